"""What the result files of lm-eval say, in memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
    """A finite number; None for anything else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
    return float(value) if is_number and math.isfinite(value) else None


def count(value: Any) -> int | None:
    """A whole number from 0 on; None for anything else."""
    return value if type(value) is int and 0 <= value < 2**53 else None


def mapping(value: Any) -> dict[str, Any]:
    """An object of JSON; an empty one for anything else."""
    return value if isinstance(value, dict) else {}


@dataclass(frozen=True, eq=False)
class Answers:
    """What one run answered to one task, document by document, in the order of document ids.

    Two runs with equal `prompts` were asked the same: the same documents, under the same demonstrations in the same
    order and the same template. Their answers are paired.

    Attributes:
        doc_ids: (documents,) integers, rising.
        documents: digest of the documents and their targets.
        prompts: digest of the documents, their prompts and their targets.
        demonstrations: digest of the demonstrations of all prompts, whatever their order. None without any.
        items: (documents,) or (documents, 2) floats: what lm-eval's metric aggregates, a score for most metrics, gold
            and predicted answer for F1 and MCC.
        predictions: (documents,) integers: the option with the highest log-likelihood; None if there are no options.
        chance: the accuracy of a random choice: the mean of 1 / options; None if there are no options.
        golds: (documents,) integers: the option that is right; None if that is not known of every document.
    """

    doc_ids: np.ndarray
    documents: str
    prompts: str
    demonstrations: str | None
    items: np.ndarray
    predictions: np.ndarray | None
    chance: float | None
    golds: np.ndarray | None = None


@dataclass(frozen=True)
class RuleFacts:
    """What a run says of a decision rule of one of its tasks (`config.icl.decided`).

    Attributes:
        name: of the filter that has its values: "batch:m=64:of=pool".
        arguments: all of the rule's, those with their default too.
        transductive: a document's decision depends on the other documents that are evaluated.
        labels: how many labels the rule uses beside those of the demonstrations.
        corpus: of how many documents it takes words.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    transductive: bool = False
    labels: int | None = None
    corpus: int | None = None


@dataclass(frozen=True)
class StudyFacts:
    """What a study says of its cell: `config.icl.study` of the results, and the cell's part of `study.json`.

    Attributes:
        split: "test", or "dev": the set on which arguments are chosen.
        order: which order of the demonstrations of its seed.
        demonstrations: how they were chosen, if the study says so.
        model: the checkpoint that the study names.
        training: the name of the training that made this model from it.
        weights: digest of the files of the model.
        arguments: of the method.
        chosen: the names of what was chosen on the dev set: arguments, "seeds", "decide".
        rule: the decision rule that was chosen; None for what the model itself says.
        metric: what stands for the task; None for the usual one.
        expected: the paper's numbers, by column.
        curve: what was measured on the dev set: {"arguments": {...}, "score": x} each.
        shared: "cells" that were scored together, of how many "orders", in how many "seconds".
    """

    split: str | None = None
    order: int = 0
    demonstrations: str | None = None
    model: str | None = None
    training: str | None = None
    weights: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    chosen: tuple[str, ...] = ()
    rule: str | None = None
    metric: str | None = None
    expected: Mapping[str, Any] = field(default_factory=dict)
    curve: Sequence[Mapping[str, Any]] = ()
    shared: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, cell: Mapping[str, Any], study: Mapping[str, Any]) -> StudyFacts:
        """From the two objects of JSON; what has another type is as if it were missing. `study.json` comes first."""
        texts = ("split", "demonstrations", "model", "training", "weights", "rule", "metric")
        both = {**cell, **study}
        points = both["curve"] if isinstance(both.get("curve"), list) else []
        return cls(
            **{name: value for name in texts if isinstance(value := cell.get(name), str)},
            order=count(cell.get("order")) or 0,
            arguments=mapping(cell.get("arguments")),
            chosen=tuple(x for x in cell.get("chosen") or () if isinstance(x, str)),
            expected=mapping(both.get("expected")),
            curve=[p for p in points if number(at(p, "score")) is not None and isinstance(at(p, "arguments"), dict)],
            shared=mapping(both.get("shared")),
        )


@dataclass(frozen=True, eq=False)
class TaskResult:
    """What one run gave on one task, by itself or under a decision rule.

    Attributes:
        task: its name.
        metric: that stands for the task: "acc", "exact_match", "ece", ...
        filter: lm-eval's name of the filter that stands for the task: "none", "strict-match", ...
        value: of the metric.
        stderr: as lm-eval's results have it; None if they have none.
        higher_is_better: of the metric.
        aggregation: lm-eval's name: "mean", "f1", ...
        shots: demonstrations a prompt.
        documents: how many were scored.
        answers: None if there are no samples, or they are not used: `marks` say why.
        marks: what is wrong with this result, each a sentence.
        rule: the decision rule that these values are under; None for those of the model itself.
        column: what was asked, the declared fields of this kind by name (`fields`).
        switches: fields that separate rows where a cell would hold two values; None where the file does not say.
    """

    task: str
    metric: str
    filter: str
    value: float
    stderr: float | None
    higher_is_better: bool
    aggregation: str
    shots: int
    documents: int
    answers: Answers | None
    marks: tuple[str, ...] = ()
    rule: RuleFacts | None = None
    column: Mapping[str, str] = field(default_factory=dict)
    switches: Mapping[str, str | None] = field(default_factory=dict)

    @property
    def reported_filter(self) -> str:
        """lm-eval's name of the filter whose values these are: a decision rule is a filter of its own."""
        return self.filter if self.rule is None else self.rule.name


