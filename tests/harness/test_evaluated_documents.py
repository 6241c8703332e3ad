"""No document is answered behind a demonstration that is that document: what is drawn, chosen and trained on."""

import json
import random
import re
from collections import Counter
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict

from lm_eval_icl import cli
from lm_eval_icl.errors import InputError
from lm_eval_icl.harness.tasks import ICLTask
from lm_eval_icl.metaicl.files import Row
from lm_eval_icl.smoke.demo import model_path
from lm_eval_icl.studies.run import Options
from lm_eval_icl.training.episodes import EpisodePool, FileTask, draw_episode, read_file
from tests import evaluation

TEST = [{"id": i, "text": f"Question {i} of the test", "label": i % 2} for i in range(10)]
TRAIN = [{"id": 100 + i, "text": f"question {i} of the training", "label": i % 2} for i in range(40)]
# Copies of documents that are evaluated, and that --limit leaves out: with another id, case, and blanks.
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
    return evaluation.load_task(config(**changes), **({} if how is None else {"demonstrations": how}))


def drawn(task, n, seed):
    """The rows of the training split in a prompt of the task, in order."""
    task.set_fewshot_seed(seed)
    prompt = task.fewshot_context(TEST[0], n)
    parts = prompt.split("\n\n")[:-1]
    texts = [f"{row['text']}: {('no', 'yes')[row['label']]}" for row in TRAIN]
    return [texts.index(part) for part in parts]


def old(how, n, seed):
    """What was drawn when nothing was replaced."""
    rnd, rows = random.Random(seed), list(range(len(TRAIN)))
    if how == "first":
        return rows[:n]
    if how == "random":
        return rnd.sample(rows, n)
    groups = [[row for row in rows if TRAIN[row]["label"] == label] for label in (0, 1)]
    rnd.shuffle(groups)
    for group in groups:
        rnd.shuffle(group)
    found = []
    while len(found) < n:
        for group in groups:
            if len(found) < n:
                found.append(group.pop())
    rnd.shuffle(found)
    return found


@pytest.mark.parametrize("of", ["ours", "lm-eval's"])
@pytest.mark.parametrize("how", ["stratified", "random", "first"])
def test_only_rows_that_are_evaluated_are_replaced(how, of):
    task = load(how, **({"class": ICLTask} if of == "ours" else {}))
    replaced = Counter()
    for seed in SEEDS:
        before, now = old(how, 6, seed), drawn(task, 6, seed)
        for was, row in zip(before, now, strict=True):
            assert row == was if was not in COPIES else row not in COPIES and row not in before
            if how == "stratified":
                assert TRAIN[row]["label"] == TRAIN[was]["label"]
        assert len(set(now)) == 6 and now == drawn(task, 6, seed)
        replaced[sum(row in COPIES for row in before)] += 1
        assert task.config.metadata.get("demonstrations_replaced", 0) == sum(row in COPIES for row in before)
    assert how == "first" or replaced[0] > 5 < sum(replaced[count] for count in replaced if count)
    if how == "first":
        assert now == [0, 1, 2, 6, 4, 5]


def test_the_results_say_how_many_were_replaced(checkpoint, caplog):
    seed = next(seed for seed in SEEDS if sum(row in COPIES for row in old("random", 6, seed)) == 2)
    clean = next(seed for seed in SEEDS if not any(row in COPIES for row in old("random", 6, seed)))
    path, metadata, prompts = checkpoint("gpt2"), {"demonstrations": "random"}, []
    for model in ("hf", "icl"):
        caplog.clear()
        results = evaluation.run(model, path, [config()], 6, metadata=metadata, limit=2, fewshot_random_seed=seed)
        assert results["configs"]["toy"]["metadata"]["demonstrations_replaced"] == 2
        (line,) = [each.getMessage() for each in caplog.records if "were replaced" in each.getMessage()]
        assert line.startswith("toy: 2 of 6 demonstrations are also among the documents that are evaluated")
        prompts.append([sample["arguments"][0][0] for sample in results["samples"]["toy"]])
    assert prompts[0] == prompts[1] and not re.search("QUESTION", prompts[0][0])
    results = evaluation.run("hf", path, [config()], 6, metadata=metadata, limit=2, fewshot_random_seed=clean)
    assert "demonstrations_replaced" not in results["configs"]["toy"]["metadata"]


