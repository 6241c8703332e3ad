"""Choosing a task's demonstrations: what is made of what a model says of the pool, and searches that ask it."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, cast

import numpy as np
from scipy.special import softmax
from tqdm import tqdm

from lm_eval_icl.demonstrations import best_random, lens
from lm_eval_icl.demonstrations.best_random import ScoredSet
from lm_eval_icl.demonstrations.draw import draw
from lm_eval_icl.demonstrations.how import SEARCHES
from lm_eval_icl.demonstrations.pool import Pool
from lm_eval_icl.demonstrations.reading import PoolReader, TaskPool
from lm_eval_icl.demonstrations.select import SELECTORS, checked, in_prompt_order, select
from lm_eval_icl.errors import InputError, log, naming
from lm_eval_icl.methods.predictor import DoesNotFit, Predictor


@dataclass(frozen=True)
class Choice:
    """The demonstrations that were chosen for a task and a seed.

    Attributes:
        indices: rows of the task's few-shot documents, in the order of the prompt.
        picked: the same in the order of picking; None where that is the prompt's.
        accuracy: the choice's, on the documents that sets were scored on; None where none were.
        evaluated: how many documents could not be chosen, or were drawn and replaced, since they are evaluated.
        seconds: how long choosing took.
        tokens: how many tokens were run through the model for it.
    """

    indices: tuple[int, ...]
    picked: tuple[int, ...] | None = None
    accuracy: float | None = None
    evaluated: int = 0
    seconds: float = field(default=0.0, compare=False)
    tokens: int = field(default=0, compare=False)


class Chooser:
    """Chooses demonstrations of a task by what a model says of its pool.

    Args:
        pool: the task's documents.
        predictor: the model under plain ICL; None for what is drawn without a model.
        most: how many documents of the pool, drawn by the seed, are chosen from.
    """

    def __init__(self, pool: TaskPool, predictor: Predictor | None, most: int) -> None:
        self.pool, self.reader = pool, PoolReader(pool, cast(Predictor, predictor))
        self.most = most
        self._read: dict[tuple[int, ...], tuple[list[np.ndarray], np.ndarray, list[int]]] = {}

    def choose(self, how: str, n: int, seed: int, balance: bool = True, **arguments: Any) -> Choice:
        """Choose n demonstrations.

        Raises:
            InputError: they cannot be chosen, or an argument is wrong.
        """
        begun = time.perf_counter()
        if how in ("random", "stratified"):
            checked(how, arguments, {})
            choice, tokens = self._drawn(how, n, seed), 0
        else:
            before = self.reader.predictor.runner.tokens_run
            choice = self._chosen(how, n, seed, balance, arguments)
            tokens = self.reader.predictor.runner.tokens_run - before
        return replace(choice, seconds=time.perf_counter() - begun, tokens=tokens)

    def _drawn(self, how: str, n: int, seed: int) -> Choice:
        pool = self.pool
        with naming(how):
            drawn, count = draw(
                pool.docs, n, how, pool.label, pool.is_evaluated, Random(seed), task=pool.name, seed=seed
            )
        if count:
            log.warning("%s: %d of %d drawn demonstrations are also evaluated, and were replaced.", pool.name, count, n)
        return Choice(tuple(drawn), evaluated=count)

    def _chosen(self, how: str, n: int, seed: int, balance: bool, arguments: dict[str, Any]) -> Choice:
        rows, closed = self._rows(seed), sum(map(self.pool.is_closed, self._part(seed)))
        if closed:
            log.warning(
                "%s: %d documents of the pool are also among the documents that are evaluated, as rows or by their "
                "texts, and left out.",
                *(self.pool.name, closed),
            )
        # To look at all documents of a large split takes longer than to choose.
        fixed = len({self.pool.query(row)[1] for row in rows}) == 1
        if not fixed and how in SELECTORS and "labels" in SELECTORS[how].needs:
            raise InputError(
                f"{how}: needs the same options for all documents, and those of task {self.pool.name!r} differ."
            )
        if balance and not fixed:
            log.warning("%s: the options differ by document, so the choice is not balanced.", self.pool.name)
            balance = False
        if how in SEARCHES:
            choice = self._searched(how, n, seed, rows, balance, checked(how, arguments, SEARCHES[how]))
            return replace(choice, evaluated=closed)
        if tuple(rows) not in self._read:  # seeds have the same rows, unless the pool is a part of the split
            self._read = {tuple(rows): self.reader.read(rows)}
        probabilities, features, rows = self._read[tuple(rows)]
        labels = np.array([self.pool.query(row)[2] if fixed else 0 for row in rows], dtype=np.int64)
        # Documents with options of their own may have different numbers of them.
        widest = max(map(len, probabilities))
        padded = np.stack([np.pad(values, (0, widest - len(values))) for values in probabilities])
        without_text = None
        if arguments.get("calibrated"):
            if not fixed:
                raise InputError(f"{how}: calibrated=True: needs the same options for all documents.")
            prompt, options = self.pool.without_text()
            (scores,) = self.reader.predictor.score([], [str(prompt.query)], [options], prefix=prompt.prefix)
            without_text = softmax([value for value, _ in scores])
        picked = select(how, Pool(labels, features, padded, without_text), n, seed, balance, **arguments)
        chosen = tuple(rows[i] for i in picked)
        return Choice(in_prompt_order(chosen, seed), chosen, evaluated=closed)

    def _part(self, seed: int) -> list[int]:
        """The rows of the pool, or as many of them as are chosen from, drawn by the seed."""
        rows = self.pool.rows
        return rows if len(rows) <= self.most else sorted(Random(f"pool {seed}").sample(rows, self.most))

    def _rows(self, seed: int) -> list[int]:
        """The rows that are chosen from, without documents that are there twice or are evaluated."""
        first: dict[str, int] = {}
        for row in self._part(seed):
            if not self.pool.is_closed(row):
                first.setdefault(str(self.pool.query(row)[0]), row)
        return list(first.values())

    def _of_set(self, demonstrations: Sequence[int], rows: Sequence[int]) -> tuple[float, float]:
        """The accuracy of a set of demonstrations, and the mean log-probability of the right option. A set that does
        not fit the model with one of the documents is below all that do."""
        try:
            correct, of_right = self.reader.right(demonstrations, rows)
        except DoesNotFit as error:
            self._too_long.append(error.message)
            return -math.inf, -math.inf
        return float(correct.mean()), float(np.log(np.maximum(of_right, 1e-300)).mean())

    # The methods that try demonstrations.

    def _searched(
        self, how: str, n: int, seed: int, rows: Sequence[int], balance: bool, arguments: dict[str, Any]
    ) -> Choice:
        self._too_long: list[str] = []  # why a set does not fit, for each
        search = self._best_random if how == "best_random" else self._lens
        rows, best = search(n, Random(seed), rows, balance, SEARCHES[how] | arguments)
        if self._too_long:
            if not math.isfinite(best.accuracy):
                raise InputError(
                    f"{how}: none of the {len(self._too_long)} sets that were tried fits the model "
                    f"({self._too_long[-1]}) Lower --num_fewshot, or take a model with more positions."
                )
            log.warning(
                "%s: %d sets of demonstrations do not fit the model with every document that they were tried on, and "
                "were not chosen.",
                *(self.pool.name, len(self._too_long)),
            )
        return Choice(tuple(rows[i] for i in best.rows), accuracy=best.accuracy)

    def _best_random(
        self, n: int, generator: Random, rows: Sequence[int], balance: bool, settings: dict[str, Any]
    ) -> tuple[list[int], ScoredSet]:
        dev_rows, rows = self._apart(rows, settings.pop("dev"))
        fitting, pool = self._fitting(rows, balance)
        with self._bar("best_random", best_random.cost(n, len(dev_rows), **settings), fitting) as bar:

            def score(members: Sequence[int]) -> tuple[float, float]:
                bar.update(len(dev_rows))
                return self._of_set(tuple(fitting[i] for i in members), dev_rows)

            return fitting, best_random.best_random(pool, n, generator, score, balance=balance, **settings)

    def _lens(
        self, n: int, generator: Random, rows: Sequence[int], balance: bool, settings: dict[str, Any]
    ) -> tuple[list[int], ScoredSet]:
        fitting, pool = self._fitting(rows, balance)
        search = lens.LensSettings(**settings)
        with self._bar("lens", lens.cost(pool, n, search, balance), fitting) as bar:
            alone = self.reader.right((), fitting)[1]

            def score(members: Sequence[int], documents: Sequence[int]) -> tuple[float, float]:
                bar.update(len(documents))
                return self._of_set(tuple(fitting[i] for i in members), [fitting[i] for i in documents])

            def info(candidate: int, others: Sequence[int]) -> np.ndarray:
                """How much a document, as the only demonstration, raises the probability of others' right options: by
                the least possible number, -1, if it does not fit the model with all of them."""
                bar.update(len(others))
                try:
                    of_right = self.reader.right((fitting[candidate],), [fitting[i] for i in others])[1]
                    return of_right - alone[list(others)]
                except DoesNotFit:
                    return np.full(len(others), -1.0)

            return fitting, lens.lens(pool, n, generator, info, score, search, balance=balance)

    def _fitting(self, rows: Sequence[int], balance: bool) -> tuple[list[int], Pool]:
        """The rows that fit the model, with their labels; with one label for all if the choice is not balanced."""
        fitting = [row for row in rows if self.reader.fits(row)]
        labels = [self.pool.query(row)[2] if balance else 0 for row in fitting]
        return fitting, Pool(np.array(labels, dtype=np.int64))

    def _apart(self, rows: Sequence[int], dev: int) -> tuple[list[int], list[int]]:
        """Documents to score sets on, the same for all seeds, and the rest."""
        pool = self.pool.rows
        if dev >= len(pool):
            raise InputError(f"best_random: dev={dev}: the pool has {len(pool)} documents, demonstrations included.")
        kept = sorted(row for row in Random("dev").sample(pool, dev) if not self.pool.is_closed(row))
        texts = {str(self.pool.query(row)[0]) for row in kept}
        rest = [row for row in rows if str(self.pool.query(row)[0]) not in texts]
        return [row for row in kept if self.reader.fits(row)], rest

    def _bar(self, how: str, cost: best_random.Cost, rows: Sequence[int]) -> Any:
        """A bar of a search's queries. Before, say what it costs: in queries, and in time as some queries take it."""
        sample = list(rows)[: min(64, len(rows))]
        self.reader.score((), sample)  # the first pass of a model is slow
        begun = time.perf_counter()
        self.reader.score((), sample)
        seconds = cost.queries * (time.perf_counter() - begun) / max(1, len(sample))
        log.warning(
            f"{self.pool.name}: {how} scores up to {cost.queries:,} queries behind {cost.contexts:,} lists of "
            f"demonstrations ({cost.demonstrations:,} demonstrations in all): some {seconds / 60:,.1f} minutes here."
        )
        return tqdm(total=cost.queries, desc=f"{self.pool.name}: {how}", unit="query")
