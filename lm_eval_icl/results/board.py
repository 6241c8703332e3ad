"""The board: entries (rows), tasks, groups and the average (columns), and what can be said of each cell."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from lm_eval_icl.results.records import Answers, LeftOutFile, RuleFacts, Run, TaskResult
from lm_eval_icl.results.statistics import Difference, Estimate

AVERAGE = "average"
SIGNIFICANT = 0.05  # a p-value up to this
_LENGTH = 200  # of a name that is shown
# By the names of two entries and the column: the first less the second.
Pairs = Mapping[tuple[str, str], Mapping[str, Difference]]
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
    return "without a decision rule" if rule is None else f"under {rule}"


def reads_in_words(rules: Iterable[RuleFacts]) -> tuple[str, ...]:
    """What a rule reads beside the document and the demonstrations, in several runs and tasks: "transductive",
    "pool: 64", "labels: 500 to 2016"."""
    numbers: dict[str, set[int]] = {}
    for rule in rules:
        if rule.transductive:
            numbers.setdefault("transductive", set())
        if rule.labels is not None:
            numbers.setdefault("labels", set()).add(rule.labels)
        if rule.arguments.get("of") == "pool":
            m = rule.arguments.get("m", rule.corpus)
            numbers.setdefault("pool", set()).update([m] if type(m) is int else [])
    ends = {name: sorted({min(of_name), max(of_name)}) if of_name else [] for name, of_name in numbers.items()}
    return tuple(f"{name}: {' to '.join(map(str, of_name))}" if of_name else name for name, of_name in ends.items())


@dataclass(frozen=True, eq=False)
class TaskRun:
    """What one run gave on one task.

    Attributes:
        repeats: further runs with the same prompts; of those, `run` is the first by date.
    """

    run: Run
    result: TaskResult
    repeats: tuple[Run, ...] = ()

    @property
    def answers(self) -> Answers:
        """The answers of a result that has some."""
        assert self.result.answers is not None
        return self.result.answers

    @property
    def asked(self) -> tuple[str, int]:
        """What was asked. The number of documents is there as a digest may be a stranger's claim."""
        return self.answers.prompts, len(self.answers.items)


@dataclass(frozen=True, eq=False)
class PromptSet:
    """The same demonstrations in one order or format, or several.

    Attributes:
        label: "seed 3", or the beginning of the digest where no seed is known.
        answered: an element for each order.
        value: the mean of the metric over the orders.
    """

    label: str
    answered: tuple[TaskRun, ...]
    value: float


@dataclass(frozen=True, eq=False)
class BoardCell:
    """An entry's result on a column.

    Attributes:
        estimate: of the metric.
        difference: this entry less its baseline, which has the same decision rule; None for the baseline itself, and
            where the two are not paired.
        p_holm: the p-value of `difference`, adjusted for all entries of the column that have one (Holm).
        to_raw: an entry under a decision rule less the same runs without it; None without a rule.
        p_raw: the p-value of `to_raw`, adjusted for all entries of the column that have one.
        rank: the first and last rank among entries of the same decision rule that the column's paired differences leave
            possible, adjusted for all their pairs; None without any.
        is_best: it has the best mean of its column among entries of the same rule.
        sets: the prompt sets of a task; empty for groups, and for results without samples.
        sensitivity: order sensitivity: the pairwise flip rate between orders; None with one order.
        corrected: `estimate.mean` corrected for chance: (mean - chance) / (1 - chance); None without options.
        marks: words on this cell: "confirmed", "differs", "unpaired", "aggregate only", "few seeds", "collapsed", or
            a sentence on what is wrong with its files.
        left_out: demonstrations left out because prompts were too long.
        predicted: the share of the answers to a task that name an option, by option; over all prompts.
        majority: the score of always giving the most frequent right answer; None where these are not known.
        expected: the paper's value, where a study says which one that is.
        chosen: the arguments that a study chose on its dev set for a task, each choice as text: "T=5, eta=0.01".
    """

    estimate: Estimate
    difference: Difference | None = None
    p_holm: float | None = None
    to_raw: Difference | None = None
    p_raw: float | None = None
    rank: tuple[int, int] | None = None
    is_best: bool = False
    sets: tuple[PromptSet, ...] = ()
    sensitivity: Estimate | None = None
    corrected: float | None = None
    marks: tuple[str, ...] = ()
    left_out: int = 0
    predicted: Mapping[str, float] = field(default_factory=dict)
    majority: float | None = None
    expected: float | None = None
    chosen: tuple[str, ...] = ()

    @property
    def is_worse(self) -> bool:
        """Whether an entry of the same rule is significantly better."""
        return self.rank is not None and self.rank[0] > 1


