"""Metrics that are functions of sums over documents: lm-eval's aggregations and the calibration error, by bootstrap."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from lm_eval_icl.results.calibration import binned, calibration_error
from lm_eval_icl.results.statistics import (
    Bounds,
    Difference,
    Estimate,
    Spread,
    checked,
    crossed,
    from_t,
    is_binary,
    paired,
)

_AXES = ("documents", "sets", "features")
_CLASSES = 1000  # of a macro-F1, fewer
Value = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Aggregation:
    """A metric that is a function of sums over documents."""

    features: Callable[[ArrayLike], np.ndarray]  # what is summed: from lm-eval's items of n documents to (n, k)
    value: Value  # the metric: from sums (..., k) to (...)
    bounds: Bounds | None  # the least and the greatest value


def _items(items: ArrayLike, columns: int) -> np.ndarray:
    """lm-eval's items of n documents: (n, columns), one number or two each."""
    values = np.asarray(items, dtype=float)
    if values.shape[1:] != (() if columns == 1 else (columns,)) or values.ndim == 0:
        count = "one number" if columns == 1 else "two numbers"
        raise ValueError(f"Each document must have {count}, but the items have the shape {values.shape}.")
    return values.reshape(len(values), columns)


def _confusions(items: ArrayLike) -> np.ndarray:
    """From pairs of the right answer and the prediction, 0 or 1: true and false positives, false and true negatives."""
    values = _items(items, 2)
    if not is_binary(values):
        raise ValueError("The right answers and predictions must be 0 or 1.")
    gold, predicted = values.T
    return np.stack(
        [gold * predicted, (1 - gold) * predicted, gold * (1 - predicted), (1 - gold) * (1 - predicted)], axis=1
    )


def _counted(items: ArrayLike) -> np.ndarray:
    """Numbers and 1, but 0 and 0 for a NaN."""
    values = _items(items, 1)
    is_number = ~np.isnan(values)
    return np.hstack([np.where(is_number, values, 0), is_number])


def _ratio(above: np.ndarray, below: np.ndarray, otherwise: float) -> np.ndarray:
    return np.divide(above, below, out=np.full(np.shape(above), otherwise), where=below != 0)


def _quotient(sums: np.ndarray) -> np.ndarray:
    return _ratio(sums[..., 0], sums[..., 1], math.nan)


def _f1(sums: np.ndarray) -> np.ndarray:
    hits, false_alarms, misses, _ = np.moveaxis(sums, -1, 0)
    return _ratio(2 * hits, 2 * hits + false_alarms + misses, 0.0)


def _matthews(sums: np.ndarray) -> np.ndarray:
    hits, false_alarms, misses, rejections = np.moveaxis(sums, -1, 0)
    margins = np.sqrt((hits + false_alarms) * (hits + misses) * (rejections + false_alarms) * (rejections + misses))
    return _ratio(hits * rejections - false_alarms * misses, margins, 0.0)


def _class_counts(items: ArrayLike) -> np.ndarray:
    """From pairs of the right class and the predicted one: of each class that is right somewhere, whether it is right,
    predicted, and both."""
    right, predicted = _items(items, 2).T
    if not (np.all(right == np.floor(right)) and 0 <= right.min() and right.max() < _CLASSES):
        raise ValueError(f"The right classes must be whole numbers below {_CLASSES:,}.")
    classes = np.arange(right.max() + 1)
    is_right, is_predicted = right[:, None] == classes, predicted[:, None] == classes
    return np.hstack([is_right, is_predicted, is_right & is_predicted]).astype(float)


def _macro_f1(sums: np.ndarray) -> np.ndarray:
    """The mean of the F1 of the classes that are right somewhere (MetaICL's metric of classification)."""
    right, predicted, both = np.split(sums, 3, axis=-1)
    counts = right > 0
    f1: np.ndarray = (counts * _ratio(2 * both, right + predicted, 0.0)).sum(axis=-1) / counts.sum(axis=-1)
    return f1


def _perplexity(sums: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):  # infinite, which is refused
        return np.exp(-_quotient(sums))


_pairs = functools.partial(_items, columns=2)
# lm-eval's aggregations (lm_eval/api/metrics.py) by their names there. F1 and Matthews' correlation are those of two
# classes and are 0 where they are not defined, as scikit-learn's.
AGGREGATIONS: Mapping[str, Aggregation] = {
    "mean": Aggregation(_counted, _quotient, None),
    "nanmean": Aggregation(_counted, _quotient, None),
    "f1": Aggregation(_confusions, _f1, (0, 1)),
    "macro_f1": Aggregation(_class_counts, _macro_f1, (0, 1)),
    "matthews_corrcoef": Aggregation(_confusions, _matthews, (-1, 1)),
    "perplexity": Aggregation(_counted, _perplexity, (0, math.inf)),
    "weighted_perplexity": Aggregation(_pairs, _perplexity, (0, math.inf)),
    "bits_per_byte": Aggregation(_pairs, lambda sums: -_quotient(sums) / math.log(2), (0, math.inf)),
    "ece": Aggregation(binned, calibration_error, (0, 1)),
}


