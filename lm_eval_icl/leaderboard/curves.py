"""Figures with numbers on both axes: results by shots, by T, and by the tokens that they cost."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lm_eval_icl.drawing.style import GREY, INK, clipped, method_style, shortened
from lm_eval_icl.leaderboard.costs import cost
from lm_eval_icl.leaderboard.drawn import (
    WIDTH,
    Drawn,
    Numbers,
    axis_of,
    ends_of,
    label_of,
    numbers_of,
    scale_of,
)
from lm_eval_icl.leaderboard.headline import names_of
from lm_eval_icl.results.board import Board, Entry, grouped

_PANELS = 9  # the most panels of a figure
_LINES = 8  # the most curves of a figure
_MARKED = 24  # the most entries of a figure of costs


@dataclass(frozen=True)
class _CurvePoint:
    """An entry's result on a column, as a point of a curve."""

    panel: str
    label: str  # of the curve
    entry: Entry
    x: float
    values: Sequence[float]  # the mean and the ends of its interval
    line: Numbers


def by_shots(board: Board) -> Drawn | None:
    """Results by number of demonstrations, a curve for entries that differ only in this number."""

    def x_of(entry: Entry) -> float | None:
        return entry.shots[0] if entry.shots[0] == entry.shots[1] else None

    def label(entry: Entry) -> str:
        conditions = _without(entry.conditions, r"\d+ shots?")
        return label_of(replace(entry, conditions=conditions))

    return _against(board, "Results by number of demonstrations", "demonstrations", x_of, label)


def by_T(board: Board) -> Drawn | None:
    """Results by T, a curve for entries that differ only in T."""

    def argument(entry: Entry, name: str) -> float | None:
        """A method's argument, if it is a number and was not chosen on the dev set."""
        method = entry.runs[0].fields.method
        try:
            return float(method.get(name, ""))
        except ValueError:
            return None

    def label(entry: Entry) -> str:
        arguments = _without(entry.arguments, "T=.*")
        eta = argument(entry, "eta")
        if eta is not None and "eta=" not in arguments:
            arguments = f"eta={eta:g}, {arguments}" if arguments else f"eta={eta:g}"
        return label_of(replace(entry, arguments=arguments))

    return _against(board, "Results by T", "T", lambda entry: argument(entry, "T"), label)


def _without(text: str, pattern: str) -> str:
    """A list of arguments or conditions, without the parts that match the pattern."""
    parts = [part for part in text.split(", ") if part and not re.fullmatch(pattern, part)]
    return ", ".join(parts)


def _against(
    board: Board,
    title: str,
    x_name: str,
    x_of: Callable[[Entry], float | None],
    label: Callable[[Entry], str],
) -> Drawn | None:
    """Results against `x_of(entry)`, with a panel for each checkpoint and each column that has the
    first column's metric."""
    first = board.columns[0]
    several = len({entry.on for entry in board.entries}) > 1
    points = []
    for entry in board.entries:
        x = x_of(entry)
        if x is None:
            continue
        for column in board.columns:
            cell = entry.cells.get(column.name)
            if cell is None or (column.metric, column.percent) != (first.metric, first.percent):
                continue
            panel = clipped(column.name, 26)
            if several:
                panel = f"{clipped(entry.on, 40)}, {panel}"
            numbers = ends_of(cell.estimate)
            values = [scale_of(column) * value for value in numbers.values()]
            line = numbers_of(entry, column, line=label(entry), **{x_name: x}, **numbers)
            points.append(_CurvePoint(panel, label(entry), entry, x, values, line))
    by_curve = grouped(points, lambda point: (point.panel, point.label))
    curves = [curve for curve in by_curve.values() if len({point.x for point in curve}) > 1]
    return _curves(title, x_name, axis_of(board, first).partition(" (")[0], curves)


