"""LENS (Li and Qiu, Findings of EMNLP 2023): a filter of the pool by how informative each row is, then a search.

How informative e = (x, y) is about e' = (x', y') is c(e, e') = p(y' | x, y, x') - p(y' | x'), as in the paper. The
search is the authors' code, which fills gaps of the paper and departs from it in some points: c and the similarities
are standardized, diversity is a mean with the weight 4, a substitute is drawn from the best four rows of its label, and
the current sets stay candidates. c(e, e) is treated as in that code: the filter takes the mean over the other rows
(`main_for_progressive_examples_selection.py`, with `mask_same_candidate_indication_pair`, which its scripts switch on),
and the search takes the mean over all rows (`main_for_iterative_optimize_train_acc_balance.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from lm_eval_icl.demonstrations.best_random import Rows, ScoredSet
from lm_eval_icl.demonstrations.pool import Pool
from lm_eval_icl.demonstrations.select import check_n, quotas
from lm_eval_icl.errors import InputError

# The sizes of the search without the model that finds the first sets.
_FIRST_BEAMS = 16
_FIRST_SETS = 160
_FIRST_ROUNDS = 20
# How many of its rows a first set may share with all earlier first sets.
_SHARED = 4
# A substitute is drawn from this many rows.
_SUBSTITUTES = 4

# c(e, e') of a row e for each of some rows e'; and a set's accuracy and mean log-probability on some rows.
Info = Callable[[int, Sequence[int]], np.ndarray]
Score = Callable[[Rows, Rows], tuple[float, float]]


@dataclass(frozen=True)
class LensSettings:
    """How a pool is filtered and searched. Each round of the filter keeps 1/rho of the rows, and computes c for rho
    times as many rows e' as the round before. The rounds end when m rows are left.

    Attributes:
        m: how many rows the filter keeps in the end.
        rho: the factor of rounds, above 1.
        l: the number of rows e' in the first round.
        beams: how many sets each round of the search begins with.
        iterations: how many rounds the search has.
        substitutions: how many sets are made of each set of a round by replacing one row by another row of its label.
        shuffles: how many sets are made of each set of a round by shuffling its rows.
        diversity: the weight of the similarity to the other rows of a set in the choice of a substitute.
        dev: how many rows of the pool sets are scored on. They are drawn from the rows that the filter did not keep.
    """

    m: int = 500
    rho: float = 2.0
    l: int = 14  # noqa: E741 - the paper's name
    beams: int = 8
    iterations: int = 10
    substitutions: int = 6
    shuffles: int = 2
    diversity: float = 4.0
    dev: int = 100

    def __post_init__(self) -> None:
        if self.rho <= 1:
            raise InputError(
                f"lens: rho={self.rho}: must be above 1, so that every round keeps fewer rows."
            )

    def rounds(self, size: int) -> list[tuple[int, int]]:
        """For each round of the filter, the number of rows e' and the number of rows to keep, with a pool of `size`."""
        rounds = []
        scored = self.l
        kept = size
        while (fewer := int(kept / self.rho)) > self.m:
            rounds.append((min(scored, size), fewer))
            scored, kept = int(scored * self.rho), fewer
        return [*rounds, (min(scored, size), min(kept, self.m))]


def lens(
    pool: Pool,
    n: int,
    generator: Random,
    info: Info,
    score: Score,
    settings: LensSettings,
    *,
    balance: bool = True,
) -> ScoredSet:
    """Choose n rows and their order.

    Args:
        info: (a row e, rows e') -> c(e, e') for each e'.
        score: (a set, rows) -> the accuracy of the set and the mean log-probability of the right label on these rows
            of the pool. The rows are the same in every call.
        balance: choose the same number from each class as far as possible.

    Raises:
        InputError: the pool has too few rows, or a class has no rows.
    """
    check_n("lens", pool, n)
    want = quotas(pool, n, generator) if balance else {-1: n}
    labels = pool.labels if balance else np.full(len(pool.labels), -1)
    rounds = _rounds(settings, labels, want)
    left = len(labels) - sum(rounds[-1][1].values())
    if left < settings.dev:
        raise InputError(
            f"lens: dev={settings.dev} rows to score sets on are asked for, and {left} of the pool's {len(labels)} are "
            f"left beside m={settings.m} candidates: raise --pool, or lower m or dev."
        )
    candidates, table = _filtered(labels, rounds, generator, info)
    dev_rows = tuple(
        generator.sample(sorted(set(range(len(labels))) - set(candidates)), settings.dev)
    )
    search = _Search(labels[candidates], table, want, settings.diversity, generator)

    scored: dict[Rows, ScoredSet] = {}
    current = search.first_sets(settings.beams)
    for _ in range(settings.iterations):
        children = []
        for rows in current:
            children += [search.substituted(rows) for _ in range(settings.substitutions)]
            children += [tuple(generator.sample(rows, n)) for _ in range(settings.shuffles)]
        sets = list(dict.fromkeys([*children, *current]))
        for rows in sets:
            if rows not in scored:
                chosen = tuple(candidates[row] for row in rows)
                scored[rows] = ScoredSet(chosen, *score(chosen, dev_rows))
        ranks = {
            rows: (-scored[rows].accuracy, -scored[rows].log_probability, scored[rows].rows)
            for rows in sets
        }
        current = sorted(sets, key=ranks.__getitem__)[: settings.beams]
    return scored[current[0]]


