"""What the cells of a board cost, as numbers and in words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from lm_eval_icl.leaderboard import numbers
from lm_eval_icl.results.board import Column, Entry, results_in
from lm_eval_icl.results.costs import Cost, cost_of

_GIB = 2**30
NAMES = [field.name for field in fields(Cost)]  # of the columns of a CSV file
HEADINGS = ("tokens a\ndocument", "tokens\nsaved", "passes", "seconds", "peak,\nGiB")


def cost(entry: Entry, column: Column) -> Cost | None:
    """The cost of the runs that are averaged in a cell. None if it is not known for this column
    alone, if the runs have no samples, or if there is no cell."""
    tasks = set()
    runs = {}
    for name in column.weights if column.name in entry.cells else ():
        for unit in results_in(entry.cells[name].sets):
            tasks.add(unit.result.task)
            runs[unit.run.digest] = unit.run
    return cost_of(runs.values(), tasks) if runs else None


def texts(cost: Cost) -> list[str]:
    """The tokens of a document, the share saved, passes, seconds and memory, each as text."""
    return [
        numbers.number(cost.tokens_a_document, 1),
        numbers.value(cost.saved, numbers.SHARE, unit=True, decimals=0),
        numbers.number(cost.passes, 1),
        numbers.number(cost.seconds, 3),
        numbers.number(cost.peak_bytes / _GIB, 2),
    ]


def facts(cost: Cost | None) -> Iterator[tuple[str, str]]:
    """Yield titles and texts for an opened cell."""
    if cost is None:
        yield "Cost", "not recorded for this column alone"
        return
    tokens, saved, passes, seconds, peak = texts(cost)
    total = numbers.number(cost.tokens_run, 1)
    yield "Tokens run", f"{total}, {tokens} a document; {saved} fewer than by single requests"
    yield "Passes, seconds", f"{passes} forward passes, {seconds} s"
    yield "Peak memory", f"{peak} GiB"
    if cost.shared_by > 1:
        yield "Shared passes", f"{cost.shared_by} runs of the study shared them, in equal parts"
