"""The command `lm-eval-icl leaderboard`: makes a table, a page and figures from results files."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from rich.console import Console

from lm_eval_icl.cli import add_options
from lm_eval_icl.cli.reading import (
    RESULTS,
    SHOWN,
    print_left_out,
    print_line,
    read_runs,
    task_names,
)
from lm_eval_icl.errors import InputError, suggestion, writing
from lm_eval_icl.files import write_atomically
from lm_eval_icl.leaderboard import tables
from lm_eval_icl.results.board import Board
from lm_eval_icl.results.build import build

_OPTIONS = {
    "output": ("FILE.html", Path, "the page: one file that needs no other"),
    "baseline": (
        "METHOD|ENTRY",
        str,
        "the method or entry with which others are compared (default: icl, or else hf)",
    ),
    "metric": (
        "M",
        str,
        "acc_norm, ..., or of the options' probabilities: ece, brier, log_probability",
    ),
    "tasks": ("T,...", str, "the tasks and groups that are columns (default: all)"),
    "csv": ("FILE", Path, "all numbers, with a line for each entry and column"),
    "md": ("FILE", Path, "the table in Markdown"),
    "tex": ("FILE", Path, "the table in LaTeX, with booktabs"),
    "plots": ("DIR", Path, "figures as SVG and PNG, each with its data as CSV"),
    "costs": ("", bool, "print tokens, passes, seconds and memory too"),
}


def command(parser: argparse.ArgumentParser, arguments: list[str]) -> None:
    """Run `lm-eval-icl leaderboard`."""
    parser.description = (
        "Make a table, a page and figures from results files, with a row for each model and method."
    )
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULTS", help=RESULTS)
    add_options(parser, _OPTIONS)
    parser.add_argument(
        "--samples",
        nargs="?",
        const="",
        metavar="T,...",
        help="put the documents of tasks (default: all) into the page: prompts, options, answers",
    )
    args = parser.parse_args(arguments)
    files = [file for file in (args.output, args.csv, args.md, args.tex) if file is not None]
    for file in files:  # checked before the results are read
        with writing(file):
            file.parent.mkdir(parents=True, exist_ok=True)
        if file.is_dir() or not os.access(file.parent, os.W_OK):
            raise InputError(f"{file}: must be a file in a folder that can be written to.")
        if files.count(file) > 1:
            raise InputError(f"{file}: is given for two options; give each a file of its own.")
    if args.samples is not None and args.output is None:
        raise InputError("--samples: give the page that gets them: --output FILE.html.")
    console = Console()
    runs, left_out = read_runs(args.results, metric=args.metric)
    # Not Path.resolve: a file that was left out may be a link to itself.
    every = [*runs, *left_out]
    results = {os.path.realpath(file.path) for file in every}  # type: ignore[attr-defined]
    for file in files:
        if os.path.realpath(file) in results:
            raise InputError(f"{file}: is one of the results; give another file to write to.")
    board = build(runs, left_out, args.baseline, task_names(args.tasks))
    _write(board, args)
    for sentence in board.summary:
        console.print(sentence, markup=False, highlight=False)
    console.print(tables.overview(board, SHOWN))
    if args.costs:
        console.print(tables.cost_table(board, SHOWN))
    print_left_out(board.left_out, console)
    for path in [*files, *filter(None, [args.plots])]:
        print_line(console, f"written: {path}")


def _write(board: Board, args: argparse.Namespace) -> None:
    """Write the tables, figures and page that are asked for."""
    for file, text in (
        (args.csv, tables.as_csv),
        (args.md, tables.as_markdown),
        (args.tex, tables.as_tex),
    ):
        if file:
            with writing(file):
                write_atomically(file, text(board))
    if args.plots or args.output:
        from lm_eval_icl.leaderboard import figures  # the import takes half a second

        if args.plots:
            figures.draw(board, args.plots)
        if args.output:
            from lm_eval_icl.leaderboard.page import page
            from lm_eval_icl.leaderboard.samples import collected

            samples = None
            if args.samples is not None:
                wanted = task_names(args.samples or None)
                columns = [column.name for column in board.columns]
                for name in wanted or ():
                    if name not in columns:
                        raise InputError(f"--samples {name}: {suggestion(name, columns)}")
                samples = collected(board, wanted)
            with writing(args.output):
                write_atomically(args.output, page(board, figures.svgs(board), samples))
