"""The commands `lm-eval-icl leaderboard`, `compare`, `collect` and `export`, which read lm-eval's result files."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from lm_eval_icl.errors import InputError
from lm_eval_icl.leaderboard import export as exporting
from lm_eval_icl.leaderboard import tables
from lm_eval_icl.results import build
from lm_eval_icl.results import collect as collecting
from lm_eval_icl.results.board import Column, Entry
from lm_eval_icl.results.cells import compare as compare_cells
from lm_eval_icl.results.differing import differing
from lm_eval_icl.results.entries import grouped, shown
from lm_eval_icl.results.read import read
from lm_eval_icl.results.records import LeftOut, Run

_RESULTS = "results files of lm-eval, and folders with such; with --log_samples, or made by collect"
_SHOWN = 10  # files left out, and rows, that the terminal shows


def leaderboard(parser: argparse.ArgumentParser, arguments: list[str]) -> None:
    """Run `lm-eval-icl leaderboard`.

    Raises:
        InputError: an option cannot be used, or there are no results.
    """
    parser.description = "Make a table, a page and figures of results files: methods on models by tasks."
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULTS", help=_RESULTS)
    parser.add_argument("--output", type=Path, metavar="FILE.html", help="the page: one file that asks for no other")
    parser.add_argument(
        "--baseline", metavar="METHOD|ENTRY", help="what the others are compared with (default: icl, or else hf)"
    )
    parser.add_argument("--tasks", metavar="T,...", help="the tasks and groups that are columns (default: all)")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="all numbers, a line for each entry and column")
    parser.add_argument("--md", type=Path, metavar="FILE", help="the table in Markdown")
    parser.add_argument("--tex", type=Path, metavar="FILE", help="the table in LaTeX, with booktabs")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="figures as SVG and PNG, each with its data as CSV")
    given = parser.parse_args(arguments)
    files = [file for file in (given.output, given.csv, given.md, given.tex) if file is not None]
    _check_files(files, given.plots)
    console = Console()
    runs, left_out = _read(given.results)
    # Not Path.resolve: a file that was left out may be a link to itself.
    results = {os.path.realpath(path) for path in (*(run.path for run in runs), *(file.path for file in left_out))}
    for file in files:
        if os.path.realpath(file) in results:
            raise InputError(f"{file}: is one of the results; give another file to write to.")
        if file.name.endswith(".jsonl"):
            raise InputError(f"{file}: may be a file of samples, which end in .jsonl; give another file to write to.")
    board = build.build(runs, left_out, given.baseline, _names(given.tasks))
    for file, text in ((given.csv, tables.as_csv), (given.md, tables.as_markdown), (given.tex, tables.as_tex)):
        if file:
            _write(file, text(board))
    if given.plots or given.output:
        from lm_eval_icl.leaderboard import figures  # takes half a second

        if given.plots:
            figures.draw(board, given.plots)
        if given.output:
            from lm_eval_icl.leaderboard.page import page

            _write(given.output, page(board, figures.svgs(board), given.results))
    for sentence in board.summary:
        console.print(sentence, markup=False, highlight=False)
    console.print(tables.overview(board, _SHOWN))
    in_table = min(_SHOWN, sum(board.columns[0].name in entry.cells for entry in board.entries))
    if len(board.entries) > in_table:
        console.print(f"{in_table} of {len(board.entries)} entries; the page and the other files have all of them.")
    _say_left_out(board.left_out, console)
    for path in [*files, *filter(None, [given.plots])]:
        _say(console, f"written: {path}")


def compare(parser: argparse.ArgumentParser, arguments: list[str]) -> None:
    """Run `lm-eval-icl compare`.

    Raises:
        InputError: one of the two is no run and no entry, or they have no task in common.
    """
    parser.description = "Compare two runs, or two rows of a leaderboard, task by task."
    parser.add_argument("first", metavar="A", help="a results file or folder of one run; or, with --results, an entry")
    parser.add_argument("second", metavar="B", help="what it is compared with")
    parser.add_argument(
        "--results", nargs="+", type=Path, metavar="RESULTS", help="where the entries A and B are found"
    )
    parser.add_argument("--tasks", metavar="T,...", help="the tasks and groups to compare (default: all)")
    parser.add_argument("--documents", type=int, default=3, metavar="N", help="to show of each task (default: 3)")
    given = parser.parse_args(arguments)
    console = Console()
    if given.documents < 0:
        raise InputError(f"--documents {given.documents}: must be 0 or more.")
    tasks, names = _names(given.tasks), (given.first, given.second)
    if given.results:
        board = build.build(read(given.results)[0], tasks=tasks)
        first, second = (build.named(board.entries, name) for name in names)
        columns, same = board.columns, first is second
    else:
        same = os.path.realpath(given.first) == os.path.realpath(given.second)
        (first, mine), (second, theirs) = (_entry(name, tasks) for name in names)
        columns = tuple(column for column in mine if column in theirs)
    if same:
        raise InputError(f"{given.first} and {given.second} are the same; give two.")
    columns = tuple(column for column in columns if column.name in first.cells and column.name in second.cells)
    if not columns:
        raise InputError(f"{given.first} and {given.second} have no task in common.")
    differences = compare_cells(first.cells, second.cells, columns)
    console.print(tables.comparison(first, second, columns, differences))
    note = "A less B, with 95% intervals. Four of five such comparisons would find a difference that is detectable."
    console.print(note, markup=False, highlight=False)
    for column in columns:
        if column.kind == "task" and column.name in differences:
            for line in differing(first, second, column.name, given.documents):
                console.print(line, markup=False, highlight=False)


def collect(parser: argparse.ArgumentParser, arguments: list[str]) -> None:
    """Run `lm-eval-icl collect`.

    Raises:
        InputError: an option cannot be used, or there are no results.
    """
    parser.description = "Make one small file of each run, with all answers: a leaderboard to share."
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULTS", help=_RESULTS)
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="one file a run, in DIR/runs")
    given = parser.parse_args(arguments)
    console = Console()
    runs, left_out = _read(given.results)
    written = collecting.collect(runs, given.output)
    _say_left_out(left_out, console)
    _say(console, f"{given.output}: {len(written)} runs")


def export(parser: argparse.ArgumentParser, arguments: list[str]) -> None:
    """Run `lm-eval-icl export`.

    Raises:
        InputError: an option cannot be used, or there are no results.
    """
    parser.description = "Write results as logs of Every Eval Ever 0.3.0, with the answers document by document."
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULTS", help=_RESULTS)
    parser.add_argument("--format", default="eee", metavar="eee", help="Every Eval Ever, the only one (default)")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="the folder to write to")
    parser.add_argument("--organization", default="", metavar="NAME", help="who ran the evaluations")
    kinds = ", ".join(exporting.RELATIONSHIPS)
    parser.add_argument(
        "--relationship",
        default="third_party",
        metavar="KIND",
        help=f"of them to the models' developers: {kinds} (default: third_party)",
    )
    parser.add_argument(
        "--developer", default="local", metavar="NAME", help="of checkpoints whose name has no owner (default: local)"
    )
    given = parser.parse_args(arguments)
    if given.format != "eee":
        raise InputError(f"--format {given.format}: must be eee (Every Eval Ever), the only format that there is.")
    console = Console()
    runs, left_out = _read(given.results)
    made = exporting.export(
        runs,
        given.output,
        organization=given.organization,
        relationship=given.relationship,
        developer=given.developer,
    )
    _say_left_out([*left_out, *made.left_out], console)
    _say(console, f"{given.output}: {len(made.files)} files")


def _names(text: str | None) -> list[str] | None:
    if text is None:
        return None
    if not (names := [name.strip() for name in text.split(",") if name.strip()]):
        raise InputError("--tasks: give at least one task.")
    return names


def _read(paths: Sequence[Path], name: str = "") -> tuple[list[Run], list[LeftOut]]:
    runs, left_out = read(paths)
    if not runs:
        reason = f" {shown(str(left_out[0].path))}: {shown(left_out[0].why)}" if left_out else ""
        raise InputError(f"{name}no results that can be used were found.{reason}")
    return runs, left_out


def _entry(name: str, tasks: Sequence[str] | None) -> tuple[Entry, tuple[Column, ...]]:
    """The only entry of a file or folder, and its columns."""
    if not Path(name).exists():
        raise InputError(f"{name}: no such file or folder. To compare entries of a board, give their --results.")
    board = build.build(_read([Path(name)], f"{name}: ")[0], tasks=tasks)
    if len(board.entries) > 1:
        labels = "; ".join(entry.label for entry in board.entries[:_SHOWN])
        raise InputError(
            f"{name} holds {len(board.entries)} entries ({labels}). Name two of them, with --results {name}."
        )
    return board.entries[0], board.columns


def _check_files(files: Sequence[Path], folder: Path | None) -> None:
    """Refuse files that cannot be written, before anything is read."""
    for file in files:
        if file.is_dir():
            raise InputError(f"{file}: is a folder; give the name of a file.")
        if not (file.parent.is_dir() and os.access(file.parent, os.W_OK)):
            raise InputError(f"{file}: the folder {file.parent} is not there, or cannot be written to.")
    if len(set(map(os.path.realpath, files))) < len(files):
        raise InputError("two of the files to write have one name; give each its own.")
    if folder is not None and folder.exists() and not folder.is_dir():
        raise InputError(f"--plots {folder}: is no folder.")


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{file}: cannot be written ({error.strerror or error}).") from error


def _say(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def _say_left_out(left_out: Sequence[LeftOut], console: Console) -> None:
    """Print a line for each reason, as all cells of a study's dev set have the same."""
    reasons = list(grouped(left_out, lambda file: file.why).items())
    for why, files in reasons[:_SHOWN]:
        more = f" and {len(files) - 1} more" if len(files) > 1 else ""
        _say(console, f"left out: {shown(str(files[0].path))}{more}: {shown(why)}")
    if rest := sum(len(files) for _, files in reasons[_SHOWN:]):
        console.print(f"left out: {rest} more.", highlight=False)
