"""The statistics of leaderboards, against simulations, numbers by hand, scipy, scikit-learn and lm-eval."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import special, stats

from lm_eval_icl.metaicl.strings import macro_f1
from lm_eval_icl.results.metrics import AGGREGATIONS, bootstrap, bootstrap_difference
from lm_eval_icl.results.statistics import (
    Difference,
    Estimate,
    difference,
    difference_group,
    estimate,
    estimate_group,
    holm,
    mcnemar_mid_p,
    order_sensitivity,
    wilson,
)

# By hand: rows are documents. The mean is 2/3; the sums of squares are 2/3 of documents, 2/3 of sets, 2/3 of the rest,
# so the mean squares are 1/3, 1/3 and 1/6.
SMALL = np.array([[1, 0, 1], [1, 1, 1], [0, 0, 1]])
MISSING = np.array([[1.0, np.nan], [0, 1]])


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def close(one: Estimate | Difference, other: Estimate | Difference, rel: float = 1e-9) -> bool:
    """Whether two results have the same fields, but for rounding."""
    pairs = zip(dataclasses.astuple(one), dataclasses.astuple(other), strict=True)
    return all(
        a == (pytest.approx(b, rel=rel, abs=1e-12) if isinstance(b, int | float) else b)
        for a, b in pairs
    )


def negated(one: Difference) -> Difference:
    """The second less the first."""
    return dataclasses.replace(one, mean=-one.mean, low=-one.high, high=-one.low)


DOCUMENTS, SETS = 200, 10
SHARED_DOCUMENT, OWN_DOCUMENT = 1.0, 0.5  # standard deviations of effects on the logit


def true_mean(level: float, variance: float) -> float:
    """The mean of a logistic function of a normal variable, by Gauss and Hermite's quadrature."""
    x, w = np.polynomial.hermite_e.hermegauss(60)
    return float(w @ special.expit(level + math.sqrt(variance) * x) / w.sum())


def simulated(
    rng: np.random.Generator, levels: tuple[float, float], shared_set: float, own_set: float
) -> tuple[np.ndarray, np.ndarray]:
    """Right answers of two methods on the same documents with the same sets."""
    common = rng.normal(0, SHARED_DOCUMENT, (DOCUMENTS, 1)) + rng.normal(0, shared_set, SETS)
    first, second = (
        rng.random((DOCUMENTS, SETS))
        < special.expit(
            level
            + common
            + rng.normal(0, OWN_DOCUMENT, (DOCUMENTS, 1))
            + rng.normal(0, own_set, SETS)
        )
        for level in levels
    )
    return first, second


def test_intervals_cover() -> None:
    """And those of the two common mistakes do not: errors over documents alone, and repeats as independent trials."""
    trials, rng, levels, shared_set, own_set = 2000, np.random.default_rng(0), (1.0, 1.0), 0.5, 0.4
    variance = SHARED_DOCUMENT**2 + OWN_DOCUMENT**2 + shared_set**2 + own_set**2
    means = [true_mean(level, variance) for level in levels]
    covered = dict.fromkeys(("one", "pair", "documents, one", "documents, pair", "mcnemar"), 0)
    t = stats.t.ppf(0.975, DOCUMENTS - 1)
    for _ in range(trials):
        first, second = simulated(rng, levels, shared_set, own_set)
        one, pair = estimate(first, bounds=(0, 1)), difference(first, second, bounds=(0, 1))
        truth = means[0] - means[1]
        covered["one"] += one.low <= means[0] <= one.high
        covered["pair"] += pair.low <= truth <= pair.high
        assert (pair.p < 0.05) == (not pair.low <= 0 <= pair.high)
        for name, scores, true in (
            ("documents, one", 1.0 * first, means[0]),
            ("documents, pair", 1.0 * first - second, truth),
        ):
            of_documents = scores.mean(axis=1)
            half = t * of_documents.std(ddof=1) / math.sqrt(DOCUMENTS)
            covered[name] += abs(of_documents.mean() - true) <= half
        better, worse = (first & ~second).sum(), (second & ~first).sum()
        # The interval of all answers as independent pairs; where the truth is 0 this is McNemar's test.
        pooled = (better - worse) / first.size
        spread = (better + worse) / first.size - (pooled**2 if truth else 0)
        covered["mcnemar"] += abs(pooled - truth) <= 1.96 * math.sqrt(spread / first.size)
    share = {name: count / trials for name, count in covered.items()}
    print(share)  # docs/leaderboard.md has these
    assert 0.93 <= share["one"] <= 0.97 and 0.93 <= share["pair"] <= 0.97, share
    assert max(share["documents, one"], share["documents, pair"], share["mcnemar"]) < 0.85, share


