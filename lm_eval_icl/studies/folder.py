"""The folder of a study: its cells, each with a results file and samples, and which process works on which.

    cells/MODEL/METHOD/TASK,.../results_ID.json   what lm-eval writes, one folder a cell
    cells/MODEL/METHOD/TASK,.../samples_TASK_ID.jsonl
    choices/MODEL/TASK,....json                   demonstrations that a model has chosen
    checkpoints/MODEL,TRAINING,METHOD-ID          models that the study has trained; NAME.part is not finished
    work/...                                      responses of cells that are not finished
    claims/...                                    who works on what

A cell's or a checkpoint's folder appears whole or not at all. Several processes, also of several machines on one file
system, share the work: each claims what it works on by creating a file, which fails if the file is there, and touches
the file as long as it lives. The claim of a process that has died is taken over by creating the next one.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import socket
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lm_eval.loggers import EvaluationTracker

from lm_eval_icl.errors import CannotWrite, InputError, one_line
from lm_eval_icl.harness.saving import whole_lines
from lm_eval_icl.harness.training import ARGUMENTS
from lm_eval_icl.results import read as reader
from lm_eval_icl.studies.grid import Training, Variant

# How often a claim is touched, and after how long without that its process counts as dead, in seconds.
TOUCH, DEAD = 10.0, 120.0


@dataclass(frozen=True)
class Model:
    """A model of a study: one that is there, or one that the study trains from that.

    Attributes:
        arguments: as of `--model_args`, of the model that is there.
        training: how it is trained; None if it is not.
        under: the method that it is trained under.
    """

    arguments: Mapping[str, Any]
    training: Training | None = None
    under: Variant | None = None

    @property
    def name(self) -> str:
        """The name of the model that is there."""
        return str(self.arguments["pretrained"])

    @property
    def folder(self) -> str:
        """The folder of its cells: its name, the training's, and a digest of all arguments and the checkpoint."""
        said = json.dumps(self.arguments, sort_keys=True, default=str)
        if self.training is None:
            return f"{_short(self.name)}-{digest(said)}"
        return f"{_short(self.name)},{plain(self.training.name, 60)}-{digest(said + self.checkpoint)}"

    @property
    def training_arguments(self) -> dict[str, Any]:
        """As of `--model_args` of `lm-eval-icl train`: the arguments that training knows, and those of the method."""
        of_model = {key: value for key, value in self.arguments.items() if key in ARGUMENTS}
        return {**of_model, **(self.under.arguments if self.under else {})}

    @property
    def checkpoint(self) -> str:
        """The name of the checkpoint that is trained, with a digest of all that its weights depend on."""
        if self.training is None or self.under is None:
            return ""
        options = {key: value for key, value in self.training.options.items() if key not in ("save_steps", "data")}
        said = json.dumps([self.training_arguments, self.under.method, options], sort_keys=True, default=str)
        names = _short(self.name), plain(self.training.name, 60), plain(self.under.name, 60)
        return f"{','.join(names)}-{digest(said)}"


@dataclass(frozen=True)
class Cell:
    """One evaluation of a study.

    Attributes:
        task: the name of the leaf task.
        split: "test" or "dev".
        changes: as of `Leaf`.
        rows: a digest of the dev set's rows, which depend on all demonstrations of a study; on the test set only of a
            cell whose demonstrations a model chooses outside the dev set, and empty otherwise.
        chosen: the arguments (or "seeds") of a cell on the test set whose values were chosen on the dev set.
        alone: its task makes the requests for one method, so that it shares none with cells of others.
    """

    model: Model
    variant: Variant
    task: str
    num_fewshot: int
    demonstrations: str | None
    seed: int
    order: int
    split: str
    limit: float | None
    changes: str = ""
    rows: str = ""
    chosen: tuple[str, ...] = ()
    alone: bool = False

    @property
    def path(self) -> str:
        """The cell's folder, below that of all cells."""
        of_task = {
            "num_fewshot": self.num_fewshot,
            **({} if self.demonstrations is None else {"demonstrations": self.demonstrations}),
            "seed": self.seed,
            "order": self.order,
            **({"changes": self.changes} if self.changes else {}),
            **({} if self.limit is None else {"limit": self.limit}),
            **({} if self.split == "test" and not self.rows else {"split": f"{self.split}-{self.rows}"}),
        }
        task = ",".join([self.task, *(f"{name}={value}" for name, value in of_task.items())])
        return "/".join([self.model.folder, plain(self.variant.name), plain(task)])

    @property
    def id(self) -> str:
        """A digest of the path, for the names of files."""
        return digest(self.path)


