"""CT-KV: Context Tuning for In-Context Optimization (Lu et al., 2025)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lm_eval_icl.inference.memory import Memory
from lm_eval_icl.methods.learned import LearnedMemory, Probability, keeping


@dataclass(frozen=True)
class CTKV(LearnedMemory):
    """Context tuning: the keys and values of the demonstrations are learned.

    All keys and values of plain ICL, as they are cached, are the parameters. A step is one epoch
    over the demonstrations (see `LearnedMemory`), each left out of the memory that it is predicted
    from, and each entry dropped with a small probability. Queries see the whole memory.
    """

    token_dropout: Probability = 0.05

    def parameters(self, model: PreTrainedModel, memory: Memory) -> list[Tensor]:
        entries = list(chain(*memory.layers))
        # In half precision, most steps would be rounded to nothing.
        return [entry.to(torch.promote_types(entry.dtype, torch.float32)) for entry in entries]

    def memory(
        self, model: PreTrainedModel, memory: Memory, parameters: Sequence[Tensor], seen: Tensor
    ) -> Memory:
        dtype = memory.layers[0][0].dtype
        # Copies, since a step changes the parameters in place.
        entries = [entry.to(dtype, copy=True) for entry in parameters]
        layers = list(zip(entries[::2], entries[1::2], strict=True))
        return keeping(replace(memory, layers=layers), seen)
