"""Deep-Thinking: Iterative Forward Tuning Boosts In-Context Learning in Language Models (ACL 2024)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lm_eval_icl.errors import is_number
from lm_eval_icl.layouts import Layout
from lm_eval_icl.memory import KeyValues, Memory, causal_pass
from lm_eval_icl.methods.icl import ICL
from lm_eval_icl.methods.method import Extent
from lm_eval_icl.tokens import Context


@dataclass(frozen=True)
class DeepThink(ICL):
    """Deep-Thinking: the demonstrations run through the model T times, refining their keys and values.

    Pass 1 is plain ICL. In pass t the context runs again behind the memory of pass t-1 (Eq. 3, positions
    L..2L-1 for a context of L tokens), and the memory moves towards the present keys and values by the
    gate eta (Eq. 4). Queries then attend the memory of pass T as if it were the context (Eq. 6).

    Args:
        T: iterations, at least 1; T=1 is `icl`. The paper's setting without a development set is 5.
        eta: the gate, in (0, 1].
        momentum: beta of the authors' released code, in [0, 1): the step is a velocity that starts as the
            first difference and decays by beta (0.9 there by default). 0 is the paper's Eq. 4.
        restart_positions: run the passes 2..T at the positions 0..L-1, for models whose positions end
            before 2L.

    Raises:
        InputError: an argument is outside its range.
    """

    without_demonstrations = "nothing to think about, evaluated as plain zero-shot"
    reach_hint = "The passes 2..T of deepthink reach twice the demonstrations; restart_positions=True does not. "

    T: int = 5
    eta: float = 0.01
    momentum: float = 0.0
    restart_positions: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_whole("T")
        self._check("eta", is_number(self.eta) and 0 < self.eta <= 1, "a number above 0 and at most 1")
        self._check("momentum", is_number(self.momentum) and 0 <= self.momentum < 1, "a number from 0 to below 1")
        self._check("restart_positions", isinstance(self.restart_positions, bool), "True or False")

    @property
    def places(self) -> bool:
        """Also where later passes restart."""
        return super().places or self.restart_positions

    def extent(self, context: Context) -> Extent:
        """Twice the positions where the passes 2..T run behind the memory."""
        once = super().extent(context)
        if self.T == 1 or self.restart_positions or not context.demonstrations:
            return once
        return replace(once, reach=once.query_start + once.reach)

    def _again(self, context: Layout) -> Tensor:
        """The positions of a context's tokens in the passes 2..T."""
        return context.positions + (0 if self.restart_positions else context.end)

    def passes(
        self, context: Context, query: tuple[int, ...] = (), answer: tuple[int, ...] = ()
    ) -> list[tuple[str, Layout]]:
        """Pass 1, the passes behind the memory, which are all alike, and the query on the memory."""
        row = self.layout(context, query, answer)
        if self.T == 1 or not context.demonstrations:
            return [("", row)]
        first = self.layout(context)
        length = len(first.tokens)
        behind = replace(
            first,
            tokens=first.tokens * 2,
            positions=torch.cat([first.positions, self._again(first)]),
            sees=torch.cat([torch.ones_like(first.sees), first.sees], dim=1).repeat(2, 1),
            kept=list(range(2 * length)),
            blocks=[("M", length), *first.blocks],
        )
        last = replace(row, blocks=[("M", length), *row.blocks[len(first.blocks) :]])
        for layout in (behind, last):
            layout.sees[:length] = False
        again = "pass 2" if self.T == 2 else f"passes 2 to {self.T}, each"
        velocity = "present - M" if not self.momentum else f"velocity, which decays by {self.momentum:g}"
        return [
            ("pass 1: its keys and values are the memory M", first),
            (f"{again}: M += {self.eta:g} ({velocity})", behind),
            ("query and answer on the last M", last),
        ]

    def encode(self, model: PreTrainedModel, context: Context) -> Memory:
        """T passes over the context; one if there is no demonstration to think about."""
        memory = super().encode(model, context)
        if not (context.demonstrations and memory.layers):  # the one token of a context may have gone to the query
            return memory
        # In sequence behind the memory, as the model counts by itself, or where the layout puts them.
        positions = None
        if self.restart_positions or self.positions != "sequential":
            positions = self._again(self.layout(context))
        # The steps are small: kept in a model's half precision they would be rounded away.
        dtype = memory.layers[0][0].dtype
        history = [entry.to(torch.promote_types(dtype, torch.float32)) for entry in _flat(memory.layers)]
        velocity: list[Tensor | float] = [0.0] * len(history)
        for _ in range(2, self.T + 1):
            # In place, and nothing kept of a pass: the entries of a long context take much room.
            for i, new in enumerate(_flat(causal_pass(model, memory.tokens, memory, positions))):
                step = new - history[i] + self.momentum * velocity[i]
                history[i] += self.eta * step
                if self.momentum:
                    velocity[i] = step
            refined = [entry.to(dtype) for entry in history]
            memory = replace(memory, layers=list(zip(refined[::2], refined[1::2], strict=True)))
        return memory


def _flat(layers: KeyValues) -> list[Tensor]:
    """keys, values, keys, values, ... of all layers: the update treats them alike."""
    return [entry for layer in layers for entry in layer]
