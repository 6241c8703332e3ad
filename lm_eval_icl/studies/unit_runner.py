"""Runs the units of a study, trainings and cells, in one process, which holds one model at a time.

The cells of a unit differ only in the order of the demonstrations and in the number of
Deep-Thinking's passes. Equal prompts run once, and queries are scored after the memory of each
pass, on the way to the last pass. Then lm-eval evaluates every cell with these responses.
"""

from __future__ import annotations

import functools
import gc
import itertools
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import lm_eval
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.task import ConfigurableTask
from lm_eval.loggers.utils import add_env_info, add_tokenizer_info, get_git_commit_hash

from lm_eval_icl import methods
from lm_eval_icl.demonstrations import kept
from lm_eval_icl.demonstrations.chooser import Chooser
from lm_eval_icl.demonstrations.how import SelectionMethod
from lm_eval_icl.errors import InputError, naming, reason
from lm_eval_icl.harness.arguments import read_arguments
from lm_eval_icl.harness.deciding import give_rules
from lm_eval_icl.harness.loading import CheckedHFLM
from lm_eval_icl.harness.model_choices import PoolOfTask, limits_of, predictor
from lm_eval_icl.harness.models import ICLModel, model_class
from lm_eval_icl.harness.prepared_run import tokens_of
from lm_eval_icl.harness.responses import check_finite
from lm_eval_icl.methods.runner import grouped, score_memories
from lm_eval_icl.studies.cell_tasks import CellTask, prepare
from lm_eval_icl.studies.conduct import Failure, Outcome, Unit
from lm_eval_icl.studies.folder import StudyFolder
from lm_eval_icl.studies.grid import HF
from lm_eval_icl.studies.targets import Cell, Checkpoint, Grid, Model, digest, passes_of

_BOOTSTRAP = 100_000  # samples for the standard errors of some metrics, as by default in lm-eval

# Checks the options of `lm-eval-icl train`, and returns the function that trains.
Trainer = Callable[[Mapping[str, Any]], Callable[[], None]]


@dataclass(frozen=True)
class Options:
    """Where, how fast and on how many documents a study runs, as in `lm_eval`."""

    device: str | None = None
    batch_size: int | str | None = None
    limit: float | None = None


