"""Runs as one small Parquet file each, for a board that people share, and a check of such files.

The results are JSON in the file's metadata. The columns are the task and the fields of
`tasks.DocumentRow`, without any text of a document. The answers under each decision rule are rows
like the model's own answers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lm_eval_icl.errors import one_line, writing
from lm_eval_icl.files import replacing
from lm_eval_icl.results.board import grouped
from lm_eval_icl.results.fields import (
    Unusable,
    at,
    digest,
    has_results,
    mapping,
    number,
    sample_facts,
)
from lm_eval_icl.results.metrics import probabilities
from lm_eval_icl.results.records import Run
from lm_eval_icl.results.tasks import MEANS, DocumentRow, aggregated, rows_from_samples

_KEY = b"lm_eval_icl.results"
_ROUNDING = 1e-6
Documents = dict[str, list[DocumentRow]]  # by task


def name_of(results: Mapping[str, Any], documents: Documents) -> str:
    """The name of a run's file: digests of its results and of its rows without predicted texts."""
    texts = []
    for task, rows in documents.items():
        for row in rows:
            prediction = row.prediction if row.options else None
            parts = [task, *row[:6], *row[7:10], prediction]
            texts.append(json.dumps(parts, sort_keys=True))
    return f"{digest([json.dumps(results, sort_keys=True)])}-{digest(texts)[:8]}"


def load(path: Path) -> tuple[dict[str, Any], Documents]:
    """The results and rows of a file of `collect`; `Unusable` is raised for any other file."""
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
        results = json.loads(table.schema.metadata[_KEY])
        if not has_results(results):
            raise ValueError("it has no results of lm-eval")
        documents: Documents = {}
        values = table.select(["task", *DocumentRow._fields[:-1]]).to_pydict()
        values["metrics"] = [json.loads(metrics) for metrics in values["metrics"]]
        values["logprobs"] = [tuple(logprobs) for logprobs in values["logprobs"]]
        for task, *row in zip(*values.values(), strict=True):
            documents.setdefault(task, []).append(DocumentRow(*row))
    except Exception as error:  # pyarrow's are of many kinds
        raise Unusable(
            f"is damaged, or not a file of `lm-eval-icl collect` ({one_line(error)[:200]})"
        ) from None
    return results, documents


def document_rows(run: Run, task: str) -> list[DocumentRow]:
    """The rows of a task's documents under all filters; empty without samples."""
    if run.path.suffix == ".parquet":
        return load(run.path)[1].get(task, [])
    return rows_from_samples(run.path, task, sample_facts(run.results, task))


