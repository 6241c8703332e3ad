"""Every method against a literal computation of its definition: no layout, mask, memory or packing of ours.

InvICL is computed twice: line by line as the paper's Algorithm 1 from GPT-2's weights, and for every family by
ordinary passes after joined keys and values.
"""

import contextlib
import copy
import dataclasses
import functools
import itertools
import logging
import math
import re
from pathlib import Path

import pytest
import torch
from torch.nn.functional import layer_norm
from transformers import DynamicCache

from lm_eval_icl import methods
from lm_eval_icl.errors import InputError
from lm_eval_icl.inference.caches import cache_arguments
from lm_eval_icl.inference.generation import continue_from
from lm_eval_icl.inference.positions import no_positions, position_embeddings
from lm_eval_icl.inference.scoring import score_packed, score_rows
from lm_eval_icl.methods.runner import MethodRunner
from lm_eval_icl.prompts.tokens import Context, TokenizedPrompt
from tests import evaluation, tiny

# How far log-likelihoods agree, in float64 models. Where norms are LayerNorm everything that differs between two ways
# of computing the same is float64 (rotary angles are float32, but the same for equal positions): 1e-14 was measured.
# RMSNorm rounds to float32: here both ways to the same number (1e-14 too), though a value that lies between two could
# be rounded either way, and then 1e-7 of it is gone. Gemma's eager attention has its softmax in float32 as well:
# 1e-6 was measured.
TOLERANCE = {
    "gpt2": 1e-10,
    "opt": 1e-10,
    "gpt_neox": 1e-10,
    "llama": 1e-8,
    "gemma2_window": 1e-5,
}
# All contexts on these, the others on fewer.
THOROUGH = ["gpt2", "llama"]

CONTEXTS = {
    "prefix": Context((5, 9), ((30, 31, 32, 33, 34), (40, 41, 42), (50, 51, 52, 53))),
    "bare": Context((), ((30, 31, 32), (40,), (50, 51, 52, 53, 54, 55))),
    "one": Context((5,), ((30, 31, 32),)),
    "tokens": Context((5, 9, 7), ((30,), (40,), (50,), (60,))),
    "nothing": Context(
        (5,), ((30, 31), (), (40, 41, 42))
    ),  # whose text went into another part's tokens
    "empty": Context((), ((),)),  # whose only token became the query
    "zero_shot": Context((5, 9), ()),
}
QUERIES = {
    (60, 61, 62, 63): [(70,), (71, 72, 73), (71, 72)],
    (60, 61): [(70,), (74, 75)],
    (66,): [(70,), (71, 72)],
}


@functools.cache
def tiny_model(name):
    # With a window that hides nothing: a 4-D mask given by hand would switch it off.
    overrides = {"sliding_window": 4096} if name == "gemma2_window" else {}
    return tiny.build(name, torch.float64, **overrides)


@functools.cache
def without_positions(name):
    """A copy of the model in which learned positions are zero and rotary angles turn by nothing."""
    model = copy.deepcopy(tiny_model(name))
    for part, module in model.named_modules():
        if part.endswith(("wpe", "embed_positions")):
            module.weight.data.zero_()
        if hasattr(module, "inv_freq"):
            module.inv_freq.zero_()
    return model


# The references. Each takes a context and returns a function of a query and an answer: the logits that predict the
# answer's tokens. Keys and values are a list of (keys, values), one a layer; None for those of no token.


def span(start, tokens):
    return list(range(start, start + len(tokens)))


def run(model, tokens, positions, past=None):
    """An ordinary causal pass after keys and values that exist already, at these positions: its own keys and values,
    and its logits."""
    if not tokens:
        return None, None
    cache = DynamicCache(past) if past else DynamicCache()
    inputs = {"position_ids": torch.tensor([positions]), **cache_arguments(model, cache)}
    out = model(torch.tensor([tokens]), **inputs)
    new = [
        (layer.keys[:, :, -len(tokens) :], layer.values[:, :, -len(tokens) :])
        for layer in cache.layers
    ]
    return new, out.logits[0]


