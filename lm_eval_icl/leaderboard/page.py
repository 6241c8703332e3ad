"""The board as a page: one HTML file that loads nothing from any server and can be read without JavaScript.

The table is in the HTML itself. The contents of opened cells are JSON beside it, for the script (`page.js`). Result
files come from strangers, so every string is data: the template escapes all strings, the script sets text and no HTML,
and the page's content security policy lets only our script run.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import math
import unicodedata
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from statistics import fmean
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from lm_eval_icl.leaderboard import card, numbers
from lm_eval_icl.leaderboard.differences import SCOPES, verdict, what_decides
from lm_eval_icl.leaderboard.numbers import count, number, p_value, signed, value
from lm_eval_icl.results.board import Board, BoardCell, Column, Entry, rule_in_words
from lm_eval_icl.results.records import Run
from lm_eval_icl.results.statistics import Difference, Estimate
from lm_eval_icl.results.summary import family

LONGEST = 400  # the most characters of a name or a note
SENTENCE = 20_000  # the most characters of a sentence of the summary
RUNS = 200  # the most runs, or sets, that an opened cell lists

MARKS = {
    "confirmed": "Two runs on different dates, with the same prompts, gave the same answer to every document.",
    "differs": "Two runs with the same prompts gave different answers. The earlier run is shown.",
    "other sets": "The baseline has other sets of demonstrations, and the interval of the difference contains the "
    "chance of both.",
    "not compared": "The baseline has other documents, or no answers to single documents.",
    "aggregate only": "There are no answers to single documents (--log_samples), so the interval comes from the "
    "standard error in the results file, and there is no difference.",
    "collapsed": "One answer is given to 95% of the documents or more under every prompt, although others are right.",
    "few seeds": "Two to four sets of demonstrations: intervals are wide, those of differences most of all.",
}

# The data that a decision rule uses besides the document and the demonstrations.
READS = {
    "transductive": "A decision depends on the other documents of the run, and so on --limit.",
    "labels": "The rule uses this number of labels besides those of the demonstrations.",
    "pool": "The rule uses this number of documents of the few-shot split, without their labels.",
}

_TEXTS = "name checkpoint details method arguments conditions rule label".split()
_HIDDEN = {
    "Cc",
    "Cf",
    "Cs",
    "Co",
    "Cn",
    "Zl",
    "Zp",
}  # categories of invisible characters, and of some that move others


def page(board: Board, figures: Mapping[str, str]) -> str:
    """The page as HTML.

    Args:
        figures: title -> the text of an SVG file, which is put into the page as an image.
    """
    files = resources.files("lm_eval_icl.leaderboard")
    template, style, script = (
        (files / f"page.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js")
    )
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_finalize,
    )
    environment.filters.update(tail=tail)
    reads = {words.partition(":")[0] for entry in board.entries for words in entry.reads}
    baselines, columns = set(board.baseline.values()), {column.name for column in board.columns}
    checkpoints = {entry.on for entry in board.entries}
    cells = [
        cell for entry in board.entries for name, cell in entry.cells.items() if name in columns
    ]
    everywhere = [mark for mark in MARKS if all(mark in cell.marks for cell in cells)]
    return environment.from_string(template).render(
        board=board,
        style=Markup(style),
        script=Markup(script),
        script_hash=Markup(base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()),
        figures=[
            (title, Markup(base64.b64encode(svg.encode()).decode()))
            for title, svg in figures.items()
        ],
        data=Markup(embed(board)),
        baselines=baselines,
        baseline_methods=sorted(
            {entry.method for entry in board.entries if entry.name in baselines}
        ),
        common=[*(checkpoints if len(checkpoints) == 1 else ()), *board.common],
        several=len(checkpoints) > 1,
        everywhere=everywhere,
        numbers=numbers,
        flips=flips(board),
        majorities=majorities(board),
        sizes=sizes(board),
        choices={
            name: sorted({str(getattr(entry, name) or "") for entry in board.entries})
            for name in ("checkpoint", "method", "rule", "conditions")
        },
        runs=len({run.digest for entry in board.entries for run in entry.runs}),
        tasks=sum(column.kind == "task" for column in board.columns),
        marks=MARKS,
        rule_in_words=rule_in_words,
        card=card,
        summary=[escape(clean(sentence, SENTENCE)) for sentence in board.summary],
        reads={name: meaning for name, meaning in READS.items() if name in reads},
    )


def sizes(board: Board) -> str:
    """How many documents and sets of demonstrations the cells of tasks have, and whether these are few."""
    tasks = {task for column in board.columns for task in column.weights}
    estimates = [
        cell.estimate
        for entry in board.entries
        for name, cell in entry.cells.items()
        if name in tasks
    ]
    documents, sets = (
        {estimate.documents for estimate in estimates},
        {estimate.sets for estimate in estimates},
    )
    ranges = [
        " to ".join(f"{n:,}" for n in sorted({min(found), max(found)}))
        for found in (documents, sets)
    ]
    text = "Measured on {} documents of each task and {} sets of demonstrations.".format(*ranges)
    if max(sets) == 1:
        return text.replace("1 sets", "1 set") + " Intervals are over documents alone."
    return text + " These are few, so intervals are wide." * (min(documents) < 100 or min(sets) < 5)


def majorities(board: Board) -> dict[str, tuple[float, str]]:
    """Column -> the score of always giving one answer, and how many entries are better, in words."""
    found = {}
    for column in board.columns:
        if (score := board.majority(column)) is not None:
            tests = [
                d for e in board.entries if (c := e.cells.get(column.name)) and (d := c.to_majority)
            ]
            better = sum(column.judged(difference) == "better" for difference in tests)
            found[column.name] = score, f"{better} of {len(tests)} better"
    return found


@functools.lru_cache(maxsize=10_000)
def clean(text: str, longest: int = LONGEST) -> str:
    """The text, cut to `longest`, with escapes for invisible characters and for those that change its direction."""
    text = text if len(text) <= longest else text[: longest - 1] + "…"
    return "".join(
        char.encode("unicode_escape").decode() if unicodedata.category(char) in _HIDDEN else char
        for char in text
    )


def _finalize(printed: Any) -> Any:
    """Clean every text that the template prints, except our own HTML. (The template escapes the text after that.)"""
    return (
        clean(printed) if isinstance(printed, str) and not isinstance(printed, Markup) else printed
    )


def tail(path: Path) -> str:
    """The names of the file and its folder. The whole path would tell who made the page."""
    return "/".join(path.parts[-2:])


def flips(board: Board) -> list[tuple[str, float | None]]:
    """Each entry's order sensitivity on the first column, as a text and a number to sort by; empty if none has it."""
    cells = [entry.cells.get(board.columns[0].name) for entry in board.entries]
    rates = [cell.sensitivity if cell else None for cell in cells]
    return (
        [(_flips(rate) or numbers.DASH, rate.mean if rate else None) for rate in rates]
        if any(rates)
        else []
    )


