"""The rows whose label the model is least certain of, by three measures (Coleman et al. 2019).

With two labels all three measures put rows in the same order. Probabilities are the model's own, or calibrated: divided
by those that it gives without a text (Zhao et al. 2021), so that a label that it prefers anyway has no advantage.
"""

from __future__ import annotations

from random import Random

import numpy as np

from lm_eval_icl.demonstrations.pool import Picks, Pool, Selection


def entropy(pool: Pool, n: int, generator: Random, *, calibrated: bool = False) -> Selection:
    """The largest entropy of the labels' probabilities."""
    probabilities = pool.distributions(calibrated)
    logs = np.log(np.where(probabilities > 0, probabilities, 1))
    return _top(pool, n, -(probabilities * logs).sum(1), -logs, calibrated)


def least_confidence(pool: Pool, n: int, generator: Random, *, calibrated: bool = False) -> Selection:
    """The smallest probability of the most probable label."""
    probabilities = pool.distributions(calibrated)
    gradient, rows = np.zeros_like(probabilities), np.arange(len(probabilities))
    gradient[rows, probabilities.argmax(1)] = -1
    return _top(pool, n, -probabilities.max(1), gradient, calibrated)


def margin(pool: Pool, n: int, generator: Random, *, calibrated: bool = False) -> Selection:
    """The smallest difference between the probabilities of the two most probable labels."""
    probabilities = pool.distributions(calibrated)
    gradient, rows = np.zeros_like(probabilities), np.arange(len(probabilities))
    highest, second = np.argsort(-probabilities, axis=1, kind="stable")[:, :2].T
    gradient[rows, highest], gradient[rows, second] = -1, 1
    return _top(pool, n, probabilities[rows, second] - probabilities[rows, highest], gradient, calibrated)


def _top(pool: Pool, n: int, scores: np.ndarray, gradient: np.ndarray, calibrated: bool) -> Selection:
    """The n highest scores, whose gradient with respect to the probabilities is known up to a constant a row."""
    probabilities = pool.distributions(calibrated)
    # A relative change e of each probability changes one that is divided by the sum by e less the mean of all e. A
    # calibrated one is a quotient of two that both change by e.
    mean = (probabilities * gradient).sum(1, keepdims=True)
    picks = Picks(pool)
    picks.top(scores, (1 + calibrated) * (probabilities * np.abs(gradient - mean)).sum(1), n)
    return picks.selection()
