"""A whole `lm_eval` command with our models, compared with `--model hf`."""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.measuring import machine, spread
from benchmarks.workloads import WORKLOADS, build_requests, tiny_model


def compare(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """The seconds from the command to the table of results, with a model of one layer. Each command is another process,
    and the commands take turns."""
    measured: dict[str, Any] = {}
    for workload in options.workloads:
        names, shots = WORKLOADS[workload]
        instances = build_requests(
            names, shots, options.tasks, options.documents, options.max_gen_toks
        )
        tasks = list(dict.fromkeys(i.task_name for i in instances)) if options.tasks else names
        shared = ["--tasks", ",".join(map(str, tasks)), "--device", options.device]
        shared += [] if shots is None else ["--num_fewshot", str(shots)]
        shared += ["--limit", str(options.documents)] if options.documents else []
        if any(i.request_type == "generate_until" for i in instances):
            shared += ["--gen_kwargs", f"max_gen_toks={options.max_gen_toks}"]
        contenders = {name: ["--model", name] for name in options.methods}
        contenders |= {
            f"hf, batch {n}": ["--model", "hf", "--batch_size", str(n)] for n in options.batch_sizes
        }
        runs: dict[str, list[tuple[float, float]]] = defaultdict(list)
        with tempfile.TemporaryDirectory() as folder:
            for part in tiny_model(instances):
                part.save_pretrained(folder)
            command = [
                *shared,
                "--model_args",
                f"pretrained={folder}",
                "--output_path",
                f"{folder}/results",
            ]
            for repetition in range(options.repetitions):
                for contender, arguments in contenders.items():
                    runs[contender].append(timed([*arguments, *command]))
                    wall, _ = runs[contender][-1]
                    console.print(
                        f"{workload} {repetition + 1}/{options.repetitions} {contender}: {wall:.1f} s"
                    )
        documents = len({(i.task_name, i.doc_id) for i in instances})
        title = f"lm_eval --model ... {' '.join(shared)}: {documents} documents, {len(instances)} requests, {machine()}"
        table = Table("model", "wall seconds", "processor seconds", title=title)
        for contender, seconds in runs.items():
            table.add_row(contender, *map(spread, zip(*seconds, strict=True)))
        console.print(table)
        measured[workload] = {
            "documents": documents,
            "requests": len(instances),
            "wall, processor": runs,
        }
    return measured


def timed(arguments: list[str]) -> tuple[float, float]:
    """The wall and the processor seconds of `lm_eval ARGUMENTS`. Its output is shown only if it fails."""
    start, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    # As in the command `lm_eval` itself, of which the start-up hook knows.
    environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    command = [sys.executable, "-m", "lm_eval", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.monotonic() - start, processor
