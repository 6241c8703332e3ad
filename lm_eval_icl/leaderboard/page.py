"""The board as a page: one HTML file that asks nothing of any server and can be read without JavaScript.

The table is in the HTML itself. What a cell opens to is JSON beside it, which the script (`page.js`) reads. Result
files come from strangers, so every string is data: the template escapes all of them, the script sets text and no HTML,
and the page's content security policy lets no script run but ours.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import math
import os
import shlex
import unicodedata
import zlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from lm_eval_icl.leaderboard import numbers
from lm_eval_icl.leaderboard.numbers import count, number, p_value, signed, value
from lm_eval_icl.results.board import SIGNIFICANT, Board, Column, Entry
from lm_eval_icl.results.records import Run
from lm_eval_icl.results.statistics import HOW, Difference, Estimate

LONGEST = 400  # characters of a name or a note; the rest is cut off
LONGEST_COMMAND = 20_000
# Budgets that keep a page of 100 rows and 30 tasks under 1 MB.
PLAIN = 300_000  # characters of JSON; more than that is compressed, which only a script can read
NUMBERS = 310_000  # values in the JSON, some two bytes each once compressed: pairs of entries fill what cells leave
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

# Of an entry under a decision rule, what it reads beside the document and the demonstrations.
READS = {
    "transductive": "A decision depends on the other documents that were run, so on --limit too. Such entries are "
    "ranked among themselves, and stand behind the others.",
    "labels": "The rule uses so many labels beside those of the demonstrations.",
    "pool": "The rule reads so many documents of the few-shot split, without their labels.",
}

# What the script is given of a cell, in this order: numbers to sort and draw by and for the CSV file; then texts. The
# texts that the table has, it takes from the table.
_CELL = (
    "numbers half count expected chosen errors df how tied corrected predicted majority "
    "sensitivity left_out marks sets difference"
).split()
_DIFFERENCE = ("interval", "p", "p_holm", "p_signs", "detectable", "better", "worse", "sets", "errors", "df", "how")
_CSV = (
    "mean low high error df sets documents difference difference_low difference_high p p_holm detectable "
    "rank_first rank_last corrected"
).split()
_PAIR = ("mean", "low", "high", "p", "detectable", "verdict", "better", "worse", "sets")
_RUN = ("file", "date", "seed", "order", "lm_eval", "transformers", "lm_eval_icl")
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
    environment.filters.update(tail=tail)
    embedded, is_plain = embed(board, results)
    baselines = _baselines(board)
    reads = {words.partition(":")[0] for entry in board.entries for words in entry.reads}
    return environment.from_string(template).render(
        board=board,
        style=Markup(style),
        script=Markup(script),
        script_hash=Markup(base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()),
        figures=[(title, Markup(svg)) for title, svg in figures.items()],
        data=Markup(embedded),
        is_plain=is_plain,
        baselines=baselines,
        baseline_labels=sorted({entry.label for entry in board.entries if entry.name in baselines}),
        numbers=numbers,
        level=SIGNIFICANT,
        command=lambda entry: escape(command(entry)),
        sections=sections(board.columns),
        extras=extras(board),
        majorities={column.name: x for column in board.columns if (x := board.majority(column)) is not None},
        has_corrected=any(cell.corrected is not None for entry in board.entries for cell in entry.cells.values()),
        choices={
            name: sorted({getattr(entry, name) for entry in board.entries})
            for name in ("checkpoint", "method", "conditions")
        },
        runs=len({run.digest for entry in board.entries for run in entry.runs}),
        tasks=sum(column.kind == "task" for column in board.columns),
        marks=MARKS,
        has_rules=any(entry.rule is not None for entry in board.entries),
        has_against_itself=any(map(board.is_against_itself, board.entries)),
        reads={name: meaning for name, meaning in READS.items() if name in reads},
        # How much smaller the table is on paper, so that its columns fit; the same in page.js.
        printed=f"{max(0.4, min(1, 1000 / (230 + 100 * (len(board.columns) + len(extras(board)))))):.2f}",
    )


def _baselines(board: Board) -> set[str]:
    """The names of the baselines, but for those of rules: every entry is the baseline of its own decision rules."""
    compared = (entry for entry in board.entries if entry.name in board.baseline)
    return {board.baseline[entry.name] for entry in compared if not board.is_against_itself(entry)}


# ---------------------------------------------------------------------------------------------------------------
# Text.


@functools.lru_cache(maxsize=10_000)
def clean(text: str, longest: int = LONGEST) -> str:
    """The text with characters that are not seen or that change the direction of writing as escapes, cut to size."""
    text = text if len(text) <= longest else text[: longest - 1] + "…"
    return "".join(
        char.encode("unicode_escape").decode() if unicodedata.category(char) in _HIDDEN else char for char in text
    )


def _finalize(printed: Any) -> Any:
    """Every text that the template prints is cleaned, but not our own HTML. (It is escaped after that.)"""
    return clean(printed) if isinstance(printed, str) and not isinstance(printed, Markup) else printed


def command(entry: Entry) -> str:
    """The entry's commands, line by line; they may be longer than other texts, and are never cut."""
    if len(entry.command) > LONGEST_COMMAND:
        return f"# The commands have {len(entry.command):,} characters, for which there is no room here."
    return "\n".join(clean(line, LONGEST_COMMAND) for line in entry.command.split("\n"))


