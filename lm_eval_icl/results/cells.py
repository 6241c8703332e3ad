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
from lm_eval_icl.results.columns import is_share
from lm_eval_icl.results.metrics import AGGREGATIONS, pseudo_values
from lm_eval_icl.results.records import Answers, at, count, number
from lm_eval_icl.results.sets import NO_SET, orders_of, prompt_sets
from lm_eval_icl.results.statistics import Bounds, Estimate, Spread

_FEW_SETS = 5
_COLLAPSED = 0.95  # the share of one prediction that gets a mark
_COLLAPSIBLE = 10  # fewer documents may well get one answer
_FEW_DOCUMENTS = 30
SHARE = (0.0, 1.0)  # the bounds of a share
_NOT_DRAWN = ("first", "first_n", "similar")  # ways to find demonstrations without chance
Values = Callable[[Answers], np.ndarray]
_ITEMS: Values = attrgetter("items")


def measured(units: Sequence[TaskRun]) -> BoardCell:
    """The numbers of a row on a task from its results there, by date; they are not yet compared with other rows."""
    task = units[0].result.task
    marks = [mark for unit in units for mark in unit.result.marks]
    lost = _most(units, "left_out", "demonstrations")
    if lost:
        documents = _most(units, "left_out")
        marks.append(
            f"{lost} demonstrations were left out of {documents} documents' prompts, which were too long."
        )
    if cut := _most(units, "truncated"):
        marks.append(
            f"{cut} documents were cut at their beginning: they do not fit even without demonstrations."
        )
    if copies := _most(units, "own_demonstrations"):
        marks.append(f"{copies} documents stand among their own demonstrations, with the answer.")
    if units[0].result.answers is None:  # then no result of this cell has answers
        cell = BoardCell(_reported(units))
        marks.append("aggregate only")
    else:
        cell = _from_answers(units)
        marks += cell.marks
    expected = _expected(units, task)
    return replace(cell, marks=tuple(dict.fromkeys(marks)), left_out=lost, expected=expected)


def _most(units: Sequence[TaskRun], name: str, what: str = "documents") -> int:
    """The largest of the runs' counts for this task."""
    return max(count(at(unit.run.icl, name, unit.result.task, what)) or 0 for unit in units)


def _expected(units: Iterable[TaskRun], column: str) -> float | None:
    """The paper's value of a column, if all runs give the same value; None for results under a decision rule."""
    values = {
        None if unit.result.rule else number(unit.run.study.expected.get(column)) for unit in units
    }
    return values.pop() if len(values) == 1 else None


def _from_answers(units: Sequence[TaskRun]) -> BoardCell:
    """The numbers of a row on a task from its samples, and marks about its runs."""
    result = units[0].result
    sets, marks = prompt_sets(units)
    marks += _marks_of_sample(sets)
    answers = [unit.answers for prompt_set in sets for unit in prompt_set.answered]
    right = one_answer(answers) if result.metric == "acc" else None
    return BoardCell(
        estimated(sets, result.aggregation, SHARE if is_share(units) else None),
        sets=sets,
        sensitivity=_sensitivity(sets),
        marks=tuple(marks),
        majority=None if right is None else float(right.mean()),
        collapsed={result.task: _collapsed(answers)},
    )


def _marks_of_sample(sets: Sequence[PromptSet]) -> list[str]:
    """What the documents and the sets of demonstrations of a cell cannot show."""
    answers = sets[0].answered[0].answers
    documents = len(answers.items)
    marks = []
    if answers.golds is not None and documents > 1 and len(np.unique(answers.golds)) == 1:
        marks.append("one label")
    if documents < _FEW_DOCUMENTS:
        marks.append("few documents")
    if 1 < len(sets) < _FEW_SETS:
        marks.append("few seeds")
    elif drawn_sets(sets) == 1:
        marks.append("one set")
    return marks


def _sensitivity(sets: Sequence[PromptSet]) -> Estimate | None:
    """The order sensitivity over the sets that have several orders; None if there is none."""
    predictions = []
    for orders in orders_of(sets):
        in_order = [answers.predictions for answers in orders]
        if any(options is None for options in in_order):
            return None
        predictions.append(np.array(in_order).T)
    return statistics.order_sensitivity(predictions)


def one_answer(answers: Sequence[Answers]) -> np.ndarray | None:
    """(documents, 1) scores of always giving the most frequent right answer, if answers are known."""
    golds = answers[0].golds
    if golds is None or any(run.predictions is None for run in answers):
        return None
    options, counts = np.unique(golds, return_counts=True)
    is_right: np.ndarray = golds[:, None] == options[counts.argmax()]
    return is_right.astype(float)


def _collapsed(answers: Sequence[Answers]) -> tuple[int, int]:
    """(collapsed prompts, all prompts): nearly all predictions are one option. (0, 0) if that is no fault."""
    if len(answers[0].items) < _COLLAPSIBLE or _is_one(answers[0].golds):
        return 0, 0
    known = [run.predictions for run in answers if run.predictions is not None]
    return sum(map(_is_one, known)), len(known)


def _is_one(options: np.ndarray | None) -> bool:
    """Whether nearly all options are the same."""
    if options is None:
        return False
    most = np.unique(options, return_counts=True)[1].max()
    return bool(most >= _COLLAPSED * len(options))


