"""What the result files of lm-eval say, in memory."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lm_eval_icl.results.form import RuleFacts, StudyFacts


@dataclass(frozen=True, eq=False)
class Answers:
    """What one run answered to one task, document by document, in the order of document ids.

    Two runs with equal `prompts` were asked the same: the same documents, under the same demonstrations in the same
    order and the same template. Their answers are paired.

    Attributes:
        doc_ids: (documents,) integers, rising.
        documents: digest of the documents and their targets.
        prompts: digest of the documents, their prompts and their targets.
        demonstrations: digest of the demonstrations of all prompts, whatever their order; equal for two orders of the
            same demonstrations. None if the prompts have none.
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


@dataclass(frozen=True, eq=False)
class TaskResult:
    """What one run gave on one task, by itself or under a decision rule.

    Attributes:
        task: its name.
        metric: the name of the metric that stands for the task: "acc", "exact_match", ...
        filter: lm-eval's name of the filter that stands for the task: "none", "strict-match", ...
        value: of the metric, as lm-eval's results have it.
        stderr: as lm-eval's results have it; None if they have none.
        higher_is_better: of the metric.
        aggregation: lm-eval's name: "mean", "f1", ...
        shots: demonstrations a prompt.
        documents: how many were scored.
        version: of the task.
        template: digest of what makes the prompts but the demonstrations: templates, delimiters, description, options,
            system instruction and chat template.
        drawn: how the demonstrations were chosen, if the results say so: "stratified", "first", ...
        answers: None if there is no samples file, or it is not used: `marks` say why.
        marks: what is wrong with this result, each a sentence.
        settings: what else the task's configuration says of the numbers, by name, as texts to compare: data, generation
            arguments, the filter, functions. What is not set is missing.
        rule: the decision rule that these values are under; None for those of the model itself.
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
    version: str
    template: str
    drawn: str | None
    answers: Answers | None
    marks: tuple[str, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    rule: RuleFacts | None = None

    @property
    def reported_filter(self) -> str:
        """lm-eval's name of the filter whose values these are: a decision rule is a filter of its own."""
        return self.filter if self.rule is None else self.rule.name


@dataclass(frozen=True, eq=False)
class Run:
    """One run of lm-eval: a results file, with its samples.

    Attributes:
        path: the file.
        digest: of lm-eval's results, without what `collect` adds: the same for copies of one run.
        model: lm-eval's name of the model: "hf", "deepthink", ...
        pretrained: the checkpoint.
        revision: its revision, or the commit that lm-eval found; "" if unknown.
        dtype: "float32", ...; "" if unknown.
        arguments: all of `model_args`, but those above.
        icl: `config.icl` of this package's models; {} of others.
        seed: of the demonstrations (`fewshot_seed`).
        order: which order of the demonstrations of this seed, in a study; 0 elsewhere.
        date: seconds since 1970.
        limit: lm-eval's `--limit`.
        tasks: by name, what the model itself gave.
        groups: of the run: name -> its tasks (no groups among them) with their weights in lm-eval's own value, which
            add up to 1.
        results: the whole of lm-eval's results file, as read.
        model_facts: what else the file says of the model, by name, as texts to compare: a digest of its files, how many
            parameters it has, how it was trained.
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
    date: float
    limit: float | None
    tasks: Mapping[str, TaskResult]
    groups: Mapping[str, Mapping[str, float]]
    results: Mapping[str, Any]
    model_facts: Mapping[str, str] = field(default_factory=dict)
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

    @functools.cached_property
    def study(self) -> StudyFacts:
        """What a study says of its cell; equal to `StudyFacts()` for other runs."""
        says = self.icl.get("study")
        return StudyFacts.model_validate(says if isinstance(says, dict) else {})


@dataclass(frozen=True)
class LeftOutFile:
    """A file that is not used, and why, in a sentence."""

    path: Path
    why: str
