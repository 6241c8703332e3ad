"""Wide tables for a terminal of 80 columns, in parts below each other."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rich import box
from rich.table import Table
from rich.text import Text

from lm_eval_icl.results.board import Entry, grouped, shown

WIDTH = 80
_NAME = 17  # the least room for a name, with the blank after it


class Line(NamedTuple):
    """A row: its entry, its name, and a text for each column."""

    entry: Entry
    name: Text
    cells: Sequence[Text]


def room_for(width: int, columns: int) -> int:
    """How many characters of a name stand beside columns of a width."""
    return WIDTH - (width + 1) * _at_a_time(width, columns) - 1


def _at_a_time(width: int, columns: int) -> int:
    """How many columns stand side by side, so that all parts have nearly as many."""
    most = (WIDTH - _NAME) // (width + 1)
    return max(1, math.ceil(columns / math.ceil(max(columns, 1) / most)))


def in_parts(
    title: str, headings: Sequence[str], lines: Sequence[Line], width: int, legend: Iterable[str]
) -> Table:
    """A part for each checkpoint, and more if the columns do not fit side by side. Columns are
    `width` wide in all parts, so that numbers are below each other."""
    grid = Table.grid()
    grid.add_column(max_width=WIDTH, overflow="fold")
    grid.add_row(Text(shown(title), style="bold"))
    size = _at_a_time(width, len(headings))
    texts = "\n".join(line.name.plain for line in lines)
    longest = max(map(len, texts.split("\n")))
    room = min(longest, room_for(width, len(headings)))
    for start in range(0, len(headings), size):
        columns = slice(start, start + size)
        for checkpoint, part_lines in grouped(lines, lambda line: line.entry.on).items():
            part = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
            part.add_column("", width=room, overflow="fold")
            for heading in headings[columns]:
                part.add_column(Text(heading), width=width, justify="right", overflow="fold")
            for line in part_lines:
                part.add_row(line.name, *line.cells[columns])
            grid.add_row("")
            grid.add_row(Text(shown(checkpoint), style="bold"))
            grid.add_row(part)
    grid.add_row("")
    for sentence in legend:
        grid.add_row(Text(sentence, style="dim"))
    return grid
