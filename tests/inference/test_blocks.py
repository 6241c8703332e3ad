"""The last block, run only where an answer is read, gives what it gives as a whole."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from lm_eval_icl.inference.blocks import last_block_at, transformer_blocks
from lm_eval_icl.inference.caches import behind_cache, cache_name
from lm_eval_icl.inference.capabilities import probe
from lm_eval_icl.inference.memory import Memory, causal_pass
from lm_eval_icl.inference.scoring import score_packed
from tests import tiny

# Models with a window of 24 run packed up to that many tokens.
CONTEXT = [5, 17, 29, 41, 53, 65, 77]
PAIRS = [([11, 23, 35], [47, 59, 71]), ([11, 23, 35], [83]), ([11, 24], [47, 60]), ([99, 98, 97, 96], [95])]
PACKING = [name for name in tiny.ARCHITECTURES if name not in ("bloom", "qwen3_5", "qwen3_next", "jamba")]
ATTENTIONS = [  # Gemma 2 has no sdpa
    (name, kind) for name in PACKING for kind in ("sdpa", "eager") if not ("gemma2" in name and kind == "sdpa")
]


@torch.no_grad()
def scores(model, context, cut):
    memory = Memory(causal_pass(model, context), context, len(context)) if context else Memory([], [], 0)
    return score_packed(model, [(memory, PAIRS)], torch.float64, cut)


@pytest.mark.parametrize("context", [CONTEXT, []], ids=["memory", "no memory"])
@pytest.mark.parametrize(("name", "attention"), ATTENTIONS)
def test_cut_and_whole_score_alike(name, attention, context):
    model = tiny.build(name, torch.float64)
    model.set_attn_implementation(attention)
    whole, cut = scores(model, context, False), scores(model, context, True)
    assert [greedy for _, greedy in cut] == [greedy for _, greedy in whole]
    # Eager attention's softmax rounds to float32.
    error = 1e-12 if attention == "sdpa" else 1e-5
    assert [score for score, _ in cut] == pytest.approx([score for score, _ in whole], abs=error, rel=0)


@pytest.mark.parametrize("dtype", tiny.slow_but([torch.bfloat16], [torch.float32, torch.bfloat16]))
@pytest.mark.parametrize("name", PACKING)
@torch.no_grad()
def test_all_these_architectures_cut(name, dtype):
    assert probe(tiny.build(name, dtype)).can_trim_last_block


@torch.no_grad()
def test_the_feed_forward_layer_of_the_last_block_sees_predicting_tokens_alone():
    model = tiny.build("llama")
    seen: list[list[int]] = [[], []]
    for which, block in enumerate(list(transformer_blocks(model))[-2:]):
        block.mlp.register_forward_hook(lambda module, args, output, to=seen[which]: to.append(args[0].shape[1]))
    scores(model, CONTEXT, True)
    # First the context. Then 11 tokens, "11 23 35 47 59", "24 47" behind the same 11, and "99 98 97 96", of which 35,
    # 47 and 59, 24 and 47, and 96 predict.
    assert seen == [[7, 11], [7, 6]]


@torch.no_grad()
def test_a_pass_leaves_model_and_cache_as_they_were():
    model = tiny.build("gpt2", torch.float64)
    before = scores(model, CONTEXT, False)
    scores(model, CONTEXT, True)
    assert scores(model, CONTEXT, False) == before
    block = transformer_blocks(model)[-1]
    assert "forward" not in vars(block)

    class Broken(nn.Module):
        def forward(self, *args, **kwargs):
            raise RuntimeError("broken")

    cache = Memory(causal_pass(model, CONTEXT), CONTEXT, len(CONTEXT)).cache()
    block.attn = Broken()
    with pytest.raises(RuntimeError, match="broken"), last_block_at(model, cache, torch.tensor([0]), 1):
        model(input_ids=torch.tensor([[3]]), **behind_cache(model, cache))
    assert "forward" not in vars(block)

    block.forward = mine = lambda *args, **kwargs: None  # as accelerate does with a module it moves
    with last_block_at(model, cache, torch.tensor([0]), 1):
        assert block.forward is not mine
    assert block.forward is mine


@torch.no_grad()
def test_a_pass_keeps_no_memory_alive():
    model = tiny.build("gpt2")
    memory = Memory(causal_pass(model, CONTEXT), CONTEXT, len(CONTEXT))
    keys = weakref.ref(memory.layers[0][0])
    gc.collect()
    gc.disable()
    try:
        score_packed(model, [(memory, PAIRS)], trim_last_block=True)
        del memory
        assert keys() is None
    finally:
        gc.enable()


@torch.no_grad()
def test_a_block_that_keeps_nothing_is_not_cut():
    """As the last blocks of models that share keys and values between layers."""
    model = tiny.build("llama", torch.float64)
    first, last = model.model.layers[-2:]
    forward = last.self_attn.forward

    def without_cache(*args, **kwargs):
        name = cache_name(model)
        return forward(*args, **kwargs | {name: kwargs[name] and Shared(kwargs[name])})

    class Shared:
        """Reads what the layer before has written."""

        def __init__(self, cache):
            self.cache = cache

        def update(self, keys, values, layer_idx, *args, **kwargs):
            layer = self.cache.layers[first.self_attn.layer_idx]
            return layer.keys, layer.values

    last.self_attn.forward = without_cache
    cache = Memory([], [], 0).cache()
    with (
        pytest.raises(LookupError, match="the last block of LlamaForCausalLM does not update the cache"),
        last_block_at(model, cache, torch.tensor([1]), 2),
    ):
        model(input_ids=torch.tensor([[3, 4]]), **behind_cache(model, cache))


@torch.no_grad()
def test_a_block_that_tells_tokens_by_their_index_is_not_cut():
    """It obeys masks and positions, and yet is another block to fewer tokens: that shows when the model is tried."""
    model = tiny.build("llama")

    def count(module: nn.Module, args: tuple[torch.Tensor]) -> torch.Tensor:
        # By little enough that the model still continues from keys and values as in one pass.
        return args[0] + 1e-4 * torch.arange(args[0].shape[1])[:, None]

    transformer_blocks(model)[-1].mlp.register_forward_pre_hook(count)
    abilities = probe(model)
    assert abilities.can_pack
    assert not abilities.can_trim_last_block
