"""Rules that subtract a constant from the log-probability of each option.

s(y|x) is the summed log-probability of option y behind the demonstrations and document x; p(y|x) is its softmax over
the options. Everything is computed in float64.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import logsumexp, softmax

from lm_eval_icl.errors import InputError


def contextual(scores: ArrayLike, content_free: ArrayLike) -> np.ndarray:
    """Contextual calibration (Zhao et al. 2021, arXiv 2102.09690, section 5), and domain-context calibration (Fei et
    al. 2023, arXiv 2305.19148, section 4), which differ in the content-free texts alone:

        s(y|x) - log mean_j exp s(y|cf_j)

    The paper's W = diag(p_cf)^-1, b = 0. The probabilities are averaged over the texts before they are normalized over
    the options: texts that give all options little probability count little. (The normalization itself changes no
    decision, and is left out.)

    Args:
        scores: (..., C) s(y|x).
        content_free: (n, C) s(y|cf_j), behind the same demonstrations.

    Returns:
        (..., C) calibrated log-probabilities, up to a constant of all options.
    """
    scores, content_free = _finite("scores", scores), _finite("content_free", content_free)
    _same_options(scores, content_free)
    shifted: np.ndarray = scores - log_mean_exp(content_free)
    return shifted


def pmi(scores: ArrayLike, premise: ArrayLike) -> np.ndarray:
    """Pointwise mutual information, and its domain-conditional form (Holtzman et al. 2021, arXiv 2104.08315, section
    3):

        s(y|x) - s(y|premise)

    Log-probabilities are summed over the tokens of an option, not averaged.

    Args:
        scores: (..., C) s(y|x).
        premise: (..., C) s(y|premise), without demonstrations.

    Returns:
        (..., C).
    """
    scores, premise = _finite("scores", scores), _finite("premise", premise)
    _same_options(scores, premise)
    shifted: np.ndarray = scores - premise
    return shifted


def batch(scores: ArrayLike, of: ArrayLike | None = None, by: str = "division") -> np.ndarray:
    """Batch calibration (Zhou et al. 2023, arXiv 2309.17249):

        division:    s(y|x) - log mean_x' p(y|x')
        difference:  p(y|x) - mean_x' p(y|x')

    Implementations of the paper differ in this; with two options, both decide alike. p is normalized over the options
    before it is averaged: the mean of the logarithms, s(y|x) - mean_x' s(y|x'), is another function.

    Args:
        scores: (D, C) s(y|x).
        of: (m, C) the scores that the mean is over; by default `scores`: each decision then depends on all documents.
        by: "division" or "difference".

    Returns:
        (D, C); log-probabilities up to a constant for `division`, differences of probabilities for `difference`.
    """
    scores = _finite("scores", scores)
    of = scores if of is None else _finite("of", of)
    if scores.ndim != 2 or of.ndim != 2:
        raise InputError(
            f"scores of shapes {scores.shape} and {of.shape}: must be a document a row, an option a column."
        )
    _same_options(scores, of)
    if of is scores and len(scores) < 2:
        raise InputError("the mean over one document is the document itself: give more documents.")
    log_mean = log_mean_exp(log_normalized(of))
    if by == "division":
        shifted: np.ndarray = scores - log_mean
        return shifted
    if by != "difference":
        raise InputError(f"by={by!r}: must be division or difference.")
    differences: np.ndarray = softmax(scores, axis=-1) - np.exp(log_mean)
    return differences


def log_mean_exp(scores: ArrayLike) -> np.ndarray:
    """(n, C) log-probabilities -> (C,) the logarithm of the mean probability of each option."""
    scores = np.asarray(scores, dtype=np.float64)
    mean: np.ndarray = logsumexp(scores, axis=0) - np.log(len(scores))
    return mean


def log_normalized(scores: ArrayLike) -> np.ndarray:
    """(..., C) s(y|x) -> (..., C) log p(y|x)."""
    scores = np.asarray(scores, dtype=np.float64)
    normalized: np.ndarray = scores - logsumexp(scores, axis=-1, keepdims=True)
    return normalized


def _finite(name: str, values: ArrayLike) -> np.ndarray:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim == 0 or 0 in array.shape:
        raise InputError(f"{name}: shape {array.shape}: must hold the log-probability of each option.")
    if not np.isfinite(array).all():
        raise InputError(f"{name}: a NaN or an infinity among the log-probabilities.")
    return array


def _same_options(scores: np.ndarray, other: np.ndarray) -> None:
    if scores.shape[-1] != other.shape[-1]:
        raise InputError(f"{scores.shape[-1]} options of documents, {other.shape[-1]} of what is subtracted.")
