"""The command `lm-eval-icl demo`: lm-eval's `hf` and eight methods on the model that comes with the package."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from lm_eval_icl.errors import refusing


def command(parser: argparse.ArgumentParser, arguments: list[str]) -> None:
    """Run `lm-eval-icl demo`."""
    parser.description = (
        "Run lm-eval's hf and eight methods on the demonstration tasks, and compare them in one table: accuracy, order "
        "flips and documents a second. Offline and on a CPU: the model and the documents come with the package."
    )
    parser.add_argument("--limit", type=int, default=100, help="documents a task; 0 for all (default: %(default)s)")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("results/demo"),
        metavar="DIR",
        help="the folder of the results (default: %(default)s)",
    )
    args = parser.parse_args(arguments)
    if args.limit < 0 or args.limit == 1:
        parser.error(f"--limit {args.limit}: must be 0, or 2 or more: one document gives no standard error")
    with refusing(f"--output {args.output}: cannot be written", "Give another folder.", (OSError,)):
        args.output.mkdir(parents=True, exist_ok=True)
    os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub
    from lm_eval_icl.smoke.comparison import compare

    compare(args.output, args.limit)