def tail(path: Path) -> str:
    """The file and its folder: the whole path would tell who made the page."""
    return "/".join(path.parts[-2:])


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
    first = [entry.cells.get(board.columns[0].name) for entry in board.entries]
    ranks = [cell.rank if cell else None for cell in first]
    flips = [cell.sensitivity if cell else None for cell in first]
    transductive = [entry.is_transductive for entry in board.entries]
    columns: dict[str, list[tuple[str, float | None]]] = {
        # The last rank decides between entries with the same first. Those that are transductive are behind all others.
        "rank": [
            (numbers.rank(rank, is_apart), rank and is_apart * len(ranks) + rank[0] + rank[1] / 1e6)
            for rank, is_apart in zip(ranks, transductive, strict=True)
        ],
        "order sensitivity": [
            (f"{numbers.share(flip.mean)} ({numbers.share_interval(flip)})", flip.mean)
            if flip
            else (numbers.DASH, None)
            for flip in flips
        ],
    }
    for title, name in (("tokens run", "tokens"), ("seconds", "seconds")):
        for shared in (False, True):
            costs = [getattr(entry, name) if entry.shared == shared else None for entry in board.entries]
            columns[title + " in a study" * shared] = [(number(cost), cost) for cost in costs]
    columns["parameters"] = [(number(entry.parameters), entry.parameters) for entry in board.entries]
    columns = {title: [(text, _rounded(x, 9)) for text, x in cells] for title, cells in columns.items()}
    return {title: cells for title, cells in columns.items() if any(order is not None for _, order in cells)}


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
    cells = (cell for entry in board.entries for cell in entry.cells.values())
    answered = sum(len(prompt_set.answered) for cell in cells for prompt_set in cell.sets)
    orders = {title: [order for _, order in cells] for title, cells in extras(board).items()}
    texts = "name checkpoint details method arguments conditions label".split()
    entries = [
        {
            **{name: clean(getattr(entry, name)) for name in texts},
            "extras": {title: numbers_by_row[row] for title, numbers_by_row in orders.items()},
            "against_itself": board.is_against_itself(entry),
            "transductive": entry.is_transductive,
            "command": command(entry),
            "runs": [_run(run) for run in entry.runs],
            "cells": [_cell(entry, column, answered <= ORDERS) for column in board.columns],
        }
        for row, entry in enumerate(board.entries)
    ]
    return {
        "fields": {"cell": _CELL, "difference": _DIFFERENCE, "numbers": _CSV, "pair": _PAIR, "run": _RUN},
        "how": dict(HOW),
        "level": SIGNIFICANT,
        "results": shlex.join(clean(os.path.relpath(path)) for path in results),
        "marks": MARKS,
        "columns": [
            {
                "name": clean(column.name),
                "kind": column.kind,
                "metric": clean(column.metric),
                "unit": "%" if column.percent else "",
                "points": " points" if column.percent else "",
                "higher_is_better": column.higher_is_better,
                "weights": {clean(task): number(weight, 3) for task, weight in column.weights.items()},
            }
            for column in board.columns
        ],
        "entries": entries,
        "baseline": {clean(name): clean(base) for name, base in board.baseline.items()},
        "baselines": sorted(map(clean, _baselines(board))),
        "pairs": _pairs(board, NUMBERS - _count(entries)),
    }


def _run(run: Run) -> list[str]:
    when = datetime.fromtimestamp(run.date, UTC).strftime("%Y-%m-%d %H:%M") if 0 < run.date < 1e11 else ""
    versions = (run.results.get("lm_eval_version"), run.results.get("transformers_version"), run.icl.get("version"))
    texts = [tail(run.path), when, run.seed, run.order, *versions]
    return ["" if text is None else clean(str(text)) for text in texts]


