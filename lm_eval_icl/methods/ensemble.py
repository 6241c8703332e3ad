"""Demonstration ensembling.

"Exploring Demonstration Ensembling for In-context Learning" (Khalifa et al., 2023).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from lm_eval_icl.inference.devices import to_device
from lm_eval_icl.methods.several import Weighted

Weights = Annotated[tuple[Annotated[float, Field(gt=0)], ...], Field(min_length=1)]


@dataclass(frozen=True)
class Ensemble(Weighted):
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

    def mixed(self, logprobs: Tensor) -> Tensor:
        weights = self.weights or [1.0] * logprobs.shape[1]
        shares = torch.tensor([weight / sum(weights) for weight in weights], dtype=logprobs.dtype)
        ones = [1] * (logprobs.dim() - 2)
        shares = to_device(shares, logprobs.device).view(-1, *ones)
        if self.combine == "poe":
            return (logprobs * shares).sum(1)
        weighted = logprobs + shares.log()
        return weighted.logsumexp(1) if self.combine == "moe" else weighted.amax(1)