@pytest.mark.parametrize("of", ["ours", "lm-eval's"])
@pytest.mark.parametrize("how", ["stratified", "random", "first", "FILE"])
@pytest.mark.parametrize("splits", [{"fewshot_split": "test"}, {"fewshot_split": None}])
def test_a_pool_that_is_evaluated_is_refused(how, of, splits, tmp_path):
    """lm-eval itself does not leave the document out where it has to fall back to the test split."""
    (tmp_path / "rows.json").write_text("[1, 2, 3]")
    changes = {**splits, "training_split": None, **({"class": ICLTask} if of == "ours" else {})}
    task = load(str(tmp_path / "rows.json") if how == "FILE" else how, **changes)
    task.set_config("num_fewshot", 3)
    task.set_fewshot_seed(0)
    says = "row 1 is also among the doc" if how == "FILE" else "the demonstrations would come from the documents that"
    with pytest.raises(InputError, match=f"^lm-eval-icl: task 'toy': demonstrations=.*{says}"):
        task.build_all_requests(limit=1)


def test_too_few_others_are_refused():
    task = load("random")
    assert len(drawn(task, 35, 0)) == 35
    with pytest.raises(InputError, match="36 demonstrations asked for, and only 35 of the pool's documents are not"):
        drawn(task, 36, 0)


def test_a_file_of_rows_is_taken_as_it_is_or_refused(tmp_path):
    file = tmp_path / "rows.json"
    file.write_text("[7, 4, 9]")
    assert drawn(load(str(file)), 3, 0) == [7, 4, 9]
    file.write_text("[7, 17, 9]")
    with pytest.raises(InputError, match=r"row 17 is also among the documents that are evaluated.*name another"):
        drawn(load(str(file)), 3, 0)


def test_one_question_with_other_options_is_another_document():
    """Of some tasks (BBH's snarks) the question is the same for all documents."""

    def questions(**_):
        rows = [{"q": "Which is sarcastic?", "choices": [f"a{i:02}", f"b{i:02}"], "label": 0} for i in range(20)]
        copies = [{**row, "choices": row["choices"][::-1], "label": 1} for row in rows[:3]]
        splits = {"train": copies + rows[10:], "test": rows[:10]}
        return DatasetDict({name: Dataset.from_list(some) for name, some in splits.items()})

    task = load("first", custom_dataset=questions, doc_to_text="{{q}}", doc_to_choice="choices")
    task.set_fewshot_seed(0)
    prompt = task.fewshot_context(task.eval_docs[0], 4)
    assert [f"a{i:02}" in prompt for i in (0, 1, 2, *range(10, 14))] == [False] * 3 + [True] * 4


# What a model chooses.


def file_of_task(folder: Path, train=TRAIN) -> str:
    given = {key: value for key, value in config().items() if key.startswith("doc_to")}
    return str(evaluation.task_file(folder, "toy", {"train": train, "test": TEST}, **given))


def select(how, task, output, *further):
    line = [how, "--tasks", task, "--num_fewshot", 6, "--output", output, *further]
    if how not in ("random", "stratified"):
        line += ["--model_args", f"pretrained={model_path()}", "--device", "cpu"]
    cli.run(["select", *map(str, line)])
    return json.loads(output.read_text())["tasks"]["toy"]["seeds"]


@pytest.mark.parametrize("how", ["stratified", "random"])
def test_select_draws_what_a_run_draws(how, tmp_path):
    seeds = select(how, file_of_task(tmp_path), tmp_path / "o.json", "--seeds", "0..9")
    task = load(how)
    assert {seed: said["indices"] for seed, said in seeds.items()} == {str(i): drawn(task, 6, i) for i in range(10)}
    counts = [sum(row in COPIES for row in old(how, 6, seed)) for seed in range(10)]
    assert [said.get("evaluated", 0) for said in seeds.values()] == counts and any(counts)