def collapse_marks(by_task: Mapping[str, tuple[int, int]]) -> tuple[str, ...]:
    """A mark that counts the prompts of `BoardCell.collapsed` over all tasks, and names the worst task."""
    collapsed = sum(prompts for prompts, _ in by_task.values())
    n = sum(of for _, of in by_task.values())
    if collapsed == 0:
        return ()
    if collapsed == n:
        return ("collapsed",)
    text = f"With {collapsed} of {n} prompts it gives one answer to nearly all documents"
    if len(by_task) > 1:
        worst = max(by_task, key=lambda task: by_task[task][0] / max(by_task[task][1], 1))
        prompts, of = by_task[worst]
        text += f", on {worst} with {prompts} of its {of}"
    return (f"{text}.",)


def matrix(sets: Sequence[PromptSet], values: Values = _ITEMS) -> np.ndarray:
    """(documents, sets) scores, or (documents, sets, ...) other values of the answers: the mean over orders."""
    by_set = ([values(order.answers) for order in prompt_set.answered] for prompt_set in sets)
    return np.stack([np.mean(orders, axis=0) for orders in by_set], axis=1)


@dataclass(frozen=True)
class CellScores:
    """What is compared of a cell: scores of documents, or pseudo-values of another metric."""

    values: np.ndarray  # (documents, sets)
    mean: float  # the metric
    bounds: Bounds | None


def scores_of(
    sets: Sequence[PromptSet], aggregation: str, bounds: Bounds | None, items: Values = _ITEMS
) -> CellScores:
    """The scores of a cell. `bounds` are those of a metric that is a mean."""
    if aggregation == "mean":
        values = matrix(sets, items)
        return CellScores(values, float(values.mean()), bounds)
    metric = AGGREGATIONS[aggregation]
    features = matrix(sets, lambda answers: metric.features(items(answers)))
    mean = float(metric.value(features.sum(axis=0)).mean())
    return CellScores(pseudo_values(features, metric.value), mean, metric.bounds)


def estimated(
    sets: Sequence[PromptSet], aggregation: str, bounds: Bounds | None, items: Values = _ITEMS
) -> Estimate:
    """The mean over sets of a metric of the answers' items."""
    scores = scores_of(sets, aggregation, bounds, items)
    scope = statistics.scope_of(drawn_sets(sets))
    return statistics.estimate(scores.values, bounds=scores.bounds, mean=scores.mean, scope=scope)


def drawn_sets(sets: Sequence[PromptSet]) -> int:
    """How many sets of demonstrations were drawn at random.

    0 if there are none, if each document has its own, or if the rows are fixed.
    """
    if len(sets) > 1:
        return len(sets)
    unit = sets[0].answered[0]
    how = unit.result.fields.switches["demonstrations"]
    is_fixed = how.partition(":")[0] in _NOT_DRAWN or how.endswith(".json")
    if is_fixed or unit.answers.each_own or sets[0].label == NO_SET:
        return 0
    return 1


def _reported(units: Sequence[TaskRun]) -> Estimate:
    """The estimate from lm-eval's own values and errors, if there are no samples. Seeds add their variance."""
    by_seed = grouped(units, lambda unit: unit.run.seed).values()
    values = [float(np.mean([unit.result.value for unit in same_seed])) for same_seed in by_seed]
    errors = [math.inf if unit.result.stderr is None else unit.result.stderr for unit in units]
    seed_variance = float(np.var(values, ddof=1)) / len(values) if len(values) > 1 else 0.0
    mean = float(np.mean(values))
    spread = Spread(float(np.mean(np.square(errors))) + seed_variance)
    bounds = SHARE if is_share(units) else None
    documents = units[0].result.documents
    return Estimate(mean, mean, spread, documents, len(values), "reported", bounds)


def combined(cells: Mapping[str, BoardCell], units: Sequence[TaskRun], column: Column) -> BoardCell:
    """The cell of a row on a group or the average, from its cells and its results (`units`) on all of its tasks."""
    parts = {task: cells[task] for task in column.weights}
    bounds = SHARE if is_share(units) else None
    flips = {task: part.sensitivity for task, part in parts.items() if part.sensitivity}
    majorities = [part.majority for part in parts.values() if part.majority is not None]
    weights = list(column.weights.values())
    marks = []
    for task, part in parts.items():
        marks += [f"{task}: {mark}" if mark.endswith(".") else mark for mark in part.marks]
    if 0 < len(flips) < len(parts):
        marks.append(f"The order sensitivity is over {len(flips)} of {len(parts)} tasks.")
    collapsed: dict[str, tuple[int, int]] = {}
    for task, part in parts.items():
        for prompts in part.collapsed.values():
            collapsed[task] = prompts
    sensitivity = None
    if flips:
        of_flips = [column.weights[task] for task in flips]
        sensitivity = statistics.estimate_group(list(flips.values()), of_flips, bounds=SHARE)
    estimates = [part.estimate for part in parts.values()]
    cell = BoardCell(
        statistics.estimate_group(estimates, weights, bounds=bounds),
        sensitivity=sensitivity,
        marks=tuple(dict.fromkeys(marks)),
        left_out=sum(part.left_out for part in parts.values()),
        collapsed=collapsed,
        expected=_expected(units, column.name),
    )
    if len(majorities) < len(parts):
        return cell
    shares = [weight * score for weight, score in zip(weights, majorities, strict=True)]
    return replace(cell, majority=math.fsum(shares))
