"""Calibration metrics, and bootstrap intervals for metrics that are functions of sums over documents.

The probability of an option is its log-likelihood, or its value under a decision rule, normalised over the options.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

import lm_eval_icl.results.statistics as statistics
from lm_eval_icl.results.statistics import (
    Bounds,
    Difference,
    Estimate,
    Spread,
    checked,
    crossed,
    is_binary,
)

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
    return np.array([special.log_softmax(x)[gold] for x, gold in zip(logprobs, golds, strict=True)])


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


def _confusions(items: ArrayLike) -> np.ndarray:
    """Pairs (right answer, prediction), 0 or 1 -> (n, 4) true and false positives, false and true negatives."""
    values = _items(items, 2)
    if not is_binary(values):
        raise ValueError("the right answers and predictions must be 0 or 1")
    is_right, is_predicted = values.T == 1
    return np.stack([is_right & is_predicted, ~is_right & is_predicted, is_right & ~is_predicted,
                     ~is_right & ~is_predicted], axis=1).astype(float)  # fmt: skip


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
    hits, false_alarms, misses, _ = np.moveaxis(sums, -1, 0)
    return _ratio(2 * hits, 2 * hits + false_alarms + misses)


def _matthews(sums: np.ndarray) -> np.ndarray:
    hits, false_alarms, misses, rejections = np.moveaxis(sums, -1, 0)
    of_hits = (hits + false_alarms) * (hits + misses)
    margins = of_hits * (rejections + false_alarms) * (rejections + misses)
    return _ratio(hits * rejections - false_alarms * misses, np.sqrt(margins))


def _macro_f1(sums: np.ndarray) -> np.ndarray:
    """The mean F1 of the classes that are right for some document (MetaICL's metric of classification)."""
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
    "f1": Aggregation(_confusions, _f1, (0, 1)),
    "macro_f1": Aggregation(_class_counts, _macro_f1, (0, 1)),
    "matthews_corrcoef": Aggregation(_confusions, _matthews, (-1, 1)),
    "perplexity": Aggregation(_counted, _perplexity, (0, math.inf)),
    "weighted_perplexity": Aggregation(_pairs, _perplexity, (0, math.inf)),
    "bits_per_byte": Aggregation(
        _pairs, lambda sums: -_quotient(sums) / math.log(2), (0, math.inf)
    ),
    "ece": Aggregation(binned, calibration_error, (0, 1)),
}


def bootstrap(
    sums: np.ndarray, value: Value, draws: int = 2000, *, bounds: Bounds | None = None
) -> Estimate:
    """The mean over sets of a metric, with the pigeonhole bootstrap (Owen 2007, Ann Appl Stat 1:386).

    In each draw, documents and sets are drawn with replacement, independently of each other. The metric deviates by a
    with the drawn documents and all sets, by b with the drawn sets and all documents, by a + b + rest with both. The
    variances of a, b and the rest over draws, divided by (n - 1) / n since resamples of n vary less, take the place of
    the mean squares in the formula of `estimate`. (The variance of draws of both would count the rest three times.) The
    interval is from t, since quantiles of draws are too narrow for few sets. The same shapes have the same draws.

    Args:
        sums: (documents, sets, k) features of an `Aggregation`.
    """
    sums = checked(sums, axes=3)
    mean = float(value(sums.sum(axis=0)).mean())
    return statistics.from_t(
        mean, _resampled([sums], value, draws), sums.shape[0], sums.shape[1], bounds, "bootstrap"
    )


def bootstrap_difference(
    first: np.ndarray,
    second: np.ndarray,
    value: Value,
    draws: int = 2000,
    *,
    bounds: Bounds | None = None,
) -> Difference:
    """The difference of two entries' metrics, as in `bootstrap`. The same documents and sets are drawn for both."""
    first, second = checked(first, axes=3), checked(second, axes=3, like=first)
    metrics = [value(sums.sum(axis=0)) for sums in (first, second)]
    spread = _resampled([first, second], value, draws)
    how = "identical" if np.array_equal(first, second) else "bootstrap"
    mean, scale = float((metrics[0] - metrics[1]).mean()), float(np.abs(metrics).max())
    return statistics.paired(mean, spread, first.shape[:2], scale, bounds, how, None)


def _resampled(entries: Sequence[np.ndarray], value: Value, draws: int) -> Spread:
    """The variance of one entry's metric, or of the difference of two; infinite if a draw's metric is undefined."""
    n, sets, _ = entries[0].shape
    if n == 1:
        return Spread(math.inf, 0)

    def by_set(weights: np.ndarray) -> np.ndarray:
        """(draws, documents) how often each document is drawn -> (draws, sets) the metric of each set."""
        metrics = [
            value((weights @ sums.reshape(n, -1)).reshape(-1, sets, sums.shape[2]))
            for sums in entries
        ]
        return metrics[0] - metrics[1] if len(metrics) == 2 else metrics[0]

    whole = by_set(np.ones((1, n)))[0]
    rng = np.random.default_rng(0)
    chunks = []
    at_a_time = max(1, 2**21 // n)  # 16 MB
    for start in range(0, draws, at_a_time):
        rows = min(at_a_time, draws - start)
        # How often each document, and each set, is drawn.
        places = rng.integers(n, size=(rows, n)) + n * np.arange(rows)[:, None]
        documents = np.bincount(places.ravel(), minlength=rows * n).reshape(rows, n).astype(float)
        columns = rng.multinomial(sets, np.full(sets, 1 / sets), size=rows).astype(float)
        metrics = by_set(documents)
        chunks.append(
            [metrics.mean(axis=1), (whole * columns).mean(axis=1), (metrics * columns).mean(axis=1)]
        )
    a, b, both = np.concatenate(chunks, axis=1)
    if not np.isfinite([a, b, both]).all():
        return Spread(math.inf, 0)
    document_variance = float(a.var(ddof=1)) * n / (n - 1)
    if sets == 1:
        return Spread(document_variance, n - 1)
    set_variance = float(b.var(ddof=1)) * sets / (sets - 1)
    rest_variance = float((both - a - b).var(ddof=1)) * n * sets / ((n - 1) * (sets - 1))
    return crossed(document_variance, set_variance, rest_variance, n, sets)
