"""Methods that refine, read or combine memories, against literal computations in float64.

The literal computations share nothing with the package but the models: attention is a function of
this file, which makes every score of every head at once, and who sees whom is said token by token.
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
from lm_eval_icl.inference.memory import Memory, kept_of
from lm_eval_icl.inference.scoring import score_packed, score_rows
from lm_eval_icl.methods.runner import MethodRunner
from lm_eval_icl.prompts.tokens import Context, TokenizedPrompt
from tests import tiny
from tests.methods.test_methods import greedy, read

pytestmark = pytest.mark.usefixtures("tried_once")

# Of three layers; llama has two key-value heads for four heads.
MODELS = ["gpt2", "llama", "gpt_neox"]
CONTEXT = Context((5, 9), ((20, 21, 22), (30, 31), (40, 41, 42, 43), (50, 51, 52)))
QUERIES = {(60, 61, 62): [(70,), (71, 72), (71, 73, 74)], (63, 64): [(70, 75), (76,)]}
PAIRS = []
for query, answers in QUERIES.items():
    PAIRS += [(query, answer) for answer in answers]
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
    """sees: [n, columns] whether a token sees a column. part: [n, columns] the columns that a token
    reads apart, with this temperature, this factor of their log-sum-exp and this weight; None for
    none."""

    sees: torch.Tensor
    part: torch.Tensor | None = None
    temperature: float = 1.0
    factor: float = 1.0
    weight: float = 1.0


SPEC: list[Spec] = []


def literal(module, query, key, value, attention_mask, scaling=None, **options):
    groups = query.shape[1] // key.shape[1]
    key = key.double().repeat_interleave(groups, dim=1)
    value = value.double().repeat_interleave(groups, dim=1)
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    scores = query.double() @ key.mT * scaling
    [spec] = SPEC
    part = torch.zeros_like(spec.sees) if spec.part is None else spec.part
    apart = spec.sees & part
    plain = spec.sees & ~part
    a = scores.masked_fill(~apart, -math.inf) / spec.temperature
    b = scores.masked_fill(~plain, -math.inf)
    share_a = spec.factor * a.logsumexp(-1) + math.log(spec.weight)
    share_a = torch.where(apart.any(-1), share_a, torch.full_like(share_a, -math.inf))
    shares = torch.stack([share_a, b.logsumexp(-1)], -1).softmax(-1)
    read_apart = a.softmax(-1).nan_to_num() @ value
    read_plain = b.softmax(-1) @ value
    output = shares[..., :1] * read_apart + shares[..., 1:] * read_plain
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register("literal_of_tests", literal)


def run(model, tokens, positions, spec, past=None):
    """Keys and values of the tokens [(keys, values)], and their logits [n, vocabulary]."""
    before = model.config._attn_implementation
    SPEC[:] = [spec]
    cache = DynamicCache(past) if past else DynamicCache()
    model.config._attn_implementation = "literal_of_tests"
    try:
        with torch.no_grad():
            output = model(
                torch.tensor([tokens]),
                position_ids=torch.tensor([positions]),
                attention_mask=torch.zeros(1, 1, *spec.sees.shape, dtype=torch.float64),
                **cache_arguments(model, cache),
            )
    finally:
        model.config._attn_implementation = before
    n = len(tokens)
    new = [(layer.keys[:, :, -n:], layer.values[:, :, -n:]) for layer in cache.layers]
    return new, output.logits[0].log_softmax(-1)


def causal(n, entries):
    """[n, entries + n]: tokens that see all before them."""
    return torch.ones(n, entries + n, dtype=torch.bool).tril(entries)


def causally(model, tokens, positions=None, past=None):
    """As `run`, of tokens that see all before them."""
    entries = past[0][0].shape[2] if past else 0
    spec = Spec(causal(len(tokens), entries))
    if positions is None:
        positions = range(len(tokens))
    return run(model, tokens, positions, spec, past)


def row_of(context, layout, window_size=1, positions="symmetric", align="left"):
    """Tokens, positions, who sees whom [n, n], which are kept, and where the query starts, by the
    definitions."""
    p = len(context.prefix)
    demonstrations = context.demonstrations
    labels = [("P", 0, i) for i in range(p)]
    copies = 2 if layout == "invicl" else 1
    for copy in range(copies):
        for d, ids in enumerate(demonstrations):
            labels += [(f"D{copy}", d, i) for i in range(len(ids))]
    window = [d // window_size for d in range(len(demonstrations))]
    lengths = [0] * (max(window) + 1)
    for d, ids in enumerate(demonstrations):
        lengths[window[d]] += len(ids)
    longest = max(lengths)

    def at(kind, d, i):
        if kind == "P":
            return i
        if positions == "sequential":
            return p + sum(map(len, demonstrations[:d])) + i
        shift = longest - lengths[window[d]] if align == "right" else 0
        earlier = range(window[d] * window_size, d)  # demonstrations of the same window
        return p + shift + sum(len(demonstrations[e]) for e in earlier) + i

    def sees(one, other):
        kind, d, i = one
        other_kind, e, j = other
        if other_kind == "P":
            return kind != "P" or j <= i
        if kind == "P":
            return False
        own = kind == other_kind and d == e and j <= i
        if layout == "icl":
            return e < d or own
        if layout == "prefixicl":
            return True
        if layout == "pcw":
            return own or (e < d and window[e] == window[d])
        assert layout == "invicl"
        return own or (kind == "D1" and other_kind == "D0" and e != d)

    tokens = [context.prefix[i] if kind == "P" else demonstrations[d][i] for kind, d, i in labels]
    end = p + (sum(lengths) if positions == "sequential" else longest)
    matrix = torch.tensor([[sees(one, other) for other in labels] for one in labels])
    kept = [kind in ("P", f"D{copies - 1}") for kind, *_ in labels]
    return tokens, [at(*label) for label in labels], matrix, kept, end


def logp(model, memory, start, query, answer, apart=None):
    """log p of an answer's tokens after a memory: [len(answer), vocabulary]. `apart` makes the
    entries of the memory a part: (columns [entries] bool, temperature, factor, weight)."""
    tokens = [*query, *answer[:-1]]
    n = len(tokens)
    spec = Spec(causal(n, memory[0][0].shape[2]))
    if apart is not None:
        columns, spec.temperature, spec.factor, spec.weight = apart
        spec.part = torch.tensor([*columns, *[False] * n]).expand(n, -1)
    _, logprobs = run(model, tokens, range(start, start + n), spec, memory)
    return logprobs[len(query) - 1 :]


def expected(model, memory, start, apart=None):
    scores = []
    for query, answer in PAIRS:
        scores.append(read(logp(model, memory, start, query, answer, apart), answer))
    return scores


def select(memory, columns):
    at = torch.tensor(columns).nonzero()[:, 0]
    return [(keys[:, :, at], values[:, :, at]) for keys, values in memory]


def ours(model, method, context=CONTEXT):
    """The product's scores after a context's memory, packed and as rows."""
    with torch.no_grad():
        (memory,) = method.encode(model, [context])
        packed = score_packed(model, [(memory, PAIRS)])
        rows = []
        for query, answers in QUERIES.items():
            rows += score_rows(model, memory, [(query, answers)])
    return list(packed), rows


def assert_close(found, wanted, tolerance=TOLERANCE):
    numbers, greedy_flags = zip(*found, strict=True)
    wanted_numbers, wanted_flags = zip(*wanted, strict=True)
    assert greedy_flags == wanted_flags
    assert numbers == pytest.approx(wanted_numbers, rel=tolerance, abs=1e-8)


# Layouts.


def assert_both_close(model, method, wanted, tolerance=TOLERANCE):
    """Packed and as rows."""
    packed, rows = ours(model, method)
    assert_close(packed, wanted, tolerance)
    assert_close(rows, wanted, tolerance)


@pytest.mark.parametrize("name", MODELS)
def test_sbp(name):
    model = model_of(name)
    tokens, positions, sees, _, end = row_of(CONTEXT, "pcw")
    memory, _ = run(model, tokens, positions, Spec(sees))
    assert_both_close(model, methods.make("sbp"), expected(model, memory, end))


def windows_of(context, size):
    """The tokens of each window of so many demonstrations."""
    shown = context.demonstrations
    return [sum(shown[i : i + size], ()) for i in range(0, len(shown), size)]


def by_entry(function, *memories):
    """A function of the keys of memories in each layer, and of their values."""
    layers = []
    for layer in zip(*memories, strict=True):
        layers.append(tuple(function(*entries) for entries in zip(*layer, strict=True)))
    return layers


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("size", [1, 2])
def test_star_is_every_window_after_a_copy_of_the_first(name, size):
    """The authors' phase 1: a window runs after the first one, whose keys and values are then
    dropped."""
    model = model_of(name)
    first_window, *windows = windows_of(CONTEXT, size)
    first = [*CONTEXT.prefix, *first_window]
    n = len(first)

    def appended(kept, new):
        return torch.cat([kept, new[:, :, n:]], dim=2)

    memory, _ = causally(model, first)
    start = n
    for window in windows:
        end = start + len(window)
        positions = [*range(n), *range(start, end)]
        entries, _ = causally(model, [*first, *window], positions)
        memory = by_entry(appended, memory, entries)
        start = end
    method = methods.make("star", {"window_size": size})
    assert_both_close(model, method, expected(model, memory, start))


# Deep-Thinking over layouts.

THINKING = {
    "icl": "sequential",
    "pcw": "symmetric",
    "invicl": "symmetric",
    "prefixicl": "symmetric",
}


def thought(model, context, layout, reads, T, eta, momentum, restart=False):
    """The definition: the row runs again at positions moved by its end, on the memory of all its
    tokens."""
    tokens, positions, sees, kept, end = row_of(context, layout, positions=THINKING[layout])
    memory, _ = run(model, tokens, positions, Spec(sees))
    velocity = by_entry(torch.zeros_like, memory)
    seen = torch.tensor([kept] * len(tokens)) if reads == "all" else sees
    later = positions if restart else [position + end for position in positions]
    for _ in range(T - 1):
        present, _ = run(model, tokens, later, Spec(torch.cat([seen, sees], 1)), memory)
        step = by_entry(lambda new, old: new - old, present, memory)
        velocity = by_entry(lambda s, v: s + momentum * v, step, velocity)
        memory = by_entry(lambda old, v: old + eta * v, memory, velocity)
    return select(memory, kept), end


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("layout", THINKING)
@pytest.mark.parametrize(
    ("reads", "restart"), [("all", False), ("layout", False), ("layout", True)]
)
def test_thinking_over_a_layout(name, layout, reads, restart):
    model = model_of(name)
    knobs = {"T": 3, "eta": 0.3, "momentum": 0.5}
    memory, start = thought(model, CONTEXT, layout, reads, **knobs, restart=restart)
    knobs |= {"layout": layout, "reads": reads, "restart_positions": restart}
    method = methods.make("deepthink", knobs)
    assert_both_close(model, method, expected(model, memory, start))


def moved(one, other):
    """For each entry, whether keys or values of any layer differ in any bit."""
    changed = []
    for layer in by_entry(torch.ne, one, other):
        changed += [entries.any(-1).any(1)[0] for entries in layer]
    return torch.stack(changed).any(0).tolist()


@pytest.mark.parametrize("reads", ["layout", "all"])
@pytest.mark.parametrize("layout", ["icl", "pcw", "invicl", "star", "prefixicl"])
def test_nothing_leaks_that_did_not_leak_in_one_pass(layout, reads):
    """Not one bit of an entry before a demonstration's last token, its answer, depends on that
    token. If passes read all of the memory, an input reads its own answer's entry from pass 2
    on."""
    model = model_of("llama")
    first, _, *rest = CONTEXT.demonstrations
    changed = Context(CONTEXT.prefix, (first, (30, 99), *rest))
    for T in (1, 2, 3, 4):
        method = methods.make("deepthink", {"layout": layout, "reads": reads, "T": T, "eta": 0.5})
        with torch.no_grad():
            (before,) = method.encode(model, [CONTEXT])
            (after,) = method.encode(model, [changed])
        differs = moved(before.layers, after.layers)
        of_prefix = differs[:2]
        of_input = differs[5]
        of_answer = differs[6]
        of_later_demonstrations = differs[7:]
        assert of_answer
        assert of_input == (layout == "prefixicl" or (reads == "all" and T > 1))
        if reads == "layout":
            assert not any(of_prefix)
            assert any(of_later_demonstrations) == (layout in ("icl", "invicl", "prefixicl"))


@pytest.mark.parametrize("layout", ["icl", "nope", "pcw", "star", "invicl", "prefixicl"])
def test_one_pass_is_the_layouts_own_method(layout):
    model = model_of("llama")
    thinking = methods.make("deepthink", {"layout": layout, "T": 1})
    assert ours(model, thinking) == ours(model, methods.make(layout))


# Reading a memory in parts.

READINGS = [(1.0, 1.0, 1.0), (0.9, 0.9, 1.0), (0.8, 1.0, 0.7), (2.5, 0.3, 4.0)]


@functools.cache
def memory_and_start(name, layout, **arguments):
    """The literal memory of the context under a layout, and where the query starts."""
    tokens, positions, sees, kept, end = row_of(CONTEXT, layout, **arguments)
    memory, _ = run(model_of(name), tokens, positions, Spec(sees))
    return select(memory, kept), end


# The entries of the demonstrations, in the memory of the context.
OF_DEMONSTRATIONS = [False] * 2 + [True] * (len(CONTEXT.tokens) - 2)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("temperature", "scale", "weight"), READINGS)
def test_ape(name, temperature, scale, weight):
    model = model_of(name)
    memory, start = memory_and_start(name, "pcw")
    apart = (OF_DEMONSTRATIONS, temperature, scale * temperature, weight)
    wanted = expected(model, memory, start, apart)
    method = methods.make("ape", {"temperature": temperature, "scale": scale, "weight": weight})
    assert_both_close(model, method, wanted)
    same = temperature == scale == weight == 1
    wanted_numbers = [number for number, _ in wanted]
    for scores in ours(model, methods.make("pcw")):
        numbers = [number for number, _ in scores]
        assert (numbers == pytest.approx(wanted_numbers, rel=TOLERANCE)) == same


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("size", "factor", "align"), [(1, None, "right"), (2, None, "right"), (3, 2.5, "left")]
)
def test_structured(name, size, factor, align):
    """Own columns have M times the weight: all entries of the memory are a part with the weight
    1/M."""
    model = model_of(name)
    memory, start = memory_and_start(name, "pcw", window_size=size, align=align)
    weight = 1 / (factor or math.ceil(4 / size))
    everything = [True] * len(CONTEXT.tokens)
    wanted = expected(model, memory, start, (everything, 1, 1, weight))
    method = methods.make("structured", {"window_size": size, "factor": factor, "align": align})
    assert_both_close(model, method, wanted)


def scores(model, method, contexts=(CONTEXT,), once=False, **options):
    runner = MethodRunner(model, method, **options)
    return tiny.scores(runner, dict.fromkeys(contexts, QUERIES), once)


OTHER = Context((7,), ((33, 34), (44, 45, 46)))


def test_parts_without_the_kernel(monkeypatch):
    """As in half precision on a CPU: scores are computed, some tokens at a time."""
    model = model_of("llama")
    method = methods.make("ape")
    packed, rows = ours(model, method)
    monkeypatch.setattr(AttentionCall, "has_kernel", property(lambda call: False))
    packed_without, rows_without = ours(model, method)
    assert_close(packed_without, packed, 1e-9)
    assert_close(rows_without, rows, 1e-9)


def generated(model, method, queries, context=CONTEXT, length=5, **settings):
    runner = MethodRunner(model, method, batch_size=8)
    prompts = [TokenizedPrompt(context, query) for query in sorted(queries, key=len, reverse=True)]
    arguments = {"max_new_tokens": length, "do_sample": False}
    arguments |= {"pad_token_id": 0, "eos_token_id": None}
    arguments |= settings

    def generate(context, **inputs):
        return model.generate(context, **inputs, **arguments)

    with runner.inference_mode():
        in_force = settings_in_force(model, {"do_sample": False, **settings})
        rows = runner.generate(prompts, ["?"] * len(prompts), length, generate, in_force)
    return {prompt.query: row for prompt, row in zip(prompts, rows, strict=True)}


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_texts_are_generated_in_parts(name):
    model = model_of(name)
    memory, start = memory_and_start(name, "pcw")
    apart = (OF_DEMONSTRATIONS, 0.6, 0.5 * 0.6, 0.4)
    logits = functools.partial(logp, model, memory, start, apart=apart)
    method = methods.make("ape", {"temperature": 0.6, "scale": 0.5, "weight": 0.4})
    texts = generated(model, method, QUERIES)
    for query in QUERIES:
        assert tuple(texts[query]) == greedy(logits, query, 5)


APART = "ape computes attention to the demonstrations apart"


@pytest.mark.parametrize(
    ("name", "attention", "says"),
    [
        # Older versions of transformers run Gemma 2 under sdpa, and then another line refuses it.
        pytest.param(
            "gemma2_window", None, f"{APART}.*, which Gemma2.*eager", marks=pytest.mark.pinned
        ),
        ("llama", "eager", f"{APART}.*attn_implementation=eager"),
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
    """log p of an answer's tokens after prefix and window, for every window: [windows, tokens,
    vocabulary]."""
    model = model_of(name)
    windows = windows_of(context, size)
    if empty:
        windows.append(())
    by_window = []
    for window in windows:
        tokens = [*context.prefix, *window, *query, *answer[:-1]]
        _, logprobs = causally(model, tokens)
        by_window.append(logprobs[-len(answer) :])
    return torch.stack(by_window)


def ensembled(numbers, combine, weights):
    weights = torch.tensor(weights, dtype=torch.float64) / sum(weights)
    weights = weights.reshape(-1, *[1] * (numbers.dim() - 1))
    if combine == "poe":
        return (weights * numbers).sum(0)
    weighted = weights * numbers.exp()
    total = weighted.sum(0) if combine == "moe" else weighted.amax(0)
    return total.log()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("combine", ["poe", "moe", "max"])
@pytest.mark.parametrize(("size", "weights"), [(1, None), (3, (1.0, 3.0))])
def test_ensemble(name, combine, size, weights):
    method = methods.make("ensemble", {"combine": combine, "window_size": size, "weights": weights})
    for (_, query, answer), (number, is_greedy) in scores(model_of(name), method).items():
        logprobs = each_window(name, query, answer, size)
        v = weights or (1.0,) * len(logprobs)
        by_window = logprobs[:, range(len(answer)), list(answer)].sum(-1)
        wanted = float(ensembled(by_window, combine, v))
        assert number == pytest.approx(wanted, rel=TOLERANCE)
        likeliest = ensembled(logprobs, combine, v).argmax(-1).tolist()
        assert is_greedy == (likeliest == list(answer))


def naive_bayes(logprobs, beta, eta, top_p):
    """The released demonstration, token by token, in loops; with a normalized z."""
    k = None
    rows = []
    for t in range(logprobs.shape[1]):
        of_windows = logprobs[:, t].tolist()
        entropies = []
        for numbers in of_windows:
            mass = 0.0
            entropy = 0.0
            for number in sorted(numbers, reverse=True):
                probability = math.exp(number)
                if mass < top_p:
                    entropy -= probability * max(number, -100)
                mass += probability
            entropies.append(entropy)
        if k is not None:
            entropies[k] -= eta
        *_, without = of_windows
        k = min(range(len(entropies) - 1), key=lambda w: entropies[w])
        z = []
        for a, b in zip(of_windows[k], without, strict=True):
            z.append((1 + beta) * a - beta * b if b > -100 else a)
        total = math.log(sum(map(math.exp, z)))
        rows.append([number - total for number in z])
    return torch.tensor(rows, dtype=torch.float64)


NBCE = [{}, {"window_size": 3, "beta": 1.0, "eta": 2.0, "top_p": 0.5}]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("arguments", NBCE, ids=str)
def test_nbce(name, arguments):
    knobs = {"beta": 0.25, "eta": 0.1, "top_p": 0.95, **arguments}
    size = knobs.pop("window_size", 1)
    by_request = scores(model_of(name), methods.make("nbce", arguments))
    for (_, query, answer), (number, is_greedy) in by_request.items():
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
        logprobs = each_window("gpt2", query, answer, empty=method == "nbce")
        if method == "nbce":
            return naive_bayes(logprobs, 0.25, 1.0, 0.95)
        return ensembled(logprobs, arguments.get("combine", "poe"), (1.0,) * 4)

    several = methods.make(method, arguments)
    texts = generated(model, several, QUERIES)
    for query in QUERIES:
        assert tuple(texts[query]) == greedy(combined, query, 5)
    says = f"{method}: several memories choose each token together"
    for settings in ({"num_beams": 2}, {"do_sample": True}, {"guidance_scale": 2.0}):
        with pytest.raises(InputError, match=says):
            generated(model, several, QUERIES, **settings)


@pytest.mark.parametrize("method", ["nbce", "ensemble", "batchicl"])
def test_no_penalty_where_rows_lack_demonstrations(method):
    """The rows of a text would get different tokens, or no token of a demonstration a penalty."""
    model = model_of("gpt2")
    says = f"{method}: a text has no row with all demonstrations"
    for name in ("repetition_penalty", "encoder_repetition_penalty"):
        with pytest.raises(InputError, match=says):
            generated(model, methods.make(method), QUERIES, **{name: 1.5})
    generated(model, methods.make(method), [(63, 64)], repetition_penalty=1.0)


@pytest.mark.parametrize(
    ("method", "arguments"),
    [("nbce", {}), ("ensemble", {}), ("ensemble", {"combine": "moe"})],
)
def test_packs_do_not_matter_and_neither_does_the_order(method, arguments):
    model = model_of("llama")
    method = methods.make(method, arguments)
    d1, d2, d3, d4 = CONTEXT.demonstrations
    permuted = Context(CONTEXT.prefix, (d3, d1, d4, d2))
    assert method.invariant
    assert not methods.make("ensemble", {"weights": [1, 2, 3, 4]}).invariant
    assert not methods.make("deepthink", {"layout": "pcw", "positions": "sequential"}).invariant
    wanted = scores(model, method).values()
    assert_close(scores(model, method, pack_tokens=3).values(), wanted, 1e-9)
    assert_close(scores(model, method, (permuted,)).values(), wanted, 1e-9)
    both = scores(model, method, (CONTEXT, OTHER), once=True)
    of_first = [score for (context, _, _), score in both.items() if context == CONTEXT]
    assert_close(of_first, wanted, 1e-9)


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
    options = {"pack_tokens": 10, "store_bytes": store_bytes}
    runner = MethodRunner(model_of("gpt2"), methods.make("nbce"), **options)
    with runner.inference_mode():
        packs = len(list(runner.score({CONTEXT: QUERIES}, once=True)))
    assert packs > 1
    assert runner.store.encoded == 5
    assert runner.store.shrink() is False  # nothing is left to drop


def test_without_demonstrations_all_are_plain():
    model = model_of("gpt2")
    bare = Context((5, 9), ())
    plain = scores(model, methods.make("icl"), (bare,))
    for name in ("sbp", "star", "ape", "structured", "ensemble", "nbce"):
        assert scores(model, methods.make(name), (bare,)) == plain
    for method in (methods.BatchICL(layer=1), methods.DeepThink()):
        by_definition = scores(model, method, (bare,), plain=True)
        for request, (logprob, _) in by_definition.items():
            assert logprob == pytest.approx(plain[request][0], abs=1e-9)


def test_texts_on_one_memory_are_those_of_its_demonstrations():
    model = model_of("gpt2")
    for name, shown in (("ensemble", [1]), ("nbce", [])):
        alone = CONTEXT.keeping(shown)
        expected = generated(model, methods.make("icl"), QUERIES, alone)
        assert generated(model, methods.make(name), QUERIES, alone) == expected


def test_a_layer_that_the_model_leaves_out_has_no_entries_to_keep():
    layout = methods.make("invicl").lay_out(1, (2, 2))
    tokens = list(range(len(layout)))
    keys = torch.arange(len(layout)).view(1, 1, -1, 1)
    empty = keys[:, :, :0]
    memory = kept_of(layout, Memory([(keys, -keys), (empty, empty)], tokens, layout.end))
    kept = layout.kept_tokens
    assert len(kept) < len(layout)
    (kept_keys, kept_values), left_out = memory.layers
    assert kept_keys.flatten().tolist() == memory.tokens == kept
    assert torch.equal(kept_values, -kept_keys)
    assert left_out == (empty, empty)


@pytest.mark.parametrize("name", ["ensemble", "moicl"])
def test_every_window_needs_its_weight(name):
    """Also where demonstrations were left out, unless one window is left."""
    model = model_of("gpt2")
    method = methods.make(name, {"weights": [1, 2, 3], "window_size": 2})
    assert method.why_not(4) == "weights: has 3 numbers, and must have 2"
    assert not method.why_not(5)
    with pytest.raises(InputError, match=f"{name}: weights: has 3 numbers, and must have 2"):
        scores(model, method)
    alone = Context(CONTEXT.prefix, CONTEXT.demonstrations[:2])
    assert scores(model, method, (alone,)) == scores(model, methods.make("icl"), (alone,))
    one = methods.make(name, {"weights": [1]})
    with pytest.raises(InputError, match=f"{name}: weights: has 1 numbers, and must have 4"):
        scores(model, one)
