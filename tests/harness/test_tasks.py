"""Demonstrations that are fixed by the seed, and BBH as cloze."""

import runpy
from collections import Counter
from pathlib import Path
from random import Random

import pytest
import yaml
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value
from hypothesis import given
from hypothesis import strategies as st
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from lm_eval_icl.demonstrations.draw import draw, stratified
from lm_eval_icl.errors import InputError
from lm_eval_icl.files import as_json
from lm_eval_icl.harness.documents import texts_in, with_texts
from lm_eval_icl.harness.plugin import task_dir
from lm_eval_icl.harness.tasks import bbh_cloze, bbh_docs
from tests import evaluation

POOL = [{"text": f"t{i}", "label": i % 3} for i in range(30)]


def label(doc):
    return doc["label"]


def sampled(how, n, seed=1):
    return [
        POOL[row]
        for row in draw(POOL, n, how, label, lambda doc: False, Random(seed), "task", seed)[0]
    ]


@given(n=st.integers(0, 30), seed=st.integers(0, 1000))
def test_stratified_counts_differ_by_one_at_most(n, seed):
    drawn = stratified(POOL, n, label, Random(seed))
    assert len({doc["text"] for doc in drawn}) == n
    counts = Counter(doc["label"] for doc in drawn)
    assert max(counts.values(), default=0) - min((counts[i] for i in range(3)), default=0) <= 1


@pytest.mark.parametrize("how", ["stratified", "random"])
def test_a_seed_has_one_draw(how):
    """With its order: a stratified draw does not come label by label."""
    assert sampled(how, 8) == sampled(how, 8)
    assert any(sampled(how, 8, seed) != sampled(how, 8) for seed in range(2, 6))
    assert len({tuple(doc["label"] for doc in sampled(how, 6, seed)) for seed in range(20)}) > 5


def test_first_and_more_than_there_are():
    assert sampled("first", 4) == POOL[:4]
    with pytest.raises(
        InputError, match="31 demonstrations are asked for, and the pool has 30 rows: lower"
    ):
        sampled("random", 31)


def test_indices_from_a_file(tmp_path):
    path = tmp_path / "chosen.json"
    path.write_text("[4, 2, 9]")
    assert sampled(str(path), 2) == [POOL[4], POOL[2]]
    path.write_text('{"0": [1, 3], "7": [4, 2, 9]}')
    assert sampled(str(path), 2, 7) == [POOL[4], POOL[2]]
    with pytest.raises(InputError, match="or one for each seed, such as 3"):
        sampled(str(path), 2, 3)


@pytest.mark.parametrize(
    ("content", "n", "says"),
    [
        ("[1, 30]", 1, "whole numbers from 0 to 29"),
        ("[1]", 2, "2 demonstrations are asked for, and the file has 1"),
    ],
)
def test_files_that_cannot_be_used(tmp_path, content, n, says):
    path = tmp_path / "chosen.json"
    path.write_text(content)
    with pytest.raises(InputError, match=says):
        sampled(str(path), n)


@pytest.mark.parametrize("name", ["icl_demo_short", "own"])
def test_documents_in_the_order_of_a_seed(name):
    """All of them, the same for every seed of the demonstrations, in our tasks and in lm-eval's own."""

    def load(**metadata):
        if name == "own":
            return evaluation.load_task(
                evaluation.task(name, **evaluation.CHOICE, doc_to_choice=["a", "b"]), **metadata
            )
        manager = TaskManager(
            include_path=task_dir() / "demo", include_defaults=False, metadata=metadata
        )
        return manager.load([name])["tasks"][name]

    plain, first, again, other = (
        load(**metadata) for metadata in ({}, {"shuffle": 0}, {"shuffle": 0}, {"shuffle": 1})
    )
    rows, *shuffled = (
        [as_json(doc) for doc in task.eval_docs] for task in (plain, first, again, other)
    )
    assert sorted(rows) == sorted(shuffled[0]) == sorted(shuffled[2])
    assert shuffled[0] == shuffled[1] == Random(0).sample(rows, len(rows)) != shuffled[2] != rows
    assert list(plain.fewshot_docs()) == list(first.fewshot_docs())
    with pytest.raises(InputError, match=r"shuffle=-1: must be a whole number, 0 or more\."):
        load(shuffle=-1)


