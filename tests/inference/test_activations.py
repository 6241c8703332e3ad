"""GELU in one kernel is transformers' GELU step by step."""

from __future__ import annotations

import pytest
import torch
from transformers.activations import ACT2FN, FastGELUActivation, NewGELUActivation

from lm_eval_icl.inference.gelu import fused_gelu
from tests import tiny

X = torch.cat(
    [
        torch.linspace(-12, 12, 4001, dtype=torch.float64),
        torch.tensor([-6e4, -0.0, 6e4, -torch.inf, torch.inf, torch.nan]),
    ]
)


@pytest.mark.parametrize("name", ["gelu_new", "gelu_fast"])
@pytest.mark.parametrize(
    ("dtype", "error"),
    [(torch.float64, 1e-9), (torch.float32, 1e-6), (torch.float16, 0), (torch.bfloat16, 0)],
)
def test_it_is_the_same_function(name, dtype, error):
    module = ACT2FN[name]
    x = X.to(dtype)
    expected = module(x)
    before = dict(vars(module))
    with fused_gelu(module):
        assert "forward" in vars(module)
        torch.testing.assert_close(module(x), expected, rtol=error, atol=error, equal_nan=True)
    assert dict(vars(module)) == before


@torch.no_grad()
def test_a_models_own_come_back():
    model = tiny.build("gpt2")
    activations = [
        m for m in model.modules() if isinstance(m, (NewGELUActivation, FastGELUActivation))
    ]
    assert activations
    # As accelerate does with a module it moves.
    activations[0].forward = mine = lambda x: x
    with pytest.raises(RuntimeError), fused_gelu(model), fused_gelu(model):
        assert activations[0].forward is mine
        assert all("forward" in vars(m) for m in activations)
        raise RuntimeError
    assert [vars(m).get("forward") for m in activations] == [mine] + [None] * (len(activations) - 1)
