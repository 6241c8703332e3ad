"""Differences in words: what they say, what they are over, and what would decide them."""

from __future__ import annotations

from lm_eval_icl.leaderboard import numbers
from lm_eval_icl.results.board import Column
from lm_eval_icl.results.statistics import Difference

# What an estimate or a difference of A and B is over (`statistics.SCOPES`).
SCOPES = {
    "documents": "over documents",
    "sets": "over documents and sets of demonstrations",
    "other sets": "over documents and sets of demonstrations, with different sets on each side",
    "one side's set": "over documents and the sets of one side; the other side has one set",
    "this set": "over documents, for this set of demonstrations only",
    "reported": "the standard error in the results file",
}


def verdict(difference: Difference, column: Column, margin: float | None = None) -> str:
    """What the interval of A - B says."""
    judged = column.judged(difference, in_unit(margin, column))
    if judged == "equivalent":
        return f"equivalent within {margin:g}{' points' if column.percent else ''}"
    return judged


def what_decides(difference: Difference, column: Column, margin: float | None = None) -> str:
    """How many documents or sets would decide; "" if the difference is decided."""
    margin = in_unit(margin, column)
    if difference.verdict(margin) != "undecided":
        return ""
    documents, sets = difference.needed(margin)
    numbers_needed = []
    if documents is not None:
        numbers_needed.append(numbers.count(documents, "document"))
    if sets is not None:
        numbers_needed.append(numbers.count(sets, "set"))
    if not numbers_needed:
        return "more documents or more sets alone would not decide"
    return f"about {' or '.join(numbers_needed)} would decide"


def in_unit(margin: float | None, column: Column) -> float | None:
    """A margin in the unit of the metric; it is given in points if the metric is a percentage."""
    if margin is None or not column.percent:
        return margin
    return margin / 100
