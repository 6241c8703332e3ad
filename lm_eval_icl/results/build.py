"""Runs into a board: what each row has on each column, and how rows differ."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any, TypeVar

import numpy as np

from lm_eval_icl.errors import InputError
from lm_eval_icl.results import entries, statistics
from lm_eval_icl.results.board import AVERAGE, Answered, Board, Cell, Column, Entry, Pairs, PromptSet
from lm_eval_icl.results.commands import commands
from lm_eval_icl.results.entries import Row, Unit, grouped
from lm_eval_icl.results.records import Answers, LeftOut, Run, TaskResult
from lm_eval_icl.results.statistics import Bounds, Difference, Estimate
from lm_eval_icl.results.summary import summarize

OneOf = TypeVar("OneOf", bound=Any)  # an entry, or a draft of one

_FEW_SETS = 5
_COLLAPSED, _FEW_DOCUMENTS = 0.95, 10  # the share of one answer, and of how many documents it says something
_NORMAL = 1.96  # half of a 95% interval, in standard errors
_HUGE = 1e100  # what is larger is no result, and its square may be no number
# Metrics between 0 and 1, which are shown as percent. Of some tasks, metrics of these names are of another range.
_SHARES = {"acc", "acc_norm", "acc_bytes", "acc_mutual_info", "exact_match", "em", "f1", "quasi_exact_match", "metaicl"}
_LISTED = 20  # names in a message


def build(
    runs: Sequence[Run],
    left_out: Sequence[LeftOut] = (),
    baseline: str | None = None,
    tasks: Sequence[str] | None = None,
    groups: Mapping[str, Mapping[str, float]] | None = None,
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
    kept = {task for column in columns for task in column.weights}
    drafts = [_Draft(row) for row in entries.rows(runs) if kept & row.units.keys()]
    for draft in drafts:
        draft.measure(columns)
    drafts = [draft for draft in drafts if draft.estimates]
    if not drafts:
        raise InputError("no result of these tasks that can be used was found.")
    _name(drafts)
    if groups is None:
        columns = _with_average(columns, drafts)
    for draft in drafts:
        draft.combine(columns)
    drafts.sort(key=lambda draft: (draft.place(columns), draft.label, draft.name))
    pairs = {
        (first.name, second.name): found
        for first, second in itertools.combinations(drafts, 2)
        if (found := _differences(first.sets, second.sets, columns))
    }
    rivals = _rivals(drafts, baseline)
    baselines = _baselines(drafts, rivals)
    finished = _finish(drafts, columns, pairs, rivals, baselines)
    files = len({run.path for run in runs} | {each.path for each in left_out})
    summary = summarize(finished, columns, pairs, baselines, baseline)
    return Board(columns, finished, baselines, pairs, summary, tuple(left_out), files)


def compare(first: Entry, second: Entry, columns: Sequence[Column]) -> dict[str, Difference]:
    """The first less the second, by column; columns on which they are not paired are missing."""
    mine, theirs = ({name: cell.sets for name, cell in entry.cells.items() if cell.sets} for entry in (first, second))
    return _differences(mine, theirs, columns)


def matrix(sets: Sequence[PromptSet]) -> np.ndarray:
    """(documents, sets) scores: of each set the mean over its orders."""
    return np.stack([np.mean([_of(each).items for each in one.answered], axis=0) for one in sets], axis=1)


# ---------------------------------------------------------------------------------------------------------------
# Columns.


def _usable(runs: Sequence[Run], left_out: list[LeftOut]) -> list[Run]:
    """The runs without results that cannot stand in a column with others; of those, it is said why."""
    kinds: dict[str, Counter[tuple[object, ...]]] = defaultdict(Counter)
    for run in runs:
        for task, result in run.tasks.items():
            kinds[task][_kind(result)] += 1
    most = {task: of.most_common(1)[0][0] for task, of in kinds.items()}  # of equals, the first
    kept = []
    for run in runs:
        tasks = {}
        for task, result in run.tasks.items():
            numbers = [result.value, *([] if result.stderr is None else [result.stderr])]
            if result.answers is not None:
                numbers += [float(np.nanmax(np.abs(result.answers.items), initial=0))]
            if task == AVERAGE:
                why = "it is called as the average over tasks is"
            elif not all(abs(number) < _HUGE for number in numbers):
                why = f"a number that is not finite, or more than {_HUGE:g}, is no result"
            elif result.metric.startswith(("acc", "exact_match")) and not 0 <= result.value <= 1:
                why = f"its {result.metric} of {result.value:g} is not between 0 and 1"
            elif _kind(result) != most[task]:
                metric, of_filter, *_ = most[task]
                why = f"its metric is {result.metric} ({result.filter}), most runs have {metric} ({of_filter})"
            else:
                tasks[task] = result
                continue
            left_out.append(LeftOut(run.path, f"task {task!r} is left out: {why}."))
        if tasks:
            kept.append(run if len(tasks) == len(run.tasks) else replace(run, tasks=tasks))
    return kept


def _kind(result: TaskResult) -> tuple[object, ...]:
    return result.metric, result.filter, result.aggregation, result.higher_is_better


def _columns(
    runs: Sequence[Run], tasks: Sequence[str] | None, groups: Mapping[str, Mapping[str, float]] | None
) -> tuple[Column, ...]:
    """A column for each group, then each task, in the order in which they come up."""
    if not runs:
        raise InputError("no results of lm-eval that can be used were found.")
    results: dict[str, list[TaskResult]] = defaultdict(list)
    for run in runs:
        for result in run.tasks.values():
            results[result.task].append(result)
    named_groups = (
        [group for run in reversed(runs) for group in run.groups.items() if group[0] != AVERAGE]
        if groups is None
        else groups.items()
    )
    weights = {name: dict(of) for name, of in named_groups if of and of.keys() <= results.keys()}
    weights |= {task: {task: 1.0} for task in sorted(results)}
    if tasks is not None:
        for name in tasks:
            if name not in weights:
                there = ", ".join(entries.shown(name) for name in sorted(weights)[:_LISTED])
                more = f" and {len(weights) - _LISTED} more" if len(weights) > _LISTED else ""
                raise InputError(f"--tasks: no result of {name!r}; there are {there}{more}.")
        weights = {name: weights[name] for name in tasks}
    found = []
    for name, of in weights.items():
        every = [result for task in of for result in results[task]]
        first = every[0]
        if len({(result.metric, result.higher_is_better) for result in every}) == 1:  # else there is no mean
            percent = first.metric in _SHARES and all(0 <= result.value <= 1 for result in every)
            kind = "task" if name in results else "average" if name == AVERAGE else "group"
            found.append(Column(name, kind, first.metric, percent, first.higher_is_better, of))
    if not found:
        raise InputError(
            f"--tasks {','.join(tasks or ())}: the tasks have different metrics, of which there is no mean."
        )
    return tuple(sorted(found, key=lambda column: ("average", "group", "task").index(column.kind)))


def _with_average(columns: tuple[Column, ...], drafts: Sequence[_Draft]) -> tuple[Column, ...]:
    """The columns with the average in front, if there are several tasks of one metric.

    It is over the tasks that at least half of the rows have: else one row with a task of its own would take the average
    from all others.
    """
    tasks = [column for column in columns if column.kind == "task" and column.percent and column.higher_is_better]
    often = [column for column in tasks if 2 * sum(column.name in draft.estimates for draft in drafts) >= len(drafts)]
    groups = [column for column in columns if column.kind == "group"]
    even = {column.name: 1 / len(often) for column in often}
    has_all = any(all(column.name in draft.estimates for column in often) for draft in drafts)
    if len(often) < 2 or not has_all or any(_same(column.weights, even) for column in groups):
        return columns
    metrics = {column.metric for column in often}
    return Column(AVERAGE, "average", metrics.pop() if len(metrics) == 1 else "", True, True, even), *columns


def _same(first: Mapping[str, float], second: Mapping[str, float]) -> bool:
    return first.keys() == second.keys() and all(abs(first[task] - second[task]) < 1e-9 for task in first)


# ---------------------------------------------------------------------------------------------------------------
# A row's own numbers.


@dataclass(eq=False)
class _Draft:
    """An entry that is being made."""

    row: Row
    name: str = ""
    checkpoint: str = ""
    details: str = ""
    method: str = ""
    arguments: str = ""
    sets: dict[str, tuple[PromptSet, ...]] = field(default_factory=dict)
    estimates: dict[str, Estimate] = field(default_factory=dict)
    sensitivities: dict[str, Estimate] = field(default_factory=dict)
    corrected: dict[str, float] = field(default_factory=dict)
    marks: dict[str, tuple[str, ...]] = field(default_factory=dict)
    left_out: dict[str, int] = field(default_factory=dict)
    predicted: dict[str, dict[str, float]] = field(default_factory=dict)
    majorities: dict[str, float] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """As that of the `Entry`."""
        return ", ".join([" ".join(filter(None, [self.method, self.arguments])), *self.row.said])

    def measure(self, columns: Sequence[Column]) -> None:
        """Its numbers on tasks."""
        for task in dict.fromkeys(task for column in columns for task in column.weights):
            if not (units := self.row.units.get(task)):
                continue
            answered = [unit for unit in units if unit.result.answers is not None]
            marks = [mark for unit in units for mark in unit.result.marks] + entries.varied(units)
            bounds = (0.0, 1.0) if any(column.percent for column in columns if task in column.weights) else None
            if not (answered and self._measure_answers(task, answered, bounds, marks)):
                self.estimates[task] = _reported(units, bounds)
                marks.append("aggregate only")
            elif len(answered) < len(units):
                marks.append(f"{len(units) - len(answered)} of {len(units)} runs without samples are not counted")
            self.marks[task] = tuple(dict.fromkeys(marks))
            self.left_out[task] = max(map(entries.left_out, units))

    def _measure_answers(self, task: str, units: Sequence[Unit], bounds: Bounds | None, marks: list[str]) -> bool:
        """Whether there are numbers: some metrics are no function of sums over documents."""
        of = statistics.AGGREGATIONS.get(units[0].result.aggregation)
        if of is None:
            return False
        sets = _prompt_sets(units, marks)
        drawn = _answers(sets[0]).demonstrations is not None
        try:
            if units[0].result.aggregation == "mean":
                estimate = statistics.estimate(matrix(sets), drawn=drawn, bounds=bounds)
            else:
                estimate = statistics.bootstrap(_sums(sets), of.value, drawn=drawn, bounds=of.bounds)
        except ValueError as error:
            marks.append(f"its samples are not used: {error}")
            return False
        if not math.isfinite(estimate.mean) or math.isnan(estimate.error):
            marks.append("its samples are not used: some of them alone have no such metric.")
            return False
        self.sets[task], self.estimates[task] = sets, estimate
        if drawn and 1 < len(sets) < _FEW_SETS:
            marks.append("few seeds")
        predictions = [[_of(each).predictions for each in one.answered] for one in sets if len(one.answered) > 1]
        if drawn and not any(order is None for orders in predictions for order in orders):
            of_orders = statistics.order_sensitivity(np.array(orders).T for orders in predictions)
            if of_orders is not None:
                self.sensitivities[task] = of_orders
        self._count(task, units[0], [_of(each) for one in sets for each in one.answered], marks)
        chance = _answers(sets[0]).chance
        if chance is not None and chance < 1 and units[0].result.metric == "acc":
            self.corrected[task] = (estimate.mean - chance) / (1 - chance)
        return True

    def _count(self, task: str, first: Unit, answers: Sequence[Answers], marks: list[str]) -> None:
        """What was predicted how often, and whether it was one answer for all documents though others are right."""
        predictions = [each.predictions for each in answers if each.predictions is not None]
        if len(predictions) < len(answers):
            return
        names = dict(enumerate(_options(first)))
        numbers, counts = np.unique(np.concatenate(predictions), return_counts=True)
        shares = dict(zip(numbers.tolist(), (counts / counts.sum()).tolist(), strict=True))
        self.predicted[task] = {names.get(n, f"option {n}"): shares.get(n, 0.0) for n in sorted({*names, *shares})}

        def most(of: np.ndarray) -> float:
            """The share of the most frequent answer."""
            return float(np.unique(of, return_counts=True)[1].max() / len(of))

        golds = answers[0].golds
        majority = None if golds is None else most(golds)
        if majority is not None and first.result.metric == "acc":
            self.majorities[task] = majority
        if len(predictions[0]) < _FEW_DOCUMENTS or (majority is not None and majority >= _COLLAPSED):
            return
        collapsed = sum(most(each) >= _COLLAPSED for each in predictions)
        if collapsed == len(predictions):
            marks.append("collapsed")
        elif collapsed:
            marks.append(f"With {collapsed} of {len(predictions)} prompts it gives one answer to nearly all documents.")

    def combine(self, columns: Sequence[Column]) -> None:
        """Its numbers on groups and the average, of those whose tasks it has all."""
        for column in columns:
            tasks, weights = list(column.weights), list(column.weights.values())
            if column.kind == "task" or not self.estimates.keys() >= column.weights.keys():
                continue
            of_tasks = [self.estimates[task] for task in tasks]
            bounds = (0.0, 1.0) if column.percent else None
            self.estimates[column.name] = statistics.estimate_group(of_tasks, weights, bounds=bounds)
            if self.sensitivities.keys() >= column.weights.keys():
                parts = [self.sensitivities[task] for task in tasks]
                self.sensitivities[column.name] = statistics.estimate_group(parts, weights, bounds=(0.0, 1.0))
            if self.corrected.keys() >= column.weights.keys():
                self.corrected[column.name] = math.fsum(
                    weight * self.corrected[task] for task, weight in column.weights.items()
                )
            if self.majorities.keys() >= column.weights.keys():
                self.majorities[column.name] = math.fsum(
                    weight * self.majorities[task] for task, weight in column.weights.items()
                )
            self.marks[column.name] = tuple(dict.fromkeys(mark for task in tasks for mark in self.marks[task]))
            self.left_out[column.name] = sum(self.left_out[task] for task in tasks)

    def place(self, columns: Sequence[Column]) -> tuple[int, float]:
        """What rows are sorted by: the first column that they have, the best first."""
        for number, column in enumerate(columns):
            if column.name in self.estimates:
                mean = self.estimates[column.name].mean
                return number, -mean if column.higher_is_better else mean
        return len(columns), 0.0


def _options(unit: Unit) -> list[str]:
    """What a task's options are called, if all documents have the same."""
    configs = unit.run.results.get("configs")
    config = configs.get(unit.result.task) if isinstance(configs, dict) else None
    found = config.get("doc_to_choice") if isinstance(config, dict) else None
    names = [entries.shown(name) for name in found if isinstance(name, str)] if isinstance(found, list) else []
    return names if len(set(names)) == len(found or ()) else []


