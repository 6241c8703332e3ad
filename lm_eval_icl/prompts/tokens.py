"""Prompts and continuations as token ids, which are those of lm-eval's `hf`, divided into the prompt's parts."""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lm_eval_icl.errors import InputError
from lm_eval_icl.prompts.prompt import FewShotPrompt
from lm_eval_icl.prompts.splitting import (
    Encode,
    Head,
    Ids,
    PartSplitter,
    WholeSplitter,
    encoder,
    tokenizes_by_line,
)

if (
    TYPE_CHECKING
):  # layouts are computed and drawn without transformers, which takes a second to import
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Context:
    """The prefix and the demonstrations of a prompt, as token ids. A context is hashable, since memories are stored by
    context."""

    prefix: tuple[
        int, ...
    ]  # BOS, if the tokenizer adds it, and the task's description or system text
    demonstrations: tuple[tuple[int, ...], ...]

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.prefix, self.demonstrations))

    def __hash__(self) -> int:
        return self._hash  # computed once, since contexts have thousands of ids and every request looks up its context

    @functools.cached_property
    def tokens(self) -> list[int]:
        """The ids of the prefix and of all demonstrations, in one list."""
        return [*self.prefix, *(token for part in self.demonstrations for token in part)]

    @functools.cached_property
    def lengths(self) -> tuple[int, ...]:
        """The number of tokens of each demonstration."""
        return tuple(map(len, self.demonstrations))

    @functools.cached_property
    def largest(self) -> int:  # every request needs it (`PromptTokenizer.check_known`)
        return max(self.tokens, default=-1)


@dataclass(frozen=True)
class TokenizedPrompt:
    """The token ids of a prompt: its context, which other prompts may share, and its query.

    The query has at least one token, since a memory alone predicts nothing: if the query's text is empty, the last
    token of the context is moved to the query.
    """

    context: Context
    query: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.context.tokens) + len(self.query)

    def keeping(self, indices: Sequence[int]) -> TokenizedPrompt:
        """The prompt with only the demonstrations at `indices`. Indices beyond the last demonstration are ignored."""
        demonstrations = self.context.demonstrations
        kept = tuple(demonstrations[i] for i in indices if i < len(demonstrations))
        return TokenizedPrompt(Context(self.context.prefix, kept), self.query)


class _SharedContext:
    """The objects that prompts with the same prefix and demonstrations share: their context and their head."""

    context: Context | None = None
    head: Head | None = None


