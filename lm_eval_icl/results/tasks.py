"""A task of a results file: its value without and with decision rules, and the answers behind it.

The answers are in the samples that lm-eval writes with `--log_samples`. A document of a task under
a filter becomes a row without its texts (`DocumentRow`). `collect` writes these rows, tables show
them, `answers_of` makes arrays of them.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lm_eval_icl.results.board import grouped
from lm_eval_icl.results.fields import (
    RuleFacts,
    SampleFacts,
    StudyFacts,
    Unusable,
    aggregation_of,
    at,
    count,
    digest,
    fields_of,
    filter_text,
    higher_is_better,
    listed,
    mapping,
    metric_entries,
    metric_of,
    number,
    reported_value,
    retrieval_marks,
    sample_facts,
    size_of,
)
from lm_eval_icl.results.metrics import AGGREGATIONS, CALIBRATION
from lm_eval_icl.results.records import Answers, TaskResult

_HASH = 16  # how many hexadecimal digits of a hash are kept
MEANS = {"acc", "acc_norm", "exact_match"}
_ALWAYS = {*MEANS, "metaicl"}  # these metrics are computed in the same way for every task


class DocumentRow(NamedTuple):
    """A document of a task under a filter."""

    filter: str
    doc_id: int  # the document's number in the task
    document: str  # digest of the document and its right answer
    prompt: str  # digest of the prompt
    demonstrations: str  # digest of the demonstrations, whatever their order; "" without any
    options: int  # the number of options; 0 if there are none
    prediction: int | str | None  # the number of the predicted option, or the filter's text
    gold: int | None  # the number of the right option; None if it is not known
    logprobs: tuple[float, ...]  # the options' log-likelihoods, or their values under a rule
    metrics: Mapping[str, Any]  # lm-eval's name of a metric -> the value that lm-eval aggregates
    target: str = ""  # the right answer, as lm-eval writes it; `collect` leaves it out


def parse(data: bytes) -> Any:
    """JSON; `Unusable` is raised if it is damaged."""
    try:
        value = json.loads(data.decode("utf-8-sig"))
        # A lone surrogate, which Python cannot print or write.
        if re.search(rb"\\u[dD][89a-fA-F]", data):
            value = json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
        return value
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise Unusable(f"is damaged, half-written or not JSON ({reason})") from error


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """The samples of a file, one at a time, since a file may have several GB. Any other line raises
    `Unusable`."""
    try:
        with path.open("rb") as file:
            for place, line in enumerate(file, 1):
                sample = parse(line)
                is_sample = isinstance(sample, dict) and type(sample.get("doc_id")) is int
                for name in ("doc_hash", "prompt_hash", "target_hash"):
                    is_sample = is_sample and isinstance(sample.get(name), str)
                if not is_sample:
                    what = "a sample of lm-eval, which has the hashes of its document"
                    raise Unusable(f"line {place} is not {what}")
                yield sample
    except (OSError, Unusable) as error:
        raise Unusable(f"{path.name}: {error}") from error


def rows_of(samples: Iterable[Mapping[str, Any]], facts: SampleFacts) -> Iterator[DocumentRow]:
    """The samples of a task as rows, one for each document and filter."""
    for sample in samples:
        document = sample["doc_hash"]
        if facts.decided:  # the document contains the prediction, which lm-eval has hashed too
            content = mapping(sample.get("doc"))
            others = {name: value for name, value in content.items() if name != "prediction"}
            document = digest([json.dumps(others, sort_keys=True)])
        demonstrations = ""
        if facts.shots:
            prompt = at(sample, "arguments", "gen_args_0", "arg_0")
            if not isinstance(prompt, str):  # the messages of a chat are a list
                prompt = json.dumps(prompt)
            demonstrations = _demonstrations(_before_query(prompt, facts), facts)
        yield DocumentRow(
            str(sample.get("filter")),
            sample["doc_id"],
            document[:_HASH] + sample["target_hash"][:8],
            sample["prompt_hash"][:_HASH],
            demonstrations,
            *_choice(sample, facts),
            {str(name): sample.get(str(name)) for name in listed(sample.get("metrics"))},
            str(sample.get("target")),
        )


def _before_query(prompt: str, facts: SampleFacts) -> str:
    """The prompt up to its last delimiter, which the query follows, or the whole prompt."""
    if facts.delimiter in prompt:
        return prompt[: prompt.rfind(facts.delimiter)]
    return prompt


@functools.lru_cache(maxsize=1)  # all documents of a task mostly have the same demonstrations
def _demonstrations(text: str, facts: SampleFacts) -> str:
    """A digest of the demonstrations before a query, whatever their order (but for a chat)."""
    for before in facts.front:
        text = text.removeprefix(before)
    parts = sorted(text.split(facts.delimiter)) if facts.delimiter else [text]
    return digest(parts)[:_HASH]


def _choice(
    sample: Mapping[str, Any], facts: SampleFacts
) -> tuple[int, int | str | None, int | None, tuple[float, ...]]:
    """How many options there are, the predicted option or text, the right option, and the options'
    log-likelihoods: `DocumentRow`'s fields of these names."""
    responses = listed(sample.get("filtered_resps"))
    scores: tuple[float, ...] = ()
    if facts.options:
        with suppress(TypeError, ValueError, LookupError, OverflowError):  # not log-likelihoods
            scores = tuple(float(response[0]) for response in responses)
    if facts.decided:
        content = mapping(sample.get("doc"))
        prediction = count(content.get("prediction"))
        options = listed(content.get("options"))
        if prediction is not None and prediction < len(options):
            target = str(sample.get("target"))
            gold = options.index(target) if target in options else None
            logprobs = scores if len(scores) == len(options) else ()
            return len(options), prediction, gold, logprobs
    elif scores:
        best = scores.index(max(scores))  # the first of equals, as lm-eval's `acc`
        return len(scores), best, _right_option(sample, len(scores), facts.target), scores
    is_text = len(responses) == 1 and isinstance(responses[0], str)
    return 0, responses[0] if is_text else None, None, ()


