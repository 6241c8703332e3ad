"""Figures of a leaderboard or a study, each with the numbers that are drawn.

Some have a row for each entry (results, differences, orders). Some have a curve for entries that
differ only in the number of shots, or only in T. One is a heat map. `FIGURES`, at the end, lists
them by name.
"""

from __future__ import annotations

import functools
import io
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from lm_eval_icl.drawing.style import (
    GREY,
    INK,
    METADATA,
    clipped,
    method_style,
    shortened,
    styled,
)
from lm_eval_icl.errors import InputError, log, writing
from lm_eval_icl.files import replacing, write_atomically
from lm_eval_icl.leaderboard import card, curves, numbers
from lm_eval_icl.leaderboard.drawn import (
    Drawn,
    Numbers,
    axis_of,
    ends_of,
    figure_of,
    metric_of,
    numbers_of,
    panels_of,
    scale_of,
)
from lm_eval_icl.leaderboard.tables import csv_text
from lm_eval_icl.results.board import Board, Column, Entry, grouped, rule_in_words
from lm_eval_icl.results.statistics import Difference, Estimate

_ROW = 0.25  # inches
_ROWS = 60  # the most rows of a figure
_ROWS_ON_PAGE = 36
_ACROSS = 4  # panels of the card side by side
_TASKS = 24  # the most columns of a heat map
_NUMBERS = 12  # the most columns with which a heat map has room for numbers


class _Mark(NamedTuple):
    """A row of a figure: single values, or a mean with its interval, and a text beside them."""

    entry: Entry
    values: Sequence[float]
    ends: Sequence[float]  # of the interval; empty without one
    text: str
    line: Numbers


def draw(board: Board, folder: Path, only: Collection[str] | None = None) -> list[Path]:
    """Draw each figure for which the board has data, as SVG, PNG and a CSV of its numbers, each
    whole or not at all. Return the files' paths.

    Args:
        only: names of figures, out of `FIGURES`; None for all.

    Raises:
        InputError: there is no such figure, or a file cannot be written.
    """
    for name in only or ():
        if name not in FIGURES:
            raise InputError(f"figures: there is no {name!r}: name some of {', '.join(FIGURES)}.")
    paths = []
    with writing(folder), styled():
        for name, drawn in _drawn(board, _ROWS, FIGURES if only is None else only):
            for kind, metadata in METADATA.items():
                path = folder / f"{name}.{kind}"
                with replacing(path) as half:
                    drawn.figure.savefig(half, format=kind, dpi=150, metadata=metadata)
                paths.append(path)
            path = folder / f"{name}.csv"
            write_atomically(path, csv_text(drawn.lines))
            paths.append(path)
    return paths


def _drawn(board: Board, most: int, names: Collection[str]) -> Iterator[tuple[str, Drawn]]:
    """The figures with these names for which the board has data."""
    for name, make in FIGURES.items():
        drawn = make(board, most) if name in names else None
        if drawn is not None:
            yield name, drawn


def svgs(board: Board) -> dict[str, str]:
    """The figures of a page, which has its own picture of the results: title -> the text of an SVG
    file. None, and a warning, without matplotlib."""
    files = {}
    try:
        with styled():
            for _, drawn in _drawn(board, _ROWS_ON_PAGE, FIGURES.keys() - {"forest"}):
                file = io.StringIO()
                drawn.figure.savefig(file, format="svg", metadata=METADATA["svg"])
                # Indentation is a tenth of the file.
                files[drawn.title] = re.sub(r"\s*\n\s*", " ", file.getvalue())
    except InputError as refusal:
        log.warning("%s The page has none.", refusal.message)
    return files


def _rows(
    board: Board,
    marks: Sequence[_Mark],
    most: int,
    title: str,
    label: str,
    reference: float | None = None,
) -> Drawn | None:
    """A figure with a row for each of the first `most` marks.

    Args:
        label: that of the x axis.
        reference: the place of a dashed vertical line, which the label explains.
    """
    if not marks:
        return None
    several = len({entry.on for entry in board.entries}) > 1
    has_rules = len(board.sections()) > 1

    def panel(mark: _Mark) -> str:
        words = [clipped(mark.entry.on, 60)] if several else []
        if has_rules:
            words.append(rule_in_words(mark.entry.rule))
        return ", ".join(words)

    panels = grouped(marks[:most], panel)
    heights = [len(rows) + 0.3 for rows in panels.values()]
    if len(marks) > most:
        rest = len(marks) - most
        label += f"\n{rest} of {len(marks)} entries are not drawn, for lack of room"
    height = _ROW * sum(heights) + 0.3 * len(panels) + 0.8 + 0.17 * label.count("\n")
    figure = figure_of(height)
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    ratios = {"height_ratios": heights}
    grid = figure.subplots(len(panels), 1, squeeze=False, sharex=True, gridspec_kw=ratios)
    for axes, (name, rows) in zip(grid[:, 0], panels.items(), strict=True):
        if reference is not None:
            axes.axvline(reference, zorder=1, color=GREY, linewidth=1, linestyle="--")
        _draw_panel(axes, rows)
        axes.set_title(name, loc="left", fontweight="bold")
    axes.set_xlabel(label)
    return Drawn(title, figure, [mark.line for mark in marks[:most]])


