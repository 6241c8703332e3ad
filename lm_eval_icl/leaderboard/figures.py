"""Figures of a leaderboard or a study, each with the numbers that are drawn.

Some have a row for each entry (results, differences, orders). Some have a curve for entries that differ only in the
number of shots, or only in T. One is a heat map. `FIGURES`, at the end, lists them by name.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from lm_eval_icl.drawing.style import (
    GREY,
    INK,
    METADATA,
    clipped,
    method_style,
    shortened,
    styled,
)
from lm_eval_icl.errors import InputError, writing
from lm_eval_icl.leaderboard import card, curves, numbers
from lm_eval_icl.leaderboard.drawn import (
    WIDTH,
    Drawn,
    Numbers,
    axis_of,
    ends_of,
    label_of,
    metric_of,
    numbers_of,
    scale_of,
)
from lm_eval_icl.leaderboard.tables import csv_text
from lm_eval_icl.results.board import Board, Column, Entry, grouped, rule_in_words
from lm_eval_icl.results.statistics import Difference, Estimate

_ROW = 0.25  # inches
_ROWS, _ROWS_ON_PAGE = 60, 36
_TASKS = 24  # the most columns of a heat map
_NUMBERS = 12  # the most columns with which a heat map has room for numbers
_DASHED: dict[str, Any] = {"color": GREY, "linestyle": (0, (4, 2)), "linewidth": 1}

_Lines = Sequence[tuple[float, str]]  # the places of vertical lines, with their labels


@dataclass(frozen=True)
class _Mark:
    """The mark of an entry in a figure: single values, or a mean with its interval; and a text beside it."""

    values: Sequence[float]
    interval: tuple[float, float] | None
    text: str
    line: Numbers


def draw(board: Board, folder: Path, only: Collection[str] | None = None) -> list[Path]:
    """Draw each figure for which the board has data, as SVG, PNG and a CSV of its numbers. Return the files' paths.

    Args:
        only: names of figures, out of `FIGURES`; None for all.

    Raises:
        InputError: there is no such figure, or a file cannot be written.
    """
    for name in only or ():
        if name not in FIGURES:
            raise InputError(
                f"figures: there is no figure {name!r}: name some of {', '.join(FIGURES)}."
            )
    paths = []
    with writing(folder), styled():
        folder.mkdir(parents=True, exist_ok=True)
        for name, drawn in _all(board, _ROWS, only):
            for kind, metadata in METADATA.items():
                paths.append(folder / f"{name}.{kind}")
                drawn.figure.savefig(paths[-1], dpi=150, metadata=metadata)
            paths.append(folder / f"{name}.csv")
            paths[-1].write_text(csv_text(drawn.lines), encoding="utf-8")
    return paths


def svgs(board: Board) -> dict[str, str]:
    """The figures of a page: title -> the text of an SVG file."""
    files = {}
    with styled():
        for _, drawn in _all(board, _ROWS_ON_PAGE):
            file = io.StringIO()
            drawn.figure.savefig(file, format="svg", metadata=METADATA["svg"])
            files[drawn.title] = re.sub(
                r"\s*\n\s*", " ", file.getvalue()
            )  # indentation is a tenth of the file
    return files


def _all(
    board: Board, most: int, only: Collection[str] | None = None
) -> Iterator[tuple[str, Drawn]]:
    for name, make in FIGURES.items():
        if (only is None or name in only) and (drawn := make(board, most)) is not None:
            yield name, drawn


def _marked(estimate: Estimate, column: Column, text: str, line: Numbers) -> _Mark:
    scale = scale_of(column)
    ends = (scale * estimate.low, scale * estimate.high)
    return _Mark(
        [scale * estimate.mean], ends if all(map(math.isfinite, ends)) else None, text, line
    )


def _rows(
    board: Board,
    most: int,
    title: str,
    label: str,
    mark_of: Callable[[Entry], _Mark | None],
    lines_at: _Lines = (),
) -> Drawn | None:
    """A figure with a row for each entry for which `mark_of` returns a mark, but with `most` rows at most.
    `label` is that of the x axis."""
    from matplotlib.figure import Figure

    marks = [(entry, mark) for entry in board.entries if (mark := mark_of(entry)) is not None]
    if not marks:
        return None
    kept = marks[:most]
    several = len({entry.on for entry in board.entries}) > 1
    rules = len({entry.rule for entry in board.entries}) > 1

    def panel(pair: tuple[Entry, _Mark]) -> str:
        rule = rule_in_words(pair[0].rule) if rules else ""
        return ", ".join(filter(None, [clipped(pair[0].on, 60) if several else "", rule]))

    panels = grouped(kept, panel)
    heights = [len(in_panel) + 0.3 for in_panel in panels.values()]
    height = (
        _ROW * sum(heights) + 0.3 * len(panels) + 0.8 + 0.17 * (len(lines_at) + label.count("\n"))
    )
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    shape: dict[str, Any] = {
        "squeeze": False,
        "sharex": True,
        "gridspec_kw": {"height_ratios": heights},
    }
    grid = figure.subplots(len(panels), 1, **shape)
    lines = []
    for axes, (name, in_panel) in zip(grid[:, 0], panels.items(), strict=True):
        for y, (entry, mark) in enumerate(in_panel):
            color, marker = method_style(entry.method)
            if mark.interval is not None:
                axes.plot(mark.interval, [y, y], color=color, linewidth=1.6, solid_capstyle="butt")
            axes.plot(
                mark.values,
                [y] * len(mark.values),
                marker,
                color=color,
                markersize=5,
                zorder=3,
                clip_on=False,
            )
            axes.annotate(
                mark.text, (1.01, y), xycoords=("axes fraction", "data"), va="center", fontsize=8
            )
            lines.append(mark.line)
        for place, (x, _) in enumerate(lines_at):
            axes.axvline(x, zorder=1, **{**_DASHED, "linestyle": ["--", ":"][place % 2]})
        axes.set_ylim(len(in_panel) - 0.35, -0.65)
        axes.set_yticks(
            range(len(in_panel)),
            [shortened(replace(entry, rule=None).label) for entry, _ in in_panel],
        )
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        axes.grid(axis="x", color=INK, alpha=0.13)
        axes.set_title(name, loc="left", fontweight="bold")
    meanings = [
        f"{['dashed', 'dotted'][place % 2]}: {what}" for place, (_, what) in enumerate(lines_at)
    ]
    if missing := len(marks) - len(kept):
        meanings.append(f"{missing} of {len(marks)} entries are not drawn, for lack of room")
    axes.set_xlabel("\n".join([label, "; ".join(meanings)] if meanings else [label]))
    return Drawn(title, figure, lines)


def _forest(board: Board, most: int) -> Drawn | None:
    """Means with intervals, and the score of always giving one answer as a line."""
    column = board.columns[0]
    majority = board.majority(column)

    def mark_of(entry: Entry) -> _Mark | None:
        if (cell := entry.cells.get(column.name)) is None:
            return None
        text = f"{numbers.value(cell.estimate.mean, column)}  [{numbers.interval(cell.estimate, column)}]"
        return _marked(
            cell.estimate, column, text, numbers_of(entry, column, **ends_of(cell.estimate))
        )

    lines_at = (
        []
        if majority is None
        else [(scale_of(column) * majority, "always one answer (uncertain too)")]
    )
    return _rows(
        board, most, "Results with 95% intervals", axis_of(board, column), mark_of, lines_at
    )


def _differences(board: Board, most: int) -> Drawn | None:
    """Differences to the baseline under the same rule, with intervals."""
    column = board.columns[0]

    def mark_of(entry: Entry) -> _Mark | None:
        cell = entry.cells.get(column.name)
        if cell is None or cell.difference is None:
            return None
        difference = cell.difference
        line = numbers_of(
            entry,
            column,
            **ends_of(difference, "difference"),
            p=difference.p,
            p_holm=difference.p_holm,
        )
        sign = numbers.SIGNS.get(column.judged(difference), "")
        return _marked(
            difference, column, f"{numbers.signed(difference.mean, column)} {sign}", line
        )

    methods = sorted(
        {base.method for name in board.baseline.values() if (base := board.named(name))}
    )
    label = f"difference to {', '.join(methods)} under the same rule, {'points' if column.percent else column.metric}"
    label += "\n▲ better, ▼ worse: p ≤ 5%, adjusted (Holm)"
    title = "Differences to the baseline, with 95% intervals that are not adjusted"
    return _rows(board, most, title, label, mark_of, [(0, "no difference")])


def _sets(board: Board, most: int, deviations: bool) -> Drawn | None:
    """The first task's value of each set of demonstrations (the mean over orders), or of each order minus that mean."""
    column = next((column for column in board.columns if column.kind == "task"), board.columns[0])

    def mark_of(entry: Entry) -> _Mark | None:
        cell = entry.cells.get(column.name)
        sets: dict[str, list[float]] = {}
        for prompt_set in cell.sets if cell else ():
            # Orders are compared in the task's own format.
            units = [unit for unit in prompt_set.answered if not (deviations and unit.run.format)]
            sets[prompt_set.label] = [unit.result.value for unit in units]
        if deviations:
            sets = {
                n: [v - fmean(values) for v in values]
                for n, values in sets.items()
                if len(values) > 1
            }
        values = [
            x for orders in sets.values() for x in (orders if deviations else [fmean(orders)])
        ]
        if len(values) < 2:
            return None
        text = ", ".join(
            f"{name} {' '.join(f'{x:.6g}' for x in orders)}" for name, orders in sets.items()
        )
        xs = [scale_of(column) * x for x in dict.fromkeys(values)]
        return _Mark(
            xs,
            None,
            numbers.value(max(values) - min(values), column),
            numbers_of(entry, column, values=text),
        )

    title = "Orders of the same demonstrations" if deviations else "Sets of demonstrations"
    what = "each order less its set's mean" if deviations else "a point for each set"
    label = f"{axis_of(board, column)}\n{what}; the range is on the right"
    return _rows(
        board, most, f"{title}: {metric_of(column)} on {clipped(column.name)}", label, mark_of
    )


