"""Every method against a literal computation of its definition: no layout, mask, memory or packing
of ours.

InvICL is computed twice: line by line as the paper's Algorithm 1 from GPT-2's weights, and for
every family by ordinary passes after joined keys and values.
"""

import contextlib
import copy
import dataclasses
import functools
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
from lm_eval_icl.harness.models import model_class
from lm_eval_icl.harness.prompts import recording
from lm_eval_icl.inference.caches import cache_arguments
from lm_eval_icl.inference.generation import continue_from
from lm_eval_icl.inference.positions import no_positions, position_embeddings
from lm_eval_icl.inference.scoring import score_packed, score_rows
from lm_eval_icl.methods.runner import MethodRunner
from lm_eval_icl.prompts.tokens import Context, TokenizedPrompt
from tests import evaluation, tiny

pytestmark = pytest.mark.usefixtures("tried_once")

# How far log-likelihoods agree, in float64 models. Where norms are LayerNorm everything that
# differs between two ways of computing the same is float64 (rotary angles are float32, but the same
# for equal positions): 1e-14 was measured. RMSNorm rounds to float32: here both ways to the same
# number (1e-14 too), though a value that lies between two could be rounded either way, and then
# 1e-7 of it is gone. Gemma's eager attention has its softmax in float32 as well: 1e-6 was measured.
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


# The references. Each takes a context and returns a function of a query and an answer: the logits
# that predict the answer's tokens. Keys and values are a list of (keys, values), one a layer; None
# for those of no token.


def span(start, tokens):
    return list(range(start, start + len(tokens)))


def run(model, tokens, positions, past=None):
    """An ordinary causal pass after keys and values that exist already, at these positions: its own
    keys and values, and its logits."""
    if not tokens:
        return None, None
    cache = DynamicCache(past) if past else DynamicCache()
    arguments = cache_arguments(model, cache)
    ids = torch.tensor([tokens])
    output = model(ids, position_ids=torch.tensor([positions]), **arguments)
    n = len(tokens)
    own = [(layer.keys[:, :, -n:], layer.values[:, :, -n:]) for layer in cache.layers]
    return own, output.logits[0]


def entries_of(model, tokens, start, past=None):
    """The keys and values of tokens that stand one after the other from this position on."""
    entries, _ = run(model, tokens, span(start, tokens), past)
    return entries


def join(*parts):
    """Keys and values one after the other."""
    parts = [part for part in parts if part]
    if not parts:
        return None
    joined = []
    for layer in zip(*parts, strict=True):
        keys, values = zip(*layer, strict=True)
        joined.append((torch.cat(keys, dim=-2), torch.cat(values, dim=-2)))
    return joined


def query_logits(model, memory, start):
    """Query and answer in one row at this position after the memory."""

    def logits(query, answer):
        tokens = [*query, *answer]
        _, of_all = run(model, tokens, span(start, tokens), memory)
        return of_all[len(query) - 1 : -1]

    return logits


def in_one_row(model, parts, sees):
    """One pass over everything.

    Args:
        parts: (label, tokens, position of the first of them) in the order of the row; the last part
            is the answer.
        sees: called with the labels of two tokens, and whether the second is the first or before
            it: whether the first sees the second.
    """
    tokens = []
    labels = []
    positions = []
    for label, ids, start in parts:
        tokens += ids
        labels += [label] * len(ids)
        positions += span(start, ids)
    shown = []
    for i, label in enumerate(labels):
        shown.append([sees(label, other, j <= i) for j, other in enumerate(labels)])
    hidden = ~torch.tensor([[shown]])
    # Always given: without a mask transformers takes positions that jump back for the beginning
    # of another text.
    mask = torch.zeros(hidden.shape, dtype=torch.float64)
    mask.masked_fill_(hidden, torch.finfo(torch.float64).min)
    arguments = {"position_ids": torch.tensor([positions]), "attention_mask": mask}
    logits = model(torch.tensor([tokens]), **arguments, use_cache=False).logits[0]
    _, answer, _ = parts[-1]
    return logits[len(tokens) - len(answer) - 1 : -1]


def parts_of(context, demonstrations, query, answer, positions):
    """The row P, D_1, .., D_n, Q, A. Symmetric positions: each demonstration begins after the
    prefix, and the query after the longest."""
    p = len(context.prefix)
    symmetric = positions == "symmetric"
    at = p
    parts = [("P", context.prefix, 0)]
    for i, demonstration in enumerate(demonstrations):
        parts.append((i, demonstration, p if symmetric else at))
        at += len(demonstration)
    start = p + max(map(len, demonstrations), default=0) if symmetric else at
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
    """Appendix A.2: demonstrations do not see each other, but the query, which stands after
    them."""
    if not isinstance(of, int):
        return before
    return other in ("P", "Q") or (other == of and before)


