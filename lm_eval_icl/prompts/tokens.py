"""Prompts and continuations as token ids, which are those of lm-eval's `hf`, divided by part."""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lm_eval_icl.errors import InputError
from lm_eval_icl.prompts.prompt import Demonstration, FewShotPrompt, Span
from lm_eval_icl.prompts.splitting import (
    Encode,
    Encoded,
    Head,
    Ids,
    PartSplitter,
    WholeSplitter,
    encoder,
    tokenizes_by_line,
)

# Layouts are computed and drawn without transformers, which takes a second to import.
if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Context:
    """The prefix and the demonstrations of a prompt, as token ids.

    A context is hashable, since memories are stored by context.
    """

    prefix: Ids  # BOS, if the tokenizer adds it, and the task's description or system text
    demonstrations: tuple[Ids, ...]
    # The indices of each demonstration's answer among its tokens, for methods that learn from them.
    answers: tuple[Span, ...] = ()

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.prefix, self.demonstrations))

    def __hash__(self) -> int:
        # Computed once: contexts have thousands of ids, and every request looks up its context.
        return self._hash

    @functools.cached_property
    def tokens(self) -> list[int]:
        """The ids of the prefix and of all demonstrations, in one list."""
        return [*self.prefix, *itertools.chain(*self.demonstrations)]

    @functools.cached_property
    def lengths(self) -> tuple[int, ...]:
        """The number of tokens of each demonstration."""
        return tuple(map(len, self.demonstrations))

    @functools.cached_property
    def largest(self) -> int:
        """The largest id, or -1. Every request needs it (`PromptTokenizer.check_known`)."""
        return max(self.tokens, default=-1)

    def keeping(self, indices: Sequence[int]) -> Context:
        """The context with only the demonstrations at `indices`, in this order."""
        demonstrations = tuple(self.demonstrations[i] for i in indices)
        answers = tuple(self.answers[i] for i in indices if self.answers)
        return Context(self.prefix, demonstrations, answers)


@dataclass(frozen=True)
class TokenizedPrompt:
    """The token ids of a prompt: its context, which other prompts may share, and its query.

    The query has at least one token, since a memory alone predicts nothing. If the query's text is
    empty, the last token of the context is moved to the query.
    """

    context: Context
    query: Ids

    def __len__(self) -> int:
        return len(self.context.tokens) + len(self.query)

    def keeping(self, indices: Sequence[int]) -> TokenizedPrompt:
        """The prompt with only the demonstrations at `indices`.

        Indices beyond the last demonstration are ignored.
        """
        kept = [i for i in indices if i < len(self.context.demonstrations)]
        return TokenizedPrompt(self.context.keeping(kept), self.query)


class _SharedContext:
    """What prompts with the same prefix and demonstrations share: their context and their head."""

    context: Context | None = None
    head: Head | None = None
    spans: list[Span] | None = None  # the answers of the demonstrations, by character
    answers: tuple[Span, ...] = ()  # and by token


def answer_spans(prompt: FewShotPrompt) -> list[Span]:
    """The indices of each demonstration's answer among its characters.

    Raises:
        InputError: the answer of a demonstration is not known, or is empty.
    """
    spans = []
    for number, part in enumerate(prompt.demonstrations, 1):
        begin, end = part.answer if isinstance(part, Demonstration) else (0, 0)
        if begin == end:
            raise InputError(
                f"the answer of demonstration {number} is not known ({part[-40:]!r}), and the "
                "method learns from it: give a Demonstration(query, answer, end), or take a task "
                "whose prompts lm-eval builds from queries and answers."
            )
        spans.append((begin, end))
    return spans


