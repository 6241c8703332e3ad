"""Means, differences and intervals from scores of documents under several sets of demonstrations.

Scores are a complete matrix (documents, sets) without NaN: every document has a score with every set. Documents and
sets are samples: two crossed random factors (Clark 1973; Baayen, Davidson and Bates 2008). Distributions come from
`scipy.special`, since the checks of `scipy.stats` take forty times as long.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import special, stats

CONFIDENCE = 0.95
POWER = 0.8
_NORMAL = float(special.ndtri((1 + CONFIDENCE) / 2))
_TINY = 1e-12  # differences of less than this share of the scores are rounding
Bounds = tuple[float, float]


@dataclass(frozen=True)
class Estimate:
    """The mean of one entry on a task or a group, with its uncertainty."""

    mean: float
    low: float  # the lower end of the 95% interval
    high: float  # the upper end of the 95% interval
    error: float  # the standard error; infinite if it is unknown, as for one document that is not scored 0 or 1
    df: float  # the degrees of freedom of the interval; infinite for Wilson's interval
    documents: int  # how many documents there are, in all tasks of a group
    sets: int  # how many distinct sets of demonstrations there are, in all tasks of a group
    # The error that would be left with every possible set of demonstrations, and with every possible document; None
    # with one set.
    error_documents: float | None
    error_sets: float | None
    how: str  # how the interval was computed: "crossed", "wilson", ..


@dataclass(frozen=True)
class Difference(Estimate):
    """The paired difference of two entries, the first minus the second."""

    p: float  # the two-sided p-value for no difference
    # The smallest difference that this comparison would find four times in five: the quantiles of t for 95% confidence
    # and 80% power, times the standard error (Miller 2024, arXiv 2411.00640). Infinite if it is unknown.
    detectable: float
    p_holm: float | None = None  # p adjusted over all such differences of a board's column (Holm)


def estimate(scores: np.ndarray, *, bounds: Bounds | None = None) -> Estimate:
    """The mean of an entry's scores, with an interval for other documents and other sets of demonstrations.

    If scores are 0 or 1, and there is one set or all scores are equal, the interval is Wilson's, with the documents as
    trials. The standard error is then the larger of the ordinary one and of half the interval in normal quantiles.

    Args:
        scores: (documents, sets), finite. Flip rates may take the place of scores.
        bounds: the least and the greatest possible score, (0, 1) for an accuracy. Intervals are cut accordingly.
    """
    scores = checked(scores)
    n, sets = scores.shape
    mean = float(scores.mean())
    spread = _spread(scores, float(np.abs(scores).max()))
    one_set = sets == 1
    if bounds in (None, (0, 1)) and is_binary(scores) and (one_set or mean in (0, 1)):
        low, high = wilson(round(n * mean), n)
        error = max(math.sqrt(spread.variance) if n > 1 else 0.0, (high - low) / (2 * _NORMAL))
        documents_error, sets_error = (None, None) if one_set else (error, 0.0)
        return Estimate(
            mean, low, high, error, math.inf, n, sets, documents_error, sets_error, "wilson"
        )
    return from_t(mean, spread, n, sets, bounds, "documents" if one_set else "crossed")


def difference(
    first: np.ndarray, second: np.ndarray, *, bounds: Bounds | None = None
) -> Difference:
    """The mean of the paired differences of two entries, with an interval for other documents and other sets.

    The interval and p are those of t. With one set of scores that are 0 or 1, p is the mid-p of McNemar's test, which
    may contradict the interval if p is about 0.05. Equal scores give [0, 0] and p = 1. Scores that differ by the same
    number everywhere give the p of sign flips of the documents, 2^(1 - documents). Arguments are as for `estimate`.
    """
    first, second = checked(first), checked(second, like=first)
    n, sets = first.shape
    scale = float(max(np.abs(first).max(), np.abs(second).max()))
    differences = first - second
    binary = is_binary(first) and is_binary(second)
    how, p = "crossed", None
    if np.abs(differences).max() <= _TINY * scale:
        how = "identical"
    elif sets == 1 and not binary:
        how = "paired t"
    elif sets == 1:
        how, p = (
            "mcnemar",
            mcnemar_mid_p(int((differences > 0).sum()), int((differences < 0).sum())),
        )
    mean = float(differences.mean(axis=0).mean())
    result = paired(mean, _spread(differences, scale), (n, sets), scale, bounds, how, p)
    possible = (0, 1) if binary else bounds
    if result.error != 0 or possible is None:
        return result
    # All documents have the same difference, which does not show how differences vary. So many may have another one as
    # the upper end of Wilson's interval for 0 allows, and each may differ by as much as is possible.
    width = possible[1] - possible[0]
    detectable = (_NORMAL + float(special.ndtri(POWER))) * width * math.sqrt(wilson(0, n)[1] / n)
    return replace(result, detectable=detectable if detectable <= width else math.inf)


@dataclass(frozen=True)
class Spread:
    """The variance of a mean, its degrees of freedom, and its two parts: the squared errors of `Estimate`."""

    variance: float
    df: float
    documents: float | None = None
    sets: float | None = None


def _spread(values: np.ndarray, scale: float) -> Spread:
    """The variance of the mean of a matrix (documents, sets) of scores. Numbers far below `scale` are rounding.

    With mean squares A of documents, B of sets and E of the rest, and N = documents * sets, the variance is estimated
    without bias by (A + B - E) / N. This is the variance with two-way clusters (Cameron, Gelbach and Miller 2011),
    without their corrections, times N / ((n - 1)(S - 1)). Degrees of freedom are Satterthwaite's (1946). In small
    samples E can be the largest. So the variance is at least A / N and B / N, with the degrees of freedom of the factor
    that sets it. If only E is not 0, it is E / N, with the fewest. With one set it is the variance over documents.
    """
    n, sets = values.shape
    if n == 1:
        return Spread(
            math.inf, 0, *((math.inf, float(values.var(ddof=1)) / sets) if sets > 1 else ())
        )
    if np.ptp(values) <= _TINY * scale:
        return Spread(0, n - 1, *((0.0, 0.0) if sets > 1 else ()))
    if sets == 1:
        return Spread(float(values.var(ddof=1)) / n, n - 1)
    mean, document_means, set_means = values.mean(), values.mean(axis=1), values.mean(axis=0)
    rest = values - document_means[:, None] - set_means + mean
    a = float(((document_means - mean) ** 2).sum()) / (n - 1) / n
    b = float(((set_means - mean) ** 2).sum()) / (sets - 1) / sets
    e = float((rest**2).sum()) / ((n - 1) * (sets - 1)) / (n * sets)
    return crossed(a, b, e, n, sets)


def crossed(a: float, b: float, e: float, n: int, sets: int) -> Spread:
    """The variance from A / N, B / N and E / N (see `_spread`)."""
    df_documents, df_sets = n - 1, sets - 1
    variance, fewest = a + b - e, min(df_documents, df_sets)
    below = a**2 / df_documents + b**2 / df_sets + e**2 / (df_documents * df_sets)
    if below == 0:
        return Spread(0, fewest, a, b)
    df = min(max(variance**2 / below, fewest), df_documents + df_sets)
    for factor, factor_df in ((b, df_sets), (a, df_documents)):
        if factor > variance * (1 + _TINY):  # by more than rounding
            variance, df = factor, factor_df
    if variance <= _TINY * e:
        variance, df = e, fewest
    return Spread(variance, df, a, b)


def from_t(
    mean: float, spread: Spread, documents: int, sets: int, bounds: Bounds | None, how: str
) -> Estimate:
    """An estimate with an interval from t, which is cut at the bounds and contains the mean."""
    error = half = math.sqrt(spread.variance)
    if 0 < error < math.inf:
        half *= _t_quantile((1 + CONFIDENCE) / 2, spread.df)
    low, high = mean - half, mean + half
    if bounds is not None:
        low, high = min(max(low, bounds[0]), mean), max(min(high, bounds[1]), mean)
    from_documents, from_sets = (
        None if x is None else math.sqrt(x) for x in (spread.documents, spread.sets)
    )
    return Estimate(
        mean, low, high, error, spread.df, documents, sets, from_documents, from_sets, how
    )


def paired(
    mean: float,
    spread: Spread,
    shape: tuple[int, ...],
    scale: float,
    bounds: Bounds | None,
    how: str,
    p: float | None,
) -> Difference:
    """The difference with this mean over (documents, sets). `bounds` are those of scores. If p is None, it is t's."""
    if how == "identical":
        mean, spread = (
            0.0,
            Spread(
                0, spread.df, *(None if x is None else 0.0 for x in (spread.documents, spread.sets))
            ),
        )
    elif p is None and spread.variance == 0 and abs(mean) > _TINY * scale:
        p = 2.0 ** (1 - shape[0])
    return _tested(from_t(mean, spread, shape[0], shape[1], _difference_bounds(bounds), how), p)


