"""SAICL: Scaling In-Context Demonstrations with Structured Attention (Cai et al., 2023), as InvICL compares with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from lm_eval_icl.inference.memory import Memory, encode_all
from lm_eval_icl.methods.base import ContextQuery, Memories, Method
from lm_eval_icl.prompts.layouts import Pattern, nothing


@dataclass(frozen=True)
class SAICL(Method):
    """Structured attention: a demonstration sees no other demonstration, but all of the query (InvICL, Appendix A.2).

    The continuation is hidden from the demonstrations. Within a layer no demonstration sees another (Table 1), but from
    the second layer on they influence each other through the query. Invariant. Since the demonstrations see the query,
    every query needs a pass over all demonstrations, and only the options of one query share a memory.
    """

    treats_demonstrations_alike = True
    memory_depends_on_query = True
    positions: str = "symmetric"

    def pattern(self, n: int) -> Pattern:
        return Pattern(nothing(n), query=True)

    def encode_queries(
        self,
        model: PreTrainedModel,
        queries: Sequence[ContextQuery],
        memories: Memories,
        packed: bool = False,
    ) -> list[tuple[Memory, tuple[int, ...]]]:
        """Run demonstrations and query in one pass. The query's last token runs again later, to predict the answer."""
        layouts = [
            self.layout(len(context.prefix), context.lengths, len(query))
            for context, query in queries
        ]
        encoded = encode_all(
            model, layouts, [[*context.tokens, *query] for context, query in queries]
        )
        return [
            (memory.without_last(query_start=int(layout.positions[-1])), query[-1:])
            for memory, layout, (_, query) in zip(encoded, layouts, queries, strict=True)
        ]
