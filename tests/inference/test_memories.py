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
from lm_eval_icl.errors import InputError, Unsupported
from lm_eval_icl.inference.attention import AttentionCall
from lm_eval_icl.inference.caches import cache_arguments
from lm_eval_icl.inference.generation import settings_in_force
from lm_eval_icl.inference.scoring import score_packed, score_rows
from lm_eval_icl.inference.trials import probe
from lm_eval_icl.methods import runner
from lm_eval_icl.methods.runner import MethodRunner
from lm_eval_icl.prompts.tokens import Context, TokenizedPrompt
from tests import tiny
from tests.methods.test_methods import greedy, read

MODELS = [
    "gpt2",
    "llama",
    "gpt_neox",
]  # of three layers; llama has two key-value heads for four heads
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


@pytest.fixture(autouse=True)
def tried_once(monkeypatch):
    """What a model can do is found out once for all tests."""
    monkeypatch.setattr(runner, "probe", probe_of)


@functools.cache
def probe_of(model):
    return probe(model)


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
    output = shares[..., :1] * (a.softmax(-1).nan_to_num() @ value) + shares[..., 1:] * (
        b.softmax(-1) @ value
    )
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register("literal_of_tests", literal)


def run(model, tokens, positions, spec, past=None):
    """Keys and values of the tokens [(keys, values)], and their logits [n, vocabulary]."""
    before, SPEC[:] = model.config._attn_implementation, [spec]
    cache = DynamicCache(past) if past else DynamicCache()
    model.config._attn_implementation = "literal_of_tests"
    try:
        with torch.no_grad():
            out = model(
                torch.tensor([tokens]),
                position_ids=torch.tensor([positions]),
                attention_mask=torch.zeros(1, 1, *spec.sees.shape, dtype=torch.float64),
                **cache_arguments(model, cache),
            )
    finally:
        model.config._attn_implementation = before
    n = len(tokens)
    new = [(layer.keys[:, :, -n:], layer.values[:, :, -n:]) for layer in cache.layers]
    return new, out.logits[0].log_softmax(-1)


def causally(model, tokens, positions=None, past=None):
    """As `run`, of tokens that see all before them."""
    n = len(tokens)
    entries = past[0][0].shape[2] if past else 0
    sees = torch.ones(n, entries + n, dtype=torch.bool).tril(entries)
    return run(model, tokens, range(n) if positions is None else positions, Spec(sees), past)


