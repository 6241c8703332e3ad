"""The board as a page: one HTML file that asks nothing of any server and can be read without JavaScript.

The table is in the HTML itself. What a cell opens to is JSON beside it, which the script (`page.js`) reads. Result
files come from strangers, so every string is data: the template escapes all of them, the script sets text and no HTML,
and the page's content security policy lets no script run but ours.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import hashlib
import json
import math
import os
import re
import shlex
import unicodedata
import zlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import resources
from numbers import Integral
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from lm_eval_icl.results.board import Answered, Board, Cell, Column, Entry
from lm_eval_icl.results.records import Run
from lm_eval_icl.results.statistics import HOW, Difference, Estimate

MINUS, DASH = "\N{MINUS SIGN}", "\N{EN DASH}"
LEVEL = 0.05  # below this, a p-value counts as a difference
LONGEST = 400  # characters of a name or a note; the rest is cut off
LONGEST_COMMAND = 20_000
# Budgets that keep a page of 100 rows and 30 tasks under 1 MB.
PLAIN = 300_000  # characters of JSON; more than that is compressed, which only a script can read
NUMBERS = 240_000  # values in the JSON, some two bytes each once compressed: pairs of entries fill what cells leave
ORDERS = 20_000  # values of single orders of demonstrations
PREDICTED = 8  # answers of a task whose shares an opened cell shows

MARKS = {
    "confirmed": "Two runs of different date, with the same prompts, gave the same answer to every document.",
    "differs": "Two runs with the same prompts gave different answers. The first by date is shown.",
    "unpaired": "The prompts are not the baseline's, so there is no paired difference.",
    "aggregate only": "There are no answers document by document (--log_samples), so the interval is made of the "
    "standard error in the results file, and nothing is paired.",
    "collapsed": "One answer is given to 95% of the documents or more under every prompt, although others are right.",
    "few seeds": "Two to four sets of demonstrations: the interval is wide, and with two sets a little too narrow.",
}

# What of a difference is embedded for a pair of entries. Of the difference to the baseline, all is.
_PAIR = ("mean", "low", "high", "p", "detectable", "sets", "better", "worse")
_CELL = tuple(field.name for field in dataclasses.fields(Cell))
_RUN = ("file", "date", "seed", "order", "where", "lm_eval", "transformers", "lm_eval_icl")
_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}  # characters that are not seen, or that move others


def page(board: Board, figures: Mapping[str, str], results: Sequence[Path] = (Path("results"),)) -> str:
    """The page.

    Args:
        figures: by title, `<svg>` elements, which are put into the page as they are.
        results: where the runs were read from, as the page's commands name it.
    """
    files = resources.files("lm_eval_icl.leaderboard")
    template, style, script = ((files / f"page.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js"))
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=_finalize
    )
    environment.filters.update(number=number, value=value, signed=signed, interval=interval, tail=tail)
    embedded, is_plain = embed(board, results)
    return environment.from_string(template).render(
        board=board,
        style=Markup(style),
        script=Markup(script),
        script_hash=Markup(base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()),
        figures=[(title, Markup(svg)) for title, svg in figures.items()],
        data=Markup(embedded),
        is_plain=is_plain,
        baselines=set(board.baseline.values()),
        baseline_labels=sorted({entry.label for entry in board.entries if entry.name in set(board.baseline.values())}),
        level=LEVEL,
        verdict=verdict,
        command=lambda entry: escape(command(entry)),
        sections=sections(board.columns),
        extras=extras(board),
        majorities=majorities(board),
        has_corrected=any(cell.corrected is not None for entry in board.entries for cell in entry.cells.values()),
        has_few_columns=len(board.columns) <= 8,
        choices={
            name: sorted({getattr(entry, name) for entry in board.entries})
            for name in ("checkpoint", "method", "conditions")
        },
        runs=sum(len(entry.runs) for entry in board.entries),
        tasks=sum(column.kind == "task" for column in board.columns),
        marks=MARKS,
        # How much smaller the table is on paper, so that its columns fit; the same in page.js.
        printed=f"{max(0.4, min(1, 1000 / (230 + 100 * (len(board.columns) + len(extras(board)))))):.2f}",
    )


# ---------------------------------------------------------------------------------------------------------------
# Text.


@functools.lru_cache(maxsize=10_000)
def clean(text: str, longest: int = LONGEST) -> str:
    """The text with characters that are not seen or that change the direction of writing as escapes, cut to size."""
    text = text if len(text) <= longest else text[: longest - 1] + "…"
    return "".join(
        char.encode("unicode_escape").decode() if unicodedata.category(char) in _HIDDEN else char for char in text
    )


def _finalize(found: Any) -> Any:
    """Every text that the template prints is cleaned, but not our own HTML. (It is escaped after that.)"""
    return clean(found) if isinstance(found, str) and not isinstance(found, Markup) else found


def command(entry: Entry) -> str:
    """The entry's commands, line by line; they may be longer than other texts, and are never cut."""
    if len(entry.command) > LONGEST_COMMAND:
        return f"# The commands have {len(entry.command):,} characters, for which there is no room here."
    return "\n".join(clean(line, LONGEST_COMMAND) for line in entry.command.split("\n"))


