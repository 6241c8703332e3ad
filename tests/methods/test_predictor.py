"""The Python API gives what lm-eval's model gives, without any of it."""

import functools
import itertools
from typing import NamedTuple

import pytest
import torch
from lm_eval.api.instance import Instance

from lm_eval_icl import methods
from lm_eval_icl.errors import InputError
from lm_eval_icl.harness.models import model_class
from lm_eval_icl.inference.capabilities import PositionSwitch
from lm_eval_icl.methods import Predictor
from lm_eval_icl.methods.limits import PromptLimits, Request, shortened, truncated
from lm_eval_icl.prompts.prompt import Demonstration, FewShotPrompt
from lm_eval_icl.prompts.tokens import Context, TokenizedPrompt
from lm_eval_icl.smoke.every_method import QUICK
from tests import tiny

pytestmark = pytest.mark.usefixtures("tried_once")

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


def lm_of(name, path):
    """lm-eval's model of a method, as quick as the smoke test has it."""
    arguments = QUICK.get(name, {})
    return model_class(name)(str(path), device="cpu", dtype="float64", batch_size=8, **arguments)


def predictor_of(name, path, **settings):
    model, tokenizer = load(path)
    return Predictor(model, tokenizer, methods.make(name, QUICK.get(name, {})), **settings)


PREFIX = "Tell. "
PROMPTS = [FewShotPrompt(PREFIX, DEMONSTRATIONS, query) for query in QUERIES]


def logprobs(scores):
    """Those of a query's options."""
    return [logprob for logprob, _ in scores]


@pytest.mark.parametrize(
    "name", tiny.slow_but(["icl", "invicl", "deepthink", "saicl", "nbce"], methods.NAMES)
)
def test_it_gives_what_the_lm_eval_model_gives(checkpoint, name):
    path = checkpoint("llama")
    requests = []
    for pair in itertools.product(PROMPTS, OPTIONS):
        requests.append(Instance("loglikelihood", {}, pair, 0))
    expected = lm_of(name, path).loglikelihood(requests, disable_tqdm=True)
    scores = predictor_of(name, path).score(DEMONSTRATIONS, QUERIES, OPTIONS, prefix=PREFIX)
    assert list(itertools.chain(*scores)) == expected


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
    expected = []
    for demonstrations, query in zip(shown, QUERIES, strict=True):
        expected.append(by_whole_passes(model, tokenizer, demonstrations, query, 7, PREFIX))
    settings = {"prefix": PREFIX, "max_new_tokens": 7}
    assert predictor.generate(shown, QUERIES, **settings) == expected
    assert predictor.generate(shown[2], QUERIES[2:], **settings) == expected[2:]


@pytest.mark.parametrize("name", tiny.slow_but(["invicl", "saicl", "nbce", "ape"], methods.NAMES))
def test_texts_are_those_of_the_lm_eval_model(checkpoint, name):
    path = checkpoint("llama")
    settings = {"until": ["e"], "max_gen_toks": 6}
    requests = [Instance("generate_until", {}, (prompt, settings), 0) for prompt in PROMPTS]
    settings = {"prefix": PREFIX, "max_new_tokens": 6, "stop": ["e"]}
    texts = predictor_of(name, path).generate(DEMONSTRATIONS, QUERIES, **settings)
    assert texts == lm_of(name, path).generate_until(requests, disable_tqdm=True)


def test_the_settings_of_a_checkpoint_and_of_a_call_hold(checkpoint):
    """Beams and a penalty are transformers' own, on the whole prompt."""
    model, tokenizer = load(checkpoint("llama"))
    settings = {"num_beams": 3, "repetition_penalty": 1.3}
    predictor = Predictor(model, tokenizer, methods.make("icl"))
    plain = predictor.generate(DEMONSTRATIONS, QUERIES)
    texts = predictor.generate(DEMONSTRATIONS, QUERIES, **settings)
    model.generation_config.update(**settings)
    assert predictor.generate(DEMONSTRATIONS, QUERIES) == texts != plain
    model.generation_config.update(num_beams=1, repetition_penalty=1.0)
    settings |= {"max_new_tokens": 32, "do_sample": False, "pad_token_id": 0}
    for query, text in zip(QUERIES, texts, strict=True):
        ids = tokenizer("".join(DEMONSTRATIONS) + query, return_tensors="pt").input_ids
        whole = model.generate(ids, **settings)
        assert tokenizer.decode(whole[0, ids.shape[1] :], skip_special_tokens=True) == text


@pytest.mark.parametrize(
    "setting", [{"repetition_penalty": 0.5}, {"repetition_penalty": 1.3}, {"guidance_scale": 2.0}]
)
def test_plain_mode_gives_processors_the_same_scores(checkpoint, setting):
    """A penalty of logits is another one of log-probabilities."""
    path = checkpoint("gpt2")
    texts = predictor_of("icl", path).generate(DEMONSTRATIONS, QUERIES, **setting)
    plain = predictor_of("icl", path, plain=True)
    assert plain.generate(DEMONSTRATIONS, QUERIES, **setting) == texts


