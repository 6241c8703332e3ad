"""Several short contexts in one pass: every number is that of a context that runs alone."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lm_eval_icl import methods
from lm_eval_icl.errors import InputError
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

METHODS = [
    *(
        methods.make(name)
        for name in methods.NAMES
        if name
        not in ("deepthink", "batchicl", "saicl", "ensemble", "nbce", "moicl", "ctkv", "ttt")
    ),
    methods.make("pcw", {"window_size": 2}),
    methods.make("invicl", {"positions": "sequential", "repeat": 2}),
    methods.make("icl", {"positions": "symmetric"}),
    methods.make("deepthink", {"T": 3, "eta": 0.3, "momentum": 0.5}),
    methods.make("deepthink", {"T": 2, "eta": 0.3, "restart_positions": True}),
    *(
        methods.make("deepthink", {"layout": layout, "T": 3, "eta": 0.4})
        for layout in ("invicl", "pcw")
    ),
]
# What a query attends to depends on it.
BY_QUERY = [
    *(
        methods.make(name, {"positions": positions})
        for name in ("saicl", "batchicl")
        for positions in POSITIONS[:2]
    ),
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


def context(seed: int, demonstrations: int, longest: int = 9) -> Context:
    random = torch.Generator().manual_seed(seed)
    draw = partial(torch.randint, 5, 110, generator=random)
    lengths = torch.randint(1, longest + 1, (demonstrations,), generator=random).tolist()
    return Context(
        tuple(draw((seed % 3,)).tolist()), tuple(tuple(draw((n,)).tolist()) for n in lengths)
    )


# One has a single token, one no demonstrations, two have the same query.
WORK = {
    **{
        context(seed, n): {(5, 6, 7, seed): ANSWERS, (5, 6): ANSWERS[:2]}
        for seed, n in enumerate((4, 2, 3, 1))
    },
    Context((), ((8,),)): {(5, 6): ANSWERS},
    Context((3, 4), ()): {(5, 6): ANSWERS},
}


def scores(runner: MethodRunner, work=WORK, once=True) -> dict:
    passes = runner.score(work, once)
    return {
        which: score
        for requests, found in passes
        for which, score in zip(requests, found, strict=True)
    }


def one_by_one(runner: MethodRunner, work=WORK) -> dict:
    """The scores of each context by itself."""
    return {
        which: score
        for each in work
        for which, score in scores(runner, {each: work[each]}, False).items()
    }


FAST = ["opt", "bloom", "qwen3_next"]


@pytest.mark.parametrize("name", tiny.slow_but(FAST, [*FAST, "gpt2", "llama3", "gemma2_window"]))
@torch.no_grad()
def test_scores_are_those_of_contexts_that_run_alone(name, monkeypatch):
    """And under their whole mask. The contexts of some do run alone: Gemma 2 has a window here, BLOOM counts positions
    by itself, and Qwen3-Next keeps other states."""
    some = {"bloom": [ICL()], "qwen3_next": [ICL()], "opt": A_FEW, "gemma2_window": A_FEW}

    def taken_at_a_time(n: int) -> None:
        monkeypatch.setattr(memory, "CONTEXT_TOKENS", n)
        monkeypatch.setattr(memory, "PIECE", n)
        monkeypatch.setattr(layout_attention, "CONTEXT_TOKENS", n)
        monkeypatch.setattr(attention, "ROW_TOKENS", n)

    model = tiny.build(name, torch.float64 if name != "qwen3_next" else torch.float32)
    for method in some.get(name, [*METHODS, *BY_QUERY]):
        together, alone = MethodRunner(model, method), MethodRunner(model, method)
        taken_at_a_time(7)
        found = scores(together)
        taken_at_a_time(10**6)
        expected = one_by_one(alone)
        assert found.keys() == expected.keys()
        within = {"gpt2": 1e-10, "opt": 1e-10, "bloom": 0, "qwen3_next": 0}.get(
            name, 1e-5
        )  # RMSNorm is in float32
        for which, (logprob, greedy) in expected.items():
            assert found[which][0] == pytest.approx(logprob, abs=within, rel=0)
            assert found[which][1] == greedy
        packs = together.capabilities.can_pack_to(120)
        if (
            method in METHODS or packs
        ):  # contexts that begin alike share their beginning in one pass
            assert together.tokens_run <= alone.tokens_run
            # Where nothing is packed, deepthink's passes run in pieces.
            assert together.passes_run <= alone.passes_run - packs or (
                method.name == "deepthink" and not packs
            )


@dataclass(frozen=True)
class Scaled(ICL):
    """A method of somebody's own, which overrides `encode` alone."""

    def encode(self, model, contexts):
        found = super().encode(model, contexts)
        return [
            replace(each, layers=[(keys, 2 * values) for keys, values in each.layers])
            for each in found
        ]


