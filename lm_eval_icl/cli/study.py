"""The command `lm-eval-icl study`: a table or figure of a paper, or a grid of one's own, in one run."""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from lm_eval_icl.errors import InputError
from lm_eval_icl.harness.arguments import check_folders, pairs
from lm_eval_icl.studies.grid import Study, named, read

if TYPE_CHECKING:  # what runs a study takes seconds to import: --list, and a fault of the study's file, do not need it
    from lm_eval_icl.studies.folder import StudyFolder
    from lm_eval_icl.studies.run import Options


def command(parser: argparse.ArgumentParser, arguments: list[str]) -> None:
    """Run `lm-eval-icl study`."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    parser.description = "Run a grid of models, methods, tasks, seeds and orders: a table or figure of a paper."
    parser.add_argument("study", nargs="?", metavar="FILE|NAME", help="a study's file, or a study of --list")
    parser.add_argument("--list", action="store_true", help="the studies that come with lm-eval-icl")
    parser.add_argument("--output", type=Path, metavar="DIR", help="the study's folder; what is there is not run again")
    parser.add_argument("--dry_run", action="store_true", help="say how much there is to run, and what is missing")
    parser.add_argument("--status", action="store_true", help="say what of the study is in its folder; run none")
    parser.add_argument("--verbose", action="store_true", help="with --dry_run or --status: list the cells")
    parser.add_argument(
        "--rerun",
        action="store_true",
        help="run cells again, and choose demonstrations again, if other code made them, if they do not say which code "
        "did, or if they are damaged; each is replaced when the new one is there",
    )
    parser.add_argument("--model_args", metavar="K=V,...", help="another model (pretrained=...), or more for each")
    parser.add_argument("--tasks", metavar="T,...", help="other tasks")
    parser.add_argument("--num_fewshot", type=int, metavar="N", help="another number of demonstrations")
    parser.add_argument("--seeds", metavar="N,A..B", help="other seeds of the demonstrations")
    parser.add_argument("--demonstrations", metavar="HOW,...", help="other ways of choosing the demonstrations")
    parser.add_argument("--decide", metavar="RULE,...", help="other decision rules; none is what the model itself says")
    parser.add_argument("--orders", type=int, metavar="N", help="another number of orders")
    parser.add_argument("--limit", type=float, metavar="N", help="documents of each task, or a share of them below 1")
    parser.add_argument("--batch_size", metavar="N|auto", help="as for lm_eval")
    parser.add_argument("--device", help="as for lm_eval")
    parser.add_argument("--train", metavar="K=V,...", help="options of `lm-eval-icl train`, for models trained first")
    parser.add_argument(
        "--ray",
        nargs="?",
        const="",
        metavar="ADDRESS",
        help="run on the Ray cluster at this address; without an address, on several workers of this machine",
    )
    parser.add_argument("--metadata", metavar="K=V,...", help="metadata of the tasks, as for lm_eval")
    parser.add_argument("--include_path", metavar="DIR", help="a folder of further tasks")
    args = parser.parse_args(arguments)
    console = Console()
    if args.list:
        lines = "\n".join(f"{name}: {paper}" for name, paper in named().items())
        console.print(lines, markup=False, highlight=False, soft_wrap=True)
        return
    if args.study is None:
        raise InputError("give a study's file or name; `lm-eval-icl study --list` lists the names.")
    if args.limit is not None and not 0 < args.limit < math.inf:  # neither is NaN
        raise InputError(f"--limit {args.limit:g}: must be above 0{', and finite' * (args.limit > 0)}.")
    check_folders(args.include_path, None)
    if args.ray is not None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InputError("--ray: Ray starts its own processes: leave out the launcher, or --ray.")
    study = read(args.study, _overrides(args))

    from lm_eval_icl.studies import screen
    from lm_eval_icl.studies.folder import StudyFolder
    from lm_eval_icl.studies.progress import open_study
    from lm_eval_icl.studies.run import Options

    whole = args.limit is not None and args.limit == int(args.limit)
    options = Options(args.device, args.batch_size, int(args.limit) if whole else args.limit)
    if args.dry_run:
        _dry_run(study, args, options, console)
        return
    if args.output is None:
        raise InputError("--output: give the study's folder.")
    folder = StudyFolder(args.output)
    if args.status:
        if not folder.cells.is_dir():
            raise InputError(f"--output {args.output}: there is no study.")
        screen.print_status(open_study(study, folder, options, args.include_path), console, args.verbose)
        return
    # The first of several processes of a launch writes and prints.
    with folder.locked() if os.environ.get("RANK", "0") == "0" else nullcontext():
        _run(study, folder, args, options, console)


def _overrides(args: argparse.Namespace) -> Mapping[str, Any]:
    """The options that stand in place of keys of the file, or are added to them."""
    overrides = {name: getattr(args, name) for name in ("model_args", "num_fewshot", "orders")}
    if args.seeds is not None:
        overrides["seeds"] = [int(seed) if seed.isdecimal() else seed for seed in args.seeds.split(",")]
    for name in ("tasks", "demonstrations", "decide"):
        if (several := getattr(args, name)) is not None:
            overrides[name] = [item for item in several.split(",") if item]
    overrides |= {name: pairs(name, getattr(args, name)) for name in ("train", "metadata") if getattr(args, name)}
    return {name: value for name, value in overrides.items() if value is not None}


def _dry_run(study: Study, args: argparse.Namespace, options: Options, console: Console) -> None:
    """Print what would be run. If something for it cannot be had, it is refused behind what can be said without it."""
    from lm_eval_icl.cli.train import training
    from lm_eval_icl.studies import screen, trainings
    from lm_eval_icl.studies.conduct import Conductor
    from lm_eval_icl.studies.folder import StudyFolder
    from lm_eval_icl.studies.plan import Plan
    from lm_eval_icl.studies.progress import open_study

    lacking: dict[str, str] = {}
    folder = StudyFolder(args.output or Path("the study's folder"))
    progress = open_study(study, folder, options, args.include_path, args.rerun, lacking)
    for model in progress.models:
        if model.training:
            try:
                trainings.check(study, model, folder, options.device, args.include_path, training)
            except InputError as error:
                lacking[model.checkpoint] = error.message
    plan = Plan(progress.grid, progress.leaves)
    screen.print_plan(progress, plan, lacking, console, args.verbose)
    refused: list[str] = []
    if args.ray is not None and not lacking:
        from lm_eval_icl.studies.cluster import StudyCluster

        with StudyCluster(Conductor(progress, args.include_path, training), args.ray) as cluster:
            answers = cluster.ask()
        refused = list(filter(None, answers))
        console.print(f"workers: {answers.count('')} of {len(answers)} nodes can run the study", highlight=False)
        for why in refused:
            console.print(f"missing: {why}", markup=False, highlight=False, soft_wrap=True)
    if number := len(lacking) + len(plan.lacking) + len(refused):
        raise InputError(f"{args.study}: cannot be run as it is: {number} missing, as listed above.")


def _run(study: Study, folder: StudyFolder, args: argparse.Namespace, options: Options, console: Console) -> None:
    """Run a study, and write and print its results."""
    from lm_eval_icl.cli.train import training
    from lm_eval_icl.studies.conduct import CellsFailed, Conductor
    from lm_eval_icl.studies.end import conclude
    from lm_eval_icl.studies.plan import Plan
    from lm_eval_icl.studies.progress import open_study

    first = os.environ.get("RANK", "0") == "0"
    progress = open_study(study, folder, options, args.include_path, args.rerun)
    conductor = Conductor(progress, args.include_path, training)
    plan: list[dict[str, Any]] = []
    failure = None
    if first:
        estimates = Plan(progress.grid, progress.leaves)
        plan = estimates.record()
        for why in estimates.lacking.values():  # of a model or a cell whose turn comes; the others need no estimate
            console.print(f"There is no estimate: {why}", markup=False, highlight=False, soft_wrap=True)
    try:
        if args.ray is None:
            conductor.run()
        else:
            from lm_eval_icl.studies.cluster import StudyCluster

            with StudyCluster(conductor, args.ray) as cluster:
                conductor.run(cluster.ended)
    except CellsFailed as error:
        failure = error
    finally:
        if first:
            record = {**progress.record(), "work": {"planned": plan, "done": progress.work()}}
            folder.write("study.json", json.dumps(record, indent=2, default=str) + "\n")
    if first:
        conclude(progress, console)
    if failure is not None:
        raise failure
