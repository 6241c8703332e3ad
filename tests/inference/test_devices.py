"""One model over several devices, with simulated ones, and on a GPU."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from accelerate import dispatch_model

from lm_eval_icl import methods
from lm_eval_icl.methods import Predictor
from lm_eval_icl.training.train import Settings, train
from tests import evaluation, tiny
from tests.devices import FIRST, SECOND, simulated
from tests.training.test_training import task

DEMONSTRATIONS = [f"Review: a {word} film\nSentiment: {word}\n\n" for word in ("dull", "odd", "quite warm")]
QUERIES = ["Review: a long night\nSentiment:", "Review: bright\nSentiment:"]
OPTIONS = [" dull", " very warm"]


def scores_of(predictor):
    return [score for scores in predictor.score(DEMONSTRATIONS, QUERIES, OPTIONS) for score in scores]


def spread(model):
    """The model with its last layers and its last norm on a second device, as `device_map=auto` would place them: the
    projection on the vocabulary is where the embedding is if they share weights."""
    base, head = model.base_model, model.get_output_embeddings()
    names = {module: name for name, module in model.named_modules()}
    places = dict.fromkeys((names[child] for child in base.children()), SECOND)
    places[names[model.get_input_embeddings()]] = FIRST
    places[names[head]] = FIRST if head.weight is model.get_input_embeddings().weight else SECOND
    for name in list(places):
        part = model.get_submodule(name)
        if isinstance(part, torch.nn.ModuleList):
            del places[name]
            places |= {f"{name}.{i}": FIRST if i < len(part) // 2 else SECOND for i in range(len(part))}
        elif name.endswith((".wpe", ".drop", ".rotary_emb")):
            places[name] = FIRST
    return dispatch_model(model, places, main_device=FIRST)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "method"),
    [
        *itertools.product(["llama"], ["nope", "saicl", "batchicl", "deepthink", "nbce"]),
        ("gpt2", "invicl"),
    ],
)
@torch.no_grad()
def test_a_model_over_two_devices(checkpoint, name, method):
    """Scores are those of one device. (GPT-2's projection on the vocabulary is on the first device, and what it reads
    on the second.)"""
    model, tokenizer = tiny.load(checkpoint(name))
    expected = scores_of(Predictor(model, tokenizer, methods.make(method)))
    with simulated():
        model, _ = tiny.load(checkpoint(name))
        there = Predictor(spread(model), tokenizer, methods.make(method))
        assert {weight.device for weight in there.runner.model.parameters()} == {FIRST, SECOND}
        found = scores_of(there)
    evaluation.assert_same(found, expected, 1e-4)


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("method", methods.NAMES)
def test_on_a_gpu_as_on_a_cpu(checkpoint, method):
    """In float32; and a pass waits for nothing before its scores are read."""
    found = []
    for device in ("cpu", "cuda"):
        model, tokenizer = tiny.load(checkpoint("llama"))
        predictor = Predictor(model.to(device), tokenizer, methods.make(method))
        found.append(scores_of(predictor))
    evaluation.assert_same(found[1], found[0], 1e-3)
    torch.cuda.set_sync_debug_mode("error")
    try:
        predictor.score(DEMONSTRATIONS, QUERIES, OPTIONS)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_training_on_a_gpu_as_on_a_cpu(checkpoint, tmp_path):
    path, losses = checkpoint("llama"), []
    settings = Settings(num_fewshot=3, steps=6, batch_size=4, learning_rate=1e-3, eval_steps=3, save_steps=2)
    for cpu in (True, False):
        model, tokenizer = tiny.load(path)
        output = tmp_path / str(cpu)
        train(model, tokenizer, methods.make("invicl"), [task()], output, settings, cpu=cpu)
        log = json.loads((output / "trainer_state.json").read_text())["log_history"]
        losses.append([entry["loss"] for entry in log if "loss" in entry])
    assert len(losses[0]) == 6 and losses[1] == pytest.approx(losses[0], rel=1e-3)
