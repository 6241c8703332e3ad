"""Decision rules: which option wins, given the log-probabilities of all. Pure functions of arrays."""

from lm_eval_icl.decisions.additive import batch, contextual, log_mean_exp, log_normalized, pmi
from lm_eval_icl.decisions.neighbors import hidden, knn

__all__ = ["batch", "contextual", "hidden", "knn", "log_mean_exp", "log_normalized", "pmi"]
