"""A task of a results file: its value, and those under decision rules, with the answers that they are of."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lm_eval_icl.results.aggregations import AGGREGATIONS
from lm_eval_icl.results.calibration import METRICS as CALIBRATION
from lm_eval_icl.results.fields import column_fields, declared, switch_fields
from lm_eval_icl.results.records import (
    HUGE,
    Answers,
    RuleFacts,
    StudyFacts,
    TaskResult,
    Unusable,
    at,
    count,
    mapping,
    number,
)
from lm_eval_icl.results.samples import Asked, DocumentRow, answers_of, lines, rows_of

# lm-eval's metrics whose aggregation is not the mean, or of which less is better (lm_eval/api/metrics.py).
_METRICS: Mapping[str, tuple[str, bool]] = {
    "f1": ("f1", True),
    "mcc": ("matthews_corrcoef", True),
    "perplexity": ("perplexity", False),
    "word_perplexity": ("weighted_perplexity", False),
    "byte_perplexity": ("weighted_perplexity", False),
    "bits_per_byte": ("bits_per_byte", False),
    "brier_score": ("brier_score", False),
    "bleu": ("bleu", True),
    "chrf": ("chrf", True),
    "chrf++": ("chrf++", True),
    "ter": ("ter", False),
    "bypass": ("bypass", True),
}
_OF_PAIRS = ("f1", "matthews_corrcoef", "weighted_perplexity", "bits_per_byte", "macro_f1", "ece")


@dataclass(frozen=True)
class ResultsFile:
    """A file that may hold results."""

    path: Path
    named: bool  # it was named itself, not found in a folder
    root: Path  # links out of this folder are not followed


def is_inside(path: Path, root: Path) -> bool:
    """Whether a path is a file, and no link out of a folder."""
    try:
        return path.is_file() and (not path.is_symlink() or path.resolve().is_relative_to(root))
    except (OSError, RuntimeError):  # a link to itself
        return False


def sentence(text: object) -> str:
    """On one line and not too long, whatever names a file has."""
    words = " ".join(str(text).split()).removesuffix(".")
    return f"{words[:600]}..." if len(words) > 600 else f"{words}."


def results_of(
    results: Mapping[str, Any],
    task: str,
    study: StudyFacts,
    documents: Sequence[DocumentRow] | Unusable,
    wanted: str | None,
    notes: list[str],
) -> list[TaskResult]:
    """A task's result, then those under decision rules; each with its answers, or with marks that say why they are not
    used. Sentences on rules that are left out are added to `notes`. `Unusable` is raised if the task has no number."""
    values, config = mapping(results["results"][task]), results["configs"][task]
    rules = mapping(at(config, "metadata", "decided"))
    for key, value in values.items():
        if "_stderr," in key and (number(value) or 0) < 0:
            raise Unusable(f"{key.partition(',')[0]} is {value:g}, and no standard error is negative")
    metric, of_filter, entry = _metric(values, config, wanted or study.metric, rules)
    aggregation, higher = _METRICS.get(metric, ("mean", True))
    aggregation = str(entry.get("aggregation", aggregation))
    is_of_probabilities = metric in CALIBRATION
    if is_of_probabilities:
        aggregation, higher = CALIBRATION[metric].aggregation, CALIBRATION[metric].higher_is_better
    if aggregation == "bypass":
        raise Unusable("it was run with --predict_only, without a metric")
    switches = switch_fields(results, task, study)
    size = count(at(results, "n-samples", task, "effective")) or count(values.get("sample_len")) or 0
    shown = at(results, "higher_is_better", task, metric)
    known = {*AGGREGATIONS, *(name for name, _ in _METRICS.values())}
    plain = TaskResult(
        task=task,
        metric=metric,
        filter=of_filter,
        value=math.nan,
        stderr=None,
        higher_is_better=(entry.get("higher_is_better", higher) if shown is None else shown) is not False,
        aggregation=aggregation if aggregation in known else "unknown",
        shots=int(number(int(switches["shots"] or 0)) or 0) if str(switches["shots"]).isdecimal() else 0,
        documents=size,
        answers=None,
        column=column_fields(results, task, metric, of_filter, size),
        switches=switches,
    )
    of_task = [plain]
    for name, facts in rules.items():
        if metric == "exact_match":  # of the most probable text, whatever the values of the options
            notes.append(f"task {task!r} under the decision rule {name!r} is left out: no rule changes exact_match")
        elif not isinstance(facts, dict) or type(facts.get("transductive")) is not bool:
            notes.append(f"task {task!r} under the decision rule {name!r} is left out: its record is damaged")
        else:
            labels, corpus = count(facts.get("labels")), count(facts.get("corpus"))
            rule = RuleFacts(name, mapping(facts.get("arguments")), facts["transductive"], labels, corpus)
            of_task.append(replace(plain, rule=rule))
    complete = []
    for result in of_task:
        try:
            if not is_of_probabilities:
                key = f"{metric},{result.reported_filter}"
                if (value := number(values.get(key))) is None:
                    says = f"its {metric} is {str(values[key])[:40]!r}, which is not a number"
                    raise Unusable(says if key in values else f"there is no {key}")
                stderr = number(values.get(f"{metric}_stderr,{result.reported_filter}"))
                result = replace(result, value=value, stderr=stderr)
            complete.append(_with_answers(result, documents))
        except Unusable as error:
            if result.rule is None:
                raise
            notes.append(f"task {task!r} under the decision rule {result.rule.name!r} is left out: {error}")
    return complete


def _metric(
    values: Mapping[str, Any], config: Mapping[str, Any], wanted: str | None, rules: Mapping[str, Any]
) -> tuple[str, str, Mapping[str, Any]]:
    """The metric that stands for a task, its first filter, and what the task's configuration says of it.

    The metric that is asked for comes first; a decision rule is a filter that does not stand for the task itself.
    `Unusable` is raised if the task has no metric.
    """
    filters: dict[str, str] = {}
    for key in values:
        metric, comma, of_filter = key.partition(",")
        if comma and not metric.endswith("_stderr") and of_filter not in rules:
            filters.setdefault(metric, of_filter)
    if wanted in CALIBRATION and filters:
        return str(wanted), next(iter(filters.values())), {}
    entries = _entries(config, filters)
    for metric in (*filter(None, [wanted]), "acc", "exact_match", *entries, *filters):
        if metric in filters:
            return metric, filters[metric], entries.get(metric, {})
    raise Unusable("it has no metric")


def _entries(config: Mapping[str, Any], metrics: Iterable[str]) -> dict[str, Mapping[str, Any]]:
    """What a task's configuration says of these metrics, in its order."""
    entries: dict[str, Mapping[str, Any]] = {}
    listed = config.get("metric_list")
    for entry in listed if isinstance(listed, list) else []:
        name = str(at(entry, "metric"))
        for metric in metrics:
            if name == metric or f"def {metric}(" in name:  # a metric that is a function has its source as its name
                entries.setdefault(metric, entry)
    return entries


