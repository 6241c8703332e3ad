"""The numbers of a row on a task or a group."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

import numpy as np

from lm_eval_icl.results import statistics
from lm_eval_icl.results.board import (
    BoardCell,
    Column,
    PromptSet,
    TaskRun,
    grouped,
)
from lm_eval_icl.results.metrics import AGGREGATIONS, pseudo_values
from lm_eval_icl.results.records import Answers, at, count, number
from lm_eval_icl.results.statistics import Bounds, Estimate, Spread

_FEW_SETS = 5
_NO_SET = "no demonstrations"
_COLLAPSED, _FEW_DOCUMENTS = (
    0.95,
    10,
)  # the share of one prediction that gets a mark, from so many documents on
_NOT_DRAWN = ("first", "similar")  # ways to find demonstrations without chance
Values = Callable[[Answers], np.ndarray]
_ITEMS: Values = attrgetter("items")


def measured(units: Sequence[TaskRun], is_share: bool) -> BoardCell:
    """The numbers of a row on a task from its results there, by date; they are not yet compared with other rows."""
    answered = [unit for unit in units if unit.result.answers is not None]
    marks = [mark for unit in units for mark in unit.result.marks]

    def most(name: str, what: str = "documents") -> int:
        return max(count(at(unit.run.icl, name, unit.result.task, what)) or 0 for unit in units)

    lost, shortened, cut = most("left_out", "demonstrations"), most("left_out"), most("truncated")
    if lost:
        marks.append(
            f"{lost} demonstrations were left out of {shortened} documents' prompts, which were too long."
        )
    if cut:
        marks.append(
            f"{cut} documents were cut at their beginning: they do not fit even without demonstrations."
        )
    if copies := most("own_demonstrations"):
        marks.append(f"{copies} documents stand among their own demonstrations, with the answer.")
    cell = (
        _from_answers(answered, is_share, marks)
        if answered
        else BoardCell(_reported(units, is_share))
    )
    if not answered:
        marks.append("aggregate only")
    elif len(answered) < len(units):
        marks.append(
            f"{len(units) - len(answered)} of {len(units)} runs without samples are not counted."
        )
    expected = _expected(units, units[0].result.task)
    return replace(cell, marks=tuple(dict.fromkeys(marks)), left_out=lost, expected=expected)


def _expected(units: Iterable[TaskRun], column: str) -> float | None:
    """The paper's value of a column, if all runs give the same value; None for results under a decision rule."""
    values = [
        None if unit.result.rule else number(unit.run.study.expected.get(column)) for unit in units
    ]
    return values[0] if values.count(values[0]) == len(values) else None


def _from_answers(units: Sequence[TaskRun], is_share: bool, marks: list[str]) -> BoardCell:
    """The numbers of a row on a task from its samples. Marks about the samples are added to `marks`."""
    result, sets = units[0].result, _prompt_sets(units, marks)
    marks += ["few seeds"] * (1 < len(sets) < _FEW_SETS)
    orders_of = [
        u
        for s in sets
        if s.label != _NO_SET
        for u in grouped(s.answered, lambda u: u.run.format).values()
    ]
    by_set = [
        [unit.answers.predictions for unit in in_format]
        for in_format in orders_of
        if len(in_format) > 1
    ]
    are_known = all(order is not None for orders in by_set for order in orders)
    answers = [unit.answers for s in sets for unit in s.answered]
    one = one_answer(answers) if result.metric == "acc" else None
    return BoardCell(
        estimated(sets, result.aggregation, (0.0, 1.0) if is_share else None),
        sets=sets,
        sensitivity=statistics.order_sensitivity(np.array(orders).T for orders in by_set)
        if are_known
        else None,
        majority=None if one is None else float(one.mean()),
        collapsed={result.task: _collapsed(answers)},
    )