@pytest.mark.parametrize(
    "how", ["herding", "k_center", "entropy", "best_random:sets=4:dev=20", "lens:m=10:l=2:beams=2:iterations=1:dev=6"]
)
def test_a_model_chooses_none_of_them(how, tmp_path, caplog):
    """The copies are all alike but for a number, and far from the rest."""
    how, *given = how.split(":")
    args = ["--args", ",".join(given)] if given else []
    file = tmp_path / "o.json"
    (said,) = select(how, file_of_task(tmp_path), file, "--seeds", "0", *args).values()
    assert not COPIES.keys() & set(said["indices"]) and len(set(said["indices"])) == 6
    assert said["evaluated"] == len(COPIES) and "toy: 5 documents of the pool are also among" in caplog.text


# Studies.


@pytest.mark.slow
@pytest.mark.usefixtures("own_tasks")
def test_a_dev_set_has_no_copies_of_demonstrations(tmp_path):
    from tests.studies.running import conduct

    train = [{**row, "id": i, "text": f"question {i % 30}"} for i, row in enumerate(TRAIN)]
    keys = {"tasks": file_of_task(tmp_path, train), "num_fewshot": 4, "seeds": "0..2", "demonstrations": "random"}
    study = conduct(tmp_path / "o", Options("cpu", 8), **keys, methods="icl", dev={"size": 20, "choose": ["seeds"]})
    cells = [study.results(cell) for cell in study.cells()]
    shown = {train[row]["text"] for found in cells for row in found["config"]["icl"]["study"]["indices"]}
    (task,) = study.grid.tasks.values()
    assert len(task.dev) == 20 and not shown & {row["text"] for row in task.dev.values()}


# Training.


@pytest.mark.slow
def test_no_demonstration_of_an_episode_says_what_the_query_says(tmp_path, capsys):
    """Of texts that are twice in a file, in drawn episodes, in those of every row, and in those held out."""
    rows = [
        {"task": "t", "input": f"{'Film' if i % 2 else ' FILM '} {i // 2}", "output": "ab"[i % 2]} for i in range(60)
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({**row, "options": ["a", "b"]}) + "\n" for row in rows))
    for of in ("task", "row"):
        line = ["icl", "--model_args", f"pretrained={model_path()}", "--episodes", file, "--output", tmp_path / of]
        line += ["--num_fewshot", 8, "--steps", 15, "--batch_size", 4, "--device", "cpu"]
        cli.run(["train", *map(str, line), "--eval_documents", "6", "--draw", of])
        says = r"of the first 60 episodes, (\d+) demonstrations say what their query says and are replaced"
        (count,) = re.findall(says, capsys.readouterr().out)
        assert 1 <= int(count) <= 20
    (task,) = read_file(file)
    pool = EpisodePool(task, 8, 6)
    episodes = [draw_episode([pool], 0, number) for number in range(60)] + pool.evaluation()
    assert all(episode.query // 2 not in {row // 2 for row in episode.demonstrations} for episode in episodes)
    assert all(len(set(episode.demonstrations)) == 8 for episode in episodes)
    for number, episode in enumerate(episodes[:60]):
        rnd = random.Random(f"0 {number} 0")
        *before, query = rnd.sample(pool.rows, 9)
        same = [row // 2 == query // 2 for row in before]
        assert episode.query == query and episode.replaced == sum(same)
        kept = [now == was for now, was in zip(episode.demonstrations, before, strict=True)]
        assert kept == [not repeated for repeated in same]


def test_rows_that_all_say_the_same_are_refused():
    task = FileTask("t", tuple(Row("the same", "a", ("a", "b")) for _ in range(20)))
    with pytest.raises(InputError, match="task 't': fewer than 2 of its rows say something else than row"):
        draw_episode([EpisodePool(task, 2, 0)], 0, 0)
