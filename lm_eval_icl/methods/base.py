"""The base class of all methods. A method turns demonstrations into a memory for queries.

There are kinds of methods, and each kind is a class that says how contexts are encoded, how queries
are scored and how texts are continued. `Method` itself makes one memory for all queries.
`methods.by_query.ByQuery` makes a memory for each query, and `methods.several.Several` several
memories whose predictions are combined. `methods.stepwise.Stepwise` refines one memory step by
step.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self

from lm_eval_icl.declared import Arguments, Positive, checked
from lm_eval_icl.errors import InputError, Unsupported, naming, one_line
from lm_eval_icl.prompts.layouts import Layout, Pattern, lay_out
from lm_eval_icl.prompts.tokens import Context, Ids, TokenizedPrompt

# The modules that run models take seconds to import. A method's arguments and layout need none.
if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel

    from lm_eval_icl.inference.attention import Reading
    from lm_eval_icl.inference.capabilities import Capabilities
    from lm_eval_icl.inference.memory import Memory
    from lm_eval_icl.inference.packing import Queries
    from lm_eval_icl.inference.schedule import Batch, ContextWork, Text
    from lm_eval_icl.inference.scoring import Pair, Scores, States
    from lm_eval_icl.methods.plain import Plain

# Combines log-probabilities [texts, memories, vocabulary] into [texts, vocabulary]. It also takes
# the state that it returned for the token before, and returns a new one (`Several.next_token`).
Combine = Callable[["Tensor", "Tensor | None"], "tuple[Tensor, Tensor | None]"]
# The layouts of forward passes, each with a title.
Passes = list[tuple[str, Layout]]


Positions = Literal["sequential", "symmetric", "none"]


class Encoder(Protocol):
    """What the runner gives to a method: a model, and the memories of contexts on it."""

    model: PreTrainedModel
    can: Capabilities
    softmax_dtype: torch.dtype | None  # of the softmax over the vocabulary. None: at least float32.

    def memories(self, contexts: Sequence[Context]) -> list[Memory]:
        """The memories of contexts, which may be stored for later queries."""

    def for_one_pass(self, contexts: Sequence[Context]) -> Sequence[Memory]:
        """The memories of contexts whose queries all run in the next pass. They are not stored."""


@dataclass(frozen=True)
class EncodedContext:
    """What the queries of a context run on."""

    memories: Sequence[Memory]  # If there are several, their predictions are combined.
    # The last tokens of the only query that has this memory. They are still to be run. None: the
    # memory belongs to all queries of the context.
    rest: Ids | None = None


@dataclass(frozen=True)
class Rows:
    """The rows of a batch in which texts are continued."""

    memories: list[Memory]  # one for all rows, or one for each row
    queries: list[Ids]  # the tokens of each row that run on its memory
    of_text: int = 1  # how many adjacent rows belong to one text
    # Gives the rows of a text the same next token (`inference.generation.combining`).
    combine: Combine | None = None


@dataclass(frozen=True)
class Method(Arguments, ABC):
    """An in-context-learning method: its arguments, and how it encodes a context.

    A method that differs from others only in its mask defines `pattern` alone. The layout and the
    forward pass follow from it. Other methods override `passes` and `encode`, and set the class
    attributes below.

    Args:
        positions: "sequential", "symmetric" or "none" (`prompts.layouts.lay_out`).
        repeat: how many times the sequence of demonstrations is repeated (2 in InvICL, Table 8).

    Raises:
        InputError: an argument is outside its range.
    """

    positions: Positions = "sequential"
    repeat: Positive = 1

    # The mask treats all demonstrations alike. Unless positions are sequential, their order then
    # has no effect.
    treats_demonstrations_alike: ClassVar[bool] = False
    # Some tokens must not see all tokens before them, so that the model must obey a 4-D mask.
    needs_mask: ClassVar[bool] = True
    # Context, query and answer are one forward pass over `lay_out`, so that models can be trained
    # under the method. It is False for a class that overrides `encode`, unless the class sets it.
    one_pass: ClassVar[bool] = True
    # The paper trains a model under the method.
    needs_training: ClassVar[bool] = False
    # What the method does without demonstrations, for a warning. Empty for no warning.
    without_demonstrations: ClassVar[str] = "evaluated as plain zero-shot"
    # Advice for the error about prompts that do not fit, if encoding takes more positions than the
    # prompt.
    overflow_hint: ClassVar[str] = ""
    # In a batch of texts, each row may have the memory of another context.
    rows_may_differ: ClassVar[bool] = True
    # The argument that counts the memories of a method that refines its memory (`Stepwise`).
    counts_memories: ClassVar[str] = ""
    # The method learns something for each context, in many passes (`methods.learned`).
    learns: ClassVar[bool] = False
    # It learns from the answers of its demonstrations, which prompts must therefore tell.
    needs_answers: ClassVar[bool] = False
    # Every query has a memory of its own. The kind of method says so.
    memory_depends_on_query: ClassVar[bool] = False
    # The memory follows from `lay_out` and `reading`, so that demonstrations may be encoded by
    # themselves (`methods.joining`). It is False for a class that overrides `encode`, unless the
    # class sets it.
    encodes_by_layout: ClassVar[bool] = True

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        members = vars(cls)
        if "encode" in members or "encode_queries" in members:
            cls.one_pass = members.get("one_pass", False)
            cls.encodes_by_layout = members.get("encodes_by_layout", False)
        if cls.memory_depends_on_query != hasattr(cls, "encode_queries"):
            raise InputError(f"{cls.__name__}: derive from ByQuery for a memory of each query.")

    def __post_init__(self) -> None:
        # lm-eval parses "none" as None if all model arguments are one string.
        if self.positions is None:
            object.__setattr__(self, "positions", "none")
        super().__post_init__()
        # A subclass may declare another type.
        checked(f"{self.name}: positions", self.positions, Positions)

    def _check(self, argument: str, *, fine: bool, must: str) -> None:
        """Refuse an argument that is not `fine`, with a message that says what it `must` be."""
        if not fine:
            value = getattr(self, argument)
            raise InputError(f"{self.name}: {argument}={value!r}: must be {must}.")

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, Any]) -> Self:
        """The method with these arguments.

        Raises:
            InputError: an argument is missing or outside its range, or `pattern` returns something
                else than a `Pattern` with a mask of the right shape.
        """
        try:
            method = cls(**arguments)
            Method.__post_init__(method)  # in case a subclass overrides it without calling it
        except TypeError as error:
            raise InputError(f"{cls.__name__.lower()}: {one_line(error)}.") from error
        if not method.why_not(3):
            # The layouts raise their errors now, before a model is loaded.
            replace(method, repeat=1).passes(0, [1] * 3)
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
        """Whether a token's position can differ from its index. The model must then obey them."""
        return self.needs_mask or self.positions != "sequential"

    @property
    def rows_wanted(self) -> int:
        """The number of labeled rows, other than demonstrations, that a context is fitted on."""
        return 0

    def for_context(self, runner: Any, context: Context) -> Method:
        """The method for the queries of a context, with what was fitted for it.

        Args:
            runner: the `MethodRunner`, which has the labeled rows.
        """
        return self

    def why_not(self, n: int) -> str:
        """Why these arguments do not allow a prompt of n demonstrations. Empty if they do."""
        return ""

    def bind(self, model: PreTrainedModel) -> Method:
        """The method for this model: arguments that depend on the model are filled in.

        Raises:
            Unsupported: the model does not do what this method needs beyond masks and positions.
        """
        return self

    # The layouts: plain data, from numbers of tokens.

    @abstractmethod
    def pattern(self, n: int) -> Pattern:
        """Which of n demonstrations sees which demonstration."""

    def lay_out(
        self, prefix: int, demonstrations: Sequence[int], query: int = 0, answer: int = 0
    ) -> Layout:
        """The layout of the forward pass over a context, and over query and answer if they are
        given.

        Args:
            prefix, demonstrations, query, answer: numbers of tokens.
        """
        pattern = self.pattern(len(demonstrations) * self.repeat)
        if not isinstance(pattern, Pattern):
            kind = type(pattern).__name__
            raise InputError(f"{self.name}: pattern: must return a Pattern, not a {kind}.")
        if pattern.query and not self.memory_depends_on_query:
            raise InputError(
                f"{self.name}: pattern: query=True needs a class that derives from ByQuery."
            )
        with naming(f"{self.name}: pattern"):
            return lay_out(
                prefix, demonstrations, pattern, self.positions, query, answer, repeat=self.repeat
            )

    def row(self, context: Context, query: int = 0, answer: int = 0) -> Layout:
        """`lay_out` for a context, and for the numbers of tokens of query and answer."""
        return self.lay_out(len(context.prefix), context.lengths, query, answer)

    def passes(
        self, prefix: int, demonstrations: Sequence[int], query: int = 0, answer: int = 0
    ) -> Passes:
        """The layouts of all forward passes until an answer is scored, each with a title.

        The last pass has the query. Entries of a memory that a pass attends to are blocks M. The
        arguments are those of `lay_out`.
        """
        return [("", self.lay_out(prefix, demonstrations, query, answer))]

    def is_ordinary(self, context: Context) -> bool:
        """Whether this context and a query are one ordinary causal pass, as in `hf`."""
        if not self.one_pass:
            return False
        row = self.row(context, 1)
        return row.causal and row.sequential and len(row) == len(context.tokens) + 1

    def footprint(self, context: Context) -> Footprint:
        """The tokens and positions that a context takes."""
        memories = len(self.contexts(context))
        return _footprint(self, len(context.prefix), context.lengths, memories)

    # How contexts are encoded.

    def encode(self, model: PreTrainedModel, contexts: Sequence[Context]) -> list[Memory]:
        """The memory of each context, which all of its queries attend to, from one forward pass.

        If there are several contexts, each has demonstrations, and the model obeys a 4-D mask and
        `position_ids`.
        """
        from lm_eval_icl.inference.memory import encode_all

        layouts = [self.row(context) for context in contexts]
        memories = encode_all(model, layouts, [context.tokens for context in contexts])
        return list(map(self.read, memories, contexts))

    def reading(self, context: Context) -> tuple[int, Reading] | None:
        """The part of the memory that attention reads in another way: its first entry, and the way.

        None if attention reads all entries as usual. A class that returns something else derives
        from `methods.parts.InParts`.
        """
        return None

    def read(self, memory: Memory, context: Context) -> Memory:
        """The memory, divided as `reading` says."""
        part = self.reading(context)
        return memory if part is None or not memory.layers else memory.divided(*part)

    def contexts(self, context: Context) -> list[Context]:
        """The contexts whose memories a query runs on, one memory at a time: the context itself."""
        return [context]

    # How the kind of method is run.

    def work(self, context: Context, queries: Queries, once: bool) -> Sequence[ContextWork]:
        """What the schedule needs to know of a context and its queries.

        Args:
            once: no later request has this context, so that its memory need not be stored.
        """
        from lm_eval_icl.inference.schedule import ContextWork

        footprint = self.footprint(context)
        memories = len(self.contexts(context))
        has_tokens = bool(context.demonstrations and context.tokens)
        side_by_side = once and memories == 1 and has_tokens
        return [
            ContextWork(
                context,
                sorted(queries.items()),
                footprint.tokens,
                footprint.entries,
                alone=not side_by_side,
                ordinary=side_by_side and self.is_ordinary(context),
                memories=memories,
            )
        ]

    def encoded(self, encoder: Encoder, context: Context, query: Ids) -> EncodedContext:
        """What a query of a context runs on, if the context is encoded before its queries run."""
        return EncodedContext(encoder.memories(self.contexts(context)))

    def scored(
        self, encoder: Encoder, batch: Batch, encoded: EncodedContext | None, states: States
    ) -> Scores:
        """The scores of a batch.

        Args:
            encoded: what its queries run on. None if its contexts are encoded in the same pass.
            states: the vectors to return with the scores (`Scores.states`).
        """
        from lm_eval_icl.inference.scoring import score_packed, score_rows

        if encoded is None:
            work = self.side_by_side(encoder, batch)
        else:
            [memory] = encoded.memories
            if not batch.tokens:
                queries = [(encoded.rest or query, answers) for _, query, answers in batch.queries]
                return score_rows(
                    encoder.model, memory, queries, encoder.softmax_dtype, batch.rows, states
                )
            pairs: list[Pair] = [
                (encoded.rest or query, answer) for _, query, answer in batch.requests
            ]
            work = [(memory, pairs)]
        return score_packed(
            encoder.model, work, encoder.softmax_dtype, states, encoder.can.can_trim
        )

    def side_by_side(self, encoder: Encoder, batch: Batch) -> list[tuple[Memory, list[Pair]]]:
        """The memories of contexts that are encoded with the batch, each with its pairs."""
        from lm_eval_icl.inference.memory import Memory

        if batch.encoding == "never":
            rows: list[Pair] = [
                ((*context.tokens, *query), answer) for context, query, answer in batch.requests
            ]
            return [(Memory([], [], 0), rows)]
        pairs: dict[Context, list[Pair]] = {}
        for context, query, answer in batch.requests:
            pairs.setdefault(context, []).append((query, answer))
        return list(zip(encoder.for_one_pass([*pairs]), pairs.values(), strict=True))

    def text_rows(self, encoder: Encoder, texts: Sequence[Text]) -> Rows:
        """The rows in which texts are continued. All have one context, or each has another."""
        from lm_eval_icl.inference.memory import Memory

        contexts = [text.prompt.context for text in texts]
        queries = [text.prompt.query for text in texts]
        if not texts[0].single:
            return Rows(encoder.memories(self.contexts(contexts[0])), queries)
        if not all(map(self.is_ordinary, contexts)):
            return Rows(encoder.memories(contexts), queries)
        whole_rows = [
            (*context.tokens, *query) for context, query in zip(contexts, queries, strict=True)
        ]
        return Rows([Memory([], [], 0)], whole_rows)

    # The definition, one request at a time (`methods.plain`).

    def by_definition(self, plain: Plain, prompt: TokenizedPrompt, answer: Ids) -> list[Tensor]:
        """The logits of a request's last tokens: for each memory, [tokens, vocabulary]."""
        if not self.encodes_by_layout:
            raise Unsupported(f"{self.name} encodes by code of its own: leave plain=True out.")
        layout = self.row(prompt.context, len(prompt.query), len(answer))
        after = [*prompt.query, *answer]
        row = [*prompt.context.tokens, *after]
        part = self.reading(prompt.context)
        if part is None:
            return [plain.run(layout, row)]
        return [plain.run_in_parts(layout, row, *part, len(after))]


