"""Herding (Welling 2009; Chen, Welling and Smola 2010): rows whose mean is near the mean of the pool."""

from __future__ import annotations

from random import Random

import numpy as np

from lm_eval_icl.demonstrations.pool import Picks, Pool


def herding(pool: Pool, n: int, generator: Random, *, unit: bool = False) -> list[int]:
    """After t picks, pick the row nearest to (t + 1) times the mean of the pool less the sum of the picks.

    Args:
        unit: scale features to length 1, which makes this kernel herding without replacement.
    """
    vectors = pool.vectors(unit)
    mean = vectors.mean(axis=0)
    picks, target = Picks(pool), np.zeros_like(mean)
    for _ in range(n):
        target = target + mean
        row = picks.best(-np.linalg.norm(target - vectors, axis=1))
        target = target - vectors[row]
    return picks.rows
