"""lm-eval's result files as pandas tables, and statistics on them: `results.runs`, `.scores` and `.documents`."""

from lm_eval_icl.results.tables import brier, documents, ece, log_probability, runs, scores

__all__ = ["brier", "documents", "ece", "log_probability", "runs", "scores"]