def test_a_small_example_by_hand() -> None:
    found = estimate(SMALL)
    assert found.mean == pytest.approx(2 / 3)
    assert found.error == pytest.approx(math.sqrt(1 / 18))  # (1/3 + 1/3 - 1/6) / 9
    assert found.df == pytest.approx(36 / 17)  # (1/2)^2 / ((1/9)/2 + (1/9)/2 + (1/36)/4)
    assert (
        found.error_documents == found.error_sets == pytest.approx(math.sqrt(1 / 27))
    )  # (1/3) / 9
    half = stats.t.ppf(0.975, 36 / 17) * math.sqrt(1 / 18)
    assert (found.low, found.high) == pytest.approx((2 / 3 - half, 2 / 3 + half))
    assert (found.documents, found.sets, found.how) == (3, 3, "crossed")
    cut = estimate(SMALL, bounds=(0, 1))
    assert (cut.low, cut.high, cut.error) == (0, 1, found.error)


def test_the_variance_is_that_of_two_way_clusters() -> None:
    """Cameron, Gelbach and Miller's, without their corrections, times nS / ((n - 1)(S - 1))."""
    rng = np.random.default_rng(0)
    n, sets = 7, 5
    y = rng.normal(size=(n, 1)) + rng.normal(size=sets) + 0.3 * rng.normal(size=(n, sets))
    e = y - y.mean()
    clustered = ((e.sum(1) ** 2).sum() + (e.sum(0) ** 2).sum() - (e**2).sum()) / (n * sets) ** 2
    assert estimate(y).error ** 2 == pytest.approx(clustered * n * sets / ((n - 1) * (sets - 1)))


def test_the_error_is_never_below_that_with_one_factor() -> None:
    """Where the rest has the largest mean square, as in a table whose rows and columns are nearly alike."""
    y = np.array([[1.0, 0, 0], [0, 1, 0], [0, 0, 1], [1, 0, 0]])
    found = estimate(y)
    # By hand: all documents have the mean 1/3, the sets 1/2, 1/4 and 1/4; 1/24 / 2 / 3 = 1/144.
    assert found.error_documents == pytest.approx(0, abs=1e-12)
    assert found.error == found.error_sets == pytest.approx(1 / 12) and found.df == 2
    checkered = difference(np.eye(2), 1 - np.eye(2))
    assert checkered.mean == 0 and checkered.p == 1 and checkered.error > 0 and checkered.df == 1


def test_one_set_is_over_documents() -> None:
    scores = np.array([[0.1], [0.4], [0.5], [1.0]])
    found = estimate(scores)
    assert found.error == pytest.approx(stats.sem(scores[:, 0])) and found.df == 3
    assert (found.low, found.high) == pytest.approx(
        stats.ttest_1samp(scores[:, 0], 0).confidence_interval()
    )
    assert (found.error_documents, found.error_sets, found.how) == (None, None, "documents")


@pytest.mark.parametrize(
    "right, n", [(0, 1), (1, 1), (0, 20), (20, 20), (19, 20), (7, 30), (499, 500)]
)
def test_wilson_by_its_definition(right: int, n: int) -> None:
    """The share is 1.96 standard errors, those at the bound, from each bound; at 0 and 1 the bound is exact."""
    share, quantile = right / n, stats.norm.ppf(0.975)
    for bound, edge in zip(wilson(right, n), (0, 1), strict=True):
        error = math.sqrt(bound * (1 - bound) / n)
        assert bound == edge == share or abs(share - bound) == pytest.approx(
            quantile * error, abs=1e-12
        )
    found = estimate((np.arange(n) < right)[:, None])
    assert (found.low, found.high, found.how, found.df) == (*wilson(right, n), "wilson", math.inf)
    assert found.error > 0
    if 5 < right < n - 5:  # the standard error is lm-eval's
        assert found.error == pytest.approx(stats.sem(np.arange(n) < right))


def test_all_right_with_every_set_is_as_sure_as_the_documents_allow() -> None:
    found = estimate(np.ones((40, 5)), bounds=(0, 1))
    assert (
        (found.low, found.high) == wilson(40, 40)
        and found.how == "wilson"
        and found.error_sets == 0
    )
    assert found.low < 0.95


