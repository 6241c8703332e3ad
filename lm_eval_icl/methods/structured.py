"""Structured prompting: Scaling In-Context Learning to 1,000 Examples (Hao et al., 2022)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from pydantic import Field

from lm_eval_icl.inference.attention import Reading
from lm_eval_icl.methods.parts import InParts
from lm_eval_icl.prompts.layouts import Layout
from lm_eval_icl.prompts.tokens import Context


@dataclass(frozen=True)
class Structured(InParts):
    """Structured prompting: windows as in `pcw`, and M times the weight for query and continuation.

    For M windows, a token of query or continuation gives the weight exp(s) to an entry of the
    memory with the score s, and M exp(s) to a token of query or continuation (rescaled attention).
    To give the memory the weight 1/M is the same. This is done here, by a shift of its log-sum-exp.
    Windows are aligned at their ends. With one window it is `icl`.

    Args:
        window_size: as for `pcw`. The paper's windows have many demonstrations.
        factor: M, above 0. None for the number of windows.
        align: "right": all windows end at the same position. "left": all windows begin at the same
            position, as in `pcw`. It has an effect on symmetric positions only.
    """

    factor: Annotated[float, Field(gt=0)] | None = None
    align: Literal["right", "left"] = "right"

    def lay_out(
        self, prefix: int, demonstrations: Sequence[int], query: int = 0, answer: int = 0
    ) -> Layout:
        """The layout of `pcw`, with all windows moved so that they end with the longest window."""
        row = super().lay_out(prefix, demonstrations, query, answer)
        if self.positions != "symmetric" or self.align == "left":
            return row
        lengths = list(demonstrations) * self.repeat
        size = self.window_size
        windows = [sum(lengths[first : first + size]) for first in range(0, len(lengths), size)]
        blocks = []
        for block in row.blocks:
            if block.name.startswith("D"):
                window = (int(block.name[1:]) - 1) // size
                shift = max(windows) - windows[window]
                block = replace(block, start=block.start + shift)
            blocks.append(block)
        return replace(row, blocks=tuple(blocks))

    def reading(self, context: Context) -> tuple[int, Reading] | None:
        """The whole memory is read with the weight 1/M."""
        windows = math.ceil(len(context.demonstrations) * self.repeat / self.window_size)
        factor = windows if self.factor is None else self.factor
        if not windows or factor == 1:
            return None
        return 0, Reading(log_weight=-math.log(factor))