def causally(of, other, before):
    return before


icl = in_a_row(causally, "sequential")
prefixicl = in_a_row(all_demonstrations, "symmetric")
saicl = in_a_row(the_query_but_no_other_demonstration, "symmetric")


def pcw(model, context, window_size=1, positions="symmetric", repeat=1):
    """Eq. 6 and Appendix A.2: a pass a window, and what they leave put side by side."""
    demonstrations = context.demonstrations * repeat
    p = len(context.prefix)
    symmetric = positions == "symmetric"
    windows = []
    for i in range(0, len(demonstrations), window_size):
        windows.append(sum(demonstrations[i : i + window_size], ()))
    prefix = entries_of(model, context.prefix, 0)
    memory = prefix
    at = p
    for window in windows:
        entries = entries_of(model, window, p if symmetric else at, prefix)
        memory = join(memory, entries)
        at += len(window)
    if symmetric:
        at = p + max(map(len, windows), default=0)
    return query_logits(model, memory, at)


def invicl(model, context, positions="symmetric", repeat=1):
    """Algorithm 1 pass by pass: after the keys of a pass, every layer attends to those of the same
    layer."""
    demonstrations = context.demonstrations * repeat
    p = len(context.prefix)
    lengths = [len(demonstration) for demonstration in demonstrations]
    if positions == "symmetric":
        first = [p] * len(lengths)
        second = first
        end = p + max(lengths, default=0)
    else:  # as the duplicated tokens stand
        first = [p + sum(lengths[:i]) for i in range(len(lengths))]
        second = [start + sum(lengths) for start in first]
        end = p + 2 * sum(lengths)
    prefix = entries_of(model, context.prefix, 0)
    alone = []
    for demonstration, start in zip(demonstrations, first, strict=True):
        alone.append(entries_of(model, demonstration, start, prefix))
    left_out = []
    for i, demonstration in enumerate(demonstrations):
        others = join(prefix, *alone[:i], *alone[i + 1 :])
        left_out.append(entries_of(model, demonstration, second[i], others))
    return query_logits(model, join(prefix, *left_out), end)


def blocks_of(model):
    """The transformer blocks, where each family keeps them."""
    kind = model.config.model_type
    if kind == "gpt2":
        return model.transformer.h
    if kind == "gpt_neox":
        return model.gpt_neox.layers
    return model.model.decoder.layers if kind == "opt" else model.model.layers


def stream_of(output):
    """The residual stream that a block hands on."""
    return output[0] if isinstance(output, tuple) else output


def batchicl(model, context, layer=3, positions="sequential", repeat=1):
    """One-shot passes over whole rows, averaged, and the average put into a zero-shot pass over a
    whole row.

    With symmetric positions the query comes after the longest demonstration in all of them, the
    last one included.
    """
    p = len(context.prefix)
    longest = max(map(len, context.demonstrations), default=0)
    block = blocks_of(model)[layer - 1]

    def whole_row(demonstration, query, answer):
        start = p + (longest if positions == "symmetric" else len(demonstration))
        parts = [("P", context.prefix, 0), ("D", demonstration, p)]
        parts += [("Q", query, start), ("A", answer, start + len(query))]
        return in_one_row(model, parts, causally)

    @functools.cache
    def streams_of(query):
        streams = []

        def read(module, args, output):
            streams.append(stream_of(output)[0, -1])

        with block.register_forward_hook(read):
            for demonstration in context.demonstrations * repeat:
                whole_row(demonstration, query, ())
        return streams

    def logits(query, answer):
        streams = streams_of(query)

        def write(module, args, output):
            stream_of(output)[0, p + len(query) - 1] = torch.stack(streams).mean(0)

        with block.register_forward_hook(write) if streams else contextlib.nullcontext():
            return whole_row((), query, answer)

    return logits


