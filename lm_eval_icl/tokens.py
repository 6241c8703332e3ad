"""A prompt as token ids by part.

For a method that must give what `hf` gives the token sequence is that of the whole string, cut afterwards at the
character offsets of the parts: a token belongs to the part in which its first character lies (`split`). For one
that does not depend on the order of the demonstrations every part is tokenized by itself (`PartSplitter`).
"""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from lm_eval_icl.errors import InputError
from lm_eval_icl.prompts import FewShotPrompt


@dataclass(frozen=True)
class Context:
    """What the queries of one set of demonstrations share, as token ids. Hashable: the key of a memory.

    Attributes:
        prefix: BOS if the tokenizer adds one, and the description or system text.
        demonstrations: one tuple of ids a demonstration; together with the prefix, in this order, the
            beginning of the prompt's token sequence.
    """

    prefix: tuple[int, ...]
    demonstrations: tuple[tuple[int, ...], ...]

    @functools.cached_property
    def tokens(self) -> list[int]:
        """All ids in a row."""
        return [*self.prefix, *(token for part in self.demonstrations for token in part)]

    @functools.cached_property
    def largest(self) -> int:
        """The largest id; -1 if there is none."""
        return max(self.tokens, default=-1)


@functools.lru_cache(maxsize=1024)
def _one(context: Context) -> Context:
    """The first of equal contexts, so that thousands of documents keep one."""
    return context


@dataclass(frozen=True)
class TokenizedPrompt:
    """A prompt's ids: the shared context, and the query (at least one token, since a memory alone
    predicts nothing: where the query is empty, the context gives up its last token to it)."""

    context: Context
    query: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.context.tokens) + len(self.query)


Encode = Callable[[str], "tuple[list[int], list[int], int]"]


def encoder(tokenizer: PreTrainedTokenizerBase, **special: bool) -> Encode:
    """A function from a text to its ids, the character at which each begins, and the number of special
    tokens that the tokenizer put in front. `special`: `add_special_tokens`, where not the default."""

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
            # Byte-level tokenizers leave the blanks in front of a word out of its offsets: a token begins
            # where the one before it ended, at the latest.
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
    """Tokenize `text`, the prompt or what is left of it without blanks at its end, by part."""
    ids, starts, added = encode(text)
    cuts, at = [], len(prompt.prefix)
    for part in (*prompt.demonstrations, prompt.query):
        cuts.append(max(added, bisect_left(starts, at)))
        at += len(part)
    cuts[-1] = min(cuts[-1], len(ids) - 1)
    cuts = [max(0, min(cut, cuts[-1])) for cut in cuts]
    demonstrations = tuple(tuple(ids[a:b]) for a, b in itertools.pairwise(cuts))
    return TokenizedPrompt(_one(Context(tuple(ids[: cuts[0]]), demonstrations)), tuple(ids[cuts[-1] :]))


# A character to stand in front of a part that is tokenized by itself: one that no token joins to the part.
_IN_FRONT = ("\n", "x", ".")


