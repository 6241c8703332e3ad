"""Which rows of a pool become demonstrations: drawn at random, stratified by label, the first ones, or given."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from lm_eval_icl.demonstrations import choices
from lm_eval_icl.errors import InputError

Row = TypeVar("Row")


def draw(
    pool: Sequence[Row],
    n: int,
    how: str,
    label: Callable[[Row], Any],
    rnd: Random,
    task: str,
    seed: int | None = None,
) -> list[Row]:
    """Draw n demonstrations from a pool.

    Args:
        how: "stratified", "random", "first", or the path of a JSON file with the rows' indices in the pool, in order:
            a list, {task name: list}, or a file of `choices`.
        label: returns the label of a row.
        rnd: the random number generator.
        task: the task's name, to find its indices in a file and for errors.
        seed: that of `rnd`, to find the indices in a file of choices.

    Raises:
        InputError: `how` is unknown, its file cannot be used, or the pool has fewer than n rows.
    """
    try:
        if n > len(pool):
            raise InputError(f"{n} demonstrations asked for, {len(pool)} there: lower --num_fewshot.")
        if how == "first":
            return list(pool[:n])
        if how == "random":
            return rnd.sample(list(pool), n)
        if how == "stratified":
            return stratified(pool, n, label, rnd)
        return [pool[index] for index in _indices(Path(how), n, pool, task, seed)]
    except InputError as error:
        raise InputError(f"task {task!r}: demonstrations={how}: {error.message}") from error


def stratified(pool: Sequence[Row], n: int, label: Callable[[Row], Any], rnd: Random) -> list[Row]:
    """Draw n rows in random order, the same number for each label as far as possible (as Deep-Thinking's code does).

    If n is not a multiple of the number of labels, the labels with one more row are drawn at random. If a label has too
    few rows, other labels get more.
    """
    by_label: dict[Any, list[Row]] = defaultdict(list)
    for row in pool:
        by_label[label(row)].append(row)
    groups = list(by_label.values())
    rnd.shuffle(groups)
    for group in groups:
        rnd.shuffle(group)
    drawn: list[Row] = []
    while len(drawn) < n:
        for group in groups:
            if group and len(drawn) < n:
                drawn.append(group.pop())
    rnd.shuffle(drawn)
    return drawn


def _indices(path: Path, n: int, pool: Sequence[Any], task: str, seed: int | None) -> list[int]:
    """The first n indices that a file has for a task."""
    if not path.is_file():
        raise InputError("must be stratified, random, first, or a JSON file of indices that exists.")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"not JSON ({error}).") from error
    if choices.is_file_of_choices(found):
        return choices.indices(found, n, pool, task, seed)
    if isinstance(found, dict):
        if task not in found:
            raise InputError(f"the file has no indices for this task, only for {', '.join(found)}.")
        found = found[task]
    if not isinstance(found, list) or not all(type(index) is int and 0 <= index < len(pool) for index in found):
        raise InputError(f"must hold a list of whole numbers from 0 to {len(pool) - 1}, or one for each task.")
    if len(found) < n:
        raise InputError(f"holds {len(found)} indices, {n} demonstrations asked for: lower --num_fewshot.")
    return found[:n]
