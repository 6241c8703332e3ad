"""Methods that refine, read or combine memories, against literal computations in float64.

The literal computations share nothing with the package but the models: attention is a function of this file, which
makes every score of every head at once, and who sees whom is said token by token.
"""

import functools
import math
from dataclasses import dataclass

import pytest
import torch
from transformers import AttentionInterface, DynamicCache

from lm_eval_icl import methods
from lm_eval_icl.errors import InputError
from lm_eval_icl.inference.scoring import score_packed, score_rows
from lm_eval_icl.prompts.tokens import Context
from tests import tiny

MODELS = ["gpt2", "llama", "gpt_neox"]  # of three layers; llama has two key-value heads for four heads
CONTEXT = Context((5, 9), ((20, 21, 22), (30, 31), (40, 41, 42, 43), (50, 51, 52)))
QUERIES = {(60, 61, 62): [(70,), (71, 72), (71, 73, 74)], (63, 64): [(70, 75), (76,)]}
TOLERANCE = 1e-6  # rotary angles are computed in float32


@functools.cache
def model_of(name):
    model = tiny.build(name, torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(1.5)
    return model


# Literal attention.


@dataclass
class Spec:
    """sees: [n, columns] whether a token sees a column. part: [n, columns] the columns that a token reads apart, with
    this temperature, this factor of their log-sum-exp and this weight; None for none."""

    sees: torch.Tensor
    part: torch.Tensor | None = None
    temperature: float = 1.0
    factor: float = 1.0
    weight: float = 1.0


SPEC: list[Spec] = []


def literal(module, query, key, value, attention_mask, scaling=None, **options):
    groups = query.shape[1] // key.shape[1]
    key, value = (part.double().repeat_interleave(groups, dim=1) for part in (key, value))
    scores = query.double() @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    [spec] = SPEC
    plain, apart = spec.sees, torch.zeros_like(spec.sees)
    if spec.part is not None:
        plain, apart = spec.sees & ~spec.part, spec.sees & spec.part
    a = scores.masked_fill(~apart, -math.inf) / spec.temperature
    b = scores.masked_fill(~plain, -math.inf)
    share_a = spec.factor * a.logsumexp(-1) + math.log(spec.weight)
    share_a = torch.where(apart.any(-1), share_a, torch.full_like(share_a, -math.inf))
    shares = torch.stack([share_a, b.logsumexp(-1)], -1).softmax(-1)
    output = shares[..., :1] * (a.softmax(-1).nan_to_num() @ value) + shares[..., 1:] * (b.softmax(-1) @ value)
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register("literal_of_tests", literal)


def run(model, tokens, positions, spec, behind=None):
    """Keys and values of the tokens [(keys, values)], and their logits [n, vocabulary]."""
    before, SPEC[:] = model.config._attn_implementation, [spec]
    model.config._attn_implementation = "literal_of_tests"
    try:
        with torch.no_grad():
            out = model(
                torch.tensor([tokens]),
                position_ids=torch.tensor([positions]),
                attention_mask=torch.zeros(1, 1, *spec.sees.shape, dtype=torch.float64),
                past_key_values=DynamicCache(behind) if behind else DynamicCache(),
                use_cache=True,
            )
    finally:
        model.config._attn_implementation = before
    n = len(tokens)
    new = [(layer.keys[:, :, -n:], layer.values[:, :, -n:]) for layer in out.past_key_values.layers]
    return new, out.logits[0].log_softmax(-1)


def row_of(context, layout, window_size=1, positions="symmetric", align="left"):
    """Tokens, positions, who sees whom [n, n], which are kept, and where the query starts, by the definitions."""
    p, demonstrations = len(context.prefix), context.demonstrations
    labels = [("P", 0, i) for i in range(p)]
    copies = 2 if layout == "invicl" else 1
    labels += [
        (f"D{copy}", d, i) for copy in range(copies) for d, ids in enumerate(demonstrations) for i in range(len(ids))
    ]
    window = [d // window_size for d in range(len(demonstrations))]
    lengths = [sum(len(ids) for d, ids in enumerate(demonstrations) if window[d] == w) for w in range(max(window) + 1)]
    longest = max(lengths)

    def at(kind, d, i):
        if kind == "P":
            return i
        if positions == "sequential":
            return p + sum(map(len, demonstrations[:d])) + i
        shift = longest - lengths[window[d]] if align == "right" else 0
        return p + shift + sum(len(ids) for e, ids in enumerate(demonstrations[:d]) if window[e] == window[d]) + i

    def sees(one, other):
        (kind, d, i), (kind2, e, j) = one, other
        if kind2 == "P":
            return kind != "P" or j <= i
        if kind == "P":
            return False
        own = (kind, d) == (kind2, e)
        if layout == "icl":
            return e < d or (own and j <= i)
        if layout == "prefixicl":
            return True
        if layout == "pcw":
            return (own and j <= i) or (e < d and window[e] == window[d])
        if layout == "star":
            return (own and j <= i) or (e < d and window[e] in (0, window[d]))
        assert layout == "invicl"
        return (own and j <= i) or (kind == "D1" and kind2 == "D0" and e != d)

    tokens = [context.prefix[i] if kind == "P" else demonstrations[d][i] for kind, d, i in labels]
    end = p + (sum(map(len, demonstrations)) if positions == "sequential" else longest)
    matrix = torch.tensor([[sees(one, other) for other in labels] for one in labels])
    kept = [kind in ("P", f"D{copies - 1}") for kind, *_ in labels]
    return tokens, [at(*label) for label in labels], matrix, kept, end


def asked(model, memory, start, query, answer, read=None):
    """log p of an answer's tokens behind a memory: [len(answer), vocabulary]. `read` makes the entries of the memory
    a part: (columns [entries] bool, temperature, factor, weight)."""
    tokens, entries = [*query, *answer[:-1]], memory[0][0].shape[2]
    n = len(tokens)
    sees = torch.cat([torch.ones(n, entries, dtype=torch.bool), torch.ones(n, n, dtype=torch.bool).tril()], 1)
    spec = Spec(sees)
    if read is not None:
        columns, *numbers = read
        part = torch.cat([torch.as_tensor(columns), torch.zeros(n, dtype=torch.bool)])[None].expand(n, -1)
        spec = Spec(sees, part, *numbers)
    _, logprobs = run(model, tokens, range(start, start + n), spec, memory)
    return logprobs[len(query) - 1 :]


def score(logprobs, answer):
    return float(logprobs[range(len(answer)), list(answer)].sum()), logprobs.argmax(-1).tolist() == list(answer)


def expected(model, memory, start, read=None):
    return [
        score(asked(model, memory, start, query, answer, read), answer)
        for query, answers in QUERIES.items()
        for answer in answers
    ]


def select(memory, columns):
    at = torch.tensor(columns).nonzero()[:, 0]
    return [(keys[:, :, at], values[:, :, at]) for keys, values in memory]


def ours(model, method, context=CONTEXT):
    """The product's scores behind a context's memory, packed and as rows."""
    with torch.no_grad():
        (memory,) = method.encode(model, [context])
        packed = score_packed(
            model, [(memory, [(query, answer) for query, answers in QUERIES.items() for answer in answers])]
        )
        rows = [found for query, answers in QUERIES.items() for found in score_rows(model, memory, [(query, answers)])]
    return list(packed), rows


def assert_close(found, wanted, tolerance=TOLERANCE):
    assert [greedy for _, greedy in found] == [greedy for _, greedy in wanted]
    assert [number for number, _ in found] == pytest.approx([number for number, _ in wanted], rel=tolerance, abs=1e-8)


# Layouts.


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("method", "layout", "arguments"),
    [
        ("sbp", "pcw", {}),
        ("star", "star", {"positions": "sequential"}),
        ("star", "star", {"positions": "sequential", "window_size": 2}),
    ],
)
def test_layouts(name, method, layout, arguments):
    model = model_of(name)
    tokens, positions, sees, _, end = row_of(CONTEXT, layout, **arguments)
    memory, _ = run(model, tokens, positions, Spec(sees))
    for found in ours(model, methods.make(method, arguments)):
        assert_close(found, expected(model, memory, end))


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_star_is_every_window_behind_a_copy_of_the_first(name):
    """The authors' phase 1: a window runs behind the first one, whose keys and values are then dropped."""
    model, context = model_of(name), Context((), CONTEXT.demonstrations)
    windows = [[*CONTEXT.demonstrations[0], *CONTEXT.demonstrations[1]], [*CONTEXT.demonstrations[2], 50, 51, 52]]
    first, second = map(len, windows)
    causal = torch.ones(first + second, first + second, dtype=torch.bool).tril()
    anchor, _ = run(model, windows[0], range(first), Spec(causal[:first, :first]))
    local, _ = run(model, [*windows[0], *windows[1]], range(first + second), Spec(causal))
    memory = [
        tuple(torch.cat([a, b[:, :, first:]], dim=2) for a, b in zip(*layer, strict=True))
        for layer in zip(anchor, local, strict=True)
    ]
    for found in ours(model, methods.make("star", {"window_size": 2}), context):
        assert_close(found, expected(model, memory, first + second))


# Deep-Thinking over layouts.

THINKING = {"icl": "sequential", "pcw": "symmetric", "invicl": "symmetric", "prefixicl": "symmetric"}


def thought(model, context, layout, reads, T, eta, momentum, restart=False):
    """The definition: the row runs again at positions moved by its end, on the memory of all its tokens."""
    tokens, positions, sees, kept, end = row_of(context, layout, positions=THINKING[layout])
    memory, _ = run(model, tokens, positions, Spec(sees))
    velocity = [(0.0, 0.0)] * len(memory)
    behind = torch.tensor([kept] * len(tokens)) if reads == "all" else sees
    for _ in range(T - 1):
        at = [position + (0 if restart else end) for position in positions]
        present, _ = run(model, tokens, at, Spec(torch.cat([behind, sees], 1)), memory)
        velocity = [
            tuple(new - old + momentum * v for new, old, v in zip(*layer, strict=True))
            for layer in zip(present, memory, velocity, strict=True)
        ]
        memory = [
            tuple(old + eta * v for old, v in zip(*layer, strict=True)) for layer in zip(memory, velocity, strict=True)
        ]
    return select(memory, kept), end


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("layout", THINKING)
@pytest.mark.parametrize("reads", ["all", "layout"])
def test_thinking_over_a_layout(name, layout, reads):
    model, knobs = model_of(name), {"T": 3, "eta": 0.3, "momentum": 0.5}
    memory, start = thought(model, CONTEXT, layout, reads, **knobs)
    method = methods.make("deepthink", {"layout": layout, "reads": reads, **knobs})
    for found in ours(model, method):
        assert_close(found, expected(model, memory, start))


def moved(one, other):
    """For each entry, whether keys or values of any layer differ in any bit."""
    changed = [
        (a != b).any(-1).any(1)[0] for la, lb in zip(one, other, strict=True) for a, b in zip(la, lb, strict=True)
    ]
    return torch.stack(changed).any(0).tolist()


@pytest.mark.parametrize(
    ("layout", "leaks"), [("icl", False), ("pcw", False), ("invicl", False), ("star", False), ("prefixicl", True)]
)
def test_nothing_leaks_that_did_not_leak_in_one_pass(layout, leaks):
    """Not one bit of an entry before a demonstration's last token, its answer, depends on that token: for every T."""
    model, answer = model_of("llama"), 99
    changed = Context(CONTEXT.prefix, (CONTEXT.demonstrations[0], (30, answer), *CONTEXT.demonstrations[2:]))
    depends_on_others = False
    for T in (1, 2, 3, 4):
        method = methods.make("deepthink", {"layout": layout, "reads": "layout", "T": T, "eta": 0.5})
        with torch.no_grad():
            one, other = (method.encode(model, [context])[0].layers for context in (CONTEXT, changed))
        differs = moved(one, other)
        assert differs[5 + 1] and not any(differs[:2])  # the answer itself; not the prefix
        assert differs[5] == leaks  # the demonstration's input
        depends_on_others = any(differs[7:])
        assert depends_on_others == (layout in ("icl", "invicl", "prefixicl"))


def test_reading_the_whole_memory_leaks():
    """The same test sees it, so it can fail: from pass 2 on an input reads its own answer's entry."""
    model = model_of("llama")
    changed = Context(CONTEXT.prefix, (CONTEXT.demonstrations[0], (30, 99), *CONTEXT.demonstrations[2:]))
    for layout in ("icl", "pcw", "invicl"):
        method = methods.make("deepthink", {"layout": layout, "reads": "all", "T": 2, "eta": 0.5})
        with torch.no_grad():
            one, other = (method.encode(model, [context])[0].layers for context in (CONTEXT, changed))
        assert moved(one, other)[5]


@pytest.mark.parametrize("layout", ["pcw", "sbp", "invicl", "prefixicl"])
@pytest.mark.parametrize("reads", ["all", "layout"])
def test_thinking_is_invariant_where_its_layout_is(layout, reads):
    model, order = model_of("gpt_neox"), [2, 0, 3, 1]
    permuted = Context(CONTEXT.prefix, tuple(CONTEXT.demonstrations[i] for i in order))
    for T in (1, 2, 4):
        method = methods.make("deepthink", {"layout": layout, "reads": reads, "T": T, "eta": 0.5})
        assert method.invariant and method.treats_demonstrations_alike
        one, other = (ours(model, method, context)[0] for context in (CONTEXT, permuted))
        assert_close(one, other, 1e-10)
    assert not methods.make("deepthink", {"layout": layout, "positions": "sequential"}).invariant


@pytest.mark.parametrize("layout", ["icl", "nope", "pcw", "star", "invicl", "prefixicl"])
def test_one_pass_is_the_layouts_own_method(layout):
    model = model_of("llama")
    assert ours(model, methods.make("deepthink", {"layout": layout, "T": 1})) == ours(model, methods.make(layout))


def test_thinking_over_the_causal_layout_by_itself_is_the_paper():
    model = model_of("gpt2")
    plain, said = methods.make("deepthink"), methods.make("deepthink", {"layout": "icl", "reads": "all"})
    assert plain == said and ours(model, plain) == ours(model, said)
    assert not plain.needs_mask and methods.make("deepthink", {"reads": "layout"}).needs_mask


def test_contexts_think_side_by_side():
    model, other = model_of("llama"), Context((7,), ((33, 34), (44, 45, 46)))
    for layout in ("invicl", "pcw"):
        method = methods.make("deepthink", {"layout": layout, "T": 3, "eta": 0.4})
        with torch.no_grad():
            together = method.encode(model, [CONTEXT, other])
            alone = tiny.encoded_alone(method, model, [CONTEXT, other])
        for one, two in zip(together, alone, strict=True):
            assert (one.tokens, one.query_start) == (two.tokens, two.query_start)
            for layer, layer2 in zip(one.layers, two.layers, strict=True):
                torch.testing.assert_close(layer, layer2, rtol=1e-9, atol=1e-9)


def test_a_long_row_is_attended_to_some_rows_at_a_time():
    """Rows of more than 256 tokens get no mask of the whole."""
    model = model_of("gpt2")
    context = Context((5, 6), tuple(tuple(range(20 + d, 60 + d)) for d in range(9)))
    knobs = {"T": 2, "eta": 0.5, "momentum": 0.0}
    for layout in ("pcw", "invicl"):
        memory, start = thought(model, context, layout, "layout", **knobs)
        found = ours(model, methods.make("deepthink", {"layout": layout, **knobs}), context)[0]
        assert_close(found, expected(model, memory, start))


@pytest.mark.parametrize(
    "arguments", [{"layout": "saicl"}, {"layout": "deepthink"}, {"layout": "none"}, {"reads": "others"}]
)
def test_what_is_not_thought_over_is_refused(arguments):
    (name,) = arguments
    with pytest.raises(InputError, match=f"deepthink: {name}="):
        methods.make("deepthink", arguments)
