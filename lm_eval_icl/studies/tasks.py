"""The tasks of a study: loaded once, with the demonstrations, order and documents of a cell, and requests made once."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import lm_eval.api.task
from lm_eval.api.task import ConfigurableTask
from lm_eval.evaluator_utils import get_sample_size

from lm_eval_icl.demonstrations.how import How
from lm_eval_icl.errors import InputError, refusing
from lm_eval_icl.harness.deciding import with_queries
from lm_eval_icl.harness.metaicl import MetaICLTask
from lm_eval_icl.harness.prompts import recording
from lm_eval_icl.harness.tasks import FixedSampler, ICLTask, These, among, template_of
from lm_eval_icl.harness.training import task_manager, unknown_task
from lm_eval_icl.metaicl.files import checked_seed
from lm_eval_icl.studies.cells import digest
from lm_eval_icl.studies.grid import Demonstrations

Doc = dict[str, Any]
# The dev set is the same for all seeds of the demonstrations.
_DEV_SEED = 0
# What a cell says of a choice of demonstrations, besides the rows that were chosen.
_OF_CHOICE = ("picked", "accuracy", "evaluated", "seconds", "tokens", "version")


@dataclass(frozen=True)
class Leaf:
    """A task of a study.

    Attributes:
        name: its name; if a study has it twice, with the names of what is changed of its configuration.
        inside: the names in the study's `tasks` that it comes from, each with its groups that contain it.
        alike: those of its groups whose tasks count alike, however many documents they have.
        task: as it was loaded, which is never changed.
        changes: what is changed of its configuration.
    """

    name: str
    inside: Mapping[str, tuple[str, ...]]
    task: ConfigurableTask
    changes: Mapping[str, Any] = field(default_factory=dict)
    alike: frozenset[str] = frozenset()

    def groups(self, asked: Collection[str] | None = None) -> tuple[str, ...]:
        """The groups that contain it, of those names in the study's `tasks`, or of all."""
        containing = [groups for name, groups in self.inside.items() if asked is None or name in asked]
        return tuple(dict.fromkeys(group for groups in containing for group in groups))

    def shots(self, num_fewshot: int | None) -> int:
        """How many demonstrations it has, as lm-eval decides it: a task with 0 in its configuration keeps 0."""
        own = self.task.config.num_fewshot
        return int(own or 0) if num_fewshot is None or own == 0 else num_fewshot


def load(
    specs: Sequence[str | Mapping[str, Any]],
    include_path: str | None,
    metadata: Mapping[str, Any] | None = None,
    lacking: dict[str, str] | None = None,
) -> list[Leaf]:
    """The leaf tasks of these names, groups and changed configurations.

    Args:
        lacking: notes here what cannot be loaded, by name, with the reason, and goes on without it.

    Raises:
        InputError: there is no such task, or its data cannot be loaded.
    """
    manager = task_manager(include_path, metadata or {})
    leaves: dict[str, Leaf] = {}
    for spec in specs:
        asked, changes = (spec, {}) if isinstance(spec, str) else (spec["task"], {**spec})
        changes.pop("task", None)
        try:
            if asked not in manager.all_tasks and not Path(asked).is_file():
                raise InputError(f"tasks: {unknown_task(asked, manager.all_tasks, include_path)}")
            # As part of a group, a task's configuration is merged with the changes.
            wanted = [{"group": "study", "task": [{"task": asked, **changes}]}] if changes else [asked]
            with refusing(f"tasks: {asked}: cannot be loaded"):
                loaded = manager.load(wanted)
        except InputError as error:
            if lacking is None:
                raise
            lacking[asked] = error.message
            continue
        groups = {name: {task.task_name for task in group.get_all_tasks()} for name, group in loaded["groups"].items()}
        means = {name: group.aggregate_metric_list or () for name, group in loaded["groups"].items()}
        alike = frozenset(name for name, every in means.items() if every and not any(m.weight_by_size for m in every))
        for name, task in loaded["tasks"].items():
            label = "+".join([name, *changes]) if changes and name in leaves else name
            inside = tuple(group for group, tasks in groups.items() if name in tasks and not changes)
            if not isinstance(task, ConfigurableTask):
                raise InputError(f"tasks: {name}: its own class builds its prompts, so that a study cannot run it.")
            if (rules := (task.config.metadata or {}).get("decide")) is not None:
                raise InputError(
                    f"tasks: {name}: decide={rules}: decision rules are a key of the study itself: leave it out of the "
                    f"task's metadata, and give decide: [none, {rules}]."
                )
            known = leaves.get(label)
            if known is not None and (changes or known.changes):
                raise InputError(f"tasks: {label} is there twice: two cells would write one file.")
            everywhere = {**(known.inside if known else {}), asked: inside}
            even = alike | (known.alike if known else frozenset())
            leaves[label] = Leaf(label, everywhere, task, changes, even)
    return list(leaves.values())