def _of(answered: Answered) -> Answers:
    assert answered.result.answers is not None
    return answered.result.answers


def _answers(one: PromptSet) -> Answers:
    return _of(one.answered[0])


def _prompts(answers: Answers) -> tuple[str, int]:
    """What was asked. The number of documents is there as a digest may be a stranger's claim."""
    return answers.prompts, len(answers.items)


def _prompt_sets(units: Sequence[Unit], marks: list[str]) -> tuple[PromptSet, ...]:
    """The answers by set of demonstrations, and in it by order. What is said of repeated runs is added to `marks`.

    Args:
        units: with answers, by date.
    """
    found: dict[str | None, list[Answered]] = {}
    answers = [(unit, unit.result.answers) for unit in units if unit.result.answers is not None]
    # Where a method sorts the demonstrations, the prompts of a study's orders are the same.
    for same in grouped(answers, lambda each: (_prompts(each[1]), each[0].run.order)).values():
        (first, counted), *others = same
        if others:
            agree = all(np.array_equal(counted.items, of.items, equal_nan=True) for _, of in others)
            marks.append("confirmed" if agree else "differs")
        repeats = tuple(unit.run for unit, _ in others)
        answered = Answered(first.run, first.result, first.run.seed, first.run.order, repeats)
        found.setdefault(counted.demonstrations, []).append(answered)
    sets = []
    for demonstrations, some in found.items():
        some.sort(key=lambda each: each.order)
        seeds = {each.seed for each in some}
        seed = seeds.pop() if len(seeds) == 1 else None
        label = f"set {demonstrations[:6]}" if demonstrations and seed is None else f"seed {seed}"
        value = float(np.mean([each.result.value for each in some]))
        one = PromptSet("no demonstrations" if demonstrations is None else label, tuple(some), value)
        sets.append((-1 if seed is None else seed, one))
    return tuple(one for _, one in sorted(sets, key=lambda each: (each[0], each[1].label)))


