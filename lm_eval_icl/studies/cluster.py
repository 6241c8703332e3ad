"""Runs the units of a study on a Ray cluster, or on several workers of this machine.

A worker is a Ray actor that holds one model. Only the process that conducts the study writes the
study's folder.

A worker is lost if its process is killed or out of memory, if its node is gone, or if its device is
broken, so that it ends itself (`StudyWorker.run`). Then this happens to its unit:

1. Ray starts the worker again, on a node that has room. It loads the study and the model again.
2. Ray runs the unit again from its first cell, since a unit returns all outcomes at its end. A
   training continues from its last checkpoint. `OnRay` sees nothing of this.
3. After `_TRIES` losses with one unit, Ray gives the unit up. `OnRay._answer` dismisses the worker
   and returns a `Failure` for each target of the unit. A new worker is made if other units wait.
   After more than `_RESTARTS` losses in all, Ray gives the worker up. A new worker runs the unit.
4. `conduct` goes on without these targets and those that need them. At the end, `end.conclude`
   writes the reasons into `study.json`, and the command ends with status 1. The same command tries
   again.

An error in a unit is no loss: `UnitRunner.run` returns a `Failure`, and nothing is repeated. If a
worker cannot begin, the units that no worker runs yet fail.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import re
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
from lm_eval_icl.errors import InputError, one_line, require
from lm_eval_icl.studies.cell_tasks import open_study
from lm_eval_icl.studies.conduct import Executor, Failure, Outcome, Unit
from lm_eval_icl.studies.folder import StudyFolder
from lm_eval_icl.studies.targets import Grid, Model
from lm_eval_icl.studies.unit_runner import Options, Trainer, UnitRunner

_TRIES = 3  # how often a unit is run if its worker is lost
_RESTARTS = 10  # how often a worker is restarted, whatever units it runs
# What stands before the reason in an error of Ray.
_BEFORE_REASON = r"InputError: lm-eval-icl: |is dead because |\n(?=[\w.]*Error: )"
# A resource in a study's file -> its name on a node.
_RAY = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}
# The resources of a worker: each name in a study's file, with how much of it.
Needs = tuple[tuple[str, float], ...]


@dataclass(eq=False)
class Worker:
    """A worker, as the process that conducts the study knows it."""

    actor: Any  # Ray's reference to its `StudyWorker`
    needs: Needs  # the resources that it has
    held: str = ""  # the folder of the model that it holds
    unit: Unit | None = None  # the unit that it runs; None if it is idle
    call: Any = None  # Ray's reference to the outcomes of the unit
    has_begun: bool = False  # it has run a unit


class OnRay(Executor):
    """Runs units on workers of a Ray cluster, as many as the cluster has room for with the needs of
    their models.

    Args:
        ray: Ray, connected to a cluster (`connected`).
        worker: the class of the workers, made with `arguments`; `run(unit)` returns the outcomes of
            the unit's targets.
        needs: maps a model to the resources that its workers need.
    """

    def __init__(
        self, ray: Any, worker: type, arguments: Sequence[Any], needs: Callable[[Model], Needs]
    ) -> None:
        super().__init__()
        self.ray = ray
        self._class = ray.remote(worker)
        self._arguments = arguments
        self.needs = needs
        self.workers: list[Worker] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in list(self.workers):
            self._dismiss(worker)
        self.ray.shutdown()

    def wait(self) -> Sequence[Outcome]:
        while True:
            self._give_units()
            calls = {worker.call: worker for worker in self.workers if worker.unit is not None}
            if not calls:  # no node has room yet
                time.sleep(0.2)
                continue
            for call in self.ray.wait(list(calls), timeout=1.0)[0]:
                outcomes = self._answer(calls[call])
                self.running -= {target.path for target, _ in outcomes}
                return outcomes

    def _give_units(self) -> None:
        """Give units to idle workers, and to new workers while the cluster has room. Idle workers
        are dismissed to make room for models with other needs and, after the loss of a node, for
        workers that Ray restarts."""
        nodes = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]

        def room(needs: Needs) -> int:
            """How many more workers with these needs would fit if all workers had the same
            needs."""
            fit = sum(
                min(int(node.get(_RAY[name], 0) // amount) for name, amount in needs if amount)
                for node in nodes
            )
            return fit - sum(worker.needs == needs for worker in self.workers)

        needs_of = {
            folder: self.needs(units[0][0].model) for folder, units in self.waiting.items() if units
        }
        waiting = Counter[Needs]()
        for folder, needs in needs_of.items():
            waiting[needs] += len(self.waiting[folder])
        for needs, number in waiting.items():
            idle = sum(worker.unit is None and worker.needs == needs for worker in self.workers)
            for _ in range(min(room(needs), number - idle)):
                options = {**dict(needs), "max_restarts": _RESTARTS, "max_task_retries": _TRIES - 1}
                actor = self._class.options(**options, scheduling_strategy="SPREAD").remote(
                    *self._arguments
                )
                self.workers.append(Worker(actor, needs))
        for worker in [worker for worker in self.workers if worker.unit is None]:
            holders = Counter(other.held for other in self.workers)
            worker.unit = self.take(
                worker.held,
                holders,
                [folder for folder, needs in needs_of.items() if needs == worker.needs],
            )
            if worker.unit is not None:
                worker.held = worker.unit[0].model.folder
                worker.call = worker.actor.run.remote(worker.unit)
            elif room(worker.needs) < 0 or any(
                other.unit and other.needs != worker.needs for other in self.workers
            ):
                self._dismiss(worker)

    def _answer(self, worker: Worker) -> Sequence[Outcome]:
        """The outcomes of a worker's unit, whose call has ended: failures if the unit has lost its
        worker too often or no worker can begin, and none if another worker runs the unit again."""
        unit = worker.unit
        worker.unit = None
        assert unit is not None
        try:
            outcomes = list(self.ray.get(worker.call))
        except self.ray.exceptions.RayError as error:
            self._dismiss(worker)
            why = " ".join(re.split(_BEFORE_REASON, str(error))[-1].split())[:300]
            failure = Failure(f"its worker was lost {_TRIES} times; the last time: {why}")
            units = [unit]
            if isinstance(error, self.ray.exceptions.ActorDiedError):  # and is not restarted
                if worker.has_begun:
                    self.submit(unit)
                    return []
                failure = Failure(f"a worker cannot begin ({why.removesuffix('.')})")
                for waiting in self.waiting.values():
                    units += waiting
                    waiting.clear()
            return [(target, failure) for unit in units for target in unit]
        worker.has_begun = True
        return outcomes

    def _dismiss(self, worker: Worker) -> None:
        self.workers.remove(worker)
        self.ray.kill(worker.actor)


def connected(address: str) -> Any:
    """Ray, connected to the cluster at an address, or for "" to one on this machine that ends with
    this process."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    require("ray", "cluster", "--ray")
    import ray

    terminated = signal.getsignal(signal.SIGTERM)
    try:
        host, _, port = address.removeprefix("ray://").rpartition(":")
        if port.isdecimal():  # if nothing answers, Ray would try for minutes
            socket.create_connection((host, int(port)), timeout=10).close()
        dashboard = None if address else False  # a running cluster has decided this
        ray.init(
            address or "local",
            log_to_driver=False,
            logging_level=logging.ERROR,
            include_dashboard=dashboard,
        )
    except Exception as error:  # a node that takes too long raises an Exception of no other class
        how = (
            f"--ray {address}: this cluster cannot be joined"
            if address
            else "--ray: Ray cannot be started"
        )
        raise InputError(f"{how} ({one_line(error)}).") from error
    signal.signal(signal.SIGTERM, terminated)  # Ray has replaced the handler
    return ray


