"""`icl` gives what lm-eval's own `hf` gives, request by request, on every shape of prompt."""

import functools
import itertools

import pytest

from lm_eval_icl import methods
from tests import evaluation, tiny

SCORED = ["one_token", "many_tokens", "described", "spaces", "prefixed", "inputs", "mutual", "likelihood"]
GENERATED = ["generate", "samples"]


def dtype_of(name):
    """transformers multiplies with the weights of experts in float32 at most."""
    return "float32" if name in ("qwen3_next", "jamba") else "float64"


def tolerance(name):
    """It computes linear attention and state spaces in float32, too."""
    return 2e-3 if name in ("qwen3_5", "qwen3_next", "jamba") else 1e-5


@functools.cache
def theirs_of(path, names, batch_size, **args):
    """What `hf` gives with three demonstrations, for several settings of ours."""
    return evaluation.responses(evaluation.run("hf", path, list(names), 3, args=args, batch_size=batch_size))


ARCHITECTURES = [*tiny.ARCHITECTURES]
# Without demonstrations, one for each way to read a prompt: by learned positions, with BOS, with a window, without
# positions, and with other states.
ZERO_SHOT = ["gpt2", "llama3", "mistral_window", "bloom", "qwen3_next"]


@pytest.mark.parametrize(
    ("name", "shots"),
    tiny.slow_but(
        itertools.product(["gpt2", "llama", "mistral_window", "bloom", "qwen3_next"], [3]),
        [*itertools.product(ARCHITECTURES, [3]), *itertools.product(ZERO_SHOT, [0])],
    ),
)
def test_every_request(checkpoint, name, shots):
    path = checkpoint(name)
    # In float64 a difference is a different computation; rotary angles and norms stay float32 there.
    args = {"dtype": dtype_of(name)}
    # One text at a time: with padding in front, hf itself generates other texts on BLOOM.
    theirs = evaluation.responses(evaluation.run("hf", path, SCORED + GENERATED, shots, args=args, batch_size=1))
    ours = evaluation.responses(evaluation.run("icl", path, SCORED + GENERATED, shots, args=args))
    evaluation.assert_same(ours, theirs, tolerance(name))


def test_prompt_that_ends_with_the_demonstrations(checkpoint):
    """The query empty, the delimiter's blanks part of the continuation."""
    path = checkpoint("gpt2")
    theirs = evaluation.responses(evaluation.run("hf", path, ["empty_query"], 2))
    ours = evaluation.responses(evaluation.run("icl", path, ["empty_query"], 2))
    evaluation.assert_same(ours, theirs, tolerance=1e-4)


@pytest.mark.parametrize(
    ("name", "bos"),
    tiny.slow_but(
        [("gpt2", True), ("llama", None)],
        [("gpt2", None), ("gpt2", True), ("llama", None), ("llama", True), ("llama", False)],
    ),
)
def test_queries_that_are_too_long_by_themselves(checkpoint, name, bos):
    """overflow=truncate keeps the tokens that `hf` keeps; of some prompts all of them, of some all but BOS."""
    path, names = checkpoint(name), [task for task in SCORED if task != "likelihood"] + GENERATED
    args = {"dtype": "float64", "add_bos_token": bos, "max_length": 30}
    theirs = evaluation.responses(evaluation.run("hf", path, names, 0, args=args, batch_size=1))
    args["overflow"] = "truncate"
    for shots in (0, 3):
        results = evaluation.run("icl", path, names, shots, args=args)
        found = results["config"]["icl"]
        expected = {task: {"documents": 6, "demonstrations": 18} for task in names} if shots else {}
        assert found["left_out"] == expected
        assert {count["documents"] for count in found["truncated"].values()} >= {5, 6}
        evaluation.assert_same(evaluation.responses(results), theirs, tolerance=1e-5)


@pytest.mark.parametrize(
    "model",
    tiny.slow_but(["icl", "invicl", "batchicl", "ape"], [name for name in methods.NAMES if name != "nope"]),
)
def test_every_method_is_plain_where_no_demonstration_is_left(checkpoint, model):
    path, names, args = checkpoint("mistral_window"), ["described", "generate"], {"dtype": "float64", "max_length": 30}
    theirs = evaluation.responses(evaluation.run("hf", path, names, 0, args=args, batch_size=1))
    ours = evaluation.run(model, path, names, 3, args={**args, "overflow": "truncate"})
    assert {count["documents"] for count in ours["config"]["icl"]["truncated"].values()} <= {5, 6}
    evaluation.assert_same(evaluation.responses(ours), theirs, tolerance=1e-5)