def bootstrap(
    sums: np.ndarray, value: Value, draws: int = 2000, *, drawn: bool = True, bounds: Bounds | None = None
) -> Estimate:
    """The mean over sets of a metric, with the pigeonhole bootstrap (Owen 2007, Ann Appl Stat 1:386).

    The mean is that of the metrics of the sets, each over all documents: what runs report. In each draw, documents and
    sets are drawn with replacement, independently of each other. The metric of the drawn documents alone deviates by a,
    that of the drawn sets alone by b, that of both by a + b and a rest. Variances over draws, divided by the
    (n - 1) / n that resamples of n lack, take the place of the mean squares in the formula of `estimate`. (The variance
    of the draws of both would count the rest three times.) The interval is from t, since the draws' quantiles are too
    narrow for few sets.

    Args:
        sums: (documents, sets, k), what an `Aggregation` sums.
        value: the metric, from sums (..., k) to (...).
        draws: how many; they are the same for the same numbers of documents and sets.
        drawn, bounds: as in `estimate`, of the metric. If sets were not drawn, only documents are.

    Raises:
        ValueError: the sums have another shape or are not all finite, or the metric is not defined for them.
    """
    sums = checked(sums, "The sums", _AXES)
    n, sets, _ = sums.shape
    mean = float(_metrics(sums, value).mean())
    return from_t(mean, _resampled([sums], value, draws, drawn), n, sets, bounds, "bootstrap")


def bootstrap_difference(
    first: np.ndarray,
    second: np.ndarray,
    value: Value,
    draws: int = 2000,
    *,
    drawn: bool = True,
    bounds: Bounds | None = None,
) -> Difference:
    """The difference of two entries' metrics: as `bootstrap`, with the same documents and sets drawn for both."""
    first = checked(first, "The first sums", _AXES)
    second = checked(second, "The second sums", _AXES, like=first)
    n, sets, _ = first.shape
    metrics = _metrics(first, value), _metrics(second, value)
    of_sets = metrics[0] - metrics[1]
    if not drawn:
        of_sets = of_sets.mean(keepdims=True)
    spread = _resampled([first, second], value, draws, drawn)
    how = "identical" if np.array_equal(first, second) else "bootstrap"
    return paired(of_sets, spread, n, sets, float(np.abs(metrics).max()), bounds, how)


def _metrics(sums: np.ndarray, value: Value) -> np.ndarray:
    """The metric of each set, over all documents."""
    metrics = np.asarray(value(sums.sum(axis=0)), dtype=float)
    if not np.isfinite(metrics).all():
        raise ValueError("The metric is not a finite number for these documents.")
    return metrics


def _resampled(entries: Sequence[np.ndarray], value: Value, draws: int, drawn: bool) -> Spread:
    """The variance of the metric of one entry, or of the difference of two."""
    n, sets, _ = entries[0].shape
    if n == 1:
        return Spread(math.inf, 0)

    def of_sets(weights: np.ndarray) -> np.ndarray:
        """(draws, sets) from (draws, documents)."""
        metrics = [value((weights @ sums.reshape(n, -1)).reshape(-1, sets, sums.shape[2])) for sums in entries]
        return metrics[0] - metrics[1] if len(metrics) == 2 else metrics[0]

    whole = of_sets(np.ones((1, n)))[0]
    rng = np.random.default_rng(0)
    chunks = []
    at_a_time = max(1, 2**21 // n)  # 16 MB
    for start in range(0, draws, at_a_time):
        rows = min(at_a_time, draws - start)
        # How often each document, and each set, is drawn.
        places = rng.integers(n, size=(rows, n)) + n * np.arange(rows)[:, None]
        documents = np.bincount(places.ravel(), minlength=rows * n).reshape(rows, n).astype(float)
        columns = rng.multinomial(sets, np.full(sets, 1 / sets), size=rows).astype(float)
        metrics = of_sets(documents)
        chunks.append([metrics.mean(axis=1), (whole * columns).mean(axis=1), (metrics * columns).mean(axis=1)])
    a, b, both = np.concatenate(chunks, axis=1)
    of_documents = float(a.var(ddof=1)) * n / (n - 1)
    if sets == 1 or not drawn:
        return Spread(of_documents, n - 1)
    of_columns = float(b.var(ddof=1)) * sets / (sets - 1)
    of_rest = float((both - a - b).var(ddof=1)) * n * sets / ((n - 1) * (sets - 1))
    return crossed(of_documents, of_columns, of_rest, n, sets)
