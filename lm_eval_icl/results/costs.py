"""What runs cost: tokens, forward passes, seconds and memory, as results files record them."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from lm_eval_icl.results.fields import at, count, mapping
from lm_eval_icl.results.records import Run

_SUMMED = ("tokens_run", "tokens_saved", "passes", "seconds")


@dataclass(frozen=True)
class Cost:
    """The cost of one or several runs. A number is NaN if a file does not have it, or has 0: then
    the answers were read from a cache."""

    tokens_run: float  # tokens that went through the model for log-likelihoods
    tokens_saved: float  # how many more they would be if every request ran alone
    passes: float  # forward passes
    seconds: float  # of a study's unit; else of lm-eval's whole run, with loading the model
    peak_bytes: float  # the most memory: torch's on a GPU, else the process's
    shared_by: int  # the largest number of a study's cells that were scored together
    documents_run: int  # the documents of all runs together

    @property
    def tokens_a_document(self) -> float:
        return self.tokens_run / max(self.documents_run, 1)

    @property
    def saved(self) -> float:
        """The share that was saved of the tokens that single requests would run."""
        return self.tokens_saved / (self.tokens_run + self.tokens_saved)


def cost_of(runs: Collection[Run], tasks: Collection[str]) -> Cost | None:
    """The cost of runs on some tasks. None if a run had other tasks too, since its file says what
    all of its tasks cost together. Cells of a study that were scored together (orders of a set of
    demonstrations, numbers of passes) have equal shares of what they cost."""
    totals = dict.fromkeys(_SUMMED, 0.0)
    peak_bytes = math.nan
    shared_by = 1
    documents = 0
    for run in runs:
        if not run.tasks.keys() <= set(tasks):
            return None
        shared = mapping(at(run.icl, "study", "shared"))
        seconds = run.results.get("total_evaluation_time_seconds")
        recorded = {"seconds": seconds, **run.icl, **shared}
        cells = count(shared.get("cells")) or 1
        for name in _SUMMED:
            totals[name] += _number(recorded.get(name)) / cells
        peak_bytes = max(_number(run.icl.get("peak_bytes")), peak_bytes)
        shared_by = max(shared_by, cells)
        documents += sum(result.documents for result in run.tasks.values())
    return Cost(**totals, peak_bytes=peak_bytes, shared_by=shared_by, documents_run=documents)


def _number(value: Any) -> float:
    """A number above 0, which may be written as text; NaN for anything else."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return math.nan
    return number if 0 < number < 1e100 else math.nan
