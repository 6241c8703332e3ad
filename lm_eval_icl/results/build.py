"""Makes a board from runs: results are grouped into rows by who answered, and into columns by what was asked."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import Any

from lm_eval_icl.errors import InputError
from lm_eval_icl.results.board import (
    AVERAGE,
    Board,
    BoardCell,
    Column,
    Entry,
    Fields,
    RowKey,
    TaskRun,
    grouped,
    shown,
)
from lm_eval_icl.results.card import card_of
from lm_eval_icl.results.cells import combined, measured
from lm_eval_icl.results.fields import CHOSEN
from lm_eval_icl.results.records import LeftOutFile, RuleFacts, Run, TaskResult
from lm_eval_icl.results.rivals import compare_all
from lm_eval_icl.results.summary import summarize

# Metrics between 0 and 1, which are shown as percent. In some tasks, metrics of these names have another range.
_SHARES = {"acc", "acc_norm", "acc_bytes", "acc_mutual_info", "exact_match", "em", "f1", "quasi_exact_match",
           "metaicl", "ece"}  # fmt: skip
_LISTED = 20  # the most names in a message

Groups = Mapping[str, Mapping[str, float]]
Row = tuple[RowKey, Sequence[TaskRun], Mapping[str, BoardCell]]


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
        baseline: the method with which all others on the same checkpoint, under the same decision rule, are compared;
            or the label or name of one entry for all entries. None for `icl`, or `hf` if there is no `icl`.
        tasks: the tasks and groups that are columns; None for all.
        groups: name -> column of a task -> its weight; the weights of a group add up to 1. `AVERAGE` is a group. None
            for the groups that the runs name, and an average over the tasks that at least half of the rows have.
        columns_by: switches that separate columns, not rows: ("training",) if columns of a study have own trainings.
    """
    runs = sorted(runs, key=lambda run: (run.date, run.digest))
    units = [TaskRun(run, result) for run in runs for result in _results(run)]
    if not units:
        raise InputError("no results of lm-eval that can be used were found.")
    keys = _keys(units, columns_by)
    names = _column_names({column: None for _, column in keys.values()})
    column_of = {unit: names[column] for unit, (_, column) in keys.items()}
    columns = _columns(column_of, tasks, groups)
    column_tasks = {task for column in columns for task in column.weights}
    shares = {task for column in columns if column.percent for task in column.weights}
    rows: list[tuple[RowKey, list[TaskRun], dict[str, BoardCell]]] = []
    for key, row_units in grouped(units, lambda unit: keys[unit][0]).items():
        by_task = grouped(row_units, lambda unit: column_of[unit])
        if cells := {
            task: measured(same, task in shares)
            for task, same in by_task.items()
            if task in column_tasks
        }:
            rows.append((key, row_units, cells))
    if groups is None:
        # Rows under decision rules do not count for the choice of the tasks of the average.
        without_rule = [cells for key, _, cells in rows if not key.rule]
        columns = _with_average(columns, without_rule or [cells for _, _, cells in rows])
    for _, row_units, cells in rows:
        for column in columns:
            if column.kind != "task" and cells.keys() >= column.weights.keys():
                group_units = [unit for unit in row_units if column_of[unit] in column.weights]
                cells[column.name] = combined(cells, group_units, column)
    columns = tuple(
        column for column in columns if any(column.name in cells for _, _, cells in rows)
    )
    if not columns:
        raise InputError("no result of these tasks that can be used was found.")
    shown_rows: list[Row] = [
        row for row in rows if any(column.name in row[2] for column in columns)
    ]
    key_of, shared = entries_of(shown_rows)
    rules = list(
        dict.fromkeys(
            entry.rule for entry in sorted(key_of, key=lambda entry: entry.rule is not None)
        )
    )

    def sort_key(entry: Entry) -> tuple[int, int, float, str, str]:
        """Entries without a rule come first; of one rule, the best come first, by the first column that they have."""
        index, column = next(pair for pair in enumerate(columns) if pair[1].name in entry.cells)
        goodness = column.sign * entry.cells[column.name].estimate.mean
        return rules.index(entry.rule), index, -goodness, entry.label, entry.name

    entries = sorted(key_of, key=sort_key)
    compared, baselines = compare_all(entries, key_of, columns, baseline)
    limits = {unit.run.limit for unit in units}
    if len(limits) == 1 and (limit := limits.pop()) is not None:
        shared = (*shared, f"limit={limit:g}")
    summary = summarize(compared, columns, baselines)
    card = card_of({entry: key_of[entry] for entry in entries}, columns)
    row_keys = {entry.name: key for entry, key in key_of.items()}
    return Board(columns, compared, baselines, summary, tuple(left_out), card, shared, row_keys)


