"""The board: its rows (entries), its columns (tasks, groups, the average), and its cells."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from lm_eval_icl.results.records import NOT_RECORDED, Answers, LeftOutFile, Run, TaskResult
from lm_eval_icl.results.statistics import Difference, Estimate

AVERAGE = "average"
_LENGTH = 200  # the most characters of a name that is shown
Pairs = tuple[tuple[str, str], ...]  # names and values
Item = TypeVar("Item")
Key = TypeVar("Key")


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Key -> the items with this key, in the order of the first item of each key."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def shown(text: str) -> str:
    """A text from a stranger's file on one line, shortened, without control characters that a
    terminal would obey."""
    plain = ""
    for char in text[: 2 * _LENGTH]:
        if not char.isprintable():
            char = " " if char.isspace() else "?"
        plain += char
    plain = " ".join(plain.split())
    return plain if len(plain) <= _LENGTH else f"{plain[: _LENGTH - 3]}..."


def in_words(name: str, value: str | None) -> str:
    """Words for a value in which rows or columns differ."""
    name = name.removeprefix("generation_kwargs.").removeprefix("metadata.")
    if not value:
        return f"no {name}"
    if value == NOT_RECORDED:
        return f"{name} {value}"
    is_digest = len(value) in (16, 32, 64) and all(char in "0123456789abcdef" for char in value)
    return shown(f"{name} {value[:6]}" if is_digest else f"{name}={value}")


def rule_in_words(rule: str | None) -> str:
    """A phrase that names the decision rule of some entries."""
    return "without a decision rule" if rule is None else f"under the rule {rule}"


@dataclass(frozen=True)
class RowKey:
    """The key of a row of the board: all fields that say who answered (`results.fields`)."""

    model: Pairs  # with the digest of the weights in place of the checkpoint's name, if it is known
    method: Pairs
    setting: Pairs
    rule: Pairs  # the decision rule and its arguments; empty for the model's own answers
    switches: Pairs  # the switches that tell rows of this board apart
    # The model by which a baseline is found. For a model without a digest, it is the only model
    # that has a digest and the same checkpoint's name.
    compared_as: Pairs = ()


@dataclass(frozen=True, eq=False)
class TaskRun:
    """The result of one run on one task."""

    run: Run
    result: TaskResult

    @property
    def answers(self) -> Answers:
        """The answers of a result that has answers."""
        assert self.result.answers is not None
        return self.result.answers


@dataclass(frozen=True, eq=False)
class PromptSet:
    """One set of demonstrations, in one or several orders and formats."""

    label: str  # "seed 3", or the beginning of the digest if no seed is known
    answered: tuple[TaskRun, ...]  # the results in each order and format


def results_in(sets: Iterable[PromptSet]) -> list[TaskRun]:
    """The results in all sets, orders and formats."""
    results: list[TaskRun] = []
    for prompt_set in sets:
        results += prompt_set.answered
    return results


@dataclass(frozen=True, eq=False)
class BoardCell:
    """An entry's result on a column."""

    estimate: Estimate  # the metric
    # The metric minus the baseline's, which has the same model, rule and conditions. All
    # differences are of one family: all pairs of rows of the column, with always one answer as a
    # row.
    difference: Difference | None = None
    # The metric minus that of the same runs without the decision rule.
    to_raw: Difference | None = None
    # Whether it has the best mean of its column among entries of the same rule.
    is_best: bool = False
    is_worse: bool | None = None  # than the best entry; None: not compared
    # The prompt sets of a task; empty for groups, and for results without samples.
    sets: tuple[PromptSet, ...] = ()
    # The order sensitivity: the pairwise flip rate between orders; None with one order.
    sensitivity: Estimate | None = None
    # "confirmed", "differs", "other sets", "not compared", "aggregate only", "few seeds",
    # "one set", "one label", "few documents", "collapsed", or a sentence about its files.
    marks: tuple[str, ...] = ()
    left_out: int = 0  # how many demonstrations were left out because prompts were too long
    # The score of always giving the most frequent right answer; None if it is not known.
    majority: float | None = None
    to_majority: Difference | None = None  # the metric minus that score
    # The metric minus that of a row that differs by one condition alone:
    # ("demonstrations=stratified", difference).
    conditions: tuple[tuple[str, Difference], ...] = ()
    comparisons: int = 1  # how many comparisons hold together: all pairs of rows of the column
    # Task -> (prompts under which nearly all answers are the same although others are right, all
    # prompts).
    collapsed: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    expected: float | None = None  # the paper's value, if a study gives it


Cells = Mapping[str, BoardCell]  # the cells of a row, by task or column


