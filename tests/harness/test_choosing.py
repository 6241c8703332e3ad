"""`lm-eval-icl select`: what is read from the model, the file, and the runs that use it."""

import json
import re

import numpy as np
import pytest
import torch
from lm_eval.tasks import TaskManager

from lm_eval_icl import cli
from lm_eval_icl.demonstrations import searches
from lm_eval_icl.demonstrations.chooser import Chooser
from lm_eval_icl.demonstrations.draw import pool_digest
from lm_eval_icl.demonstrations.how import read
from lm_eval_icl.demonstrations.pool import Pool
from lm_eval_icl.demonstrations.selector import in_prompt_order, select
from lm_eval_icl.errors import InputError
from lm_eval_icl.harness.model_choices import PoolOfTask
from lm_eval_icl.harness.plugin import task_dir
from lm_eval_icl.methods import ICL, Predictor
from lm_eval_icl.smoke.demo import model_path
from tests import evaluation, tiny

TASK = "icl_demo_four"


def load(task: str = TASK, **metadata):
    folder = task_dir() / "demo"
    manager = TaskManager(include_path=folder, include_defaults=False, metadata=metadata)
    return manager.load([task])["tasks"][task]


@pytest.fixture(scope="module")
def predictor():
    model, tokenizer = tiny.load(model_path())
    return Predictor(model, tokenizer, ICL())


@pytest.fixture(scope="module")
def pool():
    return PoolOfTask(load())


def select_command(*arguments) -> None:
    cli.run(["select", *map(str, arguments)])


MODEL = ("--model_args", f"pretrained={model_path()}", "--device", "cpu")


# What is read from the model.


def test_a_pass_reads_what_hf_gives(predictor, pool):
    rows = [3, 0, 77]
    model = predictor.runner.model
    tokenizer = predictor.tokenizer.tokenizer
    probabilities, features, fitting = Chooser(pool, predictor, 5000).read(rows)
    assert fitting == rows
    assert features.shape == (3, model.config.hidden_size)
    for row, of_options in zip(rows, probabilities, strict=True):
        prompt, options, _ = pool.query(row)
        start = len(tokenizer(str(prompt)).input_ids)
        logs = []
        for option in options:
            whole = tokenizer(str(prompt) + option).input_ids
            with torch.no_grad():
                logits = model(torch.tensor([whole])).logits[0].log_softmax(-1)
            logs.append(sum(float(logits[at - 1, whole[at]]) for at in range(start, len(whole))))
        assert np.allclose(of_options, np.exp(logs) / np.exp(logs).sum(), atol=1e-5)


# Choices.


@pytest.mark.parametrize("how", ["entropy", pytest.param("herding", marks=pytest.mark.slow)])
def test_the_command_chooses_what_the_method_chooses(how, predictor, pool, capsys, tmp_path):
    file = tmp_path / "chosen.json"
    options = ["--tasks", TASK, "--num_fewshot", 5, "--seeds", "2..3", "--output", file]
    select_command(how, *MODEL, *options)
    assert str(file) in capsys.readouterr().out
    chosen = json.loads(file.read_text())
    of_task = chosen["tasks"][TASK]
    assert chosen["about"]["how"] == how
    assert of_task["n"] == 5
    chooser = Chooser(pool, predictor, 5000)
    probabilities, features, rows = chooser.read(chooser._rows(2))
    label_of = {row: pool.query(row)[2] for row in rows}
    labels = np.array(list(label_of.values()))
    candidates = Pool(labels, features, np.stack(probabilities))
    for seed in (2, 3):
        of_seed = of_task["seeds"][str(seed)]
        picked = [rows[i] for i in select(read(how), candidates, 5, seed)]
        assert of_seed["picked"] == picked
        assert of_seed["indices"] == list(in_prompt_order(picked, seed))
        # Balanced: the task has four labels.
        assert len({label_of[row] for row in picked}) == 4