def contents(leaf: Leaf, seed: int) -> str:
    """A digest of what a task says, and of its documents and pool of demonstrations.

    Args:
        seed: of the demonstrations, where each seed has a pool of its own.
    """
    own = _contents(leaf.task), str(dict(leaf.changes))
    if isinstance(leaf.task, MetaICLTask):
        return digest_of([*own, leaf.task.pmi, leaf.task.files.shown(leaf.task.source, checked_seed(seed))])
    return digest_of(own)


@functools.cache
def _contents(task: ConfigurableTask) -> str:
    pool = task.sampler.df if hasattr(task, "sampler") else []
    return digest_of([template_of(task), list(task.eval_docs), list(pool)])


def digest_of(value: Any) -> str:
    return digest(re.sub(r" at 0x[0-9a-f]+", "", json.dumps(value, sort_keys=True, default=str)))


def prepare(
    leaf: Leaf,
    shots: int,
    how: Demonstrations | None,
    seed: int,
    order: int,
    dev: Sequence[int] | None,
    limit: float | None,
    choice: Mapping[str, Any] | None = None,
    bind: Callable[[MetaICLTask], None] | None = None,
    decide: Any = None,
) -> Any:
    """A task (`_prepared_class`) with its demonstrations and requests, which several models answer in turn.

    Args:
        how: how the demonstrations are drawn (`demonstrations.draw`); None for the task's own way.
        order: 0 for the order in which they are drawn; otherwise the number of a permutation.
        dev: the indices of the dev set's documents in the training split; None for the test set.
        choice: what a model has chosen, if `how` is a method by which one does.
        bind: tells a task that makes its requests for one model which this is.
        decide: decision rules, as `decisions.how.read` reads them; None for none.

    Raises:
        InputError: the demonstrations cannot be drawn, or there are not as many orders.
    """
    task: Any = object.__new__(_prepared_class(leaf.task.__class__))
    task.__dict__.update(leaf.task.__dict__)
    task._config = copy.deepcopy(leaf.task.config)
    task.set_config("num_fewshot", shots)
    if decide is not None:
        task.set_config("metadata", {**(task.config.metadata or {}), "decide": decide})
    indices = draw(leaf, shots, how, seed, order, choice, task)
    if isinstance(task, MetaICLTask) and indices is not None and bind is not None:
        task.set_fewshot_seed(seed)
        task.reorder(indices)
        bind(task)
        task.fix()
    elif indices is not None:
        task.pool = list(leaf.task.sampler.df)
        task.sampler = These([task.pool[i] for i in indices])
        task.fewshot_rnd = Random(seed)
        if how is not None or isinstance(leaf.task.sampler, FixedSampler):
            task.sampler.seed = seed  # as of `FixedSampler`: by it, decision rules draw
    else:
        task.sampler = copy.copy(task.sampler)
        task.set_fewshot_seed(seed)
    if dev is not None:
        rows = leaf.task.training_docs()
        task.documents = [rows[i] for i in dev]
        limit = None  # the dev set is as large as it should be
    with recording(), _quiet():
        task.build_all_requests(limit=get_sample_size(task, limit))
    task.demonstrations, task.changes = indices, leaf.changes
    task.choice = {key: choice[key] for key in _OF_CHOICE if key in choice} if choice else {}
    return task


