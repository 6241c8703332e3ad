"""Star attention: Efficient LLM Inference over Long Sequences (Acharya et al., 2024)."""

from __future__ import annotations

from dataclasses import dataclass

from lm_eval_icl.methods.base import Positions
from lm_eval_icl.methods.pcw import PCW
from lm_eval_icl.prompts.layouts import Pattern, before, same


@dataclass(frozen=True)
class Star(PCW):
    """Star attention: a demonstration sees those before it in its window and in the first one.

    The authors run every window after a copy of the first window, at the first window's positions,
    and drop the copy's keys and values, which equal those of the first window. This mask is the
    same computation. Query and continuation see all windows (phase 2). Positions are sequential.
    Not invariant: the first window is special.

    Args:
        window_size: how many demonstrations share a window. (The authors count tokens: a quarter of
            the context.)
    """

    treats_demonstrations_alike = False
    positions: Positions = "sequential"

    def pattern(self, n: int) -> Pattern:
        windows = [i // self.window_size for i in range(n)]
        sees = same(windows)
        sees[:, : self.window_size] = True
        return Pattern(before(n) & sees, windows=windows)