@dataclass(frozen=True)
class Column:
    """A task, a group, or the average over all tasks."""

    # The task, with words that tell columns of this task apart; or the group; or `AVERAGE`.
    name: str
    kind: str  # "task", "group" or "average"
    metric: str  # "acc", ..
    percent: bool  # whether the metric lies between 0 and 1, and is shown as percent
    higher_is_better: bool  # whether higher values of the metric are better
    weights: Mapping[str, float]  # the columns of its tasks -> their weights, which add up to 1

    @property
    def sign(self) -> int:
        """1 if higher values are better, or else -1."""
        return 1 if self.higher_is_better else -1

    def goodness(self, entry: Entry) -> float:
        """The mean of an entry that has a result on this column, negative if lower is better."""
        return self.sign * entry.cells[self.name].estimate.mean

    def judged(self, difference: Difference, margin: float | None = None) -> str:
        """Return "better", "worse", "equivalent" (within the margin) or "undecided"."""
        verdict = difference.verdict(margin)
        if verdict in ("equivalent", "undecided"):
            return verdict
        return "better" if (verdict == "higher") == self.higher_is_better else "worse"


@dataclass(frozen=True, eq=False)
class Entry:
    """A row: a checkpoint under a method with its arguments."""

    name: str  # a digest: short, unique on the board, and fit for an address
    checkpoint: str  # the checkpoint's name; for a folder, the end of its path
    # Revision, dtype and other facts that tell checkpoints of one name apart; "" without any.
    details: str
    method: str  # "hf", "icl", ..
    arguments: str  # the arguments of the method as text: "T=5, eta=0.01"
    # Other facts that tell this board's rows apart: "8 shots", "chat"; "" without any.
    conditions: str
    runs: tuple[Run, ...]  # all runs of the row, by date
    cells: Cells  # by the name of the column; with cells for tasks of groups that are not columns
    # The smallest and the largest number of demonstrations among its tasks.
    shots: tuple[int, int]
    rule: str | None = None  # the name of the decision rule; None for the model's own answers
    reads: tuple[str, ...] = ()  # what the decision rule uses (`RuleFacts.reads`)

    @property
    def label(self) -> str:
        """The method with its arguments, the decision rule, and conditions."""
        method = f"{self.method} {self.arguments}".strip()
        rule = "" if self.rule is None else f"decide: {self.rule}"
        return ", ".join(filter(None, [method, self.conditions, rule]))

    @property
    def on(self) -> str:
        """The checkpoint in words."""
        return f"{self.checkpoint} ({self.details})" if self.details else self.checkpoint


@dataclass(frozen=True)
class Property:
    """A column of the robustness card."""

    name: str
    what: str  # the property in words
    better: str  # "higher" or "lower" if such values are better, or else ""
    percent: bool = True
    # The labels of the demonstrations, if the property is the accuracy that they cost.
    labels: str = ""


@dataclass(frozen=True, eq=False)
class CardRow:
    """A row of the robustness card: its properties, and an entry of the board, whose labels and
    shots are left out."""

    entry: Entry
    values: Mapping[Property, Estimate]


@dataclass(frozen=True, eq=False)
class Card:
    """How much predictions depend on labels, orders and formats (`results.card`), on average over
    `tasks`."""

    properties: tuple[Property, ...]
    rows: tuple[CardRow, ...]
    tasks: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Board:
    """The whole board."""

    columns: tuple[Column, ...]  # the average if there are several tasks, then groups, then tasks
    # Entries without a decision rule come first, then those of each rule. Within a rule, the best
    # on the first column comes first.
    entries: tuple[Entry, ...]
    # Entry's name -> the name of its baseline, if it has one.
    baseline: Mapping[str, str]
    # Sentences that say which entries are best, and which differ from their baseline.
    summary: tuple[str, ...]
    left_out: tuple[LeftOutFile, ...]  # files that were not used
    card: Card | None = None  # None if neither labels nor formats are varied
    # Words that hold for all entries and columns: "8 shots", "limit=60".
    common: tuple[str, ...] = ()
    keys: Mapping[str, RowKey] = field(default_factory=dict)  # entry's name -> the key of its row

    def entries_on(self, column: Column) -> list[Entry]:
        """The entries that have a result on a column."""
        return [entry for entry in self.entries if column.name in entry.cells]

    def majority(self, column: Column) -> float | None:
        """The score of always giving the most frequent right answer; None if entries have different
        documents."""
        majorities = {entry.cells[column.name].majority for entry in self.entries_on(column)}
        return majorities.pop() if len(majorities) == 1 else None

    def differences(self, entry: Entry, column: Column) -> dict[str, Difference]:
        """With what an entry is compared on a column, in words -> its difference."""
        cell = entry.cells[column.name]
        base = self.named(self.baseline.get(entry.name))
        pairs = [(base.method if base else "", cell.difference), ("raw", cell.to_raw)]
        pairs += cell.conditions
        return {f"vs {words}": x for words, x in pairs if x is not None}

    def named(self, name: str | None) -> Entry | None:
        return next((entry for entry in self.entries if entry.name == name), None)

    def sections(self) -> Mapping[str | None, Sequence[Entry]]:
        """The entries by decision rule."""
        return grouped(self.entries, lambda entry: entry.rule)
