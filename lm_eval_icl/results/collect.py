"""Runs as small files: lm-eval's results and what is needed of the samples, without any text of the documents.

A file is what lm-eval has written, with one more key, so it is still a results file for every tool that reads them:

    "icl_scores": {TASK: {"metric": "acc,none", "documents": DIGEST, "prompts": DIGEST, "demonstrations": DIGEST|null,
                          "n": 872, "items": {"dtype": "bit", "base64": "..."}, "predictions": {"dtype": "|u1", ...},
                          "chance": 0.5, "golds": {...}, "rules": {RULE: {"metric": "acc,batch", ...}}}}

`doc_ids` is there if the documents are not the first n; `pairs` says that an item is a pair of numbers; `rules` has the
same of each decision rule. A task whose samples could not be used has its `marks` alone.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from lm_eval_icl.errors import writing
from lm_eval_icl.files import write_atomically
from lm_eval_icl.results.form import Numbers, Packed, PackedAnswers, Unusable, refusal
from lm_eval_icl.results.records import Answers, Run, TaskResult

KEY = "icl_scores"
# How numbers are kept, the shortest first: those that do not change them are used.
_DTYPES = ("|u1", "<u2", "<u4", "<f4", "<f8")


def collect(runs: Sequence[Run], folder: Path) -> list[Path]:
    """Write each run to `<folder>/runs/<digest>.json`, whole or not at all. The same run makes the same bytes.

    Where tasks, or decision rules, have no answers, the name says how many have some: such a file must not take the
    place of one with all.

    Returns:
        The files.

    Raises:
        InputError: they cannot be written.
    """
    written = []
    for run in runs:
        packed = {task: _pack(result) for task, result in run.tasks.items()}
        for result in run.decided:
            if (kept := _pack(result)) and result.rule is not None:
                packed.setdefault(result.task, {}).setdefault("rules", {})[result.rule.name] = kept
        packed = {task: kept for task, kept in packed.items() if kept}
        text = json.dumps({**run.results, **({KEY: packed} if packed else {})}, indent=2, ensure_ascii=False)
        results = len(run.all_results)
        missing = f"-{run.answered}of{results}" if run.answered < results else ""
        path = folder / "runs" / f"{run.digest}{missing}.json"
        with writing(f"--output {folder}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, text + "\n")
        written.append(path)
    return written


def _pack(result: TaskResult) -> dict[str, Any]:
    """The answers to a task, or else the marks, as JSON; empty if there are neither."""
    answers = result.answers
    if answers is None:
        return {"marks": list(result.marks)} if result.marks else {}
    n = len(answers.items)
    return {
        "metric": f"{result.metric},{result.reported_filter}",
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


def unpack(packed: Any, metric: str) -> tuple[Answers | None, list[str]]:
    """The answers that `collect` has made JSON of, or None, and the marks.

    Args:
        metric: the metric and the filter that the answers must be of.

    Raises:
        Unusable: they are damaged, or of another metric.
    """
    try:
        kept = Packed.model_validate(packed)
        if "items" not in packed:
            return None, kept.marks
        answers = PackedAnswers.model_validate(packed)
    except ValidationError as error:
        raise Unusable(f"its {KEY!r} is damaged ({refusal(error)})") from None
    n = answers.n
    if answers.metric != metric:
        raise Unusable(f"its {KEY!r} is not of {metric}")
    items = _decode(answers.items, n * (2 if answers.pairs else 1))
    ids, predictions, golds = (
        None if numbers is None else _decode(numbers, n)
        for numbers in (answers.doc_ids, answers.predictions, answers.golds)
    )
    for whole in (ids, predictions, golds):
        if whole is not None and not np.all((whole >= 0) & (whole < 2**53) & (whole == np.floor(whole))):
            raise Unusable(f"a number in its {KEY!r} is not a whole one")
    ids = np.arange(n) if ids is None else ids.astype(np.int64)
    if not np.all(np.diff(ids) > 0):
        raise Unusable(f"a document is in its {KEY!r} twice")
    return Answers(
        doc_ids=ids,
        documents=answers.documents,
        prompts=answers.prompts,
        demonstrations=answers.demonstrations,
        items=items.reshape(n, 2) if answers.pairs else items,
        predictions=None if predictions is None else predictions.astype(np.int64),
        chance=answers.chance,
        golds=None if golds is None else golds.astype(np.int64),
    ), kept.marks


def _encode(values: np.ndarray) -> dict[str, str]:
    flat = values.ravel()
    if np.all((flat == 0) | (flat == 1)):
        return {"dtype": "bit", "base64": base64.b64encode(np.packbits(flat.astype(bool)).tobytes()).decode()}
    with np.errstate(invalid="ignore", over="ignore"):
        dtype = next((dtype for dtype in _DTYPES if np.array_equal(flat.astype(dtype), flat)), "<f8")
    return {"dtype": dtype, "base64": base64.b64encode(flat.astype(dtype).tobytes()).decode()}


def _decode(numbers: Numbers, n: int) -> np.ndarray:
    """(n,) floats."""
    try:
        data = base64.b64decode(numbers.base64, validate=True)
    except ValueError:
        raise Unusable(f"the numbers in its {KEY!r} are damaged") from None
    bits = numbers.dtype == "bit"
    if len(data) != ((n + 7) // 8 if bits else n * np.dtype(numbers.dtype).itemsize):
        raise Unusable(f"the numbers in its {KEY!r} are not of {n} documents")
    if bits:
        return np.unpackbits(np.frombuffer(data, np.uint8), count=n).astype(float)
    return np.frombuffer(data, numbers.dtype).astype(float)
