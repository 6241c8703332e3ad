"""The contents of lm-eval's result files, as dataclasses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lm_eval_icl.results.compared import CHOSEN as CHOSEN
from lm_eval_icl.results.compared import NOT_RECORDED, Fields
from lm_eval_icl.results.fields import RuleFacts, StudyFacts, at, count, mapping
from lm_eval_icl.results.fields import number as number


@dataclass(frozen=True, eq=False)
class Answers:
    """The answers of one run to the documents of one task, in the order of document ids.

    If two runs have equal `prompts`, their answers are paired.
    """

    documents: str  # digest of the documents and their targets
    prompts: str  # digest of the documents, their prompts and their targets
    # Digest of the demonstrations of all prompts before any cut, in any order. None without any.
    demonstrations: str | None
    # (documents,) or (documents, 2) floats that lm-eval's metric aggregates: a score for most
    # metrics, the right and the predicted answer for F1 and MCC.
    items: np.ndarray
    # (documents,) integers: the most probable option; None if there are no options.
    predictions: np.ndarray | None
    # (documents,) integers: the right option; None unless it is known for every document.
    golds: np.ndarray | None = None
    # (documents, options) values of the options, -inf beyond a document's options; None unless all
    # are known.
    logprobs: np.ndarray | None = None
    # Digest of the predicted options or texts; None unless all are known.
    predicted: str | None = None
    each_own: bool = False  # whether most documents have demonstrations of their own


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
    study: StudyFacts = field(default_factory=StudyFacts)
    # The study that made this run as a cell; "" for other runs. Cells of one study do not confirm
    # each other.
    study_name: str = ""
    # The results under decision rules, one for each task and rule.
    decided: tuple[TaskResult, ...] = ()

    @property
    def fields(self) -> Fields:
        """The fields of the first task. All tasks have the same model, method and setting."""
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
        """Whether no answer was read from a cache; None if that is not recorded."""
        responses = at(self.results, "provenance", "responses")
        if responses is not None:
            was_read = count(at(responses, "read"))
            return None if was_read is None else was_read == 0
        config = mapping(self.results.get("config"))
        return True if config.get("use_cache", "") is None else None

    @property
    def answered(self) -> int:
        """How many results have answers."""
        return sum(result.answers is not None for result in self.all_results)

    @property
    def all_results(self) -> tuple[TaskResult, ...]:
        """The results of all tasks: first of the model's own answers, then under decision rules."""
        return *self.tasks.values(), *self.decided


@dataclass(frozen=True)
class LeftOutFile:
    """A file that is not used, and a sentence that says why."""

    path: Path
    why: str
