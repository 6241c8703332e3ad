"""The decision rules, and how they are read as users write them.

A rule is written `contextual+batch:of=pool:m=128`, or {"contextual": {"texts": ["N/A"]}}.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BeforeValidator, Field

from lm_eval_icl.decisions.rule import (
    Comparison,
    Doc,
    Rule,
    Shift,
    log_mean_exp,
    log_normalized,
)
from lm_eval_icl.declared import Positive, read_into, spelled
from lm_eval_icl.errors import InputError, naming, suggestion


def _divided(texts: Any) -> Any:
    """The texts that "|" joins in one text."""
    return texts.split("|") if isinstance(texts, str) else texts


Texts = Annotated[tuple[str, ...], BeforeValidator(_divided), Field(min_length=1)]


@dataclass(frozen=True)
class Contextual(Shift):
    """Contextual calibration (Zhao et al. 2021, arXiv 2102.09690, section 5).

    With content-free texts cf, the values are

        s(y|x) - log mean_j exp s(y|cf_j)

    This is the paper's W = diag(p_cf)^-1, b = 0. The probabilities are averaged over the texts
    before they are normalized over the options, so that texts with small probabilities of all
    options count little. (The normalization itself is left out, since it changes no decision.)
    """

    name = "contextual"

    texts: Texts = ("N/A", "", "[MASK]")

    def queries(self, source: Any, doc: Doc, start: Any, facts: dict[str, Any]) -> list[str]:
        return rendered(source, doc, self.texts)


@dataclass(frozen=True)
class Domain(Shift):
    """Domain-context calibration (Fei et al. 2023, arXiv 2305.19148, section 4).

    It is contextual calibration with n texts of words that are drawn from the few-shot documents
    (of=pool) or from the evaluated documents (of=test). A text has one word more than the documents
    have on average. " ." ends each text, as in the authors' code.
    """

    name = "domain"

    n: Positive = 20
    of: Literal["pool", "test"] = "pool"

    @property
    def is_transductive(self) -> bool:  # type: ignore[override]
        return self.of == "test"

    def queries(self, source: Any, doc: Doc, start: Any, facts: dict[str, Any]) -> list[str]:
        generator = np.random.RandomState(source.seed)
        texts: list[dict[str, str]] = [{} for _ in range(self.n)]
        for name in source.fields(doc):
            words, corpus = source.words(name, evaluated=self.is_transductive)
            size = len(words) // corpus + 1
            for text in texts:
                drawn = [words[i] for i in generator.randint(0, len(words), size=size)]
                text[name] = " ".join(drawn) + " ."
            facts |= {"seed": source.seed, "corpus": corpus}
        return rendered(source, doc, texts)


def rendered(source: Any, doc: Doc, texts: Sequence[Any]) -> list[str]:
    """The queries with these texts in place of the document's.

    Empty queries are left out, since they cannot be scored.
    """
    queries = [query for text in texts if (query := source.content_free(doc, text)).strip()]
    if not queries:
        raise InputError("all of its texts make an empty query: give other texts (texts=...).")
    return queries


@dataclass(frozen=True)
class BatchCalibration(Shift):
    """Batch calibration (Zhou et al. 2023, arXiv 2309.17249).

    The documents x' are all documents of the task, so that a decision depends on all of them. With
    of=pool, they are m few-shot documents after the same demonstrations.

        division:    s(y|x) - log mean_x' p(y|x')
        difference:  p(y|x) - mean_x' p(y|x')

    Implementations of the paper have either formula. With two options, both decide alike. p is
    normalized over the options before it is averaged. (The mean of the logarithms,
    s(y|x) - mean_x' s(y|x'), is another function.)
    """

    name = "batch"
    fixed_options = "a mean over documents"
    by_document = False

    by: Literal["division", "difference"] = "division"
    of: Literal["task", "pool"] = "task"
    m: Positive = 128

    @property
    def asks(self) -> bool:  # type: ignore[override]
        return self.of == "pool"

    @property
    def is_transductive(self) -> bool:  # type: ignore[override]
        return self.of == "task"

    @property
    def is_logarithmic(self) -> bool:  # type: ignore[override]
        return self.by == "division"

    def queries(self, source: Any, doc: Doc, start: Any, facts: dict[str, Any]) -> list[str]:
        drawn = dict(islice(source.drawn(self.name, start), self.m))
        queries = list(drawn.values())
        if len(queries) < self.m:
            raise InputError(
                f"m={self.m}: only {len(queries)} few-shot documents are neither demonstrations "
                "nor evaluated: lower m."
            )
        facts |= {"seed": source.seed, "pool": len(source.pool)}
        facts.setdefault("rows", list(drawn))  # of the first context
        return queries

    def constants(self, query_scores: np.ndarray) -> np.ndarray:
        return log_mean_exp(log_normalized(query_scores))

    def values(self, scores: np.ndarray, query_scores: np.ndarray) -> np.ndarray:
        if self.by == "division":
            return super().values(scores, query_scores)
        mean = np.exp(self.constants(query_scores))
        differences: np.ndarray = np.exp(log_normalized(scores)) - mean
        return differences


@dataclass(frozen=True)
class PMI(Shift):
    """Pointwise mutual information (Holtzman et al. 2021, arXiv 2104.08315, section 3).

    No demonstrations stand before the premise. Log-probabilities are summed over the tokens of an
    option, not averaged. The values are

        s(y|x) - s(y|premise)
    """

    name = "pmi"
    bare = True

    premise: str | None = ":"

    def queries(self, source: Any, doc: Doc, start: Any, facts: dict[str, Any]) -> list[str]:
        return [self.premise or source.premise(doc)]


@dataclass(frozen=True)
class DomainPMI(PMI):
    """The domain-conditional form of PMI.

    By default, the premise is the template's text after its last field.
    """

    name = "dcpmi"

    premise: str | None = None


@dataclass(frozen=True)
class Hidden(Comparison):
    """Hidden calibration (Cho et al. 2025, arXiv 2406.16535): the nearest class centroid.

    The Euclidean distance is that between the last hidden states of queries' last tokens. The
    values are minus the distances.
    """

    name = "hidden"

    m: Positive = 16

    def values(
        self, states: np.ndarray, anchors: np.ndarray, labels: np.ndarray, classes: int
    ) -> np.ndarray:
        from scipy.spatial.distance import cdist

        states = _without_nan(states)
        anchors = _without_nan(anchors)
        of_class = np.asarray(labels)
        centroids = [anchors[of_class == number].mean(0) for number in range(classes)]
        distances: np.ndarray = cdist(states, np.stack(centroids))
        if not np.isfinite(distances).all():
            raise InputError(
                "some hidden states are infinite, so that no distances can be computed."
            )
        return -distances


@dataclass(frozen=True)
class KNN(Comparison):
    """kNN prompting (Xu et al. 2023, arXiv 2303.13824, section 3).

    The majority of the k nearest anchors by KL(anchor || query) over the whole vocabulary decides.
    The values are votes. If anchors are equally near, the first ones vote. If classes have equally
    many votes, the lowest class wins, as with `argmax`.
    """

    name = "knn"
    reads_log_probs = True

    k: Positive = 3
    m: Positive = 128

    def values(
        self, states: np.ndarray, anchors: np.ndarray, labels: np.ndarray, classes: int
    ) -> np.ndarray:
        log_probs = _without_nan(states)
        anchors = _without_nan(anchors)
        p = np.exp(anchors)
        # A token adds nothing to the divergence if the anchor gives it 0, and infinity if only the
        # query gives it 0.
        entropy = np.where(p > 0, p * np.where(p > 0, anchors, 0), 0).sum(1)
        finite = np.maximum(log_probs, np.finfo(np.float64).min)
        products = [p @ row for row in finite]  # row by row, each as if it were alone
        divergences = entropy - np.stack(products)  # (D, N)
        nearest = np.argsort(divergences, axis=1, kind="stable")[:, : self.k]
        votes: np.ndarray = np.eye(classes)[np.asarray(labels)[nearest]].sum(1)
        return votes


def _without_nan(states: np.ndarray) -> np.ndarray:
    """The states in float64. An `InputError` is raised if they contain NaN."""
    states = np.asarray(states, dtype=np.float64)
    if np.isnan(states).any():
        raise InputError("the model's numbers for a query contain NaN, and cannot be compared.")
    return states


_RULES = (Contextual, Domain, BatchCalibration, DomainPMI, PMI, Hidden, KNN)
RULES: Mapping[str, type[Rule]] = {rule.name: rule for rule in _RULES}
# Rules that need more of a model than the log-probabilities of options.
NEIGHBORS = tuple(name for name, rule in RULES.items() if issubclass(rule, Comparison))


def read(given: Any) -> tuple[Rule, ...]:
    """The rules in the setting `decide`, which names them joined by `+`, each with its arguments.

    Raises:
        InputError: there is no such rule or argument, or the value of an argument cannot be used.
    """
    rules: list[Rule] = []
    with naming(f"decide={given if isinstance(given, str) else json.dumps(given, default=str)}"):
        if isinstance(given, list | tuple):
            for entry in given:
                rules += read(entry)
        elif isinstance(given, Mapping):
            rules = [_make(name, arguments or {}) for name, arguments in given.items()]
        else:
            rules = [_make(*spelled(text, verbatim="premise")) for text in str(given).split("+")]
        names = set(map(str, rules))
        if len(names) < len(rules):
            raise InputError(f"names a rule twice: give {'+'.join(sorted(names))}.")
    return tuple(rules)


def _make(name: str, arguments: Any) -> Rule:
    if name not in RULES:
        raise InputError(f"{name!r}: {suggestion(name, RULES)}")
    return read_into(RULES[name], arguments)


def written(rules: Sequence[Rule]) -> Any:
    """The rules as users write them.

    They are one text, or dictionaries if a text would not name all values.
    """
    text = "+".join(map(str, rules))
    try:
        if read(text) == tuple(rules):
            return text
    except InputError:
        pass
    return [{rule.name: rule.given} for rule in rules]