class PartSplitter:
    """Tokenizes every part by itself, so that no demonstration's ids depend on what stands beside it.

    Where no token of the whole string straddles a boundary, the ids are those of the whole string: a part is
    tokenized in the middle of a text (some tokenizers put a blank in front of a text), and before what the query
    begins with (GPT-2's kind divides blank lines by what follows), which stands behind the last demonstration,
    and is taken to stand behind the others as well. (An exception: digits on both sides of a boundary, where a
    tokenizer counts digits off in threes.)
    """

    def __init__(self, encode: Encode, bare: Encode):
        """`encode` adds special tokens as the model wants them, `bare` adds none."""
        self.encode, self.bare = encode, bare
        self._demonstration = functools.lru_cache(maxsize=10_000)(self._middle)

    def __call__(self, prompt: FewShotPrompt, text: str) -> TokenizedPrompt:
        """As `split`, part by part, for a prompt with demonstrations.

        Raises:
            InputError: the query is empty; a token taken from the last demonstration would make their order count.
        """
        query = text[len(prompt) - len(prompt.query) :]
        if not query:
            raise InputError(
                "the query is empty, so that the answer begins right behind the demonstrations; a method that does not "
                "depend on their order needs something between them (--model icl does not)."
            )
        blanks = len(query) - len(query.lstrip())  # how a run of them is divided depends on what ends it
        behind = query[: blanks + 1]
        demonstrations = tuple(self._demonstration(part, behind) for part in prompt.demonstrations)
        context = Context(tuple(self._prefix(prompt.prefix, behind)), demonstrations)
        return TokenizedPrompt(_one(context), self._middle(query, ""))

    def _prefix(self, prefix: str, behind: str) -> list[int]:
        """The ids of the beginning of a text."""
        if not prefix:
            ids, _, added = self.encode("x")
            return ids[:added]
        ids = self.encode(prefix + behind)[0]
        for front in _IN_FRONT:
            tail = self._between(front, behind, "")
            if tail and tuple(ids[-len(tail) :]) == tail:
                return ids[: -len(tail)]
        return self.encode(prefix)[0]

    def _middle(self, part: str, behind: str) -> tuple[int, ...]:
        """The ids of a part in the middle of a text."""
        for end, front in itertools.product((behind, "") if behind else ("",), _IN_FRONT):
            ids = self._between(front, part, end)
            if ids is not None:
                return ids
        return tuple(self.bare(part)[0])

    def _between(self, front: str, part: str, behind: str) -> tuple[int, ...] | None:
        """The ids of the part alone, front and behind having just the ids they have without it; None if they
        have others, which is where a token straddles. (Offsets would not tell: some tokenizers trim blanks.)"""
        before, outer, ids = (self.bare(text)[0] for text in (front, front + behind, front + part + behind))
        after = outer[len(before) :]
        end = len(ids) - len(after)
        clean = outer[: len(before)] == ids[: len(before)] == before and ids[end:] == after and end >= len(before)
        return tuple(ids[len(before) : end]) if clean else None


class PairEncoder:
    """Context and continuation as `TemplateLM._encode_pair` makes them, each context tokenized once.

    Blanks at the end of the context move to the continuation, whose ids are those of the joined text
    behind the context's. Joining at full length for every option is not needed: no token of a BPE
    tokenizer reaches over a line break into a word behind it, so the context's last line with the line
    break before it stands for the whole, if its own tokens are those that the whole context ends in.
    """

    def __init__(self, encode: Encode, bare: Encode, by_part: bool = False):
        """`encode` adds special tokens as the model wants them, `bare` adds none; `by_part` as `PartSplitter`."""
        self.encode, self.bare = encode, bare
        self._split_parts = PartSplitter(encode, bare) if by_part else None
        self._ids = functools.lru_cache(maxsize=100_000)(lambda text: bare(text)[0])
        self._prompt: FewShotPrompt | None = None

    def split(self, prompt: FewShotPrompt, text: str) -> TokenizedPrompt:
        """The prompt, or what is left of it without blanks at its end, by part."""
        if self._split_parts and prompt.demonstrations:
            return self._split_parts(prompt, text)
        return split(prompt, text, self.encode)

    def __call__(self, prompt: FewShotPrompt, continuation: str) -> tuple[TokenizedPrompt, tuple[int, ...]]:
        """The context's tokens by part and the continuation's ids."""
        if prompt is not self._prompt:  # lm-eval gives all options of a document the same object
            self._tokenize(prompt)
        continuation = prompt[self._end :] + continuation
        if self._line:
            return self._tokens, tuple(self._ids(self._line + continuation)[len(self._ids(self._line)) :])
        encode, text = self._text
        return self._tokens, tuple(encode(text + continuation)[0][len(encode(text)[0]) :])

    def _tokenize(self, prompt: FewShotPrompt) -> None:
        text = prompt.rstrip()
        self._prompt, self._end = prompt, len(text)
        self._tokens = self.split(prompt, text)
        self._text = self.encode, text
        if self._split_parts and prompt.demonstrations:  # nothing may depend on the last demonstration
            text = "\n" + text[len(prompt) - len(prompt.query) :]
            self._text = self.bare, text
        self._line = ""
        if "\n" in text:
            line = "\n" + text.rpartition("\n")[2]
            tail = self._ids(line)[len(self._ids("\n")) :]
            ids = [*self._tokens.context.tokens, *self._tokens.query]
            if tail and not line[1].isspace() and ids[-len(tail) :] == tail:
                self._line = line
