"""Several short contexts in one pass: every number is that of a context that runs alone."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lm_eval_icl import methods
from lm_eval_icl.errors import InputError, Unsupported
from lm_eval_icl.inference import attention, layout_attention, memory
from lm_eval_icl.inference.attention import AttentionCall, attention_by
from lm_eval_icl.inference.generation import GenerationSettings
from lm_eval_icl.inference.layout_attention import UnderLayouts
from lm_eval_icl.inference.schedule import in_order
from lm_eval_icl.inference.scoring import score_packed
from lm_eval_icl.methods.by_query import ByQuery
from lm_eval_icl.methods.icl import ICL
from lm_eval_icl.methods.runner import MethodRunner
from lm_eval_icl.prompts.layouts import POSITIONS, Pattern, lay_out, nothing, side_by_side
from lm_eval_icl.prompts.tokens import Context, TokenizedPrompt
from tests import tiny
from tests.smoke import model_types as smoke_models

pytestmark = pytest.mark.usefixtures("tried_once")

# Of those left out a query reads several memories, or a memory of its own, or one that is learned.
SEVERAL_PASSES = ("deepthink", "batchicl", "saicl", "ensemble", "nbce", "moicl", "ctkv", "ttt")
METHODS = [
    *(methods.make(name) for name in methods.NAMES if name not in SEVERAL_PASSES),
    methods.make("pcw", {"window_size": 2}),
    methods.make("invicl", {"positions": "sequential", "repeat": 2}),
    methods.make("icl", {"positions": "symmetric"}),
    methods.make("deepthink", {"T": 3, "eta": 0.3, "momentum": 0.5}),
    methods.make("deepthink", {"T": 2, "eta": 0.3, "restart_positions": True}),
    methods.make("deepthink", {"layout": "invicl", "T": 3, "eta": 0.4}),
    methods.make("deepthink", {"layout": "pcw", "T": 3, "eta": 0.4}),
]
# What a query attends to depends on it.
BY_QUERY = [
    methods.make("saicl", {"repeat": 2}),
    methods.make("batchicl", {"layer": 1}),
]
# Of each kind of pass one: causal, in windows, of two copies, of several passes, and by query.
A_FEW = [
    ICL(),
    methods.make("pcw", {"window_size": 2}),
    methods.make("invicl"),
    methods.make("deepthink", {"T": 3, "eta": 0.3, "momentum": 0.5}),
    methods.make("saicl"),
    methods.make("batchicl"),
]
GENERATING = [
    ("invicl",),
    ("pcw", {"window_size": 2}),
    ("deepthink", {"T": 3, "eta": 0.9}),
    ("saicl",),
]
ANSWERS = [(9,), (10, 11, 12), (10, 11, 13)]
for positions in POSITIONS[:2]:
    BY_QUERY.append(methods.make("saicl", {"positions": positions}))
    BY_QUERY.append(methods.make("batchicl", {"positions": positions}))


def context(seed: int, demonstrations: int, longest: int = 9) -> Context:
    random = torch.Generator().manual_seed(seed)

    def tokens(n: int) -> tuple[int, ...]:
        return tuple(torch.randint(5, 110, (n,), generator=random).tolist())

    lengths = torch.randint(1, longest + 1, (demonstrations,), generator=random).tolist()
    return Context(tokens(seed % 3), tuple(map(tokens, lengths)))


# One has a single token, one no demonstrations, two have the same query.
WORK = {
    context(0, 4): {(5, 6, 7, 0): ANSWERS, (5, 6): ANSWERS[:2]},
    context(1, 2): {(5, 6, 7, 1): ANSWERS, (5, 6): ANSWERS[:2]},
    context(2, 3): {(5, 6, 7, 2): ANSWERS, (5, 6): ANSWERS[:2]},
    context(3, 1): {(5, 6, 7, 3): ANSWERS, (5, 6): ANSWERS[:2]},
    Context((), ((8,),)): {(5, 6): ANSWERS},
    Context((3, 4), ()): {(5, 6): ANSWERS},
}


def scores(runner: MethodRunner, work=WORK) -> dict:
    """Those of contexts that may run together."""
    return tiny.scores(runner, work, once=True)


def one_by_one(runner: MethodRunner, work=WORK) -> dict:
    """The scores of each context by itself."""
    by_request = {}
    for context, queries in work.items():
        by_request |= tiny.scores(runner, {context: queries})
    return by_request


FAST = ["opt", "bloom", "qwen3_next"]


@pytest.fixture
def taken_at_a_time(monkeypatch):
    """A function: how many tokens of a context, and of a row, a step takes."""

    def take(n: int) -> None:
        monkeypatch.setattr(memory, "CONTEXT_TOKENS", n)
        monkeypatch.setattr(memory, "PIECE", n)
        monkeypatch.setattr(layout_attention, "CONTEXT_TOKENS", n)
        monkeypatch.setattr(attention, "ROW_TOKENS", n)

    return take


SOME_METHODS = {"bloom": [ICL()], "qwen3_next": [ICL()], "opt": A_FEW, "gemma2_window": A_FEW}
# RMSNorm is in float32.
WITHIN = {"gpt2": 1e-10, "opt": 1e-10, "bloom": 0, "qwen3_next": 0}


@pytest.mark.parametrize("name", tiny.slow_but(FAST, [*FAST, "gpt2", "llama3", "gemma2_window"]))
@torch.no_grad()
def test_scores_are_those_of_contexts_that_run_alone(name, taken_at_a_time):
    """And under their whole mask. The contexts of some do run alone: Gemma 2 has a window here,
    BLOOM counts positions by itself, and Qwen3-Next keeps other states."""
    model = tiny.build(name, torch.float64 if name != "qwen3_next" else torch.float32)
    for method in SOME_METHODS.get(name, [*METHODS, *BY_QUERY]):
        together = MethodRunner(model, method)
        alone = MethodRunner(model, method)
        taken_at_a_time(7)
        found = scores(together)
        taken_at_a_time(10**6)
        expected = one_by_one(alone)
        assert found.keys() == expected.keys()
        for request, (logprob, greedy) in expected.items():
            own_logprob, own_greedy = found[request]
            assert own_logprob == pytest.approx(logprob, abs=WITHIN.get(name, 1e-5), rel=0)
            assert own_greedy == greedy
        packs = together.capabilities.can_pack_to(120)
        # Contexts that begin alike share their beginning in one pass.
        if method in METHODS or packs:
            assert together.tokens_run <= alone.tokens_run
            # Where nothing is packed, deepthink's passes run in pieces.
            in_pieces = method.name == "deepthink" and not packs
            assert in_pieces or together.passes_run <= alone.passes_run - packs


@dataclass(frozen=True)
class Scaled(ICL):
    """A method of somebody's own, which overrides `encode` alone."""

    def encode(self, model, contexts):
        scaled = []
        for plain in super().encode(model, contexts):
            layers = [(keys, 2 * values) for keys, values in plain.layers]
            scaled.append(replace(plain, layers=layers))
        return scaled


