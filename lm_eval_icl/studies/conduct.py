"""Conducts a study: a loop that trains and loads each model, runs its cells batch by batch, and notes what fails."""

from __future__ import annotations

import functools
import gc
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from tqdm import tqdm

from lm_eval_icl.errors import InputError, one_line_with_place
from lm_eval_icl.harness.distributed import of_first
from lm_eval_icl.studies import tasks as study_tasks
from lm_eval_icl.studies import trainings
from lm_eval_icl.studies.cells import Cell, Model
from lm_eval_icl.studies.choices import Choices, ToChoose
from lm_eval_icl.studies.grid import HF
from lm_eval_icl.studies.order import Batch, Key, batches, without_passes
from lm_eval_icl.studies.progress import Progress
from lm_eval_icl.studies.run import Models, ends_all, naming, run_cells
from lm_eval_icl.studies.tasks import Prepared


class CellsFailed(InputError):
    """Some of a study's cells could not be run. The others are there."""


class Conductor:
    """Runs the cells of a study that are missing in its folder, which this process has locked.

    Args:
        progress: the study as it stands, which is kept up to date.
        include_path: a folder of further tasks.
        trainer: trains the models of a study that has trainings.

    Raises:
        InputError: an option of a training is not possible, or demonstrations cannot be chosen.
    """

    def __init__(self, progress: Progress, include_path: str | None, trainer: trainings.Trainer | None = None) -> None:
        self.progress, self.grid, self.folder = progress, progress.grid, progress.folder
        self._trainings: dict[str, Callable[[], None]] = {}
        for model in self.grid.models:
            if model.training:
                assert trainer
                of_model = (progress.study, model, self.folder, progress.options.device, include_path)
                self._trainings[model.checkpoint] = trainings.check(*of_model, trainer)
        self.choices = Choices(self.folder, {name: self._to_choose(name) for name in progress.leaves}, progress.rerun)
        self._prepared_for: Key = ()
        self._prepared: dict[int, Prepared] = {}

    def _to_choose(self, name: str) -> ToChoose:
        """What the models of this study choose for a task: no documents of its dev set."""
        leaf, study = self.progress.leaves[name], self.progress.study
        methods = tuple(how.method for how in study.demonstrations if how and how.method)
        rows = self.progress.dev.get(name, [])
        documents = leaf.task.training_docs() if rows else []
        return ToChoose(leaf, [documents[i] for i in rows], self.grid.tasks[name].shots, methods, study.seeds)

    def run(self) -> None:
        """Train the models and run the cells that are missing. All processes of a launch call this.

        Raises:
            CellsFailed: some could not be run, for reasons that `progress.failed` says; all others are there.
            InputError: the study cannot go on. What was finished stays.
        """
        progress = self.progress
        self._check_tasks()
        for model in self.grid.models:
            if of_first(lambda model=model: bool(progress.missing(progress.known_cells(model)))):  # type: ignore[misc]
                with self._noting(lambda model=model: progress.known_cells(model)):  # type: ignore[misc]
                    if model.training:
                        trainings.train(self.grid, self.folder, model, self._trainings[model.checkpoint])
                        _make_room()
                    self._run_model(model)
                _make_room()
        if os.environ.get("RANK", "0") != "0":
            return  # of several processes of a launch, the first one writes the cells and knows which are there
        progress.fail_what_is_not_chosen()
        if failed := progress.failed:
            number = len({cell.path for cell in progress.all_cells()} | failed.keys())
            raise CellsFailed(
                f"{len(failed)} of {number} cells failed; the first: {next(iter(failed.values())).removesuffix('.')}. "
                f"{self.folder.path / 'study.json'} has each reason under `failed`, and the same command tries again."
            )

    @contextmanager
    def _noting(self, cells: Callable[[], Iterable[Cell]]) -> Iterator[None]:
        """Inside this context, an error is noted for those of these cells that are missing, and the study goes on,
        unless nothing could be kept or run any more, or other processes of this launch would wait for this one."""
        try:
            yield
            return
        except Exception as error:
            if ends_all(error) or int(os.environ.get("WORLD_SIZE", "1")) > 1:
                raise
            why = error.message if isinstance(error, InputError) else one_line_with_place(error)
        # Now that the error no longer holds references to the model's tensors.
        self.progress.fail([cell for cell in cells() if not self.progress.is_done(cell)], why)
        _make_room()

    def _run_model(self, model: Model) -> None:
        """Load a model and run its cells: those on the dev set first, which choose those on the test set."""
        progress = self.progress
        models = Models(self.folder.arguments(model), progress.options)

        def cells_like(like: tuple[str, str]) -> list[Cell]:
            return [cell for cell in progress.known_cells(model) if without_passes(cell.variant) == like]

        for like, variant in {without_passes(each): each for each in self.grid.variants(model)}.items():
            if variant.method != HF:  # a method that the model cannot run is refused now
                with self._noting(functools.partial(cells_like, like)), naming(models, variant):
                    models.under(variant)
        self._check_weights(model, models)
        tasks = [task.name for task in self.grid.tasks_of(model)]
        for split in ("dev", "test") if progress.dev else ("test",):
            cells = of_first(lambda split=split: [c for c in progress.known_cells(model) if c.split == split])  # type: ignore[misc]
            title = f"{model.checkpoint or model.name}, cells ({split})"
            with tqdm(total=len(cells), desc=title, disable=models.rank != 0) as bar:
                self.choices.make(model, models, tasks)
                for batch in batches(cells):
                    self._run_batch(models, batch)
                    bar.update(len(batch.cells))

    def _run_batch(self, models: Models, batch: Batch) -> None:
        """Run the cells of a batch that are missing: together, and if that fails, each by itself, as the error may be
        of one alone."""
        progress = self.progress
        missing = of_first(lambda: progress.missing(batch.cells))
        if not missing:
            return
        choice = of_first(lambda: self.choices.of(missing[0]))
        if choice is None and (key := self.choices.key(missing[0])) is not None:
            progress.fail(missing, of_first(lambda: self.choices.failed[key]))
            return
        if models.rank == 0:
            self.folder.note_running(batch.title)
        prepared = self._prepare(models, batch, choice)

        def run(cells: Sequence[Cell]) -> None:
            run_cells(models, cells, prepared, self.folder, progress.options, batch.id)

        if len(missing) > 1 and models.world_size == 1:
            try:
                run(missing)
                missing = []
            except Exception as error:
                if ends_all(error):
                    raise
            if missing:
                _make_room()
        for cells in [[cell] for cell in progress.missing(missing)] if models.world_size == 1 else [missing]:
            with self._noting(lambda cells=cells: cells):  # type: ignore[misc]
                run(cells)
        if models.rank == 0 and all(map(progress.is_done, batch.cells)):
            shutil.rmtree(self.folder.work / batch.id, ignore_errors=True)

    def _prepare(self, models: Models, batch: Batch, choice: Mapping[str, Any] | None) -> Callable[[int], Prepared]:
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
                )
            return self._prepared[order]

        return prepared

    # What is refused.

    def _check_tasks(self) -> None:
        """Refuse to go on with cells of a task that had other documents, demonstrations or prompts."""
        progress = self.progress

        @functools.cache
        def drawn(task: str, *axes: Any) -> list[int] | None:
            return study_tasks.draw(progress.leaves[task], *axes)

        def indices(cell: Cell) -> list[int] | None:
            axes = cell.num_fewshot, cell.demonstrations, cell.seed, cell.order
            if cell.demonstrations is None or cell.demonstrations.method is None:
                return drawn(cell.task, *axes)
            choice = self.choices.of(cell)  # which nobody needs any more, if its file has been removed
            return None if choice is None else study_tasks.draw(progress.leaves[cell.task], *axes, choice)

        for cell in filter(progress.is_done, progress.all_cells()):
            facts = progress.facts(cell)
            contents, now = study_tasks.contents(progress.leaves[cell.task], cell.seed), indices(cell)
            what = "configuration or data" if facts["contents"] != contents else ""
            if not what and now is not None and facts["indices"] != now:
                what = "demonstrations"
            if what:
                again = ", or --rerun" if progress.state(cell) != "done" else ""
                raise InputError(
                    f"--output {self.folder.path}: {cell.task}: its {what} have changed since {cell.path} was run: "
                    f"give another folder{again}."
                )

    def _check_weights(self, model: Model, models: Models) -> None:
        """Refuse to add cells to those that another checkpoint of the same name has given."""
        for cell in filter(self.progress.is_done, self.progress.known_cells(model)):
            if self.progress.facts(cell)["weights"] not in (models.weights, models.weights_in_memory):
                raise InputError(
                    f"--output {self.folder.path}: the weights or the tokenizer of {model.checkpoint or model.name} "
                    f"have changed since {cell.path} was run: give another folder."
                )


def _make_room() -> None:
    """Free the memory of a model that is no longer used: it refers to itself, and the next one needs its place."""
    gc.collect()
    torch.cuda.empty_cache()
