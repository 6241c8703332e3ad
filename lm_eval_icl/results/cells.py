"""What a row has on a task or a group, and how two rows differ there."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from lm_eval_icl.results import statistics
from lm_eval_icl.results.aggregations import AGGREGATIONS, bootstrap, bootstrap_difference
from lm_eval_icl.results.board import BoardCell, Column, PromptSet, TaskRun, grouped, shown
from lm_eval_icl.results.records import Answers, TaskResult, at, count, number
from lm_eval_icl.results.statistics import Difference, Estimate
from lm_eval_icl.results.tasks import options

_FEW_SETS = 5
_COLLAPSED, _FEW_DOCUMENTS = 0.95, 10  # the share of one answer, and of how many documents it says something
_NORMAL = 1.96  # half of a 95% interval, in standard errors


def measured(units: Sequence[TaskRun], is_share: bool) -> BoardCell:
    """The numbers of a row on a task, not yet compared with other rows.

    Args:
        units: what its runs gave on the task, by date.
        is_share: the metric lies between 0 and 1.
    """
    answered = [unit for unit in units if unit.result.answers is not None]
    marks = [mark for unit in units for mark in unit.result.marks] + varied(units)
    if cut := max(left_out(unit, "documents", "truncated") for unit in units):
        marks.append(f"{cut} documents were cut at their beginning, since they do not fit without demonstrations")
    cell = _from_answers(answered, is_share, marks) if answered else None
    if cell is None:
        cell = BoardCell(_reported(units, is_share))
        marks.append("aggregate only")
    elif len(answered) < len(units):
        marks.append(f"{len(units) - len(answered)} of {len(units)} runs without samples are not counted")
    choices = []
    for run in (unit.run for unit in units):
        values = {**run.icl, **run.arguments, "seeds": run.seed, "decide": run.study.rule or "none"}
        chosen = sorted(name for name in run.study.chosen if name in values)
        choices.append(", ".join(f"{name.replace('seeds', 'seed')}={values[name]}" for name in chosen))
    return replace(
        cell,
        marks=tuple(dict.fromkeys(marks)),
        left_out=max(map(left_out, units)),
        expected=_expected(units, units[0].result.task),
        chosen=tuple(dict.fromkeys(map(shown, filter(None, choices)))),
    )


def _expected(units: Iterable[TaskRun], column: str) -> float | None:
    """The paper's value of a column, if all runs say the same one. It is of what a model says by itself."""
    values = [None if unit.result.rule else number(unit.run.study.expected.get(column)) for unit in units]
    return values[0] if values.count(values[0]) == len(values) else None


def _from_answers(units: Sequence[TaskRun], is_share: bool, marks: list[str]) -> BoardCell | None:
    """The numbers of a row on a task from its samples, or None where they have none: some metrics are no function of
    sums over documents. Words on them are added to `marks`."""
    first = units[0].result
    if first.aggregation not in AGGREGATIONS:
        return None
    sets = _prompt_sets(units, marks)
    drawn = sets[0].answered[0].answers.demonstrations is not None
    try:
        if first.aggregation == "mean":
            estimate = statistics.estimate(matrix(sets), drawn=drawn, bounds=(0.0, 1.0) if is_share else None)
        else:
            metric = AGGREGATIONS[first.aggregation]
            sums = matrix(sets, metric.features)
            estimate = bootstrap(sums, metric.value, drawn=drawn, bounds=metric.bounds)
    except ValueError as error:
        marks.append(f"its samples are not used: {error}")
        return None
    if not math.isfinite(estimate.mean) or math.isnan(estimate.error):
        marks.append("its samples are not used: some of them alone have no such metric.")
        return None
    if drawn and 1 < len(sets) < _FEW_SETS:
        marks.append("few seeds")
    answers = [order.answers for prompt_set in sets for order in prompt_set.answered]
    in_orders = (prompt_set.answered for prompt_set in sets if len(prompt_set.answered) > 1)
    by_set = [[order.answers.predictions for order in orders] for orders in in_orders]
    are_known = drawn and not any(order is None for orders in by_set for order in orders)
    predicted, majority = _predicted(units[0], answers, marks)
    chance = answers[0].chance if first.metric == "acc" else None
    return BoardCell(
        estimate,
        sets=sets,
        sensitivity=statistics.order_sensitivity(np.array(orders).T for orders in by_set) if are_known else None,
        corrected=None if chance is None or chance >= 1 else (estimate.mean - chance) / (1 - chance),
        predicted=predicted,
        majority=majority,
    )