def _right_option(sample: Mapping[str, Any], options: int, column: str) -> int | None:
    """The right option, of which lm-eval writes the number or the text; None if it is not known.
    If it is in a `column` of texts, then digits are a text too."""
    target = str(sample.get("target"))
    is_text = isinstance(mapping(sample.get("doc")).get(column), str)
    if not is_text and re.fullmatch("[0-9]{1,9}", target):
        return int(target) if int(target) < options else None
    places = [f"gen_args_{place}" for place in range(options)]
    texts = [str(at(sample, "arguments", place, "arg_1")).strip() for place in places]
    return texts.index(target.strip()) if texts.count(target.strip()) == 1 else None


def answers_of(
    rows: Sequence[DocumentRow], items: np.ndarray, shots: int, demonstration_rows: str
) -> Answers:
    """The sorted rows of one filter as arrays. The recorded digest of the demonstrations' rows is
    preferred to one of their texts, which may be cut."""
    predicted = [row.prediction for row in rows]
    golds = [row.gold for row in rows]
    are_options = all(row.options and isinstance(row.prediction, int) for row in rows)
    logprobs = None
    if are_options and all(len(row.logprobs) == row.options for row in rows):
        logprobs = np.full((len(rows), max(row.options for row in rows)), -np.inf)
        for values, row in zip(logprobs, rows, strict=True):
            values[: row.options] = row.logprobs
    demonstrations = None
    if shots:
        demonstrations = demonstration_rows or digest(row.demonstrations for row in rows)
    return Answers(
        documents=digest(f"{row.doc_id} {row.document}" for row in rows),
        prompts=digest(f"{row.doc_id} {row.document} {row.prompt}" for row in rows),
        demonstrations=demonstrations,
        items=items,
        predictions=np.array(predicted) if are_options else None,
        golds=np.array(golds) if are_options and None not in golds else None,
        logprobs=logprobs,
        predicted=None if None in predicted else digest(map(str, predicted)),
        each_own=len({row.demonstrations for row in rows}) > max(1, len(rows) / 2),
    )


