"""The command `lm-eval-icl study`: runs a table or figure of a paper, or a user's grid, in one
run."""

from __future__ import annotations

import argparse
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from lm_eval_icl.cli import add_options
from lm_eval_icl.errors import InputError, log
from lm_eval_icl.harness.arguments import check_folder, pairs
from lm_eval_icl.studies.grid import named, read

# These take seconds to import, and --list, or an error in the study's file, does not need them.
if TYPE_CHECKING:
    from lm_eval_icl.studies.folder import StudyFolder
    from lm_eval_icl.studies.targets import Grid
    from lm_eval_icl.studies.unit_runner import Options, UnitRunner

_OPTIONS = {
    "output": ("DIR", Path, "the study's folder; its cells are not run again"),
    "model_args": ("K=V,...", str, "another model (pretrained=...), or arguments for every model"),
    "tasks": ("T,...", str, "other tasks"),
    "methods": ("M,...", str, "other methods; methods of the study keep their arguments"),
    "num_fewshot": ("N", int, "another number of demonstrations"),
    "seeds": ("N,A..B", str, "other seeds of the demonstrations"),
    "demonstrations": ("HOW,...", str, "other ways of choosing the demonstrations"),
    "decide": ("RULE,...", str, "other decision rules; none for the model's own answers"),
    "labels": ("L,...", str, "other labels of the demonstrations: none, random, flipped:P"),
    "formats": ("N,A..B", str, "other formats of the prompts; 0 is the task's own"),
    "orders": ("N", int, "another number of orders"),
    "limit": ("N", float, "the number of documents of each task, or a share of them below 1"),
    "batch_size": ("N|auto", str, "as for lm_eval"),
    "device": ("DEVICE", str, "as for lm_eval"),
    "train": ("K=V,...", str, "options of `lm-eval-icl train` for the study's trainings"),
    "metadata": ("K=V,...", str, "metadata of the tasks, as for lm_eval"),
    "include_path": ("DIR", str, "a folder of further tasks"),
    "list": ("", bool, "list the studies that come with lm-eval-icl"),
    "dry_run": ("", bool, "print the number of missing cells, and how long they take"),
    "status": ("", bool, "print the number of cells in the folder, and run none"),
    "verbose": ("", bool, "with --dry_run or --status: list the cells"),
}


