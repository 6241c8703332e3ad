"""Tokenizes a prompt and divides the token ids into the prompt's parts.

A method whose results must equal those of `hf` needs the token sequence of the whole string. It is divided afterwards
at the character offsets of the parts: a token belongs to the part that contains its first character (`split`). For a
method that does not depend on the order of the demonstrations, every part is tokenized by itself (`PartSplitter`).
"""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from lm_eval_icl.errors import InputError
from lm_eval_icl.prompt import FewShotPrompt


@dataclass(frozen=True)
class Context:
    """The prefix and the demonstrations of a prompt, as token ids. Hashable, since memories are stored by context.

    Attributes:
        prefix: the ids of BOS, if the tokenizer adds it, and of the description or system text.
        demonstrations: the ids of each demonstration. The prefix, followed by the demonstrations in this order, is
            the beginning of the prompt's token sequence.
    """

    prefix: tuple[int, ...]
    demonstrations: tuple[tuple[int, ...], ...]

    @functools.cached_property
    def tokens(self) -> list[int]:
        """The ids of the prefix and of all demonstrations, in one list."""
        return [*self.prefix, *(token for part in self.demonstrations for token in part)]

    @functools.cached_property
    def lengths(self) -> tuple[int, ...]:
        """The number of tokens of each demonstration."""
        return tuple(map(len, self.demonstrations))

    @functools.cached_property
    def largest(self) -> int:
        """The largest id; -1 if there are no tokens."""
        return max(self.tokens, default=-1)


@functools.lru_cache(maxsize=1024)
def _intern(context: Context) -> Context:
    """The first context seen that is equal to this one, so that thousands of documents share a single object."""
    return context


@dataclass(frozen=True)
class TokenizedPrompt:
    """The token ids of a prompt: the shared context, and the query.

    The query has at least one token, since a memory alone predicts nothing: if the query's text is empty, the last
    token of the context is moved to the query.
    """

    context: Context
    query: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.context.tokens) + len(self.query)

    def keeping(self, some: Sequence[int]) -> TokenizedPrompt:
        """The prompt with only the demonstrations of these indices, if it has them, and otherwise the same tokens.

        (A prompt that is tokenized without the other demonstrations may have other tokens at the boundaries.)
        """
        there = self.context.demonstrations
        kept = tuple(there[i] for i in some if i < len(there))
        return TokenizedPrompt(Context(self.context.prefix, kept), self.query)


Encode = Callable[[str], "tuple[list[int], list[int], int]"]


def encoder(tokenizer: PreTrainedTokenizerBase, **special: bool) -> Encode:
    """Make a function that tokenizes a text.

    Args:
        special: `add_special_tokens`, if it is to differ from the tokenizer's default.

    Returns:
        A function from a text to its ids, the index of each token's first character, and the number of special
        tokens that the tokenizer put at the beginning. It raises an `InputError` for a text with half a surrogate
        pair.
    """

    def encode(text: str) -> tuple[list[int], list[int], int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"{text[max(0, error.start - 20) : error.end + 20]!r} holds half a character (a surrogate that stands "
                "alone), which no tokenizer reads: mend the task's text."
            ) from error
        encoding = tokenizer(
            text,
            return_offsets_mapping=True,
            return_special_tokens_mask=True,
            return_attention_mask=False,
            verbose=False,
            **special,
        )
        starts: list[int] = []
        end = 0
        for start, stop in encoding["offset_mapping"]:
            # Byte-level tokenizers exclude the blanks before a word from the word's offsets. A token therefore
            # begins no later than where the token before it ends.
            starts.append(max(starts[-1], min(start, end)) if starts else 0)
            end = max(end, stop)
        added = 0
        for mask, (start, stop) in zip(encoding["special_tokens_mask"], encoding["offset_mapping"], strict=True):
            if not mask or stop > start:
                break
            added += 1
        return encoding["input_ids"], starts, added

    return encode


def split(prompt: FewShotPrompt, text: str, encode: Encode) -> TokenizedPrompt:
    """Tokenize a prompt as one string and divide the ids into the prompt's parts.

    Args:
        text: the prompt, or the prompt without the blanks at its end.
    """
    ids, starts, added = encode(text)
    cuts, at = [], len(prompt.prefix)
    for part in (*prompt.demonstrations, prompt.query):
        cuts.append(max(added, bisect_left(starts, at)))
        at += len(part)
    cuts[-1] = min(cuts[-1], len(ids) - 1)
    cuts = [max(0, min(cut, cuts[-1])) for cut in cuts]
    demonstrations = tuple(tuple(ids[a:b]) for a, b in itertools.pairwise(cuts))
    return TokenizedPrompt(_intern(Context(tuple(ids[: cuts[0]]), demonstrations)), tuple(ids[cuts[-1] :]))