def join(*parts):
    """Keys and values one after the other."""
    parts = [part for part in parts if part]
    if not parts:
        return None
    return [
        tuple(torch.cat(entries, dim=-2) for entries in zip(*layer, strict=True))
        for layer in zip(*parts, strict=True)
    ]


def query_logits(model, memory, start):
    """Query and answer in one row at this position after the memory."""

    def logits(query, answer):
        tokens = [*query, *answer]
        return run(model, tokens, span(start, tokens), memory)[1][len(query) - 1 : -1]

    return logits


def in_one_row(model, parts, sees):
    """One pass over everything.

    Args:
        parts: (label, tokens, position of the first of them) in the order of the row; the last part is the answer.
        sees: called with the labels of two tokens, and whether the second is the first or before it: whether the
            first sees the second.
    """
    tokens = [token for _, ids, _ in parts for token in ids]
    labels = [label for label, ids, _ in parts for _ in ids]
    rows = [
        [sees(of, other, j <= i) for j, other in enumerate(labels)] for i, of in enumerate(labels)
    ]
    hidden = ~torch.tensor(rows)
    # Always given: without a mask transformers takes positions that jump back for the beginning of another text.
    mask = torch.zeros(1, 1, *hidden.shape, dtype=torch.float64).masked_fill(
        hidden, torch.finfo(torch.float64).min
    )
    positions = torch.tensor(
        [[position for _, ids, start in parts for position in span(start, ids)]]
    )
    logits = model(
        torch.tensor([tokens]), position_ids=positions, attention_mask=mask, use_cache=False
    ).logits[0]
    return logits[len(tokens) - len(parts[-1][1]) - 1 : -1]


def parts_of(context, demonstrations, query, answer, positions):
    """The row P, D_1, .., D_n, Q, A with positions by DESIGN's section 3."""
    at = len(context.prefix)
    longest = max(map(len, demonstrations), default=0)
    parts = [("P", context.prefix, 0)]
    for i, demonstration in enumerate(demonstrations):
        parts.append((i, demonstration, len(context.prefix) if positions == "symmetric" else at))
        at += len(demonstration)
    start = len(context.prefix) + longest if positions == "symmetric" else at
    return [*parts, ("Q", query, start), ("A", answer, start + len(query))]


def in_a_row(sees, usual_positions):
    """The reference of a method under which all is one row of a rule, which says who sees whom."""

    def reference(model, context, positions=usual_positions, repeat=1):
        def logits(query, answer):
            parts = parts_of(context, context.demonstrations * repeat, query, answer, positions)
            return in_one_row(model, parts, sees)

        return logits

    return reference


def all_demonstrations(of, other, before):
    """Eq. 5: all tokens of all demonstrations see each other."""
    return before or (isinstance(of, int) and isinstance(other, int))


def the_query_but_no_other_demonstration(of, other, before):
    """Appendix A.2: demonstrations do not see each other, but the query, which stands after them."""
    return other in ("P", "Q") or (other == of and before) if isinstance(of, int) else before


icl = in_a_row(lambda of, other, before: before, "sequential")
prefixicl = in_a_row(all_demonstrations, "symmetric")
saicl = in_a_row(the_query_but_no_other_demonstration, "symmetric")


def pcw(model, context, window_size=1, positions="symmetric", repeat=1):
    """Eq. 6 and Appendix A.2: a pass a window, and what they leave put side by side."""
    demonstrations = context.demonstrations * repeat
    rows = [
        [token for demonstration in demonstrations[i : i + window_size] for token in demonstration]
        for i in range(0, len(demonstrations), window_size)
    ]
    prefix, _ = run(model, context.prefix, span(0, context.prefix))
    at, memory = len(context.prefix), prefix
    for row in rows:
        start = len(context.prefix) if positions == "symmetric" else at
        memory = join(memory, run(model, row, span(start, row), prefix)[0])
        at += len(row)
    if positions == "symmetric":
        at = len(context.prefix) + max(map(len, rows), default=0)
    return query_logits(model, memory, at)


