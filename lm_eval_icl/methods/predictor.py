"""The Python API: runs a method on a model, with demonstrations and queries given as text, without a harness."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lm_eval_icl.errors import InputError, checked_whole, naming
from lm_eval_icl.inference.memory import vocabulary_of
from lm_eval_icl.inference.scoring import Score, not_finite
from lm_eval_icl.methods.base import Method
from lm_eval_icl.methods.runner import MethodRunner
from lm_eval_icl.prompts.prompt import FewShotPrompt
from lm_eval_icl.prompts.tokens import PromptTokenizer


class DoesNotFit(InputError):
    """A prompt is longer than the model's positions."""


class Predictor:
    """Scores the options of queries, given demonstrations, with any method.

    Demonstrations are run through the model once. Their memory is stored for later calls with the same demonstrations
    (in any order, if the method does not depend on it). Call `forget` after the model's weights have changed.

    Args:
        model: a causal language model of transformers. It is put into evaluation mode.
        tokenizer: the model's tokenizer, which must be a fast tokenizer.
        method: the method, for example `lm_eval_icl.methods.make("invicl")`.
        max_length: how many positions the model has; if None, `max_position_embeddings` of its configuration.
        add_bos_token: whether BOS is put at the beginning of a prompt; None for the tokenizer's default.
        batch_size, pack_tokens, store_bytes, plain: as for `MethodRunner`.

    Raises:
        Unsupported: the model does not do what the method needs.
        InputError: the model, the tokenizer or an argument cannot be used.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        method: Method,
        *,
        max_length: int | None = None,
        add_bos_token: bool | None = None,
        batch_size: int = 8,
        pack_tokens: int = 1024,
        store_bytes: int = 2**31,
        plain: bool = False,
    ) -> None:
        self.runner = MethodRunner(
            model,
            method,
            batch_size=batch_size,
            pack_tokens=pack_tokens,
            store_bytes=store_bytes,
            plain=plain,
        )
        self.tokenizer = PromptTokenizer(
            tokenizer,
            add_bos_token=add_bos_token,
            by_part=method.treats_demonstrations_alike,
            canonical=self.runner.invariant,
            vocabulary=vocabulary_of(model),
            pieces=not plain,
        )
        self._batch_size = int(batch_size)
        if max_length is None:
            max_length = (
                getattr(model.config.get_text_config(), "max_position_embeddings", None)
                or sys.maxsize
            )
        self.limits = self.runner.limits(checked_whole("max_length", max_length))

    def score(
        self,
        demonstrations: Sequence[str] | Sequence[Sequence[str]],
        queries: Sequence[str],
        options: Sequence[str] | Sequence[Sequence[str]],
        *,
        prefix: str = "",
    ) -> list[list[Score]]:
        """Score every option of every query.

        Args:
            demonstrations: one list for all queries, or a list for each query. A demonstration ends with its answer and
                the delimiter after it. If several queries share demonstrations, they are encoded once where possible.
            queries: the queries, each up to the beginning of the answer.
            options: one list for all queries, or a list for each query. An option begins with the blank that separates
                it from the query.
            prefix: the text before the first demonstration.

        Returns:
            For each query, a list with (log-probability, greedy) for each option: the sum of the log-probabilities of
            the option's tokens (natural logarithm), and whether greedy decoding would produce the option.

        Raises:
            InputError: a prompt cannot be used, or a log-probability is NaN or infinite.
        """
        per_query, shown = (
            _listed_by_query(name, listed, len(queries))
            for name, listed in (
                ("options", options),
                ("demonstrations", demonstrations or [()] * len(queries)),
            )
        )
        names, pairs = [], []
        for q, (query, texts, shots) in enumerate(zip(queries, per_query, shown, strict=True)):
            for name, listed in (
                ("demonstrations", shots),
                ("queries", queries),
                ("options", texts),
            ):
                if isinstance(listed, str):  # the text would be read as a list of its characters
                    raise InputError(f"{name}={listed!r}: must be a list of texts, not a text.")
            if why := self.runner.method.why_not(len(shots)):
                raise InputError(f"{self.runner.method.name}: {why}.")
            with naming(f"query {q}"):
                prompt = self.tokenizer.arranged(FewShotPrompt(prefix, shots, query))
                tokens, answers = self.tokenizer.pairs(prompt, texts)
            for o, answer in enumerate(answers):
                names.append(f"query {q}, option {o}")
                if not (answer and tokens.query):
                    empty = "query" if answer else "option"
                    raise InputError(
                        f"{names[-1]}: the {empty} is empty: there is nothing to score."
                    )
                if reason := self.limits.too_long(tokens, len(answer) - 1):
                    needs = f"this one needs {reason.sum('answer without its last token')}"
                    advice = "Give fewer demonstrations." if shots else "Shorten the query."
                    raise DoesNotFit(
                        f"{names[-1]}: prompts {reason.why}; {needs}. {reason.hint}{advice}"
                    )
                pairs.append((tokens, answer))

        scores: dict[int, Score] = {}
        with self.runner.inference_mode():
            for scores_of_pass in self.runner.score_prompts(pairs):
                scores |= scores_of_pass
        for i, name in enumerate(names):
            if not math.isfinite(scores[i][0]):
                raise not_finite(name, scores[i][0], self.runner.model)
        in_order_of_pairs = (scores[i] for i in range(len(pairs)))
        return [[next(in_order_of_pairs) for _ in texts] for texts in per_query]

    def forget(self) -> None:
        """Free all memories. They are wrong once the model's weights have changed."""
        self.runner.begin(self._batch_size)


def _listed_by_query(name: str, listed: Any, n: int) -> list[Any]:
    """The list of texts of each of n queries, from one list for all queries or a list for each query."""
    if isinstance(listed, str) or any(isinstance(text, str) for text in listed):
        return [listed] * n
    if len(listed) != n:
        raise InputError(
            f"{name}: {len(listed)} lists for {n} queries: give one list, or one for each query."
        )
    return list(listed)
