"""K-center greedy (Sener and Savarese 2018, Algorithm 1): rows such that every row of the pool is near a pick."""

from __future__ import annotations

from random import Random

import numpy as np

from lm_eval_icl.demonstrations.pool import Picks, Pool


def k_center(pool: Pool, n: int, generator: Random, *, unit: bool = False) -> list[int]:
    """Pick a random row, then each time the row that is the farthest from all picks.

    (The paper begins with rows that are labelled already. Here, there are no such rows.)

    Args:
        unit: scale features to length 1.
    """
    vectors = pool.vectors(unit)
    picks, row = Picks(pool), generator.randrange(len(vectors))
    picks.take(row)
    nearest = np.linalg.norm(vectors - vectors[row], axis=1)
    while len(picks.rows) < n:
        row = picks.best(nearest)
        nearest = np.minimum(nearest, np.linalg.norm(vectors - vectors[row], axis=1))
    return picks.rows
