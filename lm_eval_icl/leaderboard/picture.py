"""The axis of the picture at the top of the page, which the template draws as inline SVG.

Places are percentages of the width, so that texts stay as large as others on a phone.
"""

from __future__ import annotations

import math
from dataclasses import replace

from lm_eval_icl.leaderboard.headline import names_of
from lm_eval_icl.results.board import Board

ROWS = 24  # the most rows of the picture
_PARTS = 4  # about so many parts of the axis


class Axis:
    """From values of the first column's metric to places, in percent of the width.

    Attributes:
        names: name of an entry that is drawn -> its label, without its rule.
        majority: the score of always giving one answer; None if it is not known.
        flips: whether an entry has an order sensitivity.
        ticks: values with a line.
    """

    def __init__(self, board: Board) -> None:
        column = board.columns[0]
        self.rows = ROWS
        self.majority = board.majority(column)
        values = [] if self.majority is None else [self.majority]
        entries = [replace(e, rule=None) for e in board.entries if column.name in e.cells][:ROWS]
        self.names = names_of(entries)
        self.flips = False
        for entry in entries:
            cell = entry.cells[column.name]
            values += [cell.estimate.mean, cell.estimate.low, cell.estimate.high]
            self.flips |= cell.sensitivity is not None
        finite = [value for value in values if math.isfinite(value)]
        step = _step((max(finite, default=1.0) - min(finite, default=0.0)) / _PARTS)
        first = math.floor(min(finite, default=0.0) / step)
        last = max(math.ceil(max(finite, default=1.0) / step), first + 1)
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
