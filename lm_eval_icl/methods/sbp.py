"""Set-based prompting: Order-Independence Without Fine Tuning (McIlroy-Young et al., NeurIPS 2024)."""

from __future__ import annotations

from dataclasses import dataclass

from lm_eval_icl.methods.base import Method
from lm_eval_icl.prompts.layouts import Pattern, nothing


@dataclass(frozen=True)
class SBP(Method):
    """Set-based prompting: the demonstrations are a set. None sees another, and all start at the end of the prefix.

    This is `pcw window_size=1 positions=symmetric`, number by number. The paper makes other parts of a prompt parallel
    in the same way (the answer options of a question); here the parallel parts are the demonstrations.
    """

    treats_demonstrations_alike = True
    positions: str = "symmetric"

    def pattern(self, n: int) -> Pattern:
        return Pattern(nothing(n))
