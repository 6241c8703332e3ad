"""The numbers of a row on a task or a group, and its differences: to its baseline, to no rule, and to the best row."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter

import numpy as np

from lm_eval_icl.errors import InputError
from lm_eval_icl.results import statistics
from lm_eval_icl.results.board import (
    BoardCell,
    Cells,
    Column,
    Entry,
    PromptSet,
    RowKey,
    TaskRun,
    grouped,
)
from lm_eval_icl.results.columns import is_share
from lm_eval_icl.results.metrics import AGGREGATIONS, bootstrap, bootstrap_difference
from lm_eval_icl.results.records import Answers, at, count, number
from lm_eval_icl.results.sets import orders_of, prompt_sets
from lm_eval_icl.results.statistics import Bounds, Difference, Estimate

_LISTED = 20  # the most names in a message
_FEW_SETS = 5
_COLLAPSED = 0.95  # the share of one prediction that gets a mark
_FEW_DOCUMENTS = 10  # fewer documents get no mark
SHARE = (0.0, 1.0)  # the bounds of a share
_NORMAL = 1.96  # half of a 95% interval, in standard errors
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
    if 1 < len(sets) < _FEW_SETS:
        marks.append("few seeds")
    answers = [unit.answers for prompt_set in sets for unit in prompt_set.answered]
    one_answer = _one_answer(answers, len(sets)) if result.metric == "acc" else None
    cell = BoardCell(
        estimated(sets, result.aggregation, SHARE if is_share(units) else None),
        sets=sets,
        sensitivity=_sensitivity(sets),
        marks=tuple(marks),
        collapsed={result.task: _collapsed(answers)},
    )
    if one_answer is None:
        return cell
    above = statistics.difference(matrix(sets), one_answer, bounds=SHARE)
    return replace(cell, majority=float(one_answer.mean()), to_majority=above)


def _sensitivity(sets: Sequence[PromptSet]) -> Estimate | None:
    """The order sensitivity over the sets that have several orders; None if there is none."""
    predictions = []
    for orders in orders_of(sets):
        in_order = [answers.predictions for answers in orders]
        if any(options is None for options in in_order):
            return None
        predictions.append(np.array(in_order).T)
    return statistics.order_sensitivity(predictions)


def _one_answer(answers: Sequence[Answers], sets: int) -> np.ndarray | None:
    """(documents, sets) scores of always giving the most frequent right answer; None if answers are not known."""
    golds = answers[0].golds
    if golds is None or any(run_answers.predictions is None for run_answers in answers):
        return None
    options, counts = np.unique(golds, return_counts=True)
    is_right = (golds == options[counts.argmax()]).astype(float)
    return np.tile(is_right, (sets, 1)).T


def _collapsed(answers: Sequence[Answers]) -> tuple[int, int]:
    """(collapsed prompts, all prompts): nearly all predictions are one option. (0, 0) if that is no fault."""
    if len(answers[0].items) < _FEW_DOCUMENTS or _is_one(answers[0].golds):
        return 0, 0
    known = [run.predictions for run in answers if run.predictions is not None]
    return sum(map(_is_one, known)), len(known)


def _is_one(options: np.ndarray | None) -> bool:
    """Whether nearly all options are the same."""
    if options is None:
        return False
    most = np.unique(options, return_counts=True)[1].max()
    return bool(most >= _COLLAPSED * len(options))


def _collapse_marks(by_task: Mapping[str, tuple[int, int]]) -> tuple[str, ...]:
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


def estimated(
    sets: Sequence[PromptSet], aggregation: str, bounds: Bounds | None, items: Values = _ITEMS
) -> Estimate:
    """The mean over sets of a metric of the answers' items; the bounds are those of a metric that is a mean."""
    if aggregation == "mean":
        return statistics.estimate(matrix(sets, items), bounds=bounds)
    metric = AGGREGATIONS[aggregation]
    return bootstrap(
        matrix(sets, lambda one: metric.features(items(one))), metric.value, bounds=metric.bounds
    )


def _reported(units: Sequence[TaskRun]) -> Estimate:
    """The estimate from lm-eval's own values and errors, if there are no samples. Seeds add their variance."""
    by_seed = grouped(units, lambda unit: unit.run.seed).values()
    values = [float(np.mean([unit.result.value for unit in same_seed])) for same_seed in by_seed]
    errors = [math.inf if unit.result.stderr is None else unit.result.stderr for unit in units]
    seed_variance = float(np.var(values, ddof=1)) / len(values) if len(values) > 1 else 0.0
    mean = float(np.mean(values))
    error = math.sqrt(float(np.mean(np.square(errors))) + seed_variance)
    low = mean - _NORMAL * error
    high = mean + _NORMAL * error
    if is_share(units):
        low = max(low, 0.0)
        high = min(high, 1.0)
    return Estimate(
        mean,
        low,
        high,
        error,
        df=math.inf,
        documents=units[0].result.documents,
        sets=len(values),
        error_documents=None,
        error_sets=None,
        how="reported",
    )


