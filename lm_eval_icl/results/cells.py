"""What a row has on a task or a group, and how rows differ: from their baseline, without a rule, from the best."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from lm_eval_icl.errors import InputError
from lm_eval_icl.results import statistics
from lm_eval_icl.results.board import BoardCell, Cells, Column, Entry, PromptSet, RowKey, TaskRun, grouped
from lm_eval_icl.results.metrics import AGGREGATIONS, bootstrap, bootstrap_difference
from lm_eval_icl.results.records import Answers, at, count, number
from lm_eval_icl.results.statistics import Difference, Estimate

_LISTED = 20  # names in a message
_FEW_SETS = 5
_NO_SET = "no demonstrations"
_COLLAPSED, _FEW_DOCUMENTS = 0.95, 10  # the share of one answer, and of how many documents it says something
_NORMAL = 1.96  # half of a 95% interval, in standard errors


def measured(units: Sequence[TaskRun], is_share: bool) -> BoardCell:
    """The numbers of a row on a task, of what its runs gave on it by date, not yet compared with other rows."""
    answered = [unit for unit in units if unit.result.answers is not None]
    marks = [mark for unit in units for mark in unit.result.marks]
    lost, of_documents, cut, own = (
        max(count(at(unit.run.icl, done, unit.result.task, of)) or 0 for unit in units)
        for done, of in (
            ("left_out", "demonstrations"),
            *((done, "documents") for done in ("left_out", "truncated", "own_demonstrations")),
        )
    )
    if lost:
        marks.append(f"{lost} demonstrations were left out of {of_documents} documents' prompts, which were too long.")
    if cut:
        marks.append(f"{cut} documents were cut at their beginning: they do not fit without demonstrations.")
    if own:
        marks.append(f"{own} documents stand among their own demonstrations, with the answer.")
    cell = _from_answers(answered, is_share, marks) if answered else BoardCell(_reported(units, is_share))
    if not answered:
        marks.append("aggregate only")
    elif len(answered) < len(units):
        marks.append(f"{len(units) - len(answered)} of {len(units)} runs without samples are not counted")
    expected = _expected(units, units[0].result.task)
    return replace(cell, marks=tuple(dict.fromkeys(marks)), left_out=lost, expected=expected)


def _expected(units: Iterable[TaskRun], column: str) -> float | None:
    """The paper's value of a column, if all runs say the same one. It is of what a model says by itself."""
    values = [None if unit.result.rule else number(unit.run.study.expected.get(column)) for unit in units]
    return values[0] if values.count(values[0]) == len(values) else None


def _from_answers(units: Sequence[TaskRun], is_share: bool, marks: list[str]) -> BoardCell:
    """The numbers of a row on a task from its samples. Words on them are added to `marks`."""
    aggregation, sets = units[0].result.aggregation, _prompt_sets(units, marks)
    if aggregation == "mean":
        estimate = statistics.estimate(matrix(sets), bounds=(0.0, 1.0) if is_share else None)
    else:
        metric = AGGREGATIONS[aggregation]
        estimate = bootstrap(matrix(sets, metric.features), metric.value, bounds=metric.bounds)
    if 1 < len(sets) < _FEW_SETS:
        marks.append("few seeds")
    by_set = [
        [unit.answers.predictions for unit in in_format]
        for s in sets
        if s.label != _NO_SET
        for in_format in grouped(s.answered, lambda unit: unit.run.format).values()
    ]
    by_set = [orders for orders in by_set if len(orders) > 1]
    are_known = all(order is not None for orders in by_set for order in orders)
    return BoardCell(
        estimate,
        sets=sets,
        sensitivity=statistics.order_sensitivity(np.array(orders).T for orders in by_set) if are_known else None,
        majority=_majority(units[0].result.metric, [unit.answers for s in sets for unit in s.answered], marks),
    )


def _majority(metric: str, answers: Sequence[Answers], marks: list[str]) -> float | None:
    """The accuracy of always giving the most frequent right answer; a mark says with how many prompts nearly all
    predictions are one."""

    def most_frequent(options: np.ndarray) -> float:
        return float(np.unique(options, return_counts=True)[1].max() / len(options))

    predictions = [of_prompt.predictions for of_prompt in answers if of_prompt.predictions is not None]
    if len(predictions) < len(answers):
        return None
    golds = answers[0].golds
    majority = None if golds is None else most_frequent(golds)
    collapsed, n = sum(most_frequent(of_prompt) >= _COLLAPSED for of_prompt in predictions), len(predictions)
    if collapsed and len(predictions[0]) >= _FEW_DOCUMENTS and (majority is None or majority < _COLLAPSED):
        some = f"With {collapsed} of {n} prompts it gives one answer to nearly all documents."
        marks.append("collapsed" if collapsed == n else some)
    return majority if metric == "acc" else None


