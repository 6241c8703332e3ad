"""Plain in-context learning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from transformers import PreTrainedModel

from lm_eval_icl.memory import Memory, causal_pass
from lm_eval_icl.tokens import Context


@dataclass(frozen=True)
class ICL:
    """Plain in-context learning: the model's own causal attention, positions in sequence.

    The memory is the keys and values of one ordinary pass over prefix and demonstrations, so every
    log-likelihood is the one that lm-eval's `hf` computes from the joined prompt (the baseline, "ICL", of
    Deep-Thinking, section 2, and "AR ICL" of InvICL).
    """

    # Said of a task without demonstrations, where the method then does nothing of its own.
    without_demonstrations: ClassVar[str] = ""
    # What helps where encoding a context takes more positions than the prompt itself.
    reach_hint: ClassVar[str] = ""

    def reach(self, context: Context) -> int:
        """How many positions encoding a context takes."""
        return len(context.tokens)

    def encode(self, model: PreTrainedModel, context: Context) -> Memory:
        """One causal pass over the context."""
        tokens = context.tokens
        return Memory(causal_pass(model, tokens) if tokens else [], tokens, query_start=len(tokens))
