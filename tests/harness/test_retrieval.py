"""`demonstrations=similar` in a run: the same prompts under every model, none of which has its own
document."""

import re

import numpy as np
import pytest
from datasets import Dataset, DatasetDict
from lm_eval.models.dummy import DummyLM
from lm_eval.tasks import TaskManager

from lm_eval_icl.demonstrations.chooser import read_queries
from lm_eval_icl.demonstrations.retrieve import Retriever
from lm_eval_icl.errors import InputError
from lm_eval_icl.harness.plugin import task_dir
from lm_eval_icl.harness.training import Examples
from lm_eval_icl.methods import ICL, Predictor
from tests import evaluation, tiny
from tests.studies import running

NAME = "retrieved"


def data(**_):
    """A pool with copies inside it and copies of documents: a row, and a text with another
    label."""
    train = evaluation.documents(24, 10)
    test = evaluation.documents(6, 0)
    other_label = {**test[2], "label": 1 - test[2]["label"], "text": test[2]["text"].upper() + " "}
    train += [train[3], test[1], other_label]
    return DatasetDict(train=Dataset.from_list(train), test=Dataset.from_list(test))


TASK = evaluation.choice(NAME, "no", "yes", custom_dataset=data)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LM_EVAL_ICL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "demonstrations"


@pytest.fixture
def made(monkeypatch):
    """The rankings that were made, not read from a file."""
    rankings = []
    make = Retriever._ranked

    def counting(*args):
        rankings.append(args)
        return make(*args)

    monkeypatch.setattr(Retriever, "_ranked", counting)
    return rankings


def run(name, path, how, shots=3, seed=0, task=TASK):
    """What is said of the retrieval, and the prompts."""
    metadata = {"demonstrations": how}
    results = evaluation.run(name, path, [task], shots, metadata=metadata, fewshot_random_seed=seed)
    prompts = [sample["arguments"][0][0] for sample in results["samples"][task["task"]]]
    return results["configs"][task["task"]]["metadata"]["retrieved"], prompts


def texts_of(prompt):
    return re.findall(r"Review: (.*?)\nSentiment:", prompt, re.DOTALL)


def test_the_same_prompts_under_every_model_and_seed(checkpoint, cache, made):
    path = checkpoint("gpt2")
    facts, prompts = run("hf", path, "similar")
    for name, seed in (("icl", 0), ("pcw", 7), ("batchicl", 7)):
        assert run(name, path, "similar", 3, seed) == (facts, prompts), name
    [file] = cache.iterdir()
    assert facts["file"] == file.name
    assert facts["pool"].pop("sha256")[:16] in file.name
    assert facts["pool"] == {"rows": 27, "distinct": 26}
    assert facts["how"] == "similar"
    assert facts["documents"] == 6
    assert facts["own_copies"] == 2
    assert 3 <= facts["rows_used"] <= 18
    assert facts["similarity"] > 0
    _, of_four = run("icl", path, "similar", 4)
    assert len(of_four) == 6
    assert len(made) == 1  # what was ranked serves any number
    assert len(set(prompts)) == 6
    for prompt in prompts:
        assert len({" ".join(text.lower().split()) for text in texts_of(prompt)}) == 4


def rows_of(how, n=3, seed=0, **changes):
    """The rows that are shown before each document."""
    task = evaluation.load_task({**TASK, **changes}, demonstrations=how)
    task.set_fewshot_seed(seed)
    return [task.sampler.retrieved(n, doc) for doc in task.eval_docs]


def test_copies_are_left_out_though_demonstrations_have_a_template_of_their_own():
    """Row 26 has the text of document 2, and another label."""
    shots = {"doc_to_text": "Example: {{text}}\nSentiment:"}
    assert 26 not in rows_of("similar", n=20, fewshot_config=shots)[2]
    assert any(26 in rows for rows in rows_of("similar", n=20, fewshot_config=shots))


def test_a_seed_is_for_what_is_drawn():
    first = rows_of("similar:order=first")
    assert [rows[::-1] for rows in rows_of("similar")] == first
    assert rows_of("similar:order=first", seed=1) == first
    shuffled = rows_of("similar:order=random")
    assert rows_of("similar:order=random") == shuffled
    assert rows_of("similar:order=random", seed=1) != shuffled


def test_rows_are_taken_by_label_after_fixed_ones_and_from_a_smaller_pool():
    labels = data()["train"]["label"]
    for rows in rows_of("similar:per_label=1", 2):
        assert {labels[row] for row in rows} == {0, 1}
    with_fixed = rows_of("similar:fixed=4", 6)
    fixed = with_fixed[0][:4]
    assert sum(labels[row] for row in fixed) == 2
    for rows in with_fixed:
        assert rows[:4] == fixed
        assert len(set(rows)) == 6
    assert rows_of("similar:fixed=4", 6, seed=1) != with_fixed
    assert len(set().union(*rows_of("similar:pool=9", 4))) <= 9


