"""GELU in one kernel: transformers computes some variants step by step, with a pass over memory for each step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from transformers.activations import FastGELUActivation, NewGELUActivation


@contextmanager
def fused_gelu(model: nn.Module) -> Iterator[None]:
    """Inside this context, GELU's tanh approximation (`gelu_new` and `gelu_fast` of GPT-2, GPT-J, Phi and others) is
    computed by torch's kernel, which is the same function up to rounding.

    Half precision is left as it is, since the rounding between the steps makes a larger difference there.
    """

    def fused(module: nn.Module, x: Tensor) -> Tensor:
        if x.dtype in (torch.float32, torch.float64):
            return nn.functional.gelu(x, approximate="tanh")
        return type(module).forward(module, x)

    # A module that has `forward` as an instance attribute was patched by accelerate, or by an enclosing `fused_gelu`.
    kinds = (NewGELUActivation, FastGELUActivation)
    unpatched = [m for m in model.modules() if type(m) in kinds and "forward" not in vars(m)]
    for module in unpatched:
        module.forward = partial(fused, module)
    try:
        yield
    finally:
        for module in unpatched:
            del module.forward
