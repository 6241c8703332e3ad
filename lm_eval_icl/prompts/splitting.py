"""Tokenizes a prompt and divides the token ids into the prompt's parts.

A method whose results must equal those of `hf` needs the token sequence of the whole string. The
sequence is divided at the character offsets of the parts: a token belongs to the part that contains
its first character (`WholeSplitter`). For a method that does not depend on the order of the
demonstrations, every part is tokenized by itself (`PartSplitter`).
"""

from __future__ import annotations

import functools
import itertools
import re
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from lm_eval_icl.errors import InputError
from lm_eval_icl.prompts.prompt import FewShotPrompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Ids = tuple[int, ...]


class Encoded(NamedTuple):
    """The tokens of a text."""

    ids: list[int]
    starts: list[int]  # the index of each token's first character
    added: int  # the number of special tokens that the tokenizer put at the beginning


class Tokens(NamedTuple):
    """The tokens of a part of a text."""

    ids: Ids
    starts: list[int]  # the index in the part of each token's first character


Encode = Callable[[str], Encoded]


def encoder(tokenizer: PreTrainedTokenizerBase, add_special_tokens: bool = True) -> Encode:
    """A function that tokenizes a text.

    It calls the backend of the fast tokenizer. The call of transformers takes half as long again.
    """
    backend = tokenizer.backend_tokenizer
    tokenizer("")  # resets the truncation and padding of the backend

    @functools.cache
    def owns_blanks_before(token: int, first: str) -> bool:
        """True if the blanks between the offsets of two tokens belong to the second token.

        The offsets of byte-level tokenizers exclude the blanks that begin a token. Some tokenizers
        make one blank of several, and their offsets hold one. Others drop the blanks between words.

        Args:
            token: the second token.
            first: the first character of its offsets.
        """
        spelled = str(tokenizer.convert_ids_to_tokens(token))[:1]
        return spelled == "Ġ" or spelled.isspace() or (spelled == "▁" and first.isspace())

    def encode(text: str) -> Encoded:
        if backend.truncation or backend.padding:
            tokenizer("")  # undoes the truncation or padding that another caller has set
        encoding = backend.encode(text, add_special_tokens=add_special_tokens)
        starts = []
        latest = 0
        last_end = 0
        for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if start > last_end and owns_blanks_before(token, text[start : start + 1]):
                start = last_end
            if start > latest:  # max would take seven times as long
                latest = start
            starts.append(latest)
            if end > last_end:
                last_end = end
        added = 0
        for special, (start, end) in zip(
            encoding.special_tokens_mask, encoding.offsets, strict=True
        ):
            if not special or end > start:
                break
            added += 1
        return Encoded(encoding.ids, starts, added)

    return encode


# A line break that a letter follows, and an entry of a vocabulary that has a line break and another
# character after it. Byte-level tokenizers write "Ċ" for a line break, and other letters for other
# blanks.
_LINE_BREAK = re.compile(r"\n(?=[^\W\d_])")
_OVER_A_LINE_BREAK = re.compile(r"[\nĊ][^\sĊčĉĠ▁]")


def tokenizes_by_line(tokenizer: PreTrainedTokenizerBase) -> bool:
    """True if a token always ends at a line break that a letter follows.

    A text may then be divided there. The tokenizer keeps line breaks, and no entry of its
    vocabulary has a line break with a letter after it.
    """
    normalizer = tokenizer.backend_tokenizer.normalizer
    if normalizer and "\n" not in normalizer.normalize_str("a\na"):
        return False
    return not any(map(_OVER_A_LINE_BREAK.search, tokenizer.get_vocab()))


@dataclass(frozen=True)
class Head:
    """The tokens that prompts with the same context begin with.

    They end at a line break in the context's last part.
    """

    tokens: Encoded  # the tokens before the line break
    end: int  # the index of the line break in the prompt


class WholeSplitter:
    """Tokenizes a prompt as one string and divides the ids by their first characters.

    The first prompt with a context is tokenized as a whole. Later prompts with this context begin
    with the tokens of the first prompt's `Head`, and are tokenized only from a line break near the
    end of the context on. The tokenizer must allow this (`tokenizes_by_line`), and it must not
    change the tokens of the first prompt.

    Args:
        encode: adds the special tokens that the model expects.
        bare: adds no special tokens.
        by_line: the tokenizer goes line by line (`tokenizes_by_line`).
    """

    def __init__(self, encode: Encode, bare: Encode, by_line: bool = False):
        self.encode = encode
        self.bare = bare
        self.by_line = by_line
        self._line_break_tokens = len(bare("\n").ids)

    def __call__(
        self, prompt: FewShotPrompt, text: str, head: Head | None = None
    ) -> tuple[list[Ids], Head | None]:
        """Divide a prompt.

        Args:
            text: the prompt, or the prompt without the blanks at its end.
            head: the head that was returned with an earlier prompt with the same context.

        Returns:
            The ids of the prefix, of each demonstration and of the query (at least one token); and
            the context's head, if there is one.
        """
        tail = self._tail(text, head.end) if head else None
        if head and tail:
            before = head.tokens
            ids = before.ids + tail.ids
            starts = before.starts + tail.starts
            added = before.added
        else:
            whole = self.encode(text)
            ids, starts, added = whole
            if self.by_line and not head:
                head = self._head(prompt, text, whole)

        cuts = [0]
        end = len(prompt.prefix)
        for part in (*prompt.demonstrations, prompt.query):
            cuts.append(max(added, bisect_left(starts, end)))
            end += len(part)
        # The query has a token, even if its text is empty.
        last = max(0, min(cuts[-1], len(ids) - 1))
        cuts = [min(cut, last) for cut in cuts]
        parts = [tuple(ids[a:b]) for a, b in itertools.pairwise([*cuts, len(ids)])]
        return parts, head

    def _head(self, prompt: FewShotPrompt, text: str, whole: Encoded) -> Head | None:
        """The head of the prompt's context; None if later prompts cannot be divided there.

        Args:
            whole: the tokens of the text.
        """
        end = len(prompt) - len(prompt.query)
        last_part = (prompt.prefix, *prompt.demonstrations)[-1]
        begin = max(0, end - len(last_part) - 1)
        line_breaks = [match.start() for match in _LINE_BREAK.finditer(text, begin, end)]
        tail = self._tail(text, line_breaks[-1]) if line_breaks else None
        if not tail:
            return None
        n = len(whole.ids) - len(tail.ids)
        if n < 0 or whole.ids[n:] != tail.ids or whole.starts[n:] != tail.starts:
            return None
        return Head(Encoded(whole.ids[:n], whole.starts[:n], whole.added), line_breaks[-1])

    def _tail(self, text: str, line_break: int) -> Encoded | None:
        """The tokens of the text after a line break, with their first characters in the whole text.

        None if no token begins right after the line break. Then the line break is a part of a
        longer token, is left out, or has other tokens than a line break by itself.
        """
        ids, starts, _ = self.bare(text[line_break:])
        n = self._line_break_tokens
        if starts[n : n + 1] != [1]:
            return None
        return Encoded(ids[n:], [line_break + start for start in starts[n:]], 0)


