"""Contexts of many demonstrations: attention for some tokens at a time is that under the whole
mask, and no array is as large as the square of a context; and an accelerator runs a pack while the
one before it is read."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lm_eval_icl import methods
from lm_eval_icl.inference import layout_attention, memory, scoring
from lm_eval_icl.inference.scoring import score_packed
from lm_eval_icl.methods.runner import MethodRunner
from lm_eval_icl.prompts.tokens import Context
from tests import tiny

QUERY = (5, 6, 7, 8)


def context(demonstrations: int, longest: int = 12) -> Context:
    shown = []
    for i in range(demonstrations):
        length = 1 + (7 * i) % longest
        shown.append(tuple(20 + (11 * i + 3 * j) % 90 for j in range(length)))
    return Context((3, 4), tuple(shown))


def entries(method, model, given):
    """All keys and values that a query attends to."""
    found, _ = tiny.encoded_alone(method, model, given, QUERY)
    return list(itertools.chain(*found.layers))


@pytest.fixture
def rows(monkeypatch):
    """Sets how many tokens are taken at a time."""

    def set_rows(n: int) -> None:
        monkeypatch.setattr(memory, "CONTEXT_TOKENS", n)
        monkeypatch.setattr(memory, "PIECE", n)
        monkeypatch.setattr(layout_attention, "CONTEXT_TOKENS", n)

    return set_rows


class NoSquare(TorchDispatchMode):
    """Refuses tensors of more bytes than allowed; an expanded tensor has those of what it was
    expanded from."""

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
@pytest.mark.pinned  # the kernel of torch 2.6 makes the whole causal mask
@torch.no_grad()
def test_nothing_is_as_large_as_the_square(rows):
    """A context of n tokens under all methods: no array has n * n bytes, of which a boolean takes
    one."""
    model = tiny.build("llama", num_hidden_layers=1)
    given = context(180)
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
    """Also one of which only a layer computes attention in a way of its own, which shows in the
    pass."""
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
    for one, other in zip(
        entries(methods.make("invicl"), model, context(12)), expected, strict=True
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)
    assert (model in memory._with_other_attention) == (spoil == "other")


def test_scores_are_handed_on_while_the_next_pack_runs(monkeypatch):
    """As on an accelerator: a pack is begun before the scores of the one before it are handed on,
    and none is lost."""
    tried = MethodRunner(tiny.build("gpt2"), methods.make("icl"), pack_tokens=40)
    queries = {(i, *range(30, 48)): [(9,), (10, 11)] for i in range(5)}
    expected = [(requests, [*scores]) for requests, scores in tried.score({context(2): queries})]
    assert len(expected) == 3
    events = []

    def watch(*given):
        events.append("begun")
        return score_packed(*given)

    monkeypatch.setattr(scoring, "score_packed", watch)
    tried.packs_ahead = 1
    found = []
    for pairs, scores in tried.score({context(2): queries}):
        events.append("handed on")
        found.append((pairs, [*scores]))
    assert found == expected
    assert events == ["begun", "begun", "handed on", "begun", "handed on", "handed on"]
