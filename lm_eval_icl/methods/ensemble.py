"""Demonstration ensembling.

"Exploring Demonstration Ensembling for In-context Learning" (Khalifa et al., 2023).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from lm_eval_icl.errors import InputError
from lm_eval_icl.inference.devices import to_device
from lm_eval_icl.methods.several import Several
from lm_eval_icl.prompts.tokens import Context

Weights = Annotated[tuple[Annotated[float, Field(gt=0)], ...], Field(min_length=1)]


@dataclass(frozen=True)
class Ensemble(Several):
    """An ensemble of windows: the predictions on the memories of all windows are combined.

    With the log-likelihoods s_b of an answer on memory b and weights v_b that sum to 1, the
    answer's log-likelihood is

        poe: sum_b v_b s_b        moe: log sum_b v_b exp s_b        max: max_b (log v_b + s_b)

    Every request is combined by itself. Nothing is normalized over the options of a document, since
    a model does not see them. To generate text, and to decide whether an answer is the greedy one,
    the distributions of the next token are combined in the same way, and normalized.

    Args:
        combine: "poe" (product of experts), "moe" (mixture of experts) or "max".
        weights: a number above 0 for each window, in order, divided by their sum. None for equal
            weights.
    """

    combine: Literal["poe", "moe", "max"] = "poe"
    weights: Weights | None = None

    @property
    def invariant(self) -> bool:
        """Whether every window has one demonstration, and all windows have equal weights."""
        return super().invariant and self.weights is None

    def why_not(self, n: int) -> str:
        """There must be as many weights as windows."""
        windows = math.ceil(n / self.window_size)
        if self.weights is not None and n and len(self.weights) != windows:
            return f"weights: has {len(self.weights)} numbers, and must have {windows}"
        return super().why_not(n)

    def contexts(self, context: Context) -> list[Context]:
        """One context for each window. Each needs a weight, also after some were left out."""
        windows = super().contexts(context)
        if len(windows) > 1 and (why := self.why_not(len(context.demonstrations))):
            raise InputError(f"{self.name}: {why}.")
        return windows

    def next_token(self, logprobs: Tensor, state: Tensor | None) -> tuple[Tensor, None]:
        return self._joined(logprobs).log_softmax(-1), None

    def score(self, combined: Tensor, logprobs: Tensor, answer: Tensor) -> Tensor:
        ids = answer.expand(len(logprobs), -1)[..., None]
        by_memory = logprobs.gather(-1, ids)[..., 0].sum(-1)
        return self._joined(by_memory[None]).squeeze()

    def _joined(self, logprobs: Tensor) -> Tensor:
        """Combine log-probabilities: [texts, memories, ...] -> [texts, ...]."""
        memories = logprobs.shape[1]
        weights = [1.0] * memories
        if self.weights and memories > 1:
            weights = list(self.weights)
        shares = torch.tensor([weight / sum(weights) for weight in weights], dtype=logprobs.dtype)
        ones = [1] * (logprobs.dim() - 2)
        shares = to_device(shares, logprobs.device).view(-1, *ones)
        if self.combine == "poe":
            return (logprobs * shares).sum(1)
        weighted = logprobs + shares.log()
        return weighted.logsumexp(1) if self.combine == "moe" else weighted.amax(1)
