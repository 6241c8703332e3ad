"""Studies that tests run: on the demonstration model, with few documents."""

from __future__ import annotations

import csv
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import lm_eval
import pandas as pd
import yaml
from lm_eval.tasks import TaskManager

from lm_eval_icl.cli.train import training
from lm_eval_icl.harness.plugin import task_dir
from lm_eval_icl.smoke.demo import model_path
from lm_eval_icl.studies import end, grid
from lm_eval_icl.studies.cells import Cell
from lm_eval_icl.studies.conduct import Conductor
from lm_eval_icl.studies.folder import StudyFolder
from lm_eval_icl.studies.progress import StudyProgress, open_study
from lm_eval_icl.studies.run import Options

MODEL = f"pretrained={model_path()}"
DEMO = {"models": MODEL, "tasks": "icl_demo_short", "num_fewshot": 3, "seeds": "0..1"}
OPTIONS = Options("cpu", 8, 6)
# What differs between two runs of one cell: the time, and how much of it was run in this process.
TIMES = {"date", "total_evaluation_time_seconds", "start_time", "end_time", "seconds", "git_hash", "upper_git_hash"}
COUNTS = {"contexts_encoded", "contexts_reused", "tokens_run", "tokens_saved"}


def write(path: Path, **keys: object) -> str:
    """The file of a study with these keys in place of the demonstration's."""
    path.write_text(yaml.safe_dump({**DEMO, **keys}))
    return str(path)


def opened(
    output: Path,
    options: Options = OPTIONS,
    include_path: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    **keys: object,
) -> StudyProgress:
    """A study with these keys, as it stands in its folder."""
    study = grid.read(write(output.with_suffix(".yaml"), **keys), overrides or {})
    return open_study(study, StudyFolder(output), options, include_path)


def conduct(output: Path, *args: Any, trainer: Any = training, **keys: Any) -> StudyProgress:
    """A study of `opened`, which is run."""
    with StudyFolder(output).locked():
        progress = opened(output, *args, **keys)
        Conductor(progress, args[1] if len(args) > 1 else None, trainer).run()
    return progress


def rows(progress: StudyProgress) -> pd.DataFrame:
    """What `study.csv` says of the finished cells."""
    return end.cells_table(progress, end.results_of(progress, end.columns_of(progress.study, progress.leaves)))


def results(progress: StudyProgress, cell: Cell) -> dict[str, Any]:
    return dict(json.loads(progress.folder.results(cell).read_text()))


def facts(progress: StudyProgress) -> list[dict[str, Any]]:
    """What every cell says of itself."""
    return [results(progress, cell)["config"]["icl"]["study"] for cell in progress.all_cells()]


def samples(progress: StudyProgress, cell: Cell) -> list[dict[str, Any]]:
    return progress.folder.samples(cell, cell.task)


def contents(output: Path, apart: Collection[str] = (*TIMES, *COUNTS, "shared", "work")) -> dict[str, Any]:
    """The files of a study's folder, without the folder's name and these keys of JSON files."""

    def without(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: without(inner) for key, inner in value.items() if key not in apart}
        return [without(inner) for inner in value] if isinstance(value, list) else value

    files: dict[str, Any] = {}
    for path in sorted(path for path in output.rglob("*") if path.is_file() and path.name != ".lock"):
        name, content = str(path.relative_to(output)), path.read_bytes()
        for text in (str(output), str(output).replace("/", "__")):  # lm-eval makes a file's name of it, too
            content = content.replace(text.encode(), b"OUTPUT")
        if path.suffix == ".json":
            files[name] = without(json.loads(content))
        elif name == "study.csv":
            files[name] = [{**row, "seconds": ""} for row in csv.DictReader(content.decode().splitlines())]
        elif path.name in ("board.html", "log.jsonl") or path.stem == "tokens":  # they show times and counts
            files[name] = len(content) > 0
        else:
            files[name] = content
    return files


def evaluated(
    progress: StudyProgress,
    cell: Cell,
    folder: str | Path = "demo",
    metadata: Mapping[str, Any] | None = None,
    **arguments: Any,
) -> dict[str, Any]:
    """The same evaluation by lm-eval alone.

    Args:
        folder: where the task is: a folder of this package's tasks, or another.
        metadata: of the task.
        arguments: of `simple_evaluate`, in place of the cell's.
    """
    manager = TaskManager(include_path=task_dir() / folder, include_defaults=False, metadata=dict(metadata or {}))
    every = {
        "model": cell.variant.method,
        "model_args": {**progress.folder.arguments(cell.model), **cell.variant.arguments},
        "tasks": [cell.task],
        "num_fewshot": cell.num_fewshot,
        "batch_size": progress.options.batch_size,
        "device": "cpu",
        "limit": progress.options.limit,
        "fewshot_random_seed": cell.seed,
    }
    return dict(lm_eval.simple_evaluate(**{**every, **arguments}, task_manager=manager))


def assert_alike(mine: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]]) -> None:
    """The log-likelihoods of these samples are the same to 1e-5, and so are the greedy answers."""
    for one, other in zip(mine, theirs, strict=True):
        for (ours,), (their,) in zip(one["resps"], other["resps"], strict=True):
            assert abs(float(ours[0]) - float(their[0])) < 1e-5
            assert str(ours[1]) == str(their[1])
