"""A study is a makefile: what is missing and can be made is a function of the study and its folder, and one loop has it
made."""

from __future__ import annotations

import heapq
import itertools
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tqdm import tqdm

from lm_eval_icl.studies.cells import Cell, Checkpoint, ChosenRows, Grid, Model, Target, batches
from lm_eval_icl.studies.folder import StudyFolder

# States of a target. Any other text is the reason why it cannot be made.
DONE, READY, WAITING = "done", "ready", "waiting"
KINDS = ("train", "choose", "dev", "test")


@dataclass(frozen=True)
class Failure:
    """Why a target could not be made."""

    why: str


# A target, and what came of it.
Outcome = tuple[Target, Any]


@dataclass(frozen=True, eq=False)
class Unit:
    """What is run at a time: a training, the choices of demonstrations for a task, or the cells with the same requests.

    Attributes:
        rows: what the file of a choice of demonstrations says that the cells have; None if theirs are drawn.
        weights: the digest of the model's files that cells say which are there; empty if none is.
    """

    targets: tuple[Target, ...]
    rows: Mapping[str, Any] | None = None
    weights: str = ""

    @property
    def model(self) -> Model:
        return self.targets[0].model

    @property
    def kind(self) -> str:
        first = self.targets[0]
        return first.split if isinstance(first, Cell) else "train" if isinstance(first, Checkpoint) else "choose"


class Executor(Protocol):
    """Runs units, here or elsewhere.

    Attributes:
        running: the paths of the targets that were submitted and not yet handed over.
    """

    running: set[str]

    def submit(self, unit: Unit) -> None:
        """Have a unit run, sooner or later."""

    def wait(self) -> Sequence[Outcome]:
        """What was made since, or has failed; at least one target."""


def conduct(grid: Grid, folder: StudyFolder, executor: Executor, failed: dict[str, str]) -> None:
    """Make what is missing of a study.

    Args:
        failed: why targets could not be made, by path; those that fail are added.
    """
    left = sum(isinstance(target, Cell) for target, state in states(grid, folder, failed) if state != DONE)
    more = True  # may be ready: what is done on the test set, nothing waits for
    with tqdm(total=left, desc="cells") as bar:
        while True:
            for unit in ready(grid, folder, executor.running, failed) if more else ():
                executor.submit(unit)
            if not executor.running:
                return
            outcomes = executor.wait()
            more = any(not isinstance(target, Cell) or target.split == "dev" for target, _ in outcomes)
            for target, outcome in outcomes:
                if isinstance(outcome, Failure):
                    failed[target.path] = outcome.why
                    folder.note(failed)
                    tqdm.write(f"failed: {target.path}: {outcome.why}", file=sys.stderr)
                else:
                    folder.write(target, outcome)
                bar.update(isinstance(target, Cell))


def ready(grid: Grid, folder: StudyFolder, running: Collection[str], failed: Mapping[str, str]) -> list[Unit]:
    """The units whose inputs are there and whose outputs are not: trainings, choices of demonstrations, and cells.

    Args:
        running: the paths of targets that are being made.
        failed: why targets could not be made, by path; they are not tried again.
    """
    makeable = [
        target for target, state in states(grid, folder, failed) if state == READY and target.path not in running
    ]
    rows: dict[tuple[str, str], list[Target]] = {}
    for target in makeable:
        if isinstance(target, ChosenRows):  # those for a task read the same documents
            rows.setdefault((target.model.folder, target.task), []).append(target)
    trainings: list[Sequence[Target]] = [[target] for target in makeable if isinstance(target, Checkpoint)]
    cells = batches(target for target in makeable if isinstance(target, Cell))
    units = []
    for targets in (*trainings, *rows.values(), *cells):
        first = targets[0]
        chosen = first.chosen_rows if isinstance(first, Cell) else None
        units.append(Unit(tuple(targets), folder.rows(chosen) if chosen else None, folder.weights(first.model)))
    return units


