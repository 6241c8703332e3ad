"""Runs the units of a study on a Ray cluster, or on several workers of this machine.

A worker is a Ray actor that holds one model. Ray places it, restarts it where it is lost, runs its unit again then, and
brings back what it made; the process that conducts the study alone writes its folder. Ray is imported when a cluster is
opened, and not before.
"""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import os
import signal
import socket
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from lm_eval_icl import version
from lm_eval_icl.errors import InputError, one_line, reason
from lm_eval_icl.studies.cells import Model
from lm_eval_icl.studies.conduct import Failure, Outcome, Queue, Unit
from lm_eval_icl.studies.folder import StudyFolder
from lm_eval_icl.studies.grid import Study
from lm_eval_icl.studies.opening import open_study
from lm_eval_icl.studies.run import Options
from lm_eval_icl.studies.units import Trainer, UnitRunner

_TRIES = 3  # of a unit whose worker is lost
_RESTARTS = 10  # of a worker
_ANSWER = 10.0  # seconds that a cluster may take to answer
_RAY = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}


@dataclass(eq=False)
class Hired:
    """A worker, and what it does.

    Attributes:
        needs: the resources that it has.
        call: what it was asked and has not answered; None if it is idle.
        unit: what it runs; None while it begins, and if it is idle.
        held: the folder of the model that it holds; empty if it holds none.
    """

    actor: Any
    needs: Mapping[str, float]
    call: Any
    unit: Unit | None = None
    held: str = ""


