"""A model's learned positions, and prompts that need more of them."""

from __future__ import annotations

import pytest
import torch

from lm_eval_icl.errors import InputError
from lm_eval_icl.inference import memory
from lm_eval_icl.inference.memory import causal_pass, read_causally
from lm_eval_icl.inference.positions import check_length, no_positions, position_switch
from tests import tiny


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_a_length_above_the_learned_positions_is_refused(name):
    model = tiny.build(name)
    known = model.config.max_position_embeddings
    check_length(model, known)
    with pytest.raises(InputError, match=f"max_length={known + 1}: .* for {known} positions only"):
        check_length(model, known + 1)


def test_rotary_embeddings_have_no_such_limit():
    model = tiny.build("llama")
    check_length(model, model.config.max_position_embeddings + 1)


def changing_angles(kind):
    """A model whose rotary angles change beyond 16 positions."""
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 6, "long_factor": [4.0] * 6}
        rope["original_max_position_embeddings"] = 16
    longest = 16 if kind == "dynamic" else 64
    return tiny.build("llama", torch.float64, rope_parameters=rope, max_position_embeddings=longest)


def test_where_rotary_angles_change():
    assert position_switch(changing_angles("dynamic")) == (16, True)
    assert position_switch(changing_angles("longrope")) == (16, False)
    assert position_switch(tiny.build("llama")) is None


@torch.no_grad()
def test_given_positions_that_cross_the_change_run_at_once(monkeypatch):
    """In pieces, the first ones would have the angles of short rows."""
    model = changing_angles("longrope")
    before = read_causally(model, [5, 6, 7])
    tokens = [10, 11, 12, 13, 14, 15, 16]
    positions = torch.arange(12, 19)
    whole = causal_pass(model, tokens, before, positions)
    monkeypatch.setattr(memory, "PIECE", 3)
    in_pieces = causal_pass(model, tokens, before, positions)
    for (keys, values), (whole_keys, whole_values) in zip(in_pieces, whole, strict=True):
        assert torch.equal(keys, whole_keys) and torch.equal(values, whole_values)


@torch.no_grad()
def test_without_positions_and_cache_a_row_is_one_sequence():
    model = tiny.build("llama", torch.float64)
    ids = torch.tensor([[5, 6, 7, 8]])
    with no_positions(model, []):
        alone = model(ids, use_cache=False).logits
        masked = model(ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
        other = model(torch.tensor([[9, 6, 7, 8]]), use_cache=False).logits
    assert torch.equal(alone, masked)
    assert (alone[0, -1] - other[0, -1]).abs().max() > 1e-6
