"""Chooses demonstrations by a selector with a given name, the same number from each class."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from random import Random
from typing import Any

import numpy as np

from lm_eval_icl.demonstrations.cal import cal
from lm_eval_icl.demonstrations.craig import craig
from lm_eval_icl.demonstrations.gradmatch import gradmatch
from lm_eval_icl.demonstrations.herding import herding
from lm_eval_icl.demonstrations.k_center import k_center
from lm_eval_icl.demonstrations.pool import Pool
from lm_eval_icl.demonstrations.submodular import facility_location, graph_cut
from lm_eval_icl.demonstrations.uncertainty import entropy, least_confidence, margin
from lm_eval_icl.errors import InputError, did_you_mean, is_number, is_whole

Selector = Callable[
    ..., list[int]
]  # (pool, n, generator, **arguments) -> rows of the pool in the order of picking
_ALL = (
    herding,
    k_center,
    entropy,
    least_confidence,
    margin,
    cal,
    craig,
    gradmatch,
    facility_location,
    graph_cut,
)
_MUST = {bool: "true or false", int: "a whole number from 1", float: "a number from 0"}
SELECTORS: Mapping[str, Selector] = {selector.__name__: selector for selector in _ALL}


def arguments_of(selector: Selector) -> dict[str, Any]:
    """The arguments of a selector that a user may give, with their defaults."""
    parameters = inspect.signature(selector).parameters.values()
    return {p.name: p.default for p in parameters if p.kind == p.KEYWORD_ONLY}


def select(
    how: str, pool: Pool, n: int, seed: int, balance: bool = True, **arguments: Any
) -> tuple[int, ...]:
    """Choose n rows of a pool without duplicates.

    Args:
        how: the name of a selector.
        seed: the seed of the selector's random choices, and of the classes that get one row more than others.
        balance: choose inside each class, the same number as far as possible (see `quotas`).

    Returns:
        The rows in the order of picking. With class balance, these are the first row of each class, then the second row
        of each class, and so on. `in_prompt_order` puts them into the order of a prompt.
    """
    check_n(how, pool, n)
    selector, generator = SELECTORS[how], Random(seed)
    if not balance:
        return tuple(selector(pool, n, generator, **arguments))
    picked = []
    for label, quota in quotas(pool, n, generator).items():
        rows = np.flatnonzero(pool.labels == label)
        picked.append(
            [int(rows[row]) for row in selector(pool.at(rows), quota, generator, **arguments)]
        )
    return tuple(row for turn in zip_longest(*picked) for row in turn if row is not None)


def in_prompt_order(rows: Sequence[int], seed: int) -> tuple[int, ...]:
    """The order of rows in a prompt: shuffled by the seed, whatever the order in which they were picked."""
    ordered = sorted(rows)
    Random(f"order {seed}").shuffle(
        ordered
    )  # a text as the seed: independent of other choices with this seed
    return tuple(ordered)


def quotas(pool: Pool, n: int, generator: Random) -> dict[int, int]:
    """How many of n rows each class gets: n // C, and one more in n mod C classes, which are drawn.

    If a class has too few rows, the other classes get more in turns, as in a stratified draw. Classes that get rows are
    in the order in which they were drawn.

    Raises:
        InputError: a class has no rows.
    """
    available = np.bincount(pool.labels, minlength=pool.classes)
    if not available.all():
        raise InputError(
            f"label {int(np.argmin(available))} has no rows in the pool of {len(pool.labels)}: take a larger pool, or "
            "choose without balance."
        )
    labels = list(range(pool.classes))
    generator.shuffle(labels)
    counts = dict.fromkeys(labels, 0)
    while (missing := n - sum(counts.values())) > 0:
        for label in [label for label in labels if counts[label] < available[label]][:missing]:
            counts[label] += 1
    return {label: count for label, count in counts.items() if count}


def check_n(how: str, pool: Pool, n: int) -> None:
    """Raise an `InputError` if the pool has fewer than n rows."""
    if n > len(pool.labels):
        raise InputError(
            f"{how}: {n} demonstrations are asked for, and the pool has {len(pool.labels)}: lower --num_fewshot or "
            "raise pool."
        )


def checked(how: str, arguments: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a method, converted to the types of their defaults.

    Raises:
        InputError: there is no such argument, or its value has another type or is below its range.
    """
    values = {}
    for name, value in arguments.items():
        if name not in defaults:
            raise InputError(f"{how}: unknown argument {name!r}: {near(name, defaults)}")
        kind = type(defaults[name])
        whole, number = is_whole(value) and value >= 1, is_number(value) and value >= 0
        good = isinstance(value, bool) if kind is bool else whole if kind is int else number
        if not good:
            raise InputError(f"{how}: {name}={value!r}: must be {_MUST[kind]}.")
        values[name] = kind(value)
    return values


def near(name: str, names: Iterable[str], otherwise: str = "there are ") -> str:
    """The advice about an unknown name: the most similar one of the known names, or all of them after `otherwise`."""
    return did_you_mean(str(name).lower(), names) or f"{otherwise}{', '.join(names)}."
