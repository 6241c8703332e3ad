"""LENS (Li and Qiu, Findings of EMNLP 2023): a pool filtered by what each row tells, then a search.

What a row e tells about a row e' is c(e, e') = p(y' | x, y, x') - p(y' | x'), as the paper has it. The search is that
of the authors' code, which fills gaps of the paper and departs from it in some points: rows and
similarities are standardized, diversity is a mean of weight 4, a substitute is drawn from the best four of the label,
and the current sets stay candidates. What a row tells about itself is handled as in that code, too: the filter takes
the mean over the other rows (`main_for_progressive_examples_selection.py`, `mask_same_candidate_indication_pair`, which
its scripts switch on), and the search reads all of them (`main_for_iterative_optimize_train_acc_balance.py`).
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

# The search without the model, in which the first sets are found.
_FIRST_BEAMS, _FIRST_SETS, _FIRST_ROUNDS = 16, 160, 20
# How many of its rows one of the first sets may share with those before it.
_SHARED = 4
# A substitute is drawn from this many rows.
_SUBSTITUTES = 4

# What a row tells about each of some rows; and the accuracy of a set on some rows, with its mean log-probability there.
Info = Callable[[int, Sequence[int]], np.ndarray]
Score = Callable[[Rows, Rows], tuple[float, float]]


@dataclass(frozen=True)
class LensSettings:
    """How a pool is filtered and searched. Each round of the filter keeps 1/rho of the rows, and the next scores on rho
    times as many.

    Attributes:
        m: how many rows the filter leaves.
        rho: see above, above 1. Rounds end when m rows are left.
        l: how many rows the first round scores on.
        beams: how many sets each round of the search begins with.
        iterations: how many rounds the search has.
        substitutions: how many sets each set of a round makes by exchanging one row for another of its label.
        shuffles: how many sets it makes by another order of its rows.
        diversity: the weight of the similarity to the other rows of a set in choosing a substitute.
        dev: how many rows of the pool sets are scored on, all of them rows that the filter did not keep.
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
            raise InputError(f"lens: rho={self.rho}: must be above 1, so that every round keeps fewer rows.")

    def rounds(self, size: int) -> list[tuple[int, int]]:
        """For each round of the filter, on how many rows it scores and how many it keeps, with a pool of `size`."""
        rounds, scored, kept = [], self.l, size
        while (fewer := int(kept / self.rho)) > self.m:
            rounds.append((min(scored, size), fewer))
            scored, kept = int(scored * self.rho), fewer
        return [*rounds, (min(scored, size), min(kept, self.m))]


def lens(
    pool: Pool, n: int, generator: Random, info: Info, score: Score, settings: LensSettings, *, balance: bool = True
) -> ScoredSet:
    """Choose n rows and their order.

    Args:
        info: (a row e, rows e') -> c(e, e') for each e'.
        score: (a set, rows) -> the accuracy of the set and the mean log-probability of the right label, on these rows
            of the pool, which are the same in every call.
        balance: the same number from each class as far as possible.

    Raises:
        InputError: the pool has too few rows, or a class has none.
    """
    check_n("lens", pool, n)
    want = quotas(pool, n, generator) if balance else {-1: n}
    labels = pool.labels if balance else np.full(len(pool.labels), -1)
    rounds = _rounds(settings, labels, want)
    left = len(labels) - sum(rounds[-1][1].values())
    if left < settings.dev:
        raise InputError(
            f"lens: dev={settings.dev} rows to score on asked for, {left} of the pool's {len(labels)} are left beside "
            f"m={settings.m} candidates: raise --pool, or lower m or dev."
        )
    candidates, table = _filtered(labels, rounds, generator, info)
    dev_rows = tuple(generator.sample(sorted(set(range(len(labels))) - set(candidates)), settings.dev))
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
        ranks = {rows: (-scored[rows].accuracy, -scored[rows].log_probability, scored[rows].rows) for rows in sets}
        current = sorted(sets, key=ranks.__getitem__)[: settings.beams]
    return scored[current[0]]