class UnitRunner:
    """Runs units in this process, and keeps the model that it loaded last. It only reads the
    study's folder, but for trainings, which write their unfinished models there."""

    def __init__(
        self,
        grid: Grid,
        options: Options,
        folder: StudyFolder,
        trainer: Trainer,
        include_path: str | None,
    ) -> None:
        self.grid = grid
        self.options = options
        self.folder = folder
        self.trainer = trainer
        self.include_path = include_path
        self._model: Model | None = None
        self._unloadable: dict[str, Exception] = {}  # by the model's folder
        # The model under plain ICL, which has loaded the checkpoint.
        self._lm: ICLModel | None = None
        self._chooser: tuple[Any, Chooser] | None = None

    def run(self, unit: Unit) -> Iterator[Outcome]:
        """Run a unit, and yield each target with its outcome, or with a `Failure`."""
        remaining = {target.path: target for target in unit}
        try:
            for target, outcome in self._outcomes(unit):
                del remaining[target.path]
                yield target, outcome
        except Exception as error:
            # A broken device can run nothing else in this process. Out of memory is an error of one
            # unit only.
            is_of_device = isinstance(error, getattr(torch, "AcceleratorError", ()))
            if is_of_device and "out of memory" not in str(error):
                raise
            why = reason(error)
        else:
            return
        make_room()  # the error no longer holds references to the model's tensors
        for target in remaining.values():
            yield target, Failure(why)

    def _outcomes(self, unit: Unit) -> Iterator[Outcome]:
        first = unit[0]
        if isinstance(first, Checkpoint):
            self._forget()
            self.training(first.model)()
            yield first, None
            return
        cells = [target for target in unit if isinstance(target, Cell)]
        lm = self.load(first.model)
        with naming(f"{first.model.name}, {first.variant.name}"):
            yield from self._run_cells(lm, cells)

    def training(self, model: Model) -> Callable[[], None]:
        """Check the options of a model's training, and return the function that trains it."""
        metadata = self.grid.study.metadata
        assert model.training and model.under
        where = f"train: {model.training.name}"
        not_trained = {"peft", "delta", "gguf_file", "gptqmodel", "autogptq"}
        other = sorted(not_trained & model.arguments.keys())
        if other:
            raise InputError(f"models: {other[0]}: {where} trains new weights: leave it out.")
        options = dict(model.training.options)
        if "metaicl" in options:
            options.setdefault("data", metadata.get("metaicl"))
        device = self.options.device
        arguments = {
            **options,
            "method": model.under.method,
            "model_args": model.training_arguments,
            "output": str(self.folder.unfinished(model)),
            "resume": True,
            "metadata": metadata,
            "include_path": self.include_path,
            "device": device.removesuffix(":0") if device else None,
        }
        with naming(where):
            return self.trainer(
                {name: value for name, value in arguments.items() if value is not None}
            )

    def _forget(self) -> None:
        self._model = None
        self._lm = None
        self._chooser = None
        make_room()

    def load(self, model: Model) -> ICLModel:
        """Load a model, in place of the model that was loaded before."""
        if error := self._unloadable.get(model.folder):
            raise error
        if self._lm is None or self._model != model:
            self._forget()
            arguments = self.folder.arguments(model)
            if model.resources.get("num_gpus", 0) > 1:
                arguments["parallelize"] = True
            where = {"device": self.options.device, "batch_size": self.options.batch_size}
            try:
                self._lm = model_class("icl").create_from_arg_obj(arguments, where)
                if self._lm.is_tensor_parallel:
                    raise InputError(
                        "models: tp_plan: a study does not divide a model's passes: leave it out."
                    )
            except Exception as error:  # it is not tried again for each unit
                self._unloadable[model.folder] = error
                raise
            self._model = model
            identity = json.dumps(self._lm.model_identity(), sort_keys=True)
            self._weights = self._lm.model_files_digest or digest(identity)
        return self._lm

    def _choice(self, lm: ICLModel, cell: Cell) -> dict[str, Any] | None:
        """The choice of the model, perhaps of an earlier run (`demonstrations.kept`); None if rows
        are drawn."""
        task = self.grid.tasks[cell.task]
        how = cell.demonstrations
        if not isinstance(how, SelectionMethod) or not cell.num_fewshot:
            return None
        key = (cell.task, how.pool)
        if self._chooser is None or self._chooser[0] != key:  # making one reads the documents
            pool = PoolOfTask(task.loaded, list(task.dev.values()))
            self._chooser = (key, Chooser(pool, predictor(lm), how.pool))
        chooser = self._chooser[1]
        about = kept.about_model(str(lm.pretrained), lm.model_identity())
        about = {**about, **limits_of(lm), "data": cell.data}
        return kept.chosen(chooser, chooser.pool, how, cell.num_fewshot, cell.seed, about)

    def lm_of(self, loaded: ICLModel, cell: Cell) -> Any:
        """The model of lm-eval that runs a cell, with the checkpoint that is loaded."""
        if cell.variant.method == HF:
            return CheckedHFLM(loaded)
        lm = model_class(cell.variant.method)(loaded, **cell.variant.arguments)
        lm.runner.fits = [variant.make() for variant in self.grid.study.fits]
        return lm

    def check(self, cell: Cell) -> None:
        """Load a cell's model. Raises an `InputError` if a prompt of the cell does not fit it."""
        loaded = self.load(cell.model)
        with naming(f"{cell.model.name}, {cell.variant.name}"):
            lm = self.lm_of(loaded, cell)
            prepared = prepare(self.grid.study, self.grid.tasks[cell.task], cell, None, lm)
            if isinstance(lm, ICLModel):
                lm.begin([prepared.task])
                lm.run.logs = False
                lm.run.check()

    def _run_cells(self, loaded: ICLModel, cells: Sequence[Cell]) -> Iterator[Outcome]:
        """Run cells that differ only in the order of the demonstrations and the number of
        passes."""
        first = max(cells, key=lambda cell: passes_of(cell.variant)[1])
        task = self.grid.tasks[first.task]
        choice = self._choice(loaded, first)
        lm = self.lm_of(loaded, first)
        by_order = {cell.order: prepare(self.grid.study, task, cell, choice, lm) for cell in cells}
        begun = time.perf_counter()
        tasks = [prepared.task for prepared in by_order.values()]
        for cell_task in tasks:
            # Decision rules add queries that depend on what the model leaves out.
            give_rules(cell_task, lm)
            cell_task.build_all_requests()
        name, _ = passes_of(first.variant)
        numbers = {passes_of(cell.variant)[1] for cell in cells}
        answers = answer(lm, tasks, name, numbers)
        shared: dict[str, Any] = {"cells": len(cells)}
        if isinstance(lm, ICLModel):
            lm.finish()
            shared["passes"] = lm.runner.passes_run
        shared["seconds"] = round(time.perf_counter() - begun, 3)
        for cell in cells:
            prepared = by_order[cell.order]
            number = passes_of(cell.variant)[1]
            _set_passes(lm, name, number)
            if isinstance(lm, ICLModel):
                lm.counts |= lm.run.counts_of(prepared.task.instances)
            results = self._evaluate(Answered(lm, answers[number]), cell, prepared.task)
            icl = {**loaded.origin, **results["config"].get("icl", {})}
            icl["study"] = self._facts(cell, prepared, choice, shared)
            if fits := self.grid.study.fits:
                # How prompts are shortened tells rows apart.
                icl["fits"] = "+".join(variant.name for variant in fits)
            results["config"]["icl"] = icl
            yield cell, results

    def _evaluate(self, lm: LM, cell: Cell, task: ConfigurableTask) -> dict[str, Any]:
        """lm-eval's results of a cell, with all that `lm_eval.simple_evaluate` writes. (That would
        load the task again, and collect facts about the machine for every cell.)"""
        begun = time.time()
        for instance in task.instances:  # which still have the responses of the last cell
            instance.resps = []
            instance.filtered_resps = {}
        tasks: Any = {"tasks": {cell.task: task}, "groups": {}}
        results: Any = lm_eval.evaluate(lm, tasks, limit=cell.limit, bootstrap_iters=_BOOTSTRAP)
        arguments = self.folder.arguments(cell.model)
        if cell.variant.method == HF:  # which has none of the arguments of this package's models
            _, _, arguments = read_arguments(methods.find("icl"), arguments)
        results["config"] = {
            **lm.get_model_info(),
            "model": cell.variant.method,
            "model_args": {**arguments, **cell.variant.arguments},
            "batch_size": self.options.batch_size,
            "batch_sizes": list(getattr(lm, "batch_sizes", {}).values()),
            "device": self.options.device,
            "use_cache": None,
            "limit": cell.limit,
            "bootstrap_iters": _BOOTSTRAP,
            "gen_kwargs": None,
            "fewshot_seed": cell.seed,
        }
        results["date"] = begun
        results.update(_machine())
        add_tokenizer_info(results, lm)
        return dict(results)

    def _facts(
        self,
        cell: Cell,
        prepared: CellTask,
        choice: Mapping[str, Any] | None,
        shared: Mapping[str, Any],
    ) -> dict[str, Any]:
        """What the cell's results file says of it, under `config.icl.study`.

        Args:
            shared: the number of cells that were scored together, with their passes and seconds.
        """
        metric = self.grid.study.metric
        training = cell.model.training
        facts: dict[str, Any] = {
            "id": self.folder.identity,
            "model": cell.model.name,
            "training": training.name if training else None,
            "options": training.weight_options if training else None,
            "demonstrations": cell.drawn,
            "indices": prepared.indices,
            "choice": choice,
            "seed": cell.seed,
            "order": cell.order,
            "split": cell.split,
            "metric": metric if metric != "acc" else None,
            "chosen": list(cell.chosen) or None,
            "rule": cell.rule,
            "weights": self._weights,
            "shared": shared,
        }
        return {name: value for name, value in facts.items() if value not in (None, "")}


