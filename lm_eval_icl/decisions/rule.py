"""The base classes of decision rules: dataclasses with a rule's arguments as fields, its queries and its formula.

s(y|x) is the summed log-probability of option y after the demonstrations and document x. p(y|x) is its softmax over the
C options. All numbers are float64. scipy is imported inside functions, since the import takes half a second.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import BeforeValidator, Field

from lm_eval_icl.errors import whole

Doc = Mapping[str, Any]
# The types of arguments: a whole number from 1; and one or several texts, which may be joined by "|".
Number = Annotated[int, BeforeValidator(whole)]
_divided = BeforeValidator(
    lambda texts: tuple(texts.split("|")) if isinstance(texts, str) else texts
)
Texts = Annotated[tuple[str, ...], _divided, Field(min_length=1)]


@dataclass(frozen=True)
class Rule(ABC):
    """A decision rule.

    Attributes:
        name: the name that users write.
        fixed_options: why all documents must have the same options; empty if they need not.
        is_transductive: whether the decision for a document depends on other evaluated documents.
        is_logarithmic: whether values are log-probabilities plus a constant, so that metrics may divide by a length.
    """

    name: ClassVar[str]
    fixed_options: ClassVar[str] = ""
    is_transductive = False
    is_logarithmic = True

    @property
    def arguments(self) -> dict[str, Any]:
        """All arguments by name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @property
    def given(self) -> dict[str, Any]:
        """The arguments whose values differ from the defaults."""
        return {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != f.default
        }

    def __str__(self) -> str:
        """The rule as a text that names its results. It does not depend on the order in which arguments were given. The
        digest of a value replaces the value if it has characters that a name may not have."""
        parts = [self.name]
        for name, value in sorted(self.given.items()):
            text = "|".join(value) if isinstance(value, tuple) else str(value)
            if not re.fullmatch(r"[\w./|\[\] -]+", text, re.ASCII):
                text = hashlib.sha256(json.dumps(value).encode()).hexdigest()[:8]
            parts.append(f"{name}={text}")
        return ":".join(parts)


@dataclass(frozen=True)
class Shift(Rule):
    """A rule that shifts the log-probabilities of a document's options by their log-probabilities after other queries.

    Attributes:
        bare: whether its queries have no prefix and no demonstrations before them.
        by_document: whether its queries depend on the document, or only on the demonstrations before them.
        asks: whether it makes queries. If not, the task's documents are the queries.
    """

    bare: ClassVar[bool] = False
    by_document: ClassVar[bool] = True
    asks = True

    @abstractmethod
    def queries(self, task: Any, doc: Doc, place: Any, facts: dict[str, Any]) -> list[str]:
        """The queries for the document `doc`, which has the demonstrations of `place`. `task` makes the queries
        (`harness.rule_queries.RuleQueries`). Entries for the results file are added to `facts`."""

    def constants(self, query_scores: np.ndarray) -> np.ndarray:
        """(n, C) s(y|query) -> (C,) the subtracted constants: the logarithms of the mean probabilities."""
        return log_mean_exp(query_scores)

    def values(self, scores: np.ndarray, query_scores: np.ndarray) -> np.ndarray:
        """(D, C) s(y|x), (n, C) s(y|query) -> (D, C) the values of the options. The largest value wins."""
        shifted: np.ndarray = np.asarray(scores, dtype=np.float64) - self.constants(query_scores)
        return shifted


@dataclass(frozen=True)
class Comparison(Rule):
    """A rule that compares documents with m labeled rows of each class, by a vector of the query's last token: the
    log-probabilities of the next token (V), if it `reads_log_probs`, or else the last hidden state (d)."""

    fixed_options = "a comparison of documents"
    is_logarithmic = False
    reads_log_probs: ClassVar[bool] = False

    m: Number

    @abstractmethod
    def values(
        self, states: np.ndarray, anchors: np.ndarray, labels: np.ndarray, classes: int
    ) -> np.ndarray:
        """(D, d or V) of documents, (N, d or V) of labeled rows, (N,) their classes from 0 on -> (D, C) values."""


def log_mean_exp(scores: np.ndarray) -> np.ndarray:
    """(n, C) log-probabilities -> (C,) the logarithm of the mean probability of each option."""
    from scipy.special import logsumexp

    mean: np.ndarray = logsumexp(np.asarray(scores, dtype=np.float64), axis=0) - np.log(len(scores))
    return mean


def log_normalized(scores: np.ndarray) -> np.ndarray:
    """(..., C) s(y|x) -> (..., C) log p(y|x)."""
    from scipy.special import log_softmax

    normalized: np.ndarray = log_softmax(np.asarray(scores, dtype=np.float64), axis=-1)
    return normalized
