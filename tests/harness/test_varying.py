"""Demonstrations with other labels, and prompts in other formats, in runs of every model."""

import json
import re
from collections import Counter

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
    labels = {}
    for sample in results["samples"][name]:
        prompt, _ = sample["arguments"][0]
        for turn in prompt.split("\n\nReview: ")[:-1]:
            text, _, label = turn.rpartition("\nSentiment: ")
            text = text.removeprefix("Review: ")
            assert labels.setdefault(text, label) == label
    return labels


def test_the_same_labels_under_every_model(checkpoint):
    """At the rate that was asked for, recorded, and nothing else of a prompt changes."""
    path = checkpoint("gpt2")
    names = ["many_tokens"]
    flipped = {"labels": "flipped:0.5"}

    def run(model, seed):
        return evaluation.run(model, path, names, 12, metadata=flipped, fewshot_random_seed=seed)

    own = shown(evaluation.run("icl", path, names, 12))
    assert own == {doc["text"]: OPTIONS[doc["label"]] for doc in evaluation.documents(12, 50)}
    results = run("pcw", 0)
    labels = shown(results)
    with_other_seed = run("icl", 1)
    assert labels == shown(run("hf", 0)) == shown(run("icl", 0))
    assert labels != shown(with_other_seed) == shown(run("hf", 1)) == shown(run("pcw", 1))
    assert labels.keys() == own.keys()
    assert set(labels.values()) <= {*OPTIONS}
    changed = sum(labels[text] != label for text, label in own.items())
    assert 2 <= changed <= 10
    said = results["configs"]["many_tokens"]["metadata"]
    assert said["labels"] == "flipped:0.5"
    assert said["relabeled"] == {"demonstrations": 12, "changed": changed}
    recorded = json.loads(json.dumps(results, default=str))
    assert fields_of(recorded, "many_tokens").setting["labels"] == "flipped:0.5"


def relabeled(how, n):
    """The labels of so many rows, each of label 2 of five."""
    drawn = read(how)
    return [drawn.label(2, 5, f"row {number}") for number in range(n)]


@pytest.mark.parametrize(
    ("how", "share"), [("flipped:0.25", 0.25), ("flipped:1", 1), ("random", 0.8)]
)
def test_the_rate_of_other_labels(how, share):
    counts = Counter(relabeled(how, 20_000))
    assert counts[2] / 20_000 == pytest.approx(1 - share, abs=0.01)
    for label in (0, 1, 3, 4):
        assert counts[label] / 20_000 == pytest.approx(share / 4, abs=0.01)


@pytest.mark.parametrize("how", ["flipped:0.25", "flipped:1"])
def test_what_is_flipped_with_a_probability_is_so_with_a_higher_one(how):
    fewer = relabeled("flipped:0.2", 1000)
    for label, with_more in zip(fewer, relabeled(how, 1000), strict=True):
        assert label in (2, with_more)


def test_ten_formats_of_a_template():
    """Read by a person: plausible, all different, and the same whenever they are asked for."""
    assert format_of(REVIEW, 0) is None
    forms = [format_of(REVIEW, number).of(REVIEW) for number in range(1, 11)]
    assert len({REVIEW, *forms}) == 11
    assert forms[:3] == [
        Template("REVIEW - {{text.strip()}} -- SENTIMENT -", " ", "\n\n\n"),
        Template("Review: {{text.strip()}}\tSentiment:", " ", "\n\n"),
        Template("REVIEW:\n{{text.strip()}} SENTIMENT:", "\n", "\n\n"),
    ]
    for form in forms:
        assert "{{text.strip()}}" in form.text
        names = re.sub(r"\{\{.*?\}\}", "", form.text).lower()
        assert re.sub(r"[^a-z]", "", names) == "reviewsentiment"
        assert form.between.strip(" ") != "\n" or "\n" not in form.text + form.before_answer


def test_options_keep_their_letters():
    template = Template("{{question}}\nA. {{choices[0]}}\nB. {{choices[1]}}\nAnswer:", " ", "\n\n")
    forms = [format_of(template, number).of(template).text for number in range(1, 30)]
    letters = {re.search(r"\n(.*?) \{\{choices\[1\]", form)[1] for form in forms}
    assert letters == {"B.", "B)", "(B)", "B:", "[B]"}


