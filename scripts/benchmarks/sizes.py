"""The cost of methods on requests of chosen sizes: of queries, of many demonstrations, and of generated texts."""

from __future__ import annotations

import argparse
import math
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from matplotlib.figure import Figure
from rich.console import Console

from benchmarks.measuring import (
    busy,
    machine,
    measure,
    peak,
    reset_peak,
    run,
    save,
    spread,
    table_of,
    time_encoding,
    watched,
)
from benchmarks.workloads import METHODS, build_requests, random_model, synthetic, train_tokenizer


def methods(options: argparse.Namespace, console: Console) -> None:
    """The time to encode eight demonstrations, and then to run a query, in every method."""
    instances = synthetic(documents=options.documents)
    model = random_model(options.model, options.device)
    tokenizer = train_tokenizer(instances, model.config.vocab_size)
    lms = {
        m: METHODS[m](model, tokenizer=tokenizer, device=options.device) for m in options.methods
    }
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
        ratios = np.divide(scoring[name], scoring["icl"])
        encode = spread(np.multiply(1e3, encoding[name]))
        if lms[name].method.memory_depends_on_query:
            encode = "with each query"
        query = spread(np.multiply(1e3, scoring[name]))
        table.add_row(name, encode, query, spread(ratios), f"{peaks[name] / 2**20:.0f}")
    console.print(table)


def shots(options: argparse.Namespace, console: Console) -> None:
    """The processor seconds and the memory with which every method encodes growing numbers of demonstrations."""
    # Of each method: (tokens, peak in MiB, seconds) for each number of demonstrations.
    found: dict[str, list[tuple[int, float, float]]] = defaultdict(list)
    title = f"Encoding demonstrations of SST-2, {options.model}, {machine()}"
    table = table_of(
        title, "demonstrations", "tokens", "model", "seconds", "times icl's", "peak memory, MiB"
    )
    model = random_model(options.model, options.device)
    requests = {
        n: build_requests(["icl_sst2"], n, tasks=1, documents=1, max_gen_toks=0)
        for n in options.shots
    }
    tokenizer = train_tokenizer(requests[max(options.shots)], model.config.vocab_size)
    for number, instances in requests.items():
        seconds: dict[str, list[float]] = defaultdict(list)
        peaks: dict[str, int] = defaultdict(int)
        for _ in range(options.repetitions):
            for name in options.methods:
                lm = METHODS[name](model, tokenizer=tokenizer, device=options.device)
                prompt = lm.tokenize(instances[:1])[0].prompt
                before = reset_peak()
                start = busy()
                with lm.runner.inference_mode():
                    lm.runner.method.encoded(lm.runner.encoder, prompt.context, prompt.query)
                seconds[name].append(busy() - start)
                peaks[name] = max(peaks[name], peak() - before)
        tokens = len(prompt.context.tokens)
        for name, own in seconds.items():
            ratios = np.divide(own, seconds["icl"])
            memory = peaks[name] / 2**20
            row = (str(number), str(tokens), name, spread(own), spread(ratios), f"{memory:.0f}")
            table.add_row(*row)
            found[name].append((tokens, memory, statistics.median(own)))
            console.print(*row)
        if options.figure:  # so far: the last sizes take the longest
            draw_shots(found, options.figure)
    console.print(table)


def draw_shots(found: dict[str, Any], path: Path) -> None:
    """Memory and time of every method against the tokens of the demonstrations."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    axes = figure.subplots(1, 2)
    for name, curve in found.items():
        tokens, peaks, medians = zip(*curve, strict=True)
        axes[0].plot(tokens, peaks, marker="o", markersize=3, label=name)
        axes[1].plot(tokens, medians, marker="o", markersize=3)
    for axis, label in zip(axes, ("peak memory, MiB", "processor seconds"), strict=True):
        axis.set_xlabel("tokens of demonstrations")
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(found), frameon=False)
    save(figure, path)


def generation(options: argparse.Namespace, console: Console) -> None:
    """1, 16 and 64 texts after 20 demonstrations, and the same texts without demonstrations. On a CPU, `hf` continues
    at most the first 16 texts, and its time is multiplied, since its batches share nothing."""
    most = 16 if options.device == "cpu" else max(options.texts)
    model = random_model(options.model, options.device)
    tokens = options.max_gen_toks
    tokenizer = train_tokenizer(synthetic(), model.config.vocab_size)
    shared: dict[str, Any] = {"tokenizer": tokenizer, "device": options.device}
    title = f"texts of {tokens} tokens after 20 demonstrations; {options.model}, {machine()}"
    table = table_of(
        title,
        "texts",
        "model",
        "seconds",
        "times hf",
        "a step, ms",
        "of a step without demonstrations",
    )
    sizes = {min(texts, most) for texts in options.texts}
    hf = {n: HFLM(model, batch_size=n, **shared) for n in sizes}
    batch_size = max(options.texts)
    ours = {m: METHODS[m](model, batch_size=batch_size, **shared) for m in options.methods}
    runs: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for repetition in range(1, options.repetitions + 1):
        theirs = {n: measure_generation(lm, generated(n, 20, tokens)) for n, lm in hf.items()}
        for texts in options.texts:
            seconds, step = theirs[min(texts, most)]
            runs[f"{texts} hf"].append((seconds * texts / min(texts, most), step))
            for name, lm in ours.items():
                measured = measure_generation(lm, generated(texts, 20, tokens))
                runs[f"{texts} {name}"].append(measured)
                alone = measure_generation(lm, generated(texts, 0, tokens))
                runs[f"{texts} {name} alone"].append(alone)
            console.print(f"{texts} texts, {repetition}/{options.repetitions}: {dict(runs)}")
    for texts in options.texts:
        hf_seconds, _ = np.transpose(runs[f"{texts} hf"])
        for name in ("hf", *ours):
            seconds, step = np.transpose(runs[f"{texts} {name}"])
            row = [spread(seconds), spread(hf_seconds / seconds), spread(1e3 * step)]
            if name in ours:
                _, step_alone = np.transpose(runs[f"{texts} {name} alone"])
                row.append(spread(step / step_alone))
            table.add_row(str(texts), name, *row)
    console.print(table)


def generated(texts: int, demonstrations: int, tokens: int) -> list[Instance]:
    """Requests for texts of a given length, after demonstrations of about 50 tokens each. No text ends earlier."""
    settings = {"until": [], "max_gen_toks": tokens, "min_new_tokens": tokens, "do_sample": False}
    requests = synthetic(documents=texts, demonstrations=demonstrations, options=1, shot=48)
    return [
        Instance("generate_until", {}, (i.args[0], settings), 0, metadata=i.metadata)
        for i in requests
    ]


def measure_generation(lm: Any, instances: list[Instance]) -> tuple[float, float]:
    """The seconds of all texts, and the median seconds of a pass over one token of each text. On a CPU, they are the
    processor's seconds, which do not depend on other work of the machine."""
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