@functools.cache
def _prepared_class(cls: type[ConfigurableTask]) -> type[ConfigurableTask]:
    """A task's class for one cell of a study."""

    class PreparedTask(cls):
        """A task that builds its requests once, whatever asks for them.

        Attributes:
            documents: those that are evaluated; None for the test set.
            pool: the few-shot documents, if they have been read.
            demonstrations: the indices of the demonstrations in the pool, in their order; None if every document has
                its own.
            choice: how good and how costly the choice was, if a model has chosen the demonstrations.
            changes: what the study changes of the task's configuration.
        """

        documents: Sequence[Doc] | None = None
        pool: Sequence[Doc] | None = None
        demonstrations: list[int] | None
        choice: Mapping[str, Any]
        changes: Mapping[str, Any]
        _is_built = False

        def has_test_docs(self) -> bool:
            return self.documents is not None or super().has_test_docs()

        def test_docs(self) -> Any:
            return super().test_docs() if self.documents is None else self.documents

        def fewshot_docs(self) -> Any:
            return super().fewshot_docs() if self.pool is None else self.pool

        def build_all_requests(self, **kwargs: Any) -> None:
            if not self._is_built:
                super().build_all_requests(**kwargs)
                self._is_built = True
            else:  # decision rules may have been given since
                with_queries(lambda *_, **__: None, self, **kwargs)

    return PreparedTask


@contextmanager
def _quiet() -> Iterator[None]:
    """Inside this context lm-eval shows no progress bar of its own, one a cell."""
    module: Any = lm_eval.api.task
    bar, module.tqdm = module.tqdm, functools.partial(module.tqdm, disable=True)
    try:
        yield
    finally:
        module.tqdm = bar


def draw(
    leaf: Leaf,
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
        of: the task whose results are to say how many of them replace others, which are evaluated.

    Raises:
        InputError: as for `prepare`.
    """
    if isinstance(leaf.task, MetaICLTask):
        if how is not None:
            raise InputError(f"demonstrations: {how}: task {leaf.name!r} has those of MetaICL's files: leave it out.")
        number = len(leaf.task.files.shown(leaf.task.source, checked_seed(seed)))
        return permuted(list(range(min(shots, number))), order, seed, leaf.name)
    if shots == 0 and order == 0:
        return []
    if choice is not None:
        return permuted(choice["indices"], order, seed, leaf.name)
    if not isinstance(leaf.task, ICLTask) and how is None:
        if order:
            raise InputError(
                f"task {leaf.name!r} draws demonstrations of its own for every document: orders are for tasks with the "
                "same demonstrations for all documents, such as this package's, or with `demonstrations`."
            )
        return None
    sampler = leaf.task.sampler
    if how is not None:
        sampler = FixedSampler(sampler.df, str(how), leaf.task)
        if isinstance(how, How):
            permuted(list(range(shots)), order, seed, leaf.name)  # refuses more orders than there are
            return None
    return permuted(sampler.set_rnd(seed).rows(shots, of), order, seed, leaf.name)


def permuted(indices: list[int], order: int, seed: int, task: str) -> list[int]:
    """The permutation of this number: 0 is the order itself, and the others are drawn at random, all different.

    Raises:
        InputError: there are not as many.
    """
    if order >= math.factorial(len(indices)):
        raise InputError(f"orders: {order + 1}: task {task!r} has {len(indices)} demonstrations: give fewer orders.")
    rnd, permutations = Random(seed), [indices]
    while len(permutations) <= order:
        if (permutation := rnd.sample(indices, len(indices))) not in permutations:
            permutations.append(permutation)
    return permutations[order]


def dev_rows(leaf: Leaf, size: int | None, limit: float | None, used: Sequence[Doc]) -> list[int]:
    """The dev set: rows of the training split, drawn once, that are no demonstrations.

    Args:
        size: how many; None for as many as the test set has.
        limit: as of `lm_eval`, for the test set and the dev set.
        used: all demonstrations of the study.

    Raises:
        InputError: there is no training split, or it has too few rows.
    """
    task = leaf.task
    if not task.has_training_docs():
        raise InputError(f"dev: task {leaf.name!r} has no training split, from which its documents would be drawn.")
    rows, documents = task.training_docs(), len(task.eval_docs)
    documents = min(documents, get_sample_size(task, limit) or documents)
    wanted = documents if size is None else size if limit is None else min(size, documents)
    order = Random(_DEV_SEED).sample(range(len(rows)), len(rows))
    is_used = among(task, lambda: used, few_shot=True)
    dev = list(itertools.islice((i for i in order if not is_used(rows[i])), wanted))
    if len(dev) < wanted:
        raise InputError(
            f"dev: task {leaf.name!r}: its training split has {len(dev)} rows that are no demonstrations, and the "
            f"dev set {wanted}: give dev a size of {len(dev)} or less."
        )
    return dev
