"""Gives demonstrations wrong labels, to find out whether a method reads the labels.

Random labels change the results of some models little (Min et al., EMNLP 2022), and of other models
more (Yoo et al., EMNLP 2022).
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Annotated

from pydantic import Field

from lm_eval_icl.declared import Arguments, read_into
from lm_eval_icl.errors import InputError


@dataclass(frozen=True)
class Labels(Arguments):
    """How demonstrations are labeled.

    Args:
        flipped: the probability with which a demonstration has a wrong label, drawn from the other
            options. None to draw the label from all options.
    """

    flipped: Annotated[float, Field(ge=0, le=1)] | None

    def label(self, right: int, options: int, document: str) -> int:
        """The index of the option that becomes a demonstration's label.

        The label depends only on the text `document`, which may also contain a seed, and not on the
        order of calls. A demonstration that has a wrong label at one value of `flipped` has a wrong
        label at all higher values.
        """
        rnd = Random(document)
        chance = rnd.random()
        if self.flipped is None:
            return rnd.randrange(options)
        if chance >= self.flipped or options < 2:
            return right
        return (right + 1 + rnd.randrange(options - 1)) % options


def read(written: object) -> Labels:
    """Reads the setting `labels`: "flipped:0.25", or "random".

    Raises:
        InputError: the setting is neither.
    """
    if written == "random":
        return Labels(None)
    text = str(written)
    with suppress(InputError):
        if text.startswith("flipped:"):
            return read_into(Labels, {"flipped": text.removeprefix("flipped:")})
    raise InputError(
        f"labels={written}: must be random, or flipped:P with a probability P from 0 to 1."
    )