def combined(cells: Mapping[str, BoardCell], units: Sequence[TaskRun], column: Column) -> BoardCell:
    """The cell of a row on a group or the average, from its cells and its results (`units`) on all of its tasks."""
    parts = {task: cells[task] for task in column.weights}
    bounds = SHARE if is_share(units) else None
    flips = {task: part.sensitivity for task, part in parts.items() if part.sensitivity}
    above = [part.to_majority for part in parts.values() if part.to_majority is not None]
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
    cell = BoardCell(
        statistics.estimate_group(
            [part.estimate for part in parts.values()], weights, bounds=bounds
        ),
        sensitivity=_group_sensitivity(flips, column),
        marks=tuple(dict.fromkeys(marks)),
        left_out=sum(part.left_out for part in parts.values()),
        collapsed=collapsed,
        expected=_expected(units, column.name),
    )
    if len(above) < len(parts):
        return cell
    shares = [column.weights[task] * (part.majority or 0.0) for task, part in parts.items()]
    difference = statistics.difference_group(above, weights, bounds=bounds)
    return replace(cell, majority=math.fsum(shares), to_majority=difference)


def _group_sensitivity(flips: Mapping[str, Estimate], column: Column) -> Estimate | None:
    """The order sensitivity over the tasks that have one; None if there is none."""
    if not flips:
        return None
    weights = [column.weights[task] for task in flips]
    return statistics.estimate_group(list(flips.values()), weights, bounds=SHARE)


def common(
    first: Sequence[PromptSet], second: Sequence[PromptSet]
) -> list[tuple[PromptSet, PromptSet]]:
    """The pairs of sets with the same prompts in both, reduced to the orders that both have."""
    by_prompts = {
        order.answers.prompts: order for prompt_set in second for order in prompt_set.answered
    }
    pairs = []
    for prompt_set in first:
        matches = ((order, by_prompts.get(order.answers.prompts)) for order in prompt_set.answered)
        both = [(mine, theirs) for mine, theirs in matches if theirs is not None]
        if both:
            mine, theirs = zip(*both, strict=True)
            pairs.append((replace(prompt_set, answered=mine), replace(prompt_set, answered=theirs)))
    return pairs


def compare(first: Cells, second: Cells, columns: Sequence[Column]) -> dict[str, Difference]:
    """Column -> the first row minus the second, from their cells on tasks. Columns on which the rows have no common
    prompts are missing."""
    differences = {}
    for column in columns:
        both = [task for task in column.weights if task in first and task in second]
        parts = [_difference(first[task].sets, second[task].sets, column.bounds) for task in both]
        known = [part for part in parts if part is not None]
        if len(known) == len(column.weights):
            weights = list(column.weights.values())
            group = statistics.difference_group(known, weights, bounds=column.bounds)
            differences[column.name] = known[0] if column.kind == "task" else group
    return differences


def _difference(
    first: Sequence[PromptSet], second: Sequence[PromptSet], bounds: Bounds | None
) -> Difference | None:
    """The first row minus the second on one task; None if they have no common prompt."""
    if not (pairs := common(first, second)):
        return None
    mine, theirs = zip(*pairs, strict=True)
    ours, other = mine[0].answered[0].result, theirs[0].answered[0].result
    # Two files that are compared may have columns of the same name with different metrics.
    if (ours.metric, ours.filter, ours.aggregation) != (
        other.metric,
        other.filter,
        other.aggregation,
    ):
        return None
    if ours.aggregation == "mean":
        return statistics.difference(matrix(mine), matrix(theirs), bounds=bounds)
    metric = AGGREGATIONS[ours.aggregation]
    own, others = (
        matrix(sets, lambda answers: metric.features(answers.items)) for sets in (mine, theirs)
    )
    return bootstrap_difference(own, others, metric.value, bounds=metric.bounds)


def named(entries: Sequence[Entry], name: str, what: str = "") -> Entry:
    """The entry with this name, or label, or label and checkpoint. `InputError` is raised unless it is exactly one."""
    exact = [e for e in entries if name in (e.name, e.label, f"{e.label} on {e.checkpoint}")]
    # A method's name stands for its entry without a decision rule.
    matching = exact or [
        e for e in entries if e.rule is None and name in (e.method, f"{e.method} {e.arguments}")
    ]
    if len(matching) != 1:
        names = "; ".join(
            f"{e.name}: {e.label} on {e.checkpoint}" for e in (matching or entries)[:_LISTED]
        )
        how = (
            "several entries have this name. Give one of"
            if matching
            else "there is no such entry. There are"
        )
        raise InputError(f"{what}{name}: {how} {names}.")
    return matching[0]


