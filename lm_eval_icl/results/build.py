"""Runs into a board: two groupbys, by who answered and by what was asked, and how rows differ."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

import numpy as np

from lm_eval_icl.errors import InputError
from lm_eval_icl.results import statistics
from lm_eval_icl.results.board import (
    AVERAGE,
    SIGNIFICANT,
    Board,
    BoardCell,
    Column,
    Entry,
    Pairs,
    TaskRun,
    grouped,
    reads_in_words,
    shown,
)
from lm_eval_icl.results.cells import HUGE, combined, common, compare, measured, unused
from lm_eval_icl.results.fields import CHOSEN
from lm_eval_icl.results.records import LeftOutFile, RuleFacts, Run, TaskResult, count, number
from lm_eval_icl.results.statistics import Difference
from lm_eval_icl.results.summary import summarize

# Metrics between 0 and 1, which are shown as percent. Of some tasks, metrics of these names are of another range.
_SHARES = {"acc", "acc_norm", "acc_bytes", "acc_mutual_info", "exact_match", "em", "f1", "quasi_exact_match",
           "metaicl", "ece"}  # fmt: skip
_LISTED = 20  # names in a message
# Switches of what was asked; the others are of who answered.
_OF_COLUMNS = ("documents",)
_RULE = "decide"

Fields = tuple[tuple[str, str], ...]
Cells = dict[str, BoardCell]  # of a row, by task or column
Groups = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class RowKey:
    """Who answered: a row of the board has one of these.

    Attributes:
        model, method, setting: the declared fields of each part, by name.
        rule: the decision rule and its arguments; empty for what the model itself says.
        switches: those that are on.
    """

    model: Fields
    method: Fields
    setting: Fields
    rule: Fields
    switches: Fields

    @property
    def rival(self) -> tuple[Fields, Fields, Fields]:
        """What a row has in common with its baseline: all but the method and the switches."""
        return self.model, self.setting, self.rule


def build(
    runs: Sequence[Run],
    left_out: Sequence[LeftOutFile] = (),
    baseline: str | None = None,
    tasks: Sequence[str] | None = None,
    groups: Groups | None = None,
    columns_by: Sequence[str] = (),
) -> Board:
    """Fold runs into a board.

    Args:
        runs: in any order.
        left_out: files that were not used; the board lists them, with the results that cannot be used.
        baseline: the method that the others on the same checkpoint, under the same decision rule, are compared with; or
            the label or name of one entry, with which all are compared. None for `icl`, or `hf` if there is no `icl`.
        tasks: the tasks and groups that are columns; None for all.
        groups: the groups, name -> the weights of its tasks' columns, which add up to 1; one called `AVERAGE` is the
            average. None for those that the runs name, and an average over the tasks that most rows have.
        columns_by: switches that separate columns, not rows: ("training",) where each column of a study has its own.

    Raises:
        InputError: there is no run, no entry is the baseline, or no run has one of the tasks.
    """
    left_out = list(left_out)
    runs = sorted(runs, key=lambda run: (run.date, run.digest))
    units = _usable([TaskRun(run, result) for run in runs for result in _results(run)], left_out)
    if not units:
        raise InputError("no results of lm-eval that can be used were found.")
    keys = _keys(units, columns_by)
    names = _column_names(keys, units)
    by_column = grouped(units, lambda unit: names[keys[unit][1]])
    columns = _columns(units, by_column, {unit: names[keys[unit][1]] for unit in units}, tasks, groups)
    of_columns = {task for column in columns for task in column.weights}
    shares = {task for column in columns if column.percent for task in column.weights}
    rows: list[tuple[RowKey, dict[str, list[TaskRun]], Cells]] = []
    for key, of_row in grouped(units, lambda unit: keys[unit][0]).items():
        by_task = grouped(of_row, lambda unit: names[keys[unit][1]])
        cells = {task: measured(of, task in shares) for task, of in by_task.items() if task in of_columns}
        if cells:
            rows.append((key, by_task, cells))
    if groups is None:
        # Decision rules do not decide what the average is over.
        of_models = [cells for key, _, cells in rows if not key.rule]
        columns = _with_average(columns, of_models or [cells for _, _, cells in rows])
    for _, by_task, cells in rows:
        for column in columns:
            if column.kind != "task" and cells.keys() >= column.weights.keys():
                of_group = [unit for task in column.weights for unit in by_task[task]]
                cells[column.name] = combined(cells, of_group, column)
    columns = tuple(column for column in columns if any(column.name in cells for _, _, cells in rows))
    if not columns:
        raise InputError("no result of these tasks that can be used was found.")
    key_of, shared = _entries([row for row in rows if any(column.name in row[2] for column in columns)])
    rules = list(dict.fromkeys(entry.rule for entry in sorted(key_of, key=lambda entry: entry.rule is not None)))

    def place(entry: Entry) -> tuple[int, int, float, str, str]:
        """By rule, the model itself first; then the best first, by the first column that an entry has."""
        index, column = next(pair for pair in enumerate(columns) if pair[1].name in entry.cells)
        goodness = column.sign * entry.cells[column.name].estimate.mean
        return rules.index(entry.rule), index, -goodness, entry.label, entry.name

    entries = sorted(key_of, key=place)
    pairs = {
        (first.name, second.name): differences
        for first, second in itertools.combinations(entries, 2)
        if (differences := compare(first.cells, second.cells, columns))
    }
    compared, baselines = _compared(entries, key_of, columns, pairs, baseline)
    limits = {unit.run.limit for unit in units}
    if len(limits) == 1 and (limit := limits.pop()) is not None:
        shared = (*shared, f"limit={limit:g}")
    files = len({run.path for run in runs} | {file.path for file in left_out})
    summary = summarize(compared, columns, pairs, baselines)
    return Board(columns, compared, baselines, pairs, summary, tuple(left_out), files, shared)


def named(entries: Sequence[Entry], name: str, what: str = "") -> Entry:
    """The entry with this name, or label, or label and checkpoint.

    Raises:
        InputError: there is none, or there are several.
    """
    for key in (
        lambda entry: entry.name,
        lambda entry: f"{entry.label} on {entry.checkpoint}",
        lambda entry: entry.label,
        lambda entry: " ".join(filter(None, [entry.method, entry.arguments])),
        lambda entry: entry.method,
    ):
        if matching := [entry for entry in entries if key(entry) == name]:
            # A method's name is that of its entry without a decision rule.
            matching = [entry for entry in matching if entry.rule is None] or matching
            break
    if len(matching) == 1:
        return matching[0]
    names = "; ".join(f"{entry.name}: {entry.label} on {entry.checkpoint}" for entry in (matching or entries)[:_LISTED])
    if matching:
        raise InputError(f"{what}{name}: several entries are called so. Give the name of one: {names}.")
    raise InputError(f"{what}{name}: there is no such entry. There are {names}.")


# ---------------------------------------------------------------------------------------------------------------
# Keys.


def _results(run: Run) -> tuple[TaskResult, ...]:
    """The results of a run; of a study that has chosen a decision rule, those under this one in place of all rules'.
    What the model says by itself stays beside them, unless other arguments were chosen for the rule."""
    if "decide" not in (study := run.study).chosen:
        return run.all_results
    rule = RuleFacts(CHOSEN, transductive=any(r.rule.transductive for r in run.decided if r.rule is not None))
    of_rule = [r for r in run.all_results if (r.rule.name if r.rule is not None else None) == study.rule]
    kept = run.tasks.values() if study.chosen == ("decide",) else ()
    return *kept, *(replace(result, rule=rule) for result in of_rule)


def _usable(units: Sequence[TaskRun], left_out: list[LeftOutFile]) -> list[TaskRun]:
    """The results whose numbers can be shown; the reasons for the others are added to `left_out`."""
    usable = []
    for unit in units:
        result = unit.result
        numbers = [result.value, result.stderr or 0.0]
        if result.answers is not None:
            numbers.append(float(np.nanmax(np.abs(result.answers.items), initial=0)))
        if result.task == AVERAGE:
            why = "it is called as the average over tasks is"
        elif not all(abs(x) < HUGE for x in numbers):
            why = f"a number that is not finite, or more than {HUGE:g}, is no result"
        elif result.metric.startswith(("acc", "exact_match")) and not 0 <= result.value <= 1:
            why = f"its {result.metric} of {result.value:g} is not between 0 and 1"
        else:
            usable.append(unit)
            continue
        under = "" if result.rule is None else f" under the decision rule {result.rule.name!r}"
        left_out.append(LeftOutFile(unit.run.path, f"task {result.task!r}{under} is left out: {why}."))
    return usable


def _keys(units: Sequence[TaskRun], columns_by: Sequence[str]) -> dict[TaskRun, tuple[RowKey, Fields]]:
    """Of each result, whose row and which column it is in."""
    rows: dict[TaskRun, RowKey] = {}
    columns: dict[TaskRun, Fields] = {}
    of_runs = {run: {part: _fields(fields) for part, fields in run.rows.items()} for run in {u.run for u in units}}
    for unit in units:
        rule, parts = unit.result.rule, of_runs[unit.run]
        of_rule = () if rule is None else ((_RULE, rule.name), *_fields(rule.arguments))
        model, method, setting = (parts.get(part, ()) for part in ("model", "method", "setting"))
        rows[unit] = RowKey(model, method, setting, of_rule, ())
        always = {name: unit.result.switches.get(name) or "" for name in columns_by}
        columns[unit] = _fields({"task": unit.result.task, **unit.result.column, **always})
    for name in (n for n in units[0].result.switches if n not in columns_by):
        cells = grouped(units, lambda unit: (rows[unit], columns[unit]))
        known = {
            cell: dict.fromkeys(v for u in of_cell if (v := u.result.switches.get(name)) is not None)
            for cell, of_cell in cells.items()
        }
        if all(len(values) < 2 for values in known.values()):
            continue  # no cell holds two values
        for cell, of_cell in cells.items():
            for unit in of_cell:
                value = unit.result.switches.get(name)
                if value is None:  # agrees with one value
                    value = next(iter(known[cell]), "") if len(known[cell]) == 1 else ""
                if name in _OF_COLUMNS:
                    columns[unit] = _fields({**dict(columns[unit]), name: value})
                else:
                    rows[unit] = replace(rows[unit], switches=(*rows[unit].switches, (name, value)))
    return {unit: (rows[unit], columns[unit]) for unit in units}


def _fields(values: Mapping[str, Any]) -> Fields:
    return tuple(sorted((name, str(value)) for name, value in values.items()))


def _words(name: str, value: str | None) -> str:
    """Words for a value in which rows or columns differ."""
    name = name.removeprefix("generation_kwargs.").removeprefix("metadata.")
    if not value:
        return f"no {name}"
    is_digest = len(value) in (16, 32, 64) and all(char in "0123456789abcdef" for char in value)
    return shown(f"{name} {value[:6]}" if is_digest else f"{name}={value}")


def _column_names(keys: Mapping[TaskRun, tuple[RowKey, Fields]], units: Sequence[TaskRun]) -> dict[Fields, str]:
    """Short unique names of the columns: the task, and the fields in which columns of this task differ."""
    names: dict[Fields, str] = {}
    for task, columns in grouped({keys[unit][1]: None for unit in units}, lambda c: dict(c)["task"]).items():
        by_field = [dict(column) for column in columns]
        fields = sorted({name for column in by_field for name in column})
        differing = [name for name in fields if len({column.get(name) for column in by_field}) > 1]
        # The number of documents follows from the limit, and what is spelled out says more than the whole prompt.
        for quiet in ("documents", "filter"):
            rest = [name for name in differing if name != quiet]
            if len({tuple(column.get(name) for name in rest) for column in by_field}) == len(columns):
                differing = rest
        for column, values in zip(columns, by_field, strict=True):
            words = [w for n in differing if n not in ("training", "metric") and (w := _words(n, values.get(n)))]
            words = [values["metric"]] * ("metric" in differing) + words[:4]
            training = f" [{values['training']}]" if "training" in differing else ""
            name = f"{task}{training}" + (f" ({', '.join(words)})" if words else "")
            while name in names.values():
                name += "'"
            names[column] = name
    return names


# ---------------------------------------------------------------------------------------------------------------
# Columns.


def _columns(
    units: Sequence[TaskRun],
    by_column: Mapping[str, list[TaskRun]],
    names: Mapping[TaskRun, str],
    tasks: Sequence[str] | None,
    groups: Groups | None,
) -> tuple[Column, ...]:
    """A column for each group, then each task, in the order in which they come up."""
    weights: dict[str, dict[str, float]] = {}
    if groups is None:
        of_groups: dict[str, dict[Fields, dict[str, float]]] = defaultdict(dict)
        for run, of_run in reversed(grouped(units, lambda unit: unit.run).items()):
            of_task = {unit.result.task: names[unit] for unit in of_run}
            for group, of_tasks in run.groups.items():
                if group != AVERAGE and of_tasks.keys() <= of_task.keys():
                    of_group = {of_task[task]: weight for task, weight in of_tasks.items()}
                    rounded = {name: f"{weight:.9g}" for name, weight in of_group.items()}
                    of_groups[group].setdefault(_fields(rounded), of_group)
        for group, variants in of_groups.items():
            for place, of_group in enumerate(variants.values(), 1):
                weights[f"{group} ({place})" if len(variants) > 1 else group] = of_group
    else:
        weights = {name: dict(of) for name, of in groups.items() if of and of.keys() <= by_column.keys()}
    weights |= {name: {name: 1.0} for name in sorted(by_column)}
    task_of = {name: of[0].result.task for name, of in by_column.items()}
    if tasks is not None:
        chosen: dict[str, dict[str, float]] = {}
        for wanted in tasks:
            found = [n for n in weights if n == wanted or task_of.get(n) == wanted or n.startswith(f"{wanted} (")]
            if not found:
                known = ", ".join(shown(name) for name in sorted(weights)[:_LISTED])
                more = f" and {len(weights) - _LISTED} more" if len(weights) > _LISTED else ""
                raise InputError(f"--tasks: no result of {wanted!r}; there are {known}{more}.")
            chosen |= {name: weights[name] for name in found}
        weights = chosen
    columns = []
    for name, of_tasks in weights.items():
        parts = [unit.result for task in of_tasks for unit in by_column[task]]
        metric, higher_is_better = parts[0].metric, parts[0].higher_is_better
        if all((part.metric, part.higher_is_better) == (metric, higher_is_better) for part in parts):  # else no mean
            percent = metric in _SHARES and all(0 <= part.value <= 1 for part in parts)
            kind = "task" if name in by_column else "average" if name == AVERAGE else "group"
            columns.append(Column(name, kind, metric, percent, higher_is_better, of_tasks, task_of.get(name, "")))
    if not columns:
        raise InputError(
            f"--tasks {','.join(tasks or ())}: the tasks have different metrics, of which there is no mean."
        )
    return tuple(sorted(columns, key=lambda column: ("average", "group", "task").index(column.kind)))


def _with_average(columns: tuple[Column, ...], cells: Sequence[Cells]) -> tuple[Column, ...]:
    """The columns with the average in front, if there are several tasks of one metric.

    It is over the tasks that at least half of the rows have: else one row with a task of its own would take the average
    from all others.
    """
    tasks = [c for c in columns if c.kind == "task" and c.percent]
    if tasks:
        tasks = [column for column in tasks if column.higher_is_better == tasks[0].higher_is_better]
    often = [column for column in tasks if 2 * sum(column.name in of_row for of_row in cells) >= len(cells)]
    even = {column.name: 1 / len(often) for column in often}
    is_a_group = any(
        column.weights.keys() == even.keys() and np.allclose(list(column.weights.values()), 1 / len(often), 0, 1e-9)
        for column in columns
        if column.kind == "group"
    )
    if len(often) < 2 or is_a_group or not any(of_row.keys() >= even.keys() for of_row in cells):
        return columns
    metrics = {column.metric for column in often}
    metric = metrics.pop() if len(metrics) == 1 else ""
    return Column(AVERAGE, "average", metric, True, often[0].higher_is_better, even), *columns


# ---------------------------------------------------------------------------------------------------------------
# Entries.


def _conditions(key: RowKey, units: Iterable[TaskRun]) -> tuple[list[str], tuple[float, float]]:
    """Words for what else tells a row from others, and the numbers of its demonstrations."""
    units = list(units)
    setting, switches = dict(key.setting), dict(key.switches)

    def ends_of(numbers: Sequence[float]) -> str:
        ends = dict.fromkeys(f"{x:.0f}" if x == int(x) else f"{x:.4g}" for x in (min(numbers), max(numbers)))
        return " to ".join(ends)

    numbers = [unit.result.shots for unit in units]
    used = [unit.result.shots - unused(unit) for unit in units]
    shots = f"{ends_of(numbers)} shot{'s' * (ends_of(numbers) != '1')}"
    words = [f"{ends_of(used)} of {shots}" if used != numbers else shots]
    if "chat" in setting:
        words += ["chat", "multiturn" if "multiturn" in setting else "one turn"]
    if "system" in setting:
        words.append("system instruction")
    words += [_words(name, value) for name, value in key.setting if name not in ("chat", "multiturn", "system")]
    if drawn := dict.fromkeys(d for unit in units if (d := unit.result.switches.get("demonstrations")) is not None):
        of_some = "" if all(unit.result.switches.get("demonstrations") for unit in units) else " in some tasks"
        words.append(f"demonstrations={'/'.join(drawn)}{of_some}")
    elif "demonstrations" in switches:
        words.append("demonstrations drawn by the task")
    words += [f"trained: {switches['training']}"] if switches.get("training") else []
    words += [_words("weights", switches["weights"])] if "weights" in switches else []
    return list(map(shown, words)), (min(used), max(used))


def _entries(
    rows: Sequence[tuple[RowKey, Mapping[str, list[TaskRun]], Cells]],
) -> tuple[dict[Entry, RowKey], tuple[str, ...]]:
    """The rows with names, and with labels that say what they differ in; and the words that all have in common."""
    names: set[str] = set()
    key_of: dict[Entry, RowKey] = {}
    units_of = [[unit for units in by_task.values() for unit in units] for _, by_task, _ in rows]
    conditions = [_conditions(key, units) for (key, _, _), units in zip(rows, units_of, strict=True)]
    shared = [word for word in conditions[0][0] if all(word in words for words, _ in conditions)]
    checkpoints = {dict(key.model).get("checkpoint", "") for key, _, _ in rows}
    ends = Counter(PurePath(checkpoint).name for checkpoint in checkpoints)
    for (key, _, cells), units, (words, shots) in zip(rows, units_of, conditions, strict=True):
        name, text = "", repr(key)
        while not name or name in names:
            text += name
            name = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:8]
        names.add(name)
        model, method = dict(key.model), dict(key.method)
        checkpoint = model.get("checkpoint", "")
        end = PurePath(checkpoint).name
        is_path = checkpoint.startswith((".", "/", "~")) or checkpoint.count("/") > 1
        alike = [dict(other.model) for other, _, _ in rows if dict(other.model).get("checkpoint", "") == checkpoint]
        fields = ["revision", "dtype", *sorted({n for m in alike for n in m} - {"checkpoint", "revision", "dtype"})]
        differing = [n for n in fields if len({other.get(n) for other in alike}) > 1]
        known = [n for n in differing if model.get(n) or n not in fields[:2]]
        details = [model[n] if n in fields[:2] else _words(n, model.get(n)) for n in known]
        runs = tuple({unit.run.digest: unit.run for unit in units}.values())
        given = min(({n: v for n, v in run.arguments.items() if n in method and method[n] != CHOSEN} for run in runs),
                    key=lambda values: (len(values), str(values)))  # fmt: skip
        on_dev = [n for n, v in method.items() if v == CHOSEN]
        arguments = [f"{n}={v}" for n, v in given.items()] + ([f"{' and '.join(on_dev)} {CHOSEN}"] if on_dev else [])
        tokens, seconds, is_shared = _costs(runs)
        parameters = {count(run.results.get("config", {}).get("model_num_parameters")) for run in runs}
        rules = [unit.result.rule for unit in units if unit.result.rule is not None]
        entry = Entry(
            name=name,
            checkpoint=shown((end if is_path and ends[end] == 1 else checkpoint) or "unnamed"),
            details=shown(", ".join(details)),
            method=shown(method.get("method", "") or "unnamed"),
            arguments=shown(", ".join(arguments)),
            conditions=", ".join(word for word in words if word not in shared),
            runs=runs,
            cells=cells,
            parameters=(parameters.pop() or None) if len(parameters) == 1 else None,
            tokens=tokens,
            seconds=seconds,
            recorded=_recorded(runs),
            shared=is_shared,
            rule=shown(rules[0].name) if rules else None,
            reads=reads_in_words(rules),
            shots=shots,
        )
        key_of[entry] = key
    # Rows with the same label show the fields of the method in which they differ, defaults too.
    labeled: dict[Entry, RowKey] = {}
    for of_label in grouped(key_of, lambda entry: (entry.checkpoint, entry.details, entry.label)).values():
        methods = [dict((*key_of[entry].method, *key_of[entry].rule)) for entry in of_label]
        differing = [n for n in sorted({n for m in methods for n in m}) if len({m.get(n) for m in methods}) > 1]
        for entry, values in zip(of_label, methods, strict=True):
            more = [f"{n}={values[n]}" for n in differing if n in values]
            text = shown(", ".join(filter(None, [entry.arguments, *more])))
            labeled[replace(entry, arguments=text)] = key_of[entry]
    return labeled, tuple(shared)


def _recorded(runs: Sequence[Run]) -> str:
    """What the files say of how the runs were made; of several runs that agree but for seeds, once."""
    lines = []
    for run in runs:
        config = run.results.get("config", {})
        shots = sorted({result.shots for result in run.all_results})
        facts = {"model": run.model, "model_args": config.get("model_args"), "num_fewshot": shots,
                 "limit": run.limit, "gen_kwargs": config.get("gen_kwargs") or None,
                 "chat_template": bool(run.results.get("chat_template")) or None,
                 "system_instruction": run.results.get("system_instruction")}  # fmt: skip
        lines.append(
            "; ".join(f"{name}: {json.dumps(v, ensure_ascii=False)}" for name, v in facts.items() if v is not None)
        )
    by_line = grouped(zip(lines, runs, strict=True), lambda pair: pair[0])
    texts = []
    for line, pairs in by_line.items():
        seeds = sorted({run.seed for _, run in pairs if run.seed is not None})
        tasks = sorted({result.task for _, run in pairs for result in run.all_results})
        texts.append(f"{line}; seeds: {', '.join(map(str, seeds)) or 'not recorded'}; tasks: {', '.join(tasks)}")
    return "\n".join(texts)


def _costs(runs: Sequence[Run]) -> tuple[float | None, float | None, bool]:
    """Tokens run through the model and seconds, both a document; None if a run does not say. And whether they are a
    study's, which do not count where there are runs alone: the two do not compare (see `Run.cost`)."""
    counted = [run for run in runs if run.cost == "alone"] or runs
    documents = sum(sum({result.task: result.documents for result in run.all_results}.values()) for run in counted)

    def a_document(name: str) -> float | None:
        total = sum(math.nan if (value := number(getattr(run, name))) is None else value for run in counted)
        return total / documents if documents and 0 <= total < math.inf else None

    return a_document("tokens"), a_document("seconds"), counted[0].cost == "shared"