def _rounds(
    settings: LensSettings, labels: np.ndarray, want: dict[int, int]
) -> list[tuple[int, dict[int, int]]]:
    """For each round of the filter, the number of rows e', and how many rows of each label to keep: at most all rows,
    and at least as many as a set has."""
    counts = {
        int(label): int(count)
        for label, count in zip(*np.unique(labels, return_counts=True), strict=True)
    }
    return [
        (
            scored,
            {
                label: min(n, max(kept // len(counts), want.get(label, 0)))
                for label, n in counts.items()
            },
        )
        for scored, kept in settings.rounds(len(labels))
    ]


def _filtered(
    labels: np.ndarray, rounds: list[tuple[int, dict[int, int]]], generator: Random, info: Info
) -> tuple[list[int], np.ndarray]:
    """The candidates that the filter keeps, in ascending order, and c of each candidate for the rows e' of the last
    round, (candidates, rows)."""
    rows = np.arange(len(labels))
    order = list(range(len(labels)))
    generator.shuffle(order)
    table = np.zeros((len(rows), 0))
    for scored, keep in rounds:
        new = order[table.shape[1] : scored]
        table = np.concatenate([table, np.stack([info(row, new) for row in rows.tolist()])], axis=1)
        others = rows[:, None] != order[:scored]
        means = table.sum(1, where=others) / np.maximum(others.sum(1), 1)
        stays = np.zeros(len(rows), dtype=bool)
        for label, count in keep.items():
            members = np.flatnonzero(labels[rows] == label)
            stays[members[np.argsort(-means[members], kind="stable")[:count]]] = True
        rows, table = rows[stays], table[stays]
    return rows.tolist(), table


class _Search:
    """Makes sets of the E candidates, numbered from 0, without the model. `labels` is (E,); `table` (E, S) is c of each
    candidate for each of S rows e'; `want` is how many rows of each label a set has."""

    def __init__(
        self,
        labels: np.ndarray,
        table: np.ndarray,
        want: dict[int, int],
        diversity: float,
        generator: Random,
    ) -> None:
        self._labels = labels
        self._want = want
        self._diversity = diversity
        self._generator = generator
        self._members = {label: np.flatnonzero(labels == label) for label in want}
        lengths = np.linalg.norm(table, axis=1, keepdims=True)
        units = table / np.where(lengths > 0, lengths, 1)
        self._informative = _standardized(table.mean(1))
        self._similar = _standardized(units @ units.T)

    def first_sets(self, beams: int) -> list[Rows]:
        """The first sets: the best sets in a search without the model that do not share too many rows."""
        seen: dict[Rows, float] = {}
        current = [self._random() for _ in range(_FIRST_SETS)]
        for _ in range(_FIRST_ROUNDS):
            children = [self.substituted(rows) for rows in current for _ in range(_FIRST_BEAMS)]
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
        """A set in which a random row is replaced by another row of its label, drawn from the best substitutes."""
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
        return tuple(
            int(row)
            for label, count in self._want.items()
            for row in self._generator.sample(self._members[label].tolist(), count)
        )


def _standardized(values: np.ndarray) -> np.ndarray:
    """The numbers shifted and scaled to mean 0 and standard deviation 1. Equal numbers become 0."""
    spread = values.std(ddof=1) if values.size > 1 else 0.0
    return (
        (values - values.mean()) / spread
        if spread > 0 and math.isfinite(spread)
        else np.zeros_like(values)
    )
