"""Contexts of many demonstrations: attention for some tokens at a time is that under the whole mask, and no array is as
large as the square of a context; and nothing waits for a GPU before results are read, with torch's meta device for
one."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lm_eval_icl import methods
from lm_eval_icl.inference import attention, memory
from lm_eval_icl.inference.memory import run_rows
from lm_eval_icl.inference.scoring import score_packed
from lm_eval_icl.methods import runner
from lm_eval_icl.methods.runner import MethodRunner
from lm_eval_icl.prompts.layouts import Layout
from lm_eval_icl.prompts.tokens import Context
from tests import tiny

METHODS = [
    *(methods.make(name) for name in methods.NAMES if name != "batchicl"),
    methods.make("pcw", {"window_size": 3}),
    methods.make("invicl", {"positions": "sequential", "repeat": 2}),
    methods.make("icl", {"positions": "symmetric"}),
    methods.make("deepthink", {"T": 3, "restart_positions": True}),
]
QUERY = (5, 6, 7, 8)


def context(demonstrations: int, longest: int = 12) -> Context:
    lengths = [1 + (7 * i) % longest for i in range(demonstrations)]
    return Context((3, 4), tuple(tuple(20 + (11 * i + 3 * j) % 90 for j in range(n)) for i, n in enumerate(lengths)))


def behind(method, model, given=None):
    """The memory that the query goes on from, and what of the query is left."""
    queries = [(given or context(4), QUERY)]
    [memory_and_rest] = method.encode_queries(model, queries, partial(tiny.encoded_alone, method, model))
    return memory_and_rest


def entries(method, model, given):
    """All keys and values that a query attends to."""
    found, _ = behind(method, model, given)
    return [entry for layer in found.layers for entry in layer]


@pytest.fixture
def rows(monkeypatch):
    """Sets how many tokens are taken at a time."""

    def set_rows(n: int) -> None:
        monkeypatch.setattr(memory, "CONTEXT_TOKENS", n)
        monkeypatch.setattr(memory, "PIECE", n)
        monkeypatch.setattr(attention, "CONTEXT_TOKENS", n)

    return set_rows


@pytest.mark.parametrize(
    ("name", "dtype", "methods"),
    [
        *((name, torch.float64, METHODS) for name in ("llama", "opt", "mistral_window")),
        ("llama", torch.bfloat16, [methods.make("invicl"), methods.make("pcw")]),
    ],
)
@torch.no_grad()
def test_every_method_encodes_as_at_once(name, dtype, methods, rows):
    model = tiny.build(name, dtype)
    # RMSNorm rounds to float32 where all else is float64.
    tolerance = 1e-6 if name in ("llama", "mistral_window") else 1e-10
    rtol, tolerance = (0.1, 0.1) if dtype == torch.bfloat16 else (0, tolerance)
    for method in methods:
        rows(10**6)
        expected = entries(method, model, context(8))
        rows(7)
        for one, other in zip(entries(method, model, context(8)), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=rtol, atol=tolerance)
    assert model not in memory._with_other_attention


LENGTHS = st.lists(st.integers(1, 6), min_size=1, max_size=6)


@settings(deadline=None)
@given(method=st.sampled_from(METHODS), lengths=LENGTHS, prefix=st.integers(0, 3), n=st.integers(1, 9))
def test_keys_are_what_the_mask_says(method, lengths, prefix, n):
    if method.why_not(len(lengths)):
        return
    layout: Layout = method.passes(prefix, lengths, 2)[0][1]
    for first in range(0, len(layout), n):
        some = slice(first, min(first + n, len(layout)))
        shared, others = ([i for part in parts for i in range(part.start, part.stop)] for parts in layout.keys(some))
        mask = layout.mask[some]
        assert mask[:, shared].all()
        assert set(shared).isdisjoint(others)
        assert set(mask.any(dim=0).nonzero()[:, 0].tolist()) <= {*shared, *others}


class NoSquare(TorchDispatchMode):
    """Refuses tensors of more bytes than allowed; an expanded tensor has those of what it was expanded from."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        for each in found if isinstance(found, (tuple, list)) else [found]:
            if isinstance(each, torch.Tensor):
                assert each.untyped_storage().nbytes() <= self.most, (function, each.shape)
        return found