@torch.no_grad()
def test_a_method_that_overrides_encode_alone():
    """Its `encode` is what makes the memories, together and alone."""
    model = tiny.build("gpt2", torch.float64)
    method = Scaled()
    together = scores(MethodRunner(model, method))
    with pytest.raises(Unsupported, match="scaled encodes by code of its own: leave plain"):
        scores(MethodRunner(model, method, plain=True))
    for request, (logprob, _) in one_by_one(MethodRunner(model, method)).items():
        context, query, answer = request
        assert together[request][0] == pytest.approx(logprob, abs=1e-10)
        (memory,) = method.encode(model, [context])
        [(itself, _)] = score_packed(model, [(memory, [(query, answer)])])
        assert logprob == pytest.approx(itself, abs=1e-10)


def test_what_a_method_must_say_of_itself():
    """A method with an `encode` of its own, run as if it had none, would have wrong numbers and no
    error."""

    assert ICL.one_pass and not Scaled.one_pass and not Scaled.encodes_by_layout
    for member in ("memory_depends_on_query", "encode_queries"):
        with pytest.raises(InputError, match="Mine: derive from ByQuery"):
            type("Mine", (ICL,), {member: True})


@dataclass(frozen=True)
class Asking(ByQuery):
    """A method of somebody's own, whose demonstrations see the query, at the positions of `icl`."""

    def pattern(self, n):
        return Pattern(nothing(n), query=True)


