"""The robustness card: how much predictions depend on what should not matter, such as the order.

A row is a method, and a column is a property. A property is estimated on each task from the row's
samples, and averaged over tasks with equal weights. Compared samples have the same documents and
seeds of demonstrations, and are paired.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np

from lm_eval_icl.results import statistics
from lm_eval_icl.results.board import (
    Card,
    CardRow,
    Column,
    Entry,
    PromptSet,
    Property,
    RowKey,
    TaskRun,
    results_in,
)
from lm_eval_icl.results.cells import SHARE, estimated, matrix, sensitivity
from lm_eval_icl.results.comparisons import compare_sets
from lm_eval_icl.results.metrics import CALIBRATION, pseudo_values
from lm_eval_icl.results.records import Answers
from lm_eval_icl.results.statistics import Bounds, Difference, Estimate

ACCURACY = Property(
    "accuracy", "with the right labels, in the task's own format, over sets and orders", "higher"
)
FLIPS = Property(
    "order flips",
    "how often two orders of the same demonstrations give different predictions",
    "lower",
)
FORMATS = Property(
    "format spread",
    "accuracy in the best format minus that in the worst, averaged over sets",
    "lower",
)
SETS = Property(
    "set spread", "accuracy with the best set of demonstrations minus that with the worst", "lower"
)
SHOTS = Property(
    "shots gain", "accuracy with the most demonstrations minus that with the fewest (not 0)", ""
)
CONFIDENCE = {
    "ece": Property(
        "ece", "expected calibration error of the options' probabilities, in 15 bins", "lower"
    ),
    "brier": Property(
        "brier", "the sum over options of (probability - whether right) squared", "lower", False
    ),
    "log_probability": Property(
        "log-prob", "the log-probability of the right option", "higher", False
    ),
}
# Words in the conditions of rows of the board that are one row of the card.
_VARIED = r"\d+( to \d+)? shots?|labels=.*|no labels"

Sets = Sequence[PromptSet]
# The sets of a row on a task: (labels of the demonstrations, or "" for the right ones; number of
# demonstrations) -> the sets.
SetsByLabels = dict[tuple[str, int], Sets]


def card_of(key_of: Mapping[Entry, RowKey], columns: Sequence[Column]) -> Card | None:
    """The card of a board's rows, sorted by rule and accuracy.

    Rows that differ only in labels and numbers of demonstrations are one row. The tasks are those
    on which labels or formats are varied; None without such tasks.
    """
    tasks: dict[str, None] = {}
    for column in columns:
        if column.percent:
            tasks |= dict.fromkeys(column.weights)
    by_labels: dict[RowKey, dict[str, SetsByLabels]] = {}
    entries: dict[RowKey, Entry] = {}
    for entry, key in key_of.items():
        setting = dict(key.setting)
        labels = setting.pop("labels", "")
        switches = dict(key.switches)
        switches.pop("shots", None)
        row = replace(key, setting=tuple(setting.items()), switches=tuple(switches.items()))
        entries.setdefault(row, entry)
        by_task = by_labels.setdefault(row, {})
        for task in tasks.keys() & entry.cells.keys():
            sets = entry.cells[task].sets
            if sets:
                result = sets[0].answered[0].result
                if result.aggregation == "mean":  # of the scores of single documents
                    by_task.setdefault(task, {})[labels, result.shots] = sets
    used = []
    for task in tasks:
        if any(_is_varied(by_task.get(task, {})) for by_task in by_labels.values()):
            used.append(task)
    rows = []
    for row, entry in entries.items():
        values = _values([by_labels[row].get(task, {}) for task in used])
        if values:
            words = entry.conditions.split(", ")
            kept = [word for word in words if word and not re.fullmatch(_VARIED, word)]
            rows.append(CardRow(replace(entry, conditions=", ".join(kept)), values))
    if not rows:
        return None
    rules = list(dict.fromkeys(card_row.entry.rule for card_row in rows))
    rows.sort(key=lambda row: (rules.index(row.entry.rule), -row.values[ACCURACY].mean))
    shown: dict[Property, Estimate] = {}
    for card_row in rows:
        shown |= card_row.values
    labels_cost = [column for column in shown if column.labels]
    ordered = [ACCURACY, FLIPS, *labels_cost, FORMATS, SETS, SHOTS, *CONFIDENCE.values()]
    in_order = tuple(column for column in ordered if column in shown)
    return Card(in_order, tuple(rows), tuple(used))


def _values(by_task: Sequence[SetsByLabels]) -> dict[Property, Estimate]:
    """The means over tasks of the properties that are known on all of them."""
    estimates: dict[Property, list[Estimate]] = {}
    for by_labels in by_task:
        for column, estimate in properties(by_labels):
            estimates.setdefault(column, []).append(estimate)
    return {
        column: _mean(column, parts)
        for column, parts in estimates.items()
        if len(parts) == len(by_task)
    }


def _is_varied(by_labels: SetsByLabels) -> bool:
    """Whether there are other labels or formats than the task's own."""
    return any(
        labels or _only(sets, lambda unit: unit.run.format != 0)
        for (labels, _), sets in by_labels.items()
    )