def _items(rows: Sequence[DocumentRow], metric: str) -> np.ndarray:
    """What lm-eval aggregates, for each of the sorted rows; `Unusable` is raised if they do not
    give it."""
    if not rows:
        raise Unusable("the samples have none of this filter")
    document, times = Counter(row.doc_id for row in rows).most_common(1)[0]
    if times > 1:
        raise Unusable(f"document {document} is in the samples twice")
    if metric not in CALIBRATION:
        return _recorded_items([row.metrics.get(metric) for row in rows], metric)
    golds = []
    for row in rows:
        is_known = isinstance(row.prediction, int) and len(row.logprobs) == row.options > 0
        if row.gold is None or not is_known:
            what = "the options' log-likelihoods, and which option is right"
            raise Unusable(f"{metric} needs {what}")
        golds.append(row.gold)
    return CALIBRATION[metric].items([row.logprobs for row in rows], golds)


def _recorded_items(values: Sequence[Any], metric: str) -> np.ndarray:
    """(documents,) or (documents, 2) what lm-eval aggregates.

    A document has a number, two numbers, or the names of the right and the predicted class. Right
    classes are numbered in the order of the alphabet; -1 is a class that is never right.
    """
    items = [value if isinstance(value, list) else [value] for value in values]
    sizes = set(map(len, items))
    kinds = set[type]().union(*(map(type, item) for item in items))
    if sizes == {2} and kinds == {str}:
        names = sorted({name for name, _ in items})
        right = {name: place for place, name in enumerate(names)}
        return np.array([[right.get(name, -1) for name in pair] for pair in items], dtype=float)
    # A boolean is an integer, as for lm-eval.
    if len(sizes) > 1 or not kinds <= {int, float, bool}:
        what = "a number, a pair of numbers, or the names of two classes"
        raise Unusable(f"a document has no {metric} that is {what}")
    numbers = np.array(items, dtype=float)
    return numbers[:, 0] if sizes == {1} else numbers


def sentence(text: object) -> str:
    """A text as a sentence on one line, cut after 600 characters: names in files may be long."""
    words = " ".join(str(text).split()).removesuffix(".")
    return f"{words[:600]}..." if len(words) > 600 else f"{words}."


def results_of(
    path: Path,
    results: Mapping[str, Any],
    task: str,
    study: StudyFacts,
    documents: Sequence[DocumentRow] | None,
    wanted: str | None,
    notes: list[str],
) -> list[TaskResult]:
    """A task's result, then its results under decision rules, with answers or with marks that say
    why there are none. A task without a number is `Unusable`.

    Args:
        documents: the rows in a file of `collect`; None to read the samples beside the file.
        notes: sentences about rules that are left out are added.
    """
    values = mapping(results["results"][task])
    config = results["configs"][task]
    rules = mapping(at(config, "metadata", "decided"))
    metric, filter_name, entry = metric_of(values, config, wanted or study.metric, rules)
    facts = sample_facts(results, task)
    raw = TaskResult(
        task=task,
        metric=metric,
        filter=filter_name,
        value=math.nan,
        stderr=None,
        higher_is_better=higher_is_better(results, task, metric, entry),
        aggregation=aggregation_of(metric, entry),
        shots=facts.shots,
        documents=size_of(results, task),
        answers=None,
        filter_text=filter_text(results, task, filter_name),
        fields=fields_of(results, task),
        marks=retrieval_marks(config),
    )
    unread = ""
    try:
        rows = rows_from_samples(path, task, facts) if documents is None else documents
    except Unusable as error:
        rows = []
        unread = str(error)
    by_filter = grouped(rows, lambda row: row.filter)
    task_results = []
    for rule in (None, *rules):
        named = rule or filter_name
        try:
            if rule is not None and metric == "exact_match":  # a metric of the most probable text
                raise Unusable("no rule changes exact_match")
            result = replace(
                raw,
                value=reported_value(values, metric, named),
                stderr=number(values.get(f"{metric}_stderr,{named}")),
                rule=None if rule is None else RuleFacts.of(rule, mapping(rules[rule])),
            )
            answered = by_filter.get(named, []) if by_filter else None
            task_results.append(_with_answers(result, answered, unread))
        except Unusable as error:
            if rule is None:
                raise
            notes.append(f"task {task!r} under the decision rule {rule!r} is left out: {error}")
    return task_results