def test_plain_mode_gives_positions_with_every_mask(checkpoint):
    """OPT would count them by the mask."""
    method = methods.make("pcw", {"positions": "sequential"})
    scores = []
    for plain in (False, True):
        predictor = Predictor(*load(checkpoint("opt")), method, plain=plain)
        [of_query] = predictor.score(DEMONSTRATIONS, QUERIES[:1], OPTIONS)
        scores.append(logprobs(of_query))
    assert scores[1] == pytest.approx(scores[0], abs=1e-9)


def test_more_positions_than_a_model_has_learned(checkpoint):
    says = "max_length=5000: GPT2LMHeadModel has learned embeddings for 4096 positions only"
    with pytest.raises(InputError, match=says):
        predictor_of("icl", checkpoint("gpt2"), max_length=5000)
    predictor_of("icl", checkpoint("llama"), max_length=5000)


def test_one_memory_for_many_calls(checkpoint):
    predictor = predictor_of("invicl", checkpoint("gpt2"))
    first, *_ = predictor.score(DEMONSTRATIONS, QUERIES, OPTIONS)
    [again] = predictor.score(DEMONSTRATIONS[::-1], QUERIES[:1], OPTIONS)  # in any order
    assert predictor.runner.store.encoded == 1
    assert logprobs(again) == pytest.approx(logprobs(first), abs=1e-12)


@pytest.mark.parametrize("name", tiny.slow_but(["llama"], ["gpt2", "llama", "bloom"]))
def test_a_query_longer_than_a_piece_of_a_pass(checkpoint, name):
    """Of what runs in several passes, the last one has the query's last token."""
    model, tokenizer = load(checkpoint(name))
    query = f"Review: {'a long film ' * 200}\nSentiment:"
    assert len(tokenizer(query).input_ids) > 512
    in_pieces = Predictor(model, tokenizer, methods.make("batchicl"))
    whole = Predictor(model, tokenizer, methods.make("batchicl"), pack_tokens=20_000)
    [ours] = in_pieces.score(DEMONSTRATIONS, [query], OPTIONS)
    [expected] = whole.score(DEMONSTRATIONS, [query], OPTIONS)
    assert logprobs(ours) == pytest.approx(logprobs(expected), abs=1e-5)


@pytest.mark.parametrize(("name", "needed"), [("icl", 11), ("pcw", 9), ("invicl", 9)])
def test_a_prompt_may_take_every_position_of_the_model(name, needed):
    """Beside the prefix and the query, symmetric positions take those of the longest
    demonstration."""
    prompt = TokenizedPrompt(Context((1,), ((5, 6, 7), (8, 9))), (3, 4))

    def too_long(positions):
        limits = PromptLimits(methods.make(name), "GPT2", positions, None, None, "")
        return limits.too_long(prompt, 3)

    assert too_long(needed) is None
    assert too_long(needed - 1) is not None


class Spelt(NamedTuple):
    """A document whose demonstrations have fewer tokens if another stands before them."""

    lengths: tuple[int, ...] = (4, 4, 4)
    joined: int = 3

    def requests(self, left_out=()):
        lengths = [n for i, n in enumerate(self.lengths) if i not in left_out]
        if left_out and len(lengths) > 1:
            lengths = [self.joined] * len(lengths)
        prompt = TokenizedPrompt(Context((), tuple((7,) * n for n in lengths)), (8, 9))
        return [Request(prompt, (1,), 0, left_out)]


def limits_of(positions, switch=None):
    return PromptLimits(methods.ICL(), "GPT2", positions, None, switch, "")


def test_a_demonstration_that_fits_after_all_is_taken_back():
    """By the tokens of the whole prompt, two of them have to leave."""
    document = Spelt()
    [request] = shortened(document.requests(), document.requests, limits_of(8))
    assert request.left_out == (0,)
    document = Spelt(joined=4)
    [request] = shortened(document.requests(), document.requests, limits_of(8))
    assert request.left_out == (0, 1)


def test_what_is_cut_ends_where_rotary_angles_change():
    prompt = TokenizedPrompt(Context((1, 2), ()), tuple(range(10, 20)))
    request = truncated(Request(prompt, (3, 4), 1), limits_of(50, PositionSwitch(6, True)))
    assert request.cut == 7
    assert request.prompt == TokenizedPrompt(Context((), ()), (15, 16, 17, 18, 19))


def test_options_of_each_query_and_no_demonstrations(checkpoint):
    predictor = predictor_of("icl", checkpoint("llama"))
    first, second = map(logprobs, predictor.score([], QUERIES[:2], OPTIONS))
    by_query = predictor.score([], QUERIES[:2], [OPTIONS[:1], OPTIONS[1:]])
    own_first, own_second = map(logprobs, by_query)
    assert own_first == pytest.approx(first[:1], abs=1e-12)
    assert own_second == pytest.approx(second[1:], abs=1e-12)
    assert predictor.score([], [], OPTIONS) == []
    assert predictor.generate([], []) == []


