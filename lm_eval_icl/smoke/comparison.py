"""lm-eval's `hf` and the methods of the two papers on the demonstration tasks, in one table.

Each model is evaluated where the embedded model is not at its ceiling: with two demonstrations, with more of them than
in training about words that training never had, and with wrong labels among them. Each has four random orders of the
same demonstrations. The table has the mean accuracy over them with its standard error over documents, and order flips:
how often two orders give a document different labels, over all pairs.
Up to four processes, of one thread each, share the work: a model this small gains nothing from more threads.
"""

from __future__ import annotations

import functools
import json
import logging
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import lm_eval
import numpy as np
import torch
import transformers
from lm_eval.api.model import LM
from lm_eval.api.registry import get_model
from lm_eval.loggers import EvaluationTracker
from lm_eval.tasks import TaskManager
from rich.console import Console
from rich.table import Table

from lm_eval_icl.demonstrations.draw import stratified
from lm_eval_icl.harness.plugin import task_dir
from lm_eval_icl.methods import NAMES
from lm_eval_icl.results.statistics import order_sensitivity
from lm_eval_icl.smoke import demo
from lm_eval_icl.studies.run import environment_once

# What is measured, by the words for it: a task or a group, and the number of demonstrations.
SETTINGS = {
    "2 shots": ("icl_demo", 2),
    "32 shots, unseen words": ("icl_demo_unseen", 32),
    "16 shots, wrong labels": ("icl_demo_noise", 16),
}
ORDERS, SEED = 4, 1234
# Those of the two papers; all others would make the demo longer.
METHODS = [name for name in NAMES if name in "icl nope prefixicl pcw saicl batchicl invicl deepthink".split()]


def write_orders(folder: Path, shots: int) -> list[Path]:
    """One file of demonstration indices an order: the same demonstrations of each task, shuffled."""
    rnd = Random(SEED)
    chosen: dict[str, list[int]] = {}
    for pool in sorted((task_dir() / "demo").glob("*/train.jsonl")):
        rows = [{"index": i, **json.loads(line)} for i, line in enumerate(pool.read_text("utf-8").splitlines())]
        chosen[pool.parent.name] = [row["index"] for row in stratified(rows, shots, lambda row: row["label"], rnd)]
    chosen["icl_demo_noise"] = chosen["icl_demo_four"]  # whose documents it has
    files = []
    for order in range(ORDERS):
        files.append(folder / f"{shots}-shot-order{order + 1}.json")
        files[-1].write_text(json.dumps(chosen))
        chosen = {task: rnd.sample(indices, len(indices)) for task, indices in chosen.items()}
    return files


@functools.lru_cache(maxsize=1)
def load(model: str) -> LM:
    """The model of this name, on the checkpoint that ships with the package."""
    arguments = {"pretrained": str(demo.model_path())}
    lm: LM = get_model(model).create_from_arg_obj(arguments, {"batch_size": 16, "device": "cpu"})
    return lm


def evaluate(model: str, lm: LM, task: str, shots: int, order: Path, output: Path, limit: int | None) -> dict[str, Any]:
    """One evaluation through lm-eval, its results files written as if lm-eval had loaded the model by its name."""
    tracker = EvaluationTracker(output_path=str(output / model))
    manager = TaskManager(
        include_path=task_dir() / "demo", include_defaults=False, metadata={"demonstrations": str(order)}
    )
    with environment_once():
        results = lm_eval.simple_evaluate(
            model=lm,
            model_args={"pretrained": str(demo.model_path())},
            tasks=[task],
            num_fewshot=shots,
            batch_size=16,
            device="cpu",
            limit=limit,
            task_manager=manager,
            evaluation_tracker=tracker,
        )
    results["config"]["model"] = tracker.general_config_tracker.model_source = model
    samples = results.pop("samples")
    tracker.save_results_aggregated(results=results, samples=samples)
    for name, of_task in samples.items():
        tracker.save_results_samples(task_name=name, samples=of_task)
    return {**results, "samples": samples}


def answers(results: dict[str, Any]) -> tuple[list[int], list[float]]:
    """The option with the highest log-likelihood, and whether it is right, document by document of all tasks."""
    predicted, right = [], []
    for _, samples in sorted(results["samples"].items()):
        for sample in sorted(samples, key=lambda sample: int(sample["doc_id"])):
            scores = [float(response[0]) for (response,) in sample["resps"]]
            predicted.append(scores.index(max(scores)))
            right.append(float(sample["acc"]))
    return predicted, right


def measure(
    model: str, task: str, shots: int, orders: list[Path], output: Path, limit: int | None
) -> tuple[str, str, int, float]:
    """Accuracy and order flips of a model on a task or a group, in words; of how many documents, over all orders; and
    in how many seconds."""
    begun = time.perf_counter()
    runs = [evaluate(model, load(model), task, shots, order, output, limit) for order in orders]
    # Both are (documents, orders).
    predicted, right = (np.array(by_order).T for by_order in zip(*map(answers, runs), strict=True))
    flips = order_sensitivity([predicted])
    assert flips is not None
    accuracy = right.mean(axis=1)
    error = accuracy.std(ddof=1) / len(accuracy) ** 0.5
    words = f"{100 * accuracy.mean():.0f} ± {100 * error:.0f}", f"{100 * flips.mean:.0f}"
    return *words, predicted.size, time.perf_counter() - begun


def begin_process() -> None:
    """A model this small gains nothing from more threads, and lm-eval's progress bars would hide the demo's lines."""
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # git, which lm-eval starts, writes there too


def compare(output: Path, limit: int) -> None:
    """Evaluate every model; print a line for each model and setting as its numbers come, and a table at the end.

    Args:
        output: the folder of lm-eval's results files, which is there.
        limit: documents of each task; 0 for all.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    transformers.logging.set_verbosity_error()
    table = Table("model", title="The embedded model: accuracy and order flips, %")
    for name in SETTINGS:
        table.add_column(name.replace(", ", ",\n"), justify="right")
        table.add_column("flips", justify="right")
    table.add_column("docs/s", justify="right")
    orders = {shots: write_orders(output, shots) for _, shots in SETTINGS.values()}
    # Processes are forked before anything has run, so that each of them has all modules and no threads.
    forked = multiprocessing.get_context("fork" if "fork" in multiprocessing.get_all_start_methods() else None)
    workers = max(1, min(4, os.cpu_count() or 1))
    with ProcessPoolExecutor(workers, mp_context=forked, initializer=begin_process) as pool:
        measured = {
            (model, name): pool.submit(measure, model, task, shots, orders[shots], output, limit or None)
            for model in ("hf", *METHODS)
            for name, (task, shots) in SETTINGS.items()
        }
        for model in ("hf", *METHODS):
            cells: list[str] = []
            documents, seconds = 0, 0.0
            for name in SETTINGS:
                accuracy, flips, count, took = measured[model, name].result()
                print(f"{model}, {name}: accuracy {accuracy} %, order flips {flips} % ({took:.0f} s)", flush=True)
                cells += [accuracy, flips]
                documents, seconds = documents + count, seconds + took
            table.add_row(model, *cells, f"{documents / seconds:.0f}")
    console = Console()
    console.print(table)
    console.print(
        "The model was trained with 4 to 12 demonstrations, under every method but batchicl and deepthink. It knows a "
        "few hundred words: which method is better here says nothing about real models. To ask one of yours:"
    )
    command = "lm-eval-icl study which-method --model_args pretrained=MODEL --limit 200 --output results/which"
    console.print(f"  {command}", soft_wrap=True)
    console.print(f"lm-eval's results files: {output.resolve()}")
