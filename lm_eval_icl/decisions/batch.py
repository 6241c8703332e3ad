"""Batch calibration (Zhou et al. 2023)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import numpy as np

from lm_eval_icl.decisions.rule import Doc, Number, Shift, log_mean_exp, log_normalized
from lm_eval_icl.errors import InputError


@dataclass(frozen=True)
class BatchCalibration(Shift):
    """Batch calibration (Zhou et al. 2023, arXiv 2309.17249). The documents x' are all documents of the task, so that a
    decision depends on all of them; or, with of=pool, m few-shot documents after the same demonstrations:

        division:    s(y|x) - log mean_x' p(y|x')
        difference:  p(y|x) - mean_x' p(y|x')

    Implementations of the paper have either formula. With two options, both decide alike. p is normalized over the
    options before it is averaged. (The mean of the logarithms, s(y|x) - mean_x' s(y|x'), is another function.)
    """

    name = "batch"
    fixed_options = "a mean over documents"
    by_document = False

    by: Literal["division", "difference"] = "division"
    of: Literal["task", "pool"] = "task"
    m: Number = 128

    @property
    def asks(self) -> bool:  # type: ignore[override]
        return self.of == "pool"

    @property
    def is_transductive(self) -> bool:  # type: ignore[override]
        return self.of == "task"

    @property
    def is_logarithmic(self) -> bool:  # type: ignore[override]
        return self.by == "division"

    def queries(self, task: Any, doc: Doc, place: Any, facts: dict[str, Any]) -> list[str]:
        drawn = dict(islice(task.drawn(self.name, place), self.m))
        queries = list(drawn.values())
        if len(queries) < self.m:
            raise InputError(
                f"m={self.m}: only {len(queries)} few-shot documents are neither demonstrations nor evaluated: lower m."
            )
        facts |= {"seed": task.seed, "pool": len(task.pool)}
        facts.setdefault("rows", list(drawn))  # of the first context
        return queries

    def constants(self, query_scores: np.ndarray) -> np.ndarray:
        return log_mean_exp(log_normalized(query_scores))

    def values(self, scores: np.ndarray, query_scores: np.ndarray) -> np.ndarray:
        if self.by == "division":
            return super().values(scores, query_scores)
        differences: np.ndarray = np.exp(log_normalized(scores)) - np.exp(
            self.constants(query_scores)
        )
        return differences
