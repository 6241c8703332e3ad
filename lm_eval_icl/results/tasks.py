"""A task of a results file: its value without and with decision rules, and the answers from which it is computed.

The answers are in the samples that lm-eval writes with `--log_samples`. A document of a task under a filter becomes a
row without its texts (`DocumentRow`). `collect` writes these rows, tables show them, `answers_of` makes arrays of them.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lm_eval_icl.results.fields import column_fields, declared, digest, switch_fields
from lm_eval_icl.results.metrics import AGGREGATIONS, CALIBRATION
from lm_eval_icl.results.records import (
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

_HASH = 16  # how many hexadecimal digits of a hash are kept
# lm-eval's metrics that are not means over documents (lm_eval/api/metrics.py) -> the aggregation; "" if it is unknown.
_NO_MEANS = {
    **{
        "f1": "f1",
        "mcc": "matthews_corrcoef",
        "perplexity": "perplexity",
        "bits_per_byte": "bits_per_byte",
    },
    **dict.fromkeys(("word_perplexity", "byte_perplexity"), "weighted_perplexity"),
    **dict.fromkeys(("brier_score", "bleu", "chrf", "chrf++", "ter", "bypass"), ""),
}
_ALWAYS = {
    "acc",
    "acc_norm",
    "exact_match",
    "metaicl",
}  # these metrics are computed in the same way for every task


class DocumentRow(NamedTuple):
    """A document of a task under a filter."""

    filter: str
    doc_id: int  # the document's number in the task
    document: str  # digest of the document and its right answer
    prompt: str  # digest of the prompt
    demonstrations: (
        str  # digest of the prompt's demonstrations, whatever their order; "" without any
    )
    options: int  # the number of options; 0 if there are none
    prediction: (
        int | str | None
    )  # the number of the predicted option, or the text that the filter returns
    gold: int | None  # the number of the right option; None if it is not known
    logprobs: tuple[
        float, ...
    ]  # the options' log-likelihoods, or their values under a decision rule
    metrics: Mapping[str, Any]  # lm-eval's name of a metric -> the value that lm-eval aggregates
    target: str = ""  # the right answer, as lm-eval writes it; `collect` leaves it out


@dataclass(frozen=True)
class SampleFacts:
    """The facts in a task's results that are needed to read its samples."""

    # Whether the requests of a document are options, of which the one with the highest log-likelihood is predicted.
    options: bool
    decided: bool  # whether the task decides in another way, and its documents have the prediction (MetaICL)
    shots: int  # how many demonstrations a prompt has
    # The texts before the demonstrations, in this order: the system instruction, a delimiter, the description.
    front: tuple[str, ...]
    delimiter: str  # the text between demonstrations


