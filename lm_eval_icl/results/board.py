"""The board: entries (rows), tasks, groups and the average (columns), and what can be said of each cell."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from lm_eval_icl.results.records import Answers, LeftOutFile, Run, TaskResult
from lm_eval_icl.results.statistics import Difference, Estimate

AVERAGE = "average"
SIGNIFICANT = 0.05  # a p-value up to this
_LENGTH = 200  # of a name that is shown
Fields = tuple[tuple[str, str], ...]
Item = TypeVar("Item")
Key = TypeVar("Key")


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """The items by a key, in the order in which keys come up."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def shown(text: str) -> str:
    """A stranger's text on one line, not too long, and without what a terminal would not print but obey."""
    plain = "".join(c if c.isprintable() else " " if c.isspace() else "?" for c in text[: 2 * _LENGTH])
    plain = " ".join(plain.split())
    return plain if len(plain) <= _LENGTH else f"{plain[: _LENGTH - 3]}..."


def rule_in_words(rule: str | None) -> str:
    """Under which decision rule entries of a board are."""
    return "without a decision rule" if rule is None else f"under the rule {rule}"


@dataclass(frozen=True)
class RowKey:
    """Who answered: a row of the board has one of these."""

    model: Fields  # the declared fields of each part, by name
    method: Fields
    setting: Fields
    rule: Fields  # the decision rule and its arguments; empty for what the model itself says
    switches: Fields  # those that are on

    @property
    def rival(self) -> tuple[Fields, Fields, Fields]:
        """What a row has in common with its baseline: all but the method and the switches."""
        return self.model, self.setting, self.rule


@dataclass(frozen=True, eq=False)
class TaskRun:
    """What one run gave on one task."""

    run: Run
    result: TaskResult

    @property
    def answers(self) -> Answers:
        """Of a result that has some."""
        assert self.result.answers is not None
        return self.result.answers


@dataclass(frozen=True, eq=False)
class PromptSet:
    """The same demonstrations in one order or format, or several."""

    label: str  # "seed 3", or the beginning of the digest where no seed is known
    answered: tuple[TaskRun, ...]  # an element for each order, in each format


@dataclass(frozen=True, eq=False)
class BoardCell:
    """An entry's result on a column."""

    estimate: Estimate  # of the metric
    # This entry less its baseline under the same decision rule; None for the baseline itself, and if not paired.
    difference: Difference | None = None
    p_holm: float | None = None  # the p of `difference`, adjusted over all entries of the column that have one (Holm)
    # An entry under a decision rule less the same runs without it; None without a rule.
    to_raw: Difference | None = None
    p_raw: float | None = None  # the p of `to_raw`, adjusted in the same way
    is_best: bool = False  # it has the best mean of its column among entries of the same rule
    is_worse: bool = False  # significantly worse than the best, on the same prompts (Holm over all that are compared)
    sets: tuple[PromptSet, ...] = ()  # the prompt sets of a task; empty for groups, and for results without samples
    sensitivity: Estimate | None = None  # order sensitivity: the pairwise flip rate between orders; None with one order
    # "confirmed", "differs", "unpaired", "aggregate only", "few seeds", "collapsed", or a sentence on its files.
    marks: tuple[str, ...] = ()
    left_out: int = 0  # demonstrations left out because prompts were too long
    majority: float | None = None  # the score of always giving the most frequent right answer; None if not known
    expected: float | None = None  # the paper's value, where a study says which one that is


Cells = Mapping[str, BoardCell]  # of a row, by task or column


