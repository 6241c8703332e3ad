"""For development: time, tokens and memory of our models beside lm-eval's `hf`, on the same requests in one run.

    python scripts/benchmark.py tasks      # workloads: each model against hf
    python scripts/benchmark.py methods    # what a query costs in every method, relative to icl
    python scripts/benchmark.py generation # texts after 1,000 tokens of demonstrations, beside hf
    python scripts/benchmark.py retrieval  # demonstrations that are retrieved for each document, beside hf
    python scripts/benchmark.py sharing    # icl beside hf over the length of the demonstrations and the documents
    python scripts/benchmark.py engine     # icl beside CTranslate2, and how far their numbers are apart
    python scripts/benchmark.py shots      # encoding hundreds to thousands of demonstrations of SST-2

Models have random weights, made here (a GPT-2 of 124 million parameters, or a Llama-type of about that size with
grouped-query attention). Their tokenizer is trained here on the workload's own text. The models take turns within a
repetition, so that other work of the machine slows all of them. A ratio is of times in one repetition, and the spread
of the ratios is printed. `tasks`, `retrieval` and `shots` need the datasets, from the Hub or as folders of the same
names below the working directory. A GPU is used if there is one.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import Any

import torch
import transformers
from benchmarks import engine, retrieval, sharing, sizes, tasks
from benchmarks.workloads import CONFIGS, METHODS, WORKLOADS
from rich.console import Console

from lm_eval_icl.methods import make

# The defaults of commands that differ from the parser's.
DEFAULTS: dict[str, dict[str, Any]] = {
    "methods": {"methods": list(METHODS)},
    "shots": {
        "model": "toy",
        "methods": ["icl", *(name for name in METHODS if make(name).needs_mask)],
    },
}
COMPARE = {
    "tasks": tasks.compare,
    "methods": sizes.methods,
    "generation": sizes.generation,
    "retrieval": retrieval.compare,
    "shots": sizes.shots,
    "sharing": sharing.compare,
    "engine": engine.compare,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=COMPARE)
    for name, default, help in (
        ("--shots", [125, 250, 500, 1000, 2000], "numbers of demonstrations, for shots"),
        ("--batch-sizes", [1, 8], "for hf"),
        ("--texts", [1, 16, 64], "for generation"),
        ("--tasks", 2, "tasks of a workload"),
        ("--documents", 64, "documents of each task; 0 for all, in tasks"),
        ("--store-bytes", None, "of pcw, for retrieval, in place of half of what is free"),
        ("--repetitions", 3, "runs of which the median is taken"),
        ("--max-gen-toks", 32, "for generation tasks"),
    ):
        numbers = "+" if isinstance(default, list) else None
        help = f"{help} (default: %(default)s)"
        parser.add_argument(name, nargs=numbers, type=int, default=default, help=help)
    for name, choices, chosen in (
        ("--workloads", WORKLOADS, list(WORKLOADS)),
        ("--methods", METHODS, ["icl", "deepthink"]),
    ):
        parser.add_argument(name, nargs="+", choices=choices, default=chosen, metavar="NAME")
    parser.add_argument("--model", choices=CONFIGS, default="gpt2", help="toy for shots")
    parser.add_argument("--figure", type=Path, help="the file of the curves of shots, .svg or .png")
    what = parser.parse_args().what
    parser.set_defaults(**DEFAULTS.get(what, {}))
    options = parser.parse_args()
    options.device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.what in ("methods", "shots") and "icl" not in options.methods:
        parser.error("--methods: icl is what the others are compared with, and must be among them")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    transformers.logging.set_verbosity_error()
    COMPARE[options.what](options, Console(width=150))


if __name__ == "__main__":
    main()
