"""lm-eval's result files as pandas tables, and statistics on them: `results.runs`, `.scores` and `.documents`."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lm_eval_icl.results.tables import brier, documents, ece, log_probability, runs, scores

__all__ = ["brier", "documents", "ece", "log_probability", "runs", "scores"]


def __getattr__(name: str) -> Any:
    """They are imported when they are used, since pandas takes a third of a second."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lm_eval_icl.results import tables

    return getattr(tables, name)
