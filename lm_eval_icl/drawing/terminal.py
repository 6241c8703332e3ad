"""Writes a `Drawing` as lines of text: `lm-eval-icl show METHOD`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from rich.text import Text

from lm_eval_icl.drawing.drawing import Drawing, colour, columns, rows
from lm_eval_icl.prompts.layouts import Layout

# The character of a cell whose token the row's token sees: query and answer see it, too, or do not; and of other cells.
SEEN, UNREAD, UNSEEN = "█", "▒", "·"
# Where titles and notes are wrapped if there is no terminal.
WIDTH = 100


def as_text(drawing: Drawing, width: int | None = None) -> Text:
    """The drawing as lines of text.

    Args:
        width: the terminal's width in characters; None if there is no terminal. The drawing may then have any width,
            and texts are wrapped at `WIDTH`. A token takes two characters, or one if the drawing does not fit.
    """
    for cell in (2, 1):
        panels = [(title, list(_lines(layout, cell))) for title, layout in drawing.passes]
        if width is None or max(line.cell_len for _, lines in panels for line in lines) <= width:
            break

    def wrapped(words: str) -> str:
        return textwrap.fill(words, width or WIDTH)

    text = Text(wrapped(f"{drawing.name}  {drawing.arguments}") + "\n")
    text.stylize("bold", end=len(drawing.name))
    for title, lines in panels:
        text.append("\n").append(f"{wrapped(title)}\n" if title else "", "italic")
        text.append_text(Text("\n").join(lines)).append("\n")
    text.append("\n" + wrapped(" ".join(drawing.notes).replace("Hatched", UNREAD)))
    return text


def _lines(layout: Layout, cell: int) -> Iterator[Text]:
    positions, sees, kept = layout.positions.tolist(), layout.mask.tolist(), set(layout.kept_tokens)
    blocks = columns(layout)
    # A block is as wide as its tokens or its name, whichever is wider.
    widths = [max(len(block) * cell, len(name)) for name, block in blocks]
    # Without positional information no numbers are shown, since zeros would look like positions.
    digits = len(str(max(positions))) if layout.step else 0
    gutter = max(len("position"), *(len(name) + digits + 1 for name, _ in blocks))

    def line(margin: str, cells: list[Text]) -> Text:
        return Text.assemble(margin.rjust(gutter), " │", Text("│").join(cells), "│")

    def padded(text: Text, width: int) -> Text:
        text.pad_right(width - len(text))
        return text

    rule = "┼" + "┼".join("─" * width for width in widths) + "┼"
    names = zip(blocks, widths, strict=True)
    yield line(
        "", [padded(Text(name, f"bold {colour(name)}"), width) for (name, _), width in names]
    )
    for digit in range(digits):  # positions are written vertically
        figures = [
            padded(
                Text("".join(str(positions[i]).rjust(digits)[digit].ljust(cell) for i in block)),
                width,
            )
            for (_, block), width in zip(blocks, widths, strict=True)
        ]
        yield line("position" if digit == digits - 1 else "", figures)
    for name, attending in rows(layout):
        yield Text(" " * (gutter + 1) + rule)
        for row in attending:
            cells = []
            for (column, block), width in zip(blocks, widths, strict=True):
                text = Text()
                for i in block:
                    if sees[row][i]:
                        text.append((SEEN if i in kept else UNREAD) * cell, colour(column))
                    else:
                        text.append(UNSEEN.ljust(cell), "dim")
                cells.append(padded(text, width))
            head = name if row == attending[0] else ""
            number = str(positions[row]).rjust(digits) if digits else ""
            yield line(head.ljust(gutter - digits) + number, cells)
