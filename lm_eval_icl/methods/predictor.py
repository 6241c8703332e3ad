"""The Python API: runs a method on a model, with demonstrations and queries given as text, without a harness."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lm_eval_icl.errors import InputError, checked_whole, log, naming, refusing
from lm_eval_icl.inference.generation import settings_in_force
from lm_eval_icl.inference.memory import vocabulary_of
from lm_eval_icl.inference.schedule import in_order
from lm_eval_icl.inference.scoring import Score, not_finite
from lm_eval_icl.methods.base import Method
from lm_eval_icl.methods.runner import MethodRunner
from lm_eval_icl.prompts.prompt import FewShotPrompt
from lm_eval_icl.prompts.tokens import PromptTokenizer, TokenizedPrompt, line_break_at_end


class DoesNotFit(InputError):
    """A prompt is longer than the model's positions."""


class Predictor:
    """Scores options and generates texts behind demonstrations, with any method.

    Demonstrations are run through the model once: their memory is stored for further calls with the same demonstrations
    (in any order, if the method does not depend on the order). Call `forget` after the model's weights have changed.

    Args:
        model: a causal language model of transformers. It is put into evaluation mode.
        tokenizer: the model's tokenizer, a fast one.
        method: the method, `lm_eval_icl.methods.make("invicl")` for example.
        max_length: how many positions the model has; if None, `max_position_embeddings` of its configuration.
        add_bos_token: whether BOS is put at the beginning of a prompt; None for the tokenizer's default.
        batch_size: how many texts are generated in one batch.
        pack_tokens, store_bytes: as for `MethodRunner`.

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
    ) -> None:
        if not (isinstance(model, nn.Module) and isinstance(tokenizer, PreTrainedTokenizerBase)):
            types = f"{type(model).__name__}, {type(tokenizer).__name__}"
            raise InputError(f"Predictor({types}, ...): must be a model and its tokenizer, both loaded.")
        if not isinstance(method, Method):
            raise InputError(
                f"method={method!r}: must be a method with its arguments, such as InvICL() or make('invicl')."
            )
        self.runner = MethodRunner(
            model, method, batch_size=batch_size, pack_tokens=pack_tokens, store_bytes=store_bytes
        )
        self.tokenizer = PromptTokenizer(
            tokenizer,
            add_bos_token=add_bos_token,
            by_part=method.treats_demonstrations_alike,
            canonical=self.runner.invariant,
            vocabulary=vocabulary_of(model),
        )
        self._batch_size = int(batch_size)
        self._warned_of: set[str] = set()
        pad = tokenizer.pad_token_id
        self._pad = self.tokenizer.prefix_token_id if pad is None else pad
        if max_length is not None:
            max_length = checked_whole("max_length", max_length)
        else:
            max_length = getattr(model.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
        self.limits = self.runner.limits(max_length)

    def score(
        self,
        demonstrations: Sequence[str],
        queries: Sequence[str],
        options: Sequence[str] | Sequence[Sequence[str]],
        *,
        prefix: str = "",
    ) -> list[list[Score]]:
        """Score every option of every query.

        Args:
            demonstrations: the demonstrations, each with its answer and the delimiter that follows it.
            queries: the queries, each up to where the answer begins.
            options: one list for all queries, or a list for each query. An option begins with the blank that separates
                it from the query.
            prefix: the text before the first demonstration.

        Returns:
            For each query, for each option (log-probability, greedy): the sum of the log-probabilities of the option's
            tokens (natural logarithm), and whether greedy decoding would produce the option.

        Raises:
            InputError: a prompt cannot be used, or a log-probability is NaN or infinite.
        """
        _check_texts(prefix, demonstrations=demonstrations, queries=queries)
        if isinstance(options, Sequence) and not any(isinstance(option, str) for option in options):
            per_query: list[Any] = list(options)
        else:
            per_query = [options] * len(queries)
        for query_options in per_query:
            _check_texts(options=query_options)
        if len(per_query) != len(queries):
            raise InputError(f"options: {len(per_query)} lists for {len(queries)} queries: give one list, or one each.")
        if warning := next(filter(None, map(line_break_at_end, queries)), ""):
            self._warn_once("line breaks", warning)
        if ends := next(filter(re.compile(r"[\w.,:;?!'\")\]]\Z").search, demonstrations), ""):
            self._warn_once(
                "delimiters",
                f"demonstration {ends[-20:]!r} ends without a delimiter, so that what follows is part of its answer: "
                "demonstrations end with what separates them, such as a blank line.",
            )
        names, prompts = [], []
        for q, query in enumerate(queries):
            prompt = self._prompt(prefix, demonstrations, query)
            with naming(f"query {q}"):
                tokens, answers = self.tokenizer.pairs(prompt, per_query[q])
            for o, (option, answer) in enumerate(zip(per_query[q], answers, strict=True)):
                if re.search(r"[\w:;,.?!]\Z", query) and re.match(r"\w", option):
                    self._warn_once(
                        "blanks",
                        f"option {option!r} follows {query[-20:]!r} without a blank: options begin with the blank that "
                        f"separates them from the query, as in {' ' + option!r}, unless the language has none.",
                    )
                names.append(f"query {q}, option {o}")
                if not (answer and tokens.query):
                    empty = "query" if answer else "option"
                    raise InputError(f"{names[-1]}: the {empty} is empty: there is nothing to score.")
                self._check_fits(names[-1], tokens, len(answer) - 1, "answer without its last token")
                prompts.append((tokens, answer))

        scores: dict[int, Score] = {}
        with self.runner.inference_mode():
            for of_pass in self.runner.score_prompts(prompts):
                scores |= of_pass
        for i, name in enumerate(names):
            if not math.isfinite(scores[i][0]):
                raise not_finite(name, scores[i][0], self.runner.model)
        flat = (scores[i] for i in range(len(prompts)))
        return [[next(flat) for _ in query_options] for query_options in per_query]

    def generate(
        self,
        demonstrations: Sequence[str],
        queries: Sequence[str],
        *,
        prefix: str = "",
        max_new_tokens: int = 32,
        stop: Sequence[str] = (),
        **kwargs: Any,
    ) -> list[str]:
        """Generate the text that follows each query, greedily unless `kwargs` say otherwise.

        Args:
            demonstrations, queries, prefix: as for `score`.
            max_new_tokens: how many tokens are generated at most.
            stop: strings; a generated text is cut before the first occurrence of any of them.
            **kwargs: arguments of transformers' `generate` (`do_sample`, `temperature`, ...).

        Returns:
            One text for each query.

        Raises:
            InputError: a prompt cannot be used, or the scores of a next token are NaN or infinite.
        """
        in_force = settings_in_force(self.runner.model, kwargs)
        _check_texts(prefix, demonstrations=demonstrations, queries=queries, stop=stop)
        max_new_tokens = checked_whole("max_new_tokens", max_new_tokens)
        prompts = []
        for q, query in enumerate(queries):
            prompt = self._prompt(prefix, demonstrations, query)
            with naming(f"query {q}"):
                tokens = self.tokenizer.to_continue(prompt)
                if not tokens.query:
                    raise InputError("the query is empty, there is nothing to continue.")
            self._check_fits(f"query {q}", tokens, max_new_tokens, "max_new_tokens")
            prompts.append(tokens)

        def generate(context: Tensor, **inputs: Any) -> Tensor:
            settings = {"do_sample": False, "pad_token_id": self._pad, "max_new_tokens": max_new_tokens, **kwargs}
            settings["use_cache"] = True  # as lm-eval says it: the checkpoint may say otherwise
            model: Any = self.runner.model
            with refusing(f"generation arguments {kwargs}: refused by transformers", kinds=(TypeError, ValueError)):
                output: Tensor = model.generate(input_ids=context, **inputs, **settings)
            return output

        texts = [""] * len(queries)
        waiting = in_order(prompts)
        while waiting:
            names = [f"query {q}" for q in waiting[: self.runner.budget.sizes.texts]]
            waiting_prompts = [prompts[q] for q in waiting]
            rows = self.runner.generate(waiting_prompts, names, max_new_tokens, generate, in_force)
            for q, row in zip(waiting[: len(rows)], rows, strict=True):
                text = str(self.tokenizer.tokenizer.decode(row, skip_special_tokens=True))
                texts[q] = text[: min((text.find(end) for end in stop if end and end in text), default=len(text))]
            waiting = waiting[len(rows) :]
        return texts

    def forget(self) -> None:
        """Free all memories: after the model's weights have changed, the stored ones would be of the old weights."""
        self.runner.begin(self._batch_size)

    def _prompt(self, prefix: str, demonstrations: Sequence[str], query: str) -> FewShotPrompt:
        if why := self.runner.method.why_not(len(demonstrations)):
            raise InputError(f"{self.runner.method.name}: {why}.")
        return self.tokenizer.arranged(FewShotPrompt(prefix, demonstrations, query))

    def _warn_once(self, what: str, warning: str) -> None:
        if what not in self._warned_of:
            self._warned_of.add(what)
            log.warning("%s", warning)

    def _check_fits(self, name: str, tokens: TokenizedPrompt, behind: int, answer: str) -> None:
        if reason := self.limits.too_long(tokens, behind):
            advice = "Give fewer demonstrations." if tokens.context.demonstrations else "Shorten the query."
            advice = f"Shorten the {reason.longest}, or leave it out." if reason.longest else advice
            needs = f"this one needs {reason.sum(answer)}"
            raise DoesNotFit(f"{name}: prompts {reason.why}; {needs}. {reason.hint}{advice}")


def _check_texts(prefix: str = "", **lists: Sequence[str]) -> None:
    """Refuse what is no list of strings. (A string would be taken for a list of its characters.)"""
    if not isinstance(prefix, str):
        raise InputError(f"prefix={prefix!r}: must be a text.")
    for name, texts in lists.items():
        if isinstance(texts, str):
            raise InputError(f"{name}={texts!r}: must be a list of texts, not a text.")
        if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
            raise InputError(f"{name}={texts!r}: must be a list of texts.")
