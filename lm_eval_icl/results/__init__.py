"""lm-eval's result files as pandas tables (`results.runs`, `results.scores`,
`results.documents`), and statistics on them."""

from lm_eval_icl.results.tables import brier, documents, ece, log_probability, runs, scores

__all__ = ["brier", "documents", "ece", "log_probability", "runs", "scores"]
