"""The base class of methods that refine a memory step by step."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from transformers import PreTrainedModel

from lm_eval_icl.inference.memory import Memory
from lm_eval_icl.methods.base import Method
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
