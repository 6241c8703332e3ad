"""The base class of methods in which every query has a memory of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from lm_eval_icl.inference.memory import Memory, encode_all
from lm_eval_icl.inference.packing import Queries
from lm_eval_icl.inference.schedule import Batch, ContextWork, Text
from lm_eval_icl.inference.scoring import Pair
from lm_eval_icl.methods.base import EncodedContext, Encoder, Method, Rows
from lm_eval_icl.prompts.tokens import Context, Ids

# A context, and the ids of a query.
ContextQuery = tuple[Context, Ids]
# A memory, and the ids of a query's last tokens, which are still to be run on it.
MemoryQuery = tuple[Memory, Ids]
# Returns the memories of contexts, which may be stored for other queries.
Memories = Callable[[Sequence[Context]], Sequence[Memory]]


@dataclass(frozen=True)
class ByQuery(Method):
    """A memory for each query: two queries never share one, and the options of a query do.

    A method whose demonstrations see the query defines `pattern` alone, with `query=True`:
    demonstrations and query run in one pass under its mask. Other methods override
    `encode_queries`.
    """

    memory_depends_on_query = True
    one_pass = True
    encodes_by_layout = True

    def encode_queries(
        self,
        model: PreTrainedModel,
        queries: Sequence[ContextQuery],
        memories: Memories,
        packed: bool = False,
    ) -> list[MemoryQuery]:
        """The memory of each query, and the tokens of the query that are still to be run on it.

        Here, demonstrations and query run in one pass. The query's last token runs again, to
        predict the answer.

        Args:
            queries: contexts, each with the ids of a query.
            memories: returns the memories of contexts, as `encode` computes them.
            packed: queries may be packed into one row, since the model obeys a 4-D mask and
                `position_ids`.
        """
        layouts = [self.row(context, len(query)) for context, query in queries]
        prompts = [[*context.tokens, *query] for context, query in queries]
        encoded = []
        for memory, layout, (_, query) in zip(
            encode_all(model, layouts, prompts), layouts, queries, strict=True
        ):
            last_position = int(layout.positions[-1])
            encoded.append((memory.without_last(query_start=last_position), query[-1:]))
        return encoded

    def tokens_for(self, context: Context, query: int) -> tuple[int, int]:
        """How many tokens run for a query, and how many entries of stored memories they see."""
        return len(self.row(context, query)), 0

    def is_ordinary(self, context: Context) -> bool:
        return False

    def work(self, context: Context, queries: Queries, once: bool) -> Sequence[ContextWork]:
        """A piece of work for each query."""
        kept = self.footprint(context).kept
        pieces = []
        for query, answers in sorted(queries.items()):
            tokens, shared = self.tokens_for(context, len(query))
            pieces.append(
                ContextWork(context, [(query, answers)], tokens, kept, shared, alone=False)
            )
        return pieces

    def encoded(self, encoder: Encoder, context: Context, query: Ids) -> EncodedContext:
        [(memory, rest)] = self.encode_queries(encoder.model, [(context, query)], encoder.memories)
        return EncodedContext([memory], rest)

    def side_by_side(self, encoder: Encoder, batch: Batch) -> list[tuple[Memory, list[Pair]]]:
        queries = [(context, query) for context, query, _ in batch.queries]
        encoded = self.encode_queries(encoder.model, queries, encoder.memories, packed=True)
        work: list[tuple[Memory, list[Pair]]] = []
        for (memory, rest), (_, _, answers) in zip(encoded, batch.queries, strict=True):
            work.append((memory, [(rest, answer) for answer in answers]))
        return work

    def text_rows(self, encoder: Encoder, texts: Sequence[Text]) -> Rows:
        [text] = texts
        encoded = self.encoded(encoder, text.prompt.context, text.prompt.query)
        assert encoded.rest is not None
        return Rows([*encoded.memories], [encoded.rest])
