"""The tasks of a study: loaded once, with dev sets, and with the demonstrations, order and
documents of a cell."""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import lm_eval.api.task
from lm_eval.api.task import ConfigurableTask
from lm_eval.evaluator_utils import get_sample_size

import lm_eval_icl
from lm_eval_icl.decisions.rules import written
from lm_eval_icl.demonstrations.how import SelectionMethod
from lm_eval_icl.demonstrations.similar import Similar
from lm_eval_icl.errors import InputError, refusing, suggestion
from lm_eval_icl.harness.deciding import check_options
from lm_eval_icl.harness.documents import among, stable_json, template_of
from lm_eval_icl.harness.metaicl_task import MetaICLTask, tell_model
from lm_eval_icl.harness.plugin import task_dir
from lm_eval_icl.harness.private_names import copied
from lm_eval_icl.harness.prompts import recording
from lm_eval_icl.harness.samplers import FixedSampler, GivenSampler, RetrievingSampler
from lm_eval_icl.harness.task_state import state_of
from lm_eval_icl.harness.training import task_manager, unknown_task
from lm_eval_icl.harness.varying import vary
from lm_eval_icl.studies.grid import Demonstrations, Study
from lm_eval_icl.studies.targets import Cell, Grid, StudyTask, digest

# The seed of the dev set, which is the same for all seeds of the demonstrations.
_DEV_SEED = 0


def open_study(study: Study, limit: float | None, include_path: str | None) -> Grid:
    """The cells of a study, with its tasks loaded and its dev sets drawn; an `InputError` if a task
    does not fit it."""
    tasks = load(study.tasks, include_path, study.metadata)
    known_columns = set[str]()
    for task in tasks.values():
        known_columns.update(task.columns())
    for column in itertools.chain(*study.columns.values()):
        if column not in known_columns:
            raise InputError(f"columns: {column!r}: {suggestion(column, sorted(known_columns))}")
    for name, task in tasks.items():
        loaded = task.loaded
        known = loaded.aggregation()
        if study.metric not in known:
            raise InputError(
                f"metric: task {name!r} has no {study.metric!r}, only {', '.join(sorted(known))}."
            )
        if study.rules:
            check_options(loaded, study.rules)
        for labels, format_number in itertools.product(study.labels, study.formats):
            varied(loaded, labels, format_number)  # refuses what the task cannot have
        task = replace(
            task,
            shots=_shots(study, loaded),
            higher_is_better=loaded.higher_is_better().get(study.metric, True),
        )
        drawn = _drawn(study, task)
        dev = {}
        if study.dev:
            used = dict[int, Any]()
            for one_set in drawn:
                used |= one_set.demonstrations or {}
            dev = dev_set(task, study.dev.size, limit, list(used.values()))
        tasks[name] = replace(task, dev=dev, data=_data(study, task, drawn, dev))
    return Grid(study, tasks, limit)


class DrawnSet(NamedTuple):
    """A set of demonstrations of a task."""

    shots: int
    how: Demonstrations | None
    seed: int
    demonstrations: Mapping[int, Any] | None  # by their index in the pool (`draw`)


def _shots(study: Study, loaded: ConfigurableTask) -> tuple[int, ...]:
    """The numbers of demonstrations of a task. As in lm-eval, a task with 0 keeps 0."""
    default = loaded.config.num_fewshot
    shots = list[int]()
    for number in study.num_fewshot:
        if number is None or default == 0:
            number = int(default or 0)
        if number not in shots:
            shots.append(number)
    return tuple(shots)


def _drawn(study: Study, task: StudyTask) -> list[DrawnSet]:
    """All sets of demonstrations of a task. Raises an `InputError` if there are not as many orders,
    or if a dev set is drawn and demonstrations may be among its documents."""
    drawn = []
    for n, how, seed in itertools.product(task.shots, study.demonstrations, study.seeds):
        demonstrations = draw(task, n, how, seed)
        if n == task.shots[0] or not study.one_at_a_time:
            draw(task, n, how, seed, study.orders - 1)  # refuses more orders than there are
        if study.dev and demonstrations is None and not isinstance(how, SelectionMethod):
            raise InputError(
                f"dev: task {task.name!r} draws other demonstrations for every document, which may "
                "be documents of the dev set: give `demonstrations`."
            )
        drawn.append(DrawnSet(n, how, seed, demonstrations))
    return drawn


def _code(task: ConfigurableTask) -> list[str]:
    """The user's files that define functions of a task's configuration. The configuration has these
    functions, and not what they call."""
    functions = filter(inspect.isfunction, vars(task.config).values())
    files = {Path(inspect.getfile(function)).resolve() for function in functions}
    packages = [
        task_dir(),
        *(Path(str(package.__file__)).parent for package in (lm_eval, lm_eval_icl)),
    ]
    for package in packages:
        files = {file for file in files if not file.is_relative_to(package.resolve())}
    return [file.read_text("utf-8") for file in sorted(files)]


