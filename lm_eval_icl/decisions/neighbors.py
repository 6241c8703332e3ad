"""Rules that compare a document with labeled rows that are no demonstrations, in float64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lm_eval_icl.decisions.rule import Comparison, Number
from lm_eval_icl.errors import InputError


@dataclass(frozen=True)
class Hidden(Comparison):
    """Hidden calibration (Cho et al. 2025, arXiv 2406.16535): the nearest class centroid, by Euclidean distance between
    the last hidden states of queries' last tokens. The values are minus the distances."""

    name = "hidden"

    m: Number = 16

    def values(
        self, states: np.ndarray, anchors: np.ndarray, labels: np.ndarray, classes: int
    ) -> np.ndarray:
        from scipy.spatial.distance import cdist

        states, anchors = _numbers(states), _numbers(anchors)
        centroids = np.stack(
            [anchors[np.asarray(labels) == number].mean(0) for number in range(classes)]
        )
        distances: np.ndarray = cdist(states, centroids)
        if not np.isfinite(distances).all():
            raise InputError(
                "some hidden states are infinite, so that no distances can be computed."
            )
        return -distances


@dataclass(frozen=True)
class KNN(Comparison):
    """kNN prompting (Xu et al. 2023, arXiv 2303.13824, section 3): the majority of the k nearest anchors by
    KL(anchor || query) over the whole vocabulary. The values are votes. If anchors are equally near, the first ones
    vote. If classes have equally many votes, the lowest class wins, as with `argmax`."""

    name = "knn"
    reads_log_probs = True

    k: Number = 3
    m: Number = 128

    def values(
        self, states: np.ndarray, anchors: np.ndarray, labels: np.ndarray, classes: int
    ) -> np.ndarray:
        log_probs, anchors = _numbers(states), _numbers(anchors)
        p = np.exp(anchors)
        # A token adds nothing to the divergence if the anchor gives it 0, and infinity if only the query gives it 0.
        entropy = np.where(p > 0, p * np.where(p > 0, anchors, 0), 0).sum(1)
        finite = np.maximum(log_probs, np.finfo(np.float64).min)
        divergences = entropy - np.stack(
            [p @ row for row in finite]
        )  # (D, N); row by row, each as if it were alone
        nearest = np.argsort(divergences, axis=1, kind="stable")[:, : self.k]
        votes: np.ndarray = np.eye(classes)[np.asarray(labels)[nearest]].sum(1)
        return votes


def _numbers(states: np.ndarray) -> np.ndarray:
    states = np.asarray(states, dtype=np.float64)
    if np.isnan(states).any():
        raise InputError("the model's numbers for a query contain NaN, and cannot be compared.")
    return states
