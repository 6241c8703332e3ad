"""Choosing a task's demonstrations: what is made of what a model says of the pool, and searches that ask it."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import numpy as np
from tqdm import tqdm

from lm_eval_icl import version
from lm_eval_icl.demonstrations.best_random import best_random
from lm_eval_icl.demonstrations.how import SEARCHES, How
from lm_eval_icl.demonstrations.lens import LensSettings, lens
from lm_eval_icl.demonstrations.pool import Pool
from lm_eval_icl.demonstrations.reading import PoolReader, TaskPool
from lm_eval_icl.demonstrations.select import in_prompt_order, select
from lm_eval_icl.errors import InputError
from lm_eval_icl.methods.predictor import DoesNotFit, Predictor


@dataclass(frozen=True)
class Choice:
    """The demonstrations that were chosen for a task and a seed.

    Attributes:
        indices: rows of the task's few-shot documents, in the order of the prompt.
        picked: the same in the order of picking; None where that is the prompt's.
        accuracy: the choice's, on the documents that sets were scored on; None where none were.
        seconds: how long choosing took.
        tokens: how many tokens were run through the model for it.
    """

    indices: tuple[int, ...]
    picked: tuple[int, ...] | None = None
    accuracy: float | None = None
    seconds: float = field(default=0.0, compare=False)
    tokens: int = field(default=0, compare=False)

    def as_json(self) -> dict[str, Any]:
        """What results files and files of choices have of it."""
        return {name: value for name, value in vars(self).items() if value is not None}


class Chooser:
    """Chooses demonstrations of a task by what a model says of its pool.

    Args:
        pool: the task's documents.
        predictor: the model under plain ICL.
        most: how many documents of the pool, drawn by the seed, are chosen from.
    """

    def __init__(self, pool: TaskPool, predictor: Predictor, most: int) -> None:
        self.pool, self.reader, self.most = pool, PoolReader(pool, predictor), most
        self._read: dict[tuple[int, ...], tuple[np.ndarray, np.ndarray, list[int]]] = {}

    def choose(self, how: str, n: int, seed: int, balance: bool = True, **arguments: Any) -> Choice:
        """Choose n demonstrations.

        Raises:
            InputError: they cannot be chosen.
        """
        begun, before = time.perf_counter(), self.reader.predictor.runner.tokens_run
        rows = self._rows(seed)
        if len({self.pool.query(row)[1] for row in rows}) > 1:
            raise InputError(
                f"{how}: needs the same options for all documents, and those of task {self.pool.name!r} differ."
            )
        if how in SEARCHES:
            choice = self._searched(how, n, seed, rows, balance, SEARCHES[how] | arguments)
        else:
            if tuple(rows) not in self._read:  # seeds have the same rows, unless the pool is a part of the split
                self._read = {tuple(rows): self.reader.read(rows)}
            probabilities, features, rows = self._read[tuple(rows)]
            pool = Pool(np.array([self.pool.query(row)[2] for row in rows]), features, probabilities)
            picked = tuple(rows[i] for i in select(how, pool, n, seed, balance, **arguments))
            choice = Choice(in_prompt_order(picked, seed), picked)
        tokens = self.reader.predictor.runner.tokens_run - before
        return replace(choice, seconds=round(time.perf_counter() - begun, 3), tokens=tokens)

    def _rows(self, seed: int) -> list[int]:
        """The rows of the pool, or as many of them as are chosen from, drawn by the seed; without documents that are
        there twice or are evaluated."""
        rows, first = self.pool.rows, dict[str, int]()
        if len(rows) > self.most:
            rows = sorted(Random(f"pool {seed}").sample(rows, self.most))
        for row in rows:
            if not self.pool.is_closed(row):
                first.setdefault(str(self.pool.query(row)[0]), row)
        return list(first.values())

    def _searched(
        self, how: str, n: int, seed: int, rows: Sequence[int], balance: bool, settings: dict[str, Any]
    ) -> Choice:
        """What a method chooses that tries demonstrations."""
        generator, dev_rows = Random(seed), list[int]()
        if how == "best_random":
            dev_rows, rows = self._apart(rows, settings.pop("dev"))
        fitting = [row for row in rows if self.reader.fits(row)]
        pool = Pool(np.array([self.pool.query(row)[2] if balance else 0 for row in fitting], dtype=np.int64))
        with tqdm(desc=f"{self.pool.name}: {how}", unit=" queries") as bar:

            def score(members: Sequence[int], documents: Sequence[int] | None = None) -> tuple[float, float]:
                documents = dev_rows if documents is None else [fitting[i] for i in documents]
                bar.update(len(documents))
                return self._of_set([fitting[i] for i in members], documents)

            def info(candidate: int, others: Sequence[int]) -> np.ndarray:
                """How much a document, as the only demonstration, raises the probability of others' right options: by
                the least possible number, -1, if it does not fit the model with all of them."""
                bar.update(len(others))
                try:
                    of_right = self.reader.right([fitting[candidate]], [fitting[i] for i in others])[1]
                    return of_right - alone[list(others)]
                except DoesNotFit:
                    return np.full(len(others), -1.0)

            if how == "best_random":
                best = best_random(pool, n, generator, score, balance=balance, **settings)
            else:
                alone = self.reader.right([], fitting)[1]
                best = lens(pool, n, generator, info, score, LensSettings(**settings), balance=balance)
        if not math.isfinite(best.accuracy):
            raise InputError(
                f"{how}: none of the sets that were tried fits the model: lower --num_fewshot, or take a model with "
                "more positions."
            )
        return Choice(tuple(fitting[i] for i in best.rows), accuracy=best.accuracy)

    def _apart(self, rows: Sequence[int], dev: int) -> tuple[list[int], list[int]]:
        """Documents to score sets on, the same for all seeds, and the rest."""
        pool = self.pool.rows
        if dev >= len(pool):
            raise InputError(f"best_random: dev={dev}: the pool has {len(pool)} documents, demonstrations included.")
        kept = sorted(row for row in Random("dev").sample(pool, dev) if not self.pool.is_closed(row))
        texts = {str(self.pool.query(row)[0]) for row in kept}
        rest = [row for row in rows if str(self.pool.query(row)[0]) not in texts]
        return [row for row in kept if self.reader.fits(row)], rest

    def _of_set(self, demonstrations: Sequence[int], rows: Sequence[int]) -> tuple[float, float]:
        """The accuracy of a set of demonstrations, and the mean log-probability of the right option. A set that does
        not fit the model with one of the documents is below all that do."""
        try:
            correct, of_right = self.reader.right(demonstrations, rows)
        except DoesNotFit:
            return -math.inf, -math.inf
        return float(correct.mean()), float(np.log(np.maximum(of_right, 1e-300)).mean())


# What a file of choices has (`choices`).


def as_json(pool: TaskPool, n: int, of_seeds: Mapping[int, Choice]) -> dict[str, Any]:
    """A task's part of a file of choices."""
    seeds = {str(seed): choice.as_json() for seed, choice in of_seeds.items()}
    return {"n": n, "pool": {"rows": len(pool.docs), "sha256": pool.sha256}, "seeds": seeds}


def about(how: How, pretrained: str, of_model: Mapping[str, Any]) -> dict[str, Any]:
    """What a file of choices says of all of them: how they were chosen, and by the model of which name or folder and
    which `inference.identity.model_identity`."""
    sha256 = hashlib.sha256(json.dumps(of_model, sort_keys=True, default=str).encode()).hexdigest()
    model = {"pretrained": pretrained, "sha256": sha256}
    chosen_by = {"how": how.name, "arguments": dict(how.arguments), "balance": how.balance, "pool": how.pool}
    return {**chosen_by, "model": model, "version": version.version()}
