"""APE: Adaptive Parallel Encoding, Faster and Longer Context-Augmented Generation (Yang et al., ICLR 2025)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from transformers import PreTrainedModel

from lm_eval_icl.inference.attention import Reading
from lm_eval_icl.inference.memory import Memory
from lm_eval_icl.methods.base import number
from lm_eval_icl.methods.pcw import PCW
from lm_eval_icl.prompts.tokens import Context

Factor = Annotated[float, number("from 0.001 to 1000", lambda value: 1e-3 <= value <= 1e3)]


@dataclass(frozen=True)
class APE(PCW):
    """Adaptive parallel encoding: `pcw`, in which attention to the demonstrations has a temperature and a scale.

    The demonstrations are encoded as in `pcw`, each after the prefix alone. A token of query or continuation has scores
    s_C for all demonstrations, and s_O for the prefix and the tokens of query and continuation up to itself. Then

        a = temperature * scale * LSE(s_C / temperature) + log weight        b = LSE(s_O)
        output = softmax([a, b]) @ [softmax(s_C / temperature) V_C, softmax(s_O) V_O]

    The defaults are those of the authors' released module. With 1, 1, 1 it is `pcw`.

    Args:
        temperature: T. All three arguments are from 0.001 to 1000; float32 does not allow for more.
        scale: S. The factor of the demonstrations' log-sum-exp is S * T.
        weight: the factor of the demonstrations' sum of exponentials.
    """

    trained_under = "pcw"
    reads_in_parts = True
    encodes_by_layout = True

    temperature: Factor = 0.9
    scale: Factor = 0.9
    weight: Factor = 1.0

    def encode(self, model: PreTrainedModel, contexts: Sequence[Context]) -> list[Memory]:
        """The memories of `pcw`, divided by `read`."""
        return list(map(self.read, super().encode(model, contexts), contexts))

    def reading(self, context: Context) -> tuple[int, Reading] | None:
        """The demonstrations are read with temperature, scale and weight."""
        reading = Reading(self.temperature, self.scale * self.temperature, math.log(self.weight))
        return (len(context.prefix), reading) if any(context.lengths) else None
