"""No document is answered after a demonstration that is that document: what is drawn, chosen and
trained on."""

import json
import random
from collections import Counter
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict

from lm_eval_icl import cli
from lm_eval_icl.errors import InputError
from lm_eval_icl.harness.tasks import ICLTask
from lm_eval_icl.smoke.demo import model_path
from tests import evaluation

TEST = [{"id": i, "text": f"Question {i} of the test", "label": i % 2} for i in range(10)]
TRAIN = [
    {"id": 100 + i, "text": f"question {i} of the training", "label": i % 2} for i in range(40)
]
# Copies of documents that are evaluated, and that --limit leaves out: with another id, case, and
# blanks.
COPIES = {3: 9, 8: 6, 17: 5, 22: 8, 30: 4}
for _row, _of in COPIES.items():
    TRAIN[_row] = {"id": 100 + _row, "text": f"  QUESTION {_of}   of the\ttest", "label": _row % 2}
SEEDS = range(30)


def data(**_) -> DatasetDict:
    return DatasetDict({"train": Dataset.from_list(TRAIN), "test": Dataset.from_list(TEST)})


def config(**changes):
    return {
        "task": "toy",
        "custom_dataset": data,
        "output_type": "multiple_choice",
        "training_split": "train",
        "fewshot_split": "train",
        "test_split": "test",
        "doc_to_text": "{{text}}:",
        "doc_to_choice": ["no", "yes"],
        "doc_to_target": "label",
        **changes,
    }


def load(how=None, **changes):
    metadata = {} if how is None else {"demonstrations": how}
    return evaluation.load_task(config(**changes), **metadata)


def drawn(task, n, seed):
    """The rows of the training split in a prompt of the task, in order."""
    task.set_fewshot_seed(seed)
    prompt = task.fewshot_context(TEST[0], n)
    parts = prompt.split("\n\n")[:-1]
    texts = [f"{row['text']}: {('no', 'yes')[row['label']]}" for row in TRAIN]
    return [texts.index(part) for part in parts]


def old(how, n, seed):
    """What was drawn when nothing was replaced."""
    rnd = random.Random(seed)
    rows = list(range(len(TRAIN)))
    if how == "first":
        return rows[:n]
    if how == "random":
        return rnd.sample(rows, n)
    groups = [[row for row in rows if TRAIN[row]["label"] == label] for label in (0, 1)]
    rnd.shuffle(groups)
    for group in groups:
        rnd.shuffle(group)
    picked = []
    for _ in range(n):
        group = groups[len(picked) % 2]
        picked.append(group.pop())
    rnd.shuffle(picked)
    return picked


OURS = {"class": ICLTask}


@pytest.mark.parametrize("cls", [OURS, {}], ids=["ours", "lm-eval's"])
@pytest.mark.parametrize("how", ["stratified", "random", "first"])
def test_only_rows_that_are_evaluated_are_replaced(how, cls):
    task = load(how, **cls)
    replaced = Counter()
    for seed in SEEDS:
        before = old(how, 6, seed)
        now = drawn(task, 6, seed)
        for was, row in zip(before, now, strict=True):
            if was in COPIES:
                assert row not in COPIES
                assert row not in before
            else:
                assert row == was
            if how == "stratified":
                assert TRAIN[row]["label"] == TRAIN[was]["label"]
        assert len(set(now)) == 6
        assert now == drawn(task, 6, seed)
        replaced[sum(row in COPIES for row in before)] += 1
    if how == "first":
        assert now == [0, 1, 2, 6, 4, 5]
    else:
        assert replaced[0] > 5
        assert replaced.total() - replaced[0] > 5


@pytest.mark.parametrize(
    ("column", "template"), [("text", "{{id}}. {{text}}:"), ("question", "{{question}}:")]
)
def test_copies_are_known_though_demonstrations_have_a_template_of_their_own(column, template):
    """In the second case, demonstrations have no column that the template of queries names."""
    rows = [{"id": row["id"], column: row["text"], "label": row["label"]} for row in TRAIN]

    def other_columns(**_):
        return DatasetDict(train=Dataset.from_list(rows), test=Dataset.from_list(TEST))

    shots = {"doc_to_text": template}
    task = load("random", custom_dataset=other_columns, fewshot_config=shots)
    for seed in SEEDS:
        task.set_fewshot_seed(seed)
        assert "QUESTION" not in task.fewshot_context(TEST[0], 6)
    assert any(COPIES.keys() & set(old("random", 6, seed)) for seed in SEEDS)


@pytest.mark.parametrize(
    ("how", "changes", "says"),
    [
        (
            "stratified",
            OURS | {"fewshot_split": "test"},
            "the demonstrations would come from the documents that",
        ),
        ("FILE", {"fewshot_split": None}, "row 1 is also among the doc"),
    ],
)
def test_a_pool_that_is_evaluated_is_refused(how, changes, says, tmp_path):
    """lm-eval itself does not leave the document out where it has to fall back to the test
    split."""
    file = tmp_path / "rows.json"
    file.write_text("[1, 2, 3]")
    task = load(str(file) if how == "FILE" else how, training_split=None, **changes)
    task.set_config("num_fewshot", 3)
    task.set_fewshot_seed(0)
    with pytest.raises(InputError, match=f"^lm-eval-icl: task 'toy': demonstrations=.*{says}"):
        task.build_all_requests(limit=1)


def test_too_few_others_are_refused():
    task = load("random")
    assert len(drawn(task, 35, 0)) == 35
    with pytest.raises(
        InputError, match="36 demonstrations are asked for, and only 35 of the pool's documents are"
    ):
        drawn(task, 36, 0)


def test_a_file_of_rows_is_taken_as_it_is_or_refused(tmp_path):
    file = tmp_path / "rows.json"
    file.write_text("[7, 4, 9]")
    assert drawn(load(str(file)), 3, 0) == [7, 4, 9]
    file.write_text("[7, 17, 9]")
    with pytest.raises(
        InputError, match=r"row 17 is also among the documents that are evaluated.*name another"
    ):
        drawn(load(str(file)), 3, 0)


# What a model chooses.


def file_of_task(folder: Path, train=TRAIN) -> str:
    given = {key: value for key, value in config().items() if key.startswith("doc_to")}
    return str(evaluation.task_file(folder, "toy", {"train": train, "test": TEST}, **given))


def select(how, task, output, *further):
    line = [how, "--tasks", task, "--num_fewshot", 6, "--output", output, *further]
    line += ["--model_args", f"pretrained={model_path()}", "--device", "cpu"]
    cli.run(["select", *map(str, line)])
    return json.loads(output.read_text())["tasks"]["toy"]["seeds"]


@pytest.mark.parametrize("how", ["herding", "lens:m=10:l=2:beams=2:iterations=1:dev=6"])
def test_a_model_chooses_none_of_them(how, tmp_path):
    """The copies are all alike but for a number, and far from the rest."""
    (said,) = select(how, file_of_task(tmp_path), tmp_path / "o.json", "--seeds", "0").values()
    assert not COPIES.keys() & set(said["indices"]) and len(set(said["indices"])) == 6