@pytest.mark.parametrize("number", [1, 3])
def test_a_run_in_a_format(checkpoint, number):
    """What the model is asked is in the format; the task, the texts and the options are its own."""
    path = checkpoint("gpt2")
    name = "many_tokens"
    in_format, of_hf = (
        evaluation.run(model, path, [name], 2, metadata={"format": number})
        for model in ("icl", "hf")
    )
    plain = evaluation.run("icl", path, [name], 2)
    evaluation.assert_same(evaluation.responses(in_format), evaluation.responses(of_hf), 1e-4)
    own = Template(evaluation.TASKS[name]["doc_to_text"], " ", "\n\n")
    form = format_of(own, number).of(own)

    def query(doc):
        return form.text.replace("{{text}}", doc["text"])

    turns = []
    for doc in evaluation.documents(2, 50):
        turns.append(query(doc) + form.before_answer + OPTIONS[doc["label"]])
    turns.append(query(evaluation.documents(1, 0)[0]))
    expected = form.between.join(turns)
    arguments = in_format["samples"][name][0]["arguments"]
    assert arguments == [(expected, form.before_answer + option) for option in OPTIONS]
    # On a board it is the same column.
    first = fields_of(json.loads(json.dumps(plain, default=str)), name)
    second = fields_of(json.loads(json.dumps(in_format, default=str)), name)
    assert first.column == second.column
    assert first.format != second.format


OF_LABELS = "labels are changed only in tasks with"
OF_FORMATS = "the template '{{text}}' has no line `Field: val"


@pytest.mark.parametrize(
    ("name", "metadata", "says"),
    [
        ("many_tokens", {"labels": "flipped"}, "labels=flipped: must be random, or flipped:P"),
        ("generate", {"labels": "random"}, f"task 'generate': labels=random: {OF_LABELS}"),
        ("likelihood", {"format": 2}, f"task 'likelihood': format=2: {OF_FORMATS}"),
        ("many_tokens", {"format": -1}, "format=-1"),
        ("many_tokens", {"format": 1, "demonstrations": "herding"}, "choose them first"),
        ("many_tokens", {"format": 9999}, "other formats: give a smaller number."),
    ],
)
def test_what_cannot_be_varied_is_refused(name, metadata, says):
    with pytest.raises(InputError, match=re.escape(says)):
        evaluation.load_task(evaluation.TASKS[name], **metadata)


def test_format_0_is_the_task_s_own():
    own = evaluation.load_task(evaluation.TASKS["many_tokens"])
    task = evaluation.load_task(evaluation.TASKS["many_tokens"], format=0)
    document = evaluation.documents(1, 0)[0]
    assert task.fewshot_context(document, 2) == own.fewshot_context(document, 2)
    assert task.config.metadata["format"] == 0
    assert "unformatted" not in task.config.metadata


def relabeled_prompt(**changes):
    """A prompt of two demonstrations, all of whose labels are changed."""
    options = evaluation.choice("t", "no", "yes", **changes)
    task = evaluation.load_task(options, labels="flipped:1")
    return task.fewshot_context(evaluation.documents(1, 0)[0], 2)


def test_labels_that_are_texts_are_changed_too():
    as_texts = relabeled_prompt(doc_to_target="{{['no', 'yes'][label]}}")
    assert as_texts == relabeled_prompt()
    with pytest.raises(InputError, match="labels: 'odd' is not one of its options"):
        relabeled_prompt(doc_to_target="odd")


def test_a_query_that_a_function_makes_has_no_formats():
    by_function = evaluation.choice("t", "no", "yes", doc_to_text=lambda doc: doc["text"])
    with pytest.raises(InputError, match="its prompts are made by a function"):
        evaluation.load_task(by_function, format=1)


def test_a_template_that_ends_in_a_question_keeps_its_end():
    template = Template("Review: {{text}}\nIs it good?", " ", "\n\n")
    forms = [format_of(template, number).of(template) for number in range(1, 6)]
    assert all(form.text.endswith("Is it good?") for form in forms)
    assert {form.before_answer for form in forms} == {" "}
