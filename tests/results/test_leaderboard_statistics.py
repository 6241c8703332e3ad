"""Statistics, against literal slow versions, scipy, exact probabilities and lm-eval."""

from __future__ import annotations

import csv
import dataclasses
import math
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import special, stats

from lm_eval_icl.metaicl.strings import macro_f1
from lm_eval_icl.results.metrics import AGGREGATIONS, pseudo_values
from lm_eval_icl.results.statistics import (
    Difference,
    Estimate,
    Spread,
    difference,
    difference_group,
    estimate,
    estimate_group,
    order_sensitivity,
    scope_of,
)
from scripts.coverage import CASES, line

SHARE = (0.0, 1.0)
SMALL = np.array([[1, 0, 1], [1, 1, 1], [0, 0, 1]])
OTHER = np.array([[0, 0, 1], [0, 1, 0], [0, 1, 0]])
MISSING = np.array([[1.0, np.nan], [0, 1]])
MACRO_F1 = AGGREGATIONS["macro_f1"]


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def slow_half(values: np.ndarray, error_rate: float = 0.05) -> float:
    """Half of the interval of docs/comparing.md, in loops."""
    n, sets = values.shape
    mean = sum(map(sum, values)) / (n * sets)
    of_documents = [sum(values[i, s] for s in range(sets)) / sets for i in range(n)]
    of_sets = [sum(values[i, s] for i in range(n)) / n for s in range(sets)]
    documents = sum((x - mean) ** 2 for x in of_documents) / (n - 1) / n
    t = stats.t.ppf(1 - error_rate / 2, n - 1)
    if sets == 1:
        return float(t * math.sqrt(documents))
    between = sum((x - mean) ** 2 for x in of_sets) / (sets - 1) / sets
    rest = 0.0
    for i in range(n):
        for s in range(sets):
            rest += (values[i, s] - of_documents[i] - of_sets[s] + mean) ** 2
    rest /= (n - 1) * (sets - 1) * n * sets
    t_of_sets = stats.t.ppf(1 - error_rate / 2, sets - 1)
    z = stats.norm.ppf(1 - error_rate / 2)
    both = t**2 * documents + t_of_sets**2 * between - z**2 * rest
    return math.sqrt(max(both, t**2 * documents, t_of_sets**2 * between))


def with_rows(values: np.ndarray, *scores: float) -> np.ndarray:
    return np.vstack([values, *[np.full(values.shape[1], score) for score in scores]])


RNG = np.random.default_rng(0)
SIZES = [(3, 1), (3, 2), (3, 5), (20, 1), (20, 2), (20, 5)]
TABLES = [RNG.random((2, n, sets)) < 0.7 for n, sets in SIZES]


@pytest.mark.parametrize("table", TABLES, ids=lambda table: "x".join(map(str, table.shape[1:])))
def test_intervals_are_those_of_the_slow_version(table: np.ndarray):
    first, second = 1.0 * table
    differences = with_rows(first, 0, 1) - with_rows(second, 1, 0)
    found = difference(first, second, bounds=SHARE)
    assert found.mean == pytest.approx((first - second).mean())
    for comparisons in (1, 45):
        one = dataclasses.replace(found, comparisons=comparisons)
        half = slow_half(differences, 0.05 / comparisons)
        low = max(differences.mean() - half, -1)
        assert one.low == pytest.approx(min(low, one.mean))
        assert one.high == pytest.approx(min(differences.mean() + half, 1))
    four = with_rows(first, 0, 0, 1, 1)
    alone = estimate(first, bounds=SHARE)
    half = slow_half(four)
    assert alone.low == pytest.approx(max(four.mean() - half, 0))
    assert alone.high == pytest.approx(min(four.mean() + half, 1))
    unbounded = estimate(first + second / 3)
    if unbounded.spread.documents < math.inf:
        half = slow_half(first + second / 3)
        assert unbounded.high - unbounded.mean == pytest.approx(half)