def test_texts_in_a_document():
    """However deep. The letters that options are listed by stay."""
    doc = {
        "q": "one",
        "n": 3,
        "c": {"text": ["two", "", ("three",)], "label": ["A", "B"]},
        "none": None,
        "empty": [],
    }
    assert texts_in(doc) == ["one", "two", "", "three"]
    free = {
        "q": "X",
        "n": 3,
        "c": {"text": ["X", "X", ["X"]], "label": ["A", "B"]},
        "none": None,
        "empty": [],
    }
    assert with_texts(doc, lambda _: "X") == free


def test_bbh_cloze():
    rows = [
        {"input": "Which?\nOptions:\n(A) x y\n(B) z", "target": "(B)"},
        {"input": "Is it?\nOptions:\n- valid \n- invalid", "target": "valid"},
        {"input": "not True is", "target": "False"},
    ]
    assert bbh_cloze(rows, ["False", "True"]) == [
        {"question": "Which?", "choices": ["x y", "z"], "answer": 1},
        {"question": "Is it?", "choices": ["valid", "invalid"], "answer": 0},
        {"question": "not True is", "choices": ["False", "True"], "answer": 0},
    ]
    # Documents with another number of options than most are left out.
    rows = [{"input": f"{i}\nOptions:\n(A) x\n(B) y", "target": "(A)"} for i in range(3)]
    rows.append({"input": "odd\nOptions:\n(A) x\n(B) y\n(C) z", "target": "(C)"})
    assert len(bbh_docs(Dataset.from_list(rows))) == 3


class Loader(yaml.BaseLoader):
    """Reads `!function x` as the string x."""


Loader.add_constructor("!function", lambda loader, node: loader.construct_scalar(node))


def names(pattern):
    for path in sorted(task_dir().glob(pattern)):
        yield path, yaml.load(path.read_text(), Loader=Loader)


def test_every_task_and_group_that_is_promised():
    """Each task of BBH has three demonstrations, with their answers among the options."""
    bbh = []
    for path, config in names("bbh/icl_bbh_*.yaml"):
        bbh += [path.stem] if "task" in config else []
        samples = config["fewshot_config"]["samples"]
        assert [0 <= int(sample["answer"]) < len(sample["choices"]) for sample in samples] == [
            True
        ] * 3, path
    mmlu = [path.stem for path, config in names("mmlu/icl_mmlu_*.yaml") if "dataset_name" in config]
    assert (len(bbh), len(mmlu)) == (22, 57)
    groups = {
        config["group"]: config["task"] for _, config in names("*/*.yaml") if "group" in config
    }
    assert len(groups["icl_mmlu"]) == 4
    members = [name for group in groups["icl_mmlu"] for name in groups[group]]
    assert sorted(members) == sorted(mmlu)
    assert sorted(groups["icl_bbh"]) == sorted(bbh)
    assert groups["icl_classification"] == [
        "icl_sst2",
        "icl_sst5",
        "icl_mr",
        "icl_trec",
        "icl_agnews",
    ]


def test_generated_files_are_up_to_date(tmp_path):
    made = runpy.run_path(str(Path(__file__).resolve().parents[2] / "scripts/make_task_configs.py"))
    made["main"].__globals__["OUT"] = tmp_path
    made["main"]()
    written = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*.yaml"))
    assert len(written) == 2 * (57 + 5) + 22 + 1 + 2 * 3 + 132
    for path in written:
        assert (task_dir() / path).read_text() == (tmp_path / path).read_text(), path


