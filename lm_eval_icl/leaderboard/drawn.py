"""What figures of results have in common: their data as CSV, the names of axes and entries."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from lm_eval_icl.drawing.style import clipped, one_line
from lm_eval_icl.results.board import Board, Column, Entry, Property
from lm_eval_icl.results.statistics import Estimate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH = 7.6  # inches
# The fields of an entry that say who answered.
WHO = ("checkpoint", "details", "method", "arguments", "conditions")

Numbers = dict[str, object]  # a line of a figure's CSV file


class Drawn(NamedTuple):
    """A figure with its title, and the numbers that it shows."""

    title: str
    figure: Figure
    lines: list[Numbers]


def figure_of(height: float) -> Figure:
    """An empty figure with this height in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH, height), layout="constrained")


def panels_of(
    panels: int, across: int, height: float, above: float = 0.0
) -> tuple[Figure, list[Any]]:
    """A figure, and the axes of its panels, which have this height and a common y axis; at most
    `across` are side by side. `above` is the height of what is above them."""
    across = min(panels, across)
    down = math.ceil(panels / across)
    figure = figure_of(down * height + above)
    grid = figure.subplots(down, across, squeeze=False, sharey=True)
    for axes in grid.flat[panels:]:
        axes.remove()
    return figure, list(grid.flat[:panels])


def scale_of(column: Column | Property) -> int:
    """The factor from the metric to the axis, which has percent if the metric is a share."""
    return 100 if column.percent else 1


def metric_of(column: Column) -> str:
    return "accuracy" if column.metric == "acc" else clipped(column.metric)


def axis_of(board: Board, column: Column) -> str:
    """The name of an axis with a column's values."""
    where = "average over tasks" if column.kind == "average" else clipped(column.name)
    conditions = ", ".join([where, *map(clipped, board.common)])
    unit = ", %" if column.percent else ""
    return f"{metric_of(column)}{unit} ({conditions})"


def numbers_of(entry: Entry, column: Column, **values: object) -> Numbers:
    """A line of a CSV file: the entry, the column, and the values that are drawn."""
    # The texts of an entry are on one line already (`labels.entries_of`).
    line = facts_of(entry, (*WHO, "rule", "name"))
    return line | {"column": one_line(column.name), "metric": one_line(column.metric), **values}


def facts_of(thing: object, names: Iterable[str]) -> Numbers:
    """Values of a dataclass by their names, for a line of a CSV file. If there is no such thing,
    they are None."""
    return {name: thing and getattr(thing, name) for name in names}


def ends_of(estimate: Estimate, name: str = "mean") -> dict[str, float]:
    """An estimate with the ends of its interval, for a line of a CSV file."""
    return {name: estimate.mean, "low": estimate.low, "high": estimate.high}
