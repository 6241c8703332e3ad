"""NoPE: no positional information.

"The Impact of Positional Encoding on Length Generalization in Transformers" (Kazemnejad et al.,
2023).
"""

from __future__ import annotations

from dataclasses import dataclass

from lm_eval_icl.methods.base import Positions
from lm_eval_icl.methods.icl import ICL


@dataclass(frozen=True)
class NoPE(ICL):
    """Plain in-context learning without positional information: `icl` with `positions=none`.

    Learned position embeddings are replaced by zeros, and rotary embeddings are evaluated at
    position 0, for demonstrations, query and continuation alike. The causal mask still depends on
    the order of the demonstrations, so the method is not invariant (InvICL, section 5.2, footnote
    2).
    """

    needs_training = True
    positions: Positions = "none"