def aggregated(rows: Sequence[DocumentRow], metric: str, config: Mapping[str, Any]) -> float | None:
    """A metric of a task's answers under one filter; None if it is not made of numbers of single documents.

    Raises:
        Unusable: there are no answers, or a document has no such number.
    """
    entry = _entries(config, [metric]).get(metric, {})
    aggregation = str(entry.get("aggregation", _METRICS.get(metric, ("mean", True))[0]))
    if aggregation not in AGGREGATIONS:
        return None
    items = answers_of(rows, metric, 0).items
    of = AGGREGATIONS["macro_f1" if metric == "metaicl" and items.ndim == 2 else aggregation]
    try:
        return float(of.value(of.features(items).sum(axis=0)))
    except ValueError as error:
        raise Unusable(str(error).removesuffix(".")) from None


def documents_of(file: ResultsFile, results: Mapping[str, Any], task: str) -> list[DocumentRow] | Unusable:
    """`rows_from_samples`, or why they cannot be used."""
    try:
        return rows_from_samples(file, results, task)
    except Unusable as error:
        return error


def rows_from_samples(file: ResultsFile, results: Mapping[str, Any], task: str) -> list[DocumentRow]:
    """The rows of the samples beside the results."""
    path = samples_file(file.path, task)
    if not os.path.lexists(path):
        return []
    if not is_inside(path, file.root):
        raise Unusable(f"{path.name} is a link out of its folder, or a device")
    return list(rows_of(lines(path), asked(results, task)))


def samples_file(results: Path, task: str) -> Path:
    """The file beside a results file in which lm-eval puts the samples of a task.

    Raises:
        Unusable: the task's name leads to another folder.
    """
    name = f"samples_{task}_{results.stem.rpartition('_')[2]}.jsonl"
    if Path(name).name != name:
        raise Unusable("its name is none of a file")
    return results.with_name(name)