def invicl(model, context, positions="symmetric", repeat=1):
    """Algorithm 1 pass by pass: after the keys of a pass, every layer attends to those of the same layer."""
    demonstrations = context.demonstrations * repeat
    p, lengths = len(context.prefix), [len(demonstration) for demonstration in demonstrations]
    if positions == "symmetric":
        first = second = [p] * len(lengths)
        end = p + max(lengths, default=0)
    else:  # as the duplicated tokens stand
        first = [p + sum(lengths[:i]) for i in range(len(lengths))]
        second = [start + sum(lengths) for start in first]
        end = p + 2 * sum(lengths)
    prefix, _ = run(model, context.prefix, span(0, context.prefix))
    alone = [
        run(model, d, span(start, d), prefix)[0]
        for d, start in zip(demonstrations, first, strict=True)
    ]
    left_out = []
    for i, (d, start) in enumerate(zip(demonstrations, second, strict=True)):
        left_out.append(run(model, d, span(start, d), join(prefix, *alone[:i], *alone[i + 1 :]))[0])
    return query_logits(model, join(prefix, *left_out), end)


def blocks_of(model):
    """The transformer blocks, where each family keeps them."""
    kind = model.config.model_type
    if kind == "gpt2":
        return model.transformer.h
    if kind == "gpt_neox":
        return model.gpt_neox.layers
    return model.model.decoder.layers if kind == "opt" else model.model.layers


def batchicl(model, context, layer=3, positions="sequential", repeat=1):
    """One-shot passes over whole rows, averaged, and the average put into a zero-shot pass over a whole row.

    With symmetric positions the query comes after the longest demonstration in all of them, the last one included.
    """
    p, longest = len(context.prefix), max(map(len, context.demonstrations), default=0)
    block = blocks_of(model)[layer - 1]

    def whole_row(demonstration, query, answer):
        start = p + (longest if positions == "symmetric" else len(demonstration))
        parts = [("P", context.prefix, 0), ("D", demonstration, p), ("Q", query, start)]
        return in_one_row(
            model, [*parts, ("A", answer, start + len(query))], lambda of, other, before: before
        )

    def logits(query, answer):
        found = []

        def read(module, args, output):
            found.append((output[0] if isinstance(output, tuple) else output)[0, -1])

        def write(module, args, output):
            hidden = output[0] if isinstance(output, tuple) else output
            hidden[0, p + len(query) - 1] = torch.stack(found).mean(0)

        with block.register_forward_hook(read):
            for demonstration in context.demonstrations * repeat:
                whole_row(demonstration, query, ())
        with block.register_forward_hook(write) if found else contextlib.nullcontext():
            return whole_row((), query, answer)

    return logits


def deepthink(
    model,
    context,
    T=5,
    eta=0.01,
    momentum=0.0,
    restart_positions=False,
    positions="sequential",
    repeat=1,
):
    """Deep-Thinking's Eq. 3 and 4 with its Appendix D: later passes stand where the query will, or where pass 1 did."""
    *parts, (_, _, start), _ = parts_of(context, context.demonstrations * repeat, (), (), positions)
    tokens = [token for _, ids, _ in parts for token in ids]
    at = [position for _, ids, first in parts for position in span(first, ids)]
    later = [position + (0 if restart_positions else start) for position in at]
    memory, _ = run(model, tokens, at)
    velocity = None
    for _ in range(T - 1 if context.demonstrations and tokens else 0):
        present, _ = run(model, tokens, later, memory)
        step = [
            [new - old for new, old in zip(*layer, strict=True)]
            for layer in zip(present, memory, strict=True)
        ]
        if velocity is not None:
            step = [
                [s + momentum * v for s, v in zip(*layer, strict=True)]
                for layer in zip(step, velocity, strict=True)
            ]
        velocity = step
        memory = [
            tuple(entry + eta * v for entry, v in zip(*layer, strict=True))
            for layer in zip(memory, velocity, strict=True)
        ]
    return query_logits(model, memory, start)