def combined(combine, *memories):
    """`combine` of the keys of memories in each layer, and of their values."""
    layers = []
    for layer in zip(*memories, strict=True):
        keys, values = zip(*layer, strict=True)
        layers.append((combine(*keys), combine(*values)))
    return layers


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
    """Deep-Thinking's Eq. 3 and 4 with its Appendix D: later passes stand where the query will, or
    where pass 1 did."""
    *parts, (_, _, start), _ = parts_of(context, context.demonstrations * repeat, (), (), positions)
    tokens = []
    first = []
    for _, ids, begin in parts:
        tokens += ids
        first += span(begin, ids)
    later = first if restart_positions else [start + position for position in first]
    memory, _ = run(model, tokens, first)
    if not context.demonstrations or not tokens:
        return query_logits(model, memory, start)
    velocity = combined(torch.zeros_like, memory)
    for _ in range(T - 1):
        present, _ = run(model, tokens, later, memory)
        step = combined(lambda new, old: new - old, present, memory)
        velocity = combined(lambda s, v: s + momentum * v, step, velocity)
        memory = combined(lambda entry, v: entry + eta * v, memory, velocity)
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
TURNED = []
for method, arguments, other in KNOBS:
    TURNED.append((method, {**arguments, "positions": other}))
    TURNED.append((method, {**arguments, "positions": "none"}))
    TURNED.append((method, {**arguments, "repeat": 2}))
TURNED += [
    ("InvICL", {"repeat": 2, "positions": "sequential"}),
    (
        "DeepThink",
        {"T": 3, "eta": 0.5, "momentum": 0.9, "restart_positions": True, "positions": "symmetric"},
    ),
]


def title(case):
    kind, arguments = case
    return " ".join([kind, *(f"{key}={value}" for key, value in arguments.items())])


def method_of(case):
    kind, arguments = case
    return getattr(methods, kind)(**arguments)


def referred(name, case, context):
    """The reference of a case."""
    kind, arguments = case
    model = tiny_model(name)
    if kind == "NoPE":
        return icl(without_positions(name), context)
    if arguments.get("positions") == "none":  # where no position tells anything, any will do
        model = without_positions(name)
        arguments = {key: value for key, value in arguments.items() if key != "positions"}
    return REFERENCES[kind](model, context, **arguments)


def read(logits, answer):
    """An answer's log-likelihood, and whether it is the greedy one, from the logits that predict
    it."""
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
    scores = {}
    for query, options in answers.items():
        scores[query] = {answer: read(logits(query, answer), answer) for answer in options}
    return scores


def scored(name, case, context, answers):
    """What our method makes of the same queries and answers, packed and one by one."""
    model = tiny_model(name)
    method = method_of(case).bind(model)
    alone = {}
    packs = {}
    for query, options in answers.items():
        memory, rest = tiny.encoded_alone(method, model, context, query)
        scores = score_rows(model, memory, [(rest, list(options))])
        alone[query] = dict(zip(options, scores, strict=True))
        # Queries that share a memory share a row.
        key = query if method.memory_depends_on_query else None
        _, requests = packs.setdefault(key, (memory, []))
        requests += [(query, rest, option) for option in options]
    packed = {query: {} for query in answers}
    for memory, requests in packs.values():
        pairs = [(rest, option) for _, rest, option in requests]
        scores = score_packed(model, [(memory, pairs)])
        for (query, _, option), score in zip(requests, scores, strict=True):
            packed[query][option] = score
    return alone, packed


def as_run(name, case):
    """As the LM class runs a method: without positions where it has none."""
    if method_of(case).positions != "none":
        return contextlib.nullcontext()
    model = tiny_model(name)
    return no_positions(model, position_embeddings(model))


def assert_same_scores(ours, expected, tolerance):
    """Of every query, the scores of its answers in order."""
    for query, options in expected.items():
        mine = list(ours[query].values())
        evaluation.assert_same(mine, list(options.values()), tolerance)


def check(name, case, context):
    with torch.no_grad():
        answers = expected(name, case, context)
        with as_run(name, case):
            alone, packed = scored(name, case, context, answers)
    assert_same_scores(alone, answers, TOLERANCE[name])
    assert_same_scores(packed, answers, TOLERANCE[name])
    flags = set()
    for options in answers.values():
        flags |= {is_greedy for _, is_greedy in options.values()}
    assert flags == {True, False}


@pytest.mark.parametrize("case", PLAIN, ids=title)
@pytest.mark.parametrize("name", tiny.slow_but(["llama", "gemma2_window"], TOLERANCE))
def test_literal(name, case):
    contexts = CONTEXTS if name in THOROUGH else ["prefix"]
    for context in contexts:
        check(name, case, CONTEXTS[context])


