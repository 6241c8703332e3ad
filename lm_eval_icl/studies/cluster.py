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
from typing import Any, Self

from lm_eval_icl import version
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
_ANSWER = 10.0  # seconds that a cluster may take to answer
_RAY = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}


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

    def __enter__(self) -> Self:
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
        """As `Conductor.run` wants it.

        Raises:
            InputError: a worker is refused, or none can begin.
        """
        while True:
            self._hire(queue)
            held = Counter(hired.model for hired in self.hired if hired.model)
            for hired in self.hired:
                if hired.ready and hired.call is None:
                    model = queue.best(hired.model, held, lambda model, hired=hired: self.needs(model) == hired.needs)  # type: ignore[misc]
                    if model is not None:
                        held[model] += model != hired.model
                        hired.unit, hired.model = queue.take(model), model
                        hired.call = self.submit(hired.actor, hired.unit)
            self.show(queue)
            calls = {hired.call: hired for hired in self.hired if hired.call is not None}
            if not calls:
                time.sleep(0.2)  # until there is a node
                continue
            answered, _ = self.ray.wait(list(calls), timeout=1.0)
            for call in answered:
                if (unit := self._answered(calls[call], queue)) is not None:
                    return unit

    def _hire(self, queue: Queue) -> None:
        """Begin workers for the units that wait, as many as the cluster is large. Ray places each when it has room."""
        units = Counter[tuple[tuple[str, float], ...]]()
        for folder in queue.waiting():
            units[tuple(self.needs(queue.models[folder]).items())] += queue.count(folder)
        if not units:
            return
        size = self.ray.cluster_resources()
        for items, waiting in units.items():
            needs = dict(items)
            alike = [hired for hired in self.hired if hired.needs == needs]
            wanted = waiting - sum(hired.unit is None for hired in alike)
            room = [size.get(_RAY[name], 0) // number - len(alike) for name, number in needs.items() if number]
            for _ in range(int(min(wanted, *room))):
                actor, call = self.begin({**needs, "scheduling_strategy": "SPREAD"})
                self.hired.append(Hired(actor, needs, call))
        if all(hired.ready for hired in self.hired):
            return
        for hired in list(self.hired):  # those for which no unit waits make room for those that have not begun
            if hired.unit is None and tuple(hired.needs.items()) not in units:
                self._dismiss(hired)

    def _dismiss(self, hired: Hired) -> None:
        self.hired.remove(hired)
        self.ray.kill(hired.actor)

    def _answered(self, hired: Hired, queue: Queue) -> Unit | None:
        """Take an answer: the unit that has ended with it, if it ends one."""
        call, unit, hired.call, hired.unit = hired.call, hired.unit, None, None
        try:
            result = self.ray.get(call)
        except self.ray.exceptions.RayError as error:  # it was killed, its node is gone, or no cell could follow
            log, cause = str(error).strip(), getattr(error, "cause", None)
            # What Ray says of a lost worker has the numbers of its actor before the reason.
            why = one_line(cause) if cause else " ".join(log.rpartition("is dead because ")[2].split())[:300]
            self._dismiss(hired)
            self.losses[unit] += 1
            if unit is None and "creation task" in log:
                last = log.splitlines()[-1]
                what = f"a worker cannot begin ({last}): install the same lm-eval-icl on every node."
                raise InputError(f"--ray: {what}") from error
            if unit is None and self.losses[unit] > 10 * _TRIES:
                what = f"{self.losses[unit]} workers were lost while they began; the last one: {why}"
                raise InputError(f"--ray: {what}") from error
            if unit is None:
                return None
            if self.losses[unit] < _TRIES:
                queue.add(unit, again=True)
                return None
            self.give_up(unit, f"its worker was lost {_TRIES} times; the last time: {why}", log)
            return unit
        if unit is not None:
            self.receive(unit, result)
            return unit
        if result:
            raise InputError(str(result))
        hired.ready, self.losses[None] = True, 0
        return None


# A study on a cluster.


@dataclass(frozen=True)
class Setup:
    """What a worker is told of a study at its beginning.

    Attributes:
        folder: the study's, as it was given to the process that writes it.
        stamp: tells whether a worker sees that folder.
        paths: files and folders that it must find.
        contents: digests of the tasks' data and of the methods' code.
        directory: in which the study was started.
    """

    study: Study
    options: Options
    include_path: str | None
    rerun: bool
    trainer: Trainer | None
    folder: Path
    stamp: tuple[int, int]
    paths: tuple[str, ...]
    contents: Mapping[str, object]
    directory: str = field(default_factory=os.getcwd)


def versions() -> dict[str, str]:
    """The versions that all workers share."""
    names = ("torch", "transformers", "lm_eval")
    return {"lm-eval-icl": version.version(), **{name: importlib.metadata.version(name) for name in names}}


def contents_of(worker: Worker) -> dict[str, object]:
    """Digests of what a study's numbers come from: the data of each task, the code of each method, and the code that
    chooses demonstrations."""
    progress, study = worker.progress, worker.progress.study
    data = {
        f"data of task {name}": (study_tasks.contents(leaf, study.seeds[0]), worker.grid.tasks[name].dev)
        for name, leaf in progress.leaves.items()
    }
    code = {f"code of {variant.method}": code_of(variant.method) for variant in study.variants}
    return {**data, **code}


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
        known: Setup = ray.get(setup[0])
        if Path(known.directory).is_dir():
            os.chdir(known.directory)
        for path in known.paths:
            if not Path(path).exists():
                return f"{here}: there is no {path}, which the study needs: put it there, or on a disk that all share."
        self.sees = known.stamp != (0, 0) and stamp(known.folder) == known.stamp
        study_folder = StudyFolder(known.folder)
        self.folder = StudyFolder(Path(tempfile.mkdtemp(prefix="lm-eval-icl-")))
        for folder in (self.folder.cells, self.folder.work):
            folder.mkdir()
        try:
            progress = open_study(known.study, self.folder, known.options, known.include_path, known.rerun)
            self.worker = Worker(progress, known.include_path, known.trainer)
        except Exception as error:
            return f"{here}: {reason(error)}"
        self.worker.arguments, self.worker.located = study_folder.arguments, self._located
        if self.sees:
            self.worker.trains_in = study_folder
        contents = contents_of(self.worker)
        other = [name for name, digests in known.contents.items() if contents.get(name) != digests]
        return f"{here}: has another {other[0]} than where the study was started." if other else ""

    def _located(self, model: Model) -> dict[str, Any]:
        """How a model is loaded here: a trained one from where its files are, one on several GPUs in parts."""
        several = model.resources.get("num_gpus", 0) > 1
        located: dict[str, Any] = {"parallelize": True} if several else {}
        if model.training and not self.sees:
            located["pretrained"] = str(self.folder.checkpoints / model.checkpoint)
        return located

    def run(
        self, unit: Unit, weights: Mapping[str, str], needed: Mapping[str, bytes], trained: list[Any]
    ) -> dict[str, Any]:
        """Run a unit.

        Args:
            weights: as of `Worker`, for the unit's model.
            needed: files of the study's folder that the unit needs.
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
            needed = {**needed, **ray.get(trained[0])}
        for name, content in needed.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(content)
        worker.weights[unit.model.folder] = dict(weights)
        failed, broken, log = set(worker.progress.failed), "", ""
        try:
            worker.run(unit)
        except Exception as error:
            if ends_all(error):  # the next worker may have what this one lacks
                raise
            broken, log = reason(error), traceback.format_exc()
        made = {"train": "checkpoints", "choose": "choices"}.get(unit.kind, "cells")
        files = {name: content for name, content in _files(root / made, root).items() if needed.get(name) != content}
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


def _files(folder: Path, root: Path) -> dict[str, bytes]:
    """The files in a folder, by their paths below `root`."""
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


class StudyCluster(Cluster):
    """The workers of a study.

    Args:
        conductor: plans the study.
        address: as of `Cluster`.

    Raises:
        InputError: as for `Cluster`, or no node has what a model needs.
    """

    def __init__(self, conductor: Conductor, address: str) -> None:
        super().__init__(address)
        self.conductor, self.worker = conductor, conductor.worker
        self.progress, self.folder = conductor.progress, conductor.folder
        study, options, include_path = self.progress.study, self.progress.options, self.worker.include_path
        nodes = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        self._gpus = float((options.device or "cuda") != "cpu" and any(node.get("GPU", 0) >= 1 for node in nodes))
        for model in conductor.grid.models:
            needs = self.needs(model)
            if not any(all(node.get(_RAY[name], 0) >= number for name, number in needs.items()) for node in nodes):
                asked = ", ".join(f"{name}={number:g}" for name, number in needs.items() if number)
                raise InputError(f"models: {model.name}: no node of the cluster has {asked}.")
        names = ("pretrained", "tokenizer", "peft", "delta")  # arguments of a model that may be folders
        named = [str(model[name]) for model in study.models for name in names if name in model]
        absolute = {path for path in named if Path(path).is_absolute()}  # these are no names on a hub
        named += [str(value) for value in study.metadata.values()] + [include_path or ""]
        paths = tuple(path for path in dict.fromkeys(named) if path in absolute or (path and Path(path).exists()))
        setup = Setup(
            study,
            options,
            include_path,
            self.progress.rerun,
            self.worker.trainer,
            self.folder.path,
            stamp(self.folder.path),
            paths,
            contents_of(self.worker),
        )
        self._setup = self.ray.put(setup)
        self._actor = self.ray.remote(Actor)
        self._trained: dict[str, Any] = {}  # the files of the checkpoint that was asked for last
        self._weights: dict[str, str] = {}
        self._noted = 0.0

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
        choices = self.worker.choices
        paths = [choices.path(key) for key in choices.keys(model.folder, unit.task)] if unit.task else []
        needed = {str(path.relative_to(root)): path.read_bytes() for path in paths if path.is_file()}
        if model.training and unit.kind != "train" and model.checkpoint not in self._trained:
            files = _files(self.folder.checkpoints / model.checkpoint, root)
            self._trained = {model.checkpoint: self.ray.put(files)}
        trained = [self._trained[model.checkpoint]] if model.checkpoint in self._trained else []
        return actor.run.remote(unit, self.worker.weights.get(model.folder, {}), needed, trained)

    def receive(self, unit: Unit, result: Mapping[str, Any]) -> None:
        progress, model = self.progress, unit.model
        if result["log"]:
            self._log(unit, result["log"])
        if (weights := result["weights"]) and self._weights.setdefault(model.folder, weights) != weights:
            why = other_weights(self.folder.path, model, "another worker").message
            progress.fail(progress.missing(unit.cells), why)
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
        self.conductor.bar.set_postfix_str(about)
        if time.monotonic() - self._noted > 2:
            self._noted = time.monotonic()
            latest = f", one of them {in_flight[-1].title}" if in_flight else ""
            done, total = self.conductor.cells_ended, self.conductor.cells_known
            self.folder.note_running(f"cell {done} of {total}: {about}{latest}", self.progress.failed)
