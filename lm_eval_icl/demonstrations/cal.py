"""CAL (Margatina et al. 2021): rows for which the model predicts other labels than for similar rows."""

from __future__ import annotations

from random import Random

import numpy as np

from lm_eval_icl.demonstrations import gradients
from lm_eval_icl.demonstrations.pool import Picks, Pool


def cal(pool: Pool, n: int, generator: Random, *, k: int = 10) -> list[int]:
    """Pick the rows with the largest mean KL(neighbour || row) over their k nearest neighbours by features of length 1.

    (In the paper, neighbours are labelled rows, and candidates are not labelled. Here every row is both.)

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
            near = near[np.argsort(distances[at, near], kind="stable")][
                :k
            ]  # the lowest rows, if some are equally near
            scores[row] = (probabilities[near] * (logs[near] - logs[row])).sum(1).mean()
    picks = Picks(pool)
    picks.best(scores, n)
    return picks.rows
