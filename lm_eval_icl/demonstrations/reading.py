"""What a model is asked about a task's pool: the options' probabilities of documents, behind demonstrations or none."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from scipy.special import softmax
from tqdm import tqdm

from lm_eval_icl.errors import InputError
from lm_eval_icl.inference.schedule import Asked, Ids
from lm_eval_icl.inference.scoring import not_finite
from lm_eval_icl.methods.predictor import Predictor
from lm_eval_icl.methods.runner import grouped
from lm_eval_icl.prompts.prompt import FewShotPrompt
from lm_eval_icl.prompts.tokens import Context


class TaskPool(Protocol):
    """The documents that a task takes demonstrations from, as prompts (`harness.pools` has them of lm-eval's tasks).

    Attributes:
        name: the task's.
        docs: the documents; a row is the number of one.
        rows: those that are chosen from, with some that turn out to be closed.
        sha256: what tells these documents from others.
    """

    name: str
    docs: list[dict[str, Any]]
    rows: list[int]

    @property
    def sha256(self) -> str: ...

    def is_closed(self, row: int) -> bool:
        """Whether a document may not be chosen, as a row or by its text."""

    def query(self, row: int) -> tuple[FewShotPrompt, tuple[str, ...], int]:
        """A document's prompt without demonstrations, its options, and which is right."""

    def demonstration(self, row: int) -> str:
        """A document as a demonstration, with its answer and the delimiter that follows."""


class PoolReader:
    """Runs documents of a task's pool through a model.

    Args:
        pool: the task's documents.
        predictor: the model under plain ICL.
    """

    def __init__(self, pool: TaskPool, predictor: Predictor) -> None:
        self.pool, self.predictor = pool, predictor

    def read(self, rows: Sequence[int]) -> tuple[np.ndarray, np.ndarray, list[int]]:
        """The probabilities of each document's options, and the hidden states that they are predicted from, without
        demonstrations; and the rows of these documents. Those that do not fit the model are left out."""
        fitting = [row for row in rows if self.fits(row)]
        if not fitting:
            raise InputError("no document of the pool fits the model.")
        runner, tokenizer = self.predictor.runner, self.predictor.tokenizer
        logs: dict[Asked, float] = {}
        states: dict[tuple[Context, Ids], np.ndarray] = {}
        pairs = [tokenizer.pairs(*self.pool.query(row)[:2]) for row in fitting]
        work = grouped((tokens, answer) for tokens, answers in pairs for answer in answers)
        for scored, scores in tqdm(runner.score(work, states="hidden"), f"{self.pool.name}: reading", leave=False):
            for asked, (log_prob, _), state in zip(scored, scores, scores.states, strict=True):
                if not math.isfinite(log_prob):
                    raise not_finite(f"{self.pool.name}: a document of the pool", log_prob, runner.model)
                logs[asked], states[asked[:2]] = log_prob, state.numpy()
        probabilities = [softmax([logs[tokens.context, tokens.query, a] for a in answers]) for tokens, answers in pairs]
        return np.array(probabilities), np.stack([states[tokens.context, tokens.query] for tokens, _ in pairs]), fitting

    def fits(self, row: int) -> bool:
        prompt, options, _ = self.pool.query(row)
        pairs = [self.predictor.tokenizer.pair(prompt, option) for option in options]
        return all(self.predictor.limits.too_long(tokens, len(answer) - 1) is None for tokens, answer in pairs)

    def right(self, demonstrations: Sequence[int], rows: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Whether each document is answered rightly behind some demonstrations, and the probability of its right option
        among all."""
        texts = [self.pool.demonstration(row) for row in demonstrations]
        by_prefix: dict[str, list[int]] = defaultdict(list)  # a task's description may depend on the document
        for row in rows:
            by_prefix[self.pool.query(row)[0].prefix].append(row)
        answers: dict[int, tuple[bool, float]] = {}
        for prefix, group in by_prefix.items():
            prompts, options, right = zip(*map(self.pool.query, group), strict=True)
            scores = self.predictor.score(texts, [str(prompt.query) for prompt in prompts], options, prefix=prefix)
            for row, pairs, gold in zip(group, scores, right, strict=True):
                values = np.array([value for value, _ in pairs])
                answers[row] = int(values.argmax()) == gold, softmax(values)[gold]
        correct, of_right = zip(*(answers[row] for row in rows), strict=True)
        return np.array(correct), np.array(of_right)