def row_of(context, layout, window_size=1, positions="symmetric", align="left"):
    """Tokens, positions, who sees whom [n, n], which are kept, and where the query starts, by the definitions."""
    p, demonstrations = len(context.prefix), context.demonstrations
    labels = [("P", 0, i) for i in range(p)]
    copies = 2 if layout == "invicl" else 1
    labels += [
        (f"D{copy}", d, i)
        for copy in range(copies)
        for d, ids in enumerate(demonstrations)
        for i in range(len(ids))
    ]
    window = [d // window_size for d in range(len(demonstrations))]
    lengths = [
        sum(len(ids) for d, ids in enumerate(demonstrations) if window[d] == w)
        for w in range(max(window) + 1)
    ]
    longest = max(lengths)

    def at(kind, d, i):
        if kind == "P":
            return i
        if positions == "sequential":
            return p + sum(map(len, demonstrations[:d])) + i
        shift = longest - lengths[window[d]] if align == "right" else 0
        return (
            p
            + shift
            + sum(len(ids) for e, ids in enumerate(demonstrations[:d]) if window[e] == window[d])
            + i
        )

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
        assert layout == "invicl"
        return (own and j <= i) or (kind == "D1" and kind2 == "D0" and e != d)

    tokens = [context.prefix[i] if kind == "P" else demonstrations[d][i] for kind, d, i in labels]
    end = p + (sum(map(len, demonstrations)) if positions == "sequential" else longest)
    matrix = torch.tensor([[sees(one, other) for other in labels] for one in labels])
    kept = [kind in ("P", f"D{copies - 1}") for kind, *_ in labels]
    return tokens, [at(*label) for label in labels], matrix, kept, end


def logp(model, memory, start, query, answer, apart=None):
    """log p of an answer's tokens after a memory: [len(answer), vocabulary]. `apart` makes the entries of the memory
    a part: (columns [entries] bool, temperature, factor, weight)."""
    tokens, entries = [*query, *answer[:-1]], memory[0][0].shape[2]
    n = len(tokens)
    spec = Spec(torch.ones(n, entries + n, dtype=torch.bool).tril(entries))
    if apart is not None:
        columns, spec.temperature, spec.factor, spec.weight = apart
        spec.part = torch.tensor([*columns, *[False] * n]).expand(n, -1)
    _, logprobs = run(model, tokens, range(start, start + n), spec, memory)
    return logprobs[len(query) - 1 :]


def expected(model, memory, start, apart=None):
    return [
        read(logp(model, memory, start, query, answer, apart), answer)
        for query, answers in QUERIES.items()
        for answer in answers
    ]


def select(memory, columns):
    at = torch.tensor(columns).nonzero()[:, 0]
    return [(keys[:, :, at], values[:, :, at]) for keys, values in memory]


def ours(model, method, context=CONTEXT):
    """The product's scores after a context's memory, packed and as rows."""
    with torch.no_grad():
        (memory,) = method.encode(model, [context])
        packed = score_packed(
            model,
            [
                (
                    memory,
                    [(query, answer) for query, answers in QUERIES.items() for answer in answers],
                )
            ],
        )
        rows = [
            found
            for query, answers in QUERIES.items()
            for found in score_rows(model, memory, [(query, answers)])
        ]
    return list(packed), rows


def assert_close(found, wanted, tolerance=TOLERANCE):
    assert [greedy for _, greedy in found] == [greedy for _, greedy in wanted]
    assert [number for number, _ in found] == pytest.approx(
        [number for number, _ in wanted], rel=tolerance, abs=1e-8
    )


# Layouts.


@pytest.mark.parametrize("name", MODELS)
def test_sbp(name):
    model = model_of(name)
    tokens, positions, sees, _, end = row_of(CONTEXT, "pcw")
    memory, _ = run(model, tokens, positions, Spec(sees))
    for found in ours(model, methods.make("sbp")):
        assert_close(found, expected(model, memory, end))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("size", [1, 2])
def test_star_is_every_window_after_a_copy_of_the_first(name, size):
    """The authors' phase 1: a window runs after the first one, whose keys and values are then dropped."""
    model, parts = model_of(name), CONTEXT.demonstrations
    windows = [
        [token for part in parts[i : i + size] for token in part]
        for i in range(0, len(parts), size)
    ]
    first = [*CONTEXT.prefix, *windows[0]]
    memory, _ = causally(model, first)
    start = len(first)
    for window in windows[1:]:
        row, positions = [*first, *window], [*range(len(first)), *range(start, start + len(window))]
        entries, _ = causally(model, row, positions)
        memory = [
            tuple(
                torch.cat([kept, new[:, :, len(first) :]], dim=2)
                for kept, new in zip(*layer, strict=True)
            )
            for layer in zip(memory, entries, strict=True)
        ]
        start += len(window)
    for found in ours(model, methods.make("star", {"window_size": size})):
        assert_close(found, expected(model, memory, start))


# Deep-Thinking over layouts.

THINKING = {
    "icl": "sequential",
    "pcw": "symmetric",
    "invicl": "symmetric",
    "prefixicl": "symmetric",
}


def thought(model, context, layout, reads, T, eta, momentum, restart=False):
    """The definition: the row runs again at positions moved by its end, on the memory of all its tokens."""
    tokens, positions, sees, kept, end = row_of(context, layout, positions=THINKING[layout])
    memory, _ = run(model, tokens, positions, Spec(sees))
    velocity = [(0.0, 0.0)] * len(memory)
    seen = torch.tensor([kept] * len(tokens)) if reads == "all" else sees
    for _ in range(T - 1):
        at = [position + (0 if restart else end) for position in positions]
        present, _ = run(model, tokens, at, Spec(torch.cat([seen, sees], 1)), memory)
        velocity = [
            tuple(new - old + momentum * v for new, old, v in zip(*layer, strict=True))
            for layer in zip(present, memory, velocity, strict=True)
        ]
        memory = [
            tuple(old + eta * v for old, v in zip(*layer, strict=True))
            for layer in zip(memory, velocity, strict=True)
        ]
    return select(memory, kept), end


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("layout", THINKING)
@pytest.mark.parametrize(
    ("reads", "restart"), [("all", False), ("layout", False), ("layout", True)]
)
def test_thinking_over_a_layout(name, layout, reads, restart):
    model, knobs = model_of(name), {"T": 3, "eta": 0.3, "momentum": 0.5}
    memory, start = thought(model, CONTEXT, layout, reads, **knobs, restart=restart)
    method = methods.make(
        "deepthink", {"layout": layout, "reads": reads, "restart_positions": restart, **knobs}
    )
    for found in ours(model, method):
        assert_close(found, expected(model, memory, start))


def moved(one, other):
    """For each entry, whether keys or values of any layer differ in any bit."""
    changed = [
        (a != b).any(-1).any(1)[0]
        for la, lb in zip(one, other, strict=True)
        for a, b in zip(la, lb, strict=True)
    ]
    return torch.stack(changed).any(0).tolist()


@pytest.mark.parametrize("reads", ["layout", "all"])
@pytest.mark.parametrize("layout", ["icl", "pcw", "invicl", "star", "prefixicl"])
def test_nothing_leaks_that_did_not_leak_in_one_pass(layout, reads):
    """Not one bit of an entry before a demonstration's last token, its answer, depends on that token. If passes read
    all of the memory, an input reads its own answer's entry from pass 2 on."""
    model, answer = model_of("llama"), 99
    changed = Context(
        CONTEXT.prefix, (CONTEXT.demonstrations[0], (30, answer), *CONTEXT.demonstrations[2:])
    )
    for T in (1, 2, 3, 4):
        method = methods.make("deepthink", {"layout": layout, "reads": reads, "T": T, "eta": 0.5})
        with torch.no_grad():
            one, other = (
                method.encode(model, [context])[0].layers for context in (CONTEXT, changed)
            )
        differs = moved(one, other)
        assert differs[5 + 1]  # the answer itself
        assert differs[5] == (
            layout == "prefixicl" or (reads == "all" and T > 1)
        )  # the demonstration's input
        if reads == "layout":
            assert not any(differs[:2])  # the prefix
            assert any(differs[7:]) == (layout in ("icl", "invicl", "prefixicl"))


@pytest.mark.parametrize("layout", ["icl", "nope", "pcw", "star", "invicl", "prefixicl"])
def test_one_pass_is_the_layouts_own_method(layout):
    model = model_of("llama")
    assert ours(model, methods.make("deepthink", {"layout": layout, "T": 1})) == ours(
        model, methods.make(layout)
    )


# Reading a memory in parts.

READINGS = [(1.0, 1.0, 1.0), (0.9, 0.9, 1.0), (0.8, 1.0, 0.7), (2.5, 0.3, 4.0)]


@functools.cache
def memory_and_start(name, layout, **arguments):
    """The literal memory of the context under a layout, and where the query starts."""
    tokens, positions, sees, kept, end = row_of(CONTEXT, layout, **arguments)
    memory, _ = run(model_of(name), tokens, positions, Spec(sees))
    return select(memory, kept), end


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("temperature", "scale", "weight"), READINGS)
def test_ape(name, temperature, scale, weight):
    memory, start = memory_and_start(name, "pcw")
    part = [False] * 2 + [True] * (len(CONTEXT.tokens) - 2)
    wanted = expected(
        model_of(name), memory, start, (part, temperature, scale * temperature, weight)
    )
    method = methods.make("ape", {"temperature": temperature, "scale": scale, "weight": weight})
    for found in ours(model_of(name), method):
        assert_close(found, wanted)
    same = temperature == scale == weight == 1
    for found in ours(model_of(name), methods.make("pcw")):
        close = [number for number, _ in found] == pytest.approx(
            [number for number, _ in wanted], rel=TOLERANCE
        )
        assert close == same


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("size", "factor", "align"), [(1, None, "right"), (2, None, "right"), (3, 2.5, "left")]
)
def test_structured(name, size, factor, align):
    """Own columns have M times the weight: all entries of the memory are a part with the weight 1/M."""
    memory, start = memory_and_start(name, "pcw", window_size=size, align=align)
    weight = 1 / (factor or math.ceil(4 / size))
    wanted = expected(model_of(name), memory, start, ([True] * len(CONTEXT.tokens), 1, 1, weight))
    method = methods.make("structured", {"window_size": size, "factor": factor, "align": align})
    for found in ours(model_of(name), method):
        assert_close(found, wanted)


