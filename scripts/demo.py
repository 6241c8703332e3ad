"""Run lm-eval's `hf` and every method of ours on the demonstration tasks, and compare them in one table.

    python scripts/demo.py [--limit N] [--output DIR]

Offline and on a CPU: the model and the documents ship with the package. Each model is evaluated with two and with eight
demonstrations, which takes one line each: accuracy with its standard error, and the order sensitivity (the share of
documents whose predicted label is not the same for all of four random orders of the same demonstrations). A table of
all of them ends the run, with the documents that each model took a second, the whole evaluation with loading counted.
lm-eval's ordinary results files stay in the output folder.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub

import lm_eval
import transformers
from lm_eval.loggers import EvaluationTracker
from lm_eval.tasks import TaskManager
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from lm_eval_icl import demo
from lm_eval_icl.demonstrations.draw import stratified
from lm_eval_icl.harness.plugin import task_dir
from lm_eval_icl.methods import NAMES

SHOTS, ORDERS, SEED = (2, 8), 4, 1234


def write_orders(folder: Path, shots: int) -> list[Path]:
    """One file of demonstration indices an order: the same demonstrations of each task, shuffled."""
    rnd = Random(SEED)
    chosen: dict[str, list[int]] = {}
    for pool in sorted((task_dir() / "demo").glob("*/train.jsonl")):
        rows = [json.loads(line) for line in pool.read_text(encoding="utf-8").splitlines()]
        indexed = [{"index": i, **row} for i, row in enumerate(rows)]
        chosen[pool.parent.name] = [row["index"] for row in stratified(indexed, shots, lambda row: row["label"], rnd)]
    files = []
    for order in range(ORDERS):
        files.append(folder / f"{shots}-shot-order{order + 1}.json")
        files[-1].write_text(json.dumps(chosen))
        chosen = {task: rnd.sample(indices, len(indices)) for task, indices in chosen.items()}
    return files


@contextmanager
def quiet() -> Iterator[None]:
    """Inside this context nothing is written to standard error, not even by git, which lm-eval starts.

    Each evaluation would otherwise show progress bars of its own. (A traceback is printed after the context.)
    """
    kept = os.dup(2)
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def evaluate(model: str, shots: int, order: Path, output: Path, limit: int | None) -> dict[str, Any]:
    """One evaluation through lm-eval, its results files written."""
    tracker = EvaluationTracker(output_path=str(output / model))
    manager = TaskManager(
        include_path=task_dir() / "demo", include_defaults=False, metadata={"demonstrations": str(order)}
    )
    results = lm_eval.simple_evaluate(
        model=model,
        model_args={"pretrained": str(demo.model_path())},
        tasks=["icl_demo"],
        num_fewshot=shots,
        batch_size=16,
        device="cpu",
        limit=limit,
        task_manager=manager,
        evaluation_tracker=tracker,
    )
    samples = results.pop("samples")
    tracker.save_results_aggregated(results=results, samples=samples)
    for task, of_task in samples.items():
        tracker.save_results_samples(task_name=task, samples=of_task)
    return {**results, "samples": samples}


def predictions(results: dict[str, Any]) -> dict[tuple[str, int], int]:
    """(task, document) -> the index of the option with the highest log-likelihood."""
    found = {}
    for task, samples in results["samples"].items():
        for sample in samples:
            scores = [float(response[0]) for (response,) in sample["resps"]]
            found[task, sample["doc_id"]] = scores.index(max(scores))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, default=100, help="documents a task; 0 for all (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("results/demo"), help="folder (default: %(default)s)")
    options = parser.parse_args()
    if options.limit < 0 or options.limit == 1:
        parser.error(f"--limit {options.limit}: must be 0, or 2 or more: one document gives no standard error")
    options.output.mkdir(parents=True, exist_ok=True)
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    transformers.logging.set_verbosity_error()

    console = Console()
    orders = {shots: write_orders(options.output, shots) for shots in SHOTS}
    table = Table(title="icl_demo on the embedded model: accuracy, order sensitivity (o.s.)")
    table.add_column("model")
    for shots in SHOTS:
        table.add_column(f"{shots} shots", justify="right")
        table.add_column("o.s.", justify="right")
    table.add_column("documents/s", justify="right")
    # rich would otherwise take over what is written to standard error, and print it.
    with Progress(console=console, transient=True, redirect_stderr=False) as progress:
        bar = progress.add_task("", total=(len(NAMES) + 1) * len(SHOTS) * ORDERS)
        for model in ("hf", *NAMES):
            start, documents, row = time.perf_counter(), 0, []
            for shots in SHOTS:
                progress.update(bar, description=f"{model}, {shots} shots")
                begun, runs = time.perf_counter(), []
                for order in orders[shots]:
                    with quiet():
                        runs.append(evaluate(model, shots, order, options.output, options.limit or None))
                    progress.advance(bar)
                predicted = [predictions(run) for run in runs]
                changed = [len({of_run[document] for of_run in predicted}) > 1 for document in predicted[0]]
                group = runs[0]["groups"]["icl_demo"]
                accuracy = f"{group['acc,none']:.3f} ± {group['acc_stderr,none']:.3f}"
                sensitivity = f"{sum(changed) / len(changed):.3f}"
                took = f"{time.perf_counter() - begun:.0f} s"
                console.print(f"{model}, {shots} shots: accuracy {accuracy}, order sensitivity {sensitivity} ({took})")
                row += [accuracy, sensitivity]
                documents += sum(map(len, predicted))
            table.add_row(model, *row, f"{documents / (time.perf_counter() - start):.0f}")
    console.print(table)
    console.print(
        "The model was trained under every method but batchicl and deepthink, which run on a model trained under icl. "
        "Chance is 0.417; a model trained under icl alone may be near it with a method of another mask."
    )
    console.print(f"lm-eval's results files: {options.output.resolve()}")


if __name__ == "__main__":
    main()
