"""The command `lm-eval-icl compare`: two runs, or two rows of a leaderboard."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from lm_eval_icl.cli.reading import SHOWN, read_runs, task_names
from lm_eval_icl.errors import InputError
from lm_eval_icl.leaderboard import tables
from lm_eval_icl.results.board import Column, Entry
from lm_eval_icl.results.build import build
from lm_eval_icl.results.cells import compare, named
from lm_eval_icl.results.read import read


def command(parser: argparse.ArgumentParser, arguments: list[str]) -> None:
    """Run `lm-eval-icl compare`."""
    parser.description = "Compare two runs, or two rows of a leaderboard, task by task."
    parser.add_argument(
        "first",
        metavar="A",
        help="a results file or folder of one run; or, with --results, an entry",
    )
    parser.add_argument(
        "second", metavar="B", help="the file, folder or entry that A is compared with"
    )
    what = "results files, or folders, with the entries A and B"
    parser.add_argument("--results", nargs="+", type=Path, metavar="RESULTS", help=what)
    parser.add_argument(
        "--tasks", metavar="T,...", help="the tasks and groups to compare (default: all)"
    )
    parser.add_argument(
        "--metric", metavar="M", help="acc_norm, ece, brier, log_probability, ... (default: acc)"
    )
    args = parser.parse_args(arguments)
    console = Console()
    tasks, names = task_names(args.tasks), (args.first, args.second)
    if args.results:
        board = build(read(args.results, metric=args.metric)[0], tasks=tasks)
        first, second = (named(board.entries, name) for name in names)
        columns, same = board.columns, first is second
    else:
        same = os.path.realpath(args.first) == os.path.realpath(args.second)
        (first, mine), (second, theirs) = (_entry(name, tasks, args.metric) for name in names)
        columns = tuple(column for column in mine if column in theirs)
    if same:
        raise InputError(f"{args.first} and {args.second} are the same; give two.")
    columns = tuple(
        column for column in columns if column.name in first.cells and column.name in second.cells
    )
    if not columns:
        raise InputError(f"{args.first} and {args.second} have no task in common.")
    differences = compare(first.cells, second.cells, columns)
    console.print(tables.comparison(first, second, columns, differences))
    note = "A - B, in points if A and B are in percent, with 95% intervals."
    note += " Four of five such comparisons would find a difference of the detectable size."
    console.print(note, markup=False, highlight=False)


def _entry(
    name: str, tasks: Sequence[str] | None, metric: str | None
) -> tuple[Entry, tuple[Column, ...]]:
    """The only entry of a file or folder, and its columns."""
    if not Path(name).exists():
        raise InputError(
            f"{name}: no such file or folder. To compare entries of a board, give their --results."
        )
    board = build(read_runs([Path(name)], f"{name}: ", metric)[0], tasks=tasks)
    if len(board.entries) > 1:
        labels = "; ".join(entry.label for entry in board.entries[:SHOWN])
        raise InputError(
            f"{name} holds {len(board.entries)} entries ({labels}). Name two of them, with --results {name}."
        )
    return board.entries[0], board.columns
