"""Choosing demonstrations by a method's name, the same number from each class."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Selector:
    """A method that chooses rows of a pool.

    Attributes:
        function: (pool, n, generator of random numbers, **arguments) -> the rows in the order of picking. The pool has
            n rows at least, and n is 1 at least.
        needs: which attributes of the pool it reads. One that reads "labels" means the same C labels for every
            document, as class balance does for any method.
    """

    function: Callable[..., list[int]]
    needs: tuple[str, ...]

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments that a user may give, with their defaults."""
        parameters = inspect.signature(self.function).parameters.values()
        return {p.name: p.default for p in parameters if p.kind == p.KEYWORD_ONLY}


_ALL = ("labels", "features", "probabilities")
SELECTORS = {
    "herding": Selector(herding, ("features",)),
    "k_center": Selector(k_center, ("features",)),
    "entropy": Selector(entropy, ("probabilities",)),
    "least_confidence": Selector(least_confidence, ("probabilities",)),
    "margin": Selector(margin, ("probabilities",)),
    "cal": Selector(cal, _ALL),
    "craig": Selector(craig, _ALL),
    "gradmatch": Selector(gradmatch, _ALL),
    "facility_location": Selector(facility_location, _ALL),
    "graph_cut": Selector(graph_cut, _ALL),
}


def select(how: str, pool: Pool, n: int, seed: int, balance: bool = True, **arguments: Any) -> tuple[int, ...]:
    """Choose n rows of a pool.

    The caller has taken out documents that are there twice. The first m rows are what would be chosen for m.

    Args:
        how: the name of a selector.
        seed: for what a method leaves to chance, and for which classes have one row more than others.
        balance: choose inside each class, the same number as far as possible (see `quotas`).
        arguments: the method's.

    Returns:
        The rows in the order of picking, with class balance the first of each class, the second of each class and so
        on. `in_prompt_order` has the order for a prompt.

    Raises:
        InputError: there is no such method or argument, or the pool is not enough for it.
    """
    if how not in SELECTORS:
        raise InputError(f"unknown selector {how!r}: {near(how, SELECTORS)}")
    selector = SELECTORS[how]
    values = checked(how, arguments, selector.arguments)
    for need in selector.needs:
        if getattr(pool, need) is None:
            raise InputError(f"{how}: needs {need} of the pool's documents: choose a selector that does not.")
    check_n(how, pool, n)
    generator = Random(seed)
    if n == 0:
        return ()
    if not balance:
        return tuple(selector.function(pool, n, generator, **values))
    picked = []
    for label, quota in quotas(pool, n, generator).items():
        rows = np.flatnonzero(pool.labels == label)
        picked.append([int(rows[row]) for row in selector.function(pool.at(rows), quota, generator, **values)])
    return tuple(row for turn in zip_longest(*picked) for row in turn if row is not None)


def in_prompt_order(rows: Sequence[int], seed: int) -> tuple[int, ...]:
    """A set of rows as they stand in a prompt: shuffled by the seed, whatever the order in which they were picked."""
    ordered = sorted(rows)
    # A seed of its own, so that the order has nothing to do with what the same seed decided in choosing.
    Random(f"order {seed}").shuffle(ordered)
    return tuple(ordered)


def quotas(pool: Pool, n: int, generator: Random) -> dict[int, int]:
    """How many of n rows are of each class: n // C, and one more for n mod C classes that are drawn.

    Where a class has too few rows, the others get more in turns, as in a stratified draw. The classes that get any are
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
    """Refuse a number of rows that cannot be chosen, by an `InputError`."""
    if not is_whole(n) or n < 0:
        raise InputError(f"{how}: n={n!r}: must be a whole number from 0.")
    if n > len(pool.labels):
        raise InputError(
            f"{how}: {n} demonstrations asked for, {len(pool.labels)} in the pool: lower --num_fewshot or raise --pool."
        )


def checked(how: str, arguments: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a method as the types that their defaults have.

    Raises:
        InputError: there is no such argument, or its value is of another type or below its range.
    """
    values = {}
    for name, value in arguments.items():
        if name not in defaults:
            advice = near(name, defaults) if defaults else "it takes none."
            raise InputError(f"{how}: unknown argument {name!r}: {advice}")
        kind = type(defaults[name])
        if kind is bool:
            good, must = isinstance(value, bool), "true or false"
        elif kind is int:
            good, must = is_whole(value) and value >= 1, "a whole number from 1"
        else:
            good, must = is_number(value) and value >= 0, "a number from 0"
        if not good:
            raise InputError(f"{how}: {name}={value!r}: must be {must}.")
        values[name] = kind(value)
    return values


def near(name: str, names: Iterable[str], otherwise: str = "there are ") -> str:
    """The advice about a name that is none of these: the nearest of them, or all."""
    return did_you_mean(str(name).lower(), names) or f"{otherwise}{', '.join(names)}."
