"""Compares time, tokens and memory of our models with those of lm-eval's `hf`, on the same requests in the same run.

    python scripts/benchmark.py tasks      # workloads: each model against hf
    python scripts/benchmark.py methods    # what a query costs in every method, relative to icl
    python scripts/benchmark.py whole      # a whole lm_eval command beside --model hf
    python scripts/benchmark.py growth     # time against documents, demonstrations, options, tokens of an option
    python scripts/benchmark.py generation # texts after 1,000 tokens of demonstrations, beside hf
    python scripts/benchmark.py labels     # 77 and 150 labels with a demonstration each, beside hf
    python scripts/benchmark.py retrieval  # demonstrations that are retrieved for each document, beside hf
    python scripts/benchmark.py blocks     # the tokens of retrieval if each distinct demonstration is encoded once
    python scripts/benchmark.py sharing    # icl beside hf over the length of the demonstrations and the documents
    python scripts/benchmark.py shots      # encoding hundreds to thousands of demonstrations of SST-2

Models have random weights, made here (a GPT-2 of 124 million parameters, or a Llama-type of about that size with
grouped-query attention). Their tokenizer is trained here on the workload's own text. The models take turns within a
repetition, so that other work of the machine slows all of them. A ratio is of times in one repetition, and the spread
of the ratios is printed. `tasks`, `whole`, `retrieval`, `blocks` and `shots` need the datasets, from the Hub or as
folders of the same names below the working directory. For a GPU, run scripts/on_a_gpu.py.
"""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path
from typing import Any

import torch
import transformers
from benchmarks import growth, retrieval, sharing, tasks, whole
from benchmarks.measuring import machine
from benchmarks.workloads import CONFIGS, METHODS, WORKLOADS
from rich.console import Console

from lm_eval_icl.methods import make

# The defaults of commands that differ from the parser's.
DEFAULTS: dict[str, dict[str, Any]] = {
    "whole": {"methods": ["icl"], "workloads": ["mmlu"], "batch_sizes": [1]},
    "methods": {"methods": list(METHODS)},
    "shots": {
        "model": "toy",
        "methods": ["icl", *(name for name in METHODS if make(name).needs_mask)],
    },
}
COMPARE = {
    "tasks": tasks.compare,
    "whole": whole.compare,
    "methods": growth.methods,
    "growth": growth.growth,
    "labels": growth.labels,
    "generation": growth.generation,
    "retrieval": retrieval.compare,
    "blocks": retrieval.shared,
    "shots": growth.shots,
    "sharing": sharing.compare,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=COMPARE)
    parser.add_argument(
        "--model", choices=CONFIGS, default="gpt2", help="default: gpt2; toy for shots"
    )
    parser.add_argument(
        "--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), metavar="NAME"
    )
    parser.add_argument(
        "--methods", nargs="+", choices=METHODS, default=["icl", "deepthink"], metavar="NAME"
    )
    shots = [125, 250, 500, 1000, 2000]
    parser.add_argument(
        "--shots", nargs="+", type=int, default=shots, help="numbers of demonstrations, for shots"
    )
    parser.add_argument(
        "--pack-tokens", nargs="+", type=int, default=[1024], help="for our models (default: 1024)"
    )
    parser.add_argument(
        "--tasks", type=int, default=2, help="tasks of a workload; 0 for all (default: 2)"
    )
    parser.add_argument(
        "--documents", type=int, default=64, help="documents of each task; 0 for all (default: 64)"
    )
    parser.add_argument(
        "--batch-sizes",
        nargs="+",
        type=int,
        default=[1, 8],
        help="for hf (default: 1 8; 1 for whole)",
    )
    parser.add_argument(
        "--store-bytes", type=int, help="of pcw, for retrieval (default: half of what is free)"
    )
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument(
        "--max-gen-toks", type=int, default=32, help="for generation tasks (default: 32)"
    )
    parser.add_argument(
        "--texts",
        nargs="+",
        type=int,
        default=[1, 16, 64],
        help="for generation (default: 1 16 64)",
    )
    parser.add_argument("--output", type=Path, help="write the measurements there, as JSON")
    parser.add_argument(
        "--figure", type=Path, help="draw the curves of growth or shots there, .svg or .png"
    )
    what = parser.parse_args().what
    parser.set_defaults(**DEFAULTS.get(what, {}))
    options = parser.parse_args()
    if (
        options.repetitions < 1
        or options.tasks < 0
        or options.documents < (what not in ("tasks", "whole"))
    ):
        counts = "--repetitions must be 1 or more, --tasks 0 or more, --documents 1 or more (0 for tasks and whole)"
        parser.error(counts)
    options.device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.what in ("methods", "shots") and "icl" not in options.methods:
        parser.error("--methods: icl is what the others are compared with, and must be among them")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    transformers.logging.set_verbosity_error()
    console = Console(width=150)
    measured = COMPARE[options.what](options, console)
    if options.output:
        settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()}
        record = {
            "machine": machine(),
            "torch": torch.__version__,
            "options": settings,
            "found": measured,
        }
        options.output.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