def test_paired_zeros_and_ones_by_bonett_and_price():
    """4 documents that only the first answers right, 9 that only the second does, 17 others."""
    first = np.array([1] * 4 + [0] * 9 + [1] * 17)[:, None]
    second = np.array([0] * 4 + [1] * 9 + [1] * 17)[:, None]
    found = difference(first, second, bounds=SHARE)
    only_first = 5 / 32
    only_second = 10 / 32
    variance = (only_first + only_second - (only_first - only_second) ** 2) / 31
    half = stats.t.ppf(0.975, 31) * math.sqrt(variance)
    assert [found.low, found.high] == pytest.approx([-5 / 32 - half, -5 / 32 + half])
    assert found.mean == pytest.approx(-5 / 30)
    assert found.scope == "this set"


def multinomials(n: int, p: float, q: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The numbers of documents that one method alone answers right, and their probabilities."""
    i, j = np.indices((n + 1, n + 1)).reshape(2, -1)
    possible = i + j <= n
    i = i[possible]
    j = j[possible]
    rest = n - i - j
    ways = special.gammaln(n + 1) - special.gammaln([i + 1, j + 1, rest + 1]).sum(axis=0)
    powers = special.xlogy(i, p) + special.xlogy(j, q) + special.xlogy(rest, 1 - p - q)
    return i, j, np.exp(ways + powers)


@pytest.mark.parametrize("n", [5, 10, 30])
def test_one_set_holds_whatever_the_probabilities(n: int):
    """By enumeration of all outcomes: at least 93.5% of differences, and 94% of single rates."""
    ends: dict[tuple[int, int], tuple[float, float]] = {}
    documents = np.arange(n)[:, None]
    for i, j, _ in zip(*multinomials(n, 0.1, 0.1), strict=True):
        first = documents < i
        second = (documents >= i) & (documents < i + j)
        ends[i, j] = difference(first, second, bounds=SHARE).interval
    least = 1.0
    grid = [0.001, 0.01, *np.arange(0.02, 1, 0.06)]
    for p in grid:
        for q in [0.0, *grid]:
            if p + q > 1:
                continue
            i, j, shares = multinomials(n, p, q)
            intervals = [ends[outcome] for outcome in zip(i, j, strict=True)]
            low, high = np.array(intervals).T
            holds = (low <= p - q + 1e-12) & (p - q <= high + 1e-12)
            least = min(least, shares[holds].sum())
    assert least >= 0.935, least
    rates = [estimate(documents < i, bounds=SHARE).interval for i in range(n + 1)]
    low, high = np.array(rates).T
    for p in np.linspace(0.001, 0.999, 300):
        holds = (low <= p) & (p <= high)
        assert stats.binom.pmf(np.arange(n + 1), n, p)[holds].sum() >= 0.94


COVERAGE = ["two sets, much between them", "other sets", "near 1, ten documents", "F1, two sets"]


@pytest.mark.parametrize("case", [case for case in CASES if case.name in COVERAGE], ids=str)
def test_intervals_cover(case: Any):
    """In simulations of docs/comparing.md: 93% less three standard errors of 300 trials."""
    numbers = next(csv.reader([line(case, 300)]))
    of_difference = float(numbers[4])
    of_cell = float(numbers[6])
    assert min(of_difference, of_cell) >= 93 - 3 * 100 * math.sqrt(0.93 * 0.07 / 300)


def test_the_usual_interval_does_not_cover_where_ours_does():
    by_name = {(case.name, case.sets): case for case in CASES}
    usual = line(by_name["near 1, ten documents", 1], 300).split(",")[-1]
    assert float(usual) < 70


def test_without_bounds_one_set_goes_to_scipys_t():
    first, second = np.random.default_rng(0).random((2, 12, 1))
    one = estimate(first)
    assert one.interval == pytest.approx(stats.ttest_1samp(first[:, 0], 0).confidence_interval())
    both = difference(first, second)
    scipys = stats.ttest_rel(first[:, 0], second[:, 0])
    assert both.p == pytest.approx(scipys.pvalue)
    assert both.interval == pytest.approx(scipys.confidence_interval())


def test_other_sets_without_documents_go_to_welchs_t():
    """If all documents have the same score, only sets vary."""
    first = np.tile([0.1, 0.5, 0.4], (20, 1))
    second = np.tile([0.9, 0.6], (20, 1))
    found = difference(first, second, same_sets=False)
    # Samples of other sizes have a t of their own; those of one size have Welch's together.
    assert [df for _, df in found.spread.by_sets] == [2, 1]
    second = np.tile([0.9, 0.6, 0.5], (20, 1))
    found = difference(first, second, same_sets=False)
    scipys = stats.ttest_ind(first[0], second[0], equal_var=False)
    ((_, df),) = found.spread.by_sets
    assert df == pytest.approx(scipys.df)
    half = stats.t.ppf(0.975, scipys.df) * abs(found.mean / scipys.statistic)
    spread = dataclasses.replace(found.spread, documents=0.0)
    assert spread.half(0.05) == pytest.approx(half)


def test_other_sets_are_wider_than_the_same():
    rng = np.random.default_rng(1)
    sets = rng.normal(size=5)
    documents = rng.normal(0, 1, (2, 40, 1)) * 0.1
    first, second = documents + sets + rng.normal(0, 0.1, (2, 40, 5))
    same = difference(first, second)
    other = difference(first, second, same_sets=False)
    assert other.mean == same.mean
    assert other.error > 3 * same.error
    # A side without several sets has no chance in it.
    none = difference(first, second[:, :1], same_sets=False)
    ((variance, df),) = none.spread.by_sets
    assert variance == pytest.approx(first.mean(axis=0).var(ddof=1) / 5)
    assert df == 4


def test_which_sets_were_drawn():
    assert scope_of(0, 0) == "documents"
    assert scope_of(1) == "this set"
    assert scope_of(3) == "sets"
    assert scope_of(3, 3) == "sets"
    assert scope_of(3, 5, same_sets=False) == "other sets"
    assert scope_of(3, 1, same_sets=False) == "one side's set"
    assert scope_of(3, 0, same_sets=False) == "sets"
    assert scope_of(0, 1, same_sets=False) == "this set"


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 6), st.integers(1, 4), st.data())
def test_what_holds_for_all_scores(n: int, sets: int, data: Any):
    scores = arrays(float, (n, sets), elements=st.sampled_from([0.0, 0.5, 1.0]))
    first = data.draw(scores)
    second = data.draw(scores)
    one = difference(first, second, bounds=SHARE)
    two = difference(second, first, bounds=SHARE)
    assert two.mean == pytest.approx(-one.mean)
    assert two.low == pytest.approx(-one.high)
    assert two.high == pytest.approx(-one.low)
    assert two.p == pytest.approx(one.p, rel=1e-6)
    rows = data.draw(st.permutations(range(n)))
    columns = data.draw(st.permutations(range(sets)))
    moved = difference(first[rows][:, columns], second[rows][:, columns], bounds=SHARE)
    assert moved.interval == pytest.approx(one.interval)
    alone = estimate(first, bounds=SHARE)
    assert 0 <= alone.low <= alone.mean <= alone.high <= 1
    assert alone.low < alone.high
    assert -1 <= one.low <= one.mean <= one.high <= 1
    assert one.low < one.high
    for comparisons in (1, 7, 300):
        of_family = dataclasses.replace(one, comparisons=comparisons)
        assert (of_family.p < 0.05) == (of_family.low > 0 or of_family.high < 0)
        assert of_family.p == pytest.approx(min(1, comparisons * one.p))


def test_p_is_that_of_the_interval():
    """The interval that just touches 0 has the error rate p."""
    first, second = 1.0 * TABLES[-1]
    found = difference(first, second, bounds=SHARE)
    assert found.spread.half(found.p) == pytest.approx(abs(found.center))
    assert difference(np.ones((1000, 3)), np.zeros((1000, 3)), bounds=SHARE).p < 2e-12


def test_equal_answers_are_no_certainty():
    for n in (10, 100):
        ones = np.ones((n, 3))
        found = difference(ones, ones, bounds=SHARE)
        half = stats.t.ppf(0.975, n + 1) * math.sqrt(2 / ((n + 2) * (n + 1)))
        assert found.mean == pytest.approx(0)
        assert found.interval == pytest.approx((-half, half))
        assert found.p == 1
    same = difference(ones / 3, ones / 3)  # without bounds, equal numbers are no chance
    assert same.low == 0
    assert same.high == 0
    assert same.p == 1
    rounded = difference(np.full((4, 2), 0.1 + 0.2), np.full((4, 2), 0.3))
    assert rounded.mean == 0
    assert rounded.low == 0
    assert rounded.high == 0


def test_where_nothing_can_be_said():
    for found in (
        estimate(np.full((5, 4), 0.1)),
        estimate(np.array([[0.3, 0.4]])),
        difference(np.full((5, 2), 0.75), np.full((5, 2), 0.5)),
    ):
        assert found.low == -math.inf
        assert found.high == math.inf
    assert found.p == 1
    assert found.needed() == (None, None)


def test_verdicts():
    def verdict(low: float, high: float, margin: float | None = None) -> str:
        middle = (low + high) / 2
        spread = Spread(((high - low) / 2 / stats.norm.ppf(0.975)) ** 2)
        return Difference(middle, middle, spread, 9, 1, "documents").verdict(margin)

    assert verdict(0.1, 3) == "higher"
    assert verdict(-3, -0.1) == "lower"
    assert verdict(-1, 1) == "undecided"
    assert verdict(-1, 1, 2) == verdict(0.5, 1.5, 2) == "equivalent"
    assert verdict(0.1, 3, 2) == "higher"
    assert verdict(-3, 1, 2) == "undecided"


@pytest.mark.parametrize("comparisons", [1, 10])
@pytest.mark.parametrize("margin", [None, 0.2])
def test_how_many_would_decide(margin: float | None, comparisons: int):
    """The interval of so many documents, or sets, decides; that of a few less does not."""
    rng = np.random.default_rng(3)
    of_documents = rng.normal(0, 0.3, (30, 1))
    of_sets = rng.normal(0, 0.03, 8)
    effects = of_documents + of_sets + rng.normal(0, 0.5, (30, 8))
    alone = difference(effects + 0.06, np.zeros((30, 8)))
    found = dataclasses.replace(alone, comparisons=comparisons)
    assert found.verdict(margin) == "undecided"
    target = max(found.mean, (margin or 0) - found.mean)
    documents, sets = found.needed(margin)
    for name, needed, now in (("documents", documents, 30), ("sets", sets, 8)):
        if needed is not None:
            enough = found.spread.with_more(**{name: (needed + 1) / now})
            assert enough.half(0.05 / comparisons) < target
            too_few = found.spread.with_more(**{name: 0.97 * needed / now})
            assert too_few.half(0.05 / comparisons) >= target
    assert documents is not None
    assert 30 < documents < 10_000


def test_more_documents_have_the_spread_that_was_foretold():
    rng = np.random.default_rng(4)

    def spread(n: int, sets: int) -> Spread:
        of_document = rng.normal(0, 1, (n, 1))
        scores = of_document + rng.normal(0, 0.3, sets) + rng.normal(0, 1, (n, sets))
        return difference(scores, np.zeros((n, sets))).spread

    def mean_square(spreads: list[Spread]) -> float:
        return float(np.mean([spread.error**2 for spread in spreads]))

    small = [spread(40, 6) for _ in range(300)]
    foretold = mean_square([part.with_more(documents=5) for part in small])
    seen = mean_square([spread(200, 6) for _ in range(300)])
    assert foretold == pytest.approx(seen, rel=0.1)
    foretold = mean_square([part.with_more(sets=4) for part in small])
    seen = mean_square([spread(40, 24) for _ in range(300)])
    assert foretold == pytest.approx(seen, rel=0.1)


def part(mean: float, documents: float, sets: float, kind: type = Estimate) -> Any:
    spread = Spread(documents, 99, ((sets, 4),), sets / 2)
    return kind(mean, mean, spread, 100, 5, "sets", None)


def test_a_group_by_hand():
    parts = [part(0.5, 0.0004, 0.0008), part(0.8, 0.0004, 0.0001)]
    found = estimate_group(parts, [1, 3])
    assert found.mean == pytest.approx(0.725)
    first = 0.0008 / 16
    second = 0.0001 * 9 / 16
    assert found.spread.documents == pytest.approx(0.0004 * 10 / 16)
    assert found.spread.documents_df == pytest.approx(100 / (1 / 99 + 81 / 99))
    ((variance, df),) = found.spread.by_sets
    assert variance == pytest.approx(first + second)
    assert df == pytest.approx((first + second) ** 2 / (first**2 + second**2) * 4)
    assert found.spread.rest == pytest.approx((first + second) / 2)
    assert found.documents == 200
    assert found.sets == 10
    assert found.scope == "sets"
    cut = estimate_group([part(0.99, 0.01, 0.01)], [1], bounds=SHARE)
    assert cut.high == 1
    unknown = estimate_group([part(0.5, math.inf, 0), part(0.5, 0.1, 0)], [1, 1], bounds=SHARE)
    assert unknown.interval == (0, 1)


def test_a_group_of_differences():
    parts = [part(0.1, 0.0004, 0.0002, Difference), part(-0.2, 0.0003, 0.0002, Difference)]
    found = difference_group(parts, [1, 1], bounds=SHARE)
    assert isinstance(found, Difference)
    assert found.bounds == (-1, 1)
    assert found.interval == estimate_group(parts, [1, 1], bounds=(-1, 1)).interval
    of_one_set = dataclasses.replace(parts[1], scope="this set")
    mixed = difference_group([parts[0], of_one_set], [1, 1])
    assert mixed.scope == "this set"


def test_the_variance_is_that_of_two_way_clusters():
    """Cameron, Gelbach and Miller's, without their corrections, times nS / ((n - 1)(S - 1))."""
    rng = np.random.default_rng(0)
    n = 7
    sets = 5
    y = rng.normal(size=(n, 1)) + rng.normal(size=sets) + 0.3 * rng.normal(size=(n, sets))
    e = y - y.mean()
    by_document = (e.sum(axis=1) ** 2).sum()
    by_set = (e.sum(axis=0) ** 2).sum()
    clustered = (by_document + by_set - (e**2).sum()) / (n * sets) ** 2
    correction = n * sets / ((n - 1) * (sets - 1))
    assert estimate(y).error ** 2 == pytest.approx(clustered * correction)


def pairs(first: np.ndarray, second: np.ndarray) -> list[Any]:
    return np.stack([first, second], axis=1).tolist()


def items(name: str, n: int, rng: np.random.Generator) -> list[Any]:
    """Items as lm-eval's tasks, or MetaICL's, give them."""
    right = rng.random(n) < 0.7
    if name in ("f1", "matthews_corrcoef"):
        gold = rng.integers(2, size=n)
        return pairs(gold, np.where(right, gold, 1 - gold))
    if name == "macro_f1":  # classes by their number; -1 is one that is right nowhere
        gold = np.unique(rng.integers(4, size=n), return_inverse=True)[1]
        return pairs(gold, np.where(right, gold, rng.integers(-1, 4, n)))
    if name in ("weighted_perplexity", "bits_per_byte"):
        return pairs(-rng.random(n) * 50, rng.integers(1, 40, n))
    values = (-rng.random(n)).tolist()
    if name == "nanmean":
        values.append(math.nan)
    return values


def reference(name: str, values: list[Any]) -> float:
    """The value of lm-eval's function, or of MetaICL's, whose classes are texts."""
    if name == "macro_f1":
        return macro_f1([(str(gold), str(prediction)) for gold, prediction in values])
    from lm_eval.api.registry import get_aggregation

    return get_aggregation(name)(values)


LM_EVALS = [name for name in AGGREGATIONS if name != "ece"]


@pytest.mark.parametrize("name", LM_EVALS)
def test_aggregations_are_lm_evals(name: str):
    ours = AGGREGATIONS[name]
    rng = np.random.default_rng(0)
    for n in (1, 2, 50):
        values = items(name, n, rng)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = reference(name, values)
            features = ours.features(values)
            assert float(ours.value(features.sum(axis=0))) == pytest.approx(expected)
            twice = np.stack([features, features])
            assert ours.value(twice.sum(axis=1)).shape == (2,)
        if ours.bounds:
            low, high = ours.bounds
            assert low <= expected <= high


@pytest.mark.parametrize("name", ["f1", "matthews_corrcoef", "macro_f1", "perplexity"])
def test_pseudo_values_leave_out_one_document_at_a_time(name: str):
    metric = AGGREGATIONS[name]
    rng = np.random.default_rng(0)
    columns = [metric.features(items(name, 12, rng)) for _ in range(3)]
    found = pseudo_values(np.stack(columns, axis=1), metric.value)
    for s, features in enumerate(columns):
        for i in range(12):
            without = metric.value(np.delete(features, i, axis=0).sum(axis=0))
            wanted = 12 * metric.value(features.sum(axis=0)) - 11 * without
            assert found[i, s] == pytest.approx(float(wanted))


def test_pseudo_values_of_a_mean_are_the_scores():
    mean = AGGREGATIONS["nanmean"]
    scores = np.random.default_rng(0).random((20, 3))
    sums = np.stack([mean.features(column) for column in scores.T], axis=1)
    assert pseudo_values(sums, mean.value) == pytest.approx(scores)
    # Without one of the documents there is no number at all.
    sums = np.repeat(mean.features([1.0, math.nan])[:, None], 2, axis=1)
    found = estimate(pseudo_values(sums, mean.value), mean=1.0, bounds=SHARE)
    assert found.interval == SHARE


def same(one: Estimate, other: Estimate) -> bool:
    return one.mean == pytest.approx(other.mean) and one.interval == pytest.approx(other.interval)


def test_order_sensitivity_by_hand():
    """Four orders: all the same; one other; two and two; three kinds; all different."""
    predictions = np.array([[*map(int, row)] for row in "0000 0001 0011 0012 0123".split()])
    rates = np.array([0, 3 / 6, 4 / 6, 5 / 6, 1])
    found = order_sensitivity([predictions])
    assert found is not None
    assert same(found, estimate(rates[:, None], bounds=(0, 1)))
    # Two sets with other numbers of orders, of which one has one alone, are crossed with documents.
    both = order_sensitivity([predictions, predictions[:, :1], predictions[:, 2:]])
    assert both is not None
    assert both.scope == "sets"
    assert same(both, estimate(np.stack([rates, [0, 1, 0, 1, 1]], axis=1), bounds=(0, 1)))
    words = order_sensitivity([np.array([["yes", "no"], ["no", "no"]])])
    assert words is not None
    assert words.mean == 0.5
    assert words.scope == "this set"
    assert order_sensitivity([]) is order_sensitivity([predictions[:, :1]]) is None


REFUSED = {
    r"documents x sets, finite numbers, not of shape \(3,\)": lambda: estimate(np.ones(3)),
    "finite numbers": lambda: estimate(MISSING),
    "are not compared": lambda: difference(SMALL, SMALL[:, :1]),
    "same shape": lambda: order_sensitivity([np.zeros((3, 2)), np.zeros((2, 2))]),
    "documents x sets x features": lambda: pseudo_values(np.zeros((2, 2)), MACRO_F1.value),
    "each document must have two numbers": lambda: MACRO_F1.features([1, 2]),
    "must be 0 or 1": lambda: AGGREGATIONS["f1"].features([(0, 2)]),
    "whole number below 1,000": lambda: MACRO_F1.features([(0, 0), (0.5, 0)]),
}


@pytest.mark.parametrize("says", REFUSED)
def test_what_cannot_be_is_refused(says: str):
    with pytest.raises(ValueError, match=says):
        REFUSED[says]()