@pytest.mark.parametrize("args", [{"pack_tokens": 1}, {"pack_tokens": 60}, {"pack_tokens": 4096}])
def test_packing_does_not_matter(checkpoint, args):
    path = checkpoint("llama3")
    expected = evaluation.responses(evaluation.run("icl", path, SCORED, 3))
    evaluation.assert_same(evaluation.responses(evaluation.run("icl", path, SCORED, 3, args=args)), expected, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "batch_size"),
    [
        *(("gpt2", batch_size) for batch_size in (1, 3, 16, "auto")),
        *((name, batch_size) for name in ("bloom", "qwen3_next") for batch_size in (1, 3, 16)),
        ("mistral_window", 3),
        ("jamba", 3),
        ("jamba", "auto"),
    ],
)
def test_generation_in_batches(checkpoint, name, batch_size):
    path = checkpoint(name)
    args = {"dtype": dtype_of(name), "max_length": 1024}
    expected = theirs_of(path, tuple(GENERATED), 1, **args)
    most = {"max_batch_size": 4} if batch_size == "auto" else {}
    ours = evaluation.responses(evaluation.run("icl", path, GENERATED, 3, args=args, batch_size=batch_size, **most))
    evaluation.assert_same(ours, expected, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "batch_size"), [("bloom", 1), ("bloom", 3), ("bloom", 16), ("qwen3_next", 3), ("jamba", 3), ("jamba", 16)]
)
def test_scoring_in_batches(checkpoint, name, batch_size):
    """Queries that cannot be packed are the rows of batches."""
    path, args = checkpoint(name), {"dtype": dtype_of(name)}
    expected = theirs_of(path, tuple(SCORED), 4, **args)
    ours = evaluation.responses(evaluation.run("icl", path, SCORED, 3, args=args, batch_size=batch_size))
    evaluation.assert_same(ours, expected, tolerance(name))


@pytest.mark.parametrize("name", tiny.slow_but(["gpt2", "bloom"], ["gpt2", "bloom", "qwen3_next", "jamba"]))
def test_generation_arguments_reach_generate(checkpoint, name):
    path = checkpoint(name)
    kwargs = {
        "gen_kwargs": {"repetition_penalty": 1.3, "max_gen_toks": 9, "num_beams": 2},
        "args": {"dtype": dtype_of(name)},
    }
    expected = evaluation.responses(evaluation.run("hf", path, GENERATED, 3, batch_size=1, **kwargs))
    ours = evaluation.responses(evaluation.run("icl", path, GENERATED, 3, batch_size=4, **kwargs))
    evaluation.assert_same(ours, expected, 0)


@pytest.mark.parametrize(("name", "multiturn"), [("gpt2", True), ("llama3", True), ("llama3", False)])
def test_chat_template(checkpoint, chat_checkpoint, name, multiturn):
    path = chat_checkpoint(name)
    kwargs = {
        "apply_chat_template": True,
        "fewshot_as_multiturn": multiturn,
        "system_instruction": "Answer in one word.",
    }
    names = ["one_token", "described", "prefixed", "inputs", "likelihood", "generate"]
    theirs = evaluation.responses(evaluation.run("hf", path, names, 3, args={"dtype": "float64"}, **kwargs))
    ours = evaluation.responses(evaluation.run("icl", path, names, 3, args={"dtype": "float64"}, **kwargs))
    evaluation.assert_same(ours, theirs, tolerance=1e-5)


def test_rolling_is_inherited(checkpoint):
    path = checkpoint("gpt2")
    task = evaluation.task("rolling", output_type="loglikelihood_rolling", doc_to_text="", doc_to_target="{{text}}")
    evaluation.TASKS["rolling"] = task
    theirs, ours = (evaluation.run(model, path, ["rolling"], 0)["results"] for model in ("hf", "icl"))
    key = "word_perplexity,none"
    assert ours["rolling"][key] == pytest.approx(theirs["rolling"][key], rel=1e-6)


def test_eager_attention(checkpoint):
    """Eager attention adds the mask where sdpa may select by it."""
    path = checkpoint("llama")
    expected = evaluation.responses(evaluation.run("icl", path, SCORED, 2))
    ours = evaluation.responses(evaluation.run("icl", path, SCORED, 2, args={"attn_implementation": "eager"}))
    evaluation.assert_same(ours, expected, 1e-5)