def scores(model, method, contexts=(CONTEXT,), once=False, **options):
    """The runner's scores: {(context, query, answer): score}."""
    runner, found = MethodRunner(model, method, **options), {}
    with runner.inference_mode():
        for requests, numbers in runner.score(dict.fromkeys(contexts, QUERIES), once):
            found |= zip(requests, numbers, strict=True)
    return found


OTHER = Context((7,), ((33, 34), (44, 45, 46)))


def test_parts_without_the_kernel(monkeypatch):
    """As in half precision on a CPU: scores are computed, some tokens at a time."""
    model, method = model_of("llama"), methods.make("ape")
    wanted = ours(model, method)
    monkeypatch.setattr(AttentionCall, "has_kernel", property(lambda call: False))
    for found, expected_ in zip(ours(model, method), wanted, strict=True):
        assert_close(found, expected_, 1e-9)


def generated(model, method, queries, context=CONTEXT, length=5, **settings):
    runner = MethodRunner(model, method, batch_size=8)
    prompts = [TokenizedPrompt(context, query) for query in sorted(queries, key=len, reverse=True)]

    def generate(context, **inputs):
        plain = {
            "max_new_tokens": length,
            "do_sample": False,
            "pad_token_id": 0,
            "eos_token_id": None,
        }
        return model.generate(context, **inputs, **{**plain, **settings})

    with runner.inference_mode():
        in_force = settings_in_force(model, {"do_sample": False, **settings})
        rows = runner.generate(prompts, ["?"] * len(prompts), length, generate, in_force)
    return {prompt.query: row for prompt, row in zip(prompts, rows, strict=True)}


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_texts_are_generated_in_parts(name):
    model, (memory, start) = model_of(name), memory_and_start(name, "pcw")
    part = [False] * 2 + [True] * (len(CONTEXT.tokens) - 2)
    apart = (part, 0.6, 0.5 * 0.6, 0.4)
    method = methods.make("ape", {"temperature": 0.6, "scale": 0.5, "weight": 0.4})
    found = generated(model, method, QUERIES)
    for query in QUERIES:
        assert tuple(found[query]) == greedy(
            lambda *pair: logp(model, memory, start, *pair, apart), query, 5
        )


