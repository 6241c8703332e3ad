"""Where sharing the demonstrations pays: `hf` beside `icl`, over their length and the documents."""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path
from statistics import median_high
from typing import Any

from lm_eval.models.huggingface import HFLM
from matplotlib.figure import Figure
from rich.console import Console

from benchmarks.measuring import busy, machine, run, save, spread, table_of
from benchmarks.workloads import METHODS, random_model, synthetic, train_tokenizer

LENGTHS = (32, 128, 512, 2048)  # words of demonstrations, of about one token each
DOCUMENTS = (1, 4, 16, 64)
SHOT = 32  # words of a demonstration
MOST = 40_000  # a cell of more words is left out: it takes as long as all others
FEW = 4_000  # a cell of more words is measured once


def compare(options: argparse.Namespace, console: Console) -> None:
    """How many times as fast as `hf` `icl` is, in processor seconds, the two taking turns."""
    model = random_model(options.model, options.device)
    tokenizer = train_tokenizer(synthetic(), model.config.vocab_size)
    shared: dict[str, Any] = {"tokenizer": tokenizer, "device": options.device}
    icl = METHODS["icl"](model, **shared)
    hf = HFLM(model, batch_size=max(options.batch_sizes), **shared)
    for lm in (icl, hf):
        seconds_of(lm, synthetic(1))  # what happens once is not measured
    title = f"times hf; {options.model}, {machine()}"
    table = table_of(title, "tokens", *(f"{number} documents" for number in DOCUMENTS))
    ratios: dict[int, dict[int, list[float]]] = {}
    for length in LENGTHS:
        ratios[length] = defaultdict(list)
        for documents in DOCUMENTS:
            if length * documents > MOST:
                continue
            instances = synthetic(documents, demonstrations=length // SHOT, shot=SHOT)
            for _ in range(options.repetitions if length * documents <= FEW else 1):
                own = seconds_of(icl, instances)
                ratios[length][documents].append(seconds_of(hf, instances) / own)
        cells = [spread(values) for values in ratios[length].values()]
        table.add_row(str(length), *cells)
        console.print(length, *cells, sep="; ")
    console.print(table)
    if options.figure:
        draw(ratios, options.figure)


def seconds_of(lm: Any, instances: list[Any]) -> float:
    start = busy()
    run(lm, instances)
    return busy() - start


def draw(ratios: dict[int, dict[int, list[float]]], path: Path) -> None:
    """A curve for each number of documents, from the lowest to the highest ratio."""
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axis = figure.subplots()
    for color, documents in enumerate(DOCUMENTS):
        points = [part[documents] for part in ratios.values() if documents in part]
        lengths = LENGTHS[: len(points)]
        middle = list(map(median_high, points))
        label = f"{documents} documents" if documents > 1 else "1 document"
        axis.plot(lengths, middle, color=f"C{color}", marker="o", markersize=3, label=label)
        low = list(map(min, points))
        high = list(map(max, points))
        axis.fill_between(lengths, low, high, color=f"C{color}", alpha=0.2, linewidth=0)
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    axis.set_xticks(LENGTHS, map(str, LENGTHS))
    ticks = (0.5, 1, 2, 4, 8, 16, 32)
    axis.set_yticks(ticks, map(str, ticks))
    axis.set_xlabel("shared tokens")
    axis.set_ylabel("times as fast as hf")
    axis.grid(alpha=0.3)
    axis.legend(frameon=False)
    save(figure, path)