def _reported(units: Sequence[Unit], bounds: Bounds | None) -> Estimate:
    """What lm-eval's results say where there are no samples: errors over documents, and over several seeds.

    The parts cannot be told apart without samples, so that the interval is rather too wide than too narrow.

    Args:
        units: by date; of runs with one seed and order, the first counts.
    """
    results = [same[0].result for same in grouped(units, lambda unit: (unit.run.seed, unit.run.order)).values()]
    seeds = [[unit.result.value for unit in same] for same in grouped(units, lambda unit: unit.run.seed).values()]
    values = [float(np.mean(each)) for each in seeds]
    errors = [math.inf if result.stderr is None else result.stderr for result in results]
    of_seeds = float(np.var(values, ddof=1)) / len(values) if len(values) > 1 else 0.0
    mean, error = float(np.mean(values)), math.sqrt(float(np.mean(np.square(errors))) + of_seeds)
    low, high = mean - _NORMAL * error, mean + _NORMAL * error
    if bounds is not None:
        low, high = max(low, bounds[0]), min(high, bounds[1])
    documents = results[0].documents
    return Estimate(mean, low, high, error, math.inf, documents, len(values), None, None, "reported")


def _sums(sets: Sequence[PromptSet]) -> np.ndarray:
    """(documents, sets, k): what the metric's value is made of, the mean over the orders of each set."""
    features = statistics.AGGREGATIONS[sets[0].answered[0].result.aggregation].features
    return np.stack([np.mean([features(_of(each).items) for each in one.answered], axis=0) for one in sets], axis=1)


