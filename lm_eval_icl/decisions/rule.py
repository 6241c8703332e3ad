"""The base classes of decision rules: dataclasses with arguments, queries and a formula.

s(y|x) is the summed log-probability of option y after the demonstrations and document x. p(y|x) is
its softmax over the C options. All numbers are float64. scipy is imported inside functions, since
the import takes half a second.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from lm_eval_icl.declared import Arguments, Positive
from lm_eval_icl.files import as_json, digest

Doc = Mapping[str, Any]


class Rule(Arguments, ABC):
    """A decision rule, either a `Shift` or a `Comparison`. As a text, it names its results.

    The leaderboard's page shows the first three paragraphs of a rule's docstring, which should give
    its source and its formula.

    Attributes:
        name: the name that users write.
        fixed_options: why all documents must have the same options; empty if they need not.
        is_transductive: whether the decision for a document depends on other evaluated documents.
        is_logarithmic: whether values are log-probabilities plus a constant, so that metrics may
            divide by a length.
    """

    name: ClassVar[str]
    fixed_options: ClassVar[str] = ""
    is_transductive = False
    is_logarithmic = True

    def _written(self, value: Any) -> str:
        """The digest of a value replaces it if it has characters that a name may not have."""
        text = super()._written(value)
        if re.fullmatch(r"[\w./|\[\] -]+", text, re.ASCII):
            return text
        return digest(as_json(value))[:8]


class Shift(Rule):
    """A rule that shifts log-probabilities of options by those after other queries.

    Attributes:
        bare: whether its queries have no prefix and no demonstrations before them.
        by_document: whether its queries depend on the document, or only on the demonstrations
            before them.
        asks: whether it makes queries. If not, the task's documents are the queries.
    """

    bare: ClassVar[bool] = False
    by_document: ClassVar[bool] = True
    asks = True

    @abstractmethod
    def queries(self, source: Any, doc: Doc, start: Any, facts: dict[str, Any]) -> list[str]:
        """The queries for a document.

        Args:
            source: makes queries from the task's documents (`harness.rule_queries.RuleQueries`).
            start: the prefix and the demonstrations before the queries
                (`harness.rule_queries.PromptStart`).
            facts: entries for the results file are added to these.
        """

    def constants(self, query_scores: np.ndarray) -> np.ndarray:
        """The constants to subtract (C,), the logarithms of the mean probabilities.

        Args:
            query_scores: s(y|query), (n, C).
        """
        return log_mean_exp(query_scores)

    def values(self, scores: np.ndarray, query_scores: np.ndarray) -> np.ndarray:
        """The values of the options (D, C). The largest value wins.

        Args:
            scores: s(y|x), (D, C).
            query_scores: s(y|query), (n, C).
        """
        shifted: np.ndarray = np.asarray(scores, dtype=np.float64) - self.constants(query_scores)
        return shifted


@dataclass(frozen=True)
class Comparison(Rule):
    """A rule that compares documents with m labeled rows of each class.

    It compares a vector of the query's last token: the log-probabilities of the next token (V), if
    it `reads_log_probs`, or else the last hidden state (d).
    """

    fixed_options = "a comparison of documents"
    is_logarithmic = False
    reads_log_probs: ClassVar[bool] = False

    m: Positive

    @abstractmethod
    def values(
        self, states: np.ndarray, anchors: np.ndarray, labels: np.ndarray, classes: int
    ) -> np.ndarray:
        """The values of the classes (D, C). The largest value wins.

        Args:
            states: of the documents, (D, d or V).
            anchors: of the labeled rows, (N, d or V).
            labels: the classes of the labeled rows from 0 on, (N,).
            classes: C, how many classes there are.
        """


def log_mean_exp(scores: np.ndarray) -> np.ndarray:
    """The logarithm of the mean probability of each option (C,), from log-probabilities (n, C)."""
    from scipy.special import logsumexp

    mean: np.ndarray = logsumexp(np.asarray(scores, dtype=np.float64), axis=0) - np.log(len(scores))
    return mean


def log_normalized(scores: np.ndarray) -> np.ndarray:
    """log p(y|x) from s(y|x), both (..., C)."""
    from scipy.special import log_softmax

    normalized: np.ndarray = log_softmax(np.asarray(scores, dtype=np.float64), axis=-1)
    return normalized
