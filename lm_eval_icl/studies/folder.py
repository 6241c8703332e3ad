"""The folder of a study, in which every file is named by what it is made of.

    cells/MODEL/METHOD/TASK,.../results_ID.json   what lm-eval writes, one folder a cell
    cells/MODEL/METHOD/TASK,.../samples_TASK_ID.jsonl
    checkpoints/MODEL,TRAINING,METHOD-ID          models that the study has trained; NAME.part is not finished
    study.json, study.csv, board.html, figures/   what came out
    .lock                                         held by the process that writes the folder

What is there is done, and is not written again unless it is asked for (`forget`). It appears whole or not at all. One
process writes at a time.
"""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from lm_eval.loggers import EvaluationTracker

from lm_eval_icl.errors import CannotWrite, InputError, refusing, writing
from lm_eval_icl.files import write_atomically
from lm_eval_icl.studies.cells import Candidate, Cell, Checkpoint, DevChoice, Grid, Model, Target, choose, digest


class StudyFolder:
    """A study's folder, which is made when it is locked. What cannot be written raises `CannotWrite`."""

    def __init__(self, path: Path) -> None:
        self.path, self.cells, self.checkpoints = path, path / "cells", path / "checkpoints"
        results = {file.parent for file in path.glob("cells/*/*/[!.]*/results_*.json")}
        trained = {folder for folder in path.glob("checkpoints/*") if folder.suffix != ".part"}
        self._choices: dict[str, DevChoice] = {}
        # The paths of the targets that were there when it was opened, or were written since.
        self.there = {file.relative_to(path).as_posix() for file in results | trained}

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Inside this context, no other process writes the folder. A process that is killed leaves no lock."""
        with self._writing():
            self.path.mkdir(parents=True, exist_ok=True)
            try:
                lock = FileLock(self.path / ".lock", timeout=0).acquire()
            except Timeout as error:
                what = "another process runs a study in this folder: wait until it ends, or give another folder"
                raise InputError(f"--output {self.path}: {what}.") from error
        with lock:
            for half in self.path.glob("cells/*/*/.*"):  # of a process that was killed
                shutil.rmtree(half, ignore_errors=True)
            yield

    def has(self, target: Target) -> bool:
        return target.path in self.there

    def results_path(self, cell: Cell) -> Path:
        return self.path / cell.path / f"results_{digest(cell.path)}.json"

    def results(self, cell: Cell) -> dict[str, Any]:
        """The results file of a cell that is done."""
        path = self.results_path(cell)
        with refusing(f"{path}: is not whole", f"Run the cell again: --rerun '{cell.path}'."):
            return dict(json.loads(path.read_text(encoding="utf-8")))

    def choice(self, grid: Grid, candidates: Sequence[Candidate]) -> DevChoice:
        """What the dev set chooses, whose cells are all there."""
        metric = f"{grid.study.metric},"  # of several filters of a task's own, the first counts

        def score(cell: Cell, rule: str) -> float:
            values = self.results(cell)["results"][cell.task]
            return float(
                values[metric + rule] if rule else next(values[name] for name in values if name.startswith(metric))
            )

        key = candidates[0].dev[0].path
        if key not in self._choices:
            scores = [[score(cell, candidate.rule) for cell in candidate.dev] for candidate in candidates]
            self._choices[key] = choose(grid, candidates, scores)
        return self._choices[key]

    def arguments(self, model: Model) -> dict[str, Any]:
        """The arguments of `--model_args` with which a model is evaluated."""
        if model.training is None:
            return dict(model.arguments)
        of_base = ("tokenizer", "revision", "subfolder")
        own = {key: value for key, value in model.arguments.items() if key not in of_base}
        return {**own, "pretrained": str(self.checkpoints / model.checkpoint)}

    def unfinished(self, model: Model) -> Path:
        """The folder in which a model is trained."""
        return self.checkpoints / f"{model.checkpoint}.part"

    def failures(self) -> dict[str, str]:
        """Why targets could not be made when the study ended, by path, as `study.json` says."""
        record = self.path / "study.json"
        return dict(json.loads(record.read_text(encoding="utf-8"))["failures"]) if record.is_file() else {}

    def forget(self, grid: Grid, pattern: str) -> list[str]:
        """Take what is there, and what was made of it, for missing, so that it is made again. Each file stays until the
        new one takes its place. The pattern is one of paths, such as "cells/*/icl/*"."""
        forgotten = {path for path in self.there if path.startswith("checkpoints/") and fnmatch(path, pattern)}

        def matches(cell: Cell) -> bool:
            return fnmatch(cell.path, pattern) or Checkpoint(cell.model).path in forgotten

        for candidates in grid.alternatives:
            on_dev = [cell for candidate in candidates for cell in candidate.dev]
            is_chosen = len(candidates) > 1 and all(map(self.has, on_dev))
            tested = self.choice(grid, candidates)[0] if is_chosen else candidates[0].test
            forgotten |= {cell.path for cell in (*on_dev, *tested) if matches(cell)}
            if is_chosen and any(map(matches, on_dev)):
                forgotten |= {cell.path for cell in tested}
        forgotten &= self.there
        self.there -= forgotten
        self._choices.clear()
        return sorted(forgotten)

    def write(self, target: Target, outcome: Any) -> None:
        """Write a target that was made, in place of what is there: a cell's results, or a trained model, which the
        training has written beside its place."""
        place = self.path / target.path
        with self._writing():
            place.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(target, Cell):
                self._write_cell(target, place, outcome)
            else:  # which is here if all machines share the folder's disk
                # The training's own checkpoints have the optimizer's state too.
                shutil.rmtree(self.unfinished(target.model) / "checkpoints", ignore_errors=True)
                _replace(place, self.unfinished(target.model))
        self.there.add(target.path)

    def _write_cell(self, cell: Cell, place: Path, results: Mapping[str, Any]) -> None:
        """Write results and samples beside their folder, and then put them in its place."""
        half = place.with_name(f".{uuid.uuid4().hex}")
        tracker = EvaluationTracker(output_path=str(half / "results.json"))
        arguments = dict(results["config"]["model_args"])
        tracker.general_config_tracker.log_experiment_args(cell.variant.method, arguments, None, None, False)
        aggregated, samples = dict(results), results["samples"]
        del aggregated["samples"]
        try:
            tracker.save_results_aggregated(results=aggregated, samples=samples)
            for task, of_task in samples.items():
                tracker.save_results_samples(task_name=task, samples=of_task)
            files = sorted(half.iterdir()) if half.is_dir() else []
            if len(files) < 1 + len(samples) or any(file.read_bytes().rstrip()[-1:] != b"}" for file in files):
                raise CannotWrite(f"--output {self.path}: {cell.path} cannot be written: is the disk full?")
            for file in files:  # lm-eval names them by the date, and only warns of what it could not write
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
    """Put a folder in the place of another, if one is there."""
    old = place.with_name(f".{place.name}")
    with suppress(FileNotFoundError):
        place.rename(old)
    folder.rename(place)
    shutil.rmtree(old, ignore_errors=True)