@dataclass(frozen=True)
class Footprint:
    """How many tokens and positions a context takes, computed from its layouts.

    Without positional information, positions are counted as if they were sequential: a model was
    trained to attend to no more tokens than it has positions, so `nope` refuses the prompts that
    `icl` refuses.
    """

    tokens: int  # how many tokens the longest row has, entries of a memory included
    kept: int  # how many entries of a memory a query attends to
    entries: int  # how many entries queries attend to in all memories
    positions: int  # how many positions the passes that encode the context take, without a query
    shortest_pass: int  # how many positions the shortest pass takes
    query_start: int  # the position of a query's first token


@functools.lru_cache(maxsize=4096)
def _footprint(
    method: Method, prefix: int, demonstrations: tuple[int, ...], memories: int
) -> Footprint:
    if method.positions == "none":
        method = replace(method, positions="sequential")
    layouts = [layout for _, layout in method.passes(prefix, demonstrations)]
    reaches = [layout.reach for layout in layouts]
    # The last layouts are those that queries follow, one for each memory.
    kept = [len(layout.kept_tokens) for layout in layouts[-memories:]]
    return Footprint(
        tokens=max(len(layout) for layout in layouts),
        kept=max(kept),
        entries=sum(kept),
        positions=max(reaches),
        shortest_pass=min(filter(None, reaches), default=0),
        query_start=max(layout.end for layout in layouts[-memories:]),
    )