class PairEncoder:
    """Tokenizes context and continuation as lm-eval's `TemplateLM._encode_pair`, contexts once.

    Blanks at the end of the context are moved to the continuation. The continuation's ids are
    `ids(context + continuation)[len(ids(context)):]`. For every option, only the context's last
    line is tokenized again, with the line break before it. This needs a tokenizer that goes line by
    line (`tokenizes_by_line`) and puts nothing at the end of a text, and a context whose ids end
    with the line's ids.

    Args:
        encode, bare, by_line: as for `WholeSplitter`.
        by_part: divide prompts by `PartSplitter`.
        finds_answers: contexts have the answers of their demonstrations (`Context.answers`).
    """

    def __init__(
        self,
        encode: Encode,
        bare: Encode,
        by_part: bool = False,
        by_line: bool = False,
        finds_answers: bool = False,
    ):
        self.encode = encode
        self.bare = bare
        self.by_line = by_line
        self.finds_answers = finds_answers
        alone = encode("x")
        # True if a token is put at the end of every text.
        self._closes = len(alone.ids) > alone.added + len(bare("x").ids)
        self._split_whole = WholeSplitter(encode, bare, by_line)
        self._split_parts = PartSplitter(encode, bare) if by_part else None
        self._ids = functools.lru_cache(maxsize=100_000)(lambda text: bare(text).ids)
        self._shared = functools.lru_cache(maxsize=64)(lambda *key: _SharedContext())

    def split(self, prompt: FewShotPrompt, text: str) -> TokenizedPrompt:
        """The prompt's ids by part.

        Args:
            text: the prompt, or the prompt without the blanks at its end.
        """
        shared = self._shared(prompt.prefix, prompt.demonstrations)
        if self._split_parts and prompt.demonstrations:
            parts = self._split_parts(prompt, text)
        else:
            parts, shared.head = self._split_whole(prompt, text, shared.head)
        prefix, *demonstrations, query = parts
        context = Context(prefix, tuple(demonstrations))
        if self.finds_answers:
            spans = answer_spans(prompt)
            if shared.spans != spans:
                shared.spans = spans
                shared.answers = tuple(self.inside(prompt, spans))
            context = Context(prefix, tuple(demonstrations), shared.answers)
        if shared.context != context:
            shared.context = context
        return TokenizedPrompt(shared.context, query)

    def inside(self, prompt: FewShotPrompt, spans: Sequence[Span]) -> list[Span]:
        """See `PromptTokenizer.inside`."""
        text = prompt.rstrip()
        token_spans = []
        demonstrations = zip(prompt.demonstrations, spans, strict=True)
        if self._split_parts:
            following = self._split_parts.beginning(text[len(prompt) - len(prompt.query) :])
            for part, (begin, end) in demonstrations:
                starts = self._split_parts.demonstration(part, following).starts
                token_spans.append((bisect_left(starts, begin), bisect_left(starts, end)))
            return token_spans
        pieces: list[str] = []
        for part, (begin, end) in demonstrations:
            pieces += (part[:begin], part[begin:end], part[end:])
        parts, _ = self._split_whole(FewShotPrompt(prompt.prefix, pieces, prompt.query), text)
        for before, piece in zip(parts[1:-1:3], parts[2:-1:3], strict=True):
            token_spans.append((len(before), len(before) + len(piece)))
        return token_spans

    def __call__(
        self, prompt: FewShotPrompt, continuations: Sequence[str]
    ) -> tuple[TokenizedPrompt, list[Ids]]:
        """The prompt's ids by part, and the ids of each continuation."""
        text = prompt.rstrip()
        blanks = prompt[len(text) :]
        tokens = self.split(prompt, text)
        alone = self._split_parts is not None and bool(prompt.demonstrations)
        if alone:  # the ids of a continuation may not depend on the last demonstration
            text = "\n" + text[len(prompt) - len(prompt.query) :]
        encode = self.bare if alone else self.encode

        def ids(text: str) -> list[int]:
            return encode(text).ids

        if "\n" in text and self.by_line and (alone or not self._closes):
            line = "\n" + text.rpartition("\n")[2]
            tail = self._ids(line)[len(self._ids("\n")) :]
            whole = [*tokens.context.tokens, *tokens.query]
            if tail and not line[1].isspace() and whole[-len(tail) :] == tail:
                ids = self._ids
                text = line
        n = len(ids(text))
        answers = [tuple(ids(text + blanks + continuation)[n:]) for continuation in continuations]
        return tokens, answers


