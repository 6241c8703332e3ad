"""Runs the units of a study on a Ray cluster, or on several workers of this machine.

The process that conducts the study plans and alone writes its folder. A worker is a Ray actor: it holds one model,
works in a folder of its own that nobody else sees, and returns what it wrote there as the files' bytes. Ray is imported
when a cluster is opened, and not before.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import shutil
import signal
import socket
import tempfile
import time
import traceback
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lm_eval_icl import version
from lm_eval_icl.demonstrations import kept
from lm_eval_icl.errors import InputError, one_line, reason
from lm_eval_icl.studies import tasks as study_tasks
from lm_eval_icl.studies.cells import Model, digest
from lm_eval_icl.studies.conduct import Conductor
from lm_eval_icl.studies.folder import StudyFolder
from lm_eval_icl.studies.grid import Study
from lm_eval_icl.studies.order import Queue, Unit
from lm_eval_icl.studies.progress import open_study
from lm_eval_icl.studies.run import Options, code_of, ends_all
from lm_eval_icl.studies.trainings import Trainer
from lm_eval_icl.studies.worker import Worker, other_weights

_TRIES = 3  # of a unit whose worker is lost
_PATIENCE = 60.0  # seconds that the first units wait for workers that have not begun
_ANSWER = 10.0  # seconds that a cluster may take to answer
_NAMED = ("pretrained", "tokenizer", "peft", "delta")  # arguments of a model that may be folders


@dataclass(eq=False)
class Hired:
    """An actor, and what it does.

    Attributes:
        needs: the resources that it has.
        call: what it was asked and has not answered; None if it is idle.
        ready: whether it has begun and was not refused.
        model: the folder of the model that it holds.
    """

    actor: Any
    needs: Mapping[str, float]
    call: Any
    ready: bool = False
    unit: Unit | None = None
    model: str | None = None


class Cluster(ABC):
    """Gives units to actors, and those of a lost actor to others.

    Args:
        address: of a cluster that runs; empty for one of this machine, which ends with this process.

    Raises:
        InputError: Ray is not installed, or no cluster answers.
    """

    def __init__(self, address: str) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            import ray
        except ImportError as error:
            raise InputError("--ray: Ray is not installed: pip install 'lm-eval-icl[cluster]'.") from error
        self.ray: Any = ray
        host, _, port = address.rpartition(":")
        if port.isdecimal():  # Ray would try for minutes
            try:
                socket.create_connection((host.removeprefix("ray://"), int(port)), timeout=_ANSWER).close()
            except (OSError, OverflowError) as error:
                raise InputError(f"--ray {address}: nothing answers there ({one_line(error)}).") from error
        terminated = signal.getsignal(signal.SIGTERM)
        try:
            dashboard = None if address else False  # a cluster that runs has one, or has not
            ray.init(address or "local", log_to_driver=False, logging_level=logging.ERROR, include_dashboard=dashboard)
        except Exception as error:  # of any kind: a node that takes too long raises no other
            how = f"--ray {address}: this cluster cannot be joined" if address else "--ray: Ray cannot be started"
            raise InputError(f"{how} ({one_line(error)}).") from error
        signal.signal(signal.SIGTERM, terminated)  # which Ray has replaced
        self.hired: list[Hired] = []
        self.losses = Counter[Unit | None]()
        self._begun = False
        self._first_hired = self._asked = 0.0

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        for hired in list(self.hired):
            self._dismiss(hired)
        self.ray.shutdown()

    @abstractmethod
    def needs(self, model: Model) -> dict[str, float]:
        """What of Ray's resources a worker with a model has: `num_cpus`, `num_gpus`, `memory`."""

    @abstractmethod
    def begin(self, options: Mapping[str, Any]) -> tuple[Any, Any]:
        """A new actor with these options, and the call that begins it, which answers why it cannot work, or ""."""

    @abstractmethod
    def submit(self, actor: Any, unit: Unit) -> Any:
        """The call that runs a unit."""

    @abstractmethod
    def receive(self, unit: Unit, result: Any) -> None:
        """Keep what came of a unit."""

    @abstractmethod
    def give_up(self, unit: Unit, why: str, log: str) -> None:
        """Note a unit whose workers were lost too often."""

    @abstractmethod
    def show(self, queue: Queue) -> None:
        """Show how far the study is."""

    def ended(self, queue: Queue) -> Unit:
        """As of `conduct.UnitRunner`.

        Raises:
            InputError: a worker is refused, or none can begin.
        """
        while True:
            self._hire(queue)
            held = Counter(hired.model for hired in self.hired if hired.model)
            for hired in self.hired if self._may_submit() else ():
                if hired.ready and hired.call is None:
                    model = queue.best(hired.model, held, lambda model, hired=hired: self.needs(model) == hired.needs)  # type: ignore[misc]
                    if model is not None:
                        held[model] += model != hired.model
                        hired.unit, hired.model = queue.take(model), model
                        hired.call = self.submit(hired.actor, hired.unit)
            self.show(queue)
            calls = {hired.call: hired for hired in self.hired if hired.call is not None}
            if not calls:
                time.sleep(0.2)  # until there is room for a worker
                continue
            answered, _ = self.ray.wait(list(calls), timeout=1.0)
            for call in answered:
                if (unit := self._answered(calls[call], queue)) is not None:
                    return unit

    def _may_submit(self) -> bool:
        """Whether units may run: at the beginning, all workers that can begin are asked first."""
        late = time.monotonic() - self._first_hired > _PATIENCE
        self._begun |= bool(self.hired) and (late or all(hired.ready for hired in self.hired))
        return self._begun

    def _hire(self, queue: Queue) -> None:
        """Begin workers for the units that wait, as many as there is room for."""
        busy = sum(hired.unit is not None for hired in self.hired)
        wanted = len(queue) + busy - len(self.hired)
        if wanted <= 0 or time.monotonic() - self._asked < 1:
            return
        self._first_hired = self._first_hired or time.monotonic()
        room = self.ray.available_resources()
        for hired in self.hired:
            if not hired.ready:
                room = _without(room, hired.needs)
        several = [self.needs(queue.models[folder]) for folder in queue.waiting()]
        for needs in [each for i, each in enumerate(several) if each not in several[:i]]:
            while wanted > 0 and all(room.get(_RAY[name], 0) >= number for name, number in needs.items()):
                actor, call = self.begin({**needs, "scheduling_strategy": "SPREAD"})
                self.hired.append(Hired(actor, needs, call))
                room, wanted = _without(room, needs), wanted - 1
            if not any(hired.needs == needs for hired in self.hired):  # make room for it
                others = (hired for hired in self.hired if hired.ready and hired.call is None)
                if (other := next((hired for hired in others if hired.needs not in several), None)) is not None:
                    self._dismiss(other)
        self._asked = time.monotonic()

    def _dismiss(self, hired: Hired) -> None:
        self.hired.remove(hired)
        self._asked = 0.0
        self.ray.kill(hired.actor)

    def _answered(self, hired: Hired, queue: Queue) -> Unit | None:
        """Take an answer: the unit that has ended with it, if it ends one."""
        call, unit, hired.call, hired.unit = hired.call, hired.unit, None, None
        try:
            result = self.ray.get(call)
        except self.ray.exceptions.RayError as error:  # it was killed, its node is gone, or no cell could follow
            log = str(error).strip()
            # A traceback ends with the error. What Ray says begins with the reason, or with the numbers of an actor.
            raised = isinstance(error, self.ray.exceptions.RayTaskError)
            of_actor = log.partition("The actor is dead because ")[2]
            reason = log.rpartition("\n")[2] if raised else of_actor or log.partition("\n")[0]
            why = " ".join(reason.split())[:300] or type(error).__name__
            self._dismiss(hired)
            self.losses[unit] += 1
            if unit is None:
                if "creation task" in log:
                    last = log.splitlines()[-1]
                    raise InputError(
                        f"--ray: a worker cannot begin ({last}): install the same lm-eval-icl on every node."
                    ) from error
                if self.losses[unit] > 10 * _TRIES:
                    raise InputError(
                        f"--ray: {self.losses[unit]} workers were lost while they began; the last one: {why}"
                    ) from error
            elif self.losses[unit] < _TRIES:
                queue.add(unit, again=True)
            else:
                self.give_up(unit, f"its worker was lost {_TRIES} times; the last time: {why}", log)
                return unit
            return None
        if unit is None:
            if result:
                raise InputError(str(result))
            hired.ready, self.losses[None] = True, 0
            return None
        self.receive(unit, result)
        return unit


