"""SAICL: Scaling In-Context Demonstrations with Structured Attention (Cai et al., 2023), as InvICL compares with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from transformers import PreTrainedModel

from lm_eval_icl.layouts import Pattern, nothing
from lm_eval_icl.memory import Memory, encode
from lm_eval_icl.methods.method import Method
from lm_eval_icl.tokens import Context


@dataclass(frozen=True)
class SAICL(Method):
    """Structured attention: demonstrations see no other demonstration, but all of the query (InvICL, Appendix A.2).

    The continuation stays hidden from them. Within a layer no demonstration sees another (Table 1), but through the
    query they reach each other from the second layer on. Invariant; since the demonstrations look at the query, no two
    queries share their memory, and every query costs a pass over all demonstrations. Its options share it.
    """

    symmetric_mask = True
    per_query = True
    positions: str = "symmetric"

    def pattern(self, n: int) -> Pattern:
        return Pattern(nothing(n), query=True)

    def encode_query(
        self,
        model: PreTrainedModel,
        context: Context,
        query: tuple[int, ...],
        memories: Callable[[Context], Memory],
    ) -> tuple[Memory, tuple[int, ...]]:
        """Demonstrations and query in one pass; the query's last token runs again, to predict the answer."""
        layout = self.layout(context, query)
        memory = encode(model, replace(layout, kept=layout.kept[:-1], end=int(layout.positions[-1])))
        return memory, query[-1:]
