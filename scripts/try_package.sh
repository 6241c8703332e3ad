#!/usr/bin/env bash
# Builds the wheel and the source distribution into dist/, and tries the wheel in a new environment in another folder.
set -euo pipefail
checkout=$(cd "$(dirname "$0")/.." && pwd)
elsewhere=$(mktemp -d)
trap 'rm -rf "$elsewhere"' EXIT
cd "$elsewhere"
unset PYTHONPATH

rm -rf "$checkout/dist"
python3 -m venv builder
builder/bin/pip install --quiet build twine
builder/bin/python -m build --outdir "$checkout/dist" "$checkout"  # the wheel is built from the source distribution
builder/bin/twine check --strict "$checkout"/dist/*

python3 -m venv env
env/bin/pip install --quiet -c "$checkout/constraints.txt" "$checkout"/dist/*.whl
. env/bin/activate
export HF_HUB_OFFLINE=1
lm-eval-icl --version | grep "commit $(git -C "$checkout" rev-parse HEAD)"  # the package knows its commit
lm-eval-icl demo --limit 20
model=$(python -c "from lm_eval_icl.smoke.demo import model_path; print(model_path())")
lm_eval --model invicl --model_args "pretrained=$model" --tasks icl_demo --num_fewshot 2 --device cpu
lm-eval-icl smoke