def _difference_bounds(bounds: Bounds | None) -> Bounds | None:
    return None if bounds is None else (bounds[0] - bounds[1], bounds[1] - bounds[0])


def _tested(estimated: Estimate, p: float | None) -> Difference:
    """An estimate of a difference with its p, from t if p is None, and with the detectable difference."""
    detectable, error, df = math.inf, estimated.error, estimated.df
    if error != 0 and not math.isinf(error):
        detectable = (_t_quantile((1 + CONFIDENCE) / 2, df) + _t_quantile(POWER, df)) * error
        if p is None:
            t = -abs(estimated.mean) / error
            p = 2 * float(special.ndtr(t) if math.isinf(df) else special.stdtr(df, t))
    return Difference(**vars(estimated), p=1.0 if p is None else p, detectable=detectable)


@functools.lru_cache(maxsize=1024)
def _t_quantile(share: float, df: float) -> float:
    return float(special.ndtri(share) if math.isinf(df) else special.stdtrit(df, share))


@functools.lru_cache(maxsize=4096)
def wilson(successes: int, trials: int) -> Bounds:
    """Wilson's 95% interval for a share (1927, JASA 22:209), without a correction for continuity."""
    interval = stats.binomtest(successes, trials).proportion_ci(CONFIDENCE, method="wilson")
    return float(interval.low), float(interval.high)


