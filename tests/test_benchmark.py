"""The benchmark's command for a GPU, where there is none."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch


def test_without_a_gpu_the_command_for_one_says_so_in_a_line(monkeypatch, capsys):
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[1] / "scripts")
    monkeypatch.setattr(sys, "argv", ["benchmark.py", "gpu"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        importlib.import_module("benchmark").main()
    assert ended.value.code == 2
    *_, last = capsys.readouterr().err.splitlines()
    assert last == (
        "benchmark.py: error: gpu: there is no GPU here (torch.cuda.is_available() is False); `tasks` runs on a CPU"
    )
