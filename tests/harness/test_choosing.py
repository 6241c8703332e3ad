"""`lm-eval-icl select`: what is read from the model, the file, and the runs that use it."""

import json
import re

import numpy as np
import pytest
import torch
from lm_eval.tasks import TaskManager

from lm_eval_icl import cli
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
from tests import tiny

TASK = "icl_demo_four"


def load(task: str = TASK, **metadata):
    manager = TaskManager(
        include_path=task_dir() / "demo", include_defaults=False, metadata=metadata
    )
    return manager.load([task])["tasks"][task]


@pytest.fixture(scope="module")
def predictor():
    return Predictor(*tiny.load(model_path()), ICL())


@pytest.fixture(scope="module")
def pool():
    return PoolOfTask(load())


def select_command(*arguments) -> None:
    cli.run(["select", *map(str, arguments)])


MODEL = ("--model_args", f"pretrained={model_path()}", "--device", "cpu")


# What is read from the model.


def test_a_pass_reads_what_hf_gives(predictor, pool):
    rows = [3, 0, 77]
    probabilities, features, fitting = Chooser(pool, predictor, 5000).read(rows)
    assert fitting == rows and features.shape == (3, predictor.runner.model.config.hidden_size)
    model, tokenizer = predictor.runner.model, predictor.tokenizer.tokenizer
    for row, found in zip(rows, probabilities, strict=True):
        prompt, options, _ = pool.query(row)
        logs = []
        for option in options:
            whole, start = (
                tokenizer(str(prompt) + option).input_ids,
                len(tokenizer(str(prompt)).input_ids),
            )
            with torch.no_grad():
                logits = model(torch.tensor([whole])).logits[0].log_softmax(-1)
            logs.append(sum(float(logits[at - 1, whole[at]]) for at in range(start, len(whole))))
        assert np.allclose(found, np.exp(logs) / np.exp(logs).sum(), atol=1e-5)


# Choices.


@pytest.mark.parametrize("how", ["entropy", pytest.param("herding", marks=pytest.mark.slow)])
def test_the_command_chooses_what_the_method_chooses(how, predictor, pool, capsys, tmp_path):
    file = tmp_path / "chosen.json"
    select_command(
        how, *MODEL, "--tasks", TASK, "--num_fewshot", 5, "--seeds", "2..3", "--output", file
    )
    assert str(file) in capsys.readouterr().out
    found = json.loads(file.read_text())
    chooser = Chooser(pool, predictor, 5000)
    probabilities, features, rows = chooser.read(chooser._rows(2))
    labels = np.array([pool.query(row)[2] for row in rows])
    assert found["about"]["how"] == how and found["tasks"][TASK]["n"] == 5
    for seed in (2, 3):
        said = found["tasks"][TASK]["seeds"][str(seed)]
        expected = select(read(how), Pool(labels, features, np.stack(probabilities)), 5, seed)
        picked = [rows[i] for i in expected]
        assert said["picked"] == picked and said["indices"] == list(in_prompt_order(picked, seed))
        assert (
            len({pool.query(row)[2] for row in picked}) == 4
        )  # balanced: the task has four labels


def test_best_random_is_the_best_of_its_sets(predictor, pool):
    chooser, scored = Chooser(pool, predictor, 5000), []
    set_score = chooser._set_score

    def listening(demonstrations, rows):
        scores = set_score(demonstrations, rows)
        scored.append((demonstrations, *scores, tuple(rows)))
        return scores

    chooser._set_score = listening
    choice = chooser.choose(read("best_random:sets=6:dev=15"), 3, 0)
    assert len(scored) == 6 and len({rows for *_, rows in scored}) == 1
    best = max(scored, key=lambda each: (each[1], each[2]))
    assert choice.indices == tuple(best[0]) and choice.accuracy == best[1]
    dev = set(scored[0][3])
    assert len(dev) == 15 and not any(dev & set(rows) for rows, *_ in scored)
    # Against lm-eval's own accuracy with these demonstrations on these documents.
    texts = [pool.demonstration(row) for row in choice.indices]
    right = 0
    for row in dev:
        prompt, options, gold = pool.query(row)
        (scores,) = predictor.score(texts, [str(prompt.query)], list(options), prefix=prompt.prefix)
        right += int(np.argmax([value for value, _ in scores])) == gold
    assert right / 15 == choice.accuracy
    other = Chooser(pool, predictor, 5000)._dev_and_rest(range(len(pool.docs)), 15)[0]
    assert set(other) == dev  # whatever the seed


# Runs with a file.


@pytest.mark.parametrize(
    ("changes", "n", "seed", "says"),
    [
        ({}, 1, 0, "2 demonstrations were chosen and 1 are asked for"),
        ({}, 2, 1, "nothing was chosen for seed 1, only for 0"),
        (
            {"pool": {"rows": 9, "sha256": "0"}},
            2,
            0,
            "chosen from another pool: the data has changed since",
        ),
    ],
)
def test_a_file_for_something_else_is_refused(changes, n, seed, says, pool, tmp_path):
    file, digest = (
        tmp_path / "chosen.json",
        {"rows": len(pool.docs), "sha256": pool_digest(pool.docs)},
    )
    of_task = {"n": 2, "pool": digest, "seeds": {"0": {"indices": [4, 8]}}, **changes}
    file.write_text(json.dumps({"about": {}, "tasks": {TASK: of_task}}))
    task = load(demonstrations=str(file))
    if not changes:
        sampler = task.sampler.set_rnd(0)
        assert [task.sampler.df.index(row) for row in sampler.sample(2)] == [4, 8]
    with pytest.raises(InputError, match=f"demonstrations={file}.*{re.escape(says)}"):
        task.sampler.set_rnd(seed).sample(n)


# Bad input.


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["herding", *MODEL, "--tasks", "nothing"], "there is no task 'nothing'"),
        (["best_random:dev=500", *MODEL, "--tasks", TASK], "dev=500: the pool has 200 documents"),
        (
            ["herding", *MODEL, "--tasks", TASK, "--num_fewshot", 0],
            "--num_fewshot: give how many demonstrations task",
        ),
    ],
)
def test_bad_input_is_one_line(arguments, says, tmp_path):
    shots = [] if "--num_fewshot" in arguments else ["--num_fewshot", 4]
    with pytest.raises(InputError, match=re.escape(says)):
        select_command(*arguments, *shots, "--output", tmp_path / "chosen.json")
    assert not (tmp_path / "chosen.json").exists()