def _predicted(unit: TaskRun, answers: Sequence[Answers], marks: list[str]) -> tuple[dict[str, float], float | None]:
    """The share of each option among the predictions, and the accuracy of always giving the most frequent right answer.
    A mark says if nearly all predictions are one option though others are right."""
    predictions = [of_prompt.predictions for of_prompt in answers if of_prompt.predictions is not None]
    if len(predictions) < len(answers):
        return {}, None
    names = dict(enumerate(map(shown, options(unit.run.results, unit.result.task))))
    numbers, counts = np.unique(np.concatenate(predictions), return_counts=True)
    shares = dict(zip(numbers.tolist(), (counts / counts.sum()).tolist(), strict=True))
    predicted = {names.get(n, f"option {n}"): shares.get(n, 0.0) for n in sorted({*names, *shares})}

    def most_frequent(options: np.ndarray) -> float:
        """The share of the most frequent option."""
        return float(np.unique(options, return_counts=True)[1].max() / len(options))

    golds = answers[0].golds
    majority = None if golds is None else most_frequent(golds)
    if len(predictions[0]) >= _FEW_DOCUMENTS and (majority is None or majority < _COLLAPSED):
        collapsed = sum(most_frequent(of_prompt) >= _COLLAPSED for of_prompt in predictions)
        if collapsed == len(predictions):
            marks.append("collapsed")
        elif collapsed:
            marks.append(f"With {collapsed} of {len(predictions)} prompts it gives one answer to nearly all documents.")
    return predicted, majority if unit.result.metric == "acc" else None


def _prompt_sets(units: Sequence[TaskRun], marks: list[str]) -> tuple[PromptSet, ...]:
    """The answers by set of demonstrations, and in a set by order. Words on repeated runs are added to `marks`."""
    orders: dict[str | None, list[TaskRun]] = {}
    # Where a method sorts the demonstrations, the prompts of a study's orders are the same.
    for first, *others in grouped(units, lambda unit: (unit.asked, unit.run.order, unit.run.format)).values():
        others = [unit for unit in others if unit.run.date != first.run.date]  # else it is no other run
        if others:
            agree = all(np.array_equal(first.answers.items, unit.answers.items, equal_nan=True) for unit in others)
            marks.append("confirmed" if agree else "differs")
        counted = replace(first, repeats=tuple(unit.run for unit in others))
        orders.setdefault(first.answers.demonstrations, []).append(counted)
    sets = []
    for demonstrations, answered in orders.items():
        answered.sort(key=lambda unit: (unit.run.order, unit.run.format))
        seeds = {unit.run.seed for unit in answered}
        seed = seeds.pop() if len(seeds) == 1 else None
        label = f"set {demonstrations[:6]}" if demonstrations and seed is None else f"seed {seed}"
        value = float(np.mean([unit.result.value for unit in answered]))
        prompt_set = PromptSet("no demonstrations" if demonstrations is None else label, tuple(answered), value)
        sets.append((-1 if seed is None else seed, prompt_set))
    return tuple(prompt_set for _, prompt_set in sorted(sets, key=lambda seeded: (seeded[0], seeded[1].label)))


def matrix(sets: Sequence[PromptSet], features: Callable[[np.ndarray], np.ndarray] = lambda items: items) -> np.ndarray:
    """(documents, sets) scores: the mean over the orders of each set. With the k features of a metric, of which its
    value is made, (documents, sets, k)."""
    by_set = ([features(order.answers.items) for order in prompt_set.answered] for prompt_set in sets)
    return np.stack([np.mean(orders, axis=0) for orders in by_set], axis=1)


