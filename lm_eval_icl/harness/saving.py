"""Checks that results files (`--output_path`) were written: if not, lm-eval warns and reports success.

A batch job would then look finished although its results are lost. This package's commands end with an error.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lm_eval.loggers.evaluation_tracker import EvaluationTracker
from lm_eval.utils import make_table

from lm_eval_icl.errors import InputError


def results_saved(original: Callable[..., None], tracker: EvaluationTracker, results: Any, **kwargs: Any) -> None:
    """Wrapper of `EvaluationTracker.save_results_aggregated`: a file that is missing or incomplete is an error, after
    the table of results was printed."""
    original(tracker, results=results, **kwargs)
    if not tracker.output_path:
        return
    path = Path(tracker.output_path)
    name = f"{path.stem}_{tracker.date_id}.json" if path.suffix == ".json" else f"results_{tracker.date_id}.json"
    if whole_lines(_folder(tracker) / name, 1, together=True):
        return
    print(make_table(results))  # lm-eval prints the table after saving
    raise InputError(
        f"the results could not be saved in {tracker.output_path} (lm-eval's warning above says why). They are printed "
        "above; with --use_cache the same command makes them again without computing."
    )


def samples_saved(
    original: Callable[..., None], tracker: EvaluationTracker, task_name: str, samples: Any, **kwargs: Any
) -> None:
    """Wrapper of `EvaluationTracker.save_results_samples`: a file that is missing or incomplete is an error."""
    original(tracker, task_name=task_name, samples=samples, **kwargs)
    if not tracker.output_path:
        return
    if not whole_lines(_folder(tracker) / f"samples_{task_name}_{tracker.date_id}.jsonl", len(samples)):
        raise InputError(
            f"the samples of task {task_name!r} could not be saved in {tracker.output_path} (lm-eval's warning above "
            "says why). The results are there; with --use_cache the same command makes both without computing."
        )


def _folder(tracker: EvaluationTracker) -> Path:
    """The folder into which lm-eval writes."""
    path = Path(tracker.output_path)
    return path.parent if path.suffix == ".json" else path / str(tracker.general_config_tracker.model_name_sanitized)


def whole_lines(path: Path, number: int, together: bool = False) -> bool:
    """Whether a file has `number` lines that are each JSON; with `together`, whether the whole file is JSON."""
    try:
        with path.open(encoding="utf-8") as file:
            entries = [json.load(file)] if together else [json.loads(line) for line in file]
    except (OSError, ValueError):
        return False
    return len(entries) == number
