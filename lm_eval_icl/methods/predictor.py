"""The Python API: runs a method on a model, with demonstrations and queries as text."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lm_eval_icl.declared import Positive, checked
from lm_eval_icl.errors import InputError, naming, refusing
from lm_eval_icl.inference.generation import settings_in_force
from lm_eval_icl.inference.memory import vocabulary_of
from lm_eval_icl.inference.schedule import in_order
from lm_eval_icl.inference.scoring import Score, not_finite
from lm_eval_icl.methods.base import Method
from lm_eval_icl.methods.limits import Request, truncated
from lm_eval_icl.methods.runner import MethodRunner
from lm_eval_icl.prompts.prompt import FewShotPrompt
from lm_eval_icl.prompts.tokens import PromptTokenizer, TokenizedPrompt

# One list of texts for all queries, or a list for each query.
TextLists = Sequence[str] | Sequence[Sequence[str]]


class DoesNotFit(InputError):
    """A prompt is longer than the model's positions."""


class Predictor:
    """Scores options of queries, and generates texts after queries, with any method.

    Demonstrations are run through the model once. Their memory is stored for later calls with the
    same demonstrations (in any order, if the method does not depend on it). Call `forget` after the
    model's weights have changed.

    Args:
        model: a causal language model of transformers. It is put into evaluation mode.
        tokenizer: the model's tokenizer, which must be a fast tokenizer.
        method: the method, for example `lm_eval_icl.methods.make("invicl")`.
        max_length: how many positions the model has. None: `max_position_embeddings` of its
            configuration.
        add_bos_token: whether BOS is put at the beginning of a prompt. None: the tokenizer's
            default.
        batch_size: how many texts are generated in one batch.
        pack_tokens, store_bytes: as for `MethodRunner`.
        plain: compute every request alone, with none of the optimizations (`methods.plain`).

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
        store_bytes: int | None = None,
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
            finds_answers=method.needs_answers,
        )
        self._batch_size = int(batch_size)
        if max_length is None:
            config = model.config.get_text_config()
            max_length = getattr(config, "max_position_embeddings", None) or sys.maxsize
        self.limits = self.runner.limits(checked("max_length", max_length, Positive))

    def score(
        self,
        demonstrations: TextLists,
        queries: Sequence[str],
        options: TextLists,
        *,
        prefix: str = "",
    ) -> list[list[Score]]:
        """Score every option of every query.

        Args:
            demonstrations: one list for all queries, or a list for each query. A demonstration ends
                with its answer and the delimiter after it. Demonstrations that several queries
                share are encoded once where possible.
            queries: the queries, each up to the beginning of the answer.
            options: one list for all queries, or a list for each query. An option begins with the
                blank that separates it from the query.
            prefix: the text before the first demonstration.

        Returns:
            For each query, a list with (log-probability, greedy) for each option: the sum of the
            log-probabilities of the option's tokens (natural logarithm), and whether greedy
            decoding would produce the option.

        Raises:
            InputError: a prompt cannot be used, or a log-probability is NaN or infinite.
        """
        prompts = self._prompts(prefix, demonstrations, queries)
        options_of_query = _for_each_query("options", options, len(queries))
        names = []
        pairs = []
        for q, (prompt, texts) in enumerate(zip(prompts, options_of_query, strict=True)):
            with naming(f"query {q}"):
                tokens, answers = self.tokenizer.pairs(prompt, texts)
            for o, answer in enumerate(answers):
                name = f"query {q}, option {o}"
                if not (answer and tokens.query):
                    empty = "query" if answer else "option"
                    raise InputError(f"{name}: the {empty} is empty: there is nothing to score.")
                positions = len(answer) - 1
                whole = self._fitting(name, tokens, positions, "answer without its last token")
                names.append(name)
                pairs.append((whole, answer))

        scores: dict[int, Score] = {}
        with self.runner.inference_mode():
            for scores_of_pass in self.runner.score_prompts(pairs):
                scores |= scores_of_pass
        for i, name in enumerate(names):
            if not math.isfinite(scores[i][0]):
                raise not_finite(name, scores[i][0], self.runner.model)
        in_order_of_pairs = (scores[i] for i in range(len(pairs)))
        return [[next(in_order_of_pairs) for _ in texts] for texts in options_of_query]

    def generate(
        self,
        demonstrations: TextLists,
        queries: Sequence[str],
        *,
        prefix: str = "",
        max_new_tokens: int = 32,
        stop: Sequence[str] = (),
        **settings: Any,
    ) -> list[str]:
        """Generate the text that follows each query.

        Each token is the likeliest one, unless settings say otherwise. The settings of the
        checkpoint's `generation_config` hold, as under lm-eval.

        Args:
            demonstrations, queries, prefix: as for `score`.
            max_new_tokens: how many tokens a text has at most.
            stop: a text ends before the first of these strings.
            **settings: arguments of transformers' `generate`, such as `num_beams` or
                `repetition_penalty`.

        Returns:
            The text of each query.

        Raises:
            InputError: a prompt or a setting cannot be used, or the scores of a next token are NaN
                or infinite.
            Unsupported: the method generates no text with this model.
        """
        model: Any = self.runner.model
        in_force = settings_in_force(model, settings)
        max_new_tokens = checked("max_new_tokens", max_new_tokens, Positive)
        _check_list("stop", stop)
        prompts = []
        for q, prompt in enumerate(self._prompts(prefix, demonstrations, queries)):
            with naming(f"query {q}"):
                tokens = self.tokenizer.to_continue(prompt)
                if not tokens.query:
                    raise InputError("the query is empty: there is nothing to continue.")
            prompts.append(self._fitting(f"query {q}", tokens, max_new_tokens, "new tokens"))

        def generate(context: Tensor, **inputs: Any) -> Tensor:
            arguments = {"do_sample": False, "pad_token_id": self._padding, **settings}
            arguments |= {"max_new_tokens": max_new_tokens, "use_cache": True}
            with refusing(
                f"generation arguments {settings}: refused by transformers",
                kinds=(TypeError, ValueError),
            ):
                ids: Tensor = model.generate(input_ids=context, **inputs, **arguments)
            return ids

        uses = Counter(prompt.context for prompt in prompts)
        single = {context for context, number in uses.items() if number == 1 < len(uses)}
        texts = [""] * len(queries)
        waiting = in_order(prompts)
        while waiting:
            rows = self.runner.generate(
                [prompts[q] for q in waiting],
                [f"query {q}" for q in waiting],
                max_new_tokens,
                generate,
                in_force,
                single,
            )
            for q, row in zip(waiting, rows, strict=False):
                text = str(self.tokenizer.tokenizer.decode(row, skip_special_tokens=True))
                ends = [text.index(string) for string in stop if string in text]
                texts[q] = text[: min(ends, default=len(text))]
            waiting = waiting[len(rows) :]
        return texts

    def forget(self) -> None:
        """Free all memories. They are wrong once the model's weights have changed."""
        self.runner.begin(self._batch_size)

    @property
    def _padding(self) -> int:
        """The token id after the end of a text that is shorter than others of its batch."""
        pad = self.tokenizer.tokenizer.pad_token_id
        return self.tokenizer.prefix_token_id if pad is None else pad

    def _prompts(
        self, prefix: str, demonstrations: TextLists, queries: Sequence[str]
    ) -> list[FewShotPrompt]:
        """The prompt of each query."""
        _check_list("queries", queries)
        shown = _for_each_query(
            "demonstrations", demonstrations or [()] * len(queries), len(queries)
        )
        prompts = []
        for query, shots in zip(queries, shown, strict=True):
            if why := self.runner.method.why_not(len(shots)):
                raise InputError(f"{self.runner.method.name}: {why}.")
            prompts.append(self.tokenizer.arranged(FewShotPrompt(prefix, shots, query)))
        return prompts

    def _fitting(
        self, name: str, tokens: TokenizedPrompt, after: int, after_name: str
    ) -> TokenizedPrompt:
        """A prompt as it runs with `after` positions after it (`limits.truncated`). One that would
        be cut, or lose demonstrations, is refused."""
        if reason := self.limits.too_long(tokens, after):
            shots = tokens.context.demonstrations
            request = truncated(Request(tokens, (), after), self.limits)
            if not (shots or request.cut):
                return request.prompt
            advice = "Give fewer demonstrations." if shots else "Shorten the query."
            needs = f"this one needs {reason.sum(after_name)}"
            raise DoesNotFit(f"{name}: prompts {reason.why}; {needs}. {reason.hint}{advice}")
        return tokens


def _check_list(name: str, texts: Any) -> None:
    """Refuse a text in place of a list of texts. It would be read as a list of its characters."""
    if isinstance(texts, str):
        raise InputError(f"{name}={texts!r}: must be a list of texts, not a text.")


def _for_each_query(name: str, lists: Any, n: int) -> list[Any]:
    """The list of each of n queries, from one list for all of them or a list for each."""
    _check_list(name, lists)
    if any(isinstance(text, str) for text in lists):
        return [lists] * n
    if len(lists) != n:
        raise InputError(
            f"{name}: {len(lists)} lists for {n} queries: give one list, or one for each query."
        )
    return list(lists)
