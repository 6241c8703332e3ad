"""MetaICL's decision and metric: the option with the smallest mean loss a token; macro-F1, or accuracy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def mean_losses(logprobs: Sequence[float], tokens: Sequence[int]) -> np.ndarray:
    """The mean loss of an option's tokens, from the sums of their log-probabilities and their numbers."""
    return -np.asarray(logprobs, dtype=np.float64) / np.asarray(tokens, dtype=np.float64)


def decision(losses: Sequence[float] | np.ndarray) -> int:
    """The option with the smallest loss; the first if several have it."""
    return int(np.argmin(losses))


def macro_f1(pairs: Sequence[tuple[str, str]]) -> float:
    """The mean of the F1 of the classes that some document has: a class that is only predicted does not count.

    Args:
        pairs: for each document, the right class and the predicted one.
    """
    scores = []
    for label in {right for right, _ in pairs}:
        actual = sum(right == label for right, _ in pairs)
        predicted = sum(answer == label for _, answer in pairs)
        both = sum(right == answer == label for right, answer in pairs)
        scores.append(2 * both / (actual + predicted))  # the harmonic mean of precision and recall
    return sum(scores) / len(scores)