def one_answer(answers: Sequence[Answers]) -> np.ndarray | None:
    """(documents, 1) scores of always giving the most frequent right answer, if answers are known."""
    golds = answers[0].golds
    if golds is None or any(run.predictions is None for run in answers):
        return None
    options, counts = np.unique(golds, return_counts=True)
    is_right: np.ndarray = golds[:, None] == options[counts.argmax()]
    return is_right.astype(float)


def _collapsed(answers: Sequence[Answers]) -> tuple[int, int]:
    """With how many prompts nearly all predictions are one option, and of how many; (0, 0) if that is no fault."""

    def is_one(options: np.ndarray | None) -> bool:
        return options is not None and max(
            np.unique(options, return_counts=True)[1]
        ) >= _COLLAPSED * len(options)

    known = [one.predictions for one in answers if one.predictions is not None]
    enough = len(answers[0].items) >= _FEW_DOCUMENTS and not is_one(answers[0].golds)
    return (sum(bool(is_one(one)) for one in known), len(known)) if enough else (0, 0)


def collapse_marks(by_task: Mapping[str, tuple[int, int]]) -> tuple[str, ...]:
    """A mark that counts the prompts of `BoardCell.collapsed` over all tasks, and names the worst task."""
    collapsed, n = (sum(counts[place] for counts in by_task.values()) for place in (0, 1))
    if collapsed in (0, n):
        return ("collapsed",) * (collapsed > 0)
    text = f"With {collapsed} of {n} prompts it gives one answer to nearly all documents"
    if len(by_task) > 1:
        worst = max(by_task, key=lambda task: by_task[task][0] / max(by_task[task][1], 1))
        text += ", on {} with {} of its {}".format(worst, *by_task[worst])
    return (f"{text}.",)


def _prompt_sets(units: Sequence[TaskRun], marks: list[str]) -> tuple[PromptSet, ...]:
    """The answers by set of demonstrations, and within a set by format and order. Marks about repeated runs are added
    to `marks`. A format changes the texts of the demonstrations, so the set in a format is found by its seed."""
    by_seed = {unit.run.seed: unit.answers.demonstrations for unit in units if not unit.run.format}
    orders: dict[str | None, list[TaskRun]] = {}
    # If a method sorts the demonstrations, the prompts are the same in all orders of a study.
    for first, *others in grouped(
        units, lambda unit: (unit.answers.prompts, unit.run.order)
    ).values():
        others = [
            unit for unit in others if unit.run.date != first.run.date
        ]  # of the same date, it is the same run
        if others:
            agree = all(
                np.array_equal(first.answers.items, unit.answers.items, equal_nan=True)
                for unit in others
            )
            marks.append("confirmed" if agree else "differs")
        texts, seed = first.answers.demonstrations, first.run.seed
        demonstrations = (
            by_seed.get(seed, f"seed {seed}") if first.run.format and texts is not None else texts
        )
        orders.setdefault(demonstrations, []).append(first)
    if "differs" in marks:  # then "confirmed" is only true of other prompts
        marks[:] = [mark for mark in marks if mark != "confirmed"]
    sets = []
    for demonstrations, answered in orders.items():
        answered.sort(key=lambda unit: (unit.run.format, unit.run.order))
        seeds = {unit.run.seed for unit in answered}
        seed = seeds.pop() if len(seeds) == 1 else None
        label = f"set {demonstrations[:6]}" if demonstrations and seed is None else f"seed {seed}"
        prompt_set = PromptSet(_NO_SET if demonstrations is None else label, tuple(answered))
        sets.append((-1 if seed is None else seed, prompt_set))
    return tuple(
        prompt_set
        for _, prompt_set in sorted(sets, key=lambda seeded: (seeded[0], seeded[1].label))
    )


def matrix(sets: Sequence[PromptSet], values: Values = _ITEMS) -> np.ndarray:
    """(documents, sets) scores, or (documents, sets, ...) other values of the answers: the mean over orders."""
    by_set = ([values(order.answers) for order in prompt_set.answered] for prompt_set in sets)
    return np.stack([np.mean(orders, axis=0) for orders in by_set], axis=1)


