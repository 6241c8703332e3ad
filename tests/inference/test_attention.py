"""A packed row's attention in parts is its attention under the whole mask."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from lm_eval_icl.inference import attention, scoring
from lm_eval_icl.inference.attention import OfPackedRow, additive, attention_by
from lm_eval_icl.inference.memory import Memory, causal_pass
from tests import tiny

# Models with a window of 24 run packed up to that many tokens.
CONTEXT = [5, 17, 29, 41, 53, 65, 77]
PAIRS = [
    ([11, 23, 35], [47, 59, 71]),
    ([11, 23, 35], [83]),
    ([11, 24], [47, 60]),
    ([99, 98, 97, 96], [95]),
]
SDPA = ALL_ATTENTION_FUNCTIONS["sdpa"]
THREE = OfPackedRow(torch.eye(3, dtype=torch.bool), [(slice(0, 3), slice(0, 1))])


@pytest.fixture
def divided(monkeypatch):
    """Three tokens at a time; returns how many layers' attention was divided."""
    count, repeat = [0], attention.repeat_kv

    def counting(states, groups):
        count[0] += 1
        return repeat(states, groups)

    monkeypatch.setattr(attention, "ROW_TOKENS", 3)
    monkeypatch.setattr(attention, "repeat_kv", counting)
    return lambda: count[0] // 2


@pytest.mark.parametrize(
    "name",
    # Older versions of transformers give Gemma's attention a cap, and then it runs whole.
    [
        "gpt2",
        "gpt_neo",
        "llama",
        "mistral_window",
        pytest.param("gemma2_window", marks=pytest.mark.pinned),
    ],
)
@torch.no_grad()
def test_scores_are_those_under_the_whole_mask(name, divided, monkeypatch):
    model = tiny.build(name, torch.float64)
    memory = Memory(causal_pass(model, CONTEXT), CONTEXT, len(CONTEXT))
    scores = scoring.score_packed(model, [(memory, PAIRS)], torch.float64)
    layers = model.config.num_hidden_layers
    assert divided() == (layers if model.config._attn_implementation == "sdpa" else 0)
    monkeypatch.setattr(scoring, "attention_by", lambda attention: nullcontext())
    whole = scoring.score_packed(model, [(memory, PAIRS)], torch.float64)
    assert [greedy for _, greedy in scores] == [greedy for _, greedy in whole]
    assert [score for score, _ in scores] == pytest.approx(
        [score for score, _ in whole], abs=1e-12, rel=0
    )


