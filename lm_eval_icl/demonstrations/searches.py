"""Searches for a set of demonstrations by trying sets: the best of many random sets, and LENS.

Random sets are compared as in Li and Qiu (2023). LENS (Li and Qiu, Findings of EMNLP 2023) filters
the pool by how informative each row is, and then searches.

How informative e = (x, y) is about e' = (x', y') is c(e, e') = p(y' | x, y, x') - p(y' | x'), as in
the paper. The search is the authors' code, which fills gaps of the paper and departs from it in
some points: c and the similarities are standardized, diversity is a mean with the weight 4, a
substitute is drawn from the best four rows of its label, and the current sets stay candidates.
c(e, e) is treated as in that code: the filter takes the mean over the other rows
(`main_for_progressive_examples_selection.py`, with `mask_same_candidate_indication_pair`, which its
scripts switch on), and the search takes the mean over all rows
(`main_for_iterative_optimize_train_acc_balance.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Annotated

import numpy as np
from pydantic import Field

from lm_eval_icl.declared import Positive
from lm_eval_icl.demonstrations.draw import stratified
from lm_eval_icl.demonstrations.pool import Pool
from lm_eval_icl.demonstrations.selector import SelectionMethod, check_n, quotas
from lm_eval_icl.errors import InputError

Rows = tuple[int, ...]
# c(e, e') of a row e for each of some rows e'.
Info = Callable[[int, Sequence[int]], np.ndarray]
# A set's accuracy and mean log-probability of the right label on some rows.
Score = Callable[[Rows, Rows], tuple[float, float]]

# The sizes of the search without the model that finds the first sets.
_FIRST_BEAMS = 16
_FIRST_SETS = 160
_FIRST_ROUNDS = 20
# How many of its rows a first set may share with all earlier first sets.
_SHARED = 4
# A substitute is drawn from this many rows.
_SUBSTITUTES = 4


@dataclass(frozen=True)
class ScoredSet:
    """A set of demonstrations with its score, as a search returns it.

    Attributes:
        rows: the rows in the order of the prompt, which is a part of the search.
        accuracy: the accuracy on the documents of the search.
        log_probability: the mean log-probability of the right label, which decides between equal
            accuracies.
    """

    rows: Rows
    accuracy: float
    log_probability: float


@dataclass(frozen=True)
class BestRandom(SelectionMethod):
    """The best of many random sets of demonstrations.

    Args:
        sets: how many ordered sets are drawn.
        dev: how many documents sets are scored on.
    """

    name = "best_random"

    sets: Positive = 100
    dev: Positive = 1000

    def search(
        self,
        pool: Pool,
        n: int,
        generator: Random,
        score: Callable[[Rows], tuple[float, float]],
    ) -> ScoredSet:
        """Draw ordered sets of n rows, and keep the set with the highest accuracy.

        Ties are decided by the mean log-probability of the right label, and then by the order of
        drawing.

        Args:
            score: returns the accuracy of a set and the mean log-probability of the right label, on
                the same documents in every call. None of these documents may be in the pool.

        Raises:
            InputError: the pool has fewer than n rows.
        """
        check_n(self, pool, n)
        rows = range(len(pool.labels))
        results = []
        for _ in range(self.sets):
            if self.balance:
                members = stratified(rows, n, lambda row: pool.labels[row], generator)
            else:
                members = generator.sample(rows, n)
            drawn = tuple(members)
            results.append(ScoredSet(drawn, *score(drawn)))
        return max(results, key=lambda result: (result.accuracy, result.log_probability))


@dataclass(frozen=True)
class Lens(SelectionMethod):
    """How LENS filters a pool and searches it.

    Each round of the filter keeps 1/rho of the rows, and computes c for rho times as many rows e'
    as the round before. The rounds end when m rows are left.

    Args:
        m: how many rows the filter keeps in the end.
        rho: the factor of rounds, above 1, so that every round keeps fewer rows.
        l: the number of rows e' in the first round.
        beams: how many sets each round of the search begins with.
        iterations: how many rounds the search has.
        substitutions: how many sets are made of each set of a round by replacing one row by another
            row of its label.
        shuffles: how many sets are made of each set of a round by shuffling its rows.
        diversity: the weight of the similarity to the other rows of a set in the choice of a
            substitute.
        dev: how many rows of the pool sets are scored on. They are drawn from the rows that the
            filter did not keep.
    """

    name = "lens"

    m: Positive = 500
    rho: Annotated[float, Field(gt=1)] = 2.0
    l: Positive = 14  # noqa: E741 - the paper's name
    beams: Positive = 8
    iterations: Positive = 10
    substitutions: Positive = 6
    shuffles: Positive = 2
    diversity: Annotated[float, Field(ge=0)] = 4.0
    dev: Positive = 100

    def rounds(self, size: int) -> list[tuple[int, int]]:
        """For each round of the filter of a pool of `size`: (rows e', rows to keep)."""
        rounds = []
        scored = self.l
        kept = size
        while (fewer := int(kept / self.rho)) > self.m:
            rounds.append((min(scored, size), fewer))
            scored = int(scored * self.rho)
            kept = fewer
        return [*rounds, (min(scored, size), min(kept, self.m))]


def lens(how: Lens, pool: Pool, n: int, generator: Random, info: Info, score: Score) -> ScoredSet:
    """Choose n rows and their order.

    Args:
        info: (a row e, rows e') -> c(e, e') for each e'.
        score: (a set, rows) -> the accuracy of the set and the mean log-probability of the right
            label on these rows of the pool. The rows are the same in every call.

    Raises:
        InputError: the pool has too few rows, or a class has no rows.
    """
    check_n(how, pool, n)
    labels = pool.labels if how.balance else np.full(len(pool.labels), -1)
    quota_by_label = quotas(pool, n, generator) if how.balance else {-1: n}
    rounds = _rounds(how, labels, quota_by_label)
    last_round = rounds[-1][1]
    left = len(labels) - sum(last_round.values())
    if left < how.dev:
        raise InputError(
            f"lens: dev={how.dev} exceeds the {left} of the pool's {len(labels)} rows that are not "
            f"among the m={how.m} candidates: raise pool=, or lower m= or dev=."
        )
    candidates, table = _filtered(labels, rounds, generator, info)
    others = sorted(set(range(len(labels))) - set(candidates))
    dev_rows = tuple(generator.sample(others, how.dev))
    search = _Search(labels[candidates], table, quota_by_label, how.diversity, generator)

    scored: dict[Rows, ScoredSet] = {}
    current = search.first_sets(how.beams)
    for _ in range(how.iterations):
        children = []
        for rows in current:
            children += [search.substituted(rows) for _ in range(how.substitutions)]
            children += [tuple(generator.sample(rows, n)) for _ in range(how.shuffles)]
        sets = list(dict.fromkeys([*children, *current]))
        for rows in sets:
            if rows not in scored:
                chosen = tuple(candidates[row] for row in rows)
                scored[rows] = ScoredSet(chosen, *score(chosen, dev_rows))
        current = sorted(sets, key=lambda rows: _rank(scored[rows]))[: how.beams]
    return scored[current[0]]


def _rank(result: ScoredSet) -> tuple[float, float, Rows]:
    """Sorts the best set first."""
    return -result.accuracy, -result.log_probability, result.rows


def _rounds(
    how: Lens, labels: np.ndarray, quota_by_label: dict[int, int]
) -> list[tuple[int, dict[int, int]]]:
    """For each round of the filter: (rows e', rows of each label to keep).

    At most all rows of a label are kept, and at least as many as a set has.
    """
    names, numbers = np.unique(labels, return_counts=True)
    counts = dict(zip(names.tolist(), numbers.tolist(), strict=True))
    rounds = []
    for scored, kept in how.rounds(len(labels)):
        share = kept // len(counts)
        keep = {
            label: min(count, max(share, quota_by_label.get(label, 0)))
            for label, count in counts.items()
        }
        rounds.append((scored, keep))
    return rounds


def _filtered(
    labels: np.ndarray, rounds: list[tuple[int, dict[int, int]]], generator: Random, info: Info
) -> tuple[list[int], np.ndarray]:
    """The candidates that the filter keeps, in ascending order, and a table of c.

    The table has c of each candidate for the rows e' of the last round, (candidates, rows).
    """
    rows = np.arange(len(labels))
    order = list(range(len(labels)))
    generator.shuffle(order)
    table = np.zeros((len(rows), 0))
    for scored, keep in rounds:
        new = order[table.shape[1] : scored]
        columns = np.stack([info(row, new) for row in rows.tolist()])
        table = np.concatenate([table, columns], axis=1)
        others = rows[:, None] != order[:scored]
        means = table.sum(1, where=others) / np.maximum(others.sum(1), 1)
        stays = np.zeros(len(rows), dtype=bool)
        for label, count in keep.items():
            members = np.flatnonzero(labels[rows] == label)
            best_first = np.argsort(-means[members], kind="stable")
            stays[members[best_first[:count]]] = True
        rows = rows[stays]
        table = table[stays]
    return rows.tolist(), table


class _Search:
    """Makes sets of the E candidates, numbered from 0, without the model.

    Args:
        labels: (E,) the label of each candidate.
        table: (E, S) c of each candidate for each of S rows e'.
        quota_by_label: how many rows of each label a set has.
        diversity: the weight of the similarity to the other rows of a set.
    """

    def __init__(
        self,
        labels: np.ndarray,
        table: np.ndarray,
        quota_by_label: dict[int, int],
        diversity: float,
        generator: Random,
    ) -> None:
        self._labels = labels
        self._quota_by_label = quota_by_label
        self._diversity = diversity
        self._generator = generator
        self._members = {label: np.flatnonzero(labels == label) for label in quota_by_label}
        lengths = np.linalg.norm(table, axis=1, keepdims=True)
        units = table / np.where(lengths > 0, lengths, 1)
        self._informative = _standardized(table.mean(1))
        self._similar = _standardized(units @ units.T)

    def first_sets(self, beams: int) -> list[Rows]:
        """The best sets of a search without the model that do not share too many rows."""
        seen: dict[Rows, float] = {}
        current = [self._random() for _ in range(_FIRST_SETS)]
        for _ in range(_FIRST_ROUNDS):
            children: list[Rows] = []
            for rows in current:
                children += [self.substituted(rows) for _ in range(_FIRST_BEAMS)]
            sets = {tuple(sorted(rows)) for rows in [*children, *current]}
            for rows in sets - seen.keys():
                chosen = list(rows)
                alike = self._similar[chosen][:, chosen].mean()
                seen[rows] = float(self._informative[chosen].mean() - self._diversity * alike)
            current = sorted(sets, key=lambda rows: (-seen[rows], rows))[:_FIRST_BEAMS]
        taken: list[Rows] = []
        used: set[int] = set()
        for rows in sorted(seen, key=lambda rows: (-seen[rows], rows)):
            if len(taken) < beams and len(used.intersection(rows)) <= _SHARED:
                taken.append(tuple(self._generator.sample(rows, len(rows))))
                used.update(rows)
        return taken + [self._random() for _ in range(beams - len(taken))]

    def substituted(self, rows: Rows) -> Rows:
        """A set in which a random row is replaced by another row of its label.

        The row is drawn from the best substitutes.
        """
        at = self._generator.randrange(len(rows))
        others = [*rows[:at], *rows[at + 1 :]]
        members = self._members[int(self._labels[rows[at]])]
        substitutes = members[~np.isin(members, rows)]
        if not len(substitutes):
            return rows
        values = self._informative[substitutes]
        if others:
            values = values - self._diversity * self._similar[substitutes][:, others].mean(1)
        best = np.argsort(-values, kind="stable")[:_SUBSTITUTES]
        weights = np.exp(values[best] - values[best[0]])
        new = int(self._generator.choices(substitutes[best], weights.tolist())[0])
        return (*rows[:at], new, *rows[at + 1 :])

    def _random(self) -> Rows:
        rows: list[int] = []
        for label, count in self._quota_by_label.items():
            rows += self._generator.sample(self._members[label].tolist(), count)
        return tuple(rows)


def _standardized(values: np.ndarray) -> np.ndarray:
    """The numbers shifted and scaled to mean 0 and standard deviation 1.

    Equal numbers become 0.
    """
    spread = values.std(ddof=1) if values.size > 1 else 0.0
    if spread > 0 and math.isfinite(spread):
        return (values - values.mean()) / spread
    return np.zeros_like(values)
