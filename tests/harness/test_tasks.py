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
from lm_eval_icl.harness.tasks import NamedLabelsTask, bbh_cloze, bbh_docs
from tests import evaluation

POOL = [{"text": f"t{i}", "label": i % 3} for i in range(30)]


def label(doc):
    return doc["label"]


def sampled(how, n, seed=1):
    rows, _ = draw(POOL, n, how, label, lambda doc: False, Random(seed), "task", seed)
    return [POOL[row] for row in rows]


@given(n=st.integers(0, 30), seed=st.integers(0, 1000))
def test_stratified_counts_differ_by_one_at_most(n, seed):
    drawn = stratified(POOL, n, label, Random(seed))
    assert len({doc["text"] for doc in drawn}) == n
    counts = Counter(range(3))  # one more of each, also of labels that were not drawn
    counts.update(doc["label"] for doc in drawn)
    assert max(counts.values()) - min(counts.values()) <= 1


@pytest.mark.parametrize("how", ["stratified", "random"])
def test_a_seed_has_one_draw(how):
    """With its order: a stratified draw does not come label by label."""
    assert sampled(how, 8) == sampled(how, 8)
    assert any(sampled(how, 8, seed) != sampled(how, 8) for seed in range(2, 6))
    orders_of_labels = set()
    for seed in range(20):
        orders_of_labels.add(tuple(doc["label"] for doc in sampled(how, 6, seed)))
    assert len(orders_of_labels) > 5


def test_first_and_more_than_there_are():
    assert sampled("first", 4) == POOL[:4]
    says = "31 demonstrations are asked for, and the pool has 30 rows: lower"
    with pytest.raises(InputError, match=says):
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
        ("[1", 1, "must be stratified, random, first, or a JSON file of indices"),
        ('{"tasks": {"other": {}}}', 1, "has no choice for this task, only for other"),
    ],
)
def test_files_that_cannot_be_used(tmp_path, content, n, says):
    path = tmp_path / "chosen.json"
    path.write_text(content)
    with pytest.raises(InputError, match=says):
        sampled(str(path), n)


OWN = evaluation.choice("own", "a", "b")


def load(name, **metadata):
    if name == "own":
        return evaluation.load_task(OWN, **metadata)
    folder = task_dir() / "demo"
    manager = TaskManager(include_path=folder, include_defaults=False, metadata=metadata)
    return manager.load([name])["tasks"][name]


@pytest.mark.parametrize("how", ["random", "stratified"])
def test_a_draw_does_not_depend_on_earlier_draws_of_other_numbers(how):
    config = evaluation.choice("two", "no", "yes")
    drawn = []
    for numbers in ((4,), (2, 4)):
        sampler = evaluation.load_task(config, demonstrations=how).sampler.set_rnd(5)
        drawn.append([sampler.rows(n) for n in numbers][-1])
    assert drawn[0] == drawn[1]


def test_a_split_that_also_has_the_demonstrations_is_not_shuffled():
    own = {**OWN, "test_split": "train"}
    with pytest.raises(InputError, match="shuffle=0: its evaluated documents are not a split"):
        evaluation.load_task(own, shuffle=0)


def texts_of(task):
    return [as_json(doc) for doc in task.eval_docs]


@pytest.mark.parametrize("name", ["icl_demo_short", "own"])
def test_documents_in_the_order_of_a_seed(name):
    """All of them, the same for every seed of the demonstrations, in our tasks and in lm-eval's
    own."""
    plain = load(name)
    shuffled = load(name, shuffle=0)
    rows = texts_of(plain)
    first = texts_of(shuffled)
    other = texts_of(load(name, shuffle=1))
    assert sorted(rows) == sorted(first) == sorted(other)
    assert first == texts_of(load(name, shuffle=0))
    assert first == Random(0).sample(rows, len(rows))
    assert first != other
    assert other != rows
    assert list(plain.fewshot_docs()) == list(shuffled.fewshot_docs())
    with pytest.raises(InputError, match=r"shuffle=-1: must be a whole number, 0 or more\."):
        load(name, shuffle=-1)


