"""Plain in-context learning."""

from __future__ import annotations

from dataclasses import dataclass

from lm_eval_icl.methods.base import Method
from lm_eval_icl.prompts.layouts import Pattern, before


@dataclass(frozen=True)
class ICL(Method):
    """Plain in-context learning: D_i sees D_1..D_{i-1}, by the model's causal attention.

    The memory is the keys and values of one ordinary pass over prefix and demonstrations, so every
    log-likelihood is the one that lm-eval's `hf` computes from the joined prompt (the baseline
    "ICL" in Deep-Thinking, section 2; "AR ICL" in InvICL, Eq. 4).
    """

    needs_mask = False
    without_demonstrations = ""

    def pattern(self, n: int) -> Pattern:
        return Pattern(before(n))
