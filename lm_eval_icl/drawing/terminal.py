"""Writes a `Drawing` as lines of text: `lm-eval-icl show METHOD`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from itertools import chain

from rich.text import Text

from lm_eval_icl.drawing.drawing import Drawing, colour, columns, rows
from lm_eval_icl.prompts.layouts import Layout

# The character of a cell of the mask.
SEEN = "█"  # the row's token sees the column's token; query and answer see it, too
UNREAD = "▒"  # the row's token sees it; query and answer do not
UNSEEN = "·"
# Titles and notes are wrapped at this width if there is no terminal.
WIDTH = 100


def as_text(drawing: Drawing, width: int | None = None) -> Text:
    """The drawing as lines of text.

    A token takes two characters, or one if the drawing does not fit.

    Args:
        width: the terminal's width in characters. None if there is no terminal: the drawing may
            then have any width, and texts are wrapped at `WIDTH`.
    """

    def wrapped(words: str) -> str:
        return textwrap.fill(words, width or WIDTH)

    for cell in (2, 1):
        panels = [list(_lines(layout, cell)) for _, layout in drawing.passes]
        if width is None or max(line.cell_len for line in chain(*panels)) <= width:
            break

    text = Text(wrapped(f"{drawing.name}  {drawing.arguments}") + "\n")
    text.stylize("bold", end=len(drawing.name))
    for (title, _), lines in zip(drawing.passes, panels, strict=True):
        text.append("\n")
        if title:
            text.append(wrapped(title) + "\n", "italic")
        text.append_text(Text("\n").join(lines)).append("\n")
    notes = " ".join(drawing.notes).replace("Hatched", UNREAD)
    return text.append("\n" + wrapped(notes))


def _lines(layout: Layout, cell: int) -> Iterator[Text]:
    """The lines of one forward pass.

    Args:
        cell: the width of a token in characters.
    """
    positions = layout.positions.tolist()
    sees = layout.mask.tolist()
    kept = set(layout.kept_tokens)
    blocks = columns(layout)
    # A block is as wide as its tokens or its name, whichever is wider.
    widths = [max(len(tokens) * cell, len(name)) for name, tokens in blocks]
    # Without positional information no numbers are shown, since zeros would look like positions.
    digits = len(str(max(positions))) if layout.step else 0
    gutter = max(len("position"), *(len(name) + digits + 1 for name, _ in blocks))

    def line(margin: str, cells: Sequence[Text]) -> Text:
        for text, width in zip(cells, widths, strict=True):
            text.pad_right(width - len(text))
        return Text.assemble(margin.rjust(gutter), " │", Text("│").join(cells), "│")

    yield line("", [Text(name, f"bold {colour(name)}") for name, _ in blocks])
    for digit in range(digits):  # positions are written vertically
        figures = [str(position).rjust(digits)[digit].ljust(cell) for position in positions]
        margin = "position" if digit == digits - 1 else ""
        yield line(
            margin, [Text("".join(figures[tokens.start : tokens.stop])) for _, tokens in blocks]
        )
    rule = "┼".join(["", *("─" * width for width in widths), ""])
    for name, attending in rows(layout):
        yield Text(" " * (gutter + 1) + rule)
        for row in attending:
            cells = []
            for column, tokens in blocks:
                text = Text()
                for i in tokens:
                    if not sees[row][i]:
                        text.append(UNSEEN.ljust(cell), "dim")
                    elif i in kept:
                        text.append(SEEN * cell, colour(column))
                    else:
                        text.append(UNREAD * cell, colour(column))
                cells.append(text)
            head = name if row == attending[0] else ""
            number = str(positions[row]).rjust(digits) if digits else ""
            yield line(head.ljust(gutter - digits) + number, cells)