def _rounds(settings: LensSettings, labels: np.ndarray, want: dict[int, int]) -> list[tuple[int, dict[int, int]]]:
    """For each round of the filter, on how many rows it scores, and how many of each label it keeps: at most those that
    exist, at least those wanted."""
    counts = {int(label): int(count) for label, count in zip(*np.unique(labels, return_counts=True), strict=True)}
    return [
        (scored, {label: min(n, max(kept // len(counts), want.get(label, 0))) for label, n in counts.items()})
        for scored, kept in settings.rounds(len(labels))
    ]


def _filtered(
    labels: np.ndarray, rounds: list[tuple[int, dict[int, int]]], generator: Random, info: Info
) -> tuple[list[int], np.ndarray]:
    """The candidates that the filter leaves, in rising order, and what each tells about each row that the last round
    scored on."""
    rows, order = np.arange(len(labels)), list(range(len(labels)))
    generator.shuffle(order)
    table = np.zeros((len(rows), 0))
    for scored, keep in rounds:
        new = order[table.shape[1] : scored]
        table = np.concatenate([table, np.stack([info(row, new) for row in rows.tolist()])], axis=1)
        others = rows[:, None] != order[:scored]
        means = table.sum(1, where=others) / np.maximum(others.sum(1), 1)
        stays = np.zeros(len(rows), dtype=bool)
        for label, count in keep.items():
            of_label = np.flatnonzero(labels[rows] == label)
            stays[of_label[np.argsort(-means[of_label], kind="stable")[:count]]] = True
        rows, table = rows[stays], table[stays]
    return rows.tolist(), table


class _Search:
    """Sets of candidates, numbered from 0, and their value by what their rows tell: `labels` (E,) of the
    candidates, `table` (E, S) what each tells about each row that it was scored on, and `want` how many of each label a
    set has."""

    def __init__(
        self, labels: np.ndarray, table: np.ndarray, want: dict[int, int], diversity: float, generator: Random
    ) -> None:
        self._labels, self._want, self._diversity, self._generator = labels, want, diversity, generator
        self._of_label = {label: np.flatnonzero(labels == label) for label in want}
        lengths = np.linalg.norm(table, axis=1, keepdims=True)
        units = table / np.where(lengths > 0, lengths, 1)
        self._tells = _standardized(table.mean(1))
        self._similar = _standardized(units @ units.T)

    def first_sets(self, beams: int) -> list[Rows]:
        """Sets to begin with: the best that a search without the model has seen, but not too alike."""
        seen: dict[Rows, float] = {}
        current = [self._random() for _ in range(_FIRST_SETS)]
        for _ in range(_FIRST_ROUNDS):
            children = [self.substituted(rows) for rows in current for _ in range(_FIRST_BEAMS)]
            sets = {tuple(sorted(rows)) for rows in [*children, *current]}
            for rows in sets - seen.keys():
                chosen = list(rows)
                alike = self._similar[chosen][:, chosen].mean()
                seen[rows] = float(self._tells[chosen].mean() - self._diversity * alike)
            current = sorted(sets, key=lambda rows: (-seen[rows], rows))[:_FIRST_BEAMS]
        taken: list[Rows] = []
        used: set[int] = set()
        for rows in sorted(seen, key=lambda rows: (-seen[rows], rows)):
            if len(taken) < beams and len(used.intersection(rows)) <= _SHARED:
                taken.append(tuple(self._generator.sample(rows, len(rows))))
                used.update(rows)
        return taken + [self._random() for _ in range(beams - len(taken))]

    def substituted(self, rows: Rows) -> Rows:
        """A set with one of its rows, drawn, exchanged for one of the same label that looks good beside the others."""
        at = self._generator.randrange(len(rows))
        others = [*rows[:at], *rows[at + 1 :]]
        alike = self._of_label[int(self._labels[rows[at]])]
        open_ = alike[~np.isin(alike, rows)]
        if not len(open_):
            return rows
        looks = self._tells[open_]
        if others:
            looks = looks - self._diversity * self._similar[open_][:, others].mean(1)
        best = np.argsort(-looks, kind="stable")[:_SUBSTITUTES]
        weights = np.exp(looks[best] - looks[best[0]])
        new = int(self._generator.choices(open_[best], weights.tolist())[0])
        return (*rows[:at], new, *rows[at + 1 :])

    def _random(self) -> Rows:
        return tuple(
            int(row)
            for label, count in self._want.items()
            for row in self._generator.sample(self._of_label[label].tolist(), count)
        )


def _standardized(values: np.ndarray) -> np.ndarray:
    """The numbers shifted and scaled to mean 0 and standard deviation 1; all 0 if they are equal."""
    spread = values.std(ddof=1) if values.size > 1 else 0.0
    return (values - values.mean()) / spread if spread > 0 and math.isfinite(spread) else np.zeros_like(values)