# ---------------------------------------------------------------------------------------------------------------
# Differences.


def common(first: Sequence[PromptSet], second: Sequence[PromptSet]) -> list[tuple[PromptSet, PromptSet]]:
    """The sets that both were asked, each with the orders that both were asked."""
    by_prompts = {_prompts(_of(each)): each for one in second for each in one.answered}
    found = []
    for one in first:
        of_first = ((each, by_prompts.get(_prompts(_of(each)))) for each in one.answered)
        both = [(mine, theirs) for mine, theirs in of_first if theirs is not None]
        if both:
            mine, theirs = zip(*both, strict=True)
            found.append((replace(one, answered=mine), replace(one, answered=theirs)))
    return found


def _difference(
    first: Sequence[PromptSet], second: Sequence[PromptSet], bounds: Bounds | None = None
) -> Difference | None:
    """On one task; None if no prompt was put to both, or the metric has no value for those that were."""
    pairs = common(first, second)
    if not pairs:
        return None
    mine, theirs = ([pair[i] for pair in pairs] for i in (0, 1))
    one, other = mine[0].answered[0].result, theirs[0].answered[0].result
    if _kind(one) != _kind(other):
        return None
    drawn = _answers(mine[0]).demonstrations is not None
    try:
        if one.aggregation == "mean":
            return statistics.difference(matrix(mine), matrix(theirs), drawn=drawn, bounds=bounds)
        of = statistics.AGGREGATIONS[one.aggregation]
        found = statistics.bootstrap_difference(_sums(mine), _sums(theirs), of.value, drawn=drawn, bounds=of.bounds)
        return None if math.isnan(found.p) else found
    except ValueError:
        return None


