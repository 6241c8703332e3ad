"""What the result files of lm-eval say, in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np


class Unusable(ValueError):
    """Something in a file that cannot be used; the message is a sentence that says why."""


def at(value: Any, *keys: str) -> Any:
    """What is at these keys of a file; None if it is not there."""
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def number(value: Any) -> float | None:
    """A number whose square is one, too; None for anything else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e100
    return float(value) if is_number else None


def count(value: Any) -> int | None:
    """A whole number from 0 on; None for anything else."""
    return value if type(value) is int and 0 <= value < 2**53 else None


def mapping(value: Any) -> dict[str, Any]:
    """An object of JSON; an empty one for anything else."""
    return value if isinstance(value, dict) else {}


@dataclass(frozen=True, eq=False)
class Answers:
    """What one run answered to one task, document by document, in the order of document ids.

    Two runs with equal `prompts` were asked the same, and their answers are paired.
    """

    documents: str  # digest of the documents and their targets
    prompts: str  # digest of the documents, their prompts and their targets
    demonstrations: str | None  # digest of the demonstrations of all prompts, whatever their order. None without any
    # (documents,) or (documents, 2) floats: what lm-eval's metric aggregates, a score for most metrics, gold and
    # predicted answer for F1 and MCC.
    items: np.ndarray
    # (documents,) integers: the option with the highest log-likelihood; None if there are no options.
    predictions: np.ndarray | None
    # (documents,) integers: the option that is right; None if that is not known of every document.
    golds: np.ndarray | None = None
    # (documents, options) what the options are decided by, -inf beyond a document's options; None if not all are known.
    logprobs: np.ndarray | None = None


@dataclass(frozen=True)
class RuleFacts:
    """What a run says of a decision rule of one of its tasks (its metadata, `decided`)."""

    name: str  # of the filter that has its values: "batch:m=64:of=pool"
    arguments: Mapping[str, Any] = field(default_factory=dict)  # all of the rule's, those with their default too
    # What the rule reads beside the document and the demonstrations: "transductive" (a decision depends on the other
    # documents), "labels: 2016", "pool: 64" (documents of the few-shot split, without labels).
    reads: tuple[str, ...] = ()

    @classmethod
    def of(cls, name: str, facts: Mapping[str, Any]) -> RuleFacts:
        """From an object of JSON."""
        arguments, labels = mapping(facts.get("arguments")), count(facts.get("labels"))
        pool = (count(arguments.get("m")) or count(facts.get("corpus"))) if arguments.get("of") == "pool" else None
        numbers = {"labels": labels, "pool": pool}
        reads = [f"{what}: {number}" for what, number in numbers.items() if number is not None]
        return cls(name, arguments, (*("transductive",) * bool(facts.get("transductive")), *reads))


@dataclass(frozen=True)
class StudyFacts:
    """What a study says of its cell: `config.icl.study` of the results, and the cell's part of `study.json`."""

    split: str | None = None  # "test", or "dev": the set on which arguments are chosen
    order: int = 0  # which order of the demonstrations of its seed
    model: str | None = None  # the checkpoint that the study names
    training: str | None = None  # the name of the training that made this model from it
    chosen: tuple[str, ...] = ()  # the names of what was chosen on the dev set: arguments, "seeds", "decide"
    rule: str | None = None  # the decision rule that was chosen; None for what the model itself says
    metric: str | None = None  # what stands for the task; None for the usual one
    expected: Mapping[str, Any] = field(default_factory=dict)  # the paper's numbers, by column

    @classmethod
    def of(cls, cell: Mapping[str, Any], study: Mapping[str, Any]) -> StudyFacts:
        """From the two objects of JSON; what has another type is as if it were missing."""
        names = ("split", "model", "training", "rule", "metric")
        texts: dict[str, Any] = {name: x for name in names if isinstance(x := cell.get(name), str)}
        chosen = cell.get("chosen")
        return cls(
            **texts,
            order=count(cell.get("order")) or 0,
            chosen=tuple(x for x in (chosen if isinstance(chosen, list) else ()) if isinstance(x, str)),
            expected=mapping(study.get("expected", cell.get("expected"))),
        )


@dataclass(frozen=True, eq=False)
class TaskResult:
    """What one run gave on one task, by itself or under a decision rule."""

    task: str  # its name
    metric: str  # that stands for the task: "acc", "exact_match", "ece", ..
    filter: str  # lm-eval's name of the filter that stands for the task: "none", "strict-match", ..
    value: float  # of the metric
    stderr: float | None  # as lm-eval's results have it; None if they have none
    higher_is_better: bool  # of the metric
    aggregation: str  # lm-eval's name: "mean", "f1", ..
    shots: int  # demonstrations a prompt
    documents: int  # how many were scored
    answers: Answers | None  # None if there are no samples, or they are not used: `marks` say why
    marks: tuple[str, ...] = ()  # what is wrong with this result, each a sentence
    rule: RuleFacts | None = None  # the decision rule that these values are under; None for those of the model itself
    # What was asked, the fields of this kind by name (`fields`).
    column: Mapping[str, str] = field(default_factory=dict)
    switches: Mapping[str, str | None] = field(default_factory=dict)  # the same; None where the file does not say

    @property
    def reported_filter(self) -> str:
        """lm-eval's name of the filter whose values these are: a decision rule is a filter of its own."""
        return self.filter if self.rule is None else self.rule.name


@dataclass(frozen=True, eq=False)
class Run:
    """One run of lm-eval: a results file, with its samples."""

    path: Path  # the file
    digest: str  # of lm-eval's results: the same for copies of one run
    model: str  # the method: `config.icl.method`, or lm-eval's name of the model: "hf", ..
    pretrained: str  # of the checkpoint; "" if unknown
    revision: str
    dtype: str
    arguments: Mapping[str, Any]  # all of `model_args`, but those above
    icl: Mapping[str, Any]  # `config.icl` of this package's models; {} of others
    seed: int | None  # of the demonstrations (`fewshot_seed`)
    order: int  # which order of the demonstrations of this seed, in a study; 0 elsewhere
    date: float  # seconds since 1970
    limit: float | None  # lm-eval's `--limit`
    tasks: Mapping[str, TaskResult]  # by name, what the model itself gave
    groups: Mapping[str, Mapping[str, float]]  # by name, their tasks with the weights in lm-eval's own value
    results: Mapping[str, Any]  # the whole of lm-eval's results file, as read
    study: StudyFacts = StudyFacts()  # what a study says of it
    # Who answered, the declared fields of this kind (`fields`) in three parts: "model", "method", "setting".
    rows: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    decided: tuple[TaskResult, ...] = ()  # what the same answers give under decision rules, one for each task and rule
    format: int = 0  # of the prompts (`--metadata format=`); 0 is the task's own

    @property
    def all_results(self) -> tuple[TaskResult, ...]:
        """The results of all tasks, first those of the model itself and then those under decision rules."""
        return *self.tasks.values(), *self.decided


@dataclass(frozen=True)
class LeftOutFile:
    """A file that is not used, and why, in a sentence."""

    path: Path
    why: str