class Answered(LM):
    """A model whose responses are known already, by id(instance)."""

    def __init__(self, model: LM, responses: Mapping[int, Iterable[Any]]) -> None:
        super().__init__()
        self.model = model
        # Several cells have the same responses.
        self.responses = {key: iter(several) for key, several in responses.items()}
        self.config = model.config

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[Any]:
        return [next(self.responses[id(instance)]) for instance in requests]

    loglikelihood_rolling = generate_until = loglikelihood

    def __getattr__(self, name: str) -> Any:
        """The attributes of a model that lm-eval uses beyond its interface: the tokenizer,
        `get_model_info`, ..."""
        return getattr(self.model, name)


def _set_passes(lm: Any, name: str, number: int) -> None:
    if name:
        lm.runner.method = replace(lm.runner.method, **{name: number})


def answer(
    lm: Any, tasks: Sequence[Any], name: str, numbers: set[int]
) -> Mapping[int, Mapping[int, Iterable[Any]]]:
    """Number of passes -> id(instance) -> the responses of a model to all requests of these tasks.
    `name` is the argument that sets the number of passes, or "" (`passes_of`)."""
    instances = list[Instance]()
    for task in tasks:
        instances += task.instances
    kinds = sorted({instance.request_type for instance in instances})
    if isinstance(lm, ICLModel):
        has_memory = not lm.runner.capabilities.no_memory
        if kinds == ["loglikelihood"] and has_memory:
            return _log_likelihoods(lm, tasks, instances, numbers)
    answers = dict[int, Mapping[int, Iterable[Any]]]()
    for number in numbers:
        _set_passes(lm, name, number)
        if isinstance(lm, ICLModel):
            lm.begin(tasks)
        responses = defaultdict[int, list[Any]](list)
        for kind in kinds:
            repeated = list[Instance]()
            for instance in instances:
                if instance.request_type == kind:
                    repeated += [instance] * instance.repeats
            of_kind = getattr(lm, kind)(repeated, disable_tqdm=True)
            for instance, response in zip(repeated, of_kind, strict=True):
                responses[id(instance)].append(response)
        answers[number] = responses
    return answers