def parse(data: bytes) -> Any:
    """JSON; `Unusable` is raised if it is damaged."""
    try:
        return json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise Unusable(
            f"is damaged, half-written or not JSON ({' '.join(str(error).split())})"
        ) from error


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """The samples of a file, one at a time, since a file may have several GB. Any other line raises `Unusable`."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                sample = parse(line)
                hashes = [at(sample, name) for name in ("doc_hash", "prompt_hash", "target_hash")]
                if type(at(sample, "doc_id")) is not int or not all(
                    isinstance(text, str) for text in hashes
                ):
                    raise Unusable(
                        f"line {number} is not a sample of lm-eval, which has the hashes of its document"
                    )
                yield sample
    except (OSError, Unusable) as error:
        raise Unusable(f"{path.name}: {error}") from error


def rows_of(samples: Iterable[Mapping[str, Any]], facts: SampleFacts) -> Iterator[DocumentRow]:
    """The samples of a task as rows, one for each document and filter."""
    for sample in samples:
        prediction: int | str | None
        prediction, options, gold, logprobs = _choice(sample, facts)
        texts = sample.get("filtered_resps")
        if (
            prediction is None
            and isinstance(texts, list)
            and len(texts) == 1
            and isinstance(texts[0], str)
        ):
            prediction = texts[0]
        prompt = at(sample, "arguments", "gen_args_0", "arg_0")  # the messages of a chat are a list
        prompt = prompt if isinstance(prompt, str) else json.dumps(prompt)
        # The query follows the last delimiter. Without a delimiter, the whole prompt stands for its demonstrations.
        before = (
            prompt[: prompt.rfind(facts.delimiter)]
            if facts.delimiter and facts.delimiter in prompt
            else prompt
        )
        names, document, hashed = (
            sample.get("metrics"),
            mapping(sample.get("doc")),
            sample["doc_hash"],
        )
        if facts.decided:  # the document contains the prediction, which lm-eval has hashed too
            hashed = digest(
                [
                    json.dumps(
                        {n: x for n, x in document.items() if n != "prediction"}, sort_keys=True
                    )
                ]
            )
        yield DocumentRow(
            str(sample.get("filter")),
            sample["doc_id"],
            hashed[:_HASH] + sample["target_hash"][:8],
            sample["prompt_hash"][:_HASH],
            _demonstrations(before, facts.front, facts.delimiter) if facts.shots else "",
            options,
            prediction,
            gold,
            logprobs,
            {
                str(name): sample.get(str(name))
                for name in (names if isinstance(names, list) else [])
            },
            str(sample.get("target")),
        )


def answers_of(rows: Iterable[DocumentRow], metric: str, shots: int) -> Answers:
    """The rows of one filter as arrays; `Unusable` is raised if the metric cannot be computed from them."""
    rows = sorted(rows, key=lambda row: row.doc_id)
    if not rows:
        raise Unusable("the samples have none of this filter")
    if twice := [
        one.doc_id for one, other in itertools.pairwise(rows) if one.doc_id == other.doc_id
    ]:
        raise Unusable(f"document {twice[0]} is in the samples twice")
    known = all(row.options and isinstance(row.prediction, int) for row in rows)
    golds: list[Any] = [row.gold for row in rows]
    if metric in CALIBRATION:
        if not known or None in golds or any(len(row.logprobs) != row.options for row in rows):
            raise Unusable(
                f"{metric} needs the options' log-likelihoods, and which option is right"
            )
        items = CALIBRATION[metric].items([row.logprobs for row in rows], golds)
    else:
        items = _items([row.metrics.get(metric) for row in rows], metric)
    documents = [f"{row.doc_id} {row.document}" for row in rows]
    logprobs = None
    if known and all(len(row.logprobs) == row.options for row in rows):
        logprobs = np.full((len(rows), max(row.options for row in rows)), -np.inf)
        for values, row in zip(logprobs, rows, strict=True):
            values[: row.options] = row.logprobs
    return Answers(
        documents=digest(documents),
        prompts=digest(
            f"{document} {row.prompt}" for document, row in zip(documents, rows, strict=True)
        ),
        demonstrations=digest(row.demonstrations for row in rows) if shots else None,
        items=items,
        predictions=np.array([row.prediction for row in rows]) if known else None,
        golds=np.array(golds) if known and None not in golds else None,
        logprobs=logprobs,
    )


def _choice(
    sample: Mapping[str, Any], facts: SampleFacts
) -> tuple[int | None, int, int | None, tuple[float, ...]]:
    """The predicted option, the number of options, the right option (lm-eval writes its number or its text; None if it
    is not known), and the options' log-likelihoods. They are None, 0, None and () if there are no options."""
    target = str(sample.get("target"))
    try:
        scores = (
            [float(response[0]) for response in sample["filtered_resps"]] if facts.options else []
        )
    except (
        TypeError,
        ValueError,
        LookupError,
        OverflowError,
    ):  # a response is not a log-likelihood
        scores = []
    if facts.decided:
        content = mapping(sample.get("doc"))
        prediction, options = content.get("prediction"), content.get("options")
        if (
            type(prediction) is not int
            or not isinstance(options, list)
            or not 0 <= prediction < len(options)
        ):
            return None, 0, None, ()
        logprobs = tuple(scores) if len(scores) == len(options) else ()
        return (
            prediction,
            len(options),
            options.index(target) if target in options else None,
            logprobs,
        )
    if not scores:
        return None, 0, None, ()
    if re.fullmatch("[0-9]{1,9}", target):
        gold = int(target) if int(target) < len(scores) else None
    else:
        requests = (
            at(sample, "arguments", f"gen_args_{number}", "arg_1") for number in range(len(scores))
        )
        texts = [str(text).strip() for text in requests]
        gold = texts.index(target.strip()) if texts.count(target.strip()) == 1 else None
    return (
        scores.index(max(scores)),
        len(scores),
        gold,
        tuple(scores),
    )  # the first of equals, as lm-eval's `acc`


