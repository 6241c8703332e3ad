"""The checkpoint and tasks that ship with the package."""

from __future__ import annotations

import re
import runpy
from collections import Counter
from pathlib import Path

import lm_eval
import pytest
import torch
from lm_eval.tasks import TaskManager
from transformers import AutoModelForCausalLM, AutoTokenizer

from lm_eval_icl.harness.plugin import task_dir
from lm_eval_icl.smoke.demo import documents, model_path
from tests import processes

TASKS = ["icl_demo_short", "icl_demo_long", "icl_demo_four", "icl_demo_pieces", "icl_demo_unseen"]
SCRIPT = runpy.run_path(str(Path(__file__).resolve().parents[2] / "scripts/demo_model/__main__.py"))


def test_checkpoint_is_small_safe_and_roomy() -> None:
    files = list(model_path().iterdir())
    assert sum(file.stat().st_size for file in files) <= 4 * 2**20
    assert {file.suffix for file in files} == {".json", ".safetensors"}, "no pickles, no code"
    model = AutoModelForCausalLM.from_pretrained(model_path())
    assert model.config.max_position_embeddings >= 2048
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


def test_tokenizer_takes_any_text_and_adds_nothing() -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_path())
    text = "Review: thunder, 雷 and\tfrost\r\n\nSentiment: naïve"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.bos_token == tokenizer.eos_token == "<|endoftext|>"
    for word in (" thunder", " amber", " cobalt"):
        assert len(tokenizer(word).input_ids) == 1
    for word in (" zephyr", " lavender", " gazebo"):
        assert len(tokenizer(word).input_ids) > 1


@pytest.mark.parametrize("name", TASKS)
def test_documents_are_distinct_and_balanced(name: str) -> None:
    data = documents(name, version=1.0)
    texts = []
    for split in data.values():
        texts += split["text"]
    assert len(set(texts)) == len(texts) > 390
    for split in data.values():
        counts = Counter(row["label"] for row in split)
        assert sorted(counts) == list(range(len(counts)))
        assert len(set(counts.values())) == 1


def test_a_quarter_of_the_demonstrations_has_a_wrong_label_and_no_document() -> None:
    manager = TaskManager(include_path=task_dir() / "demo", include_defaults=False)
    task = manager.load(["icl_demo_noise"])["tasks"]["icl_demo_noise"]
    data = documents("icl_demo_four")
    wrong = 0
    for row in data["train"]:
        label = task.doc_to_target(row, task.fewshot_cfg.doc_to_target)
        wrong += int(label) != row["label"]
    assert 0.2 < wrong / len(data["train"]) < 0.3
    assert [task.doc_to_target(row) for row in task.eval_docs] == list(data["test"]["label"])


def test_documents_come_from_the_seed(tmp_path: Path) -> None:
    SCRIPT["write_documents"](tmp_path, seed=0)
    for name in TASKS:
        for split in ("train", "test"):
            made = (tmp_path / name / f"{split}.jsonl").read_bytes()
            assert made == (task_dir() / "demo" / name / f"{split}.jsonl").read_bytes()


def accuracies(shots: int) -> dict[str, float]:
    results = lm_eval.simple_evaluate(
        model="icl",
        model_args={"pretrained": str(model_path())},
        tasks=["icl_demo"],
        task_manager=TaskManager(include_path=task_dir() / "demo", include_defaults=False),
        num_fewshot=shots,
        limit=60,
        batch_size=16,
        device="cpu",
        bootstrap_iters=0,
    )
    return {name: results["results"][name]["acc,none"] for name in TASKS}


@pytest.mark.slow
def test_demonstrations_teach_the_labels() -> None:
    untaught = accuracies(0)
    taught = accuracies(8)
    chance = [1 / len(set(documents(name)["test"]["label"])) for name in TASKS]
    # 60 documents are not quite balanced.
    assert abs(sum(untaught.values()) - sum(chance)) / len(TASKS) <= 0.1
    assert min(taught.values()) >= 0.8


@pytest.mark.slow
def test_the_demo_prints_a_table_and_says_how_to_go_on(tmp_path: Path) -> None:
    done = processes.command("demo", "--limit", 2, "--output", "o", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [line.split()[0] for line in done.stdout.splitlines() if re.match(r"\w+ +[0-9.]+", line)]
    methods = "hf icl icl nope prefixicl pcw saicl batchicl invicl deepthink"
    assert rows == methods.split()
    assert "lm-eval-icl study which-method" in done.stdout
    assert (tmp_path / "o/board.html").is_file()
