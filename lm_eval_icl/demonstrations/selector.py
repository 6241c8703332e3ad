"""Chooses demonstrations by a selector, the same number from each class."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from random import Random
from typing import ClassVar

import numpy as np

from lm_eval_icl.declared import Arguments, Positive
from lm_eval_icl.demonstrations.pool import Pool
from lm_eval_icl.errors import InputError


@dataclass(frozen=True)
class SelectionMethod(Arguments):
    """A method by which a model chooses demonstrations, with its arguments.

    It is either a `Selector`, or one of the two searches of `searches`, which run the model often.

    Args:
        balance: choose inside each class, the same number as far as possible (see `quotas`).
        pool: how many documents are candidates.
    """

    name: ClassVar[str]

    balance: bool = True
    pool: Positive = 5000


class Selector(SelectionMethod, ABC):
    """A method that picks rows by the model's outputs on the pool.

    A new one is a class in `selectors` with a line in `SELECTORS`. What a selector may know of a
    document is a field of `Pool`, which `Chooser` fills.
    """

    @abstractmethod
    def pick(self, pool: Pool, n: int, generator: Random) -> list[int]:
        """Pick n rows of the pool, in the order of picking.

        The first rows do not depend on n, and a tie goes to the lowest row (`Picks`).

        Args:
            pool: with class balance, the rows of one class.
            generator: for random choices.
        """


def select(how: Selector, pool: Pool, n: int, seed: int) -> tuple[int, ...]:
    """Choose n rows of a pool without duplicates.

    Args:
        seed: the seed of the selector's random choices, and of the classes that get one row more
            than others.

    Returns:
        The rows in the order of picking. With class balance, these are the first row of each class,
        then the second row of each class, and so on. `in_prompt_order` puts them into the order of
        a prompt.
    """
    check_n(how, pool, n)
    generator = Random(seed)
    if not how.balance:
        return tuple(how.pick(pool, n, generator))
    picked = []
    for label, quota in quotas(pool, n, generator).items():
        rows = np.flatnonzero(pool.labels == label)
        picked.append(rows[how.pick(pool.at(rows), quota, generator)].tolist())
    by_turns: list[int] = []
    for turn in zip_longest(*picked):
        by_turns += [row for row in turn if row is not None]
    return tuple(by_turns)


def in_prompt_order(rows: Sequence[int], seed: int) -> tuple[int, ...]:
    """The order of rows in a prompt: shuffled by the seed, in whatever order they were picked."""
    ordered = sorted(rows)
    # The seed is a text, so that the order is independent of other choices with this seed.
    Random(f"order {seed}").shuffle(ordered)
    return tuple(ordered)


def quotas(pool: Pool, n: int, generator: Random) -> dict[int, int]:
    """How many of n rows each class gets: n // C, and one more in n mod C classes, which are drawn.

    If a class has too few rows, the other classes get more in turns, as in a stratified draw.
    Classes that get rows are in the order in which they were drawn.

    Raises:
        InputError: a class has no rows.
    """
    available = np.bincount(pool.labels, minlength=pool.classes)
    if not available.all():
        raise InputError(
            f"label {int(np.argmin(available))} has no rows in the pool of {len(pool.labels)} "
            "rows: raise pool=, or give balance=False."
        )
    labels = list(range(pool.classes))
    generator.shuffle(labels)
    counts = dict.fromkeys(labels, 0)
    while (missing := n - sum(counts.values())) > 0:
        with_rows = [label for label in labels if counts[label] < available[label]]
        for label in with_rows[:missing]:
            counts[label] += 1
    return {label: count for label, count in counts.items() if count}


def check_n(how: SelectionMethod, pool: Pool, n: int) -> None:
    """Raise an `InputError` if the pool has fewer than n rows."""
    if n > len(pool.labels):
        raise InputError(
            f"{how.name}: {n} demonstrations are asked for, and the pool has {len(pool.labels)} "
            "rows: lower --num_fewshot, or raise pool=."
        )
