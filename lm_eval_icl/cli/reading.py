"""What several commands read: results files, and the arguments of models."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from lm_eval_icl.demonstrations.select import near
from lm_eval_icl.errors import InputError
from lm_eval_icl.harness.arguments import pairs
from lm_eval_icl.results.board import grouped, shown
from lm_eval_icl.results.read import read
from lm_eval_icl.results.records import LeftOutFile, Run

RESULTS = "results files of lm-eval, and folders with such; with --log_samples, or made by collect"
SHOWN = 10  # rows that the terminal shows


def task_names(text: str | None) -> list[str] | None:
    """The names in --tasks; None if it is not given."""
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


def read_runs(paths: Sequence[Path], where: str = "", metric: str | None = None) -> tuple[list[Run], list[LeftOutFile]]:
    """The runs in these files and folders, of which there is one or more, and the files that were left out; `where`
    stands before the message if there is none."""
    runs, left_out = read(paths, metric=metric)
    if not runs:
        reason = f" {shown(str(left_out[0].path))}: {shown(left_out[0].why)}" if left_out else ""
        raise InputError(f"{where}no results that can be used were found.{reason}")
    return runs, left_out


def print_line(console: Console, line: str) -> None:
    """Print a line as it is, at whatever width."""
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def print_left_out(left_out: Sequence[LeftOutFile], console: Console) -> None:
    """Print a line for each reason, as all cells of a study's dev set have the same."""
    for why, files in grouped(left_out, lambda file: file.why).items():
        more = f" and {len(files) - 1} more" if len(files) > 1 else ""
        print_line(console, f"left out: {shown(str(files[0].path))}{more}: {shown(why)}")


def model_arguments(written: Any, own: Collection[str] = ()) -> dict[str, Any]:
    """The arguments of a model in --model_args: those of `load_model`, and of a method its own."""
    from lm_eval_icl.inference.checkpoints import ARGUMENTS  # which imports transformers

    arguments = pairs("model_args", written)
    if not arguments.get("pretrained"):
        raise InputError("--model_args: has no pretrained=...: give the name or folder of a checkpoint.")
    for name in arguments.keys() - ARGUMENTS - {*own}:
        raise InputError(f"--model_args: unknown argument {name!r}: {near(name, sorted(ARGUMENTS | {*own}))}")
    return arguments