def baselines_of(
    entries: Sequence[Entry], key_of: Mapping[Entry, RowKey], baseline: str | None
) -> dict[str, Entry]:
    """Entry's name -> its baseline: an entry of the baseline's method, without arguments if the entry has this method
    too, on the same checkpoint, under the same rule. Of several, one with the same switches is preferred, and then the
    one with common prompts on most tasks."""
    methods = {dict(key.method).get("method", "") for key in key_of.values()}
    if baseline is not None and baseline not in methods:
        only = named(entries, baseline, "--baseline ")
        return {entry.name: only for entry in entries if entry is not only}
    if baseline is None:
        baseline = next((name for name in ("icl", "hf") if name in methods), "")
    alike = grouped(entries, lambda entry: key_of[entry].rival)
    bases = {}
    for entry in entries:
        nearness = {}
        for rival in alike[key_of[entry].rival]:
            comparable = entry.method != baseline or (entry.arguments and not rival.arguments)
            if comparable and dict(key_of[rival].method).get("method") == baseline:
                tasks = entry.cells.keys() & rival.cells.keys()
                paired = sum(
                    bool(common(entry.cells[task].sets, rival.cells[task].sets)) for task in tasks
                )
                nearness[rival] = (
                    key_of[rival].switches == key_of[entry].switches,
                    paired,
                    -len(rival.arguments),
                )
        if nearness:
            bases[entry.name] = max(nearness, key=nearness.__getitem__)
    return bases


def compare_all(
    entries: Sequence[Entry],
    key_of: Mapping[Entry, RowKey],
    columns: Sequence[Column],
    baseline: str | None,
) -> tuple[tuple[Entry, ...], dict[str, str]]:
    """The entries with differences and marks; and entry's name -> the name of its baseline."""
    bases = baselines_of(entries, key_of, baseline)
    raw = {replace(key, rule=()): entry for entry, key in key_of.items() if not key.rule}
    raws = {
        e.name: r
        for e in entries
        if (r := raw.get(replace(key_of[e], rule=()))) is not None and r is not e
    }
    cells: dict[str, dict[str, BoardCell]] = {entry.name: {} for entry in entries}
    for column in columns:
        column_entries = [entry for entry in entries if column.name in entry.cells]
        to_baseline, to_raw = (
            _differences(column_entries, bases, column),
            _differences(column_entries, raws, column),
        )
        to_majority = _adjusted({e.name: e.cells[column.name].to_majority for e in column_entries})
        for rule_entries in grouped(column_entries, lambda entry: entry.rule).values():
            best = max(
                rule_entries, key=lambda entry: column.sign * entry.cells[column.name].estimate.mean
            )
            to_best = _differences(
                rule_entries, {e.name: best for e in rule_entries if e is not best}, column
            )
            for entry in rule_entries:
                cell = entry.cells[column.name]
                difference, below = to_baseline.get(entry.name), to_best.get(entry.name)
                marks = cell.marks + _collapse_marks(cell.collapsed)
                if difference is not None:
                    if difference.sets < cell.estimate.sets:
                        marks += (
                            f"Paired on {difference.sets} of {cell.estimate.sets} sets of demonstrations.",
                        )
                    if lost := bases[entry.name].cells[column.name].left_out:
                        marks += (
                            f"{lost} demonstrations were left out of its baseline's prompts.",
                        )
                elif entry.name in bases and column.name in bases[entry.name].cells:
                    marks += ("unpaired",) * ("aggregate only" not in marks)
                cells[entry.name][column.name] = replace(
                    cell,
                    difference=difference,
                    to_raw=to_raw.get(entry.name),
                    to_majority=to_majority.get(entry.name),
                    is_best=abs(cell.estimate.mean - best.cells[column.name].estimate.mean)
                    <= 1e-12,
                    is_worse=None if below is None else column.judged(below) == "worse",
                    marks=marks,
                )
    # Cells are in the order of the columns. The cells of tasks that are not columns follow.
    ordered = tuple(replace(e, cells=cells[e.name] | {**e.cells, **cells[e.name]}) for e in entries)
    return ordered, {name: base.name for name, base in bases.items()}


def _differences(
    entries: Sequence[Entry], others: Mapping[str, Entry], column: Column
) -> dict[str, Difference]:
    """Entry's name -> its difference on a column to its entry in `others`, for entries that are compared."""
    compared = {
        e.name: compare(e.cells, others[e.name].cells, [column])
        for e in entries
        if e.name in others
    }
    return _adjusted({name: by_column.get(column.name) for name, by_column in compared.items()})


def _adjusted(differences: Mapping[str, Difference | None]) -> dict[str, Difference]:
    """The differences that are there, with p adjusted over them (Holm)."""
    known = {name: difference for name, difference in differences.items() if difference is not None}
    p_holm = statistics.holm([difference.p for difference in known.values()])
    return {name: replace(known[name], p_holm=p) for name, p in zip(known, p_holm, strict=True)}
