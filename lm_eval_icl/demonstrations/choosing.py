"""Choosing a task's demonstrations with a model: what the model is asked about the pool, and what is made of it."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, Protocol, cast

import numpy as np
from scipy.special import softmax
from tqdm import tqdm

from lm_eval_icl.demonstrations import best_random, lens
from lm_eval_icl.demonstrations.draw import draw
from lm_eval_icl.demonstrations.how import METHODS, SEARCHES
from lm_eval_icl.demonstrations.pool import Pool
from lm_eval_icl.demonstrations.select import SELECTORS, checked, in_prompt_order, select
from lm_eval_icl.errors import InputError, log, naming
from lm_eval_icl.inference.scoring import query_states
from lm_eval_icl.methods.predictor import DoesNotFit, Predictor
from lm_eval_icl.prompts.prompt import FewShotPrompt

HOW = ("random", "stratified", *METHODS)
_AT_ONCE = 256  # queries between two steps of the progress bar


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


class TaskPool(Protocol):
    """The documents that a task takes demonstrations from, as prompts (`harness.pools` has them of lm-eval's tasks).

    Attributes:
        name: the task's.
        docs: the documents; a row is the number of one.
        rows: those that are chosen from, with some that turn out to be closed.
        sha256: what tells these documents from others.
        prompts: what a choice depends on besides: the templates, and which documents are evaluated.
    """

    name: str
    docs: list[dict[str, Any]]
    rows: list[int]

    @property
    def sha256(self) -> str: ...

    @property
    def prompts(self) -> str: ...

    def is_closed(self, row: int) -> bool:
        """Whether a document may not be chosen, as a row or by its text."""

    def is_evaluated(self, doc: Any) -> bool:
        """Whether a document is among those that the task evaluates."""

    def label(self, doc: Any) -> Any:
        """The class of a document, for a stratified draw."""

    def query(self, row: int) -> tuple[FewShotPrompt, tuple[str, ...], int]:
        """A document's prompt without demonstrations, its options, and which is right."""

    def demonstration(self, row: int) -> str:
        """A document as a demonstration, with its answer and the delimiter that follows."""

    def without_text(self) -> tuple[FewShotPrompt, tuple[str, ...]]:
        """The prompt of a document whose texts are all "N/A", and the options."""


class Chooser:
    """Chooses demonstrations of a task for a model.

    Args:
        pool: the task's documents.
        predictor: the model under plain ICL; None for what is drawn without a model.
        most: how many documents of the pool, drawn by the seed, are chosen from.
    """

    def __init__(self, pool: TaskPool, predictor: Predictor | None, most: int) -> None:
        self.pool, self.most = pool, most
        self.predictor = cast(Predictor, predictor)
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
            before = self.predictor.runner.tokens_run
            choice = self._chosen(how, n, seed, balance, arguments)
            tokens = self.predictor.runner.tokens_run - before
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
            self._read = {tuple(rows): self._pass(rows)}
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
            (scores,) = self.predictor.score([], [str(prompt.query)], [options], prefix=prompt.prefix)
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

    # Passes through the model.

    def _pass(self, rows: Sequence[int]) -> tuple[list[np.ndarray], np.ndarray, list[int]]:
        """The probabilities of each document's options, and the hidden states that they are predicted from, without
        demonstrations. Documents that do not fit the model are left out."""
        fitting = [row for row in rows if self._fits(row)]
        if len(fitting) < len(rows):
            log.warning(
                "%s: %d documents of the pool are too long and left out.", self.pool.name, len(rows) - len(fitting)
            )
        if not fitting:
            raise InputError("no document of the pool fits the model.")
        probabilities: dict[int, np.ndarray] = {}
        features: dict[int, np.ndarray] = {}
        with tqdm(total=len(fitting), desc=f"{self.pool.name}: reading the pool", leave=False) as bar:
            for group in self._by_prefix(fitting):
                with query_states(self.predictor.runner.model) as states:
                    for row, scores in zip(group, self._score((), group), strict=True):
                        probabilities[row] = softmax(scores)
                for row in group:
                    prompt, options, _ = self.pool.query(row)
                    tokens = self.predictor.tokenizer.pair(prompt, options[0])[0].query
                    features[row] = states[tuple(tokens)].numpy()
                bar.update(len(group))
        return [probabilities[row] for row in fitting], np.stack([features[row] for row in fitting]), fitting

    def _by_prefix(self, rows: Sequence[int]) -> Iterator[list[int]]:
        """The rows in parts, each with one text before its prompts: a task's description may depend on the document."""
        by_prefix: dict[str, list[int]] = defaultdict(list)
        for row in rows:
            by_prefix[self.pool.query(row)[0].prefix].append(row)
        for group in by_prefix.values():
            yield from (group[start : start + _AT_ONCE] for start in range(0, len(group), _AT_ONCE))

    def _fits(self, row: int) -> bool:
        prompt, options, _ = self.pool.query(row)
        pairs = [self.predictor.tokenizer.pair(prompt, option) for option in options]
        return all(self.predictor.limits.too_long(tokens, len(answer) - 1) is None for tokens, answer in pairs)

    def _score(self, demonstrations: Sequence[int], rows: Sequence[int]) -> list[np.ndarray]:
        """The log-probabilities of each document's options behind some demonstrations."""
        texts = [self.pool.demonstration(row) for row in demonstrations]
        scored: dict[int, np.ndarray] = {}
        for group in self._by_prefix(rows):
            queries = [self.pool.query(row) for row in group]
            scores = self.predictor.score(
                texts,
                [str(prompt.query) for prompt, _, _ in queries],
                [options for _, options, _ in queries],
                prefix=queries[0][0].prefix,
            )
            scored |= {row: np.array([value for value, _ in pairs]) for row, pairs in zip(group, scores, strict=True)}
        return [scored[row] for row in rows]

    def _right(self, demonstrations: Sequence[int], rows: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Whether each document is answered rightly, and the probability of its right option among all."""
        right = [self.pool.query(row)[2] for row in rows]
        scores = self._score(demonstrations, rows)
        correct = [int(np.argmax(values)) == gold for values, gold in zip(scores, right, strict=True)]
        return np.array(correct), np.array([softmax(values)[gold] for values, gold in zip(scores, right, strict=True)])

    def _of_set(self, demonstrations: Sequence[int], rows: Sequence[int]) -> tuple[float, float]:
        """The accuracy of a set of demonstrations, and the mean log-probability of the right option. A set that does
        not fit the model with one of the documents is below all that do."""
        try:
            correct, of_right = self._right(demonstrations, rows)
        except DoesNotFit as error:
            self._too_long.append(error.message)
            return -math.inf, -math.inf
        return float(correct.mean()), float(np.log(np.maximum(of_right, 1e-300)).mean())

    # The methods that try demonstrations.

    def _searched(
        self, how: str, n: int, seed: int, rows: Sequence[int], balance: bool, arguments: dict[str, Any]
    ) -> Choice:
        settings = {**SEARCHES[how], **arguments}
        self._too_long: list[str] = []  # why a set does not fit, for each
        dev_rows: list[int] = []
        if how == "best_random":
            dev_rows, rows = self._apart(rows, settings.pop("dev"))
        rows = [row for row in rows if self._fits(row)]
        pool = Pool(np.array([self.pool.query(row)[2] if balance else 0 for row in rows], dtype=np.int64))
        if how == "best_random":
            cost = best_random.cost(n, len(dev_rows), **settings)
        else:
            cost = lens.cost(pool, n, lens.LensSettings(**settings), balance)
        self._announce(how, cost, rows)
        with tqdm(total=cost.queries, desc=f"{self.pool.name}: {how}", unit="query") as bar:

            def score(members: Sequence[int], documents: Sequence[int]) -> tuple[float, float]:
                scores = self._of_set(tuple(rows[i] for i in members), documents)
                bar.update(len(documents))
                return scores

            def info(candidate: int, others: Sequence[int]) -> np.ndarray:
                """How much a document, as the only demonstration, raises the probability of others' right options: by
                the least possible number, -1, if it does not fit the model with all of them."""
                bar.update(len(others))
                try:
                    return self._right((rows[candidate],), [rows[i] for i in others])[1] - alone[list(others)]
                except DoesNotFit:
                    return np.full(len(others), -1.0)

            if how == "best_random":
                best = best_random.best_random(
                    pool, n, Random(seed), lambda members: score(members, dev_rows), balance=balance, **settings
                )
            else:
                alone = self._right((), rows)[1]
                best = lens.lens(
                    pool,
                    n,
                    Random(seed),
                    info,
                    lambda members, on: score(members, [rows[i] for i in on]),
                    lens.LensSettings(**settings),
                    balance=balance,
                )
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

    def _apart(self, rows: Sequence[int], dev: int) -> tuple[list[int], list[int]]:
        """Documents to score sets on, the same for all seeds, and the rest."""
        pool = self.pool.rows
        if dev >= len(pool):
            raise InputError(f"best_random: dev={dev}: the pool has {len(pool)} documents, demonstrations included.")
        kept = sorted(row for row in Random("dev").sample(pool, dev) if not self.pool.is_closed(row))
        texts = {str(self.pool.query(row)[0]) for row in kept}
        return [row for row in kept if self._fits(row)], [
            row for row in rows if str(self.pool.query(row)[0]) not in texts
        ]

    def _announce(self, how: str, cost: best_random.Cost, rows: Sequence[int]) -> None:
        """Say what a search costs, before it begins: in queries, and in time as some queries take it."""
        sample = list(rows)[: min(64, len(rows))]
        self._score((), sample)  # the first pass of a model is slow
        begun = time.perf_counter()
        self._score((), sample)
        seconds = cost.queries * (time.perf_counter() - begun) / max(1, len(sample))
        log.warning(
            f"{self.pool.name}: {how} scores up to {cost.queries:,} queries behind {cost.contexts:,} lists of "
            f"demonstrations ({cost.demonstrations:,} demonstrations in all): some {seconds / 60:,.1f} minutes here."
        )