def _differences(
    first: Mapping[str, Sequence[PromptSet]], second: Mapping[str, Sequence[PromptSet]], columns: Sequence[Column]
) -> dict[str, Difference]:
    """By column, of those on which the two are paired."""
    of_tasks = {}
    for column in columns:
        bounds = (0.0, 1.0) if column.percent else None
        for task in column.weights:
            if task in first and task in second and task not in of_tasks:
                of_tasks[task] = _difference(first[task], second[task], bounds)
    found = {}
    for column in columns:
        parts = [part for task in column.weights if (part := of_tasks.get(task)) is not None]
        if len(parts) == len(column.weights):
            bounds, weights = (0.0, 1.0) if column.percent else None, list(column.weights.values())
            of_group = column.kind != "task"
            found[column.name] = statistics.difference_group(parts, weights, bounds=bounds) if of_group else parts[0]
    return found


def _rivals(drafts: Sequence[_Draft], baseline: str | None) -> dict[str, list[_Draft]]:
    """By an entry's name, the rows that it may be compared with, on each task with one of them: all rows of the
    baseline on its checkpoint, those of the same conditions first, and of these those with fewer arguments."""
    methods = {draft.row.method for draft in drafts}
    if baseline is not None and baseline not in methods:
        one: _Draft = named(drafts, baseline, "--baseline ")
        return {draft.name: [one] for draft in drafts if draft is not one}
    if baseline is None:
        baseline = next((name for name in ("icl", "hf") if name in methods), "")

    of_baseline = [draft for draft in drafts if draft.row.method == baseline]

    def rivals(draft: _Draft) -> list[_Draft]:
        same = [each for each in of_baseline if each.row.checkpoint == draft.row.checkpoint]
        return sorted(same, key=lambda each: (each.row.conditions != draft.row.conditions, len(each.arguments)))

    return {draft.name: rivals(draft) for draft in drafts if draft not in of_baseline}