def options(results: Mapping[str, Any], task: str) -> list[str]:
    """The names of the options, where all documents have the same: the configuration lists them."""
    choices = at(results, "configs", task, "doc_to_choice")
    are_names = isinstance(choices, list) and all(isinstance(name, str) for name in choices)
    return choices if are_names and len(set(choices)) == len(choices) else []


def asked(results: Mapping[str, Any], task: str) -> Asked:
    """What a task's results say about its samples."""
    values, config = mapping(results["results"][task]), results["configs"][task]
    metrics = dict.fromkeys(key.partition(",")[0] for key in values if "," in key and "_stderr," not in key)
    filters = [key.partition(",")[2] for key in values if "," in key]
    system, delimiter = results.get("system_instruction"), config.get("fewshot_delimiter", "\n\n")
    delimiter = delimiter if isinstance(delimiter, str) else ""
    front = (system, delimiter, config.get("description")) if system else (config.get("description"),)
    listed = config.get("metric_list")
    return Asked(
        filter=filters[0] if filters else "none",
        options=config.get("output_type") == "multiple_choice",
        decided=any(key.startswith("metaicl,") for key in values),
        unconditional=any(at(e, "metric") == "acc_mutual_info" for e in (listed if isinstance(listed, list) else [])),
        shots=int(declared("switch", {"file": results, "task": config}, task).get("shots", 0)),
        front=tuple(text for text in front if isinstance(text, str)),
        delimiter=delimiter,
        metrics=metrics,
    )


def _with_answers(result: TaskResult, documents: Sequence[DocumentRow] | Unusable) -> TaskResult:
    """A result with its answers, or with marks that say why they are not used."""
    marks, answers = [], None
    is_accuracy = result.metric.startswith("acc") or result.metric == "exact_match"
    if is_accuracy and not 0 <= result.value <= 1:
        raise Unusable(f"its {result.metric} of {result.value:g} is not between 0 and 1")
    if result.aggregation not in AGGREGATIONS:
        marks.append(f"its {result.metric} is not computed from numbers of single documents: it is shown as reported")
    elif isinstance(documents, Unusable):
        marks.append(f"its samples are not used: {documents}")
    elif documents and not marks:
        try:
            rows = [row for row in documents if row.filter == result.reported_filter]
            answers = answers_of(rows, result.metric, result.shots)
            if answers.items.ndim == 2 and result.metric == "metaicl":  # of classification
                result = replace(result, aggregation="macro_f1")
            if result.metric in CALIBRATION:
                metric = AGGREGATIONS[result.aggregation]
                result = replace(result, value=float(metric.value(metric.features(answers.items).sum(axis=0))))
            if why := _contradiction(answers, result, is_accuracy):
                raise Unusable(why)
        except Unusable as error:
            marks.append(f"its samples are not used: {error}")
            answers = None
    if math.isnan(result.value):
        raise Unusable(marks[0] if marks else f"its {result.metric} needs samples (--log_samples)")
    if answers is None:
        return replace(result, marks=tuple(dict.fromkeys(map(sentence, marks))))
    size = str(len(answers.items))
    switches = {**result.switches, "documents": answers.documents}
    column = {**result.column, "documents": size}
    return replace(result, documents=len(answers.items), answers=answers, switches=switches, column=column)


def _contradiction(answers: Answers, result: TaskResult, is_accuracy: bool) -> str:
    """Why answers are not those that the result is of; "" if they can be."""
    items = answers.items
    if result.documents and len(items) != result.documents:
        return f"they are of {len(items)} documents, the results of {result.documents}"
    if (np.abs(items) > HUGE).any() or (np.isnan(items).any() and result.aggregation != "nanmean"):
        return f"the {result.metric} of a document is not a finite number"
    if is_accuracy and (items.min() < 0 or items.max() > 1):
        return f"the {result.metric} of a document is not between 0 and 1"
    if (items.ndim == 2) != (result.aggregation in _OF_PAIRS):
        return f"the {result.metric} of a document is not what lm-eval's {result.aggregation} is computed from"
    if result.aggregation in ("mean", "nanmean") and not np.isnan(items).all():
        mean = float(np.nanmean(items))
        if not math.isclose(mean, result.value, rel_tol=1e-9, abs_tol=1e-12):
            return f"their mean {result.metric} is {mean:.6g}, in the results it is {result.value:.6g}"
    return ""