@pytest.mark.slow
@torch.no_grad()
def test_nothing_is_as_large_as_the_square(rows):
    """A context of n tokens under all methods: no array has n * n bytes, of which a boolean takes one."""
    model, given = tiny.build("llama", num_hidden_layers=1), context(180)
    square = len(given.tokens) ** 2
    assert square > 10**6
    rows(128)
    for method in map(methods.make, ("icl", "prefixicl", "invicl")):
        with NoSquare(square):
            entries(method, model, given)
    with NoSquare(square):
        entries(methods.make("deepthink", {"T": 2}), model, given)
    rows(10**6)
    with pytest.raises(AssertionError, match="aten"), NoSquare(square):
        entries(methods.make("pcw"), model, given)


@pytest.mark.parametrize("spoil", ["eager", "other"])
@torch.no_grad()
def test_a_model_with_attention_of_its_own_runs_under_the_whole_mask(spoil, rows):
    """Also one of which only a layer computes attention in a way of its own, which shows in the pass."""
    model = tiny.build("gpt2", torch.float64)
    expected = entries(methods.make("invicl"), model, context(12))
    if spoil == "eager":
        model.set_attn_implementation("eager")
    else:
        block = model.transformer.h[1].attn
        forward = block.forward
        block.forward = lambda hidden, *args, attention_mask=None, **kwargs: forward(
            hidden, *args, attention_mask=attention_mask.clone(), **kwargs
        )
    rows(16)
    for one, other in zip(entries(methods.make("invicl"), model, context(12)), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)
    assert (model in memory._with_other_attention) == (spoil == "other")


@pytest.mark.slow
@torch.no_grad()
def test_nothing_waits_for_the_device_until_results_are_read(rows):
    """The meta device raises where a number would have to come to the host: `item`, `tolist`, a boolean index."""
    rows(16)
    model = tiny.build("llama").to("meta")
    for method in [*METHODS, methods.make("batchicl", {"layer": 2})]:
        found, rest = behind(method, model)
        pairs = [(rest, (9, 10)), (rest, (11,))]
        with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor") as raised:
            score_packed(model, [(found, pairs)])
        assert raised.traceback[-1].name == "__init__"  # where `Scores` are sent to the host
        ids = torch.zeros(3, 1, dtype=torch.long, device="meta")
        logits = run_rows(model, ids, [0], found.cache(3), found.query_start + torch.zeros_like(ids))
        assert logits.shape[:2] == (3, 1)
        assert logits.is_meta


class Copies(TorchFunctionMode):
    """Which tensors were moved without waiting for it."""

    def __init__(self) -> None:
        super().__init__()
        self.waited: list[bool] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.to:
            self.waited.append(not (kwargs or {}).get("non_blocking", False))
        return function(*args, **(kwargs or {}))


@torch.no_grad()
def test_all_devices_but_cuda_are_waited_for(rows):
    """Others may read a tensor when it is freed already."""
    rows(16)
    model, method = tiny.build("llama"), methods.make("invicl")
    with Copies() as copies:
        found, rest = behind(method, model)
        score_packed(model, [(found, [(rest, (9, 10)), (rest, (11,))])])
    assert copies.waited and all(copies.waited)


def test_scores_are_handed_on_while_the_next_pack_runs(monkeypatch):
    """As on an accelerator: a pack is begun before the scores of the one before it are handed on, and none is lost."""
    tried = MethodRunner(tiny.build("gpt2"), methods.make("icl"), pack_tokens=40)
    queries = {(i, *range(30, 48)): [(9,), (10, 11)] for i in range(5)}
    expected = list(tried.score({context(2): queries}))
    assert len(expected) == 3
    events = []

    def watch(*given):
        events.append("begun")
        return score_packed(*given)

    monkeypatch.setattr(runner, "score_packed", watch)
    tried.packs_ahead = 1
    found = []
    for pairs, scores in tried.score({context(2): queries}):
        events.append("handed on")
        found.append((pairs, scores))
    assert found == expected
    assert events == ["begun", "begun", "handed on", "begun", "handed on", "handed on"]