def _flips(flips: Estimate | None) -> str:
    share = numbers.SHARE
    return (
        f"{value(flips.mean, share, unit=True)} ({numbers.interval(flips, share, unit=True)})"
        if flips
        else ""
    )


def embed(board: Board) -> str:
    """The data as JSON that may stand in a script element."""
    text = json.dumps(data(board), separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def data(board: Board) -> dict[str, Any]:
    """The data for the script: numbers to sort by, and the titles and texts of opened cells."""
    orders = [order for _, order in flips(board)]
    runs = {run.digest: run for entry in board.entries for run in entry.runs}
    places = {digest: place for place, digest in enumerate(runs)}
    entries = [
        {
            **{name: clean(str(getattr(entry, name) or "")) for name in _TEXTS},
            "flips": orders[row] if orders else None,
            "cells": [_cell(board, entry, column, places) for column in board.columns],
        }
        for row, entry in enumerate(board.entries)
    ]
    columns = [
        {"name": clean(c.name), "kind": c.kind, "higher": c.higher_is_better} for c in board.columns
    ]
    return {
        "columns": columns,
        "entries": entries,
        "runs": [[clean(text) for text in _run(run)] for run in runs.values()],
    }


def _cell(
    board: Board, entry: Entry, column: Column, places: Mapping[str, int]
) -> dict[str, Any] | None:
    if (cell := entry.cells.get(column.name)) is None:
        return None
    mean = cell.estimate.mean
    texts = (
        numbers.value(mean, column),
        numbers.interval(cell.estimate, column),
        numbers.short(cell, column),
    )
    used = {unit.run.digest for prompt_set in cell.sets for unit in prompt_set.answered}
    return {
        "sort": mean if math.isfinite(mean) else None,
        **dict(zip(("mean", "interval", "short"), texts, strict=True)),
        "facts": [
            [title, clean(text)] for title, text in _facts(board, entry, column, cell) if text
        ],
        "sets": _sets(entry, column, cell),
        "runs": [places[run.digest] for run in entry.runs if not used or run.digest in used][:RUNS],
    }


def _facts(
    board: Board, entry: Entry, column: Column, cell: BoardCell
) -> Iterator[tuple[str, str]]:
    """Yield the titles and texts of an opened cell. Empty texts are not shown."""
    estimate = cell.estimate
    yield (
        "Its own 95% interval",
        f"{numbers.interval(estimate, column, unit=True)}, {SCOPES[estimate.scope]}",
    )
    sets = (
        f"{count(estimate.sets, 'set')} of demonstrations, {count(estimate.documents, 'document')}"
    )
    yield (
        "Measured on",
        sets + (f" in {count(len(column.weights), 'task')}" if column.kind != "task" else ""),
    )
    if column.kind != "task":
        yield (
            "Weights",
            ", ".join(f"{task} {number(weight, 3)}" for task, weight in column.weights.items()),
        )
    yield "Standard error", _errors(estimate, column)
    yield (
        "The paper's value",
        "" if cell.expected is None else value(cell.expected, column, unit=True),
    )
    yield (
        "Always one answer",
        "" if cell.majority is None else value(cell.majority, column, unit=True),
    )
    yield "Order sensitivity", _flips(cell.sensitivity)
    differences = board.differences(entry, column)
    if cell.to_majority is not None:
        differences["vs always one answer"] = cell.to_majority
    for words, difference in differences.items():
        yield f"Difference {words}", _difference(difference, column)
    for mark in cell.marks:
        yield "Note", f"{mark}: {MARKS[mark]}" if mark in MARKS else mark


def _difference(difference: Difference, column: Column) -> str:
    interval = numbers.interval(difference, column, sign=True)
    parts = [
        f"{signed(difference.mean, column, unit=True)} ({interval}; p {p_value(difference.p)})",
        f"{verdict(difference, column)}, as one of {family(difference.comparisons)}",
        what_decides(difference, column),
        SCOPES[difference.scope],
    ]
    return "; ".join(filter(None, parts))


def _sets(entry: Entry, column: Column, cell: BoardCell) -> list[list[str]]:
    """For each set of demonstrations: its label, its mean, and the values of its orders."""
    rows = []
    for prompt_set in cell.sets[:RUNS]:
        values = [unit.result.value for unit in prompt_set.answered]
        texts = [
            value(fmean(values), column, decimals=2),
            ", ".join(value(x, column) for x in values),
        ]
        rows.append([clean(prompt_set.label), *texts])
    return rows


def _run(run: Run) -> list[str]:
    when = (
        datetime.fromtimestamp(run.date, UTC).strftime("%Y-%m-%d %H:%M")
        if 0 < run.date < 1e11
        else ""
    )
    versions = (
        run.results.get("lm_eval_version"),
        run.results.get("transformers_version"),
        run.icl.get("version"),
    )
    return [
        tail(run.path),
        when,
        str(run.seed),
        str(run.order),
        ", ".join(str(x) for x in versions if x),
    ]


def _errors(estimate: Estimate | Difference, column: Column) -> str:
    """The standard error, with its parts for documents and sets if they are known."""
    if not math.isfinite(estimate.error):
        return ""
    text = value(estimate.error, column, decimals=2)
    if estimate.error_sets is not None:
        alone = (
            value(x, column, decimals=2) for x in (estimate.error_documents, estimate.error_sets)
        )
        text += " (documents alone {}, demonstrations alone {})".format(*alone)
    return text