def unit_features(predictor, rows):
    """The state of each row's query, as a vector of length 1."""
    examples = Examples(evaluation.load_task(TASK), list(rows))
    queries = []
    for row in range(len(examples)):
        example = examples.example((), row)
        queries.append((example.prompt, example.options))
    _, vectors, *_ = read_queries(predictor, "", queries)
    vectors = vectors.astype(np.float64)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def test_features_are_those_of_the_evaluated_model(checkpoint, made):
    path = checkpoint("gpt2")
    how = "similar:by=features"
    facts, prompts = run("icl", path, how)
    for name in ("hf", "pcw"):
        assert run(name, path, how) == (facts, prompts)
    assert len(made) == 1
    model, tokenizer = tiny.load(path)
    predictor = Predictor(model, tokenizer, ICL())
    pool = data()["train"]
    similarities = unit_features(predictor, data()["test"]) @ unit_features(predictor, pool).T
    order = np.argsort(-similarities, axis=1, kind="stable").tolist()
    # Without the copies of row 3, and of the documents 1 and 2.
    copies = [{24}, {24, 25}, {24, 26}, {24}, {24}, {24}]
    for prompt, ranked, left_out in zip(prompts, order, copies, strict=True):
        nearest = [row for row in ranked if row not in left_out][:3]
        assert texts_of(prompt)[:3] == [pool[row]["text"] for row in nearest[::-1]]
    of_other_model, _ = run("icl", checkpoint("llama"), how)
    assert of_other_model["file"] != facts["file"]
    assert len(made) == 2


def test_features_with_another_tokenizer_are_read_anew(checkpoint, made, tmp_path):
    path = checkpoint("gpt2")
    tiny.llama3().save_pretrained(tmp_path / "other")
    metadata = {"demonstrations": "similar:by=features"}
    other = {"tokenizer": str(tmp_path / "other")}
    for name, args, number in (("hf", {}, 1), ("hf", other, 2), ("icl", other, 2)):
        evaluation.run(name, path, [TASK], 3, metadata=metadata, args=args)
        assert len(made) == number


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("fixed=3", "task 'retrieved': demonstrations=similar:fixed=3: fixed=3: must be less"),
        ("per_label=2", "per_label=2: this needs --num_fewshot 4"),
        ("pool=99", "pool=99: the few-shot split has 27 rows."),
        ("by=no/model", "by=no/model needs sentence_transformers: pip install"),
    ],
)
def test_what_cannot_be_is_one_line(how, says, checkpoint):
    with pytest.raises(InputError, match=re.escape(says)):
        run("icl", checkpoint("gpt2"), f"similar:{how}", 3)


def test_a_model_without_hidden_states():
    says = "by=features needs a model of transformers, and DummyLM is none"
    with pytest.raises(InputError, match=says):
        run(DummyLM(), "", "similar:by=features")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"doc_to_target": "{{other}}"}, "per_label: the answer of row 0 is none of its options"),
        ({"output_type": "loglikelihood"}, "per_label needs a task with options"),
    ],
)
def test_rows_without_labels_are_not_taken_by_label(changes, says, checkpoint):
    with pytest.raises(InputError, match=says):
        run("hf", checkpoint("gpt2"), "similar:per_label=1", task=TASK | changes)


@pytest.mark.parametrize("name", ["generate", "inputs", "empty_query"])
def test_other_tasks(name, checkpoint):
    path = checkpoint("gpt2")
    task = {**evaluation.TASKS[name], "custom_dataset": data}
    _, prompts = run("icl", path, "similar", task=task)
    _, of_hf = run("hf", path, "similar", task=task)
    assert prompts == of_hf
    assert len(set(prompts)) > 3


def test_a_study_has_one_cell_whatever_the_seed(tmp_path):
    study = running.conduct(
        tmp_path / "study", demonstrations=["similar"], methods="pcw", seeds=[0, 1]
    )
    (cell,) = study.cells()
    assert len({sample["prompt_hash"] for sample in study.samples(cell)}) == 6


@pytest.mark.parametrize("split", [None, "train"], ids=["test", "train"])
def test_documents_among_their_own_demonstrations_are_counted(checkpoint, caplog, split):
    """lm-eval's sampler leaves out the document only where it knows that both come from one
    split."""
    task = {**TASK, "training_split": None, "fewshot_split": split}
    task["fewshot_config"] = {"sampler": "default"}
    results = evaluation.run("icl", checkpoint("gpt2"), [task], 3)
    own = 0
    for sample in results["samples"][NAME]:
        prompt, _ = sample["arguments"][0]
        *demonstrations, query = texts_of(prompt)
        own += query in demonstrations
    assert own > 0
    assert results["config"]["icl"]["own_demonstrations"] == {NAME: {"documents": own}}
    assert caplog.text.count("documents are among their own demonstrations, with the answer") == 1


@pytest.mark.slow
def test_trec_has_no_test_question_among_its_demonstrations(hub, monkeypatch):
    """Eleven of its 500 test questions stand in its training rows, where retrieval finds them
    first."""
    monkeypatch.chdir(hub)
    metadata = {"demonstrations": "similar"}
    folder = str(task_dir())
    manager = TaskManager(include_defaults=False, include_path=folder, metadata=metadata)
    task = manager.load(["icl_trec"])["tasks"]["icl_trec"]
    task.set_fewshot_seed(0)

    def said(doc):
        return " ".join(doc["text"].lower().split())

    train = {said(doc) for doc in task.training_docs()}
    own = 0
    for doc in task.eval_docs:
        shown = [said(task.sampler.df[row]) for row in task.sampler.retrieved(8, doc)]
        assert said(doc) not in shown
        assert len(set(shown)) == 8
        own += said(doc) in train
    assert own == 11 == task.sampler.facts["own_copies"]
