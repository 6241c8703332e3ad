"""`icl` gives what lm-eval's own `hf` gives, request by request, on every shape of prompt."""

import functools
import itertools

import pytest
from lm_eval.api.instance import Instance

from lm_eval_icl.harness.models import model_class
from tests import evaluation, tiny

SCORED = [
    "one_token",
    "many_tokens",
    "described",
    "spaces",
    "prefixed",
    "inputs",
    "mutual",
    "likelihood",
]
GENERATED = ["generate", "samples"]
# transformers multiplies with the weights of experts in float32 at most, and computes linear
# attention and state spaces in float32. Elsewhere a difference in float64 is a different
# computation; rotary angles and norms stay float32 there.
DTYPE = {"qwen3_next": "float32", "jamba": "float32"}
TOLERANCE = {"qwen3_5": 2e-3, "qwen3_next": 2e-3, "jamba": 2e-3}


@functools.cache
def theirs(path, names, shots, dtype):
    """What `hf` gives, one text at a time: with padding in front it generates other texts on
    BLOOM."""
    return evaluation.answers("hf", path, list(names), shots, args={"dtype": dtype}, batch_size=1)


def assert_as_hf(path, names, shots, **kwargs):
    args = {"dtype": "float64"}
    ours = evaluation.answers("icl", path, names, shots, args=args, **kwargs)
    expected = evaluation.answers("hf", path, names, shots, args=args, **kwargs)
    evaluation.assert_same(ours, expected, 1e-5)


# Without demonstrations, one for each way to read a prompt: with BOS, with a window, and with other
# states.
ZERO_SHOT = ["llama3", "mistral_window", "qwen3_next"]
FAST = itertools.product(["llama", "bloom"], [3], [4])
# Queries that cannot be packed are the rows of batches, in which texts are continued too.
IN_BATCHES = [("qwen3_next", 3, 16), ("mistral_window", 3, 3), ("bloom", 3, "auto")]
CASES = [*itertools.product(tiny.ARCHITECTURES, [3], [4]), *itertools.product(ZERO_SHOT, [0], [4])]


@pytest.mark.parametrize(
    ("name", "shots", "batch_size"), tiny.slow_but(FAST, [*CASES, *IN_BATCHES])
)
def test_every_request(checkpoint, name, shots, batch_size):
    path = checkpoint(name)
    names = SCORED + GENERATED
    dtype = DTYPE.get(name, "float64")
    args = {"dtype": dtype}
    sizes = {"batch_size": batch_size}
    if batch_size == "auto":
        args["max_length"] = 1024
        sizes["max_batch_size"] = 4
    ours = evaluation.answers("icl", path, names, shots, args=args, **sizes)
    expected = theirs(path, tuple(names), shots, dtype)
    evaluation.assert_same(ours, expected, TOLERANCE.get(name, 1e-5))


def test_prompt_that_ends_with_the_demonstrations(checkpoint):
    """The query empty, the delimiter's blanks part of the continuation."""
    assert_as_hf(checkpoint("gpt2"), ["empty_query"], 2)


def documents_cut(icl):
    """For every task, how many documents' prompts were cut."""
    return {count["documents"] for count in icl["truncated"].values()}


@pytest.mark.parametrize(
    ("name", "bos"),
    tiny.slow_but([("llama", None)], [("gpt2", True), ("llama", None), ("llama", False)]),
)
def test_queries_that_are_too_long_by_themselves(checkpoint, name, bos):
    """What is cut keeps the tokens that `hf` keeps; of some prompts all of them, of some all but
    BOS."""
    path = checkpoint(name)
    names = [task for task in SCORED + GENERATED if task != "likelihood"]
    args = {"dtype": "float64", "add_bos_token": bos, "max_length": 30}
    expected = evaluation.answers("hf", path, names, 0, args=args, batch_size=1)
    everything = {name: {"documents": 6, "demonstrations": 18} for name in names}
    for shots, left_out in ((0, {}), (3, everything)):
        results = evaluation.run("icl", path, names, shots, args=args)
        icl = results["config"]["icl"]
        assert icl["left_out"] == left_out
        assert documents_cut(icl) >= {5, 6}
        evaluation.assert_same(evaluation.responses(results), expected, tolerance=1e-5)


