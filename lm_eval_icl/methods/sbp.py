"""Set-based prompting.

"Order-Independence Without Fine Tuning" (McIlroy-Young et al., NeurIPS 2024).
"""

from __future__ import annotations

from dataclasses import dataclass

from lm_eval_icl.methods.base import Method, Positions
from lm_eval_icl.methods.pcw import PCW
from lm_eval_icl.prompts.layouts import Pattern


@dataclass(frozen=True)
class SBP(Method):
    """Set-based prompting: `pcw` with one demonstration in each window, under its own name.

    No demonstration sees another, and all demonstrations start at the end of the prefix. The paper
    makes other parts of a prompt parallel in the same way (the answer options of a question). Here
    the parallel parts are the demonstrations.
    """

    treats_demonstrations_alike = True
    positions: Positions = "symmetric"

    def pattern(self, n: int) -> Pattern:
        return PCW(window_size=1).pattern(n)
