"""Order-invariant methods through lm-eval: not a bit of a result depends on the order of the
demonstrations."""

import pytest

from tests import evaluation, tiny

pytestmark = pytest.mark.usefixtures("tried_once")

INVARIANT = ["prefixicl", "pcw", "saicl", "invicl", "batchicl"]
# Demonstrations that begin and end with blanks, line breaks and punctuation, or hold nothing else.
TEXTS = ["  a dull plot ", "warm!\n", "\n\nquick 12", "...", " \n x", "café, long", "30"]


def tasks(order, delimiter="\n\n"):
    samples = [{"text": TEXTS[i], "label": i % 2, "other": evaluation.WORDS[i]} for i in order]
    name = "order_" + "".join(map(str, order))
    config = {
        "fewshot_split": None,
        "training_split": None,
        "fewshot_delimiter": delimiter,
        "fewshot_config": {"sampler": "first_n", "samples": samples},
        "description": "Tell what it is. ",
        "doc_to_text": "{{text}}\nSentiment:",
    }
    choice = evaluation.choice(name, "very bad", "bad", "good.", **config)
    settings = {"until": ["\n\n"], "max_gen_toks": 6}
    generate = evaluation.generation(f"generate_{name}", settings, **config)
    return [choice, generate]


def answers(model, path, order, delimiter="\n\n", **kwargs):
    results = evaluation.run(model, path, tasks(order, delimiter), len(order), **kwargs)
    return evaluation.responses(results)


def no_bit_depends_on_the_order(model, path, **kwargs):
    one = answers(model, path, [0, 1, 2, 3, 4, 5, 6], **kwargs)
    other = answers(model, path, [4, 2, 6, 0, 5, 3, 1], **kwargs)
    assert one == other
    assert len(set(map(str, one))) > 5


@pytest.mark.parametrize(
    ("architecture", "delimiter"),
    tiny.slow_but([("llama", "")], [("llama", ""), ("llama3", "\n\n"), ("gpt2", " ")]),
)
@pytest.mark.parametrize("model", INVARIANT)
def test_no_bit_depends_on_the_order(checkpoint, model, architecture, delimiter):
    no_bit_depends_on_the_order(model, checkpoint(architecture), delimiter=delimiter)


MEMORIES = [
    ("sbp", {}),
    ("ape", {}),
    ("structured", {}),
    ("ensemble", {"combine": "moe"}),
    ("nbce", {}),
    ("deepthink", {"layout": "pcw", "reads": "all", "T": 3, "eta": 0.5}),
    ("deepthink", {"layout": "invicl", "reads": "layout", "T": 3, "eta": 0.5}),
]


@pytest.mark.parametrize(("model", "args"), tiny.slow_but([("ape", {}), ("nbce", {})], MEMORIES))
def test_no_bit_depends_on_it_where_memories_are_refined_read_in_parts_or_combined(
    checkpoint, model, args
):
    no_bit_depends_on_the_order(model, checkpoint("llama"), delimiter=" ", args=args)


@pytest.mark.parametrize("model", ["prefixicl", "pcw", "invicl"])
def test_permuted_contexts_share_one_memory(checkpoint, model):
    # One for the log-likelihoods, whose demonstrations end in labels, one for generation.
    both = [*tasks([0, 1, 2, 3]), *tasks([3, 1, 0, 2])]
    results = evaluation.run(model, checkpoint("llama"), both, 4)
    assert results["config"]["icl"]["contexts_encoded"] == 2


@pytest.mark.parametrize(
    ("model", "args"),
    [
        ("invicl", {"positions": "sequential"}),
        ("prefixicl", {"positions": "sequential"}),
        ("pcw", {"window_size": 2}),
        ("icl", {}),
        ("icl", {"positions": "symmetric"}),
    ],
)
def test_an_order_dependence_is_not_hidden(checkpoint, model, args):
    """Canonical order is off where it would hide what somebody means to measure."""

    def scores(order):
        choice, _ = tasks(order)
        results = evaluation.run(model, checkpoint("gpt2"), [choice], 4, args=args)
        assert results["config"]["icl"]["canonical_order"] is False
        return [score for score, _ in evaluation.responses(results)]

    assert scores([0, 1, 2, 3]) != pytest.approx(scores([3, 1, 0, 2]), rel=0, abs=1e-4)


@pytest.mark.parametrize(
    ("model", "args"),
    tiny.slow_but(
        [("icl", {})],
        [("deepthink", {"T": 2}), ("nope", {}), ("star", {}), ("pcw", {"window_size": 2})],
    ),
)
def test_the_control_sorted_demonstrations(checkpoint, model, args):
    """Under any method, `canonical_order=True` gives what the method gives for demonstrations in
    sorted order."""
    path = checkpoint("llama")
    control = {**args, "canonical_order": True}
    no_bit_depends_on_the_order(model, path, args=control)

    def scores(order, args):
        choice, _ = tasks(order)
        return evaluation.answers(model, path, [choice], 4, args=args)

    texts = [f"{TEXTS[i]}\nSentiment: {['very bad', 'bad'][i % 2]}\n\n" for i in range(4)]
    in_order = sorted(range(4), key=texts.__getitem__)
    expected = scores(in_order, args)
    assert scores([0, 1, 2, 3], control) == expected
    assert scores([0, 1, 2, 3], args) != expected
