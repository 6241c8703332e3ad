"""The columns of the board: tasks, groups of tasks, and the average."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter

from lm_eval_icl.errors import InputError
from lm_eval_icl.results.board import (
    AVERAGE,
    BoardCell,
    Column,
    Pairs,
    TaskRun,
    grouped,
    in_words,
    shown,
)

# Metrics between 0 and 1, which are shown as percent. In some tasks, metrics of these names have
# another range.
SHARES = frozenset(
    "acc acc_norm acc_bytes acc_mutual_info exact_match em f1 quasi_exact_match metaicl ece".split()
)
_LISTED = 20  # the most names in a message
_WORDS = 4  # the most words that tell columns of a task apart
Groups = Mapping[str, Mapping[str, float]]  # name -> column of a task -> its weight


def is_share(units: Iterable[TaskRun]) -> bool:
    """Whether the metric of these results lies between 0 and 1."""
    return all(unit.result.metric in SHARES and 0 <= unit.result.value <= 1 for unit in units)


def differing(values: Sequence[Mapping[str, str]]) -> list[str]:
    """The sorted names of the fields in which `values` differ."""
    names = set[str]().union(*values)
    return [name for name in sorted(names) if len({fields.get(name) for fields in values}) > 1]


def column_names(columns: Iterable[Pairs]) -> dict[Pairs, str]:
    """Short unique names of the columns: the task, and the fields in which its columns differ."""
    names: dict[Pairs, str] = {}
    by_task = grouped(dict.fromkeys(columns), lambda column: dict(column)["task"])
    for task, task_columns in by_task.items():
        by_field = [dict(column) for column in task_columns]
        apart = _telling(by_field)
        for column, values in zip(task_columns, by_field, strict=True):
            name = _column_name(task, values, apart)
            while name == AVERAGE or name in names.values():
                name += "'"
            names[column] = name
    return names


def _telling(columns: Sequence[Mapping[str, str]]) -> list[str]:
    """The fields in which columns of a task differ. The documents and the filter are left out if
    other fields, which say more, tell the columns apart."""
    apart = differing(columns)
    for quiet in ("documents", "filter"):
        rest = [name for name in apart if name != quiet]
        different = {tuple(column.get(name) for name in rest) for column in columns}
        if len(different) == len(columns):
            apart = rest
    return apart


def _column_name(task: str, values: Mapping[str, str], apart: Sequence[str]) -> str:
    named = [name for name in apart if name not in ("training", "metric")]
    words = [in_words(name, values.get(name)) for name in named[:_WORDS]]
    if "metric" in apart:
        words.insert(0, values["metric"])
    name = task
    if "training" in apart:
        name += f" [{values['training']}]"
    return f"{name} ({', '.join(words)})" if words else name


def columns_of(
    column_of: Mapping[TaskRun, str], tasks: Sequence[str] | None, groups: Groups | None
) -> tuple[Column, ...]:
    """A column for each group and each task: first the average, then groups, then tasks."""
    by_column = grouped(column_of, lambda unit: column_of[unit])
    if groups is None:
        weights = _groups_of_runs(column_of)
    else:
        weights = {}
        for name, group in groups.items():
            if group and group.keys() <= by_column.keys():
                weights[name] = group
    weights |= {name: {name: 1.0} for name in sorted(by_column)}
    if tasks is not None:
        weights = _wanted(weights, tasks)
    columns = []
    for name, column_weights in weights.items():
        units: list[TaskRun] = []
        for task in column_weights:
            units += by_column[task]
        first = units[0].result
        metrics = {(unit.result.metric, unit.result.higher_is_better) for unit in units}
        if len(metrics) > 1:
            continue  # there is no mean
        kind = "average" if name == AVERAGE else "group"
        if name in by_column:
            kind = "task"
        higher = first.higher_is_better
        columns.append(Column(name, kind, first.metric, is_share(units), higher, column_weights))
    order = ("average", "group", "task")
    return tuple(sorted(columns, key=lambda column: order.index(column.kind)))


def _groups_of_runs(column_of: Mapping[TaskRun, str]) -> dict[str, Mapping[str, float]]:
    """The groups that the runs name, with their weights. Tasks of equal values do not show the
    weights, which other runs may."""
    found = []
    for run, run_units in grouped(column_of, lambda unit: unit.run).items():
        task_column = {unit.result.task: column_of[unit] for unit in run_units}
        for group, task_weights in run.groups.items():
            if not task_weights.keys() <= task_column.keys():
                continue  # a task has no result under the rule that was chosen on the dev set
            column_weights = {task_column[task]: x for task, x in task_weights.items()}
            values = {run.tasks[task].value for task in task_weights}
            found.append((len(values) == 1, group, column_weights))
    weights: dict[str, Mapping[str, float]] = {}
    for is_unknown, name, column_weights in sorted(found, key=itemgetter(0)):
        # Another run may have a group of this name with other tasks or weights.
        while name == AVERAGE or (
            name in weights and not _alike(weights[name], column_weights, is_unknown)
        ):
            name += "'"
        weights.setdefault(name, column_weights)
    return weights


def _wanted(
    weights: Mapping[str, Mapping[str, float]], tasks: Sequence[str]
) -> dict[str, Mapping[str, float]]:
    """The columns with these names, or of tasks with these names."""
    chosen: dict[str, Mapping[str, float]] = {}
    for task in tasks:
        beginnings = (f"{task} (", f"{task} [")
        names = [name for name in weights if name == task or name.startswith(beginnings)]
        if not names:
            known = ", ".join(shown(name) for name in sorted(weights)[:_LISTED])
            raise InputError(f"there is no result of {task!r}; there are {known}.")
        chosen |= {name: weights[name] for name in names}
    return chosen


def _alike(
    first: Mapping[str, float], second: Mapping[str, float], names_alone: bool = False
) -> bool:
    same_names = first.keys() == second.keys()
    return same_names and (
        names_alone or all(abs(first[name] - second[name]) < 1e-9 for name in first)
    )


def with_average(
    columns: tuple[Column, ...],
    rows: Sequence[Mapping[str, BoardCell]],
    task_of: Mapping[str, str],
) -> tuple[Column, ...]:
    """The columns with the average in front, over the tasks that at least half of the rows have.

    There is none if these have two columns of a task (`task_of`), which are not independent.
    """
    tasks = [column for column in columns if column.kind == "task" and column.percent]
    often = []
    for column in tasks:
        number = sum(column.name in cells for cells in rows)
        if column.higher_is_better == tasks[0].higher_is_better and 2 * number >= len(rows):
            often.append(column)
    weights = {column.name: 1 / len(often) for column in often}
    groups = [column.weights for column in columns if column.kind == "group"]
    is_a_group = any(_alike(group, weights) for group in groups)
    is_complete = any(cells.keys() >= weights.keys() for cells in rows)
    is_twice = len({task_of[name] for name in weights}) < len(weights)
    if len(often) < 2 or is_a_group or is_twice or not is_complete:
        return columns
    metrics = {column.metric for column in often}
    metric = metrics.pop() if len(metrics) == 1 else ""
    average = Column(AVERAGE, "average", metric, True, often[0].higher_is_better, weights)
    return (average, *columns)
