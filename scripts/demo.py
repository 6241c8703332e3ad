"""Run lm-eval's `hf` and every method of ours on the demonstration tasks, and compare them in one table.

    python scripts/demo.py [--limit N] [--output DIR]

Offline and on a CPU: the model and the documents ship with the package. The table shows, for each model,
with two and with eight demonstrations, accuracy with its standard error and the order sensitivity (the share of
documents whose predicted label is not the same for all of four random orders of the same demonstrations); and
documents a second, the whole evaluation with loading counted. lm-eval's ordinary results files stay in the output
folder.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import time
from pathlib import Path
from random import Random
from typing import Any

# Before anything imports huggingface_hub or tqdm: offline, and fewer bars between this script's own lines.
os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}

import lm_eval
import transformers
from lm_eval.loggers import EvaluationTracker
from lm_eval.tasks import TaskManager
from rich.console import Console
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
    if options.limit < 0:
        parser.error(f"--limit {options.limit}: must be 0 or more")
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
    steps = itertools.count(1)
    for model in ("hf", *NAMES):
        start, documents, row = time.perf_counter(), 0, []
        for shots in SHOTS:
            runs = []
            for order in orders[shots]:
                step = next(steps)
                console.print(f"{step}/{(len(NAMES) + 1) * len(SHOTS) * ORDERS}  {model}, {shots} demonstrations")
                runs.append(evaluate(model, shots, order, options.output, options.limit or None))
            predicted = [predictions(run) for run in runs]
            changed = [len({of_run[document] for of_run in predicted}) > 1 for document in predicted[0]]
            group = runs[0]["groups"]["icl_demo"]
            row.append(f"{group['acc,none']:.3f} ± {group['acc_stderr,none']:.3f}")
            row.append(f"{sum(changed) / len(changed):.3f}")
            documents += sum(map(len, predicted))
        table.add_row(model, *row, f"{documents / (time.perf_counter() - start):.0f}")
    console.print(table)
    console.print(
        "Measured on a model trained under the plain causal layout, where icl is at home: a method whose mask it was "
        "not trained under may do no better than chance on it, as prefixicl and invicl here."
    )
    console.print(f"lm-eval's results files: {options.output.resolve()}")


if __name__ == "__main__":
    main()