@torch.no_grad()
def test_a_method_that_overrides_encode_alone():
    """Its `encode` is what makes the memories, together and alone."""
    model, method = tiny.build("gpt2", torch.float64), Scaled()
    found, expected = scores(MethodRunner(model, method)), one_by_one(MethodRunner(model, method))
    for (context, query, answer), (logprob, _) in expected.items():
        assert found[context, query, answer][0] == pytest.approx(logprob, abs=1e-10)
        (itself, _), *_ = score_packed(
            model, [(*method.encode(model, [context]), [(query, answer)])]
        )
        assert logprob == pytest.approx(itself, abs=1e-10)


def test_what_a_method_must_say_of_itself():
    """A method with an `encode` of its own, run as if it had none, would have wrong numbers and no error."""

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
    """Under the mask that is block-diagonal by construction, with memories in front of the rows and without."""
    random = torch.Generator().manual_seed(seed)
    layouts = []
    for each in lengths:
        sees = torch.rand(len(each), len(each), generator=random) < 0.5
        layouts.append(lay_out(len(each) % 3, each, Pattern(sees), "sequential"))
        if on_memory:
            layouts[-1] = layouts[-1].on_memory(
                lay_out(1, each[:1], Pattern(sees[:1, :1]), "sequential")
            )
    entries = [layout.entries for layout in layouts]
    rows = [len(layout) - layout.entries for layout in layouts]
    expected = torch.cat(
        [
            torch.block_diag(
                *(layout.mask[layout.entries :, : layout.entries].int() for layout in layouts)
            ),
            torch.block_diag(
                *(layout.mask[layout.entries :, layout.entries :].int() for layout in layouts)
            ),
        ],
        dim=1,
    ).bool()
    joint = side_by_side(layouts)
    assert joint.entries == sum(entries) and torch.equal(joint.mask[joint.entries :], expected)
    positions = torch.cat([layout.positions[layout.entries :] for layout in layouts])
    assert torch.equal(joint.positions[joint.entries :], positions)

    module = nn.Module()
    module.num_key_value_groups = heads[0] // heads[1]
    query = torch.randn(1, heads[0], sum(rows), 8, dtype=torch.float64, generator=random)
    # Far from each other: what the parts weigh differs by orders of magnitude.
    key, value = 9 * torch.randn(
        2, 1, heads[1], len(joint), 8, dtype=torch.float64, generator=random
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout_attention, "CONTEXT_TOKENS", n)
        if not kernel:
            patch.setattr(AttentionCall, "has_kernel", False)
        under = UnderLayouts(layouts)
        with attention_by(under):
            mask = under.mask(query.dtype, query.device)
            found, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, scaling=0.3)
        pieces = [
            (some.start - joint.entries, some.stop - joint.entries) for some, *_ in under.parts
        ]
    assert under.layers == 1
    attended = scaled_dot_product_attention(
        query, key, value, expected, scale=0.3, enable_gqa=True
    ).transpose(1, 2)
    torch.testing.assert_close(found, attended, rtol=1e-10, atol=1e-10)
    # No row is in two pieces that would have fitted into one, and all tokens are in one piece each.
    assert [i for piece in pieces for i in range(*piece)] == list(range(sum(rows)))
    ends = torch.tensor(rows).cumsum(0).tolist()
    for start, length in zip([0, *ends], rows, strict=False):
        holding = [piece for piece in pieces if piece[0] < start + length and piece[1] > start]
        assert len(holding) == max(1, math.ceil(length / n))