@pytest.mark.slow
@pytest.mark.parametrize("case", TURNED, ids=title)
@pytest.mark.parametrize("name", [*THOROUGH, "gpt_neox"])
def test_literal_with_a_knob_turned(name, case):
    contexts = ["prefix", "bare"] if name in THOROUGH else ["bare"]
    for context in contexts:
        check(name, case, CONTEXTS[context])


@pytest.mark.parametrize("name", ["gpt_neo", "mistral_window"])
@torch.no_grad()
def test_thinking_beyond_a_window(name):
    """Layers that look back a few tokens count by index, so that nothing is packed."""
    model = tiny.build(name, torch.float64)
    context = CONTEXTS["prefix"]
    knobs = {"T": 3, "eta": 0.3, "momentum": 0.5}
    (memory,) = methods.DeepThink(**knobs).encode(model, [context])
    logits = deepthink(model, context, **knobs)
    for query, answers in QUERIES.items():
        literal = [read(logits(query, answer), answer) for answer in answers]
        ours = score_rows(model, memory, [(query, answers)])
        evaluation.assert_same(ours, literal, 1e-6)


def side_by_side(of, other, before):
    """A demonstration, ("first", i), sees no other."""
    return before if isinstance(of, str) else before and of == other


def in_two_copies(of, other, before):
    """Section 3.3: the second copy of a demonstration sees the first copies of the others, and what
    follows it sees the second copies alone."""
    if isinstance(of, str):
        return before and other[0] != "first"
    if isinstance(other, str):
        return False  # what follows it
    if of == other:
        return before
    copy, i = of
    others_copy, j = other
    return copy == "second" and others_copy == "first" and i != j


@pytest.mark.parametrize(
    ("name", "copies", "sees"), [("PCW", 1, side_by_side), ("InvICL", 2, in_two_copies)]
)
@torch.no_grad()
def test_masks_beyond_a_window_that_stays(name, copies, sees):
    """GPT-Neo's local layers hide what is more than 24 tokens back in the row, whatever the mask
    shows: as in one pass of transformers' own model over everything. The order of the
    demonstrations then matters."""
    model = tiny.build("gpt_neo", torch.float64)
    shown = tuple(tuple(range(30 + 9 * i, 38 + 8 * i)) for i in range(5))
    context = Context((), shown)
    runner = MethodRunner(model, getattr(methods, name)())
    prompt = TokenizedPrompt(context, (1, 2))
    assert not runner.invariant
    assert runner.limits(40).too_long(prompt, 30).why
    assert runner.limits(200).too_long(prompt, 3) is None
    parts = []
    for which in ["first", "second"][:copies]:
        parts += [((which, i), demonstration, 0) for i, demonstration in enumerate(shown)]
    start = max(map(len, shown))
    scores = tiny.scores(runner, {context: QUERIES})
    assert len(scores) == sum(map(len, QUERIES.values()))
    for (_, query, answer), score in scores.items():
        row = [*parts, ("Q", query, start), ("A", answer, start + len(query))]
        literal = read(in_one_row(model, row, sees), answer)
        # GPT-Neo attends in float32.
        evaluation.assert_same([score], [literal], 1e-6)
    turned = Context((), shown[::-1])
    query, (answer, *_) = next(iter(QUERIES.items()))
    [(in_turn, _)] = tiny.scores(runner, {turned: {query: [answer]}}).values()
    assert abs(in_turn - scores[context, query, answer][0]) > 1e-4
    after_a_prefix = TokenizedPrompt(Context((5,), shown), (1, 2))
    assert runner.limits(200).too_long(after_a_prefix, 3) is None or copies == 2


@torch.no_grad()
def test_half_precision_keeps_small_steps():
    """In bfloat16 a step of eta=0.001 is below half a unit in the last place, mostly; the running
    sum is not."""
    model = tiny.build("llama", torch.bfloat16)
    context = CONTEXTS["prefix"]
    (start,) = methods.ICL().encode(model, [context])
    (moved,) = methods.DeepThink(T=30, eta=0.001).encode(model, [context])
    assert moved.layers[0][0].dtype == torch.bfloat16
    # What the first layer is given does not change.
    for before, after in zip(start.layers[1:], moved.layers[1:], strict=True):
        for old, new in zip(before, after, strict=True):
            assert (old != new).float().mean() > 0.5


# Algorithm 1 as it stands, layer by layer from GPT-2's weights.


