"""What the page says first: which row is best, what its comparisons with the others decide, why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lm_eval_icl.results.board import Board, BoardCell, Column, Entry, rule_in_words
from lm_eval_icl.results.comparisons import compare
from lm_eval_icl.results.statistics import Difference, Estimate


@dataclass(frozen=True)
class Headline:
    """The best row of the first column, which the template puts into words."""

    name: str  # the row's label, with its model if there are several
    cell: BoardCell
    undecided: list[str]  # the labels of rows that are not distinguishable from it
    better: list[str]  # those of rows that it is better than
    estimates: list[Estimate]  # of the tasks of the column
    # If it is better than no row: a task, a row that is better than its baseline there, and by how
    # much, where that is most.
    on_a_task: tuple[Column, Entry, Difference] | None
    why: dict[str, Entry]  # name -> the best row, and the first baseline, whose facts are named


def names_of(entries: Sequence[Entry]) -> dict[str, str]:
    """Entry's name -> its label, with its model and its decision rule if there are several, and
    without conditions that all of these entries have."""
    several_models = len({entry.on for entry in entries}) > 1
    several_rules = len({entry.rule for entry in entries}) > 1
    conditions = [entry.conditions.split(", ") for entry in entries]
    common = set(conditions[0]).intersection(*conditions)
    names = {}
    for entry, words in zip(entries, conditions, strict=True):
        apart = ", ".join(word for word in words if word not in common)
        label = replace(entry, conditions=apart, rule=None).label.replace("demonstrations=", "")
        if several_models:
            label += f" on {entry.on}"
        if several_rules:
            label += f", {rule_in_words(entry.rule)}"
        names[entry.name] = label
    return names


def headline(board: Board) -> Headline:
    """The best row under all decision rules, compared with every other row of the column."""
    column = board.columns[0]
    entries = [entry for entry in board.entries if column.name in entry.cells]
    best = max(entries, key=lambda entry: column.sign * entry.cells[column.name].estimate.mean)
    cell = best.cells[column.name]
    names = names_of(entries)
    differences = {
        names[entry.name]: compare(best.cells, entry.cells, column)
        for entry in entries
        if entry is not best
    }
    differences["always one answer"] = cell.to_majority
    verdicts: dict[str, list[str]] = {"better": [], "undecided": [], "worse": []}
    for label, difference in differences.items():
        if difference is not None:
            simultaneous = replace(difference, comparisons=cell.comparisons)
            verdicts[column.judged(simultaneous)].append(label)
    estimates = []
    for entry in entries:
        estimates += [entry.cells[task].estimate for task in column.weights]
    bases = [entry for entry in entries if entry.name in board.baseline.values()]
    return Headline(
        name=names[best.name],
        cell=cell,
        undecided=verdicts["undecided"],
        better=verdicts["better"],
        estimates=estimates,
        on_a_task=None if verdicts["better"] else _on_a_task(board),
        why={names[entry.name]: entry for entry in (best, *bases[:1])},
    )


def _on_a_task(board: Board) -> tuple[Column, Entry, Difference] | None:
    decided = []
    for column in board.columns[1:]:
        for entry in board.entries:
            cell = entry.cells.get(column.name)
            if cell is None or cell.difference is None:
                continue
            if column.judged(cell.difference) == "better":
                decided.append((column, entry, cell.difference))
    return max(decided, key=lambda found: abs(found[2].mean), default=None)
