"""CAL (Margatina et al. 2021): rows whose label the model predicts differently from that of similar rows."""

from __future__ import annotations

from random import Random

import numpy as np

from lm_eval_icl.demonstrations import gradients
from lm_eval_icl.demonstrations.pool import Picks, Pool, Selection

# Noise can make another row a neighbour, which moves a score at once. What it can do is known for noise of these sizes,
# so that no margin of this selector is above the first.
NOISES = (1e-4, 1e-5, 1e-6, 1e-7)


def cal(pool: Pool, n: int, generator: Random, *, k: int = 10) -> Selection:
    """The largest mean divergence KL(neighbour || row) over a row's k nearest neighbours, with features of length 1.

    The paper's neighbours are labelled rows and its candidates are not. Here every row is both.

    Args:
        k: the number of neighbours.
    """
    probabilities = np.maximum(pool.distributions(), 1e-12)
    logs = np.log(probabilities)
    vectors = pool.vectors(unit=True)
    size, k = len(vectors), min(k, len(vectors) - 1)
    scores, noise, jumps = np.zeros(size), np.zeros(size), np.zeros((len(NOISES), size))
    for part in gradients.parts(size) if k else []:
        distances = np.sqrt(np.maximum(2 - 2 * vectors[part] @ vectors.T, 0))
        distances[np.arange(len(distances)), np.arange(size)[part]] = np.inf
        last = np.partition(distances, k - 1, axis=1)[:, k - 1, None]
        # Each distance moves by twice the noise, so a row within four times the noise may be a neighbour or not.
        near = distances <= last + 4 * NOISES[0]
        for at, row in enumerate(range(size)[part]):
            candidates = np.flatnonzero(near[at])
            candidates = candidates[np.argsort(distances[at, candidates], kind="stable")]
            ratios = logs[candidates] - logs[row]
            divergences = (probabilities[candidates] * ratios).sum(1)
            scores[row] = divergences[:k].mean()
            own = probabilities[candidates] * np.abs(ratios - divergences[:, None])
            noise[row] = (own + np.abs(probabilities[candidates] - probabilities[row])).sum(1).max()
            if len(candidates) > k:
                beyond = distances[at, candidates] - last[at]
                jumps[:, row] = [_jump(divergences, beyond, k, 4 * size) for size in NOISES]
    choices = []
    for largest, jump in zip(NOISES, jumps, strict=True):
        picks = Picks(pool)
        picks.top(scores, noise, n, jump)
        picks.margin = min(picks.margin, largest)
        choices.append(picks.selection())
    return max(choices, key=lambda choice: choice.margin)


def _jump(divergences: np.ndarray, beyond: np.ndarray, k: int, reach: float) -> float:
    """How far the mean of k divergences can move if rows within reach of the last neighbour take each other's place.

    Args:
        divergences: of the rows that may be neighbours, the nearest first.
        beyond: how much farther each of them is than the last neighbour.
    """
    unsure = np.abs(beyond) <= reach
    taken, possible = divergences[:k][unsure[:k]], np.sort(divergences[unsure])
    low, high = possible[: len(taken)].sum(), possible[len(possible) - len(taken) :].sum()
    return float(max(high - taken.sum(), taken.sum() - low)) / k
