"""Encoding ever more demonstrations."""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console

from benchmarks.measuring import busy, machine, peak, reset_peak, save, spread, table_of
from benchmarks.workloads import METHODS, build_requests, random_model, train_tokenizer


def compare(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Processor seconds and memory that encoding ever more demonstrations takes in every method, up to a query."""
    found: dict[str, dict[int, Any]] = {name: {} for name in options.methods}
    title = f"Encoding demonstrations of SST-2, {options.model}, {machine()}"
    table = table_of(title, "demonstrations", "tokens", "model", "seconds", "times icl's", "peak memory, MiB")
    model = random_model(options.model, options.device)
    requests = {n: build_requests(["icl_sst2"], n, tasks=1, documents=1, max_gen_toks=0) for n in options.shots}
    tokenizer = train_tokenizer(requests[max(options.shots)], model.config.vocab_size)
    for shots, instances in requests.items():
        seconds: dict[str, list[float]] = defaultdict(list)
        peaks: dict[str, int] = defaultdict(int)
        for _ in range(options.repetitions):
            for name in options.methods:
                lm = METHODS[name](model, tokenizer=tokenizer, device=options.device)
                method, prompt = lm.runner.method, lm.tokenize(instances[:1])[0].prompt
                before, start = reset_peak(), busy()
                with lm.runner.inference_mode():
                    method.encode_queries(model, [(prompt.context, prompt.query)], partial(method.encode, model))
                seconds[name].append(busy() - start)
                peaks[name] = max(peaks[name], peak() - before)
        tokens = len(prompt.context.tokens)
        for name, own in seconds.items():
            ratios = [one / icl for one, icl in zip(own, seconds["icl"], strict=True)]
            row = (str(shots), str(tokens), name, spread(own), spread(ratios), f"{peaks[name] / 2**20:.0f}")
            table.add_row(*row)
            found[name][shots] = {"tokens": tokens, "seconds": own, "peak": peaks[name]}
            console.print(*row)
        if options.figure:  # so far: the last sizes take the longest
            draw_shots(found, options.figure)
    console.print(table)
    return found


def draw_shots(found: dict[str, Any], path: Path) -> None:
    """Memory and time of every method against the tokens of the demonstrations."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    axes = figure.subplots(1, 2)
    for name, curve in found.items():
        tokens = [point["tokens"] for point in curve.values()]
        axes[0].plot(tokens, [point["peak"] / 2**20 for point in curve.values()], marker="o", markersize=3, label=name)
        medians = [statistics.median(point["seconds"]) for point in curve.values()]
        axes[1].plot(tokens, medians, marker="o", markersize=3)
    for axis, label in zip(axes, ("peak memory, MiB", "processor seconds"), strict=True):
        axis.set_xlabel("tokens of demonstrations")
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=len(found), frameon=False)
    save(figure, path)
