"""Runs cells of a study, sharing what can be shared.

A model is loaded once. The requests of a task with some demonstrations are made once for all methods. The cells of one
method that differ only in the order of the demonstrations, or in the number of passes of Deep-Thinking, are scored
together: prompts that are the same for the method are run once, and the memory after each pass is scored on the way to
the last. Every cell then goes through lm-eval with the scores that were found.
"""

from __future__ import annotations

import copy
import functools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import lm_eval
import lm_eval.evaluator
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks import TaskManager
from tqdm import tqdm

from lm_eval_icl import version
from lm_eval_icl.errors import InputError, naming
from lm_eval_icl.harness.arguments import CommonArguments
from lm_eval_icl.harness.deciding import give_rules
from lm_eval_icl.harness.loading import CheckedHFLM, Loaded
from lm_eval_icl.harness.models import ICLModel, model_class
from lm_eval_icl.harness.requests import RequestTokenizer
from lm_eval_icl.harness.responses import check_finite
from lm_eval_icl.inference.scoring import Score
from lm_eval_icl.methods.limits import Request
from lm_eval_icl.methods.runner import grouped
from lm_eval_icl.studies.cells import Cell, digest, passes_of
from lm_eval_icl.studies.grid import HF, Study
from lm_eval_icl.studies.parts import Variant

# The number of a memory -> id(instance) -> its score.
Scores = dict[int, dict[int, Score]]


@dataclass(frozen=True)
class Options:
    """What says where and how fast a study runs, as in `lm_eval`."""

    device: str | None = None
    batch_size: int | str | None = None
    limit: float | None = None


class Answered(LM):
    """A model whose log-likelihoods are known."""

    def __init__(self, model: ICLModel, scores: Mapping[int, Score]) -> None:
        super().__init__()
        self.model, self.scores, self.config = model, scores, model.config

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[Score]:
        return [self.scores[id(instance)] for instance in requests]

    loglikelihood_rolling = generate_until = None  # nothing else is asked

    def __getattr__(self, name: str) -> Any:
        """What lm-eval asks of a model beyond its interface: the tokenizer, the device, `get_model_info`, ..."""
        return getattr(self.model, name)


class OneTokenizer(RequestTokenizer):
    """A tokenizer of requests that tokenizes each only once, until `forget`."""

    def __init__(self, tokenize: RequestTokenizer) -> None:
        super().__init__(tokenize.prompts, tokenize.max_gen_toks)
        self._known: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[Sequence[Instance], list[Request]]] = {}

    def __call__(self, instances: Sequence[Instance], left_out: tuple[int, ...] = ()) -> list[Request]:
        key = (tuple(map(id, instances)), left_out)
        if key not in self._known:  # instances are kept, since an id is unique only as long as its object exists
            self._known[key] = (instances, super().__call__(instances, left_out))
        return self._known[key][1]

    def forget(self) -> None:
        self._known.clear()


class Models:
    """A checkpoint, loaded once, as the model of every method.

    Args:
        arguments: as `--model_args`.
        parts: whether it is loaded in parts, on several devices.

    Attributes:
        first: the model under plain ICL.
        weights: a digest of its files; of what was loaded, if they are not here.

    Raises:
        InputError: it cannot be loaded, its weights cannot be read, or its passes are divided among processes.
    """

    def __init__(self, arguments: Mapping[str, Any], options: Options, parts: bool = False) -> None:
        self.arguments = arguments
        where = {"device": options.device, "batch_size": options.batch_size}
        loaded = {**arguments, **({"parallelize": True} if parts else {})}
        self.first: ICLModel = model_class("icl").create_from_arg_obj(loaded, where)
        if self.first._is_tensor_parallel:
            raise InputError("models: tp_plan: a study does not divide the passes of a model: leave it out.")
        self.loaded = Loaded(self.first)
        identity = json.dumps(self.first.model_identity(), sort_keys=True)
        self.weights: str = self.first.model_files_digest or digest(identity)
        self._tokenizers: dict[tuple[bool, bool], OneTokenizer] = {}
        self._models: dict[str, ICLModel] = {}
        self._latest = self.first

    def under(self, variant: Variant) -> ICLModel:
        """The model of a method, which is refused if the model does not do what it needs."""
        if variant.name not in self._models:
            model = model_class(variant.method)(self.loaded, **variant.arguments)
            key = (model.method.treats_demonstrations_alike, model.canonical_order)
            model.tokenize = self._tokenizers.setdefault(key, OneTokenizer(model.tokenize))
            self._models[variant.name] = model
        if self._latest is not self._models[variant.name]:
            self._latest.begin([])  # its memories would stay
            self._latest = self._models[variant.name]
        return self._latest

    def hf(self) -> CheckedHFLM:
        """The checkpoint as lm-eval's own model: a new one for each cell, since batch sizes that were found for one may
        be too large for another."""
        return CheckedHFLM(self.loaded)

    def naming(self, variant: Variant) -> AbstractContextManager[None]:
        """Inside this context, the model and the method stand before an error's message."""
        return naming(f"{self.arguments['pretrained']}, {variant.name}")

    def forget_requests(self) -> None:
        for tokenize in self._tokenizers.values():
            tokenize.forget()