def test_texts_in_a_document():
    """However deep. The letters that options are listed by stay."""
    doc = {"q": "one", "n": 3, "none": None, "empty": []}
    doc["c"] = {"text": ["two", "", ("three",)], "label": ["A", "B"]}
    assert texts_in(doc) == ["one", "two", "", "three"]
    free = {"q": "X", "n": 3, "none": None, "empty": []}
    free["c"] = {"text": ["X", "X", ["X"]], "label": ["A", "B"]}
    assert with_texts(doc, lambda _: "X") == free


@pytest.mark.parametrize(
    ("text", "target", "document"),
    [
        (
            "Which?\nOptions:\n(A) x y\n(B) z",
            "(B)",
            {"question": "Which?", "choices": ["x y", "z"], "answer": 1},
        ),
        (
            "Is it?\nOptions:\n- valid \n- invalid",
            "valid",
            {"question": "Is it?", "choices": ["valid", "invalid"], "answer": 0},
        ),
        (
            "not True is",
            "False",
            {"question": "not True is", "choices": ["False", "True"], "answer": 0},
        ),
    ],
    ids=["letters", "words", "no list"],
)
def test_bbh_cloze(text, target, document):
    assert bbh_cloze([{"input": text, "target": target}], ["False", "True"]) == [document]


class Loader(yaml.BaseLoader):
    """Reads `!function x` as the string x."""


Loader.add_constructor("!function", lambda loader, node: loader.construct_scalar(node))


def names(pattern):
    for path in sorted(task_dir().glob(pattern)):
        yield path, yaml.load(path.read_text(), Loader=Loader)


def test_documents_with_another_number_of_options_than_most_are_left_out():
    rows = [{"input": f"{i}\nOptions:\n(A) x\n(B) y", "target": "(A)"} for i in range(3)]
    rows.append({"input": "odd\nOptions:\n(A) x\n(B) y\n(C) z", "target": "(C)"})
    assert len(bbh_docs(Dataset.from_list(rows))) == 3


CLASSIFICATION = ["icl_sst2", "icl_sst5", "icl_mr", "icl_trec", "icl_agnews"]


def test_every_task_and_group_that_is_promised():
    """Each task of BBH has three demonstrations, with their answers among the options."""
    bbh = []
    for path, config in names("bbh/icl_bbh_*.yaml"):
        if "task" in config:
            bbh.append(path.stem)
        samples = config["fewshot_config"]["samples"]
        assert len(samples) == 3, path
        for sample in samples:
            assert 0 <= int(sample["answer"]) < len(sample["choices"]), path
    mmlu = [path.stem for path, config in names("mmlu/icl_mmlu_*.yaml") if "dataset_name" in config]
    assert len(bbh) == 22
    assert len(mmlu) == 57
    groups = {}
    for _, config in names("*/*.yaml"):
        if "group" in config:
            groups[config["group"]] = config["task"]
    assert len(groups["icl_mmlu"]) == 4
    members = []
    for group in groups["icl_mmlu"]:
        members += groups[group]
    assert sorted(members) == sorted(mmlu)
    assert sorted(groups["icl_bbh"]) == sorted(bbh)
    assert groups["icl_classification"] == CLASSIFICATION


def test_generated_files_are_up_to_date(tmp_path):
    script = Path(__file__).resolve().parents[2] / "scripts/make_task_configs.py"
    main = runpy.run_path(str(script))["main"]
    main.__globals__["OUT"] = tmp_path
    main()
    written = [path.relative_to(tmp_path) for path in tmp_path.rglob("*.yaml")]
    assert len(written) == 2 * (57 + 5) + 22 + 1 + 2 * 3 + 132
    for path in written:
        assert (task_dir() / path).read_text() == (tmp_path / path).read_text(), path