class PairEncoder:
    """Tokenizes context and continuation as lm-eval's `TemplateLM._encode_pair` does, but each context only once.

    Blanks at the end of the context are moved to the continuation, and the continuation's ids are
    `ids(context + continuation)[len(ids(context)):]`. If the tokenizer goes line by line (`tokenizes_by_line`) and puts
    nothing at the end of a text, only the context's last line, with the line break before it, is tokenized again for
    every option, provided that the context's ids end with the line's ids.
    """

    def __init__(self, encode: Encode, bare: Encode, by_part: bool = False, by_line: bool = False):
        """`encode`, `bare` and `by_line` are as for `WholeSplitter`; `by_part` uses `PartSplitter`."""
        self.encode, self.bare, self.by_line = encode, bare, by_line
        alone, _, added = encode("x")
        self._closes = len(alone) > added + len(
            bare("x")[0]
        )  # whether a token is put at the end of every text
        self._split_whole = WholeSplitter(encode, bare, by_line)
        self._split_parts = PartSplitter(encode, bare) if by_part else None
        self._ids = functools.lru_cache(maxsize=100_000)(lambda text: bare(text)[0])
        self._shared = functools.lru_cache(maxsize=64)(
            lambda prefix, demonstrations: _SharedContext()
        )

    def split(self, prompt: FewShotPrompt, text: str) -> TokenizedPrompt:
        """The prompt's ids by part. `text` is the prompt, or the prompt without the blanks at its end."""
        shared = self._shared(prompt.prefix, prompt.demonstrations)
        if self._split_parts and prompt.demonstrations:
            prefix, *demonstrations, query = self._split_parts(prompt, text)
        else:
            (prefix, *demonstrations, query), shared.head = self._split_whole(
                prompt, text, shared.head
            )
        context = Context(prefix, tuple(demonstrations))
        if shared.context != context:
            shared.context = context
        return TokenizedPrompt(shared.context, query)

    def inside(
        self, prompt: FewShotPrompt, spans: Sequence[tuple[int, int]]
    ) -> list[tuple[int, int]]:
        """See `PromptTokenizer.inside`."""
        text = prompt.rstrip()
        if self._split_parts:
            following = self._split_parts.beginning(text[len(prompt) - len(prompt.query) :])
            starts = [
                self._split_parts.demonstration(part, following)[1]
                for part in prompt.demonstrations
            ]
            return [
                (bisect_left(at, begin), bisect_left(at, end))
                for at, (begin, end) in zip(starts, spans, strict=True)
            ]
        pieces = [
            piece
            for part, (begin, end) in zip(prompt.demonstrations, spans, strict=True)
            for piece in (part[:begin], part[begin:end], part[end:])
        ]
        parts, _ = self._split_whole(FewShotPrompt(prompt.prefix, pieces, prompt.query), text)
        lengths = list(map(len, parts[1:-1]))
        return [(lengths[i], lengths[i] + lengths[i + 1]) for i in range(0, len(lengths), 3)]

    def __call__(
        self, prompt: FewShotPrompt, continuations: Sequence[str]
    ) -> tuple[TokenizedPrompt, list[Ids]]:
        """The prompt's ids by part, and the ids of each continuation."""
        text = prompt.rstrip()
        tokens, blanks = self.split(prompt, text), prompt[len(text) :]
        alone = self._split_parts is not None and bool(prompt.demonstrations)
        if alone:  # the ids of a continuation may not depend on the last demonstration
            text = "\n" + text[len(prompt) - len(prompt.query) :]
        encode = self.bare if alone else self.encode

        def ids(text: str) -> list[int]:
            return encode(text)[0]

        if "\n" in text and self.by_line and (alone or not self._closes):
            line = "\n" + text.rpartition("\n")[2]
            tail = self._ids(line)[len(self._ids("\n")) :]
            whole = [*tokens.context.tokens, *tokens.query]
            if tail and not line[1].isspace() and whole[-len(tail) :] == tail:
                ids, text = self._ids, line
        before = len(ids(text))
        return tokens, [
            tuple(ids(text + blanks + continuation)[before:]) for continuation in continuations
        ]


