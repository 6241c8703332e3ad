"""The folder of a study.

    cells/MODEL/METHOD/TASK,.../results_ID.json   what lm-eval writes, one folder a cell
    cells/MODEL/METHOD/TASK,.../samples_TASK_ID.jsonl
    choices/MODEL/TASK,....json                   demonstrations that a model has chosen
    checkpoints/MODEL,TRAINING,METHOD-ID          models that the study has trained; NAME.part is not finished
    work/...                                      responses of cells that are not finished
    logs/...                                      what a cluster's worker said of a unit that failed
    study.json                                    the study, the states of its cells, what was chosen, what failed
    .lock, .running.json                          held by the process that writes the folder, and what that runs

A cell's or a checkpoint's folder appears whole or not at all. One process writes a folder at a time.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from lm_eval.loggers import EvaluationTracker

from lm_eval_icl.errors import CannotWrite, InputError, one_line, refusing, writing
from lm_eval_icl.files import write_atomically
from lm_eval_icl.results import read as reader
from lm_eval_icl.studies.cells import Cell, Model

# How long, in seconds, a lock is waited for, which `--status` may hold for a moment.
_WAIT = 2.0


class StudyFolder:
    """A study's folder. What cannot be written in it raises `CannotWrite`.

    Args:
        path: the folder, which is made when it is locked.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.cells, self.work = path, path / "cells", path / "work"
        self.checkpoints = path / "checkpoints"
        self._lock, self._running = path / ".lock", path / ".running.json"
        self._writing = partial(writing, f"--output {path}", CannotWrite)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Inside this context, no other process writes the folder. A process that is killed leaves no lock.

        Raises:
            InputError: another process has it, or the folder cannot be made or written.
        """
        lock = FileLock(self._lock)
        with self._writing():
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                lock.acquire(timeout=_WAIT)
            except Timeout as error:
                raise InputError(
                    f"--output {self.path}: {self.running() or 'another process'} runs a study in this folder, and "
                    "only one may at a time: wait until it ends (--status shows how far it is), or give another folder."
                ) from error
        try:
            self.note_running("the beginning")
            for folder in (self.cells, self.work):
                folder.mkdir(exist_ok=True)
            yield
        finally:
            self._running.unlink(missing_ok=True)
            lock.release()

    def note_running(self, what: str, failed: Mapping[str, str] | None = None) -> None:
        """Note what is run now, for `running`, and why cells have failed so far, for `failed`."""
        facts = {"process": os.getpid(), "machine": socket.gethostname(), "runs": what, "failed": failed or {}}
        self.write(self._running.name, json.dumps(facts) + "\n")

    def running(self) -> str:
        """Which process runs a study in this folder, and what; empty if none does."""
        try:
            if not self._lock.is_file():
                return ""
            with FileLock(self._lock, timeout=0):
                return ""
        except Timeout:
            pass
        except OSError:  # somebody else's folder: what stands in the file is all that is known
            if not self._running.is_file():
                return ""
        try:
            facts = json.loads(self._running.read_text(encoding="utf-8"))
            return f"process {facts['process']} on {facts['machine']} (at {facts['runs']})"
        except (OSError, ValueError, KeyError, TypeError):
            return "another process"

    def failed(self) -> dict[str, str]:
        """Why cells have failed, by their paths: as the latest run has said, and the one that runs or was killed."""
        failed = dict(self.record().get("failed", {}))
        with suppress(OSError, ValueError, KeyError, TypeError):
            failed |= json.loads(self._running.read_text(encoding="utf-8"))["failed"]
        return failed

    def results(self, cell: Cell) -> Path:
        return self.cells / cell.path / f"results_{cell.id}.json"

    def save(self, cell: Cell, results: dict[str, Any], model_args: Mapping[str, Any]) -> None:
        """Write a cell's results and samples, all or nothing. They take the place of those that are there."""
        half = self.work / f"{cell.id}.{uuid.uuid4().hex}"
        tracker = EvaluationTracker(output_path=str(half / "results.json"))
        tracker.general_config_tracker.log_experiment_args(cell.variant.method, dict(model_args), None, None, False)
        samples = results.pop("samples")
        tracker.save_results_aggregated(results=results, samples=samples)
        for task, of_task in samples.items():
            tracker.save_results_samples(task_name=task, samples=of_task)
        names = {f"results_{tracker.date_id}.json": 1}
        names |= {f"samples_{task}_{tracker.date_id}.jsonl": len(of_task) for task, of_task in samples.items()}
        if not all(whole_lines(half / name, lines, name.endswith(".json")) for name, lines in names.items()):
            shutil.rmtree(half, ignore_errors=True)  # lm-eval only warns
            raise CannotWrite(f"--output {self.path}: the results of {cell.path} cannot be written: is the disk full?")
        for file in list(half.iterdir()):  # lm-eval names them by the date, which would differ in every run
            file.rename(half / file.name.replace(str(tracker.date_id), cell.id))
        self._replace(self.cells / cell.path, half)

    def receive(self, files: Mapping[str, bytes]) -> None:
        """Write files that another process has made in a folder of its own: each cell, choice and checkpoint all or
        nothing.

        Args:
            files: by their paths below that folder.
        """
        wholes: dict[Path, dict[str, bytes]] = {}
        for name, content in files.items():
            path = Path(name)
            whole = {"cells": path.parent, "choices": path}.get(path.parts[0], Path(*path.parts[:2]))
            wholes.setdefault(whole, {})[str(path.relative_to(whole))] = content
        for whole, contents in wholes.items():
            half = self.work / uuid.uuid4().hex
            with self._writing():
                for name, content in contents.items():
                    file = half / name  # of a whole that is one file, the name is "."
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.write_bytes(content)
            self._replace(self.path / whole, half)

    def _replace(self, whole: Path, half: Path) -> None:
        """Put what was written in the place of what is there, all or nothing."""
        before = half.with_name(f"{half.name}.before")
        with self._writing():
            try:
                with suppress(FileNotFoundError):
                    whole.rename(before)
                whole.parent.mkdir(parents=True, exist_ok=True)
                half.rename(whole)
                if before.is_dir():
                    shutil.rmtree(before, ignore_errors=True)
                else:  # a file, or nothing
                    before.unlink(missing_ok=True)
            except OSError:
                shutil.rmtree(half, ignore_errors=True)
                with suppress(OSError):
                    before.rename(whole)
                raise

    def read(self, cell: Cell, task: str) -> dict[str, Any]:
        """The results, configuration and numbers of samples of a finished cell, checked as a leaderboard checks them:
        the samples are there, each of them once, and give the result.

        Raises:
            InputError: somebody has changed or removed them.
        """
        with self._whole(cell):
            runs, left_out = reader.read([self.results(cell)], quiet=True, dev=True)
            if not runs:
                raise self._damaged(cell, left_out[0].why)
            result, results = runs[0].tasks[task], runs[0].results
            if result.answers is None:
                if result.aggregation in reader.AGGREGATIONS:
                    raise self._damaged(cell, " ".join(result.marks) or "its samples are missing.")
                # Such a metric is not computed from numbers of single documents: only these can be counted.
                documents = {sample["doc_id"] for sample in self.samples(cell, task)}
                if len(documents) != result.documents:
                    why = f"its samples are of {len(documents)} documents, its results of {result.documents}."
                    raise self._damaged(cell, why)
            study = results["config"]["icl"]["study"]
            study["contents"]  # which every cell has
            return {key: results[key] for key in ("results", "config", "n-samples")}

    def samples(self, cell: Cell, task: str) -> list[dict[str, Any]]:
        """The samples of a finished cell, in the order of the documents.

        Raises:
            InputError: as for `read`.
        """
        path = self.cells / cell.path / f"samples_{task}_{cell.id}.jsonl"
        with self._whole(cell), path.open(encoding="utf-8") as file:
            return [json.loads(line) for line in file]

    @contextmanager
    def _whole(self, cell: Cell) -> Iterator[None]:
        try:
            yield
        except InputError:
            raise
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise self._damaged(cell, one_line(error)) from error

    def _damaged(self, cell: Cell, why: str) -> InputError:
        return InputError(
            f"--output {self.path}: {cell.path} is not whole ({why.removesuffix('.')}): remove that folder below "
            "cells/, and the same command runs it again, as it does with --rerun."
        )

    def is_trained(self, model: Model) -> bool:
        """Whether the checkpoint of a model is there, or none is needed."""
        return model.training is None or (self.checkpoints / model.checkpoint).is_dir()

    def finish_training(self, model: Model) -> None:
        """Let the checkpoint of a model, whose training has ended, be there, without the training's own checkpoints."""
        checkpoint = self.checkpoints / model.checkpoint
        with self._writing():
            self.unfinished(model).rename(checkpoint)
        shutil.rmtree(checkpoint / "checkpoints", ignore_errors=True)  # those have the optimizer's state too

    def unfinished(self, model: Model) -> Path:
        """The folder in which a model is trained."""
        return self.checkpoints / f"{model.checkpoint}.part"

    def arguments(self, model: Model) -> dict[str, Any]:
        """The arguments of `--model_args` with which a model is evaluated."""
        if model.training is None:
            return dict(model.arguments)
        of_base = ("tokenizer", "revision", "subfolder")
        own = {key: value for key, value in model.arguments.items() if key not in of_base}
        return {**own, "pretrained": str(self.checkpoints / model.checkpoint)}

    def training_record(self, model: Model) -> dict[str, Any]:
        """What the training of a model was made with.

        Raises:
            InputError: somebody has changed or removed it.
        """
        path = self.checkpoints / model.checkpoint / "training.json"
        with refusing(f"{path}: is not whole", "Remove its folder, and the same command trains again."):
            return dict(json.loads(path.read_text(encoding="utf-8")))

    def record(self) -> dict[str, Any]:
        """What the latest run has written to `study.json`; empty if there is none.

        Raises:
            InputError: somebody has damaged it.
        """
        path = self.path / "study.json"
        if not path.is_file():
            return {}
        with refusing(f"{path} cannot be read"):
            return dict(json.loads(path.read_text(encoding="utf-8")))

    def write(self, name: str, content: str) -> None:
        """Write a file of the folder, whole or not at all."""
        with self._writing():
            write_atomically(self.path / name, content)

    def tidy(self) -> None:
        """Remove what was kept of cells that were not finished."""
        shutil.rmtree(self.work, ignore_errors=True)


def whole_lines(path: Path, number: int, together: bool = False) -> bool:
    """Whether a file has `number` lines that are each JSON; with `together`, whether the whole file is JSON."""
    try:
        with path.open(encoding="utf-8") as file:
            entries = [json.load(file)] if together else [json.loads(line) for line in file]
    except (OSError, ValueError):
        return False
    return len(entries) == number