REFERENCES = {
    "ICL": icl,
    "PrefixICL": prefixicl,
    "PCW": pcw,
    "SAICL": saicl,
    "BatchICL": batchicl,
    "InvICL": invicl,
    "DeepThink": deepthink,
}
# The methods as they are, then with every knob turned.
PLAIN = [
    ("ICL", {}),
    ("NoPE", {}),
    ("PrefixICL", {}),
    ("PCW", {}),
    ("PCW", {"window_size": 2}),
    ("PCW", {"window_size": 3}),
    ("SAICL", {}),
    ("BatchICL", {"layer": 1}),
    ("BatchICL", {"layer": 2}),
    ("BatchICL", {}),  # 15, or the last block of a model that is less deep
    ("InvICL", {}),
    ("DeepThink", {}),
    ("DeepThink", {"T": 4, "eta": 0.3, "momentum": 0.9}),
    ("DeepThink", {"T": 3, "eta": 0.3, "restart_positions": True}),
]
# A method's arguments, and positions that are not its own.
KNOBS = [
    ("ICL", {}, "symmetric"),
    ("PrefixICL", {}, "sequential"),
    ("PCW", {}, "sequential"),
    ("PCW", {"window_size": 2}, "sequential"),
    ("SAICL", {}, "sequential"),
    ("BatchICL", {"layer": 2}, "symmetric"),
    ("InvICL", {}, "sequential"),
    ("DeepThink", {"T": 3, "eta": 0.5}, "symmetric"),
]
TURNED = [
    (name, {**arguments, **knob})
    for name, arguments, other in KNOBS
    for knob in ({"positions": other}, {"positions": "none"}, {"repeat": 2})
]
TURNED += [
    ("InvICL", {"repeat": 2, "positions": "sequential"}),
    (
        "DeepThink",
        {"T": 3, "eta": 0.5, "momentum": 0.9, "restart_positions": True, "positions": "symmetric"},
    ),
]


def title(case):
    return " ".join([case[0], *(f"{key}={value}" for key, value in case[1].items())])


def referred(name, case, context):
    """The reference of a case."""
    kind, arguments = case
    if kind == "NoPE":
        return icl(without_positions(name), context)
    if arguments.get("positions") == "none":  # where no position tells anything, any will do
        arguments = {key: value for key, value in arguments.items() if key != "positions"}
        return REFERENCES[kind](without_positions(name), context, **arguments)
    return REFERENCES[kind](tiny_model(name), context, **arguments)


def read(logits, answer):
    """An answer's log-likelihood, and whether it is the greedy one, from the logits that predict it."""
    logprobs = logits.log_softmax(-1)[range(len(answer)), list(answer)]
    return logprobs.sum().item(), logits.argmax(-1).tolist() == list(answer)


def greedy(logits, query, length):
    """Token by token, each from a pass of its own over everything before it."""
    tokens = []
    for _ in range(length):
        tokens.append(logits(query, (*tokens, 0))[-1].argmax().item())
    return tuple(tokens)


def expected(name, case, context):
    """query -> answer -> score, by the reference; one of the answers is the greedy one."""
    logits = referred(name, case, context)
    answers = {query: list(options) for query, options in QUERIES.items()}
    first = next(iter(answers))
    answers[first].append(greedy(logits, first, 2))
    return {
        query: {answer: read(logits(query, answer), answer) for answer in options}
        for query, options in answers.items()
    }


def scored(name, case, context, answers):
    """What our method makes of the same queries and answers, packed and one by one."""
    model, method = tiny_model(name), getattr(methods, case[0])(**case[1]).bind(tiny_model(name))
    alone, packed, packs = {}, {}, {}
    for query, options in answers.items():
        memory, rest = tiny.encoded_alone(method, model, context, query)
        alone[query] = dict(
            zip(options, score_rows(model, memory, [(rest, list(options))]), strict=True)
        )
        # Queries that share a memory share a row.
        packs.setdefault(query if method.memory_depends_on_query else None, []).append(
            (memory, rest, query)
        )
    for pack in packs.values():
        of = [(query, rest, option) for _, rest, query in pack for option in answers[query]]
        scores = score_packed(model, [(pack[0][0], [(rest, option) for _, rest, option in of])])
        for (query, _, option), score in zip(of, scores, strict=True):
            packed.setdefault(query, {})[option] = score
    return alone, packed


