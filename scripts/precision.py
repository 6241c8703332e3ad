"""What half precision does to the answers of each method: every document in float32 and in lower precision.

    python scripts/precision.py [--pretrained M] [--tasks T,...] [--num_fewshot N] [--limit N] [--models M,...]

Prints a table in Markdown, for lm-eval's `hf` and every method and dtype: the share of documents whose predicted option
is the same as in float32, and the largest difference between two log-probabilities of one option. By default on the
model and the documents that ship with the package.
"""

from __future__ import annotations

import argparse
import logging
import os

# Before anything imports tqdm: fewer bars between this script's own lines.
os.environ |= {"TQDM_DISABLE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}

import lm_eval
import transformers
from lm_eval.tasks import TaskManager

from lm_eval_icl.errors import InputError
from lm_eval_icl.methods import NAMES
from lm_eval_icl.smoke import demo

# (task, document) -> the log-probability of each option
Scores = dict[tuple[str, int], list[float]]


def evaluate(model: str, dtype: str, options: argparse.Namespace, manager: TaskManager) -> Scores:
    """The log-probabilities of one evaluation through lm-eval."""
    results = lm_eval.simple_evaluate(
        model=model,
        model_args={"pretrained": options.pretrained, "dtype": dtype},
        tasks=options.tasks.split(","),
        num_fewshot=options.num_fewshot,
        batch_size=8,
        device="cpu",
        limit=options.limit or None,
        task_manager=manager,
        bootstrap_iters=0,
    )
    return {
        (task, sample["doc_id"]): [float(response[0]) for (response,) in sample["resps"]]
        for task, samples in results["samples"].items()
        for sample in samples
    }


def compare(exact: Scores, rounded: Scores) -> tuple[float, float]:
    """The share of documents with the same best option, and the largest difference of a log-probability."""
    same = [of.index(max(of)) == rounded[at].index(max(rounded[at])) for at, of in exact.items()]
    apart = [abs(a - b) for at, of in exact.items() for a, b in zip(of, rounded[at], strict=True)]
    return sum(same) / len(same), max(apart)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pretrained", default=str(demo.model_path()), help="a checkpoint (default: the embedded one)")
    parser.add_argument("--tasks", default="icl_demo", help="of kind multiple_choice (default: %(default)s)")
    parser.add_argument("--num_fewshot", type=int, help="demonstrations (default: the task's own)")
    parser.add_argument("--limit", type=int, default=100, help="documents a task; 0 for all (default: %(default)s)")
    parser.add_argument("--models", default=",".join(("hf", *NAMES)), help="(default: %(default)s)")
    parser.add_argument("--dtypes", default="float16,bfloat16", help="(default: %(default)s)")
    options = parser.parse_args()
    if options.limit < 0:
        parser.error(f"--limit {options.limit}: must be 0 or more")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    transformers.logging.set_verbosity_error()

    manager, dtypes = TaskManager(), options.dtypes.split(",")
    print("| model | documents |" + "".join(f" {dtype}: same prediction | largest difference |" for dtype in dtypes))
    print("| --- | --- |" + " --- | --- |" * len(dtypes))
    for model in options.models.split(","):
        exact = evaluate(model, "float32", options, manager)
        cells = [model, str(len(exact))]
        for dtype in dtypes:
            try:
                share, apart = compare(exact, evaluate(model, dtype, options, manager))
                cells += [f"{100 * share:.1f} %", f"{apart:.3f}"]
            except InputError as refusal:  # numbers that overflow
                print(refusal)
                cells += ["refused", ""]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