@dataclass(frozen=True, eq=False)
class Run:
    """One run of lm-eval: a results file, with its samples.

    Attributes:
        path: the file.
        digest: of lm-eval's results: the same for copies of one run.
        model: the method: `config.icl.method`, or lm-eval's name of the model: "hf", ...
        pretrained, revision, dtype: of the checkpoint; "" if unknown.
        arguments: all of `model_args`, but those above.
        icl: `config.icl` of this package's models; {} of others.
        seed: of the demonstrations (`fewshot_seed`).
        order: which order of the demonstrations of this seed, in a study; 0 elsewhere.
        format: of the prompts' format, 0 for the task's own.
        date: seconds since 1970.
        limit: lm-eval's `--limit`.
        tasks: by name, what the model itself gave.
        groups: of the run: name -> its tasks (no groups among them) with their weights in lm-eval's own value.
        results: the whole of lm-eval's results file, as read.
        study: what a study says of it.
        rows: who answered, the declared fields of this kind (`fields`) in three parts: "model", "method", "setting".
        cost: "alone", or "shared": of a study's cell, whose tokens and seconds are its part of those of all cells that
            were scored together, and whose seconds are those of scoring, not of the whole run. The two do not compare.
        tokens: run through the model; None if the file does not say.
        seconds: that the run took; None if the file does not say.
        decided: what the same answers give under decision rules, one for each task and rule.
    """

    path: Path
    digest: str
    model: str
    pretrained: str
    revision: str
    dtype: str
    arguments: Mapping[str, Any]
    icl: Mapping[str, Any]
    seed: int | None
    order: int
    format: int
    date: float
    limit: float | None
    tasks: Mapping[str, TaskResult]
    groups: Mapping[str, Mapping[str, float]]
    results: Mapping[str, Any]
    study: StudyFacts = StudyFacts()
    rows: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    cost: str = "alone"
    tokens: float | None = None
    seconds: float | None = None
    decided: tuple[TaskResult, ...] = ()

    @property
    def all_results(self) -> tuple[TaskResult, ...]:
        """The results of all tasks, first those of the model itself and then those under decision rules."""
        return *self.tasks.values(), *self.decided

    @property
    def answered(self) -> int:
        """How many of these results have answers document by document."""
        return sum(result.answers is not None for result in self.all_results)


@dataclass(frozen=True)
class LeftOutFile:
    """A file that is not used, and why, in a sentence."""

    path: Path
    why: str
