"""Runs as small files: lm-eval's results and what is needed of the samples, without any text of the documents.

A file is what lm-eval has written, with one more key, so it is still a results file for every tool that reads them:

    "icl_scores": {TASK: {"metric": "acc,none", "documents": DIGEST, "prompts": DIGEST, "demonstrations": DIGEST|null,
                          "n": 872, "items": {"dtype": "bit", "base64": "..."}, "predictions": {"dtype": "|u1", ...},
                          "chance": 0.5, "golds": {...}}}

`doc_ids` is there if the documents are not the first n; `pairs` says that an item is a pair of numbers. A task whose
samples could not be used has its `marks` alone.
"""

from __future__ import annotations

import base64
import json
import re
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from lm_eval_icl.errors import InputError
from lm_eval_icl.results.records import Answers, Run, TaskResult
from lm_eval_icl.results.samples import DOCUMENTS, Unusable

KEY = "icl_scores"
# How numbers are kept, the shortest first: those that do not change them are used.
_DTYPES = ("|u1", "<u2", "<u4", "<f4", "<f8")


def collect(runs: Sequence[Run], folder: Path) -> list[Path]:
    """Write each run to `<folder>/runs/<digest>.json`, whole or not at all. The same run makes the same bytes.

    Where tasks have no answers, the name says how many have some: such a file must not take the place of one with all.

    Returns:
        The files.

    Raises:
        InputError: they cannot be written.
    """
    written = []
    for run in runs:
        packed = {task: each for task, result in run.tasks.items() if (each := pack(result))}
        text = json.dumps({**run.results, **({KEY: packed} if packed else {})}, indent=2, ensure_ascii=False)
        answered = sum(result.answers is not None for result in run.tasks.values())
        missing = f"-{answered}of{len(run.tasks)}" if answered < len(run.tasks) else ""
        path = folder / "runs" / f"{run.digest}{missing}.json"
        half = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            half.write_text(text + "\n", encoding="utf-8")
            half.replace(path)
        except OSError as error:
            with suppress(OSError):
                half.unlink()
            raise InputError(f"--output {folder}: cannot be written ({error.strerror}).") from error
        written.append(path)
    return written


def pack(result: TaskResult) -> dict[str, Any]:
    """The answers to a task, or else the marks, as JSON; empty if there are neither."""
    answers = result.answers
    if answers is None:
        return {"marks": list(result.marks)} if result.marks else {}
    n = len(answers.items)
    return {
        "metric": f"{result.metric},{result.filter}",
        "documents": answers.documents,
        "prompts": answers.prompts,
        "demonstrations": answers.demonstrations,
        "n": n,
        **({} if np.array_equal(answers.doc_ids, np.arange(n)) else {"doc_ids": _encode(answers.doc_ids)}),
        **({"pairs": True} if answers.items.ndim == 2 else {}),
        "items": _encode(answers.items),
        **({} if answers.predictions is None else {"predictions": _encode(answers.predictions)}),
        "chance": answers.chance,
        **({} if answers.golds is None else {"golds": _encode(answers.golds)}),
    }


def unpack(packed: Any, metric: str) -> Answers | None:
    """The answers that `pack` has made JSON of; None if there are only marks.

    Args:
        metric: the metric and the filter that the answers must be of.

    Raises:
        Unusable: they are damaged, or of another metric.
    """
    if not isinstance(packed, Mapping):
        raise Unusable(f"its {KEY!r} is damaged")
    if "items" not in packed:
        return None
    n, demonstrations = packed.get("n"), packed.get("demonstrations")
    digests = [packed.get("documents"), packed.get("prompts"), *([] if demonstrations is None else [demonstrations])]
    if type(n) is not int or not 0 < n <= DOCUMENTS or packed.get("metric") != metric:
        raise Unusable(f"its {KEY!r} is not of {metric} of 1 to {DOCUMENTS:,} documents")
    if not all(isinstance(each, str) and re.fullmatch("[0-9a-f]{32}", each) for each in digests):
        raise Unusable(f"a digest in its {KEY!r} is damaged")
    chance = packed.get("chance")
    if chance is not None and not (type(chance) is float and 0 < chance <= 1):
        raise Unusable(f"the chance in its {KEY!r} is no probability")
    items = _decode(packed["items"], n * (2 if packed.get("pairs") is True else 1))
    ids = _decode(packed["doc_ids"], n) if "doc_ids" in packed else np.arange(float(n))
    predictions = _decode(packed["predictions"], n) if "predictions" in packed else None
    golds = _decode(packed["golds"], n) if "golds" in packed else None
    for whole in (ids, predictions, golds):
        if whole is not None and not np.all((whole >= 0) & (whole < 2**53) & (whole == np.floor(whole))):
            raise Unusable(f"a number in its {KEY!r} is not a whole one")
    if not np.all(np.diff(ids) > 0):
        raise Unusable(f"a document is in its {KEY!r} twice")
    return Answers(
        doc_ids=ids.astype(np.int64),
        documents=digests[0],
        prompts=digests[1],
        demonstrations=demonstrations,
        items=items.reshape(n, 2) if packed.get("pairs") is True else items,
        predictions=None if predictions is None else predictions.astype(np.int64),
        chance=chance,
        golds=None if golds is None else golds.astype(np.int64),
    )


def packed_marks(packed: Any) -> tuple[str, ...]:
    """The marks that `pack` has kept."""
    marks = packed.get("marks", []) if isinstance(packed, Mapping) else []
    if not isinstance(marks, list) or not all(isinstance(mark, str) and len(mark) < 1000 for mark in marks[:10]):
        raise Unusable(f"the marks in its {KEY!r} are damaged")
    return tuple(marks[:10])


def _encode(values: np.ndarray) -> dict[str, str]:
    flat = values.ravel()
    if np.all((flat == 0) | (flat == 1)):
        return {"dtype": "bit", "base64": base64.b64encode(np.packbits(flat.astype(bool)).tobytes()).decode()}
    with np.errstate(invalid="ignore", over="ignore"):
        dtype = next((dtype for dtype in _DTYPES if np.array_equal(flat.astype(dtype), flat)), "<f8")
    return {"dtype": dtype, "base64": base64.b64encode(flat.astype(dtype).tobytes()).decode()}


def _decode(entry: Any, n: int) -> np.ndarray:
    """(n,) floats."""
    try:
        dtype, data = entry["dtype"], base64.b64decode(entry["base64"], validate=True)
    except (TypeError, KeyError, ValueError):
        raise Unusable(f"the numbers in its {KEY!r} are damaged") from None
    if dtype == "bit" and len(data) == (n + 7) // 8:
        return np.unpackbits(np.frombuffer(data, np.uint8), count=n).astype(float)
    if dtype not in _DTYPES or len(data) != n * np.dtype(dtype).itemsize:
        raise Unusable(f"the numbers in its {KEY!r} are not of {n} documents")
    return np.frombuffer(data, dtype).astype(float)
