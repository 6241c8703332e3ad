"""The numbers of a row on a task or a group."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

import numpy as np

from lm_eval_icl.demonstrations.how import SELECTION_METHODS
from lm_eval_icl.results import statistics
from lm_eval_icl.results.board import (
    BoardCell,
    Column,
    PromptSet,
    TaskRun,
    grouped,
    results_in,
)
from lm_eval_icl.results.columns import is_share
from lm_eval_icl.results.metrics import AGGREGATIONS, pseudo_values
from lm_eval_icl.results.records import Answers, at, count, number
from lm_eval_icl.results.sets import NO_SET, drawing_seed, prompt_sets
from lm_eval_icl.results.statistics import Bounds, Estimate, Spread

_FEW_SETS = 5
_COLLAPSED = 0.95  # the share of one prediction that gets a mark
_COLLAPSIBLE = 10  # fewer documents may well get one answer
_FEW_DOCUMENTS = 30
SHARE = (0.0, 1.0)  # the bounds of a share
_NOT_DRAWN = ("first", "first_n", "similar")  # ways to find demonstrations without chance
_FOR_ALL = ("stratified", "random", *SELECTION_METHODS)  # ways that find one set for all documents
Values = Callable[[Answers], np.ndarray]
_ITEMS: Values = attrgetter("items")


def measured(units: Sequence[TaskRun]) -> BoardCell:
    """The numbers of a row on a task from its results there, which are sorted by date. They are
    not yet compared with other rows."""
    task = units[0].result.task
    marks: list[str] = []
    for unit in units:
        marks += unit.result.marks
    lost = _most(units, "left_out", "demonstrations")
    if lost:
        documents = _most(units, "left_out")
        marks.append(
            f"{lost} demonstrations were left out of {documents} documents' prompts, "
            "which were too long."
        )
    cut = _most(units, "truncated")
    if cut:
        marks.append(
            f"{cut} documents were cut at their beginning: "
            "they do not fit even without demonstrations."
        )
    copies = _most(units, "own_demonstrations")
    if copies:
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
    """The paper's value of a column, if all runs give the same value. None for results under a
    decision rule."""
    values = set()
    for unit in units:
        value = number(unit.run.study.expected.get(column))
        values.add(None if unit.result.rule else value)
    return values.pop() if len(values) == 1 else None


def _from_answers(units: Sequence[TaskRun]) -> BoardCell:
    """The numbers of a row on a task from its samples, and marks about its runs."""
    result = units[0].result
    sets, marks = prompt_sets(units)
    marks += _marks_of_sample(sets)
    answers = [unit.answers for unit in results_in(sets)]
    right = one_answer(answers) if result.metric == "acc" else None
    return BoardCell(
        estimated(sets, result.aggregation, SHARE if is_share(units) else None),
        sets=sets,
        sensitivity=sensitivity(sets),
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
    if len({prompt_set.label for prompt_set in sets}) < len(sets):
        marks.append("A seed has several sets of demonstrations: what it draws from has changed.")
    return marks


def sensitivity(sets: Sequence[PromptSet]) -> Estimate | None:
    """The order sensitivity over the sets that have several orders in one format; None if there
    are none, or if there are no options."""
    predictions = []
    for prompt_set in sets:
        in_formats = grouped(prompt_set.answered, lambda unit: unit.run.format)
        has_orders = prompt_set.answered[0].answers.demonstrations is not None
        for units in in_formats.values() if has_orders else ():
            orders = [unit.answers.predictions for unit in units]
            if any(options is None for options in orders):
                return None
            predictions.append(np.array(orders).T)
    return statistics.order_sensitivity(predictions)


def one_answer(answers: Sequence[Answers]) -> np.ndarray | None:
    """(documents, 1) scores of always giving the most frequent right answer; None if the answers
    are not known."""
    golds = answers[0].golds
    if golds is None or any(run.predictions is None for run in answers):
        return None
    options, counts = np.unique(golds, return_counts=True)
    is_right: np.ndarray = golds[:, None] == options[counts.argmax()]
    return is_right.astype(float)


def _collapsed(answers: Sequence[Answers]) -> tuple[int, int]:
    """(prompts under which nearly all predictions are one option, all prompts). (0, 0) if that is
    no fault."""
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
    """A mark that counts the prompts of `BoardCell.collapsed` over all tasks, and names the worst
    task."""
    collapsed = sum(prompts for prompts, _ in by_task.values())
    n = sum(of for _, of in by_task.values())
    if collapsed == 0:
        return ()
    if collapsed == n:
        return ("collapsed",)
    text = f"With {collapsed} of {n} prompts it gives one answer to nearly all documents"
    if len(by_task) > 1:
        shares = {task: prompts / max(of, 1) for task, (prompts, of) in by_task.items()}
        worst = max(shares, key=shares.__getitem__)
        prompts, of = by_task[worst]
        text += f", on {worst} with {prompts} of its {of}"
    return (f"{text}.",)


def matrix(sets: Sequence[PromptSet], values: Values = _ITEMS) -> np.ndarray:
    """(documents, sets) scores or other values of the answers: the mean over orders."""
    means = []
    for prompt_set in sets:
        orders = [values(unit.answers) for unit in prompt_set.answered]
        means.append(np.mean(orders, axis=0))
    return np.stack(means, axis=1)


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

    def value(answers: Answers) -> np.ndarray:
        return metric.value(metric.features(items(answers)).sum(axis=0, keepdims=True))

    def pseudo(answers: Answers) -> np.ndarray:
        return pseudo_values(metric.features(items(answers))[:, None], metric.value)[:, 0]

    return CellScores(matrix(sets, pseudo), float(matrix(sets, value).mean()), metric.bounds)


def estimated(
    sets: Sequence[PromptSet], aggregation: str, bounds: Bounds | None, items: Values = _ITEMS
) -> Estimate:
    """The mean over sets of a metric of the answers' items."""
    scores = scores_of(sets, aggregation, bounds, items)
    scope = statistics.scope_of(drawn_sets(sets))
    return statistics.estimate(scores.values, bounds=scores.bounds, mean=scores.mean, scope=scope)


