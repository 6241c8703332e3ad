"""Draws demonstrations from a pool: at random, stratified by label, the first, or those of a file.

No evaluated document becomes a demonstration, since its prompt would contain its answer.

A file of choices, which `lm-eval-icl select` writes and runs read, is {"about": {how, model,
version}, "tasks": {task: {"n": 8, "pool": {"rows": 6920, "sha256": "..."}, "seeds": {"0":
{"indices": [in the order of the prompt], ...}}}}}.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from lm_eval_icl.errors import InputError
from lm_eval_icl.files import as_json, digest

Row = TypeVar("Row")
# The ways of drawing. They need no model.
DRAWN = ("stratified", "random", "first")


def draw(
    pool: Sequence[Row],
    n: int,
    how: str,
    label: Callable[[Row], Any],
    evaluated: Callable[[Row], bool],
    rnd: Random,
    task: str,
    seed: int | None = None,
) -> tuple[list[int], int]:
    """Draw n demonstrations from a pool, none of which is an evaluated document.

    Args:
        how: "stratified", "random", "first", or the path of a JSON file: a list of the rows'
            indices, in order; such a list for each seed ({"0": [7, 2], "1": [5, 9]}); or a file of
            choices.
        label: returns the label of a row.
        evaluated: whether a row is an evaluated document. If such a row is drawn, another row takes
            its place: with "first", the next row of the pool; otherwise a row that is drawn, and
            with "stratified" has the same label if possible. The other rows keep their places.
        rnd: the random number generator.
        task, seed: the task's name and the seed of `rnd`. They are the keys of a choice in a file
            of choices.

    Returns:
        The rows' indices, and how many rows have been replaced.

    Raises:
        InputError: `how` is unknown, its file cannot be used or names a row that is evaluated, or
            the pool has fewer than n rows that are not evaluated.
    """
    indices = range(len(pool))
    if n > len(pool):
        raise InputError(
            f"{n} demonstrations are asked for, and the pool has {len(pool)} rows: lower "
            "--num_fewshot."
        )
    if how == "first":
        drawn = list(indices[:n])
    elif how == "random":
        drawn = rnd.sample(indices, n)
    elif how == "stratified":
        drawn = stratified(indices, n, lambda row: label(pool[row]), rnd)
    else:
        drawn = _indices(Path(how), n, pool, task, seed)
    closed = [row for row in drawn if evaluated(pool[row])]
    if closed and how not in DRAWN:
        raise InputError(
            f"row {closed[0]} is also among the documents that are evaluated, as a row or by its "
            "text: name another."
        )
    rest = [row for row in indices if row not in drawn] if closed else []
    if how != "first":
        Random(f"in place of what is evaluated {seed}").shuffle(rest)
    for old in closed:
        same_label = rest
        if how == "stratified":
            same_label = [row for row in rest if label(pool[row]) == label(pool[old])]
        new = next((row for row in chain(same_label, rest) if not evaluated(pool[row])), None)
        if new is None:
            raise too_few(n, sum(not evaluated(row) for row in pool))
        drawn[drawn.index(old)] = new
        rest.remove(new)
    return drawn, len(closed)


def as_text(query: str, options: Iterable[str]) -> str:
    """A document's text: its query and its sorted options, in lower case and with single blanks.

    (In some tasks, all documents have the same query, and only their options differ.)
    """
    return json.dumps([" ".join(text.lower().split()) for text in (query, *sorted(options))])


def too_few(n: int, free: int) -> InputError:
    """The error for a pool in which only `free` documents, fewer than n, are not evaluated."""
    return InputError(
        f"{n} demonstrations are asked for, and only {free} of the pool's documents are not "
        "evaluated: the demonstrations would come from the documents that are evaluated (the same "
        "rows, or the same texts). Give the task another fewshot_split, such as its training split."
    )


def stratified(pool: Sequence[Row], n: int, label: Callable[[Row], Any], rnd: Random) -> list[Row]:
    """Draw n rows in random order, the same number for each label as far as possible.

    This is the draw of Deep-Thinking's code. If n is not a multiple of the number of labels, the
    labels with one more row are drawn at random. If a label has too few rows, other labels get more
    rows.
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


def pool_digest(pool: Sequence[Any]) -> str:
    """The SHA-256 of a pool's rows as JSON, which identifies the pool."""
    return digest("".join(f"{as_json(row)}\n" for row in pool))


def _indices(path: Path, n: int, pool: Sequence[Any], task: str, seed: int | None) -> list[int]:
    """The first n indices in a file."""
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"must be stratified, random, first, or a JSON file of indices ({error})."
        ) from error
    if isinstance(contents, dict) and isinstance(contents.get("tasks"), dict):
        return _chosen(contents["tasks"], n, pool, task, seed)
    if isinstance(contents, dict):
        contents = contents.get(str(seed))
    indices: list[Any] = contents if isinstance(contents, list) else [None]
    if not all(type(index) is int and 0 <= index < len(pool) for index in indices):
        raise InputError(
            f"must hold a list of whole numbers from 0 to {len(pool) - 1}, or one for each seed, "
            f"such as {seed}."
        )
    if len(indices) < n:
        raise InputError(
            f"{n} demonstrations are asked for, and the file has {len(indices)}: lower "
            "--num_fewshot."
        )
    return indices[:n]


def _chosen(
    tasks: dict[str, Any], n: int, pool: Sequence[Any], task: str, seed: int | None
) -> list[int]:
    """The rows that a file of choices has for a task and a seed, in the order of the prompt."""
    if (chosen := tasks.get(task)) is None:
        raise InputError(f"the file has no choice for this task, only for {', '.join(tasks)}.")
    if chosen["n"] != n:
        raise InputError(
            f"{chosen['n']} demonstrations were chosen and {n} are asked for: give --num_fewshot "
            f"{chosen['n']}, or choose {n}."
        )
    if chosen["pool"]["sha256"] != pool_digest(pool):
        raise InputError(
            "the demonstrations were chosen from another pool: the data has changed since. Choose "
            "again."
        )
    if str(seed) not in chosen["seeds"]:
        raise InputError(
            f"nothing was chosen for seed {seed}, only for {', '.join(chosen['seeds'])}: give one "
            f"of these as the fourth number of --seed, or choose for seed {seed}."
        )
    return list(chosen["seeds"][str(seed)]["indices"])
