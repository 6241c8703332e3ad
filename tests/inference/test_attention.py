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
from lm_eval_icl.inference.attention import Kernel, OfPackedRow, Reading, additive, attention_by
from lm_eval_icl.inference.layout_attention import UnderLayouts
from lm_eval_icl.inference.memory import Memory, causal_pass
from lm_eval_icl.methods import make
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
    calls = []
    repeat = attention.repeat_kv

    def counting(states, groups):
        calls.append(groups)
        return repeat(states, groups)

    monkeypatch.setattr(attention, "ROW_TOKENS", 3)
    monkeypatch.setattr(attention, "repeat_kv", counting)
    return lambda: len(calls) // 2  # keys and values


def logprobs(scores):
    return [logprob for logprob, _ in scores]


def greedy_flags(scores):
    return [greedy for _, greedy in scores]


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
    can_be_divided = model.config._attn_implementation == "sdpa"
    assert divided() == (model.config.num_hidden_layers if can_be_divided else 0)
    monkeypatch.setattr(scoring, "attention_by", lambda attention: nullcontext())
    whole = scoring.score_packed(model, [(memory, PAIRS)], torch.float64)
    assert greedy_flags(scores) == greedy_flags(whole)
    assert logprobs(scores) == pytest.approx(logprobs(whole), abs=1e-12, rel=0)