def _log_likelihoods(
    lm: ICLModel, tasks: Sequence[Any], instances: Sequence[Instance], numbers: set[int]
) -> Mapping[int, Mapping[int, Iterable[Any]]]:
    """`answer` for log-likelihoods, which are scored after the memory of each pass, on the way to
    the last pass."""
    lm.begin(tasks)
    run = lm.run
    runner = lm.runner
    run.logs = False  # the study shows the progress of its cells
    requests = run.requests(instances)
    run.tokens_alone += tokens_of(requests) * len(numbers)
    answers: dict[int, dict[int, Iterable[Any]]] = {number: {} for number in numbers}
    contexts = grouped((request.prompt, request.answer) for request in requests)
    with runner.mixed_precision():
        for context, queries in contexts.items():
            if lm.method.counts_memories and context.demonstrations:
                memories: Any = score_memories(runner, context, queries, numbers)
            else:  # the memory is the same for every number of passes
                memories = ((None, scored) for scored in runner.score({context: queries}))
            for number, scored in memories:
                for (_, query, ids), value in zip(*scored, strict=True):
                    for i in queries[query][ids]:
                        check_finite(instances[i], value[0], runner.model)
                        for passes in numbers if number is None else [number]:
                            answers[passes][id(instances[i])] = itertools.repeat(value)
            runner.forget(context)
    return answers


@functools.cache
def _machine() -> dict[str, Any]:
    """lm-eval's facts about the machine, and the commit. To collect them takes seconds."""
    facts: dict[str, Any] = {"git_hash": get_git_commit_hash()}
    add_env_info(facts)
    return facts


def make_room() -> None:
    """Free the memory of a model that is no longer used, since it refers to itself, and the next
    model needs room."""
    gc.collect()
    torch.cuda.empty_cache()
