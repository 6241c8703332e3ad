"""The benchmark's commands: that for a GPU, where there is none, and a whole `lm_eval` on four documents."""

from __future__ import annotations

import importlib
import json
import logging
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch
import transformers

from tests import processes

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(SCRIPTS)
    monkeypatch.setattr(logging.getLogger("lm_eval"), "setLevel", lambda level: None)  # also that of other tests
    monkeypatch.setattr(transformers.logging, "set_verbosity_error", lambda: None)
    return importlib.import_module("benchmark")


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
    for name in ("Tests", "Two devices", "Out of memory", "Time"):
        assert parts[name].strip().splitlines()[-1].startswith("Skipped: "), name
    (_, _, found, share), *others = (
        line.strip("| ").split(" | ")
        for line in parts["`icl` beside `hf`"].splitlines()
        if line.startswith("| float32")
    )
    assert float(found) < 1e-4 and share == "100.0%" and not others


def forked(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """`python -m benchmarks.clocked ARGUMENTS`, in a process that has imported most of it."""
    code = f"import sys; sys.path.insert(0, {str(SCRIPTS)!r}); from benchmarks import clocked; clocked.main()"
    return processes.python(code, *arguments)


@pytest.mark.slow
def test_a_whole_command_by_part(benchmark, monkeypatch, capsys, tmp_path):
    """Both contenders go through every part, and the parts of each are all of its time."""
    whole = importlib.import_module("benchmarks.whole")
    monkeypatch.setattr(whole, "run", forked)
    monkeypatch.setitem(whole.WORKLOADS, "demo", (["icl_demo_short", "icl_demo_long"], 2))
    line = ["benchmark.py", "whole", "--workloads", "demo", "--tasks", "0", "--documents", "2", "--repetitions", "1"]
    monkeypatch.setattr(sys, "argv", [*line, "--output", str(tmp_path / "found.json")])
    start = time.monotonic()
    benchmark.main()
    elapsed = time.monotonic() - start
    printed = capsys.readouterr().out
    rows = dict(row.strip("| ").split(" | ", 1) for row in printed.splitlines() if row.startswith("| "))
    assert rows["processor seconds"] == "`icl` | `hf, batch 1`"
    found = json.loads((tmp_path / "found.json").read_text())["found"]["demo"]
    assert (found["documents"], found["requests"]) == (4, 8)
    (icl,), (hf,) = found["wall, processor"].values()
    for seconds in (icl, hf):
        assert list(rows)[2:-2] == list(seconds)
        assert all(0 < kind < elapsed for part in seconds.values() for kind in part)
    assert sum(wall for wall, _ in [*icl.values(), *hf.values()]) < elapsed
    busy = [sum(processor for _, processor in seconds.values()) for seconds in (icl, hf)]
    assert rows["everything"] == " | ".join(f"{total:.2f} ({total:.2f} to {total:.2f})" for total in busy)


def test_a_second_counts_in_the_innermost_part(benchmark, monkeypatch):
    clocked = importlib.import_module("benchmarks.clocked")
    clock = iter([12.0, 15.0, 19.0, 24.0])
    monkeypatch.setattr(clocked.time, "monotonic", lambda: next(clock))
    clocks = clocked.Clocks(10.0)
    inner = clocks.around(clocked.BUILDING, lambda: 1)
    assert clocks.around(clocked.LOADING, inner)() == 1
    wall = {part: seconds for part, (seconds, _) in clocks.seconds.items() if seconds}
    assert wall == {clocked.IMPORTING: 2.0, clocked.LOADING: 3.0 + 5.0, clocked.BUILDING: 4.0}
