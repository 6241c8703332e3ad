"""Demonstrations that a model chooses from the few-shot documents of a task, or that are retrieved
for each document. In a run of several processes, the first process chooses and retrieves them,
before requests are built."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache, cached_property, partial
from typing import Any

import numpy as np
from lm_eval.api.task import ConfigurableTask, Task
from lm_eval.evaluator_utils import get_sample_size
from lm_eval.models.huggingface import HFLM

from lm_eval_icl.demonstrations.chooser import read_queries
from lm_eval_icl.demonstrations.draw import pool_digest, too_few
from lm_eval_icl.demonstrations.kept import about_model, chosen
from lm_eval_icl.demonstrations.retrieve import Features
from lm_eval_icl.errors import InputError, naming
from lm_eval_icl.files import as_json
from lm_eval_icl.harness.distributed import from_first
from lm_eval_icl.harness.documents import among, evaluated, template_of
from lm_eval_icl.harness.models import ICLModel
from lm_eval_icl.harness.samplers import FixedSampler, RetrievingSampler, pool_of, pool_sampler
from lm_eval_icl.harness.training import Examples
from lm_eval_icl.inference.identity import files_digest, hub_commit, model_identity
from lm_eval_icl.methods import ICL, Predictor
from lm_eval_icl.prompts.prompt import FewShotPrompt


class PoolOfTask:
    """The documents that a task takes demonstrations from (`demonstrations.chooser.TaskPool`).

    Args:
        task: a task with options to choose from.
        without: documents that must not be chosen, besides the documents that the task evaluates.

    Raises:
        InputError: the task has no options or no few-shot documents, or it evaluates all of these.
    """

    def __init__(self, task: ConfigurableTask, without: Sequence[Mapping[str, Any]] = ()) -> None:
        self.name = str(getattr(task, "task_name", None) or type(task).__name__)
        if (
            not isinstance(task, ConfigurableTask)
            or task.OUTPUT_TYPE != "multiple_choice"
            or task.multiple_input
        ):
            raise InputError(
                f"task {self.name!r}: demonstrations are chosen only for tasks with options."
            )
        self.task = task
        self.docs = pool_of(task)
        if not self.docs:
            raise InputError(f"task {self.name!r}: has no few-shot documents to choose from.")
        closed = {as_json(doc) for doc in without}
        self.rows = [
            row for row, doc in enumerate(self.docs) if not closed or as_json(doc) not in closed
        ]
        is_evaluated = evaluated(task)
        is_without = among(task, lambda: without)
        self.is_closed = cache(
            lambda row: is_evaluated(self.docs[row]) or is_without(self.docs[row])
        )
        if all(self.is_closed(row) for row in self.rows):
            raise InputError(f"task {self.name!r}: {too_few(1, 0).message}")
        self.demonstration = cache(self._demonstration)
        self.query = cache(self._query)

    @cached_property
    def _examples(self) -> Examples:
        return Examples(self.task, self.docs)

    @cached_property
    def docs_digest(self) -> str:
        return pool_digest(self.docs)

    @cached_property
    def prompts(self) -> str:
        """What a choice depends on besides the pool: the task's templates, and the documents that
        it evaluates."""
        return template_of(self.task) + pool_digest(list(self.task.eval_docs))

    def _query(self, row: int) -> tuple[FewShotPrompt, tuple[str, ...], int]:
        example = self._examples.example((), row)
        return example.prompt, example.options, example.right

    def _demonstration(self, row: int) -> str:
        return self._examples.example((row,), row).prompt.demonstrations[0]


def predictor(model: HFLM) -> Predictor:
    """A model under plain ICL, whatever method it runs, with the limits of its runs."""
    options: dict[str, Any] = {}
    if isinstance(model, ICLModel):
        common = model.common
        options = {
            "batch_size": model.texts,
            "pack_tokens": common.pack_tokens,
            "store_bytes": model.runner.store_bytes,
            "plain": common.plain,
        }
    return Predictor(model.model, model.tokenizer, ICL(), **limits_of(model), **options)


def limits_of(model: HFLM) -> dict[str, Any]:
    """The arguments of a model that change its prompts."""
    return {"max_length": model.max_length, "add_bos_token": model.add_bos_token}


def give_chosen(model: ICLModel, tasks: Iterable[Task]) -> dict[str, Any]:
    """Give all tasks of a run the demonstrations that its model chooses. Every process of a run
    calls this function; the first process chooses.

    Returns:
        Task -> the choice, for the results file; empty if no task asks for one.

    Raises:
        InputError: the demonstrations cannot be chosen.
    """
    waiting: dict[Task, FixedSampler] = {}
    for task in tasks:
        sampler = pool_sampler(task)
        if task.config.num_fewshot and isinstance(sampler, FixedSampler) and sampler.method:
            waiting[task] = sampler
    if not waiting:
        return {}

    def choose() -> dict[str, Any]:
        name = str(getattr(model.pretrained, "name_or_path", model.pretrained))
        about = {**about_model(name, model.model_identity()), **limits_of(model)}
        under_icl = predictor(model)
        choices = {}
        for task, sampler in waiting.items():
            seed = 1234 if sampler.seed is None else sampler.seed  # lm-eval's default
            assert sampler.method is not None
            shots = int(task.config.num_fewshot)
            pool = PoolOfTask(task)
            choice = chosen(under_icl, pool, sampler.method, shots, seed, about)
            choices[str(task.config.task)] = choice
        return choices

    by_task = from_first(choose)
    for task, sampler in waiting.items():
        sampler.give(by_task[str(task.config.task)]["indices"])
    return by_task


def retrieving(tasks: Mapping[str, Task]) -> dict[str, RetrievingSampler]:
    """The samplers of the tasks that retrieve demonstrations for each document, by task."""
    samplers = {}
    for name, task in tasks.items():
        sampler = pool_sampler(task)
        if task.config.num_fewshot and isinstance(sampler, RetrievingSampler):
            samplers[name] = sampler
    return samplers


def give_rankings(model: Any, tasks: Mapping[str, Task], limit: float | None) -> None:
    """Rank the pools of tasks that retrieve demonstrations, for the documents of a run. Every
    process of a run calls this function; the first process ranks."""
    for name, sampler in retrieving(tasks).items():
        task = tasks[name]
        shots = int(task.config.num_fewshot)
        read = partial(_features, model, task) if sampler.similar.by == "features" else None
        documents = list(task.eval_docs)[: get_sample_size(task, limit)]
        with naming(f"task {sampler.name!r}: demonstrations={sampler.similar}"):
            sampler.give(shots, *from_first(partial(sampler.rank, shots, documents, read)))


def _features(model: Any, task: Task, pool: Sequence[Any], documents: Sequence[Any]) -> Features:
    """The hidden states of the evaluated model after the queries of the task's pool, and after
    those of documents."""
    if not isinstance(model, HFLM):
        raise InputError(
            f"by=features needs a model of transformers, and {type(model).__name__} is none."
        )
    under_icl = predictor(model)
    if isinstance(model, ICLModel):
        identity = model.model_identity()
    else:
        adapters = {"peft": model.peft, "delta": model.delta}
        tokenizer = model.tokenizer.name_or_path
        if tokenizer not in ("", model.pretrained):
            adapters["tokenizer"] = tokenizer
        files = files_digest(model.pretrained, **adapters)
        identity = model_identity(model.model, files, hub_commit(model.pretrained, model.revision))

    def read(docs: Sequence[Any]) -> np.ndarray:
        examples = Examples(task, docs)
        queries = []
        for row in range(len(docs)):
            example = examples.example((), row)
            queries.append((example.prompt, example.options[:1]))
        _, states = read_queries(under_icl, str(task.config.task), queries)
        return states

    identity = {**identity, "add_bos_token": model.add_bos_token}
    return identity, lambda rows: (read([pool[row] for row in rows]), read(documents))
