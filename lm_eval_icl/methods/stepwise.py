"""The base class of methods that refine a memory step by step."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from transformers import PreTrainedModel

from lm_eval_icl import methods
from lm_eval_icl.inference.memory import Memory
from lm_eval_icl.methods.base import Method
from lm_eval_icl.prompts.layouts import Pattern
from lm_eval_icl.prompts.tokens import Context


@dataclass(frozen=True)
class Stepwise(Method):
    """One memory for all queries, refined step by step. Each step can be scored.

    A class says in `counts_memories` which of its arguments is the number of steps, and in
    `first_number` its value for the first memory.
    """

    first_number: ClassVar[int] = 1

    @abstractmethod
    def memories(
        self, model: PreTrainedModel, contexts: Sequence[Context]
    ) -> Iterator[list[Memory]]:
        """The memories of all contexts after each step. Queries attend to the last ones."""

    def encode(self, model: PreTrainedModel, contexts: Sequence[Context]) -> list[Memory]:
        last = list[Memory]()
        for memories in self.memories(model, contexts):
            last = memories  # those of earlier steps are freed
        return last


class FromLayout(Stepwise):
    """A memory that begins as that of another method, whose mask and positions it keeps.

    A class has the arguments `positions`, whose "layout" stands for the positions of that method,
    and `layout`, the method's name. Its `__post_init__` calls `_begin`.
    """

    layout: str

    def _begin(self) -> None:
        """Check `layout`, and fill in its positions."""
        first = methods.find(self.layout) if self.layout in methods.NAMES else type(self)
        fine = first.one_pass and not first.memory_depends_on_query
        self._check(
            "layout",
            fine=fine,
            must="a method of one pass for all queries: icl, nope, prefixicl, pcw, ...",
        )
        if self.positions == "layout":
            object.__setattr__(self, "positions", first.positions)

    @cached_property
    def first(self) -> Method:
        """The method whose memory is the beginning."""
        return methods.find(self.layout)(positions=self.positions, repeat=self.repeat)

    @property
    def trained_under(self) -> str:
        return self.first.name

    @property
    def needs_training(self) -> bool:  # type: ignore[override]
        return self.first.needs_training

    @property
    def treats_demonstrations_alike(self) -> bool:  # type: ignore[override]
        return self.first.treats_demonstrations_alike

    def pattern(self, n: int) -> Pattern:
        return self.first.pattern(n)
