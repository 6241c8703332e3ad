"""The contents of lm-eval's result files, as dataclasses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

CHOSEN = "chosen on dev"
NOT_RECORDED = "not recorded"


class Unusable(ValueError):
    """Something in a file that cannot be used; the message is a sentence that says why."""


def at(value: Any, *keys: str) -> Any:
    """The value under nested keys of a file; None if it is not there."""
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def number(value: Any) -> float | None:
    """A number whose square is finite; None for anything else."""
    is_number = (
        isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e100
    )
    return float(value) if is_number else None


def count(value: Any) -> int | None:
    """A whole number from 0 on; None for anything else."""
    return value if type(value) is int and 0 <= value < 2**53 else None


def mapping(value: Any) -> dict[str, Any]:
    """An object of JSON; an empty one for anything else."""
    return value if isinstance(value, dict) else {}


@dataclass(frozen=True, eq=False)
class Answers:
    """The answers of one run to the documents of one task, in the order of document ids.

    If two runs have equal `prompts`, their answers are paired.
    """

    documents: str  # digest of the documents and their targets
    prompts: str  # digest of the documents, their prompts and their targets
    # Digest of the demonstrations of all prompts before any cut, in any order. None without any.
    demonstrations: str | None
    # (documents,) or (documents, 2) floats that lm-eval's metric aggregates: a score for most metrics, the right and
    # the predicted answer for F1 and MCC.
    items: np.ndarray
    # (documents,) integers: the option with the highest log-likelihood; None if there are no options.
    predictions: np.ndarray | None
    # (documents,) integers: the right option; None unless it is known for every document.
    golds: np.ndarray | None = None
    # (documents, options) values of the options, -inf beyond a document's options; None unless all are known.
    logprobs: np.ndarray | None = None
    # Digest of the predicted options or texts; None unless all are known.
    predicted: str | None = None
    each_own: bool = False  # whether most documents have demonstrations of their own


@dataclass(frozen=True)
class RuleFacts:
    """The facts that a run reports about a decision rule of one of its tasks (`decided` in the task's metadata)."""

    name: str  # the name of the filter with the rule's values: "batch:m=64:of=pool"
    # All arguments of the rule, with defaults.
    arguments: Mapping[str, Any] = field(default_factory=dict)
    # What the rule uses besides the prompt: "transductive" (a decision depends on the other documents), "labels: 2016"
    # (labeled documents), "pool: 64" (documents of the few-shot split, without labels).
    reads: tuple[str, ...] = ()

    @classmethod
    def of(cls, name: str, facts: Mapping[str, Any]) -> RuleFacts:
        """From an object of JSON."""
        arguments = mapping(facts.get("arguments"))
        numbers = {"labels": count(facts.get("labels"))}
        if arguments.get("of") == "pool":
            numbers["pool"] = count(arguments.get("m")) or count(facts.get("corpus"))
        reads = ["transductive"] if facts.get("transductive") else []
        reads += [f"{what}: {number}" for what, number in numbers.items() if number is not None]
        return cls(name, arguments, tuple(reads))


@dataclass(frozen=True)
class StudyFacts:
    """A study's facts about a cell: `config.icl.study` of the results, and the cell's part of `study.json`."""

    split: str | None = None  # "test", or "dev": the set on which arguments are chosen
    order: int = 0  # the number of the order of the seed's demonstrations
    model: str | None = None  # the checkpoint that the study names
    training: str | None = None  # the name of the training that made this model from the checkpoint
    # The settings that were chosen on the dev set: names of arguments, "seeds", "decide".
    chosen: tuple[str, ...] = ()
    rule: str | None = None  # the decision rule that was chosen; None for the model's own answers
    metric: str | None = None  # the metric of the task; None for the usual one
    expected: Mapping[str, Any] = field(default_factory=dict)  # the paper's numbers, by column

    @classmethod
    def of(cls, cell: Mapping[str, Any], study: Mapping[str, Any] | None = None) -> StudyFacts:
        """From the two objects of JSON. Values of a wrong type count as missing."""
        names = ("split", "model", "training", "rule", "metric")
        texts: dict[str, Any] = {name: x for name in names if isinstance(x := cell.get(name), str)}
        chosen = cell.get("chosen")
        if not isinstance(chosen, list):
            chosen = []
        return cls(
            **texts,
            order=count(cell.get("order")) or 0,
            chosen=tuple(name for name in chosen if isinstance(name, str)),
            expected=mapping((study or {}).get("expected", cell.get("expected"))),
        )


@dataclass(frozen=True, eq=False)
class Fields:
    """The compared fields of a task in a results file, as texts by name (`results.fields`)."""

    model: Mapping[str, str]
    method: Mapping[str, str]
    setting: Mapping[str, str]
    switches: Mapping[str, str]
    facts: Mapping[str, str]
    column: Mapping[str, str]
    seed: int | None = None  # the seed of the demonstrations (`fewshot_seed`)
    order: int = 0  # the number of the order of this seed's demonstrations, in a study
    format: int = 0  # the format of the prompts; 0 is the task's own
    demonstration_rows: str = ""  # digest of the demonstrations' rows before any cut, if recorded


@dataclass(frozen=True, eq=False)
class TaskResult:
    """The result of one run on one task, without or with a decision rule."""

    task: str  # the name of the task
    metric: str  # the metric that stands for the task: "acc", "exact_match", "ece", ..
    filter: str  # lm-eval's name of the filter that stands for the task: "none", "strict-match", ..
    value: float  # the value of the metric
    stderr: float | None  # lm-eval's standard error; None if the file has none
    higher_is_better: bool  # whether higher values of the metric are better
    aggregation: str  # lm-eval's name of the metric's aggregation: "mean", "f1", ..
    shots: int  # how many demonstrations a prompt has
    documents: int  # how many documents were scored
    answers: Answers | None  # None if there are no samples, or they are not used: `marks` say why
    fields: Fields
    marks: tuple[str, ...] = ()  # sentences about what is wrong with this result
    rule: RuleFacts | None = None  # the decision rule; None for the model's own answers
    filter_text: str = ""  # the filter with its settings

    @property
    def column(self) -> Mapping[str, str]:
        """The fields that say what was asked."""
        return {
            **self.fields.column,
            "metric": self.metric,
            "filter": self.filter_text,
            "documents": str(self.documents),
        }

    @property
    def documents_digest(self) -> str:
        return NOT_RECORDED if self.answers is None else self.answers.documents

    @property
    def reported_filter(self) -> str:
        """lm-eval's name of the filter that has these values. A decision rule is a filter, too."""
        return self.filter if self.rule is None else self.rule.name


@dataclass(frozen=True, eq=False)
class Run:
    """One run of lm-eval: a results file, with its samples."""

    path: Path  # the file
    digest: str  # a digest of lm-eval's results: the same for copies of one run
    arguments: Mapping[str, Any]  # the arguments in `model_args`, without the three above
    icl: Mapping[str, Any]  # `config.icl` of this package's models; {} for other models
    date: float  # seconds since 1970
    limit: float | None  # lm-eval's `--limit`
    tasks: Mapping[str, TaskResult]  # task -> the result of the model's own answers
    # Group -> task -> its weight in lm-eval's value of the group.
    groups: Mapping[str, Mapping[str, float]]
    results: Mapping[str, Any]  # the whole content of lm-eval's results file
    study: StudyFacts = StudyFacts()
    # The study that made this run as a cell; "" for other runs. Cells of one study do not confirm each other.
    study_name: str = ""
    # The results under decision rules, one for each task and rule.
    decided: tuple[TaskResult, ...] = ()

    @property
    def fields(self) -> Fields:
        """The fields of the first task. All tasks of a run have the same model, method and setting."""
        return next(iter(self.tasks.values())).fields

    @property
    def model(self) -> str:
        """The method, or lm-eval's name of the model: "hf", .."""
        return self.fields.method.get("method", "")

    @property
    def pretrained(self) -> str:
        """The checkpoint's name; "" if unknown."""
        return self.fields.model.get("checkpoint", "")

    @property
    def revision(self) -> str:
        return self.fields.model.get("revision", "")

    @property
    def dtype(self) -> str:
        return self.fields.model.get("dtype", "")

    @property
    def seed(self) -> int | None:
        return self.fields.seed

    @property
    def order(self) -> int:
        return self.fields.order

    @property
    def format(self) -> int:
        return self.fields.format

    @property
    def is_computed(self) -> bool | None:
        """Whether all answers were computed, and none was read from a cache. None if that is not recorded."""
        responses = at(self.results, "provenance", "responses")
        if responses is not None:
            was_read = count(at(responses, "read"))
            return None if was_read is None else was_read == 0
        config = mapping(self.results.get("config"))
        return True if config.get("use_cache", "") is None else None

    @property
    def all_results(self) -> tuple[TaskResult, ...]:
        """The results of all tasks: first of the model's own answers, then under decision rules."""
        return *self.tasks.values(), *self.decided


@dataclass(frozen=True)
class LeftOutFile:
    """A file that is not used, and a sentence that says why."""

    path: Path
    why: str