@torch.no_grad()
def test_a_mask_whose_demonstrations_see_the_query():
    model = tiny.build("gpt2", torch.float64)
    found = scores(MethodRunner(model, Asking()))
    expected = scores(MethodRunner(model, methods.make("saicl", {"positions": "sequential"})))
    assert found == expected


LENGTHS = st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=4)


@settings(deadline=None)
@given(
    lengths=LENGTHS,
    seed=st.integers(0, 2**32 - 1),
    n=st.integers(1, 12),
    heads=st.sampled_from([(2, 2), (4, 2)]),
    on_memory=st.booleans(),
    kernel=st.booleans(),
)
def test_any_patterns_side_by_side(lengths, seed, n, heads, on_memory, kernel):
    """Under the mask that is block-diagonal by construction, with memories in front of the rows and
    without."""
    random = torch.Generator().manual_seed(seed)
    layouts = []
    for each in lengths:
        sees = torch.rand(len(each), len(each), generator=random) < 0.5
        layout = lay_out(len(each) % 3, each, Pattern(sees), "sequential")
        if on_memory:
            of_memory = lay_out(1, each[:1], Pattern(sees[:1, :1]), "sequential")
            layout = layout.on_memory(of_memory)
        layouts.append(layout)
    to_memory = []
    to_rows = []
    positions = []
    rows = []
    for layout in layouts:
        mask = layout.mask[layout.entries :].int()
        to_memory.append(mask[:, : layout.entries])
        to_rows.append(mask[:, layout.entries :])
        positions.append(layout.positions[layout.entries :])
        rows.append(len(mask))
    blocks = [torch.block_diag(*to_memory), torch.block_diag(*to_rows)]
    expected = torch.cat(blocks, dim=1).bool()
    joint = side_by_side(layouts)
    assert joint.entries == sum(layout.entries for layout in layouts)
    assert torch.equal(joint.mask[joint.entries :], expected)
    assert torch.equal(joint.positions[joint.entries :], torch.cat(positions))

    of_queries, of_keys = heads
    module = nn.Module()
    module.num_key_value_groups = of_queries // of_keys
    query = torch.randn(1, of_queries, sum(rows), 8, dtype=torch.float64, generator=random)
    # Far from each other: what the parts weigh differs by orders of magnitude.
    shape = (2, 1, of_keys, len(joint), 8)
    key, value = 9 * torch.randn(shape, dtype=torch.float64, generator=random)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout_attention, "CONTEXT_TOKENS", n)
        if not kernel:
            patch.setattr(AttentionCall, "has_kernel", False)
        under = UnderLayouts(layouts)
        with attention_by(under):
            mask = under.mask(query.dtype, query.device)
            sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
            found, _ = sdpa(module, query, key, value, mask, scaling=0.3)
        pieces = []
        for taken, *_ in under.parts:
            pieces.append(range(taken.start - joint.entries, taken.stop - joint.entries))
    assert under.layers == 1
    attended = scaled_dot_product_attention(
        query, key, value, expected, scale=0.3, enable_gqa=True
    ).transpose(1, 2)
    torch.testing.assert_close(found, attended, rtol=1e-10, atol=1e-10)
    # No row is in two pieces that would have fitted into one, and all tokens are in one piece each.
    assert list(itertools.chain(*pieces)) == list(range(sum(rows)))
    start = 0
    for length in rows:
        end = start + length
        holding = [piece for piece in pieces if piece.start < end and piece.stop > start]
        assert len(holding) == max(1, math.ceil(length / n))
        start = end


