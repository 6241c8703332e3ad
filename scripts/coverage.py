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
from typing import NamedTuple

import numpy as np
from scipy import special

from lm_eval_icl.results import statistics
from lm_eval_icl.results.metrics import AGGREGATIONS, pseudo_values
from lm_eval_icl.results.statistics import Difference, Estimate

SHARE = (0.0, 1.0)
BOTH = 1.0  # standard deviation of the effects of documents, for both methods
EACH = 0.5  # and for each
QUADRATURE = np.polynomial.hermite_e.hermegauss(60)
HEAD = "case,documents,sets,metric,difference,its width,cell,its width,usual t"


@dataclass(frozen=True)
class Case:
    """Two methods on the same documents."""

    name: str
    documents: int
    sets: int  # of demonstrations
    second_sets: int = 0  # of the second method, if it has not as many
    levels: tuple[float, float] = (1.0, 0.5)  # on the logit
    same_sets: bool = True
    shared: float = 0.5  # standard deviations of the effects of sets: for both methods
    own: float = 0.4  # and for each
    by_document: tuple[bool, bool] = (False, False)  # whether documents have their own sets
    metric: str = "mean"
    tasks: int = 1  # whose mean is estimated

    @property
    def sets_of_each(self) -> tuple[int, int]:
        return self.sets, self.second_sets or self.sets


CASES = (
    Case("same sets", 200, 10),
    Case("same sets", 200, 5),
    Case("same sets", 200, 3),
    Case("same sets", 30, 5),
    Case("same sets that do not matter", 200, 5, shared=0, own=0),
    Case("two sets", 200, 2),
    Case("two sets, much between them", 200, 2, own=1.0),
    Case("two sets, little between them", 200, 2, shared=0.1, own=0.2),
    Case("other sets", 200, 5, same_sets=False),
    Case("other sets", 200, 3, same_sets=False),
    Case("other sets", 200, 2, same_sets=False),
    Case("other sets", 200, 5, 2, same_sets=False),
    Case("other sets, much between the two", 200, 10, 2, same_sets=False, own=1.0),
    Case("one set, this one", 200, 1),
    Case("one set, this one", 30, 1),
    Case("sets against this one", 200, 5, 1, same_sets=False),
    Case("documents' own sets", 200, 1, by_document=(True, True)),
    Case("documents' own sets", 200, 3, by_document=(True, True)),
    Case("sets against documents' own", 200, 3, 1, same_sets=False, by_document=(False, True)),
    Case("ten documents", 10, 5),
    Case("ten documents", 10, 1),
    Case("near 1", 200, 5, levels=(5, 4)),
    Case("near 1", 30, 5, levels=(5, 4)),
    Case("near 1", 30, 3, levels=(4, 4)),
    Case("near 1", 30, 1, levels=(5, 4)),
    Case("near 1, ten documents", 10, 5, levels=(5, 4)),
    Case("near 1, ten documents", 10, 1, levels=(5, 4)),
    Case("near 0", 30, 5, levels=(-5, -4)),
    Case("near 0, other sets", 30, 3, levels=(-5, -4), same_sets=False),
    Case("near 0, ten documents", 10, 1, levels=(-5, -4)),
    Case("F1", 100, 5, metric="f1"),
    Case("F1, two sets", 100, 2, metric="f1"),
    Case("F1, other sets", 100, 3, metric="f1", same_sets=False),
    Case("F1, near 1", 30, 3, levels=(5, 4), metric="f1"),
    Case("Matthews' correlation", 100, 5, metric="matthews_corrcoef"),
    Case("macro-F1", 100, 5, metric="macro_f1"),
    Case("mean of five tasks", 100, 5, tasks=5),
    Case("mean of five tasks", 100, 2, tasks=5),
    Case("mean of five tasks, other sets", 100, 2, tasks=5, same_sets=False),
    Case("mean of five tasks, near 1", 20, 1, levels=(5, 4), tasks=5),
)
FAMILIES = ((200, 10), (200, 5), (200, 3), (200, 2), (30, 5), (30, 1))  # documents and sets


class Drawn(NamedTuple):
    """One trial."""

    answers: list[np.ndarray]  # of each method: (documents, sets) whether it is right
    means: list[float]  # of each method: the truth, if the metric is a mean
    golds: np.ndarray  # (documents,) the right options


def draw(case: Case, rng: np.random.Generator) -> Drawn:
    n = case.documents
    of_document = rng.normal(0, BOTH, (n, 1))
    shared = rng.normal(0, case.shared, (n, max(case.sets_of_each)))
    answers = []
    means = []
    for method, sets in enumerate(case.sets_of_each):
        level = case.levels[method]
        rows = n if case.by_document[method] else 1
        of_set = rng.normal(0, case.own, (rows, sets))
        if case.same_sets:
            of_set += shared[:rows, :sets]
        else:
            of_set += rng.normal(0, case.shared, (rows, sets))
        answers.append(answered(level, of_document, of_set, rng))
        means.append(true_mean(case, level, of_set))
    golds = (rng.random(n) < 0.4).astype(int)
    return Drawn(answers, means, golds)


