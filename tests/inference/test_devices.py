"""On a GPU as on a CPU; and how much memory a device has to spare."""

from __future__ import annotations

import itertools
import json
import sys
from types import SimpleNamespace

import pytest
import torch

from lm_eval_icl import methods
from lm_eval_icl.inference import devices
from lm_eval_icl.methods import Predictor, runner
from lm_eval_icl.smoke.every_method import QUICK
from lm_eval_icl.training.finetune import Settings, train
from tests import evaluation, tiny
from tests.training.test_training import task

DEMONSTRATIONS = [
    f"Review: a {word} film\nSentiment: {word}\n\n" for word in ("dull", "odd", "quite warm")
]
QUERIES = ["Review: a long night\nSentiment:", "Review: bright\nSentiment:"]
OPTIONS = [" dull", " very warm"]


def scores_of(predictor):
    return list(itertools.chain(*predictor.score(DEMONSTRATIONS, QUERIES, OPTIONS)))


@pytest.mark.gpu
@pytest.mark.parametrize("method", methods.NAMES)
def test_on_a_gpu_as_on_a_cpu(checkpoint, method):
    """In float32; and a pass waits for nothing before its scores are read."""
    found = []
    for device in ("cpu", "cuda"):
        model, tokenizer = tiny.load(checkpoint("llama"))
        predictor = Predictor(
            model.to(device), tokenizer, methods.make(method, QUICK.get(method, {}))
        )
        found.append(scores_of(predictor))
    evaluation.assert_same(found[1], found[0], 1e-3)
    torch.cuda.set_sync_debug_mode("error")
    try:
        predictor.score(DEMONSTRATIONS, QUERIES, OPTIONS)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_training_on_a_gpu_as_on_a_cpu(checkpoint, tmp_path):
    path = checkpoint("llama")
    losses = []
    settings = Settings(
        num_fewshot=3, steps=6, batch_size=4, learning_rate=1e-3, eval_steps=3, save_steps=2
    )
    for cpu in (True, False):
        model, tokenizer = tiny.load(path)
        output = tmp_path / str(cpu)
        train(model, tokenizer, methods.make("invicl"), [task()], output, settings, cpu=cpu)
        log = json.loads((output / "trainer_state.json").read_text())["log_history"]
        losses.append([entry["loss"] for entry in log if "loss" in entry])
    assert len(losses[0]) == 6 and losses[1] == pytest.approx(losses[0], rel=1e-3)


def test_memory_is_what_this_process_may_use(tmp_path, monkeypatch):
    """The machine's, a control group's if it has less, and a part of it beside other processes."""
    monkeypatch.setattr(devices, "CONTROL_GROUP", tmp_path)
    cpu = torch.device("cpu")
    monkeypatch.setattr(devices.psutil, "virtual_memory", lambda: SimpleNamespace(available=9000))
    assert devices.free_bytes(cpu) == 9000
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("400\n")
    assert devices.free_bytes(cpu) == 9000
    (tmp_path / "memory.max").write_text("1000\n")
    assert devices.free_bytes(cpu) == 600
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert devices.free_bytes(cpu) == 200
    (tmp_path / "memory.max").write_text("100\n")
    assert devices.free_bytes(cpu) == 0


def test_the_most_memory_of_a_process(monkeypatch):
    cpu = torch.device("cpu")
    assert devices.peak_bytes(cpu) > 2**20
    monkeypatch.setitem(sys.modules, "resource", None)  # as on Windows
    assert devices.peak_bytes(cpu) == 0


@pytest.mark.parametrize("given", [None, 0, 1000])
def test_stored_memories_take_half_of_what_is_free(checkpoint, given, monkeypatch, caplog):
    monkeypatch.setattr(runner, "free_bytes", lambda device: 3 * 10**9)
    model, tokenizer = tiny.load(checkpoint("llama"))
    with caplog.at_level("INFO", logger="lm_eval.icl"):
        predictor = Predictor(model, tokenizer, methods.make("icl"), store_bytes=given)
    expected = 1_500_000_000 if given is None else given
    assert predictor.runner.store.max_bytes == expected
    lines = [line for line in caplog.messages if line.startswith("store_bytes=")]
    said = "store_bytes=1500000000: memories of demonstrations may take half of the 3.0 GB"
    assert lines == ([] if given is not None else [f"{said} that are free on cpu"])


@pytest.mark.gpu
def test_memory_of_a_gpu_is_what_torch_can_still_take():
    device = torch.device("cuda")
    before = devices.free_bytes(device)
    taken = torch.empty(2**28, dtype=torch.uint8, device=device)
    assert before - devices.free_bytes(device) >= 2**28
    del taken
    assert before - devices.free_bytes(device) < 2**28
