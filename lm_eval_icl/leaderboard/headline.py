"""What the page says first: which row is best, what that means, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lm_eval_icl.leaderboard import numbers
from lm_eval_icl.results.board import Board, BoardCell, Column, Entry, shown
from lm_eval_icl.results.comparisons import compare

_LISTED = 3  # the most rows that a sentence names


@dataclass(frozen=True)
class Headline:
    """The best row of the first column, in words."""

    best: str  # its name
    number: str  # its mean
    interval: str  # its own 95% interval
    over: str  # what was measured
    undecided: str  # the rows that are not distinguishable from it; "" for none
    better: str  # the rows that it is better than; "" for none
    tasks: str  # the task on which a row is better than its baseline, if the average decides nothing
    why: tuple[str, ...]  # facts of the best row and of its baseline


def headline(board: Board) -> Headline:
    """The best row under all decision rules, compared with every other row of the column."""
    column = board.columns[0]
    entries = [entry for entry in board.entries if column.name in entry.cells]
    best = max(entries, key=lambda entry: column.sign * entry.cells[column.name].estimate.mean)
    cell = best.cells[column.name]
    undecided = []
    better = []
    for entry in entries:
        difference = compare(best.cells, entry.cells, column) if entry is not best else None
        if difference is None:
            continue
        verdict = column.judged(replace(difference, comparisons=cell.comparisons))
        (better if verdict == "better" else undecided).append(entry.label)
    if cell.to_majority is not None:
        verdict = column.judged(cell.to_majority)
        (better if verdict == "better" else undecided).append("always one answer")
    return Headline(...)