@dataclass(frozen=True)
class Scores:
    """What is compared of a cell: scores of documents, or pseudo-values of another metric."""

    values: np.ndarray  # (documents, sets)
    mean: float  # the metric
    bounds: Bounds | None


def scores_of(
    sets: Sequence[PromptSet], aggregation: str, bounds: Bounds | None, items: Values = _ITEMS
) -> Scores:
    """The scores of a cell. `bounds` are those of a metric that is a mean."""
    if aggregation == "mean":
        values = matrix(sets, items)
        return Scores(values, float(values.mean()), bounds)
    metric = AGGREGATIONS[aggregation]
    features = matrix(sets, lambda answers: metric.features(items(answers)))
    mean = float(metric.value(features.sum(axis=0)).mean())
    return Scores(pseudo_values(features, metric.value), mean, metric.bounds)


def estimated(
    sets: Sequence[PromptSet], aggregation: str, bounds: Bounds | None, items: Values = _ITEMS
) -> Estimate:
    """The mean over sets of a metric of the answers' items."""
    scores = scores_of(sets, aggregation, bounds, items)
    drawn = drawn_sets(sets)
    return statistics.estimate(
        scores.values, bounds=scores.bounds, mean=scores.mean, scope=statistics.scope_of(drawn)
    )


def drawn_sets(sets: Sequence[PromptSet]) -> int:
    """How many sets of demonstrations were drawn at random.

    0 if there are none, if each document has its own, or if the rows are fixed.
    """
    if len(sets) > 1:
        return len(sets)
    how = sets[0].answered[0].result.switches.get("demonstrations") or ""
    is_fixed = how.partition(":")[0] in _NOT_DRAWN or how.endswith(".json")
    return 0 if is_fixed or sets[0].label == _NO_SET else 1


def _reported(units: Sequence[TaskRun], is_share: bool) -> Estimate:
    """The estimate from lm-eval's own values and errors, if there are no samples. Seeds add their variance."""
    by_seed = grouped(units, lambda unit: unit.run.seed).values()
    values = [float(np.mean([unit.result.value for unit in same])) for same in by_seed]
    errors = [math.inf if unit.result.stderr is None else unit.result.stderr for unit in units]
    seed_variance = float(np.var(values, ddof=1)) / len(values) if len(values) > 1 else 0.0
    mean = float(np.mean(values))
    spread = Spread(float(np.mean(np.square(errors))) + seed_variance)
    bounds = (0.0, 1.0) if is_share else None
    documents = units[0].result.documents
    return Estimate(mean, mean, spread, documents, len(values), "reported", bounds)


def combined(cells: Mapping[str, BoardCell], units: Iterable[TaskRun], column: Column) -> BoardCell:
    """The numbers of a row on a group or the average, from its cells and its results (`units`) on all of its tasks."""
    parts, weights = [cells[task] for task in column.weights], list(column.weights.values())
    flips = [part.sensitivity for part in parts if part.sensitivity is not None]
    majorities = [part.majority for part in parts if part.majority is not None]
    n = len(parts)
    notes = (
        f"{task}: {m}" if m.endswith(".") else m
        for task in column.weights
        for m in cells[task].marks
    )
    return BoardCell(
        statistics.estimate_group([part.estimate for part in parts], weights, bounds=column.bounds),
        sensitivity=statistics.estimate_group(flips, weights, bounds=(0.0, 1.0))
        if len(flips) == n
        else None,
        marks=tuple(dict.fromkeys(notes)),
        left_out=sum(part.left_out for part in parts),
        majority=math.fsum(map(math.prod, zip(weights, majorities, strict=True)))
        if len(majorities) == n
        else None,
        collapsed={
            task: counts for task in column.weights for counts in cells[task].collapsed.values()
        },
        expected=_expected(units, column.name),
    )
