"""A study is opened: its tasks are loaded, its dev sets drawn, and what cannot be run is refused before anything is."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lm_eval.evaluator_utils import get_sample_size

from lm_eval_icl.decisions.how import written
from lm_eval_icl.demonstrations.how import How
from lm_eval_icl.errors import InputError
from lm_eval_icl.harness.choosing import PoolOfTask
from lm_eval_icl.harness.deciding import check_options, give_rules, meaningless
from lm_eval_icl.harness.metaicl import MetaICLTask
from lm_eval_icl.studies import tasks as study_tasks
from lm_eval_icl.studies.cells import Grid, GridTask
from lm_eval_icl.studies.grid import Study
from lm_eval_icl.studies.tasks import Leaf

_DOCUMENTS = 20  # of a task, for which the queries of decision rules are tried


@dataclass(frozen=True)
class Opened:
    """A study with its tasks.

    Attributes:
        grid: which cells there are.
        leaves: the tasks, loaded, by name.
        dev: the rows of each task's training split that are its dev set; empty if there is none.
        pools: what models choose demonstrations from, by task; empty if none is to choose.
    """

    grid: Grid
    leaves: Mapping[str, Leaf]
    dev: Mapping[str, list[int]]
    pools: Mapping[str, PoolOfTask]


def open_study(
    study: Study, limit: float | None, include_path: str | None, lacking: dict[str, str] | None = None
) -> Opened:
    """Load a study's tasks, draw its demonstrations and its dev set.

    Args:
        limit: as of `lm_eval`.
        include_path: a folder of further tasks.
        lacking: notes here why a task cannot be loaded, by its name in the study, and goes on without it.

    Raises:
        InputError: a task cannot be loaded, its demonstrations or dev set cannot be drawn, or a metric or column does
            not exist.
    """
    leaves = {leaf.name: leaf for leaf in study_tasks.load(study.tasks, include_path, study.metadata, lacking)}
    models_choose = any(isinstance(how, How) for how in study.demonstrations)
    dev: dict[str, list[int]] = {}
    tasks, pools = {}, {}
    for name, leaf in leaves.items():
        shots = tuple(dict.fromkeys(leaf.shots(n) for n in study.num_fewshot))
        for n in shots:
            for how in study.demonstrations:
                study_tasks.draw(leaf, n, how, study.seeds[0], study.orders - 1)
        _check_metrics(study, leaf)
        if study.rules:
            _try_rules(study, leaf, shots[0], limit)
        documents, of_dev = [], ""
        if study.dev is not None:
            dev[name] = _dev_rows(study, leaf, shots, limit)
            training = leaf.task.training_docs()
            documents = [training[i] for i in dev[name]]
            of_dev = study_tasks.digest_of([dev[name], documents])
        if models_choose and max(shots):
            pools[name] = PoolOfTask(leaf.task, documents)
            if max(shots) > (number := len(pools[name].rows)):
                raise InputError(
                    f"task {name!r}: {max(shots)} demonstrations asked for, {number} there: lower num_fewshot."
                )
        data = {}
        for n, how, seed in itertools.product(shots, study.demonstrations, study.seeds):
            drawn = study_tasks.draw(leaf, n, how, seed)
            data[n, str(how), seed] = study_tasks.digest_of([study_tasks.contents(leaf, seed), drawn])
        tasks[name] = GridTask(
            name,
            shots,
            asked=tuple(leaf.inside),
            alone=isinstance(leaf.task, MetaICLTask),
            reported=leaf.task.task_name,
            data=data,
            dev=of_dev,
            higher_is_better=leaf.task.higher_is_better().get((study.dev or study).metric, True),
        )
    columns = {*leaves, *(group for leaf in leaves.values() for group in leaf.groups())}
    for column in (column for part in study.columns.values() for column in part):
        if column not in columns and not lacking:
            raise InputError(
                f"columns: {column!r} is no task of this study, and no group: {', '.join(sorted(columns))}."
            )
    return Opened(Grid(study, tasks, limit), leaves, dev, pools)


def _check_metrics(study: Study, leaf: Leaf) -> None:
    for metric in {study.metric, *([study.dev.metric] if study.dev else [])}:
        if metric not in (known := leaf.task.aggregation()):
            raise InputError(f"metric: task {leaf.name!r} has no {metric!r}, only {', '.join(sorted(known))}.")
        if without := [str(rule) for rule in study.rules if metric in meaningless(rule)]:
            raise InputError(f"metric: {metric} means nothing under decide={without[0]}: give another.")


def _try_rules(study: Study, leaf: Leaf, shots: int, limit: float | None) -> None:
    """Make the queries of decision rules behind the first documents, so that what does not fit the task is told."""
    check_options(leaf.task, study.rules)
    how = study.demonstrations[0]
    how = "random" if isinstance(how, How) else how  # drawn ones stand for those that a model will choose
    some = min(get_sample_size(leaf.task, limit) or _DOCUMENTS, _DOCUMENTS)
    decide = written(study.rules)
    task = study_tasks.prepare(leaf, shots, how, study.seeds[0], 0, None, some, decide=decide)
    give_rules(task, None)
    task.build_all_requests()


def _dev_rows(study: Study, leaf: Leaf, shots: Sequence[int], limit: float | None) -> list[int]:
    """The dev set of a task: rows that no seed and no way of drawing has among the demonstrations."""
    if isinstance(leaf.task, MetaICLTask):
        raise InputError(f"dev: task {leaf.name!r}: MetaICL's tasks have no split to draw it from: leave it out.")
    config = leaf.task.fewshot_cfg
    from_training = config.samples is None and config.split in (None, leaf.task.config.training_split)
    used: set[int] = set()
    for how in study.demonstrations:
        if isinstance(how, How):  # a model, which chooses outside the dev set
            continue
        for n, seed in ((n, seed) for n in shots for seed in study.seeds):
            drawn = study_tasks.draw(leaf, n, how, seed)
            if drawn is None and from_training:
                raise InputError(
                    f"dev: task {leaf.name!r} draws demonstrations of its own for every document, and from the "
                    "training split, so that those of the dev set would be among them."
                )
            used.update(drawn or ())
    pool = leaf.task.sampler.df if used else []
    return study_tasks.dev_rows(leaf, study.dev.size if study.dev else None, limit, [pool[i] for i in used])
