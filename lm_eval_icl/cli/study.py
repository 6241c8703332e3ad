"""The command `lm-eval-icl study`: runs a table or figure of a paper, or a user's grid, in one run."""

from __future__ import annotations

import argparse
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from lm_eval_icl.errors import InputError
from lm_eval_icl.harness.arguments import check_folder, pairs
from lm_eval_icl.studies.grid import named, read

if (
    TYPE_CHECKING
):  # these take seconds to import, and --list, or an error in the study's file, does not need them
    from lm_eval_icl.studies.cells import Grid
    from lm_eval_icl.studies.folder import StudyFolder
    from lm_eval_icl.studies.run import Options, UnitRunner


def command(parser: argparse.ArgumentParser, arguments: list[str]) -> None:
    """Run `lm-eval-icl study`."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    parser.description = (
        "Run a grid of models, methods, tasks, seeds and orders: a table or figure of a paper."
    )
    parser.add_argument(
        "study", nargs="?", metavar="FILE|NAME", help="a study's file, or a study of --list"
    )
    parser.add_argument(
        "--list", action="store_true", help="the studies that come with lm-eval-icl"
    )
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="the study's folder; its cells are not run again"
    )
    parser.add_argument(
        "--dry_run", action="store_true", help="print how many cells are missing and what they take"
    )
    parser.add_argument(
        "--status", action="store_true", help="print how many cells are in the folder; run none"
    )
    parser.add_argument(
        "--verbose", action="store_true", help="with --dry_run or --status: list the cells"
    )
    parser.add_argument(
        "--rerun",
        nargs="?",
        const="cells/*",
        metavar="PATTERN",
        help="make cells or checkpoints again that match (cells/*/icl/*), and all that need them (default: cells/*)",
    )
    parser.add_argument(
        "--model_args",
        metavar="K=V,...",
        help="another model (pretrained=...), or arguments for each",
    )
    parser.add_argument("--tasks", metavar="T,...", help="other tasks")
    parser.add_argument(
        "--methods", metavar="M,...", help="other methods; the study's own keep their arguments"
    )
    parser.add_argument(
        "--num_fewshot", type=int, metavar="N", help="another number of demonstrations"
    )
    parser.add_argument("--seeds", metavar="N,A..B", help="other seeds of the demonstrations")
    parser.add_argument(
        "--demonstrations", metavar="HOW,...", help="other ways of choosing the demonstrations"
    )
    parser.add_argument(
        "--decide",
        metavar="RULE,...",
        help="other decision rules; none for the model's own answers",
    )
    parser.add_argument(
        "--labels",
        metavar="L,...",
        help="other labels of the demonstrations: none, random, flipped:P",
    )
    parser.add_argument(
        "--formats", metavar="N,A..B", help="other formats of the prompts; 0 is the task's own"
    )
    parser.add_argument("--orders", type=int, metavar="N", help="another number of orders")
    parser.add_argument(
        "--limit",
        type=float,
        metavar="N",
        help="documents of each task, or a share of them below 1",
    )
    parser.add_argument("--batch_size", metavar="N|auto", help="as for lm_eval")
    parser.add_argument("--device", help="as for lm_eval")
    parser.add_argument(
        "--train",
        metavar="K=V,...",
        help="options of `lm-eval-icl train` for the study's trainings",
    )
    parser.add_argument(
        "--ray",
        nargs="?",
        const="",
        metavar="ADDRESS",
        help="run on the Ray cluster at this address; without an address, on several workers of this machine",
    )
    parser.add_argument(
        "--metadata", metavar="K=V,...", help="metadata of the tasks, as for lm_eval"
    )
    parser.add_argument("--include_path", metavar="DIR", help="a folder of further tasks")
    args = parser.parse_args(arguments)
    console = Console()
    if args.list:
        print("\n".join(f"{name}: {paper}" for name, paper in named().items()))
        return
    if args.study is None:
        raise InputError("give a study's file or name; `lm-eval-icl study --list` lists the names.")
    if args.limit is not None and not 0 < args.limit < math.inf:  # this refuses NaN too
        raise InputError(
            f"--limit {args.limit:g}: must be above 0{', and finite' * (args.limit > 0)}."
        )
    check_folder(args.include_path)
    study = read(args.study, _overrides(args))

    from lm_eval_icl.studies import end
    from lm_eval_icl.studies.folder import StudyFolder
    from lm_eval_icl.studies.run import Options
    from lm_eval_icl.studies.tasks import open_study

    whole = args.limit is not None and args.limit == int(args.limit)
    options = Options(args.device, args.batch_size, int(args.limit) if whole else args.limit)
    if args.output is None and not args.dry_run:
        raise InputError("--output: give the study's folder.")
    if args.status and not (args.output / "cells").is_dir():
        raise InputError(f"--output {args.output}: there is no study.")
    folder = StudyFolder(args.output or Path("the study's folder"))
    if args.dry_run or args.status:
        grid = open_study(study, options.limit, args.include_path)
        end.print_states(grid, folder, console, args.verbose)
        if args.dry_run:
            from lm_eval_icl.studies.plan import print_plan

            print_plan(grid, folder, console, _runner(grid, folder, args, options))
    else:
        with folder.locked():
            _run(
                open_study(study, options.limit, args.include_path),
                StudyFolder(args.output),
                args,
                options,
                console,
            )


def _overrides(args: argparse.Namespace) -> Mapping[str, Any]:
    """The options that replace keys of the file, or are added to them."""
    overrides = {name: getattr(args, name) for name in ("model_args", "num_fewshot", "orders")}
    for name in ("seeds", "formats"):
        if (several := getattr(args, name)) is not None:
            overrides[name] = [
                int(number) if number.isdecimal() else number for number in several.split(",")
            ]
    for name in ("tasks", "methods", "demonstrations", "labels", "decide"):
        if (several := getattr(args, name)) is not None:
            overrides[name] = [item for item in several.split(",") if item]
    overrides |= {
        name: pairs(name, getattr(args, name))
        for name in ("train", "metadata")
        if getattr(args, name)
    }
    return {name: value for name, value in overrides.items() if value is not None}


def _runner(
    grid: Grid, folder: StudyFolder, args: argparse.Namespace, options: Options
) -> UnitRunner:
    """The runner of units in this process. A wrong training is an `InputError` before anything is run."""
    from lm_eval_icl.cli.train import training
    from lm_eval_icl.studies.run import UnitRunner

    runner = UnitRunner(grid, options, folder, training, args.include_path)
    for model in grid.models:
        if model.training:
            runner.training(model)
    return runner


def _run(
    grid: Grid, folder: StudyFolder, args: argparse.Namespace, options: Options, console: Console
) -> None:
    """Run a study, and write and print its results."""
    from lm_eval_icl.cli.train import training
    from lm_eval_icl.studies.cells import Cell
    from lm_eval_icl.studies.conduct import Here, conduct, states
    from lm_eval_icl.studies.end import conclude

    runner = _runner(grid, folder, args, options)
    if args.rerun is not None:
        again = folder.forget(grid, args.rerun)
        console.print(
            f"--rerun {args.rerun}: {len(again)} are made again", markup=False, highlight=False
        )
    failed: dict[str, str] = {}
    if args.ray is None:
        conduct(grid, folder, Here(runner.run), failed)
    else:
        from lm_eval_icl.studies.cluster import study_on_ray

        where = options, folder.path, training, args.include_path
        with study_on_ray(args.ray, grid, *where) as executor:
            conduct(grid, folder, executor, failed)
    if not_made := conclude(grid, folder, args.study, failed, console):
        cells = [target for target, _ in states(grid, folder, failed) if isinstance(target, Cell)]
        number = sum(cell.path in not_made for cell in cells)
        raise InputError(
            f"{number} of {len(cells)} cells failed; the first: {next(iter(not_made.values())).removesuffix('.')}. "
            f"{folder.path / 'study.json'} has each reason under `failures`, and the same command tries again."
        )
