"""What a cell of the page shows when it is opened, as data for the page's script (`page.js`)."""

from __future__ import annotations

import functools
import math
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

from lm_eval_icl.leaderboard import costs, numbers
from lm_eval_icl.leaderboard.differences import SCOPES, verdict, what_decides
from lm_eval_icl.leaderboard.drawn import WHO
from lm_eval_icl.leaderboard.numbers import count, number, p_value, signed, value
from lm_eval_icl.results import fields
from lm_eval_icl.results.board import Board, BoardCell, Column, Entry, results_in
from lm_eval_icl.results.records import Run
from lm_eval_icl.results.statistics import Difference, Estimate
from lm_eval_icl.results.summary import family

LONGEST = 400  # the most characters of a name or a note
RUNS = 200  # the most runs, or sets, that an opened cell lists

# Words that are marks of a cell, with their meaning.
MARKS = {
    "confirmed": "Two runs on different dates, with the same prompts, gave the same answer to "
    "every document.",
    "differs": "Two runs with the same prompts gave different answers. The earlier run is shown.",
    "other sets": "The baseline has other sets of demonstrations, so the interval of the "
    "difference includes the variation of both.",
    "not compared": "The baseline has other documents or formats, or no answers to documents.",
    "aggregate only": "There are no answers to single documents (--log_samples), so the interval "
    "comes from the standard error in the results file, and there is no difference.",
    "collapsed": "One answer is given to 95% of the documents or more under every prompt, although "
    "others are right.",
    "one label": "All documents have the same right answer, so that a method that always gives it "
    "is right on all. --limit takes the first rows of a split, which may be sorted: add --metadata "
    "shuffle=0.",
    "few documents": "Fewer than 30 documents: the interval is wide.",
    "one set": "One set of demonstrations was drawn: the interval is over documents only, for this "
    "set. More seeds would say how others do.",
    "few seeds": "Two to four sets of demonstrations: intervals are wide, those of differences "
    "most of all.",
}
_TEXTS = ("name", *WHO, "rule", "label")


@functools.lru_cache(maxsize=10_000)
def clean(text: str, longest: int = LONGEST) -> str:
    """The text, cut to `longest`, with escapes for invisible characters and for those that change
    its direction."""
    if len(text) > longest:
        text = text[: longest - 1] + "…"
    characters = []
    for char in text:
        is_hidden = not char.isprintable() and unicodedata.category(char) != "Zs"
        characters.append(char.encode("unicode_escape").decode() if is_hidden else char)
    return "".join(characters)


def tail(path: Path) -> str:
    """The names of the file and its folder. The whole path would tell who made the page."""
    return "/".join(path.parts[-2:])


def data(board: Board) -> dict[str, Any]:
    """Numbers to sort by, and the titles and texts of opened cells."""
    runs: dict[str, Run] = {}
    for entry in board.entries:
        runs |= {run.digest: run for run in entry.runs}
    places = {digest: place for place, digest in enumerate(runs)}
    entries = []
    for entry in board.entries:
        texts = {name: clean(str(getattr(entry, name) or "")) for name in _TEXTS}
        cells = [_cell(board, entry, column, places) for column in board.columns]
        entries.append({**texts, "cells": cells})
    columns = []
    for column in board.columns:
        name = clean(column.name)
        columns.append({"name": name, "kind": column.kind, "higher": column.higher_is_better})
    return {
        "columns": columns,
        "entries": entries,
        "runs": [_run(run) for run in runs.values()],
    }


def flips_in_words(estimate: Estimate | None) -> str:
    """An order sensitivity with its interval; "" if it is not known."""
    if estimate is None:
        return ""
    share = value(estimate.mean, numbers.SHARE, unit=True)
    return f"{share} ({numbers.interval(estimate, numbers.SHARE, unit=True)})"


def _cell(
    board: Board, entry: Entry, column: Column, places: Mapping[str, int]
) -> dict[str, Any] | None:
    cell = entry.cells.get(column.name)
    if cell is None:
        return None
    estimate = cell.estimate
    used = {unit.run.digest for unit in results_in(cell.sets)}
    runs = [places[run.digest] for run in entry.runs if not used or run.digest in used]
    facts = []
    for title, text in _facts(board, entry, column, cell):
        if text:
            facts.append([title, clean(text)])
    return {
        "sort": estimate.mean if math.isfinite(estimate.mean) else None,
        "flips": cell.sensitivity and cell.sensitivity.mean,
        "mean": numbers.value(estimate.mean, column),
        "interval": numbers.interval(estimate, column),
        "short": numbers.short(cell, column),
        "facts": facts,
        "sets": _sets(column, cell),
        "runs": runs[:RUNS],
    }


