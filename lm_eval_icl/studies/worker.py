"""Runs the units of a study in one process, which holds one model at a time, and notes what fails."""

from __future__ import annotations

import functools
import gc
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from lm_eval_icl.decisions.how import written
from lm_eval_icl.errors import InputError, naming, reason
from lm_eval_icl.harness.distributed import of_first
from lm_eval_icl.studies import tasks as study_tasks
from lm_eval_icl.studies import trainings
from lm_eval_icl.studies.cells import Cell, Model
from lm_eval_icl.studies.choices import Choices
from lm_eval_icl.studies.grid import HF
from lm_eval_icl.studies.order import CellBatch, Key, Unit, without_passes
from lm_eval_icl.studies.progress import StudyProgress
from lm_eval_icl.studies.run import Models, ends_all, run_cells
from lm_eval_icl.studies.tasks import Prepared


class Worker:
    """Trains, chooses and scores, in the folder of `progress`.

    Args:
        progress: the study as it stands in the folder, which is kept up to date.
        include_path: a folder of further tasks.
        trainer: trains the models of a study that has trainings.

    Attributes:
        weights: the weights that cells of a model already have: its folder -> their digest -> a cell.
        arguments: returns a model's arguments, as its results and messages have them.
        located: returns those of them that are different where this process loads the model.
        trains_in: the folder in which models are trained.

    Raises:
        InputError: demonstrations cannot be chosen.
    """

    def __init__(
        self, progress: StudyProgress, include_path: str | None, trainer: trainings.Trainer | None = None
    ) -> None:
        self.progress, self.grid, self.folder = progress, progress.grid, progress.folder
        self.include_path, self.trainer = include_path, trainer
        self.weights: dict[str, dict[str, str]] = {}
        self.arguments: Callable[[Model], dict[str, Any]] = self.folder.arguments
        self.located: Callable[[Model], dict[str, Any]] = lambda model: {}
        self.trains_in = self.folder
        self.choices = Choices(progress)
        self._trainings: dict[str, Callable[[], None]] = {}
        self._model: Model | None = None
        self._models: Models | None = None
        self._prepared_for: Key = ()
        self._prepared: dict[int, Prepared] = {}

    def training(self, model: Model) -> Callable[[], None]:
        """What trains a model, its options checked, as of `trainings.check`."""
        if model.checkpoint not in self._trainings:
            assert self.trainer
            study, device = self.progress.study, self.progress.options.device
            checked = trainings.check(study, model, self.trains_in, device, self.include_path, self.trainer)
            self._trainings[model.checkpoint] = checked
        return self._trainings[model.checkpoint]

    def run(self, unit: Unit) -> None:
        """Run a unit. All processes of a launch call this. Cells that fail are noted.

        Raises:
            Exception: nothing of the model can be run, or nothing at all (`ends_all`).
        """
        if unit.kind == "train":
            if int(os.environ.get("WORLD_SIZE", "1")) > 1:
                raise InputError(
                    f"train: {unit.model.checkpoint} is not trained yet, and a study does not train in several "
                    "processes of one launch: run the same command once without the launcher."
                )
            self._forget()
            self.folder.note_running(unit.title, self.progress.failed)
            with naming(f"training of {unit.model.checkpoint}"):
                self.training(unit.model)()
            if self.trains_in is self.folder:
                self.folder.finish_training(unit.model)
            make_room()
            return
        models = self._load(unit.model)
        if unit.kind == "choose":
            of_first(lambda: self.choices.make(unit.model, models, unit.task))
        for batch in unit.batches:
            self._run_batch(models, batch)

    @property
    def weights_held(self) -> str:
        """A digest of the weights of the model that is loaded; empty if none is."""
        return self._models.weights if self._models is not None else ""

    def _forget(self) -> None:
        self._model, self._models, self._prepared_for, self._prepared = None, None, (), {}
        make_room()

    def _load(self, model: Model) -> Models:
        """Load a model, in place of the one before, and refuse the methods that it cannot run.

        Raises:
            InputError: it cannot be loaded, or cells are there that other weights have given.
        """
        if self._models is not None and self._model == model:
            return self._models
        self._forget()
        models = Models(self.arguments(model), self.progress.options, self.located(model))

        def cells_like(like: tuple[str, str]) -> list[Cell]:
            return [cell for cell in self.progress.known_cells(model) if without_passes(cell.variant) == like]

        for like, variant in {without_passes(variant): variant for variant in self.grid.variants(model)}.items():
            if variant.method != HF:
                with self.noting(functools.partial(cells_like, like)), models.naming(variant):
                    models.under(variant)
        for weights, path in self.weights.get(model.folder, {}).items():
            if weights != models.weights:
                raise other_weights(self.folder.path, model, path)
        self._model, self._models = model, models
        return models

    @contextmanager
    def noting(self, cells: Callable[[], Iterable[Cell]]) -> Iterator[None]:
        """Inside this context, an error is noted for those of these cells that are missing, and the study goes on,
        unless nothing could be kept or run any more, or other processes of this launch would wait for this one."""
        try:
            yield
            return
        except Exception as error:
            if ends_all(error) or int(os.environ.get("WORLD_SIZE", "1")) > 1:
                raise
            why = reason(error)
        # Now that the error no longer holds references to the model's tensors.
        self.progress.fail([cell for cell in cells() if not self.progress.is_done(cell)], why)
        make_room()

    def _run_batch(self, models: Models, batch: CellBatch) -> None:
        """Run the cells of a batch that are missing: together, and if that fails, each by itself, as the error may be
        of one alone."""
        progress = self.progress
        missing = of_first(lambda: progress.missing(batch.cells))
        if not missing:
            return
        if models.rank == 0:
            self.folder.note_running(batch.title, progress.failed)
        prepared = self._prepare(models, batch, of_first(lambda: self.choices.of(missing[0])))

        def run(cells: Sequence[Cell]) -> None:
            run_cells(models, cells, prepared, self.folder, progress.options, batch.id)

        parts = [missing]
        if len(missing) > 1 and models.world_size == 1:
            try:
                run(missing)
            except Exception as error:
                if ends_all(error):
                    raise
            parts = [[cell] for cell in progress.missing(missing)]
            if parts:
                make_room()
        for cells in parts:
            with self.noting(lambda cells=cells: cells):  # type: ignore[misc]
                run(cells)
        if models.rank == 0 and all(map(progress.is_done, batch.cells)):
            shutil.rmtree(self.folder.work / batch.id, ignore_errors=True)

    def _prepare(self, models: Models, batch: CellBatch, choice: Mapping[str, Any] | None) -> Callable[[int], Prepared]:
        """The task of an order, with demonstrations that are drawn or that a model has chosen. Those of the latest
        demonstrations are kept, since the next method has the same."""
        if self._prepared_for != batch.requests:
            self._prepared_for, self._prepared = batch.requests, {}
            models.forget_requests()
        cell, progress = batch.cells[0], self.progress

        def prepared(order: int) -> Prepared:
            if order not in self._prepared:
                self._prepared[order] = study_tasks.prepare(
                    progress.leaves[cell.task],
                    cell.num_fewshot,
                    cell.demonstrations,
                    cell.seed,
                    order,
                    progress.dev[cell.task] if cell.split == "dev" else None,
                    cell.limit,
                    models.rank,
                    models.world_size,
                    choice,
                    lambda task: task.bind(models.hf() if cell.variant.method == HF else models.under(cell.variant)),
                    written(progress.study.rules) if progress.study.rules else None,
                )
            return self._prepared[order]

        return prepared


def other_weights(output: object, model: Model, path: str) -> InputError:
    """The error about a model whose cell was run with other weights under the same name."""
    return InputError(
        f"--output {output}: the weights or the tokenizer of {model.title} have changed since "
        f"{path} was run: give another folder."
    )


def make_room() -> None:
    """Free the memory of a model that is no longer used: it refers to itself, and the next one needs its place."""
    gc.collect()
    torch.cuda.empty_cache()