def _results(run: Run) -> tuple[TaskResult, ...]:
    """The results of a run. If a study has chosen a decision rule, its results replace those under all rules. The
    results without a rule are kept, unless the study has also chosen arguments, which then belong to the rule."""
    if "decide" not in (study := run.study).chosen:
        return run.all_results
    is_transductive = any(
        r.rule is not None and "transductive" in r.rule.reads for r in run.decided
    )
    rule = RuleFacts(CHOSEN, reads=("transductive",) if is_transductive else ())
    under_rule = [
        r for r in run.all_results if (r.rule.name if r.rule is not None else None) == study.rule
    ]
    kept = run.tasks.values() if study.chosen == ("decide",) else ()
    return *kept, *(replace(result, rule=rule) for result in under_rule)


def _keys(
    units: Sequence[TaskRun], columns_by: Sequence[str]
) -> dict[TaskRun, tuple[RowKey, Fields]]:
    """Result -> the key of its row, and the fields of its column."""
    rows: dict[TaskRun, RowKey] = {}
    columns: dict[TaskRun, Fields] = {}
    run_fields = {
        run: {part: as_fields(fields) for part, fields in run.rows.items()}
        for run in {u.run for u in units}
    }
    for unit in units:
        rule, parts = unit.result.rule, run_fields[unit.run]
        rule_fields = () if rule is None else (("decide", rule.name), *as_fields(rule.arguments))
        model, method, setting = (parts.get(part, ()) for part in ("model", "method", "setting"))
        rows[unit] = RowKey(model, method, setting, rule_fields, ())
        always = {name: unit.result.switches.get(name) or "" for name in columns_by}
        columns[unit] = as_fields({"task": unit.result.task, **unit.result.column, **always})
    for name in (n for n in units[0].result.switches if n not in columns_by):
        cells = grouped(units, lambda unit: (rows[unit], columns[unit]))
        known = {
            cell: dict.fromkeys(
                v for u in cell_units if (v := u.result.switches.get(name)) is not None
            )
            for cell, cell_units in cells.items()
        }
        if all(len(values) < 2 for values in known.values()):
            continue  # no cell holds two values
        for cell, cell_units in cells.items():
            for unit in cell_units:
                value = unit.result.switches.get(name)
                if value is None:  # an unknown value agrees with a single known one
                    value = next(iter(known[cell]), "") if len(known[cell]) == 1 else ""
                if (
                    name == "documents"
                ):  # this switch says what was asked; the others say who answered
                    columns[unit] = as_fields({**dict(columns[unit]), name: value})
                else:
                    rows[unit] = replace(rows[unit], switches=(*rows[unit].switches, (name, value)))
    return {unit: (rows[unit], columns[unit]) for unit in units}


def _column_names(columns: Mapping[Fields, None]) -> dict[Fields, str]:
    """Short unique names of the columns: the task, and the fields in which columns of this task differ."""
    names: dict[Fields, str] = {}
    for task, task_columns in grouped(columns, lambda column: dict(column)["task"]).items():
        by_field = [dict(column) for column in task_columns]
        apart = differing(by_field)
        # The documents and the filter are not named if other fields, which say more, tell the columns apart.
        for quiet in ("documents", "filter"):
            rest = [name for name in apart if name != quiet]
            if len({tuple(column.get(name) for name in rest) for column in by_field}) == len(
                task_columns
            ):
                apart = rest
        for column, values in zip(task_columns, by_field, strict=True):
            words = [values["metric"]] * ("metric" in apart)
            words += [in_words(n, values.get(n)) for n in apart if n not in ("training", "metric")][
                :4
            ]
            training = f" [{values['training']}]" if "training" in apart else ""
            name = f"{task}{training}" + (f" ({', '.join(words)})" if words else "")
            while name == AVERAGE or name in names.values():
                name += "'"
            names[column] = name
    return names


