"""Tiny models of every model type of transformers, and the smoke test on them."""

import pytest
import torch
from transformers import AutoConfig

from lm_eval_icl.smoke import tiny
from scripts.sweep import PAGE, read_table, row, summary
from tests.smoke import model_types


@pytest.mark.parametrize("arch", ["gemma3n_text", "deepseek_v32", "jamba"])
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
    without = {*model_types.NONE, "gemma3n"}  # gemma3n needs a package more
    for arch in set(tiny.types()) - without:
        model = model_types.build(arch)
        default = AutoConfig.for_model(arch).get_text_config()
        config = model.config.get_text_config()
        for name in ("layer_types", "mlp_layer_types"):
            kinds = set(getattr(default, name, None) or ())
            assert kinds <= set(getattr(config, name, None) or ()), arch
        assert sum(weight.numel() for weight in model.parameters()) < 5_000_000, arch


# The table of docs/reports. Made again by: python -m scripts.sweep

ROWS = read_table()
# Refused, and with experts and latent attention.
SAMPLE = ["bert", "deepseek_v3"]


@pytest.mark.pinned
def test_every_model_type_has_a_row():
    assert sorted(row.type for row in ROWS) == sorted(tiny.types())
    assert len(ROWS) > 180


@pytest.mark.pinned
def test_the_page_sums_the_table_up():
    assert PAGE.read_text(encoding="utf-8").endswith(f"\n\n{summary(ROWS)}\n")


@pytest.mark.slow
@pytest.mark.pinned
@pytest.mark.parametrize("arch", SAMPLE)
def test_rows_of_model_types_are_what_is_found_now(arch):
    assert row(arch) in ROWS