@pytest.mark.parametrize(
    "model",
    tiny.slow_but(["icl", "batchicl"], ["icl", "batchicl", "deepthink", "nbce"]),
)
def test_every_method_is_plain_where_no_demonstration_is_left(checkpoint, model):
    path = checkpoint("mistral_window")
    names = ["described", "generate"]
    args = {"dtype": "float64", "max_length": 30}
    expected = evaluation.answers("hf", path, names, 0, args=args, batch_size=1)
    ours = evaluation.run(model, path, names, 3, args=args)
    assert documents_cut(ours["config"]["icl"]) <= {5, 6}
    evaluation.assert_same(evaluation.responses(ours), expected, tolerance=1e-5)


# Eager attention adds the mask where sdpa may select by it, and has float32 inside.
PACKED = {"pack_tokens": 60}
EAGER = {"attn_implementation": "eager"}
ONE_BY_ONE = {"pack_tokens": 1}


@pytest.mark.parametrize(
    ("args", "tolerance"),
    [(PACKED, 1e-9), (EAGER, 1e-5), pytest.param(ONE_BY_ONE, 1e-9, marks=pytest.mark.slow)],
    ids=["packed", "eager", "one by one"],
)
def test_how_it_is_computed_does_not_matter(checkpoint, args, tolerance):
    path = checkpoint("llama3")
    whole = {"dtype": "float64"}
    ours = evaluation.answers("icl", path, SCORED, 3, args=whole | args)
    expected = evaluation.answers("icl", path, SCORED, 3, args=whole)
    evaluation.assert_same(ours, expected, tolerance)


@pytest.mark.parametrize(
    "name", tiny.slow_but(["gpt2", "bloom"], ["gpt2", "bloom", "qwen3_next", "jamba"])
)
def test_generation_arguments_reach_generate(checkpoint, name):
    settings = {"repetition_penalty": 1.3, "max_gen_toks": 9, "num_beams": 2}
    options = {"args": {"dtype": DTYPE.get(name, "float64")}, "gen_kwargs": settings}

    def texts(model, batch_size):
        path = checkpoint(name)
        return evaluation.answers(model, path, GENERATED, 3, batch_size=batch_size, **options)

    assert texts("icl", 4) == texts("hf", 1)


def test_guided_texts(checkpoint):
    """The guidance's own passes of the model see nothing of the prompt but its last token."""

    def texts(model, **args):
        settings = {"guidance_scale": 3.0}
        path = checkpoint("llama")
        return evaluation.answers(model, path, GENERATED, 2, args=args, gen_kwargs=settings)

    assert texts("icl") == texts("icl", plain=True) == texts("hf")


def test_a_token_that_ends_thinking(checkpoint):
    """The text after the last of these tokens, without the blanks before it."""
    end = tiny.sentencepiece().convert_tokens_to_ids("osi")  # one that is often generated

    def texts(model, **args):
        return evaluation.answers(model, checkpoint("llama"), ["generate"], 2, limit=3, args=args)

    expected = texts("hf", think_end_token=end)
    assert texts("icl", think_end_token=end) == expected != texts("icl")


@pytest.mark.parametrize("multiturn", tiny.slow_but([True], [True, False]))
def test_chat_template(chat_checkpoint, multiturn):
    assert_as_hf(
        chat_checkpoint("llama3"),
        ["one_token", "described", "prefixed", "inputs", "likelihood", "generate"],
        3,
        apply_chat_template=True,
        fewshot_as_multiturn=multiturn,
        system_instruction="In one word.",
    )


def test_rolling_is_inherited(checkpoint):
    task = evaluation.task(
        "rolling", output_type="loglikelihood_rolling", doc_to_text="", doc_to_target="{{text}}"
    )

    def perplexity(model):
        results = evaluation.run(model, checkpoint("gpt2"), [task], 0)
        return results["results"]["rolling"]["word_perplexity,none"]

    assert perplexity("icl") == pytest.approx(perplexity("hf"), rel=1e-6)


def test_rolling_runs_without_positions_where_the_method_has_none(checkpoint):
    """As one continuation of the empty text does."""
    text = " the film was warm and slow"
    lm = model_class("nope")(pretrained=str(checkpoint("gpt2")), device="cpu")
    task = ("rolling", 0, 1)
    rolling = Instance("loglikelihood_rolling", {}, (text,), 0, task)
    continuation = Instance("loglikelihood", {}, ("", text), 0, task)
    [(expected, _)] = lm.loglikelihood([continuation])
    assert lm.loglikelihood_rolling([rolling]) == [pytest.approx(expected, rel=1e-6)]
