"""Activation functions that transformers computes step by step, each step a pass over memory, in one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import FastGELUActivation, NewGELUActivation


@contextmanager
def fused_gelu(model: PreTrainedModel) -> Iterator[None]:
    """While it lasts, GELU's tanh approximation (`gelu_new` and `gelu_fast` of GPT-2, GPT-J, Phi and others) is
    torch's own, the same function to the last digits.

    Not in half precision, where the roundings between the steps are no longer last digits.
    """

    def fused(module: nn.Module, x: Tensor) -> Tensor:
        if x.dtype in (torch.float32, torch.float64):
            return nn.functional.gelu(x, approximate="tanh")
        return type(module).forward(module, x)

    # One with a forward of its own already is another's (accelerate's), or ours.
    found = [m for m in model.modules() if type(m) in (NewGELUActivation, FastGELUActivation)]
    found = [m for m in found if "forward" not in vars(m)]
    for module in found:
        module.forward = partial(fused, module)
    try:
        yield
    finally:
        for module in found:
            del module.forward
