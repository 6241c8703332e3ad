"""The command `lm-eval-icl collect`: one small file a run for a shared leaderboard, and a check of such files."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from lm_eval_icl.cli.reading import RESULTS, print_left_out, print_line, read_runs
from lm_eval_icl.errors import InputError
from lm_eval_icl.results.collect import collect
from lm_eval_icl.results.entries import shown
from lm_eval_icl.results.read import AGGREGATIONS, read


def command(parser: argparse.ArgumentParser, arguments: list[str]) -> None:
    """Run `lm-eval-icl collect`.

    Raises:
        InputError: an option cannot be used, there are no results, or a file that is checked is not as it should be.
    """
    parser.description = "Make one small file of each run, with all answers: a leaderboard to share."
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULTS", help=RESULTS)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--output", type=Path, metavar="DIR", help="one file a run, in DIR/runs")
    action.add_argument(
        "--check",
        action="store_true",
        help="write nothing: name each file that is not a whole run as this command has written it, and fail if one is",
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
    """Print a line for every file that does not belong on a shared board.

    Raises:
        InputError: there is such a file, or no file.
    """
    faults: dict[Path, list[str]] = {}
    files = {file: None for path in paths for file in _files(path)}
    for file, fault in _faults(paths, files):
        faults.setdefault(file, []).append(fault)
    for file, (first, *others) in sorted(faults.items()):
        more = f" ({len(others)} more)" if others else ""
        print_line(console, f"{shown(str(file))}: {shown(first)}{more}")
    if faults:
        raise InputError(f"{len(faults)} of {len(files)} files cannot be used as they are.")
    if not files:
        raise InputError(f"{', '.join(map(str, paths))}: there is no file to check.")
    print_line(console, f"{len(files)} runs are as they should be.")


def _files(path: Path) -> Iterator[Path]:
    """The file, or all files of the folder and of those in it, but hidden ones."""
    if not path.is_dir():
        yield path
    for folder, folders, names in os.walk(path):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(folder, name) for name in names if not name.startswith("."))


def _faults(paths: Sequence[Path], files: dict[Path, None]) -> Iterator[tuple[Path, str]]:
    """Files with what is wrong with them.

    Args:
        files: all files in these paths.
    """
    runs, left_out = read(paths, quiet=True)
    yield from ((file.path, file.why) for file in left_out)
    for run in runs:
        # What comes behind the digest says how many tasks have answers.
        if run.path.stem.partition("-")[0] != run.digest:
            yield run.path, "was changed after `lm-eval-icl collect` wrote it, or not written by it: collect it again."
        for name, result in run.tasks.items():
            # Of a metric such as BLEU only the mean is known, whatever the samples are.
            if result.marks and result.aggregation in AGGREGATIONS:
                yield run.path, f"task {name!r}: {' '.join(result.marks)}"
    for file in files.keys() - {run.path for run in runs} - {file.path for file in left_out}:
        yield file, "is no results file of lm-eval."
