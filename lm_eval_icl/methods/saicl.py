"""SAICL: structured attention.

"Scaling In-Context Demonstrations with Structured Attention" (Cai et al., 2023), as InvICL compares
with it.
"""

from __future__ import annotations

from dataclasses import dataclass

from lm_eval_icl.methods.base import Positions
from lm_eval_icl.methods.by_query import ByQuery
from lm_eval_icl.prompts.layouts import Pattern, nothing


@dataclass(frozen=True)
class SAICL(ByQuery):
    """Structured attention: a demonstration sees no other demonstration, but all of the query.

    The method is that of InvICL, Appendix A.2. The continuation is hidden from the demonstrations.
    Within a layer no demonstration sees another (Table 1), but from the second layer on they
    influence each other through the query. Invariant. Since the demonstrations see the query, every
    query needs a pass over all demonstrations, and only the options of one query share a memory.
    """

    treats_demonstrations_alike = True
    needs_training = True
    positions: Positions = "symmetric"

    def pattern(self, n: int) -> Pattern:
        return Pattern(nothing(n), query=True)
