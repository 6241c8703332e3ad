"""Contextual calibration (Zhao et al. 2021), and domain-context calibration (Fei et al. 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from lm_eval_icl.decisions.rule import Doc, Number, Shift, Texts
from lm_eval_icl.errors import InputError


@dataclass(frozen=True)
class Contextual(Shift):
    """Contextual calibration (Zhao et al. 2021, arXiv 2102.09690, section 5) with content-free texts cf:

        s(y|x) - log mean_j exp s(y|cf_j)

    This is the paper's W = diag(p_cf)^-1, b = 0. The probabilities are averaged over the texts before they are
    normalized over the options, so that texts with small probabilities of all options count little. (The normalization
    itself is left out, since it changes no decision.)
    """

    name = "contextual"

    texts: Texts = ("N/A", "", "[MASK]")

    def queries(self, task: Any, doc: Doc, place: Any, facts: dict[str, Any]) -> list[str]:
        return rendered(task, doc, self.texts)


@dataclass(frozen=True)
class Domain(Shift):
    """Domain-context calibration (Fei et al. 2023, arXiv 2305.19148, section 4): contextual calibration with n texts of
    words that are drawn from the few-shot documents (of=pool) or from the evaluated documents (of=test). A text has one
    word more than the documents have on average. " ." ends each text, as in the authors' code."""

    name = "domain"

    n: Number = 20
    of: Literal["pool", "test"] = "pool"

    @property
    def is_transductive(self) -> bool:  # type: ignore[override]
        return self.of == "test"

    def queries(self, task: Any, doc: Doc, place: Any, facts: dict[str, Any]) -> list[str]:
        generator = np.random.RandomState(task.seed)
        texts: list[dict[str, str]] = [{} for _ in range(self.n)]
        for name in task.fields(doc):
            words, corpus = task.words(name, evaluated=self.is_transductive)
            size = len(words) // corpus + 1
            for text in texts:
                text[name] = (
                    " ".join(words[i] for i in generator.randint(0, len(words), size=size)) + " ."
                )
            facts |= {"seed": task.seed, "corpus": corpus}
        return rendered(task, doc, texts)


def rendered(task: Any, doc: Doc, texts: Sequence[Any]) -> list[str]:
    """The queries with these texts in place of the document's. Empty queries are left out: they cannot be scored."""
    queries = [query for text in texts if (query := task.content_free(doc, text)).strip()]
    if not queries:
        raise InputError("all of its texts make an empty query: give other texts (texts=...).")
    return queries
