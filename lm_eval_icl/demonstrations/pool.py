"""The data of a pool that a selector has, and how it picks: the highest score, ties to the lowest row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# Two scores tie if they differ by no more than this part of the largest: that is what float64 arithmetic itself adds.
TIE = 1e-12


@dataclass(frozen=True, eq=False)
class Pool:
    """The data of the pool's N documents that a selector has."""

    labels: np.ndarray  # (N,) whole numbers from 0
    features: np.ndarray | None = None  # (N, d) such as the hidden states that answers are predicted from
    probabilities: np.ndarray | None = None  # (N, C) of each label, given the document alone

    @property
    def classes(self) -> int:
        """C, the number of labels."""
        return int(self.labels.max(initial=-1)) + 1 if self.probabilities is None else self.probabilities.shape[1]

    def at(self, rows: np.ndarray) -> Pool:
        """The pool of these rows alone."""
        others = [None if part is None else part[rows] for part in (self.features, self.probabilities)]
        return Pool(self.labels[rows], *others)

    def vectors(self, unit: bool = False) -> np.ndarray:
        """The features in float64, of length 1 if `unit`. A vector of zeros stays as it is."""
        assert self.features is not None
        vectors = self.features.astype(np.float64)
        if unit:
            lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
            vectors /= np.where(lengths > 0, lengths, 1)
        return vectors

    def distributions(self) -> np.ndarray:
        """The probabilities in float64, each row divided by its sum."""
        assert self.probabilities is not None
        probabilities = self.probabilities.astype(np.float64)
        return probabilities / probabilities.sum(1, keepdims=True)


class Picks:
    """Picks rows of a pool by scores. Scores that differ by no more than rounding tie, and the lowest row is picked.

    Attributes:
        rows: the picked rows in the order of picking, each once.
    """

    def __init__(self, pool: Pool) -> None:
        self.rows: list[int] = []
        self._open = np.ones(len(pool.labels), dtype=bool)
        self._largest = 0.0  # of all scores so far: small differences have the rounding of large numbers

    def take(self, row: int) -> None:
        """Pick a row without scores."""
        self.rows.append(row)
        self._open[row] = False

    def best(self, scores: np.ndarray, n: int = 1) -> int:
        """Pick the n rows of the highest scores (N,) of those not yet picked. Returns the last of them."""
        self._largest = max(self._largest, float(np.abs(scores).max()))
        rows = np.flatnonzero(self._open)
        order = rows[np.argsort(-scores[rows], kind="stable")]
        tied = np.concatenate([[0], np.cumsum(-np.diff(scores[order]) > TIE * self._largest)])
        for row in order[np.lexsort((order, tied))][:n].tolist():
            self.take(row)
        return self.rows[-1]
