"""PCW: Parallel Context Windows for Large Language Models (Ratner et al., ACL 2023)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lm_eval_icl.layouts import Pattern, before, same
from lm_eval_icl.methods.method import Method


@dataclass(frozen=True)
class PCW(Method):
    """Parallel context windows: demonstrations see those before them in their own window, and no other.

    With one demonstration a window it is bag-of-examples ICL (InvICL, Eq. 6, Figure 2c and Appendix A.2):
    invariant and without leakage, but not interdependent. Symmetric positions start every window at the end
    of the prefix.

    Args:
        windows: how many demonstrations share a window. Inside a window of several, order counts.
    """

    symmetric_mask = True
    positions: str = "symmetric"
    windows: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_whole("windows")

    @property
    def invariant(self) -> bool:
        """As long as no two demonstrations share a window."""
        return self.windows == 1 and super().invariant

    def refuse(self, n: int) -> str:
        """A window has at most all demonstrations."""
        n *= self.repeat
        return f"windows={self.windows}: more than the {n} demonstrations; lower it" if self.windows > max(n, 1) else ""

    def pattern(self, n: int) -> Pattern:
        window = torch.arange(n) // self.windows
        return Pattern(before(n) & same(window), windows=window)
