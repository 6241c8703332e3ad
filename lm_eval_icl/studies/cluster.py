"""Runs the units of a study on a Ray cluster, or on several workers of this machine.

A worker is a Ray actor that holds one model. Ray places it, restarts it where it is lost, runs its unit again then, and
brings back what it made; the process that conducts the study alone writes its folder.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import signal
import socket
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from lm_eval_icl import version
from lm_eval_icl.errors import InputError, one_line
from lm_eval_icl.studies.cells import Grid, Model
from lm_eval_icl.studies.conduct import Executor, Failure, Outcome, Unit
from lm_eval_icl.studies.folder import StudyFolder
from lm_eval_icl.studies.run import Options, Trainer, UnitRunner
from lm_eval_icl.studies.tasks import open_study

_TRIES = 3  # of a unit whose worker is lost
_RESTARTS = 10  # of a worker
_RAY = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}
# What a worker has of Ray's resources, by these names.
Needs = tuple[tuple[str, float], ...]


@dataclass(eq=False)
class Hired:
    """A worker."""

    actor: Any
    needs: Needs  # what it has
    held: str = ""  # the folder of the model that it holds
    unit: Unit | None = None  # what it runs; None if it is idle
    call: Any = None  # what stands for the answer


class OnRay(Executor):
    """Runs units on workers of a Ray cluster: as many as it has room for under what their models need.

    Args:
        ray: Ray, with a cluster (`connected`).
        worker: the class of the workers, with its arguments: `run(unit)` returns what came of the unit's targets.
        needs: what a worker with a model has.
    """

    def __init__(self, ray: Any, worker: type, arguments: Sequence[Any], needs: Callable[[Model], Needs]) -> None:
        super().__init__()
        self.ray, self._class, self._arguments, self.needs = ray, ray.remote(worker), arguments, needs
        self.workers: list[Hired] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in list(self.workers):
            self._dismiss(worker)
        self.ray.shutdown()

    def wait(self) -> Sequence[Outcome]:
        """
        Raises:
            InputError: a worker cannot begin.
        """
        while True:
            self._give_units()
            calls = {worker.call: worker for worker in self.workers if worker.unit is not None}
            if not calls:  # until there is a node
                time.sleep(0.2)
                continue
            for call in self.ray.wait(list(calls), timeout=1.0)[0]:
                outcomes = self._answer(calls[call])
                self.running -= {target.path for target, _ in outcomes}
                return outcomes

    def _give_units(self) -> None:
        """Give units to idle workers, and to new ones while the cluster has room for them. Idle workers make room for
        those of models with other needs, and where a node was lost, for those that Ray begins again."""
        nodes = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]

        def room(needs: Needs) -> int:
            """How many more workers would fit if there were only such."""
            fit = sum(min(int(node.get(_RAY[name], 0) // each) for name, each in needs if each) for node in nodes)
            return fit - sum(worker.needs == needs for worker in self.workers)

        needs_of = {folder: self.needs(units[0][0].model) for folder, units in self.waiting.items() if units}
        waiting = Counter[Needs]()
        for folder, needs in needs_of.items():
            waiting[needs] += len(self.waiting[folder])
        for needs, number in waiting.items():
            idle = sum(worker.unit is None and worker.needs == needs for worker in self.workers)
            for _ in range(min(room(needs), number - idle)):
                options = {**dict(needs), "max_restarts": _RESTARTS, "max_task_retries": _TRIES - 1}
                actor = self._class.options(**options, scheduling_strategy="SPREAD").remote(*self._arguments)
                self.workers.append(Hired(actor, needs))
        for worker in [worker for worker in self.workers if worker.unit is None]:
            holders = Counter(other.held for other in self.workers)
            worker.unit = self.take(worker.held, holders, [f for f, needs in needs_of.items() if needs == worker.needs])
            if worker.unit is not None:
                worker.held, worker.call = worker.unit[0].model.folder, worker.actor.run.remote(worker.unit)
            elif room(worker.needs) < 0 or any(other.unit and other.needs != worker.needs for other in self.workers):
                self._dismiss(worker)

    def _answer(self, worker: Hired) -> Sequence[Outcome]:
        """What came of the unit of a worker that has answered."""
        unit, worker.unit = worker.unit, None
        assert unit is not None
        try:
            outcomes: Sequence[Outcome] = self.ray.get(worker.call)
        except self.ray.exceptions.RayError as error:  # it cannot begin, was killed too often, or its node is gone
            self._dismiss(worker)
            if "creation task" in str(error):
                why = str(error).strip().splitlines()[-1].rpartition("InputError: lm-eval-icl: ")[2]
                raise InputError(f"--ray: a worker cannot begin ({why.removesuffix('.')}).") from error
            why = " ".join(str(error).rpartition("is dead because ")[2].split())[:300]
            return [(target, Failure(f"its worker was lost {_TRIES} times; the last time: {why}")) for target in unit]
        return outcomes

    def _dismiss(self, worker: Hired) -> None:
        self.workers.remove(worker)
        self.ray.kill(worker.actor)


def connected(address: str) -> Any:
    """Ray, with the cluster at this address; without one, with one of this machine, which ends with this process."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise InputError("--ray: Ray is not installed: pip install 'lm-eval-icl[cluster]'.") from error
    terminated = signal.getsignal(signal.SIGTERM)
    try:
        host, _, port = address.removeprefix("ray://").rpartition(":")
        if port.isdecimal():  # Ray would try for minutes where nothing answers
            socket.create_connection((host, int(port)), timeout=10).close()
        dashboard = None if address else False  # a cluster that runs has one, or has not
        ray.init(address or "local", log_to_driver=False, logging_level=logging.ERROR, include_dashboard=dashboard)
    except Exception as error:  # of any kind: a node that takes too long raises no other
        how = f"--ray {address}: this cluster cannot be joined" if address else "--ray: Ray cannot be started"
        raise InputError(f"{how} ({one_line(error)}).") from error
    signal.signal(signal.SIGTERM, terminated)  # which Ray has replaced
    return ray


