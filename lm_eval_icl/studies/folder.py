"""The folder of a study, in which every file is named by what it is made of.

    cells/MODEL/METHOD/TASK,.../results_ID.json   what lm-eval writes, one folder a cell
    cells/MODEL/METHOD/TASK,.../samples_TASK_ID.jsonl
    choices/MODEL/TASK,....json                   demonstrations that a model has chosen
    checkpoints/MODEL,TRAINING,METHOD-ID          models that the study has trained; NAME.part is not finished
    study.json, study.csv, board.html, figures/   what came out
    .lock                                         held by the process that writes the folder

What is there is done, and is never written again. It appears whole or not at all. One process writes at a time.
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
from lm_eval_icl.studies.cells import Candidate, Cell, ChosenRows, Grid, Model, Target, digest
from lm_eval_icl.studies.choose import DevChoice, choose

# How long, in seconds, a lock is waited for, which `--status` may hold for a moment.
_WAIT = 2.0


class StudyFolder:
    """A study's folder. What cannot be written in it raises `CannotWrite`.

    Args:
        path: the folder, which is made when it is locked.

    Attributes:
        there: the paths of the targets that were there when the folder was opened, or were written since.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.cells, self.checkpoints = path, path / "cells", path / "checkpoints"
        results = {file.parent for file in path.glob("cells/*/*/[!.]*/results_*.json")}
        trained = {folder for folder in path.glob("checkpoints/*") if folder.suffix != ".part"}
        files = results | trained | {*path.glob("choices/*/*.json")}
        self._weights: dict[str, str] = {}
        self._choices: dict[str, DevChoice] = {}
        self.there = {file.relative_to(path).as_posix() for file in files}
        self._examples = {name.split("/")[1]: name for name in self.there if name.startswith("cells/")}  # by model

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Inside this context, no other process writes the folder. A process that is killed leaves no lock.

        Raises:
            InputError: another process has it, or the folder cannot be made or written.
        """
        lock = FileLock(self.path / ".lock")
        with self._writing():
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                lock.acquire(timeout=_WAIT)
            except Timeout as error:
                raise InputError(
                    f"--output {self.path}: another process runs a study in this folder, and only one may at a time: "
                    "wait until it ends (--status shows how far it is), or give another folder."
                ) from error
        try:
            for half in self.path.glob("cells/*/*/.*"):  # of a process that was killed
                shutil.rmtree(half, ignore_errors=True)
            yield
        finally:
            lock.release()

    @property
    def is_running(self) -> bool:
        """Whether a process runs a study in this folder."""
        lock = self.path / ".lock"
        try:
            if lock.is_file():
                FileLock(lock, timeout=0).acquire().lock.release()
        except Timeout:
            return True
        except OSError:  # somebody else's folder
            pass
        return False

    # What is there.

    def has(self, target: Target) -> bool:
        return target.path in self.there

    def results_path(self, cell: Cell) -> Path:
        return self.path / cell.path / f"results_{digest(cell.path)}.json"

    def results(self, cell: Cell) -> dict[str, Any]:
        """The results file of a cell that is done.

        Raises:
            InputError: somebody has damaged or removed it.
        """
        return self._read(self.results_path(cell))

    @staticmethod
    def _read(path: Path) -> dict[str, Any]:
        with refusing(f"{path}: is not whole", "Run the cell again: --rerun, with its path."):
            return dict(json.loads(path.read_text(encoding="utf-8")))

    def facts(self, cell: Cell) -> dict[str, Any]:
        """What a cell that is done says under `config.icl.study`."""
        return dict(self.results(cell)["config"]["icl"]["study"])

    def choice(self, grid: Grid, candidates: Sequence[Candidate]) -> DevChoice:
        """What the dev set chooses, whose cells are all there."""
        key = candidates[0].dev[0].path
        if key not in self._choices:
            self._choices[key] = choose(grid, candidates, self.results)
        return self._choices[key]

    def rows(self, chosen: ChosenRows) -> dict[str, Any]:
        """What the file of a choice of demonstrations says, which is there."""
        path = self.path / chosen.path
        with refusing(f"{path}: is not whole", "Remove it, and the same command chooses again."):
            return dict(json.loads(path.read_text(encoding="utf-8")))

    def weights(self, model: Model) -> str:
        """The digest of a model's files that a cell says which is there; empty if none is."""
        name = self._examples.get(model.folder)
        if name is not None and model.folder not in self._weights:
            path = self.path / name / f"results_{digest(name)}.json"
            self._weights[model.folder] = str(self._read(path)["config"]["icl"]["study"]["weights"])
        return self._weights.get(model.folder, "")

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

    def training_record(self, model: Model) -> dict[str, Any]:
        """What the training of a model was made with; empty if the checkpoint has been removed."""
        with suppress(OSError, ValueError):
            return dict(json.loads((self.checkpoints / model.checkpoint / "training.json").read_text(encoding="utf-8")))
        return {}

    def record(self) -> dict[str, Any]:
        """What `study.json` says; empty if there is none, or it is damaged."""
        with suppress(OSError, ValueError):
            return dict(json.loads((self.path / "study.json").read_text(encoding="utf-8")))
        return {}

    # What is made.

    def write(self, target: Target, outcome: Any) -> None:
        """Write a target that was made: a cell's results, a choice of demonstrations, or a trained model, which the
        training has written beside its place."""
        with self._writing():
            if isinstance(target, Cell):
                self._write_cell(target, outcome)
            elif isinstance(target, ChosenRows):
                (self.path / target.path).parent.mkdir(parents=True, exist_ok=True)
                write_atomically(self.path / target.path, json.dumps(outcome, indent=1) + "\n")
            elif not self.unfinished(target.model).is_dir():
                why = "was trained where this process does not see it: put the study's folder on a disk that all share"
                raise InputError(f"--output {self.path}: {target.path} {why}.")
            else:
                self.unfinished(target.model).rename(self.path / target.path)
                # The training's own checkpoints have the optimizer's state too.
                shutil.rmtree(self.path / target.path / "checkpoints", ignore_errors=True)
        self.there.add(target.path)
        if isinstance(target, Cell):
            self._examples.setdefault(target.model.folder, target.path)

    def _write_cell(self, cell: Cell, results: Mapping[str, Any]) -> None:
        """Write results and samples beside their folder, and then put them in its place."""
        place = self.path / cell.path
        place.parent.mkdir(parents=True, exist_ok=True)
        half = place.with_name(f".{uuid.uuid4().hex}")
        tracker = EvaluationTracker(output_path=str(half / "results.json"))
        arguments = dict(results["config"]["model_args"])
        tracker.general_config_tracker.log_experiment_args(cell.variant.method, arguments, None, None, False)
        samples = results["samples"]
        try:
            tracker.save_results_aggregated(
                results={key: value for key, value in results.items() if key != "samples"}, samples=samples
            )
            for task, of_task in samples.items():
                tracker.save_results_samples(task_name=task, samples=of_task)
            names = {f"results_{tracker.date_id}.json": 1}
            names |= {f"samples_{task}_{tracker.date_id}.jsonl": len(of_task) for task, of_task in samples.items()}
            for name, number in names.items():  # lm-eval only warns
                lines = (half / name).read_text(encoding="utf-8").splitlines() if (half / name).is_file() else []
                if len(lines) < number or not lines[-1].endswith("}"):
                    raise CannotWrite(f"--output {self.path}: {cell.path} cannot be written: is the disk full?")
            for file in list(half.iterdir()):  # lm-eval names them by the date, which would differ in every run
                file.rename(half / file.name.replace(str(tracker.date_id), digest(cell.path)))
            shutil.rmtree(place, ignore_errors=True)  # which somebody may have left there without results
            half.rename(place)
        finally:
            shutil.rmtree(half, ignore_errors=True)

    def note(self, failed: Mapping[str, str]) -> None:
        """Note why targets could not be made, by path."""
        self.write_file("study.json", json.dumps({**self.record(), "failures": failed}, indent=2) + "\n")

    def write_file(self, name: str, content: str) -> None:
        """Write a file of the folder, whole or not at all."""
        with self._writing():
            write_atomically(self.path / name, content)

    def remove(self, grid: Grid, pattern: str) -> list[str]:
        """Remove what is there and what was made of it, so that it is made again.

        Args:
            pattern: of paths below this folder, such as "cells/*/icl/*".

        Returns:
            The paths.
        """
        removed: dict[str, None] = {}

        def is_removed(target: Target) -> bool:
            made_of = [is_removed(need) for need in target.needs]
            if not (fnmatch(target.path, pattern) or any(made_of)):
                return False
            if self.has(target):
                removed[target.path] = None
            return True

        for candidates in grid.alternatives:
            on_dev = [is_removed(cell) for candidate in candidates for cell in candidate.dev]
            tested = [cell for candidate in candidates for cell in candidate.test]
            if len(candidates) > 1 and all(self.has(cell) for candidate in candidates for cell in candidate.dev):
                tested = [*self.choice(grid, candidates).cells]
            for cell in tested:
                if (is_removed(cell) or (len(candidates) > 1 and any(on_dev))) and self.has(cell):
                    removed[cell.path] = None
        with self._writing():
            for path in removed:
                place = self.path / path
                place.unlink() if place.suffix == ".json" else shutil.rmtree(place)
        self.there -= removed.keys()
        self._choices.clear()
        self._examples = {name.split("/")[1]: name for name in self.there if name.startswith("cells/")}
        return [*removed]

    def _writing(self) -> Any:
        return writing(f"--output {self.path}", CannotWrite)
