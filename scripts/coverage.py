"""How often the intervals of `lm_eval_icl.results.statistics` contain the truth, by simulation.

    python scripts/coverage.py --trials 1000 > docs/reports/coverage.csv

For the page docs/comparing.md. An answer is right with the probability
logistic(level + effects). The effects are normal: of the document (standard deviation 1 for both
methods, and 0.5 for each), and of the set of demonstrations (0.5 for both, 0.4 for each) unless
a case says otherwise. The truth is the mean over the population, by quadrature; for a metric that
is no mean, it is the mean of 1,000 sets with 1,000 documents each.
"""

from __future__ import annotations

import argparse
import itertools
import math
from dataclasses import dataclass, replace

import numpy as np
from scipy import special

from lm_eval_icl.results import statistics
from lm_eval_icl.results.metrics import AGGREGATIONS, pseudo_values
from lm_eval_icl.results.statistics import Difference, Estimate

SHARE = (0.0, 1.0)
BOTH, EACH = 1.0, 0.5  # standard deviations of the effects of documents
METHODS = (0, 1)
QUADRATURE = np.polynomial.hermite_e.hermegauss(60)
HEAD = "case,documents,sets,metric,difference,its width,cell,its width,usual t"


@dataclass(frozen=True)
class Case:
    """Two methods on the same documents."""

    name: str
    documents: int
    sets: tuple[int, int]  # of each method
    levels: tuple[float, float] = (1.0, 0.5)  # on the logit
    same_sets: bool = True
    shared: float = 0.5  # standard deviations of the effects of sets: for both methods
    own: float = 0.4  # and for each
    # Whether the truth is that of the drawn set, where a method has only one.
    this_set: bool = False
    by_document: tuple[bool, bool] = (False, False)  # whether documents have their own sets
    metric: str = "mean"
    tasks: int = 1  # whose mean is estimated


CASES = (
    Case("same sets", 200, (10, 10)),
    Case("same sets", 200, (5, 5)),
    Case("same sets", 200, (3, 3)),
    Case("same sets", 30, (5, 5)),
    Case("same sets that do not matter", 200, (5, 5), shared=0, own=0),
    Case("two sets", 200, (2, 2)),
    Case("two sets, much between them", 200, (2, 2), own=1.0),
    Case("two sets, little between them", 200, (2, 2), shared=0.1, own=0.2),
    Case("other sets", 200, (5, 5), same_sets=False),
    Case("other sets", 200, (3, 3), same_sets=False),
    Case("other sets", 200, (2, 2), same_sets=False),
    Case("other sets", 200, (5, 2), same_sets=False),
    Case("other sets, much between the two", 200, (10, 2), same_sets=False, own=1.0),
    Case("one set, this one", 200, (1, 1), this_set=True),
    Case("one set, this one", 30, (1, 1), this_set=True),
    Case("sets against this one", 200, (5, 1), same_sets=False, this_set=True),
    Case("documents' own sets", 200, (1, 1), by_document=(True, True)),
    Case("documents' own sets", 200, (3, 3), by_document=(True, True)),
    Case("sets against documents' own", 200, (3, 1), same_sets=False, by_document=(False, True)),
    Case("ten documents", 10, (5, 5)),
    Case("ten documents", 10, (1, 1), this_set=True),
    Case("near 1", 200, (5, 5), levels=(5, 4)),
    Case("near 1", 30, (5, 5), levels=(5, 4)),
    Case("near 1", 30, (3, 3), levels=(4, 4)),
    Case("near 1", 30, (1, 1), levels=(5, 4), this_set=True),
    Case("near 1, ten documents", 10, (5, 5), levels=(5, 4)),
    Case("near 1, ten documents", 10, (1, 1), levels=(5, 4), this_set=True),
    Case("near 0", 30, (5, 5), levels=(-5, -4)),
    Case("near 0, other sets", 30, (3, 3), levels=(-5, -4), same_sets=False),
    Case("near 0, ten documents", 10, (1, 1), levels=(-5, -4), this_set=True),
    Case("F1", 100, (5, 5), metric="f1"),
    Case("F1, two sets", 100, (2, 2), metric="f1"),
    Case("F1, other sets", 100, (3, 3), metric="f1", same_sets=False),
    Case("F1, near 1", 30, (3, 3), levels=(5, 4), metric="f1"),
    Case("Matthews' correlation", 100, (5, 5), metric="matthews_corrcoef"),
    Case("macro-F1", 100, (5, 5), metric="macro_f1"),
    Case("mean of five tasks", 100, (5, 5), tasks=5),
    Case("mean of five tasks", 100, (2, 2), tasks=5),
    Case("mean of five tasks, other sets", 100, (2, 2), tasks=5, same_sets=False),
    Case("mean of five tasks, near 1", 20, (1, 1), levels=(5, 4), this_set=True, tasks=5),
)
FAMILIES = ((200, 10), (200, 5), (200, 3), (200, 2), (30, 5), (30, 1))  # documents and sets