_RAY = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}


def _without(room: Mapping[str, float], needs: Mapping[str, float]) -> dict[str, float]:
    return {**room, **{_RAY[name]: room.get(_RAY[name], 0) - number for name, number in needs.items()}}


# A study on a cluster.


@dataclass(frozen=True)
class Setup:
    """What a worker is told of a study at its beginning.

    Attributes:
        folder: the study's, as it was given to the process that writes it.
        stamp: tells whether a worker sees that folder.
        paths: files and folders that it must find.
        contents: digests of the tasks' data and of the methods' code.
    """

    study: Study
    options: Options
    include_path: str | None
    rerun: bool
    trainer: Trainer | None
    folder: Path
    stamp: tuple[int, int]
    paths: tuple[str, ...]
    contents: Mapping[str, object] = field(default_factory=dict)
    directory: str = field(default_factory=os.getcwd)


def versions() -> dict[str, str]:
    """The versions that all workers share."""
    names = ("torch", "transformers", "lm_eval")
    return {"lm-eval-icl": version.version(), **{name: importlib.metadata.version(name) for name in names}}


def contents_of(worker: Worker) -> dict[str, object]:
    """Digests of what a study's numbers come from: by task its data, by method its code."""
    progress, study = worker.progress, worker.progress.study
    data = {
        f"data of task {name}": (study_tasks.contents(leaf, study.seeds[0]), worker.grid.tasks[name].dev)
        for name, leaf in progress.leaves.items()
    }
    code = {f"code of {variant.method}": code_of(variant.method) for variant in study.variants}
    return {**data, **code, "code that chooses demonstrations": kept.code()}


