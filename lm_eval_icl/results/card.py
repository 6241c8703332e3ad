"""The robustness card: what a prediction should not depend on, a row a method, a column a property.

Each property of a row is an estimate on a task, from the row's samples there, and the mean over tasks that count alike.
What is compared has the same documents, and sets of demonstrations of the same seeds, so that it is paired.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from lm_eval_icl.results import statistics
from lm_eval_icl.results.board import Card, CardRow, Column, Entry, PromptSet, Property, RowKey, TaskRun
from lm_eval_icl.results.metrics import AGGREGATIONS, CALIBRATION, bootstrap
from lm_eval_icl.results.records import Answers
from lm_eval_icl.results.statistics import Bounds, Difference, Estimate

ACCURACY = Property("accuracy", "with the right labels, in the task's own format, over sets and orders", "higher")
FLIPS = Property("order flips", "how often two orders of the same demonstrations give different predictions", "lower")
FORMATS = Property("format spread", "accuracy in the best format less that in the worst, the mean over sets", "lower")
SETS = Property("set spread", "accuracy with the best set of demonstrations less that with the worst", "lower")
SHOTS = Property("shots gain", "accuracy with the most demonstrations less that with the fewest (not none)", "")
CONFIDENCE = {
    "ece": Property("ece", "expected calibration error of the options' probabilities, in 15 bins", "lower"),
    "brier": Property("brier", "the sum over options of (probability - whether right) squared", "lower", False),
    "log_probability": Property("log-prob", "the log-probability of the right option", "higher", False),
}
# Words that tell apart rows of a board that are one row of the card.
_VARIED = r"\d+( to \d+)? shots?|labels=.*|no labels"
_SHARE = (0.0, 1.0)

Sets = Sequence[PromptSet]
# Of one row on one task: the sets of demonstrations by their labels ("" for the right ones) and their number.
Asked = dict[tuple[str, int], Sets]


def card_of(key_of: Mapping[Entry, RowKey], columns: Sequence[Column]) -> Card | None:
    """The card of a board's rows, by rule and accuracy: those that differ only in labels and numbers of demonstrations
    are one. It is of the tasks on which labels or formats are varied; None if there are none."""
    tasks = dict.fromkeys(task for column in columns if column.percent for task in column.weights)
    asked: dict[RowKey, dict[str, Asked]] = {}
    entries: dict[RowKey, Entry] = {}
    for entry, key in key_of.items():
        labels = dict(key.setting).get("labels", "")
        setting = tuple(pair for pair in key.setting if pair[0] != "labels")
        row = replace(key, setting=setting, switches=tuple(pair for pair in key.switches if pair[0] != "shots"))
        entries.setdefault(row, entry)
        for task in tasks.keys() & entry.cells.keys():
            if sets := entry.cells[task].sets:
                result = sets[0].answered[0].result
                if result.aggregation == "mean":  # of single documents' scores
                    asked.setdefault(row, {}).setdefault(task, {})[labels, result.shots] = sets
    used = [task for task in tasks if any(_is_varied(of_row.get(task, {})) for of_row in asked.values())]
    rows = []
    for row, entry in entries.items():
        on_tasks = [dict(properties(asked.get(row, {}).get(task, {}))) for task in used]
        values = {of: _mean(of, [on[of] for on in on_tasks]) for on in on_tasks[:1] for of in on
                  if all(of in other for other in on_tasks)}  # fmt: skip
        if values:
            words = [word for word in entry.conditions.split(", ") if not re.fullmatch(_VARIED, word)]
            rows.append(CardRow(replace(entry, conditions=", ".join(filter(None, words))), values))
    rules = list(dict.fromkeys(made.entry.rule for made in rows))
    rows.sort(key=lambda made: (rules.index(made.entry.rule), -made.values[ACCURACY].mean))
    shown = dict.fromkeys(of for made in rows for of in made.values)
    fixed = [ACCURACY, FLIPS, *(of for of in shown if of.labels), FORMATS, SETS, SHOTS, *CONFIDENCE.values()]
    return Card(tuple(of for of in fixed if of in shown), tuple(rows), tuple(used)) if rows else None


def _is_varied(asked: Asked) -> bool:
    formats = (unit.run.format for sets in asked.values() for of in sets for unit in of.answered)
    return any(labels for labels, _ in asked) or any(formats)


def _bounds(of: Property) -> Bounds:
    return _SHARE if of.percent else (0.0, 2.0) if of.better == "lower" else (-math.inf, 0.0)


def _mean(of: Property, parts: Sequence[Estimate]) -> Estimate:
    """The mean over tasks, which count alike."""
    differences = [part for part in parts if isinstance(part, Difference)]
    if len(parts) == 1:
        return parts[0]
    if len(differences) == len(parts):
        return statistics.difference_group(differences, [1] * len(parts), bounds=_SHARE)
    return statistics.estimate_group(parts, [1] * len(parts), bounds=_bounds(of))


def properties(asked: Asked) -> Iterator[tuple[Property, Estimate]]:
    """What is known of a row on a task. The number of demonstrations is that with most runs; labels, formats and other
    numbers are those of the first order."""
    runs = {n: sum(len(of.answered) for of in sets) for (labels, n), sets in asked.items() if not labels}
    if not runs:
        return
    shots = max(runs, key=runs.__getitem__)
    base = _only(asked["", shots], lambda unit: unit.run.format == 0)
    if not base:
        return
    yield ACCURACY, statistics.estimate(_by_set(base, _scores), bounds=_SHARE)
    several = [[unit.answers.predictions for unit in of.answered] for of in base if len(of.answered) > 1]
    flips = statistics.order_sensitivity(np.array(of).T for of in several if not any(order is None for order in of))
    if flips is not None:
        yield FLIPS, flips
    first = _in_first_order(base)
    for (labels, n), sets in sorted(asked.items()):
        if labels and n == shots and (cost := _less(first, _in_first_order(sets))) is not None:
            what = f"accuracy with the right labels less that with {labels} labels in the demonstrations"
            name = "random labels cost" if labels == "random" else f"{labels.replace(':', ' ')} cost"
            yield Property(name, what, "", labels=labels), cost
    formats = _formats(asked["", shots])
    if formats is not None:
        yield FORMATS, spread(formats)
    if len(base) > 1:
        yield SETS, spread(_by_set(base, _scores)[:, None])
    numbers = sorted(n for n in runs if n)
    if len(numbers) > 1:
        most, fewest = (_in_first_order(asked["", n]) for n in (numbers[-1], numbers[0]))
        if (gain := _less(most, fewest)) is not None:
            yield SHOTS, gain
    answers = [unit.answers for of in base for unit in of.answered]
    if all(of.logprobs is not None and of.golds is not None for of in answers):
        for name, of in CONFIDENCE.items():
            yield of, _calibration(base, name)


def spread(scores: np.ndarray) -> Estimate:
    """The largest less the smallest mean over documents, and of several sets the mean of that, with an interval by
    bootstrap. It is at least 0, and more variants have a larger one.

    Args:
        scores: (documents, sets, variants).
    """
    sums = np.concatenate([scores, np.ones((*scores.shape[:2], 1))], axis=2)
    found = bootstrap(sums, lambda of: np.ptp(of[..., :-1], axis=-1) / of[..., -1], bounds=_SHARE)
    # Where no document shows how they vary, as many may differ unseen as Wilson's interval for 0 allows.
    unseen = statistics.wilson(0, len(scores))[1] if found.error == 0 else 0.0
    return replace(found, high=min(1.0, max(found.high, found.mean + unseen)))


def _scores(answers: Answers) -> np.ndarray:
    return answers.items


def _by_set(sets: Sets, of: Callable[[Answers], np.ndarray]) -> np.ndarray:
    """(documents, sets, ...) of what answers have, the mean over orders."""
    return np.stack([np.mean([of(unit.answers) for unit in one.answered], axis=0) for one in sets], axis=1)


def _only(sets: Sets, wanted: Callable[[TaskRun], bool]) -> list[PromptSet]:
    """The sets with those answers alone that are wanted, if there are any."""
    kept = (replace(of, answered=tuple(filter(wanted, of.answered))) for of in sets)
    return [of for of in kept if of.answered]


def _in_first_order(sets: Sets) -> list[PromptSet]:
    return _only(sets, lambda unit: unit.run.order == 0 and unit.run.format == 0)


def _less(more: Sets, less: Sets) -> Difference | None:
    """The first scores less the second, on sets of the same seeds; None without any."""
    others = {of.label: of for of in less}
    pairs = [(of, others[of.label]) for of in more if of.label in others]
    documents = {unit.answers.documents for pair in pairs for of in pair for unit in of.answered}
    if len(documents) != 1:
        return None
    first, second = zip(*pairs, strict=True)
    return statistics.difference(_by_set(first, _scores), _by_set(second, _scores), bounds=_SHARE)


def _formats(sets: Sets) -> np.ndarray | None:
    """(documents, sets, formats) scores in the first order, in the formats that all sets have; None without others."""
    of_sets = [
        {unit.run.format: unit.answers.items for unit in of.answered}
        for of in _only(sets, lambda unit: unit.run.order == 0)
    ]
    numbers = sorted(set.intersection(*map(set, of_sets))) if of_sets else []
    if len(numbers) < 2:
        return None
    return np.stack([np.stack([of[number] for number in numbers], axis=1) for of in of_sets], axis=1)


def _calibration(sets: Sets, name: str) -> Estimate:
    metric = CALIBRATION[name]
    aggregation = AGGREGATIONS[metric.aggregation]

    def items(answers: Answers) -> np.ndarray:
        assert answers.logprobs is not None and answers.golds is not None
        return metric.items(answers.logprobs, answers.golds)  # type: ignore[arg-type]

    if metric.aggregation == "mean":
        return statistics.estimate(_by_set(sets, items), bounds=_bounds(CONFIDENCE[name]))
    sums = _by_set(sets, lambda answers: aggregation.features(items(answers)))
    return bootstrap(sums, aggregation.value, bounds=aggregation.bounds)
