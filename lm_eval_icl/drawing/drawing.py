"""Prepares a drawing of the layouts that a method runs: which token sees which, and where.

`lm-eval-icl show METHOD` prints it (`terminal`). With `--output FILE.svg` or `FILE.png`, the
command saves a file (`picture`).
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from typing import NamedTuple

from lm_eval_icl.errors import InputError
from lm_eval_icl.methods.base import Method
from lm_eval_icl.prompts.layouts import Layout

# A row may have this many tokens. The cells of longer rows would be too small to see.
LIMIT = 200
# The numbers of tokens of the parts of the prompt that is drawn.
PREFIX = 2
DEMONSTRATION = (3, 2, 4)  # demonstrations have these lengths in turn
QUERY = 2
ANSWER = 2


@dataclass(frozen=True)
class Drawing:
    """The forward passes of a method for a prompt."""

    name: str
    arguments: str
    passes: list[tuple[str, Layout]]  # the title and the layout of every forward pass
    notes: list[str]  # how to read the drawing


def example(shots: int) -> list[int]:
    """The numbers of tokens of this many demonstrations.

    Raises:
        InputError: `shots` is negative, or too large to draw.
    """
    if not 0 <= shots <= LIMIT:
        raise InputError(
            f"--shots {shots}: must be from 0 to {LIMIT}, the largest number of tokens that is "
            "drawn."
        )
    return list(itertools.islice(itertools.cycle(DEMONSTRATION), shots))


def draw(method: Method, shots: int) -> Drawing:
    """The drawing of a method's forward passes for a prompt with this many demonstrations.

    Raises:
        InputError: the method refuses this number of demonstrations, or there are too many to draw.
    """
    demonstrations = example(shots)
    if why := method.why_not(shots):
        raise InputError(f"{method.name}: {why}.")
    longest = PREFIX + sum(demonstrations) * method.repeat + QUERY + ANSWER
    # This is tested first, since the mask of a layout is as large as the square of its length.
    if longest <= LIMIT:
        passes = method.passes(PREFIX, demonstrations, QUERY, ANSWER)
        longest = max(len(layout) for _, layout in passes)
    if longest > LIMIT:
        raise InputError(
            f"a row has {longest} tokens, and at most {LIMIT} are drawn: lower --shots."
        )

    blocks = itertools.chain.from_iterable(layout.blocks for _, layout in passes)
    names = {block.name for block in blocks}
    notes = [
        "A row shows which tokens its token attends to, in the colours of their blocks: P prefix, "
        "D demonstrations, Q query, A answer."
    ]
    if method.positions == "none":
        notes.append("The model gets no positional information.")
    else:
        notes.append("Numbers are positions.")
    if any(name.endswith("'") for name in names):
        notes.append(
            "D1' is the second copy of D1. Hatched: entries to which query and answer do not "
            "attend."
        )
    if "M" in names:
        notes.append("M is the memory: keys and values, which do not run again.")
    if f"D{shots + 1}" in names:
        notes.append(f"D{shots + 1} is D1 again (repeat={method.repeat}).")
    arguments = []
    for field in dataclasses.fields(method):
        value = getattr(method, field.name)
        # The model would set an argument that is None (`Method.bind`). There is no model here.
        if value is not None:
            arguments.append(f"{field.name}={value}")
    return Drawing(method.name, ", ".join(arguments), passes, notes)


class Strip(NamedTuple):
    """Adjacent tokens of a row whose blocks have one name."""

    name: str
    tokens: range


def columns(layout: Layout) -> list[Strip]:
    """The blocks of a row, each with its tokens. Adjacent blocks M count as one block."""
    strips = []
    start = 0
    for name, blocks in itertools.groupby(layout.blocks, key=lambda block: block.name):
        end = start + sum(block.length for block in blocks)
        strips.append(Strip(name, range(start, end)))
        start = end
    return strips


def rows(layout: Layout) -> list[Strip]:
    """The blocks whose tokens attend to others: all of `columns` but M, which is a memory."""
    return [strip for strip in columns(layout) if strip.name != "M"]


# After Okabe and Ito's palette for colour-blind readers. Demonstrations have their colours in turn.
_COLOURS = {"P": "#8c8c8c", "M": "#5a5a5a", "Q": "#d55e00", "A": "#44369c"}
_DEMONSTRATIONS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9")


def colour(block: str) -> str:
    """The colour of a block, given its name, as "#rrggbb"."""
    if block in _COLOURS:
        return _COLOURS[block]
    return _DEMONSTRATIONS[(int(block.strip("D'")) - 1) % len(_DEMONSTRATIONS)]