def run_cells(
    models: Models, cells: Sequence[Cell], prepared: Callable[[int], Any], study: Study, options: Options
) -> Iterator[tuple[Cell, dict[str, Any]]]:
    """Run cells that differ in nothing but the order of the demonstrations and the number of passes.

    Args:
        prepared: the task of an order.

    Yields:
        Each cell with lm-eval's results.
    """
    variant = max((cell.variant for cell in cells), key=lambda variant: passes_of(variant)[1])
    tasks = {cell.order: prepared(cell.order) for cell in cells}
    kinds = {instance.request_type for task in tasks.values() for instance in task.instances}
    whole = models.first.runner.capabilities.no_memory  # prompts are read as a whole
    if variant.method == HF or kinds != {"loglikelihood"} or whole:
        for cell in cells:
            number = passes_of(cell.variant)[1]
            lm: LM = models.hf() if variant.method == HF else _with_passes(models, cell.variant, number)
            with models.naming(cell.variant):
                results = evaluate(lm, cell, _with_rules(tasks[cell.order], lm), options)
            yield cell, recorded(cell, results, tasks[cell.order], models, study, {"cells": 1})
        return
    wanted = {passes_of(cell.variant)[1] for cell in cells}
    model = _with_passes(models, variant, max(wanted))
    with models.naming(variant):
        rounds = _together(model, tasks.values(), wanted)
    for numbers in rounds:
        begun = time.perf_counter()
        of_these = [cell for cell in cells if passes_of(cell.variant)[1] in numbers]
        model = _with_passes(models, variant, max(numbers))
        with models.naming(variant):
            model.begin([])  # so that its limits are those of this number of passes
            deciding = {order: _with_rules(task, model) for order, task in tasks.items()}
            instances = [instance for task in deciding.values() for instance in task.instances]
            scores = score(model, list(deciding.values()), instances, numbers)
            model.finish()
        seconds = round(time.perf_counter() - begun, 3)
        counts = {"cells": len(of_these), "orders": len(tasks), "passes": model.runner.passes_run, "seconds": seconds}
        for cell in of_these:
            number = passes_of(cell.variant)[1]
            answered = Answered(_with_passes(models, variant, number), scores[number])
            results = evaluate(answered, cell, deciding[cell.order], options)
            yield cell, recorded(cell, results, tasks[cell.order], models, study, counts)


def _with_passes(models: Models, variant: Variant, number: int) -> ICLModel:
    """The model of a method, with this number of passes, which it keeps until it is given another."""
    model, (name, _) = models.under(variant), passes_of(variant)
    if name:
        changed: dict[str, Any] = {name: number}
        model.runner.method = replace(model.runner.method, **changed)
    return model


def _with_rules(task: ConfigurableTask, model: LM) -> ConfigurableTask:
    """A task with the queries of its decision rules, which depend on what a model leaves out of prompts."""
    task = copy.copy(task)
    give_rules(task, model)
    task.build_all_requests()
    return task


def _together(model: ICLModel, tasks: Iterable[Any], wanted: set[int]) -> list[set[int]]:
    """The numbers of passes that are scored together.

    One pass takes fewer positions than several. Where the prompts of several do not fit, so that something is left out
    of them, the cells of one pass are scored by themselves, as they have other prompts.
    """
    if len(wanted) > 1 and 1 in wanted and model.common.overflow != "error":
        model.begin(list(tasks))
        model.run.check()
        if model.run.left_out or model.run.truncated:
            return [{1}, wanted - {1}]
    return [wanted]