def _asked_the_same(draft: _Draft, rivals: Sequence[_Draft], task: str) -> list[_Draft]:
    """The rivals that were asked the same on a task, the one to compare with first."""
    mine = draft.sets.get(task, ())
    matching = [(each, len(common(mine, each.sets[task]))) for each in rivals if task in each.sets]

    def order(match: tuple[_Draft, int]) -> tuple[bool, int]:
        return match[0].row.conditions != draft.row.conditions, -match[1]

    return [each for each, sets in sorted(matching, key=order) if sets]


def _baselines(drafts: Sequence[_Draft], rivals: Mapping[str, Sequence[_Draft]]) -> dict[str, str]:
    """By an entry's name, the name of the row that it is compared with on most tasks; on none, of the only one of its
    conditions, or of all."""
    found = {}
    for draft in drafts:
        of = rivals.get(draft.name, ())
        tasks = Counter(same[0].name for task in draft.sets if (same := _asked_the_same(draft, of, task)))
        alike = [each for each in of if each.row.conditions == draft.row.conditions]
        if tasks:
            found[draft.name] = max((each.name for each in of), key=lambda each: tasks[each])  # of equals, the first
        elif len(only := alike if len(alike) == 1 else of) == 1:  # which of several would be a guess
            found[draft.name] = only[0].name
    return found


