"""GELU in one kernel. transformers computes some variants in steps, each a pass over memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from transformers.activations import FastGELUActivation, NewGELUActivation


@contextmanager
def fused_gelu(model: nn.Module) -> Iterator[None]:
    """Inside this context, torch's kernel computes GELU's tanh approximation.

    It is the same function up to rounding as `gelu_new` and `gelu_fast` of GPT-2, GPT-J, Phi and
    others. Half precision is left as it is, since rounding between steps makes a larger difference
    there.
    """

    def fused(module: nn.Module, x: Tensor) -> Tensor:
        if x.dtype in (torch.float32, torch.float64):
            return nn.functional.gelu(x, approximate="tanh")
        return type(module).forward(module, x)

    # Accelerate, or an enclosing `fused_gelu`, has patched a module whose instance has a `forward`.
    kinds = (NewGELUActivation, FastGELUActivation)
    unpatched = [m for m in model.modules() if type(m) in kinds and "forward" not in vars(m)]
    for module in unpatched:
        module.forward = partial(fused, module)
    try:
        yield
    finally:
        for module in unpatched:
            del module.forward