def _items(values: Sequence[Any], metric: str) -> np.ndarray:
    """(documents,) or (documents, 2) what lm-eval aggregates: a number, two numbers, or the names of the right and the
    predicted class. Right classes are numbered in the order of the alphabet; -1 is a class that is never right."""
    if values and all(
        isinstance(v, list) and len(v) == 2 and all(isinstance(x, str) for x in v) for v in values
    ):
        right = {name: place for place, name in enumerate(sorted({name for name, _ in values}))}
        return np.array([[right.get(name, -1) for name in pair] for pair in values], dtype=float)
    items = [value if isinstance(value, list) else [value] for value in values]
    # A boolean is an integer, as for lm-eval.
    if len(set(map(len, items))) > 1 or not all(
        isinstance(x, int | float) for item in items for x in item
    ):
        raise Unusable(
            f"a document has no {metric} that is a number, a pair of numbers, or the names of two classes"
        )
    return np.array(items if len(items[0]) > 1 else [item[0] for item in items], dtype=float)


@functools.lru_cache(maxsize=1)  # all documents of a task mostly have the same demonstrations
def _demonstrations(text: str, front: tuple[str, ...], delimiter: str) -> str:
    """A digest of the demonstrations in a prompt without its query, whatever their order (but for chat templates)."""
    for before in front:
        text = text.removeprefix(before)
    return digest(sorted(text.split(delimiter)) if delimiter else [text])[:_HASH]


def sentence(text: object) -> str:
    """A text as a sentence on one line, cut after 600 characters, since names in files may be long."""
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
    """A task's result, then its results under decision rules, each with its answers or with marks that say why they are
    not used. Sentences about rules that are left out are added to `notes`. A task without a number is `Unusable`."""
    values, config = mapping(results["results"][task]), results["configs"][task]
    rules = mapping(at(config, "metadata", "decided"))
    metric, filter_name, entry = _metric(values, config, wanted or study.metric, rules)
    higher = at(results, "higher_is_better", task, metric)
    higher = entry.get("higher_is_better") if higher is None else higher
    switches, retrieved = switch_fields(results, task), mapping(at(config, "metadata", "retrieved"))
    size = (
        count(at(results, "n-samples", task, "effective")) or count(values.get("sample_len")) or 0
    )
    task_results = []
    for rule in (None, *rules):
        key = f"{metric},{filter_name if rule is None else rule}"
        value = number(values.get(key))
        try:
            if rule is not None and metric == "exact_match":  # a metric of the most probable text
                raise Unusable("no rule changes exact_match")
            if value is None and metric not in CALIBRATION:
                raise Unusable(f"its {key} is {str(values.get(key))[:40]!r}, which is not a number")
            result = TaskResult(
                task=task,
                metric=metric,
                filter=filter_name,
                value=math.nan if value is None else value,
                stderr=number(values.get(key.replace(",", "_stderr,", 1))),
                higher_is_better=CALIBRATION[metric].higher_is_better
                if metric in CALIBRATION
                else higher is not False,
                aggregation=_aggregation(metric, entry),
                shots=int(str(switches["shots"])) if str(switches["shots"]).isdecimal() else 0,
                documents=size,
                answers=None,
                rule=None if rule is None else RuleFacts.of(rule, mapping(rules[rule])),
                column=column_fields(results, task, metric, filter_name, size),
                switches=switches,
            )
            result = _with_answers(result, documents)
            task_results.append(
                replace(result, marks=(*result.marks, *_retrieval_marks(retrieved)))
            )
        except Unusable as error:
            if rule is None:
                raise
            notes.append(f"task {task!r} under the decision rule {rule!r} is left out: {error}")
    return task_results


