"""The last layer, run for predicting tokens alone, gives the same scores as the whole layer."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from lm_eval_icl.inference.caches import cache_arguments, cache_name
from lm_eval_icl.inference.memory import Memory, causal_pass
from lm_eval_icl.inference.residual import last_layer_at, transformer_layers
from lm_eval_icl.inference.scoring import score_packed
from lm_eval_icl.inference.trials import probe
from tests import tiny

# Models with a window of 24 run packed up to that many tokens.
CONTEXT = [5, 17, 29, 41, 53, 65, 77]
PAIRS = [
    ([11, 23, 35], [47, 59, 71]),
    ([11, 23, 35], [83]),
    ([11, 24], [47, 60]),
    ([99, 98, 97, 96], [95]),
]
ARCHITECTURES = tiny.slow_but(
    ["gpt2", "llama", "opt"], ["gpt2", "llama", "opt", "gemma2_window", "llama3"]
)


def memory_of(model, context=CONTEXT):
    return Memory(causal_pass(model, context) if context else [], context, len(context))


@torch.no_grad()
def scores(model, context, trim):
    work = [(memory_of(model, context), PAIRS)]
    return list(score_packed(model, work, torch.float64, trim_last_layer=trim))


@pytest.mark.parametrize("context", [CONTEXT, []], ids=["memory", "no memory"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_scores_are_those_of_the_whole_layer(name, context):
    model = tiny.build(name, torch.float64)
    whole = scores(model, context, False)
    trimmed = scores(model, context, True)
    assert [greedy for _, greedy in trimmed] == [greedy for _, greedy in whole]
    # Eager attention's softmax rounds to float32.
    error = 1e-12 if model.config._attn_implementation == "sdpa" else 1e-5
    for (score, _), (expected, _) in zip(trimmed, whole, strict=True):
        assert score == pytest.approx(expected, abs=error, rel=0)


@torch.no_grad()
def test_the_feed_forward_network_of_the_last_layer_sees_predicting_tokens_alone():
    model = tiny.build("llama")
    lengths: list[list[int]] = [[], []]
    for layer, seen in zip(transformer_layers(model)[-2:], lengths, strict=True):
        layer.mlp.register_forward_hook(
            lambda _, args, output, to=seen: to.append(args[0].shape[1])
        )
    scores(model, CONTEXT, True)
    # First the context. Then 11 tokens: "11 23 35 47 59", "24 47" after the same 11, and
    # "99 98 97 96". Of these, 35, 47 and 59, 24 and 47, and 96 predict.
    assert lengths == [[7, 11], [7, 6]]


@torch.no_grad()
def test_a_pass_leaves_model_and_cache_as_they_were():
    model = tiny.build("gpt2", torch.float64)
    layer = transformer_layers(model)[-1]
    before = scores(model, CONTEXT, False)
    scores(model, CONTEXT, True)
    assert scores(model, CONTEXT, False) == before
    assert "forward" not in vars(layer)
    cache = memory_of(model).cache()

    class Broken(nn.Module):
        def forward(self, *args, **kwargs):
            raise RuntimeError("broken")

    layer.attn = Broken()
    with (
        pytest.raises(RuntimeError, match="broken"),
        last_layer_at(model, cache, torch.tensor([0]), 1),
    ):
        model(input_ids=torch.tensor([[3]]), **cache_arguments(model, cache))
    assert "forward" not in vars(layer) and "update" not in vars(cache)

    layer.forward = mine = lambda *args, **kwargs: None  # as accelerate does
    with last_layer_at(model, cache, torch.tensor([0]), 1):
        assert layer.forward is not mine
    assert layer.forward is mine


@torch.no_grad()
def test_a_pass_keeps_no_memory_alive():
    model = tiny.build("gpt2")
    memory = memory_of(model)
    keys = weakref.ref(memory.layers[0][0])
    gc.collect()
    gc.disable()
    try:
        score_packed(model, [(memory, PAIRS)], trim_last_layer=True)
        del memory
        assert keys() is None
    finally:
        gc.enable()


@torch.no_grad()
def test_a_layer_that_adds_nothing_to_the_cache_runs_as_a_whole():
    """Some models share keys and values between layers."""
    model = tiny.build("llama", torch.float64)
    attention = transformer_layers(model)[-1].self_attn
    forward = attention.forward
    attention.forward = lambda *args, **kwargs: forward(
        *args, **{**kwargs, cache_name(model): None}
    )
    assert scores(model, [], True) == scores(model, [], False)


@torch.no_grad()
def test_a_layer_that_tells_tokens_by_their_index_is_not_trimmed():
    """It obeys masks and positions, but gives other results for fewer tokens: a trial shows it."""
    model = tiny.build("llama")
    assert probe(model).can_trim

    def count(module: nn.Module, args: tuple[torch.Tensor]) -> torch.Tensor:
        # This is so little that the model still continues from its cache as in one pass.
        return args[0] + 1e-4 * torch.arange(args[0].shape[1])[:, None]

    transformer_layers(model)[-1].mlp.register_forward_pre_hook(count)
    can = probe(model)
    assert can.can_pack and not can.can_trim