@pytest.mark.parametrize(
    ("name", "attention", "says"),
    [
        # Older versions of transformers run Gemma 2 under sdpa, and then another line refuses it.
        pytest.param(
            "gemma2_window",
            None,
            "ape computes .* apart.*, which Gemma2.*eager",
            marks=pytest.mark.pinned,
        ),
        (
            "llama",
            "eager",
            "ape computes attention to the demonstrations apart.*attn_implementation=eager",
        ),
        (
            "bloom",
            None,
            "ape hides tokens from each other|ape needs a model that obeys given positions",
        ),
    ],
)
def test_models_that_do_not_read_in_parts_are_refused(name, attention, says):
    model = tiny.build(name)
    if attention:
        model.set_attn_implementation(attention)
    with pytest.raises(Unsupported, match=says):
        MethodRunner(model, methods.make("ape"))


# Several memories.


def each_window(name, query, answer, size=1, empty=False, context=CONTEXT):
    """log p of an answer's tokens after prefix and window, for every window: [windows, tokens, vocabulary]."""
    model, found = model_of(name), []
    windows = [
        context.demonstrations[i : i + size] for i in range(0, len(context.demonstrations), size)
    ]
    for window in [*windows, *[()] * empty]:
        tokens = [
            *context.prefix,
            *(token for ids in window for token in ids),
            *query,
            *answer[:-1],
        ]
        found.append(causally(model, tokens)[1][-len(answer) :])
    return torch.stack(found)