PAIRS = [
    (
        "rte",
        {"sentence1": "Rain fell. ", "sentence2": "It was dry.", "label": 1},
        "Premise:Rain fell.\nHypothesis:It was dry.\nAnswer:",
        "↓",
    ),
    (
        "mrpc",
        {"sentence1": "It rained .", "sentence2": "Rain fell .", "label": 1},
        "Sentence 1:It rained .\nSentence 2:Rain fell .\nAnswer:",
        "→",
    ),
    (
        "qnli",
        {"question": "When was it?", "sentence": "It was in 1948.", "label": 0},
        "Question:When was it?\nParagraph:It was in 1948.\nAnswer:",
        "↑",
    ),
]


@pytest.mark.parametrize(("end", "instructions"), [("", 0), ("_instruction", 1)])
@pytest.mark.parametrize(("name", "row", "query", "answer"), PAIRS, ids=["rte", "mrpc", "qnli"])
def test_pairs_of_sentences_as_batch_icl_writes_them(name, row, query, answer, end, instructions):
    """As in the rows and `format_example` of github.com/Cardinalere/Batch-ICL, where ↑ is
    entailment, → equivalence."""
    config = load_yaml(task_dir() / f"classification/icl_{name}{end}.yaml")
    assert config.pop("dataset_path") == "nyu-mll/glue"
    assert config.pop("dataset_name") == name
    row = {**row, "idx": 0}
    document = dict(row)
    for field, value in row.items():
        if isinstance(value, str):
            document[field] = f"{value} Or not."
    train = [{**row, "label": label, "idx": i} for i, label in enumerate([0, 1, 0, 1], start=1)]
    task = of_rows(config, validation=Dataset.from_list([document]), train=Dataset.from_list(train))
    options = task.doc_to_choice(row)
    assert task.doc_to_text(row) == query
    assert options[task.doc_to_target(row)] == answer
    prompt = task.fewshot_context(document, 4)
    task.build_all_requests(limit=1)
    assert {request.args[1] for request in task.instances} == set(options)
    assert prompt.endswith(f"\n\n{task.doc_to_text(document)}")
    assert prompt.count("\n\n") == 4 + instructions
    assert f"{query}{answer}\n\n" in prompt  # a demonstration


INTENTS = [("icl_banking77", "label", 77), ("icl_clinc150", "intent", 150)]


INTENTS.append(("icl_trec_fine", "fine_label", 50))


def of_rows(config, **splits):
    """The task of a configuration over these rows."""
    return evaluation.load_task({**config, "custom_dataset": lambda **_: DatasetDict(splits)})


def many_labels(name, column, count):
    """The task on made rows of the data set's columns."""
    path = task_dir() / "classification" / f"{name}.yaml"
    config = load_yaml(path, resolve_func=True)
    of_classes = list(config.get("words") or ())
    of_classes += [f"class_{i}" for i in range(count - len(of_classes))]
    of_classes = of_classes[:count] + config.get("without", [])
    n = len(of_classes)
    features = Features({"text": Value("string"), column: ClassLabel(names=of_classes)})

    def rows(split):
        made = [{"text": f"  {split} {i} ", column: i % n} for i in range(3 * n)]
        return Dataset.from_list(made, features)

    return of_rows(config, train=rows("train"), test=rows("test")), of_classes


@pytest.mark.parametrize(
    ("feature", "says"),
    [
        (Value("int64"), "task 't': its column 'label' has no names of classes."),
        (ClassLabel(names=["a_b", "a b"]), "task 't': two classes are called 'a b'."),
    ],
)
def test_columns_that_name_no_options(feature, says):
    rows = Dataset.from_list([{"text": "x", "label": 0}])
    rows = rows.cast_column("label", feature)
    named = {"class": NamedLabelsTask, "label_column": "label"}
    with pytest.raises(InputError, match=says):
        of_rows(evaluation.choice("t") | named, train=rows, test=rows)


@pytest.mark.parametrize(("name", "column", "count"), INTENTS)
def test_tasks_with_many_labels(name, column, count):
    """The options are the names of the classes in words, and a class that is no option has no
    documents."""
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
    first = drawn[0]
    demonstration = f"Query: {first['text'].strip()}\nIntent: {first['answer']}"
    assert prompt.startswith(f"{demonstration}\n\nQuery: ")
    assert prompt.endswith("\n\nQuery: test 0\nIntent:")