def test_where_nothing_varies_or_nothing_can_be_said() -> None:
    found = estimate(np.full((5, 4), 0.1 + 0.2))
    assert (found.low, found.high, found.error) == (found.mean, found.mean, 0)
    for scores in ([[0.3]], [[0.3, 0.4]], [[0, 1]]):
        found = estimate(np.array(scores), bounds=(0, 1))
        assert (found.low, found.high, found.error) == (0, 1, math.inf)
    pair = difference(np.array([[0.3]]), np.array([[0.1]]))
    assert (pair.p, pair.low, pair.high, pair.detectable) == (1, -math.inf, math.inf, math.inf)


def test_a_difference_has_the_spread_of_the_differences() -> None:
    second = np.array([[0, 0, 1], [0, 1, 0], [0, 1, 0]])
    found, alone = difference(SMALL, second), estimate(SMALL - second)
    for name in (
        "mean",
        "low",
        "high",
        "error",
        "df",
        "error_documents",
        "error_sets",
        "documents",
        "sets",
        "how",
    ):
        assert getattr(found, name) == getattr(alone, name)
    t = abs(found.mean) / found.error
    assert found.p == pytest.approx(2 * stats.t.sf(t, found.df))
    quantiles = stats.t.ppf(0.975, found.df) + stats.t.ppf(0.8, found.df)
    assert found.detectable == pytest.approx(quantiles * found.error)


def test_identical_answers() -> None:
    for scores in (SMALL, SMALL[:, :1], np.ones((5, 2)), np.array([[0.3]]), np.zeros((3, 1))):
        found = difference(scores, scores.copy())
        assert (found.mean, found.low, found.high, found.error, found.p) == (0, 0, 0, 0, 1)
        assert found.how == "identical"
    rounded = difference(np.full((4, 2), 0.1 + 0.2), np.full((4, 2), 0.3))
    assert rounded.how == "identical" and rounded.p == 1


def test_equal_answers_detect_a_difference_that_documents_could_have() -> None:
    """The variance is that of as many different documents as Wilson's interval for none of them allows."""
    quantiles = stats.norm.ppf(0.975) + stats.norm.ppf(0.8)
    z2 = stats.norm.ppf(0.975) ** 2
    for n, sets in ((40, 1), (40, 3), (200, 1)):
        expected = quantiles * math.sqrt(z2 / (n + z2) / n)
        ones = np.ones((n, sets))
        assert difference(ones, ones).detectable == pytest.approx(expected)
        assert difference(ones / 3, ones / 3, bounds=(0, 1)).detectable == pytest.approx(expected)
        assert difference(ones, 0 * ones).detectable == pytest.approx(
            expected
        )  # the same difference everywhere
        # Without bounds of the scores nothing is known, nor where not even the largest difference would be found.
        assert math.isinf(difference(ones / 3, ones / 3).detectable)
    assert math.isinf(difference(np.ones((3, 1)), np.ones((3, 1))).detectable)
    same, other = difference(np.ones((40, 1)), np.ones((40, 1))), difference(SMALL, 1 - SMALL)
    assert difference_group([same, same], [1, 1]).detectable == pytest.approx(
        same.detectable / math.sqrt(2)
    )
    alone = difference_group([dataclasses.replace(same, detectable=0.0), other], [1, 1]).detectable
    both = difference_group([same, other], [1, 1]).detectable
    assert both == pytest.approx(math.hypot(alone, same.detectable / 2))


def test_the_same_difference_everywhere() -> None:
    found = difference(np.full((20, 4), 0.75), np.full((20, 4), 0.5))
    assert (found.low, found.high, found.error, found.how) == (0.25, 0.25, 0, "crossed")
    assert found.p == 2.0**-19
    assert difference(np.ones((20, 1)), np.zeros((20, 1))).p == pytest.approx(
        2.0**-20
    )  # the mid-p of 20 to 0


def test_one_set_of_right_answers_goes_to_mcnemar() -> None:
    """Bentur's trial in Fagerland, Lydersen and Laake (2013), table 1: 1 and 7 of 21 changed; the mid-p is 0.039."""
    assert mcnemar_mid_p(1, 7) == pytest.approx(10 / 256)  # 2 * (1 + 8) / 2^8 less 8 / 2^8
    assert round(mcnemar_mid_p(1, 7), 3) == 0.039
    first = np.array([1] * 1 + [0] * 7 + [1] * 8 + [0] * 5)[:, None]
    second = np.array([0] * 1 + [1] * 7 + [1] * 8 + [0] * 5)[:, None]
    found = difference(first, second)
    assert (found.p, found.how) == (mcnemar_mid_p(1, 7), "mcnemar")
    assert found.error == pytest.approx(stats.sem((first - second)[:, 0]))


