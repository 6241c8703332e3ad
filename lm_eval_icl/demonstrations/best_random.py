"""The best of many random sets of demonstrations, by their accuracy on separate documents (Li and Qiu 2023)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from lm_eval_icl.demonstrations.draw import stratified
from lm_eval_icl.demonstrations.pool import Pool
from lm_eval_icl.demonstrations.select import check_n

Rows = tuple[int, ...]


@dataclass(frozen=True)
class ScoredSet:
    """A set of demonstrations with its score, as a search returns it.

    Attributes:
        rows: the rows in the order of the prompt, which is a part of the search.
        accuracy: the accuracy on the documents of the search.
        log_probability: the mean log-probability of the right label, which decides between equal accuracies.
    """

    rows: Rows
    accuracy: float
    log_probability: float


def best_random(
    pool: Pool,
    n: int,
    generator: Random,
    score: Callable[[Rows], tuple[float, float]],
    *,
    sets: int,
    balance: bool = True,
) -> ScoredSet:
    """Draw ordered sets of demonstrations, and keep the set with the highest accuracy.

    Ties are decided by the mean log-probability of the right label, and then by the order of drawing.

    Args:
        score: returns the accuracy of a set and the mean log-probability of the right label, on the same documents in
            every call. None of these documents may be in the pool.
        sets: how many sets are drawn.
        balance: draw the same number from each class as far as possible.

    Raises:
        InputError: the pool has fewer than n rows.
    """
    check_n("best_random", pool, n)
    rows = range(len(pool.labels))
    drawn = [
        tuple(
            stratified(rows, n, lambda row: pool.labels[row], generator)
            if balance
            else generator.sample(rows, n)
        )
        for _ in range(sets)
    ]
    results = [ScoredSet(chosen, *score(chosen)) for chosen in drawn]
    return max(results, key=lambda result: (result.accuracy, result.log_probability))