@settings(deadline=None)
@given(
    parents=st.lists(st.integers(-1, 10**6), min_size=1, max_size=150),
    entries=st.integers(0, 40),
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 1)]),
    scaling=st.sampled_from([None, 0.3]),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_tree_after_any_memory(parents, entries, heads, scaling, seed):
    n, generator = len(parents), torch.Generator().manual_seed(seed)
    sees = torch.eye(n, dtype=torch.bool)
    for node, parent in enumerate(parents):
        if node and parent >= 0:
            sees[node] |= sees[parent % node]
    mask = additive(
        torch.cat([torch.ones(n, entries, dtype=torch.bool), sees], dim=1), torch.float64
    )[None, None]
    module = nn.Module()
    module.num_key_value_groups = heads[0] // heads[1]
    query = torch.randn(1, heads[0], n, 8, dtype=torch.float64, generator=generator)
    # Far from each other: what the memory and the row weigh differs by orders of magnitude.
    key, value = 9 * torch.randn(
        2, 1, heads[1], entries + n, 8, dtype=torch.float64, generator=generator
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "ROW_TOKENS", 5)  # so that most rows are divided
        with attention_by(OfPackedRow(sees, [(slice(0, n), slice(0, entries))])):
            found, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](
                module, query, key, value, mask, scaling=scaling
            )
    expected = scaled_dot_product_attention(query, key, value, mask, scale=scaling, enable_gqa=True)
    torch.testing.assert_close(found, expected.transpose(1, 2), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": torch.bfloat16},
        {"rows": 2},
        {"queries": 4},
        {"mask": None},
        {"width": 6},
        {"position_bias": torch.ones(1, 2, 5, 12)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_cannot_be_divided_runs_whole(change, divided):
    dtype, rows, queries = (
        change.get("dtype", torch.float32),
        change.get("rows", 1),
        change.get("queries", 5),
    )
    query, key = (
        torch.randn(rows, 2, queries, 4, dtype=dtype),
        torch.randn(rows, 2, 12, 4, dtype=dtype),
    )
    value = torch.randn(rows, 2, 12, change.get("width", 4), dtype=dtype)
    mask = change.get("mask", torch.randn(1, 1, queries, 12, dtype=dtype))
    more = {name: bias for name, bias in change.items() if name == "position_bias"}
    with attention_by(OfPackedRow(torch.eye(5, dtype=torch.bool), [(slice(0, 5), slice(0, 7))])):
        found, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](
            nn.Module(), query, key, value, mask, is_causal=False, **more
        )
    assert divided() == 0
    assert torch.equal(
        found, SDPA(nn.Module(), query, key, value, mask, is_causal=False, **more)[0]
    )


def test_somebody_elses_function_is_called():
    """One that is registered after ours stays in force, in a packed pass and outside it."""
    calls = []

    def theirs(*args, **kwargs):
        calls.append(args)
        return SDPA(*args, **kwargs)

    with attention_by(THREE):
        pass
    before = AttentionInterface()["sdpa"]
    AttentionInterface.register("sdpa", theirs)
    try:
        inputs = [torch.randn(1, 2, 3, 4) for _ in range(3)]
        ALL_ATTENTION_FUNCTIONS["sdpa"](nn.Module(), *inputs, None)
        with attention_by(THREE):
            ALL_ATTENTION_FUNCTIONS["sdpa"](nn.Module(), *inputs, None)
        assert len(calls) == 2
    finally:
        AttentionInterface.register("sdpa", before)
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is before


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_without_the_kernel_attention_runs_whole(name, monkeypatch):
    model = tiny.build(name, torch.float64)
    context = [5, 6, 7, 8] * 8
    with torch.no_grad():
        memory = Memory(causal_pass(model, context), context, len(context))
        pairs = [((20 + i, *range(30, 60)), (9, 8)) for i in range(4)]
        expected = scoring.score_packed(model, [(memory, pairs)])
        placed = ALL_ATTENTION_FUNCTIONS["sdpa"]
        monkeypatch.setattr(attention, "KERNELS", {})
        AttentionInterface.register(
            "sdpa", SDPA
        )  # as in a process where the kernel was never there
        try:
            found = scoring.score_packed(model, [(memory, pairs)])
        finally:
            AttentionInterface.register("sdpa", placed)
    assert [score for score, _ in found] == pytest.approx(
        [score for score, _ in expected], abs=1e-10
    )


@pytest.mark.parametrize("vocabulary", [1, 2, 400, 50_257])
def test_the_greedy_token_is_the_first_of_the_likeliest(vocabulary):
    """Most rows have several tokens of the same, highest logit."""
    torch.manual_seed(vocabulary)
    logits = torch.randint(0, 5, (30, vocabulary)).float()
    logits[0, -1] = logits[1, 0] = logits[2, vocabulary // 2] = 6
    highest = [(row == row.max()).nonzero()[:, 0].tolist() for row in logits]
    pairs = [
        (row, token) for row, tokens in enumerate(highest) for token in {tokens[0], tokens[-1], 0}
    ]
    _, greedy = scoring._numbers(
        logits, [[row] for row, _ in pairs], [((), (token,)) for _, token in pairs], None
    )
    assert greedy.tolist() == [token == highest[row][0] for row, token in pairs]