def _draw_panel(axes: Any, marks: Sequence[_Mark], longest: int = 46) -> None:
    """Draw rows with points, intervals, names on the left and texts on the right. Points of sorted
    demonstrations, a control, are hollow."""
    for y, mark in enumerate(marks):
        color, marker = method_style(mark.entry.method)
        look = {"color": color, "markersize": 5, "zorder": 3, "clip_on": False}
        if "canonical_order" in mark.entry.arguments:
            look["fillstyle"] = "none"
        if mark.ends and all(map(math.isfinite, mark.ends)):
            axes.plot(mark.ends, [y, y], color=color, linewidth=1.6, solid_capstyle="butt")
        axes.plot(mark.values, [y] * len(mark.values), marker, **look)
        beside = ("axes fraction", "data")
        axes.annotate(mark.text, (1.01, y), xycoords=beside, va="center", fontsize=8)
    names = [shortened(replace(mark.entry, rule=None).label, longest) for mark in marks]
    axes.set_yticks(range(len(marks)), names)
    axes.set_ylim(len(marks) - 0.35, -0.65)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x", color=INK, alpha=0.13)


def _marks(
    board: Board,
    column: Column,
    field: str,
    name: str,
    text_of: Callable[[Any], str],
) -> list[_Mark]:
    """A mark for each entry whose cell has an estimate in a field. `name` is the estimate's in the
    CSV file."""
    marks = []
    scale = scale_of(column)
    for entry in board.entries_on(column):
        estimate = getattr(entry.cells[column.name], field)
        if estimate is None:
            continue
        ends = [scale * estimate.low, scale * estimate.high]
        line = numbers_of(entry, column, **ends_of(estimate, name))
        if isinstance(estimate, Difference):
            line |= {"p": estimate.p, "comparisons": estimate.comparisons}
        marks.append(_Mark(entry, [scale * estimate.mean], ends, text_of(estimate), line))
    return marks


def _forest(board: Board, most: int) -> Drawn | None:
    """Means with intervals, and the score of always giving one answer as a line."""
    column = board.columns[0]

    def text(estimate: Estimate) -> str:
        interval = numbers.interval(estimate, column)
        return f"{numbers.value(estimate.mean, column)}  [{interval}]"

    label = axis_of(board, column)
    reference = board.majority(column)
    if reference is not None:
        reference *= scale_of(column)
        label += "\ndashed: always one answer (uncertain too)"
    marks = _marks(board, column, "estimate", "mean", text)
    return _rows(board, marks, most, "Results with 95% intervals", label, reference)


def _differences(board: Board, most: int) -> Drawn | None:
    """Differences to the baseline under the same rule, with intervals."""
    column = board.columns[0]
    text = functools.partial(numbers.judged, column=column)
    marks = _marks(board, column, "difference", "difference", text)
    bases = {entry.method for entry in board.entries if entry.name in board.baseline.values()}
    unit = "points" if column.percent else column.metric
    label = f"difference to {', '.join(sorted(bases))}, {unit}"
    label += "\n▲ better, ▼ worse; dashed: no difference"
    title = "Differences to the baseline; intervals hold for all pairs of rows together (95%)"
    return _rows(board, marks, most, title, label, 0.0)


def _sensitivity(board: Board, most: int) -> Drawn | None:
    """How often another order of the demonstrations changes the prediction, with intervals."""
    share = replace(board.columns[0], percent=True)
    marks = _marks(
        board, share, "sensitivity", "flip rate", lambda flips: numbers.value(flips.mean, share)
    )
    label = "predictions that another order of the same demonstrations changes, %"
    return _rows(board, marks, most, "Order sensitivity", label)


def _sets(board: Board, most: int, *, deviations: bool = False) -> Drawn | None:
    """The first task's value of each set of demonstrations, the mean over orders; or of each order
    minus its set's mean, in the task's own format."""
    column = next((column for column in board.columns if column.kind == "task"), board.columns[0])
    marks = []
    for entry in board.entries_on(column):
        texts = []
        values = []
        for prompt_set in entry.cells[column.name].sets:
            units = [x for x in prompt_set.answered if not (deviations and x.run.format)]
            orders = [unit.result.value for unit in units]
            if not deviations:
                values.append(fmean(orders))
            elif len(orders) > 1:
                orders = [x - fmean(orders) for x in orders]
                values += orders
            else:
                orders = []
            written = [f"{x:.6g}" for x in orders]
            texts.append(" ".join([prompt_set.label, *written]))
        if len(values) > 1:
            width = numbers.value(max(values) - min(values), column)
            scaled = [scale_of(column) * value for value in dict.fromkeys(values)]
            line = numbers_of(entry, column, values=", ".join(texts))
            marks.append(_Mark(entry, scaled, [], width, line))
    what = "each order minus its set's mean" if deviations else "a point for each set"
    title = "Orders of the same demonstrations" if deviations else "Sets of demonstrations"
    title = f"{title}: {metric_of(column)} on {clipped(column.name)}"
    label = f"{axis_of(board, column)}\n{what}; the range is on the right"
    return _rows(board, marks, most, title, label)