def _data(
    study: Study, task: StudyTask, drawn: Sequence[DrawnSet], dev: Mapping[int, Any]
) -> dict[tuple[int, str, int, str], str]:
    """The digests of `StudyTask.data`."""
    loaded = task.loaded
    contents: list[Any] = [template_of(loaded), list(loaded.eval_docs), _pool(loaded)]
    contents.append(loaded.pmi if isinstance(loaded, MetaICLTask) else None)
    contents += [variant.name for variant in study.fits]
    contents += _code(loaded)
    in_common = digest_of(contents)
    of_dev = digest_of(list(dev.items()))
    data = {}
    for n, how, seed, demonstrations in drawn:
        rows = None if demonstrations is None else list(demonstrations.items())
        on_dev = digest_of([in_common, rows, of_dev])
        data[n, str(how), seed, "dev"] = on_dev
        # A model that chooses demonstrations does not choose documents of the dev set.
        on_test = on_dev if isinstance(how, SelectionMethod) else digest_of([in_common, rows])
        data[n, str(how), seed, "test"] = on_test
    return data


def load(
    specs: Sequence[str | Mapping[str, Any]], include_path: str | None, metadata: Mapping[str, Any]
) -> dict[str, StudyTask]:
    """Task's name -> the task, for all tasks that the names, groups and changed configurations
    stand for."""
    manager = task_manager(include_path, metadata)
    tasks = dict[str, StudyTask]()
    changed = set[str]()
    for spec in specs:
        changes = {"task": spec} if isinstance(spec, str) else dict(spec)
        listed = str(changes.pop("task", None))
        if listed not in manager.all_tasks and not Path(listed).is_file():
            raise InputError(f"tasks: {unknown_task(listed, manager.all_tasks, include_path)}")
        wanted: Any = listed
        if changes and listed in {*manager.all_groups, *manager.all_tags}:
            raise InputError(f"tasks: {listed}: is a group: change each of its tasks by itself.")
        if changes:  # as part of a group, a task's configuration is merged with the changes
            wanted = {"group": "study", "task": [{"task": listed, **changes}]}
        with refusing(f"tasks: {listed}: cannot be loaded"):
            loaded = manager.load([wanted])
        groups = dict[str, set[str]]()
        alike = set[str]()
        for name, group in loaded["groups"].items():
            groups[name] = {task.task_name for task in group.get_all_tasks()}
            means = group.aggregate_metric_list
            if means and not any(mean.weight_by_size for mean in means):
                alike.add(name)
        for name, task in loaded["tasks"].items():
            if not isinstance(task, ConfigurableTask):
                raise InputError(
                    f"tasks: {name}: its own class builds its prompts, so that a study cannot run "
                    "it."
                )
            if name in tasks and (changes or name in changed):
                raise InputError(
                    f"tasks: {name} is listed twice, so that two cells would write one file: list "
                    "it once."
                )
            inside = tuple(group for group, members in groups.items() if name in members)
            if changes:
                changed.add(name)
                inside = ()
            known = tasks.get(name, StudyTask(name, (), {}, loaded=task))
            tasks[name] = replace(
                known, inside={**known.inside, listed: inside}, alike=known.alike | alike
            )
    return tasks


def _pool(task: ConfigurableTask) -> list[Any]:
    return list(task.sampler.df or ()) if hasattr(task, "sampler") else []


def digest_of(value: Any) -> str:
    return digest(stable_json(value))


@dataclass(frozen=True)
class CellTask:
    """lm-eval's task of a cell, with its requests.

    Attributes:
        task: a copy of the task, with the cell's demonstrations, format and documents.
        indices: the rows of the pool that are its demonstrations, in order; None if every document
            has other demonstrations.
    """

    task: ConfigurableTask
    indices: list[int] | None