def as_run(name, case):
    """As the LM class runs a method: without positions where it has none."""
    if getattr(methods, case[0])(**case[1]).positions != "none":
        return contextlib.nullcontext()
    model = tiny_model(name)
    return no_positions(model, position_embeddings(model))


def check(name, case, context):
    with torch.no_grad():
        answers = expected(name, case, context)
        with as_run(name, case):
            alone, packed = scored(name, case, context, answers)
    for query, options in answers.items():
        for ours in (alone, packed):
            evaluation.assert_same(
                list(ours[query].values()), list(options.values()), TOLERANCE[name]
            )
    flags = {is_greedy for options in answers.values() for _, is_greedy in options.values()}
    assert flags == {True, False}


@pytest.mark.parametrize("case", PLAIN, ids=title)
@pytest.mark.parametrize("name", tiny.slow_but(["llama", "gemma2_window"], TOLERANCE))
def test_literal(name, case):
    for context in CONTEXTS if name in THOROUGH else ("prefix",):
        check(name, case, CONTEXTS[context])


@pytest.mark.slow
@pytest.mark.parametrize("case", TURNED, ids=title)
@pytest.mark.parametrize("name", [*THOROUGH, "gpt_neox"])
def test_literal_with_a_knob_turned(name, case):
    for context in ("prefix", "bare") if name in THOROUGH else ("bare",):
        check(name, case, CONTEXTS[context])


@pytest.mark.parametrize("name", ["gpt_neo", "mistral_window"])
@torch.no_grad()
def test_thinking_beyond_a_window(name):
    """Layers that look back a few tokens count by index, so that nothing is packed."""
    model, context, knobs = (
        tiny.build(name, torch.float64),
        CONTEXTS["prefix"],
        {"T": 3, "eta": 0.3, "momentum": 0.5},
    )
    (memory,) = methods.DeepThink(**knobs).encode(model, [context])
    logits = deepthink(model, context, **knobs)
    for query, answers in QUERIES.items():
        literal = [read(logits(query, answer), answer) for answer in answers]
        evaluation.assert_same(score_rows(model, memory, [(query, answers)]), literal, 1e-6)


def side_by_side(of, other, before):
    """A demonstration, ("first", i), sees no other."""
    return before if isinstance(of, str) else before and of == other


def in_two_copies(of, other, before):
    """Section 3.3: the second copy of a demonstration sees the first copies of the others, and what follows it sees the
    second copies alone."""
    if isinstance(of, str):
        return before and other[0] != "first"
    if isinstance(other, str):
        return False  # what follows it
    (copy, i), (theirs, j) = of, other
    return before if (copy, i) == (theirs, j) else copy == "second" and theirs == "first" and i != j


@pytest.mark.parametrize(
    ("name", "copies", "sees"), [("PCW", 1, side_by_side), ("InvICL", 2, in_two_copies)]
)
@torch.no_grad()
def test_masks_beyond_a_window_that_stays(name, copies, sees):
    """GPT-Neo's local layers hide what is more than 24 tokens back in the row, whatever the mask shows: as in one pass
    of transformers' own model over everything. The order of the demonstrations then matters."""
    model, shown = (
        tiny.build("gpt_neo", torch.float64),
        [tuple(range(30 + 9 * i, 38 + 8 * i)) for i in range(5)],
    )
    runner, context = MethodRunner(model, getattr(methods, name)()), Context((), tuple(shown))
    assert (
        not runner.invariant
        and runner.limits(40).too_long(TokenizedPrompt(context, (1, 2)), 30).why
    )
    assert runner.limits(200).too_long(TokenizedPrompt(context, (1, 2)), 3) is None
    longest = max(map(len, shown))
    parts = [
        ((["first", "second"][copy], i), d, 0)
        for copy in range(copies)
        for i, d in enumerate(shown)
    ]
    scored = dict(
        pair for batch in runner.score({context: QUERIES}) for pair in zip(*batch, strict=True)
    )
    for query, answers in QUERIES.items():
        for answer in answers:
            row = [*parts, ("Q", query, longest), ("A", answer, longest + len(query))]
            literal = read(in_one_row(model, row, sees), answer)
            # GPT-Neo attends in float32.
            evaluation.assert_same([scored[context, query, answer]], [literal], 1e-6)
    turned = Context((), tuple(reversed(shown)))
    query, answers = next(iter(QUERIES.items()))
    [(_, other)] = list(runner.score({turned: {query: answers[:1]}}))
    assert abs(other[0][0] - scored[context, query, answers[0]][0]) > 1e-4
    assert (
        runner.limits(200).too_long(TokenizedPrompt(Context((5,), tuple(shown)), (1, 2)), 3) is None
        or copies == 2
    )