def values_by_set(cells: Mapping[str, BoardCell], column: Column) -> dict[str, list[float]]:
    """The values of each order of each set of demonstrations, by set. If the column has several tasks, they are
    weighted means over these, of the sets and orders that all of them have."""
    if not column.weights.keys() <= cells.keys():
        return {}
    by_task = []
    for task, weight in column.weights.items():
        units = ((prompt_set.label, unit) for prompt_set in cells[task].sets for unit in prompt_set.answered)
        by_task.append({(label, unit.run.order): weight * unit.result.value for label, unit in units})
    values: dict[str, list[float]] = {}
    for key in by_task[0]:
        if all(key in of_task for of_task in by_task):
            values.setdefault(key[0], []).append(sum(of_task[key] for of_task in by_task))
    return values


def _reported(units: Sequence[TaskRun], is_share: bool) -> Estimate:
    """What lm-eval's results say where there are no samples: errors over documents, and over several seeds.

    The parts cannot be told apart without samples, so that the interval is rather too wide than too narrow. Of runs
    with one seed and order, the first counts.
    """
    results = [same[0].result for same in grouped(units, lambda unit: (unit.run.seed, unit.run.order)).values()]
    of_seeds = [[unit.result.value for unit in same] for same in grouped(units, lambda unit: unit.run.seed).values()]
    values = [float(np.mean(of_seed)) for of_seed in of_seeds]
    errors = [math.inf if result.stderr is None else result.stderr for result in results]
    variance_of_seeds = float(np.var(values, ddof=1)) / len(values) if len(values) > 1 else 0.0
    mean, error = float(np.mean(values)), math.sqrt(float(np.mean(np.square(errors))) + variance_of_seeds)
    low, high = mean - _NORMAL * error, mean + _NORMAL * error
    if is_share:
        low, high = max(low, 0.0), min(high, 1.0)
    return Estimate(mean, low, high, error, math.inf, results[0].documents, len(values), None, None, "reported")