def answered(
    level: float, of_document: np.ndarray, of_set: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """(documents, sets) whether a method is right, as 0 or 1."""
    of_each = rng.normal(0, EACH, of_document.shape)
    logits = level + of_document + of_each + of_set
    return (rng.random(logits.shape) < special.expit(logits)).astype(float)


def true_mean(case: Case, level: float, of_set: np.ndarray) -> float:
    """The accuracy on all documents with all sets, or with the drawn one where all have the same."""
    variance = BOTH**2 + EACH**2
    if of_set.size == 1:
        return normal_mean(level + of_set.item(), variance)
    return normal_mean(level, variance + case.shared**2 + case.own**2)


def normal_mean(level: float, variance: float) -> float:
    """The mean of a logistic function of a normal variable, by Gauss and Hermite's quadrature."""
    points, weights = QUADRATURE
    return float(weights @ special.expit(level + math.sqrt(variance) * points) / weights.sum())


def features(case: Case, drawn: Drawn) -> list[np.ndarray]:
    """Of each method: (documents, sets, k) features of the case's metric."""
    golds = drawn.golds
    of_metric = AGGREGATIONS[case.metric].features
    found = []
    for answers in drawn.answers:
        predicted = np.where(answers == 1, golds[:, None], 1 - golds[:, None])
        columns = [of_metric(np.stack([golds, column], axis=1)) for column in predicted.T]
        found.append(np.stack(columns, axis=1))
    return found


def metric_means(case: Case, drawn: Drawn) -> list[float]:
    value = AGGREGATIONS[case.metric].value
    return [float(value(of_method.sum(axis=0)).mean()) for of_method in features(case, drawn)]


def true_metrics(case: Case, rng: np.random.Generator) -> list[float]:
    """The truth of a metric that is no mean."""
    large = Case(case.name, 1000, 1, levels=case.levels, metric=case.metric)
    drawn = [metric_means(large, draw(large, rng)) for _ in range(1000)]
    return np.mean(drawn, axis=0).tolist()


def intervals(case: Case, drawn: Drawn) -> tuple[Estimate, Difference]:
    """Of the first method, and of the first minus the second."""
    if case.metric == "mean":
        first, second = drawn.answers
        own = statistics.estimate(first, bounds=SHARE)
        return own, statistics.difference(first, second, bounds=SHARE, same_sets=case.same_sets)
    metric = AGGREGATIONS[case.metric]
    first, second = (pseudo_values(one, metric.value) for one in features(case, drawn))
    mean, other_mean = metric_means(case, drawn)
    return statistics.estimate(first, bounds=metric.bounds, mean=mean), statistics.difference(
        first,
        second,
        bounds=metric.bounds,
        same_sets=case.same_sets,
        mean=mean - other_mean,
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
    df = min(max(variance**2 / below, min(n, sets) - 1), n + sets - 2)
    # The variance is at least that of either factor.
    factors = [(spread.sets, sets - 1), (spread.documents, n - 1)]
    variance, df = max((variance, df), *factors)
    return float(special.stdtrit(df, 0.975)) * math.sqrt(variance)


def line(case: Case, trials: int) -> str:
    """A line of the file: how often intervals hold, in percent, and their mean widths in points."""
    rng = np.random.default_rng(0)
    metrics = [] if case.metric == "mean" else true_metrics(case, rng)
    has_usual = case.same_sets and case.metric == "mean" and case.tasks == 1
    counts = np.zeros(6)
    weights = [1] * case.tasks
    for _ in range(trials):
        tasks = [draw(case, rng) for _ in weights]
        first, second = metrics or np.mean([drawn.means for drawn in tasks], axis=0)
        pairs = [intervals(case, drawn) for drawn in tasks]
        own, both = pairs[0]
        if case.tasks > 1:
            owns, differences = zip(*pairs, strict=True)
            own = statistics.estimate_group(owns, weights, bounds=SHARE)
            both = statistics.difference_group(differences, weights, bounds=(-1.0, 1.0))
        counts[:5] += [
            first,
            both.low <= first - second <= both.high,
            both.high - both.low,
            own.low <= first <= own.high,
            own.high - own.low,
        ]
        if has_usual:
            difference = np.subtract(*tasks[0].answers)
            counts[5] += abs(difference.mean() - first + second) <= usual_half(difference)
    percents = [f"{100 * count / trials:.1f}" for count in counts]
    if not has_usual:
        percents[-1] = ""
    sets = " and ".join(map(str, dict.fromkeys(case.sets_of_each)))
    return ",".join([f'"{case.name}"', str(case.documents), sets, *percents])


def family_line(documents: int, sets: int, trials: int) -> str:
    """How often all intervals of the pairs of eight methods hold at once, and their mean width."""
    rng = np.random.default_rng(0)
    case = Case("all 28 pairs of eight methods", documents, sets)
    hold = 0
    width = 0.0
    for _ in range(trials):
        of_document = rng.normal(0, BOTH, (documents, 1))
        shared = rng.normal(0, case.shared, sets)
        methods = []
        for level in np.linspace(0.5, 1.5, 8):
            of_set = shared + rng.normal(0, case.own, sets)
            answers = answered(level, of_document, of_set, rng)
            methods.append((answers, true_mean(case, level, of_set)))
        missed = 0
        for (first, mean), (second, other_mean) in itertools.combinations(methods, 2):
            alone = statistics.difference(first, second, bounds=SHARE)
            found = replace(alone, comparisons=28)
            missed += not found.low <= mean - other_mean <= found.high
            width += (found.high - found.low) / 28
        hold += not missed
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
