"""The rows for whose label the model is least certain, by three measures (Coleman et al. 2019).

With two labels, all three measures put rows into the same order.
"""

from __future__ import annotations

from random import Random

import numpy as np

from lm_eval_icl.demonstrations.pool import Picks, Pool


def entropy(pool: Pool, n: int, generator: Random) -> list[int]:
    """Pick the rows with the largest entropy of the labels' probabilities."""
    probabilities = pool.distributions()
    logs = np.log(np.where(probabilities > 0, probabilities, 1))
    return _highest(pool, n, -(probabilities * logs).sum(1))


def least_confidence(pool: Pool, n: int, generator: Random) -> list[int]:
    """Pick the rows with the smallest probability of the most probable label."""
    return _highest(pool, n, -pool.distributions().max(1))


def margin(pool: Pool, n: int, generator: Random) -> list[int]:
    """Pick the rows with the smallest difference between the probabilities of the two most probable labels."""
    second, highest = np.sort(pool.distributions(), axis=1)[:, -2:].T
    return _highest(pool, n, second - highest)


def _highest(pool: Pool, n: int, scores: np.ndarray) -> list[int]:
    picks = Picks(pool)
    picks.best(scores, n)
    return picks.rows