def states(grid: Grid, folder: StudyFolder, failed: Mapping[str, str]) -> list[tuple[Target, str]]:
    """The cells of a study and all that they need, each with its state: `DONE`, `READY` (its inputs are there),
    `WAITING` (for others), or the reason why it cannot be made.

    A checkpoint or a choice of demonstrations is among them only if a cell that is missing needs it. A cell on the test
    set that waits for a choice on the dev set stands for any that may be chosen.
    """
    known: dict[str, tuple[Target, str]] = {}

    def state_of(target: Target) -> str:
        path = target.path
        if path not in known:
            known[path] = target, missing(target) if not folder.has(target) else DONE
        return known[path][1]

    def missing(target: Target) -> str:
        if target.path in failed:
            return failed[target.path]
        inputs = {need.path: state_of(need) for need in target.needs}
        for path, state in inputs.items():
            if state not in (DONE, READY, WAITING):
                return f"{path} failed: {state}"
        return READY if all(state == DONE for state in inputs.values()) else WAITING

    for candidates in grid.alternatives:
        on_dev = {cell.path: state_of(cell) for candidate in candidates for cell in candidate.dev}
        tested = candidates[0].test
        if len(candidates) > 1:
            broken = [path for path, state in on_dev.items() if state not in (DONE, READY, WAITING)]
            if all(state == DONE for state in on_dev.values()):
                tested = folder.choice(grid, candidates).cells
            else:
                why = (
                    f"nothing can be chosen on the dev set, as {broken[0]} failed: {on_dev[broken[0]]}"
                    if broken
                    else ""
                )
                known |= {cell.path: (cell, why or WAITING) for cell in tested}
                continue
        for cell in tested:
            state_of(cell)
    return list(known.values())


class Queue:
    """Units that wait, by model and kind."""

    def __init__(self) -> None:
        self._units: dict[str, list[tuple[int, int, Unit]]] = {}  # a heap for each model, by kind and place
        self._places = itertools.count()

    def add(self, unit: Unit) -> None:
        """Put a unit behind those of its model and kind."""
        units = self._units.setdefault(unit.model.folder, [])
        heapq.heappush(units, (KINDS.index(unit.kind), next(self._places), unit))

    def waiting(self) -> list[Unit]:
        """The first unit of every model that has some."""
        return [units[0][2] for units in self._units.values() if units]

    def count(self, model: Model) -> int:
        """How many units of a model wait."""
        return len(self._units[model.folder])

    def take(self, held: str, holders: Mapping[str, int], fits: Callable[[Model], bool]) -> Unit | None:
        """The unit that an idle worker runs next; None if none waits that it can run.

        Trainings come first, since everything else of a model waits for them. Then the worker goes on with the model
        that it holds. If that has no units, it loads a model whose units others wait for, and which few workers hold.

        Args:
            held: the folder of the model that the worker holds.
            holders: how many workers hold a model, by its folder.
            fits: whether a model can be loaded by the worker.
        """
        units = [unit for unit in self.waiting() if fits(unit.model)]
        if not units:
            return None

        def place(unit: Unit) -> tuple[Any, ...]:
            folder, kind = unit.model.folder, KINDS.index(unit.kind)
            return kind > 0, folder != held, kind, holders.get(folder, 0)

        model = min(units, key=place).model
        return heapq.heappop(self._units[model.folder])[2]


class Here:
    """Runs units in this process, and hands over each target as it is done.

    Args:
        run: runs a unit, target by target.
    """

    def __init__(self, run: Callable[[Unit], Iterator[Outcome]]) -> None:
        self.run, self.queue, self.running, self._held = run, Queue(), set[str](), ""
        self._outcomes: Iterator[Outcome] = iter(())

    def submit(self, unit: Unit) -> None:
        self.queue.add(unit)
        self.running |= {target.path for target in unit.targets}

    def wait(self) -> list[Outcome]:
        while True:
            for target, outcome in self._outcomes:
                self.running.discard(target.path)
                return [(target, outcome)]
            # Nothing is gained by training all models first: a model is finished before the next one is loaded.
            folders = [unit.model.folder for unit in self.queue.waiting()]
            self._held = self._held if self._held in folders else folders[0]
            unit = self.queue.take(self._held, {}, lambda model: model.folder == self._held)
            assert unit is not None
            self._outcomes = self.run(unit)
