"""Demonstrations that are encoded once and joined for each context, and beginnings that contexts share: the scores are
those of each context encoded by itself, and fewer tokens are run."""

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
    predictor = Predictor(*load(path, dtype=dtype), methods.make(name, arguments), **settings)
    found = predictor.score(sets, QUERIES[: len(sets)], OPTIONS, prefix=prefix)
    return [score for of_query in found for score, _ in of_query], predictor.runner


@pytest.fixture
def apart(monkeypatch):
    """A function: whether each context is encoded by itself."""
    separate = joining.has_separate_demonstrations
    return lambda yes: monkeypatch.setattr(
        joining, "has_separate_demonstrations", (lambda method: False) if yes else separate
    )


@pytest.mark.parametrize("prefix", ["", "Tell what they say. "])
@pytest.mark.parametrize(("name", "arguments"), JOINED)
def test_joined_is_what_is_encoded_together(checkpoint, apart, name, arguments, prefix):
    for model, dtype, tolerance in (("gpt2", torch.float64, 1e-10), ("llama", torch.float32, 1e-6)):
        apart(True)
        expected, alone = scores(checkpoint(model), name, arguments, SETS, prefix, dtype)
        apart(False)
        for settings in ({}, {"pack_tokens": 60}, {"store_bytes": 4000}):
            found, runner = scores(
                checkpoint(model), name, arguments, SETS, prefix, dtype, **settings
            )
            assert found == pytest.approx(expected, rel=tolerance), (model, settings)
            if not settings:
                assert runner.tokens_run < 0.9 * alone.tokens_run


def test_whose_demonstrations_are_separate():
    separate = joining.has_separate_demonstrations
    assert {n for n in methods.NAMES if separate(methods.make(n))} == {
        "pcw",
        "sbp",
        "ape",
        "invicl",
    }
    for arguments in ({"window_size": 2}, {"positions": "sequential"}, {"repeat": 2}):
        assert not separate(methods.make("pcw", arguments))


def test_each_block_is_encoded_once_and_dropped_after_its_last_use(checkpoint, caplog):
    predictor = Predictor(*load(checkpoint("gpt2"), dtype=torch.float64), methods.make("pcw"))
    runner = predictor.runner
    with caplog.at_level(logging.INFO, logger="lm_eval.icl"):
        predictor.score(SETS, QUERIES, OPTIONS)
    assert (
        runner.store.encoded == 10 + 1
    )  # the prefix, which is empty; two of the twelve sets are the same
    assert (
        "pcw: the 10 distinct demonstrations of 11 contexts take" in caplog.text
        and "holds them" in caplog.text
    )
    before = runner.tokens_run
    predictor.score(SETS[::-1], QUERIES, OPTIONS)  # nothing is encoded again for further calls
    assert runner.store.encoded == 11 and runner.tokens_run - before < before
    predictor.forget()
    prompts = [FewShotPrompt("", texts, query) for texts, query in zip(SETS, QUERIES, strict=True)]
    pairs = [predictor.tokenizer.pair(prompt, " no") for prompt in prompts]
    assert (
        sum(map(len, runner.score_prompts(pairs, once=True))) == 12 and runner.store.encoded == 11
    )
    assert not any(
        block in runner.store for tokens, _ in pairs for block in joining.separated(tokens.context)
    )


def test_a_store_that_is_too_small_is_said_and_contexts_are_put_in_order(checkpoint, caplog):
    predictor = Predictor(
        *load(checkpoint("gpt2"), dtype=torch.float64), methods.make("pcw"), store_bytes=4000
    )
    contexts = [
        Context((), ((i % 6, 1), (i % 6, 2), (9, i))) for i in range(24)
    ]  # six kinds, one after another
    with predictor.runner.inference_mode():
        order = predictor.runner.encoder.order(contexts)
    assert sorted(map(id, order)) == sorted(map(id, contexts))
    assert (
        sum(a.demonstrations[0] != b.demonstrations[0] for a, b in itertools.pairwise(order)) == 5
    )
    assert "36 distinct demonstrations of 24 contexts take" in caplog.text
    assert "store_bytes=4000 holds less: some are encoded again" in caplog.text


def test_a_beginning_that_contexts_share_is_encoded_once(checkpoint):
    """Under plain ICL, fixed demonstrations in front of others."""
    path, front = checkpoint("llama"), POOL[:5]
    sets = [[*front, *Random(i).sample(POOL[5:], i % 3)] for i in range(12)]
    expected, alone = scores(path, "icl", {}, sets, "Tell. ", pack_tokens=100_000)
    for settings in ({"pack_tokens": 300}, {"pack_tokens": 1}):
        found, runner = scores(path, "icl", {}, sets, "Tell. ", **settings)
        assert found == pytest.approx(expected, abs=1e-10)
        assert runner.tokens_run < 0.7 * alone.tokens_run and runner.store.encoded == 1
    expected, _ = scores(path, "prefixicl", {}, sets, "Tell. ", pack_tokens=100_000)
    found, runner = scores(
        path, "prefixicl", {}, sets, "Tell. ", pack_tokens=300
    )  # whose demonstrations look ahead
    assert found == pytest.approx(expected, abs=1e-10) and runner.store.encoded > 1


def test_demonstrations_of_each_query(checkpoint):
    path = checkpoint("gpt2")
    for name in ("icl", "batchicl", "saicl", "nbce"):
        one_by_one = []
        for texts, query in zip(SETS, QUERIES, strict=True):
            predictor = Predictor(*load(path, dtype=torch.float64), methods.make(name))
            one_by_one += [score for score, _ in predictor.score(texts, [query], OPTIONS)[0]]
        assert scores(path, name, {})[0] == pytest.approx(one_by_one, abs=1e-10), name
    with pytest.raises(
        InputError,
        match="demonstrations: 2 lists for 3 queries: give one list, or one for each query",
    ):
        predictor.score(SETS[:2], QUERIES[:3], OPTIONS)
    with pytest.raises(
        InputError, match=r"demonstrations='Review.*must be a list of texts, not a text"
    ):
        predictor.score(POOL[0], QUERIES[:3], OPTIONS)
