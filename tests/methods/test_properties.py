"""What InvICL (ICLR 2025) proves and claims of the methods, over random demonstrations: Table 1 row
by row, what the methods are to each other, and Theorem 4.1."""

import contextlib
import functools
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lm_eval_icl import methods
from lm_eval_icl.inference.positions import no_positions, position_embeddings
from lm_eval_icl.inference.scoring import score_packed, score_rows
from lm_eval_icl.prompts.tokens import Context
from tests import tiny

# What is the same in real numbers differs by the order of summation: by 1e-14 where all is float64,
# and by up to 1e-7 where RMSNorm rounds to float32 in between. What differs is asked to differ by
# far more.
TOLERANCE = {"gpt2": 1e-9, "llama": 1e-6}
CLEARLY = 1e-4
INVARIANT = [
    methods.PrefixICL(),
    methods.PCW(),
    methods.SAICL(),
    methods.InvICL(),
    methods.BatchICL(layer=2),
]

TOKEN = st.integers(3, 400)
LABEL = st.sampled_from([(401, 402), (403,), (404, 405, 406)])
# Inputs and labels of demonstrations.
EXAMPLES = st.lists(
    st.tuples(st.lists(TOKEN, min_size=1, max_size=4).map(tuple), LABEL), min_size=1, max_size=5
)
PREFIX = st.lists(TOKEN, max_size=3).map(tuple)
QUERY = st.lists(TOKEN, min_size=1, max_size=4).map(tuple)

few = settings(max_examples=8, deadline=None)
on_all_models = pytest.mark.parametrize("name", TOLERANCE)


@functools.cache
def tiny_model(name):
    return tiny.build(name, torch.float64)


def made_of(prefix, examples):
    return Context(tuple(prefix), tuple((*x, *y) for x, y in examples))


@torch.no_grad()
def answered(name, method, context, query=(60, 61), answers=((70,), (71, 72))):
    """The log-likelihoods of a query's answers, one by one and packed."""
    model = tiny_model(name)
    method = method.bind(model)
    memory, rest = tiny.encoded_alone(method, model, context, query)
    pairs = [(rest, answer) for answer in answers]
    one_by_one = score_rows(model, memory, [(rest, answers)])
    scores = [*one_by_one, *score_packed(model, [(memory, pairs)])]
    return torch.tensor([logprob for logprob, _ in scores], dtype=torch.float64)


def distance(one, other):
    return (one - other).abs().max().item()


# Definition 3.1: the order of the demonstrations changes no prediction.


@on_all_models
@pytest.mark.parametrize("method", INVARIANT, ids=lambda method: method.name)
@few
@given(data=st.data(), prefix=PREFIX, examples=EXAMPLES, query=QUERY)
def test_invariance(name, method, data, prefix, examples, query):
    permuted = data.draw(st.permutations(examples))
    assert method.invariant
    one = answered(name, method, made_of(prefix, examples), query)
    other = answered(name, method, made_of(prefix, permuted), query)
    assert distance(one, other) <= TOLERANCE[name]


FIXED = [((30, 31, 32), (401,)), ((40,), (402,)), ((50, 51, 52, 53), (401,))]


@on_all_models
@pytest.mark.parametrize(
    "method",
    [
        methods.ICL(),
        methods.ICL(positions="symmetric"),
        methods.NoPE(),  # the causal mask still tells the order (section 5.2, footnote 2)
        methods.InvICL(positions="sequential"),
        methods.PrefixICL(positions="sequential"),
        methods.PCW(positions="sequential"),
        methods.PCW(window_size=2),
        methods.DeepThink(),
    ],
    ids=str,
)
def test_what_depends_on_the_order(name, method):
    """Mask and positions must both be symmetric (Table 7): every order gives another answer."""
    assert not method.invariant
    model = tiny_model(name)
    positions = contextlib.nullcontext()
    if method.positions == "none":
        positions = no_positions(model, position_embeddings(model))
    by_order = []
    with positions:
        for order in itertools.permutations(FIXED):
            by_order.append(answered(name, method, made_of((5,), order)))
    for one, other in itertools.combinations(by_order, 2):
        assert distance(one, other) > CLEARLY


# Definitions 3.2 and 3.3: what the encoding of a demonstration's input, from which its label is
# predicted, depends on. It is read where queries read it: in the memory, at the input's tokens.


@torch.no_grad()
def encodings(name, method, prefix, examples):
    """Of each demonstration's input, [tokens, keys and values of all layers and heads]."""
    context = made_of(prefix, examples)
    (memory,) = method.encode(tiny_model(name), [context])
    assert memory.tokens == context.tokens
    # [2 layers, 1, heads, tokens, width]
    entries = torch.stack(list(itertools.chain(*memory.layers)))
    entries = entries.permute(3, 0, 1, 2, 4).flatten(1)
    by_input = []
    start = len(context.prefix)
    for x, y in examples:
        end = start + len(x)
        by_input.append(entries[start:end])
        start = end + len(y)
    assert start == len(entries)
    return by_input


def influence(name, method, prefix, examples, i, j):
    """How far the label of demonstration j, replaced by another one as long, changes the encoding
    of i's input."""
    x, y = examples[j]
    relabelled = list(examples)
    relabelled[j] = (x, tuple(token + 10 for token in y))
    before = encodings(name, method, prefix, examples)[i]
    after = encodings(name, method, prefix, relabelled)[i]
    return distance(before, after)