def _prompt_sets(units: Sequence[TaskRun], marks: list[str]) -> tuple[PromptSet, ...]:
    """The answers by set of demonstrations, and in a set by format and order. Words on repeated runs are added to
    `marks`. In another format, texts of demonstrations are others: they are the set of that seed."""
    own = {unit.run.seed: unit.answers.demonstrations for unit in units if not unit.run.format}
    orders: dict[str | None, list[TaskRun]] = {}
    # Where a method sorts the demonstrations, the prompts of a study's orders are the same.
    for first, *others in grouped(units, lambda unit: (unit.answers.prompts, unit.run.order)).values():
        others = [unit for unit in others if unit.run.date != first.run.date]  # else it is no other run
        if others:
            agree = all(np.array_equal(first.answers.items, unit.answers.items, equal_nan=True) for unit in others)
            marks.append("confirmed" if agree else "differs")
        texts, seed = first.answers.demonstrations, first.run.seed
        set_of = own.get(seed, f"seed {seed}") if first.run.format and texts is not None else texts
        orders.setdefault(set_of, []).append(first)
    if "differs" in marks:  # of another prompt's answers, which other runs confirm
        marks[:] = [mark for mark in marks if mark != "confirmed"]
    sets = []
    for demonstrations, answered in orders.items():
        answered.sort(key=lambda unit: (unit.run.format, unit.run.order))
        seeds = {unit.run.seed for unit in answered}
        seed = seeds.pop() if len(seeds) == 1 else None
        label = f"set {demonstrations[:6]}" if demonstrations and seed is None else f"seed {seed}"
        prompt_set = PromptSet(_NO_SET if demonstrations is None else label, tuple(answered))
        sets.append((-1 if seed is None else seed, prompt_set))
    return tuple(prompt_set for _, prompt_set in sorted(sets, key=lambda seeded: (seeded[0], seeded[1].label)))


def matrix(sets: Sequence[PromptSet], features: Callable[[np.ndarray], np.ndarray] = lambda items: items) -> np.ndarray:
    """(documents, sets) scores, the mean over orders; with the features of a metric, (documents, sets, k)."""
    by_set = ([features(order.answers.items) for order in prompt_set.answered] for prompt_set in sets)
    return np.stack([np.mean(orders, axis=0) for orders in by_set], axis=1)


def _reported(units: Sequence[TaskRun], is_share: bool) -> Estimate:
    """What lm-eval's results say where there are no samples: errors over documents, and over several seeds."""
    by_seed = grouped(units, lambda unit: unit.run.seed).values()
    values = [float(np.mean([unit.result.value for unit in same])) for same in by_seed]
    errors = [math.inf if unit.result.stderr is None else unit.result.stderr for unit in units]
    of_seeds = float(np.var(values, ddof=1)) / len(values) if len(values) > 1 else 0.0
    mean, error = float(np.mean(values)), math.sqrt(float(np.mean(np.square(errors))) + of_seeds)
    low, high = mean - _NORMAL * error, mean + _NORMAL * error
    if is_share:
        low, high = max(low, 0.0), min(high, 1.0)
    documents = units[0].result.documents
    return Estimate(mean, low, high, error, math.inf, documents, len(values), None, None, "reported")


def combined(cells: Mapping[str, BoardCell], units: Iterable[TaskRun], column: Column) -> BoardCell:
    """The numbers of a row on a group or the average, from its cells and what its runs gave on all of its tasks."""
    parts, weights = [cells[task] for task in column.weights], list(column.weights.values())
    flips = [part.sensitivity for part in parts if part.sensitivity is not None]
    majorities = [part.majority for part in parts if part.majority is not None]
    n = len(parts)
    return BoardCell(
        statistics.estimate_group([part.estimate for part in parts], weights, bounds=column.bounds),
        sensitivity=statistics.estimate_group(flips, weights, bounds=(0.0, 1.0)) if len(flips) == n else None,
        marks=tuple(dict.fromkeys(mark for part in parts for mark in part.marks)),
        left_out=sum(part.left_out for part in parts),
        majority=math.fsum(map(math.prod, zip(weights, majorities, strict=True))) if len(majorities) == n else None,
        expected=_expected(units, column.name),
    )


def common(first: Sequence[PromptSet], second: Sequence[PromptSet]) -> list[tuple[PromptSet, PromptSet]]:
    """The sets that both were asked, each with the orders that both were asked."""
    by_prompts = {order.answers.prompts: order for prompt_set in second for order in prompt_set.answered}
    pairs = []
    for prompt_set in first:
        matches = ((order, by_prompts.get(order.answers.prompts)) for order in prompt_set.answered)
        both = [(mine, theirs) for mine, theirs in matches if theirs is not None]
        if both:
            mine, theirs = zip(*both, strict=True)
            pairs.append((replace(prompt_set, answered=mine), replace(prompt_set, answered=theirs)))
    return pairs


def compare(first: Cells, second: Cells, columns: Sequence[Column]) -> dict[str, Difference]:
    """The first row less the second, by column, from their cells on tasks; columns on which they are not paired are
    missing."""
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
    first: Sequence[PromptSet], second: Sequence[PromptSet], bounds: tuple[float, float] | None
) -> Difference | None:
    """On one task; None if no prompt was put to both."""
    if not (pairs := common(first, second)):
        return None
    mine, theirs = zip(*pairs, strict=True)
    one, other = mine[0].answered[0].result, theirs[0].answered[0].result
    # In two files that are compared, a column of one name may be another thing.
    if (one.metric, one.filter, one.aggregation) != (other.metric, other.filter, other.aggregation):
        return None
    if one.aggregation == "mean":
        return statistics.difference(matrix(mine), matrix(theirs), bounds=bounds)
    metric = AGGREGATIONS[one.aggregation]
    sums = matrix(mine, metric.features), matrix(theirs, metric.features)
    return bootstrap_difference(*sums, metric.value, bounds=metric.bounds)