def ensembled(numbers, combine, weights):
    weights = torch.tensor(weights, dtype=torch.float64) / sum(weights)
    weights = weights.reshape(-1, *[1] * (numbers.dim() - 1))
    if combine == "poe":
        return (weights * numbers).sum(0)
    return (
        (weights * numbers.exp()).sum(0).log()
        if combine == "moe"
        else (weights * numbers.exp()).amax(0).log()
    )


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("combine", ["poe", "moe", "max"])
@pytest.mark.parametrize(("size", "weights"), [(1, None), (3, (1.0, 3.0))])
def test_ensemble(name, combine, size, weights):
    method = methods.make("ensemble", {"combine": combine, "window_size": size, "weights": weights})
    found = scores(model_of(name), method)
    for (_, query, answer), number in found.items():
        logprobs = each_window(name, query, answer, size)
        v = weights or (1.0,) * len(logprobs)
        by_window = logprobs[:, range(len(answer)), list(answer)].sum(-1)
        is_greedy = ensembled(logprobs, combine, v).argmax(-1).tolist() == list(answer)
        assert number == (
            pytest.approx(float(ensembled(by_window, combine, v)), rel=TOLERANCE),
            is_greedy,
        )


def naive_bayes(logprobs, beta, eta, top_p):
    """The released demonstration, token by token, in loops; with a normalized z."""
    tokens, k, rows = logprobs.shape[1], None, []
    for t in range(tokens):
        cut, entropies = [], []
        for context in logprobs[:, t].tolist():
            inside, mass = set(), 0.0
            for token in sorted(range(len(context)), key=lambda token: -context[token]):
                if mass < top_p:
                    inside.add(token)
                mass += math.exp(context[token])
            cut.append(
                [number if token in inside else -math.inf for token, number in enumerate(context)]
            )
            entropies.append(-sum(math.exp(number) * max(number, -100) for number in cut[-1]))
        if k is not None:
            entropies[k] -= eta
        k = min(range(len(entropies) - 1), key=lambda w: entropies[w])
        of = logprobs[:, t].tolist()
        z = [
            (1 + beta) * a - beta * b if b > -100 else a for a, b in zip(of[k], of[-1], strict=True)
        ]
        total = math.log(sum(map(math.exp, z)))
        rows.append([number - total for number in z])
    return torch.tensor(rows, dtype=torch.float64)


NBCE = [
    {},
    {"window_size": 3, "beta": 1.0, "eta": 2.0, "top_p": 0.5},
]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("arguments", NBCE, ids=str)
def test_nbce(name, arguments):
    knobs = {"beta": 0.25, "eta": 0.1, "top_p": 0.95, **arguments}
    size = knobs.pop("window_size", 1)
    for (_, query, answer), (number, is_greedy) in scores(
        model_of(name), methods.make("nbce", arguments)
    ).items():
        z = naive_bayes(each_window(name, query, answer, size, empty=True), **knobs)
        path = z[range(len(answer)), list(answer)]
        assert number == pytest.approx(float(path.sum()), rel=TOLERANCE)
        assert is_greedy == (z.argmax(-1).tolist() == list(answer))


