"""What a study measured on its dev set, where it chose arguments."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from lm_eval_icl.errors import is_number
from lm_eval_icl.results.board import Column, Entry
from lm_eval_icl.results.records import Run


class DevPoint(NamedTuple):
    """The score of one value of an argument, the mean over sets of demonstrations."""

    at: float
    score: float
    is_chosen: bool  # for some of the sets


def score(entry: Entry, column: Column) -> float | None:
    """The score of an entry whose study has measured it alone and chosen nothing; None for others."""
    scores: dict[str, list[float]] = {}
    for run in entry.runs if entry.rule is None else ():  # what was measured is of the model by itself
        if len(run.study.curve) == 1:
            for task in run.tasks:
                scores.setdefault(task, []).append(run.study.curve[0]["score"])
    if not column.weights.keys() <= scores.keys():
        return None
    return math.fsum(weight * fmean(scores[task]) for task, weight in column.weights.items())


def curves(runs: Sequence[Run]) -> Mapping[tuple[str, str], list[DevPoint]]:
    """The curves of an entry: by the name of what varies, and by tasks and what else varies, in words."""
    scores: dict[tuple[str, str], dict[float, list[tuple[float, bool]]]] = {}
    for run in runs:
        points = [(point["arguments"], point["score"]) for point in run.study.curve]
        names = dict.fromkeys(name for arguments, _ in points for name in arguments)
        varying = [name for name in names if len({repr(arguments.get(name)) for arguments, _ in points}) > 1]
        numeric = [name for name in varying if all(is_number(arguments.get(name)) for arguments, _ in points)]
        if not numeric:
            continue
        x_name = "T" if "T" in numeric else numeric[0]
        for arguments, scored in points:
            rest = (f"{name}={arguments.get(name)}" for name in varying if name != x_name)
            line = ", ".join(["/".join(run.tasks), *rest])
            is_chosen = all(run.study.arguments.get(name) == arguments.get(name) for name in varying)
            at = scores.setdefault((x_name, line), {}).setdefault(float(arguments[x_name]), [])
            at.append((scored, is_chosen))
    return {
        name: [
            DevPoint(x, fmean(s for s, _ in scored), any(chosen for _, chosen in scored))
            for x, scored in sorted(by_x.items())
        ]
        for name, by_x in scores.items()
    }