# Characters to put before a part that is tokenized by itself. They are tried in this order, until
# one is found that the tokenizer does not merge into a token with the beginning of the part.
_IN_FRONT = ("\n", "x", ".")


class PartSplitter:
    """Tokenizes every part by itself, so that a demonstration's ids do not depend on others.

    The ids equal those of the whole string, unless a token of the whole string straddles a boundary
    between parts. To achieve this, a part is tokenized in the middle of a text, since some
    tokenizers add a blank at the beginning of a text. It is followed by the beginning of the query,
    since GPT-2's tokenizer divides blank lines depending on the text after them. The query follows
    only the last demonstration, but the others are tokenized as if it followed them too.

    One case remains in which the ids differ: digits on both sides of a boundary, if the tokenizer
    groups digits in threes.
    """

    def __init__(self, encode: Encode, bare: Encode):
        self.encode = encode
        self.bare = bare
        self.demonstration = functools.lru_cache(maxsize=10_000)(self._middle)
        self._prefix_ids = functools.lru_cache(maxsize=1_000)(self._prefix)
        # The ids of the texts before and after a part: a few texts for thousands of queries.
        self._around = functools.lru_cache(maxsize=1_000)(lambda text: bare(text).ids)

    def __call__(self, prompt: FewShotPrompt, text: str) -> list[Ids]:
        """The ids of the prefix, of each demonstration (at least one) and of the query.

        Raises:
            InputError: the query is empty. It would need a token of the last demonstration, so that
                the result would depend on the order.
        """
        query = text[len(prompt) - len(prompt.query) :]
        if not query:
            raise InputError(
                "the query is empty, so that the answer follows the demonstrations at once. A "
                "method that does not depend on their order needs a query with text (--model icl "
                "does not)."
            )
        following = self.beginning(query)
        parts = [self._prefix_ids(prompt.prefix, following)]
        parts += [self.demonstration(part, following).ids for part in prompt.demonstrations]
        return [*parts, self._middle(query, "").ids]

    def _prefix(self, prefix: str, following: str) -> Ids:
        """The ids of the prefix, at the beginning of a text and followed by `following`."""
        if not prefix:
            alone = self.encode("x")
            return tuple(alone.ids[: alone.added])
        ids = tuple(self.encode(prefix + following).ids)
        for front in _IN_FRONT:
            tail = self._between(front, following, "")
            if tail and tail.ids and ids[-len(tail.ids) :] == tail.ids:
                return ids[: -len(tail.ids)]
        return tuple(self.encode(prefix).ids)

    @staticmethod
    def beginning(query: str) -> str:
        """The query up to its first character that is not blank.

        The tokens of the blanks at the end of a demonstration depend on this text.
        """
        return query[: len(query) - len(query.lstrip()) + 1]

    def _middle(self, part: str, following: str) -> Tokens:
        """The tokens of a part in the middle of a text, followed by `following`."""
        for end in dict.fromkeys((following, "")):
            for front in _IN_FRONT:
                tokens = self._between(front, part, end)
                if tokens is not None:
                    return tokens
        ids, starts, _ = self.bare(part)
        return Tokens(tuple(ids), starts)

    def _between(self, front: str, part: str, following: str) -> Tokens | None:
        """The tokens of the part, tokenized between `front` and `following`.

        None if `front` and `following` have other ids than without the part, since a token then
        straddles a boundary. (Offsets would not show this: some tokenizers trim blanks from them.)
        Also None if a token of the part begins in `front`, since blanks that have no id at the end
        of a text may have an id within a text.
        """
        before = self._around(front)
        outer = self._around(front + following)
        ids, starts, _ = self.bare(front + part + following)
        n = len(before)
        after = outer[n:]
        end = len(ids) - len(after)
        if end < n or ids[end:] != after or not outer[:n] == ids[:n] == before:
            return None
        inside = [start - len(front) for start in starts[n:end]]
        return None if any(start < 0 for start in inside) else Tokens(tuple(ids[n:end]), inside)
