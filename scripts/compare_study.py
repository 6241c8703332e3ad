"""A study beside its cells, each run alone with `lm_eval`: the time of both, and whether the answers are the same.

    python scripts/compare_study.py STUDY.yaml --sample 12
    python scripts/compare_study.py STUDY.yaml --sample 12 --random gpt2 --limit 100

The study runs before the sampled cells and once more after them, so that whatever else the machine does meets both. The
time of all cells alone is the sample's time, divided by its size and times the number of cells. The exit status is 1 if
a prompt or an accuracy differs, or a log-likelihood by more than 1e-5.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from benchmarks.measuring import machine
from benchmarks.workloads import CONFIGS, build_requests, random_model, train_tokenizer

from lm_eval_icl.studies.grid import read


def seconds(*command: object) -> float:
    """How long a command takes. Its output is shown only if it fails."""
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", *map(str, command)], capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return time.perf_counter() - start


def run_alone(cell: dict[str, Any], folder: Path, batch_size: str) -> tuple[float, Path]:
    """Run with `lm_eval` what one results file of the study says. Returns the seconds and the samples file."""
    config = cell["config"]
    facts = config["icl"]["study"]
    metadata = folder / "demonstrations.json"
    metadata.write_text(json.dumps({facts["task"]: facts["indices"]}))
    arguments = ",".join(f"{name}={value}" for name, value in config["model_args"].items())
    spent = seconds(
        *("lm_eval", "--model", config["model"], "--model_args", arguments, "--tasks", facts["task"]),
        *("--num_fewshot", facts["num_fewshot"], "--seed", f"0,1234,1234,{facts['seed']}"),
        *("--metadata", json.dumps({"demonstrations": str(metadata)}), "--batch_size", batch_size),
        *("--device", config["device"], "--log_samples", "--output_path", folder / "results.json"),
        *(("--limit", config["limit"]) if config["limit"] else ()),
    )
    return spent, next(folder.glob("samples_*.jsonl"))


def largest_difference(first: Path, second: Path) -> float:
    """Of the log-likelihoods in two samples files; infinite if a prompt, an option or a score differs."""
    largest = 0.0
    with first.open() as mine, second.open() as theirs:
        for one, other in zip(mine, theirs, strict=True):
            a, b = json.loads(one), json.loads(other)
            if any(a[key] != b[key] for key in ("doc_id", "doc_hash", "prompt_hash", "target_hash", "acc")):
                return float("inf")
            for ((x, *_),), ((y, *_),) in zip(a["resps"], b["resps"], strict=True):
                largest = max(largest, abs(float(x) - float(y)))
    return largest


def save_random(kind: str, study: str, folder: Path) -> None:
    """A model with random weights, and a tokenizer trained on the study's first task and number of shots."""
    grid = read(study, {})
    names = [task for task in grid.tasks if isinstance(task, str)]
    instances = build_requests(names, grid.num_fewshot[0], 0, 64, 32)
    model = random_model(kind, "cpu").float()
    train_tokenizer(instances, model.config.vocab_size).save_pretrained(folder)
    model.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", help="a study's file or name")
    parser.add_argument("--sample", type=int, default=12, help="how many cells run alone (default: %(default)s)")
    parser.add_argument("--random", choices=CONFIGS, help="run this model with random weights in place of the study's")
    parser.add_argument("--limit", type=int, help="documents a task")
    parser.add_argument("--batch_size", default="16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        command: list[object] = ["lm_eval_icl", "study", options.study, "--device", options.device]
        command += ["--batch_size", options.batch_size]
        if options.random:
            save_random(options.random, options.study, folder / "model")
            command += ["--model_args", f"pretrained={folder / 'model'}"]
        if options.limit:
            command += ["--limit", options.limit]
        studies = [seconds(*command, "--output", folder / "first")]
        files = sorted((folder / "first" / "cells").rglob("results_*.json"))
        sample = random.Random(0).sample(files, min(options.sample, len(files)))
        alone, worst = [], 0.0
        for number, file in enumerate(sample):
            (own := folder / f"alone{number}").mkdir()
            spent, samples = run_alone(json.loads(file.read_text()), own, options.batch_size)
            alone.append(spent)
            worst = max(worst, largest_difference(next(file.parent.glob("samples_*.jsonl")), samples))
        studies.append(seconds(*command, "--output", folder / "second"))
    mean = sum(alone) / len(alone)
    every = mean * len(files)
    print(
        f"{machine()}: a study of {len(files)} cells took {studies[0]:.0f} and {studies[1]:.0f} s; {len(alone)} of its "
        f"cells alone {mean:.1f} s each ({min(alone):.1f} to {max(alone):.1f}), so all {every:.0f} s, "
        f"{every / max(studies):.1f} to {every / min(studies):.1f} times as long. Largest difference of a "
        f"log-likelihood: {worst:.1g}."
    )
    sys.exit(worst > 1e-5)


if __name__ == "__main__":
    main()
