"""Deep-Thinking: demonstrations that are read several times.

"Iterative Forward Tuning Boosts In-Context Learning in Language Models" (ACL 2024).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from lm_eval_icl.declared import Positive
from lm_eval_icl.inference.memory import (
    KeyValues,
    Memory,
    causal_pass,
    encode_all,
    kept_of,
    masked_pass,
)
from lm_eval_icl.methods.base import Passes, Positions
from lm_eval_icl.methods.plain import Plain
from lm_eval_icl.methods.stepwise import FromLayout
from lm_eval_icl.prompts.layouts import Layout
from lm_eval_icl.prompts.tokens import Context, Ids, TokenizedPrompt


@dataclass(frozen=True)
class DeepThink(FromLayout):
    """Deep-Thinking: the demonstrations run T times, which refines their keys and values.

    Pass 1 is plain ICL. In pass t, the context is run again on the memory of pass t-1 (Eq. 3; at
    positions L..2L-1 for a context of L tokens), and the memory is moved towards the keys and
    values of pass t by the gate eta (Eq. 4). Queries then attend to the memory of pass T as if it
    were the context (Eq. 6).

    Other layouts than that of `icl` are not in the paper. Pass 1 is then the method `layout`, and
    the later passes run its row again, with its mask, on the memory of the whole row. If a token
    attends only to the entries of tokens that it attends to in pass 1 (`reads="layout"`), no other
    tokens influence it in T passes than in one pass: an invariant method stays invariant, and a
    method without leakage stays without leakage.

    Args:
        positions: "layout" for the positions of the method of pass 1.
        layout: the name of the method of pass 1. Its memory must come from a single forward pass
            under a mask.
        reads: the entries that the tokens of the passes 2..T attend to. "all": all entries that
            queries attend to, as in the paper. "layout": the entries of the tokens that they attend
            to in pass 1. None is "all" for `icl`, and "layout" for other layouts.
        T: the number of iterations, at least 1; T=1 is `icl`. The paper uses 5 if there is no
            development set.
        eta: the gate, in (0, 1].
        momentum: beta of the authors' released code (0.9 there by default), in [0, 1). A step is
            eta times a velocity: keys and values of the pass minus the memory, plus beta times the
            last velocity. 0 is the paper's Eq. 4.
        restart_positions: run the passes 2..T at the positions 0..L-1, for models that have fewer
            than 2L positions.
    """

    counts_memories = "T"
    without_demonstrations = "nothing to think about, evaluated as plain zero-shot"
    overflow_hint = (
        "The passes 2 to T of deepthink reach twice the demonstrations; "
        "restart_positions=True does not. "
    )

    positions: Literal[Positions, "layout"] = "layout"  # type: ignore[assignment]
    T: Positive = 5
    eta: Annotated[float, Field(gt=0, le=1)] = 0.01
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    restart_positions: bool = False
    layout: str = "icl"
    reads: Literal["all", "layout"] | None = None

    def __post_init__(self) -> None:
        self._begin()
        if self.reads is None:
            object.__setattr__(self, "reads", "all" if self.layout == "icl" else "layout")
        super().__post_init__()

    @property
    def needs_mask(self) -> bool:  # type: ignore[override]
        """Whether some token does not see all tokens before it, in the row or in the memory."""
        return self.first.needs_mask or self.reads == "layout"

    @property
    def needs_positions(self) -> bool:
        """Whether pass 1 needs `position_ids`, or the passes 2..T restart at position 0."""
        return super().needs_positions or self.restart_positions

    def passes(
        self, prefix: int, demonstrations: Sequence[int], query: int = 0, answer: int = 0
    ) -> Passes:
        """Pass 1, one layout for all later passes, and the query on the last memory."""
        row = self.first.lay_out(prefix, demonstrations, query, answer)
        if self.T == 1 or not demonstrations:
            return [("", row)]
        first = self.first.lay_out(prefix, demonstrations)
        reads = torch.tensor(first.kept) if self.reads == "all" else None
        again = first.again(0 if self.restart_positions else first.end, reads)
        velocity = "present - M"
        if self.momentum:
            velocity = f"velocity, which decays by {self.momentum:g}"
        title = "pass 2" if self.T == 2 else f"passes 2 to {self.T}, each"
        return [
            ("pass 1: its keys and values are the memory M", first),
            (f"{title}: M += {self.eta:g} ({velocity})", again),
            ("query and answer on the last M", row.take("QA").on_memory(first)),
        ]

    def memories(
        self, model: PreTrainedModel, contexts: Sequence[Context]
    ) -> Iterator[list[Memory]]:
        """The memories of all contexts after each of the T passes.

        Without demonstrations, only the first pass runs.
        """
        firsts = [self.first.row(context) for context in contexts]
        # The next pass also attends to entries that no query attends to.
        whole_rows = [replace(first, kept=(True,) * len(first.blocks)) for first in firsts]
        rows = encode_all(model, whole_rows, [context.tokens for context in contexts])
        yield list(map(kept_of, firsts, rows))
        # A memory is empty if the context's only token was moved to an empty query.
        is_refined = self.T > 1 and bool(contexts[0].demonstrations) and bool(rows[0].layers)
        refined = [_Refined(memory) for memory in rows] if is_refined else []
        layouts = []
        for context in contexts if is_refined else ():
            [_, (_, again), _] = self.passes(len(context.prefix), context.lengths)
            layouts.append(again)
        for _ in range(2, self.T + 1):
            if is_refined:
                for memory, present in zip(refined, self._again(model, rows, layouts), strict=True):
                    memory.step(present, self.eta, self.momentum)
                rows = [memory.rounded() for memory in refined]
            yield list(map(kept_of, firsts, rows))

    def _again(
        self, model: PreTrainedModel, memories: Sequence[Memory], layouts: Sequence[Layout]
    ) -> list[KeyValues]:
        """The keys and values of one more pass over all contexts, each on its memory."""
        if len(memories) > 1 or self.needs_mask:
            return masked_pass(model, [memory.tokens for memory in memories], layouts, memories)
        [memory] = memories
        # None stands for consecutive positions after the memory, which the model computes by
        # itself.
        positions = None
        if self.restart_positions or self.positions != "sequential":
            positions = layouts[0].positions[len(memory) :]
        return [causal_pass(model, memory.tokens, memory, positions)]

    def by_definition(self, plain: Plain, prompt: TokenizedPrompt, answer: Ids) -> list[Tensor]:
        """The memory of all tokens after T passes, then the query on the entries that are kept."""
        context = prompt.context
        sizes = (len(context.prefix), context.lengths, len(prompt.query), len(answer))
        *before, last = [layout for _, layout in self.passes(*sizes)]
        row = [*context.tokens, *prompt.query, *answer]
        if not before:
            return [plain.run(last, row)]
        first, again = before
        memory = DynamicCache()
        plain.run(first, row, memory)
        # Keys and values are updated alike. A layer that the model leaves out has none.
        layers: list[Any] = memory.layers
        used = [layer for layer in layers if layer.keys is not None]
        entries = list(product(used, ("keys", "values")))
        wide = torch.promote_types(plain.model.dtype, torch.float32)
        exact = [getattr(*entry).to(wide) for entry in entries]
        velocity: list[Any] = [0.0] * len(entries)
        for _ in range(1, self.T):
            plain.run(again, row, memory)
            for i, entry in enumerate(entries):
                present = getattr(*entry)[:, :, len(first) :]
                velocity[i] = present - exact[i] + self.momentum * velocity[i]
                exact[i] = exact[i] + self.eta * velocity[i]
                setattr(*entry, exact[i].to(present.dtype))
        for entry in entries:
            setattr(*entry, getattr(*entry)[:, :, first.kept_tokens])
        return [plain.run(last, row, memory)]


class _Refined:
    """The keys and values of a context while they are refined, in float32 or wider.

    The steps are small. In half precision, they would be rounded to 0.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._dtype = memory.layers[0][0].dtype
        wide = torch.promote_types(self._dtype, torch.float32)
        # Keys, values, keys, values, ... of all layers, since the update is the same for both.
        self._entries = [entry.to(wide) for entry in chain(*memory.layers)]
        self._velocity: list[Tensor | float] = [0.0] * len(self._entries)

    def step(self, layers: KeyValues, eta: float, momentum: float) -> None:
        """Move the entries towards the keys and values of a pass."""
        present = list(chain(*layers))
        layers.clear()
        for i, entry in enumerate(self._entries):
            # `pop` frees the tensors of the pass one by one, since those of a long context are
            # large.
            velocity = present.pop(0) - entry + momentum * self._velocity[i]
            self._entries[i] = entry + eta * velocity
            if momentum:
                self._velocity[i] = velocity

    def rounded(self) -> Memory:
        """The memory in the model's dtype."""
        entries = [entry.to(self._dtype) for entry in self._entries]
        return replace(self._memory, layers=list(zip(entries[::2], entries[1::2], strict=True)))