@dataclass(frozen=True)
class Drawn:
    """One trial."""

    answers: tuple[np.ndarray, np.ndarray]  # (documents, sets) whether each method is right
    effects: tuple[np.ndarray, np.ndarray]  # (1 or documents, sets) of the sets
    golds: np.ndarray  # (documents,) the right options


def draw(case: Case, rng: np.random.Generator) -> Drawn:
    n = case.documents
    of_document = rng.normal(0, BOTH, (n, 1))
    shared = rng.normal(0, case.shared, (n, max(case.sets)))
    answers = []
    effects = []
    for method in METHODS:
        rows = n if case.by_document[method] else 1
        shape = (rows, case.sets[method])
        of_set = rng.normal(0, case.own, shape)
        if case.same_sets:
            of_set += shared[:rows, : case.sets[method]]
        else:
            of_set += rng.normal(0, case.shared, shape)
        of_each = rng.normal(0, EACH, (n, 1))
        logits = case.levels[method] + of_document + of_each + of_set
        answers.append((rng.random(logits.shape) < special.expit(logits)).astype(float))
        effects.append(of_set)
    golds = (rng.random(n) < 0.4).astype(int)
    return Drawn((answers[0], answers[1]), (effects[0], effects[1]), golds)


def normal_mean(level: float, variance: float) -> float:
    """The mean of a logistic function of a normal variable, by Gauss and Hermite's quadrature."""
    points, weights = QUADRATURE
    return float(weights @ special.expit(level + math.sqrt(variance) * points) / weights.sum())


def true_mean(case: Case, method: int, drawn: Drawn) -> float:
    variance = BOTH**2 + EACH**2
    if case.this_set and case.sets[method] == 1:
        return normal_mean(case.levels[method] + float(drawn.effects[method][0, 0]), variance)
    return normal_mean(case.levels[method], variance + case.shared**2 + case.own**2)


def features(case: Case, method: int, drawn: Drawn) -> np.ndarray:
    """(documents, sets, k) features of the case's metric."""
    golds = drawn.golds
    predicted = np.where(drawn.answers[method] == 1, golds[:, None], 1 - golds[:, None])
    pairs = [np.stack([golds, column], axis=1) for column in predicted.T]
    return np.stack([AGGREGATIONS[case.metric].features(pair) for pair in pairs], axis=1)


def metric_means(case: Case, drawn: Drawn) -> list[float]:
    value = AGGREGATIONS[case.metric].value
    return [float(value(features(case, m, drawn).sum(axis=0)).mean()) for m in METHODS]


def true_metrics(case: Case, rng: np.random.Generator) -> list[float]:
    """The truth of a metric that is no mean."""
    large = Case(case.name, 1000, (1, 1), case.levels, metric=case.metric)
    drawn = [metric_means(large, draw(large, rng)) for _ in range(1000)]
    return np.mean(drawn, axis=0).tolist()


def intervals(case: Case, drawn: Drawn) -> tuple[Estimate, Difference]:
    """Of the first method, and of the first minus the second."""
    if case.metric == "mean":
        first, second = drawn.answers
        own = statistics.estimate(first, bounds=SHARE)
        return own, statistics.difference(first, second, bounds=SHARE, same_sets=case.same_sets)
    metric = AGGREGATIONS[case.metric]
    values = [pseudo_values(features(case, method, drawn), metric.value) for method in METHODS]
    means = metric_means(case, drawn)
    own = statistics.estimate(values[0], bounds=metric.bounds, mean=means[0])
    return own, statistics.difference(
        values[0],
        values[1],
        bounds=metric.bounds,
        same_sets=case.same_sets,
        mean=means[0] - means[1],
    )