def aggregated(rows: Sequence[DocumentRow], metric: str, config: Mapping[str, Any]) -> float | None:
    """A metric of a task's answers under one filter.

    None if it is not computed from numbers of single documents, or if the configuration does not
    say how: the task's own class may have computed it. `ValueError` is raised if there are no
    answers, or if a document has no such number.
    """
    entries = metric_entries(config, [metric])
    if metric not in {*entries, *_ALWAYS}:
        return None
    aggregation = aggregation_of(metric, entries.get(metric, {}))
    if not aggregation:
        return None
    return _value(_items(rows, metric), metric, aggregation)[0]


def _value(items: np.ndarray, metric: str, aggregation: str) -> tuple[float, str]:
    """The value of a metric for lm-eval's items, and the name of the aggregation."""
    if metric == "metaicl" and items.ndim == 2:  # a classification task
        aggregation = "macro_f1"
    function = AGGREGATIONS[aggregation]
    return float(function.value(function.features(items).sum(axis=0))), aggregation


def samples_path(path: Path, task: str) -> Path:
    """The file beside a results file that has, or would have, the samples of a task."""
    return path.with_name(f"samples_{task}_{path.stem.rpartition('_')[2]}.jsonl")


def rows_from_samples(path: Path, task: str, facts: SampleFacts) -> list[DocumentRow]:
    """The rows of the samples beside a results file; `Unusable` is raised if they are damaged."""
    file = samples_path(path, task)
    if not os.path.lexists(file):
        return []
    samples = lines(file)
    return list(rows_of(samples, facts))


def options(results: Mapping[str, Any], task: str) -> list[str]:
    """The names of the options if the configuration lists them, so that all documents have the
    same; or else empty."""
    choices = listed(at(results, "configs", task, "doc_to_choice"))
    are_names = all(isinstance(name, str) for name in choices)
    return choices if are_names and len(set(choices)) == len(choices) else []


def _with_answers(
    result: TaskResult, rows: Sequence[DocumentRow] | None, unread: str
) -> TaskResult:
    """A result with its answers, or with a mark that says why they are not used."""
    metric = result.metric
    is_accuracy = metric.startswith("acc") or metric == "exact_match"
    if is_accuracy and not 0 <= result.value <= 1:
        raise Unusable(f"its {metric} of {result.value:g} is not between 0 and 1")
    mark = f"its samples are not used: {unread}" if unread else ""
    if not result.aggregation:
        what = "not computed from numbers of single documents"
        mark = f"its {metric} is {what}: it is shown as reported"
    elif rows is not None:
        try:
            return _answered(result, rows)
        except ValueError as error:
            mark = f"its samples are not used: {error}"
    if math.isnan(result.value):
        raise Unusable(mark or f"its {metric} needs samples (--log_samples)")
    return replace(result, marks=(sentence(mark), *result.marks)) if mark else result


def _answered(result: TaskResult, rows: Sequence[DocumentRow]) -> TaskResult:
    """A result with its answers, which give its value."""
    metric = result.metric
    rows = sorted(rows, key=lambda row: row.doc_id)
    items = _items(rows, metric)
    if result.documents and len(items) != result.documents:
        raise Unusable(f"they are of {len(items)} documents, the results of {result.documents}")
    numbers = items[~np.isnan(items)] if result.aggregation == "nanmean" else items
    if not (np.abs(numbers) < 1e100).all():
        raise Unusable(f"the {metric} of a document is not a finite number")
    value, aggregation = _value(items, metric, result.aggregation)
    if metric not in CALIBRATION:
        if not math.isclose(value, result.value, rel_tol=1e-9, abs_tol=1e-12):
            both = f"{value:.6g}, in the results it is {result.value:.6g}"
            raise Unusable(f"their {metric} is {both}")
        value = result.value
    answers = answers_of(rows, items, result.shots, result.fields.demonstration_rows)
    return replace(
        result, value=value, aggregation=aggregation, documents=len(items), answers=answers
    )