@torch.no_grad()
def test_half_precision_keeps_small_steps():
    """In bfloat16 a step of eta=0.001 is below half a unit in the last place, mostly; the running sum is not."""
    model, context = tiny.build("llama", torch.bfloat16), CONTEXTS["prefix"]
    (start,) = methods.ICL().encode(model, [context])
    (moved,) = methods.DeepThink(T=30, eta=0.001).encode(model, [context])
    assert moved.layers[0][0].dtype == torch.bfloat16
    # What the first layer is given does not change.
    pairs = zip(itertools.chain(*start.layers[1:]), itertools.chain(*moved.layers[1:]), strict=True)
    assert all((one != other).float().mean() > 0.5 for one, other in pairs)


# Algorithm 1 as it stands, layer by layer from GPT-2's weights.


def aggregate(block, heads, own, *others):
    """`aggr{others, own}`: one layer's update of the hidden states `own`, [tokens, width], which attend to all of
    the others' and causally to themselves; all are those that the layer before left."""

    def normed(hidden, norm):
        return layer_norm(hidden, hidden.shape[-1:], norm.weight, norm.bias, norm.eps)

    def linear(hidden, module):
        return hidden @ module.weight + module.bias

    before = sum(map(len, others))
    read = linear(normed(torch.cat([*others, own]), block.ln_1), block.attn.c_attn)
    queries, keys, values = (
        part.unflatten(-1, (heads, -1)).transpose(0, 1) for part in read.chunk(3, dim=-1)
    )
    scores = (
        queries[:, before:] @ keys.transpose(1, 2) / math.sqrt(keys.shape[-1])
    )  # [heads, own, others and own]
    ahead = torch.ones(len(own), len(own), dtype=torch.bool).triu(1)
    scores[:, :, before:] = scores[:, :, before:].masked_fill(ahead, -math.inf)
    attended = (scores.softmax(-1) @ values).transpose(0, 1).flatten(1)
    own = own + linear(attended, block.attn.c_proj)
    inner = linear(normed(own, block.ln_2), block.mlp.c_fc)
    gelu = 0.5 * inner * (1 + torch.tanh(math.sqrt(2 / math.pi) * (inner + 0.044715 * inner**3)))
    return own + linear(gelu, block.mlp.c_proj)


def algorithm_1(model, context, query, answer):
    """The logits that predict the answer. h_bar are the independent encodings, h the leave-one-out ones.

    In line 8 the query reads h, as section 3.3 and Figure 2d have it. The prefix, which the paper does not have, is
    read by all.
    """
    body, heads = model.transformer, model.config.n_head

    def embedded(tokens, start):
        tokens, positions = (
            torch.tensor(ids, dtype=torch.long) for ids in (tokens, span(start, tokens))
        )
        return body.wte.weight[tokens] + body.wpe.weight[positions]

    p, demonstrations = len(context.prefix), context.demonstrations
    prefix = embedded(context.prefix, 0)
    h_bar = [embedded(demonstration, p) for demonstration in demonstrations]
    h = list(h_bar)
    h_t = embedded([*query, *answer], p + max(map(len, demonstrations), default=0))
    for block in body.h:

        def aggr(own, *others, block=block):
            return aggregate(block, heads, own, *others)

        prefix, h_bar, h, h_t = (
            aggr(prefix) if p else prefix,
            [aggr(h_bar[i], prefix) for i in range(len(h))],
            [
                aggr(h[i], prefix, *(h_bar[j] for j in range(len(h)) if j != i))
                for i in range(len(h))
            ],
            aggr(h_t, prefix, *h),
        )
    final = layer_norm(h_t, h_t.shape[-1:], body.ln_f.weight, body.ln_f.bias, body.ln_f.eps)
    return (final @ model.lm_head.weight.T)[len(query) - 1 : -1]


