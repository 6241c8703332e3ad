"""Figures with numbers on both axes: results by shots, by T, and by the tokens that they cost."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

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
from lm_eval_icl.results.board import Board, Entry, grouped

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PANELS = 9  # the most panels of a figure
_LINES = 8  # the most curves of a figure
_MARKED = 24  # the most entries of a figure of costs


@dataclass(frozen=True)
class _CurvePoint:
    """A point of a curve, with the ends of its interval and its line of the CSV file."""

    panel: str
    method: str
    label: str
    x: float
    mean: float
    ends: tuple[float, float]
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
    for column in board.columns:
        if (column.metric, column.percent) != (first.metric, first.percent):
            continue
        for entry in board.entries:
            x = x_of(entry)
            cell = entry.cells.get(column.name)
            if x is None or cell is None:
                continue
            panel = clipped(column.name, 26)
            if several:
                panel = f"{clipped(entry.on, 40)}, {panel}"
            estimate = cell.estimate
            scale = scale_of(column)
            line = numbers_of(entry, column, line=label(entry), **{x_name: x}, **ends_of(estimate))
            points.append(
                _CurvePoint(
                    panel=panel,
                    method=entry.method,
                    label=label(entry),
                    x=x,
                    mean=scale * estimate.mean,
                    ends=(scale * estimate.low, scale * estimate.high),
                    line=line,
                )
            )
    curves = grouped(points, lambda point: (point.panel, point.label))
    longer = [curve for curve in curves.values() if len({point.x for point in curve}) > 1]
    points = [point for curve in longer for point in curve]
    return _curves(title, x_name, axis_of(board, first).partition(" (")[0], points)


def _curves(title: str, x_name: str, y_name: str, points: Sequence[_CurvePoint]) -> Drawn | None:
    """Panels with a common y axis. The curves of a method have one colour and other dashes."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator

    by_panel = grouped(points, lambda point: point.panel)
    if not by_panel:
        return None
    panels = list(by_panel)[:_PANELS]
    looks = _looks([point for panel in panels for point in by_panel[panel]])
    across = min(len(panels), 3)
    down = math.ceil(len(panels) / across)
    height = (3 if across == 1 else 2.4) * down + 0.3 + 0.17 * len(looks)
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    grid = figure.subplots(down, across, squeeze=False, sharey=True)
    for axes in grid.flat[len(panels) :]:
        axes.remove()
    lines: list[Numbers] = []
    for axes, panel in zip(grid.flat, panels, strict=False):
        for label, curve in grouped(by_panel[panel], lambda point: point.label).items():
            if label in looks:
                lines += _curve(axes, curve, looks[label])
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
    """Label -> how its curve is drawn, for the first curves."""
    methods = {point.label: point.method for point in points}
    looks: dict[str, Mapping[str, Any]] = {}
    for method, labels in grouped(list(methods)[:_LINES], methods.__getitem__).items():
        color, marker = method_style(method)
        for place, label in enumerate(labels):
            looks[label] = {
                "color": color,
                "marker": marker,
                "linestyle": ["-", "--", ":", "-."][place % 4],
                "fillstyle": ["full", "none"][place // 4 % 2],
            }
    return looks


def _curve(axes: Axes, points: Sequence[_CurvePoint], look: Mapping[str, Any]) -> list[Numbers]:
    """Draw one curve with its intervals as a band, and return its numbers."""
    ordered = sorted(points, key=lambda point: point.x)
    xs = [point.x for point in ordered]
    means = [point.mean for point in ordered]
    lows, highs = zip(*(point.ends for point in ordered), strict=True)
    axes.plot(xs, means, linewidth=1.5, markersize=4.5, zorder=3, **look)
    axes.fill_between(xs, lows, highs, color=look["color"], alpha=0.08, linewidth=0)
    return [point.line for point in ordered]


def by_tokens(board: Board) -> Drawn | None:
    """Results in the first column by the tokens that were run for a document, with the frontier:
    the entries that no other beats with as few tokens. Names stand at the frontier alone."""
    from matplotlib.figure import Figure

    column = board.columns[0]
    points = []
    for entry in board.entries:
        entry_cost = cost(entry, column) if column.name in entry.cells else None
        if entry_cost is not None and entry_cost.tokens_run > 0:
            points.append((entry_cost, entry))
    points.sort(key=lambda point: point[0].tokens_a_document)
    if len(points) < 2:
        return None
    figure = Figure(figsize=(WIDTH, 3.6), layout="constrained")
    axes = figure.subplots()
    scale = scale_of(column)
    best = -math.inf
    frontier = []
    lines: list[Numbers] = []
    for entry_cost, entry in points[:_MARKED]:
        estimate = entry.cells[column.name].estimate
        x = entry_cost.tokens_a_document
        y = scale * estimate.mean
        color, marker = method_style(entry.method)
        fill: Any = "full" if entry.rule is None else "none"
        axes.plot([x, x], [scale * estimate.low, scale * estimate.high], color=color, alpha=0.35)
        axes.plot([x], [y], marker, color=color, fillstyle=fill, zorder=3)
        is_better = column.sign * y > best
        if is_better:
            best = column.sign * y
            frontier.append((x, y))
            axes.annotate(
                shortened(label_of(entry), 34),
                (x, y),
                (4, 5),
                textcoords="offset points",
                fontsize=7.5,
            )
        line = numbers_of(entry, column, tokens=x, frontier=is_better, **ends_of(estimate))
        lines.append(line)
    xs, ys = zip(*frontier, strict=True)
    axes.step(xs, ys, where="post", color=GREY, linewidth=1, linestyle=(0, (4, 2)), zorder=1)
    axes.set_xscale("log")
    axes.set_xlabel("tokens run for a document (logarithmic)\n" + _LEGEND)
    axes.set_ylabel(axis_of(board, column))
    axes.grid(color=INK, alpha=0.13)
    return Drawn("Results by tokens", figure, lines)


_LEGEND = "dashed: the best for so many tokens; hollow: under a decision rule; 95% intervals"
