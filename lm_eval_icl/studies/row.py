"""What one cell of a study gave."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """What one cell gave: one method on one task, with one set of demonstrations in one order.

    Attributes:
        model: the `pretrained` of the model, of one that the study has trained that of the model it began from.
        method: "hf", "icl", ...
        arguments: of the method, as given in the study: {"T": 3, "eta": 0.01}.
        task: the task, no group.
        groups: the groups that the task is in, from the study's `tasks`, of those that are the training's targets.
        num_fewshot: how many demonstrations a prompt has.
        demonstrations: how they are drawn.
        seed: of the draw.
        order: 0 to orders - 1; which permutation of the demonstrations that were drawn.
        split: "test" or "dev".
        chosen: its arguments, or its seed, were chosen on dev for this task, or nothing was to be chosen.
        documents: how many were scored.
        score: the metric; in 0..1 for accuracy.
        predictions: the option with the highest log-likelihood, document by document; empty if there are no options.
        seconds: what scoring took.
        training: the name of the study's training; empty if the model was not trained.
        code: "other code" or "unknown code" if that has made the cell; empty if this code has.
    """

    model: str
    method: str
    arguments: Mapping[str, Any]
    task: str
    groups: tuple[str, ...]
    num_fewshot: int
    demonstrations: str
    seed: int
    order: int
    split: str
    chosen: bool
    documents: int
    score: float
    predictions: tuple[int, ...]
    seconds: float
    training: str = ""
    code: str = ""
