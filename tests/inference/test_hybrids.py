"""Models that keep more than keys and values: state spaces, and linear attention beside attention."""

import pytest
import torch

from lm_eval_icl import methods
from lm_eval_icl.errors import Unsupported
from lm_eval_icl.inference.capabilities import probe
from lm_eval_icl.methods.runner import MethodRunner
from lm_eval_icl.smoke import smoke
from tests import tiny
from tests.smoke import model_types as smoke_models


@pytest.mark.parametrize(
    ("method", "arguments"),
    [("invicl", {}), ("pcw", {"window_size": 2}), ("nope", {}), ("icl", {"positions": "symmetric"}), ("deepthink", {})],
)
def test_methods_that_work_on_keys_and_values_are_refused(method, arguments):
    with pytest.raises(Unsupported, match=f"{method} (continues from a memory|hides tokens)"):
        MethodRunner(tiny.build("qwen3_next"), methods.make(method, arguments))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["qwen3_5_text", "qwen3_next", "granitemoehybrid", "mamba2", "jamba"])
@torch.no_grad()
def test_hybrids_are_found(name, dtype):
    can = probe(smoke_models.build(name).to(dtype))
    assert "keeps more of its tokens than keys and values" in can.no_memory
    assert not (can.obeys_mask or can.obeys_positions or can.can_batch or can.can_generate)


@pytest.mark.parametrize(
    "kind", tiny.slow_but(["qwen3_next"], ["mamba", "xlstm", "falcon_mamba", "rwkv", "jamba", "recurrent_gemma"])
)
def test_a_model_without_a_memory_runs_icl_as_hf_does(kind, caplog):
    """The smoke test compares log-likelihoods and texts with those of `hf`."""
    scores = smoke.smoke(kind, special=smoke_models.TYPES)
    assert {name for name, by_task in scores.items() if not isinstance(by_task, str)} == {"icl"}
    assert "does not continue from its cache" in scores["deepthink"]
    (said,) = [record.message for record in caplog.records if "does not continue from its cache" in record.message]
    assert "every prompt is read as a whole, as --model hf does it" in said