def aggregate(block, heads, own, *others):
    """`aggr{others, own}`: one layer's update of the hidden states `own`, [tokens, width], which
    attend to all of the others' and causally to themselves; all are those that the layer before
    left."""

    def normed(hidden, norm):
        return layer_norm(hidden, hidden.shape[-1:], norm.weight, norm.bias, norm.eps)

    def linear(hidden, module):
        return hidden @ module.weight + module.bias

    def by_head(hidden):
        return hidden.unflatten(-1, (heads, -1)).transpose(0, 1)  # [heads, tokens, width of a head]

    before = sum(map(len, others))
    states = normed(torch.cat([*others, own]), block.ln_1)
    queries, keys, values = linear(states, block.attn.c_attn).chunk(3, dim=-1)
    queries = by_head(queries[before:])
    keys = by_head(keys)
    scores = queries @ keys.mT / math.sqrt(keys.shape[-1])  # [heads, own, others and own]
    ahead = torch.ones(len(own), len(own), dtype=torch.bool).triu(1)
    scores[:, :, before:].masked_fill_(ahead, -math.inf)
    attended = scores.softmax(-1) @ by_head(values)
    own = own + linear(attended.transpose(0, 1).flatten(1), block.attn.c_proj)
    inner = linear(normed(own, block.ln_2), block.mlp.c_fc)
    cubic = inner + 0.044715 * inner**3
    gelu = 0.5 * inner * (1 + torch.tanh(math.sqrt(2 / math.pi) * cubic))
    return own + linear(gelu, block.mlp.c_proj)


def algorithm_1(model, context, query, answer):
    """The logits that predict the answer. h_bar are the independent encodings, h the leave-one-out
    ones.

    In line 8 the query reads h, as section 3.3 and Figure 2d have it. The prefix, which the paper
    does not have, is read by all.
    """
    body = model.transformer
    p = len(context.prefix)
    demonstrations = context.demonstrations

    def embedded(tokens, start):
        ids = torch.tensor(tokens, dtype=torch.long)
        positions = torch.tensor(span(start, tokens), dtype=torch.long)
        return body.wte.weight[ids] + body.wpe.weight[positions]

    prefix = embedded(context.prefix, 0)
    h_bar = [embedded(demonstration, p) for demonstration in demonstrations]
    h = list(h_bar)
    h_t = embedded([*query, *answer], p + max(map(len, demonstrations), default=0))
    for block in body.h:
        aggr = functools.partial(aggregate, block, model.config.n_head)
        next_h_t = aggr(h_t, prefix, *h)
        next_h = []
        for i, state in enumerate(h):
            next_h.append(aggr(state, prefix, *h_bar[:i], *h_bar[i + 1 :]))
        h_bar = [aggr(state, prefix) for state in h_bar]
        prefix = aggr(prefix) if p else prefix
        h = next_h
        h_t = next_h_t
    final = layer_norm(h_t, h_t.shape[-1:], body.ln_f.weight, body.ln_f.bias, body.ln_f.eps)
    return (final @ model.lm_head.weight.T)[len(query) - 1 : -1]


@pytest.mark.parametrize("context", CONTEXTS)
@torch.no_grad()
def test_invicl_is_algorithm_1(context):
    """On GPT-2 literally; the passes after joined keys, which the other families are compared with,
    agree."""
    model = tiny_model("gpt2")
    context = CONTEXTS[context]
    passes = invicl(model, context)
    answers = {query: {} for query in QUERIES}
    for query, options in QUERIES.items():
        for answer in options:
            literal = algorithm_1(model, context, query, answer)
            torch.testing.assert_close(passes(query, answer), literal, rtol=0, atol=1e-10)
            answers[query][answer] = read(literal, answer)
    alone, packed = scored("gpt2", ("InvICL", {}), context, answers)
    assert_same_scores(alone, answers, TOLERANCE["gpt2"])
    assert_same_scores(packed, answers, TOLERANCE["gpt2"])


LAID_OUT = [case for case in PLAIN + TURNED if case[0] not in ("BatchICL", "DeepThink")]