def stamp(folder: Path) -> tuple[int, int]:
    """What only this folder has, wherever it is mounted; (0, 0) if it is not there."""
    try:
        facts = (folder / ".lock").stat()
    except OSError:
        return 0, 0
    return facts.st_ino, facts.st_mtime_ns


class Actor:
    """A worker of a study, which Ray makes an actor of."""

    def begin(self, theirs: Mapping[str, str], setup: list[Any]) -> str:
        """Load the study's tasks.

        Args:
            theirs: the versions of the process that conducts the study.
            setup: a reference to `Setup`, which is read after the versions have been compared.

        Returns:
            Why this worker cannot work, in one line; empty if it can.
        """
        import ray

        context = ray.get_runtime_context()
        here = f"worker on {socket.gethostname()} (node {context.get_node_id()[:8]})"
        for name, ours in versions().items():
            if ours != theirs[name]:
                return f"{here}: has {name} {ours}, and the study was started with {theirs[name]}: install the same."
        self.setup: Setup = ray.get(setup[0])
        if Path(self.setup.directory).is_dir():
            os.chdir(self.setup.directory)
        for path in self.setup.paths:
            if not Path(path).exists():
                return f"{here}: there is no {path}, which the study needs: put it there, or on a disk that all share."
        self.sees = self.setup.stamp != (0, 0) and stamp(self.setup.folder) == self.setup.stamp
        self.folder = StudyFolder(Path(tempfile.mkdtemp(prefix="lm-eval-icl-")))
        for path in (self.folder.cells, self.folder.work):
            path.mkdir()
        facts = self.setup.study, self.folder, self.setup.options, self.setup.include_path, self.setup.rerun
        try:
            self.worker = Worker(open_study(*facts), self.setup.include_path, self.setup.trainer)
        except Exception as error:
            return f"{here}: {reason(error)}"
        self.worker.arguments = StudyFolder(self.setup.folder).arguments
        self.worker.located = self._located
        if self.sees:
            self.worker.trains_in = StudyFolder(self.setup.folder)
        contents = contents_of(self.worker)
        other = [name for name, known in self.setup.contents.items() if contents.get(name) != known]
        return f"{here}: has another {other[0]} than where the study was started." if other else ""

    def _located(self, model: Model) -> dict[str, Any]:
        """How a model is loaded here: a trained one from where its files are, one on several GPUs in parts."""
        several = model.resources.get("num_gpus", 0) > 1
        located: dict[str, Any] = {"parallelize": True} if several else {}
        if model.training and not self.sees:
            located["pretrained"] = str(self.folder.checkpoints / model.checkpoint)
        return located

    def run(
        self, unit: Unit, weights: Mapping[str, str], given: Mapping[str, bytes], trained: list[Any]
    ) -> dict[str, Any]:
        """Run a unit.

        Args:
            weights: as of `Worker`, for the unit's model.
            given: files of the study's folder that the unit needs.
            trained: a reference to the files of the model's checkpoint, which are fetched if they are not here.

        Returns:
            files: those of the study's folder that it has made.
            failed, unchosen, broken: why cells, choices and all of the model could not be run.
            weights: a digest of the model's.
            log: the traceback of what broke.
        """
        import ray

        worker, root = self.worker, self.folder.path
        if trained and not self.sees and not (self.folder.checkpoints / unit.model.checkpoint).is_dir():
            given = {**given, **ray.get(trained[0])}
        _write(root, given)
        worker.weights[unit.model.folder] = dict(weights)
        failed, broken, log = set(worker.progress.failed), "", ""
        try:
            worker.run(unit)
        except Exception as error:
            if ends_all(error):  # the next worker may have what this one lacks
                raise
            broken, log = reason(error), traceback.format_exc()
        files: dict[str, bytes] = {}
        made = {"train": "checkpoints", "choose": "choices"}.get(unit.kind, "cells")
        for path in sorted((root / made).rglob("*")):
            if path.is_file() and given.get(name := str(path.relative_to(root))) != (content := path.read_bytes()):
                files[name] = content
        shutil.rmtree(self.folder.cells)
        self.folder.cells.mkdir()
        return {
            "files": files,
            "failed": {path: why for path, why in worker.progress.failed.items() if path not in failed},
            "unchosen": dict(worker.choices.failed),
            "broken": broken,
            "weights": worker.weights_held,
            "log": log,
        }


