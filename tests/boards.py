"""Made-up boards for tests of the page: random numbers, but seeded, and consistent with each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lm_eval_icl.results.board import AVERAGE, Answered, Board, Cell, Column, Entry, PromptSet
from lm_eval_icl.results.records import LeftOut, Run, TaskResult
from lm_eval_icl.results.statistics import Difference, Estimate

METHODS = (
    ("icl", ""),
    ("hf", ""),
    ("invicl", ""),
    ("deepthink", "T=5, eta=0.01"),
    ("batchicl", "layer=15"),
    ("pcw", ""),
)
CHECKPOINTS = ("meta-llama/Llama-2-7b-hf", "gpt2-large", "EleutherAI/pythia-1.4b")
TASKS = ("icl_sst2", "icl_sst5", "icl_mr", "icl_agnews", "icl_trec", "icl_perplexity")


def _estimate(mean: float, error: float, sets: int, documents: int, how: str = "crossed") -> Estimate:
    parts = (0.8 * error, 0.6 * error) if sets > 1 else (None, None)
    return Estimate(mean, mean - 2.3 * error, mean + 2.3 * error, error, 6.4, documents, sets, *parts, how)


def _difference(mean: float, error: float, sets: int, documents: int, how: str = "crossed") -> Difference:
    found = _estimate(mean, error, sets, documents, how)
    p = math.erfc(abs(mean / error) / math.sqrt(2))
    better = sum(math.sin(7 * number) * error + mean > 0 for number in range(sets))
    return Difference(
        mean, found.low, found.high, error, 6.4, p, 3.2 * error, documents, sets, found.error_documents,
        found.error_sets, better, sets - better, 2 / 2**sets if sets > 1 else None, how,
    )  # fmt: skip


def make(
    checkpoints: Sequence[str] = CHECKPOINTS,
    methods: Sequence[tuple[str, str]] = METHODS[:4],
    tasks: Sequence[str] = TASKS,
    seeds: int = 5,
    orders: int = 1,
    note: str = "the results' own mean is not that of its samples",
    details: str = "main, float16",
) -> Board:
    """Every checkpoint under every method. The last task is a perplexity: lower is better, no percent.

    The last entry has no result on the first task, the last but one has no samples. A group holds the first half of the
    tasks.
    """
    draw = np.random.default_rng(0)
    half = tasks[: max(1, len(tasks) // 2)]
    columns = [
        Column(AVERAGE, "average", "acc", True, True, {task: 1 / (len(tasks) - 1) for task in tasks[:-1]}),
        Column("first half", "group", "acc", True, True, {task: 1 / len(half) for task in half}),
        *(
            Column(task, "task", "acc", True, True, {task: 1.0})
            if task != tasks[-1]
            else Column(task, "task", "word_perplexity", False, False, {task: 1.0})
            for task in tasks
        ),
    ]  # fmt: skip
    names = [(checkpoint, *method) for checkpoint in checkpoints for method in methods]
    skill = {name: draw.normal(0, 0.02) + 0.04 * (name[0] == checkpoints[0]) for name in names}
    names.sort(key=lambda name: -skill[name])
    digests = {name: f"{place:08x}" for place, name in enumerate(names)}
    means = {
        (name, column.name): float(
            (0.6 + 0.25 * math.sin(3 * at) + skill[name] + draw.normal(0, 0.01))
            if column.percent
            else 14 - 20 * skill[name]
        )
        for name in names
        for at, column in enumerate(columns)
    }
    scale = {column.name: 1.0 if column.percent else 30.0 for column in columns}
    entries = []
    for place, name in enumerate(names):
        checkpoint, method, arguments = name
        runs = [_run(checkpoint, method, seed, order, tasks) for seed in range(seeds) for order in range(orders)]
        base = (checkpoint, *methods[0])
        cells = {}
        for at, column in enumerate(columns):
            if place == len(names) - 1 and column.name == tasks[0]:
                continue
            is_task, has_samples = column.kind == "task", place != len(names) - 2
            count, documents = (seeds, 500 + 100 * at) if is_task else (seeds * len(column.weights), 4000)
            mean = means[name, column.name]
            error = 0.012 * scale[column.name]
            difference = None
            if name != base and has_samples:
                difference = _difference(mean - means[base, column.name], error / 2, count, documents)
            how = "crossed" if has_samples else "reported"
            marks = ["confirmed"] if at == 2 and place == 0 else []
            marks += [] if has_samples else ["aggregate only"]
            marks += [note] if at == 3 and place == 1 else []
            cells[column.name] = Cell(
                _estimate(mean, error, count if has_samples else 1, documents, how),
                difference,
                None if difference is None else min(1.0, difference.p * len(methods)),
                (max(1, place), min(len(names), place + 3)) if has_samples else None,
                place < 2,
                _sets(runs, orders, mean, scale[column.name], draw) if is_task and has_samples else (),
                _estimate(0.03 + 0.002 * place, 0.004, count, documents) if orders > 1 else None,
                (mean - 0.25) / 0.75 if column.percent else None,
                tuple(marks),
                3 * (place == 1),
            )  # fmt: skip
        command = f"lm_eval --model {method} --model_args pretrained={checkpoint} --tasks {','.join(tasks)} --seed 0"
        entries.append(
            Entry(
                digests[name], checkpoint, details, method, arguments, f"{8 if place % 5 else 4} shots",
                tuple(runs), cells,
                124_439_808 * (1 + checkpoints.index(checkpoint)), 1_234_567 + place, 3600.5 * (place + 1), command,
            )
        )  # fmt: skip
    pairs = {
        (digests[one], digests[other]): {
            column.name: _difference(
                means[one, column.name] - means[other, column.name], 0.007 * scale[column.name], seeds, 700
            )
            for column in columns
            if column.name in entries[i].cells and column.name in entries[j].cells
        }
        for i, one in enumerate(names)
        for j, other in enumerate(names)
        if i < j and entries[i].cells[AVERAGE].rank and entries[j].cells[AVERAGE].rank
    }
    baseline = {digests[name]: digests[name[0], *methods[0]] for name in names if name != (name[0], *methods[0])}
    best = entries[0]
    summary = (
        f"{best.label} on {best.checkpoint} has the highest average, {100 * best.cells[AVERAGE].estimate.mean:.1f}%.",
        f"It cannot be told apart from {entries[1].label} on {entries[1].checkpoint}.",
    )
    left_out = (
        LeftOut(
            Path("results/half/results_2026-11-20.json"), "It ends in the middle: the run was stopped while it wrote."
        ),
        LeftOut(Path("results/other/package.json"), "It is JSON, but no results of lm-eval."),
    )
    return Board(tuple(columns), tuple(entries), baseline, pairs, summary, left_out, len(names) * seeds * orders + 2)


def _run(checkpoint: str, method: str, seed: int, order: int, tasks: Sequence[str]) -> Run:
    path = (
        Path("/home/somebody/results")
        / checkpoint.replace("/", "__")
        / f"results_2026-11-{seed + 10}T0{order}-15-36.754108.json"
    )
    results = {
        task: TaskResult(
            task, "acc", "none", 0.5 + 0.01 * order, 0.01, True, "mean", 8, 500, "1.0", "t", "stratified", None
        )
        for task in tasks
    }  # fmt: skip
    return Run(
        path, f"{checkpoint} {method} {seed} {order}", method, checkpoint, "main", "float16", {}, {"version": "0.1.0"},
        seed, order, 1_794_000_000.0 + 86_400 * seed, None, results, {},
        {"lm_eval_version": "0.4.13", "transformers_version": "5.23.0"},
    )  # fmt: skip


def _sets(
    runs: Sequence[Run], orders: int, mean: float, scale: float, draw: np.random.Generator
) -> tuple[PromptSet, ...]:
    return tuple(
        PromptSet(
            f"seed {runs[start].seed}",
            tuple(Answered(run, next(iter(run.tasks.values()))) for run in runs[start : start + orders]),
            float(mean + scale * draw.normal(0, 0.02)),
        )
        for start in range(0, len(runs), orders)
    )
