"""`demonstrations=similar` in a run: the same prompts under every model, none of which has its own document."""

import re

import numpy as np
import pytest
from datasets import Dataset, DatasetDict
from lm_eval.tasks import TaskManager

from lm_eval_icl.demonstrations.chooser import read_queries
from lm_eval_icl.demonstrations.retrieve import Retriever
from lm_eval_icl.errors import InputError
from lm_eval_icl.harness.training import Examples
from lm_eval_icl.methods import ICL, Predictor
from tests import evaluation, tiny
from tests.studies import running

NAME = "retrieved"


def data(**_):
    """A pool with copies inside it and copies of documents: a row, and a text with another label."""
    train, test = evaluation.documents(24, 10), evaluation.documents(6, 0)
    train += [
        train[3],
        {**test[1]},
        {**test[2], "label": 1 - test[2]["label"], "text": test[2]["text"].upper() + " "},
    ]
    return DatasetDict(train=Dataset.from_list(train), test=Dataset.from_list(test))


TASK = {
    **evaluation.TASKS["one_token"],
    "task": NAME,
    "custom_dataset": data,
    "doc_to_choice": ["no", "yes"],
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LM_EVAL_ICL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "demonstrations"


@pytest.fixture
def made(monkeypatch):
    rankings, make = [], Retriever._ranked
    monkeypatch.setattr(Retriever, "_ranked", lambda *args: rankings.append(args) or make(*args))
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
    for name, shots, seed in (("icl", 3, 0), ("pcw", 3, 7), ("batchicl", 3, 7)):
        assert run(name, path, "similar", shots, seed) == (facts, prompts), name
    assert (
        len(made) == len(list(cache.iterdir())) == 1 and facts["file"] == next(cache.iterdir()).name
    )
    assert len(set(prompts)) == 6 and facts["how"] == "similar" and facts["documents"] == 6
    assert facts["pool"].pop("sha256")[:16] in facts["file"]
    assert facts["pool"] == {"rows": 27, "distinct": 26} and facts["own_copies"] == 2
    assert 3 <= facts["rows_used"] <= 18 and facts["similarity"] > 0
    assert (
        len(run("icl", path, "similar", 4)[1]) == 6 and len(made) == 1
    )  # what was ranked serves any number
    for prompt in prompts:
        assert len({" ".join(text.lower().split()) for text in texts_of(prompt)}) == 4


def test_a_seed_is_for_what_is_drawn(checkpoint):
    def rows(how, n=3, seed=0):
        task = evaluation.load_task(TASK, demonstrations=how)
        task.set_fewshot_seed(seed)
        return [task.sampler.retrieved(n, doc) for doc in task.eval_docs]

    last = rows("similar")
    assert (
        [found[::-1] for found in last]
        == rows("similar:order=first")
        == rows("similar:order=first", seed=1)
    )
    shuffled = rows("similar:order=random")
    assert shuffled == rows("similar:order=random") != rows("similar:order=random", seed=1)
    labels = data()["train"]["label"]
    assert all({labels[row] for row in found} == {0, 1} for found in rows("similar:per_label=1", 2))
    front = rows("similar:fixed=4", 6)
    assert len({tuple(found[:4]) for found in front}) == 1 and all(
        len(set(found)) == 6 for found in front
    )
    assert [labels[row] for row in front[0][:4]].count(1) == 2 and rows(
        "similar:fixed=4", 6, seed=1
    ) != front
    assert len({row for found in rows("similar:pool=9", 4) for row in found}) <= 9


def test_features_are_those_of_the_evaluated_model(checkpoint, made):
    path = checkpoint("gpt2")
    facts, prompts = run("icl", path, "similar:by=features")
    for name in ("hf", "pcw"):
        assert run(name, path, "similar:by=features") == (facts, prompts)
    assert len(made) == 1
    task, predictor = evaluation.load_task(TASK), Predictor(*tiny.load(path), ICL())
    unit = {}
    for split in ("train", "test"):
        examples = Examples(task, list(data()[split]))
        queries = [examples.example((), row) for row in range(len(examples))]
        vectors = read_queries(predictor, "", [(e.prompt, e.options) for e in queries])[1].astype(
            np.float64
        )
        unit[split] = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    order = np.argsort(-(unit["test"] @ unit["train"].T), axis=1, kind="stable")
    for i, prompt in enumerate(prompts):  # without the copies of row 3 and of the documents 1 and 2
        nearest = [row for row in order[i].tolist() if row not in (24, 24 + i * (i < 3))][:3]
        assert texts_of(prompt)[:3] == [data()["train"][row]["text"] for row in nearest[::-1]]
    assert (
        run("icl", checkpoint("llama"), "similar:by=features")[0]["file"] != facts["file"]
        and len(made) == 2
    )


@pytest.mark.parametrize(
    ("how", "shots", "changes", "says"),
    [
        (
            "similar:fixed=3",
            3,
            {},
            "task 'retrieved': demonstrations=similar:fixed=3: fixed=3: must be less",
        ),
        ("similar:per_label=2", 3, {}, "per_label=2: this needs --num_fewshot 4"),
        ("similar:by=no/model", 3, {}, "by=no/model needs sentence_transformers: pip install"),
    ],
)
def test_what_cannot_be_is_one_line(how, shots, changes, says, checkpoint):
    with pytest.raises(InputError, match=re.escape(says)):
        run(
            "icl",
            checkpoint("gpt2"),
            how,
            shots,
            task={**TASK, **changes, "task": NAME, "custom_dataset": data},
        )


def test_other_tasks_and_studies(checkpoint, tmp_path):
    path = checkpoint("gpt2")
    for name in ("generate", "inputs", "empty_query"):
        task = {**evaluation.TASKS[name], "custom_dataset": data}
        prompts = run("icl", path, "similar", task=task)[1]
        assert prompts == run("hf", path, "similar", task=task)[1] and len(set(prompts)) > 3
    study = running.conduct(
        tmp_path / "study", demonstrations=["similar"], methods="pcw", seeds=[0, 1]
    )
    (cell,) = study.cells()  # whatever the seed
    assert len({sample["prompt_hash"] for sample in study.samples(cell)}) == 6


def test_documents_among_their_own_demonstrations_are_counted(checkpoint, caplog):
    """lm-eval's sampler leaves out the document only where it knows that both come from one split."""
    of_test = {
        **TASK,
        "training_split": None,
        "fewshot_split": None,
        "fewshot_config": {"sampler": "default"},
    }
    for split in ("test", "train"):
        task = {**of_test, "fewshot_split": None if split == "test" else "train"}
        results = evaluation.run("icl", checkpoint("gpt2"), [task], 3)
        said = [texts_of(sample["arguments"][0][0]) for sample in results["samples"][NAME]]
        own = sum(query in shown for *shown, query in said)
        counted = results["config"]["icl"]["own_demonstrations"].get(NAME, {"documents": 0})
        assert counted == {"documents": own} and own > 0
    assert caplog.text.count("documents are among their own demonstrations, with the answer") == 2


@pytest.mark.slow
def test_trec_has_no_test_question_among_its_demonstrations(hub, monkeypatch):
    """Eleven of its 500 test questions stand in its training rows, where retrieval finds them first."""
    monkeypatch.chdir(hub)
    task = TaskManager(metadata={"demonstrations": "similar"}).load(["icl_trec"])["tasks"][
        "icl_trec"
    ]
    task.set_fewshot_seed(0)

    def said(doc):
        return " ".join(doc["text"].lower().split())

    train, own = {said(doc) for doc in task.training_docs()}, 0
    for doc in task.eval_docs:
        shown = [said(task.sampler.df[row]) for row in task.sampler.retrieved(8, doc)]
        assert said(doc) not in shown and len(set(shown)) == 8
        own += said(doc) in train
    assert own == 11 == task.sampler.facts["own_copies"]
