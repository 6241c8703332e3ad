"""Prefix ICL: demonstrations as a prefix language model reads them.

"Exploring the Limits of Transfer Learning" (Raffel et al., JMLR 2020), as InvICL compares with it.
"""

from __future__ import annotations

from dataclasses import dataclass

from lm_eval_icl.methods.base import Method, Positions
from lm_eval_icl.prompts.layouts import Pattern, everything


@dataclass(frozen=True)
class PrefixICL(Method):
    """Prefix ICL: every token of a demonstration sees all tokens of all demonstrations.

    This is InvICL's Eq. 5 and Figure 2b.

    Query and continuation are causal, as in the other methods, and so is the prefix, which sees no
    demonstration. Invariant and interdependent, but a demonstration's input sees its own label
    (InvICL, Table 1).
    """

    treats_demonstrations_alike = True
    needs_training = True
    positions: Positions = "symmetric"

    def pattern(self, n: int) -> Pattern:
        return Pattern(everything(n))