def command(parser: argparse.ArgumentParser, arguments: list[str]) -> None:
    """Run `lm-eval-icl study`."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    args = _read_options(parser, arguments)
    console = Console()
    if args.list:
        print("\n".join(f"{name}: {paper}" for name, paper in named().items()))
        return
    if args.study is None:
        raise InputError("give a study's file or name; `lm-eval-icl study --list` lists the names.")
    if args.limit is not None:
        args.limit = _checked_limit(args.limit)
    check_folder(args.include_path)
    study = read(args.study, _overrides(args))

    from lm_eval_icl.studies import end
    from lm_eval_icl.studies.cell_tasks import open_study
    from lm_eval_icl.studies.folder import StudyFolder
    from lm_eval_icl.studies.unit_runner import Options

    options = Options(args.device, args.batch_size, args.limit)
    if args.output is None and not args.dry_run:
        raise InputError("--output: give the study's folder.")
    folder = StudyFolder(args.output or Path("the study's folder"))
    if args.status and not (folder.path / "cells").is_dir():
        raise InputError(f"--output {folder.path}: there is no study.")
    if args.dry_run or args.status:
        grid = open_study(study, args.limit, args.include_path)
        end.print_states(grid, folder, console, args.verbose)
        if args.dry_run:
            from lm_eval_icl.studies.plan import print_plan

            print_plan(grid, folder, console, _runner(grid, folder, args, options))
        return
    with folder.locked():
        grid = open_study(study, args.limit, args.include_path)
        _run(grid, StudyFolder(args.output), args, options, console)


def _read_options(parser: argparse.ArgumentParser, arguments: list[str]) -> argparse.Namespace:
    parser.description = (
        "Run a grid of models, methods, tasks, seeds and orders: a table or figure of a paper."
    )
    parser.add_argument(
        "study", nargs="?", metavar="FILE|NAME", help="a study's file, or a study of --list"
    )
    add_options(parser, _OPTIONS)
    parser.add_argument(
        "--rerun",
        nargs="?",
        const="cells/*",
        metavar="PATTERN",
        help="make cells or checkpoints again whose path matches, such as cells/*/icl/*, and all "
        "that depend on them (default: cells/*)",
    )
    parser.add_argument(
        "--ray",
        nargs="?",
        const="",
        metavar="ADDRESS",
        help="run on the Ray cluster at this address, or without an address on several workers of "
        "this machine",
    )
    return parser.parse_args(arguments)


def _checked_limit(limit: float) -> float:
    """A limit, as a whole number if it is one."""
    if not 0 < limit < math.inf:  # this refuses NaN too
        finite = ", and finite" if limit > 0 else ""
        raise InputError(f"--limit {limit:g}: must be above 0{finite}.")
    return int(limit) if limit == int(limit) else limit


def _overrides(args: argparse.Namespace) -> Mapping[str, Any]:
    """The options that replace keys of the file, or are added to them."""
    overrides: dict[str, Any] = {}
    for name in ("model_args", "num_fewshot", "orders"):
        value = getattr(args, name)
        if value is not None:
            overrides[name] = value
    for name in ("seeds", "formats", "tasks", "methods", "demonstrations", "labels", "decide"):
        listed = getattr(args, name)
        if listed is not None:
            values = [value for value in listed.split(",") if value]
            if name in ("seeds", "formats"):
                values = [int(value) if value.isdecimal() else value for value in values]
            overrides[name] = values
    for name in ("train", "metadata"):
        written = getattr(args, name)
        if written:
            overrides[name] = pairs(name, written)
    return overrides


def _runner(
    grid: Grid, folder: StudyFolder, args: argparse.Namespace, options: Options
) -> UnitRunner:
    """The runner of units in this process. A wrong training is an `InputError` before anything is
    run."""
    from lm_eval_icl.cli.train import training
    from lm_eval_icl.studies.unit_runner import UnitRunner

    runner = UnitRunner(grid, options, folder, training, args.include_path)
    for model in grid.models:
        if model.training:
            runner.training(model)
    return runner


def _run(
    grid: Grid, folder: StudyFolder, args: argparse.Namespace, options: Options, console: Console
) -> None:
    """Run a study, and write and print its results."""
    from lm_eval_icl.studies.conduct import Here, conduct, states
    from lm_eval_icl.studies.end import conclude
    from lm_eval_icl.studies.targets import Cell

    runner = _runner(grid, folder, args, options)
    if args.rerun is not None:
        again = folder.forget(grid, args.rerun)
        what = f"--rerun {args.rerun}: {len(again)} are made again"
        console.print(what, markup=False, highlight=False)
    failed: dict[str, str] = {}
    if args.ray is None:
        conduct(grid, folder, Here(runner.run), failed)
    else:
        from lm_eval_icl.studies.cluster import study_on_ray

        with study_on_ray(
            args.ray, grid, options, folder.path, runner.trainer, args.include_path
        ) as executor:
            conduct(grid, folder, executor, failed)
    # While cells run, a warning would stand there once a cell. Now it says what the page lacks.
    log.setLevel(logging.WARNING)
    not_made = conclude(grid, folder, args.study, failed, console)
    if not_made:
        cells = [target for target, _ in states(grid, folder, failed) if isinstance(target, Cell)]
        number = sum(cell.path in not_made for cell in cells)
        first = next(iter(not_made.values())).removesuffix(".")
        raise InputError(
            f"{number} of {len(cells)} cells failed; the first: {first}. "
            f"{folder.path / 'study.json'} has each reason under `failures`, and the same command "
            "tries again."
        )
