"""Two submodular functions of the picks, each maximized greedily (Iyer and Bilmes 2013; Iyer et al. 2021).

The similarity of two rows is the cosine of their gradients. Inside one of two labels, this is the cosine of their
features [1; h].
"""

from __future__ import annotations

from random import Random

from lm_eval_icl.demonstrations import gradients
from lm_eval_icl.demonstrations.pool import Picks, Pool


def facility_location(pool: Pool, n: int, generator: Random) -> list[int]:
    """Maximize the sum, over the rows of the pool, of the similarity to the most similar pick."""
    return gradients.cover(pool, n, gradients.cosines(pool))


def graph_cut(pool: Pool, n: int, generator: Random, *, lam: float = 1.0) -> list[int]:
    """Maximize lam times the sum of similarities of picks and pool, less the sum of similarities between picks.

    The first sum has N similarities for each pick, and the second at most 2 n. With a large pool, the picks are
    therefore nearly the n most central rows.

    Args:
        lam: the weight of the similarity to the pool.
    """
    similarities = gradients.cosines(pool)
    picks, scores = Picks(pool), lam * similarities.sum(0)
    for _ in range(n):
        scores = scores - 2 * similarities[picks.best(scores)]
    return picks.rows
