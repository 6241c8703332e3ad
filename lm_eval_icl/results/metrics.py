"""Calibration metrics, and pseudo-values of metrics that are functions of sums over documents.

The probability of an option is its log-likelihood, or its value under a decision rule, normalised
over the options.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from lm_eval_icl.results.statistics import Bounds, checked

BINS = 15  # of equal width (Guo et al. 2017, "On Calibration of Modern Neural Networks")
_CLASSES = 1000  # a macro-F1 has fewer classes
Logprobs = Iterable[ArrayLike]  # (options,) log-likelihoods for each document
Value = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Aggregation:
    """A metric that is a function of sums over documents."""

    # lm-eval's items of n documents -> (n, k) numbers that are summed
    features: Callable[[ArrayLike], np.ndarray]
    value: Value  # (..., k) sums -> (...) the metric
    bounds: Bounds | None  # the least and the greatest value of the metric


@dataclass(frozen=True)
class CalibrationMetric:
    """A metric that is computed from log-likelihoods."""

    # log-likelihoods and right options -> items to aggregate
    items: Callable[[Logprobs, Iterable[int]], np.ndarray]
    aggregation: str  # a name of `AGGREGATIONS`
    higher_is_better: bool


def probabilities(logprobs: ArrayLike) -> np.ndarray:
    """(options,) log-likelihoods -> (options,) probabilities that add up to 1."""
    shares: np.ndarray = special.softmax(np.asarray(logprobs, dtype=float))
    return shares


def confidences(logprobs: Logprobs, golds: Iterable[int]) -> np.ndarray:
    """(documents, 2): the probability of the predicted option, and whether it is the right one."""
    pairs = []
    for values, gold in zip(logprobs, golds, strict=True):
        p = probabilities(values)
        pairs.append([p.max(), float(p.argmax() == gold)])
    return np.array(pairs)


def _squared(logprobs: Logprobs, golds: Iterable[int]) -> np.ndarray:
    """(documents,) the sums over options of (probability - whether it is right)^2."""
    sums = []
    for values, gold in zip(logprobs, golds, strict=True):
        errors = probabilities(values)
        errors[gold] -= 1
        sums.append((errors**2).sum())
    return np.array(sums)


def _right_log_probabilities(logprobs: Logprobs, golds: Iterable[int]) -> np.ndarray:
    """(documents,) the logarithms of the right options' probabilities."""
    pairs = zip(logprobs, golds, strict=True)
    return np.array([special.log_softmax(values)[gold] for values, gold in pairs])


CALIBRATION = {
    "ece": CalibrationMetric(confidences, "ece", False),
    "brier": CalibrationMetric(_squared, "mean", False),
    "log_probability": CalibrationMetric(_right_log_probabilities, "mean", True),
}


def binned(items: ArrayLike) -> np.ndarray:
    """(documents, 2) confidences -> (documents, 2 bins), to be summed.

    For each bin, whether the prediction is right minus its confidence; and then for each bin,
    whether the document is in it. A bin contains its upper end only.
    """
    confidence, is_right = np.asarray(items, dtype=float).T
    places = np.clip(np.ceil(confidence * BINS) - 1, 0, BINS - 1)
    is_in = (places[:, None] == np.arange(BINS)).astype(float)
    gaps = is_in * (is_right - confidence)[:, None]
    return np.hstack([gaps, is_in])


def calibration_error(sums: np.ndarray) -> np.ndarray:
    """(..., 2 bins) sums -> (...) the mean of |accuracy - confidence| of the documents' bins."""
    gaps, counts = np.split(np.asarray(sums, dtype=float), 2, axis=-1)
    error: np.ndarray = np.abs(gaps).sum(axis=-1) / counts.sum(axis=-1)
    return error


def _items(items: ArrayLike, columns: int) -> np.ndarray:
    """lm-eval's items of n documents, each of one or two numbers, as (n, columns)."""
    values = np.asarray(items, dtype=float)
    shape = (len(values),) if columns == 1 else (len(values), columns)
    if values.shape != shape:
        count = "one number" if columns == 1 else "two numbers"
        raise ValueError(f"each document must have {count}, not items of shape {values.shape}")
    return values.reshape(len(values), columns)