@settings(deadline=None)
@given(
    parents=st.lists(st.integers(-1, 10**6), min_size=1, max_size=150),
    entries=st.integers(0, 40),
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 1)]),
    scaling=st.sampled_from([None, 0.3]),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_tree_after_any_memory(parents, entries, heads, scaling, seed):
    n = len(parents)
    of_queries, of_keys = heads
    generator = torch.Generator().manual_seed(seed)
    sees = torch.eye(n, dtype=torch.bool)
    for node, parent in enumerate(parents):
        if node and parent >= 0:
            sees[node] |= sees[parent % node]
    whole = torch.cat([torch.ones(n, entries, dtype=torch.bool), sees], dim=1)
    mask = additive(whole, torch.float64)[None, None]
    module = nn.Module()
    module.num_key_value_groups = of_queries // of_keys
    query = torch.randn(1, of_queries, n, 8, dtype=torch.float64, generator=generator)
    # Far from each other: what the memory and the row weigh differs by orders of magnitude.
    shape = (2, 1, of_keys, entries + n, 8)
    key, value = 9 * torch.randn(shape, dtype=torch.float64, generator=generator)
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "ROW_TOKENS", 5)  # so that most rows are divided
        with attention_by(OfPackedRow(sees, [(slice(0, n), slice(0, entries))])):
            attended, _ = sdpa(module, query, key, value, mask, scaling=scaling)
    expected = scaled_dot_product_attention(query, key, value, mask, scale=scaling, enable_gqa=True)
    torch.testing.assert_close(attended, expected.transpose(1, 2), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": torch.bfloat16},
        {"rows": 2},
        {"queries": 4},
        {"mask": None},
        {"width": 6},
        {"value_dtype": torch.bfloat16},
        {"position_bias": torch.ones(1, 2, 5, 12)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_cannot_be_divided_runs_whole(change, divided):
    dtype = change.get("dtype", torch.float32)
    rows = change.get("rows", 1)
    queries = change.get("queries", 5)
    query = torch.randn(rows, 2, queries, 4, dtype=dtype)
    key = torch.randn(rows, 2, 12, 4, dtype=dtype)
    value = torch.randn(rows, 2, 12, change.get("width", 4), dtype=change.get("value_dtype", dtype))
    mask = change.get("mask", torch.randn(1, 1, queries, 12, dtype=dtype))
    arguments = {"is_causal": False}
    if "position_bias" in change:
        arguments["position_bias"] = change["position_bias"]
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
    of_row = OfPackedRow(torch.eye(5, dtype=torch.bool), [(slice(0, 5), slice(0, 7))])
    with torch.autocast("cpu", torch.bfloat16, enabled="value_dtype" in change):
        with attention_by(of_row):
            attended, _ = sdpa(nn.Module(), query, key, value, mask, **arguments)
        expected, _ = SDPA(nn.Module(), query, key, value, mask, **arguments)
    assert divided() == 0
    assert torch.equal(attended, expected)


@pytest.mark.parametrize(
    ("mask", "options", "says"),
    [
        (
            torch.zeros(1, 1, 5, 12),
            {"s_aux": torch.zeros(2)},
            "has sinks, caps its scores or adds a bias",
        ),
        (None, {}, "its attention cannot be computed in parts"),
    ],
)
def test_parts_that_cannot_be_read_apart(mask, options, says):
    in_part = [[(slice(0, 7), Reading(temperature=0.5))]]
    query = torch.randn(1, 2, 5, 4)
    key = torch.randn(1, 2, 12, 4)
    groups = [(slice(0, 5), slice(0, 7))]
    of_row = OfPackedRow(torch.eye(5, dtype=torch.bool), groups, in_part)
    with attention_by(of_row), pytest.raises(ValueError, match=says):
        ALL_ATTENTION_FUNCTIONS["sdpa"](nn.Module(), query, key, key, mask, **options)


def test_a_pass_over_layouts_whose_model_adds_a_bias_runs_whole():
    [(_, layout)] = make("invicl").passes(1, (2, 2))
    under = UnderLayouts([layout])
    query = torch.randn(1, 2, len(layout), 4)
    key = torch.randn(1, 2, len(layout), 4)
    mask = under.mask(query.dtype, query.device)
    bias = torch.randn(1, 2, len(layout), len(layout))
    with attention_by(under):
        sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
        attended, _ = sdpa(nn.Module(), query, key, key, mask, position_bias=bias)
    expected, _ = SDPA(nn.Module(), query, key, key, mask, position_bias=bias)
    assert torch.equal(attended, expected)
    assert not under.layers


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


ABSENT = Kernel("that_torch_has_not", (torch.float32, torch.float64))


@pytest.mark.parametrize(("name", "kernels"), [("gpt2", {}), ("llama", {"cpu": ABSENT})])
def test_without_the_kernel_attention_runs_whole(name, kernels, monkeypatch):
    model = tiny.build(name, torch.float64)
    context = [5, 6, 7, 8] * 8
    pairs = [((20 + i, *range(30, 60)), (9, 8)) for i in range(4)]
    with torch.no_grad():
        memory = Memory(causal_pass(model, context), context, len(context))
        expected = scoring.score_packed(model, [(memory, pairs)])
        placed = ALL_ATTENTION_FUNCTIONS["sdpa"]
        monkeypatch.setattr(attention, "KERNELS", kernels)
        # As in a process where the kernel was never there.
        AttentionInterface.register("sdpa", SDPA)
        try:
            scores = scoring.score_packed(model, [(memory, pairs)])
        finally:
            AttentionInterface.register("sdpa", placed)
    assert logprobs(scores) == pytest.approx(logprobs(expected), abs=1e-10)


@pytest.mark.parametrize("vocabulary", [1, 2, 400, 50_257])
def test_the_greedy_token_is_the_first_of_the_likeliest(vocabulary):
    """Most rows have several tokens of the same, highest logit."""
    torch.manual_seed(vocabulary)
    logits = torch.randint(0, 5, (30, vocabulary)).float()
    logits[0, -1] = 6
    logits[1, 0] = 6
    logits[2, vocabulary // 2] = 6
    rows = []
    answers = []
    expected = []
    for number, row in enumerate(logits):
        highest = (row == row.max()).nonzero()[:, 0].tolist()
        for token in {highest[0], highest[-1], 0}:
            rows.append([number])
            answers.append(((), (token,)))
            expected.append(token == highest[0])
    _, greedy = scoring._numbers(logits, rows, answers, None)
    assert greedy.tolist() == expected