def tail(path: Path) -> str:
    """The file and its folder: the whole path would tell who made the page."""
    return "/".join(path.parts[-2:])


def number(found: float | None, digits: int = 4) -> str:
    """A number of any size: 12,345 or 0.01234."""
    if found is None or not math.isfinite(found):
        return DASH
    return f"{found:,.0f}" if abs(found) >= 10 ** (digits - 1) or found == int(found) else f"{found:.{digits}g}"


def value(found: float | None, column: Column) -> str:
    """A value of the column's metric: percent with one decimal where it is a share."""
    if found is None or not math.isfinite(found):
        return DASH
    return _minus(f"{100 * found:.1f}" if column.percent else number(found))


def signed(found: float, column: Column) -> str:
    """A difference of values, with its sign."""
    text = value(found, column) if column.percent else _minus(number(found, 3))
    return text if text in (DASH, "0", "0.0") or text.startswith(MINUS) else f"+{text}"


def _span(rank: tuple[int, int]) -> str:
    return str(rank[0]) if rank[0] == rank[1] else f"{rank[0]}{DASH}{rank[1]}"


def _minus(text: str) -> str:
    """With a minus sign for a hyphen in front; zero has none."""
    return text.lstrip("-") if re.fullmatch(r"-[0.]+", text) else re.sub("^-", MINUS, text)


def interval(estimate: Estimate, column: Column) -> str:
    """From the low to the high end."""
    low, high = value(estimate.low, column), value(estimate.high, column)
    return f"{low} to {high}" if MINUS in low + high else f"{low}{DASH}{high}"


def verdict(cell: Cell, column: Column) -> str:
    """How the cell compares with the baseline: "better", "worse" or "same" (not significant)."""
    assert cell.difference is not None
    if cell.p_holm is None or not cell.p_holm < LEVEL:
        return "same"
    return "better" if (cell.difference.mean > 0) == column.higher_is_better else "worse"


# ---------------------------------------------------------------------------------------------------------------
# Columns.


def sections(columns: Sequence[Column]) -> dict[str, str]:
    """By column, the name of the part of the table that it is shown or hidden with.

    A task goes with the smallest of its groups.
    """
    rest = "other tasks" if any(column.kind == "group" for column in columns) else "tasks"
    groups = sorted((column for column in columns if column.kind == "group"), key=lambda group: len(group.weights))
    return {
        column.name: column.name
        if column.kind != "task"
        else next((group.name for group in groups if column.name in group.weights), rest)
        for column in columns
    }