@pytest.mark.parametrize("context", CONTEXTS)
@torch.no_grad()
def test_invicl_is_algorithm_1(context):
    """On GPT-2 literally; the passes after joined keys, which the other families are compared with, agree."""
    model, context = tiny_model("gpt2"), CONTEXTS[context]
    passes = invicl(model, context)
    answers = {}
    for query, options in QUERIES.items():
        for answer in options:
            literal = algorithm_1(model, context, query, answer)
            torch.testing.assert_close(passes(query, answer), literal, rtol=0, atol=1e-10)
            answers.setdefault(query, {})[answer] = read(literal, answer)
    for ours in scored("gpt2", ("InvICL", {}), context, answers):
        for query, options in answers.items():
            evaluation.assert_same(
                list(ours[query].values()), list(options.values()), TOLERANCE["gpt2"]
            )


@pytest.mark.parametrize(
    "case", [case for case in PLAIN + TURNED if case[0] not in ("BatchICL", "DeepThink")], ids=title
)
@torch.no_grad()
def test_the_layout_drawn_is_the_one_that_runs(case):
    """Query and continuation in the layout, all in one row, give the same as both after the memory."""
    kind, arguments = case
    context, query, answer = CONTEXTS["prefix"], (60, 61, 62, 63), (71, 72, 73)
    method = getattr(methods, kind)(**arguments)
    layout = method.lay_out(len(context.prefix), context.lengths, len(query), len(answer))
    model = without_positions("gpt2") if method.positions == "none" else tiny_model("gpt2")
    hidden = torch.zeros(layout.mask.shape, dtype=torch.float64).masked_fill(
        ~layout.mask, -math.inf
    )
    prompt = [*context.tokens, *query, *answer]
    ids, position_ids = torch.tensor([[prompt[i] for i in layout.source]]), layout.positions[None]
    logits = model(
        ids, position_ids=position_ids, attention_mask=hidden[None, None], use_cache=False
    ).logits[0]
    expected = referred("gpt2", case, context)(query, answer)
    torch.testing.assert_close(logits[-4:-1], expected, rtol=0, atol=1e-10)
    assert layout.end == layout.positions[-1] + (method.positions != "none")


@pytest.mark.parametrize("case", PLAIN, ids=title)
@torch.no_grad()
def test_generation_goes_on_from_any_memory(case):
    """Also from one without a single entry, and from the residual stream that only the first pass replaces."""
    name = "llama"
    model, method = tiny_model(name), getattr(methods, case[0])(**case[1]).bind(tiny_model(name))

    def generate(context, **kwargs):
        return model.generate(
            context, max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0, **kwargs
        )

    for context in (CONTEXTS["prefix"], CONTEXTS["zero_shot"], Context((), ())):
        for query in QUERIES:
            expected = greedy(referred(name, case, context), query, 4)
            if model.config.eos_token_id in expected:
                continue  # min_new_tokens keeps it from being said
            with as_run(name, case):
                memory, rest = tiny.encoded_alone(method, model, context, query)
                ours = continue_from(model, generate, [memory], [rest])
            assert ours == [list(expected)], (context, query)


def test_without_demonstrations_thinking_is_zero_shot_and_says_so_once(
    checkpoint, caplog, monkeypatch
):
    monkeypatch.setattr(logging.getLogger("lm_eval"), "propagate", True)
    names = ["one_token", "generate"]
    with caplog.at_level("WARNING", logger="lm_eval.icl"):
        thought = evaluation.answers("deepthink", checkpoint("gpt2"), names, None)
    assert thought == evaluation.answers("icl", checkpoint("gpt2"), names, None)
    warnings = [
        record.getMessage() for record in caplog.records if "--num_fewshot" in record.getMessage()
    ]
    assert (
        len(warnings) == 1
        and "2 of 2 tasks have no demonstrations (one_token, generate)" in warnings[0]
    )


