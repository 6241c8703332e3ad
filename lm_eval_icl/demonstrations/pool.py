"""What a selector sees of a pool, what it returns, and how it picks: the highest score, ties to the lowest row."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lm_eval_icl.errors import InputError

# Two scores tie if noise of this relative size could have ordered them: that is what float64 arithmetic itself adds.
TIE = 1e-12


@dataclass(frozen=True, eq=False)
class Pool:
    """What a selector may see of the pool's N documents.

    Attributes:
        labels: (N,) whole numbers from 0.
        features: (N, d) one vector a document, such as the hidden state that its answer is predicted from.
        probabilities: (N, C) of each label, given the document alone.
        without_text: (C,) the probability of each label, given a document without a text.
    """

    labels: np.ndarray
    features: np.ndarray | None = None
    probabilities: np.ndarray | None = None
    without_text: np.ndarray | None = None

    def __post_init__(self) -> None:
        if self.labels.ndim != 1 or self.labels.dtype.kind not in "iu" or self.labels.min(initial=0) < 0:
            raise InputError("labels of a pool: must be one whole number from 0 for each document.")
        for name, values in (("features", self.features), ("probabilities", self.probabilities)):
            if values is None:
                continue
            if values.ndim != 2 or len(values) != len(self.labels):
                raise InputError(
                    f"{name} of a pool: shape {values.shape}: must have one row for each of {len(self.labels)} labels."
                )
            if not np.isfinite(values).all():
                raise InputError(
                    f"{name} of a pool: a NaN or an infinity in row {np.argmin(np.isfinite(values).all(1))}."
                )
        if self.probabilities is None:
            return
        if self.classes < max(2, self.labels.max(initial=0) + 1):
            raise InputError(
                f"probabilities of a pool: {self.classes} a document: must be one for each label, of two at least."
            )
        wrong = (self.probabilities < 0).any(1) | (np.abs(self.probabilities.sum(1) - 1) > 1e-3)
        if wrong.any():
            row = int(np.argmax(wrong))
            raise InputError(
                f"probabilities of a pool: {self.probabilities[row].tolist()} in row {row}: must be 0 or more and "
                "sum to 1."
            )
        null = self.without_text
        if null is not None and (null.shape != (self.classes,) or not (np.isfinite(null) & (null > 0)).all()):
            raise InputError(
                f"probabilities without a text: {null.tolist()}: must be one above 0 for each of {self.classes} labels."
            )

    @property
    def classes(self) -> int:
        """C, the number of labels."""
        return int(self.labels.max(initial=-1)) + 1 if self.probabilities is None else self.probabilities.shape[1]

    def at(self, rows: np.ndarray) -> Pool:
        """The pool of these rows alone."""
        return Pool(
            self.labels[rows],
            None if self.features is None else self.features[rows],
            None if self.probabilities is None else self.probabilities[rows],
            self.without_text,
        )

    def vectors(self, unit: bool = False) -> np.ndarray:
        """The features in float64, of length 1 if `unit`. A vector of zeros stays as it is."""
        assert self.features is not None
        vectors = self.features.astype(np.float64)
        if unit:
            lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
            vectors /= np.where(lengths > 0, lengths, 1)
        return vectors

    def distributions(self, calibrated: bool = False) -> np.ndarray:
        """The probabilities in float64, each row divided by its sum; if `calibrated`, after division by those without
        a text.

        Raises:
            InputError: there are none without a text.
        """
        assert self.probabilities is not None
        probabilities = self.probabilities.astype(np.float64)
        if calibrated:
            if self.without_text is None:
                raise InputError("calibrated=True: needs the probabilities of the labels without a text.")
            probabilities = probabilities / self.without_text.astype(np.float64)
        return probabilities / probabilities.sum(1, keepdims=True)

    @cached_property
    def documents(self) -> np.ndarray:
        """(N,) the same number for rows that are one document twice: equal in all that the pool holds of them."""
        if self.features is None:
            return np.arange(len(self.labels))
        numbers: dict[tuple[bytes, ...], int] = {}
        arrays = [values for values in (self.labels, self.features, self.probabilities) if values is not None]
        rows = (tuple(values[row].tobytes() for values in arrays) for row in range(len(self.labels)))
        return np.array([numbers.setdefault(row, len(numbers)) for row in rows], dtype=np.int64)


@dataclass(frozen=True)
class Selection:
    """The rows that a selector picked.

    Attributes:
        rows: in the order of picking, each once.
        margin: how much relative noise in features and probabilities leaves the same rows picked, from 0 to 1.
    """

    rows: tuple[int, ...]
    margin: float


class Picks:
    """Picks rows by scores, and keeps the margin of the closest decision."""

    def __init__(self, pool: Pool) -> None:
        self.rows: list[int] = []
        self.margin = 1.0
        self._open = np.ones(len(pool.labels), dtype=bool)
        self._documents = pool.documents

    def take(self, row: int) -> int:
        """Pick a row that was not decided on by scores."""
        self.rows.append(row)
        self._open[row] = False
        return row

    def best(self, scores: np.ndarray, noise: np.ndarray) -> int:
        """Pick the row of the highest score of those not yet picked.

        Args:
            scores: (N,).
            noise: (N,) how far each score can move, divided by the relative noise that moves it.
        """
        rows = np.flatnonzero(self._open)
        row = int(rows[self._order(scores[rows], noise[rows])[0]])
        self.take(row)
        self._decided([row], scores, noise, np.zeros_like(scores))
        return row

    def top(self, scores: np.ndarray, noise: np.ndarray, n: int, jump: np.ndarray | None = None) -> None:
        """Pick the n rows of the highest scores. The margin is that of the set, whatever the order in it.

        Args:
            jump: (N,) how far any noise at all may move a score besides; by default not at all.
        """
        for row in self._order(scores, noise)[:n]:
            self.take(int(row))
        self._decided(self.rows, scores, noise, np.zeros_like(scores) if jump is None else jump)

    def selection(self) -> Selection:
        """What was picked. Where nothing is left, no noise can leave other rows picked."""
        return Selection(tuple(self.rows), self.margin if self._open.any() else 1.0)

    def _order(self, scores: np.ndarray, noise: np.ndarray) -> np.ndarray:
        """From the highest score to the lowest. Neighbours that tie are in the order of their rows."""
        order = np.argsort(-scores, kind="stable")
        gaps, bounds = -np.diff(scores[order]), noise[order][1:] + noise[order][:-1]
        group = np.concatenate([[0], np.cumsum(gaps > TIE * bounds)])
        return order[np.lexsort((order, group))]

    def _decided(self, picked: list[int], scores: np.ndarray, noise: np.ndarray, jump: np.ndarray) -> None:
        """Lower the margin to that of having picked these rows in place of the open ones."""
        rivals = np.flatnonzero(self._open)
        for row in picked:
            others = rivals[self._documents[rivals] != self._documents[row]]
            gaps, bounds = scores[row] - scores[others] - jump[row] - jump[others], noise[row] + noise[others]
            gaps = np.where(gaps > TIE * bounds, gaps, 0)
            # A gap that no noise moves decides for good.
            margins = np.divide(gaps, bounds, out=(gaps > 0).astype(float), where=bounds > 0)
            self.margin = min(self.margin, float(margins.min(initial=1)))
