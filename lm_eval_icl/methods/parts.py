"""The base class of methods in which attention reads a part of the memory in another way."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel

from lm_eval_icl.methods.needs import check_parts
from lm_eval_icl.methods.pcw import PCW


@dataclass(frozen=True)
class InParts(PCW):
    """Windows as in `pcw`, with a part that is read with a temperature, a scale or a weight.

    A method says in `reading` which part it is, and how it is read.
    """

    trained_under = "pcw"
    one_pass = False
    rows_may_differ = False

    def bind(self, model: PreTrainedModel) -> InParts:
        """Check that the model's attention can read a memory in parts."""
        check_parts(self, model)
        return self
