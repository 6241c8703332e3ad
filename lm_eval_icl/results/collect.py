"""Runs as one small Parquet file each, for a board that people share, and a check of such files (`packed`)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from lm_eval_icl.errors import writing
from lm_eval_icl.results.packed import KEY, load, name_of
from lm_eval_icl.results.read import document_rows
from lm_eval_icl.results.records import Run, Unusable, at
from lm_eval_icl.results.samples import DocumentRow


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
        columns = {
            "task": pa.array([task for task, _ in rows], pa.string()),
            **{
                name: pa.array([getattr(row, name) for _, row in rows], kind)
                for name, kind in (("filter", pa.string()), ("doc_id", pa.int64()), ("document", pa.string()),
                                   ("prompt", pa.string()), ("demonstrations", pa.string()), ("options", pa.int32()),
                                   ("gold", pa.int32()))
            },
            "prediction": pa.array([p if type(p := row.prediction) is int else None for _, row in rows], pa.int32()),
            "logprobs": pa.array([list(row.logprobs) for _, row in rows], pa.list_(pa.float64())),
            "metrics": pa.array([json.dumps(row.metrics, sort_keys=True) for _, row in rows], pa.string()),
        }  # fmt: skip
        text = json.dumps(run.results, ensure_ascii=False)
        table = pa.table(columns).replace_schema_metadata({KEY: text.encode()})
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

    Its name must be the digests of its results and rows; every value of a task, those under decision rules too, must
    have rows; their mean must be the value, and each document's accuracy must follow from prediction and right option.

    Raises:
        Unusable: it is damaged, or another kind of file.
    """
    results, documents = load(path)
    sentences = []
    rows = [(task, row) for task, of_task in documents.items() for row in of_task]
    if path.stem != name_of(results, rows):
        sentences.append("was changed after `lm-eval-icl collect` wrote it, or was renamed: collect it again.")
    for task, of_task in documents.items():
        by_filter: dict[str, list[DocumentRow]] = {}
        for row in of_task:
            by_filter.setdefault(row.filter, []).append(row)
        values = results["results"].get(task) or {}
        for key, value in values.items():
            metric, comma, of_filter = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            if of_filter not in by_filter:
                sentences.append(f"task {task!r}: there are no answers for its {key}.")
                continue
            items = [row.metrics.get(metric) for row in by_filter[of_filter]]
            known = [float(item) for item in items if isinstance(item, int | float)]
            listed = results["configs"].get(task, {}).get("metric_list") or []
            is_own = any(at(e, "metric") == metric and at(e, "aggregation") not in (None, "mean") for e in listed)
            is_mean = metric in ("acc", "acc_norm", "exact_match") and len(known) == len(items) and not is_own
            if is_mean and abs(sum(known) / len(known) - value) > 1e-9:
                sentences.append(f"task {task!r}: the answers do not give its {key}.")
        for row in of_task:
            has_score = row.gold is not None and isinstance(row.prediction, int) and "acc" in row.metrics
            if has_score and float(row.metrics["acc"]) != float(row.prediction == row.gold):
                sentences.append(f"task {task!r}: document {row.doc_id} under {row.filter!r} has another score.")
                break
    return sentences
