"""A layout is made from lengths; its mask, its rule, its positions and what is read off it say the
same."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lm_eval_icl import methods
from lm_eval_icl.methods.several import Several
from lm_eval_icl.prompts.tokens import Context

METHODS = [
    *(methods.make(name) for name in methods.NAMES),
    methods.make("pcw", {"window_size": 2}),
    methods.make("invicl", {"positions": "sequential", "repeat": 2}),
    methods.make("invicl", {"positions": "none"}),
    methods.make("prefixicl", {"repeat": 2}),
    methods.make("batchicl", {"positions": "symmetric"}),
    methods.make("deepthink", {"positions": "symmetric", "restart_positions": True}),
]
LENGTHS = st.tuples(
    st.integers(0, 3),
    st.lists(st.integers(0, 4), max_size=4).map(tuple),
    st.integers(0, 3),
    st.integers(0, 3),
)


def rows(method, prefix, demonstrations, query, answer):
    """Every row of a method, and its one row."""
    if method.why_not(len(demonstrations)):
        return []
    layouts = [layout for _, layout in method.passes(prefix, demonstrations, query, answer)]
    if method.name != "deepthink":
        layouts.append(method.lay_out(prefix, demonstrations, query, answer))
    return layouts


@pytest.mark.parametrize("method", METHODS, ids=str)
@settings(max_examples=15, deadline=None)
@given(lengths=LENGTHS)
def test_the_mask_is_the_rule_for_every_pair(method, lengths):
    """The rule is said here token by token: a block sees the blocks that `sees` gives, and itself
    causally."""
    for layout in rows(method, *lengths):
        block_of = []
        for number, block in enumerate(layout.blocks):
            block_of += [number] * block.length
        sees = layout.sees.tolist()
        tokens = torch.arange(len(block_of))
        for query, a in enumerate(block_of):
            expected = []
            for key, b in enumerate(block_of):
                own = a == b and query >= key and layout.blocks[a].name != "M"
                expected.append(own or sees[a][b])
            # Of any shape: a token by itself, a token and some others.
            token = tokens[query]
            assert layout.mask[query].tolist() == layout.rule(token, tokens).tolist() == expected
            assert layout.rule(token, token).item() == expected[query]
        assert layout.mask.shape == tokens.shape * 2


@pytest.mark.parametrize("method", METHODS, ids=str)
@settings(max_examples=25, deadline=None)
@given(lengths=LENGTHS)
def test_what_is_read_off_blocks_is_so_token_by_token(method, lengths):
    prefix, demonstrations, query, answer = lengths
    prompt = [("P", i) for i in range(prefix)]
    for d, length in enumerate(demonstrations, 1):
        prompt += [(f"D{d}", i) for i in range(length)]
    prompt += [("Q", i) for i in range(query)] + [("A", i) for i in range(answer)]
    divided = (
        isinstance(method, Several) or method.name == "batchicl"
    )  # each pass has the prompt of its own context
    for layout in rows(method, *lengths)[-1:] if divided else rows(method, *lengths):
        n = len(layout)
        runs = layout.mask.any(dim=1)
        assert layout.causal == torch.equal(layout.mask, torch.ones(n, n, dtype=torch.bool).tril())
        assert layout.sequential == (
            layout.step == 1 and layout.positions.tolist() == list(range(n)) and layout.end == n
        )
        assert layout.reach == max(layout.positions.tolist(), default=-1) + 1
        # Every token is the prompt's token that its block and its place in the block say.
        repeats = len(demonstrations)
        at = 0
        for block in layout.blocks:
            for i in range(block.length):
                part, place = prompt[layout.source[at]]
                assert place == i
                if block.name == "M":
                    assert not runs[at]
                elif block.name in "PQA":
                    assert part == block.name
                else:
                    assert (
                        part == f"D{(int(block.name.strip('D').strip(chr(39))) - 1) % repeats + 1}"
                    )
                assert int(layout.positions[at]) == block.start + layout.step * i
                at += 1
        assert at == n
        assert all(layout.mask[i, i] for i in range(n) if runs[i])


@pytest.mark.parametrize("method", METHODS, ids=str)
@settings(max_examples=25, deadline=None)
@given(lengths=LENGTHS)
def test_the_footprint_is_what_the_rows_take(method, lengths):
    """Computed here from the tokens' positions in every row that encodes; without positions, those
    of a sequence."""
    prefix, demonstrations, _, _ = lengths
    if method.why_not(len(demonstrations)):
        return
    context = Context((1,) * prefix, tuple((1,) * length for length in demonstrations))
    footprint = method.footprint(context)
    if method.positions == "none":
        method = methods.make(method.name, {"repeat": method.repeat, "positions": "sequential"})
    layouts = [layout for _, layout in method.passes(prefix, demonstrations)]
    assert footprint.tokens == max(len(layout.positions) for layout in layouts)
    ends = [max(layout.positions.tolist()) + 1 for layout in layouts if len(layout)]
    assert footprint.positions == max(ends, default=0)
    assert footprint.shortest_pass == min(ends, default=0)
    # The query's first token, in the row that has one, or after each of several memories.
    with_query = [layout for _, layout in method.passes(prefix, demonstrations, 1)]
    with_query = with_query if isinstance(method, Several) else with_query[-1:]
    assert footprint.query_start == max(int(layout.positions[-1]) for layout in with_query)
    assert footprint.kept == max(len(layout.kept_tokens) - 1 for layout in with_query)


def test_masks_of_thousands_of_demonstrations_are_made_from_blocks():
    """The rule of a row needs no array as large as the square of its tokens."""
    layout = methods.make("invicl").lay_out(2, [30] * 1000, 50, 1)
    assert len(layout) == 2 + 2 * 30 * 1000 + 51
    assert layout.sees.shape == (2003, 2003)
    first = torch.tensor([2, 2 + 30 * 1000, len(layout) - 1])
    seen = layout.rule(first[:, None], torch.arange(len(layout)))
    # A first copy: the prefix and itself. A second: the prefix, 999 first copies, itself. The
    # answer: prefix, second copies, query, itself.
    assert seen.sum(dim=1).tolist() == [3, 2 + 999 * 30 + 1, 2 + 1000 * 30 + 50 + 1]
