"""InvICL: Rethinking Invariance in In-context Learning (ICLR 2025)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lm_eval_icl.methods.base import Method, Positions
from lm_eval_icl.prompts.layouts import Pattern, nothing, others


@dataclass(frozen=True)
class InvICL(Method):
    """Invariant ICL: every demonstration is encoded with all other demonstrations as its context.

    Algorithm 1, unrolled into one pass (section 3.3, Figure 2d): the first copy of D_i sees no
    other demonstration; the second copy sees the first copies of all D_j, j != i; queries see the
    second copies. Both copies have the same symmetric positions (Appendix A.1). Invariant, without
    leakage, interdependent (Table 1). (With `repeat`, a repetition counts as another demonstration,
    so the second copy of a demonstration sees its own label there.)
    """

    treats_demonstrations_alike = True
    needs_training = True
    positions: Positions = "symmetric"

    def pattern(self, n: int) -> Pattern:
        first_sees = torch.cat([nothing(n), nothing(n)], dim=1)
        second_sees = torch.cat([others(n), nothing(n)], dim=1)
        return Pattern(torch.cat([first_sees, second_sees]), copies=2)
