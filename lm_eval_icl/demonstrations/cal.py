"""CAL (Margatina et al. 2021): rows whose label the model predicts differently from that of similar rows."""

from __future__ import annotations

from random import Random

import numpy as np

from lm_eval_icl.demonstrations import gradients
from lm_eval_icl.demonstrations.pool import Picks, Pool


def cal(pool: Pool, n: int, generator: Random, *, k: int = 10) -> list[int]:
    """The largest mean divergence KL(neighbour || row) over a row's k nearest neighbours, with features of length 1.

    The paper's neighbours are labelled rows and its candidates are not. Here every row is both.

    Args:
        k: the number of neighbours.
    """
    probabilities = np.maximum(pool.distributions(), 1e-12)
    logs = np.log(probabilities)
    vectors = pool.vectors(unit=True)
    size, k = len(vectors), min(k, len(vectors) - 1)
    scores = np.zeros(size)
    for part in gradients.parts(size) if k else []:
        distances = np.sqrt(np.maximum(2 - 2 * vectors[part] @ vectors.T, 0))
        distances[np.arange(len(distances)), np.arange(size)[part]] = np.inf
        last = np.partition(distances, k - 1, axis=1)[:, k - 1]
        for at, row in enumerate(range(size)[part]):
            near = np.flatnonzero(distances[at] <= last[at])
            near = near[np.argsort(distances[at, near], kind="stable")][:k]  # of equally near rows, the lowest
            scores[row] = (probabilities[near] * (logs[near] - logs[row])).sum(1).mean()
    picks = Picks(pool)
    picks.best(scores, n)
    return picks.rows
