"""How far a model's confidence can be believed: of tables of `results.documents`, and as metrics of a board.

The probability of an option is its log-likelihood, or what a decision rule makes of it, normalised over the document's
options. Documents whose options or right answer are not known are no part of a mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

if TYPE_CHECKING:
    import pandas as pd

BINS = 15  # of equal width (Guo et al. 2017, "On Calibration of Modern Neural Networks")
Logprobs = Sequence[Sequence[float]]


def probabilities(logprobs: Sequence[float]) -> np.ndarray:
    """(options,) probabilities that add up to 1."""
    shares: np.ndarray = special.softmax(np.asarray(logprobs, dtype=float))
    return shares


def confidences(logprobs: Logprobs, golds: Sequence[int]) -> np.ndarray:
    """(documents, 2): the probability of the predicted option, and whether it is the right one."""
    by_document = [probabilities(values) for values in logprobs]
    return np.array([[p.max(), float(p.argmax() == gold)] for p, gold in zip(by_document, golds, strict=True)])


def _squared(logprobs: Logprobs, golds: Sequence[int]) -> np.ndarray:
    """(documents,) the sums over options of (probability - whether it is right)^2."""
    by_document = [probabilities(values) for values in logprobs]
    return np.array([((p - (np.arange(len(p)) == g)) ** 2).sum() for p, g in zip(by_document, golds, strict=True)])


def _of_the_right(logprobs: Logprobs, golds: Sequence[int]) -> np.ndarray:
    """(documents,) the logarithms of the right options' probabilities."""
    return np.array([special.log_softmax(x)[gold] for x, gold in zip(logprobs, golds, strict=True)])


def binned(items: ArrayLike) -> np.ndarray:
    """(documents, 2 bins): what is summed for the expected calibration error: by bin of confidence, whether the
    prediction is right less its confidence, and 1 for each document. Bins are open below and closed above."""
    values = np.asarray(items, dtype=float)
    places = np.clip(np.ceil(values[:, 0] * BINS) - 1, 0, BINS - 1).astype(int)
    is_in = places[:, None] == np.arange(BINS)
    return np.hstack([is_in * (values[:, 1] - values[:, 0])[:, None], is_in.astype(float)])


def calibration_error(sums: np.ndarray) -> np.ndarray:
    """From sums (..., 2 bins) the mean over documents of |accuracy - confidence| of their bins: (...)."""
    gaps, counts = np.split(np.asarray(sums, dtype=float), 2, axis=-1)
    error: np.ndarray = np.abs(gaps).sum(axis=-1) / counts.sum(axis=-1)
    return error


@dataclass(frozen=True)
class CalibrationMetric:
    """A metric that is made of log-likelihoods."""

    # From log-likelihoods and right options, what is aggregated of each document.
    items: Callable[[Logprobs, Sequence[int]], np.ndarray]
    aggregation: str  # a name of `aggregations.AGGREGATIONS`
    higher_is_better: bool


METRICS = {
    "ece": CalibrationMetric(confidences, "ece", False),
    "brier": CalibrationMetric(_squared, "mean", False),
    "log_probability": CalibrationMetric(_of_the_right, "mean", True),
}


def _known(documents: pd.DataFrame) -> tuple[list[Sequence[float]], list[int]]:
    rows = [
        (logprobs, int(gold))
        for logprobs, gold in zip(documents.loglikelihoods, documents.gold, strict=True)
        if isinstance(logprobs, tuple) and logprobs and gold == gold and gold is not None
    ]
    if not rows:
        raise ValueError("no document has the log-likelihoods of its options and a right answer that is known.")
    return [logprobs for logprobs, _ in rows], [gold for _, gold in rows]


def ece(documents: pd.DataFrame) -> float:
    """The expected calibration error, with 15 bins of equal width (Guo et al. 2017), of rows of `results.documents`."""
    return float(calibration_error(binned(confidences(*_known(documents))).sum(axis=0)))


def brier(documents: pd.DataFrame) -> float:
    """The mean Brier score: the sum over options of (probability - whether it is right)^2; 0 is best, 2 is worst."""
    return float(_squared(*_known(documents)).mean())


def log_probability(documents: pd.DataFrame) -> float:
    """The mean logarithm of the right option's probability."""
    return float(_of_the_right(*_known(documents)).mean())
