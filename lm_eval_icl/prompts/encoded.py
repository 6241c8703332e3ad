"""Prompts and continuations that come with their token ids.

Most prompts are texts, and the model tokenizes them. MetaICL's protocol says how each piece of a
prompt is tokenized and cut. Its task therefore tokenizes by itself, and the model runs these ids.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Self

from lm_eval_icl.prompts.prompt import FewShotPrompt
from lm_eval_icl.prompts.tokens import TokenizedPrompt


class EncodedText(str):
    """A continuation as a text, with its token ids."""

    ids: tuple[int, ...]

    def __new__(cls, text: str, ids: Sequence[int]) -> Self:
        self = super().__new__(cls, text)
        self.ids = tuple(ids)
        return self

    def __reduce__(self) -> tuple[type[EncodedText], tuple[str, tuple[int, ...]]]:
        return EncodedText, (str(self), self.ids)


class EncodedPrompt(FewShotPrompt):
    """A prompt by part, with the token ids of every part.

    The text is for readers. The model runs the ids.

    Attributes:
        tokens: the ids by part, with as many demonstrations as the text.
    """

    tokens: TokenizedPrompt

    def __new__(cls, demonstrations: Sequence[str], query: str, tokens: TokenizedPrompt) -> Self:
        self = super().__new__(cls, "", demonstrations, query)
        self.tokens = tokens
        return self

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return EncodedPrompt, (self.demonstrations, self.query, self.tokens)

    @property
    def ids(self) -> list[int]:
        """The ids of all parts, in one list."""
        return [*self.tokens.context.tokens, *self.tokens.query]

    def without(self, left_out: Collection[int]) -> TokenizedPrompt:
        """The ids without the demonstrations whose indices are in `left_out`."""
        if not left_out:
            return self.tokens
        indices = [i for i in range(len(self.demonstrations)) if i not in left_out]
        return self.tokens.keeping(indices)
