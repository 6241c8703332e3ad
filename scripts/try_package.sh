#!/usr/bin/env bash
# Builds the wheel and the source distribution into dist/, and tries the wheel in a new environment in another folder:
# for each PYTHON that is named (python3.12 python3.13), or for python3.
set -euo pipefail
checkout=$(cd "$(dirname "$0")/.." && pwd)
elsewhere=$(mktemp -d)
trap 'rm -rf "$elsewhere"' EXIT
cd "$elsewhere"
unset PYTHONPATH
export HF_HUB_OFFLINE=1
[ $# -gt 0 ] || set -- python3

rm -rf "$checkout/dist"
"$1" -m venv builder
builder/bin/pip install --quiet build twine
builder/bin/python -m build --outdir "$checkout/dist" "$checkout"  # the wheel is built from the source distribution
builder/bin/twine check --strict "$checkout"/dist/*

for python in "$@"; do
    rm -rf env
    "$python" -m venv env
    # What README installs comes second: the demo makes its table and page without figures, too.
    env/bin/pip install --quiet -c "$checkout/constraints.txt" "$checkout"/dist/*.whl
    . env/bin/activate
    lm-eval-icl --version | grep "commit $(git -C "$checkout" rev-parse HEAD)"  # the package knows its commit
    lm-eval-icl demo --limit 4 --output without 2>&1 | grep "pip install 'lm-eval-icl\[figures\]'"
    pip install --quiet -c "$checkout/constraints.txt" "$(echo "$checkout"/dist/*.whl)[figures]"
    lm-eval-icl demo --limit 20
    model=$(python -c "from lm_eval_icl.smoke.demo import model_path; print(model_path())")
    run="--model invicl --model_args pretrained=$model --tasks icl_demo --num_fewshot 2 --device cpu --limit 20"
    lm_eval $run
    python -X utf8 -m lm_eval $run
    lm-eval-icl smoke
    deactivate
    echo "$python: $("$python" --version) passed"
done
