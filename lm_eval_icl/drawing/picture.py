"""Saves a `Drawing` as a picture: `lm-eval-icl show METHOD --output FILE.svg` or `FILE.png`."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lm_eval_icl.drawing.drawing import Drawing, colour, columns, rows
from lm_eval_icl.drawing.style import FILES
from lm_eval_icl.errors import InputError, require, writing
from lm_eval_icl.files import replacing
from lm_eval_icl.prompts.layouts import Layout, slices

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# All lengths are in inches, from the upper left corner.
_BAND = 0.36  # the width of the blocks' names beside a mask
_HEAD = 0.32  # the height of a panel's title
_BESIDE = 0.3  # the width of the positions beside a mask
_ABOVE = 0.46  # the height of the positions above a mask
_PAGE = 15.0  # the width of the page
_MARGIN = 0.25
_GREY = "#555555"
# Colours on which a black name is easier to read than a white one.
_LIGHT = ("#e69f00", "#cc79a7", "#56b4e9")
# (x, y, width, height)
Box = tuple[float, float, float, float]


def check_output(path: Path) -> str:
    """The format of a picture, "svg" or "png", by the suffix of its file.

    Raises:
        InputError: the file has another suffix, its folder does not exist, or matplotlib is not
            installed.
    """
    kind = path.suffix.lower().removeprefix(".")
    if kind not in ("svg", "png"):
        raise InputError(f"--output {path}: must end in .svg or .png.")
    if not path.parent.is_dir():
        raise InputError(
            f"--output {path}: there is no folder {path.parent}: make it first, or name another "
            "folder."
        )
    require("matplotlib", "figures", f"--output {path}: a picture")
    return kind


def save(drawing: Drawing, path: Path) -> None:
    """Write a drawing in the format of the file's suffix.

    Equal drawings make equal SVG files, byte for byte.

    Raises:
        InputError: as for `check_output`, or the file cannot be written.
    """
    kind = check_output(path)
    from matplotlib import style  # imported here, since it takes half a second

    metadata: dict[str, Any] = {"Title": f"{drawing.name}: which token sees which"}
    if kind == "svg":
        metadata |= {"Date": None, "Creator": None}
    with (
        style.context(["default", {**FILES, "hatch.linewidth": 0.7}]),
        writing(f"--output {path}"),
        replacing(path) as half,
    ):
        _figure(drawing).savefig(half, format=kind, dpi=200, metadata=metadata)


def _figure(drawing: Drawing) -> Figure:
    from matplotlib.figure import Figure

    layouts = [layout for _, layout in drawing.passes]
    cell = min(0.27, max(0.08, 7.5 / max(map(len, layouts))))
    last = max(int(layout.positions.max()) for layout in layouts)
    panels = [_Panel(title, layout, cell, last) for title, layout in drawing.passes]

    # Place the panels side by side, as many as fit the width of a page.
    head = _HEAD if any(panel.title for panel in panels) else 0.0
    x = _MARGIN
    y = 0.68 + head / 3
    deepest = 0.0  # the height of the panels in this row
    page = max(5.4, 0.5 + _width(drawing.arguments, 9))
    for panel in panels:
        if x > _MARGIN and x + panel.width > _PAGE:
            y += deepest + _MARGIN
            x = _MARGIN
            deepest = 0.0
        panel.x = x
        panel.y = y
        deepest = max(deepest, head + panel.height)
        x += panel.width + 0.45
        page = max(page, x - 0.2)
    notes = textwrap.wrap(" ".join(drawing.notes), int((page - 0.5) / _width("n", 7.2)))
    end = y + deepest + 0.2
    height = end + 0.17 * len(notes) + 0.12

    figure = Figure(figsize=(page, height), facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, page), ylim=(height, 0))
    axes.axis("off")
    _write(axes, _MARGIN, 0.28, drawing.name, 14, weight="bold")
    _write(axes, _MARGIN, 0.53, drawing.arguments, 9, color=_GREY)
    for panel in panels:
        panel.draw(axes)
    for i, note in enumerate(notes):
        _write(axes, _MARGIN, end + 0.17 * (i + 0.5), note, 7.2, color=_GREY)
    return figure


@dataclass
class _Panel:
    """One forward pass: bars as high as the positions, the blocks' names, and the mask."""

    title: str
    layout: Layout
    cell: float  # the width and height of a cell of the mask
    last: int  # the largest position in the drawing
    # The upper left corner, which is set when the size is known.
    x: float = 0.0
    y: float = 0.0

    def __post_init__(self) -> None:
        layout = self.layout
        self.columns = columns(layout)
        self.rows = rows(layout)
        self.row_tokens = range(layout.entries, len(layout))
        self.read = set(layout.kept_tokens)  # query and answer attend to these tokens
        # The space for positions beside the mask and above it.
        self.beside = _BESIDE if layout.step else 0.0
        self.above = _ABOVE if layout.step else 0.0
        across = max(len(layout) * self.cell, _width(self.title, 8.5) - _BAND)
        self.width = _BAND + self.beside + across
        self.height = self.above + 0.36 + len(self.row_tokens) * self.cell  # without a title

    def draw(self, axes: Axes) -> None:
        cell = self.cell
        positions = self.layout.positions.tolist()
        size = min(7.0, cell * 72 * 0.9 / (0.64 * len(str(self.last))))
        left = self.x + _BAND + self.beside
        foot = self.y + (_HEAD if self.title else 0.0) + self.above
        top = foot + 0.36
        _write(axes, self.x, self.y + 0.06, self.title, 8.5, style="italic")

        # Columns: the positions of the tokens that are seen, on bars, and the names of their
        # blocks.
        if self.above:
            _write(axes, left - 0.06, foot + 0.06, "position", 6.5, ha="right", color=_GREY)
        for name, tokens in self.columns:
            if self.above:
                for i in tokens:
                    height = self.above * (positions[i] + 1) / (self.last + 1)
                    x = left + i * cell
                    y = foot - height
                    bar = (x + 0.12 * cell, y + 0.12, 0.76 * cell, height)
                    _fill(axes, [bar], colour(name), i in self.read)
                    _write(axes, x + cell / 2, y + 0.06, str(positions[i]), size, ha="center")
            x = left + tokens[0] * cell
            _band(axes, (x, top - 0.23, len(tokens) * cell, 0.2), name, tokens[0] in self.read)

        # Rows: the tokens that see.
        y = top
        for name, tokens in self.rows:
            height = len(tokens) * cell
            _band(axes, (self.x, y, _BAND - 0.04, height), name, tokens[0] in self.read)
            y += height
        if self.above:
            for row, i in enumerate(self.row_tokens):
                y = top + (row + 0.5) * cell
                _write(axes, left - 0.07, y, str(positions[i]), size, ha="right")
        self._draw_mask(axes, left, top)

    def _draw_mask(self, axes: Axes, left: float, top: float) -> None:
        """One path for each block that is seen, then lines between cells and between blocks."""
        layout = self.layout
        cell = self.cell
        columns = [left + i * cell for i in range(len(layout) + 1)]
        rows = [top + row * cell for row in range(len(self.row_tokens) + 1)]
        right = columns[-1]
        bottom = rows[-1]
        _fill(axes, [(left, top, right - left, bottom - top)], "#f2f2f2")
        for name, tokens in self.columns:
            for read in (True, False):
                seen = torch.zeros(len(layout), dtype=torch.bool)
                seen[[i for i in tokens if (i in self.read) == read]] = True
                boxes = []
                for y, token in zip(rows, self.row_tokens, strict=False):
                    for run in slices(layout.mask[token] & seen):
                        width = (run.stop - run.start) * cell
                        boxes.append((columns[run.start], y, width, cell))
                if boxes:
                    _fill(axes, boxes, colour(name), read)
        width = 0.7 if cell > 0.15 else 0.35
        axes.vlines(columns[1:-1], top, bottom, colors="white", linewidth=width)
        axes.hlines(rows[1:-1], left, right, colors="white", linewidth=width)
        block_columns = [left, *(columns[tokens.stop] for _, tokens in self.columns)]
        block_rows = [top, *(rows[tokens.stop - layout.entries] for _, tokens in self.rows)]
        axes.vlines(block_columns, top, bottom, colors="#333333", linewidth=0.8)
        axes.hlines(block_rows, left, right, colors="#333333", linewidth=0.8)