def test_best_random_is_the_best_of_its_sets(predictor, pool):
    chooser = Chooser(pool, predictor, 5000)
    scored = []
    devs = []
    set_score = chooser._set_score

    def listening(demonstrations, rows):
        scores = set_score(demonstrations, rows)
        scored.append((*scores, tuple(demonstrations)))
        devs.append(set(rows))
        return scores

    chooser._set_score = listening
    choice = chooser.choose(read("best_random:sets=6:dev=15"), 3, 0)
    assert len(scored) == 6
    accuracy, _, demonstrations = max(scored, key=lambda scores: scores[:2])
    assert choice.indices == demonstrations
    assert choice.accuracy == accuracy
    dev = devs[0]
    assert devs == [dev] * 6
    assert len(dev) == 15
    assert not any(dev & set(demonstrations) for *_, demonstrations in scored)
    # Against lm-eval's own accuracy with these demonstrations on these documents.
    texts = [pool.demonstration(row) for row in choice.indices]
    right = 0
    for row in dev:
        prompt, options, gold = pool.query(row)
        [scores] = predictor.score(texts, [str(prompt.query)], list(options), prefix=prompt.prefix)
        right += np.argmax([logprob for logprob, _ in scores]) == gold
    assert right / 15 == choice.accuracy
    with_any_seed, _ = Chooser(pool, predictor, 5000)._dev_and_rest(range(len(pool.docs)), 15)
    assert set(with_any_seed) == dev


def test_labels_that_are_texts_are_the_options_of_these_texts():
    by_text = pool_of(*WORDS, doc_to_target="{{['no', 'yes'][label]}}")
    by_number = pool_of(*WORDS)
    for row in range(len(WORDS)):
        assert by_text.query(row) == by_number.query(row)
        assert by_text.query(row)[2] == row % 2


def test_a_document_with_the_mark_of_a_turn_has_no_parts():
    with pytest.raises(InputError, match="task 't': a request does not say which parts"):
        pool_of("a \U000f1c1e film").query(0)


# Runs with a file.


@pytest.fixture
def chosen(pool, tmp_path):
    """A function that writes a file of two demonstrations for seed 0, and returns the task."""

    def write(**changes):
        file = tmp_path / "chosen.json"
        digest = {"rows": len(pool.docs), "sha256": pool_digest(pool.docs)}
        of_task = {"n": 2, "pool": digest, "seeds": {"0": {"indices": [4, 8]}}, **changes}
        file.write_text(json.dumps({"about": {}, "tasks": {TASK: of_task}}))
        return load(demonstrations=str(file))

    return write


def test_a_file_is_what_the_sampler_takes(chosen):
    sampler = chosen().sampler
    rows = sampler.set_rnd(0).sample(2)
    assert [sampler.df.index(row) for row in rows] == [4, 8]


OTHER_POOL = {"pool": {"rows": 9, "sha256": "0"}}


@pytest.mark.parametrize(
    ("changes", "n", "seed", "says"),
    [
        ({}, 1, 0, "2 demonstrations were chosen and 1 are asked for"),
        ({}, 2, 1, "nothing was chosen for seed 1, only for 0"),
        (OTHER_POOL, 2, 0, "chosen from another pool: the data has changed since"),
    ],
    ids=["number", "seed", "pool"],
)
def test_a_file_for_something_else_is_refused(changes, n, seed, says, chosen):
    sampler = chosen(**changes).sampler
    with pytest.raises(InputError, match=f"demonstrations=.*chosen.json.*{re.escape(says)}"):
        sampler.set_rnd(seed).sample(n)


# What does not fit the model.


def pool_of(*texts, **changes):
    """The pool of a task whose few-shot documents have these texts, and two labels in turns."""
    docs = [{"text": text, "label": row % 2} for row, text in enumerate(texts)]
    config = evaluation.choice("t", "no", "yes", doc_to_text="{{text}}") | changes
    config["fewshot_split"] = None
    config["fewshot_config"] = {"sampler": "first_n", "samples": docs}
    return PoolOfTask(evaluation.load_task(config))


@pytest.fixture
def small(checkpoint):
    """A function: a tiny model under plain ICL, with so many positions."""

    def limited(positions=None):
        return Predictor(*tiny.load(checkpoint("gpt2")), ICL(), max_length=positions)

    return limited


WORDS = [f"a {word} film" for word in evaluation.WORDS[:8]]
LONG = "a long film " * 9
LENS = "lens:m=4:l=8:dev=4:beams=1:iterations=1:substitutions=1:shuffles=1"
DEV = 1  # a document that best_random scores sets on