def _cell(entry: Entry, column: Column, has_orders: bool) -> list[Any] | None:
    """What an opened cell shows, as `_CELL` lists it."""
    if (cell := entry.cells.get(column.name)) is None:
        return None
    estimate, difference, flips, is_task = cell.estimate, cell.difference, cell.sensitivity, column.kind == "task"

    def known(x: float | None) -> str:
        return value(x, column) if x is not None and math.isfinite(x) else ""

    row: list[float | None] = [getattr(estimate, name) for name in "mean low high error df sets documents".split()]
    row += [difference.mean, difference.low, difference.high, difference.p] if difference else [None] * 4
    row += [cell.p_holm, difference.detectable if difference else None, *(cell.rank or (None, None)), cell.corrected]
    counted = f"{count(estimate.sets, 'set')} of demonstrations{' (dots)' * (is_task and len(cell.sets) > 1)}, "
    counted += count(estimate.documents, "document") + ("" if is_task else f" in {count(len(column.weights), 'task')}")
    shares = sorted(cell.predicted.items(), key=lambda pair: -pair[1])[:PREDICTED]
    runs = {run.digest: index for index, run in enumerate(entry.runs)}
    sets = []
    for prompt_set in cell.sets:
        values = [value(unit.result.value, column) for unit in prompt_set.answered]
        orders = values if len(values) > 1 else []
        by_order = [[run.digest for run in (unit.run, *unit.repeats)] for unit in prompt_set.answered]
        places = [[runs[digest] for digest in digests if digest in runs] for digests in by_order]
        of_orders = [", ".join(orders), places] if has_orders else ["", []]
        sets.append([clean(prompt_set.label), value(prompt_set.value, column, decimals=2), *of_orders])
    return [
        [_rounded(x) for x in row],
        numbers.half(estimate, column) + "†" * (numbers.verdict(cell, column) in numbers.WORDS),
        counted,
        known(cell.expected),
        "; ".join(map(clean, cell.chosen)),
        _errors(estimate, column),
        number(estimate.df, 3),
        estimate.how,
        int(cell.tied_with_best),
        known(cell.corrected),
        ", ".join(f"{clean(name)} {numbers.share(share)}" for name, share in shares),
        known(cell.majority),
        f"{numbers.share(flips.mean)} ({numbers.share_interval(flips)})" if flips else "",
        number(cell.left_out) if cell.left_out else "",
        [clean(mark) for mark in cell.marks],
        sets,
        difference
        and [
            numbers.interval(difference, column, sign=True),
            p_value(difference.p),
            p_value(cell.p_holm),
            p_value(difference.p_signs) if difference.p_signs is not None else "",
            known(difference.detectable),
            *(difference.better, difference.worse, difference.sets),
            _errors(difference, column),
            number(difference.df, 3),
            difference.how,
        ],
    ]


def _errors(estimate: Estimate | Difference, column: Column) -> list[str]:
    """The standard error, and its parts if there are any."""
    parts: list[float | None] = [estimate.error]
    if estimate.error_sets is not None:
        parts += [estimate.error_documents, estimate.error_sets]
    return [value(error, column, decimals=2) for error in parts] if math.isfinite(estimate.error) else []


def _pairs(board: Board, left: int) -> list[list[Any]]:
    """[index of the first entry, of the second, [index of the column, texts of the difference], ...] for every pair.

    Args:
        left: how many values there may be. Those of one checkpoint come first, then the average, groups, tasks.
    """
    index = {entry.name: place for place, entry in enumerate(board.entries)}
    columns = {column.name: (place, column) for place, column in enumerate(board.columns)}
    kinds, on = ("average", "group", "task"), {entry.name: entry.on for entry in board.entries}
    ladder = sorted(
        (on[a] != on[b], kinds.index(columns[name][1].kind), index[a], index[b], columns[name][0], name, difference)
        for (a, b), differences in board.pairs.items()
        for name, difference in differences.items()
    )
    pairs: dict[tuple[int, int], list[Any]] = {(index[a], index[b]): [index[a], index[b]] for a, b in board.pairs}
    for _, _, first, second, place, name, difference in ladder[: max(0, left) // (len(_PAIR) + 1)]:
        column = columns[name][1]
        texts = [
            *(signed(x, column) for x in (difference.mean, difference.low, difference.high)),
            p_value(difference.p),
            value(difference.detectable, column),
        ]
        verdict = column.judged(difference.mean, difference.p)
        pairs[first, second].append([place, *texts, verdict, difference.better, difference.worse, difference.sets])
    return list(pairs.values())


def _count(part: Any) -> int:
    """The values in nested lists and dictionaries."""
    if isinstance(part, dict):
        return sum(map(_count, part.values()))
    return sum(map(_count, part)) if isinstance(part, list) else 1


def _rounded(x: float | None, digits: int = 4) -> float | None:
    """A number with so many significant digits, or None if it is not finite: JSON has no other way."""
    if x is None or not math.isfinite(x):
        return None
    short = float(f"{x:.{digits}g}") if isinstance(x, float) else float(x)
    return int(short) if short == int(short) else short