@pytest.mark.parametrize("case", LAID_OUT, ids=title)
@torch.no_grad()
def test_the_layout_drawn_is_the_one_that_runs(case):
    """Query and continuation in the layout, all in one row, give the same as both after the
    memory."""
    context = CONTEXTS["prefix"]
    query = (60, 61, 62, 63)
    answer = (71, 72, 73)
    method = method_of(case)
    layout = method.lay_out(len(context.prefix), context.lengths, len(query), len(answer))
    without = method.positions == "none"
    model = without_positions("gpt2") if without else tiny_model("gpt2")
    mask = torch.zeros(layout.mask.shape, dtype=torch.float64)
    mask.masked_fill_(~layout.mask, -math.inf)
    tokens = [*context.tokens, *query, *answer]
    logits = model(
        torch.tensor([[tokens[i] for i in layout.source]]),
        position_ids=layout.positions[None],
        attention_mask=mask[None, None],
        use_cache=False,
    ).logits[0]
    expected = referred("gpt2", case, context)(query, answer)
    torch.testing.assert_close(logits[-4:-1], expected, rtol=0, atol=1e-10)
    last = layout.positions[-1]
    assert layout.end == (last if without else last + 1)


@pytest.mark.parametrize("case", PLAIN, ids=title)
@torch.no_grad()
def test_generation_goes_on_from_any_memory(case):
    """Also from one without a single entry, and from the residual stream that only the first pass
    replaces."""
    name = "llama"
    model = tiny_model(name)
    method = method_of(case).bind(model)
    length = {"max_new_tokens": 4, "min_new_tokens": 4}
    generate = functools.partial(model.generate, **length, do_sample=False, pad_token_id=0)
    for context in (CONTEXTS["prefix"], CONTEXTS["zero_shot"], Context((), ())):
        logits = referred(name, case, context)
        for query in QUERIES:
            expected = greedy(logits, query, 4)
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
    [warning] = [message for message in caplog.messages if "--num_fewshot" in message]
    assert "2 of 2 tasks have no demonstrations (one_token, generate)" in warning


def test_with_no_demonstrations_of_a_papers_task_the_papers_setting_is_named(
    checkpoint, caplog, monkeypatch
):
    monkeypatch.setattr(logging.getLogger("lm_eval"), "propagate", True)
    lm = model_class("deepthink")(str(checkpoint("gpt2")), device="cpu")
    task = evaluation.load_task({**evaluation.TASKS["generate"], "task": "bbh_cot_made"})
    task.set_config("num_fewshot", 0)
    with recording():
        task.build_all_requests(limit=1)
    lm.begin([task])
    with caplog.at_level("WARNING", logger="lm_eval.icl"):
        lm.run.check()
    advice = (
        "Give some with --num_fewshot 5, or take --tasks icl_bbh, the setting of the papers "
        "(lm-eval's bbh generates chains of thought, and has three demonstrations at most)."
    )
    [warning] = [message for message in caplog.messages if "--num_fewshot" in message]
    assert warning.startswith("The task has no demonstrations (bbh_cot_made): ")
    assert warning.endswith(advice)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Needy(methods.ICL):
    needed: int


def test_a_method_of_ones_own_may_need_an_argument():
    says = r"^lm-eval-icl: needy: TypeError: .* missing 1 required keyword-only .*'needed'\.$"
    with pytest.raises(InputError, match=says):
        Needy.from_arguments({})
    assert Needy.from_arguments({"needed": 3}).needed == 3


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
    """MODULE:CLASS in the working directory is a model of lm-eval, with its arguments, as it is of
    the Python API. If a demonstration reaches all those before it, it is `icl`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "of_mine.py").write_text(MINE)
    path = checkpoint("llama")
    names = ["many_tokens", "generate"]
    near = evaluation.answers("of_mine:Mine", path, names, 4)
    far = evaluation.run("of_mine:Mine", path, names, 4, args={"reach": 9})
    plain = evaluation.answers("icl", path, names, 4)
    far_answers = evaluation.responses(far)
    assert near != far_answers
    evaluation.assert_same(far_answers, plain, 1e-5)
    config = far["config"]
    assert config["model"] == "of_mine:Mine"
    assert config["icl"].items() >= {"method": "mine", "reach": 9}.items()
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
    runner = MethodRunner(tiny_model("llama"), method)
    scores = tiny.scores(runner, {context: QUERIES})
    return {(query, answer): logprob for (_, query, answer), (logprob, _) in scores.items()}


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
    shown = context.demonstrations
    first = scores_of(methods.ICL(), Context(context.prefix, shown[:2]))
    second = scores_of(methods.ICL(), Context(context.prefix, shown[2:]))
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
            first, *rest = context.demonstrations
            return [Context((), (first,)), Context((), tuple(rest))]

    names = []
    for _, layout in Parts().passes(0, [3] * 3):
        names.append([block.name for block in layout.blocks])
    assert names == [["D1"], ["D2", "D3"]]
