"""How time grows with documents, demonstrations, options and their tokens."""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console

from benchmarks.measuring import machine, measure, save, spread, table_of, time_encoding
from benchmarks.workloads import METHODS, random_model, synthetic, train_tokenizer


def compare(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Time a document, one size growing at a time."""
    sizes = {
        "documents": (8, 16, 32, 64, 128),
        "demonstrations": (0, 2, 4, 8, 16, 32),
        "options": (1, 2, 4, 8, 16),
        "length": (1, 2, 4, 8, 16),
    }
    model = random_model(options.model, options.device)
    tokenizer = train_tokenizer(synthetic(), model.config.vocab_size)
    lms = {m: METHODS[m](model, tokenizer=tokenizer, device=options.device) for m in options.methods}
    found: dict[str, Any] = {}
    for size, values in sizes.items():
        title = f"milliseconds a document (without encoding) against {size}; {options.model}, {machine()}"
        table = table_of(title, size, *lms)
        found[size] = {name: {} for name in lms}
        for value in values:
            instances = synthetic(**{"documents": options.documents, size: value})
            documents = len({i.doc_id for i in instances})
            cells = []
            for name, lm in lms.items():
                whole = [1e3 * measure(lm, instances).seconds / documents for _ in range(options.repetitions)]
                encoding = [1e3 * time_encoding(lm, instances) / documents for _ in range(options.repetitions)]
                queries = [total - shared for total, shared in zip(whole, encoding, strict=True)]
                found[size][name][value] = {"document": whole, "query": queries}
                cells.append(f"{spread(whole)}; {statistics.median(queries):.1f}")
            table.add_row(str(value), *cells)
        console.print(table)
    if options.figure:
        draw(found, options.figure)
    return found


def draw(found: dict[str, Any], path: Path) -> None:
    """The growth curves, median of the repetitions; dotted what is left without encoding the demonstrations."""
    labels = {"length": "tokens an option"}
    figure = Figure(figsize=(13, 3.2), layout="constrained")
    axes = figure.subplots(1, len(found), sharey=True)
    for axis, (size, curves) in zip(axes, found.items(), strict=True):
        for color, (name, curve) in enumerate(curves.items()):
            for what, style in (("document", "-"), ("query", ":")):
                times = [statistics.median(point[what]) for point in curve.values()]
                label = name if what == "document" else f"{name}, demonstrations encoded"
                axis.plot(list(curve), times, style, color=f"C{color}", marker="o", markersize=3, label=label)
        axis.set_xlabel(labels.get(size, size))
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("milliseconds a document")
    axes[0].set_ylim(bottom=0)  # after the last curve: it fixes the upper end, which all panels share
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=4, frameon=False)
    save(figure, path)