def _heatmap(board: Board, most: int) -> Drawn | None:
    """Differences to the baseline by task, bold if their simultaneous intervals exclude 0."""
    from matplotlib.colors import LinearSegmentedColormap, Normalize

    differences = {}
    for column in board.columns:
        for entry in board.entries_on(column):
            difference = entry.cells[column.name].difference
            if column.percent and difference is not None:
                differences[entry.name, column.name] = difference
    if len(differences) < 2:
        return None
    in_rows = {row for row, _ in differences}
    in_columns = {column for _, column in differences}
    entries = [entry for entry in board.entries if entry.name in in_rows][:most]
    columns = [column for column in board.columns if column.name in in_columns][:_TASKS]
    lines = []
    goodness = np.full((len(entries), len(columns)), np.nan)
    figure = figure_of(_ROW * len(entries) + 1.7)
    axes = figure.subplots()
    for y, entry in enumerate(entries):
        for x, column in enumerate(columns):
            difference = differences.get((entry.name, column.name))
            if difference is None:
                continue
            goodness[y, x] = 100 * difference.mean * column.sign
            is_decided = column.judged(difference) in numbers.SIGNS
            text = numbers.signed(difference.mean, column)
            if len(columns) > _NUMBERS:
                text = "•" if is_decided else ""
            weight = "bold" if is_decided else "normal"
            axes.text(x, y, text, ha="center", va="center", fontsize=8, fontweight=weight)
            line = numbers_of(entry, column, difference=difference.mean, p=difference.p)
            lines.append(line | {"decided": is_decided})
    largest = max(0.1, float(np.nanmax(np.abs(goodness))))
    colors = LinearSegmentedColormap.from_list("", ["#e8752a", "#ffffff", "#2b8fd0"])
    image = axes.imshow(goodness, cmap=colors, norm=Normalize(-largest, largest), aspect="auto")
    names = [clipped(column.name, 26) for column in columns]
    axes.set_xticks(range(len(columns)), names, rotation=30, ha="right")
    axes.set_yticks(range(len(entries)), [shortened(entry.label) for entry in entries])
    bar = figure.colorbar(
        image,
        ax=axes,
        location="bottom",
        shrink=0.5,
        aspect=40,
        ticks=[-largest, 0, largest],
        format="{x:+.1f}",
    )
    meaning = "points better (blue) or worse than the baseline"
    if any(line["decided"] for line in lines):
        meaning += ";\nbold: shown to differ (all pairs of rows hold together with 95% certainty)"
    bar.set_label(meaning, fontsize=8)
    return Drawn("Differences to the baseline, by task", figure, lines)


def _card(board: Board, most: int) -> Drawn | None:
    """The robustness card: a panel for each property, of rows without a decision rule if there are
    some."""
    if board.card is None:
        return None
    properties = board.card.properties
    rows = [row for row in board.card.rows if row.entry.rule is None] or board.card.rows
    rows = rows[:most]
    lines = []
    figure, all_axes = panels_of(len(properties), _ACROSS, 0.2 * len(rows) + 0.6)
    for axes, prop in zip(all_axes, properties, strict=True):
        scale = scale_of(prop)
        marks = []
        for row in rows:
            estimate = row.values.get(prop)
            values = []
            if estimate is not None:
                numbers_drawn = ends_of(estimate)
                values = [scale * x for x in numbers_drawn.values()]
                names = {"checkpoint": row.entry.on, "entry": row.entry.label}
                lines.append({**names, "property": prop.name, **numbers_drawn})
            marks.append(_Mark(row.entry, values[:1], values[1:], "", {}))
        _draw_panel(axes, marks, 30)
        axes.set_title(card.heading(prop), loc="left", fontsize=8)
        axes.locator_params(axis="x", nbins=4)
        if not prop.better:
            axes.axvline(0, color=INK, alpha=0.4, linewidth=0.8)
    title = "What predictions depend on, with 95% intervals"
    rules = {row.entry.rule for row in rows} - {None}
    if len(rules) == 1:
        title += f", {rule_in_words(rules.pop())}"
    return Drawn(title, figure, lines)


# Name, as in a study's file -> a function of the board and of the most rows, which makes the figure
# or returns None.
FIGURES: Mapping[str, Callable[[Board, int], Drawn | None]] = {
    "card": _card,
    "forest": _forest,
    "differences": _differences,
    "heatmap": _heatmap,
    "shots": lambda board, most: curves.by_shots(board),
    "T": lambda board, most: curves.by_T(board),
    "tokens": lambda board, most: curves.by_tokens(board),
    "seeds": _sets,
    "orders": functools.partial(_sets, deviations=True),
    "sensitivity": _sensitivity,
}
