"""Runs as one small Parquet file each, for a board that people share, and a check of such files.

The results are JSON in the file's metadata. The columns are the task and the fields of `tasks.DocumentRow`, without any
text of a document. The answers under each decision rule are rows like the model's own answers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_eval_icl.errors import one_line, writing
from lm_eval_icl.results.board import grouped
from lm_eval_icl.results.fields import digest
from lm_eval_icl.results.records import Run, Unusable, at, mapping, number
from lm_eval_icl.results.tasks import DocumentRow, aggregated, rows_from_samples

_KEY = b"lm_eval_icl.results"
Documents = dict[str, list[DocumentRow]]  # by task


def name_of(results: Mapping[str, Any], documents: Documents) -> str:
    """The name of a run's file: digests of its results and of its rows without the predicted texts."""
    rows = (
        (task, row, row.prediction if row.options else None)
        for task, rows in documents.items()
        for row in rows
    )
    texts = (
        json.dumps([task, *row[:6], *row[7:10], prediction], sort_keys=True)
        for task, row, prediction in rows
    )
    return f"{digest([json.dumps(results, sort_keys=True)])}-{digest(texts)[:8]}"


def load(path: Path) -> tuple[dict[str, Any], Documents]:
    """The results and rows of a file that `collect` has made; `Unusable` is raised for any other file."""
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
        results = json.loads(table.schema.metadata[_KEY])
        if any(not isinstance(at(results, key), dict) for key in ("results", "configs", "config")):
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
    return rows_from_samples(run.path, run.results, task)


def collect(runs: Sequence[Run], folder: Path) -> list[Path]:
    """Write each run to `<folder>/runs/<digest>.parquet`, whole or not at all. The same run makes the same bytes."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    written = []
    for run in runs:
        # Samples that cannot be used are not written, as the board does not use them.
        used = {result.task for result in run.all_results if result.answers is not None}
        documents = {task: document_rows(run, task) for task in run.tasks if task in used}
        columns = []
        for task, row in ((task, row) for task, rows in documents.items() for row in rows):
            prediction = row.prediction if row.options else None  # predicted texts are not written
            metrics = json.dumps(row.metrics, sort_keys=True)
            columns.append(
                {"task": task, **row._asdict(), "prediction": prediction, "metrics": metrics}
            )
        kinds = {**dict.fromkeys(("task", "filter", "document", "prompt", "demonstrations", "metrics"), pa.string()),
                 "doc_id": pa.int64(), **dict.fromkeys(("options", "prediction", "gold"), pa.int32()),
                 "logprobs": pa.list_(pa.float64())}  # fmt: skip
        schema = pa.schema(list(kinds.items()), {_KEY: json.dumps(run.results).encode()})
        path = folder / "runs" / f"{name_of(run.results, documents)}.parquet"
        with writing(f"--output {folder}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            half = path.with_suffix(".part")
            pq.write_table(pa.Table.from_pylist(columns, schema), half, compression="zstd")
            half.replace(path)
        written.append(path)
    return written


def faults(path: Path) -> list[str]:
    """Sentences about parts of a file of `collect` that contradict each other; none for a sound file. In such a file,
    the name is made of the digests of results and rows, all filters and rules have the same documents, predictions
    follow from log-likelihoods, accuracies follow from predictions, and the answers give the results' value of every
    metric that is computed from single documents."""
    results, documents = load(path)
    sentences = []
    if path.stem != name_of(results, documents):
        sentences.append(
            "was changed after `lm-eval-icl collect` wrote it, or was renamed: collect it again."
        )
    for task, task_rows in documents.items():
        by_filter = grouped(task_rows, lambda row: row.filter)
        prompts = [
            sorted((row.doc_id, row.document, row.prompt) for row in rows)
            for rows in by_filter.values()
        ]
        if any(filter_prompts != prompts[0] for filter_prompts in prompts):
            sentences.append(
                f"task {task!r}: the answers under its filters and rules are not to the same documents."
            )
        for row in task_rows:
            chosen = row.logprobs.index(max(row.logprobs)) if row.logprobs else row.prediction
            has_score = (
                row.gold is not None and isinstance(row.prediction, int) and "acc" in row.metrics
            )
            if (chosen != row.prediction and "metaicl" not in row.metrics) or (
                has_score and float(row.metrics["acc"]) != float(row.prediction == row.gold)
            ):
                sentences.append(
                    f"task {task!r}, document {row.doc_id}, {row.filter!r}: another answer or score."
                )
                break
        for key, value in mapping(results["results"].get(task)).items():
            metric, comma, filter_name = key.partition(",")
            if not comma or metric.endswith("_stderr") or number(value) is None:
                continue
            try:
                given = aggregated(
                    by_filter.get(filter_name, []), metric, mapping(results["configs"].get(task))
                )
            except ValueError as error:
                sentences.append(f"task {task!r}, {key}: {error}.")
            else:
                if given is not None and not math.isclose(
                    given, value, rel_tol=1e-9, abs_tol=1e-12
                ):
                    sentences.append(f"task {task!r}: the answers do not give its {key}.")
    return sentences
