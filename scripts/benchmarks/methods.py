"""What a query costs in every method."""

from __future__ import annotations

import argparse
from collections import defaultdict
from typing import Any

from rich.console import Console

from benchmarks.measuring import machine, measure, spread, table_of, time_encoding
from benchmarks.workloads import METHODS, random_model, synthetic, train_tokenizer


def compare(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """What it takes to encode eight demonstrations, and a query then, in every method."""
    instances = synthetic(documents=options.documents)
    model = random_model(options.model, options.device)
    tokenizer = train_tokenizer(instances, model.config.vocab_size)
    lms = {m: METHODS[m](model, tokenizer=tokenizer, device=options.device) for m in options.methods}
    encoding: dict[str, list[float]] = defaultdict(list)
    scoring: dict[str, list[float]] = defaultdict(list)
    peaks: dict[str, int] = defaultdict(int)
    for _ in range(options.repetitions):
        for name, lm in lms.items():
            everything = measure(lm, instances)
            peaks[name] = max(peaks[name], everything.peak)
            encoding[name].append(time_encoding(lm, instances))
            scoring[name].append((everything.seconds - encoding[name][-1]) / options.documents)
    title = f"8 demonstrations of 60 tokens, queries of 50, 4 options; {options.model}, {machine()}"
    table = table_of(title, "model", "encode, ms", "a query, ms", "times icl's", "peak memory, MiB")
    for name in lms:
        ratios = [own / plain for own, plain in zip(scoring[name], scoring["icl"], strict=True)]
        encode = spread([1e3 * t for t in encoding[name]])
        encode = "with each query" if lms[name].method.memory_depends_on_query else encode
        row = (encode, spread([1e3 * t for t in scoring[name]]), spread(ratios), f"{peaks[name] / 2**20:.0f}")
        table.add_row(name, *row)
    console.print(table)
    return {"encode": encoding, "query": scoring, "peak": peaks}
