"""PCW: Parallel Context Windows for Large Language Models (Ratner et al., ACL 2023)."""

from __future__ import annotations

from dataclasses import dataclass

from lm_eval_icl.declared import Positive
from lm_eval_icl.methods.base import Method, Positions
from lm_eval_icl.prompts.layouts import Pattern, before, same


@dataclass(frozen=True)
class PCW(Method):
    """Parallel context windows: a demonstration sees those before it in its window, and no others.

    With one demonstration in each window it is bag-of-examples ICL (InvICL, Eq. 6, Figure 2c and
    Appendix A.2): invariant and without leakage, but not interdependent. With symmetric positions
    every window starts at the end of the prefix.

    Args:
        window_size: how many demonstrations share a window, at most all of them. The last window
            may have fewer. If it is more than 1, the order of the demonstrations in a window has an
            effect.
    """

    treats_demonstrations_alike = True

    positions: Positions = "symmetric"
    window_size: Positive = 1

    @property
    def invariant(self) -> bool:
        """Whether positions are not sequential, and no two demonstrations share a window."""
        return self.window_size == 1 and super().invariant

    def why_not(self, n: int) -> str:
        """A window must not be larger than the number of demonstrations."""
        if self.window_size <= max(n, 1):
            return ""
        return f"window_size={self.window_size}: must not exceed the {n} demonstrations: lower it"

    def pattern(self, n: int) -> Pattern:
        windows = [i // self.window_size for i in range(n)]
        return Pattern(before(n) & same(windows), windows=windows)