def _counted(items: ArrayLike) -> np.ndarray:
    """(n, 2) each number and 1, or 0 and 0 for a NaN."""
    values = _items(items, 1)
    is_number = ~np.isnan(values)
    return np.hstack([np.where(is_number, values, 0), is_number])


def _binary_counts(items: ArrayLike) -> np.ndarray:
    """Pairs (right answer, prediction), 0 or 1 -> (n, 4) right, predicted, both, and 1."""
    values = _items(items, 2)
    if not ((values == 0) | (values == 1)).all():
        raise ValueError("the right answers and predictions must be 0 or 1")
    both = values.prod(axis=1)
    return np.column_stack([values, both, np.ones_like(both)])


def _class_counts(items: ArrayLike) -> np.ndarray:
    """Pairs (right class, predicted class) -> (n, 3 classes).

    For each class up to the largest right one, whether it is right, whether it is predicted, and
    both.
    """
    right, predicted = _items(items, 2).T
    if not (right == np.floor(np.abs(right))).all() or right.max() >= _CLASSES:
        raise ValueError(
            f"the right class of each document must be a whole number below {_CLASSES:,}"
        )
    classes = np.arange(right.max() + 1)
    is_right = right[:, None] == classes
    is_predicted = predicted[:, None] == classes
    return np.hstack([is_right, is_predicted, is_right & is_predicted]).astype(float)


def _ratio(above: np.ndarray, below: np.ndarray, otherwise: float = 0.0) -> np.ndarray:
    return np.divide(above, below, out=np.full(np.shape(above), otherwise), where=below != 0)


def _quotient(sums: np.ndarray) -> np.ndarray:
    return _ratio(sums[..., 0], sums[..., 1], math.nan)


def _perplexity(sums: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):  # infinite
        return np.exp(-_quotient(sums))


def _f1(sums: np.ndarray) -> np.ndarray:
    right, predicted, both, _ = np.moveaxis(sums, -1, 0)
    return _ratio(2 * both, right + predicted)


def _matthews(sums: np.ndarray) -> np.ndarray:
    right, predicted, both, documents = np.moveaxis(sums, -1, 0)
    margins = right * (documents - right) * predicted * (documents - predicted)
    return _ratio(documents * both - right * predicted, np.sqrt(margins))


def _macro_f1(sums: np.ndarray) -> np.ndarray:
    """The mean F1 of the classes that are right for some document, as MetaICL scores
    classification."""
    right, predicted, both = np.split(sums, 3, axis=-1)
    counts = right > 0
    scores = counts * _ratio(2 * both, right + predicted)
    mean: np.ndarray = scores.sum(axis=-1) / counts.sum(axis=-1)
    return mean


_pairs = functools.partial(_items, columns=2)
# By their names in lm-eval or MetaICL. Other metrics are shown as lm-eval reports them. F1 and
# Matthews' correlation are for two classes, and 0 if they are not defined, as in scikit-learn.
AGGREGATIONS: Mapping[str, Aggregation] = {
    "mean": Aggregation(_counted, _quotient, None),
    "nanmean": Aggregation(_counted, _quotient, None),
    "f1": Aggregation(_binary_counts, _f1, (0, 1)),
    "macro_f1": Aggregation(_class_counts, _macro_f1, (0, 1)),
    "matthews_corrcoef": Aggregation(_binary_counts, _matthews, (-1, 1)),
    "perplexity": Aggregation(_counted, _perplexity, (0, math.inf)),
    "weighted_perplexity": Aggregation(_pairs, _perplexity, (0, math.inf)),
    "bits_per_byte": Aggregation(
        _pairs, lambda sums: -_quotient(sums) / math.log(2), (0, math.inf)
    ),
    "ece": Aggregation(binned, calibration_error, (0, 1)),
}


def pseudo_values(sums: np.ndarray, value: Value) -> np.ndarray:
    """(documents, sets, k) features of an `Aggregation` -> (documents, sets) pseudo-values.

    A pseudo-value is n times the metric less n - 1 times the metric without the document (Tukey's
    jackknife). The pseudo-values of a mean are the scores themselves, and those of a smooth metric
    are independent in large samples, so that their spread is that of the metric.
    """
    sums = checked(sums, axes=3)
    n = len(sums)
    total = sums.sum(axis=0)
    with np.errstate(invalid="ignore"):
        values: np.ndarray = n * value(total) - (n - 1) * value(total - sums)
    return values
