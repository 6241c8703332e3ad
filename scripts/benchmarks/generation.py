"""Texts behind demonstrations, beside `hf`."""

from __future__ import annotations

import argparse
import math
import statistics
from collections import defaultdict
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from rich.console import Console

from benchmarks.measuring import busy, machine, run, spread, table_of, watched
from benchmarks.workloads import METHODS, random_model, synthetic, train_tokenizer


def compare(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """1, 16 and 64 texts behind 20 demonstrations, and the same texts behind none.

    `hf` continues the first 16 texts at most, and what it takes is multiplied: its batches share nothing.
    """
    model, tokens = random_model(options.model, options.device), options.max_gen_toks
    tokenizer = train_tokenizer(synthetic(), model.config.vocab_size)
    shared: dict[str, Any] = {"tokenizer": tokenizer, "device": options.device}
    title = f"texts of {tokens} tokens behind 20 demonstrations; {options.model}, {machine()}"
    columns = ("texts", "model", "seconds", "times hf", "a step, ms", "of a step without demonstrations")
    table = table_of(title, *columns)
    hf = {n: HFLM(model, batch_size=n, **shared) for n in {min(texts, 16) for texts in options.texts}}
    ours = {m: METHODS[m](model, batch_size=max(options.texts), **shared) for m in options.methods}
    runs: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for repetition in range(options.repetitions):
        theirs = {n: measure_generation(lm, generated(n, 20, tokens)) for n, lm in hf.items()}
        for texts in options.texts:
            seconds, step = theirs[min(texts, 16)]
            runs[f"{texts} hf"].append((seconds * texts / min(texts, 16), step))
            for name, lm in ours.items():
                runs[f"{texts} {name}"].append(measure_generation(lm, generated(texts, 20, tokens)))
                runs[f"{texts} {name} alone"].append(measure_generation(lm, generated(texts, 0, tokens)))
            console.print(f"{texts} texts, {repetition + 1}/{options.repetitions}: {dict(runs)}")
    for texts, name in ((texts, name) for texts in options.texts for name in ("hf", *ours)):
        measured, alone = runs[f"{texts} {name}"], runs[f"{texts} {name} alone"]
        table.add_row(
            str(texts),
            name,
            spread([seconds for seconds, _ in measured]),
            spread([a / b for (a, _), (b, _) in zip(runs[f"{texts} hf"], measured, strict=True)]),
            spread([1e3 * step for _, step in measured]),
            spread([a / b for (_, a), (_, b) in zip(measured, alone, strict=True)]) if alone else "",
        )
    console.print(table)
    return runs


def generated(texts: int, demonstrations: int, tokens: int) -> list[Instance]:
    """Requests for texts of so many tokens, behind demonstrations of about 50 tokens each. Nothing ends them before."""
    asked = {"until": [], "max_gen_toks": tokens, "min_new_tokens": tokens, "do_sample": False}
    found = synthetic(documents=texts, demonstrations=demonstrations, options=1, shot=48)
    return [Instance("generate_until", {}, (i.args[0], asked), 0, metadata=i.metadata) for i in found]


def measure_generation(lm: Any, instances: list[Instance]) -> tuple[float, float]:
    """The seconds of all, and in the median those of a pass over one token of each text. On a CPU they are seconds of
    the processor, which what else runs on the machine does not count in."""
    steps: list[float] = []

    def begin(ids: torch.Tensor) -> None:
        steps.append(-busy() if ids.shape[1] == 1 else math.nan)

    def end() -> None:
        steps[-1] += busy()

    with watched(lm.model, begin, end):
        start = busy()
        run(lm, instances)
        seconds = busy() - start
    return seconds, statistics.median(step for step in steps if not math.isnan(step))
