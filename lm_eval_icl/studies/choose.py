"""What the dev set chooses: a function of scores."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from lm_eval_icl.studies.grid import Variant


@dataclass(frozen=True)
class DevChoice:
    """What was chosen on the dev set for a model, a method and a task.

    Attributes:
        variant, seed: the chosen method with its arguments, and the chosen seed; the seed itself if seeds are not
            chosen among.
        rule: the chosen decision rule; empty for what the model says by itself, and if rules are not chosen among.
        curve: the mean over orders on the dev set, for every variant, seed and rule, as it is recorded: {"arguments"
            (with `decide`, if rules are chosen among), "seed", "score"}.
        names: the arguments (or "seeds") that there were several values of to choose from.
    """

    variant: Variant
    seed: int
    rule: str
    curve: tuple[Mapping[str, Any], ...]
    names: tuple[str, ...]


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
        for score, documents in orders:
            if not math.isfinite(score):
                total += -math.inf if higher else math.inf
                continue
            count = Fraction(round(score * documents), documents)
            is_count = float(count) == score
            total += count if is_count else Fraction(score)
            all_are_counts &= is_count
        means.append(total / len(orders))
    top = max(means) if higher else min(means)
    equal = [mean == top or (not all_are_counts and math.isclose(mean, top, rel_tol=1e-9)) for mean in means]
    return equal.index(True), [float(mean) for mean in means]