def drawn_sets(sets: Sequence[PromptSet]) -> int:
    """How many sets of demonstrations were drawn at random, or had labels, a decision rule or a fit
    that were.

    0 if there are none, if each document has its own, or if the rows are fixed.
    """
    if len(sets) > 1:
        return len(sets)
    unit = sets[0].answered[0]
    how = unit.result.fields.switches["demonstrations"]
    name = how.partition(":")[0]
    is_fixed = name in _NOT_DRAWN or how.endswith(".json")
    # Texts look as if each had its own if queries have the delimiter too.
    is_fixed = is_fixed or (unit.answers.each_own and name not in _FOR_ALL)
    if "labels" in unit.result.fields.setting or drawing_seed(unit) is not None:
        is_fixed = False
    return 0 if is_fixed or sets[0].label == NO_SET else 1


def _reported(units: Sequence[TaskRun]) -> Estimate:
    """The estimate from lm-eval's own values and errors, if there are no samples. The variance of
    the seeds is added. An error of 0 does not show how documents vary: for a share, it is that of
    four more documents, of which two are right (Agresti and Coull 1998)."""
    bounds = SHARE if is_share(units) else None
    documents = units[0].result.documents
    by_seed = grouped(units, lambda unit: unit.run.seed).values()
    values = [float(np.mean([unit.result.value for unit in same_seed])) for same_seed in by_seed]
    errors = []
    for unit in units:
        error = unit.result.stderr or math.inf
        if unit.result.stderr == 0 and bounds and documents:
            share = (documents * unit.result.value + 2) / (documents + 4)
            error = math.sqrt(share * (1 - share) / (documents + 4))
        errors.append(error)
    n = len(values)
    by_seeds = ((float(np.var(values, ddof=1)) / n, n - 1),) if n > 1 else ()
    mean = float(np.mean(values))
    spread = Spread(float(np.mean(np.square(errors))), by_sets=by_seeds)
    return Estimate(mean, mean, spread, documents, n, "reported", bounds)


def combined(cells: Mapping[str, BoardCell], units: Sequence[TaskRun], column: Column) -> BoardCell:
    """The cell of a row on a group or the average, from its cells and its results (`units`) on all
    of its tasks."""
    parts = {task: cells[task] for task in column.weights}
    weights = list(column.weights.values())
    bounds = SHARE if is_share(units) else None
    marks = []
    collapsed: dict[str, tuple[int, int]] = {}
    for task, part in parts.items():
        marks += [f"{task}: {mark}" if mark.endswith(".") else mark for mark in part.marks]
        for prompts in part.collapsed.values():
            collapsed[task] = prompts
    flips = {task: part.sensitivity for task, part in parts.items() if part.sensitivity}
    if 0 < len(flips) < len(parts):
        marks.append(f"The order sensitivity is over {len(flips)} of {len(parts)} tasks.")
    flips_of_all = None
    if flips:
        of_flips = [column.weights[task] for task in flips]
        flips_of_all = statistics.estimate_group(list(flips.values()), of_flips, bounds=SHARE)
    estimates = [part.estimate for part in parts.values()]
    cell = BoardCell(
        statistics.estimate_group(estimates, weights, bounds=bounds),
        sensitivity=flips_of_all,
        marks=tuple(dict.fromkeys(marks)),
        left_out=sum(part.left_out for part in parts.values()),
        collapsed=collapsed,
        expected=_expected(units, column.name),
    )
    majorities = [part.majority for part in parts.values() if part.majority is not None]
    if len(majorities) < len(parts):
        return cell
    shares = [weight * score for weight, score in zip(weights, majorities, strict=True)]
    return replace(cell, majority=math.fsum(shares))
