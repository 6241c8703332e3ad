"""The tasks of a study: loaded once, with dev sets, and with the demonstrations, order and documents of a cell."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import lm_eval.api.task
from lm_eval.api.task import ConfigurableTask
from lm_eval.evaluator_utils import get_sample_size

from lm_eval_icl.decisions.how import written
from lm_eval_icl.demonstrations.how import How
from lm_eval_icl.demonstrations.similar import Similar
from lm_eval_icl.errors import InputError, refusing
from lm_eval_icl.harness.deciding import check_options
from lm_eval_icl.harness.metaicl import MetaICLTask
from lm_eval_icl.harness.prompts import recording
from lm_eval_icl.harness.tasks import FixedSampler, ICLTask, RetrievingSampler, These, among, template_of
from lm_eval_icl.harness.training import task_manager, unknown_task
from lm_eval_icl.metaicl.files import checked_seed
from lm_eval_icl.studies.cells import Cell, Grid, StudyTask, digest
from lm_eval_icl.studies.grid import Demonstrations, Study

# The dev set is the same for all seeds of the demonstrations.
_DEV_SEED = 0


def open_study(study: Study, limit: float | None, include_path: str | None) -> Grid:
    """The cells of a study, with its tasks loaded and its dev sets drawn. What cannot be is refused."""
    tasks = load(study.tasks, include_path, study.metadata)
    for name, task in tasks.items():
        loaded, rows, data, used = task.loaded, {}, {}, set[int]()
        if study.metric not in (known := loaded.aggregation()):
            raise InputError(f"metric: task {name!r} has no {study.metric!r}, only {', '.join(sorted(known))}.")
        if study.rules:
            check_options(loaded, study.rules)
        own = loaded.config.num_fewshot  # as lm-eval decides it: a task with 0 in its configuration keeps 0
        shots = tuple(dict.fromkeys(int(own or 0) if n is None or own == 0 else n for n in study.num_fewshot))
        for n, how, seed in itertools.product(shots, study.demonstrations, study.seeds):
            draw(task, n, how, seed, study.orders - 1)
            rows[n, str(how), seed] = drawn = draw(task, n, how, seed)
            used.update(drawn or ())
            if study.dev and drawn is None and not isinstance(how, How):
                why = "draws demonstrations of its own for every document, which may be documents of the dev set"
                raise InputError(f"dev: task {name!r} {why}: give `demonstrations`.")
        demonstrations = [row for i, row in enumerate(_pool(loaded)) if i in used]
        dev = dev_set(task, study.dev.size, limit, demonstrations) if study.dev else {}
        of_dev = digest_of(list(dev.items()))
        for n, how, seed in itertools.product(shots, study.demonstrations, study.seeds):
            shown = _shown(loaded, seed) if isinstance(loaded, MetaICLTask) else None
            inputs = [_contents(loaded), shown, rows[n, str(how), seed]]
            data[n, str(how), seed, "dev"] = on_dev = digest_of([*inputs, of_dev])
            data[n, str(how), seed, "test"] = on_dev if isinstance(how, How) else digest_of(inputs)
        better = loaded.higher_is_better().get(study.metric, True)
        tasks[name] = replace(task, shots=shots, dev=dev, data=data, higher_is_better=better)
    return Grid(study, tasks, limit)


def load(
    specs: Sequence[str | Mapping[str, Any]], include_path: str | None, metadata: Mapping[str, Any]
) -> dict[str, StudyTask]:
    """The leaf tasks of these names, groups and changed configurations."""
    manager = task_manager(include_path, metadata)
    tasks, changed = dict[str, StudyTask](), set[str]()
    for spec in specs:
        changes = {} if isinstance(spec, str) else {**spec}
        asked = str(spec if isinstance(spec, str) else changes.pop("task", None))
        if asked not in manager.all_tasks and not Path(asked).is_file():
            raise InputError(f"tasks: {unknown_task(asked, manager.all_tasks, include_path)}")
        # As part of a group, a task's configuration is merged with the changes.
        wanted = [{"group": "study", "task": [{"task": asked, **changes}]}] if changes else [asked]
        with refusing(f"tasks: {asked}: cannot be loaded"):
            loaded = manager.load(wanted)
        groups = {name: {task.task_name for task in group.get_all_tasks()} for name, group in loaded["groups"].items()}
        means = {name: group.aggregate_metric_list or () for name, group in loaded["groups"].items()}
        alike = frozenset(name for name, every in means.items() if every and not any(m.weight_by_size for m in every))
        for name, task in loaded["tasks"].items():
            if not isinstance(task, ConfigurableTask):
                raise InputError(f"tasks: {name}: its own class builds its prompts, so that a study cannot run it.")
            if name in tasks and (changes or name in changed):
                raise InputError(f"tasks: {name} is there twice: two cells would write one file.")
            changed |= {name} if changes else set()
            known = tasks.get(name, StudyTask(name, (), {}, loaded=task))
            inside = tuple(group for group, tasks_in in groups.items() if name in tasks_in and not changes)
            tasks[name] = replace(known, inside={**known.inside, asked: inside}, alike=known.alike | alike)
    return tasks


@functools.cache
def _contents(task: ConfigurableTask) -> str:
    """A digest of what a task says, and of its documents and pool of demonstrations."""
    return digest_of([template_of(task), list(task.eval_docs), _pool(task), getattr(task, "pmi", None)])


def _pool(task: ConfigurableTask) -> list[Any]:
    return list(task.sampler.df or ()) if hasattr(task, "sampler") else []


def digest_of(value: Any) -> str:
    return digest(re.sub(r" at 0x[0-9a-f]+", "", json.dumps(value, sort_keys=True, default=str)))


def _shown(task: MetaICLTask, seed: int) -> Sequence[Any]:
    """The demonstrations of MetaICL's files, which are of certain seeds."""
    return task.files.shown(task.source, checked_seed(seed))