def _retrieval_marks(retrieved: Mapping[str, Any]) -> list[str]:
    """A mark that says from how many labeled documents each document's demonstrations were retrieved."""
    rows, number = count(at(retrieved, "pool", "rows")), count(retrieved.get("own_copies"))
    if rows is None or number is None:
        return []
    copies = (
        f"it has copies of {number} documents, which were left out"
        if number
        else "it has no copies of documents"
    )
    return [f"Each document's demonstrations are retrieved from a pool of {rows:,} rows; {copies}."]


def _metric(
    values: Mapping[str, Any],
    config: Mapping[str, Any],
    wanted: str | None,
    rules: Mapping[str, Any],
) -> tuple[str, str, Mapping[str, Any]]:
    """The metric that stands for a task, its first filter that is not a decision rule, and its `metric_list` entry."""
    filters: dict[str, str] = {}
    for key in values:
        metric, comma, filter_name = key.partition(",")
        if (
            comma
            and not metric.endswith("_stderr")
            and metric != "bypass"
            and filter_name not in rules
        ):
            filters.setdefault(metric, filter_name)
    if wanted in CALIBRATION and filters:
        return str(wanted), next(iter(filters.values())), {}
    entries = _entries(config, filters)
    for metric in (*filter(None, [wanted]), "acc", "exact_match", *entries, *filters):
        if metric in filters:
            return metric, filters[metric], entries.get(metric, {})
    raise Unusable("it has no metric")


def _entries(config: Mapping[str, Any], metrics: Iterable[str]) -> dict[str, Mapping[str, Any]]:
    """Metric -> its entry in a task's `metric_list`, in the order of that list."""
    entries: dict[str, Mapping[str, Any]] = {}
    listed = config.get("metric_list")
    for entry in listed if isinstance(listed, list) else []:
        name = str(at(entry, "metric"))
        for metric in metrics:
            if (
                name == metric or f"def {metric}(" in name
            ):  # a metric that is a function has its source as its name
                entries.setdefault(metric, entry)
    return entries


def _aggregation(metric: str, entry: Mapping[str, Any]) -> str:
    """A name of `AGGREGATIONS`, or "" if there is none for the metric."""
    if metric in CALIBRATION:
        return CALIBRATION[metric].aggregation
    name = str(entry.get("aggregation", _NO_MEANS.get(metric, "mean")))
    return name if name in AGGREGATIONS else ""


def aggregated(rows: Sequence[DocumentRow], metric: str, config: Mapping[str, Any]) -> float | None:
    """A metric of a task's answers under one filter; None if it is not computed from numbers of single documents, or if
    the configuration does not say how: the task's own class may have computed it. `ValueError` is raised if there are
    no answers, or if a document has no such number."""
    entries = _entries(config, [metric])
    aggregation = (
        _aggregation(metric, entries.get(metric, {})) if metric in {*entries, *_ALWAYS} else ""
    )
    return (
        _value(answers_of(rows, metric, 0).items, metric, aggregation)[0] if aggregation else None
    )


def _value(items: np.ndarray, metric: str, aggregation: str) -> tuple[float, str]:
    """The value of a metric for lm-eval's items, and the name of the aggregation."""
    if metric == "metaicl" and items.ndim == 2:  # a classification task
        aggregation = "macro_f1"
    function = AGGREGATIONS[aggregation]
    return float(function.value(function.features(items).sum(axis=0))), aggregation


