"""GradMatch (Killamsetty et al. 2021): rows whose weighted gradients add up to the mean gradient of the pool."""

from __future__ import annotations

from random import Random

import numpy as np

from lm_eval_icl.demonstrations import gradients
from lm_eval_icl.demonstrations.pool import Picks, Pool


def gradmatch(pool: Pool, n: int, generator: Random, *, lam: float = 1.0) -> list[int]:
    """Orthogonal matching pursuit: pick the row whose gradient has the largest inner product with the residual.

    The residual is the mean gradient b less the weighted sum of the picks' gradients g. The weights w minimize
    |b - sum w g|^2 + lam |w|^2. All n picks are kept, whatever their weights. (The paper's authors drop picks with
    negative weights.)

    Args:
        lam: the strength of the regularization of the weights.
    """
    products = gradients.gram(pool)
    with_mean = products.mean(1)
    picks, residual = Picks(pool), with_mean
    while True:
        picks.best(residual)
        rows = picks.rows
        if len(rows) == n:
            return rows
        among = products[np.ix_(rows, rows)]
        # `lstsq` also has a solution if gradients are linearly dependent and lam is 0.
        weights = np.linalg.lstsq(among + lam * np.eye(len(rows)), with_mean[rows], rcond=None)[0]
        residual = with_mean - products[:, rows] @ weights