@pytest.mark.parametrize("better, worse", [(0, 0), (0, 1), (3, 3), (2, 9), (100, 140)])
def test_mid_p_is_the_mean_of_two_exact_ones(better: int, worse: int) -> None:
    """Those of what was seen or more, and of strictly more."""
    few, n = min(better, worse), better + worse
    exact = 2 * stats.binom.cdf(few, n, 0.5) - stats.binom.pmf(few, n, 0.5)
    assert mcnemar_mid_p(better, worse) == mcnemar_mid_p(worse, better) == pytest.approx(exact)


def test_other_scores_of_one_set_go_to_the_paired_t() -> None:
    rng = np.random.default_rng(0)
    first, second = rng.random((2, 12, 1))
    found, scipys = difference(first, second), stats.ttest_rel(first[:, 0], second[:, 0])
    assert (found.how, found.p) == ("paired t", pytest.approx(scipys.pvalue))
    assert (found.low, found.high) == pytest.approx(scipys.confidence_interval())


MATRICES = st.tuples(st.integers(1, 6), st.integers(1, 4)).flatmap(
    lambda shape: st.tuples(
        *2
        * [
            st.one_of(
                arrays(float, shape, elements=st.sampled_from([0.0, 0.5, 1.0])), arrays(bool, shape)
            )
        ]
    )
)


@settings(max_examples=150, deadline=None)
@given(MATRICES, st.randoms(use_true_random=False))
def test_what_holds_for_all_scores(pair: tuple[np.ndarray, np.ndarray], random: Any) -> None:
    first, second = pair
    one, two = difference(first, second), difference(second, first)
    assert close(two, negated(one), rel=1e-15)
    n, sets = first.shape
    rows, columns = random.sample(range(n), n), random.sample(range(sets), sets)
    assert close(difference(first[rows][:, columns], second[rows][:, columns]), one)
    alone = estimate(first, bounds=(0, 1))
    assert close(estimate(first[rows][:, columns], bounds=(0, 1)), alone)
    for found in (one, alone):
        assert found.low <= found.mean <= found.high
        assert not any(isinstance(v, float) and math.isnan(v) for v in dataclasses.astuple(found))
        if found.error_sets is not None and found.error_documents is not None:
            assert found.error >= max(found.error_sets, found.error_documents) * (1 - 1e-9)
    assert 0 <= alone.low and alone.high <= 1 and 0 < one.p <= 1
    assert (one.p == 1 and one.how == "identical") == np.array_equal(1.0 * first, 1.0 * second)


def part(mean: float, error: float, df: float) -> Estimate:
    return Estimate(
        mean, mean - error, mean + error, error, df, 100, 10, error / 2, error / 4, "crossed"
    )


def test_a_group_by_hand() -> None:
    found = estimate_group([part(0.5, 0.03, 9), part(0.8, 0.04, 20)], [1, 1])
    assert found.mean == pytest.approx(0.65) and found.error == pytest.approx(
        0.025
    )  # sqrt(0.0009 + 0.0016) / 2
    # (0.000225 + 0.0004)^2 / (0.000225^2 / 9 + 0.0004^2 / 20)
    df = 3.90625e-7 / (5.0625e-8 / 9 + 1.6e-7 / 20)
    assert found.df == pytest.approx(df)
    half = stats.t.ppf(0.975, df) * 0.025
    assert (found.low, found.high) == pytest.approx((0.65 - half, 0.65 + half))
    assert (found.error_documents, found.error_sets) == pytest.approx((0.0125, 0.00625))
    assert (found.documents, found.sets, found.how) == (200, 20, "group")
    # Weights are in proportion.
    assert close(estimate_group([part(0.5, 0.03, 9), part(0.8, 0.04, 20)], [7, 7]), found)
    by_size = estimate_group([part(0.5, 0.03, 9), part(0.8, 0.04, 20)], [300, 100])
    assert by_size.mean == pytest.approx(0.575)
    assert estimate_group([part(0.99, 0.03, 9)], [1], bounds=(0, 1)).high == 1