def versions() -> dict[str, str]:
    """Versions that all workers share, since numbers depend on them."""
    names = ("lm_eval", "transformers", "torch")
    return {"lm-eval-icl": version.version(), **{name: importlib.metadata.version(name) for name in names}}


class StudyWorker:
    """A worker of a study, whose tasks it loads for itself. It compares `versions` with those of the process that
    conducts the study before it reads what `of_study` refers to (`study_on_ray`)."""

    def __init__(self, theirs: Mapping[str, str], of_study: Sequence[Any]) -> None:
        import ray

        for name, ours in versions().items():
            if ours != theirs[name]:
                here = f"on {socket.gethostname()}: {name} {ours}"
                raise InputError(f"{here}, and the study was started with {theirs[name]}")
        study, directory, options, folder, *others = ray.get(of_study[0])
        if directory.is_dir():
            os.chdir(directory)
        grid = open_study(study, options.limit, include_path=others[-1])
        self._runner = UnitRunner(grid, options, StudyFolder(folder), *others)

    def run(self, unit: Unit) -> list[Outcome]:
        """What came of a unit's targets. Where the device is broken, the process ends, and Ray begins another."""
        try:
            return list(self._runner.run(unit))
        except Exception:
            traceback.print_exc()
            os._exit(1)


def study_on_ray(
    address: str, grid: Grid, options: Options, folder: Path, trainer: Trainer, include_path: str | None
) -> OnRay:
    """The workers of a study: each with a core and a GPU if the cluster has any, unless the study says otherwise."""
    ray = connected(address)
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    gpus = float((options.device or "cuda") != "cpu" and any(node.get("GPU", 0) >= 1 for node in nodes))

    def needs(model: Model) -> Needs:
        return tuple({"num_cpus": 1.0, "num_gpus": gpus, **model.resources}.items())

    for model in grid.models:
        asked = [(name, number) for name, number in needs(model) if number]
        if not asked or not any(all(node.get(_RAY[name], 0) >= n for name, n in asked) for node in nodes):
            ray.shutdown()
            what = ", ".join(f"{name}={number:g}" for name, number in asked) or "no need of anything"
            raise InputError(f"resources: {model.name}: no node of the cluster has {what}.")
    of_study = ray.put((grid.study, Path.cwd(), options, folder, trainer, include_path))
    return OnRay(ray, StudyWorker, (versions(), [of_study]), needs)
