"""The Python API gives what lm-eval's model gives, without any of it."""

import functools
import itertools

import pytest
import torch
from lm_eval.api.instance import Instance

from lm_eval_icl import methods
from lm_eval_icl.errors import InputError
from lm_eval_icl.harness.models import model_class
from lm_eval_icl.methods import Predictor
from lm_eval_icl.methods.limits import PromptLimits
from lm_eval_icl.prompts.prompt import Demonstration, FewShotPrompt
from lm_eval_icl.prompts.tokens import Context, TokenizedPrompt
from lm_eval_icl.smoke.every_method import QUICK
from tests import tiny

DEMONSTRATIONS = [
    Demonstration("Review: dull and long\nSentiment:", " no", "\n\n"),
    Demonstration("Review: warm\nSentiment:", " yes", "\n\n"),
    Demonstration("Review: odd\nSentiment:", " no", "\n\n"),
]
QUERIES = [
    "Review: a film\nSentiment:",
    "Review: sharp and bright\nSentiment:",
    "Review: quiet, slow\nSentiment:",
]
OPTIONS = [" no", " yes", " yes indeed"]


load = functools.partial(tiny.load, dtype=torch.float64)


@pytest.mark.parametrize(
    "name", tiny.slow_but(["icl", "invicl", "deepthink", "saicl", "nbce"], methods.NAMES)
)
def test_it_gives_what_the_lm_eval_model_gives(checkpoint, name):
    path = checkpoint("llama")
    arguments = QUICK.get(name, {})
    predictor = Predictor(*load(path), methods.make(name, arguments))
    lm = model_class(name)(str(path), device="cpu", dtype="float64", batch_size=8, **arguments)
    prompts = [FewShotPrompt("Tell. ", DEMONSTRATIONS, query) for query in QUERIES]
    scored = [
        Instance("loglikelihood", {}, pair, 0) for pair in itertools.product(prompts, OPTIONS)
    ]
    found = predictor.score(DEMONSTRATIONS, QUERIES, OPTIONS, prefix="Tell. ")
    assert [score for scores in found for score in scores] == lm.loglikelihood(
        scored, disable_tqdm=True
    )


@torch.no_grad()
def by_whole_passes(model, tokenizer, demonstrations, query, number, prefix=""):
    """Greedy decoding of plain ICL, by one pass over the whole text for each token."""
    ids = tokenizer(prefix + "".join(demonstrations) + query).input_ids
    end = len(ids) + number
    while len(ids) < end:
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] == model.generation_config.eos_token_id:
            break
    return tokenizer.decode(ids[end - number :], skip_special_tokens=True)


@pytest.mark.parametrize("name", tiny.slow_but(["llama"], ["gpt2", "llama", "opt"]))
def test_texts_are_those_of_whole_passes(checkpoint, name):
    model, tokenizer = load(checkpoint(name))
    predictor = Predictor(model, tokenizer, methods.make("icl"), batch_size=2)
    # The last query has demonstrations of its own.
    shown = [DEMONSTRATIONS, DEMONSTRATIONS, DEMONSTRATIONS[1:]]
    expected = [
        by_whole_passes(model, tokenizer, demonstrations, query, 7, prefix="Tell. ")
        for demonstrations, query in zip(shown, QUERIES, strict=True)
    ]
    assert predictor.generate(shown, QUERIES, prefix="Tell. ", max_new_tokens=7) == expected
    assert (
        predictor.generate(shown[2], QUERIES[2:], prefix="Tell. ", max_new_tokens=7)
        == (expected[2:])
    )


