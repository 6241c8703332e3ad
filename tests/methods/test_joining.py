"""Demonstrations that are encoded once and joined for each context, and beginnings that contexts
share: the scores are those of each context encoded by itself, and fewer tokens are run."""

import functools
import itertools
import logging
from random import Random

import pytest
import torch

from lm_eval_icl import methods
from lm_eval_icl.errors import InputError
from lm_eval_icl.methods import Predictor, joining
from lm_eval_icl.prompts.prompt import FewShotPrompt
from lm_eval_icl.prompts.tokens import Context
from tests import tiny
from tests.evaluation import WORDS

pytestmark = pytest.mark.usefixtures("tried_once")

load = functools.cache(tiny.load)
POOL = [
    f"Review: {' '.join(WORDS[i : i + 2 + i % 5])}\nSentiment: {'yes' if i % 2 else 'no'}\n\n"
    for i in range(10)
]
SETS = [Random(i).sample(POOL, 3) for i in range(12)]
QUERIES = [f"Review: {WORDS[i]} {WORDS[-i]}\nSentiment:" for i in range(12)]
OPTIONS = [" no", " yes indeed"]
# What can be joined; of the last, the second copies run after the joined first ones.
JOINED = [("pcw", {}), ("sbp", {}), ("pcw", {"positions": "none"}), ("ape", {}), ("invicl", {})]


def scores(path, name, arguments, sets=SETS, prefix="", dtype=torch.float64, **settings):
    """Those of every query and option; and the runner, which has counted what ran."""
    model, tokenizer = load(path, dtype=dtype)
    predictor = Predictor(model, tokenizer, methods.make(name, arguments), **settings)
    logprobs = []
    for of_query in predictor.score(sets, QUERIES[: len(sets)], OPTIONS, prefix=prefix):
        logprobs += [logprob for logprob, _ in of_query]
    return logprobs, predictor.runner


@pytest.fixture
def apart(monkeypatch):
    """A function that makes each context be encoded by itself."""

    def encode_apart():
        monkeypatch.setattr(joining, "has_separate_demonstrations", lambda method: False)

    return encode_apart


@pytest.mark.parametrize(
    ("model", "dtype", "tolerance"),
    [("gpt2", torch.float64, 1e-10), ("llama", torch.float32, 1e-6)],
    ids=["gpt2", "llama"],
)
@pytest.mark.parametrize("prefix", ["", "Tell what they say. "])
@pytest.mark.parametrize(("name", "arguments"), JOINED)
def test_joined_is_what_is_encoded_together(
    checkpoint, apart, name, arguments, prefix, model, dtype, tolerance
):
    tried = functools.partial(scores, checkpoint(model), name, arguments, SETS[:8], prefix, dtype)
    joined, runner = tried()
    in_small_packs, _ = tried(pack_tokens=60)
    in_a_small_store, _ = tried(store_bytes=4000)
    apart()
    expected, alone = tried()
    assert joined == pytest.approx(expected, rel=tolerance)
    assert in_small_packs == pytest.approx(expected, rel=tolerance)
    assert in_a_small_store == pytest.approx(expected, rel=tolerance)
    assert runner.tokens_run < 0.9 * alone.tokens_run


def test_whose_demonstrations_are_separate():
    separate = joining.has_separate_demonstrations
    names = {name for name in methods.NAMES if separate(methods.make(name))}
    assert names == {"pcw", "sbp", "ape", "invicl"}
    for arguments in ({"window_size": 2}, {"positions": "sequential"}, {"repeat": 2}):
        assert not separate(methods.make("pcw", arguments))


def test_each_block_is_encoded_once_and_dropped_after_its_last_use(checkpoint, caplog):
    model, tokenizer = load(checkpoint("gpt2"), dtype=torch.float64)
    predictor = Predictor(model, tokenizer, methods.make("pcw"))
    runner = predictor.runner
    with caplog.at_level(logging.INFO, logger="lm_eval.icl"):
        predictor.score(SETS, QUERIES, OPTIONS)
    # Ten and the prefix, which is empty; two of the twelve sets are the same.
    assert runner.store.encoded == 10 + 1
    assert "pcw: the 10 distinct demonstrations of 11 contexts take" in caplog.text
    assert "holds them" in caplog.text
    before = runner.tokens_run
    predictor.score(SETS[::-1], QUERIES, OPTIONS)
    assert runner.store.encoded == 11  # nothing is encoded again for further calls
    assert runner.tokens_run - before < before
    predictor.forget()
    pairs = []
    for texts, query in zip(SETS, QUERIES, strict=True):
        pairs.append(predictor.tokenizer.pair(FewShotPrompt("", texts, query), " no"))
    scored = runner.score_prompts(pairs, once=True)
    assert sum(map(len, scored)) == 12
    assert runner.store.encoded == 11
    for prompt, _ in pairs:
        for block in joining.separated(prompt.context):
            assert block not in runner.store


