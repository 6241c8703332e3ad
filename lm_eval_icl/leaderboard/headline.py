"""What the page says and shows first: which row is best, what its comparisons with the others
decide, why; and the axis of the picture below, which the template draws as inline SVG."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from lm_eval_icl.leaderboard.drawn import ends_of
from lm_eval_icl.results.board import Board, Column, Entry
from lm_eval_icl.results.comparisons import compare
from lm_eval_icl.results.statistics import Difference, Estimate

_ROWS = 24  # the most rows of the picture
_PARTS = 4  # about so many parts of its axis


class Headline(NamedTuple):
    """The best row of the first column, which the template puts into words."""

    undecided: list[str]  # the labels of rows that are not distinguishable from it
    better: list[str]  # those of rows that it is better than
    estimates: list[Estimate]  # of the tasks of the column
    # If it is better than no row: a task, a row that is better than its baseline there, and by how
    # much, where that is most.
    on_a_task: tuple[Column, Entry, Difference] | None
    # Name -> the best row, and the first baseline, whose facts are named. A name is the label,
    # with its model and its rule if there are several.
    why: dict[str, Entry]


def names_of(entries: Sequence[Entry]) -> dict[str, str]:
    """Entry's name -> its label, with its model if there are several, without its decision rule and
    without conditions that all of these entries have."""
    several_models = len({entry.on for entry in entries}) > 1
    conditions = [entry.conditions.split(", ") for entry in entries]
    common = set(conditions[0]).intersection(*conditions)
    names = {}
    for entry in entries:
        words = entry.conditions.split(", ")
        apart = ", ".join(word for word in words if word not in common)
        label = replace(entry, conditions=apart, rule=None).label.replace("demonstrations=", "")
        if several_models:
            label += f" on {entry.on}"
        names[entry.name] = label
    return names


def headline(board: Board) -> Headline:
    """The best row under all decision rules, compared with every other row of the column."""
    column = board.columns[0]
    entries = board.entries_on(column)
    best = max(entries, key=column.goodness)
    cell = best.cells[column.name]
    names = names_of(entries)
    if len({entry.rule for entry in entries}) > 1:
        for entry in entries:
            names[entry.name] += ", no rule" if entry.rule is None else f", rule {entry.rule}"
    differences = {"always one answer": cell.to_majority}
    for entry in entries:
        if entry is not best:
            differences[names[entry.name]] = compare(best.cells, entry.cells, column)
    verdicts = defaultdict[str, list[str]](list)
    for label, difference in differences.items():
        if difference is not None:
            simultaneous = replace(difference, comparisons=cell.comparisons)
            verdicts[column.judged(simultaneous)].append(label)
    estimates = []
    for entry in entries:
        estimates += [entry.cells[task].estimate for task in column.weights]
    bases = [entry for entry in entries if entry.name in board.baseline.values()]
    return Headline(
        undecided=verdicts["undecided"],
        better=verdicts["better"],
        estimates=estimates,
        on_a_task=None if verdicts["better"] else _on_a_task(board),
        why={names[entry.name]: entry for entry in (best, *bases[:1])},
    )


def _on_a_task(board: Board) -> tuple[Column, Entry, Difference] | None:
    decided = []
    for column in board.columns[1:]:
        for entry in board.entries_on(column):
            difference = entry.cells[column.name].difference
            if difference is not None and column.judged(difference) == "better":
                decided.append((column, entry, difference))
    return max(decided, key=lambda found: abs(found[2].mean), default=None)


class Axis:
    """From values of the first column's metric to places, in percent of the width, so that texts
    stay as large as others on a phone.

    Attributes:
        names: name of an entry that is drawn -> its label, without its rule; at most `_ROWS`.
        ticks: values with a line.
    """

    def __init__(self, board: Board) -> None:
        column = board.columns[0]
        majority = board.majority(column)
        values = [] if majority is None else [majority]
        entries = board.entries_on(column)[:_ROWS]
        self.names = names_of(entries)
        for entry in entries:
            values += ends_of(entry.cells[column.name].estimate).values()
        finite = list(filter(math.isfinite, values))
        least = min(finite, default=0.0)
        most = max(finite, default=1.0)
        step = _step((most - least) / _PARTS)
        first = math.floor(least / step)
        last = max(math.ceil(most / step), first + 1)
        self.ticks = [step * place for place in range(first, last + 1)]

    def place(self, value: float) -> float:
        """The place of a value, between 2 and 98 percent. Infinite values are at the ends."""
        low = self.ticks[0]
        share = (value - low) / (self.ticks[-1] - low)
        return round(2 + 96 * min(max(share, 0.0), 1.0), 2)


def _step(width: float) -> float:
    """The smallest of 1, 2 and 5 times a power of ten that is at least `width`."""
    power = 10.0 ** math.floor(math.log10(max(width, 1e-9)))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= 0.999 * width)
