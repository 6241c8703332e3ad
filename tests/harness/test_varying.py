"""Demonstrations with other labels, and prompts in other formats, in runs of every model."""

import json
import re
from random import Random

import pytest

from lm_eval_icl.demonstrations.labels import read
from lm_eval_icl.errors import InputError
from lm_eval_icl.prompts.formats import Template, format_of
from lm_eval_icl.results.fields import column_fields, row_fields
from lm_eval_icl.results.records import StudyFacts
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
    for model in ("hf", "icl", "pcw"):
        for seed in (0, 1):
            labeled = {"labels": "flipped:0.5"}
            runs[model, seed] = evaluation.run(
                model, path, ["many_tokens"], 12, metadata=labeled, fewshot_random_seed=seed
            )
    labels = {key: shown(results) for key, results in runs.items()}
    assert labels["hf", 0] == labels["icl", 0] == labels["pcw", 0] != labels["icl", 1] == labels["hf", 1]
    changed = sum(labels["hf", 0][text] != label for text, label in own.items())
    for results in runs.values():
        assert results["configs"]["many_tokens"]["metadata"]["labels"] == "flipped:0.5"
    assert runs["pcw", 0]["configs"]["many_tokens"]["metadata"]["relabeled"] == {
        "demonstrations": 12,
        "changed": changed,
    }
    assert 2 <= changed <= 10 and labels["hf", 0].keys() == own.keys() and set(labels["hf", 0].values()) <= {*OPTIONS}
    # Labels are of who answered, and the template and the task are the same.
    rows = row_fields(json.loads(json.dumps(runs["icl", 0], default=str)), StudyFacts())
    assert rows["setting"]["labels"] == "flipped:0.5"


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
def test_the_rate_of_flipped_labels(share):
    labels = [read(f"flipped:{share}").label(2, 5, f"row {n}") for n in range(20_000)]
    assert abs(sum(label != 2 for label in labels) / 20_000 - share) < 0.01
    others = {label: labels.count(label) for label in set(labels) - {2}}
    assert all(abs(count / 20_000 - share / 4) < 0.01 for count in others.values())
    # What is flipped with a probability is so with a higher one.
    fewer = [read(f"flipped:{share / 2}").label(2, 5, f"row {n}") for n in range(1000)]
    assert all(one in (2, other) for one, other in zip(fewer, labels, strict=False))


def test_random_labels_are_drawn_from_all_options():
    labels = [read("random").label(2, 4, f"row {n}") for n in range(20_000)]
    assert all(abs(labels.count(label) / 20_000 - 1 / 4) < 0.01 for label in range(4))


def test_ten_formats_of_a_template():
    """Read by a person: plausible, all different, and the same whenever they are asked for."""
    made = [format_of(REVIEW, number) for number in range(11)]
    assert made[0] is None
    forms = [each.of(REVIEW) for each in made[1:]]
    for number, form in enumerate(forms, 1):
        text = form.text.replace("{{text.strip()}}", "warm and sharp")
        print(f"--- format {number}\n{text}{form.before_answer}good{form.between}{text}")
    assert len({REVIEW, *forms}) == 11
    assert forms[:3] == [
        Template("REVIEW - {{text.strip()}} -- SENTIMENT -", " ", "\n\n\n"),
        Template("Review: {{text.strip()}}\tSentiment:", " ", "\n\n"),
        Template("REVIEW:\n{{text.strip()}} SENTIMENT:", "\n", "\n\n"),
    ]
    for form in forms:
        names = re.sub(r"\{\{.*?\}\}", "", form.text)
        assert re.sub(r"[^a-z]", "", names.lower()) == "reviewsentiment" and "{{text.strip()}}" in form.text
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
    results = {model: evaluation.run(model, path, ["many_tokens"], 2, metadata=metadata) for model in ("hf", "icl")}
    plain = evaluation.run("icl", path, ["many_tokens"], 2)
    evaluation.assert_same(evaluation.responses(results["icl"]), evaluation.responses(results["hf"]), 1e-4)
    own = Template(evaluation.TASKS["many_tokens"]["doc_to_text"], " ", "\n\n")
    form = format_of(own, number).of(own)
    docs = evaluation.documents(2, 50)
    turns = [form.text.replace("{{text}}", doc["text"]) + form.before_answer + OPTIONS[doc["label"]] for doc in docs]
    query = form.text.replace("{{text}}", evaluation.documents(1, 0)[0]["text"])
    sample = results["icl"]["samples"]["many_tokens"][0]
    assert [continuation for _, continuation in sample["arguments"]] == [form.before_answer + o for o in OPTIONS]
    assert sample["arguments"][0][0] == form.between.join([*turns, query])
    # On a board it is the same column.
    columns = [
        column_fields(json.loads(json.dumps(of, default=str)), "many_tokens", "acc", "none", 6)
        for of in (plain, results["icl"])
    ]
    assert columns[0] == columns[1]


@pytest.mark.parametrize(
    ("name", "metadata", "says"),
    [
        ("many_tokens", {"labels": "flipped"}, "labels=flipped: must be random, or flipped:P"),
        ("many_tokens", {"labels": "flipped:1.5"}, "labels=flipped:1.5: must be random"),
        ("generate", {"labels": "random"}, "task 'generate': labels=random: labels are those of tasks with options"),
        ("inputs", {"labels": "random"}, "labels are those of tasks with options"),
        ("likelihood", {"format": 2}, "task 'likelihood': format=2: the template '{{text}}' has no `Field: value`"),
        ("many_tokens", {"format": -1}, "format=-1"),
        ("many_tokens", {"format": 10_000}, "other formats: give a smaller number"),
        ("many_tokens", {"format": 1, "demonstrations": "herding"}, "choose them first"),
    ],
)
def test_what_cannot_be_varied_is_refused(name, metadata, says):
    with pytest.raises(InputError, match=re.escape(says)):
        evaluation.load_task(evaluation.TASKS[name], **metadata)


def test_labels_do_not_depend_on_what_is_drawn_besides():
    """Nor is anything drawn from the task's own generator."""
    task = evaluation.load_task(evaluation.TASKS["one_token"], labels="flipped:0.5")
    task.set_fewshot_seed(3)
    docs = evaluation.documents(12, 50)
    labels = [task.fewshot_cfg.doc_to_target(doc) for doc in docs]
    assert task.fewshot_rnd.random() == Random(3).random()
    assert [task.fewshot_cfg.doc_to_target(doc) for doc in reversed(docs)] == labels[::-1]
    task.set_fewshot_seed(4)
    assert [task.fewshot_cfg.doc_to_target(doc) for doc in docs] != labels
