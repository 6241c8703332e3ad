"""GradMatch (Killamsetty et al. 2021): rows whose weighted gradients add up to the whole pool's."""

from __future__ import annotations

from random import Random

import numpy as np

from lm_eval_icl.demonstrations import gradients
from lm_eval_icl.demonstrations.pool import Picks, Pool, Selection


def gradmatch(pool: Pool, n: int, generator: Random, *, lam: float = 1.0) -> Selection:
    """Orthogonal matching pursuit: pick the row whose gradient has the largest inner product with what is left.

    What is left is the mean gradient b less the weighted sum of the picks, of the weights w that minimize
    |b - sum w g|^2 + lam |w|^2. All n picks are kept, whatever their weights; the paper's authors drop those with
    negative weights.

    Args:
        lam: the strength of the regularization of the weights.
    """
    products = gradients.gram(pool)
    lengths = gradients.lengths(products)
    with_mean = products.mean(1)
    square = with_mean.mean()
    picks, left = Picks(pool), with_mean
    length_left, noise_left = np.sqrt(max(square, 0)), gradients.NOISE * lengths.mean()
    while True:
        picks.best(left, gradients.NOISE * lengths * length_left + lengths * noise_left)
        rows = picks.rows
        if len(rows) == n:
            return picks.selection()
        among = products[np.ix_(rows, rows)]
        # The least squares solution also where gradients depend on each other and lam is 0.
        weights = np.linalg.lstsq(among + lam * np.eye(len(rows)), with_mean[rows], rcond=None)[0]
        left = with_mean - products[:, rows] @ weights
        length_left = np.sqrt(max(square - 2 * weights @ with_mean[rows] + weights @ among @ weights, 0))
        squares = np.maximum(np.linalg.eigvalsh(among), 0)
        if squares.min() + lam <= 1e-13 * squares.max():
            picks.margin = 0.0  # any noise gives other weights
        squares = squares[squares > 1e-13 * squares.max()]
        # With G the picks' gradients, what is left is r = M b with M = I - G (G'G + lam I)^-1 G', and G'r = lam w, so
        # that dr = M db - M dG w - G (G'G + lam I)^-1 dG'r, where M is at most 1, and what is before dG'r at most the
        # largest s / (s^2 + lam) of the singular values s of G.
        factor = (np.sqrt(squares) / (squares + lam)).max(initial=0)
        picked = lengths[rows]
        noise_left = gradients.NOISE * (
            lengths.mean() + np.abs(weights) @ picked + factor * np.linalg.norm(picked) * length_left
        )