def versions() -> dict[str, str]:
    """The versions of libraries on which numbers depend, and which all workers must share."""
    names = ("lm_eval", "transformers", "torch")
    return {
        "lm-eval-icl": version.version(),
        **{name: importlib.metadata.version(name) for name in names},
    }


class StudyWorker:
    """A worker of a study, which loads the study's tasks itself. It first compares its `versions`
    with those of the process that conducts the study, and then gets the study from Ray by
    `references` (`study_on_ray`)."""

    def __init__(self, theirs: Mapping[str, str], references: Sequence[Any]) -> None:
        import ray

        for name, ours in versions().items():
            if ours != theirs[name]:
                here = f"on {socket.gethostname()}: {name} {ours}"
                raise InputError(f"{here}, and the study was started with {theirs[name]}")
        study, directory, options, folder, *others = ray.get(references[0])
        if directory.is_dir():
            os.chdir(directory)
        grid = open_study(study, options.limit, include_path=others[-1])
        self._runner = UnitRunner(grid, options, StudyFolder(folder), *others)

    def run(self, unit: Unit) -> list[Outcome]:
        """The outcomes of a unit's targets. If the device is broken, the process ends, and Ray
        starts another."""
        try:
            return list(self._runner.run(unit))
        except Exception:
            traceback.print_exc()
            os._exit(1)


def study_on_ray(
    address: str,
    grid: Grid,
    options: Options,
    folder: Path,
    trainer: Trainer,
    include_path: str | None,
) -> OnRay:
    """The workers of a study. Each gets a core, and a GPU if the cluster has any, or else what the
    study asks for."""
    ray = connected(address)
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    gpus = float(
        (options.device or "cuda") != "cpu" and any(node.get("GPU", 0) >= 1 for node in nodes)
    )

    def needs(model: Model) -> Needs:
        return tuple({"num_cpus": 1.0, "num_gpus": gpus, **model.resources}.items())

    for model in grid.models:
        needed = [(name, number) for name, number in needs(model) if number]
        if not needed or not any(
            all(node.get(_RAY[name], 0) >= n for name, n in needed) for node in nodes
        ):
            ray.shutdown()
            what = ", ".join(f"{name}={number:g}" for name, number in needed) or "room for it"
            raise InputError(f"resources: {model.name}: no node of the cluster has {what}.")
    reference = ray.put((grid.study, Path.cwd(), options, folder, trainer, include_path))
    return OnRay(ray, StudyWorker, (versions(), [reference]), needs)
