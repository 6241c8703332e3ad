"""What InvICL (ICLR 2025) says of masks: Propositions 3.4 to 3.6 over every mask of a few examples,
whose mask is whose, which gradient descent each method is (section 4), and how many pairs of blocks
attend (section 6)."""

import itertools
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lm_eval_icl import methods
from tests.methods.test_properties import distance, linear_attention, mask_of, regression

some = settings(max_examples=30, deadline=None)


# Section 4: plain ICL is online gradient descent with a constant rate, prefix ICL is full gradient
# descent, and a bag of examples has a constant gradient.


def predictions(mask, x, y, x_t, eta, layers):
    """What the query reads off after each layer of linear attention, [layers]. It begins with
    weights of zero. A prediction is minus the last component, as for Theorem 4.1."""
    width = x.shape[1]
    no_weights = torch.zeros(width, dtype=torch.float64)
    query = torch.cat([x_t, torch.zeros(1, dtype=torch.float64)])
    examples = torch.cat([x, y[:, None]], dim=1)
    tokens = torch.cat([examples, query[None]])
    read_off = []
    for _ in range(layers):
        tokens = linear_attention(tokens, mask, no_weights, eta)
        read_off.append(-tokens[-1, width])
    return torch.stack(read_off)


@some
@given(n=st.integers(1, 5), d=st.integers(2, 5), seed=st.integers(0, 10**6))
def test_plain_icl_is_online_gradient_descent(n, d, seed):
    """Layer after layer, the prediction comes to that of one pass over the demonstrations in their
    order, each a step on its own loss, at rate 1 for inputs of length 1 (Ding et al., 2023, whom
    section 4 follows)."""
    x, y, x_t, _ = regression(n, d, seed)
    x = x / x.norm(dim=1, keepdim=True)
    forwards = list(range(n))
    backwards = forwards[::-1]
    for order in (forwards, backwards):
        w = torch.zeros(d, dtype=torch.float64)
        for i in order:
            residual = w @ x[i] - y[i]
            w = w - residual * x[i]
        mask = mask_of(methods.ICL(), n)
        last = predictions(mask, x[order], y[order], x_t, 0.5, 120)[-1]
        torch.testing.assert_close(last, w @ x_t, rtol=0, atol=1e-9)


@some
@given(n=st.integers(1, 6), d=st.integers(1, 5), seed=st.integers(0, 10**6))
def test_prefix_icl_is_gradient_descent(n, d, seed):
    """Eq. 10, with one step a layer."""
    x, y, x_t, eta = regression(n, d, seed)
    w = torch.zeros(d, dtype=torch.float64)
    expected = []
    for _ in range(5):
        w = w - eta * x.T @ (x @ w - y)
        expected.append(w @ x_t)
    by_layer = predictions(mask_of(methods.PrefixICL(), n), x, y, x_t, eta, 5)
    torch.testing.assert_close(by_layer, torch.stack(expected))


@some
@given(n=st.integers(1, 6), d=st.integers(1, 5), seed=st.integers(0, 10**6))
def test_a_bag_of_examples_has_a_constant_gradient(n, d, seed):
    """Every layer adds the gradient at the initial weights (the remark of appendix C.1). The remark
    is on what the demonstrations see of each other. So the term of a token that sees itself is left
    out, as in Eq. 14."""
    x, y, x_t, eta = regression(n, d, seed)
    mask = mask_of(methods.PCW(), n)
    mask.fill_diagonal_(0)
    gradient = -x.T @ y  # at weights of zero
    expected = [-layer * eta * gradient @ x_t for layer in range(1, 6)]
    by_layer = predictions(mask, x, y, x_t, eta, 5)
    torch.testing.assert_close(by_layer, torch.stack(expected))


def test_the_three_are_different():
    x, y, x_t, eta = regression(4, 3, 1)
    kinds = [methods.ICL(), methods.PrefixICL(), methods.PCW()]
    by_method = [predictions(mask_of(method, 4), x, y, x_t, eta, 3) for method in kinds]
    for one, other in itertools.combinations(by_method, 2):
        assert distance(one[1:], other[1:]) > 1e-2  # the first layer reads the given targets


# Propositions 3.4 to 3.6: layers of softmax attention (Eq. 2) with random weights.

WIDTH = 5
LAYERS = 4


def every_mask(n):
    """[2 ** (n * n) - 1, n, n] bool: True where M is 0 in Eq. 7. The mask that is -infinity
    everywhere, which the paper calls meaningless, is left out."""
    masks = list(itertools.product([False, True], repeat=n * n))
    return torch.tensor(masks[1:]).view(-1, n, n)


def random_states(tokens, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, WIDTH, generator=generator, dtype=torch.float64)