def prepare(
    study: Study, task: StudyTask, cell: Cell, choice: Mapping[str, Any] | None, bind: Callable[[Any], None]
) -> Any:
    """lm-eval's task of a cell, with its demonstrations and requests, which are built once, whatever asks for them.

    Args:
        choice: what a model has chosen, if one chooses the demonstrations.
        bind: tells a task of MetaICL's the model that is evaluated, by which it cuts its texts.

    Returns:
        A copy of the task; `demonstrations` are their indices in the pool, in their order (None if every document has
        its own), and `chosen` is `choice`.

    """
    made: Any = copy.copy(task.loaded)
    made._config = copy.deepcopy(task.loaded.config)
    made.set_config("num_fewshot", cell.num_fewshot)
    if study.rules:
        made.set_config("metadata", {**(made.config.metadata or {}), "decide": written(study.rules)})
    indices = draw(task, cell.num_fewshot, cell.demonstrations, cell.seed, cell.order, choice, made)
    if isinstance(made, MetaICLTask):
        made.set_fewshot_seed(cell.seed)
        made.reorder(indices or [])
        bind(made)
        made.fix()
    elif indices is not None:
        pool = _pool(task.loaded)
        made.fewshot_docs = lambda: pool  # which are read once
        made.sampler = These([pool[i] for i in indices])
        made.fewshot_rnd = Random(cell.seed)
        if cell.demonstrations is not None or isinstance(task.loaded.sampler, FixedSampler):
            made.sampler.seed = cell.seed  # as of `FixedSampler`: by it, decision rules draw
    else:
        made.sampler = copy.copy(made.sampler)
        if isinstance(cell.demonstrations, Similar):
            made.sampler = RetrievingSampler(_pool(task.loaded), cell.demonstrations, made)
        made.set_fewshot_seed(cell.seed)
    if cell.split == "dev":
        documents = list(task.dev.values())
        made.has_test_docs, made.test_docs = lambda: True, lambda: documents
    with recording(), mock.patch("lm_eval.api.task.tqdm", functools.partial(lm_eval.api.task.tqdm, disable=True)):
        made.build_all_requests(limit=get_sample_size(made, cell.limit))
    made.demonstrations, made.chosen = indices, choice
    made.requests_are_made = True  # it builds no more but those of decision rules, which it may be given
    return made


def draw(
    task: StudyTask,
    shots: int,
    how: Demonstrations | None,
    seed: int,
    order: int = 0,
    choice: Mapping[str, Any] | None = None,
    of: ConfigurableTask | None = None,
) -> list[int] | None:
    """The indices of a task's demonstrations in its pool; None if lm-eval draws others for every document, or a model
    is still to choose them.

    Args:
        order: 0 for the order in which they are drawn; otherwise the number of a permutation.
        of: the task whose results are to say how many of them replace others, which are evaluated.
    """
    if isinstance(task.loaded, MetaICLTask):
        if how is not None:
            raise InputError(f"demonstrations: {how}: task {task.name!r} has those of MetaICL's files: leave it out.")
        return permuted(list(range(min(shots, len(_shown(task.loaded, seed))))), order, seed, task.name)
    if shots == 0 and order == 0:
        return []
    if choice is not None:
        return permuted(choice["indices"], order, seed, task.name)
    if isinstance(how, How):
        permuted(list(range(shots)), order, seed, task.name)  # refuses more orders than there are
        return None
    sampler = task.loaded.sampler
    if how is not None and not isinstance(how, Similar):
        sampler = FixedSampler(sampler.df, how, task.loaded)
    elif how is not None or not isinstance(task.loaded, ICLTask):
        if order:
            why = "draws demonstrations of its own for every document, which have no orders"
            raise InputError(f"orders: task {task.name!r} {why}: give `demonstrations`.")
        return None
    return permuted(sampler.set_rnd(seed).rows(shots, of), order, seed, task.name)


def permuted(indices: list[int], order: int, seed: int, task: str) -> list[int]:
    """The permutation of this number: 0 is the order itself, and the others are drawn at random, all different."""
    if order >= math.factorial(len(indices)):
        raise InputError(f"orders: {order + 1}: task {task!r} has {len(indices)} demonstrations: give fewer orders.")
    rnd, permutations = Random(seed), [indices]
    while len(permutations) <= order:
        if (permutation := rnd.sample(indices, len(indices))) not in permutations:
            permutations.append(permutation)
    return permutations[order]


def dev_set(
    task: StudyTask, size: int | None, limit: float | None, used: Sequence[Mapping[str, Any]]
) -> dict[int, Mapping[str, Any]]:
    """The dev set: rows of the training split with their documents, drawn once, none of which is among the used
    demonstrations. A size of None is as many as the test set has; `limit` is for both sets."""
    loaded = task.loaded
    if not loaded.has_training_docs():
        raise InputError(f"dev: task {task.name!r} has no training split, from which its documents would be drawn.")
    rows, documents = loaded.training_docs(), len(loaded.eval_docs)
    documents = min(documents, get_sample_size(loaded, limit) or documents)
    wanted = documents if size is None else size if limit is None else min(size, documents)
    order = Random(_DEV_SEED).sample(range(len(rows)), len(rows))
    is_used = among(loaded, lambda: used, few_shot=True)
    dev = {i: rows[i] for i in itertools.islice((i for i in order if not is_used(rows[i])), wanted)}
    if len(dev) < wanted:
        why = (
            f"its training split has {len(dev)} rows that are no demonstrations, and not {wanted}: give a smaller size"
        )
        raise InputError(f"dev: task {task.name!r}: {why}.")
    return dev
