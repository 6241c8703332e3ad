"""The Parquet files that `collect` makes: a run's results, and the documents' rows without any text of theirs.

The results are JSON in the file's metadata, under `KEY`. The columns are those of `samples.DocumentRow`, and the task;
the answers under every decision rule are there as those of the model itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_eval_icl.errors import one_line
from lm_eval_icl.results.fields import digest
from lm_eval_icl.results.records import Unusable
from lm_eval_icl.results.samples import DocumentRow

KEY = b"lm_eval_icl.results"
Documents = dict[str, list[DocumentRow]]  # by task


def name_of(results: Mapping[str, Any], rows: Sequence[tuple[str, DocumentRow]]) -> str:
    """The name of the file of a run: digests of its results and of its rows."""
    texts = (json.dumps([task, *row[:6], row[7], row[8], row.metrics], sort_keys=True) for task, row in rows)
    predictions = (str(row.prediction) for _, row in rows if isinstance(row.prediction, int))
    return f"{digest([json.dumps(results, sort_keys=True)])}-{digest([*texts, *predictions])[:8]}"


def load(path: Path) -> tuple[dict[str, Any], Documents]:
    """The results and rows of a file that `collect` has made.

    Raises:
        Unusable: it is damaged, or another kind of file.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            text = (file.schema_arrow.metadata or {}).get(KEY)
            if text is None:
                raise Unusable("is no file of `lm-eval-icl collect`")
            table = file.read()
        results = json.loads(text)
        if not isinstance(results, dict) or not isinstance(results.get("results"), dict):
            raise Unusable("is no file of `lm-eval-icl collect`")
        documents: Documents = {}
        values = table.select(["task", *DocumentRow._fields[:-1]]).to_pydict()
        values["metrics"] = [json.loads(metrics) for metrics in values["metrics"]]
        values["logprobs"] = [tuple(logprobs) for logprobs in values["logprobs"]]
        for task, *row in zip(*values.values(), strict=True):
            documents.setdefault(task, []).append(DocumentRow(*row))
    except Unusable:
        raise
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise Unusable(f"is damaged, or no file of `lm-eval-icl collect` ({one_line(error)[:200]})") from None
    return results, documents