def generated(
    runner, prompts: list[TokenizedPrompt], single, beams: int = 1
) -> tuple[list[list[int]], list[int]]:
    """What follows each prompt, and how many rows each batch had."""
    found: dict[int, list[int]] = {}
    batches = []

    def generate(context, **given):
        given |= {
            "max_new_tokens": 6,
            "do_sample": False,
            "num_beams": beams,
            "pad_token_id": 0,
            "eos_token_id": None,
        }
        return runner.model.generate(input_ids=context, **given)

    waiting = in_order(prompts)
    while waiting:
        some = [prompts[i] for i in waiting]
        rows = runner.generate(
            some,
            [f"prompt {i}" for i in waiting],
            6,
            generate,
            GenerationSettings(beams),
            single=single,
        )
        found |= zip(waiting[: len(rows)], rows, strict=True)
        batches.append(len(rows))
        waiting = waiting[len(rows) :]
    return [found[i] for i in range(len(prompts))], batches


# One after no demonstrations, one after nothing, and two after the same context.
SHARED = context(9, 3)
PROMPTS = [
    *(
        TokenizedPrompt(context(seed, 1 + seed % 3), tuple(range(20, 22 + seed)))
        for seed in range(5)
    ),
    TokenizedPrompt(Context((3, 4, 5), ()), (20, 21)),
    TokenizedPrompt(Context((), ()), (20, 21, 22)),
    TokenizedPrompt(SHARED, (30, 31)),
    TokenizedPrompt(SHARED, (40, 41, 42)),
]


NOT_SHARED = {prompt.context for prompt in PROMPTS} - {SHARED}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["opt", "gemma2_window", "llama4_text", "qwen3_next"])
@torch.no_grad()
def test_texts_are_those_of_prompts_that_run_alone(name):
    """Rows with a context of their own are one batch, rows that share one another; those of some models run alone."""
    model = smoke_models.build(name) if name == "llama4_text" else tiny.build(name)
    for method in (ICL(), *(methods.make(*each) for each in GENERATING)):
        if name == "qwen3_next" and type(method) is not ICL:
            continue
        for beams in (1, 2) if type(method) is ICL else (1,):
            runner = MethodRunner(model, method, batch_size=4)
            found, batches = generated(runner, PROMPTS, NOT_SHARED, beams)
            alone, ones = generated(MethodRunner(model, method), PROMPTS, (), beams)
            assert found == alone
            assert ones == [1] * len(PROMPTS)
            if name == "opt" and not method.memory_depends_on_query:
                assert sorted(batches) == [2, 3, 4]


@torch.no_grad()
def test_rotary_angles_that_change_with_length():
    """Contexts on both sides of the position where they change are neither encoded nor continued together."""
    parameters = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "factor": 8.0,
        "original_max_position_embeddings": 64,
    }
    parameters |= {"short_factor": [1.0] * 6, "long_factor": [4.0] * 6}
    model = tiny.build("llama", rope_parameters=parameters, max_position_embeddings=512)
    lengths = ([35] * 2, [20] * 2, [30] * 3, [5] * 4)
    contexts = [
        Context((), tuple(tuple(range(5 + i, 5 + i + n)) for i, n in enumerate(each)))
        for each in lengths
    ]
    prompts = [TokenizedPrompt(each, (20, 21, 22)) for each in contexts]
    for method in (ICL(), methods.make("pcw", {"window_size": 2})):
        together, alone = MethodRunner(model, method, batch_size=4), MethodRunner(model, method)
        assert generated(together, prompts, contexts)[0] == generated(alone, prompts, ())[0]
        work = {each: {(20, 21, 22): ANSWERS} for each in contexts}
        assert scores(together, work) == scores(alone, work, once=False)


@torch.no_grad()
def test_how_texts_begin():
    """An ordinary pass reads a context of its own with the query; contexts of a batch are encoded side by side."""
    model = tiny.build("gpt2")
    passes = []
    model.register_forward_pre_hook(lambda module, args: passes.append(module))
    prompts = [TokenizedPrompt(context(seed, 2), (20, 21)) for seed in range(4)]
    for method, encoding in (
        (ICL(), 0),
        (methods.make("invicl"), 1),
        (methods.make("deepthink", {"T": 5}), 5),
    ):
        for rows in (1, 4):
            runner = MethodRunner(model, method, batch_size=rows)
            passes.clear()
            generated(runner, prompts, [prompt.context for prompt in prompts])
            assert len(passes) == (encoding + 6) * 4 // rows