def samples_path(path: Path, task: str) -> Path:
    """The file beside a results file that has, or would have, the samples of a task."""
    return path.with_name(f"samples_{task}_{path.stem.rpartition('_')[2]}.jsonl")


def rows_from_samples(path: Path, results: Mapping[str, Any], task: str) -> list[DocumentRow]:
    """The rows of the samples beside a results file; `Unusable` is raised if they cannot be read."""
    samples = samples_path(path, task)
    if not os.path.lexists(samples):
        return []
    return list(rows_of(lines(samples), sample_facts(results, task)))


def options(results: Mapping[str, Any], task: str) -> list[str]:
    """The names of the options if the configuration lists them, so that all documents have the same; or else empty."""
    choices = at(results, "configs", task, "doc_to_choice")
    are_names = isinstance(choices, list) and all(isinstance(name, str) for name in choices)
    return choices if are_names and len(set(choices)) == len(choices) else []


def sample_facts(results: Mapping[str, Any], task: str) -> SampleFacts:
    """The facts in a task's results about its samples."""
    values, config = mapping(results["results"][task]), results["configs"][task]
    system, delimiter = results.get("system_instruction"), config.get("fewshot_delimiter", "\n\n")
    delimiter = delimiter if isinstance(delimiter, str) else ""
    front = (
        (system, delimiter, config.get("description")) if system else (config.get("description"),)
    )
    return SampleFacts(
        # With acc_mutual_info, there is a second request for each option, without the prompt.
        options=config.get("output_type") == "multiple_choice"
        and not _entries(config, ["acc_mutual_info"]),
        decided=any(key.startswith("metaicl,") for key in values),
        shots=int(declared("switch", {"file": results, "task": config}, task).get("shots", 0)),
        front=tuple(text for text in front if isinstance(text, str)),
        delimiter=delimiter,
    )


def _with_answers(result: TaskResult, documents: Sequence[DocumentRow] | Unusable) -> TaskResult:
    """A result with its answers, or with a mark that says why they are not used."""
    mark, answers = "", None
    is_accuracy = result.metric.startswith("acc") or result.metric == "exact_match"
    if is_accuracy and not 0 <= result.value <= 1:
        raise Unusable(f"its {result.metric} of {result.value:g} is not between 0 and 1")
    if not result.aggregation:
        mark = f"its {result.metric} is not computed from numbers of single documents: it is shown as reported"
    elif isinstance(documents, Unusable):
        mark = f"its samples are not used: {documents}"
    elif documents:
        try:
            rows = [row for row in documents if row.filter == result.reported_filter]
            answers = answers_of(rows, result.metric, result.shots)
            items = answers.items
            if result.documents and len(items) != result.documents:
                raise Unusable(
                    f"they are of {len(items)} documents, the results of {result.documents}"
                )
            numbers = items[~np.isnan(items)] if result.aggregation == "nanmean" else items
            if not (np.abs(numbers) < 1e100).all():
                raise Unusable(f"the {result.metric} of a document is not a finite number")
            given, aggregation = _value(items, result.metric, result.aggregation)
            if result.metric in CALIBRATION:
                result = replace(result, value=given)
            elif not math.isclose(given, result.value, rel_tol=1e-9, abs_tol=1e-12):
                raise Unusable(
                    f"their {result.metric} is {given:.6g}, in the results it is {result.value:.6g}"
                )
            result = replace(result, aggregation=aggregation)
        except ValueError as error:
            mark, answers = f"its samples are not used: {error}", None
    if math.isnan(result.value):
        raise Unusable(mark or f"its {result.metric} needs samples (--log_samples)")
    if answers is None:
        return replace(result, marks=(sentence(mark),) if mark else ())
    switches = {**result.switches, "documents": answers.documents}
    column = {**result.column, "documents": str(len(answers.items))}
    return replace(
        result, documents=len(answers.items), answers=answers, switches=switches, column=column
    )
