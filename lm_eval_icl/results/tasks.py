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

from lm_eval_icl.results.fields import digest, fields_of, filter_text
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
from lm_eval_icl.results.reported import (
    aggregation_of,
    higher_is_better,
    metric_entries,
    metric_of,
    reported_value,
    retrieval_marks,
    size_of,
)

_HASH = 16  # how many hexadecimal digits of a hash are kept
MEANS = {"acc", "acc_norm", "exact_match"}
_ALWAYS = {*MEANS, "metaicl"}  # these metrics are computed in the same way for every task


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


def answers_of(
    rows: Iterable[DocumentRow], metric: str, shots: int, demonstration_rows: str = ""
) -> Answers:
    """The rows of one filter as arrays; `Unusable` is raised if the metric cannot be computed from them. The recorded
    digest of the demonstrations' rows is preferred to one of their texts, which may be cut."""
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
    prompts = (f"{document} {row.prompt}" for document, row in zip(documents, rows, strict=True))
    demonstrations = None
    if shots:
        demonstrations = demonstration_rows or digest(row.demonstrations for row in rows)
    predicted = [row.prediction for row in rows]
    return Answers(
        documents=digest(documents),
        prompts=digest(prompts),
        demonstrations=demonstrations,
        items=items,
        predictions=np.array(predicted) if known else None,
        golds=np.array(golds) if known and None not in golds else None,
        logprobs=logprobs,
        predicted=None if None in predicted else digest(map(str, predicted)),
        each_own=len({row.demonstrations for row in rows}) > max(1, len(rows) / 2),
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
    values = mapping(results["results"][task])
    config = results["configs"][task]
    rules = mapping(at(config, "metadata", "decided"))
    metric, filter_name, entry = metric_of(values, config, wanted or study.metric, rules)
    fields = fields_of(results, task)
    shots = fields.switches["shots"]
    raw = TaskResult(
        task=task,
        metric=metric,
        filter=filter_name,
        value=math.nan,
        stderr=None,
        higher_is_better=higher_is_better(results, task, metric, entry),
        aggregation=aggregation_of(metric, entry),
        shots=int(shots) if shots.isdecimal() else 0,
        documents=size_of(results, task),
        answers=None,
        filter_text=filter_text(results, task, filter_name),
        fields=fields,
        marks=tuple(retrieval_marks(mapping(at(config, "metadata", "retrieved")))),
    )
    rows_by_filter: dict[str, list[DocumentRow]] = {}
    for row in documents if isinstance(documents, list) else ():
        rows_by_filter.setdefault(row.filter, []).append(row)
    task_results = []
    for rule in (None, *rules):
        named = filter_name if rule is None else rule
        try:
            if rule is not None and metric == "exact_match":  # a metric of the most probable text
                raise Unusable("no rule changes exact_match")
            result = replace(
                raw,
                value=reported_value(values, metric, named),
                stderr=number(values.get(f"{metric}_stderr,{named}")),
                rule=None if rule is None else RuleFacts.of(rule, mapping(rules[rule])),
            )
            rows = documents
            if rows_by_filter:
                rows = rows_by_filter.get(named) or Unusable("the samples have none of this filter")
            task_results.append(_with_answers(result, rows))
        except Unusable as error:
            if rule is None:
                raise
            notes.append(f"task {task!r} under the decision rule {rule!r} is left out: {error}")
    return task_results


def aggregated(rows: Sequence[DocumentRow], metric: str, config: Mapping[str, Any]) -> float | None:
    """A metric of a task's answers under one filter; None if it is not computed from numbers of single documents, or if
    the configuration does not say how: the task's own class may have computed it. `ValueError` is raised if there are
    no answers, or if a document has no such number."""
    entries = metric_entries(config, [metric])
    aggregation = (
        aggregation_of(metric, entries.get(metric, {})) if metric in {*entries, *_ALWAYS} else ""
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
        and not metric_entries(config, ["acc_mutual_info"]),
        decided=any(key.startswith("metaicl,") for key in values),
        shots=_shots(results, task),
        front=tuple(text for text in front if isinstance(text, str)),
        delimiter=delimiter,
    )


def _shots(results: Mapping[str, Any], task: str) -> int:
    shots = at(results, "n-shot", task) or at(results, "configs", task, "num_fewshot")
    return count(shots) or 0


def _with_answers(result: TaskResult, documents: Sequence[DocumentRow] | Unusable) -> TaskResult:
    """A result with its answers, or with a mark that says why they are not used."""
    is_accuracy = result.metric.startswith("acc") or result.metric == "exact_match"
    if is_accuracy and not 0 <= result.value <= 1:
        raise Unusable(f"its {result.metric} of {result.value:g} is not between 0 and 1")
    mark = ""
    if not result.aggregation:
        mark = f"its {result.metric} is not computed from numbers of single documents: it is shown as reported"
    elif isinstance(documents, Unusable):
        mark = f"its samples are not used: {documents}"
    elif documents:
        try:
            return _answered(result, documents)
        except ValueError as error:
            mark = f"its samples are not used: {error}"
    if math.isnan(result.value):
        raise Unusable(mark or f"its {result.metric} needs samples (--log_samples)")
    return replace(result, marks=(sentence(mark), *result.marks)) if mark else result


def _answered(result: TaskResult, rows: Sequence[DocumentRow]) -> TaskResult:
    """A result with its answers, which give its value."""
    recorded = result.fields.demonstration_rows
    answers = answers_of(rows, result.metric, result.shots, recorded)
    items = answers.items
    if result.documents and len(items) != result.documents:
        raise Unusable(f"they are of {len(items)} documents, the results of {result.documents}")
    numbers = items[~np.isnan(items)] if result.aggregation == "nanmean" else items
    if not (np.abs(numbers) < 1e100).all():
        raise Unusable(f"the {result.metric} of a document is not a finite number")
    value, aggregation = _value(items, result.metric, result.aggregation)
    if result.metric not in CALIBRATION:
        if not math.isclose(value, result.value, rel_tol=1e-9, abs_tol=1e-12):
            raise Unusable(
                f"their {result.metric} is {value:.6g}, in the results it is {result.value:.6g}"
            )
        value = result.value
    return replace(
        result, value=value, aggregation=aggregation, documents=len(items), answers=answers
    )