def prepare(
    study: Study, task: StudyTask, cell: Cell, choice: Mapping[str, Any] | None, model: Any
) -> CellTask:
    """The task of a cell. Its requests are built once.

    Args:
        choice: the choice of a model, if a model chooses the demonstrations.
        model: the model that is evaluated.
    """
    task_copy = varied(task.loaded, cell.labels, cell.format)
    task_copy.set_config("num_fewshot", cell.num_fewshot)
    if study.rules:
        metadata = task_copy.config.metadata or {}
        task_copy.set_config("metadata", {**metadata, "decide": written(study.rules)})
    drawn = draw(
        task, cell.num_fewshot, cell.demonstrations, cell.seed, cell.order, choice, quiet=False
    )
    if isinstance(cell.demonstrations, Similar):
        task_copy.sampler = RetrievingSampler(_pool(task.loaded), cell.demonstrations, task_copy)
    task_copy.set_fewshot_seed(cell.seed)
    if drawn is not None:
        seed = None  # decision rules draw by it
        if cell.demonstrations is not None or isinstance(task_copy.sampler, FixedSampler):
            seed = cell.seed
        task_copy.sampler = GivenSampler(list(drawn.values()), _pool(task_copy), seed)
    if cell.split == "dev":
        task_copy.dataset = {**task_copy.dataset, "dev": list(task.dev.values())}
        task_copy.set_config("test_split", "dev")
        task_copy.set_config("process_docs", None)  # they are processed
    tell_model(task_copy, model)
    with recording(), _without_progress_bars():
        task_copy.build_all_requests(limit=get_sample_size(task_copy, cell.limit))
    state_of(task_copy).requests_are_made = True
    return CellTask(task_copy, None if drawn is None else list(drawn))


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    """Inside this context manager, lm-eval shows no progress bar while it builds a task's
    requests."""
    shown = lm_eval.api.task.tqdm
    lm_eval.api.task.tqdm = functools.partial(shown, disable=True)
    try:
        yield
    finally:
        lm_eval.api.task.tqdm = shown


def varied(loaded: ConfigurableTask, labels: str | None, format_number: int) -> ConfigurableTask:
    """A copy of a task with other labels in its demonstrations, and with the format of this
    number."""
    task_copy = copied(loaded)
    vary(task_copy, labels, format_number or None)
    return task_copy


def draw(
    task: StudyTask,
    shots: int,
    how: Demonstrations | None,
    seed: int,
    order: int = 0,
    choice: Mapping[str, Any] | None = None,
    quiet: bool = True,
) -> dict[int, Any] | None:
    """Index in the pool -> demonstration of a task, in the order of this number (`permuted`). None
    if every document has other demonstrations, or if a model has yet to choose them.

    Args:
        quiet: no warning about demonstrations that were replaced.
    """
    loaded = task.loaded
    if how is not None and isinstance(loaded, MetaICLTask):
        raise InputError(f"demonstrations: {how}: task {task.name!r}: {loaded.own_demonstrations}")
    if shots == 0 and order == 0:
        return {}
    pool = _pool(loaded)
    if choice is not None:
        rows = choice["indices"]
    elif isinstance(how, SelectionMethod):
        permuted(list(range(shots)), order, seed, task.name)  # refuses more orders than there are
        return None
    else:
        seeded = copied(loaded)
        if isinstance(how, str):
            seeded.sampler = FixedSampler(pool, how, loaded)
        seeded.set_fewshot_seed(seed)
        sampler = seeded.sampler
        is_fixed = isinstance(sampler, FixedSampler | GivenSampler)
        if isinstance(how, Similar) or not is_fixed:
            if order:
                why = "draws other demonstrations for every document, which have no orders"
                raise InputError(f"orders: task {task.name!r} {why}: give `demonstrations`.")
            return None
        rows = sampler.rows(shots, quiet)
        pool = list(sampler.df)
    return {row: pool[row] for row in permuted(rows, order, seed, task.name)}


def permuted(indices: list[int], order: int, seed: int, task: str) -> list[int]:
    """The permutation of number `order`: 0 is the given order, and the others are drawn at random,
    all different."""
    if order >= math.factorial(len(indices)):
        raise InputError(
            f"orders: {order + 1}: task {task!r} has {len(indices)} demonstrations: give fewer "
            "orders."
        )
    rnd = Random(seed)
    permutations = [indices]
    while len(permutations) <= order:
        if (permutation := rnd.sample(indices, len(indices))) not in permutations:
            permutations.append(permutation)
    return permutations[order]


def dev_set(
    task: StudyTask, size: int | None, limit: float | None, used: Sequence[Mapping[str, Any]]
) -> dict[int, Mapping[str, Any]]:
    """The dev set: row of the training split -> document. They are drawn once, and none is among
    the used demonstrations. A `size` of None is that of the test set; `limit` holds for both
    sets."""
    loaded = task.loaded
    if not loaded.has_training_docs():
        raise InputError(
            f"dev: task {task.name!r} has no training split, from which its documents would be "
            "drawn."
        )
    rows = loaded.training_docs()
    wanted = len(loaded.eval_docs)
    limited = get_sample_size(loaded, limit)
    if limited:
        wanted = min(wanted, limited)
    if size is not None:
        wanted = size if limit is None else min(size, wanted)
    order = Random(_DEV_SEED).sample(range(len(rows)), len(rows))
    is_used = among(loaded, lambda: used)
    free = (row for row in order if not is_used(rows[row]))
    dev = {row: rows[row] for row in itertools.islice(free, wanted)}
    if len(dev) < wanted:
        raise InputError(
            f"dev: task {task.name!r}: its training split has {len(dev)} rows that are not "
            f"demonstrations, and {wanted} are needed: give a smaller size."
        )
    return dev