def test_a_store_that_is_too_small_is_said_and_contexts_are_put_in_order(checkpoint, caplog):
    model, tokenizer = load(checkpoint("gpt2"), dtype=torch.float64)
    predictor = Predictor(model, tokenizer, methods.make("pcw"), store_bytes=4000)
    # Six kinds, one after another.
    contexts = [Context((), ((i % 6, 1), (i % 6, 2), (9, i))) for i in range(24)]
    with predictor.runner.inference_mode():
        order = predictor.runner.encoder.order(contexts)
    assert sorted(map(id, order)) == sorted(map(id, contexts))
    beginnings = [context.demonstrations[0] for context in order]
    assert sum(one != other for one, other in itertools.pairwise(beginnings)) == 5
    assert "36 distinct demonstrations of 24 contexts take" in caplog.text
    assert "store_bytes=4000 holds less: some are encoded again" in caplog.text


def test_a_beginning_that_contexts_share_is_encoded_once(checkpoint):
    """Under plain ICL, fixed demonstrations in front of others."""
    path = checkpoint("llama")
    sets = [[*POOL[:5], *Random(i).sample(POOL[5:], i % 3)] for i in range(12)]

    def tried(name, pack_tokens):
        return scores(path, name, {}, sets, "Tell. ", pack_tokens=pack_tokens)

    expected, alone = tried("icl", 100_000)
    for pack_tokens in (300, 1):
        shared, runner = tried("icl", pack_tokens)
        assert shared == pytest.approx(expected, abs=1e-10)
        assert runner.tokens_run < 0.7 * alone.tokens_run
        assert runner.store.encoded == 1
    # Its demonstrations look ahead.
    expected, _ = tried("prefixicl", 100_000)
    own, runner = tried("prefixicl", 300)
    assert own == pytest.approx(expected, abs=1e-10)
    assert runner.store.encoded > 1


@pytest.mark.parametrize("name", ["pcw", "sbp", "ape", "invicl"])
def test_texts_after_scores_are_those_without_them(checkpoint, name):
    """Of demonstrations that were joined, in one batch with others."""
    model, tokenizer = load(checkpoint("llama"), dtype=torch.float64)
    a, b, c, d, *_ = POOL
    texts = []
    for scored_before in (True, False):
        predictor = Predictor(model, tokenizer, methods.make(name))
        if scored_before:
            predictor.score([[a, b, c], [b, a]], QUERIES[:2], OPTIONS)
            assert predictor.runner.encoder.joined
        texts.append(predictor.generate([[a, b, c], [d]], QUERIES[:2], max_new_tokens=5))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("prefix", ["", "Tell what they say. "])
@pytest.mark.parametrize("name", ["pcw", "invicl"])
def test_a_demonstration_may_be_empty(checkpoint, name, prefix):
    a, b, *_ = POOL
    sets = [[a, "", b], [b, a], ["", ""]]
    path = checkpoint("llama")
    own, runner = scores(path, name, {}, sets, prefix)
    expected, _ = scores(path, name, {}, sets, prefix, plain=True)
    assert runner.encoder.joined
    assert own == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("name", ["icl", "batchicl", "saicl", "nbce"])
def test_demonstrations_of_each_query(checkpoint, name):
    path = checkpoint("gpt2")
    model, tokenizer = load(path, dtype=torch.float64)
    one_by_one = []
    for texts, query in zip(SETS, QUERIES, strict=True):
        predictor = Predictor(model, tokenizer, methods.make(name))
        [of_query] = predictor.score(texts, [query], OPTIONS)
        one_by_one += [logprob for logprob, _ in of_query]
    together, _ = scores(path, name, {})
    assert together == pytest.approx(one_by_one, abs=1e-10)


@pytest.mark.parametrize(
    ("shown", "says"),
    [
        (SETS[:2], "demonstrations: 2 lists for 3 queries: give one list, or one for each query"),
        (POOL[0], r"demonstrations='Review.*must be a list of texts, not a text"),
    ],
    ids=["two lists", "a text"],
)
def test_demonstrations_that_fit_no_queries_are_refused(checkpoint, shown, says):
    model, tokenizer = load(checkpoint("gpt2"), dtype=torch.float64)
    predictor = Predictor(model, tokenizer, methods.make("nbce"))
    with pytest.raises(InputError, match=says):
        predictor.score(shown, QUERIES[:3], OPTIONS)
