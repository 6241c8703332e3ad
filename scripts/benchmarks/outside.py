"""What a document costs outside the model."""

from __future__ import annotations

import argparse
import gc
import time
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import nn

from benchmarks.measuring import machine, spread
from benchmarks.workloads import METHODS, WORKLOADS, build_requests, tiny_model


def compare(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Processor milliseconds a document, with a model of one layer: turning requests into ids and checking them, the
    model, and the rest (grouping, packing, masks, reading scores)."""
    found: dict[str, Any] = {}
    for workload in options.workloads:
        names, shots = WORKLOADS[workload]
        instances = build_requests(names, shots, options.tasks, options.documents, options.max_gen_toks)
        documents = len({(i.task_name, i.doc_id) for i in instances})
        model, tokenizer = tiny_model(instances)
        lms = {m: METHODS[m](model, tokenizer=tokenizer, device="cpu") for m in options.methods}
        inside = 0.0

        def enter(module: nn.Module, args: Any) -> None:
            nonlocal inside
            inside -= time.process_time()

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            nonlocal inside
            inside += time.process_time()

        model.register_forward_pre_hook(enter)
        model.register_forward_hook(leave)
        parts: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in lms}
        for _ in range(options.repetitions):
            for name, lm in lms.items():
                gc.collect()
                lm.begin([SimpleNamespace(instances=instances)])
                inside, start = 0.0, time.process_time()
                lm.run.check()
                checked = time.process_time()
                lm.loglikelihood(instances, disable_tqdm=True)
                end = time.process_time()
                times = {"requests": checked - start, "model": inside, "rest": end - checked - inside}
                times["outside"] = times["requests"] + times["rest"]
                for part, seconds in times.items():
                    parts[name][part].append(1e3 * seconds / documents)
        title = f"{workload}: processor milliseconds a document, {documents} documents, {machine()}"
        table = Table("model", "requests as ids", "model", "rest", "outside", title=title)
        for name, times_of in parts.items():
            table.add_row(name, *map(spread, times_of.values()))
        console.print(table)
        found[workload] = {"documents": documents, "milliseconds": parts}
    return found
