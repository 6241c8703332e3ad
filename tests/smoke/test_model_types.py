"""Tiny models of every model type of transformers, and the smoke test on them."""

import os
import sys

import pytest
import torch
from transformers import AutoConfig

from lm_eval_icl.errors import InputError
from lm_eval_icl.methods import NAMES
from lm_eval_icl.smoke import tiny
from tests.smoke import model_types
from tests.smoke import sweep as sweep_of_types
from tests.smoke.sweep import PAGE, Result, result_of, row, sweep


@pytest.mark.parametrize("arch", ["llama", "gemma3n_text", "deepseek_v32", "qwen3_next", "jamba", "gpt_oss"])
@torch.no_grad()
def test_every_weight_of_a_tiny_model_makes_a_difference(arch):
    model = model_types.build(arch)
    ids = torch.arange(5, 105)[None] * 7
    expected = model(ids).logits
    for name, weight in model.named_parameters():
        before = weight.clone()
        weight.add_(torch.randn_like(weight) * 0.3)
        assert (model(ids).logits - expected).abs().max() > 1e-5, name
        weight.copy_(before)


@pytest.mark.slow
@pytest.mark.pinned
def test_a_tiny_model_has_every_kind_of_layer():
    for arch in set(tiny.types()) - set(model_types.NONE) - {"gemma3n"}:  # which needs a package more
        model = model_types.build(arch)
        default, config = (each.get_text_config() for each in (AutoConfig.for_model(arch), model.config))
        for name in ("layer_types", "mlp_layer_types"):
            kinds = set(getattr(default, name, None) or ())
            assert kinds <= set(getattr(config, name, None) or ()), arch
        assert sum(weight.numel() for weight in model.parameters()) < 5_000_000, arch


@pytest.mark.slow
def test_sweep_goes_on_after_what_is_wrong(tmp_path, monkeypatch):
    """After a method that ends the process, and after a type that takes too long."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os\nfrom lm_eval_icl.methods.icl import ICL\n"
        "ICL.bind = lambda self, model: os._exit(3) if model.config.model_type == 'gpt2' else self\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))  # of the other process
    record = tmp_path / "results.jsonl"
    died, fine, none = sweep(["gpt2", "llama", "musicgen"], limit=1, record=record)
    assert (died.status, died.why) == ("WRONG", "the process died (exit code 3)")
    assert (fine.status, fine.ran) == ("exact", [*NAMES]) and fine.seconds > 0
    assert (none.status, none.why) == ("none", "it generates sound")
    (slow,) = sweep(["llama"], time_limit=0.1)
    assert (slow.status, slow.why) == ("WRONG", "not done after 0.1 seconds")
    # What is recorded is not run again.
    monkeypatch.setattr(sweep_of_types, "_Worker", None)
    assert list(sweep(["llama", "gpt2"], record=record)) == [fine, died]
    record.write_text("no")
    with pytest.raises(InputError, match=r"results.jsonl: not a record of results .*Remove it"):
        list(sweep(["llama"], record=record))
    with pytest.raises(InputError, match=r"nowhere.x: results cannot be kept there .*Name another file"):
        list(sweep(["llama"], record=tmp_path / "nowhere" / "x"))


# The table of docs/reports/model-types.md. Made again by: python -m tests.smoke.sweep

TYPE_ROWS = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.count("|") == 4]
# Of every kind: plain, without positions, with windows, experts, latent and linear attention, refused.
SAMPLE = "bart bert deepseek_v3 gemma3 gpt2 zamba2".split()


@pytest.mark.pinned
def test_every_model_type_has_a_row():
    types = [line.split("`")[1] for line in TYPE_ROWS if line.startswith("| `")]
    assert sorted(types) == sorted(tiny.types()) and len(types) > 180


@pytest.mark.slow
@pytest.mark.pinned
@pytest.mark.parametrize("arch", SAMPLE)
def test_rows_of_model_types_are_what_is_found_now(arch):
    assert row(result_of(arch)) in TYPE_ROWS


def test_a_row_of_what_is_wrong():
    why = "smoke test on llama: icl: a log-likelihood is -1.0, with hf -2.0 (5.0e-01 of its size)"
    assert row(Result("llama", "WRONG", why)).startswith("| `llama` | WRONG | smoke test on llama: icl: a log")