@pytest.mark.parametrize("switch", [64, 80])
@torch.no_grad()
def test_long_prompts_without_demonstrations_run_as_one_pass(tmp_path, switch):
    """On a model whose rotary angles change before the end of the prompt, or in its answer."""
    rope = tiny.longrope(switch)
    tiny.save("llama", tmp_path, rope_parameters=rope, max_position_embeddings=512)
    predictor = predictor_of("icl", tmp_path)
    prompt = PREFIX + "sharp and bright " * 5 + QUERIES[0]
    before, after = map(predictor.tokenizer.tokenizer.encode, (prompt, prompt + OPTIONS[2]))
    logprobs = predictor.runner.model(torch.tensor([after[:-1]])).logits[0].log_softmax(-1)
    expected = [float(logprobs[i - 1, after[i]]) for i in range(len(before), len(after))]
    [[(score, _)]] = predictor.score([], [prompt.removeprefix(PREFIX)], OPTIONS[2:], prefix=PREFIX)
    assert score == pytest.approx(sum(expected), abs=1e-9)
    assert len(before) <= 80 < len(after) - 1


NO_LIST = "must be a list of texts"


@pytest.mark.parametrize(
    ("shown", "queries", "options", "says"),
    [
        (DEMONSTRATIONS, QUERIES, [OPTIONS], "options: 1 lists for 3 queries"),
        (
            ["many " * 3000] * 2,
            QUERIES,
            OPTIONS,
            r"query 0, option 0: prompts do not fit the model's 4096 positions; this one needs "
            r"\d+: prefix and demonstrations \d+ \+ query \d+"
            r"( \+ answer without its last token \d+)?\. Give fewer .*\.$",
        ),
        ("Review", ["a"], [" yes"], f"demonstrations='Review': {NO_LIST}"),
        ([], ["a"], [""], "query 0, option 0: the option is empty: there is nothing to score"),
    ],
    ids=["options", "length", "demonstrations", "option"],
)
def test_bad_input_to_score_is_one_line(checkpoint, shown, queries, options, says):
    predictor = predictor_of("icl", checkpoint("gpt2"))
    with pytest.raises(InputError, match=f"^lm-eval-icl: {says}"):
        predictor.score(shown, queries, options)


@pytest.mark.parametrize(
    ("shown", "queries", "settings", "says"),
    [
        (
            DEMONSTRATIONS,
            QUERIES,
            {"max_new_tokens": 5000},
            r"query 0: prompts do not fit .* \+ new tokens 5000\. Give fewer demonstrations\.$",
        ),
        ([], "a", {}, f"queries='a': {NO_LIST}"),
        ([], ["a"], {"stop": "e"}, f"stop='e': {NO_LIST}"),
        ([], ["a"], {"max_new_tokens": "a few"}, "max_new_tokens='a few': must be a whole"),
        ([], ["a"], {"use_cache": False}, "generation argument use_cache=False"),
        (
            [],
            ["a"],
            {"nonsense": 1},
            "generation arguments {'nonsense': 1}: refused by transformers",
        ),
    ],
    ids=["length", "queries", "stop", "max_new_tokens", "use_cache", "nonsense"],
)
def test_bad_input_to_generate_is_one_line(checkpoint, shown, queries, settings, says):
    predictor = predictor_of("icl", checkpoint("gpt2"))
    with pytest.raises(InputError, match=f"^lm-eval-icl: {says}"):
        predictor.generate(shown, queries, **settings)


def test_more_windows_than_demonstrations_are_refused(checkpoint):
    model, tokenizer = load(checkpoint("gpt2"))
    predictor = Predictor(model, tokenizer, methods.make("pcw", {"window_size": 4}))
    says = "^lm-eval-icl: pcw: window_size=4: must not exceed the 3 demonstrations"
    with pytest.raises(InputError, match=says):
        predictor.score(DEMONSTRATIONS, QUERIES, OPTIONS)


@pytest.mark.parametrize(("name", "value"), [("pack_tokens", 0), ("max_length", True)])
def test_arguments_out_of_range(checkpoint, name, value):
    with pytest.raises(InputError, match=f"{name}={value!r}: must be a whole number, 1 or more"):
        predictor_of("icl", checkpoint("gpt2"), **{name: value})


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
    path = checkpoint("llama")
    predictor = Predictor(*load(path), methods.make("ctkv", {"steps": 2}))
    plain = [str(demonstration) for demonstration in DEMONSTRATIONS]
    with pytest.raises(InputError, match=r"query 0: the answer of demonstration 1 is not known"):
        predictor.score(plain, QUERIES, OPTIONS)
    expected = predictor_of("icl", path).score([], QUERIES[:1], OPTIONS)
    assert predictor.score([], QUERIES[:1], OPTIONS) == expected
