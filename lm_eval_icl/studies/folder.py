"""The folder of a study, in which the path of every file tells its inputs.

    cells/MODEL/METHOD/TASK,.../           a folder for each cell, with lm-eval's files:
        results_ID.json                    its results
        samples_TASK_ID.jsonl              its samples
    checkpoints/MODEL,TRAINING,METHOD-ID   a model that the study has trained
    checkpoints/MODEL,TRAINING,METHOD-ID.part   a model that is being trained
    study.json, study.csv, trainings.csv   the results of the whole study,
    board.html, figures/                   and what shows them
    .id                                    names the study in the results of its cells
    .lock                                  held by the process that writes the folder

A target that is in the folder is done, and is not made again unless the user asks for it
(`forget`). It appears whole or not at all. One process writes at a time.
"""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from lm_eval.loggers import EvaluationTracker

from lm_eval_icl.errors import CannotWrite, InputError, refusing, writing
from lm_eval_icl.files import HALF, read_json, to_disk, write_atomically
from lm_eval_icl.studies.targets import (
    Candidate,
    Cell,
    Checkpoint,
    Grid,
    Model,
    Target,
    choose,
    digest,
)


class StudyFolder:
    """A study's folder, which is made when it is locked. `CannotWrite` is raised if a file cannot
    be written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.cells = path / "cells"
        self.checkpoints = path / "checkpoints"
        files = path.glob("cells/*/*/[!.]*/results_*.json")
        results = {file.parent for file in files if read_json(file) is not None}
        trained = {folder for folder in path.glob("checkpoints/*") if folder.suffix != ".part"}
        # Paths of all candidates on the dev set -> the cells that these chose.
        self._choices: dict[tuple[str, ...], tuple[Cell, ...]] = {}
        # The paths of the targets that are in the folder.
        self.there = {file.relative_to(path).as_posix() for file in results | trained}

    @contextmanager
    def locked(self) -> Iterator[None]:
        """A context manager in which no other process writes the folder. A process that is killed
        leaves no lock."""
        with self._writing():
            self.path.mkdir(parents=True, exist_ok=True)
            try:
                lock = FileLock(self.path / ".lock", timeout=0).acquire()
            except Timeout as error:
                what = (
                    "another process runs a study in this folder: wait until it ends, or give "
                    "another folder"
                )
                raise InputError(f"--output {self.path}: {what}.") from error
        with lock:
            self._clean()
            yield

    def _clean(self) -> None:
        """Remove what a process that was killed had half written, or put back what it was
        replacing."""
        for hidden in [*self.path.glob("cells/*/*/.*"), *self.path.glob("checkpoints/.*")]:
            place = hidden.with_name(hidden.name.removeprefix("."))
            if hidden.name.startswith(HALF) or place.exists():
                shutil.rmtree(hidden, ignore_errors=True)
            else:
                hidden.rename(place)

    @cached_property
    def identity(self) -> str:
        """What the cells of this folder have in common, wherever they are copied to."""
        file = self.path / ".id"
        if not file.is_file() or not file.stat().st_size:
            self.write_file(file.name, uuid.uuid4().hex)
        return file.read_text(encoding="utf-8")

    def has(self, target: Target) -> bool:
        return target.path in self.there

    def results_path(self, cell: Cell) -> Path:
        return self.path / cell.path / f"results_{digest(cell.path)}.json"

    def results(self, cell: Cell) -> dict[str, Any]:
        """The results file of a cell that is done."""
        path = self.results_path(cell)
        with refusing(f"{path}: is incomplete", f"Run the cell again: --rerun '{cell.path}'."):
            return dict(json.loads(path.read_text(encoding="utf-8")))

    def choice(self, grid: Grid, candidates: Sequence[Candidate]) -> tuple[Cell, ...]:
        """The cells on the test set that the dev set has chosen. All cells on the dev set must be
        done."""
        metric = f"{grid.study.metric},"

        def score(cell: Cell, rule: str) -> float:
            values = self.results(cell)["results"][cell.task]
            # If a task has several filters, the first counts.
            names = [metric + rule] if rule else [x for x in values if x.startswith(metric)]
            return float(values[names[0]])

        key = tuple(candidate.dev[0].path for candidate in candidates)
        if key not in self._choices:
            scores = [
                [score(cell, candidate.rule) for cell in candidate.dev] for candidate in candidates
            ]
            self._choices[key] = choose(grid, candidates, scores)
        return self._choices[key]

    def arguments(self, model: Model) -> dict[str, Any]:
        """The arguments of `--model_args` with which a model is evaluated."""
        if model.training is None:
            return dict(model.arguments)
        base_only = ("tokenizer", "revision", "subfolder")
        kept = {key: value for key, value in model.arguments.items() if key not in base_only}
        return {**kept, "pretrained": str(self.checkpoints / model.checkpoint)}

    def unfinished(self, model: Model) -> Path:
        """The folder in which a model is while it is trained."""
        return self.checkpoints / f"{model.checkpoint}.part"

    def failures(self) -> dict[str, str]:
        """Path -> reason of the targets that could not be made when the study ended, from
        `study.json`."""
        record = read_json(self.path / "study.json")
        return dict(record["failures"]) if record else {}

    def forget(self, grid: Grid, pattern: str) -> list[str]:
        """Treat the targets whose paths match a pattern, such as "cells/*/icl/*", and all targets
        that depend on them as missing, so that they are made again. Each file stays until a new one
        replaces it. Return the paths."""
        forgotten = {
            path
            for path in self.there
            if path.startswith("checkpoints/") and fnmatch(path, pattern)
        }

        def matches(cell: Cell) -> bool:
            return fnmatch(cell.path, pattern) or Checkpoint(cell.model).path in forgotten

        for candidates in grid.alternatives:
            on_dev = list[Cell]()
            for candidate in candidates:
                on_dev += candidate.dev
            is_chosen = len(candidates) > 1 and all(map(self.has, on_dev))
            tested = self.choice(grid, candidates) if is_chosen else candidates[0].test
            forgotten |= {cell.path for cell in (*on_dev, *tested) if matches(cell)}
            if is_chosen and any(map(matches, on_dev)):
                forgotten |= {cell.path for cell in tested}
        forgotten &= self.there
        self.there -= forgotten
        self._choices.clear()
        return sorted(forgotten)

    def write(self, target: Target, outcome: Any) -> None:
        """Write a cell's results, or move a trained model from the folder in which it was trained.
        An older result is replaced."""
        place = self.path / target.path
        with self._writing():
            place.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(target, Cell):
                self._write_cell(target, place, outcome)
            else:  # trained by another machine, it is here if all machines share the disk
                # The training's own checkpoints have the optimizer's state too.
                shutil.rmtree(self.unfinished(target.model) / "checkpoints", ignore_errors=True)
                _replace(place, self.unfinished(target.model))
        self.there.add(target.path)

    def _write_cell(self, cell: Cell, place: Path, results: Mapping[str, Any]) -> None:
        """Write results and samples into a hidden folder, and then rename that to the cell's
        folder."""
        half = place.with_name(f"{HALF}{uuid.uuid4().hex}")
        tracker = EvaluationTracker(output_path=str(half / "results.json"))
        arguments = dict(results["config"]["model_args"])
        tracker.general_config_tracker.log_experiment_args(
            cell.variant.method, arguments, None, None, False
        )
        aggregated = dict(results)
        samples = results["samples"]
        del aggregated["samples"]
        try:
            tracker.save_results_aggregated(results=aggregated, samples=samples)
            for task, task_samples in samples.items():
                tracker.save_results_samples(task_name=task, samples=task_samples)
            # lm-eval only warns if it cannot write a file.
            files = sorted(half.iterdir()) if half.is_dir() else []
            lines = sum(file.read_bytes().count(b"}\n") for file in half.glob("samples_*"))
            is_whole = any(read_json(file) is not None for file in half.glob("results_*"))
            if not is_whole or lines < sum(map(len, samples.values())):
                raise CannotWrite(
                    f"--output {self.path}: {cell.path} cannot be written: is the disk full?"
                )
            for file in files:  # lm-eval names them by the date
                to_disk(file)
                file.rename(half / file.name.replace(str(tracker.date_id), digest(cell.path)))
            _replace(place, half)
        finally:
            shutil.rmtree(half, ignore_errors=True)

    def write_file(self, name: str, content: str) -> None:
        """Write a file of the folder, whole or not at all."""
        with self._writing():
            write_atomically(self.path / name, content)

    def _writing(self) -> Any:
        return writing(f"--output {self.path}", CannotWrite)


def _replace(place: Path, folder: Path) -> None:
    """Move a folder to a place, and remove the folder that was there. If a process is killed
    between the two steps, `StudyFolder.locked` puts that folder back."""
    old = place.with_name(f".{place.name}")
    with suppress(FileNotFoundError):
        place.rename(old)
    folder.rename(place)
    shutil.rmtree(old, ignore_errors=True)