def named(entries: Sequence[Entry], name: str, what: str = "") -> Entry:
    """The entry with this name, or label, or label and checkpoint; `InputError` is raised if it is not one."""
    exact = [e for e in entries if name in (e.name, e.label, f"{e.label} on {e.checkpoint}")]
    # A method's name is that of its entry without a rule.
    matching = exact or [e for e in entries if e.rule is None and name in (e.method, f"{e.method} {e.arguments}")]
    if len(matching) != 1:
        names = "; ".join(f"{e.name}: {e.label} on {e.checkpoint}" for e in (matching or entries)[:_LISTED])
        how = "several entries are called so. Give a name:" if matching else "there is no such entry. There are"
        raise InputError(f"{what}{name}: {how} {names}.")
    return matching[0]


def baselines_of(entries: Sequence[Entry], key_of: Mapping[Entry, RowKey], baseline: str | None) -> dict[str, Entry]:
    """By the name of an entry, the entry that it is compared with: of the baseline's method, on the same checkpoint and
    under the same rule; of several that with the same switches, or else that asked the same on most tasks."""
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
            if dict(key_of[rival].method).get("method") == baseline != entry.method:
                tasks = entry.cells.keys() & rival.cells.keys()
                paired = sum(bool(common(entry.cells[task].sets, rival.cells[task].sets)) for task in tasks)
                nearness[rival] = key_of[rival].switches == key_of[entry].switches, paired, -len(rival.arguments)
        if nearness:
            bases[entry.name] = max(nearness, key=nearness.__getitem__)
    return bases


def compare_all(
    entries: Sequence[Entry], key_of: Mapping[Entry, RowKey], columns: Sequence[Column], baseline: str | None
) -> tuple[tuple[Entry, ...], dict[str, str]]:
    """The entries with differences and marks; and by the name of an entry that of its baseline."""
    bases = baselines_of(entries, key_of, baseline)
    raw = {replace(key, rule=()): entry for entry, key in key_of.items() if not key.rule}
    raws = {e.name: of for e in entries if (of := raw.get(replace(key_of[e], rule=()))) is not None and of is not e}
    cells: dict[str, dict[str, BoardCell]] = {entry.name: {} for entry in entries}
    for column in columns:
        of_column = [entry for entry in entries if column.name in entry.cells]
        to_baseline, to_raw = _differences(of_column, bases, column), _differences(of_column, raws, column)
        for of_rule in grouped(of_column, lambda entry: entry.rule).values():
            best = max(of_rule, key=lambda entry: column.sign * entry.cells[column.name].estimate.mean)
            to_best = _differences(of_rule, {entry.name: best for entry in of_rule if entry is not best}, column)
            for entry in of_rule:
                cell = entry.cells[column.name]
                difference, p_holm = to_baseline.get(entry.name, (None, None))
                raw_difference, p_raw = to_raw.get(entry.name, (None, None))
                marks = cell.marks
                if difference is not None:
                    if difference.sets < cell.estimate.sets:
                        marks += (f"Paired on {difference.sets} of {cell.estimate.sets} sets of demonstrations.",)
                    if lost := bases[entry.name].cells[column.name].left_out:
                        marks += (f"{lost} demonstrations were left out of its baseline's prompts.",)
                elif entry.name in bases and column.name in bases[entry.name].cells:
                    marks += ("unpaired",) * ("aggregate only" not in marks)
                below, p_best = to_best.get(entry.name, (None, None))
                cells[entry.name][column.name] = replace(
                    cell,
                    difference=difference,
                    p_holm=p_holm,
                    to_raw=raw_difference,
                    p_raw=p_raw,
                    is_best=abs(cell.estimate.mean - best.cells[column.name].estimate.mean) <= 1e-12,
                    is_worse=below is not None and column.judged(below.mean, p_best) == "worse",
                    marks=marks,
                )
    # Cells stand in the order of the columns, and behind them those of tasks that are no columns.
    ordered = tuple(replace(e, cells=cells[e.name] | {**e.cells, **cells[e.name]}) for e in entries)
    return ordered, {name: base.name for name, base in bases.items()}


def _differences(
    entries: Sequence[Entry], others: Mapping[str, Entry], column: Column
) -> dict[str, tuple[Difference, float]]:
    """By the name of an entry, how it differs on a column from its other, and p adjusted over all of them (Holm)."""
    compared = {e.name: compare(e.cells, others[e.name].cells, [column]) for e in entries if e.name in others}
    differences = {name: of[column.name] for name, of in compared.items() if of}
    adjusted = statistics.holm([difference.p for difference in differences.values()])
    return {name: (of, p) for (name, of), p in zip(differences.items(), adjusted, strict=True)}
