"""The table that ends a study in the terminal: the rows of its board and the study's columns, 80
characters wide."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from rich.table import Table
from rich.text import Text

from lm_eval_icl.leaderboard import numbers
from lm_eval_icl.leaderboard.numbers import Metric
from lm_eval_icl.leaderboard.parts import Line, in_parts, room_for
from lm_eval_icl.results.board import Board, BoardCell, Entry, shown
from lm_eval_icl.results.statistics import Estimate

_NUMBER = 8  # the width of "57.9±1.2"
_FLIPS = "order flips"  # the name of the last column


def table(
    board: Board,
    columns: Sequence[str],
    entries: Sequence[Entry],
    flips: Mapping[str, Estimate],
    title: str,
) -> Table:
    """The table, in parts (`parts.in_parts`).

    Args:
        columns: the names of the columns, in order. A column that the board does not have is shown
            as missing.
        entries: the entries of the board, in the order of the lines.
        flips: entry's name -> order sensitivity.
    """
    by_name: dict[str, Metric] = {column.name: column for column in board.columns}
    headings = list(columns)
    if flips:
        by_name[_FLIPS] = numbers.SHARE
        headings.append(_FLIPS)
    for width in (_NUMBER, _NUMBER + 1):  # icl_demo_pieces has two lines of 9
        broken = [_broken(shown(heading), width) for heading in headings]
        if all(heading.count("\n") < 2 for heading in broken):
            break
    missing = Text(numbers.DASH, style="dim")
    lines = []
    for entry in entries:
        papers = entry.runs[0].study.expected
        known = dict(entry.cells)
        if entry.name in flips:
            known[_FLIPS] = BoardCell(flips[entry.name], expected=papers.get(_FLIPS))
        cells = []
        for name in headings:
            number = missing
            if name in known and name in by_name:
                number = _number(known[name], by_name[name], papers.get(f"{name} ±"))
            cells.append(number)
        lines.append(Line(entry, _name(entry, room_for(width, len(headings))), cells))
    return in_parts(title, broken, lines, width, [_legend(board, entries, bool(flips))])


def _name(entry: Entry, width: int) -> Text:
    """The method and, below it, its arguments, conditions and decision rule."""
    about_rule = [*entry.reads]
    if entry.rule is not None:
        about_rule.insert(0, f"decide: {entry.rule}")
    below = [entry.arguments, entry.conditions, ", ".join(about_rule)]
    name = Text(_broken(entry.method, width))
    for text in filter(None, below):
        name.append(f"\n{_broken(text, width)}", style="dim")
    return name


def _broken(text: str, width: int) -> str:
    """The text in lines, broken after underscores, blanks and equals signs."""
    lines = [""]
    for part in re.findall(r"[^_ =]*[_ =]?", text):
        if lines[-1] and len((lines[-1] + part).rstrip()) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(line.rstrip() for line in lines)


def _number(cell: BoardCell, column: Metric, papers_spread: float | None) -> Text:
    """A mean with its interval, and below it the paper's number, with the number after its ±."""
    text = Text(_value(cell.estimate.mean, column))
    interval = _interval(cell.estimate, column)
    if interval:
        is_long = len(text) + len(interval) > _NUMBER or not interval.startswith("±")
        text.append("\n" + interval if is_long else interval, style="dim")
    if cell.expected is not None:
        spread = ""
        if papers_spread is not None:
            spread = f"\n±{_value(papers_spread, column)}"
        text.append(f"\n({_value(cell.expected, column)}{spread})", style="cyan")
    return text


def _interval(estimate: Estimate, column: Metric) -> str:
    """The interval in few characters: "±1.2" if its sides are equal, or both of its ends."""
    if not math.isfinite(estimate.high - estimate.low):
        return ""
    if numbers.is_even(estimate, column):
        return "±" + _value(estimate.high - estimate.mean, column, 0.0995)
    ends = numbers.interval(estimate, column)
    if len(ends) <= _NUMBER or not column.percent:
        return ends
    low = numbers.value(estimate.low, column, decimals=0)
    high = numbers.value(estimate.high, column, decimals=0)
    return f"{low}{numbers.DASH}{high}"


def _value(x: float, column: Metric, least: float = 0.9995) -> str:
    """A value in few characters: "57.9", "100", "±12". Percents have no decimals if the value is
    `least` or more."""
    if column.percent:
        return numbers.value(x, column, decimals=int(x < least))
    return numbers.number(x, 3)


def _legend(board: Board, entries: Sequence[Entry], flips: bool) -> str:
    """Sentences that explain the numbers."""
    over = "documents, for these demonstrations"
    for entry in entries:
        if len({run.seed for run in entry.runs}) > 1:
            over = "documents and sets of demonstrations"
    text = f"Means with 95% intervals over {over}, ± half or from{numbers.DASH}to"
    text = ", ".join(filter(None, [text, numbers.units(board)]))
    published = []
    for entry in entries:
        published += [cell.expected for cell in entry.cells.values()]
    if any(value is not None for value in published):
        text += "; in parentheses, published numbers"
    text += "."
    if board.common:
        text = f"{', '.join(board.common)}. {text}"
    if flips:
        text += (
            " Order flips: how often two orders of the same demonstrations give different "
            "predictions, in percent, with the 95% interval."
        )
    return text
