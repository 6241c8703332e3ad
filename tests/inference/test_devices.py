"""On a GPU as on a CPU."""

from __future__ import annotations

import json

import pytest
import torch

from lm_eval_icl import methods
from lm_eval_icl.methods import Predictor
from lm_eval_icl.smoke.smoke import QUICK
from lm_eval_icl.training.train import Settings, train
from tests import evaluation, tiny
from tests.training.test_training import task

DEMONSTRATIONS = [
    f"Review: a {word} film\nSentiment: {word}\n\n" for word in ("dull", "odd", "quite warm")
]
QUERIES = ["Review: a long night\nSentiment:", "Review: bright\nSentiment:"]
OPTIONS = [" dull", " very warm"]


def scores_of(predictor):
    return [
        score for scores in predictor.score(DEMONSTRATIONS, QUERIES, OPTIONS) for score in scores
    ]


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
    path, losses = checkpoint("llama"), []
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
