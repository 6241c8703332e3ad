"""The command `lm-eval-icl compare`: two runs, or rows of a leaderboard."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from lm_eval_icl.cli import add_options
from lm_eval_icl.cli.reading import SHOWN, print_left_out, read_runs, task_names
from lm_eval_icl.errors import InputError, did_you_mean
from lm_eval_icl.leaderboard import numbers, tables
from lm_eval_icl.leaderboard.differences import SCOPES, in_unit, verdict, what_decides
from lm_eval_icl.results.board import Column, Entry, shown
from lm_eval_icl.results.build import build
from lm_eval_icl.results.columns import differing
from lm_eval_icl.results.comparisons import compare, comparisons_of
from lm_eval_icl.results.records import Run, TaskResult
from lm_eval_icl.results.rivals import condition_pairs, fields_of, named
from lm_eval_icl.results.statistics import Difference
from lm_eval_icl.results.summary import family

_REPETITIONS = ("format", "order", "seed")  # axes of a cell, which rows do not differ in
_NOTES = Console(stderr=True)  # for what is no result, so that JSON stays JSON

_OPTIONS = {
    "by": (
        "CONDITION",
        str,
        "instead of A and B: compare all rows that differ only in this: demonstrations, shots, "
        "labels, rule, method, training, format, ...",
    ),
    "tasks": ("T,...", str, "the tasks and groups to compare (default: all)"),
    "metric": ("M", str, "acc_norm, ece, brier, log_probability, ... (default: acc)"),
    "margin": (
        "M",
        float,
        "count differences within this margin as equivalent (in points, for percents)",
    ),
    "json": ("", bool, "print the numbers as JSON"),
    "fail-below": (
        "M",
        float,
        "end with status 1 if all of an interval of A - B is below this (in points)",
    ),
}


def command(parser: argparse.ArgumentParser, arguments: list[str]) -> None:
    """Run `lm-eval-icl compare`."""
    parser.description = "Compare two runs, or rows of a leaderboard, task by task."
    parser.add_argument(
        "names",
        nargs="*",
        metavar="A B",
        help="results files or folders of one run each; or, with --results, rows by the names that "
        "the leaderboard prints",
    )
    parser.add_argument(
        "--results",
        nargs="+",
        type=Path,
        metavar="RESULTS",
        help="results files, or folders, with the rows",
    )
    add_options(parser, _OPTIONS)
    args = parser.parse_args(arguments)
    if args.margin is not None and not args.margin > 0:
        raise InputError(f"--margin {args.margin:g}: must be above 0.")
    if args.fail_below is not None and math.isnan(args.fail_below):
        raise InputError("--fail-below nan: must be a number.")
    pairs = list(_by_condition(args) if args.by else _two(args))
    for pair in pairs:
        for note in _notes(pair):
            _say(_NOTES, note)
    if args.json:
        lines = list[dict[str, Any]]()
        for pair in pairs:
            lines += _json(pair, args.margin)
        print(json.dumps(lines, indent=2, allow_nan=False))
    else:
        console = Console()
        for pair in pairs:
            if pair.columns:
                _print(pair, args.margin, console)
    if args.fail_below is not None:
        _fail_below(pairs, args.fail_below)


@dataclass(frozen=True)
class _Pair:
    """Two rows, and their differences by column."""

    first: Entry
    second: Entry
    columns: Sequence[Column]
    not_compared: Sequence[Column]  # both have a result there
    differences: Mapping[str, Difference]  # each as one comparison by itself
    on_board: Mapping[str, Difference]  # each as one of all pairs of rows; empty without a board


def _two(args: argparse.Namespace) -> Iterator[_Pair]:
    """The two rows that are named."""
    if len(args.names) != 2:
        raise InputError("give two files, folders or rows (A B), or --by CONDITION.")
    first_name, second_name = args.names
    tasks = task_names(args.tasks)
    if args.results:
        board = build(_runs(args.results, args.metric), tasks=tasks)
        first = named(board.entries, first_name)
        second = named(board.entries, second_name)
        is_same = first is second
        columns: Sequence[Column] = board.columns
        entries = board.entries
    else:
        is_same = os.path.realpath(first_name) == os.path.realpath(second_name)
        first, columns = only_entry(first_name, tasks, args.metric)
        second, theirs = only_entry(second_name, tasks, args.metric)
        columns = [column for column in columns if column in theirs]
        entries = ()
    if is_same:
        raise InputError(f"{first_name} and {second_name} are the same; give two.")
    pair = _pair(first, second, columns, entries)
    if not pair.columns:
        why = "have no task in common"
        for column in pair.not_compared:
            why = _why_not(pair, column)
        raise InputError(f"{first_name} and {second_name} {why}.")
    yield pair


def _why_not(pair: _Pair, column: Column) -> str:
    """Why two rows are not compared on a column that both have."""
    for entry in (pair.first, pair.second):
        if "aggregate only" in entry.cells[column.name].marks:
            return f"are not compared: {entry.label} has no samples (--log_samples)"
    return "did not answer the same documents in the same format"


def _by_condition(args: argparse.Namespace) -> Iterator[_Pair]:
    """The rows that differ by one condition alone, each with its reference."""
    if args.names or not args.results:
        raise InputError("--by: give --results RESULTS, and no names of rows.")
    runs = _runs(args.results, args.metric)
    if args.by in _REPETITIONS:
        runs = [_apart(run, args.by) for run in runs]
    board = build(runs, tasks=task_names(args.tasks))
    key_of = {entry: board.keys[entry.name] for entry in board.entries}
    pairs = condition_pairs(key_of, args.by)
    if not pairs:
        known = set[str]()
        for entry, key in key_of.items():
            known.update(fields_of(entry, key))
        advice = did_you_mean(args.by, known) or f"rows have {', '.join(sorted(known))}."
        raise InputError(f"--by {args.by}: no two rows differ only in this: {advice}")
    compared = [_pair(entry, other, board.columns, board.entries) for _, entry, other in pairs]
    if not any(pair.columns for pair in compared):
        why = "did not answer the same documents, or have no samples (--log_samples)"
        raise InputError(f"--by {args.by}: rows that differ only in this {why}.")
    yield from compared


def _apart(run: Run, axis: str) -> Run:
    """The run with an axis of its cell as a setting, so that its values are rows."""

    def apart(result: TaskResult) -> TaskResult:
        setting = {**result.fields.setting, axis: str(getattr(result.fields, axis) or "")}
        return replace(result, fields=replace(result.fields, setting=setting))

    tasks = {task: apart(result) for task, result in run.tasks.items()}
    return replace(run, tasks=tasks, decided=tuple(map(apart, run.decided)))


def _pair(
    first: Entry, second: Entry, columns: Sequence[Column], entries: Sequence[Entry]
) -> _Pair:
    compared = []
    not_compared = []
    differences = {}
    on_board = {}
    for column in columns:
        if column.name not in first.cells or column.name not in second.cells:
            continue
        difference = compare(first.cells, second.cells, column)
        if difference is None:
            not_compared.append(column)
            continue
        compared.append(column)
        differences[column.name] = difference
        if entries:
            comparisons = comparisons_of(entries, column)
            on_board[column.name] = replace(difference, comparisons=comparisons)
    return _Pair(first, second, compared, not_compared, differences, on_board)


def _notes(pair: _Pair) -> Iterator[str]:
    """Which columns are not compared, and in which the rows were asked differently. (Rows of one
    board were not.)"""
    names = f"{pair.first.label} and {pair.second.label}"
    for column in pair.not_compared:
        yield f"{column.name}: {names} {_why_not(pair, column)}."
    for column in pair.columns:
        for task in column.weights:
            sides = [entry.cells[task].sets[0].answered[0] for entry in (pair.first, pair.second)]
            fields = differing([unit.result.fields.column for unit in sides])
            if fields:
                yield f"{task}: {names} were asked differently: {', '.join(fields)}."


def _runs(paths: Sequence[Path], metric: str | None) -> list[Run]:
    """The runs in files and folders. A line says which files are left out."""
    runs, left_out = read_runs(paths, metric)
    print_left_out(left_out, _NOTES)
    return runs


def only_entry(
    name: str, tasks: Sequence[str] | None, metric: str | None
) -> tuple[Entry, tuple[Column, ...]]:
    """The only entry of a file or folder, and its columns."""
    if not Path(name).exists():
        raise InputError(
            f"{name}: no such file or folder. To compare rows of a board, give their --results."
        )
    board = build(_runs([Path(name)], metric), tasks=tasks)
    if len(board.entries) > 1:
        labels = "; ".join(entry.label for entry in board.entries[:SHOWN])
        raise InputError(
            f"{name} holds {len(board.entries)} rows ({labels}). "
            f"Name two of them, with --results {name}."
        )
    return board.entries[0], board.columns


def _print(pair: _Pair, margin: float | None, console: Console) -> None:
    """Print the differences by themselves, then those on the board, then what they say."""
    names = f"A: {pair.first.label} on {pair.first.on}\nB: {pair.second.label} on {pair.second.on}"
    title = f"{names}\n\nEach line is one comparison by itself, not adjusted:"
    console.print(tables.comparison(pair.first, pair.second, pair.columns, pair.differences, title))
    for column in pair.columns:
        for name, entry in (("A", pair.first), ("B", pair.second)):
            if count := entry.cells[column.name].left_out:
                prompts = f"{count} demonstrations were left out of {name}'s prompts"
                _say(console, f"{column.name}: {prompts}.")
        difference = pair.differences[column.name]
        words = [_verdict(difference, column, margin), SCOPES[difference.scope]]
        words += filter(None, [what_decides(difference, column, margin)])
        _say(console, f"{column.name}: {'; '.join(words)}.")
    for column in pair.columns:
        of_board = pair.on_board.get(column.name)
        if of_board is not None and of_board.comparisons > 1:
            interval = numbers.interval(of_board, column, sign=True, unit=True)
            _say(
                console,
                f"{column.name} on the board, as one of {family(of_board.comparisons)}: "
                f"{interval}, p {numbers.p_value(of_board.p)}: "
                f"{_verdict(of_board, column, margin)}.",
            )


def _say(console: Console, text: str) -> None:
    console.print(shown(text), markup=False, highlight=False)


def _verdict(difference: Difference, column: Column, margin: float | None) -> str:
    words = verdict(difference, column, margin)
    return f"A is {words}" if words in ("better", "worse") else words


def _json(pair: _Pair, margin: float | None) -> Iterator[dict[str, Any]]:
    """A line for each column, in the unit of the metric."""
    for column in pair.columns:
        difference = pair.differences[column.name]
        documents, sets = difference.needed(in_unit(margin, column))
        line: dict[str, Any] = {
            "a": pair.first.label,
            "b": pair.second.label,
            "checkpoint_a": pair.first.on,
            "checkpoint_b": pair.second.on,
            "column": column.name,
            "metric": column.metric,
            "mean_a": pair.first.cells[column.name].estimate.mean,
            "mean_b": pair.second.cells[column.name].estimate.mean,
            "documents": difference.documents,
            "sets": difference.sets,
            "over": difference.scope,
            **_numbers(difference, column, margin),
            "documents_that_decide": documents,
            "sets_that_decide": sets,
        }
        if pair.on_board:
            line["board"] = _numbers(pair.on_board[column.name], column, margin)
        yield line


def _numbers(difference: Difference, column: Column, margin: float | None) -> dict[str, Any]:
    low, high = difference.interval
    return {
        "difference": difference.mean,
        "low": _finite(low),
        "high": _finite(high),
        "p": difference.p,
        "comparisons": difference.comparisons,
        "verdict": column.judged(difference, in_unit(margin, column)),
    }


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _fail_below(pairs: Sequence[_Pair], least: float) -> None:
    """Exit with status 1 if an interval is wholly below a difference, or if a column is not
    compared, which one alone may have."""
    for pair in pairs:
        for column in pair.columns:
            difference = pair.differences[column.name]
            limit = in_unit(least, column)
            if limit is not None and difference.high < limit:
                interval = numbers.interval(difference, column, sign=True, unit=True)
                raise SystemExit(
                    f"lm-eval-icl: compare: --fail-below {least:g}: on {column.name}, "
                    f"{pair.first.label} minus {pair.second.label} is {interval}."
                )
        alone = {*pair.first.cells, *pair.second.cells}
        for column in pair.columns:
            alone -= {column.name, *column.weights}
        if alone:
            names = ", ".join(sorted(alone))
            raise InputError(f"--fail-below {least:g}: not compared: {names}. Choose --tasks.")