@pytest.mark.parametrize("name", tiny.slow_but(["invicl", "saicl", "nbce", "ape"], methods.NAMES))
def test_texts_are_those_of_the_lm_eval_model(checkpoint, name):
    path = checkpoint("llama")
    arguments = QUICK.get(name, {})
    predictor = Predictor(*load(path), methods.make(name, arguments))
    lm = model_class(name)(str(path), device="cpu", dtype="float64", batch_size=8, **arguments)
    prompts = [FewShotPrompt("Tell. ", DEMONSTRATIONS, query) for query in QUERIES]
    arguments = {"until": ["e"], "max_gen_toks": 6}
    requests = [Instance("generate_until", {}, (prompt, arguments), 0) for prompt in prompts]
    texts = predictor.generate(
        DEMONSTRATIONS, QUERIES, prefix="Tell. ", max_new_tokens=6, stop=["e"]
    )
    assert texts == lm.generate_until(requests, disable_tqdm=True)


def test_the_settings_of_a_checkpoint_and_of_a_call_hold(checkpoint):
    """Beams and a penalty are transformers' own, on the whole prompt."""
    model, tokenizer = load(checkpoint("llama"))
    settings = {"num_beams": 3, "repetition_penalty": 1.3}
    predictor = Predictor(model, tokenizer, methods.make("icl"))
    plain = predictor.generate(DEMONSTRATIONS, QUERIES)
    found = predictor.generate(DEMONSTRATIONS, QUERIES, **settings)
    model.generation_config.update(**settings)
    assert predictor.generate(DEMONSTRATIONS, QUERIES) == found != plain
    model.generation_config.update(num_beams=1, repetition_penalty=1.0)
    for query, text in zip(QUERIES, found, strict=True):
        ids = tokenizer("".join(DEMONSTRATIONS) + query, return_tensors="pt").input_ids
        whole = model.generate(ids, max_new_tokens=32, do_sample=False, pad_token_id=0, **settings)
        assert tokenizer.decode(whole[0, ids.shape[1] :], skip_special_tokens=True) == text


def test_more_positions_than_a_model_has_learned(checkpoint):
    says = "max_length=5000: GPT2LMHeadModel has learned embeddings for 4096 positions only"
    with pytest.raises(InputError, match=says):
        Predictor(*load(checkpoint("gpt2")), methods.make("icl"), max_length=5000)
    Predictor(*load(checkpoint("llama")), methods.make("icl"), max_length=5000)


def test_one_memory_for_many_calls(checkpoint):
    predictor = Predictor(*load(checkpoint("gpt2")), methods.make("invicl"))
    first = predictor.score(DEMONSTRATIONS, QUERIES, OPTIONS)
    again = predictor.score(DEMONSTRATIONS[::-1], QUERIES[:1], OPTIONS)  # in any order
    assert predictor.runner.store.encoded == 1
    assert [score for score, _ in again[0]] == pytest.approx(
        [score for score, _ in first[0]], abs=1e-12
    )


@pytest.mark.parametrize("name", tiny.slow_but(["llama"], ["gpt2", "llama", "bloom"]))
def test_a_query_longer_than_a_piece_of_a_pass(checkpoint, name):
    """Of what runs in several passes, the last one has the query's last token."""
    model, query = load(checkpoint(name)), f"Review: {'a long film ' * 200}\nSentiment:"
    predictors = [
        Predictor(*model, methods.make("batchicl"), **pack)
        for pack in ({}, {"pack_tokens": 20_000})
    ]
    assert len(model[1](query).input_ids) > 512
    ours, whole = (predictor.score(DEMONSTRATIONS, [query], OPTIONS)[0] for predictor in predictors)
    assert [score for score, _ in ours] == pytest.approx([score for score, _ in whole], abs=1e-5)


@pytest.mark.parametrize(("name", "needed"), [("icl", 11), ("pcw", 9), ("invicl", 9)])
def test_a_prompt_may_take_every_position_of_the_model(name, needed):
    """Beside the prefix and the query, symmetric positions take those of the longest demonstration."""
    prompt = TokenizedPrompt(Context((1,), ((5, 6, 7), (8, 9))), (3, 4))
    for positions in (needed, needed - 1):
        limits = PromptLimits(methods.make(name), "GPT2", positions, None, None, "")
        assert (limits.too_long(prompt, 3) is None) == (positions == needed)


