"""The table that ends a study in the terminal: the rows of its board and the study's columns, 80 characters wide."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from lm_eval_icl.leaderboard import numbers
from lm_eval_icl.results.board import Board, BoardCell, Column, Entry, grouped, shown
from lm_eval_icl.results.statistics import Estimate

_WIDTH = 80
_NUMBER, _INTERVAL = 8, 9  # the widths of "57.9±1.2" and of an interval
_AT_A_TIME = 7  # columns of numbers side by side: five tasks, their average, the order sensitivity
_SHARE = Column("order flips", "average", "", percent=True, higher_is_better=False, weights={})


def table(
    board: Board,
    columns: Sequence[str],
    entries: Sequence[Entry],
    flips: Mapping[str, Estimate],
    title: str,
) -> Table:
    """The table, in parts: one for each checkpoint, and more if the columns do not fit side by side.

    Args:
        columns: the names of the columns, in order. A column that the board does not have is shown as missing.
        entries: the entries of the board, in the order of the lines.
        flips: entry's name -> order sensitivity.
    """
    by_name = {column.name: column for column in board.columns}
    labels = {}
    for entry in entries:
        rule = f"decide: {entry.rule}" if entry.rule is not None else ""
        more = [entry.arguments, entry.conditions, ", ".join(filter(None, [rule, *entry.reads]))]
        labels[entry.name] = list(filter(None, [entry.method, *more]))
    headings = [*columns, *([_SHARE.name] if flips else [])]
    size = math.ceil(len(headings) / math.ceil(len(headings) / _AT_A_TIME)) if headings else 1
    longest = max((len(part) for label in labels.values() for part in label), default=0)

    grid = Table.grid()
    grid.add_column(max_width=_WIDTH, overflow="fold")
    grid.add_row(Text(shown(title), style="bold"))
    for start in range(0, len(headings), size):
        part_headings = headings[start : start + size]
        # Columns have the same width in the parts of all checkpoints, so that their numbers are below each other.
        widths = [
            _INTERVAL if heading == _SHARE.name and flips else _NUMBER for heading in part_headings
        ]
        width = min(longest, _WIDTH - sum(widths) - len(widths))
        for checkpoint, checkpoint_entries in grouped(entries, lambda entry: entry.on).items():
            part = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=0)
            part.add_column("", width=width, overflow="fold")
            for heading, wide in zip(part_headings, widths, strict=True):
                part.add_column(
                    Text(_broken(shown(heading), wide)),
                    width=wide,
                    justify="right",
                    overflow="fold",
                )
            for entry in checkpoint_entries:
                method, *details = (_broken(text, width) for text in labels[entry.name])
                row = [
                    Text("\n").join([Text(method), *(Text(text, style="dim") for text in details)])
                ]
                for heading, wide in zip(part_headings, widths, strict=True):
                    if wide == _NUMBER:
                        row.append(_number(entry.cells.get(heading), by_name.get(heading)))
                    elif entry.name in flips:  # the share of flips, with its interval below
                        share = flips[entry.name]
                        interval = "\n" + numbers.interval(share, _SHARE), "dim"
                        paper = entry.runs[0].study.expected.get(_SHARE.name)
                        papers = (
                            "" if paper is None else f"\n({numbers.value(paper, _SHARE)})",
                            "cyan",
                        )
                        row.append(
                            Text.assemble(numbers.value(share.mean, _SHARE), interval, papers)
                        )
                    else:
                        row.append(Text(numbers.DASH, style="dim"))
                part.add_row(*row)
            grid.add_row("")
            grid.add_row(Text(shown(checkpoint), style="bold"))
            grid.add_row(part)
    grid.add_row("")
    grid.add_row(Text(_legend(board, entries, bool(flips)), style="dim"))
    return grid


def _broken(text: str, width: int) -> str:
    """The text in lines, broken after underscores, blanks and equals signs."""
    lines = [""]
    for part in re.findall(r"[^_ =]*[_ =]?", text):
        if lines[-1] and len((lines[-1] + part).rstrip()) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(line.rstrip() for line in lines)


def _number(cell: BoardCell | None, column: Column | None) -> Text:
    """A mean with its interval, and the paper's number below it."""
    if cell is None or column is None:
        return Text(numbers.DASH, style="dim")
    text = Text(_value(cell.estimate.mean, column, 0.9995))
    interval = _interval(cell.estimate, column)
    if interval:
        is_long = len(text) + len(interval) > _NUMBER or not interval.startswith("±")
        text.append("\n" + interval if is_long else interval, style="dim")
    if cell.expected is not None:
        text.append(f"\n({_value(cell.expected, column, 0.9995)})", style="cyan")
    return text


def _interval(estimate: Estimate, column: Column) -> str:
    """The interval in few characters: "±1.2" if its sides are equal, or both of its ends."""
    if not math.isfinite(estimate.high - estimate.low):
        return ""
    if numbers.is_even(estimate, column):
        return "±" + _value(estimate.high - estimate.mean, column, 0.0995)
    ends = numbers.interval(estimate, column)
    if len(ends) <= _NUMBER or not column.percent:
        return ends
    low, high = (numbers.value(x, column, decimals=0) for x in (estimate.low, estimate.high))
    return f"{low}{numbers.DASH}{high}"


def _value(x: float, column: Column, least: float) -> str:
    """A value in few characters: "57.9", "100", "±12". Percents have no decimals if the value is `least` or more."""
    return (
        numbers.value(x, column, decimals=int(x < least))
        if column.percent
        else numbers.number(x, 3)
    )


def _legend(board: Board, entries: Sequence[Entry], flips: bool) -> str:
    """Sentences that explain the numbers."""
    others = [shown(column.name) for column in board.columns if not column.percent]
    several = any(len({run.seed for run in entry.runs}) > 1 for entry in entries)
    over = (
        "documents and sets of demonstrations" if several else "documents, for these demonstrations"
    )
    text = f"Means with 95% intervals over {over}, ± half or from{numbers.DASH}to"
    if len(others) < len(board.columns):
        text += ", in percent" + (f" but for {', '.join(others)}" if others else "")
    if any(cell.expected is not None for entry in entries for cell in entry.cells.values()):
        text += "; in parentheses, the paper's"
    sentences = [f"{', '.join(board.common)}." if board.common else "", f"{text}."]
    if flips:
        sentences.append(
            "Order flips: how often two orders of the same demonstrations give different predictions, in percent, with "
            "the 95% interval."
        )
    return " ".join(filter(None, sentences))
