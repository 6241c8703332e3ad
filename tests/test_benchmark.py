"""The benchmark's commands: that for a GPU, where there is none, and a whole `lm_eval`."""

from __future__ import annotations

import importlib
import json
import logging
import sys
from pathlib import Path

import pytest
import torch
import transformers

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


def test_without_a_gpu_the_command_for_one_says_what_it_skips(monkeypatch, tmp_path):
    """It writes its file all the same, with what can be known on a CPU."""
    monkeypatch.syspath_prepend(SCRIPTS)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    command = importlib.import_module("on_a_gpu")
    monkeypatch.setitem(command.PARTS, "Any order", lambda bench: ["as they are"])  # takes longest
    monkeypatch.setattr(sys, "argv", ["on_a_gpu.py", "--documents", "4", "--output", str(tmp_path / "gpu.md")])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 0
    parts = dict(part.split("\n", 1) for part in (tmp_path / "gpu.md").read_text().split("\n## ")[1:])
    assert list(parts) == list(command.PARTS)
    for name in ("Tests", "Out of memory", "Time"):
        assert parts[name].strip().splitlines()[-1].startswith("Skipped: "), name
    (_, _, found, share), *others = (
        line.strip("| ").split(" | ")
        for line in parts["`icl` beside `hf`"].splitlines()
        if line.startswith("| float32")
    )
    assert float(found) < 1e-4 and share == "100.0%" and not others


def test_a_whole_command_is_timed_beside_hf(monkeypatch, capsys, tmp_path):
    """Contenders take turns on the same tasks; what they print and what is written are their seconds."""
    monkeypatch.syspath_prepend(SCRIPTS)
    monkeypatch.setattr(logging.getLogger("lm_eval"), "setLevel", lambda level: None)  # also that of other tests
    monkeypatch.setattr(transformers.logging, "set_verbosity_error", lambda: None)
    benchmark, whole = importlib.import_module("benchmark"), importlib.import_module("benchmarks.whole")
    commands = []
    monkeypatch.setattr(whole, "timed", lambda command: commands.append(command) or (len(commands), 0.5))
    monkeypatch.setitem(whole.WORKLOADS, "demo", (["icl_demo_short"], 2))
    line = ["benchmark.py", "whole", "--workloads", "demo", "--documents", "2", "--repetitions", "2"]
    monkeypatch.setattr(sys, "argv", [*line, "--output", str(tmp_path / "measured.json")])
    benchmark.main()
    assert [command[:2] for command in commands] == [["--model", "icl"], ["--model", "hf"]] * 2
    assert all({"icl_demo_short", "--num_fewshot", "--limit"} < set(command) for command in commands)
    measured = json.loads((tmp_path / "measured.json").read_text())["found"]["demo"]
    assert (measured["documents"], measured["requests"]) == (2, 4)
    assert measured["wall, processor"] == {"icl": [[1, 0.5], [3, 0.5]], "hf, batch 1": [[2, 0.5], [4, 0.5]]}
    assert "2.00 (1.00 to 3.00)" in capsys.readouterr().out
