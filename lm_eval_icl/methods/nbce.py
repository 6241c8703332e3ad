"""NBCE: Naive Bayes-based Context Extension for Large Language Models (Su et al., NAACL 2024)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from lm_eval_icl.methods.several import Several
from lm_eval_icl.prompts.tokens import Context

Weight = Annotated[float, Field(ge=0)]


@dataclass(frozen=True)
class NBCE(Several):
    """Naive-Bayes context extension: the window with the least entropy predicts.

    With the log-probabilities l_w of the next token after window w, l_0 after the prefix alone, and
    the entropies H_w = -sum exp(l_w) clip(l_w, -100, 0) of the distributions truncated to their
    nucleus,

        k = argmin_w H_w, where the entropy of the window chosen for the token before is first
        lowered by eta z = (1 + beta) l_k - beta l_0 where l_0 > -100, and l_k elsewhere

    The next token's distribution is the softmax of z. If entropies are equal, the first window is
    chosen.

    Args:
        beta: the weight of the prediction without demonstrations, 0 or more.
        eta: by how much the entropy of the window chosen for the token before is lowered, 0 or
            more.
        top_p: the probability of the nucleus, above 0. 1 for no truncation.
    """

    beta: Weight = 0.25
    eta: Weight = 0.1
    top_p: Annotated[float, Field(gt=0, le=1)] = 0.95

    def contexts(self, context: Context) -> list[Context]:
        """One context for each window, and one with the prefix alone."""
        windows = super().contexts(context)
        return [*windows, Context(context.prefix, ())] if context.demonstrations else windows

    def next_token(self, logprobs: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """The next token's distribution, and the number of the chosen window as the state."""
        texts = torch.arange(len(logprobs), device=logprobs.device)
        entropy = self._entropy(logprobs[:, :-1])
        if state is not None:
            entropy[texts, state] -= self.eta
        state = entropy.argmin(-1)
        chosen = logprobs[texts, state]
        without = logprobs[:, -1]
        contrast = (1 + self.beta) * chosen - self.beta * without
        return torch.where(without > -100, contrast, chosen).log_softmax(-1), state

    def _entropy(self, logprobs: Tensor) -> Tensor:
        """The entropies of distributions truncated to their nucleus: [..., vocabulary] -> [...]."""
        if self.top_p < 1:
            ascending, tokens = logprobs.sort(-1)
            outside = ascending.exp().cumsum(-1) <= 1 - self.top_p
            outside[..., -1] = False
            by_token = torch.zeros_like(outside).scatter(-1, tokens, outside)
            logprobs = logprobs.masked_fill(by_token, -math.inf)
        return -(logprobs.exp() * logprobs.clip(-100, 0)).sum(-1)
