"""Figures with numbers on both axes: results by shots, by T, and by the tokens that they cost."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pandas as pd

from lm_eval_icl.drawing.style import INK, clipped, method_style, shortened
from lm_eval_icl.leaderboard.costs import cost
from lm_eval_icl.leaderboard.drawn import (
    Drawn,
    axis_of,
    ends_of,
    figure_of,
    numbers_of,
    panels_of,
    scale_of,
)
from lm_eval_icl.leaderboard.headline import names_of
from lm_eval_icl.results.board import Board, Entry

_PANELS = 9  # the most panels of a figure
_ACROSS = 3  # of them side by side
_LINES = 8  # the most curves of a figure
_MARKED = 24  # the most entries of a figure of costs
_DASHES = ("-", "--", ":", "-.")
_LEGEND = "dashed: the best for so many tokens; hollow: under a decision rule; 95% intervals"
Places = Mapping[Entry, tuple[str, float]]  # entry -> the label of its curve, and its x


def by_shots(board: Board) -> Drawn | None:
    """Results by number of demonstrations, a curve for entries that differ only in this number."""
    places = {}
    for entry in board.entries:
        fewest, most = entry.shots
        if fewest == most:
            conditions = _without(entry.conditions, r"\d+ shots?")
            places[entry] = replace(entry, conditions=conditions).label, fewest
    return _against(board, "Results by number of demonstrations", "demonstrations", places)


def by_T(board: Board) -> Drawn | None:
    """Results by T, a curve for entries that differ only in T."""
    places = {}
    for entry in board.entries:
        T = _argument(entry, "T")
        if T is not None:
            arguments = _without(entry.arguments, "T=.*")
            eta = _argument(entry, "eta")
            if eta is not None and "eta=" not in arguments:
                arguments = ", ".join(filter(None, [f"eta={eta:g}", arguments]))
            places[entry] = replace(entry, arguments=arguments).label, T
    return _against(board, "Results by T", "T", places)


def _argument(entry: Entry, name: str) -> float | None:
    """A method's argument, if it is a number and was not chosen on the dev set."""
    try:
        return float(entry.runs[0].fields.method.get(name, ""))
    except ValueError:
        return None


def _without(text: str, pattern: str) -> str:
    """A list of arguments or conditions, without the parts that match the pattern."""
    parts = [part for part in text.split(", ") if part and not re.fullmatch(pattern, part)]
    return ", ".join(parts)


def _against(board: Board, title: str, x_name: str, places: Places) -> Drawn | None:
    """Results against x, with a panel for each checkpoint and each column that has the first
    column's metric. The panels have a common y axis. The curves of a method have one colour and
    other dashes."""
    from matplotlib.ticker import MaxNLocator

    first = board.columns[0]
    several = len({entry.on for entry in board.entries}) > 1
    lines = []
    for entry, (label, x) in places.items():
        for column in board.columns:
            cell = entry.cells.get(column.name)
            if cell is None or (column.metric, column.percent) != (first.metric, first.percent):
                continue
            panel = clipped(column.name, 26)
            if several:
                panel = f"{clipped(entry.on, 40)}, {panel}"
            ends = ends_of(cell.estimate)
            line = numbers_of(entry, column, line=label, **{x_name: x}, **ends)
            lines.append({"panel": panel, **line})
    if not lines:
        return None
    curves = pd.DataFrame(lines).groupby(["panel", "line"], sort=False)
    table = curves.filter(lambda curve: curve[x_name].nunique() > 1)
    panels = list(table.groupby("panel", sort=False))[:_PANELS]
    if not panels:
        return None
    looks = {}  # by label
    curves_of = Counter[str]()  # by method
    points = pd.concat([table for _, table in panels])
    first_points = points.drop_duplicates("line").head(_LINES)
    for label, method in zip(first_points["line"], first_points["method"], strict=True):
        color, marker = method_style(method)
        dashes = _DASHES[curves_of[method] % len(_DASHES)]
        looks[label] = {"color": color, "marker": marker, "linestyle": dashes}
        curves_of[method] += 1
    height = 3 if len(panels) == 1 else 2.4
    drawn: list[Any] = []
    # The legend is above the panels.
    figure, all_axes = panels_of(len(panels), _ACROSS, height, 0.3 + 0.17 * len(looks))
    handles = {}
    for axes, (panel, table) in zip(all_axes, panels, strict=True):
        for label, unsorted in table.groupby("line", sort=False):
            if label in looks:
                look = looks[label]
                curve = unsorted.sort_values(x_name, kind="stable")
                xs = curve[x_name]
                values = scale_of(first) * curve[["mean", "low", "high"]]
                (handles[label],) = axes.plot(xs, values["mean"], markersize=4.5, zorder=3, **look)
                band = {"color": look["color"], "alpha": 0.08, "linewidth": 0}
                axes.fill_between(xs, values["low"], values["high"], **band)
                drawn += curve.drop(columns="panel").to_dict("records")
        axes.set_title(panel, loc="left")
        axes.set_xlabel(x_name)
        axes.grid(color=INK, alpha=0.13)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.supylabel(axis_of(board, first).partition(" (")[0], fontsize=9)
    names = [f" {shortened(label)}" for label in handles]
    figure.legend(handles.values(), names, loc="outside upper left", ncols=2)
    return Drawn(title, figure, drawn)


def by_tokens(board: Board) -> Drawn | None:
    """Results in the first column by the tokens that were run for a document, with the frontier:
    the entries that no other beats with as few tokens."""
    from matplotlib.ticker import LogLocator, NullFormatter

    column = board.columns[0]
    scale = scale_of(column)
    points = []
    for entry in board.entries_on(column):
        entry_cost = cost(entry, column)
        if entry_cost is not None and entry_cost.tokens_run > 0:
            points.append((entry_cost.tokens_a_document, entry))
    points = points[:_MARKED]
    if len(points) < 2:
        return None
    # A decision rule reads the same runs, so an entry under a rule is above or below its own.
    names = names_of([entry for _, entry in points])
    named: dict[float, dict[str, None]] = {}
    # Of entries with as many tokens, the best comes first.
    points.sort(key=lambda point: (point[0], -column.goodness(point[1])))
    figure = figure_of(3.6)
    axes = figure.subplots()
    frontier: list[tuple[float, float]] = []
    lines = []
    for x, entry in points:
        numbers = ends_of(entry.cells[column.name].estimate)
        y, low, high = (scale * value for value in numbers.values())
        color, marker = method_style(entry.method)
        fill = "full" if entry.rule is None else "none"
        axes.plot([x, x], [low, high], color=color, alpha=0.35)
        axes.plot([x], [y], marker, color=color, fillstyle=fill, zorder=3)
        is_first = not frontier or column.sign * (y - frontier[-1][1]) > 0
        if is_first:
            frontier.append((x, y))
        named.setdefault(x, {})[shortened(names[entry.name], 34)] = None
        lines.append(numbers_of(entry, column, tokens=x, frontier=is_first, **numbers))
    for x, at_x in named.items():
        text = "\n".join(at_x)
        above = axes.get_xaxis_transform()
        axes.text(x, 1.02, text, transform=above, rotation=35, fontsize=7, va="bottom")
    # Above the intervals, which would hide its last step.
    steps = zip(*frontier, strict=True)
    axes.step(*steps, where="post", color=INK, linestyle="--", zorder=2.5)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(f"tokens run for a document (logarithmic)\n{_LEGEND}")
    axes.set_ylabel(axis_of(board, column).partition(" (")[0])
    axes.grid(color=INK, alpha=0.13)
    return Drawn("Results by tokens", figure, lines)
