"""What a model is asked about a task's pool: the options' probabilities of documents, behind demonstrations or none."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from scipy.special import softmax
from tqdm import tqdm

from lm_eval_icl.errors import InputError, log
from lm_eval_icl.inference.schedule import Asked, Ids
from lm_eval_icl.inference.scoring import not_finite
from lm_eval_icl.methods.predictor import Predictor
from lm_eval_icl.methods.runner import grouped
from lm_eval_icl.prompts.prompt import FewShotPrompt
from lm_eval_icl.prompts.tokens import Context


class TaskPool(Protocol):
    """The documents that a task takes demonstrations from, as prompts (`harness.choosing` has them of lm-eval's tasks).

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


class PoolReader:
    """Runs documents of a task's pool through a model.

    Args:
        pool: the task's documents.
        predictor: the model under plain ICL.
    """

    def __init__(self, pool: TaskPool, predictor: Predictor) -> None:
        self.pool, self.predictor = pool, predictor

    def read(self, rows: Sequence[int]) -> tuple[list[np.ndarray], np.ndarray, list[int]]:
        """The probabilities of each document's options, and the hidden states that they are predicted from, without
        demonstrations. Documents that do not fit the model are left out."""
        fitting = [row for row in rows if self.fits(row)]
        if len(fitting) < len(rows):
            log.warning(
                "%s: %d documents of the pool are too long and left out.", self.pool.name, len(rows) - len(fitting)
            )
        if not fitting:
            raise InputError("no document of the pool fits the model.")
        runner, tokenizer = self.predictor.runner, self.predictor.tokenizer
        logs: dict[Asked, float] = {}
        states: dict[tuple[Context, Ids], np.ndarray] = {}
        pairs = [tokenizer.pairs(*self.pool.query(row)[:2]) for row in fitting]
        work = grouped((tokens, answer) for tokens, answers in pairs for answer in answers)
        with tqdm(total=len(fitting), desc=f"{self.pool.name}: reading the pool", leave=False) as bar:
            for scored, scores in runner.score(work, states="hidden"):
                for asked, (log_prob, _), state in zip(scored, scores, scores.states, strict=True):
                    if not math.isfinite(log_prob):
                        raise not_finite(f"{self.pool.name}: a document of the pool", log_prob, runner.model)
                    logs[asked], states[asked[:2]] = log_prob, state.numpy()
                bar.update(len({asked[:2] for asked in scored}))
        probabilities = [softmax([logs[tokens.context, tokens.query, a] for a in answers]) for tokens, answers in pairs]
        return probabilities, np.stack([states[tokens.context, tokens.query] for tokens, _ in pairs]), fitting

    def fits(self, row: int) -> bool:
        prompt, options, _ = self.pool.query(row)
        pairs = [self.predictor.tokenizer.pair(prompt, option) for option in options]
        return all(self.predictor.limits.too_long(tokens, len(answer) - 1) is None for tokens, answer in pairs)

    def score(self, demonstrations: Sequence[int], rows: Sequence[int]) -> list[np.ndarray]:
        """The log-probabilities of each document's options behind some demonstrations."""
        texts = [self.pool.demonstration(row) for row in demonstrations]
        by_prefix: dict[str, list[int]] = defaultdict(list)  # a task's description may depend on the document
        for row in rows:
            by_prefix[self.pool.query(row)[0].prefix].append(row)
        scored: dict[int, np.ndarray] = {}
        for group in by_prefix.values():
            queries = [self.pool.query(row) for row in group]
            scores = self.predictor.score(
                texts,
                [str(prompt.query) for prompt, _, _ in queries],
                [options for _, options, _ in queries],
                prefix=queries[0][0].prefix,
            )
            scored |= {row: np.array([value for value, _ in pairs]) for row, pairs in zip(group, scores, strict=True)}
        return [scored[row] for row in rows]

    def right(self, demonstrations: Sequence[int], rows: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Whether each document is answered rightly, and the probability of its right option among all."""
        right = [self.pool.query(row)[2] for row in rows]
        scores = self.score(demonstrations, rows)
        correct = [int(np.argmax(values)) == gold for values, gold in zip(scores, right, strict=True)]
        return np.array(correct), np.array([softmax(values)[gold] for values, gold in zip(scores, right, strict=True)])