def _columns(
    column_of: Mapping[TaskRun, str], tasks: Sequence[str] | None, groups: Groups | None
) -> tuple[Column, ...]:
    """A column for each group and each task: first the average, then groups, then tasks."""
    by_column = grouped(column_of, lambda unit: column_of[unit])
    weights: dict[str, Mapping[str, float]] = {}
    if groups is None:
        for run, run_units in grouped(column_of, lambda unit: unit.run).items():
            task_column = {unit.result.task: column_of[unit] for unit in run_units}
            for group, task_weights in run.groups.items():
                column_weights = {
                    task_column[task]: weight for task, weight in task_weights.items()
                }
                name = group
                while name == AVERAGE or (
                    name in weights and not _alike(weights[name], column_weights)
                ):
                    name += "'"  # another run has a group of this name with other tasks or weights
                weights.setdefault(name, column_weights)
    else:
        weights |= {
            name: group
            for name, group in groups.items()
            if group and group.keys() <= by_column.keys()
        }
    weights |= {name: {name: 1.0} for name in sorted(by_column)}
    if tasks is not None:
        chosen: dict[str, Mapping[str, float]] = {}
        for wanted in tasks:
            found = [
                name
                for name in weights
                if name == wanted or name.startswith((f"{wanted} (", f"{wanted} ["))
            ]
            if not found:
                known = ", ".join(shown(name) for name in sorted(weights)[:_LISTED])
                raise InputError(f"--tasks: no result of {wanted!r}; there are {known}.")
            chosen |= {name: weights[name] for name in found}
        weights = chosen
    columns = []
    for name, parts_weights in weights.items():
        parts = [unit.result for column in parts_weights for unit in by_column[column]]
        metric, higher_is_better = parts[0].metric, parts[0].higher_is_better
        if all(
            (part.metric, part.higher_is_better) == (metric, higher_is_better) for part in parts
        ):  # else no mean
            percent = metric in _SHARES and all(0 <= part.value <= 1 for part in parts)
            kind = "task" if name in by_column else "average" if name == AVERAGE else "group"
            columns.append(Column(name, kind, metric, percent, higher_is_better, parts_weights))
    return tuple(
        sorted(columns, key=lambda column: ("average", "group", "task").index(column.kind))
    )


def _alike(first: Mapping[str, float], second: Mapping[str, float]) -> bool:
    return first.keys() == second.keys() and all(
        abs(first[name] - second[name]) < 1e-9 for name in first
    )


def _with_average(
    columns: tuple[Column, ...], cells: Sequence[Mapping[str, BoardCell]]
) -> tuple[Column, ...]:
    """The columns with the average in front, over the tasks that at least half of the rows have."""
    tasks = [c for c in columns if c.kind == "task" and c.percent]
    tasks = [column for column in tasks if column.higher_is_better == tasks[0].higher_is_better]
    often = [
        column
        for column in tasks
        if 2 * sum(column.name in row_cells for row_cells in cells) >= len(cells)
    ]
    even = {column.name: 1 / len(often) for column in often}
    is_a_group = any(column.kind == "group" and _alike(column.weights, even) for column in columns)
    if (
        len(often) < 2
        or is_a_group
        or not any(row_cells.keys() >= even.keys() for row_cells in cells)
    ):
        return columns
    metrics = {column.metric for column in often}
    metric = metrics.pop() if len(metrics) == 1 else ""
    return Column(AVERAGE, "average", metric, True, often[0].higher_is_better, even), *columns


def as_fields(values: Mapping[str, Any]) -> Fields:
    return tuple(sorted((name, str(value)) for name, value in values.items()))


def in_words(name: str, value: str | None) -> str:
    """Words for a value in which rows or columns differ."""
    name = name.removeprefix("generation_kwargs.").removeprefix("metadata.")
    if not value:
        return f"no {name}"
    is_digest = len(value) in (16, 32, 64) and all(char in "0123456789abcdef" for char in value)
    return shown(f"{name} {value[:6]}" if is_digest else f"{name}={value}")


def differing(values: Sequence[Mapping[str, str]]) -> list[str]:
    """The sorted names of the fields in which `values` differ."""
    names = sorted({name for fields in values for name in fields})
    return [name for name in names if len({fields.get(name) for fields in values}) > 1]