def _facts(
    board: Board, entry: Entry, column: Column, cell: BoardCell
) -> Iterator[tuple[str, str]]:
    """Yield the titles and texts of an opened cell. Empty texts are not shown."""
    estimate = cell.estimate
    interval = numbers.interval(estimate, column, unit=True)
    yield "Its own 95% interval", f"{interval}, {SCOPES[estimate.scope]}"
    sets = count(estimate.sets, "set")
    measured = f"{sets} of demonstrations, {count(estimate.documents, 'document')}"
    if column.kind != "task":
        measured += f" in {count(len(column.weights), 'task')}"
        weights = [f"{task} {number(weight, 3)}" for task, weight in column.weights.items()]
        yield "Weights", ", ".join(weights)
    yield "Measured on", measured
    yield "Standard error", _errors(estimate, column)
    scores = {"The paper's value": cell.expected, "Always one answer": cell.majority}
    for title, score in scores.items():
        if score is not None:
            yield title, value(score, column, unit=True)
    yield "Order sensitivity", flips_in_words(cell.sensitivity)
    differences = board.differences(entry, column)
    if cell.to_majority is not None:
        differences["vs always one answer"] = cell.to_majority
    for words, difference in differences.items():
        yield f"Difference {words}", _difference(difference, column)
    yield from costs.facts(costs.cost(entry, column))
    yield "Demonstrations encoded", _encoded(cell)
    for mark in cell.marks:
        yield "Note", f"{mark}: {MARKS[mark]}" if mark in MARKS else mark


def _difference(difference: Difference, column: Column) -> str:
    """A difference in words, with the family whose comparisons hold together."""
    interval = numbers.interval(difference, column, sign=True)
    mean = signed(difference.mean, column, unit=True)
    adjusted = "adjusted p" if difference.comparisons > 1 else "p"
    parts = [
        f"{mean} ({interval}; {adjusted} {p_value(difference.p)})",
        f"{verdict(difference, column)}, as one of {family(difference.comparisons)}",
        what_decides(difference, column),
        SCOPES[difference.scope],
    ]
    return "; ".join(filter(None, parts))


def _encoded(cell: BoardCell) -> str:
    """What the runs of a task encoded once, where demonstrations may be joined; "" elsewhere."""
    totals = Counter[str]()
    for unit in results_in(cell.sets):
        shared = fields.mapping(unit.run.icl.get("shared_demonstrations"))
        for name in ("demonstrations", "distinct", "joined"):
            totals[name] += fields.count(shared.get(name)) or 0
    of_contexts = totals["demonstrations"]
    if not of_contexts:
        return ""
    why = "none shared: at most a tenth of their tokens occurs again"
    if totals["joined"]:
        why = "each once"
    return f"{totals['distinct']:,} distinct of {of_contexts:,}, {why}"


def _sets(column: Column, cell: BoardCell) -> list[list[str]]:
    """For each set of demonstrations: its label, its mean, and the values of its orders."""
    rows = []
    for prompt_set in cell.sets[:RUNS]:
        values = [unit.result.value for unit in prompt_set.answered]
        mean = value(fmean(values), column, decimals=2)
        orders = ", ".join(value(x, column) for x in values)
        rows.append([clean(prompt_set.label), mean, orders])
    return rows


def _run(run: Run) -> list[str]:
    """The file, date, seed, order and versions of a run."""
    when = ""
    if 0 < run.date < 1e11:
        when = datetime.fromtimestamp(run.date, UTC).strftime("%Y-%m-%d %H:%M")
    versions = [
        run.results.get("lm_eval_version"),
        run.results.get("transformers_version"),
        run.icl.get("version"),
    ]
    with_versions = ", ".join(map(str, filter(None, versions)))
    texts = [tail(run.path), when, str(run.seed), str(run.order), with_versions]
    return list(map(clean, texts))


def _errors(estimate: Estimate, column: Column) -> str:
    """The standard error, with its parts for documents and sets if they are known."""
    if not math.isfinite(estimate.error):
        return ""
    text = value(estimate.error, column, decimals=2)
    if estimate.error_sets is not None:
        documents = value(estimate.error_documents, column, decimals=2)
        sets = value(estimate.error_sets, column, decimals=2)
        text += f" (documents alone {documents}, demonstrations alone {sets})"
    return text
