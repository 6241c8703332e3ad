"""Results files (`--output_path`) that cannot be written: lm-eval warns, prints its table and reports success.

A batch job then looks done whose results are lost. After a run of our models it ends in one line and an error.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lm_eval.loggers.evaluation_tracker import EvaluationTracker
from lm_eval.utils import make_table

from lm_eval_icl.errors import InputError
from lm_eval_icl.wrapping import wrap


def report_failures() -> None:
    """Let `EvaluationTracker` raise what it meets where it saves results of our models. Twice changes nothing."""
    for name in ("save_results_aggregated", "save_results_samples"):
        wrap(EvaluationTracker, name, _save)


def _save(original: Callable[..., None], tracker: EvaluationTracker, *args: Any, **kwargs: Any) -> None:
    # lm-eval gives the results by name, once, and then the samples of one task after another.
    results = tracker.__dict__.setdefault("icl_results", kwargs.get("results", {}))
    with _caught(logging.getLogger(EvaluationTracker.__module__)) as errors:
        original(tracker, *args, **kwargs)
    if errors and "icl" in results.get("config", {}):
        print(make_table(results))  # all that is left of them; lm-eval prints it after saving
        raise InputError(
            f"lm-eval-icl: the results could not be saved in {tracker.output_path}, or not be pushed: {errors[0]}. "
            "They are printed above; with --use_cache the same command makes them again without computing."
        ) from errors[0]


@contextmanager
def _caught(log: logging.Logger) -> Iterator[list[BaseException]]:
    """The errors that are being handled where something warns."""
    errors: list[BaseException] = []

    def note(record: logging.LogRecord) -> bool:
        if record.levelno >= logging.WARNING and (error := sys.exc_info()[1]) is not None:
            errors.append(error)
        return True

    level = log.level
    log.setLevel(min(log.getEffectiveLevel(), logging.WARNING))  # else nothing comes by here
    log.addFilter(note)
    try:
        yield errors
    finally:
        log.removeFilter(note)
        log.setLevel(level)
