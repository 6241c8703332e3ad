"""Two submodular functions of the picks, each maximized greedily (Iyer and Bilmes 2013; Iyer et al. 2021).

Rows are as similar as the cosine of their gradients. With two labels, and picked within one of them, that is the cosine
of [1; h] alone.
"""

from __future__ import annotations

from random import Random

import numpy as np

from lm_eval_icl.demonstrations import gradients
from lm_eval_icl.demonstrations.pool import Picks, Pool, Selection

# Half a cosine moves by at most half of what each of its directions moves by.
_NOISE = gradients.NOISE / 2


def facility_location(pool: Pool, n: int, generator: Random) -> Selection:
    """Maximize the sum, over the rows of the pool, of the similarity to the most similar pick."""
    return gradients.cover(pool, n, gradients.cosines(pool), np.full(len(pool.labels), _NOISE))


def graph_cut(pool: Pool, n: int, generator: Random, *, lam: float = 1.0) -> Selection:
    """Maximize lam times the similarity of the picks to the pool, less their similarity to each other.

    The first sum has N similarities a pick and the second at most 2 n, so with a large pool these are nearly the n most
    central rows.

    Args:
        lam: the weight of the similarity to the pool.
    """
    similarities = gradients.cosines(pool)
    rows = len(similarities)
    scores, noise = lam * similarities.sum(0), 2 * _NOISE * lam * rows
    picks = Picks(pool)
    for _ in range(n):
        row = picks.best(scores, np.full(rows, noise))
        scores, noise = scores - 2 * similarities[row], noise + 4 * _NOISE
    return picks.selection()