MINE = """
from dataclasses import dataclass

from lm_eval_icl.prompts.layouts import Pattern, before
from lm_eval_icl.methods import Method


@dataclass(frozen=True)
class Mine(Method):
    reach: int = 1

    def pattern(self, n: int) -> Pattern:
        return Pattern(before(n).triu(-self.reach))
"""


def test_a_method_in_a_file_of_ones_own(checkpoint, tmp_path, monkeypatch):
    """MODULE:CLASS in the working directory is a model of lm-eval, with its arguments, as it is of the Python API. If a
    demonstration reaches all those before it, it is `icl`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "of_mine.py").write_text(MINE)
    path = checkpoint("llama")
    found = [
        evaluation.run(model, path, ["many_tokens", "generate"], 4, args=args)
        for model, args in (("of_mine:Mine", {}), ("of_mine:Mine", {"reach": 9}), ("icl", {}))
    ]
    near, far, plain = map(evaluation.responses, found)
    assert near != far
    evaluation.assert_same(far, plain, 1e-5)
    assert found[1]["config"]["model"] == "of_mine:Mine"
    assert found[1]["config"]["icl"].items() >= {"method": "mine", "reach": 9}.items()
    assert methods.make("of_mine:Mine", {"reach": 9}) == methods.find("of_mine:Mine")(reach=9)


PAGE = Path(__file__).parents[2] / "docs" / "add-a-method.md"


def classes_of_the_page():
    """The classes that docs/add-a-method.md defines, by name."""
    names = {"__name__": "a_page"}
    for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        exec(code, names)
    return names


def scores_of(method, context):
    """(query, answer) -> the log-probability of the answer."""
    scored = {}
    for requests, scores in MethodRunner(tiny_model("llama"), method).score({context: QUERIES}):
        for (_, query, answer), (logprob, _) in zip(requests, scores, strict=True):
            scored[query, answer] = logprob
    return scored


def test_the_methods_of_the_page_are_what_it_says():
    page = classes_of_the_page()
    context = CONTEXTS["prefix"]
    plain = scores_of(methods.ICL(), context)
    near = scores_of(page["Neighbours"](), context)
    assert scores_of(page["Reach"](reach=1), context) == near != plain
    assert scores_of(page["Reach"](reach=2), context) == pytest.approx(plain, abs=1e-8)
    with pytest.raises(InputError, match="reach: reach=0: must be a whole number, 1 or more"):
        page["Reach"](reach=0)
    averaged = scores_of(page["Averaged"](window_size=2), context)
    first, second = (
        scores_of(methods.ICL(), Context(context.prefix, window))
        for window in (context.demonstrations[:2], context.demonstrations[2:])
    )
    for (query, answer), logprob in averaged.items():
        if len(answer) == 1:
            mean = (math.exp(first[query, answer]) + math.exp(second[query, answer])) / 2
            assert logprob == pytest.approx(math.log(mean), abs=1e-8)


def test_a_pattern_of_another_type_is_one_line():
    @dataclasses.dataclass(frozen=True)
    class Mask(methods.Method):
        def pattern(self, n):
            return torch.ones(n, n, dtype=torch.bool)

    with pytest.raises(InputError, match="mask: pattern: must return a Pattern, not a Tensor"):
        Mask.from_arguments({})


def test_parts_of_other_sizes_keep_the_numbers_of_their_demonstrations():
    class Parts(methods.NBCE):
        def contexts(self, context):
            shown = context.demonstrations
            return [Context((), part) for part in (shown[:1], shown[1:])]

    first, second = (layout for _, layout in Parts().passes(0, [3] * 3))
    assert [block.name for block in first.blocks] == ["D1"]
    assert [block.name for block in second.blocks] == ["D2", "D3"]