def named(found: Sequence[OneOf], name: str, what: str = "") -> OneOf:
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
        some = [entry for entry in found if key(entry) == name]
        if len(some) == 1:
            return some[0]
        if some:
            there = "; ".join(f"{entry.name}: {entry.label} on {entry.checkpoint}" for entry in some[:_LISTED])
            raise InputError(f"{what}{name}: several entries are called so. Give the name of one: {there}.")
    there = "; ".join(f"{entry.name}: {entry.label} on {entry.checkpoint}" for entry in found[:_LISTED])
    raise InputError(f"{what}{name}: there is no such entry. There are {there}.")


# ---------------------------------------------------------------------------------------------------------------
# The finished entries.


def _name(drafts: Sequence[_Draft]) -> None:
    """Names, and labels that say what rows differ in."""
    ends = {draft.row.checkpoint[0]: PurePath(draft.row.checkpoint[0]).name for draft in drafts}
    counts = Counter(ends.values())
    taken: set[str] = set()
    for draft in drafts:
        row = draft.row
        full, *details = row.checkpoint
        checkpoint = row.checkpoint if row.checkpoint[3] else row.checkpoint[:3]
        key = repr((checkpoint, row.method, row.resolved, row.conditions))
        while not draft.name or draft.name in taken:
            key += draft.name
            draft.name = hashlib.sha256(key.encode()).hexdigest()[:8]
        taken.add(draft.name)
        is_path = full.startswith((".", "/", "~")) or full.count("/") > 1
        draft.checkpoint = entries.shown((ends[full] if is_path and counts[ends[full]] == 1 else full) or "unnamed")
        same = [other.row.checkpoint[1:] for other in drafts if other.row.checkpoint[0] == full]
        differing = [part for i, part in enumerate(details) if any(other[i] != part for other in same)]
        draft.details = entries.shown(", ".join(filter(None, differing)))
        draft.method = entries.shown(row.method)
        draft.arguments = row.arguments
    for alike in grouped(drafts, lambda draft: (draft.checkpoint, draft.details, draft.label)).values():
        resolved = [json.loads(draft.row.resolved) for draft in alike]
        differing = sorted(
            {key for of in resolved for key in of if any(of[key] != other.get(key) for other in resolved)}
        )
        for draft, of in zip(alike, resolved, strict=True):
            more = [f"{key}={of[key]}" for key in differing if key in of]
            draft.arguments = entries.shown(", ".join(filter(None, [draft.arguments, *more])))


