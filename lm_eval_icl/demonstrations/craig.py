"""CRAIG (Mirzasoleiman, Bilmes and Leskovec 2020): rows such that every row's gradient is near that of a pick."""

from __future__ import annotations

from random import Random

import numpy as np

from lm_eval_icl.demonstrations import gradients
from lm_eval_icl.demonstrations.pool import Pool


def craig(pool: Pool, n: int, generator: Random) -> list[int]:
    """Pick the row that most lowers the sum, over all rows, of the distance of gradients to the nearest pick.

    This is the greedy maximization of a facility location function whose similarity is a constant less the distance.
    The weights that the paper gives to the picks are not used, since demonstrations have no weights.
    """
    distances = gradients.distances(pool)
    return gradients.cover(pool, n, np.negative(distances, out=distances))
