"""Makes a board from runs: rows of results by who answered, and columns by what was asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from lm_eval_icl.errors import InputError
from lm_eval_icl.results.board import (
    Board,
    BoardCell,
    Column,
    Entry,
    RowKey,
    TaskRun,
    grouped,
)
from lm_eval_icl.results.card import card_of
from lm_eval_icl.results.cells import combined, measured
from lm_eval_icl.results.columns import Groups, column_names, columns_of, with_average
from lm_eval_icl.results.keys import Keys, keys_of
from lm_eval_icl.results.labels import Row, entries_of
from lm_eval_icl.results.records import CHOSEN, LeftOutFile, RuleFacts, Run, TaskResult
from lm_eval_icl.results.rivals import compare_all
from lm_eval_icl.results.summary import summarize


def build(
    runs: Sequence[Run],
    left_out: Sequence[LeftOutFile] = (),
    baseline: str | None = None,
    tasks: Sequence[str] | None = None,
    groups: Groups | None = None,
    columns_by: Sequence[str] = (),
) -> Board:
    """Make a board from runs, or raise an `InputError` if they have no results that can be used.

    Args:
        baseline: the method with which all others on the same checkpoint, under the same decision
            rule, are compared; or the label or name of one entry for all entries. None for `icl`,
            or `hf` if there is no `icl`.
        tasks: the tasks and groups that are columns; None for all.
        groups: name -> column of a task -> its weight; the weights of a group add up to 1.
            `AVERAGE` is a group. None for the groups that the runs name, and an average over the
            tasks that at least half of the rows have.
        columns_by: switches that separate columns, not rows: ("training",) if columns of a study
            have own trainings.
    """
    runs = sorted(runs, key=lambda run: (run.date, run.digest))
    units: list[TaskRun] = []
    for run in runs:
        units += [TaskRun(run, result) for result in _results(run)]
    if not units:
        raise InputError("no results of lm-eval that can be used were found.")
    keys = keys_of(units, columns_by)
    names = column_names(column for _, column in keys.values())
    column_of = {unit: names[column] for unit, (_, column) in keys.items()}
    columns = columns_of(column_of, tasks, groups)
    rows = _rows(keys, column_of, columns)
    if groups is None:
        # Rows under decision rules do not count for the choice of the tasks of the average.
        without_rule = [cells for key, _, cells in rows if not key.rule]
        rows_to_count = without_rule or [cells for _, _, cells in rows]
        task_of = {name: unit.result.task for unit, name in column_of.items()}
        columns = with_average(columns, rows_to_count, task_of)
    for _, row_units, cells in rows:
        for column in columns:
            if column.kind != "task" and cells.keys() >= column.weights.keys():
                group_units = [unit for unit in row_units if column_of[unit] in column.weights]
                cells[column.name] = combined(cells, group_units, column)
    have_cells = set[str]().union(*(cells for _, _, cells in rows))
    columns = tuple(column for column in columns if column.name in have_cells)
    if not columns:
        raise InputError("no result of these tasks that can be used was found.")
    named = {column.name for column in columns}
    shown_rows: list[Row] = [row for row in rows if row[2].keys() & named]
    key_of, common = entries_of(shown_rows)
    entries = _sorted(list(key_of), columns)
    compared, baselines = compare_all(entries, key_of, columns, baseline)
    limits = {run.limit for run in runs}
    if len(limits) == 1 and None not in limits:
        common = (*common, f"limit={limits.pop():g}")
    summary = summarize(compared, columns, baselines)
    card = card_of({entry: key_of[entry] for entry in entries}, columns)
    row_keys = {entry.name: key for entry, key in key_of.items()}
    return Board(columns, compared, baselines, summary, tuple(left_out), card, common, row_keys)


def _results(run: Run) -> tuple[TaskResult, ...]:
    """The results of a run.

    If a study has chosen a decision rule, its results replace those under all rules. The results
    without a rule are kept, unless the study has also chosen arguments, which then belong to the
    rule.
    """
    study = run.study
    if "decide" not in study.chosen:
        return run.all_results
    rules = [result.rule for result in run.decided if result.rule is not None]
    is_transductive = any("transductive" in rule.reads for rule in rules)
    reads = ("transductive",) if is_transductive else ()
    rule = RuleFacts(CHOSEN, reads=reads, draws=any(rule.draws for rule in rules))
    results = list(run.tasks.values()) if study.chosen == ("decide",) else []
    for result in run.all_results:
        name = None if result.rule is None else result.rule.name
        if name == study.rule:
            results.append(replace(result, rule=rule))
    return tuple(results)


def _rows(
    keys: Keys, column_of: Mapping[TaskRun, str], columns: Sequence[Column]
) -> list[tuple[RowKey, list[TaskRun], dict[str, BoardCell]]]:
    """The rows with their cells on tasks."""
    tasks = set[str]().union(*(column.weights for column in columns))
    rows = []
    for key, row_units in grouped(keys, lambda unit: keys[unit][0]).items():
        by_task = grouped(row_units, lambda unit: column_of[unit])
        cells = {task: measured(units) for task, units in by_task.items() if task in tasks}
        if cells:
            rows.append((key, row_units, cells))
    return rows


def _sorted(entries: Sequence[Entry], columns: Sequence[Column]) -> list[Entry]:
    """Entries without a rule come first; of one rule, the best by the first column that they
    have."""
    rules = dict.fromkeys(entry.rule for entry in entries if entry.rule is not None)
    places = {rule: place for place, rule in enumerate([None, *rules])}

    def sort_key(entry: Entry) -> tuple[int, int, float, str, str]:
        column = next(column for column in columns if column.name in entry.cells)
        place = columns.index(column)
        return places[entry.rule], place, -column.goodness(entry), entry.label, entry.name

    return sorted(entries, key=sort_key)