def generated(
    runner, prompts: list[TokenizedPrompt], single, beams: int = 1
) -> tuple[list[list[int]], list[int]]:
    """What follows each prompt, and how many rows each batch had."""
    texts: dict[int, list[int]] = {}
    batches = []
    arguments = {"max_new_tokens": 6, "do_sample": False, "num_beams": beams}
    arguments |= {"pad_token_id": 0, "eos_token_id": None}
    settings = GenerationSettings(beams)

    def generate(context, **inputs):
        return runner.model.generate(input_ids=context, **inputs, **arguments)

    waiting = in_order(prompts)
    while waiting:
        names = [f"prompt {i}" for i in waiting]
        candidates = [prompts[i] for i in waiting]
        rows = runner.generate(candidates, names, 6, generate, settings, single=single)
        n = len(rows)
        texts |= zip(waiting[:n], rows, strict=True)
        batches.append(n)
        waiting = waiting[n:]
    return [texts[i] for i in range(len(prompts))], batches


SHARED = context(9, 3)
# One after no demonstrations, one after nothing, and two after the same context.
PROMPTS = []
for seed in range(5):
    query = tuple(range(20, 22 + seed))
    PROMPTS.append(TokenizedPrompt(context(seed, 1 + seed % 3), query))
PROMPTS += [
    TokenizedPrompt(Context((3, 4, 5), ()), (20, 21)),
    TokenizedPrompt(Context((), ()), (20, 21, 22)),
    TokenizedPrompt(SHARED, (30, 31)),
    TokenizedPrompt(SHARED, (40, 41, 42)),
]


# The contexts of one prompt each.
NOT_SHARED = {prompt.context for prompt in PROMPTS} - {SHARED}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["opt", "gemma2_window", "llama4_text", "qwen3_next"])
@torch.no_grad()
def test_texts_are_those_of_prompts_that_run_alone(name):
    """Rows with a context of their own are one batch, rows that share one another; those of some
    models run alone."""
    model = smoke_models.build(name) if name == "llama4_text" else tiny.build(name)
    cases = [(ICL(), 1), (ICL(), 2)]
    if name != "qwen3_next":
        cases += [(methods.make(*each), 1) for each in GENERATING]
    for method, beams in cases:
        runner = MethodRunner(model, method, batch_size=4)
        texts, batches = generated(runner, PROMPTS, NOT_SHARED, beams)
        alone, ones = generated(MethodRunner(model, method), PROMPTS, (), beams)
        assert texts == alone
        assert ones == [1] * len(PROMPTS)
        if name == "opt" and not method.memory_depends_on_query:
            assert sorted(batches) == [2, 3, 4]


@torch.no_grad()
def test_rotary_angles_that_change_with_length():
    """Contexts on both sides of the position where they change are neither encoded nor continued
    together."""
    longrope = tiny.longrope(64)
    model = tiny.build("llama", rope_parameters=longrope, max_position_embeddings=512)
    contexts = []
    for n, demonstrations in ((35, 2), (20, 2), (30, 3), (5, 4)):
        shown = [tuple(range(5 + i, 5 + i + n)) for i in range(demonstrations)]
        contexts.append(Context((), tuple(shown)))
    query = (20, 21, 22)
    prompts = [TokenizedPrompt(context, query) for context in contexts]
    work = {context: {query: ANSWERS} for context in contexts}
    for method in (ICL(), methods.make("pcw", {"window_size": 2})):
        together = MethodRunner(model, method, batch_size=4)
        alone = MethodRunner(model, method)
        texts, _ = generated(together, prompts, contexts)
        texts_alone, _ = generated(alone, prompts, ())
        assert texts == texts_alone
        assert scores(together, work) == tiny.scores(alone, work)


@pytest.mark.parametrize(
    ("method", "encoding"),
    [(ICL(), 0), (methods.make("invicl"), 1), (methods.make("deepthink", {"T": 5}), 5)],
    ids=["icl", "invicl", "deepthink"],
)
@torch.no_grad()
def test_how_texts_begin(method, encoding):
    """An ordinary pass reads a context of its own with the query; contexts of a batch are encoded
    side by side."""
    model = tiny.build("gpt2")
    passes = []
    model.register_forward_pre_hook(lambda module, args: passes.append(module))
    prompts = [TokenizedPrompt(context(seed, 2), (20, 21)) for seed in range(4)]
    for rows in (1, 4):
        runner = MethodRunner(model, method, batch_size=rows)
        passes.clear()
        generated(runner, prompts, [prompt.context for prompt in prompts])
        assert len(passes) == (encoding + 6) * 4 // rows
