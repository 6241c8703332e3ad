"""Demonstrations with other labels, and prompts in other formats, in runs of every model."""

import itertools
import json
import re

import pytest

from lm_eval_icl.demonstrations.wrong_labels import read
from lm_eval_icl.errors import InputError
from lm_eval_icl.prompts.formats import Template, format_of
from lm_eval_icl.results.fields import fields_of
from tests import evaluation

OPTIONS = ["very negative indeed", "very negative", "positive"]
REVIEW = Template("Review: {{text.strip()}}\nSentiment:", " ", "\n\n")


def shown(results, name="many_tokens"):
    """By a prompt's demonstration, its label; from the prompts of all documents."""
    prompts = [sample["arguments"][0][0] for sample in results["samples"][name]]
    found = {}
    for prompt in prompts:
        for turn in prompt.split("\n\nReview: ")[:-1]:
            text, _, label = turn.rpartition("\nSentiment: ")
            assert found.setdefault(text.removeprefix("Review: "), label) == label
    return found


def test_the_same_labels_under_every_model(checkpoint):
    """At the rate that was asked for, recorded, and nothing else of a prompt changes."""
    path, runs = checkpoint("gpt2"), {}
    own = shown(evaluation.run("icl", path, ["many_tokens"], 12))
    assert own == {doc["text"]: OPTIONS[doc["label"]] for doc in evaluation.documents(12, 50)}
    for key in itertools.product(("hf", "icl", "pcw"), (0, 1)):
        seed = {"fewshot_random_seed": key[1]}
        runs[key] = evaluation.run(
            key[0], path, ["many_tokens"], 12, metadata={"labels": "flipped:0.5"}, **seed
        )
    labels = {key: shown(results) for key, results in runs.items()}
    assert (
        labels["hf", 0]
        == labels["icl", 0]
        == labels["pcw", 0]
        != labels["icl", 1]
        == labels["hf", 1]
    )
    changed = sum(labels["hf", 0][text] != label for text, label in own.items())
    said = runs["pcw", 0]["configs"]["many_tokens"]["metadata"]
    assert said["labels"] == "flipped:0.5" and said["relabeled"] == {
        "demonstrations": 12,
        "changed": changed,
    }
    assert (
        2 <= changed <= 10
        and labels["hf", 0].keys() == own.keys()
        and set(labels["hf", 0].values()) <= {*OPTIONS}
    )
    recorded = json.loads(json.dumps(runs["icl", 0], default=str))
    assert fields_of(recorded, "many_tokens").setting["labels"] == "flipped:0.5"


@pytest.mark.parametrize(
    ("how", "share"), [("flipped:0.25", 0.25), ("flipped:1", 1), ("random", 0.8)]
)
def test_the_rate_of_other_labels(how, share):
    """What is flipped with a probability is so with a higher one."""
    labels = [read(how).label(2, 5, f"row {n}") for n in range(20_000)]
    assert all(abs(labels.count(label) / 20_000 - share / 4) < 0.01 for label in (0, 1, 3, 4))
    assert abs(labels.count(2) / 20_000 - (1 - share)) < 0.01
    fewer = [read("flipped:0.2").label(2, 5, f"row {n}") for n in range(1000)]
    assert how == "random" or all(a in (2, b) for a, b in zip(fewer, labels, strict=False))


def test_ten_formats_of_a_template():
    """Read by a person: plausible, all different, and the same whenever they are asked for."""
    made = [format_of(REVIEW, number) for number in range(11)]
    assert made[0] is None
    forms = [each.of(REVIEW) for each in made[1:]]
    assert len({REVIEW, *forms}) == 11
    assert forms[:3] == [
        Template("REVIEW - {{text.strip()}} -- SENTIMENT -", " ", "\n\n\n"),
        Template("Review: {{text.strip()}}\tSentiment:", " ", "\n\n"),
        Template("REVIEW:\n{{text.strip()}} SENTIMENT:", "\n", "\n\n"),
    ]
    for form in forms:
        names = re.sub(r"\{\{.*?\}\}", "", form.text)
        assert (
            re.sub(r"[^a-z]", "", names.lower()) == "reviewsentiment"
            and "{{text.strip()}}" in form.text
        )
        assert form.between.strip(" ") != "\n" or "\n" not in form.text + form.before_answer


def test_options_keep_their_letters():
    template = Template("{{question}}\nA. {{choices[0]}}\nB. {{choices[1]}}\nAnswer:", " ", "\n\n")
    forms = [format_of(template, number).of(template).text for number in range(1, 30)]
    letters = {re.search(r"\n(.*?) \{\{choices\[1\]", form)[1] for form in forms}
    assert letters == {"B.", "B)", "(B)", "B:", "[B]"}


@pytest.mark.parametrize("number", [1, 3])
def test_a_run_in_a_format(checkpoint, number):
    """What the model is asked is in the format; the task, the texts and the options are its own."""
    path, metadata = checkpoint("gpt2"), {"format": number}
    results = {
        model: evaluation.run(model, path, ["many_tokens"], 2, metadata=metadata)
        for model in ("hf", "icl")
    }
    plain = evaluation.run("icl", path, ["many_tokens"], 2)
    evaluation.assert_same(
        evaluation.responses(results["icl"]), evaluation.responses(results["hf"]), 1e-4
    )
    own = Template(evaluation.TASKS["many_tokens"]["doc_to_text"], " ", "\n\n")
    form = format_of(own, number).of(own)
    docs = evaluation.documents(2, 50)
    turns = [
        form.text.replace("{{text}}", doc["text"]) + form.before_answer + OPTIONS[doc["label"]]
        for doc in docs
    ]
    query = form.text.replace("{{text}}", evaluation.documents(1, 0)[0]["text"])
    sample = results["icl"]["samples"]["many_tokens"][0]
    assert [continuation for _, continuation in sample["arguments"]] == [
        form.before_answer + o for o in OPTIONS
    ]
    assert sample["arguments"][0][0] == form.between.join([*turns, query])
    # On a board it is the same column.
    both = [json.loads(json.dumps(of, default=str)) for of in (plain, results["icl"])]
    first, second = (fields_of(of, "many_tokens") for of in both)
    assert first.column == second.column and first.format != second.format


@pytest.mark.parametrize(
    ("name", "metadata", "says"),
    [
        ("many_tokens", {"labels": "flipped"}, "labels=flipped: must be random, or flipped:P"),
        (
            "generate",
            {"labels": "random"},
            "task 'generate': labels=random: labels are changed only in tasks with",
        ),
        (
            "likelihood",
            {"format": 2},
            "task 'likelihood': format=2: the template '{{text}}' has no line `Field: val",
        ),
        ("many_tokens", {"format": -1}, "format=-1"),
        ("many_tokens", {"format": 1, "demonstrations": "herding"}, "choose them first"),
    ],
)
def test_what_cannot_be_varied_is_refused(name, metadata, says):
    with pytest.raises(InputError, match=re.escape(says)):
        evaluation.load_task(evaluation.TASKS[name], **metadata)
