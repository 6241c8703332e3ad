"""Half precision changes few predictions: the script that measures it, on a few documents."""

import runpy
import sys
from pathlib import Path

import pytest

from lm_eval_icl.methods import NAMES

SCRIPT = str(Path(__file__).resolve().parents[1] / "scripts/precision.py")


@pytest.mark.slow
def test_every_method_predicts_alike_in_half_precision(monkeypatch, capsys):
    arguments = ["--tasks", "icl_demo_short", "--limit", "20", "--models", ",".join(NAMES)]
    monkeypatch.setattr(sys, "argv", [SCRIPT, *arguments])
    runpy.run_path(SCRIPT, run_name="__main__")
    table = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert [name for name, *_ in table[2:]] == list(NAMES)
    for name, documents, *cells in table[2:]:
        assert documents == "20"
        for share, apart in zip(cells[::2], cells[1::2], strict=True):
            assert float(share.removesuffix(" %")) >= 90, name
            assert 0 < float(apart) < 1, name  # that of another dtype, and no other method's


def test_what_it_compares():
    compare = runpy.run_path(SCRIPT)["compare"]
    share, apart = compare(
        {("t", 0): [-1.0, -2.0], ("t", 1): [-3.0, -2.0]}, {("t", 0): [-2.5, -2.0], ("t", 1): [-3.0, -2.5]}
    )
    assert (share, apart) == (0.5, pytest.approx(1.5))