# Characters to put before a part that is tokenized by itself. They are tried in this order, until one is found that the
# tokenizer does not merge into a token with the beginning of the part.
_IN_FRONT = ("\n", "x", ".")


class PartSplitter:
    """Tokenizes every part by itself, so that the ids of a demonstration do not depend on its neighbours.

    The ids equal those of the whole string, unless a token of the whole string straddles a boundary between parts. To
    achieve this, a part is tokenized in the middle of a text (some tokenizers add a blank at the beginning of a text),
    followed by the beginning of the query (tokenizers like GPT-2's divide blank lines depending on what follows). The
    query follows only the last demonstration, but the others are tokenized as if it followed them too. (One case
    remains in which the ids differ: digits on both sides of a boundary, if the tokenizer groups digits in threes.)
    """

    def __init__(self, encode: Encode, bare: Encode):
        """`encode` adds the special tokens that the model expects, `bare` adds none."""
        self.encode, self.bare = encode, bare
        self._demonstration = functools.lru_cache(maxsize=10_000)(self._middle)

    def __call__(self, prompt: FewShotPrompt, text: str) -> TokenizedPrompt:
        """Tokenize a prompt that has demonstrations; `text` as in `split`.

        Raises:
            InputError: the query is empty. A token would have to be moved to it from the last demonstration, and the
                result would then depend on the order of the demonstrations.
        """
        query = text[len(prompt) - len(prompt.query) :]
        if not query:
            raise InputError(
                "the query is empty, so that the answer begins right behind the demonstrations; a method that does not "
                "depend on their order needs something between them (--model icl does not)."
            )
        behind = self._behind(query)
        demonstrations = tuple(self._demonstration(part, behind) for part in prompt.demonstrations)
        context = Context(tuple(self._prefix(prompt.prefix, behind)), demonstrations)
        return TokenizedPrompt(_intern(context), self._middle(query, ""))

    def _prefix(self, prefix: str, behind: str) -> list[int]:
        """The ids of the prefix, tokenized at the beginning of a text and followed by `behind`."""
        if not prefix:
            ids, _, added = self.encode("x")
            return ids[:added]
        ids = self.encode(prefix + behind)[0]
        for front in _IN_FRONT:
            tail = self._between(front, behind, "")
            if tail and tail[0] and tuple(ids[-len(tail[0]) :]) == tail[0]:
                return ids[: -len(tail[0])]
        return self.encode(prefix)[0]

    def _middle(self, part: str, behind: str) -> tuple[int, ...]:
        """The ids of a part, tokenized in the middle of a text and followed by `behind`."""
        return self._with_starts(part, behind)[0]

    def before(self, part: str, query: str, ats: Sequence[int]) -> list[int]:
        """How many of a demonstration's tokens begin before each of these characters of it.

        Args:
            part: the demonstration.
            query: the prompt's query, which the tokenization of a demonstration takes into account.
        """
        starts = self._with_starts(part, self._behind(query))[1]
        return [bisect_left(starts, at) for at in ats]

    @staticmethod
    def _behind(query: str) -> str:
        """The beginning of the query, up to its first character that is not blank: on it depends how blanks are
        tokenized."""
        return query[: len(query) - len(query.lstrip()) + 1]

    def _with_starts(self, part: str, behind: str) -> tuple[tuple[int, ...], list[int]]:
        """`_middle`, and the index in the part of each token's first character."""
        for end, front in itertools.product((behind, "") if behind else ("",), _IN_FRONT):
            found = self._between(front, part, end)
            if found is not None:
                return found
        ids, starts, _ = self.bare(part)
        return tuple(ids), starts

    def _between(self, front: str, part: str, behind: str) -> tuple[tuple[int, ...], list[int]] | None:
        """The ids of the part, tokenized between `front` and `behind`, and the index of each token's first character.

        None if the ids of `front` and `behind` are not those that they have without the part, since a token then
        straddles a boundary. (Offsets would not show this, since some tokenizers trim blanks from them.)
        """
        before, outer = (self.bare(text)[0] for text in (front, front + behind))
        ids, starts, _ = self.bare(front + part + behind)
        after = outer[len(before) :]
        end = len(ids) - len(after)
        clean = outer[: len(before)] == ids[: len(before)] == before and ids[end:] == after and end >= len(before)
        inside = slice(len(before), end)
        return (tuple(ids[inside]), [start - len(front) for start in starts[inside]]) if clean else None


