"""The robustness card for people: its words, and the table in the terminal."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from lm_eval_icl.leaderboard import numbers
from lm_eval_icl.leaderboard.parts import Line, in_parts
from lm_eval_icl.results.board import Card, Property, shown
from lm_eval_icl.results.statistics import Estimate

_NUMBER = 13  # the width of a column
_ARROWS = {"higher": " ↑", "lower": " ↓", "": ""}


def heading(prop: Property) -> str:
    """A property's name, with an arrow up if higher values are better, or down if lower values are
    better."""
    unit = ", %" if prop.percent else ""
    return f"{prop.name}{unit}{_ARROWS[prop.better]}"


def texts(prop: Property, estimate: Estimate | None) -> tuple[str, str]:
    """A value and its 95% interval."""
    if estimate is None:
        return numbers.DASH, ""
    return numbers.value(estimate.mean, prop), numbers.interval(estimate, prop)


def legend(card: Card) -> list[str]:
    """Sentences that say what the columns and the numbers are."""
    over = "the mean over" if len(card.tasks) > 1 else "on"
    tasks = ", ".join(map(shown, card.tasks))
    sentences = [f"{prop.name}: {prop.what}." for prop in card.properties]
    sentences.append(
        f"Each number is {over} {tasks}, with its 95% interval below it. "
        "An arrow says which end is better."
    )
    return sentences


def table(card: Card, title: str = "") -> Table:
    """The card for a terminal of 80 columns, in parts: one for each checkpoint, and more if
    properties do not fit."""
    lines = []
    for row in card.rows:
        cells = []
        for prop in card.properties:
            value, interval = texts(prop, row.values.get(prop))
            cells.append(Text.assemble(value, "\n", (interval, "dim")))
        lines.append(Line(row.entry, Text(row.entry.label), cells))
    headings = list(map(heading, card.properties))
    return in_parts(title, headings, lines, _NUMBER, legend(card))
