"""Tokenizes a prompt and divides the token ids into the prompt's parts.

A method whose results must equal those of `hf` needs the token sequence of the whole string. It is divided afterwards
at the character offsets of the parts: a token belongs to the part that contains its first character (`WholeSplitter`).
For a method that does not depend on the order of the demonstrations, every part is tokenized by itself
(`PartSplitter`).
"""

from __future__ import annotations

import functools
import itertools
import re
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lm_eval_icl.errors import InputError
from lm_eval_icl.prompts.prompt import FewShotPrompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Ids = tuple[int, ...]
Encode = Callable[[str], "tuple[list[int], list[int], int]"]


def encoder(tokenizer: PreTrainedTokenizerBase, add_special_tokens: bool = True) -> Encode:
    """A function that tokenizes a text. It returns the ids, the index of each token's first character, and the number
    of special tokens that the tokenizer put at the beginning. It calls the backend of the fast tokenizer, since the
    call of transformers takes half as long again."""
    backend = tokenizer.backend_tokenizer
    tokenizer("")  # resets the truncation and padding of the backend

    @functools.cache
    def owns_blanks_before(token: int, first: str) -> bool:
        """Whether the blanks between the offsets of two tokens belong to the second token, whose offsets begin with the
        character `first`. The offsets of byte-level tokenizers exclude the blanks that begin a token. If a tokenizer
        makes one blank of several, the offsets hold one. Other tokenizers drop the blanks between words."""
        spelled = str(tokenizer.convert_ids_to_tokens(token))[:1]
        return spelled == "Ġ" or spelled.isspace() or (spelled == "▁" and first.isspace())

    def encode(text: str) -> tuple[list[int], list[int], int]:
        if backend.truncation or backend.padding:
            tokenizer("")  # undoes the truncation or padding that another caller has set
        encoding = backend.encode(text, add_special_tokens=add_special_tokens)
        offsets = encoding.offsets
        starts, begun, ended = list[int](), 0, 0
        for token, (start, end) in zip(encoding.ids, offsets, strict=True):
            at = (
                ended
                if start > ended and owns_blanks_before(token, text[start : start + 1])
                else start
            )
            begun = at if at > begun else begun  # max would take seven times as long
            starts.append(begun)
            ended = end if end > ended else ended
        added = 0
        for mask, (start, end) in zip(encoding.special_tokens_mask, offsets, strict=True):
            if not mask or end > start:
                break
            added += 1
        return encoding.ids, starts, added

    return encode


# A line break that a letter follows, and an entry of a vocabulary that has a line break and another character after it.
# (Byte-level tokenizers write "Ċ" for a line break, and other letters for other blanks.)
_LINE_BREAK = re.compile(r"\n(?=[^\W\d_])")
_OVER_A_LINE_BREAK = re.compile(r"[\nĊ][^\sĊčĉĠ▁]")