def combined(cells: Mapping[str, BoardCell], units: Iterable[TaskRun], column: Column) -> BoardCell:
    """The numbers of a row on a group or the average, from its cells and what its runs gave on all of its tasks."""
    parts, weights = [cells[task] for task in column.weights], list(column.weights.values())

    def mean(values: Sequence[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return math.fsum(map(math.prod, zip(weights, known, strict=True))) if len(known) == len(values) else None

    sensitivities = [part.sensitivity for part in parts if part.sensitivity is not None]
    return BoardCell(
        statistics.estimate_group([part.estimate for part in parts], weights, bounds=column.bounds),
        sensitivity=statistics.estimate_group(sensitivities, weights, bounds=(0.0, 1.0))
        if len(sensitivities) == len(parts)
        else None,
        corrected=mean([part.corrected for part in parts]),
        marks=tuple(dict.fromkeys(mark for part in parts for mark in part.marks)),
        left_out=sum(part.left_out for part in parts),
        majority=mean([part.majority for part in parts]),
        expected=_expected(units, column.name),
    )


def left_out(unit: TaskRun, what: str = "demonstrations", done: str = "left_out") -> int:
    """How many demonstrations were left out of a task's prompts because these were too long, or of how many documents
    (what="documents"); with done="truncated", how many documents were cut, which do not fit without any either."""
    return count(at(unit.run.icl, done, unit.result.task, what)) or 0


def unused(unit: TaskRun) -> float:
    """How many demonstrations were left out of a prompt, the mean over documents."""
    orders = count(unit.run.study.shared.get("orders")) or 1  # a study counts orders that are scored together
    documents = unit.result.documents * orders
    return min(unit.result.shots, left_out(unit) / max(documents, left_out(unit, "documents"), 1))


def varied(units: Sequence[TaskRun]) -> list[str]:
    """Sentences on what runs of one cell differ in, of what is known to matter little: code, libraries, machines; and
    on weights that nothing identifies."""
    texts: dict[str, set[str]] = {}
    for run in (unit.run for unit in units):
        machine = str(run.results.get("pretty_env_info") or "")
        found = {
            what: re.findall(rf"^{name}:(.*)$", machine, re.MULTILINE)[:1]
            for what, name in (("torch", "PyTorch version"), ("the GPU", "GPU 0"), ("the CPU", "Model name"))
        }
        found |= {"the code of lm-eval-icl": [run.icl.get("commit") or run.icl.get("version")]}
        found |= {what: [run.results.get(f"{what.replace('-', '_')}_version")] for what in ("lm-eval", "transformers")}
        found |= {"their training": [run.study.training]}
        for what, values in found.items():
            texts.setdefault(what, set()).update(str(value).strip() for value in values if value)
    sentences = []
    for what, of_runs in texts.items():
        if len(values := sorted(map(shown, filter(None, of_runs)))) > 1:
            sentences.append(f"Its runs differ in {what}: {', '.join(values[:4])}{', ...' * (len(values) > 4)}.")
    is_local = any(unit.run.pretrained.startswith((".", "/", "~")) for unit in units)
    if is_local and not all(unit.result.switches.get("weights") for unit in units):
        sentences.append("Nothing says which weights the model had: other weights under its name would be this row.")
    return sentences  # fmt: skip


def kind(result: TaskResult) -> tuple[object, ...]:
    """What two results must have in common for a difference."""
    return result.metric, result.filter, result.aggregation, result.higher_is_better


def common(first: Sequence[PromptSet], second: Sequence[PromptSet]) -> list[tuple[PromptSet, PromptSet]]:
    """The sets that both were asked, each with the orders that both were asked."""
    by_prompts = {order.asked: order for prompt_set in second for order in prompt_set.answered}
    pairs = []
    for prompt_set in first:
        matches = ((order, by_prompts.get(order.asked)) for order in prompt_set.answered)
        both = [(mine, theirs) for mine, theirs in matches if theirs is not None]
        if both:
            mine, theirs = zip(*both, strict=True)
            pairs.append((replace(prompt_set, answered=mine), replace(prompt_set, answered=theirs)))
    return pairs


def compare(
    first: Mapping[str, BoardCell], second: Mapping[str, BoardCell], columns: Sequence[Column]
) -> dict[str, Difference]:
    """The first row less the second, by column, from their cells on tasks; columns on which they are not paired are
    missing."""
    of_tasks: dict[str, Difference | None] = {}
    differences = {}
    for column in columns:
        for task in column.weights:
            if task in first and task in second and task not in of_tasks:
                of_tasks[task] = _difference(first[task].sets, second[task].sets, column.bounds)
        parts = [part for task in column.weights if (part := of_tasks.get(task)) is not None]
        if len(parts) == len(column.weights):
            weights = list(column.weights.values())
            differences[column.name] = (
                parts[0] if column.kind == "task" else statistics.difference_group(parts, weights, bounds=column.bounds)
            )
    return differences


def _difference(
    first: Sequence[PromptSet], second: Sequence[PromptSet], bounds: tuple[float, float] | None
) -> Difference | None:
    """On one task; None if no prompt was put to both, or the metric has no value for those that were."""
    if not (pairs := common(first, second)):
        return None
    mine, theirs = zip(*pairs, strict=True)
    one, other = mine[0].answered[0], theirs[0].answered[0]
    if kind(result := one.result) != kind(other.result):
        return None
    drawn = one.answers.demonstrations is not None
    try:
        if result.aggregation == "mean":
            return statistics.difference(matrix(mine), matrix(theirs), drawn=drawn, bounds=bounds)
        metric = AGGREGATIONS[result.aggregation]
        sums = matrix(mine, metric.features), matrix(theirs, metric.features)
        difference = bootstrap_difference(*sums, metric.value, drawn=drawn, bounds=metric.bounds)
        return None if math.isnan(difference.p) else difference
    except ValueError:
        return None
