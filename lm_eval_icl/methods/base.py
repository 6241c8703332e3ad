"""The base class of all methods. A method turns demonstrations into a memory that queries attend to."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, get_type_hints

from lm_eval_icl.errors import InputError, is_number, naming, one_line, whole
from lm_eval_icl.prompts.layouts import POSITIONS, Layout, Pattern, lay_out
from lm_eval_icl.prompts.tokens import Context

if (
    TYPE_CHECKING
):  # the modules that run models take seconds to import; a method's arguments and layout need none
    from transformers import PreTrainedModel

    from lm_eval_icl.inference.attention import Reading
    from lm_eval_icl.inference.memory import Memory
    from lm_eval_icl.inference.packing import Queries
    from lm_eval_icl.inference.schedule import ContextWork

# A context, and the ids of a query.
ContextQuery = tuple[Context, tuple[int, ...]]
# The layouts of forward passes, each with a title.
Passes = list[tuple[str, Layout]]
# A function that returns the memories of several contexts, as `Method.encode` computes them.
Memories = Callable[[Sequence[Context]], "Sequence[Memory]"]


def must(be: str, fine: Callable[[Any], bool]) -> Callable[[Any], Any]:
    """A check for the annotation of an argument, such as `eta: Annotated[float, must("above 0", lambda eta: eta > 0)]`.
    The check returns the value if it is `fine`, and otherwise raises a `ValueError` with "must be above 0"."""

    def check(value: Any) -> Any:
        if not fine(value):
            raise ValueError(f"must be {be}")
        return value

    return check


def number(be: str, fine: Callable[[float], bool]) -> Callable[[Any], Any]:
    """The check of a number. Its message is "must be a number {be}"."""
    return must(f"a number {be}", lambda value: is_number(value) and fine(value))


def optional(check: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The check of an argument that may also be None."""
    return lambda value: None if value is None else check(value)


Whole = Annotated[int, whole]
Positions = Annotated[
    str, must(f"{', '.join(POSITIONS[:-1])} or {POSITIONS[-1]}", lambda value: value in POSITIONS)
]


@functools.cache
def _checks(method: type[Method]) -> list[tuple[str, Callable[[Any], Any]]]:
    """The checks in the annotations of a method's arguments. `positions` and `repeat` are always checked."""
    hints = {**get_type_hints(method, include_extras=True), "positions": Positions, "repeat": Whole}
    return [
        (name, check) for name, hint in hints.items() for check in getattr(hint, "__metadata__", ())
    ]