def collect(runs: Sequence[Run], folder: Path) -> list[Path]:
    """Write each run to `<folder>/runs/<digest>.parquet`, whole or not at all.

    The same run makes the same bytes.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    kinds = dict.fromkeys("task filter document prompt demonstrations metrics".split(), pa.string())
    kinds["doc_id"] = pa.int64()
    kinds |= dict.fromkeys("options prediction gold".split(), pa.int32())
    kinds["logprobs"] = pa.list_(pa.float64())
    written = []
    for run in runs:
        # Samples that cannot be used are not written, as the board does not use them.
        used = {result.task for result in run.all_results if result.answers is not None}
        documents = {task: document_rows(run, task) for task in run.tasks if task in used}
        table = []
        for task, rows in documents.items():
            for row in rows:
                values = {"task": task, **row._asdict()}
                values["metrics"] = json.dumps(row.metrics, sort_keys=True)
                if not row.options:  # predicted texts are not written
                    values["prediction"] = None
                table.append(values)
        schema = pa.schema(kinds.items(), {_KEY: json.dumps(run.results).encode()})
        path = folder / "runs" / f"{name_of(run.results, documents)}.parquet"
        with writing(f"--output {folder}"), replacing(path) as half:
            pq.write_table(pa.Table.from_pylist(table, schema), half, compression="zstd")
        written.append(path)
    return written


def faults(path: Path) -> list[str]:
    """Sentences about parts of a file of `collect` that contradict each other.

    There are none for a sound file: its name is made of the digests of results and rows, all
    filters and rules have the same documents and right answers, predictions follow from
    log-likelihoods, a rule's values from its constants, accuracies from predictions, and the
    documents give every value and standard error of a metric that is computed from single
    documents.
    """
    results, documents = load(path)
    sentences = []
    if path.stem != name_of(results, documents):
        sentences.append(
            "was changed after `lm-eval-icl collect` wrote it, or was renamed: collect it again."
        )
    for task, task_rows in documents.items():
        config = mapping(results["configs"].get(task))
        by_filter = grouped(task_rows, lambda row: row.filter)
        size = len(next(iter(by_filter.values())))
        values = mapping(results["results"].get(task))
        faulty = [
            _documents_differ(by_filter),
            _answers_contradict(task_rows, config),
            _rule_contradicts(by_filter, config),
            _size_contradicts(size, results, task),
            *_values_contradict(by_filter, values, config),
        ]
        sentences += [f"task {task!r}{fault}." for fault in faulty if fault]
    return sentences


def _documents_differ(by_filter: Mapping[str, Sequence[DocumentRow]]) -> str:
    prompts = []
    golds: dict[int, set[int | None]] = {}
    for rows in by_filter.values():
        prompts.append(sorted((row.doc_id, row.document, row.prompt) for row in rows))
        for row in rows:
            golds.setdefault(row.doc_id, set()).add(row.gold)
    if any(filter_prompts != prompts[0] for filter_prompts in prompts):
        return ": the answers under its filters and rules are not to the same documents"
    twice = [document for document, right in golds.items() if len(right) > 1]
    return f", document {twice[0]}: has two right answers" if twice else ""


def _answers_contradict(rows: Sequence[DocumentRow], config: Mapping[str, Any]) -> str:
    rules = mapping(at(config, "metadata", "decided"))
    for row in rows:
        where = f", document {row.doc_id}, {row.filter!r}"
        is_raw = row.filter not in rules
        if is_raw and any(not logprob <= 0 for logprob in row.logprobs):
            return f"{where}: has a log-likelihood above 0 or none"
        if "metaicl" not in row.metrics and row.options and len(row.logprobs) != row.options:
            return f"{where}: has an option without log-likelihood"
        best = row.logprobs.index(max(row.logprobs)) if row.logprobs else row.prediction
        if best != row.prediction and "metaicl" not in row.metrics:
            return f"{where}: has an answer that differs from its log-likelihoods"
        is_scored = isinstance(row.prediction, int) and "acc" in row.metrics
        right = float(row.prediction == row.gold)
        if is_scored and row.gold is not None and float(row.metrics["acc"]) != right:
            return f"{where}: has a score that differs from its answer"
    return ""


def _rule_contradicts(
    by_filter: Mapping[str, Sequence[DocumentRow]], config: Mapping[str, Any]
) -> str:
    """The constants of a transductive rule are of all documents, else of the first document."""
    rules = mapping(at(config, "metadata", "decided"))
    raw = next((rows for name, rows in by_filter.items() if name not in rules), [])
    scores = {row.doc_id: row.logprobs for row in raw}
    for name, facts in rules.items():
        constants = at(facts, "constants")
        if not isinstance(constants, list):
            continue
        rows = sorted(by_filter.get(name, []), key=lambda row: row.doc_id)
        for row in rows if at(facts, "transductive") else rows[:1]:
            values = np.array(row.logprobs)
            own = np.array(scores.get(row.doc_id, ()))
            if not len(values) == len(own) == len(constants):
                continue
            # A rule shifts log-probabilities, which may be normalized, or probabilities.
            if at(facts, "arguments", "by") == "difference":
                rest = values - probabilities(own) + np.exp(constants)
            else:
                rest = values - own + constants
            if not np.ptp(rest) <= _ROUNDING * (1 + np.abs(own).max()):
                return (
                    f", document {row.doc_id}, {name!r}: has values that differ from its constants"
                )
    return ""


def _size_contradicts(size: int, results: Mapping[str, Any], task: str) -> str:
    """Without a limit, a run may still be of chosen documents (lm-eval's `samples`)."""
    limit = number(results["config"].get("limit"))
    whole = number(at(results, "n-samples", task, "original"))
    if limit is None or whole is None:
        return ""
    most = min(whole, int(limit) if limit >= 1 else math.ceil(limit * whole))
    return "" if size == most else f": has {size} documents, and its limit gives {most:g}"


def _values_contradict(
    by_filter: Mapping[str, Sequence[DocumentRow]],
    values: Mapping[str, Any],
    config: Mapping[str, Any],
) -> list[str]:
    wrong = []
    for key, value in values.items():
        metric, comma, filter_name = key.partition(",")
        if not comma or metric.endswith("_stderr") or number(value) is None:
            continue
        rows = by_filter.get(filter_name, [])
        try:
            given = aggregated(rows, metric, config)
        except ValueError as error:
            wrong.append(f", {key}: {error}")
            continue
        if given is None:
            continue
        if not math.isclose(given, value, rel_tol=1e-9, abs_tol=1e-12):
            wrong.append(f": the answers do not give its {key}")
        error_key = f"{metric}_stderr,{filter_name}"
        reported = number(values.get(error_key))
        if reported is None or metric not in MEANS or len(rows) < 2:
            continue
        scores = np.array([row.metrics[metric] for row in rows], dtype=float)
        if not math.isclose(reported, scores.std(ddof=1) / math.sqrt(len(scores)), rel_tol=1e-6):
            wrong.append(f": the answers do not give its {error_key}")
    return wrong