def _curves(
    title: str, x_name: str, y_name: str, curves: Sequence[Sequence[_CurvePoint]]
) -> Drawn | None:
    """Panels with a common y axis. The curves of a method have one colour and other dashes."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator

    by_panel = grouped(curves, lambda curve: curve[0].panel)
    if not by_panel:
        return None
    panels = list(by_panel)[:_PANELS]
    looks = _looks([curve[0] for panel in panels for curve in by_panel[panel]])
    across = min(len(panels), 3)
    down = math.ceil(len(panels) / across)
    height = (3 if across == 1 else 2.4) * down + 0.3 + 0.17 * len(looks)
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    grid = figure.subplots(down, across, squeeze=False, sharey=True)
    for axes in grid.flat[len(panels) :]:
        axes.remove()
    lines: list[Numbers] = []
    for axes, panel in zip(grid.flat, panels, strict=False):
        for curve in by_panel[panel]:
            look = looks.get(curve[0].label)
            if look is not None:
                ordered = sorted(curve, key=lambda point: point.x)
                xs = [point.x for point in ordered]
                means, lows, highs = zip(*(point.values for point in ordered), strict=True)
                axes.plot(xs, means, linewidth=1.5, markersize=4.5, zorder=3, **look)
                axes.fill_between(xs, lows, highs, color=look["color"], alpha=0.08, linewidth=0)
                lines += [point.line for point in ordered]
        axes.set_title(panel, loc="left")
        axes.set_xlabel(x_name)
        axes.grid(color=INK, alpha=0.13)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.supylabel(y_name, fontsize=9)
    handles = [Line2D([], [], markersize=4.5, **look) for look in looks.values()]
    names = [f" {shortened(label)}" for label in looks]
    figure.legend(handles, names, loc="outside upper left", ncols=2)
    return Drawn(title, figure, lines)


def _looks(points: Sequence[_CurvePoint]) -> dict[str, Mapping[str, Any]]:
    """Label -> how its curves are drawn, for the first labels."""
    methods = {point.label: point.entry.method for point in points}
    looks: dict[str, Mapping[str, Any]] = {}
    for method, labels in grouped(list(methods)[:_LINES], methods.__getitem__).items():
        color, marker = method_style(method)
        for place, label in enumerate(labels):
            looks[label] = {
                "color": color,
                "marker": marker,
                "linestyle": ["-", "--", ":", "-."][place % 4],
            }
    return looks


def by_tokens(board: Board) -> Drawn | None:
    """Results in the first column by the tokens that were run for a document, with the frontier:
    the entries that no other beats with as few tokens."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    column = board.columns[0]
    scale = scale_of(column)
    points = []
    for entry in board.entries:
        entry_cost = cost(entry, column)
        if entry_cost is not None and entry_cost.tokens_run > 0:
            points.append((entry_cost.tokens_a_document, entry))
    points = points[:_MARKED]
    if len(points) < 2:
        return None
    names = names_of([entry for _, entry in points])
    # Of entries with as many tokens, the best comes first.
    points.sort(
        key=lambda point: (point[0], -column.sign * point[1].cells[column.name].estimate.mean)
    )
    figure = Figure(figsize=(WIDTH, 3.6), layout="constrained")
    axes = figure.subplots()
    frontier: list[tuple[float, float]] = []
    lines: list[Numbers] = []
    for x, entry in points:
        numbers = ends_of(entry.cells[column.name].estimate)
        y, low, high = (scale * value for value in numbers.values())
        color, marker = method_style(entry.method)
        fill: Any = "full" if entry.rule is None else "none"
        axes.plot([x, x], [low, high], color=color, alpha=0.35)
        axes.plot([x], [y], marker, color=color, fillstyle=fill, zorder=3)
        is_first = not frontier or column.sign * (y - frontier[-1][1]) > 0
        if is_first:
            frontier.append((x, y))
        name = shortened(names[entry.name], 34)
        axes.annotate(name, (x, y), (5, 3), textcoords="offset points", fontsize=7)
        lines.append(numbers_of(entry, column, tokens=x, frontier=is_first, **numbers))
    axes.step(*zip(*frontier, strict=True), where="post", color=GREY, linewidth=1, linestyle="--")
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(f"tokens run for a document (logarithmic)\n{_LEGEND}")
    axes.set_ylabel(axis_of(board, column).partition(" (")[0])
    axes.grid(color=INK, alpha=0.13)
    return Drawn("Results by tokens", figure, lines)


_LEGEND = "dashed: the best for so many tokens; hollow: under a decision rule; 95% intervals"
