"""`icl` gives what lm-eval's own `hf` gives, request by request, on every shape of prompt."""

import functools
import itertools

import pytest

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
# transformers multiplies with the weights of experts in float32 at most, and computes linear attention and state spaces
# in float32. Elsewhere a difference in float64 is a different computation; rotary angles and norms stay float32 there.
DTYPE = {"qwen3_next": "float32", "jamba": "float32"}
TOLERANCE = {"qwen3_5": 2e-3, "qwen3_next": 2e-3, "jamba": 2e-3}


@functools.cache
def theirs(path, names, shots, dtype):
    """What `hf` gives, one text at a time: with padding in front it generates other texts on BLOOM."""
    return evaluation.answers("hf", path, list(names), shots, args={"dtype": dtype}, batch_size=1)


def assert_as_hf(path, names, shots, tolerance=1e-5, args=None, **kwargs):
    args = {"dtype": "float64", **(args or {})}
    ours, expected = (
        evaluation.answers(model, path, names, shots, args=args, **kwargs)
        for model in ("icl", "hf")
    )
    evaluation.assert_same(ours, expected, tolerance)


# Without demonstrations, one for each way to read a prompt: with BOS, with a window, and with other states.
ZERO_SHOT = ["llama3", "mistral_window", "qwen3_next"]
FAST = itertools.product(["llama", "bloom"], [3], [4])
# Queries that cannot be packed are the rows of batches, in which texts are continued too.
IN_BATCHES = [("qwen3_next", 3, 16), ("mistral_window", 3, 3), ("bloom", 3, "auto")]


@pytest.mark.parametrize(
    ("name", "shots", "batch_size"),
    tiny.slow_but(
        FAST,
        [
            *itertools.product(tiny.ARCHITECTURES, [3], [4]),
            *itertools.product(ZERO_SHOT, [0], [4]),
            *IN_BATCHES,
        ],
    ),
)
def test_every_request(checkpoint, name, shots, batch_size):
    path, names, dtype = checkpoint(name), SCORED + GENERATED, DTYPE.get(name, "float64")
    args, most = {"dtype": dtype}, {}
    if batch_size == "auto":
        args, most = {**args, "max_length": 1024}, {"max_batch_size": 4}
    ours = evaluation.answers("icl", path, names, shots, args=args, batch_size=batch_size, **most)
    evaluation.assert_same(
        ours, theirs(path, tuple(names), shots, dtype), TOLERANCE.get(name, 1e-5)
    )


def test_prompt_that_ends_with_the_demonstrations(checkpoint):
    """The query empty, the delimiter's blanks part of the continuation."""
    assert_as_hf(checkpoint("gpt2"), ["empty_query"], 2)


@pytest.mark.parametrize(
    ("name", "bos"),
    tiny.slow_but(
        [("llama", None)],
        [("gpt2", True), ("llama", None), ("llama", False)],
    ),
)
def test_queries_that_are_too_long_by_themselves(checkpoint, name, bos):
    """What is cut keeps the tokens that `hf` keeps; of some prompts all of them, of some all but BOS."""
    path, names = checkpoint(name), [task for task in SCORED if task != "likelihood"] + GENERATED
    args = {"dtype": "float64", "add_bos_token": bos, "max_length": 30}
    expected = evaluation.answers("hf", path, names, 0, args=args, batch_size=1)
    for shots in (0, 3):
        results = evaluation.run("icl", path, names, shots, args=args)
        found = results["config"]["icl"]
        left_out = {task: {"documents": 6, "demonstrations": 18} for task in names} if shots else {}
        assert found["left_out"] == left_out
        assert {count["documents"] for count in found["truncated"].values()} >= {5, 6}
        evaluation.assert_same(evaluation.responses(results), expected, tolerance=1e-5)


@pytest.mark.parametrize(
    "model",
    tiny.slow_but(["icl", "batchicl"], ["icl", "batchicl", "deepthink", "nbce"]),
)
def test_every_method_is_plain_where_no_demonstration_is_left(checkpoint, model):
    path, names, args = (
        checkpoint("mistral_window"),
        ["described", "generate"],
        {"dtype": "float64", "max_length": 30},
    )
    expected = evaluation.answers("hf", path, names, 0, args=args, batch_size=1)
    ours = evaluation.run(model, path, names, 3, args=args)
    assert {count["documents"] for count in ours["config"]["icl"]["truncated"].values()} <= {5, 6}
    evaluation.assert_same(evaluation.responses(ours), expected, tolerance=1e-5)


# Eager attention adds the mask where sdpa may select by it.
@pytest.mark.parametrize(
    "args",
    tiny.slow_but(
        PACKED_OR_EAGER := [{"pack_tokens": 60}, {"attn_implementation": "eager"}],
        [*PACKED_OR_EAGER, {"pack_tokens": 1}],
    ),
    ids=str,
)
def test_how_it_is_computed_does_not_matter(checkpoint, args):
    path, whole = checkpoint("llama3"), {"dtype": "float64"}
    ours = evaluation.answers("icl", path, SCORED, 3, args=whole | args)
    expected = evaluation.answers("icl", path, SCORED, 3, args=whole)
    evaluation.assert_same(
        ours, expected, 1e-5 if "attn_implementation" in args else 1e-9
    )  # eager has float32 inside


@pytest.mark.parametrize(
    "name", tiny.slow_but(["gpt2", "bloom"], ["gpt2", "bloom", "qwen3_next", "jamba"])
)
def test_generation_arguments_reach_generate(checkpoint, name):
    path, args = checkpoint(name), {"dtype": DTYPE.get(name, "float64")}
    settings = {"repetition_penalty": 1.3, "max_gen_toks": 9, "num_beams": 2}
    expected = evaluation.answers(
        "hf", path, GENERATED, 3, args=args, gen_kwargs=settings, batch_size=1
    )
    assert (
        evaluation.answers("icl", path, GENERATED, 3, args=args, gen_kwargs=settings, batch_size=4)
        == expected
    )


@pytest.mark.parametrize(
    ("name", "multiturn"), tiny.slow_but([("llama3", True)], [("llama3", True), ("llama3", False)])
)
def test_chat_template(chat_checkpoint, name, multiturn):
    names = ["one_token", "described", "prefixed", "inputs", "likelihood", "generate"]
    chat = {
        "apply_chat_template": True,
        "fewshot_as_multiturn": multiturn,
        "system_instruction": "In one word.",
    }
    assert_as_hf(chat_checkpoint(name), names, 3, **chat)


def test_rolling_is_inherited(checkpoint):
    task = evaluation.task(
        "rolling", output_type="loglikelihood_rolling", doc_to_text="", doc_to_target="{{text}}"
    )
    expected, ours = (
        evaluation.run(model, checkpoint("gpt2"), [task], 0)["results"] for model in ("hf", "icl")
    )
    key = "word_perplexity,none"
    assert ours["rolling"][key] == pytest.approx(expected["rolling"][key], rel=1e-6)
