"""What the dev set chooses: a function of scores."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from lm_eval_icl.studies.cells import Candidate, Cell, Grid


@dataclass(frozen=True)
class DevChoice:
    """What was chosen on the dev set.

    Attributes:
        cells: the cells on the test set, one for each order, which say what was chosen.
        names: the arguments (or "seeds", "decide") that there were several values of to choose from.
        curve: the mean over orders on the dev set of every candidate: {"arguments" (with `decide`, if rules are chosen
            among), "seed", "score"}.
    """

    cells: tuple[Cell, ...]
    names: tuple[str, ...]
    curve: tuple[Mapping[str, Any], ...]


def choose(grid: Grid, candidates: Sequence[Candidate], results: Callable[[Cell], Mapping[str, Any]]) -> DevChoice:
    """What the dev set chooses among these, by the mean over orders.

    Args:
        results: returns the results file of a cell on the dev set.
    """
    dev = grid.study.dev
    assert dev is not None
    task = grid.tasks[candidates[0].dev[0].task]
    scores = [
        [(score(found := results(cell), task.reported, dev.metric, candidate.rule), documents(found, task.reported))
         for cell in candidate.dev]
        for candidate in candidates
    ]  # fmt: skip
    index, means = best(scores, task.higher_is_better)
    rules = [{"decide": candidate.rule or "none"} if "decide" in dev.choose else {} for candidate in candidates]
    curve: tuple[dict[str, Any], ...] = tuple(
        {"arguments": {**candidate.variant.arguments, **rule}, "seed": candidate.seed, "score": mean}
        for candidate, rule, mean in zip(candidates, rules, means, strict=True)
    )
    values = [{**point["arguments"], "seeds": point["seed"]} for point in curve]
    names = tuple(name for name in dev.choose if len({str(of_one.get(name)) for of_one in values}) > 1)
    chosen = candidates[index]
    rule = chosen.rule if "decide" in names else ""
    return DevChoice(tuple(replace(cell, chosen=names, rule=rule) for cell in chosen.test), names, curve)


def score(results: Mapping[str, Any], task: str, metric: str, rule: str = "") -> float:
    """The metric of a cell, under a decision rule or by what the model says."""
    values = results["results"][task]
    if rule:
        return float(values[f"{metric},{rule}"])
    # Of several filters of the task's own, the first counts.
    return float(next(value for name, value in values.items() if name.startswith(f"{metric},")))


def documents(results: Mapping[str, Any], task: str) -> int:
    """How many documents a cell has."""
    return int(results["n-samples"][task]["effective"])


def best(candidates: Sequence[Sequence[tuple[float, int]]], higher: bool) -> tuple[int, list[float]]:
    """The candidate with the best mean over orders; of equal ones, the first.

    Counts of documents, such as accuracies, are compared exactly. Means of other metrics, which are rounded, are equal
    if they differ by less than a billionth. A score that is no number is the worst.

    Args:
        candidates: of each, the score and the number of documents for every order.
        higher: whether more is better.

    Returns:
        Its index, and the means of all.
    """
    means: list[Fraction | float] = []
    all_are_counts = True
    for orders in candidates:
        total: Fraction | float = Fraction(0)
        for value, number in orders:
            if not math.isfinite(value):
                total += -math.inf if higher else math.inf
                continue
            count = Fraction(round(value * number), number)
            is_count = float(count) == value
            total += count if is_count else Fraction(value)
            all_are_counts &= is_count
        means.append(total / len(orders))
    top = max(means) if higher else min(means)
    equal = [mean == top or (not all_are_counts and math.isclose(mean, top, rel_tol=1e-9)) for mean in means]
    return equal.index(True), [float(mean) for mean in means]