def _finish(
    drafts: Sequence[_Draft],
    columns: Sequence[Column],
    pairs: Pairs,
    rivals: Mapping[str, Sequence[_Draft]],
    baselines: Mapping[str, str],
) -> tuple[Entry, ...]:
    cells: dict[str, dict[str, Cell]] = {draft.name: {} for draft in drafts}
    for column in columns:
        there = [draft for draft in drafts if column.name in draft.estimates]
        differences: dict[str, Difference | None] = {}
        with_whom: dict[str, str] = {}
        for draft in there:
            of = rivals.get(draft.name, ())
            same = {task: _asked_the_same(draft, of, task) for task in column.weights}
            firsts = list({each[0].name: each[0] for each in same.values() if each}.values())
            if len(firsts) == 1 or not all(same.values()):
                found = _against(draft.name, firsts[0].name, column.name, pairs) if all(same.values()) else None
            else:  # other rows of the baseline on other tasks
                sets = {task: each[0].sets[task] for task, each in same.items()}
                found = _differences(draft.sets, sets, [column]).get(column.name)
            differences[draft.name] = found
            if found is not None and (
                [each.name for each in firsts] != [baselines[draft.name]]
                or any(len(each) > 1 for each in same.values())
            ):
                with_whom[draft.name] = f"Compared with {'; '.join(each.label for each in firsts)}."
        p = [math.nan if (found := differences[draft.name]) is None else found.p for draft in there]
        adjusted = dict(zip(differences, statistics.holm(p), strict=True))
        ranks = _ranks(there, column, pairs)
        for draft in there:
            name, marks = column.name, draft.marks[column.name]
            asked = any(name in each.estimates for each in rivals.get(draft.name, ()))
            found = differences[draft.name]
            marks += (with_whom[draft.name],) if draft.name in with_whom else ()
            if asked and found is None and "aggregate only" not in marks:
                marks = (*marks, "unpaired")
            if found is not None and found.sets < draft.estimates[name].sets:
                marks = (*marks, f"Paired on {found.sets} of {draft.estimates[name].sets} sets of demonstrations.")
            if "differs" in marks:  # of another prompt's answers, which other runs confirm
                marks = tuple(mark for mark in marks if mark != "confirmed")
            cells[draft.name][name] = Cell(
                estimate=draft.estimates[name],
                difference=differences[draft.name],
                p_holm=None if differences[draft.name] is None else adjusted[draft.name],
                rank=ranks.get(draft.name),
                tied_with_best=draft.name in ranks and ranks[draft.name][0] == 1,
                sets=draft.sets.get(name, ()),
                sensitivity=draft.sensitivities.get(name),
                corrected=draft.corrected.get(name),
                marks=marks,
                left_out=draft.left_out[name],
                predicted=draft.predicted.get(name, {}),
                majority=draft.majorities.get(name),
                expected=_expected(draft.row, column),
            )
    finished = []
    for draft in drafts:
        runs = draft.row.runs
        tokens, seconds, shared = entries.costs(runs)
        finished.append(
            Entry(
                name=draft.name,
                checkpoint=draft.checkpoint,
                details=draft.details,
                method=draft.method,
                arguments=draft.arguments,
                conditions=", ".join(draft.row.said),
                runs=runs,
                cells=cells[draft.name],
                parameters=_parameters(runs),
                tokens=tokens,
                seconds=seconds,
                command=commands(runs),
                shared=shared,
            )
        )
    return tuple(finished)


def _expected(row: Row, column: Column) -> float | None:
    """The paper's value, where the studies of all runs say the same."""
    runs = [unit.run for task in column.weights for unit in row.units[task]]
    values = {(entries.study(run).get("expected") or {}).get(column.name) for run in runs}
    return values.pop() if len(values) == 1 else None


def _against(name: str, other: str | None, column: str, pairs: Pairs) -> Difference | None:
    """The difference of two entries on a column, whichever of them is further up."""
    if other is None:
        return None
    if (found := pairs.get((name, other), {}).get(column)) is not None:
        return found
    if (found := pairs.get((other, name), {}).get(column)) is not None:
        return _reversed(found)
    return None


def _reversed(of: Difference) -> Difference:
    """The second less the first."""
    mean, low, high = (0.0 - value for value in (of.mean, of.high, of.low))  # never -0.0
    return replace(of, mean=mean, low=low, high=high, better=of.worse, worse=of.better)


def _ranks(drafts: Sequence[_Draft], column: Column, pairs: Pairs) -> dict[str, tuple[int, int]]:
    """The range of ranks of each entry on a column; of those that are paired with another."""
    p = np.full((len(drafts), len(drafts)), math.nan)
    paired = set()
    means = [draft.estimates[column.name].mean for draft in drafts]
    for (i, first), (j, second) in itertools.combinations(enumerate(drafts), 2):
        if (found := _against(first.name, second.name, column.name, pairs)) is not None:
            paired |= {first.name, second.name}
            # On the prompts that both were asked the other may be better than over all that each was asked.
            p[i, j] = p[j, i] = found.p if found.mean * (means[i] - means[j]) >= 0 else 1.0
    sign = 1 if column.higher_is_better else -1
    ranges = statistics.rank_ranges([sign * mean for mean in means], p)
    return {draft.name: ranks for draft, ranks in zip(drafts, ranges, strict=True) if draft.name in paired}


def _parameters(runs: Iterable[Run]) -> int | None:
    found = [run.results["config"].get("model_num_parameters") for run in runs]
    known = type(found[0]) is int and 0 < found[0] < 2**53 and all(number == found[0] for number in found)
    return found[0] if known else None
