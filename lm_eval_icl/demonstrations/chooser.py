"""Chooses a task's demonstrations by a model's outputs, or by searches that run the model often."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, Protocol

import numpy as np
from scipy.special import softmax
from tqdm import tqdm

from lm_eval_icl.demonstrations.pool import Pool
from lm_eval_icl.demonstrations.searches import BestRandom, Lens, lens
from lm_eval_icl.demonstrations.selector import SelectionMethod, Selector, in_prompt_order, select
from lm_eval_icl.errors import InputError
from lm_eval_icl.inference.schedule import ContextQueryAnswer, Ids
from lm_eval_icl.inference.scoring import not_finite
from lm_eval_icl.methods.predictor import DoesNotFit, Predictor
from lm_eval_icl.methods.runner import grouped
from lm_eval_icl.prompts.prompt import FewShotPrompt
from lm_eval_icl.prompts.tokens import Context, TokenizedPrompt


class TaskPool(Protocol):
    """The documents that may become a task's demonstrations, as prompts.

    `harness.model_choices.PoolOfTask` is such a pool.

    Attributes:
        docs: the documents. A row is the index of a document.
        rows: the candidates. Some of them may be closed, which means that they are not chosen.
        docs_digest: a digest of these documents (`draw.pool_digest`).
        prompts: the templates, and a digest of the evaluated documents. A choice also depends on
            both.
    """

    name: str
    docs: list[dict[str, Any]]
    rows: list[int]

    @property
    def docs_digest(self) -> str: ...
    @property
    def prompts(self) -> str: ...
    def is_closed(self, row: int) -> bool: ...
    def query(self, row: int) -> tuple[FewShotPrompt, tuple[str, ...], int]:
        """A document's prompt without demonstrations, its options, and the right option's index."""

    def demonstration(self, row: int) -> str:
        """A document as a demonstration, with its answer and the delimiter after it."""


@dataclass(frozen=True)
class Choice:
    """The demonstrations that were chosen for a task and a seed.

    Attributes:
        indices: rows of the task's few-shot documents, in the order of the prompt.
        picked: the same rows in the order of picking; None if this is the order of the prompt.
        accuracy: the accuracy of the chosen set on the documents of the search; None without a
            search.
        seconds: how long the choice took.
        tokens: how many tokens ran through the model for the choice.
    """

    indices: tuple[int, ...]
    picked: tuple[int, ...] | None = None
    accuracy: float | None = None
    seconds: float = field(default=0.0, compare=False)
    tokens: int = field(default=0, compare=False)

    def as_json(self) -> dict[str, Any]:
        """The choice as an entry of results files and of files of choices."""
        return {name: value for name, value in vars(self).items() if value is not None}


class Chooser:
    """Chooses demonstrations of a task by a model's outputs on its pool.

    Args:
        pool: the task's documents.
        predictor: the model with plain ICL.
        most: the largest number of candidates. If the pool has more documents, the candidates are
            drawn by the seed.
    """

    def __init__(self, pool: TaskPool, predictor: Predictor, most: int) -> None:
        self.pool = pool
        self.predictor = predictor
        self.most = most
        self._read: dict[tuple[int, ...], tuple[np.ndarray, np.ndarray, list[int]]] = {}

    def choose(self, how: SelectionMethod, n: int, seed: int) -> Choice:
        """Choose n demonstrations.

        Raises:
            InputError: there are too few documents that fit the model, or their options differ.
        """
        begun = time.perf_counter()
        tokens_before = self.predictor.runner.tokens_run
        rows = self._rows(seed)
        if len({self.pool.query(row)[1] for row in rows}) > 1:
            raise InputError(
                f"{how.name}: needs the same options for all documents, and the documents of task "
                f"{self.pool.name!r} have different options."
            )
        choice = (
            self._selected(how, n, seed, rows)
            if isinstance(how, Selector)
            else self._searched(how, n, seed, rows)
        )
        tokens = self.predictor.runner.tokens_run - tokens_before
        return replace(choice, seconds=round(time.perf_counter() - begun, 3), tokens=tokens)

    def _selected(self, how: Selector, n: int, seed: int, rows: Sequence[int]) -> Choice:
        """The choice of a method that reads the model's outputs once."""
        candidates = tuple(rows)
        if candidates not in self._read:  # all seeds have the same rows, unless they are drawn
            self._read = {candidates: self.read(rows)}
        probabilities, features, fitting = self._read[candidates]
        labels = np.array([self.pool.query(row)[2] for row in fitting])
        chosen = select(how, Pool(labels, features, probabilities), n, seed)
        picked = tuple(fitting[i] for i in chosen)
        return Choice(in_prompt_order(picked, seed), picked)

    def _rows(self, seed: int) -> list[int]:
        """The candidates: at most `most` rows of the pool, drawn by the seed.

        There are no duplicates and no closed rows among them.
        """
        rows = self.pool.rows
        first: dict[str, int] = {}
        if len(rows) > self.most:
            rows = sorted(Random(f"pool {seed}").sample(rows, self.most))
        for row in rows:
            if not self.pool.is_closed(row):
                first.setdefault(str(self.pool.query(row)[0]), row)
        return list(first.values())

    def read(self, rows: Sequence[int]) -> tuple[np.ndarray, np.ndarray, list[int]]:
        """`read_queries` of the documents that fit the model, and their rows."""
        fitting = [row for row in rows if self.fits(row)]
        if not fitting:
            raise InputError("no document of the pool fits the model.")
        name = f"{self.pool.name}: a document of the pool"
        queries = [self.pool.query(row)[:2] for row in fitting]
        probabilities, features = read_queries(self.predictor, name, queries)
        return np.array(probabilities), features, fitting

    def fits(self, row: int) -> bool:
        prompt, options, _ = self.pool.query(row)
        pairs = [self.predictor.tokenizer.pair(prompt, option) for option in options]
        return all(
            self.predictor.limits.too_long(tokens, len(answer) - 1) is None
            for tokens, answer in pairs
        )

    def right(
        self, demonstrations: Sequence[int], rows: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Whether each document is answered correctly after these demonstrations, and how surely.

        Returns:
            Whether the right option has the highest probability, and the probability of the right
            option, normalized over all options. Both are (len(rows),).
        """
        texts = [self.pool.demonstration(row) for row in demonstrations]
        # A task's description may depend on the document.
        by_prefix: dict[str, list[int]] = defaultdict(list)
        for row in rows:
            by_prefix[self.pool.query(row)[0].prefix].append(row)
        log_probs: dict[int, np.ndarray] = {}
        for prefix, group in by_prefix.items():
            prompts, options, _ = zip(*map(self.pool.query, group), strict=True)
            queries = [str(prompt.query) for prompt in prompts]
            scores = self.predictor.score(texts, queries, options, prefix=prefix)
            for row, pairs in zip(group, scores, strict=True):
                log_probs[row] = np.array([value for value, _ in pairs])
        correct = []
        probabilities = []
        for row in rows:
            gold = self.pool.query(row)[2]
            correct.append(log_probs[row].argmax() == gold)
            probabilities.append(softmax(log_probs[row])[gold])
        return np.array(correct), np.array(probabilities)

    def _searched(self, how: SelectionMethod, n: int, seed: int, rows: Sequence[int]) -> Choice:
        """The choice of a method that searches."""
        generator = Random(seed)
        dev_rows: list[int] = []
        if isinstance(how, BestRandom):
            dev_rows, rows = self._dev_and_rest(rows, how.dev)
        fitting = [row for row in rows if self.fits(row)]
        labels = [self.pool.query(row)[2] if how.balance else 0 for row in fitting]
        pool = Pool(np.array(labels, dtype=np.int64))
        with tqdm(desc=f"{self.pool.name}: {how.name}", unit=" queries") as bar:

            def score(
                members: Sequence[int], documents: Sequence[int] | None = None
            ) -> tuple[float, float]:
                documents = dev_rows if documents is None else [fitting[i] for i in documents]
                bar.update(len(documents))
                return self._set_score([fitting[i] for i in members], documents)

            def info(candidate: int, others: Sequence[int]) -> np.ndarray:
                """By how much a document, as the only demonstration, raises the probabilities of
                the right options of other documents.

                It is the smallest possible number, -1, if the document does not fit the model with
                all of them.
                """
                bar.update(len(others))
                documents = [fitting[i] for i in others]
                try:
                    _, after = self.right([fitting[candidate]], documents)
                except DoesNotFit:
                    return np.full(len(others), -1.0)
                return after - alone[list(others)]

            if isinstance(how, BestRandom):
                best = how.search(pool, n, generator, score)
            else:
                assert isinstance(how, Lens)
                _, alone = self.right([], fitting)
                best = lens(how, pool, n, generator, info, score)
        if not math.isfinite(best.accuracy):
            raise InputError(
                f"{how.name}: none of the sets that were tried fits the model: lower "
                "--num_fewshot, or take a model with more positions."
            )
        return Choice(tuple(fitting[i] for i in best.rows), accuracy=best.accuracy)

    def _dev_and_rest(self, rows: Sequence[int], dev: int) -> tuple[list[int], list[int]]:
        """The documents to score sets on, and the `rows` that have other texts.

        The documents are the same for all seeds.
        """
        pool = self.pool.rows
        if dev >= len(pool):
            raise InputError(
                f"best_random: dev={dev}: the pool has {len(pool)} documents for dev and "
                "demonstrations."
            )
        drawn = Random("dev").sample(pool, dev)
        kept = sorted(row for row in drawn if not self.pool.is_closed(row))
        texts = {str(self.pool.query(row)[0]) for row in kept}
        rest = [row for row in rows if str(self.pool.query(row)[0]) not in texts]
        return [row for row in kept if self.fits(row)], rest

    def _set_score(self, demonstrations: Sequence[int], rows: Sequence[int]) -> tuple[float, float]:
        """The accuracy of a set of demonstrations, and the mean log-probability of right options.

        Both are minus infinity if the set does not fit the model with one of the documents.
        """
        try:
            correct, probabilities = self.right(demonstrations, rows)
        except DoesNotFit:
            return -math.inf, -math.inf
        return float(correct.mean()), float(np.log(np.maximum(probabilities, 1e-300)).mean())


def read_queries(
    predictor: Predictor, name: str, queries: Sequence[tuple[FewShotPrompt, tuple[str, ...]]]
) -> tuple[list[np.ndarray], np.ndarray]:
    """Run queries with their options. All queries must fit the model.

    Args:
        name: stands for a query in messages.

    Returns:
        The probabilities of each query's options, and the last hidden state of each query's last
        token, (n, width).
    """
    runner = predictor.runner
    log_probs: dict[ContextQueryAnswer, float] = {}
    states: dict[tuple[Context, Ids], np.ndarray] = {}
    pairs = [predictor.tokenizer.pairs(*query) for query in queries]
    asked: list[tuple[TokenizedPrompt, Ids]] = []
    for tokens, answers in pairs:
        asked += [(tokens, answer) for answer in answers]
    batches = runner.score(grouped(asked), states="hidden")
    for requests, scores in tqdm(batches, f"{name}: reading", leave=False):
        for request, (log_prob, _), state in zip(requests, scores, scores.states, strict=True):
            if not math.isfinite(log_prob):
                raise not_finite(name, log_prob, runner.model)
            log_probs[request] = log_prob
            states[request[:2]] = state.numpy()
    probabilities = []
    for tokens, answers in pairs:
        values = [log_probs[tokens.context, tokens.query, answer] for answer in answers]
        probabilities.append(softmax(values))
    return probabilities, np.stack([states[tokens.context, tokens.query] for tokens, _ in pairs])
