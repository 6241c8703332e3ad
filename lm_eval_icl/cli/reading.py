"""Inputs of several commands: results files, and the arguments of models."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from lm_eval_icl.errors import InputError, suggestion
from lm_eval_icl.harness.arguments import pairs
from lm_eval_icl.results.board import grouped, shown
from lm_eval_icl.results.metrics import CALIBRATION
from lm_eval_icl.results.read import read
from lm_eval_icl.results.records import LeftOutFile, Run

RESULTS = (
    "results files of lm-eval (best with --log_samples) or of collect, and folders with such files"
)
SHOWN = 10  # how many rows the terminal shows


def task_names(text: str | None) -> list[str] | None:
    """The names in --tasks; None if it is not given."""
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


def read_runs(
    paths: Sequence[Path], metric: str | None = None
) -> tuple[list[Run], list[LeftOutFile]]:
    """The runs in files and folders, and the files that were left out. An `InputError` is raised if
    there are no runs, or if none has the metric."""
    runs, left_out = read(paths, metric=metric)
    if not runs:
        reason = f" {shown(str(left_out[0].path))}: {shown(left_out[0].why)}" if left_out else ""
        names = ", ".join(map(str, paths))
        raise InputError(f"{names}: no results that can be used were found.{reason}")
    known = set[str]()
    for run in runs:
        known.update(result.metric for result in run.all_results)
    if metric is not None and metric not in known:
        near = suggestion(metric, sorted(known | CALIBRATION.keys()))
        raise InputError(f"--metric {metric}: no result has it: {near}")
    return runs, left_out


def print_line(console: Console, line: str) -> None:
    """Print a line as it is, without wrapping it to the width of the terminal."""
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def print_left_out(left_out: Sequence[LeftOutFile], console: Console) -> None:
    """Print a line for each reason. (All cells on the dev set of a study have the same reason.)"""
    for why, files in grouped(left_out, lambda file: file.why).items():
        more = f" and {len(files) - 1} more" if len(files) > 1 else ""
        print_line(console, f"left out: {shown(str(files[0].path))}{more}: {shown(why)}")


def model_arguments(written: Any, method_names: Collection[str] = ()) -> dict[str, Any]:
    """The arguments in --model_args, which may be arguments of `load_model`, or of a method
    (`method_names`)."""
    from lm_eval_icl.inference.checkpoints import ARGUMENTS  # which imports transformers

    arguments = pairs("model_args", written)
    if not arguments.get("pretrained"):
        raise InputError(
            "--model_args: has no pretrained=...: give the name or folder of a checkpoint."
        )
    for name in arguments.keys() - ARGUMENTS - {*method_names}:
        near = suggestion(name, sorted(ARGUMENTS | {*method_names}))
        raise InputError(f"--model_args: unknown argument {name!r}: {near}")
    return arguments
