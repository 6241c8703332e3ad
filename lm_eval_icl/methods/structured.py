"""Structured prompting: Scaling In-Context Learning to 1,000 Examples (Hao et al., 2022)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from transformers import PreTrainedModel

from lm_eval_icl.inference.attention import Reading
from lm_eval_icl.inference.memory import Memory
from lm_eval_icl.methods.base import must, number, optional
from lm_eval_icl.methods.pcw import PCW
from lm_eval_icl.prompts.layouts import Block, Layout
from lm_eval_icl.prompts.tokens import Context


@dataclass(frozen=True)
class Structured(PCW):
    """Structured prompting: windows as in `pcw`, and M times the weight for the tokens of query and continuation.

    For M windows, a token of query or continuation gives the weight exp(s) to an entry of the memory with the score s,
    and M exp(s) to a token of query or continuation (rescaled attention). To give the memory the weight 1/M is the
    same; this is done here, by a shift of its log-sum-exp. Windows are aligned at their ends. With one window it is
    `icl`.

    Args:
        window_size: as for `pcw`. The paper's windows have many demonstrations.
        factor: M, above 0; None for the number of windows.
        align: "right": all windows end at the same position; "left": all windows begin at the same position, as in
            `pcw`. It has an effect on symmetric positions only.
    """

    trained_under = "pcw"
    reads_in_parts = True

    factor: Annotated[float | None, optional(number("above 0", lambda value: value > 0))] = None
    align: Annotated[str, must("right or left", lambda value: value in ("right", "left"))] = "right"

    def layout(
        self, prefix: int, demonstrations: Sequence[int], query: int = 0, answer: int = 0
    ) -> Layout:
        """The layout of `pcw`, with all windows moved so that they end with the longest window."""
        row = super().layout(prefix, demonstrations, query, answer)
        if self.positions != "symmetric" or self.align == "left":
            return row
        lengths, size = [*demonstrations] * self.repeat, self.window_size
        windows = [sum(lengths[first : first + size]) for first in range(0, len(lengths), size)]

        def moved(block: Block) -> Block:
            if not block.name.startswith("D"):
                return block
            length = windows[(int(block.name[1:]) - 1) // size]
            return replace(block, start=block.start + max(windows) - length)

        return replace(row, blocks=tuple(map(moved, row.blocks)))

    def encode(self, model: PreTrainedModel, contexts: Sequence[Context]) -> list[Memory]:
        """The memories of `pcw`, divided by `read`."""
        return list(map(self.read, super().encode(model, contexts), contexts))

    def reading(self, context: Context) -> tuple[int, Reading] | None:
        """The whole memory is read with the weight 1/M."""
        windows = math.ceil(len(context.demonstrations) * self.repeat / self.window_size)
        factor = (windows if self.factor is None else self.factor) if windows else 1
        return None if factor == 1 else (0, Reading(log_weight=-math.log(factor)))
