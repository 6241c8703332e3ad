"""The command `lm-eval-icl study`: a table or figure of a paper, or a grid of one's own, in one run."""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lm_eval_icl.errors import InputError, refusing
from lm_eval_icl.harness.arguments import check_folders, pairs
from lm_eval_icl.studies.conduct import CellsFailed, Conductor
from lm_eval_icl.studies.end import conclude
from lm_eval_icl.studies.folder import Folder
from lm_eval_icl.studies.grid import named, read
from lm_eval_icl.studies.plan import Plan
from lm_eval_icl.studies.run import Options
from lm_eval_icl.train import training


def command(parser: argparse.ArgumentParser, arguments: list[str]) -> None:
    """Run `lm-eval-icl study`.

    Raises:
        InputError: the study, an option or a folder cannot be used.
    """
    parser.description = "Run a grid of models, methods, tasks, seeds and orders: a table or figure of a paper."
    parser.add_argument("study", nargs="?", metavar="FILE|NAME", help="a study's file, or a study of --list")
    parser.add_argument("--list", action="store_true", help="the studies that come with lm-eval-icl")
    parser.add_argument("--output", type=Path, metavar="DIR", help="the study's folder; what is there is not run again")
    parser.add_argument("--dry_run", action="store_true", help="say which cells there are and what they take; run none")
    parser.add_argument("--status", action="store_true", help="say what of the study is in its folder; run none")
    parser.add_argument(
        "--rerun",
        action="store_true",
        help="run cells again, and choose demonstrations again, that other code has made than this, that do not say "
        "which code, or that are damaged; each is replaced when the new one is there",
    )
    parser.add_argument("--model_args", metavar="K=V,...", help="another model (pretrained=...), or more for each")
    parser.add_argument("--tasks", metavar="T,...", help="other tasks")
    parser.add_argument("--num_fewshot", type=int, metavar="N", help="another number of demonstrations")
    parser.add_argument("--seeds", metavar="N,A..B", help="other seeds of the demonstrations")
    parser.add_argument("--demonstrations", metavar="HOW,...", help="other ways of choosing the demonstrations")
    parser.add_argument("--orders", type=int, metavar="N", help="another number of orders")
    parser.add_argument("--limit", type=float, metavar="N", help="documents of each task, or a share of them below 1")
    parser.add_argument("--batch_size", metavar="N|auto", help="as for lm_eval")
    parser.add_argument("--device", help="as for lm_eval")
    parser.add_argument("--train", metavar="K=V,...", help="options of `lm-eval-icl train`, for models trained first")
    parser.add_argument("--metadata", metavar="K=V,...", help="metadata of the tasks, as for lm_eval")
    parser.add_argument("--include_path", metavar="DIR", help="a folder of further tasks")
    given = parser.parse_args(arguments)
    console = Console()
    if given.list:
        for name, paper in named().items():
            console.print(f"{name}: {paper}", markup=False, highlight=False, soft_wrap=True)
        return
    if given.study is None:
        raise InputError("give a study's file or name; `lm-eval-icl study --list` lists the names.")
    if given.limit is not None and not 0 < given.limit < math.inf:  # neither is NaN
        raise InputError(f"--limit {given.limit:g}: must be above 0{', and finite' * (given.limit > 0)}.")
    check_folders(given.include_path, None)
    overrides: dict[str, Any] = {
        name: getattr(given, name)
        for name in ("model_args", "num_fewshot", "orders")
        if getattr(given, name) is not None
    }
    if given.seeds is not None:
        overrides["seeds"] = [int(seed) if seed.isdecimal() else seed for seed in given.seeds.split(",")]
    for name in ("tasks", "demonstrations"):
        if (several := getattr(given, name)) is not None:
            overrides[name] = [each for each in several.split(",") if each]
    overrides |= {name: pairs(name, getattr(given, name)) for name in ("train", "metadata") if getattr(given, name)}
    study = read(given.study, overrides)
    options = Options(given.device, given.batch_size, _whole(given.limit))
    if given.dry_run:
        with tempfile.TemporaryDirectory() as folder:
            conductor = Conductor(study, Folder(Path(folder)), options, given.include_path, training)
            _say_plan(Plan(conductor), console)
        return
    if given.output is None:
        raise InputError("--output: give the study's folder.")
    if given.status and not (given.output / "cells").is_dir():
        raise InputError(f"--output {given.output}: there is no study.")
    conductor = Conductor(study, Folder(given.output), options, given.include_path, training, given.rerun)
    if given.status:
        _say_status(conductor, console)
        return
    first = os.environ.get("RANK", "0") == "0"  # of several processes, one writes and prints
    plan: list[dict[str, Any]] = []
    failure = None
    try:
        plan = Plan(conductor).record() if first else []
    except InputError as error:  # of one model or one cell, whose turn comes; the others need no estimate
        console.print(f"There is no estimate: {error.message}", markup=False, highlight=False, soft_wrap=True)
    try:
        conductor.run()
    except CellsFailed as error:
        failure = error
    finally:
        if first:
            record = {**conductor.record(), "work": {"planned": plan, "done": conductor.work()}}
            conductor.folder.write("study.json", json.dumps(record, indent=2, default=str) + "\n")
    if first:
        conclude(conductor, console)
    if failure is not None:
        raise failure


def _say_status(conductor: Conductor, console: Console) -> None:
    """Print how many cells are in which state, and those that are not simply done, with the reasons of the last run."""
    said = conductor.folder.path / "study.json"
    with refusing(f"{said} cannot be read"):
        failed = json.loads(said.read_text(encoding="utf-8")).get("failed", {}) if said.is_file() else {}
    states = {cell.path: conductor.state(cell) for cell in conductor.all_cells()}
    # Damaged cells are found now; what a cell on the dev set has kept from being chosen is no cell yet.
    failed = {path: why for path, why in failed.items() if states.get(path, "missing") == "missing"} | conductor.failed
    states |= dict.fromkeys(failed, "failed")
    for state, number in Counter(states.values()).most_common():
        console.print(f"{number} {state}", markup=False, highlight=False)
    for path, state in states.items():
        if state != "done":
            why = f": {failed[path]}" if path in failed else ""
            console.print(f"{state}: {path}{why}", markup=False, highlight=False, soft_wrap=True)


def _say_plan(plan: Plan, console: Console) -> None:
    """Print the cells, and a table of what they take."""
    for model in plan.conductor.models:
        if model.training:
            console.print(f"to be trained: {model.checkpoint}", markup=False, highlight=False, soft_wrap=True)
        for cell in plan.cells(model):
            console.print(cell.path, markup=False, highlight=False, soft_wrap=True)
    table = Table(title="estimate of forward passes and tokens")
    table.add_column("model", overflow="fold")
    for column in ("cells", "passes", "tokens", "tokens, cells one by one"):
        table.add_column(column, justify="right")
    for row in plan.record():
        numbers = (row["cells"], row["passes"], row["tokens"], row["tokens_one_by_one"])
        table.add_row(escape(row["model"]), *(f"{number:,}" for number in numbers))
    console.print(table)
    if plan.conductor.choices.pools:
        console.print("What the models take to choose demonstrations is not counted.")
    if plan.conductor.study.dev:
        console.print("Cells that depend on the dev set are counted with the values that take most.")


def _whole(limit: float | None) -> float | None:
    return int(limit) if limit is not None and limit == int(limit) else limit
