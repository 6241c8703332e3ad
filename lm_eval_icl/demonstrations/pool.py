"""The data of a pool, from which a selector computes scores, and the picking by scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

# Two scores tie if they differ by no more than this part of the largest score, which is the
# rounding of float64.
TIE = 1e-12


@dataclass(frozen=True, eq=False)
class Pool:
    """The data of the N documents of a pool that a selector may use, with a row for each document.

    `Chooser` has them from the model and the task.
    """

    labels: np.ndarray  # (N,) whole numbers from 0
    # (N, d), such as the last hidden states of the documents' queries
    features: np.ndarray | None = None
    # (N, C) the probability of each label, given the document alone
    probabilities: np.ndarray | None = None

    @property
    def classes(self) -> int:
        """C, the number of labels."""
        if self.probabilities is None:
            return int(self.labels.max(initial=-1)) + 1
        return self.probabilities.shape[1]

    def at(self, rows: np.ndarray) -> Pool:
        """The pool of these rows alone."""
        data: dict[str, Any] = {}
        for name, of_all in vars(self).items():
            data[name] = None if of_all is None else of_all[rows]
        return Pool(**data)

    def vectors(self, unit: bool = False) -> np.ndarray:
        """The features in float64, (N, d).

        If `unit`, vectors get length 1, except for vectors of zeros.
        """
        assert self.features is not None
        vectors = self.features.astype(np.float64)
        if unit:
            lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
            vectors /= np.where(lengths > 0, lengths, 1)
        return vectors

    def distributions(self) -> np.ndarray:
        """The probabilities in float64, (N, C), each row divided by its sum."""
        assert self.probabilities is not None
        probabilities = self.probabilities.astype(np.float64)
        return probabilities / probabilities.sum(1, keepdims=True)


class Picks:
    """Picks rows of a pool by scores.

    Scores that differ by no more than rounding tie, and the lowest row is picked.

    Attributes:
        rows: the picked rows in the order of picking, each once.
    """

    def __init__(self, pool: Pool) -> None:
        self.rows: list[int] = []
        self._open = np.ones(len(pool.labels), dtype=bool)
        # The largest score so far, which sets the rounding of the differences of scores.
        self._largest = 0.0

    def take(self, row: int) -> None:
        """Pick this row, whatever its score."""
        self.rows.append(row)
        self._open[row] = False

    def best(self, scores: np.ndarray, n: int = 1) -> int:
        """Pick the n rows with the highest scores, (N,), among the rows not yet picked.

        Returns the last of them.
        """
        self._largest = max(self._largest, float(np.abs(scores).max()))
        rows = np.flatnonzero(self._open)
        order = rows[np.argsort(-scores[rows], kind="stable")]
        tied = np.concatenate([[0], np.cumsum(-np.diff(scores[order]) > TIE * self._largest)])
        for row in order[np.lexsort((order, tied))][:n].tolist():
            self.take(row)
        return self.rows[-1]
