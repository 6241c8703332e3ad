"""Runs into a board: what each row has on each column, and how rows differ."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath

import numpy as np

from lm_eval_icl.errors import InputError
from lm_eval_icl.results import entries as folding
from lm_eval_icl.results import statistics
from lm_eval_icl.results.board import AVERAGE, SIGNIFICANT, Board, BoardCell, Column, Entry, Pairs
from lm_eval_icl.results.cells import HUGE, combined, common, compare, kind, measured
from lm_eval_icl.results.commands import commands
from lm_eval_icl.results.entries import EntryRuns, grouped, shown
from lm_eval_icl.results.records import LeftOutFile, Run
from lm_eval_icl.results.statistics import Difference
from lm_eval_icl.results.summary import summarize

# Metrics between 0 and 1, which are shown as percent. Of some tasks, metrics of these names are of another range.
_SHARES = {"acc", "acc_norm", "acc_bytes", "acc_mutual_info", "exact_match", "em", "f1", "quasi_exact_match", "metaicl"}
_LISTED = 20  # names in a message

Cells = dict[str, BoardCell]  # of a row, by task or column
Groups = Mapping[str, Mapping[str, float]]


def build(
    runs: Sequence[Run],
    left_out: Sequence[LeftOutFile] = (),
    baseline: str | None = None,
    tasks: Sequence[str] | None = None,
    groups: Groups | None = None,
) -> Board:
    """Fold runs into a board.

    Args:
        runs: in any order.
        left_out: files that were not used; the board lists them, with the results that cannot be used.
        baseline: the method that the others on the same checkpoint are compared with; or the label or name of one
            entry, with which all are compared. None for `icl`, or `hf` if there is no `icl`.
        tasks: the tasks and groups that are columns; None for all.
        groups: the groups, name -> the weights of its tasks, which add up to 1; one called `AVERAGE` is the average.
            None for those that the runs name, and an average over the tasks that most rows have.

    Raises:
        InputError: there is no run, no entry is the baseline, or no run has one of the tasks.
    """
    left_out = list(left_out)
    runs = _usable(sorted(runs, key=lambda run: (run.date, run.digest)), left_out)
    columns = _columns(runs, tasks, groups)
    of_columns = {task for column in columns for task in column.weights}
    shares = {task for column in columns if column.percent for task in column.weights}
    rows: list[tuple[EntryRuns, Cells]] = []
    for row in folding.rows(runs):
        of_tasks = {task: units for task, units in row.units.items() if task in of_columns}
        rows.append((row, {task: measured(units, task in shares) for task, units in of_tasks.items()}))
    rows = [(row, cells) for row, cells in rows if cells]
    if groups is None:
        # Decision rules do not decide what the average is over.
        of_models = [cells for row, cells in rows if row.rule is None]
        columns = _with_average(columns, of_models or [cells for _, cells in rows])
    for row, cells in rows:
        for column in columns:
            if column.kind != "task" and cells.keys() >= column.weights.keys():
                units = [unit for task in column.weights for unit in row.units[task]]
                cells[column.name] = combined(cells, units, column)
    columns = tuple(column for column in columns if any(column.name in cells for _, cells in rows))
    if not columns:
        raise InputError("no result of these tasks that can be used was found.")

    def place(entry: Entry) -> tuple[bool, int, float, str, str]:
        """The best first, by the first column that an entry has; those that are transductive behind all others."""
        number, column = next(pair for pair in enumerate(columns) if pair[1].name in entry.cells)
        goodness = column.sign * entry.cells[column.name].estimate.mean
        return entry.is_transductive, number, -goodness, entry.label, entry.name

    row_of = _entries([row for row in rows if any(column.name in row[1] for column in columns)])
    entries = sorted(row_of, key=place)
    pairs = {
        (first.name, second.name): differences
        for first, second in itertools.combinations(entries, 2)
        if (differences := compare(first.cells, second.cells, columns))
    }
    compared, baselines = _compared(entries, row_of, columns, pairs, baseline)
    files = len({run.path for run in runs} | {file.path for file in left_out})
    summary = summarize(compared, columns, pairs, baselines, baseline)
    return Board(columns, compared, baselines, pairs, summary, tuple(left_out), files)


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
# Columns.


def _usable(runs: Sequence[Run], left_out: list[LeftOutFile]) -> list[Run]:
    """The runs without results that cannot stand in a column with others; the reasons are added to `left_out`."""
    kinds: dict[str, Counter[tuple[object, ...]]] = defaultdict(Counter)
    for run in runs:
        for task, result in run.tasks.items():
            kinds[task][kind(result)] += 1
    most_common = {task: of_task.most_common(1)[0][0] for task, of_task in kinds.items()}  # of equals, the first
    usable = []
    for run in runs:
        kept = []
        for result in run.all_results:
            task = result.task
            numbers = [result.value, result.stderr or 0.0]
            if result.answers is not None:
                numbers.append(float(np.nanmax(np.abs(result.answers.items), initial=0)))
            if task == AVERAGE:
                why = "it is called as the average over tasks is"
            elif not all(abs(number) < HUGE for number in numbers):
                why = f"a number that is not finite, or more than {HUGE:g}, is no result"
            elif result.metric.startswith(("acc", "exact_match")) and not 0 <= result.value <= 1:
                why = f"its {result.metric} of {result.value:g} is not between 0 and 1"
            elif kind(result) != most_common.get(task, kind(result)):
                metric, of_filter, *_ = most_common[task]
                why = f"its metric is {result.metric} ({result.filter}), most runs have {metric} ({of_filter})"
            else:
                kept.append(result)
                continue
            under = "" if result.rule is None else f" under the decision rule {result.rule.name!r}"
            left_out.append(LeftOutFile(run.path, f"task {task!r}{under} is left out: {why}."))
        if kept:
            tasks = {result.task: result for result in kept if result.rule is None}
            decided = tuple(result for result in kept if result.rule is not None)
            usable.append(replace(run, tasks=tasks, decided=decided))
    return usable


def _columns(runs: Sequence[Run], tasks: Sequence[str] | None, groups: Groups | None) -> tuple[Column, ...]:
    """A column for each group, then each task, in the order in which they come up."""
    if not runs:
        raise InputError("no results of lm-eval that can be used were found.")
    results = grouped((result for run in runs for result in run.all_results), lambda result: result.task)
    of_runs = [group for run in reversed(runs) for group in run.groups.items() if group[0] != AVERAGE]
    named_groups = of_runs if groups is None else groups.items()
    weights = {
        name: dict(of_tasks) for name, of_tasks in named_groups if of_tasks and of_tasks.keys() <= results.keys()
    }
    weights |= {task: {task: 1.0} for task in sorted(results)}
    if tasks is not None:
        if missing := [name for name in tasks if name not in weights]:
            names = ", ".join(shown(name) for name in sorted(weights)[:_LISTED])
            more = f" and {len(weights) - _LISTED} more" if len(weights) > _LISTED else ""
            raise InputError(f"--tasks: no result of {missing[0]!r}; there are {names}{more}.")
        weights = {name: weights[name] for name in tasks}
    columns = []
    for name, of_tasks in weights.items():
        parts = [result for task in of_tasks for result in results[task]]
        metric, higher_is_better = parts[0].metric, parts[0].higher_is_better
        if all((part.metric, part.higher_is_better) == (metric, higher_is_better) for part in parts):  # else no mean
            percent = metric in _SHARES and all(0 <= part.value <= 1 for part in parts)
            is_of = "task" if name in results else "average" if name == AVERAGE else "group"
            columns.append(Column(name, is_of, metric, percent, higher_is_better, of_tasks))
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
    tasks = [column for column in columns if column.kind == "task" and column.percent and column.higher_is_better]
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
    return Column(AVERAGE, "average", metrics.pop() if len(metrics) == 1 else "", True, True, even), *columns


# ---------------------------------------------------------------------------------------------------------------
# Entries.


def _entries(rows: Sequence[tuple[EntryRuns, Cells]]) -> dict[Entry, EntryRuns]:
    """The rows with names, and with labels that say what they differ in."""
    ends = {row.checkpoint[0]: PurePath(row.checkpoint[0]).name for row, _ in rows}
    counts = Counter(ends.values())
    names: set[str] = set()
    row_of: dict[Entry, EntryRuns] = {}
    for row, cells in rows:
        full, *details = row.checkpoint
        checkpoint = row.checkpoint if row.checkpoint[3] else row.checkpoint[:3]
        rule = () if row.rule is None else (row.rule,)
        name, key = "", repr((checkpoint, row.method, row.resolved, row.conditions, *rule))
        while not name or name in names:
            key += name
            name = hashlib.sha256(key.encode()).hexdigest()[:8]
        names.add(name)
        is_path = full.startswith((".", "/", "~")) or full.count("/") > 1
        others = [other.checkpoint[1:] for other, _ in rows if other.checkpoint[0] == full]
        differing = [part for i, part in enumerate(details) if any(other[i] != part for other in others)]
        tokens, seconds, shared = folding.costs(row.runs)
        parameters = [run.results["config"].get("model_num_parameters") for run in row.runs]
        known = type(parameters[0]) is int and 0 < parameters[0] < 2**53 and parameters.count(parameters[0])
        entry = Entry(
            name=name,
            checkpoint=shown((ends[full] if is_path and counts[ends[full]] == 1 else full) or "unnamed"),
            details=shown(", ".join(filter(None, differing))),
            method=shown(row.method),
            arguments=row.arguments,
            conditions=", ".join(row.words),
            runs=row.runs,
            cells=cells,
            parameters=parameters[0] if known == len(parameters) else None,
            tokens=tokens,
            seconds=seconds,
            command=commands(row.runs, row.rule is not None),
            shared=shared,
            rule=None if row.rule is None else shown(row.rule[0]),
            reads=row.reads,
        )
        row_of[entry] = row
    # Rows with the same label show the arguments in which they differ, defaults and quiet ones too.
    labeled: dict[Entry, EntryRuns] = {}
    for alike in grouped(row_of, lambda entry: (entry.checkpoint, entry.details, entry.label)).values():
        resolved = [json.loads(row_of[entry].resolved) for entry in alike]
        keys = sorted({key for values in resolved for key in values})
        differing = [key for key in keys if len({json.dumps(values.get(key)) for values in resolved}) > 1]
        for entry, values in zip(alike, resolved, strict=True):
            more = [f"{key}={values[key]}" for key in differing if key in values]
            arguments = shown(", ".join(filter(None, [entry.arguments, *more])))
            labeled[replace(entry, arguments=arguments)] = row_of[entry]
    return labeled


# ---------------------------------------------------------------------------------------------------------------
# Baselines and ranks.


def _compared(
    entries: Sequence[Entry],
    row_of: Mapping[Entry, EntryRuns],
    columns: Sequence[Column],
    pairs: Pairs,
    baseline: str | None,
) -> tuple[tuple[Entry, ...], dict[str, str]]:
    """The entries with differences to the baseline and ranks; and by the name of an entry that of its baseline.

    The baseline may be several rows, as of several prompts: an entry is compared on each task with the row that was
    asked the same. Its own baseline is the row that it is compared with on most tasks.
    """
    rivals = _rivals(entries, row_of, baseline)
    baselines: dict[str, str] = {}
    same: dict[str, dict[str, list[Entry]]] = {}  # by an entry's name and the task, the rivals that were asked the same
    differences: dict[str, dict[str, Difference]] = {}
    for entry in entries:
        of_entry, conditions = rivals[entry.name], row_of[entry].conditions
        same[entry.name] = {}
        for task, cell in entry.cells.items():
            sets = {rival: len(common(cell.sets, rival.cells[task].sets)) for rival in of_entry if task in rival.cells}
            order = sorted(sets, key=lambda rival: (row_of[rival].conditions != conditions, -sets[rival]))
            same[entry.name][task] = [rival for rival in order if sets[rival]]
        firsts = {task: of_task[0] for task, of_task in same[entry.name].items() if of_task}
        differences[entry.name] = compare(
            entry.cells, {task: rival.cells[task] for task, rival in firsts.items()}, columns
        )
        alike = [rival for rival in of_entry if row_of[rival].conditions == conditions]
        if firsts:
            counts = Counter(rival.name for rival in firsts.values())
            baselines[entry.name] = max((rival.name for rival in of_entry), key=lambda name: counts[name])  # the first
        elif len(only := alike if len(alike) == 1 else of_entry) == 1:  # which of several would be a guess
            baselines[entry.name] = only[0].name
    cells: dict[str, Cells] = {entry.name: {} for entry in entries}
    for column in columns:
        of_column = [entry for entry in entries if column.name in entry.cells]
        against = [differences[entry.name].get(column.name) for entry in of_column]
        adjusted = statistics.holm([math.nan if difference is None else difference.p for difference in against])
        # Never under one rank: a transductive decision has read the other documents.
        inductive, transductive = ([e for e in of_column if e.is_transductive is has] for has in (False, True))
        ranks = _ranks(inductive, column, pairs) | _ranks(transductive, column, pairs)
        for entry, difference, p_holm in zip(of_column, against, adjusted, strict=True):
            cell, rank = entry.cells[column.name], ranks.get(entry.name)
            marks = list(cell.marks)
            if difference is not None:
                of_tasks = [same[entry.name][task] for task in column.weights]
                with_whom = list({of_task[0].name: of_task[0] for of_task in of_tasks}.values())
                is_only_choice = all(len(of_task) == 1 for of_task in of_tasks)
                if not is_only_choice or [rival.name for rival in with_whom] != [baselines[entry.name]]:
                    marks.append(f"Compared with {'; '.join(rival.label for rival in with_whom)}.")
                if difference.sets < cell.estimate.sets:
                    marks.append(f"Paired on {difference.sets} of {cell.estimate.sets} sets of demonstrations.")
            elif any(column.name in rival.cells for rival in rivals[entry.name]) and "aggregate only" not in marks:
                marks.append("unpaired")
            if "differs" in marks:  # of another prompt's answers, which other runs confirm
                marks = [mark for mark in marks if mark != "confirmed"]
            cells[entry.name][column.name] = replace(
                cell,
                difference=difference,
                p_holm=None if difference is None else p_holm,
                rank=rank,
                tied_with_best=rank is not None and rank[0] == 1,
                marks=tuple(marks),
            )
    # Cells stand in the order of the columns, and behind them those of tasks that are no columns.
    ordered = (cells[entry.name] | {**entry.cells, **cells[entry.name]} for entry in entries)
    return tuple(replace(entry, cells=of_row) for entry, of_row in zip(entries, ordered, strict=True)), baselines


def _rivals(
    entries: Sequence[Entry], row_of: Mapping[Entry, EntryRuns], baseline: str | None
) -> dict[str, list[Entry]]:
    """The entries that each entry may be compared with, by its name: all entries of the baseline on its checkpoint.

    Those of the same conditions come first, and among these the ones with fewer arguments. An entry under a decision
    rule is compared with the same runs without the rule.
    """
    methods = {row.method for row in row_of.values()}
    if baseline is not None and baseline not in methods:
        one = named(entries, baseline, "--baseline ")
        return {entry.name: [] if entry is one else [one] for entry in entries}
    if baseline is None:
        baseline = next((name for name in ("icl", "hf") if name in methods), "")

    def rivals(row: EntryRuns) -> list[Entry]:
        of_models = [entry for entry in entries if entry.rule is None]
        if row.rule is None:
            of_baseline = [entry for entry in of_models if row_of[entry].method == baseline != row.method]
        else:
            method = row.method, row.resolved
            of_baseline = [entry for entry in of_models if (row_of[entry].method, row_of[entry].resolved) == method]
        on_checkpoint = [entry for entry in of_baseline if row_of[entry].checkpoint == row.checkpoint]
        return sorted(
            on_checkpoint, key=lambda entry: (row_of[entry].conditions != row.conditions, len(entry.arguments))
        )

    return {entry.name: rivals(row_of[entry]) for entry in entries}


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
