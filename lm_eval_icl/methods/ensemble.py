"""Demonstration ensembling: Exploring Demonstration Ensembling for In-context Learning (Khalifa et al., 2023)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from lm_eval_icl.methods.base import must
from lm_eval_icl.methods.several import Several

Combine = Annotated[str, must("poe, moe or max", lambda value: value in ("poe", "moe", "max"))]


@dataclass(frozen=True)
class Ensemble(Several):
    """An ensemble of windows: what is predicted behind each window's memory is combined.

    With the log-likelihoods s_b of an answer behind the memory b of B, the answer's is

        poe: sum_b s_b / B        moe: log sum_b (exp s_b) / B        max: max_b s_b - log B

    Every request is combined by itself: nothing is normalized over the options of a document, which a model does not
    see. Where text is generated, and for whether an answer is the greedy one, the distributions of the next token are
    combined so, and normalized.

    Args:
        combine: "poe" (product of experts), "moe" (mixture of experts) or "max".
    """

    combine: Combine = "poe"

    def next_token(self, logprobs: Tensor, state: Tensor | None) -> tuple[Tensor, None]:
        return self._joined(logprobs).log_softmax(-1), None

    def score(self, combined: Tensor, logprobs: Tensor, answer: Tensor) -> Tensor:
        behind_each = logprobs.gather(-1, answer.expand(len(logprobs), -1)[..., None])[..., 0].sum(-1)
        return self._joined(behind_each[None]).squeeze()

    def _joined(self, numbers: Tensor) -> Tensor:
        """Combine log-probabilities, [texts, memories, ...] -> [texts, ...]."""
        if self.combine == "poe":
            return numbers.mean(1)
        weighted = numbers - math.log(numbers.shape[1])
        return weighted.logsumexp(1) if self.combine == "moe" else weighted.amax(1)