def _write(root: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)


class StudyCluster(Cluster):
    """The workers of a study.

    Args:
        conductor: plans the study.
        include_path, trainer: as of `Conductor`.
        address: as of `Cluster`.

    Raises:
        InputError: as for `Cluster`, or no node has what a model needs.
    """

    def __init__(self, conductor: Conductor, include_path: str | None, trainer: Trainer | None, address: str) -> None:
        super().__init__(address)
        self.conductor, self.worker = conductor, conductor.worker
        self.progress, self.folder = conductor.progress, conductor.folder
        study, options = self.progress.study, self.progress.options
        nodes = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        self._gpus = float((options.device or "cuda") != "cpu" and any(node.get("GPU", 0) >= 1 for node in nodes))
        for model in conductor.grid.models:
            needs = self.needs(model)
            if not any(all(node.get(_RAY[name], 0) >= number for name, number in needs.items()) for node in nodes):
                raise InputError(f"models: {model.name}: no node of the cluster has {_said(needs)}.")
        named = [str(model[name]) for model in study.models for name in _NAMED if name in model]
        absolute = {path for path in named if Path(path).is_absolute()}  # these are no names on a hub
        named += [str(value) for value in study.metadata.values()] + [include_path or ""]
        paths = tuple(path for path in dict.fromkeys(named) if path in absolute or (path and Path(path).exists()))
        facts = study, options, include_path, self.progress.rerun, trainer, self.folder.path, stamp(self.folder.path)
        self._setup = self.ray.put(Setup(*facts, paths, contents_of(self.worker)))
        self._actor = self.ray.remote(Actor)
        self._trained: dict[str, Any] = {}
        self._weights: dict[str, str] = {}
        self._noted = 0.0
        text = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[about]}")
        self._bar = Progress(*text, TimeRemainingColumn(), console=Console(stderr=True))
        self._cells = self._bar.add_task("cells", total=None, about="")

    def __exit__(self, *_: object) -> None:
        if self._bar.live.is_started:
            self._bar.update(self._cells, completed=self.conductor.cells_ended)
            self._bar.stop()
        super().__exit__()

    def ask(self) -> list[str]:
        """One worker on each node of the cluster is asked: why it cannot work; empty if it can."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        begun = []
        for node in self.ray.nodes():
            if node["Alive"] and node["Resources"].get("CPU", 0):
                where = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                begun.append(self.begin({"num_cpus": 0, "scheduling_strategy": where}))
        answers = []
        for _, call in begun:
            try:
                answers.append(self.ray.get(call))
            except self.ray.exceptions.RayError as error:
                answers.append(f"a worker ends while it begins: {one_line(error)[:300]}")
        return answers

    def needs(self, model: Model) -> dict[str, float]:
        """Those of the study's file; else one core, a GPU if the cluster has any, and memory for the weights twice."""
        files = Path(model.name).glob("*.safetensors") if Path(model.name).is_dir() else ()
        memory = 2 * sum(file.stat().st_size for file in files)
        return {"num_cpus": 1, "num_gpus": self._gpus, "memory": memory, **model.resources}

    def begin(self, options: Mapping[str, Any]) -> tuple[Any, Any]:
        actor = self._actor.options(**options, max_restarts=0).remote()
        return actor, actor.begin.remote(versions(), [self._setup])

    def submit(self, actor: Any, unit: Unit) -> Any:
        model, root = unit.model, self.folder.path
        given = {}
        if unit.task:
            for path in self.worker.choices.paths(model.folder, unit.task):
                if path.is_file():
                    given[str(path.relative_to(root))] = path.read_bytes()
        if model.training and unit.kind != "train" and model.checkpoint not in self._trained:
            files = (path for path in (self.folder.checkpoints / model.checkpoint).rglob("*") if path.is_file())
            self._trained = {
                model.checkpoint: self.ray.put({str(path.relative_to(root)): path.read_bytes() for path in files})
            }
        trained = [self._trained[model.checkpoint]] if model.checkpoint in self._trained else []
        return actor.run.remote(unit, self.worker.weights.get(model.folder, {}), given, trained)

    def receive(self, unit: Unit, result: Mapping[str, Any]) -> None:
        progress, model = self.progress, unit.model
        if result["log"]:
            self._log(unit, result["log"])
        if (weights := result["weights"]) and self._weights.setdefault(model.folder, weights) != weights:
            progress.fail(
                progress.missing(unit.cells), other_weights(self.folder.path, model, "another worker").message
            )
            return
        self.folder.receive(result["files"])
        if unit.kind == "train" and not result["broken"]:
            if self.folder.is_trained(model):  # what an earlier worker has begun here is not needed
                shutil.rmtree(self.folder.unfinished(model), ignore_errors=True)
            else:
                self.folder.finish_training(model)
        self.worker.choices.failed.update(result["unchosen"])
        if result["failed"] or result["broken"]:
            for cell in progress.missing(progress.known_cells(model)):
                if why := result["failed"].get(cell.path) or result["broken"]:
                    progress.fail([cell], why)
        progress.fail(progress.missing(unit.cells), "its worker has written nothing.")

    def give_up(self, unit: Unit, why: str, log: str) -> None:
        self._log(unit, log)
        if unit.kind == "choose":
            self.worker.choices.failed |= dict.fromkeys(self.worker.choices.keys(unit.model.folder, unit.task), why)
        elif unit.kind == "train":
            why = f"training of {unit.model.checkpoint}: {why}"
            self.progress.fail(self.progress.missing(self.progress.known_cells(unit.model)), why)
        self.progress.fail(self.progress.missing(unit.cells), why)

    def _log(self, unit: Unit, text: str) -> None:
        (self.folder.path / "logs").mkdir(exist_ok=True)
        requests = unit.batches[0].id if unit.batches else ""
        self.folder.write(f"logs/{digest(f'{unit.title} {requests}')}.txt", f"{unit.title}\n{text}\n")

    def show(self, queue: Queue) -> None:
        in_flight = [hired.unit for hired in self.hired if hired.unit is not None]
        ready = sum(hired.ready for hired in self.hired)
        beginning = f" ({len(self.hired) - ready} begin)" if ready < len(self.hired) else ""
        about = f"{ready} workers{beginning}, {len(in_flight)} units in flight, {len(self.progress.failed)} failed"
        done, total = self.conductor.cells_ended, self.conductor.cells_known
        self._bar.start()
        self._bar.update(self._cells, completed=done, total=total, about=about)
        if time.monotonic() - self._noted > 2:
            self._noted = time.monotonic()
            latest = f", one of them {in_flight[-1].title}" if in_flight else ""
            self.folder.note_running(f"cell {done} of {total}: {about}{latest}", self.progress.failed)


def _said(needs: Mapping[str, float]) -> str:
    return ", ".join(f"{name}={number:g}" for name, number in needs.items() if number)