def test_a_group_with_normal_and_one_set_tasks() -> None:
    wilsons = estimate(np.array([[1], [1], [0], [1]]))
    both = estimate_group([wilsons, wilsons], [1, 1])
    assert both.df == math.inf and both.error_sets is None
    assert both.high - both.mean == pytest.approx(
        stats.norm.ppf(0.975) * wilsons.error / math.sqrt(2)
    )
    mixed = estimate_group([wilsons, part(0.5, 0.02, 9)], [1, 1])
    assert mixed.error_sets == pytest.approx(0.0025)
    assert mixed.error_documents == pytest.approx(math.hypot(wilsons.error, 0.01) / 2)
    unknown = estimate_group([wilsons, part(0.5, math.inf, 0)], [1, 1], bounds=(0, 1))
    assert (unknown.low, unknown.high) == (0, 1)


def test_a_group_of_differences() -> None:
    rng = np.random.default_rng(0)
    tasks = [rng.random((2, 30, 5)) < level for level in (0.6, 0.7, 0.8)]
    parts = [difference(*task) for task in tasks]
    found = difference_group(parts, [1, 1, 1])
    assert found.p == pytest.approx(2 * stats.t.sf(abs(found.mean) / found.error, found.df))
    assert found.error == pytest.approx(math.sqrt(sum(each.error**2 for each in parts)) / 3)
    assert found.sets == 15 and found.documents == 90
    back = difference_group([difference(second, first) for first, second in tasks], [1, 1, 1])
    assert (back.mean, back.low, back.high, back.p) == (
        -found.mean,
        -found.high,
        -found.low,
        found.p,
    )
    same = difference(SMALL, SMALL)
    assert (
        difference_group([same, same], [1, 2]).p,
        difference_group([same, same], [1, 2]).how,
    ) == (1, "identical")
    constant = difference(np.full((5, 2), 0.5), np.full((5, 2), 0.25))
    assert difference_group([same, constant], [1, 1]).p == constant.p == 1 / 16


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx(
        [0.03, 0.06, 0.06, 0.02]
    )  # x3, x1 but not below, x2, x4
    assert holm([0.5, 0.6, 0.9]) == [1, 1, 1] and holm([]) == [] and holm([0.04]) == [0.04]


def items(name: str, n: int, rng: np.random.Generator) -> list[Any]:
    """Items as lm-eval's tasks, or MetaICL's, give them."""
    right = rng.random(n) < 0.7
    if name in ("f1", "matthews_corrcoef"):
        gold = rng.integers(2, size=n)
        return np.stack([gold, np.where(right, gold, 1 - gold)], axis=1).tolist()
    if name == "macro_f1":  # classes by their number; -1 is one that is right nowhere
        gold = np.unique(rng.integers(4, size=n), return_inverse=True)[1]
        return np.stack([gold, np.where(right, gold, rng.integers(-1, 4, n))], axis=1).tolist()
    if name in ("weighted_perplexity", "bits_per_byte"):
        return np.stack([-rng.random(n) * 50, rng.integers(1, 40, n)], axis=1).tolist()
    values = (-rng.random(n)).tolist()
    return [*values, math.nan] if name == "nanmean" else values


