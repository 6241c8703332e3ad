"""A few-shot prompt with its parts: `prefix | demonstration 1 | ... | demonstration n | query`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

# The indices (begin, end) of a piece of a text among its characters, or of its tokens.
Span = tuple[int, int]


class Demonstration(str):
    """A demonstration whose answer is known: the query, the answer and what follows it.

    It goes wherever the text goes. Methods that learn from the answers of demonstrations need it.

    Args:
        query: the text up to where the answer begins.
        answer: the answer, with the blank that separates it from the query.
        end: the delimiter after the answer.

    Attributes:
        answer: the indices of the answer among the characters.
    """

    answer: Span

    def __new__(cls, query: str, answer: str, end: str = "") -> Self:
        self = super().__new__(cls, query + answer + end)
        self.answer = (len(query), len(query) + len(answer))
        return self

    def __reduce__(self) -> tuple[type, tuple[str, ...]]:
        begin, end = self.answer
        return Demonstration, (self[:begin], self[begin:end], self[end:])


class FewShotPrompt(str):
    """A prompt as one string, with its parts as attributes.

    Attributes:
        prefix: the text before the first demonstration: the task's instruction, the system text and
            the beginning of a chat template. The header of a chat turn ("<|user|>") belongs to the
            part before the turn, so that the prefix and every demonstration end in the same way.
        demonstrations: the demonstrations, each with its answer and the delimiter that follows it.
            One whose answer is known is a `Demonstration`.
        query: the document to answer, up to where the answer begins.
    """

    prefix: str
    demonstrations: tuple[str, ...]
    query: str

    def __new__(cls, prefix: str, demonstrations: Sequence[str], query: str) -> Self:
        self = super().__new__(cls, prefix + "".join(demonstrations) + query)
        self.prefix = prefix
        self.demonstrations = tuple(demonstrations)
        self.query = query
        return self

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return FewShotPrompt, (self.prefix, self.demonstrations, self.query)
