"""Half precision changes few predictions: methods of every kind in float16 and bfloat16 beside
float32."""

import lm_eval
import pytest
import torch
from lm_eval.tasks import TaskManager

from lm_eval_icl.harness.plugin import task_dir
from lm_eval_icl.methods import make
from lm_eval_icl.methods.runner import MethodRunner
from lm_eval_icl.smoke.demo import model_path
from tests import tiny
from tests.methods.test_learned import WORK


def log_probabilities(method: str, dtype: str) -> torch.Tensor:
    """Those of the options, [documents, options], in one evaluation through lm-eval."""
    results = lm_eval.simple_evaluate(
        model=method,
        model_args={"pretrained": str(model_path()), "dtype": dtype},
        tasks=["icl_demo_short"],
        batch_size=8,
        device="cpu",
        limit=20,
        task_manager=TaskManager(include_path=task_dir() / "demo", include_defaults=False),
        bootstrap_iters=0,
    )
    samples = results["samples"]["icl_demo_short"]
    return torch.tensor(
        [[float(response[0]) for (response,) in sample["resps"]] for sample in samples]
    )


@pytest.mark.slow
# One of every kind: a plain pass, a mask, memories that depend on the query, thinking, parts.
@pytest.mark.parametrize("method", ["icl", "invicl", "batchicl", "deepthink", "ape"])
def test_a_method_predicts_alike_in_half_precision(method):
    exact = log_probabilities(method, "float32")
    assert len(exact) == 20
    for dtype in ("float16", "bfloat16"):
        rounded = log_probabilities(method, dtype)
        assert (exact.argmax(dim=1) == rounded.argmax(dim=1)).float().mean() >= 0.9
        assert 0 < (exact - rounded).abs().max() < 1  # that of another dtype, and no other method's


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "qwen3"])
@pytest.mark.parametrize("method", ["pcw", "ape", "structured"])
def test_a_method_predicts_alike_in_mixed_precision(method, architecture):
    model = tiny.build(architecture)
    scores = []
    for dtype in (None, torch.bfloat16):
        runner = MethodRunner(model, make(method), mixed_precision_dtype=dtype)
        scores.append([logprob for logprob, _ in tiny.scores(runner, WORK).values()])
    exact, rounded = scores
    assert rounded != exact
    assert rounded == pytest.approx(exact, abs=0.1)
