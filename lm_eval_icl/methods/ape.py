"""APE: adaptive parallel encoding.

"APE: Faster and Longer Context-Augmented Generation via Adaptive Parallel Encoding" (Yang et al.,
ICLR 2025).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from lm_eval_icl.inference.attention import Reading
from lm_eval_icl.methods.parts import InParts
from lm_eval_icl.prompts.tokens import Context

Factor = Annotated[float, Field(ge=1e-3, le=1000)]


@dataclass(frozen=True)
class APE(InParts):
    """Adaptive parallel encoding: `pcw`, whose demonstrations are read with a temperature and a
    scale.

    The demonstrations are encoded as in `pcw`, each after the prefix alone. A token of query or
    continuation has scores s_C for all demonstrations, and s_O for the prefix and the tokens of
    query and continuation up to itself. Then

        a = temperature * scale * LSE(s_C / temperature) + log weight        b = LSE(s_O)
        output = softmax([a, b]) @ [softmax(s_C / temperature) V_C, softmax(s_O) V_O]

    The defaults are those of the authors' released module. With 1, 1, 1 it is `pcw`.

    Args:
        temperature: T. All three arguments are from 0.001 to 1000. float32 does not allow for more.
        scale: S. The factor of the demonstrations' log-sum-exp is S * T.
        weight: the factor of the demonstrations' sum of exponentials.
    """

    temperature: Factor = 0.9
    scale: Factor = 0.9
    weight: Factor = 1.0

    def reading(self, context: Context) -> tuple[int, Reading] | None:
        """The demonstrations are read with temperature, scale and weight."""
        if not any(context.lengths):
            return None
        factor = self.scale * self.temperature
        return len(context.prefix), Reading(self.temperature, factor, math.log(self.weight))