def softmax_attention(states, sees):
    """States [masks, tokens, WIDTH] after all layers. A token that sees nothing adds nothing to
    itself."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(LAYERS):
        weights = torch.randn(3, WIDTH, WIDTH, generator=generator, dtype=torch.float64)
        w_q, w_k, w_v = weights / WIDTH**0.5
        scores = (states @ w_q) @ (states @ w_k).mT
        attention = scores.masked_fill(~sees, -torch.inf).softmax(-1).nan_to_num()
        states = states + attention @ states @ w_v
    return states


def is_invariant(masks):
    """Of each mask, Definition 3.1: whether no order of the examples changes the test example,
    which sees all."""
    n = masks.shape[-1]
    sees = torch.zeros(len(masks), n + 1, n + 1, dtype=torch.bool)
    sees[:, :n, :n] = masks
    sees[:, n] = True
    states = random_states(n + 1, seed=1)
    outcomes = []
    for order in itertools.permutations(range(n)):
        permuted = states[[*order, n]].expand(len(masks), -1, -1)
        outcomes.append(softmax_attention(permuted, sees)[:, n])
    by_order = torch.stack(outcomes)
    return (by_order - by_order[0]).abs().amax((0, 2)) < 1e-9


def leaks_nothing(masks):
    """Of each mask, Definition 3.2: whether no label reaches the state from which it is predicted.

    An example is two tokens, its input and its label. Inside an example, the label comes after the
    input. An example that sees another sees all of it. (The paper's self-loops are no leakage.)
    """
    n = masks.shape[-1]
    tokens = 2 * n
    sees = masks.repeat_interleave(2, dim=1).repeat_interleave(2, dim=2)
    for i in range(n):
        sees[:, 2 * i, 2 * i + 1] = False  # an input does not see its own label
    states = random_states(tokens, seed=2)
    before = softmax_attention(states.expand(len(masks), -1, -1), sees)
    safe = torch.ones(len(masks), dtype=torch.bool)
    for i in range(n):
        relabelled = states.clone()
        relabelled[2 * i + 1] += 1
        after = softmax_attention(relabelled.expand(len(masks), -1, -1), sees)
        change = (after - before)[:, 2 * i].abs().amax(1)
        safe &= change < 1e-9
    return safe


def is_one_of(masks, wanted):
    """Of each mask, whether it is one of the wanted masks."""
    equal = [(masks == mask).all(-1).all(-1) for mask in wanted]
    return torch.stack(equal).any(0)


def is_lower_triangular_in_some_order(masks):
    n = masks.shape[-1]
    above = torch.ones(n, n, dtype=torch.bool).triu(1)
    in_order = []
    for order in itertools.permutations(range(n)):
        reordered = masks[:, order][:, :, order]
        in_order.append(~(reordered & above).any(-1).any(-1))
    return torch.stack(in_order).any(0)


@pytest.mark.parametrize("n", [2, 3])
def test_propositions_3_4_to_3_6(n):
    masks = every_mask(n)
    m_1 = torch.eye(n, dtype=torch.bool)
    m_2 = ~m_1
    zero = torch.ones(n, n, dtype=torch.bool)
    invariant = is_invariant(masks)
    safe = leaks_nothing(masks)
    assert torch.equal(invariant, is_one_of(masks, [m_1, m_2, zero]))
    assert torch.equal(safe, is_lower_triangular_in_some_order(masks))
    assert torch.equal(invariant & safe, is_one_of(masks, [m_1]))


def blocks_of(method, n):
    """Which block attends to which, where each demonstration is a single token, and so is the
    query."""
    return method.lay_out(0, [1] * n, query=1).mask.bool()


def test_which_mask_is_whose():
    """M_1 is bag of examples, 0 is prefix ICL, and M_2 is between InvICL's second copies and its
    first ones (Figure 2d)."""
    n = 4
    own = torch.eye(n, dtype=torch.bool)
    every = torch.ones(n, n, dtype=torch.bool)
    assert torch.equal(blocks_of(methods.PCW(), n)[:n, :n], own)
    assert torch.equal(blocks_of(methods.PrefixICL(), n)[:n, :n], every)
    assert torch.equal(blocks_of(methods.ICL(), n)[:n, :n], every.tril())
    of_invicl = blocks_of(methods.InvICL(), n)
    assert torch.equal(of_invicl[:n, :n], own)
    assert torch.equal(of_invicl[n : 2 * n, :n], ~own)


# Section 6, "Theoretical complexity of InvICL".


def complexities():
    """Method -> the number of pairs of blocks that attend, as a formula in n, from
    docs/methods/README.md."""
    page = Path(__file__).parents[2] / "docs/methods/README.md"
    table = page.read_text(encoding="utf-8").partition("| pairs of blocks |")[2].strip()
    formulas = {}
    for row in table.partition("\n\n")[0].splitlines()[1:]:
        _, names, formula, _ = row.split("|")
        in_python = re.sub(r"(\d)n", r"\1*n", formula).replace("n²", "n*n").strip()
        for name in re.findall(r"`(\w+)`", names):
            formulas[name] = in_python
    return formulas


@pytest.mark.parametrize(("name", "formula"), complexities().items())
def test_how_many_pairs_of_blocks_attend(name, formula):
    for n in (1, 2, 8, 16):
        pairs = int(blocks_of(methods.make(name), n).sum())
        assert pairs == eval(formula, {"n": n})


def test_invicl_counts_the_papers_pairs():
    assert complexities()["invicl"] == "n*n + 2*n + 1"
    assert len(complexities()) == 9