class PromptTokenizer:
    """Tokenizes prompts as lm-eval's `HFLM` does, and divides the ids into the prompt's parts.

    Args:
        tokenizer: a fast tokenizer. Others do not give the character offsets of tokens.
        prefix_token_id: the token in place of an empty context. None: the tokenizer's BOS token, or
            its EOS token if it has no BOS token (as in `HFLM`).
        add_bos_token: put BOS at the beginning. None: the tokenizer's default.
        by_part: tokenize every part by itself, so that the ids of a demonstration do not depend on
            its neighbours (`PartSplitter`).
        canonical: put the demonstrations into canonical order (sorted by text).
        pieces: tokenize pieces of a text by themselves where this gives the same ids. If False,
            the text (or, with `by_part`, each part) is tokenized as a whole.
        vocabulary: the number of token ids that the model has. None: accept all ids.
        finds_answers: find the answers of the demonstrations (`Context.answers`), and refuse a
            prompt whose answers are not known.

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
        finds_answers: bool = False,
    ):
        if not tokenizer.is_fast:
            raise InputError(
                f"{type(tokenizer).__name__} does not say which characters a token stands for, so "
                "a prompt cannot be divided into its parts: use a fast tokenizer "
                "(use_fast_tokenizer=True)."
            )
        if prefix_token_id is None:
            prefix_token_id = tokenizer.bos_token_id
        if prefix_token_id is None:
            prefix_token_id = tokenizer.eos_token_id
        self.tokenizer = tokenizer
        self.prefix_token_id = prefix_token_id
        self.canonical = canonical
        self.vocabulary = vocabulary
        self.finds_answers = finds_answers
        self.bare = encoder(tokenizer, add_special_tokens=False)
        default = encoder(tokenizer, add_bos_token is not False)
        by_line = pieces and tokenizes_by_line(tokenizer)

        def pair_encoder(bos: str | None) -> PairEncoder:
            # A text that begins with BOS already (from a chat template) gets no second BOS.
            def encode(text: str) -> Encoded:
                if bos is not None and text.startswith(bos):
                    return self.bare(text)
                return default(text)

            return PairEncoder(encode, self.bare, by_part, by_line, finds_answers)

        self._pair = pair_encoder(str(tokenizer.decode(prefix_token_id)))
        self._continued = pair_encoder(tokenizer.bos_token)

    @property
    def nothing(self) -> TokenizedPrompt:
        """An empty prompt: an empty context, and the token `prefix_token_id` as the query."""
        return TokenizedPrompt(Context((), ()), (self.prefix_token_id,))

    def arranged(self, prompt: FewShotPrompt, left_out: tuple[int, ...] = ()) -> FewShotPrompt:
        """The prompt with its demonstrations in canonical order, if `canonical` is set.

        Args:
            left_out: leave out the demonstrations with these indices in this order.
        """
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
        """The ids of a prompt, by part, and of continuations to score.

        They are those that `TemplateLM.loglikelihood` makes.

        Raises:
            InputError: the query is empty, though parts are tokenized by themselves; or the model
                has no such id.
        """
        if prompt == "":
            tokens = self.nothing
            answers = [tuple(self.bare(continuation).ids) for continuation in continuations]
            answers = [answer[1:] if answer[:1] == tokens.query else answer for answer in answers]
        else:
            tokens, answers = self._pair(prompt, continuations)
        self.check_known(tokens, *answers)
        return tokens, answers

    def inside(self, prompt: FewShotPrompt, spans: Sequence[Span]) -> list[Span]:
        """The tokens of one piece of each demonstration, such as its answer.

        Args:
            prompt: a prompt that `arranged` returned.
            spans: for each demonstration, the indices of the piece among its characters.

        Returns:
            For each demonstration, the indices of the piece among its tokens.
        """
        return self._pair.inside(prompt, spans)

    def to_continue(self, prompt: FewShotPrompt) -> TokenizedPrompt:
        """The ids, by part, of a prompt to continue with generated text.

        They are those that `HFLM.generate_until` makes. The errors are those of `pairs`.
        """
        tokens = self.nothing if prompt == "" else self._continued.split(prompt, prompt)
        self.check_known(tokens)
        return tokens

    def check_known(self, tokens: TokenizedPrompt, *answers: Ids) -> None:
        """Refuse ids outside the model's vocabulary. (Some tokenizers have more tokens.)"""
        token = max(tokens.context.largest, -1, *tokens.query, *itertools.chain(*answers))
        if self.vocabulary is not None and token >= self.vocabulary:
            name = self.tokenizer.convert_ids_to_tokens(token)
            raise InputError(
                f"token {token} ({name!r}) is not among the {self.vocabulary} that the model "
                "knows, so the tokenizer is another model's: give --model_args tokenizer=..."
            )
