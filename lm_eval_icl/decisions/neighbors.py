"""Rules that compare a document with labeled rows beyond the demonstrations. All values are computed in float64."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike
from scipy.spatial.distance import cdist

from lm_eval_icl.errors import InputError


def hidden(states: ArrayLike, anchors: ArrayLike, labels: ArrayLike, classes: int) -> np.ndarray:
    """Hidden calibration (Cho et al. 2025, arXiv 2406.16535): the nearest class centroid, by Euclidean distance.

    Args:
        states: (D, d) the last hidden state at the last token of each query.
        anchors: (N, d) those of labeled rows, behind the same demonstrations.
        labels: (N,) their classes, from 0.
        classes: C, the number of classes.

    Returns:
        (D, C) minus the distance to the centroid of each class.

    Raises:
        InputError: a class has no anchor, or a state is not finite.
    """
    states, anchors, of_class = _anchored(states, anchors, labels, classes)
    centroids = np.stack([anchors[rows].mean(0) for rows in of_class])
    distances: np.ndarray = cdist(states, centroids)
    if not np.isfinite(distances).all():
        raise InputError("states: some are infinite, so that nothing is near them.")
    return -distances


def knn(log_probs: ArrayLike, anchors: ArrayLike, labels: ArrayLike, classes: int, k: int = 3) -> np.ndarray:
    """kNN prompting (Xu et al. 2023, arXiv 2303.13824, section 3): the majority of the k nearest anchors by
    KL(anchor || query) over the whole vocabulary V.

    Args:
        log_probs: (D, V) the log-probabilities of the token that follows each query.
        anchors: (N, V) those of labeled rows, behind the same demonstrations.
        labels: (N,) their classes, from 0.
        classes: C, the number of classes.
        k: how many neighbors vote. Of equally near anchors the first ones vote.

    Returns:
        (D, C) votes. Of classes with equally many, the lowest wins, as with `argmax`.

    Raises:
        InputError: a class has no anchor, there are fewer anchors than k, or a number is NaN.
    """
    log_probs, anchors, _ = _anchored(log_probs, anchors, labels, classes)
    if not 1 <= k <= len(anchors):
        raise InputError(f"k={k}: must be from 1 to the number of anchors, {len(anchors)}.")
    p = np.exp(anchors)
    # A token of probability 0 adds nothing to the divergence of an anchor, and an infinity where the query's is 0.
    entropy = np.where(p > 0, p * np.where(p > 0, anchors, 0), 0).sum(1)
    finite = np.maximum(log_probs, np.finfo(np.float64).min)
    divergences = entropy - np.stack([p @ row for row in finite])  # (D, N); a query's bits are those of it alone
    nearest = np.argsort(divergences, axis=1, kind="stable")[:, :k]
    votes: np.ndarray = np.eye(classes)[np.asarray(labels)[nearest]].sum(1)
    return votes


def _anchored(
    queries: ArrayLike, anchors: ArrayLike, labels: ArrayLike, classes: int
) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """Queries and anchors in float64, and the anchors of each class."""
    queries, anchors = np.asarray(queries, dtype=np.float64), np.asarray(anchors, dtype=np.float64)
    if queries.ndim != 2 or anchors.ndim != 2 or queries.shape[1] != anchors.shape[1]:
        raise InputError(f"shapes {queries.shape} and {anchors.shape}: must be a row each, of equal width.")
    if np.isnan(queries).any() or np.isnan(anchors).any():
        raise InputError("the model gave a query NaN, with which nothing can be compared.")
    labels = np.asarray(labels)
    if labels.shape != (len(anchors),):
        raise InputError(f"labels of shape {labels.shape}: must be one for each of {len(anchors)} anchors.")
    of_class = [np.flatnonzero(labels == number) for number in range(classes)]
    if missing := [number for number, rows in enumerate(of_class) if not len(rows)]:
        raise InputError(f"class {missing[0]} has no anchor: draw more, or the same number for each class.")
    if sum(map(len, of_class)) < len(labels):
        raise InputError(f"labels: must be whole numbers from 0 to {classes - 1}.")
    return queries, anchors, of_class