@dataclass(frozen=True)
class Column:
    """A task, a group, or the average over all tasks."""

    name: str  # of the task, with what tells columns of this task apart, or of the group, or `AVERAGE`
    kind: str  # "task", "group" or "average"
    metric: str  # "acc", ..
    percent: bool  # the metric lies between 0 and 1, and is shown as percent
    higher_is_better: bool  # of the metric
    weights: Mapping[str, float]  # of its tasks' columns; they add up to 1. One for a task

    @property
    def bounds(self) -> tuple[float, float] | None:
        """Of the metric's values, where they are known."""
        return (0.0, 1.0) if self.percent else None

    @property
    def sign(self) -> int:
        """1, or -1 where less is better."""
        return 1 if self.higher_is_better else -1

    def judged(self, difference: float, p: float | None) -> str:
        """What a difference says: "better", "worse", or "same" where it is not significant."""
        if p is None or not p <= SIGNIFICANT:
            return "same"
        return "better" if (difference > 0) == self.higher_is_better else "worse"


@dataclass(frozen=True, eq=False)
class Entry:
    """A row: a checkpoint under a method with its arguments."""

    name: str  # short and unique on the board, fit for an address: a digest
    checkpoint: str  # its name, the end of the path for a folder
    details: str  # revision, dtype and what else tells checkpoints of one name apart; "" if nothing does
    method: str  # "hf", "icl", ..
    arguments: str  # as text: "T=5, eta=0.01"
    conditions: str  # what else tells this board's rows apart: "8 shots", "chat"; "" if nothing does
    runs: tuple[Run, ...]  # all of its runs, by date
    cells: Cells  # by the column's name; the tasks of a column that are no columns themselves are there too
    rule: str | None = None  # the name of the decision rule of its results; None of those of the model itself
    reads: tuple[str, ...] = ()  # as of `RuleFacts`
    shots: tuple[int, int] = (0, 0)  # the numbers of demonstrations, the least and the most of its tasks

    @property
    def label(self) -> str:
        """The method with its arguments, the decision rule, and conditions."""
        rule = f"decide: {self.rule}" if self.rule is not None else ""
        return ", ".join(filter(None, [" ".join(filter(None, [self.method, self.arguments])), self.conditions, rule]))

    @property
    def on(self) -> str:
        """The checkpoint in words."""
        return f"{self.checkpoint} ({self.details})" if self.details else self.checkpoint


@dataclass(frozen=True)
class Property:
    """A column of the robustness card."""

    name: str
    what: str  # in words
    better: str  # "higher", "lower", or "" where neither is
    percent: bool = True
    labels: str = ""  # of the demonstrations, if it says what these cost


@dataclass(frozen=True, eq=False)
class CardRow:
    """A row of the robustness card: an entry of the board, with its labels and shots left out, and its properties."""

    entry: Entry
    values: Mapping[Property, Estimate]


@dataclass(frozen=True, eq=False)
class Card:
    """What predictions depend on (`results.card`), the mean over these tasks."""

    properties: tuple[Property, ...]
    rows: tuple[CardRow, ...]
    tasks: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Board:
    """All of it."""

    columns: tuple[Column, ...]  # the average first if there are several tasks, groups, then tasks
    # By decision rule, the model itself first; under a rule the best first, by the first column.
    entries: tuple[Entry, ...]
    # By an entry's name, the name of the entry that its differences are to, if there is one.
    baseline: Mapping[str, str]
    summary: tuple[str, ...]  # sentences that say what is best and what cannot be told apart
    left_out: tuple[LeftOutFile, ...]  # files that were not used
    card: Card | None = None  # where labels or formats are varied
    common: tuple[str, ...] = ()  # words for what all entries and columns have in common: "8 shots", "limit=60"

    def majority(self, column: Column) -> float | None:
        """The score of always giving the most frequent answer, where all entries have the same documents."""
        majorities = {entry.cells[column.name].majority for entry in self.entries if column.name in entry.cells}
        return majorities.pop() if len(majorities) == 1 else None

    def named(self, name: str | None) -> Entry | None:
        return next((entry for entry in self.entries if entry.name == name), None)

    def sections(self) -> Mapping[str | None, Sequence[Entry]]:
        """The entries by decision rule."""
        return grouped(self.entries, lambda entry: entry.rule)