def _conditions(key: RowKey, units: Sequence[TaskRun]) -> list[str]:
    """Words about the setting and the switches of a row, such as its number of shots."""
    setting, switches = dict(key.setting), dict(key.switches)
    shots = [str(extreme(unit.result.shots for unit in units)) for extreme in (min, max)]
    words = [f"{' to '.join(dict.fromkeys(shots))} shot{'s' * (shots != ['1', '1'])}"]
    if "chat" in setting:
        words += ["chat", "multiturn" if "multiturn" in setting else "one turn"]
    if "system" in setting:
        words.append("system instruction")
    words += [
        in_words(name, value)
        for name, value in key.setting
        if name not in ("chat", "multiturn", "system")
    ]
    drawn = dict.fromkeys(unit.result.switches.get("demonstrations") for unit in units)
    if any(drawn):
        words.append(
            in_words("demonstrations", "/".join(way or "drawn by the task" for way in drawn))
        )
    elif "demonstrations" in switches:
        words.append("demonstrations drawn by the task")
    words += [f"trained: {switches['training']}"] if switches.get("training") else []
    words += [in_words("weights", switches["weights"])] if "weights" in switches else []
    return list(map(shown, words))


def entries_of(rows: Sequence[Row]) -> tuple[dict[Entry, RowKey], tuple[str, ...]]:
    """The rows as entries, whose labels say in what they differ; and the words that all rows have in common."""
    key_of: dict[Entry, RowKey] = {}
    conditions = [_conditions(key, units) for key, units, _ in rows]
    shared = [word for word in conditions[0] if all(word in words for words in conditions)]
    checkpoints = {dict(key.model).get("checkpoint", "") for key, _, _ in rows}
    ends = Counter(PurePath(checkpoint).name for checkpoint in checkpoints)
    for (key, units, cells), words in zip(rows, conditions, strict=True):
        model, method = dict(key.model), dict(key.method)
        checkpoint = model.get("checkpoint", "")
        end = PurePath(checkpoint).name
        is_path = checkpoint.startswith((".", "/", "~")) or checkpoint.count("/") > 1
        alike = [
            dict(other.model)
            for other, _, _ in rows
            if dict(other.model).get("checkpoint", "") == checkpoint
        ]
        plain = ("revision", "dtype")  # these values are shown without their names
        apart = sorted(
            differing(alike), key=lambda name: (name != "revision", name != "dtype", name)
        )
        details = [model.get(n, "") if n in plain else in_words(n, model.get(n)) for n in apart]
        runs = tuple({unit.run.digest: unit.run for unit in units}.values())
        given = min(({n: v for n, v in run.arguments.items() if n in method and method[n] != CHOSEN} for run in runs),
                    key=lambda values: (len(values), str(values)))  # fmt: skip
        on_dev = [n for n, v in method.items() if v == CHOSEN]
        arguments = [f"{n}={v}" for n, v in given.items()] + (
            [f"{' and '.join(on_dev)} {CHOSEN}"] if on_dev else []
        )
        rules = [unit.result.rule for unit in units if unit.result.rule is not None]
        entry = Entry(
            name=hashlib.sha256(repr(key).encode("utf-8", "replace")).hexdigest()[:8],
            checkpoint=shown((end if is_path and ends[end] == 1 else checkpoint) or "unnamed"),
            details=shown(", ".join(filter(None, details))),
            method=shown(method.get("method", "") or "unnamed"),
            arguments=shown(", ".join(arguments)),
            conditions=", ".join(word for word in words if word not in shared),
            runs=runs,
            cells=cells,
            rule=shown(rules[0].name) if rules else None,
            reads=tuple(dict.fromkeys(words for rule in rules for words in rule.reads)),
            shots=(
                min(unit.result.shots for unit in units),
                max(unit.result.shots for unit in units),
            ),
        )
        key_of[entry] = key
    # Rows with the same label show the fields of the method in which they differ, defaults too.
    labeled: dict[Entry, RowKey] = {}
    for same_label in grouped(
        key_of, lambda entry: (entry.checkpoint, entry.details, entry.label)
    ).values():
        methods = [dict((*key_of[entry].method, *key_of[entry].rule)) for entry in same_label]
        for entry, values in zip(same_label, methods, strict=True):
            more = [f"{n}={values[n]}" for n in differing(methods) if n in values]
            text = shown(", ".join(filter(None, [entry.arguments, *more])))
            labeled[replace(entry, arguments=text)] = key_of[entry]
    return labeled, tuple(shared)