class OnRay:
    """Runs units on workers of a Ray cluster: as many as it has room for.

    Args:
        ray: Ray, with a cluster (`connected`).
        worker: the class of the workers: `refusal()` returns why one cannot work, or "", and `run(unit)` what came of
            the unit's targets.
        arguments: of that class.
        needs: what of Ray's resources a worker with a model has: `num_cpus`, `num_gpus`, `memory`.
    """

    def __init__(
        self, ray: Any, worker: type, arguments: Sequence[Any], needs: Callable[[Model], dict[str, float]]
    ) -> None:
        self.ray = ray
        self._class, self._arguments, self.needs = self.ray.remote(worker), arguments, needs
        self.queue, self.running = Queue(), set[str]()
        self.workers: list[Hired] = []
        self._lost = 0  # workers that were lost while they began

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in list(self.workers):
            self._dismiss(worker)
        self.ray.shutdown()

    def submit(self, unit: Unit) -> None:
        self.queue.add(unit)
        self.running |= {target.path for target in unit.targets}

    def wait(self) -> list[Outcome]:
        """
        Raises:
            InputError: a worker is refused, or none can begin.
        """
        while True:
            self._hire()
            for worker in self.workers:
                if worker.call is None:
                    self._give_unit(worker)
            calls = {worker.call: worker for worker in self.workers if worker.call is not None}
            if not calls:  # until there is a node
                time.sleep(0.2)
                continue
            self.ray.wait(list(calls), timeout=1.0)
            answered, _ = self.ray.wait(list(calls), num_returns=len(calls), timeout=0)
            if outcomes := [outcome for call in answered for outcome in self._answer(calls[call])]:
                self.running -= {target.path for target, _ in outcomes}
                return outcomes

    def _hire(self) -> None:
        """Begin workers for the units that wait, as many as the cluster is large; Ray places each when there is room.
        Where there are more workers than fit, idle ones make room."""
        waiting = Counter[tuple[tuple[str, float], ...]]()
        for unit in self.queue.waiting():
            waiting[tuple(self.needs(unit.model).items())] += self.queue.count(unit.model)
        size = self.ray.cluster_resources()
        for items, number in waiting.items():
            alike = [worker for worker in self.workers if worker.needs == dict(items)]
            wanted = number - sum(worker.unit is None for worker in alike)
            room = [size.get(_RAY[name], 0) // each - len(alike) for name, each in items if each]
            for _ in range(int(min(wanted, *room))):
                options = {**dict(items), "max_restarts": _RESTARTS, "max_task_retries": _TRIES - 1}
                actor = self._class.options(**options, scheduling_strategy="SPREAD").remote(*self._arguments)
                self.workers.append(Hired(actor, dict(items), actor.refusal.remote()))
        for name, resource in _RAY.items():
            if sum(worker.needs.get(name, 0) for worker in self.workers) > size.get(resource, 0):
                for worker in [worker for worker in self.workers if worker.call is None]:
                    if tuple(worker.needs.items()) not in waiting:
                        self._dismiss(worker)

    def _give_unit(self, worker: Hired) -> None:
        holders = Counter(other.held for other in self.workers if other.held)
        unit = self.queue.take(worker.held, holders, lambda model: self.needs(model) == worker.needs)
        if unit is not None:
            worker.unit, worker.held, worker.call = unit, unit.model.folder, worker.actor.run.remote(unit)

    def _answer(self, worker: Hired) -> Sequence[Outcome]:
        """What a worker has answered: what came of its unit, or that it has begun."""
        call, unit, worker.call, worker.unit = worker.call, worker.unit, None, None
        try:
            answer = self.ray.get(call)
        except self.ray.exceptions.RayError as error:  # it was killed too often, or its node is gone
            self._dismiss(worker)
            log = str(error).strip()
            why = " ".join(log.rpartition("is dead because ")[2].split())[:300]
            if unit is not None:
                failure = Failure(f"its worker was lost {_TRIES} times; the last time: {why}")
                return [(target, failure) for target in unit.targets]
            self._lost += 1
            if "creation task" in log or self._lost > _TRIES:
                raise InputError(f"--ray: a worker cannot begin ({log.splitlines()[-1]}).") from error
            return []
        if unit is not None:
            outcomes: Sequence[Outcome] = answer
            return outcomes
        if answer:
            raise InputError(f"--ray: {answer}")
        return []

    def _dismiss(self, worker: Hired) -> None:
        self.workers.remove(worker)
        self.ray.kill(worker.actor)


def connected(address: str) -> Any:
    """Ray, with a cluster.

    Args:
        address: of a cluster that runs; empty for one of this machine, which ends with this process.

    Raises:
        InputError: Ray is not installed, or no cluster answers.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise InputError("--ray: Ray is not installed: pip install 'lm-eval-icl[cluster]'.") from error
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
    return ray


# The workers of a study.


@dataclass(frozen=True)
class Setup:
    """What a worker is told of a study at its beginning.

    Attributes:
        folder: the study's, as it was given to the process that writes it.
        directory: in which the study was started.
    """

    study: Study
    options: Options
    include_path: str | None
    trainer: Trainer
    folder: Path
    directory: str = field(default_factory=os.getcwd)


def versions() -> dict[str, str]:
    """The versions that all workers share."""
    names = ("torch", "transformers", "lm_eval")
    return {"lm-eval-icl": version.version(), **{name: importlib.metadata.version(name) for name in names}}


class StudyWorker:
    """A worker of a study.

    Args:
        theirs: the versions of the process that conducts the study.
        setup: a reference to `Setup`, which is read after the versions have been compared.
    """

    def __init__(self, theirs: Mapping[str, str], setup: list[Any]) -> None:
        import ray

        here = f"worker on {socket.gethostname()} (node {ray.get_runtime_context().get_node_id()[:8]})"
        self._refusal = ""
        for name, ours in versions().items():
            if ours != theirs[name]:
                self._refusal = f"{here}: has {name} {ours}, and the study was started with {theirs[name]}."
                return
        known: Setup = ray.get(setup[0])
        if Path(known.directory).is_dir():
            os.chdir(known.directory)
        try:
            opened = open_study(known.study, known.options.limit, known.include_path)
        except Exception as error:
            self._refusal = f"{here}: {reason(error)}"
            return
        folder = StudyFolder(known.folder)
        self._runner = UnitRunner(opened, known.options, folder, known.trainer, known.include_path)

    def refusal(self) -> str:
        """Why this worker cannot work, in one line; empty if it can."""
        return self._refusal

    def run(self, unit: Unit) -> list[Outcome]:
        """What came of a unit's targets. Where the device is broken, the process ends, and Ray begins another."""
        try:
            return list(self._runner.run(unit))
        except Exception:
            traceback.print_exc()
            os._exit(1)


def study_on_ray(address: str, setup: Setup, models: Sequence[Model]) -> OnRay:
    """The workers of a study.

    Raises:
        InputError: as for `connected`, or no node has what a model needs.
    """
    ray = connected(address)
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    gpus = float((setup.options.device or "cuda") != "cpu" and any(node.get("GPU", 0) >= 1 for node in nodes))

    @functools.cache
    def memory(name: str) -> int:
        return 2 * sum(file.stat().st_size for file in Path(name).glob("*.safetensors"))

    def needs(model: Model) -> dict[str, float]:
        """Those of the study's file; else one core, a GPU if the cluster has any, and memory for the weights twice."""
        return {"num_cpus": 1, "num_gpus": gpus, "memory": memory(model.name), **model.resources}

    for model in models:
        asked = {name: number for name, number in needs(model).items() if number}
        if not any(all(node.get(_RAY[name], 0) >= number for name, number in asked.items()) for node in nodes):
            what = ", ".join(f"{name}={number:g}" for name, number in asked.items())
            ray.shutdown()
            raise InputError(f"models: {model.name}: no node of the cluster has {what}.")
    return OnRay(ray, StudyWorker, (versions(), [ray.put(setup)]), needs)