def mcnemar_mid_p(better: int, worse: int) -> float:
    """The mid-p of McNemar's test (Fagerland, Lydersen and Laake 2013, BMC Med Res Methodol 13:91); 1 for a tie."""
    few, all_ = min(better, worse), better + worse
    # Twice the exact one-sided p, minus the probability of the observed numbers.
    return float(special.bdtr(few, all_, 0.5) + (special.bdtr(few - 1, all_, 0.5) if few else 0))


def estimate_group(
    parts: Sequence[Estimate],
    weights: Sequence[float],
    *,
    bounds: Bounds | None = None,
    how: str = "group",
) -> Estimate:
    """The weighted mean over tasks with independent documents and demonstrations, with Satterthwaite's degrees of
    freedom (1946). The error of a task with one set of demonstrations counts as an error over documents."""
    total = math.fsum(weights)
    weighted = [(part, weight / total) for part, weight in zip(parts, weights, strict=True)]
    variances = [(share * part.error) ** 2 for part, share in weighted]
    variance = math.fsum(variances)
    if math.isinf(variance):
        df = 0.0
    elif variance == 0:
        df = min(part.df for part, _ in weighted)
    else:
        below = math.fsum(
            x**2 / part.df for x, (part, _) in zip(variances, weighted, strict=True) if x
        )
        df = variance**2 / below if below else math.inf
    document_variance = set_variance = None
    if any(part.error_sets is not None for part, _ in weighted):
        set_variance = math.fsum((share * (part.error_sets or 0)) ** 2 for part, share in weighted)
        errors = (
            (part.error if part.error_documents is None else part.error_documents, w)
            for part, w in weighted
        )
        document_variance = math.fsum((share * error) ** 2 for error, share in errors)
    mean = math.fsum(share * part.mean for part, share in weighted)
    documents, sets = (
        sum(part.documents for part, _ in weighted),
        sum(part.sets for part, _ in weighted),
    )
    return from_t(
        mean, Spread(variance, df, document_variance, set_variance), documents, sets, bounds, how
    )


def difference_group(
    parts: Sequence[Difference], weights: Sequence[float], *, bounds: Bounds | None = None
) -> Difference:
    """As `estimate_group`, for differences. If no task shows how differences vary, p is the largest p of the tasks that
    differ. If single tasks do not show it, their detectable differences are added like errors."""
    differing = [part.p for part in parts if part.how != "identical"]
    how = "group" if differing else "identical"
    mean = estimate_group(parts, weights, bounds=_difference_bounds(bounds), how=how)
    result = _tested(mean, max(differing) if differing and mean.error == 0 else None)
    total = math.fsum(weights)
    unseen = [
        w / total * part.detectable
        for part, w in zip(parts, weights, strict=True)
        if part.error == 0
    ]
    return replace(
        result, detectable=math.hypot(result.detectable if result.error else 0.0, *unseen)
    )


def holm(p: Sequence[float]) -> list[float]:
    """The p-values of a family of tests adjusted by Holm's method (1979, Scand J Statist 6:65), in the same order."""
    values = np.asarray(p, dtype=float)
    order = np.argsort(values, kind="stable")
    values[order] = np.minimum(
        np.maximum.accumulate(np.arange(len(order), 0, -1) * values[order]), 1
    )
    return values.tolist()


def order_sensitivity(predictions: Iterable[np.ndarray]) -> Estimate | None:
    """The pairwise flip rate: the probability that two random orders of the same demonstrations give different
    predictions for a document: 1 - sum_c n_c (n_c - 1) / (k (k - 1)), where n_c of k orders give the prediction c
    (InvICL, table 7). It is unbiased for any k. `predictions` are (documents, orders) for each set of demonstrations.
    """
    rates = []
    for set_predictions in map(np.asarray, predictions):
        if set_predictions.shape[1] >= 2:
            pairs = itertools.combinations(set_predictions.T, 2)
            rates.append(np.mean([first != second for first, second in pairs], axis=0))
    return estimate(np.stack(rates, axis=1), bounds=(0.0, 1.0)) if rates else None


def checked(scores: np.ndarray, axes: int = 2, like: np.ndarray | None = None) -> np.ndarray:
    """Finite floats with `axes` axes and the shape of `like`. `ValueError` is raised for any others."""
    values = np.asarray(scores, dtype=float)
    is_other = like is not None and values.shape != like.shape
    if values.ndim != axes or not values.size or is_other or not np.isfinite(values).all():
        what = f"documents x sets{' x features' * (axes == 3)}, finite numbers"
        raise ValueError(
            f"scores must be {what}, not of shape {values.shape}, and of one shape to be compared."
        )
    return values


def is_binary(scores: np.ndarray) -> bool:
    return bool(((scores == 0) | (scores == 1)).all())
