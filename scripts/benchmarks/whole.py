"""A whole `lm_eval` command, ours beside `--model hf`, and what its parts take."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.clocked import PARTS
from benchmarks.measuring import machine, spread
from benchmarks.workloads import WORKLOADS, build_requests, tiny_model


def compare(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Processor seconds by part, with a model of one layer, from the command to the table of results. Each command is
    a process of its own, in turns."""
    found: dict[str, Any] = {}
    for workload in options.workloads:
        names, shots = WORKLOADS[workload]
        instances = build_requests(names, shots, options.tasks, options.documents, options.max_gen_toks)
        documents = len({(i.task_name, i.doc_id) for i in instances})
        tasks = list(dict.fromkeys(i.task_name for i in instances)) if options.tasks else names
        shared = ["--tasks", ",".join(map(str, tasks)), "--device", options.device]
        shared += [] if shots is None else ["--num_fewshot", str(shots)]
        shared += ["--limit", str(options.documents)] if options.documents else []
        if any(i.request_type == "generate_until" for i in instances):
            shared += ["--gen_kwargs", f"max_gen_toks={options.max_gen_toks}"]
        command = " ".join(["lm_eval --model ...", *shared])
        contenders = {name: ["--model", name] for name in options.methods}
        contenders |= {f"hf, batch {n}": ["--model", "hf", "--batch_size", str(n)] for n in options.batch_sizes}
        runs: dict[str, list[dict[str, list[float]]]] = defaultdict(list)
        with tempfile.TemporaryDirectory() as folder:
            for part in tiny_model(instances):
                part.save_pretrained(folder)
            shared += ["--model_args", f"pretrained={folder}", "--output_path", f"{folder}/results"]
            for repetition in range(options.repetitions):
                for contender, arguments in contenders.items():
                    runs[contender].append(timed([*arguments, *shared], Path(folder) / "seconds.json"))
                    wall = sum(wall for wall, _ in runs[contender][-1].values())
                    console.print(f"{workload} {repetition + 1}/{options.repetitions} {contender}: {wall:.1f} s")
        title = f"{command}\n\n{documents} documents, {len(instances)} requests, {machine()}"
        # As a table in Markdown, whose lines must not be broken.
        console.print(f"\n{title}\n\n{table(runs)}\n", markup=False, highlight=False, soft_wrap=True)
        found[workload] = {"documents": documents, "requests": len(instances), "wall, processor": runs}
    return found


def timed(arguments: list[str], file: Path) -> dict[str, list[float]]:
    """The wall time and the processor time of every part of `lm_eval ARGUMENTS`. Its output is shown only if it
    fails."""
    done = run([str(file), str(time.monotonic()), *arguments])
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    seconds: dict[str, list[float]] = json.loads(file.read_text(encoding="utf-8"))
    return seconds


def run(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    scripts = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join([scripts, *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "benchmarks.clocked", *arguments]
    # As in the command `lm_eval` itself, of which the start-up hook knows.
    environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ, "PYTHONPATH": path}
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def table(runs: dict[str, list[dict[str, list[float]]]]) -> str:
    """Processor seconds of the parts and of everything, and the wall time of everything; a column for each model."""
    rows = [["processor seconds", *(f"`{contender}`" for contender in runs)], ["---"] * (len(runs) + 1)]
    for part in PARTS:
        rows.append([part, *(spread([run[part][1] for run in of_one]) for of_one in runs.values())])
    for name, kind in (("everything", 1), ("everything, wall time", 0)):
        totals = [[sum(seconds[kind] for seconds in run.values()) for run in of_one] for of_one in runs.values()]
        rows.append([name, *map(spread, totals)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
