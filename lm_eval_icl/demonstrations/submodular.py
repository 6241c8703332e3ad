"""Two submodular functions of the picks, each maximized greedily (Iyer and Bilmes 2013; Iyer et al. 2021).

Rows are as similar as the cosine of their gradients. With two labels, and picked within one of them, that is the cosine
of [1; h] alone.
"""

from __future__ import annotations

from random import Random

from lm_eval_icl.demonstrations import gradients
from lm_eval_icl.demonstrations.pool import Picks, Pool


def facility_location(pool: Pool, n: int, generator: Random) -> list[int]:
    """Maximize the sum, over the rows of the pool, of the similarity to the most similar pick."""
    return gradients.cover(pool, n, gradients.cosines(pool))


def graph_cut(pool: Pool, n: int, generator: Random, *, lam: float = 1.0) -> list[int]:
    """Maximize lam times the similarity of the picks to the pool, less their similarity to each other.

    The first sum has N similarities a pick and the second at most 2 n, so with a large pool these are nearly the n most
    central rows.

    Args:
        lam: the weight of the similarity to the pool.
    """
    similarities = gradients.cosines(pool)
    picks, scores = Picks(pool), lam * similarities.sum(0)
    for _ in range(n):
        scores = scores - 2 * similarities[picks.best(scores)]
    return picks.rows