@dataclass(frozen=True)
class Method(ABC):
    """An in-context-learning method: its arguments, and how it encodes a context.

    A method that differs from others only in its mask defines `pattern` alone. The layout and the forward pass follow
    from it. Other methods override `passes` and `encode`, or `encode_queries` if the memory depends on the query, and
    set the flags below.

    Args:
        positions: "sequential", "symmetric" or "none" (`prompts.layouts.lay_out`).
        repeat: how many times the sequence of demonstrations is repeated in the prompt (2 in InvICL, Table 8).

    Raises:
        InputError: an argument is outside its range.
    """

    positions: Positions = "sequential"
    repeat: Whole = 1

    # Whether the mask treats all demonstrations alike. Unless positions are sequential, their order then has no effect.
    treats_demonstrations_alike: ClassVar[bool] = False
    # Whether some tokens must not see all tokens before them, so that the model must obey a 4-D mask.
    needs_mask: ClassVar[bool] = True
    # Whether context, query and answer are one forward pass over `layout`, so that models can be trained under the
    # method. If a class overrides `encode`, it is False unless the class sets it.
    one_pass: ClassVar[bool] = True
    # Whether the memory depends on the query, so that two queries never share a memory.
    memory_depends_on_query: ClassVar[bool] = False
    # Whether attention reads the memory in parts (`inference.memory.MemoryPart`). The model's attention must allow it.
    reads_in_parts: ClassVar[bool] = False
    # What the method does without demonstrations, for the warning about such a task. Empty for no warning.
    without_demonstrations: ClassVar[str] = "evaluated as plain zero-shot"
    # Advice for the error about prompts that do not fit, if encoding takes more positions than the prompt.
    overflow_hint: ClassVar[str] = ""
    # The name of the argument that is the number of memories of `memories`, if there are several.
    counts_memories: ClassVar[str] = ""

    # Whether the memory follows from `layout` and `read` alone, so that demonstrations may be encoded by themselves
    # (`methods.blocks`). If a class overrides `encode`, it is False unless the class sets it.
    encodes_by_layout: ClassVar[bool] = True

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for flag in ("one_pass", "encodes_by_layout"):
            if "encode" in vars(cls) and flag not in vars(cls):
                setattr(cls, flag, False)

    def __post_init__(self) -> None:
        if (
            self.positions is None
        ):  # lm-eval parses "none" as None if all model arguments are one string
            object.__setattr__(self, "positions", "none")
        for argument, check in _checks(type(self)):
            value = getattr(self, argument)
            try:
                object.__setattr__(self, argument, check(value))
            except ValueError as error:
                raise InputError(f"{self.name}: {argument}={value!r}: {error}.") from None

    def _check(self, argument: str, *, fine: bool, must: str) -> None:
        """Refuse an argument unless it is `fine`. The message says what it `must` be. For `__post_init__`."""
        if not fine:
            value = getattr(self, argument)
            raise InputError(f"{self.name}: {argument}={value!r}: must be {must}.")

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, Any]) -> Self:
        """The method with these arguments.

        Raises:
            InputError: an argument is missing or outside its range, or `pattern` returns a mask of another shape.
        """
        try:
            method = cls(**arguments)
            Method.__post_init__(method)  # in case a subclass overrides it without calling it
        except TypeError as error:
            raise InputError(f"{cls.__name__.lower()}: {one_line(error)}.") from error
        if not method.why_not(3):
            replace(method, repeat=1).passes(
                0, [1] * 3
            )  # raises its errors now, before a model is loaded
        return method

    @property
    def name(self) -> str:
        """The NAME in `--model NAME`."""
        return type(self).__name__.lower()

    @property
    def trained_under(self) -> str:
        """The name of the method under which models are trained for this method."""
        return self.name if self.one_pass else "icl"

    @property
    def invariant(self) -> bool:
        """Whether the order of the demonstrations makes no difference except for rounding."""
        return self.treats_demonstrations_alike and self.positions != "sequential"

    @property
    def needs_positions(self) -> bool:
        """Whether a token's position can differ from its index, so that the model must obey `position_ids`."""
        return self.needs_mask or self.positions != "sequential"

    def why_not(self, n: int) -> str:
        """Why these arguments do not allow a prompt of n demonstrations; empty if they do."""
        return ""

    def bind(self, model: PreTrainedModel) -> Method:
        """The method with the arguments filled in that depend on the model."""
        return self

    @abstractmethod
    def pattern(self, n: int) -> Pattern:
        """Which of n demonstrations sees which demonstration."""

    def layout(
        self, prefix: int, demonstrations: Sequence[int], query: int = 0, answer: int = 0
    ) -> Layout:
        """The layout of the forward pass over a context, followed by query and answer if their lengths are given. The
        arguments are numbers of tokens."""
        pattern = self.pattern(len(demonstrations) * self.repeat)
        if pattern.query and not self.memory_depends_on_query:
            raise InputError(
                f"{self.name}: pattern: query=True needs memory_depends_on_query and an encode_queries."
            )
        with naming(f"{self.name}: pattern"):
            return lay_out(
                prefix, demonstrations, pattern, self.positions, query, answer, repeat=self.repeat
            )

    def passes(
        self, prefix: int, demonstrations: Sequence[int], query: int = 0, answer: int = 0
    ) -> Passes:
        """The layouts of all forward passes until an answer is scored, each with a title for readers. The last pass has
        the query. Entries of a memory that a pass attends to are blocks M. The arguments are those of `layout`."""
        return [("", self.layout(prefix, demonstrations, query, answer))]

    def is_ordinary(self, context: Context) -> bool:
        """Whether this context and a query are one ordinary causal pass, as in `hf`."""
        if not self.one_pass or self.memory_depends_on_query:
            return False
        row = self.layout(len(context.prefix), context.lengths, 1)
        return row.causal and row.sequential and len(row) == len(context.tokens) + 1

    def footprint(self, context: Context) -> Footprint:
        """The numbers of tokens and positions that it takes to encode a context, and the position of queries."""
        return _footprint(self, len(context.prefix), context.lengths)

    def encode(self, model: PreTrainedModel, contexts: Sequence[Context]) -> list[Memory]:
        """The memory of each context, which all of its queries attend to, from one forward pass over the layouts. If
        there are several contexts, each has demonstrations, and the model obeys a 4-D mask and `position_ids`."""
        from lm_eval_icl.inference.memory import encode_all

        layouts = [self.layout(len(context.prefix), context.lengths) for context in contexts]
        return encode_all(model, layouts, [context.tokens for context in contexts])

    def reading(self, context: Context) -> tuple[int, Reading] | None:
        """If attention reads the memory in two parts (`reads_in_parts`): the first entry of the second part, and how it
        is read. None if the memory is read as any other."""
        return None

    def read(self, memory: Memory, context: Context) -> Memory:
        """The memory, divided into parts as `reading` says."""
        part = self.reading(context)
        return memory if part is None or not memory.layers else memory.divided(*part)

    def memories(self, model: PreTrainedModel, context: Context) -> Iterator[Memory]:
        """The memory of a context after each pass, if the method refines its memory pass by pass (`counts_memories`).
        The last memory is the one of `encode`."""
        yield from self.encode(model, [context])

    @property
    def window_method(self) -> Method:
        """The method that encodes the memories of `contexts`."""
        return self

    def contexts(self, context: Context) -> list[Context]:
        """The contexts whose memories a query runs on, one memory at a time: the context itself, or its windows."""
        return [context]

    def encode_queries(
        self,
        model: PreTrainedModel,
        queries: Sequence[ContextQuery],
        memories: Memories,
        packed: bool = False,
    ) -> list[tuple[Memory, tuple[int, ...]]]:
        """The memory that each query attends to, and the ids of the query's tokens that are still to be run on it.

        Args:
            queries: contexts, each with the ids of a query.
            memories: returns the memories of several contexts, which may be stored for other queries.
            packed: whether queries may be packed into one row, since the model obeys a 4-D mask and `position_ids`.
                Otherwise they run one by one.
        """
        if self.memory_depends_on_query:
            raise InputError(
                f"{self.name}: memory_depends_on_query = True needs an encode_queries."
            )
        contexts, ids = [context for context, _ in queries], [query for _, query in queries]
        return list(zip(memories(contexts), ids, strict=True))

    def work(self, context: Context, queries: Queries, once: bool) -> Iterator[ContextWork]:
        """The work of encoding a context for all of its queries or, if the memory depends on the query, for each query.
        `once`: no later request has this context, so its memory need not be stored."""
        from lm_eval_icl.inference.schedule import ContextWork

        footprint, windows, items = (
            self.footprint(context),
            self.contexts(context),
            sorted(queries.items()),
        )
        if self.memory_depends_on_query and queries:
            for query, answers in items:
                tokens, shared_entries = self.tokens_for(context, len(query))
                yield ContextWork(
                    context, [(query, answers)], tokens, footprint.kept, shared_entries, alone=False
                )
            return
        side_by_side = bool(
            once and len(windows) == 1 and context.demonstrations and context.tokens
        )
        yield ContextWork(
            context,
            items,
            footprint.tokens,
            entries=sum(self.footprint(window).kept for window in windows),
            alone=not side_by_side,
            ordinary=side_by_side and bool(queries) and self.is_ordinary(context),
            memories=len(windows),
        )

    def tokens_for(self, context: Context, query: int) -> tuple[int, int]:
        """If the memory depends on the query: how many tokens run for a query of `query` tokens, and how many entries
        these tokens attend to in memories that several queries share."""
        return len(self.layout(len(context.prefix), context.lengths, query)), 0


@dataclass(frozen=True)
class Footprint:
    """How many tokens and positions a context takes, computed from the layouts of its forward passes.

    Without positional information, positions are counted as if they were sequential: a model was trained to attend to
    no more tokens than it has positions, so `nope` refuses the prompts that `icl` refuses.
    """

    tokens: int  # how many tokens the longest row has, entries of a memory included
    kept: int  # how many entries a query attends to
    positions: int  # how many positions the passes that encode the context take, not counting those of a query
    shortest_pass: int  # how many positions the shortest pass takes
    query_start: int  # the position of a query's first token


@functools.lru_cache(maxsize=4096)
def _footprint(method: Method, prefix: int, demonstrations: tuple[int, ...]) -> Footprint:
    if method.positions == "none":
        method = replace(method, positions="sequential")
    layouts = [layout for _, layout in method.passes(prefix, demonstrations)]
    reaches = [layout.reach for layout in layouts]
    return Footprint(
        tokens=max(len(layout) for layout in layouts),
        kept=len(layouts[-1].kept_tokens),
        positions=max(reaches),
        shortest_pass=min(filter(None, reaches), default=0),
        query_start=layouts[-1].end,
    )