@dataclass(frozen=True)
class Column:
    """A task, a group, or the average over all tasks.

    Attributes:
        name: of the task, with what tells columns of this task apart, or of the group, or `AVERAGE`.
        kind: "task", "group" or "average".
        metric: "acc", ...
        percent: the metric lies between 0 and 1, and is shown as percent.
        higher_is_better: of the metric.
        weights: of its tasks' columns; they add up to 1. One for a task.
        task: the name of the task; "" for others.
    """

    name: str
    kind: str
    metric: str
    percent: bool
    higher_is_better: bool
    weights: Mapping[str, float]
    task: str = ""

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
    """A row: a checkpoint under a method with its arguments.

    Attributes:
        name: short and unique on the board, fit for an address: a digest.
        checkpoint: its name, the end of the path for a folder.
        details: revision, dtype and what else tells checkpoints of one name apart; "" if nothing does.
        method: "hf", "icl", ...
        arguments: as text: "T=5, eta=0.01".
        conditions: what else tells this board's rows apart: "8 shots", "chat"; "" if nothing does.
        runs: all of its runs, by date.
        cells: by the column's name; those without a result are missing. The tasks of a column that are no columns
            themselves are there too, not compared with anything.
        parameters: how many the model has; None if unknown.
        tokens, seconds: run through the model, and of a run, a document; None if the files do not say.
        recorded: what the files say of how the runs were made, as text.
        shared: tokens and seconds are those of a study's cells, which share passes.
        rule: the name of the decision rule of its results; None of those of the model itself, which are an entry of
            their own.
        reads: what the rule reads beside the document and the demonstrations: "transductive", "labels: 2016".
        shots: the numbers of demonstrations, the least and the most of its tasks.
    """

    name: str
    checkpoint: str
    details: str
    method: str
    arguments: str
    conditions: str
    runs: tuple[Run, ...]
    cells: Mapping[str, BoardCell]
    parameters: int | None = None
    tokens: float | None = None
    seconds: float | None = None
    recorded: str = ""
    shared: bool = False
    rule: str | None = None
    reads: tuple[str, ...] = ()
    shots: tuple[float, float] = (0, 0)

    @property
    def is_transductive(self) -> bool:
        """Whether its decisions depend on the other documents that were evaluated."""
        return "transductive" in self.reads

    @property
    def label(self) -> str:
        """The method with its arguments, the decision rule, and conditions."""
        rule = f"decide: {self.rule}" if self.rule is not None else ""
        return ", ".join(filter(None, [" ".join(filter(None, [self.method, self.arguments])), self.conditions, rule]))

    @property
    def on(self) -> str:
        """The checkpoint in words."""
        return f"{self.checkpoint} ({self.details})" if self.details else self.checkpoint


@dataclass(frozen=True, eq=False)
class Board:
    """All of it.

    Attributes:
        columns: the average first if there are several tasks, groups, then tasks.
        entries: by decision rule, the model itself first; under a rule the best first, by the first column.
        baseline: by an entry's name, the name of the entry that its differences are to, if it has one: on the same
            checkpoint and under the same rule.
        pairs: by the names of two entries, the first of them further up: by column, the first less the second. Columns
            on which the two are not paired are missing.
        summary: sentences that say what is best and what cannot be told apart.
        left_out: files that were not used.
        files: how many files were read.
        common: words for what all entries and columns have in common: "8 shots", "limit=60".
    """

    columns: tuple[Column, ...]
    entries: tuple[Entry, ...]
    baseline: Mapping[str, str]
    pairs: Pairs
    summary: tuple[str, ...]
    left_out: tuple[LeftOutFile, ...]
    files: int
    common: tuple[str, ...] = ()

    def majority(self, column: Column) -> float | None:
        """The score of always giving the most frequent answer, where all entries have the same documents."""
        majorities = {entry.cells[column.name].majority for entry in self.entries if column.name in entry.cells}
        return majorities.pop() if len(majorities) == 1 else None

    def named(self, name: str | None) -> Entry | None:
        """The entry of this name, if there is one."""
        return next((entry for entry in self.entries if entry.name == name), None)

    def sections(self) -> Mapping[str | None, Sequence[Entry]]:
        """The entries by decision rule."""
        return grouped(self.entries, lambda entry: entry.rule)