def _sensitivity(board: Board, most: int) -> Drawn | None:
    """How often another order of the demonstrations changes the prediction, with 95% intervals."""
    column = board.columns[0]
    share = replace(column, percent=True)

    def mark_of(entry: Entry) -> _Mark | None:
        cell = entry.cells.get(column.name)
        if cell is None or cell.sensitivity is None:
            return None
        line = numbers_of(entry, column, **ends_of(cell.sensitivity, "flip rate"))
        return _marked(cell.sensitivity, share, numbers.value(cell.sensitivity.mean, share), line)

    label = "predictions that another order of the same demonstrations changes, %"
    return _rows(board, most, "Order sensitivity", label, mark_of)


def _heatmap(board: Board, most: int) -> Drawn | None:
    """Differences to the baseline by task, bold if the adjusted p-value is at most 5%."""
    from matplotlib.colors import LinearSegmentedColormap, Normalize
    from matplotlib.figure import Figure

    def difference_of(entry: Entry, column: Column) -> Difference | None:
        cell = entry.cells.get(column.name)
        return cell.difference if cell is not None else None

    columns = [
        c for c in board.columns if c.percent and any(difference_of(e, c) for e in board.entries)
    ][:_TASKS]
    entries = [
        entry for entry in board.entries if any(difference_of(entry, column) for column in columns)
    ][:most]
    if len(entries) * len(columns) < 2:  # a map needs more than one difference
        return None
    lines, goodness = [], [[math.nan] * len(columns) for _ in entries]
    figure = Figure(figsize=(WIDTH, _ROW * len(entries) + 1.7), layout="constrained")
    axes = figure.subplots()
    for y, entry in enumerate(entries):
        for x, column in enumerate(columns):
            if (difference := difference_of(entry, column)) is None:
                continue
            goodness[y][x] = 100 * difference.mean * column.sign
            is_significant = column.judged(difference) in numbers.SIGNS
            text = (
                numbers.signed(difference.mean, column)
                if len(columns) <= _NUMBERS
                else "•" * is_significant
            )
            weight = "bold" if is_significant else "normal"
            axes.text(x, y, text, ha="center", va="center", fontsize=8, fontweight=weight)
            values = {
                "difference": difference.mean,
                "p_holm": difference.p_holm,
                "significant": is_significant,
            }
            lines.append(numbers_of(entry, column, **values))
    largest = max(0.1, *(abs(x) for row in goodness for x in row if not math.isnan(x)))
    colors = LinearSegmentedColormap.from_list("", ["#e8752a", "#ffffff", "#2b8fd0"])
    image = axes.imshow(goodness, cmap=colors, norm=Normalize(-largest, largest), aspect="auto")
    axes.set_xticks(
        range(len(columns)), [clipped(c.name, 26) for c in columns], rotation=30, ha="right"
    )
    axes.set_yticks(range(len(entries)), [shortened(label_of(entry)) for entry in entries])
    bar = figure.colorbar(
        image, ax=axes, location="bottom", shrink=0.5, aspect=40, ticks=[-largest, 0, largest]
    )
    bar.ax.set_xticklabels([f"{x:+.1f}" for x in (-largest, 0, largest)])
    bar.set_label(
        "points better (blue) or worse than the baseline; bold: adjusted p ≤ 5%", fontsize=8
    )
    return Drawn("Differences to the baseline, by task", figure, lines)


def _card(board: Board, most: int) -> Drawn | None:
    """The robustness card, if the board has one."""
    return None if board.card is None else Drawn(*card.figure(board.card, most))


# Name, as in a study's file -> a function of the board and of the most rows, which makes the figure or returns None.
FIGURES: Mapping[str, Callable[[Board, int], Drawn | None]] = {
    "card": _card,
    "forest": _forest,
    "differences": _differences,
    "heatmap": _heatmap,
    "shots": lambda board, most: curves.by_shots(board),
    "T": lambda board, most: curves.by_T(board),
    "tokens": lambda board, most: curves.by_tokens(board),
    "seeds": lambda board, most: _sets(board, most, deviations=False),
    "orders": lambda board, most: _sets(board, most, deviations=True),
    "sensitivity": _sensitivity,
}
