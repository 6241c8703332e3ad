"""Runs as one small Parquet file each, for a board that people share, and a check of such files (`packed`)."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from lm_eval_icl.errors import writing
from lm_eval_icl.results.board import grouped
from lm_eval_icl.results.packed import KEY, load, name_of
from lm_eval_icl.results.read import document_rows
from lm_eval_icl.results.records import Run, Unusable, mapping, number
from lm_eval_icl.results.tasks import aggregated


def collect(runs: Sequence[Run], folder: Path) -> list[Path]:
    """Write each run to `<folder>/runs/<digest>.parquet`, whole or not at all. The same run makes the same bytes.

    Returns:
        The files.

    Raises:
        InputError: they cannot be written.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    written = []
    for run in runs:
        rows = []
        for task in dict.fromkeys(result.task for result in run.all_results):
            try:
                rows += [(task, row) for row in document_rows(run, task)]
            except Unusable:
                continue  # which the results do without
        columns = [
            {
                "task": task,
                **row._asdict(),
                "prediction": row.prediction if type(row.prediction) is int else None,  # a text is no part of the file
                "metrics": json.dumps(row.metrics, sort_keys=True),
            }
            for task, row in rows
        ]
        text = json.dumps(run.results, ensure_ascii=False)
        kinds = {**dict.fromkeys(("task", "filter", "document", "prompt", "demonstrations", "metrics"), pa.string()),
                 "doc_id": pa.int64(), **dict.fromkeys(("options", "prediction", "gold"), pa.int32()),
                 "logprobs": pa.list_(pa.float64())}  # fmt: skip
        table = pa.Table.from_pylist(columns, pa.schema(list(kinds.items()), {KEY: text.encode()}))
        path = folder / "runs" / f"{name_of(run.results, rows)}.parquet"
        with writing(f"--output {folder}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            half = path.with_suffix(".part")
            pq.write_table(table, half, compression="zstd")
            half.replace(path)
        written.append(path)
    return written


def faults(path: Path) -> list[str]:
    """What of a file that `collect` has made does not belong together, as sentences; none for a whole run.

    Its name must be the digests of its results and rows. Whatever the name is, under every filter and decision rule the
    documents must be the same, each prediction must follow from the log-likelihoods and each accuracy from the
    prediction, and the answers must give the results' value of every metric that is made of single documents'.

    Raises:
        Unusable: it is damaged, or another kind of file.
    """
    results, documents = load(path)
    sentences = []
    if path.stem != name_of(results, [(task, row) for task, of_task in documents.items() for row in of_task]):
        sentences.append("was changed after `lm-eval-icl collect` wrote it, or was renamed: collect it again.")
    for task, of_task in documents.items():
        by_filter = grouped(of_task, lambda row: row.filter)
        asked = [sorted((row.doc_id, row.document, row.prompt) for row in rows) for rows in by_filter.values()]
        if any(of_filter != asked[0] for of_filter in asked):
            sentences.append(f"task {task!r}: the answers under its filters and rules are not to the same documents.")
        values = mapping(results["results"].get(task))
        for row in of_task:
            chosen = row.logprobs.index(max(row.logprobs)) if row.logprobs else row.prediction
            has_score = row.gold is not None and isinstance(row.prediction, int) and "acc" in row.metrics
            if (chosen != row.prediction and "metaicl" not in row.metrics) or (
                has_score and float(row.metrics["acc"]) != float(row.prediction == row.gold)
            ):
                sentences.append(
                    f"task {task!r}: document {row.doc_id} under {row.filter!r} has another answer or score."
                )
                break
        for key, value in values.items():
            metric, comma, of_filter = key.partition(",")
            if not comma or metric.endswith("_stderr") or number(value) is None:
                continue
            try:
                given = aggregated(by_filter.get(of_filter, []), metric, mapping(results["configs"].get(task)))
            except Unusable as error:
                sentences.append(f"task {task!r}, {key}: {error}.")
            else:
                if given is not None and not math.isclose(given, value, rel_tol=1e-9, abs_tol=1e-12):
                    sentences.append(f"task {task!r}: the answers do not give its {key}.")
    return sentences