def _bounds(column: Property) -> Bounds:
    if column.percent:
        return SHARE
    return (0.0, 2.0) if column.better == "lower" else (-math.inf, 0.0)


def _mean(column: Property, parts: Sequence[Estimate]) -> Estimate:
    """The mean over tasks, with equal weights."""
    differences = [part for part in parts if isinstance(part, Difference)]
    if len(parts) == 1:
        return parts[0]
    if len(differences) == len(parts):
        return statistics.difference_group(differences, [1] * len(parts), bounds=SHARE)
    return statistics.estimate_group(parts, [1] * len(parts), bounds=_bounds(column))


def properties(by_labels: SetsByLabels) -> Iterator[tuple[Property, Estimate]]:
    """The known properties of a row on a task, with the number of demonstrations that most runs
    have. Other labels, formats and numbers of demonstrations are compared in the first order
    alone."""
    runs = {}
    for (labels, n), sets in by_labels.items():
        if not labels:
            runs[n] = sum(len(prompt_set.answered) for prompt_set in sets)
    if not runs:
        return
    shots = max(runs, key=runs.__getitem__)
    base = _only(by_labels["", shots], lambda unit: unit.run.format == 0)
    if not base:
        return
    yield ACCURACY, statistics.estimate(matrix(base), bounds=SHARE)
    flips = sensitivity(base)
    if flips is not None:
        yield FLIPS, flips
    first = _in_first_order(base)
    for (labels, n), sets in sorted(by_labels.items()):
        if not labels or n != shots:
            continue
        cost = compare_sets(first, _in_first_order(sets))
        if cost is not None:
            less = f"minus that with {labels} labels in the demonstrations"
            words = "random labels" if labels == "random" else labels.replace(":", " ")
            what = f"accuracy with the right labels {less}"
            yield Property(f"{words} cost", what, "", labels=labels), cost
    formats = _formats(by_labels["", shots])
    if formats is not None:
        yield FORMATS, spread(formats)
    if len(base) > 1:
        yield SETS, spread(matrix(base)[:, None])
    numbers = sorted(n for n in runs if n)
    if len(numbers) > 1:
        most = _in_first_order(by_labels["", numbers[-1]])
        fewest = _in_first_order(by_labels["", numbers[0]])
        gain = compare_sets(most, fewest)
        if gain is not None:
            yield SHOTS, gain
    answers = [unit.answers for unit in results_in(base)]
    if all(one.logprobs is not None and one.golds is not None for one in answers):
        for name, column in CONFIDENCE.items():
            with suppress(ValueError):  # a log-likelihood is not finite
                estimate = _calibration(base, name)
                if math.isfinite(estimate.mean):
                    yield column, estimate


def spread(scores: np.ndarray) -> Estimate:
    """The largest minus the smallest of the variants' means over documents, averaged over sets. The
    interval is the jackknife's. A spread is at least 0, and larger for more variants.

    Args:
        scores: (documents, sets, variants).
    """

    def spread_of(sums: np.ndarray) -> np.ndarray:
        """(..., variants + 1) sums, of which the last is the number of documents."""
        ranges: np.ndarray = np.ptp(sums[..., :-1], axis=-1)
        return ranges / sums[..., -1]

    means = scores.mean(axis=0)
    mean = float(np.ptp(means, axis=-1).mean())
    ones = np.ones((*scores.shape[:2], 1))
    sums = np.concatenate([scores, ones], axis=2)
    values = pseudo_values(sums, spread_of)
    return statistics.estimate(values, bounds=SHARE, mean=mean)


def _only(sets: Sets, wanted: Callable[[TaskRun], bool]) -> list[PromptSet]:
    """The sets with only the answers that are wanted, without sets that have no such answers."""
    kept = []
    for prompt_set in sets:
        answered = tuple(filter(wanted, prompt_set.answered))
        if answered:
            kept.append(replace(prompt_set, answered=answered))
    return kept


def _in_first_order(sets: Sets) -> list[PromptSet]:
    return _only(sets, lambda unit: unit.run.order == 0 and unit.run.format == 0)


def _formats(sets: Sets) -> np.ndarray | None:
    """(documents, sets, formats) scores in the first order, in the formats that all sets have.

    None if that is fewer than two.
    """
    by_set = []
    for prompt_set in _only(sets, lambda unit: unit.run.order == 0):
        by_set.append({unit.run.format: unit.answers.items for unit in prompt_set.answered})
    shared = set.intersection(*map(set, by_set)) if by_set else set()
    if len(shared) < 2:
        return None
    scores = [[items[number] for number in sorted(shared)] for items in by_set]
    return np.moveaxis(np.array(scores), -1, 0)


def _calibration(sets: Sets, name: str) -> Estimate:
    metric = CALIBRATION[name]

    def items(answers: Answers) -> np.ndarray:
        assert answers.logprobs is not None and answers.golds is not None
        return metric.items(answers.logprobs, answers.golds)

    return estimated(sets, metric.aggregation, _bounds(CONFIDENCE[name]), items)
