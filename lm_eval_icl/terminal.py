"""What `lm_eval_icl.show` draws, as lines of text: `lm-eval-icl show METHOD`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich.text import Text

from lm_eval_icl.layouts import Layout
from lm_eval_icl.show import Drawing, colour, columns, refusal, rows


@dataclass(frozen=True)
class Glyphs:
    """What cells and lines are made of."""

    seen: str
    unread: str
    unseen: str
    down: str
    across: str
    cross: str


UNICODE, ASCII = Glyphs("█", "▒", "·", "│", "─", "┼"), Glyphs("#", "+", ".", "|", "-", "+")


def as_text(drawing: Drawing, room: int | None = None, glyphs: Glyphs = UNICODE) -> Text:
    """The drawing as lines of text.

    Args:
        room: how wide the terminal is; a token is two characters wide, or one where two do not fit.

    Raises:
        InputError: one does not fit either.
    """
    needed = 0
    for cell in (2, 1):
        panels = [(title, list(_lines(layout, drawing.reads, cell, glyphs))) for title, layout in drawing.passes]
        needed = max(line.cell_len for _, lines in panels for line in lines)
        if room is None or needed <= room:
            break
    else:
        raise refusal(f"{needed} columns are needed and the terminal has {room}: widen it, or give --output FILE.svg.")
    text = Text.assemble((drawing.name, "bold"), f"  {drawing.arguments}\n")
    for title, lines in panels:
        text.append("\n").append(f"{title}\n" if title else "", "italic").append_text(Text("\n").join(lines)).append(
            "\n"
        )
    text.append("\n" + "\n".join(drawing.notes).replace("Hatched", glyphs.unread))
    return text if glyphs is UNICODE else Text(text.plain.encode("ascii", "backslashreplace").decode())


def _lines(layout: Layout, reads: dict[int, str], cell: int, glyphs: Glyphs) -> Iterator[Text]:
    positions, sees, kept = layout.positions.tolist(), layout.sees.tolist(), set(layout.kept)
    blocks = columns(layout)
    # A block is as wide as its tokens, or as its name.
    widths = [max(len(block) * cell, len(name)) for name, block in blocks]
    digits = len(str(max(positions)))
    gutter = max(len("position"), *(len(name) + digits + 1 for name, _ in blocks))

    def line(margin: str, cells: list[Text], end: str = "") -> Text:
        joined = Text(glyphs.down).join(cells)
        return Text.assemble(margin.rjust(gutter), " ", glyphs.down, joined, glyphs.down, end and f" {end}")

    def padded(text: Text, width: int) -> Text:
        text.pad_right(width - len(text))
        return text

    rule = glyphs.cross + glyphs.cross.join(glyphs.across * width for width in widths) + glyphs.cross
    names = zip(blocks, widths, strict=True)
    yield line("", [padded(Text(name, f"bold {colour(name)}"), width) for (name, _), width in names])
    for digit in range(digits):  # positions are written downwards
        figures = [
            padded(Text("".join(str(positions[i]).rjust(digits)[digit].ljust(cell) for i in block)), width)
            for (_, block), width in zip(blocks, widths, strict=True)
        ]
        yield line("position" if digit == digits - 1 else "", figures)
    for name, looking in rows(layout):
        yield Text(" " * (gutter + 1) + rule)
        for row in looking:
            cells = []
            for (column, block), width in zip(blocks, widths, strict=True):
                text = Text()
                for i in block:
                    if sees[row][i]:
                        text.append((glyphs.seen if i in kept else glyphs.unread) * cell, colour(column))
                    else:
                        text.append(glyphs.unseen.ljust(cell), "dim")
                cells.append(padded(text, width))
            head = name.ljust(gutter - digits) if row == looking[0] else ""
            yield line(f"{head}{positions[row]:>{digits}}", cells, reads.get(layout.tokens[row], ""))
