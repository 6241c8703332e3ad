"""A few-shot prompt with its parts: `prefix | demonstration 1 | ... | demonstration n | query`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self


class FewShotPrompt(str):
    """A prompt as one string, with its parts as attributes.

    Attributes:
        prefix: the text before the first demonstration: the task's instruction, the system text and
            the beginning of a chat template. The header of a chat turn ("<|user|>") belongs to the
            part before the turn, so that the prefix and every demonstration end in the same way.
        demonstrations: the demonstrations, each with its answer and the delimiter that follows it.
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
