"""Inner products of the gradients of the loss with respect to a last linear layer.

The gradients are not computed. A linear layer with C outputs is applied to the features h of a
document, and the loss is the cross-entropy of the label y. The gradient is the outer product of R =
P - onehot(y) and [1; h], which has C (d + 1) numbers. The inner product of two gradients is
(R_i R_j) (1 + h_i h_j).
"""

from __future__ import annotations

import numpy as np

from lm_eval_icl.demonstrations.pool import Picks, Pool


def gram(pool: Pool) -> np.ndarray:
    """(N, N) the inner products of gradients. N = 5,000 takes 200 MB."""
    assert pool.probabilities is not None
    residuals = pool.probabilities.astype(np.float64)
    rows = np.arange(len(pool.labels))
    # P - 1 of the label is minus the sum of the other labels' P, which loses no digits where P is
    # nearly 1.
    residuals[rows, pool.labels] = 0
    residuals[rows, pool.labels] = -residuals.sum(1)
    vectors = pool.vectors()
    products = vectors @ vectors.T
    products += 1
    for part in parts(len(products)):
        products[part] *= residuals[part] @ residuals.T
    return products


def cosines(pool: Pool) -> np.ndarray:
    """(N, N) similarities (1 + cosine) / 2 of gradients, from 0 to 1.

    The cosine to a gradient of 0 counts as 0.
    """
    similarities = gram(pool)
    length = np.sqrt(np.maximum(np.diagonal(similarities), 0))
    length[length == 0] = 1
    for part in parts(len(similarities)):
        similarities[part] /= 2 * length[part, None] * length
        similarities[part] += 0.5
    return similarities


def distances(pool: Pool) -> np.ndarray:
    """(N, N) the distances between gradients."""
    products = gram(pool)
    squares = np.sqrt(np.maximum(np.diagonal(products), 0)) ** 2
    for part in parts(len(products)):
        sums = squares[part, None] + squares
        products[part] *= -2
        products[part] += sums
        # The difference of equal numbers may be rounding instead of 0, and its root 1e-8 of a
        # length.
        products[part][products[part] < 1e-13 * sums] = 0
        np.sqrt(products[part], out=products[part])
    return products


def cover(pool: Pool, n: int, nearness: np.ndarray) -> list[int]:
    """Pick n rows, each of which most raises the sum of the nearness to the nearest pick.

    Args:
        nearness: of all rows to all rows, (N, N). The sum is over all rows.
    """
    picks = Picks(pool)
    nearest = np.full(len(nearness), -np.inf)
    for _ in range(n):
        sums = np.zeros(len(nearness))
        for part in parts(len(nearness)):
            sums += np.maximum(nearness[part], nearest[part, None]).sum(0)
        nearest = np.maximum(nearest, nearness[picks.best(sums)])
    return picks.rows


def parts(rows: int) -> list[slice]:
    """The rows of a large matrix in slices of 256, so that intermediate results stay small."""
    return [slice(start, start + 256) for start in range(0, rows, 256)]
