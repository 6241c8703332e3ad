"""The command `lm-eval-icl collect`: one small file of each run for a shared leaderboard, and a
check of such files."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from lm_eval_icl.cli.reading import RESULTS, print_left_out, print_line, read_runs
from lm_eval_icl.errors import InputError
from lm_eval_icl.results.board import shown
from lm_eval_icl.results.collect import collect, faults
from lm_eval_icl.results.fields import Unusable
from lm_eval_icl.results.metrics import AGGREGATIONS
from lm_eval_icl.results.read import read


def command(parser: argparse.ArgumentParser, arguments: list[str]) -> None:
    """Run `lm-eval-icl collect`."""
    parser.description = (
        "Make one small file of each run, with all answers, for a shared leaderboard."
    )
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULTS", help=RESULTS)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument(
        "--output", type=Path, metavar="DIR", help="write one file for each run to DIR/runs"
    )
    action.add_argument(
        "--check",
        action="store_true",
        help="write nothing; name each file that has faults, and end with status 1 if there are any",
    )
    args = parser.parse_args(arguments)
    console = Console()
    if args.check:
        _check(args.results, console)
        return
    runs, left_out = read_runs(args.results)
    written = collect(runs, args.output)
    print_left_out(left_out, console)
    print_line(console, f"{args.output}: {len(written)} runs")


def _check(paths: Sequence[Path], console: Console) -> None:
    """Print a line for every file that does not belong on a shared board; an `InputError` if there
    is such a file, or if there are no files."""
    found = set[Path]()
    for path in paths:
        found.update(path.rglob("*") if path.is_dir() else [path])
    files = {file for file in found if file.is_file() and not file.name.startswith(".")}
    runs, left_out = read(paths, quiet=True)
    wrong = dict.fromkeys(
        files - {run.path for run in runs}, "is not a file of `lm-eval-icl collect`."
    )
    wrong |= {file.path: file.why for file in left_out}
    for run in runs:
        # For a metric such as BLEU, only the mean is known, even with samples.
        marked = [
            result
            for result in run.all_results
            if result.marks and result.aggregation in AGGREGATIONS
        ]
        try:
            sentences = [
                *faults(run.path),
                *(f"task {result.task!r}: {' '.join(result.marks)}" for result in marked),
            ]
        except Unusable as error:
            sentences = [f"{error}."]
        if sentences:
            wrong[run.path] = sentences[0]
    for path, sentence in sorted(wrong.items()):
        print_line(console, f"{shown(str(path))}: {shown(sentence)}")
    if not files:
        raise InputError(f"{', '.join(map(str, paths))}: there are no files to check.")
    if wrong:
        raise InputError(f"{len(wrong)} of {len(files)} files have faults.")
    print_line(console, f"{len(files)} runs have no faults.")