@pytest.mark.parametrize(
    "name", [name for name in AGGREGATIONS if name != "ece"]
)  # which is none of lm-eval's
def test_aggregations_are_lm_evals(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from lm_eval.api.registry import get_aggregation

        rng, ours = np.random.default_rng(0), AGGREGATIONS[name]
        theirs = macro_f1 if name == "macro_f1" else get_aggregation(name)
        for n in (1, 2, 50):
            some = items(name, n, rng)
            features = ours.features(some)
            wanted = theirs([(str(a), str(b)) for a, b in some] if name == "macro_f1" else some)
            assert float(ours.value(features.sum(axis=0))) == pytest.approx(wanted)
            assert ours.value(np.stack([features, features]).sum(axis=1)).shape == (2,)
            if ours.bounds:
                assert ours.bounds[0] <= wanted <= ours.bounds[1]


def test_the_bootstrap_of_a_mean_is_nearly_the_formula() -> None:
    rng, mean = np.random.default_rng(0), AGGREGATIONS["mean"]
    y, other = (
        rng.normal(0, [[[2.0]], [[1.0]]], (2, 60, 1))
        + rng.normal(size=(2, 1, 6))
        + rng.normal(size=(2, 60, 6))
    )

    def sums(scores: np.ndarray) -> np.ndarray:
        return np.stack([mean.features(column) for column in scores.T], axis=1)

    found, formula = bootstrap(sums(y), mean.value, draws=20_000), estimate(y)
    assert found.mean == pytest.approx(formula.mean)
    assert found.error == pytest.approx(formula.error, rel=0.03)
    assert (found.error_documents, found.error_sets) == pytest.approx(
        (formula.error_documents, formula.error_sets), rel=0.03
    )
    assert found.df == pytest.approx(formula.df, rel=0.1) and found.how == "bootstrap"
    paired, by_formula = (
        bootstrap_difference(sums(y), sums(other), mean.value, draws=20_000),
        difference(y, other),
    )
    assert paired.mean == pytest.approx(by_formula.mean) and paired.error == pytest.approx(
        by_formula.error, rel=0.03
    )
    assert paired.p == pytest.approx(by_formula.p, rel=0.2)
    one_set = bootstrap(sums(y[:, :1]), mean.value, draws=20_000)
    assert (
        one_set.error == pytest.approx(estimate(y[:, :1]).error, rel=0.03)
        and one_set.error_sets is None
    )


def test_bootstrap_differences() -> None:
    rng, f1 = np.random.default_rng(0), AGGREGATIONS["f1"]
    first, second = (
        np.stack([f1.features(items("f1", 40, rng)) for _ in range(4)], axis=1) for _ in range(2)
    )
    one, two = (
        bootstrap_difference(first, second, f1.value),
        bootstrap_difference(second, first, f1.value),
    )
    assert close(two, negated(one), rel=1e-15)
    assert one == bootstrap_difference(first, second, f1.value)  # the same draws
    assert one.mean == pytest.approx(
        bootstrap(first, f1.value).mean - bootstrap(second, f1.value).mean
    )
    same = bootstrap_difference(first, first, f1.value)
    assert (same.p, same.low, same.high, same.how) == (1, 0, 0, "identical")
    # Paired: an entry that is nearly the other has a small error, however uncertain both are.
    nearly = first.copy()
    nearly[0] = second[0]
    assert (
        bootstrap_difference(first, nearly, f1.value).error < 0.5 * bootstrap(first, f1.value).error
    )


def test_bootstrap_of_little() -> None:
    f1, mean = AGGREGATIONS["f1"], AGGREGATIONS["nanmean"]
    assert bootstrap(f1.features([(1, 1)])[:, None], f1.value).error == math.inf
    nothing = bootstrap(np.repeat(f1.features([(0, 0), (0, 0)])[:, None], 3, axis=1), f1.value)
    assert (nothing.mean, nothing.low, nothing.high) == (0, 0, 0)
    # Some draws have no document with a number.
    sums = np.repeat(mean.features([1.0, math.nan])[:, None], 2, axis=1)
    assert (
        bootstrap(sums, mean.value).error == math.inf
        and bootstrap_difference(sums, 2 * sums, mean.value).p == 1
    )


def test_order_sensitivity_by_hand() -> None:
    """Documents under four orders: all the same; one other; two and two; three kinds; all different."""
    predictions = np.array([[0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 1, 1], [0, 0, 1, 2], [0, 1, 2, 3]])
    rates = np.array([0, 3 / 6, 4 / 6, 5 / 6, 1])
    found = order_sensitivity([predictions])
    assert found is not None and close(found, estimate(rates[:, None], bounds=(0, 1)))
    # Two sets with other numbers of orders, of which one has one alone, are crossed with documents.
    both = order_sensitivity([predictions, predictions[:, :1], predictions[:, 2:]])
    assert both is not None and both.how == "crossed"
    assert close(both, estimate(np.stack([rates, [0, 1, 0, 1, 1]], axis=1), bounds=(0, 1)))
    words = order_sensitivity([np.array([["yes", "no"], ["no", "no"]])])
    assert words is not None and (words.mean, words.how) == (0.5, "wilson")
    assert order_sensitivity([]) is order_sensitivity([predictions[:, :1]]) is None


@pytest.mark.parametrize(
    ("function", "arguments", "says"),
    [
        (estimate, [np.ones(3)], r"documents x sets, finite numbers, not of shape \(3,\)"),
        (estimate, [MISSING], "finite numbers"),
        (difference, [SMALL, SMALL[:, :1]], "of one shape"),
        (order_sensitivity, [[np.zeros((3, 2)), np.zeros((2, 2))]], "same shape"),
        (bootstrap, [np.zeros((2, 2)), AGGREGATIONS["macro_f1"].value], "documents x sets x features"),
        (AGGREGATIONS["f1"].features, [[(0, 2)]], "must be 0 or 1"),
        (AGGREGATIONS["macro_f1"].features, [[(0, 0), (0.5, 0)]], "whole number below 1,000"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(
    function: Callable[..., object], arguments: list[Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        function(*arguments)
