"""The board: entries (rows), tasks, groups and the average (columns), and what can be said of each cell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lm_eval_icl.results.records import Answers, LeftOutFile, Run, TaskResult
from lm_eval_icl.results.statistics import Difference, Estimate

AVERAGE = "average"
SIGNIFICANT = 0.05  # a p-value up to this
# By the names of two entries and the column: the first less the second.
Pairs = Mapping[tuple[str, str], Mapping[str, Difference]]


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
    """The same demonstrations in one order or several.

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
        difference: this entry less the baseline; None for the baseline itself, and where it is not paired.
        p_holm: the p-value of `difference`, adjusted for all entries of the column (Holm).
        rank: the first and last rank that the column's paired differences leave possible; None without any. Ranks are
            among entries that are all transductive, or all not.
        tied_with_best: no entry is significantly better (the range of ranks begins with 1).
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
    rank: tuple[int, int] | None = None
    tied_with_best: bool = False
    sets: tuple[PromptSet, ...] = ()
    sensitivity: Estimate | None = None
    corrected: float | None = None
    marks: tuple[str, ...] = ()
    left_out: int = 0
    predicted: Mapping[str, float] = field(default_factory=dict)
    majority: float | None = None
    expected: float | None = None
    chosen: tuple[str, ...] = ()


@dataclass(frozen=True)
class Column:
    """A task, a group, or the average over all tasks.

    Attributes:
        name: of the task or group, or `AVERAGE`.
        kind: "task", "group" or "average".
        metric: "acc", ...
        percent: the metric lies between 0 and 1, and is shown as percent.
        higher_is_better: of the metric.
        weights: of its tasks; they add up to 1. One task for a task.
    """

    name: str
    kind: str
    metric: str
    percent: bool
    higher_is_better: bool
    weights: Mapping[str, float]

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
    """A row: a checkpoint under a method with its arguments, shots and prompts.

    Attributes:
        name: short and unique on the board, fit for an address: a digest.
        checkpoint: its name, the end of the path for a folder.
        details: revision, dtype and what else tells checkpoints of one name apart; "" if nothing does.
        method: "hf", "icl", ...
        arguments: as text: "T=5, eta=0.01".
        conditions: what else tells rows apart: "8 shots", "prompts 3fa2c1", "limit=100"; "" if nothing does.
        runs: all of its runs, by date.
        cells: by the column's name; those without a result are missing. The tasks of a column that are no columns
            themselves are there too, not compared with anything.
        parameters: how many the model has; None if unknown.
        tokens: run through the model a document; None if the files do not say.
        seconds: of a run, a document; None if the files do not say.
        command: the commands that make the runs again.
        shared: tokens and seconds are those of a study's cells, which share passes.
        rule: the name of the decision rule of its results; None of those of the model itself, which are an entry of
            their own.
        reads: what the rule reads beside the document and the demonstrations, in words that end `conditions`:
            "transductive", "labels: 2016", "pool: 64".
    """

    name: str
    checkpoint: str
    details: str
    method: str
    arguments: str
    conditions: str
    runs: tuple[Run, ...]
    cells: Mapping[str, BoardCell]
    parameters: int | None
    tokens: float | None
    seconds: float | None
    command: str
    shared: bool = False
    rule: str | None = None
    reads: tuple[str, ...] = ()

    @property
    def is_transductive(self) -> bool:
        """Whether its decisions depend on the other documents that were evaluated."""
        return "transductive" in self.reads

    @property
    def label(self) -> str:
        """The method with its arguments and conditions."""
        return ", ".join(filter(None, [" ".join(filter(None, [self.method, self.arguments])), self.conditions]))

    @property
    def on(self) -> str:
        """The checkpoint in words."""
        return f"{self.checkpoint} ({self.details})" if self.details else self.checkpoint


@dataclass(frozen=True, eq=False)
class Board:
    """All of it.

    Attributes:
        columns: the average first if there are several tasks, groups, then tasks.
        entries: the best first, by the first column; those that are transductive behind all others.
        baseline: by an entry's name, the name of its baseline, if it has one: an entry on the same checkpoint. That of
            an entry under a decision rule is the entry of the same runs without it.
        pairs: by the names of two entries, the first of them further up: by column, the first less the second. Columns
            on which the two are not paired are missing.
        summary: sentences that say what is best and what cannot be told apart.
        left_out: files that were not used.
        files: how many files were read, and how many runs they hold.
    """

    columns: tuple[Column, ...]
    entries: tuple[Entry, ...]
    baseline: Mapping[str, str]
    pairs: Pairs
    summary: tuple[str, ...]
    left_out: tuple[LeftOutFile, ...]
    files: int

    def majority(self, column: Column) -> float | None:
        """The score of always giving the most frequent answer, where all entries have the same documents."""
        majorities = {entry.cells[column.name].majority for entry in self.entries if column.name in entry.cells}
        return majorities.pop() if len(majorities) == 1 else None

    def is_against_itself(self, entry: Entry) -> bool:
        """Whether an entry's baseline is the entry of the same runs without its decision rule."""
        base = next((other for other in self.entries if other.name == self.baseline.get(entry.name)), None)
        if base is None or base.rule is not None or entry.rule is None:
            return False
        return (base.on, base.method, base.arguments) == (entry.on, entry.method, entry.arguments)