@pytest.mark.parametrize("how", [LENS, "best_random:sets=6:dev=1"])
def test_a_document_that_is_too_long_as_a_demonstration_is_not_chosen(how, small, monkeypatch):
    """Alone, as a query, it fits; after another of its length it does not."""
    monkeypatch.setattr(searches, "_FIRST_ROUNDS", 0)
    texts = [*WORDS]
    for row in (2, DEV):
        texts[row] = f"{LONG}{row}"
    pool = pool_of(*texts)
    tokens, _ = small().tokenizer.pair(pool.query(2)[0], " yes")
    chooser = Chooser(pool, small(len(tokens) + 25), 99)
    choice = chooser.choose(read(how), 2, 0)
    assert len(choice.indices) == 2
    assert not {2, DEV} & {*choice.indices}
    with pytest.raises(InputError, match=f"^lm-eval-icl: {how[:4]}.*: none of the sets that were"):
        chooser.choose(read(how), 4, 0)


def test_pools_that_no_choice_can_be_made_of(small):
    entropy = read("entropy")
    with pytest.raises(InputError, match="no document of the pool fits the model"):
        Chooser(pool_of(*WORDS), small(1), 99).choose(entropy, 2, 0)
    other_options = pool_of(*WORDS, doc_to_choice="{{['no', 'yes', text]}}")
    says = "entropy: needs the same options for all documents, and the documents of task 't' have"
    with pytest.raises(InputError, match=says):
        Chooser(other_options, small(), 99).choose(entropy, 2, 0)


def test_a_model_that_gives_no_number(small):
    predictor = small()
    head = predictor.runner.model.get_output_embeddings()
    head.register_forward_hook(lambda module, given, logits: logits * np.nan)
    with pytest.raises(InputError, match="t: a document of the pool: the log-probability is nan"):
        Chooser(pool_of(*WORDS), predictor, 99).choose(read("entropy"), 2, 0)
    with pytest.raises(InputError, match="query 0, option 0: the log-probability is nan"):
        predictor.score([], ["a film"], [" yes"])
    with pytest.raises(InputError, match="query 0: the scores of the next token are nan"):
        predictor.generate([], ["a film"])


# Bad input.


@pytest.mark.parametrize(
    ("how", "task", "shots", "says"),
    [
        ("herding", "nothing", 4, "there is no task 'nothing'"),
        ("best_random:dev=500", TASK, 4, "dev=500: the pool has 200 documents"),
        ("herding", TASK, 0, "--num_fewshot: give how many demonstrations task"),
        ("herding", TASK, 300, "herding: 300 demonstrations are asked for, and the pool has 200"),
        ("stratified", TASK, 4, "'stratified': is no such method: give one of "),
    ],
    ids=["task", "dev", "num_fewshot", "pool", "how"],
)
def test_bad_input_is_one_line(how, task, shots, says, tmp_path):
    file = tmp_path / "chosen.json"
    with pytest.raises(InputError, match=re.escape(says)):
        select_command(how, *MODEL, "--tasks", task, "--num_fewshot", shots, "--output", file)
    assert not file.exists()


def test_a_task_that_is_not_in_a_folder_of_ones_own(tmp_path):
    folder = ["--include_path", tmp_path, "--tasks", "nothing", "--num_fewshot", 2]
    says = (
        f"there is no task 'nothing'. `lm-eval-icl ls tasks --include_path {tmp_path}` lists them"
    )
    with pytest.raises(InputError, match=re.escape(f"--tasks: {says}.") + "$"):
        select_command("herding", *MODEL, *folder, "--output", tmp_path / "chosen.json")


def without_rows(**_):
    splits = evaluation.splits()
    return {**splits, "train": splits["train"].select([])}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"output_type": "loglikelihood"}, "demonstrations are chosen only for tasks with options"),
        ({"custom_dataset": without_rows}, "has no few-shot documents to choose from"),
    ],
)
def test_tasks_without_rows_to_choose_from(changes, says):
    config = evaluation.choice("t", "no", "yes") | {"fewshot_config": None} | changes
    with pytest.raises(InputError, match=f"task 't': .*{says}"):
        PoolOfTask(evaluation.load_task(config))
