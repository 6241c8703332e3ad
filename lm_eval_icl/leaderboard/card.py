"""The robustness card for people: in the terminal, on the page, and as one figure with a panel for each property."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table
from rich.text import Text

from lm_eval_icl.drawing.style import INK, method_style, shortened
from lm_eval_icl.leaderboard import numbers
from lm_eval_icl.results.board import Card, Column, Property, grouped, rule_in_words, shown
from lm_eval_icl.results.statistics import Estimate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WIDTH, _AT_A_TIME = 80, 4  # the width of the terminal; columns side by side
_ACROSS, _INCHES, _ROW = (
    4,
    7.6,
    0.2,
)  # panels side by side; the width of a figure and the height of a row
_ARROWS = {"higher": " ↑", "lower": " ↓", "": ""}


def heading(prop: Property) -> str:
    """A property's name, with an arrow up if higher values are better, or down if lower values are better."""
    return prop.name + (", %" if prop.percent else "") + _ARROWS[prop.better]


def texts(prop: Property, estimate: Estimate | None) -> tuple[str, str]:
    """A value and its 95% interval."""
    if estimate is None:
        return numbers.DASH, ""
    column = Column(prop.name, "average", "", prop.percent, prop.better != "lower", {})
    return numbers.value(estimate.mean, column), numbers.interval(estimate, column)


def legend(card: Card) -> list[str]:
    """Sentences that say what the columns and the numbers are."""
    tasks = ("the mean over " if len(card.tasks) > 1 else "on ") + ", ".join(map(shown, card.tasks))
    return [f"{prop.name}: {prop.what}." for prop in card.properties] + [
        f"Each number is {tasks}, with its 95% interval below it. An arrow says which end is better."
    ]


def table(card: Card, title: str = "") -> Table:
    """The card for a terminal of 80 columns, in parts: one for each checkpoint, and more if properties do not fit."""
    grid = Table.grid()
    grid.add_column(max_width=_WIDTH, overflow="fold")
    grid.add_row(Text(shown(title), style="bold"))
    parts = -(-len(card.properties) // _AT_A_TIME)
    size = -(-len(card.properties) // parts)
    for start in range(0, len(card.properties), size):
        properties = card.properties[start : start + size]
        for checkpoint, rows in grouped(card.rows, lambda row: row.entry.on).items():
            part = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
            part.add_column(
                Text(checkpoint, style="bold"), width=_WIDTH - 14 * size, overflow="fold"
            )
            for prop in properties:
                part.add_column(Text(heading(prop)), width=13, justify="right", overflow="fold")
            for row in rows:
                cells = (texts(prop, row.values.get(prop)) for prop in properties)
                values = [
                    Text.assemble(value, "\n", (interval, "dim")) for value, interval in cells
                ]
                part.add_row(Text(row.entry.label), *values)
            grid.add_row("")
            grid.add_row(part)
    grid.add_row("")
    for sentence in legend(card):
        grid.add_row(Text(sentence, style="dim"))
    return grid


def figure(card: Card, most: int) -> tuple[str, Figure, list[dict[str, object]]]:
    """The title, the figure with a panel for each property, and its numbers. Its rows are the first `most` without a
    decision rule."""
    from matplotlib.figure import Figure

    rows = [row for row in card.rows if row.entry.rule is None][:most] or list(card.rows[:most])
    across, down = min(_ACROSS, len(card.properties)), -(-len(card.properties) // _ACROSS)
    drawn = Figure(figsize=(_INCHES, down * (_ROW * len(rows) + 0.6)), layout="constrained")
    grid = drawn.subplots(down, across, squeeze=False, sharey=True)
    for axes in grid.flat[len(card.properties) :]:
        axes.remove()
    several = len({row.entry.on for row in rows}) > 1
    lines: list[dict[str, object]] = []
    for axes, prop in zip(grid.flat, card.properties, strict=False):
        scale = 100 if prop.percent else 1
        for y, row in enumerate(rows):
            estimate = row.values.get(prop)
            if estimate is None:
                continue
            color, marker = method_style(row.entry.method)
            ends = [scale * estimate.low, scale * estimate.high]
            if all(map(math.isfinite, ends)):
                axes.plot(ends, [y, y], color=color, linewidth=1.6, solid_capstyle="butt")
            fill: Any = "none" if "canonical_order" in row.entry.arguments else "full"
            axes.plot(
                [scale * estimate.mean],
                [y],
                marker,
                color=color,
                fillstyle=fill,
                markersize=5,
                clip_on=False,
            )
            lines.append({"checkpoint": row.entry.on, "entry": row.entry.label, "property": prop.name,
                          "mean": estimate.mean, "low": estimate.low, "high": estimate.high})  # fmt: skip
        axes.set_title(heading(prop), loc="left", fontsize=8)
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        axes.grid(axis="x", color=INK, alpha=0.13)
        axes.locator_params(axis="x", nbins=4)
        if not prop.better:
            axes.axvline(0, color=INK, alpha=0.4, linewidth=0.8)
    names = [
        shortened(f"{row.entry.label}, {row.entry.on}" if several else row.entry.label, 30)
        for row in rows
    ]
    grid[0, 0].set_yticks(range(len(rows)), names)
    grid[0, 0].set_ylim(len(rows) - 0.5, -0.5)
    rules = {row.entry.rule for row in rows}
    rule = rules.pop() if len(rules) == 1 else None
    title = "What predictions depend on, with 95% intervals" + (
        f", {rule_in_words(rule)}" if rule else ""
    )
    return title, drawn, lines