def _short(model: str) -> str:
    return plain(model.strip("/"), 60)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def plain(text: str, longest: int = 150) -> str:
    """Text as a file's name. What is shortened or has other characters gets a digest."""
    plain = re.sub(r"[^\w.,=+-]+", "-", text, flags=re.ASCII).lstrip(".-")[-longest:]
    return plain if plain == text else f"{plain}-{digest(text)}"


class Folder:
    """A study's folder.

    Args:
        path: the folder, which is made if it does not exist.

    Raises:
        InputError: it cannot be made or written.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.cells, self.work, self.claims = path, path / "cells", path / "work", path / "claims"
        self.checkpoints = path / "checkpoints"
        try:
            for each in (self.cells, self.work, self.claims):
                each.mkdir(parents=True, exist_ok=True)
            probe = path / f".{uuid.uuid4().hex}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise InputError(f"--output {path}: cannot be written ({error.strerror}).") from error

    def results(self, cell: Cell) -> Path:
        return self.cells / cell.path / f"results_{cell.id}.json"

    def save(self, cell: Cell, results: dict[str, Any], model_args: Mapping[str, Any]) -> None:
        """Write a cell's results and samples, all or nothing. They take the place of those that are there.

        Raises:
            CannotWrite: they cannot be written.
        """
        folder = self.cells / cell.path
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
        before = half.with_name(f"{half.name}.before")
        try:
            for file in half.iterdir():  # lm-eval names them by the date, which would differ in every run
                file.rename(half / file.name.replace(str(tracker.date_id), cell.id))
            with suppress(FileNotFoundError):
                folder.rename(before)
            folder.parent.mkdir(parents=True, exist_ok=True)
            half.rename(folder)
            shutil.rmtree(before, ignore_errors=True)
        except OSError as error:
            shutil.rmtree(half, ignore_errors=True)
            with suppress(OSError):
                before.rename(folder)
            if not self.results(cell).is_file():  # otherwise another process that was taken for dead has been faster
                raise CannotWrite(f"--output {self.path}: cannot be written ({error.strerror}).") from error

    def read(self, cell: Cell, task: str) -> dict[str, Any]:
        """The results, configuration and numbers of samples of a finished cell, checked as a leaderboard checks them:
        the samples are there, each of them once, and give the result.

        Raises:
            InputError: somebody has changed or removed them.
        """
        with self._whole(cell):
            runs, left_out = reader.read([self.results(cell)], quiet=True, dev=True)
            if left_out:
                raise self._damaged(cell, left_out[0].why)
            result, found = runs[0].tasks[task], runs[0].results
            if result.answers is None:
                if result.aggregation in reader.AGGREGATIONS:
                    raise self._damaged(cell, " ".join(result.marks) or "its samples are missing.")
                # Such a metric is not computed from numbers of single documents: only these can be counted.
                documents = {sample["doc_id"] for sample in self.samples(cell, task)}
                if len(documents) != result.documents:
                    why = f"its samples are of {len(documents)} documents, its results of {result.documents}."
                    raise self._damaged(cell, why)
            found["config"]["icl"]["study"]["contents"]  # which every cell has
            return {key: found[key] for key in ("results", "config", "n-samples")}

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
        """Let the checkpoint of a model, whose training has ended, be there, without the training's own checkpoints.

        Raises:
            InputError: it cannot be written.
        """
        there = self.checkpoints / model.checkpoint
        try:
            self.unfinished(model).rename(there)
        except OSError as error:
            raise CannotWrite(f"--output {self.path}: cannot be written ({error.strerror}).") from error
        shutil.rmtree(there / "checkpoints", ignore_errors=True)  # those have the optimizer's state too

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
        try:
            return dict(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise InputError(
                f"{path}: is not whole ({one_line(error)}): remove its folder, and the same command trains again."
            ) from error

    def drop_work(self, name: str, claim: Path) -> None:
        """Remove what was kept of a piece of work, which is done, unless another process has taken over the claim."""
        if not self._later(name, claim):
            shutil.rmtree(self.work / name, ignore_errors=True)

    def write(self, name: str, content: str) -> None:
        """Write a file of the folder, whole or not at all.

        Raises:
            InputError: it cannot be written.
        """
        half = self.path / f".{uuid.uuid4().hex}"
        try:
            half.write_text(content, encoding="utf-8")
            half.replace(self.path / name)
        except OSError as error:
            raise CannotWrite(f"--output {self.path}: cannot be written ({error.strerror}).") from error

    @contextmanager
    def claimed(self, name: str) -> Iterator[Path | None]:
        """Claim a piece of work; the claim is released at the end, but not that of a process that has taken it over.

        Yields the claim's file, None if another process has the claim.
        """
        path = self._claim(name)
        if path is None:
            yield None
            return
        stop = threading.Event()

        def keep() -> None:
            while not stop.wait(TOUCH):
                with suppress(OSError):
                    path.touch()

        thread = threading.Thread(target=keep, daemon=True)
        thread.start()
        try:
            yield path
        finally:
            stop.set()
            thread.join()
            for each in {*self.claims.glob(f"{name}.*")} - self._later(name, path):
                each.unlink(missing_ok=True)

    def _later(self, name: str, claim: Path) -> set[Path]:
        """The claims of processes that have taken this one for dead, which it was not: it was paused, for example."""
        return {each for each in self.claims.glob(f"{name}.*") if int(each.suffix[1:]) > int(claim.suffix[1:])}

    def _claim(self, name: str) -> Path | None:
        self.claims.mkdir(exist_ok=True)  # another process that has finished may have removed it
        number = 0
        for each in self.claims.glob(f"{name}.*"):
            number = max(number, int(each.suffix[1:]))
        latest = self.claims / f"{name}.{number}"
        if number and not self._is_dead(latest):
            return None
        mine = self.claims / f"{name}.{number + 1}"
        try:
            with mine.open("x", encoding="utf-8") as file:
                json.dump({"where": _where(), "pid": os.getpid()}, file)
        except (FileExistsError, FileNotFoundError):  # another process has claimed it, or is just tidying
            return None
        return mine

    def _is_dead(self, claim: Path) -> bool:
        """Whether the process of a claim has died: on this machine it is gone, on another it no longer touches it."""
        try:
            claimed = json.loads(claim.read_text(encoding="utf-8") or "{}")
            if claimed.get("where") == _where() and not _is_alive(claimed["pid"]):
                return True
            return self._now() - claim.stat().st_mtime > DEAD
        except (OSError, ValueError):
            return False  # it has just been released, or is just being written

    def _now(self) -> float:
        """The time by the file system's clock, which may be another machine's."""
        probe = self.claims / f"clock-{uuid.uuid4().hex}"
        probe.touch()
        now = probe.stat().st_mtime
        probe.unlink()
        return now

    def tidy(self) -> None:
        """Remove the folders of work and claims, if no process works on anything."""
        with suppress(OSError):
            self.claims.rmdir()
            gone = self.path / f".work.{uuid.uuid4().hex}"
            self.work.rename(gone)  # at once, as a process that begins now would use it
            shutil.rmtree(gone, ignore_errors=True)


def _where() -> str:
    """Where a process's number means this process: the machine, and on Linux its namespace of process numbers."""
    space = Path("/proc/self/ns/pid")
    return f"{socket.gethostname()} {space.readlink() if space.is_symlink() else ''}".strip()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