@dataclass(frozen=True)
class _Encoded:
    """What `PairEncoder` keeps about the last prompt, for further continuations of the same prompt.

    Attributes:
        prompt: the prompt.
        end: the index of the first of the blanks at the prompt's end.
        tokens: the prompt's ids by part.
        encode, text: a function that tokenizes, and the text that it must be given together with a continuation.
        line: the last line of `text` with the line break before it, if it can be used in place of all of `text`;
            else empty.
    """

    prompt: FewShotPrompt
    end: int
    tokens: TokenizedPrompt
    encode: Encode
    text: str
    line: str


class PairEncoder:
    """Tokenizes context and continuation as lm-eval's `TemplateLM._encode_pair` does, but each context only once.

    Blanks at the end of the context are moved to the continuation, and the continuation's ids are
    `ids(context + continuation)[len(ids(context)):]`. The whole context need not be tokenized again for every option:
    no token of a BPE tokenizer reaches across a line break into the word after it. The context's last line, with the
    line break before it, is therefore used in place of the context, provided that the context's ids end with the
    line's ids.
    """

    def __init__(self, encode: Encode, bare: Encode, by_part: bool = False):
        """`encode` adds the special tokens that the model expects, `bare` adds none. `by_part` uses `PartSplitter`."""
        self.encode, self.bare = encode, bare
        self._split_parts = PartSplitter(encode, bare) if by_part else None
        self._ids = functools.lru_cache(maxsize=100_000)(lambda text: bare(text)[0])
        self._last: _Encoded | None = None

    def split(self, prompt: FewShotPrompt, text: str) -> TokenizedPrompt:
        """The prompt's ids by part. `text` is the prompt, or the prompt without the blanks at its end."""
        if self._split_parts and prompt.demonstrations:
            return self._split_parts(prompt, text)
        return split(prompt, text, self.encode)

    def inside(self, prompt: FewShotPrompt, spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """For each demonstration of the prompt, (begin, end) of the tokens that begin among some characters of it.

        Args:
            spans: for each demonstration, (begin, end) of the characters.
        """
        text, found = prompt.rstrip(), []
        if self._split_parts:
            query = text[len(prompt) - len(prompt.query) :]
            for part, span in zip(prompt.demonstrations, spans, strict=True):
                begin, end = self._split_parts.before(part, query, span)
                found.append((begin, end))
            return found
        pieces = [
            piece
            for part, (begin, end) in zip(prompt.demonstrations, spans, strict=True)
            for piece in (part[:begin], part[begin:end], part[end:])
        ]
        lengths = split(FewShotPrompt(prompt.prefix, pieces, prompt.query), text, self.encode).context.lengths
        return [(lengths[i], lengths[i] + lengths[i + 1]) for i in range(0, len(lengths), 3)]

    def __call__(self, prompt: FewShotPrompt, continuation: str) -> tuple[TokenizedPrompt, tuple[int, ...]]:
        """The context's ids by part, and the continuation's ids."""
        last = self._last
        if last is None or last.prompt is not prompt:  # all options of a document have the same prompt object
            last = self._last = self._tokenize(prompt)
        continuation = prompt[last.end :] + continuation
        if last.line:
            return last.tokens, tuple(self._ids(last.line + continuation)[len(self._ids(last.line)) :])
        return last.tokens, tuple(last.encode(last.text + continuation)[0][len(last.encode(last.text)[0]) :])

    def _tokenize(self, prompt: FewShotPrompt) -> _Encoded:
        text = prompt.rstrip()
        end, encode, tokens = len(text), self.encode, self.split(prompt, text)
        if self._split_parts and prompt.demonstrations:  # the answer's ids may not depend on the last demonstration
            encode, text = self.bare, "\n" + text[len(prompt) - len(prompt.query) :]
        found = ""
        if "\n" in text:
            line = "\n" + text.rpartition("\n")[2]
            tail = self._ids(line)[len(self._ids("\n")) :]
            ids = [*tokens.context.tokens, *tokens.query]
            if tail and not line[1].isspace() and ids[-len(tail) :] == tail:
                found = line
        return _Encoded(prompt, end, tokens, encode, text, found)


class PromptTokenizer:
    """Tokenizes prompts as lm-eval's `HFLM` does, and divides the ids into the prompt's parts.

    Args:
        tokenizer: a fast tokenizer, since only a fast one gives the character offsets of tokens.
        prefix_token_id: the token that is used in place of an empty context; the tokenizer's BOS token if None, or its
            EOS token if it has no BOS token (as in `HFLM`).
        add_bos_token: whether BOS is put at the beginning; None for the tokenizer's default.
        by_part: tokenize every part by itself, so that the ids of a demonstration do not depend on its neighbours
            (`PartSplitter`).
        canonical: put the demonstrations into canonical order (sorted by text), whatever order they are given in.
        vocabulary: how many tokens the model has; None to accept all of the tokenizer's tokens.

    Raises:
        InputError: the tokenizer is not a fast one, or has neither a BOS nor an EOS token.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prefix_token_id: int | None = None,
        add_bos_token: bool | None = None,
        by_part: bool = False,
        canonical: bool = False,
        vocabulary: int | None = None,
    ):
        if not tokenizer.is_fast:
            raise InputError(
                f"{type(tokenizer).__name__} does not tell which characters a token stands for, and a prompt's parts "
                "are found by them: use a fast tokenizer (use_fast_tokenizer=True)."
            )
        if prefix_token_id is None:
            prefix_token_id = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        if prefix_token_id is None:
            raise InputError("the tokenizer names no BOS and no EOS token, one of which stands for an empty context.")
        self.tokenizer, self.prefix_token_id = tokenizer, prefix_token_id
        self.canonical, self.vocabulary = canonical, vocabulary
        self.bare = encoder(tokenizer, add_special_tokens=False)
        special = {} if add_bos_token is None else {"add_special_tokens": add_bos_token}
        default = encoder(tokenizer, **special)

        def unless_it_opens_with(bos: str | None) -> Encode:
            # A text that begins with BOS already (from a chat template) gets no second one from the tokenizer.
            return lambda text: (self.bare if bos is not None and text.startswith(bos) else default)(text)

        self._pair = PairEncoder(unless_it_opens_with(str(tokenizer.decode(prefix_token_id))), self.bare, by_part)
        self._continued = PairEncoder(unless_it_opens_with(tokenizer.bos_token), self.bare, by_part)
        # The last prompt that was arranged, so that all options of a document keep sharing one prompt object.
        nothing = FewShotPrompt("", (), "")
        self._last: tuple[FewShotPrompt, tuple[int, ...], FewShotPrompt] = nothing, (), nothing

    @property
    def nothing(self) -> TokenizedPrompt:
        """The ids of an empty prompt: an empty context, and the token `prefix_token_id` as the query."""
        return TokenizedPrompt(Context((), ()), (self.prefix_token_id,))

    def arranged(self, prompt: FewShotPrompt, left_out: tuple[int, ...] = ()) -> FewShotPrompt:
        """The prompt with its demonstrations in canonical order, if `canonical` is set, and without those whose indices
        in that order are in `left_out`."""
        last, without, arranged = self._last
        if last is not prompt or without != left_out:
            demonstrations = sorted(prompt.demonstrations) if self.canonical else prompt.demonstrations
            kept = [each for i, each in enumerate(demonstrations) if i not in left_out]
            arranged = FewShotPrompt(prompt.prefix, kept, prompt.query)
            self._last = prompt, left_out, arranged
        return arranged

    def pair(self, prompt: FewShotPrompt, continuation: str) -> tuple[TokenizedPrompt, tuple[int, ...]]:
        """The ids of a prompt, by part, and of a continuation to score, as `TemplateLM.loglikelihood` makes them.

        Raises:
            InputError: no tokenizer can read the text, or a token is not in the model's vocabulary.
        """
        if prompt == "":
            tokens, answer = self.nothing, tuple(self.bare(continuation)[0])
            answer = answer[1:] if answer[:1] == tokens.query else answer
        else:
            tokens, answer = self._pair(prompt, continuation)
        self.check_known(tokens, answer)
        return tokens, answer

    def inside(self, prompt: FewShotPrompt, spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Where `pair` has the tokens of a piece of each demonstration, such as its answer.

        Args:
            prompt: a prompt as `arranged` returns it.
            spans: for each demonstration, (begin, end) of the piece's characters.

        Returns:
            For each demonstration, (begin, end) of the piece's tokens, counted from the demonstration's first token.
        """
        return self._pair.inside(prompt, spans)

    def to_continue(self, prompt: FewShotPrompt) -> TokenizedPrompt:
        """The ids of a prompt, by part, from which text is generated, as `HFLM.generate_until` makes them.

        Raises:
            InputError: as for `pair`.
        """
        tokens = self.nothing if prompt == "" else self._continued.split(prompt, prompt)
        self.check_known(tokens, ())
        return tokens

    def check_known(self, tokens: TokenizedPrompt, answer: tuple[int, ...]) -> None:
        """Refuse ids outside the model's vocabulary: some tokenizers have more tokens than the model they come with.

        Raises:
            InputError: an id is outside the vocabulary.
        """
        ids = (*tokens.query, *answer)
        if self.vocabulary is None or max(tokens.context.largest, *ids, -1) < self.vocabulary:
            return
        token = next(i for i in (*tokens.context.tokens, *ids) if i >= self.vocabulary)
        raise InputError(
            f"token {token} ({self.tokenizer.convert_ids_to_tokens(token)!r}) is not among the {self.vocabulary} that "
            "the model knows: the tokenizer is not the model's. Give the right one: --model_args tokenizer=..."
        )
