# ruff: noqa: RUF002 (the examples have typographic signs)
"""How numbers are written for people: in the terminal, on the page, in figures, Markdown and LaTeX.

A metric between 0 and 1 is written in percent with one decimal. Other metrics have four significant
digits, and their differences have three. Minus signs and dashes are the typographic ones. Unknown
and infinite values are a dash.
"""

from __future__ import annotations

import math
import re

from lm_eval_icl.results.board import Board, BoardCell, Column, Property, shown
from lm_eval_icl.results.statistics import Difference, Estimate

MINUS = "\N{MINUS SIGN}"
DASH = "\N{EN DASH}"
Metric = Column | Property  # says whether a value is written in percent
SHARE = Property("", "", "")  # a value in percent


def number(x: float | None, digits: int = 4) -> str:
    """A number of any size with significant digits, such as 12,345 or 0.01235. Whole numbers keep
    all digits."""
    if x is None or not math.isfinite(x):
        return DASH
    is_whole = abs(x) >= 10 ** (digits - 1) or x == int(x)
    return _minus(f"{x:,.0f}" if is_whole else f"{x:.{digits}g}")


def value(x: float | None, column: Metric, *, unit: bool = False, decimals: int = 1) -> str:
    """A value of the column's metric, such as 66.5. Percents have `decimals`, and a percent sign if
    `unit` is True."""
    if not column.percent or x is None or not math.isfinite(x):
        return number(x)
    text = _minus(f"{100 * x:.{decimals}f}")
    return f"{text}%" if unit else text


def signed(x: float | None, column: Metric, *, unit: bool = False) -> str:
    """A difference of values with its sign, such as +1.2; zero has no sign. The unit of percents is
    points."""
    text = value(x, column) if column.percent else number(x, 3)
    if text not in (DASH, "0", "0.0") and not text.startswith(MINUS):
        text = f"+{text}"
    has_unit = unit and column.percent and text != DASH
    return f"{text} points" if has_unit else text


def judged(difference: Difference, column: Column) -> str:
    """A difference, a blank, and an arrow if it is decided, such as +1.2 ▲."""
    arrow = SIGNS.get(column.judged(difference), "")
    return f"{signed(difference.mean, column)} {arrow}"


def interval(estimate: Estimate, column: Metric, *, sign: bool = False, unit: bool = False) -> str:
    """The 95% interval, such as 83.1–87.4 or −0.3 to +2.7. Only its end has a percent sign, if
    `unit` is True."""
    written = signed if sign else value
    low = written(estimate.low, column)
    high = written(estimate.high, column)
    between = " to " if sign or MINUS in low + high else DASH
    text = f"{low}{between}{high}"
    if unit and column.percent and math.isfinite(estimate.high):
        text += " points" if sign else "%"
    return text


def is_even(estimate: Estimate, column: Metric) -> bool:
    """Whether an interval may be written with ±: its sides are equal, and it ends inside the
    metric's range."""
    below = estimate.mean - estimate.low
    above = estimate.high - estimate.mean
    is_inside = not column.percent or (0 < estimate.low and estimate.high < 1)
    return is_inside and math.isfinite(below) and math.isclose(below, above, rel_tol=1e-6)


def spread(estimate: Estimate, column: Column) -> str:
    """The interval after its mean: ± 2.1, or both of its ends in brackets. "" without an
    interval."""
    if is_even(estimate, column):
        return f"± {value(estimate.high - estimate.mean, column)}"
    if not math.isfinite(estimate.high - estimate.low):
        return ""
    return f"[{interval(estimate, column)}]"


def short(cell: BoardCell | None, column: Column) -> str:
    """A mean with its interval, such as 66.5 ± 2.1, and a dagger if it differs from the
    baseline."""
    if cell is None:
        return DASH
    text = f"{value(cell.estimate.mean, column)} {spread(cell.estimate, column)}".rstrip()
    is_different = cell.difference is not None and column.judged(cell.difference) in SIGNS
    return text + "†" if is_different else text


def units(board: Board) -> str:
    """Which numbers of a board are in percent; "" if none are."""
    others = [shown(column.name) for column in board.columns if not column.percent]
    if len(others) == len(board.columns):
        return ""
    return f"in percent, except {', '.join(others)}" if others else "in percent"


def p_value(p: float | None) -> str:
    """A p-value with two digits, or "<0.0001"."""
    if p is None or not math.isfinite(p):
        return DASH
    if p < 1e-4:
        return "<0.0001"
    return f"{p:.2g}" if p < 0.095 else f"{p:.2f}"


def count(n: int, one: str) -> str:
    """A number of things, such as 1 set or 1,200 sets."""
    plural = "" if n == 1 else "s"
    return f"{number(n)} {one}{plural}"


SIGNS = {"better": "▲", "worse": "▼"}


def _minus(text: str) -> str:
    """The text of a number with a minus sign in place of a leading hyphen. Zero has no sign."""
    if re.fullmatch(r"-[0.]+", text):
        return text.lstrip("-")
    return re.sub("^-", MINUS, text)