# ---------------------------------------------------------------------------------------------------------------
# Baselines and ranks.


def _compared(
    entries: Sequence[Entry],
    key_of: Mapping[Entry, RowKey],
    columns: Sequence[Column],
    pairs: Pairs,
    baseline: str | None,
) -> tuple[tuple[Entry, ...], dict[str, str]]:
    """The entries with differences and ranks; and by the name of an entry that of its baseline.

    The baseline may be several rows, as of several numbers of demonstrations: an entry is compared on each task with
    the row that was asked the same. Its own baseline is the row that it is compared with on most tasks.
    """
    methods = {dict(key.method).get("method", "") for key in key_of.values()}
    only = named(entries, baseline, "--baseline ") if baseline is not None and baseline not in methods else None
    if baseline is None:
        baseline = next((name for name in ("icl", "hf") if name in methods), "")
    alike = grouped(entries, lambda entry: key_of[entry].rival)
    raw = {(key.model, key.method, key.setting, key.switches): entry for entry, key in key_of.items() if not key.rule}
    baselines: dict[str, str] = {}
    firsts: dict[str, dict[str, Entry]] = {}  # by an entry's name and the task, the row that it is compared with
    rivals: dict[str, list[Entry]] = {}
    differences: dict[str, dict[str, Difference]] = {}
    to_raw: dict[str, dict[str, Difference]] = {}
    for entry in entries:
        key = key_of[entry]
        if only is not None:
            rivals[entry.name] = [] if entry is only else [only]
        else:
            of_entry = (e for e in alike[key.rival] if dict(key_of[e].method).get("method") == baseline != entry.method)
            rivals[entry.name] = sorted(of_entry, key=lambda e: (key_of[e].switches != key.switches, len(e.arguments)))
        firsts[entry.name] = {}
        for task, cell in entry.cells.items():
            sets = {r: len(common(cell.sets, r.cells[task].sets)) for r in rivals[entry.name] if task in r.cells}
            order = sorted(sets, key=lambda r: (key_of[r].switches != key.switches, -sets[r]))
            if asked := [rival for rival in order if sets[rival]]:
                firsts[entry.name][task] = asked[0]
        other = {task: rival.cells[task] for task, rival in firsts[entry.name].items()}
        differences[entry.name] = compare(entry.cells, other, columns)
        counts = Counter(rival.name for rival in firsts[entry.name].values())
        same = [rival for rival in rivals[entry.name] if key_of[rival].switches == key.switches]
        if counts:
            baselines[entry.name] = max(
                (r.name for r in rivals[entry.name]), key=lambda name: counts[name]
            )  # the first
        elif len(alone := same if len(same) == 1 else rivals[entry.name]) == 1:  # which of several would be a guess
            baselines[entry.name] = alone[0].name
        if key.rule and (base := raw.get((key.model, key.method, key.setting, key.switches))) is not None:
            to_raw[entry.name] = compare(entry.cells, base.cells, columns)
    cells: dict[str, Cells] = {entry.name: {} for entry in entries}
    for column in columns:
        of_column = [entry for entry in entries if column.name in entry.cells]
        against, against_raw = (
            [of.get(entry.name, {}).get(column.name) for entry in of_column] for of in (differences, to_raw)
        )
        adjusted, adjusted_raw = (
            statistics.holm([math.nan if d is None else d.p for d in of]) for of in (against, against_raw)
        )
        ranks: dict[str, tuple[int, int]] = {}
        best: set[str] = set()
        for of_rule in grouped(of_column, lambda entry: entry.rule).values():
            ranks |= _ranks(of_rule, column, pairs)
            goodness = {e.name: column.sign * e.cells[column.name].estimate.mean for e in of_rule}
            best |= {name for name, good in goodness.items() if good >= max(goodness.values()) - 1e-12}
        for place, entry in enumerate(of_column):
            cell, difference = entry.cells[column.name], against[place]
            marks = list(cell.marks)
            if difference is not None:
                with_whom = {e.name: e for task in column.weights if (e := firsts[entry.name].get(task))}
                if list(with_whom) != [baselines[entry.name]]:
                    marks.append(f"Compared with {'; '.join(rival.label for rival in with_whom.values())}.")
                if difference.sets < cell.estimate.sets:
                    marks.append(f"Paired on {difference.sets} of {cell.estimate.sets} sets of demonstrations.")
            elif any(column.name in r.cells for r in rivals[entry.name]) and "aggregate only" not in marks:
                marks.append("unpaired")
            if "differs" in marks:  # of another prompt's answers, which other runs confirm
                marks = [mark for mark in marks if mark != "confirmed"]
            cells[entry.name][column.name] = replace(
                cell,
                difference=difference,
                p_holm=None if difference is None else adjusted[place],
                to_raw=against_raw[place],
                p_raw=None if against_raw[place] is None else adjusted_raw[place],
                rank=ranks.get(entry.name),
                is_best=entry.name in best,
                marks=tuple(marks),
            )
    # Cells stand in the order of the columns, and behind them those of tasks that are no columns.
    ordered = (cells[entry.name] | {**entry.cells, **cells[entry.name]} for entry in entries)
    return tuple(replace(entry, cells=of_row) for entry, of_row in zip(entries, ordered, strict=True)), baselines


def _ranks(entries: Sequence[Entry], column: Column, pairs: Pairs) -> dict[str, tuple[int, int]]:
    """The range of ranks of each entry on a column; of those that are paired with another.

    Args:
        entries: in the order of the board.
    """
    p = np.full((len(entries), len(entries)), math.nan)
    means = [entry.cells[column.name].estimate.mean for entry in entries]
    for (i, first), (j, second) in itertools.combinations(enumerate(entries), 2):
        if (difference := pairs.get((first.name, second.name), {}).get(column.name)) is not None:
            # The entry that is worse over all of its prompts may be better on those that both were asked.
            p[i, j] = p[j, i] = difference.p if difference.mean * (means[i] - means[j]) >= 0 else 1.0
    ranges = statistics.rank_ranges([column.sign * mean for mean in means], p, SIGNIFICANT)
    paired = ~np.isnan(p).all(axis=1)
    return {entry.name: ranks for entry, ranks, is_paired in zip(entries, ranges, paired, strict=True) if is_paired}