@pytest.mark.parametrize(
    ("method", "arguments"),
    [("nbce", {"eta": 1.0}), ("ensemble", {"combine": "moe"}), ("ensemble", {})],
)
def test_texts_are_chosen_by_all_memories_together(method, arguments):
    model = model_of("gpt2")

    def combined(query, answer):
        if method == "nbce":
            return naive_bayes(each_window("gpt2", query, answer, empty=True), 0.25, 1.0, 0.95)
        return ensembled(
            each_window("gpt2", query, answer), arguments.get("combine", "poe"), (1.0,) * 4
        )

    found = generated(model, methods.make(method, arguments), QUERIES)
    for query in QUERIES:
        assert tuple(found[query]) == greedy(combined, query, 5)
    for settings in ({"num_beams": 2}, {"do_sample": True}):
        with pytest.raises(
            InputError, match=f"{method}: several memories choose each token together"
        ):
            generated(model, methods.make(method, arguments), QUERIES, **settings)


@pytest.mark.parametrize(
    ("method", "arguments"),
    [("nbce", {}), ("ensemble", {}), ("ensemble", {"combine": "moe"})],
)
def test_packs_do_not_matter_and_neither_does_the_order(method, arguments):
    model, method = model_of("llama"), methods.make(method, arguments)
    permuted = Context(CONTEXT.prefix, tuple(CONTEXT.demonstrations[i] for i in (2, 0, 3, 1)))
    assert method.invariant and not methods.make("ensemble", {"weights": [1, 2, 3, 4]}).invariant
    assert not methods.make("deepthink", {"layout": "pcw", "positions": "sequential"}).invariant
    wanted = [*scores(model, method).values()]
    assert_close([*scores(model, method, pack_tokens=3).values()], wanted, 1e-9)
    assert_close([*scores(model, method, (permuted,)).values()], wanted, 1e-9)
    both = scores(model, method, (CONTEXT, OTHER), once=True)
    assert_close(
        [number for (context, *_), number in both.items() if context == CONTEXT], wanted, 1e-9
    )


def test_windows_are_stored_by_themselves():
    runner = MethodRunner(model_of("gpt2"), methods.make("nbce"))
    shared = Context(CONTEXT.prefix, CONTEXT.demonstrations[1:])
    with runner.inference_mode():
        for context in (CONTEXT, shared):
            list(runner.score({context: QUERIES}))
    assert runner.store.encoded == 5  # four windows and the prefix, whatever sets they are in


@pytest.mark.parametrize("store_bytes", [1, 2**31])
def test_windows_are_encoded_once_for_all_packs_and_released(store_bytes):
    """Also if they are more than what is stored."""
    runner = MethodRunner(
        model_of("gpt2"), methods.make("nbce"), pack_tokens=10, store_bytes=store_bytes
    )
    with runner.inference_mode():
        packs = len(list(runner.score({CONTEXT: QUERIES}, once=True)))
    assert packs > 1 and runner.store.encoded == 5
    assert runner.store.shrink() is False  # nothing is left to drop


def test_without_demonstrations_all_are_plain():
    model, bare = model_of("gpt2"), Context((5, 9), ())
    plain = scores(model, methods.make("icl"), (bare,))
    for name in ("sbp", "star", "ape", "structured", "ensemble", "nbce"):
        assert scores(model, methods.make(name), (bare,)) == plain


def test_every_window_needs_its_weight():
    """Also where demonstrations were left out, unless one window is left."""
    method = methods.make("ensemble", {"weights": [1, 2, 3], "window_size": 2})
    assert method.why_not(4) == "weights: has 3 numbers, and must have 2" and not method.why_not(5)
    with pytest.raises(InputError, match="ensemble: weights: has 3 numbers, and must have 2"):
        method.contexts(CONTEXT)
    alone = Context(CONTEXT.prefix, CONTEXT.demonstrations[:2])
    assert scores(model_of("gpt2"), method, (alone,)) == scores(
        model_of("gpt2"), methods.make("icl"), (alone,)
    )