def tokenizes_by_line(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a token always ends at a line break that a letter follows, so that a text may be divided there: the
    tokenizer keeps line breaks, and no entry of its vocabulary has a line break with a letter after it."""
    normalizer = tokenizer.backend_tokenizer.normalizer
    keeps = not normalizer or "\n" in normalizer.normalize_str("a\na")
    return keeps and not any(map(_OVER_A_LINE_BREAK.search, tokenizer.get_vocab()))


@dataclass(frozen=True)
class Head:
    """The tokens that prompts with the same context begin with, up to a line break in the context's last part."""

    ids: list[int]  # the ids of the tokens before the line break
    starts: list[int]  # the index of each token's first character
    added: int  # the number of special tokens at the beginning
    end: int  # the index of the line break in the prompt


class WholeSplitter:
    """Tokenizes a prompt as one string and divides the ids into the prompt's parts by their first characters.

    The first prompt with a context is tokenized as a whole. Later prompts with this context begin with the tokens of
    the first prompt's `Head`, and are tokenized only from a line break near the end of the context on. The tokenizer
    must allow this (`tokenizes_by_line`), and it must not change the tokens of the first prompt.
    """

    def __init__(self, encode: Encode, bare: Encode, by_line: bool = False):
        """`encode` adds the special tokens that the model expects, `bare` adds none. `by_line`: `tokenizes_by_line`."""
        self.encode, self.bare, self.by_line = encode, bare, by_line
        self._line_break_tokens = len(bare("\n")[0])

    def __call__(
        self, prompt: FewShotPrompt, text: str, head: Head | None = None
    ) -> tuple[list[Ids], Head | None]:
        """The ids of the prefix, of each demonstration and of the query (at least one token); and the context's head.

        Args:
            text: the prompt, or the prompt without the blanks at its end.
            head: the head that was returned with an earlier prompt with the same context; None if there is none.
        """
        tail = self._tail(text, head.end) if head else None
        if head and tail:
            ids, starts, added = head.ids + tail[0], head.starts + tail[1], head.added
        else:
            ids, starts, added = self.encode(text)
            end = len(prompt) - len(prompt.query)
            begin = max(0, end - len((prompt.prefix, *prompt.demonstrations)[-1]) - 1)
            share = self.by_line and not head
            line_breaks = (
                [match.start() for match in _LINE_BREAK.finditer(text, begin, end)] if share else []
            )
            if line_breaks and (tail := self._tail(text, line_breaks[-1])):
                before = len(ids) - len(tail[0])
                if before >= 0 and (ids[before:], starts[before:]) == tail:
                    head = Head(ids[:before], starts[:before], added, line_breaks[-1])

        cuts, at = [0], len(prompt.prefix)
        for part in (*prompt.demonstrations, prompt.query):
            cuts.append(max(added, bisect_left(starts, at)))
            at += len(part)
        last = max(
            0, min(cuts[-1], len(ids) - 1)
        )  # the query has a token, even if its text is empty
        cuts = [min(cut, last) for cut in cuts]
        return [tuple(ids[a:b]) for a, b in itertools.pairwise([*cuts, len(ids)])], head

    def _tail(self, text: str, line_break: int) -> tuple[list[int], list[int]] | None:
        """The ids of the text after a line break, and the index in the whole text of each token's first character.

        None if no token begins right after the line break. Then the line break is a part of a longer token, is left
        out, or has other tokens than a line break that is tokenized by itself.
        """
        ids, starts, _ = self.bare(text[line_break:])
        n = self._line_break_tokens
        return (
            (ids[n:], [line_break + start for start in starts[n:]])
            if starts[n : n + 1] == [1]
            else None
        )


# Characters to put before a part that is tokenized by itself. They are tried in this order, until one is found that the
# tokenizer does not merge into a token with the beginning of the part.
_IN_FRONT = ("\n", "x", ".")


class PartSplitter:
    """Tokenizes every part by itself, so that the ids of a demonstration do not depend on its neighbours.

    The ids equal those of the whole string, unless a token of the whole string straddles a boundary between parts. To
    achieve this, a part is tokenized in the middle of a text (some tokenizers add a blank at the beginning of a text),
    followed by the beginning of the query (GPT-2's tokenizer divides blank lines depending on the text after them). The
    query follows only the last demonstration, but the others are tokenized as if it followed them too. (One case
    remains in which the ids differ: digits on both sides of a boundary, if the tokenizer groups digits in threes.)
    """

    def __init__(self, encode: Encode, bare: Encode):
        self.encode, self.bare = encode, bare
        self.demonstration = functools.lru_cache(maxsize=10_000)(self._middle)
        self._prefix_ids = functools.lru_cache(maxsize=1_000)(self._prefix)
        # The ids of the texts before and after a part. There are only a few such texts, for thousands of queries.
        self._around = functools.lru_cache(maxsize=1_000)(lambda text: bare(text)[0])

    def __call__(self, prompt: FewShotPrompt, text: str) -> list[Ids]:
        """The ids of the prefix, of each demonstration (at least one) and of the query. An empty query is refused: it
        would need a token of the last demonstration, so that the result would depend on the order."""
        query = text[len(prompt) - len(prompt.query) :]
        if not query:
            raise InputError(
                "the query is empty, so that the answer follows the demonstrations at once. A method that does not "
                "depend on their order needs a query with text (--model icl does not)."
            )
        following = self.beginning(query)
        demonstrations = [self.demonstration(part, following)[0] for part in prompt.demonstrations]
        return [
            self._prefix_ids(prompt.prefix, following),
            *demonstrations,
            self._middle(query, "")[0],
        ]

    def _prefix(self, prefix: str, following: str) -> Ids:
        """The ids of the prefix, tokenized at the beginning of a text and followed by the text `following`."""
        if not prefix:
            alone, _, added = self.encode("x")
            return tuple(alone[:added])
        ids = tuple(self.encode(prefix + following)[0])
        for front in _IN_FRONT:
            tail = self._between(front, following, "")
            if tail and tail[0] and ids[-len(tail[0]) :] == tail[0]:
                return ids[: -len(tail[0])]
        return tuple(self.encode(prefix)[0])

    @staticmethod
    def beginning(query: str) -> str:
        """The query up to its first character that is not blank. The tokens of the blanks at the end of a demonstration
        depend on this text."""
        return query[: len(query) - len(query.lstrip()) + 1]

    def _middle(self, part: str, following: str) -> tuple[Ids, list[int]]:
        """The ids of a part, tokenized in the middle of a text and followed by `following`, and the index in the part
        of each token's first character."""
        for end, front in itertools.product((following, "") if following else ("",), _IN_FRONT):
            ids_and_starts = self._between(front, part, end)
            if ids_and_starts is not None:
                return ids_and_starts
        ids, starts, _ = self.bare(part)
        return tuple(ids), starts

    def _between(self, front: str, part: str, following: str) -> tuple[Ids, list[int]] | None:
        """The ids of the part, tokenized between `front` and `following`, and each token's first character's index.

        None if `front` and `following` have other ids than without the part, since a token then straddles a boundary
        (offsets would not show this, since some tokenizers trim blanks from them). Also None if a token of the part
        begins in `front`, since blanks that have no id at the end of a text may have an id within a text.
        """
        before, outer = (self._around(text) for text in (front, front + following))
        ids, starts, _ = self.bare(front + part + following)
        after = outer[len(before) :]
        end = len(ids) - len(after)
        clean = (
            outer[: len(before)] == ids[: len(before)] == before
            and ids[end:] == after
            and end >= len(before)
        )
        inside = slice(len(before), end)
        clean = clean and all(start >= len(front) for start in starts[inside])
        return (
            (tuple(ids[inside]), [start - len(front) for start in starts[inside]])
            if clean
            else None
        )