# Which demonstration's label reaches which demonstration's input. Its own reaches it where a method
# leaks.
REACHES = {
    methods.ICL(): lambda i, j: j < i,  # partial: Table 1
    methods.PrefixICL(): lambda i, j: True,
    methods.PCW(): lambda i, j: False,
    methods.PCW(window_size=2): lambda i, j: j < i and j // 2 == i // 2,
    methods.InvICL(): lambda i, j: j != i,
}


@on_all_models
@pytest.mark.parametrize("method", REACHES, ids=str)
@few
@given(data=st.data(), prefix=PREFIX, examples=EXAMPLES)
def test_interdependence_and_non_leakage(name, method, data, prefix, examples):
    numbers = st.sampled_from(range(len(examples)))
    i = data.draw(numbers)
    other = data.draw(numbers)
    for j in (i, other):
        change = influence(name, method, prefix, examples, i, j)
        if REACHES[method](i, j):
            assert change > CLEARLY
        else:
            assert change <= TOLERANCE[name]


# What the methods are to each other.


@on_all_models
@few
@given(prefix=PREFIX, examples=EXAMPLES, query=QUERY)
def test_batchicl_averages_repeated_demonstrations_away(name, prefix, examples, query):
    context = made_of(prefix, examples)
    twice = Context(context.prefix, context.demonstrations * 2)
    expected = answered(name, methods.BatchICL(layer=2), context, query)
    repeated = answered(name, methods.BatchICL(layer=2, repeat=2), context, query)
    assert distance(expected, repeated) <= TOLERANCE[name]
    written_twice = answered(name, methods.BatchICL(layer=2), twice, query)
    assert distance(expected, written_twice) <= TOLERANCE[name]


# Theorem 4.1: under InvICL's mask linear attention takes steps of gradient descent.


def mask_of(method, n):
    """Which token sees which where every demonstration is a single token, and so is the query, as 0
    and 1."""
    mask = method.lay_out(0, [1] * n, query=1).mask.double()
    # A token of a model always sees itself. The sums of Eq. 14 leave a token's own term out for the
    # second copies and the query, which are all from n on; the first copies have nothing but their
    # own.
    mask.diagonal()[n:] = 0
    return mask


def linear_attention(z, mask, w, eta):
    """A layer of linear self-attention over tokens z, [tokens, d + 1], with the weights of Eq. 11;
    w is its w_0."""
    d = len(w)
    w_q = torch.eye(d + 1, dtype=torch.float64)
    w_q[d, d] = 0
    w_k = w_q
    w_v = torch.zeros(d + 1, d + 1, dtype=torch.float64)
    w_v[d, :d] = w
    w_v[d, d] = -1
    p = eta * torch.eye(d + 1, dtype=torch.float64)
    queries = z @ w_q.T
    keys = z @ w_k.T
    scores = mask * (queries @ keys.T)
    return z + scores @ z @ w_v.T @ p.T


def step(method, x, y, w, eta):
    """The weights after w, as the query reads them off.

    The first layer moves the demonstrations' targets; the second is the first in which the query
    reads moved ones, and adds -x_t (w' - w) to its last component (a prediction is minus that
    component, as with von Oswald et al., 2023). With the unit vectors for x_t that is w' - w entry
    by entry. The next step has w' for the w_0 of Eq. 11, and begins with the targets as they were.
    """
    n, d = x.shape
    mask = mask_of(method, n)
    copies = (len(mask) - 1) // n
    demonstrations = torch.cat([x, y[:, None]], dim=1).repeat(copies, 1)
    change = []
    for i in range(d):
        query = torch.zeros(1, d + 1, dtype=torch.float64)
        query[0, i] = 1
        z = torch.cat([demonstrations, query])
        once = linear_attention(z, mask, w, eta)
        twice = linear_attention(once, mask, w, eta)
        assert torch.equal(twice[:, :d], z[:, :d])  # inputs stay as they are
        change.append(once[-1, d] - twice[-1, d])
    return w + torch.stack(change)


def equation_12(x, y, w, eta):
    """Gradient descent but for a term of second order.

    Eq. 18 has a sign wrong: by the update of Eq. 14 the targets become
    y + eta (XX^T - diag(XX^T)) (Xw - y), which is what Eq. 12 follows from.
    """
    gram = x @ x.T
    residual = x @ w - y
    delta = x.T @ (gram - torch.diag(gram.diagonal())) @ residual
    return w - eta * x.T @ residual + eta**2 * delta


def regression(n, d, seed):
    """Inputs, targets, weights to begin with, and a step as large as gradient descent stands."""
    random = functools.partial(
        torch.randn, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    x = random(n, d)
    y = random(n)
    w = random(d)
    return x, y, w, 1 / torch.linalg.eigvalsh(x @ x.T).max().item()


@settings(max_examples=30, deadline=None)
@given(n=st.integers(1, 6), d=st.integers(1, 5), seed=st.integers(0, 10**6))
def test_theorem_4_1(n, d, seed):
    x, y, w, eta = regression(n, d, seed)
    expected = w
    for _ in range(5):
        w = step(methods.InvICL(), x, y, w, eta)
        expected = equation_12(x, y, expected, eta)
        torch.testing.assert_close(w, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "method", [methods.ICL(), methods.PrefixICL(), methods.PCW()], ids=lambda method: method.name
)
def test_theorem_4_1_holds_of_invicl_alone(method):
    x, y, w, eta = regression(5, 3, 0)
    expected = equation_12(x, y, w, eta)
    assert distance(step(methods.InvICL(), x, y, w, eta), expected) <= 1e-10
    assert distance(step(method, x, y, w, eta), expected) > 1e-2
    plain_gradient_descent = w - eta * x.T @ (x @ w - y)  # Eq. 10
    assert distance(plain_gradient_descent, expected) > 1e-2