def extras(board: Board) -> dict[str, list[tuple[str, float | None]]]:
    """By title, further columns: for each entry a text and a number to sort by. Those without any number are missing.

    Rank and order sensitivity are those of the first column. What a study's cells cost has columns of its own.
    """
    if not board.columns:
        return {}
    first = [entry.cells.get(board.columns[0].name) for entry in board.entries]
    ranks = [cell.rank if cell else None for cell in first]
    flips = [cell.sensitivity if cell else None for cell in first]
    share = dataclasses.replace(board.columns[0], percent=True)
    found: dict[str, list[tuple[str, float | None]]] = {
        # The last rank decides between entries with the same first.
        "rank": [(_span(rank), rank[0] + rank[1] / 1e6) if rank else (DASH, None) for rank in ranks],
        "order sensitivity": [
            (f"{value(flip.mean, share)} ({interval(flip, share)})", _finite(flip.mean)) if flip else (DASH, None)
            for flip in flips
        ],
        **{
            f"{title}{' in a study' * shared}": [
                (number(cost), _finite(cost)) if entry.shared == shared else (DASH, None)
                for entry in board.entries
                for cost in [getattr(entry, name)]
            ]
            for title, name in (("tokens run", "tokens"), ("seconds", "seconds"))
            for shared in (False, True)
        },
        "parameters": [(number(entry.parameters), _finite(entry.parameters)) for entry in board.entries],
    }
    return {title: cells for title, cells in found.items() if any(order is not None for _, order in cells)}


def majorities(board: Board) -> dict[str, float]:
    """By column, the score of always giving the most frequent answer, where all entries have the same documents."""
    found = {
        column.name: {cell.majority for entry in board.entries if (cell := entry.cells.get(column.name)) is not None}
        for column in board.columns
    }
    only = {name: next(iter(values)) for name, values in found.items() if len(values) == 1}
    return {name: majority for name, majority in only.items() if majority is not None}


# ---------------------------------------------------------------------------------------------------------------
# Data for the script.


def embed(board: Board, results: Sequence[Path] = (Path("results"),)) -> tuple[str, bool]:
    """The data, fit to stand in a script element; and whether it is JSON, rather than compressed JSON in base64."""
    text = json.dumps(data(board, results), separators=(",", ":"), allow_nan=False)
    text = text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
    if len(text) <= PLAIN:
        return text, True
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode(), False


def data(board: Board, results: Sequence[Path] = (Path("results"),)) -> dict[str, Any]:
    """What the script needs. What repeats is in arrays, whose `fields` are listed once."""
    answered = sum(
        len(chosen.answered) for entry in board.entries for cell in entry.cells.values() for chosen in cell.sets
    )
    entries = [_entry(entry, board.columns, answered <= ORDERS) for entry in board.entries]
    return {
        "fields": {
            "estimate": [field.name for field in dataclasses.fields(Estimate)],
            "difference": [field.name for field in dataclasses.fields(Difference)],
            "pair": _PAIR,
            "cell": _CELL,
            "run": _RUN,
        },
        "level": LEVEL,
        "results": shlex.join(clean(os.path.relpath(path)) for path in results),
        "how": dict(HOW),
        "marks": MARKS,
        "columns": [
            {
                "name": clean(column.name),
                "kind": column.kind,
                "metric": clean(column.metric),
                "percent": column.percent,
                "higher_is_better": column.higher_is_better,
                "weights": {clean(task): _rounded(weight) for task, weight in column.weights.items()},
            }
            for column in board.columns
        ],
        "entries": entries,
        "baseline": {clean(name): clean(base) for name, base in board.baseline.items()},
        "pairs": _pairs(board, NUMBERS - _count(entries)),
    }


def _entry(entry: Entry, columns: Sequence[Column], has_orders: bool) -> dict[str, Any]:
    runs = {run.digest: index for index, run in enumerate(entry.runs)}
    return {
        **{
            name: clean(getattr(entry, name))
            for name in ("name", "checkpoint", "details", "method", "arguments", "conditions", "label")
        },
        **{name: _rounded(getattr(entry, name)) for name in ("parameters", "tokens", "seconds")},
        "shared": entry.shared,
        "command": command(entry),
        "runs": [_run(run) for run in entry.runs],
        "cells": [_cell(entry.cells.get(column.name), runs, has_orders) for column in columns],
    }