def test_options_of_each_query_and_no_demonstrations(checkpoint):
    predictor = Predictor(*load(checkpoint("llama")), methods.make("icl"))
    same = predictor.score([], QUERIES[:2], OPTIONS)
    each = predictor.score([], QUERIES[:2], [OPTIONS[:1], OPTIONS[1:]])
    assert [len(scores) for scores in each] == [1, 2]
    assert [score for score, _ in each[0] + each[1]] == pytest.approx(
        [same[0][0][0], same[1][1][0], same[1][2][0]], abs=1e-12
    )
    assert predictor.score([], [], OPTIONS) == predictor.generate([], []) == []


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda p: p.score(DEMONSTRATIONS, QUERIES, [OPTIONS]), "options: 1 lists for 3 queries"),
        (
            lambda p: p.score(["many " * 3000] * 2, QUERIES, OPTIONS),
            r"query 0, option 0: prompts do not fit the model's 4096 positions; this one needs \d+: "
            r"prefix and demonstrations \d+ \+ query \d+( \+ answer without its last token \d+)?\. Give fewer .*\.$",
        ),
        (
            lambda p: p.score("Review", ["a"], [" yes"]),
            "demonstrations='Review': must be a list of texts",
        ),
        (
            lambda p: p.generate(DEMONSTRATIONS, QUERIES, max_new_tokens=5000),
            r"query 0: prompts do not fit .* \+ new tokens 5000\. Give fewer demonstrations\.$",
        ),
        (lambda p: p.generate([], "a"), "queries='a': must be a list of texts"),
        (lambda p: p.generate([], ["a"], stop="e"), "stop='e': must be a list of texts"),
        (
            lambda p: p.generate([], ["a"], max_new_tokens="a few"),
            "max_new_tokens='a few': must be a whole",
        ),
        (lambda p: p.generate([], ["a"], use_cache=False), "generation argument use_cache=False"),
        (
            lambda p: p.generate([], ["a"], nonsense=1),
            "generation arguments {'nonsense': 1}: refused by transformers",
        ),
    ],
)
def test_bad_input_is_one_line(checkpoint, call, says):
    predictor = Predictor(*load(checkpoint("gpt2")), methods.make("icl"))
    with pytest.raises(InputError, match=f"^lm-eval-icl: {says}"):
        call(predictor)


@pytest.mark.parametrize("argument", [{"pack_tokens": 0}, {"max_length": True}])
def test_arguments_out_of_range(checkpoint, argument):
    ((name, value),) = argument.items()
    with pytest.raises(InputError, match=f"{name}={value!r}: must be a whole number, 1 or more"):
        Predictor(*load(checkpoint("gpt2")), methods.make("icl"), **argument)


def test_a_model_that_somebody_owns_is_left_as_it_was(checkpoint):
    model, tokenizer = load(checkpoint("gpt2"))
    model.generation_config.cache_implementation = "static"
    ids = torch.tensor([tokenizer.encode(QUERIES[0])])
    before = model(ids).logits
    predictor = Predictor(model, tokenizer, methods.make("nope"))
    predictor.score(DEMONSTRATIONS, QUERIES, OPTIONS)
    assert model.generation_config.cache_implementation == "static"
    assert torch.equal(model(ids).logits, before)


def test_a_method_that_learns_needs_the_answers_of_demonstrations(checkpoint):
    predictor = Predictor(*load(checkpoint("llama")), methods.make("ctkv", {"steps": 2}))
    plain = [str(demonstration) for demonstration in DEMONSTRATIONS]
    with pytest.raises(InputError, match=r"query 0: the answer of demonstration 1 is not known"):
        predictor.score(plain, QUERIES, OPTIONS)
    assert predictor.score([], QUERIES[:1], OPTIONS) == Predictor(
        *load(checkpoint("llama")), methods.make("icl")
    ).score([], QUERIES[:1], OPTIONS)
