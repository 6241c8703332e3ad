"""Pointwise mutual information of document and option, and its domain-conditional form (Holtzman et al. 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lm_eval_icl.decisions.rule import Doc, Shift


@dataclass(frozen=True)
class PMI(Shift):
    """Pointwise mutual information (Holtzman et al. 2021, arXiv 2104.08315, section 3). No demonstrations stand before
    the premise:

        s(y|x) - s(y|premise)

    Log-probabilities are summed over the tokens of an option, not averaged.
    """

    name = "pmi"
    bare = True

    premise: str | None = ":"

    def queries(self, task: Any, doc: Doc, place: Any, facts: dict[str, Any]) -> list[str]:
        return [self.premise or task.premise(doc)]


@dataclass(frozen=True)
class DomainPMI(PMI):
    """The domain-conditional form of PMI. By default, the premise is the template's text after its last field."""

    name = "dcpmi"

    premise: str | None = None