@pytest.mark.parametrize(
    ("name", "row", "query", "answer"),
    [
        ("rte", {"sentence1": "Rain fell. ", "sentence2": "It was dry.", "label": 1},
         "Premise:Rain fell.\nHypothesis:It was dry.\nAnswer:", "↓"),
        ("mrpc", {"sentence1": "It rained .", "sentence2": "Rain fell .", "label": 1},
         "Sentence 1:It rained .\nSentence 2:Rain fell .\nAnswer:", "→"),
        ("qnli", {"question": "When was it?", "sentence": "It was in 1948.", "label": 0},
         "Question:When was it?\nParagraph:It was in 1948.\nAnswer:", "↑"),
    ],
)  # fmt: skip
def test_pairs_of_sentences_as_batch_icl_writes_them(name, row, query, answer):
    """As in the rows and `format_example` of github.com/Cardinalere/Batch-ICL, where ↑ is entailment, → equivalence."""
    rows = [{**row, "label": label, "idx": i} for i, label in enumerate([row["label"], 0, 1, 0, 1])]
    for end, before in (("", ""), ("_instruction", "arrow")):
        config = load_yaml(task_dir() / f"classification/icl_{name}{end}.yaml")
        assert (config.pop("dataset_path"), config.pop("dataset_name")) == ("nyu-mll/glue", name)
        document = {
            name: f"{value} Or not." if isinstance(value, str) else value
            for name, value in rows[0].items()
        }
        data = {"validation": Dataset.from_list([document]), "train": Dataset.from_list(rows[1:])}
        task = evaluation.load_task(
            {**config, "custom_dataset": lambda data=data, **_: DatasetDict(data)}
        )
        assert task.doc_to_text(rows[0]) == query
        assert task.doc_to_choice(rows[0])[task.doc_to_target(rows[0])] == answer
        prompt = task.fewshot_context(document, 4)
        task.build_all_requests(limit=1)
        assert {request.args[1] for request in task.instances} == set(task.doc_to_choice(rows[0]))
        assert prompt.endswith(f"\n\n{task.doc_to_text(document)}") and prompt.count(
            "\n\n"
        ) == 4 + bool(before)
        assert f"{query}{answer}\n\n" in prompt  # a demonstration


INTENTS = {
    "icl_banking77": ("label", 77),
    "icl_clinc150": ("intent", 150),
    "icl_trec_fine": ("fine_label", 50),
}


def many_labels(name, column, count):
    """The task on made rows of the data set's columns."""
    path = task_dir() / "classification" / f"{name}.yaml"
    config = load_yaml(path, resolve_func=True)
    of_classes = [*(config.get("words") or ()), *(f"class_{i}" for i in range(count))][:count]
    of_classes += config.get("without", [])
    features = Features({"text": Value("string"), column: ClassLabel(names=of_classes)})
    numbers = range(3 * len(of_classes))
    data = {
        split: Dataset.from_list(
            [{"text": f"  {split} {i} ", column: i % len(of_classes)} for i in numbers], features
        )
        for split in ("train", "test")
    }
    return evaluation.load_task(
        {**config, "custom_dataset": lambda **_: DatasetDict(data)}
    ), of_classes


@pytest.mark.parametrize("name", INTENTS)
def test_tasks_with_many_labels(name):
    """The options are the names of the classes in words, and a class that is no option has no documents."""
    column, count = INTENTS[name]
    task, of_classes = many_labels(name, column, count)
    options = task.doc_to_choice(task.eval_docs[0])
    assert len(options) == len(set(options)) == count == task.config.num_fewshot
    assert not any("_" in option or ":" in option for option in options)
    for doc in task.eval_docs:
        assert of_classes[doc[column]] != "oos"
        assert task.doc_to_target(doc) == options[doc[column]] == doc["answer"]
    task.set_fewshot_seed(0)
    drawn = task.sampler.sample(count)
    assert len({doc["answer"] for doc in drawn}) == count  # one of each
    prompt = task.fewshot_context(task.eval_docs[0], count)
    assert prompt.startswith(
        f"Query: {drawn[0]['text'].strip()}\nIntent: {drawn[0]['answer']}\n\nQuery: "
    )
    assert prompt.endswith("\n\nQuery: test 0\nIntent:")
