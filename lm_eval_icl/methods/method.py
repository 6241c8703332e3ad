"""What every method is: a way to turn demonstrations into a memory that queries attend to."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from transformers import PreTrainedModel

from lm_eval_icl.errors import InputError, is_whole
from lm_eval_icl.layouts import POSITIONS, Layout, Pattern, lay_out, starts
from lm_eval_icl.memory import Memory, causal_pass, encode
from lm_eval_icl.tokens import Context


@dataclass(frozen=True)
class Method(ABC):
    """An in-context-learning method: its arguments, and what it makes of a context.

    A mask method says in `pattern` which demonstration sees which, and is done: laying it out and running it
    in one pass is the same for all. Others override `encode`, or `encode_query` where what the query attends
    to depends on the query.

    Args:
        positions: "sequential", as the tokens stand; "symmetric", every demonstration at the end of the prefix
            and the query behind the longest (InvICL, Appendix A.1); "none", no positional information.
        repeat: how many times in a row the demonstrations stand there (InvICL, Table 8, has 2).

    Raises:
        InputError: an argument is outside its range.
    """

    positions: str = "sequential"
    repeat: int = 1

    # Whether the mask treats all demonstrations alike, so that without positions in sequence their order is nothing.
    symmetric_mask: ClassVar[bool] = False
    # Whether something else than "itself and all before it" has to be hidden, for which a model must take a mask.
    masks: ClassVar[bool] = True
    # Whether what a query attends to depends on the query, so that no two queries share a memory.
    per_query: ClassVar[bool] = False
    # Said of a task without demonstrations, where the method then does nothing of its own.
    without_demonstrations: ClassVar[str] = "evaluated as plain zero-shot"
    # What helps where encoding a context takes more positions than the prompt itself.
    reach_hint: ClassVar[str] = ""

    def __post_init__(self) -> None:
        if self.positions is None:  # how lm-eval reads "none" where all model arguments are one string
            object.__setattr__(self, "positions", "none")
        self._check("positions", self.positions in POSITIONS, f"{', '.join(POSITIONS[:-1])} or {POSITIONS[-1]}")
        self._check_whole("repeat")

    def _check_whole(self, argument: str) -> None:
        value = getattr(self, argument)
        self._check(argument, is_whole(value) and value >= 1, "a whole number, 1 or more")
        object.__setattr__(self, argument, int(value))  # 2.0 is 2

    def _check(self, argument: str, fine: bool, must: str) -> None:
        if not fine:
            value = getattr(self, argument)
            raise InputError(f"lm-eval-icl: {self.name}: {argument}={value!r}: must be {must}.")

    @property
    def name(self) -> str:
        """As in `--model NAME`."""
        return type(self).__name__.lower()

    @property
    def invariant(self) -> bool:
        """Whether the order of the demonstrations makes no difference, in real numbers."""
        return self.symmetric_mask and self.positions != "sequential"

    @property
    def places(self) -> bool:
        """Whether tokens stand elsewhere than at their index, for which a model must obey given positions."""
        return self.masks or self.positions != "sequential"

    def refuse(self, n: int) -> str:
        """Why a prompt of n demonstrations is none for these arguments; empty if it is."""
        return ""

    def bind(self, model: PreTrainedModel) -> Method:
        """The method with those arguments filled in that depend on the model."""
        return self

    @abstractmethod
    def pattern(self, n: int) -> Pattern:
        """Which of n demonstrations sees which."""

    def repeated(self, context: Context) -> tuple[tuple[int, ...], ...]:
        """The demonstrations as they stand in the row."""
        return context.demonstrations * self.repeat

    def layout(self, context: Context, query: tuple[int, ...] = (), answer: tuple[int, ...] = ()) -> Layout:
        """The row of tokens that runs for a context; query and answer behind it where they are given."""
        demonstrations = self.repeated(context)
        pattern = self.pattern(len(demonstrations))
        return lay_out(context.prefix, demonstrations, pattern, self.positions, query, answer)

    def passes(
        self, context: Context, query: tuple[int, ...] = (), answer: tuple[int, ...] = ()
    ) -> list[tuple[str, Layout]]:
        """What runs until an answer is scored, as a title and a row of tokens each, for a reader (`show` draws it).

        Entries of a memory that a row attends to stand in it as block M, and see nothing: they do not run again.
        """
        return [("", self.layout(context, query, answer))]

    def extent(self, context: Context) -> Extent:
        """How long the context's layout is, found without spelling it out."""
        return _extent(self, context)

    def encode(self, model: PreTrainedModel, context: Context) -> Memory:
        """What all queries behind this context attend to: one pass over its layout."""
        if self.places:
            return encode(model, self.layout(context))
        # Causal, in sequence: nothing that would have to be laid out.
        tokens = [*context.prefix, *(token for part in self.repeated(context) for token in part)]
        return Memory(causal_pass(model, tokens) if tokens else [], tokens, query_start=len(tokens))

    def encode_query(
        self,
        model: PreTrainedModel,
        context: Context,
        query: tuple[int, ...],
        memories: Callable[[Context], Memory],
    ) -> tuple[Memory, tuple[int, ...]]:
        """What this query attends to, and the part of it that is still to run on that.

        Args:
            memories: `encode`, what it made of a context kept for the next query.
        """
        return memories(context), query


@dataclass(frozen=True)
class Extent:
    """How much room a context's layout takes. Without positions it is that of a sequence: a model's limit is also
    one of how much it was trained to attend to, and `nope` then refuses just what `icl` does.

    Attributes:
        tokens: in the row that runs.
        kept: entries that a query attends to.
        reach: positions that encoding takes; where it takes a pass a query, without the query.
        least: positions of the shortest pass behind which others run.
        query_start: the position of a query's first token.
    """

    tokens: int
    kept: int
    reach: int
    least: int
    query_start: int


@functools.lru_cache(maxsize=4096)
def _extent(method: Method, context: Context) -> Extent:
    demonstrations = method.repeated(context)
    pattern = method.pattern(len(demonstrations))
    prefix, lengths = len(context.prefix), [len(part) for part in demonstrations] * pattern.copies
    positions = "sequential" if method.positions == "none" else method.positions
    start, query_start = starts(prefix, lengths, pattern, positions)
    reach = max((at + length for at, length in zip(start, lengths, strict=True)), default=prefix)
    kept = prefix + sum(lengths) // pattern.copies
    return Extent(prefix + sum(lengths), kept, reach, reach, query_start)