def _run(run: Run) -> list[Any]:
    when = datetime.fromtimestamp(run.date, UTC).strftime("%Y-%m-%d %H:%M") if 0 < run.date < 1e11 else ""
    versions = (run.results.get("lm_eval_version"), run.results.get("transformers_version"), run.icl.get("version"))
    return [
        clean(tail(run.path)), when, run.seed, run.order, clean(run.where),
        *("" if version is None else clean(str(version)) for version in versions),
    ]  # fmt: skip


def _cell(cell: Cell | None, runs: Mapping[str, int], has_orders: bool) -> list[Any] | None:
    if cell is None:
        return None
    given: dict[str, Any] = {
        "estimate": _values(cell.estimate),
        "difference": cell.difference and _values(cell.difference),
        "p_holm": _rounded(cell.p_holm),
        "rank": cell.rank and [int(rank) for rank in cell.rank],
        "tied_with_best": int(cell.tied_with_best),
        "sets": [
            [clean(chosen.label), _rounded(chosen.value), _answered(chosen.answered, runs) if has_orders else []]
            for chosen in cell.sets
        ],
        "sensitivity": cell.sensitivity and _values(cell.sensitivity),
        "corrected": _rounded(cell.corrected),
        "marks": [clean(mark) for mark in cell.marks],
        "left_out": int(cell.left_out),
        "predicted": [
            [clean(name), _rounded(share)]
            for name, share in sorted(cell.predicted.items(), key=lambda each: -each[1])[:PREDICTED]
        ],
        "majority": _rounded(cell.majority),
        "expected": _rounded(cell.expected),
        "chosen": [clean(choice) for choice in cell.chosen],
    }
    return [given[name] for name in _CELL]


def _answered(orders: Sequence[Answered], runs: Mapping[str, int]) -> list[list[Any]]:
    """For each order: its number, its value if there are several, and its runs by their place in the entry's."""
    return [
        [
            each.order,
            _rounded(each.result.value) if len(orders) > 1 else None,
            *(runs[run.digest] for run in (each.run, *each.repeats) if run.digest in runs),
        ]
        for each in orders
    ]


def _pairs(board: Board, left: int) -> list[list[Any]]:
    """[index of the first entry, of the second, [index of the column, difference], ...] for every pair.

    Args:
        left: how many values there may be. Those of one checkpoint come first, then the average, groups, tasks.
    """
    index = {entry.name: place for place, entry in enumerate(board.entries)}
    columns = {column.name: (place, column.kind) for place, column in enumerate(board.columns)}
    checkpoints = {entry.name: (entry.checkpoint, entry.details) for entry in board.entries}
    kinds = ("average", "group", "task")
    ladder = sorted(
        (
            checkpoints[a] != checkpoints[b],
            kinds.index(columns[column][1]),
            index[a],
            index[b],
            columns[column][0],
            found,
        )
        for (a, b), differences in board.pairs.items()
        for column, found in differences.items()
    )
    pairs: dict[tuple[int, int], list[Any]] = {(index[a], index[b]): [index[a], index[b]] for a, b in board.pairs}
    for *_, first, second, column, found in ladder[: max(0, left) // (len(_PAIR) + 1)]:
        pairs[first, second].append([column, *(_rounded(getattr(found, name)) for name in _PAIR)])
    return list(pairs.values())


def _count(found: Any) -> int:
    """The values in nested lists and dictionaries."""
    if isinstance(found, dict):
        return sum(map(_count, found.values()))
    return sum(map(_count, found)) if isinstance(found, list) else 1


def _values(found: Estimate | Difference) -> list[Any]:
    return [_rounded(getattr(found, field.name)) for field in dataclasses.fields(found)]


def _rounded(found: Any) -> Any:
    """A float with four significant digits, or None if it is not finite: JSON has no other way. The rest as it is."""
    if found is None or isinstance(found, str):
        return found
    if not math.isfinite(found):
        return None
    short = float(found) if isinstance(found, Integral) else float(f"{found:.4g}")
    return int(short) if short == int(short) else short


def _finite(found: float | None) -> float | None:
    return None if found is None or not math.isfinite(found) else found
