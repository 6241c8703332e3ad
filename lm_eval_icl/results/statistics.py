"""Means, differences and intervals from scores of documents under sets of demonstrations.

Scores are a complete matrix (documents, sets) without NaN: every document has a score with every
set. Documents and sets are samples: two crossed random factors (Clark 1973). docs/comparing.md has
the formulas with their assumptions, and `scripts/coverage.py` simulates how often they hold.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from scipy import optimize, special

ERROR_RATE = 0.05  # how often an interval, or one of a family of intervals, may miss the truth
_TINY = 1e-12  # differences of less than this share of the scores are rounding
_SMALLEST_P = 1e-12
_MOST = 10_000  # times as many documents or sets are too many to ask for
# What an interval is over: documents alone, since nothing was drawn or each document has its own
# demonstrations; documents and sets of demonstrations, which may be others on each side of a
# difference; documents for the one set that was drawn on one side, or on both; or whatever
# lm-eval's standard error is over.
SCOPES = ("documents", "sets", "other sets", "one side's set", "this set", "reported")
Bounds = tuple[float, float]
Part = tuple[float, float]


@dataclass(frozen=True)
class Spread:
    """The parts of the variance of a mean.

    With mean squares A of documents, B of sets and E of the rest, and N = documents * sets, they
    are A / N, B / N and E / N: squared errors over documents, over sets, and what both count.
    """

    documents: float  # infinite if nothing shows how documents vary
    documents_df: float = math.inf
    # (squared error, degrees of freedom) over each sample of sets; none if no sets vary.
    by_sets: tuple[Part, ...] = ()
    rest: float = 0.0

    @property
    def sets(self) -> float:
        return math.fsum(variance for variance, _ in self.by_sets)

    @property
    def error(self) -> float:
        """The standard error: without bias, unless the rest exceeds one of the other parts."""
        unbiased = self.documents + self.sets - self.rest
        return math.sqrt(max(unbiased, self.documents, self.sets))

    def half(self, error_rate: float) -> float:
        """Half of the interval that misses the truth at most that often.

        The squares of the intervals for documents alone and for each sample of sets are added
        (Banerjee 1960, Sankhya 22), which holds however these compare and however few sets there
        are. The rest, which both contain, is subtracted once. The interval for one factor alone is
        the least.
        """
        if math.isinf(self.documents):
            return math.inf
        documents = _quantile(error_rate, self.documents_df) ** 2 * self.documents
        sets = 0.0
        for variance, df in self.by_sets:
            sets += _quantile(error_rate, df) ** 2 * variance
        rest = _quantile(error_rate, math.inf) ** 2 * self.rest
        return math.sqrt(max(documents + sets - rest, documents, sets))

    def scaled(self, share: float, extra: float) -> Spread:
        """The spread of a share of the mean that extra documents do not move.

        With them, there are `extra` times as many documents.
        """
        of_documents = share**2 * extra
        of_sets = of_documents * extra
        return Spread(
            of_documents * self.documents,
            self.documents_df,
            tuple((of_sets * variance, df) for variance, df in self.by_sets),
            of_sets * self.rest,
        )

    def with_more(self, documents: float = 1, sets: float = 1) -> Spread:
        """The spread of that many times the documents or sets, if variances stay as they are."""
        rest_of_documents = min(self.rest, self.documents)
        of_documents = self.documents - rest_of_documents + rest_of_documents / sets
        rest_of_sets = min(self.rest / self.sets, 1) if self.sets else 0.0
        of_sets = 1 - rest_of_sets + rest_of_sets / documents
        return Spread(
            of_documents / documents,
            (self.documents_df + 1) * documents - 1,
            tuple((x * of_sets / sets, (df + 1) * sets - 1) for x, df in self.by_sets),
            self.rest / documents / sets,
        )


@dataclass(frozen=True)
class Estimate:
    """The mean of one entry on a task or a group, with its uncertainty."""

    mean: float
    center: float  # the middle of the interval before it is cut: the mean with the extra documents
    spread: Spread
    documents: int  # how many documents there are, in all tasks of a group
    sets: int  # how many distinct sets of demonstrations there are, in all tasks of a group
    scope: str  # what the interval is over: a name of `SCOPES`
    bounds: Bounds | None = None
    extra: int = 0  # how many documents were added for the interval

    @property
    def error_rate(self) -> float:
        """How often the interval may miss the truth."""
        return ERROR_RATE

    @functools.cached_property
    def interval(self) -> Bounds:
        """The interval, which is cut at the bounds and contains the mean."""
        half = self.spread.half(self.error_rate)
        least, most = self.bounds or (-math.inf, math.inf)
        if math.isinf(half):
            return least, most
        low = max(self.center - half, least)
        high = min(self.center + half, most)
        return min(low, self.mean), max(high, self.mean)

    @property
    def low(self) -> float:
        return self.interval[0]

    @property
    def high(self) -> float:
        return self.interval[1]

    @property
    def error(self) -> float:
        return self.spread.error

    @property
    def error_documents(self) -> float | None:
        """The error that would be left with every possible set; None without several sets."""
        if not self.spread.by_sets:
            return None
        return math.sqrt(self.spread.documents)

    @property
    def error_sets(self) -> float | None:
        """The error that would be left with every possible document."""
        if not self.spread.by_sets:
            return None
        return math.sqrt(self.spread.sets)


@dataclass(frozen=True)
class Difference(Estimate):
    """The first entry minus the second. The interval and p hold for a whole family of comparisons.

    Both are Bonferroni's: the error rate is divided by the number of comparisons. So the interval
    excludes 0 if and only if p is below the error rate.
    """

    comparisons: int = 1  # how many comparisons the family has; 1 is a comparison by itself

    @property
    def error_rate(self) -> float:
        return ERROR_RATE / self.comparisons

    @functools.cached_property
    def p(self) -> float:
        """The two-sided p-value for no difference, adjusted for the family: 1e-12 at the least."""

        def excess(exponent: float) -> float:
            return self.spread.half(math.exp(exponent)) - abs(self.center)

        if self.center == 0 or math.isinf(self.spread.documents):
            return 1.0
        least = math.log(_SMALLEST_P)
        if excess(least) > 0:
            least = optimize.brentq(excess, least, 0, xtol=1e-9)
        alone = math.exp(least)
        return min(1.0, alone * self.comparisons)

    def verdict(self, margin: float | None = None) -> str:
        """What the interval says.

        Returns:
            "equivalent" if all of it is nearer to 0 than `margin`: two one-sided tests. Otherwise
            "higher" or "lower" if it excludes 0, or else "undecided".
        """
        if margin is not None and -margin < self.low and self.high < margin:
            return "equivalent"
        if self.low > 0:
            return "higher"
        if self.high < 0:
            return "lower"
        return "undecided"

    def needed(self, margin: float | None = None) -> tuple[int | None, int | None]:
        """(documents, sets) in all that would decide, if means and variances stay as they are.

        Each with the number of the other as it is. None if no number would, or if sets have no
        chance in them.
        """
        distance = abs(self.mean)
        target = max(distance, (margin or 0) - distance)
        documents = self._needed("documents", self.documents, target)
        sets = self._needed("sets", self.sets, target)
        return documents, sets

    def _needed(self, what: str, now: int, target: float) -> int | None:
        """How many there must be for half of the interval to be below `target`."""

        def excess(times: float) -> float:
            more = self.spread.with_more(**{what: times})
            return more.half(self.error_rate) - target

        if excess(_MOST) >= 0:
            return None
        if excess(1) < 0:
            return now
        times = optimize.brentq(excess, 1, _MOST, rtol=1e-4)
        return math.ceil(times * now)


def estimate(
    scores: np.ndarray,
    *,
    bounds: Bounds | None = None,
    mean: float | None = None,
    scope: str = "",
) -> Estimate:
    """The mean of an entry's scores, with an interval for other documents and other sets.

    If scores are bounded, the interval is that of four more documents, of which two have the least
    score and two the greatest (Agresti and Coull 1998).

    Args:
        scores: (documents, sets), finite. Flip rates or pseudo-values may take their place.
        bounds: the least and the greatest possible score, (0, 1) for an accuracy.
        mean: the metric, if `scores` are its pseudo-values, which may be undefined.
        scope: as in `Estimate`; "" if all sets were drawn.
    """
    scores = checked(scores, finite=mean is None)
    n, sets = scores.shape
    if mean is None:
        mean = float(scores.mean())
    extra = 2 * _extra(bounds)
    scale = float(np.abs(scores).max())
    spread = spread_of(with_documents(scores, extra), scale)
    center = (n * mean + sum(extra)) / (n + len(extra))
    scope = scope or scope_of(sets)
    return Estimate(mean, center, spread, n, sets, scope, bounds, len(extra))


def difference(
    first: np.ndarray,
    second: np.ndarray,
    *,
    bounds: Bounds | None = None,
    same_sets: bool = True,
    mean: float | None = None,
    scope: str = "",
) -> Difference:
    """The first entry's mean minus the second's, on the same documents.

    If scores are bounded, the interval is that of two more documents, one that only the first and
    one that only the second answers right (Bonett and Price 2012). So equal answers to few
    documents do not show that two entries are equal. Arguments are as for `estimate`.

    Args:
        same_sets: whether the columns of both are the same sets of demonstrations, in this order.
            Otherwise the sets of each entry with several are a sample of their own.
    """
    first = checked(first, finite=mean is None)
    second = checked(second, finite=mean is None)
    n = len(first)
    if len(second) != n or (same_sets and first.shape != second.shape):
        raise ValueError(f"scores of shapes {first.shape} and {second.shape} are not compared.")
    if mean is None:
        mean = float(first.mean() - second.mean())
    scale = float(max(np.abs(first).max(), np.abs(second).max()))
    if abs(mean) <= _TINY * scale:
        mean = 0.0
    extra = _extra(bounds)
    first = with_documents(first, extra)
    second = with_documents(second, extra[::-1])
    if same_sets:
        spread = spread_of(first - second, scale)
        sets = first.shape[1]
    else:
        spread = spread_of_other_sets(first, second, scale)
        sets = max(first.shape[1], second.shape[1])
    center = mean * n / (n + len(extra))
    limits = _of_difference(bounds)
    scope = scope or scope_of(sets, same_sets=same_sets)
    return Difference(mean, center, spread, n, sets, scope, limits, len(extra))


def scope_of(first: int, second: int = 0, *, same_sets: bool = True) -> str:
    """A name of `SCOPES`, from the numbers of sets that were drawn at random on each side."""
    if first == second == 0:
        return "documents"
    if 1 in (first, second):
        return "one side's set" if max(first, second) > 1 else "this set"
    if first and second and not same_sets:
        return "other sets"
    return "sets"


def _of_difference(bounds: Bounds | None) -> Bounds | None:
    """The bounds of a difference of scores with these bounds."""
    if bounds is None:
        return None
    width = bounds[1] - bounds[0]
    return -width, width


def _extra(bounds: Bounds | None) -> Bounds | tuple[()]:
    """The scores of further documents: the bounds, if they are finite."""
    if bounds is None or math.isinf(bounds[1] - bounds[0]):
        return ()
    return bounds


def with_documents(scores: np.ndarray, extra: Sequence[float]) -> np.ndarray:
    """The scores with further documents, each with the same score for every set."""
    sets = scores.shape[1]
    more = [[score] * sets for score in extra]
    return np.vstack([scores, *more])


def spread_of(values: np.ndarray, scale: float) -> Spread:
    """The spread of the mean of (documents, sets) values. Far below `scale` is rounding."""
    n, sets = values.shape
    if not np.isfinite(values).all():
        return Spread(math.inf)
    mean = values.mean()
    document_means = values.mean(axis=1)
    set_means = values.mean(axis=0)
    if np.abs(values).max() <= _TINY * scale:
        return Spread(0.0)  # nothing differs
    if n == 1 or np.ptp(values) <= _TINY * scale:
        return Spread(math.inf)  # values do not show how they vary
    documents = float(document_means.var(ddof=1)) / n
    if sets == 1:
        return Spread(documents, n - 1)
    of_sets = float(set_means.var(ddof=1)) / sets
    rest = values - document_means[:, None] - set_means + mean
    mean_square = float((rest**2).sum()) / ((n - 1) * (sets - 1))
    return Spread(documents, n - 1, ((of_sets, sets - 1),), mean_square / (n * sets))


def spread_of_other_sets(first: np.ndarray, second: np.ndarray, scale: float) -> Spread:
    """The spread of a difference of means over the same documents, with sets of their own."""
    differences = first.mean(axis=1) - second.mean(axis=1)
    documents = spread_of(differences[:, None], scale)
    sides = [spread_of(first, scale), spread_of(second, scale)]
    by_sets = _of_all_sets(sides)
    rest = sides[0].rest + sides[1].rest
    return replace(documents, by_sets=by_sets, rest=rest)


def _of_all_sets(spreads: Iterable[Spread]) -> tuple[Part, ...]:
    """The parts over sets: one for all samples of one size, since one t holds for their sum."""
    by_df: dict[float, list[Part]] = {}
    for spread in spreads:
        for variance, df in spread.by_sets:
            by_df.setdefault(df, []).append((variance, df))
    return tuple(map(_added, by_df.values()))


def _added(parts: Sequence[Part]) -> Part:
    """The sum of variances with degrees of freedom, and its own (Satterthwaite 1946)."""
    total = math.fsum(variance for variance, _ in parts)
    if math.isinf(total):
        return total, 0.0
    below = math.fsum(variance**2 / df for variance, df in parts if variance)
    if below > 0:
        return total, total**2 / below
    return total, min(df for _, df in parts)


def estimate_group(
    parts: Sequence[Estimate], weights: Sequence[float], *, bounds: Bounds | None = None
) -> Estimate:
    """The weighted mean over tasks with independent documents and demonstrations.

    The variances over documents are added, and those over samples of sets of one size. The extra
    documents of each task move the center the less the more tasks there are, so the variances are
    those without moves.
    """
    total = math.fsum(weights)
    shares = [weight / total for weight in weights]
    pairs = list(zip(shares, parts, strict=True))
    spreads = []
    for share, part in pairs:
        extra = 1 + part.extra / max(part.documents, 1)  # reported ones may be unknown
        spreads.append(part.spread.scaled(share, extra))
    documents, documents_df = _added([(part.documents, part.documents_df) for part in spreads])
    by_sets = _of_all_sets(spreads)
    rest = math.fsum(part.rest for part in spreads)
    mean = math.fsum(share * part.mean for share, part in pairs)
    shift = math.fsum(share**2 * (part.center - part.mean) for share, part in pairs)
    return Estimate(
        mean=mean,
        center=mean + shift,
        spread=Spread(documents, documents_df, by_sets, rest),
        documents=sum(part.documents for part in parts),
        sets=sum(part.sets for part in parts),
        scope=max((part.scope for part in parts), key=SCOPES.index),
        bounds=bounds,
    )


def difference_group(
    parts: Sequence[Difference], weights: Sequence[float], *, bounds: Bounds | None = None
) -> Difference:
    """As `estimate_group`, for differences. `bounds` are those of scores."""
    group = estimate_group(parts, weights, bounds=_of_difference(bounds))
    return Difference(**{field.name: getattr(group, field.name) for field in fields(Estimate)})


def order_sensitivity(predictions: Iterable[np.ndarray]) -> Estimate | None:
    """The pairwise flip rate of the orders of the same demonstrations (InvICL, table 7).

    It is the probability that two random orders give different predictions for a document:
    1 - sum_c n_c (n_c - 1) / (k (k - 1)), where n_c of k orders give the prediction c. It is
    unbiased for any k. `predictions` are (documents, orders) for each set of demonstrations.
    """
    rates = []
    for set_predictions in map(np.asarray, predictions):
        if set_predictions.shape[1] >= 2:
            pairs = itertools.combinations(set_predictions.T, 2)
            rates.append(np.mean([first != second for first, second in pairs], axis=0))
    return estimate(np.stack(rates, axis=1), bounds=(0.0, 1.0)) if rates else None


def checked(scores: np.ndarray, axes: int = 2, *, finite: bool = True) -> np.ndarray:
    """Floats with `axes` axes. `ValueError` is raised for any others."""
    values = np.asarray(scores, dtype=float)
    if values.ndim != axes or not values.size or (finite and not np.isfinite(values).all()):
        what = "documents x sets" + (" x features" if axes == 3 else "")
        raise ValueError(f"scores must be {what}, finite numbers, not of shape {values.shape}.")
    return values


def _quantile(error_rate: float, df: float) -> float:
    """The quantile of t that is exceeded by either sign with this probability."""
    tail = error_rate / 2
    return -float(special.ndtri(tail) if math.isinf(df) else special.stdtrit(df, tail))
