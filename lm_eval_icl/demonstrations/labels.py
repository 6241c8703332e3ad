"""Demonstrations with other labels than the right ones: does a method read them?

Of the labels of demonstrations, random ones change little for some models (Min et al., EMNLP 2022), and more for others
(Yoo et al., EMNLP 2022).
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from random import Random

from lm_eval_icl.errors import InputError


@dataclass(frozen=True)
class Labels:
    """How demonstrations are labeled: each has another label than its own with probability `flipped`, drawn from the
    other options; or, if that is None, a random one of all options."""

    flipped: float | None

    def label(self, right: int, options: int, document: str) -> int:
        """The number of the option that a demonstration is labeled with.

        It depends on nothing but the document and what else this text says, such as a seed: not on the order in which
        demonstrations are asked for. A demonstration that is flipped with some probability is so with a higher one.
        """
        rnd = Random(document)
        chance = rnd.random()
        if self.flipped is None:
            return rnd.randrange(options)
        if chance >= self.flipped or options < 2:
            return right
        return (right + 1 + rnd.randrange(options - 1)) % options


def read(written: object) -> Labels:
    """The labels that `labels` names: "flipped:0.25", or "random".

    Raises:
        InputError: it is neither.
    """
    if written == "random":
        return Labels(None)
    kind, _, share = str(written).partition(":")
    with suppress(ValueError):
        if kind == "flipped" and 0 <= float(share) <= 1:
            return Labels(float(share))
    raise InputError(f"labels={written}: must be random, or flipped:P with a probability P from 0 to 1.")
