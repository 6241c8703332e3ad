"""Prepares a drawing of the layouts that a method runs: which token sees which token, and at which position.

`lm-eval-icl show METHOD` prints it (`terminal`). With `--output FILE.svg` or `FILE.png`, it saves a file (`picture`).
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass

from lm_eval_icl.errors import InputError
from lm_eval_icl.methods.base import Method
from lm_eval_icl.prompts.layouts import Layout

# How many tokens a row may have. The cells of longer rows would be too small to see.
LIMIT = 200
# The numbers of tokens of the parts of the prompt that is drawn. Demonstrations have these three lengths in turn.
PREFIX, DEMONSTRATION, QUERY, ANSWER = 2, (3, 2, 4), 2, 2


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
            f"--shots {shots}: must be from 0 to {LIMIT}, the largest number of tokens that is drawn."
        )
    return list(itertools.islice(itertools.cycle(DEMONSTRATION), shots))


def draw(method: Method, shots: int) -> Drawing:
    """The drawing of the forward passes of `method` for a prompt with this many demonstrations.

    Raises:
        InputError: the method refuses this number of demonstrations, or there are too many to draw.
    """
    demonstrations = example(shots)
    if why := method.why_not(shots):
        raise InputError(f"{method.name}: {why}.")
    longest = PREFIX + sum(demonstrations) * method.repeat + QUERY + ANSWER
    if (
        longest <= LIMIT
    ):  # tested first, since the mask of a layout is as large as the square of its length
        passes = method.passes(PREFIX, demonstrations, QUERY, ANSWER)
        longest = max(len(layout) for _, layout in passes)
    if longest > LIMIT:
        raise InputError(
            f"a row has {longest} tokens, and at most {LIMIT} are drawn: lower --shots."
        )

    names = {block.name for _, layout in passes for block in layout.blocks}
    notes = [
        "A row shows which tokens its token attends to, in the colours of their blocks: P prefix, D demonstrations, "
        "Q query, A answer.",
        "The model gets no positional information."
        if method.positions == "none"
        else "Numbers are positions.",
    ]
    if any(name.endswith("'") for name in names):
        notes.append(
            "D1' is the second copy of D1. Hatched: entries to which query and answer do not attend."
        )
    if "M" in names:
        notes.append("M is the memory: keys and values, which do not run again.")
    if f"D{shots + 1}" in names:
        notes.append(f"D{shots + 1} is D1 again (repeat={method.repeat}).")
    arguments = {field.name: getattr(method, field.name) for field in dataclasses.fields(method)}
    # Arguments that are None are left out: the model would set them (`Method.bind`), and there is no model here.
    written = ", ".join(f"{name}={value}" for name, value in arguments.items() if value is not None)
    return Drawing(method.name, written, passes, notes)


def columns(layout: Layout) -> list[tuple[str, range]]:
    """The names of the blocks, each with the indices of the block's tokens. Adjacent blocks M count as one block."""
    lengths = [
        (name, sum(block.length for block in blocks))
        for name, blocks in itertools.groupby(layout.blocks, key=lambda block: block.name)
    ]
    ends = itertools.accumulate(length for _, length in lengths)
    return [
        (name, range(end - length, end)) for (name, length), end in zip(lengths, ends, strict=True)
    ]


def rows(layout: Layout) -> list[tuple[str, list[int]]]:
    """The blocks whose tokens attend to others, as in `columns`: all blocks except M, which is a memory."""
    return [(name, list(block)) for name, block in columns(layout) if name != "M"]


# After Okabe and Ito's palette for colour-blind readers. The demonstrations use their colours in turn.
_COLOURS = {"P": "#8c8c8c", "M": "#5a5a5a", "Q": "#d55e00", "A": "#44369c"}
_DEMONSTRATIONS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9")


def colour(block: str) -> str:
    """The colour of a block, given its name, as "#rrggbb"."""
    if block in _COLOURS:
        return _COLOURS[block]
    return _DEMONSTRATIONS[(int(block.strip("D'")) - 1) % len(_DEMONSTRATIONS)]
