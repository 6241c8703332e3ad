"""Runs the units of a study in one process, which holds one model at a time: trainings, choices, cells."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from lm_eval_icl import version
from lm_eval_icl.decisions.how import written
from lm_eval_icl.demonstrations.choosing import Chooser
from lm_eval_icl.demonstrations.kept import about_model
from lm_eval_icl.errors import InputError, naming, reason
from lm_eval_icl.harness.choosing import predictor
from lm_eval_icl.studies import tasks as study_tasks
from lm_eval_icl.studies.cells import Cell, ChosenRows, Model, together
from lm_eval_icl.studies.conduct import Failure, Outcome, Unit
from lm_eval_icl.studies.folder import StudyFolder
from lm_eval_icl.studies.grid import HF
from lm_eval_icl.studies.opening import Opened
from lm_eval_icl.studies.run import Models, Options, run_cells

# Checks the options of `lm-eval-icl train`, and returns what trains.
Trainer = Callable[[Mapping[str, Any]], Callable[[], None]]
# Of lm-eval's model arguments, those that put other weights in place of a checkpoint's, or on top of them.
_OTHER_WEIGHTS = {"peft", "delta", "gguf_file", "gptqmodel", "autogptq"}


def is_broken(error: BaseException | None) -> bool:
    """Whether the device has stopped working, so that nothing else could be run in this process. Out of memory is an
    error of one cell, since the next one may be smaller."""
    broken = getattr(torch, "AcceleratorError", ())  # since torch 2.8
    while error is not None:
        if isinstance(error, broken) and "out of memory" not in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


class UnitRunner:
    """Runs units in this process, and keeps the model that it loaded last.

    Args:
        opened: the study, whose tasks are loaded.
        options: where and how fast it runs.
        folder: the study's folder, which is only read; trainings write there beside their place.
        trainer: checks the options of `lm-eval-icl train`, and returns what trains.
        include_path: a folder of further tasks.
    """

    def __init__(
        self, opened: Opened, options: Options, folder: StudyFolder, trainer: Trainer, include_path: str | None
    ) -> None:
        self.opened, self.options, self.folder = opened, options, folder
        self.trainer, self.include_path = trainer, include_path
        self._model: Model | None = None
        self._models: Models | None = None

    def run(self, unit: Unit) -> Iterator[Outcome]:
        """Run a unit: each target with what it gave, or with the `Failure`. What fails does not stop the others.

        Raises:
            Exception: the device is broken.
        """
        if unit.kind == "train":
            self._forget()
            yield unit.targets[0], self._attempt(lambda: self.training(unit.model)())
            make_room()
            return
        models = self._attempt(lambda: self._load(unit))
        if isinstance(models, Failure):
            yield from ((target, models) for target in unit.targets)
            return
        choosers: dict[int, Chooser] = {}
        for target in unit.targets:
            if isinstance(target, ChosenRows):
                yield target, self._attempt(functools.partial(self._choose, models, target, choosers))
        if cells := [target for target in unit.targets if isinstance(target, Cell)]:
            yield from self._run_cells(models, cells, unit.rows)

    def training(self, model: Model) -> Callable[[], None]:
        """What trains a model.

        Raises:
            InputError: an option of its training cannot be used.
        """
        study = self.opened.grid.study
        assert model.training and model.under
        where = f"train: {model.training.name}"
        if other := sorted(_OTHER_WEIGHTS & model.arguments.keys()):
            raise InputError(f"models: {other[0]}: {where} makes weights of its own: leave it out.")
        options = dict(model.training.options)
        if "metaicl" in options and "data" not in options:
            if "metaicl" not in study.metadata:
                raise InputError(f"{where}: needs the folder of MetaICL's data: give --metadata metaicl=DATA_DIR.")
            options["data"] = study.metadata["metaicl"]
        device = self.options.device
        arguments = {
            **options,
            "method": model.under.method,
            "model_args": model.training_arguments,
            "output": str(self.folder.unfinished(model)),
            "resume": True,
            "metadata": study.metadata,
            "include_path": self.include_path,
            "device": device.removesuffix(":0") if device else None,
        }
        with naming(where):
            return self.trainer({name: value for name, value in arguments.items() if value is not None})

    def _attempt(self, make: Callable[[], Any]) -> Any:
        try:
            return make()
        except Exception as error:
            if is_broken(error):
                raise
            why = reason(error)
        make_room()  # now that the error no longer holds references to the model's tensors
        return Failure(why)

    def _forget(self) -> None:
        self._model = self._models = None
        make_room()

    def _load(self, unit: Unit) -> Models:
        """Load a unit's model, in place of the one before.

        Raises:
            InputError: it cannot be loaded, or other weights have given cells that are there.
        """
        model = unit.model
        if self._models is None or self._model != model:
            self._forget()
            several = model.resources.get("num_gpus", 0) > 1
            self._models, self._model = Models(self.folder.arguments(model), self.options, several), model
        if unit.weights not in ("", self._models.weights):
            raise InputError(
                f"--output {self.folder.path}: the weights or the tokenizer of {model.title} have changed since other "
                "cells were run: give another folder."
            )
        return self._models

    def _choose(self, models: Models, rows: ChosenRows, choosers: dict[int, Chooser]) -> dict[str, Any]:
        """The contents of the file of a choice of demonstrations."""
        pool, how = self.opened.pools[rows.task], rows.how
        with naming(f"task {rows.task!r}: demonstrations={how}"):
            chooser = choosers.setdefault(how.pool, Chooser(pool, predictor(models.first), how.pool))
            choice = chooser.choose(how.name, rows.num_fewshot, rows.seed, how.balance, **how.arguments)
        model = about_model(str(models.arguments["pretrained"]), models.first.model_identity())
        digest = {"rows": len(pool.docs), "sha256": pool.sha256}
        chosen = {"n": rows.num_fewshot, "pool": digest, "seeds": {str(rows.seed): choice.as_json()}}
        about = {"how": str(how), "model": model, "version": version.version()}
        return {"about": about, "tasks": {pool.name: chosen}}

    def _run_cells(self, models: Models, cells: Sequence[Cell], rows: Mapping[str, Any] | None) -> Iterator[Outcome]:
        """Run cells with the same requests, those together that can be. If that fails, each by itself, as the error may
        be of one alone."""
        models.forget_requests()
        prepared = functools.cache(functools.partial(self._prepare, models, cells[0], rows))
        for batch in together(cells):
            done = set[str]()
            if len(batch) > 1:
                run = self._attempting(models, batch, prepared)
                for cell, results in run:
                    if isinstance(results, Failure):
                        break
                    done.add(cell.path)
                    yield cell, results
            for cell in batch:
                if cell.path not in done:
                    yield from self._attempting(models, [cell], prepared)

    def _attempting(self, models: Models, cells: Sequence[Cell], prepared: Callable[[int], Any]) -> Iterator[Outcome]:
        """The cells that are run together, and if that fails, the first with the reason."""
        running = run_cells(models, cells, prepared, self.opened.grid.study, self.options)
        while (outcome := self._attempt(lambda: next(running, None))) is not None:
            if isinstance(outcome, Failure):
                yield cells[0], outcome
                return
            yield outcome

    def _prepare(self, models: Models, cell: Cell, rows: Mapping[str, Any] | None, order: int) -> Any:
        """The task of an order, with demonstrations that are drawn or that a model has chosen."""
        opened, choice = self.opened, None
        if rows is not None and (chosen := cell.chosen_rows) is not None:
            pool = opened.pools[cell.task]
            if rows["tasks"][pool.name]["pool"]["sha256"] != pool.sha256:
                raise InputError(f"{chosen.path}: chosen from another pool.")
            choice = {**rows["tasks"][pool.name]["seeds"][str(cell.seed)], "version": rows["about"].get("version")}
        rules = opened.grid.study.rules
        return study_tasks.prepare(
            opened.leaves[cell.task],
            cell.num_fewshot,
            cell.demonstrations,
            cell.seed,
            order,
            opened.dev[cell.task] if cell.split == "dev" else None,
            cell.limit,
            choice,
            lambda task: task.bind(models.hf() if cell.variant.method == HF else models.under(cell.variant)),
            written(rules) if rules else None,
        )


def make_room() -> None:
    """Free the memory of a model that is no longer used: it refers to itself, and the next one needs its place."""
    gc.collect()
    torch.cuda.empty_cache()
