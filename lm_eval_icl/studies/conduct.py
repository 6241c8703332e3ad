"""Conducts a study: plans its units, stage by stage, has them run here or on a cluster, and notes what fails."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import groupby
from typing import Any

from tqdm import tqdm

from lm_eval_icl.demonstrations.how import How
from lm_eval_icl.errors import InputError
from lm_eval_icl.harness.distributed import of_first
from lm_eval_icl.studies import tasks as study_tasks
from lm_eval_icl.studies import trainings
from lm_eval_icl.studies.cells import Cell, Model
from lm_eval_icl.studies.order import Queue, Unit, batches
from lm_eval_icl.studies.progress import StudyProgress
from lm_eval_icl.studies.worker import Worker

# The units of a model or of a task: each stage needs what the one before gave.
Stages = Iterator[list[Unit]]


class CellsFailed(InputError):
    """Some of a study's cells could not be run. The others are there."""


class Conductor:
    """Runs the cells of a study that are missing in its folder, which this process has locked.

    Args:
        progress: the study as it stands, which is kept up to date.
        include_path: a folder of further tasks.
        trainer: trains the models of a study that has trainings.

    Attributes:
        bar: the cells of this run, in the terminal.

    Raises:
        InputError: an option of a training is not possible, or demonstrations cannot be chosen.
    """

    def __init__(
        self, progress: StudyProgress, include_path: str | None, trainer: trainings.Trainer | None = None
    ) -> None:
        self.progress, self.grid, self.folder = progress, progress.grid, progress.folder
        self.worker = Worker(progress, include_path, trainer)
        self.choices = self.worker.choices
        for model in self.grid.models:
            if model.training:
                self.worker.training(model)
        self._queue = Queue()
        self._stages: dict[Unit, tuple[Stages, set[Unit]]] = {}  # of units that have not ended: theirs, and its others
        self.cells_known = self.cells_ended = 0  # of those that were missing when the study began
        self.bar = tqdm(desc="cells", disable=True)

    def run(self, ended: Callable[[Queue], Unit] | None = None) -> None:
        """Train the models and run the cells that are missing. All processes of a launch call this.

        Args:
            ended: takes units from the queue to run them, and waits until one has ended, which is one of those or of
                those taken before: what came of it is in the folder then, or noted as failed. None for this process.

        Raises:
            CellsFailed: some could not be run, for reasons that `progress.failed` says; all others are there.
            InputError: the study cannot go on. What was finished stays.
        """
        progress, ended = self.progress, ended or self._run_here
        is_first = os.environ.get("RANK", "0") == "0"
        self._check_tasks()
        for model in self.grid.models:
            if self._has_missing(model):
                self._open(self._stages_of_model(model))
        with tqdm(desc="cells", disable=not is_first) as self.bar:
            while self._stages:
                self.bar.total = self.cells_known
                self.bar.refresh()
                unit = ended(self._queue)
                self.cells_ended += len(unit.cells)
                self.bar.update(len(unit.cells))
                stages, stage = self._stages.pop(unit)
                stage.remove(unit)
                if not stage:
                    self._open(stages)
        if not is_first:
            return  # of several processes of a launch, the first one writes the cells and knows which are there
        progress.fail_what_is_not_chosen()
        if failed := progress.failed:
            number = len({cell.path for cell in progress.all_cells()} | failed.keys())
            raise CellsFailed(
                f"{len(failed)} of {number} cells failed; the first: {next(iter(failed.values())).removesuffix('.')}. "
                f"{self.folder.path / 'study.json'} has each reason under `failed`, and the same command tries again."
            )

    def _run_here(self, queue: Queue) -> Unit:
        """Run the next unit in this process. A model is finished before the next one is loaded."""
        unit = queue.take(next(iter(queue.waiting())))
        with self.worker.noting(lambda: self.progress.known_cells(unit.model)):
            self.worker.run(unit)
        return unit

    def _has_missing(self, model: Model) -> bool:
        return of_first(lambda: bool(self.progress.missing(self.progress.known_cells(model))))

    def _open(self, stages: Stages) -> None:
        """Queue the units of the next stage that has any."""
        units = next((units for units in stages if units), [])
        stage = set(units)
        for unit in units:
            self._stages[unit] = stages, stage
            self._queue.add(unit)
        self.cells_known += sum(len(unit.cells) for unit in units)

    def _stages_of_model(self, model: Model) -> Stages:
        """The training of a model, if it is missing, and then its tasks, which do not wait for each other."""
        progress = self.progress
        if model.training:
            if not self.folder.is_trained(model):
                yield [Unit(model, "train")]
            if self.folder.is_trained(model):
                with self.worker.noting(lambda: progress.known_cells(model)):
                    trainings.check_beginning(self.grid, self.folder, model)
        for cell in filter(progress.is_done, progress.known_cells(model)):
            self.worker.weights.setdefault(model.folder, {}).setdefault(progress.facts(cell)["weights"], cell.path)
        for task in self.grid.tasks_of(model):
            self._open(self._stages_of_task(model, task.name))

    def _stages_of_task(self, model: Model, task: str) -> Stages:
        """What a model chooses for a task, then its cells on the dev set, then those on the test set.

        A unit has the cells with the same requests. What is chosen on the dev set decides which are on the test set.
        """
        progress, grid = self.progress, replace(self.grid, tasks={task: self.grid.tasks[task]})
        if self.choices.keys(model.folder, task) and self._has_missing(model):
            yield [Unit(model, "choose", task)]

        def missing(split: str) -> list[Cell]:
            cells = grid.dev_cells(model) if split == "dev" else grid.test_cells(model, progress.choice)
            for cell in cells:
                if (key := self.choices.key(cell)) is not None and self.choices.of(cell) is None:
                    progress.fail(progress.missing([cell]), self.choices.failed.get(key, "nothing was chosen."))
            return progress.missing(cells)

        for split in ("dev", "test"):
            of_split = batches(of_first(functools.partial(missing, split)))
            yield [Unit(model, split, task, tuple(same)) for _, same in groupby(of_split, lambda batch: batch.requests)]

    def _check_tasks(self) -> None:
        """Refuse to go on with cells of a task that had other documents, demonstrations or prompts."""
        progress = self.progress

        @functools.cache
        def draw(task: str, *axes: Any) -> list[int] | None:
            return study_tasks.draw(progress.leaves[task], *axes)

        def indices(cell: Cell) -> list[int] | None:
            axes = cell.num_fewshot, cell.demonstrations, cell.seed, cell.order
            if not isinstance(cell.demonstrations, How):
                return draw(cell.task, *axes)
            choice = self.choices.of(cell)  # which nobody needs any more, if its file has been removed
            return None if choice is None else study_tasks.draw(progress.leaves[cell.task], *axes, choice)

        for cell in filter(progress.is_done, progress.all_cells()):
            facts = progress.facts(cell)
            what = ""
            if facts["contents"] != study_tasks.contents(progress.leaves[cell.task], cell.seed):
                what = "configuration or data"
            elif (now := indices(cell)) is not None and facts["indices"] != now:
                what = "demonstrations"
            if what:
                again = ", or --rerun" if progress.state(cell) != "done" else ""
                raise InputError(
                    f"--output {self.folder.path}: {cell.task}: its {what} have changed since {cell.path} was run: "
                    f"give another folder{again}."
                )