def score(model: ICLModel, tasks: Sequence[Any], instances: Sequence[Instance], numbers: set[int]) -> Scores:
    """The log-likelihoods of all instances, on the memory after each of these numbers of passes.

    Raises:
        InputError: an instance cannot be run, or its log-probability is not finite.
    """
    model.begin(tasks)
    run, runner = model.run, model.runner
    run.logs = False  # the progress is that of the study's cells
    requests = run.requests(instances)
    run.tokens_alone += sum({id(request): request.length for request in requests}.values()) * len(numbers)
    scores: Scores = {number: {} for number in numbers}
    with (
        tqdm(total=len(instances) * len(numbers), leave=False, desc=model.method.name) as bar,
        runner.mixed_precision(),
    ):
        for context, queries in grouped((request.prompt, request.answer) for request in requests).items():
            asked = {query: list(answers) for query, answers in queries.items()}
            if model.method.counts_memories and context.demonstrations:
                memories = runner.score_memories(context, asked, numbers)
            else:  # one memory, whatever the number
                memories = ((1, scored) for scored in runner.score({context: asked}))
            last: dict[int, Score] = {}
            for number, scored in memories:
                for (_, query, answer), value in zip(*scored, strict=True):
                    for i in queries[query][answer]:
                        check_finite(instances[i], value[0], runner.model)
                        last[id(instances[i])] = value
                        if number in numbers:
                            scores[number][id(instances[i])] = value
            for of_number in scores.values():
                # Without demonstrations there is one memory, after however many passes.
                of_number.update({key: value for key, value in last.items() if key not in of_number})
            bar.update(len(last) * len(numbers))
            runner.forget(context)
    return scores


def evaluate(lm: LM, cell: Cell, task: ConfigurableTask, options: Options) -> dict[str, Any]:
    """lm-eval's results of a cell."""
    for instance in task.instances:  # which has the responses of the cell before
        instance.resps, instance.filtered_resps = [], {}
    with environment_once():
        results: dict[str, Any] = lm_eval.simple_evaluate(
            model=lm,
            tasks=[task],
            task_manager=TaskManager(include_defaults=False),  # the task is loaded: no folder is scanned
            limit=options.limit if cell.split == "test" else None,  # the dev set is as large as it should be
            fewshot_random_seed=cell.seed,
            batch_size=options.batch_size,
            device=options.device,
        )
    return results


def recorded(
    cell: Cell,
    results: dict[str, Any],
    task: Any,
    models: Models,
    study: Study,
    shared: Mapping[str, Any],
) -> dict[str, Any]:
    """A cell's results, with what was varied under `config.icl.study`.

    Args:
        shared: how many cells were scored together, and if this was measured, of how many orders, in how many passes
            and seconds.
    """
    # `hf` has none of the arguments of this package's models.
    ours = {field.name for field in fields(CommonArguments)} if cell.variant.method == HF else set()
    of_model = {name: value for name, value in models.arguments.items() if name not in ours}
    metric = study.dev.metric if study.dev and cell.split == "dev" else study.metric
    facts: dict[str, Any] = {
        "model": cell.model.name,
        "arguments": dict(cell.variant.arguments),
        "task": cell.task,
        "num_fewshot": cell.num_fewshot,
        "demonstrations": cell.drawn,
        "indices": task.demonstrations,
        "seed": cell.seed,
        "order": cell.order,
        "split": cell.split,
        "weights": models.weights,
        "shared": dict(shared),
    }
    where_there_are_some = {
        "training": cell.model.training.name if cell.model.training else "",
        "checkpoint": cell.model.checkpoint,
        "choice": task.choice,
        "changes": task.changes,
        "chosen": list(cell.chosen),
        "metric": metric if metric != "acc" else "",
    }
    facts |= {name: value for name, value in where_there_are_some.items() if value}
    if "decide" in cell.chosen:
        facts["rule"] = cell.rule or None
    config = results["config"]
    config |= {"model": cell.variant.method, "model_args": {**of_model, **cell.variant.arguments}}
    config["icl"] = {**origin(), **config.get("icl", {}), "study": facts}
    return results


@functools.cache
def _environment(add: Callable[[dict[str, Any]], None], commit: Callable[[], str | None]) -> tuple[dict[str, Any], Any]:
    facts: dict[str, Any] = {}
    add(facts)
    return facts, commit()


@contextmanager
def environment_once() -> Iterator[None]:
    """Inside this context, lm-eval finds out about the machine and the commit only once, which takes seconds."""
    module: Any = lm_eval.evaluator
    add, commit = module.add_env_info, module.get_git_commit_hash
    module.add_env_info = lambda storage: storage.update(_environment(add, commit)[0])
    module.get_git_commit_hash = lambda: _environment(add, commit)[1]
    try:
        yield
    finally:
        module.add_env_info, module.get_git_commit_hash = add, commit


@functools.cache
def origin() -> dict[str, str | None]:
    """The version and the commit of this package."""
    return {"version": version.version(), "commit": version.commit()}
