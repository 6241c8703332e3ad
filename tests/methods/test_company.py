"""Independence of company: what a request scores does not depend on the requests, batches and packs
beside it.

The company is permuted, doubled and halved, and divided otherwise; and every request is also
computed in plain mode. Numbers differ by rounding only, and no prediction does.
"""

import functools
import itertools

import pytest
import torch

from lm_eval_icl import methods
from lm_eval_icl.methods.runner import MethodRunner
from lm_eval_icl.prompts.tokens import Context, TokenizedPrompt
from lm_eval_icl.smoke.every_method import QUICK
from tests import tiny

pytestmark = pytest.mark.usefixtures("tried_once")

# Norms of llama round to float32, so that float64 is told from rounding where norms are LayerNorm.
BOUNDS = [("gpt2", torch.float64, 1e-10), ("llama", torch.float32, 1e-5)]
VARIANTS = [
    *((name, QUICK.get(name, {})) for name in methods.NAMES),
    ("pcw", {"window_size": 2}),
    ("ensemble", {"combine": "moe", "window_size": 2}),
    ("deepthink", {"layout": "invicl", "T": 3, "eta": 0.5}),
    ("deepthink", {"T": 3, "eta": 0.5, "momentum": 0.9}),
]
PREFIX = (5, 9)
DEMONSTRATIONS = [(30, 31, 32, 33, 34), (40, 41, 42), (50, 51, 52, 53), (54, 55), (56, 57, 58)]
ANSWERS = [(70,), (71, 72, 73), (71, 72)]


@functools.cache
def model_of(architecture, dtype):
    return tiny.build(architecture, dtype)


def requests():
    """Requests of three contexts with common demonstrations, and of one without any, in no
    order."""
    contexts = [Context(PREFIX, tuple(DEMONSTRATIONS[i:] + DEMONSTRATIONS[:i])) for i in range(3)]
    contexts.append(Context(PREFIX, ()))
    prompts = []
    for number in range(5):
        query = tuple(range(60, 62 + number // 2))
        prompts.append(TokenizedPrompt(contexts[number % 4], query))
    return [(prompt, answer) for answer, prompt in itertools.product(ANSWERS, prompts)]


def score(runner, pairs, batch_size=1, once=False):
    """The score of each pair, in order, by a runner that keeps nothing of earlier calls."""
    runner.begin(batch_size)
    scores = {}
    for scored in runner.score_prompts(pairs, once):
        scores |= scored
    return [scores[i] for i in range(len(pairs))]


def assert_same(found, expected, bound):
    for (score, greedy), (expected_score, expected_greedy) in zip(found, expected, strict=True):
        assert abs(score - expected_score) <= bound * max(1, abs(expected_score))
        assert greedy == expected_greedy


@pytest.mark.parametrize(("architecture", "dtype", "bound"), BOUNDS)
@pytest.mark.parametrize(("name", "arguments"), VARIANTS)
def test_a_request_scores_the_same_in_any_company(name, arguments, architecture, dtype, bound):
    model = model_of(architecture, dtype)
    method = methods.make(name, arguments)
    make_runner = functools.partial(MethodRunner, model, method)
    runner = make_runner()
    pairs = requests()
    alone = [score(runner, [pair])[0] for pair in pairs]
    assert len(set(alone)) > len(pairs) / 2

    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(1)).tolist()
    permuted = score(runner, [pairs[i] for i in order])
    assert_same(permuted, [alone[i] for i in order], bound)

    doubled = score(runner, [*pairs, pairs[3], *pairs[:2]])
    assert_same(doubled, [*alone, alone[3], *alone[:2]], bound)

    halved = score(runner, pairs[::2])
    assert_same(halved, alone[::2], bound)

    plain = score(make_runner(plain=True), pairs)
    assert_same(plain, alone, bound)

    for batch_size, pack_tokens in ((1, 16), (7, 1024), (64, 16)):
        divided = score(make_runner(pack_tokens=pack_tokens), pairs, batch_size, once=True)
        assert_same(divided, alone, bound)