def _width(text: str, size: float) -> float:
    """The approximate width of a text in inches, with room for wider fonts than matplotlib's."""
    return len(text) * size * 0.0088


def _write(
    axes: Axes, x: float, y: float, text: str, size: float, color: str = "#222222", **style: Any
) -> None:
    if text:
        # Without `parse_math`, "$" is a dollar sign.
        axes.text(x, y, text, fontsize=size, va="center", color=color, parse_math=False, **style)


def _band(axes: Axes, box: Box, name: str, read: bool) -> None:
    """Draw a box in the colour of a block, with the block's name in black or white."""
    x, y, width, height = box
    _fill(axes, [box], colour(name), read, hatch="")
    dark = not read or colour(name) in _LIGHT
    size = min(8.5, width / _width(name, 1.0))
    ink = "#111111" if dark else "white"
    _write(axes, x + width / 2, y + height / 2, name, size, ink, ha="center", weight="bold")


def _fill(
    axes: Axes, boxes: list[Box], colour: str, read: bool = True, hatch: str = "//////"
) -> None:
    """Draw boxes in one colour: pale and hatched, if query and answer do not `read` them."""
    from matplotlib.colors import to_rgb
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Outline

    outlines = []
    for x, y, width, height in boxes:
        corners = [(x, y), (x + width, y), (x + width, y + height), (x, y + height), (x, y)]
        outlines.append(Outline(corners, closed=True))
    patch = PathPatch(Outline.make_compound_path(*outlines), facecolor=colour, linewidth=0)
    if not read:
        pale = [1 - 0.35 * (1 - part) for part in to_rgb(colour)]
        patch.set(facecolor=pale, edgecolor=colour, hatch=hatch)
    axes.add_patch(patch)