class PromptTokenizer:
    """Tokenizes prompts as lm-eval's `HFLM` does, and divides the ids into the prompt's parts.

    Args:
        tokenizer: a fast tokenizer, since only a fast tokenizer gives the character offsets of tokens.
        prefix_token_id: the token that is used in place of an empty context; the tokenizer's BOS token if None, or its
            EOS token if it has no BOS token (as in `HFLM`).
        add_bos_token: whether BOS is put at the beginning; None for the tokenizer's default.
        by_part: tokenize every part by itself, so that the ids of a demonstration do not depend on its neighbours
            (`PartSplitter`).
        canonical: put the demonstrations into canonical order (sorted by text), whatever order they are given in.
        pieces: tokenize pieces of a text by themselves where this gives the same ids, or where `by_part` asks for it.
            If False, every text is tokenized as a whole, and its parts are cut by the offsets of the tokens.
        vocabulary: how many token ids the model has; None to accept all of the tokenizer's ids.

    Raises:
        InputError: the tokenizer is not fast.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prefix_token_id: int | None = None,
        add_bos_token: bool | None = None,
        by_part: bool = False,
        canonical: bool = False,
        vocabulary: int | None = None,
        pieces: bool = True,
    ):
        if not tokenizer.is_fast:
            raise InputError(
                f"{type(tokenizer).__name__} does not say which characters a token stands for, so a prompt cannot be "
                "divided into its parts: use a fast tokenizer (use_fast_tokenizer=True)."
            )
        if prefix_token_id is None:
            prefix_token_id = (
                tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
            )
        self.tokenizer, self.prefix_token_id = tokenizer, prefix_token_id
        self.canonical, self.vocabulary = canonical, vocabulary
        self.bare = encoder(tokenizer, add_special_tokens=False)
        default = encoder(tokenizer, add_bos_token is not False)

        def without_second(bos: str | None) -> Encode:
            # A text that begins with BOS already (from a chat template) gets no second BOS from the tokenizer.
            return lambda text: (
                self.bare if bos is not None and text.startswith(bos) else default
            )(text)

        by_line = pieces and tokenizes_by_line(tokenizer)
        by_part = pieces and by_part
        bos = str(tokenizer.decode(prefix_token_id))
        self._pair = PairEncoder(without_second(bos), self.bare, by_part, by_line)
        self._continued = PairEncoder(
            without_second(tokenizer.bos_token), self.bare, by_part, by_line
        )

    @property
    def nothing(self) -> TokenizedPrompt:
        """The ids of an empty prompt: an empty context, and the token `prefix_token_id` as the query."""
        return TokenizedPrompt(Context((), ()), (self.prefix_token_id,))

    def arranged(self, prompt: FewShotPrompt, left_out: tuple[int, ...] = ()) -> FewShotPrompt:
        """The prompt with its demonstrations in canonical order if `canonical` is set, without those whose indices in
        this order are in `left_out`."""
        if not (self.canonical or left_out):
            return prompt
        demonstrations = sorted(prompt.demonstrations) if self.canonical else prompt.demonstrations
        kept = [part for i, part in enumerate(demonstrations) if i not in left_out]
        return FewShotPrompt(prompt.prefix, kept, prompt.query)

    def pair(self, prompt: FewShotPrompt, continuation: str) -> tuple[TokenizedPrompt, Ids]:
        """`pairs` for a single continuation."""
        tokens, (answer,) = self.pairs(prompt, [continuation])
        return tokens, answer

    def pairs(
        self, prompt: FewShotPrompt, continuations: Sequence[str]
    ) -> tuple[TokenizedPrompt, list[Ids]]:
        """The ids of a prompt, by part, and of continuations to score, as `TemplateLM.loglikelihood` makes them.

        Raises:
            InputError: the query is empty, though parts are tokenized by themselves; or the model has no such id.
        """
        if prompt == "":
            tokens, answers = (
                self.nothing,
                [tuple(self.bare(continuation)[0]) for continuation in continuations],
            )
            answers = [answer[1:] if answer[:1] == tokens.query else answer for answer in answers]
        else:
            tokens, answers = self._pair(prompt, continuations)
        self.check_known(tokens, *answers)
        return tokens, answers

    def inside(
        self, prompt: FewShotPrompt, spans: Sequence[tuple[int, int]]
    ) -> list[tuple[int, int]]:
        """The tokens of one piece of each demonstration, such as its answer: for each demonstration, the indices
        (begin, end) of the piece among its tokens.

        Args:
            prompt: a prompt that `arranged` returned.
            spans: for each demonstration, the indices (begin, end) of the piece among its characters.
        """
        return self._pair.inside(prompt, spans)

    def to_continue(self, prompt: FewShotPrompt) -> TokenizedPrompt:
        """The ids of a prompt to continue with generated text, by part, as `HFLM.generate_until` makes them. The errors
        are those of `pairs`."""
        tokens = self.nothing if prompt == "" else self._continued.split(prompt, prompt)
        self.check_known(tokens)
        return tokens

    def check_known(self, tokens: TokenizedPrompt, *answers: tuple[int, ...]) -> None:
        """Refuse ids outside the model's vocabulary. (Some checkpoints have tokenizers with more tokens.)"""
        token = max(tokens.context.largest, -1, *tokens.query, *itertools.chain(*answers))
        if self.vocabulary is not None and token >= self.vocabulary:
            raise InputError(
                f"token {token} ({self.tokenizer.convert_ids_to_tokens(token)!r}) is not among the {self.vocabulary} "
                "that the model knows, so the tokenizer is another model's: give --model_args tokenizer=..."
            )