def usual_half(differences: np.ndarray) -> float:
    """Half of the usual interval: t with Satterthwaite's degrees of freedom, nothing added."""
    n, sets = differences.shape
    spread = statistics.spread_of(differences, 1.0)
    if spread.documents in (0, math.inf):
        return 0.0
    if sets == 1:
        return spread.half(0.05)
    variance = spread.documents + spread.sets - spread.rest
    below = spread.documents**2 / (n - 1) + spread.sets**2 / (sets - 1)
    below += spread.rest**2 / ((n - 1) * (sets - 1))
    df: float = min(max(variance**2 / below, min(n, sets) - 1), n + sets - 2)
    # The variance is at least that of either factor.
    for factor, factor_df in ((spread.sets, sets - 1), (spread.documents, n - 1)):
        if factor > variance:
            variance = factor
            df = factor_df
    return float(special.stdtrit(df, 0.975)) * math.sqrt(variance)


def line(case: Case, trials: int) -> str:
    """A line of the file: how often intervals hold, in percent, and their mean widths in points."""
    rng = np.random.default_rng(0)
    metrics = [] if case.metric == "mean" else true_metrics(case, rng)
    has_usual = case.same_sets and case.metric == "mean" and case.tasks == 1
    counts = np.zeros(6)
    for _ in range(trials):
        tasks = [draw(case, rng) for _ in range(case.tasks)]
        truths = [metrics or [true_mean(case, m, drawn) for m in METHODS] for drawn in tasks]
        first, second = np.mean(truths, axis=0)
        pairs = [intervals(case, drawn) for drawn in tasks]
        own = statistics.estimate_group([one for one, _ in pairs], [1] * case.tasks, bounds=SHARE)
        both = statistics.difference_group(
            [difference for _, difference in pairs], [1] * case.tasks, bounds=(-1.0, 1.0)
        )
        if case.tasks == 1:
            own, both = pairs[0]
        is_usual = False
        if has_usual:
            differences = tasks[0].answers[0] - tasks[0].answers[1]
            is_usual = abs(differences.mean() - first + second) <= usual_half(differences)
        counts += [
            first,
            both.low <= first - second <= both.high,
            both.high - both.low,
            own.low <= first <= own.high,
            own.high - own.low,
            is_usual,
        ]
    percents = [f"{100 * count / trials:.1f}" for count in counts]
    if not has_usual:
        percents[-1] = ""
    sets = " and ".join(map(str, dict.fromkeys(case.sets)))
    return ",".join([f'"{case.name}"', str(case.documents), sets, *percents])


def family_line(documents: int, sets: int, trials: int) -> str:
    """How often all intervals of the pairs of eight methods hold at once, and their mean width."""
    rng = np.random.default_rng(0)
    case = Case("all 28 pairs of eight methods", documents, (sets, sets), this_set=sets == 1)
    levels = np.linspace(0.5, 1.5, 8)
    hold = 0
    width = 0.0
    for _ in range(trials):
        of_document = rng.normal(0, BOTH, (documents, 1))
        shared = rng.normal(0, case.shared, sets)
        answers = []
        truths = []
        for level in levels:
            of_set = shared + rng.normal(0, case.own, sets)
            logits = level + of_document + rng.normal(0, EACH, (documents, 1)) + of_set
            answers.append((rng.random(logits.shape) < special.expit(logits)).astype(float))
            variance = BOTH**2 + EACH**2
            if sets > 1:
                truths.append(normal_mean(level, variance + case.shared**2 + case.own**2))
            else:
                truths.append(normal_mean(level + of_set[0], variance))
        pairs = list(itertools.combinations(range(len(levels)), 2))
        found = [
            replace(
                statistics.difference(answers[a], answers[b], bounds=SHARE),
                comparisons=len(pairs),
            )
            for a, b in pairs
        ]
        hold += all(
            x.low <= truths[a] - truths[b] <= x.high for x, (a, b) in zip(found, pairs, strict=True)
        )
        width += sum(x.high - x.low for x in found) / len(pairs)
    of_all = f"{100 * hold / trials:.1f},{100 * width / trials:.1f}"
    return f'"{case.name}",{documents},{sets},,{of_all},,,'


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=2000)
    trials = parser.parse_args().trials
    print(HEAD)
    for case in CASES:
        print(line(case, trials), flush=True)
    for documents, sets in FAMILIES:
        print(family_line(documents, sets, max(1, trials // 4)), flush=True)


if __name__ == "__main__":
    main()
