"""Saves a `Drawing` as a picture: `lm-eval-icl show METHOD --output FILE.svg` or `FILE.png`."""

from __future__ import annotations

import itertools
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lm_eval_icl.drawing.drawing import Drawing, colour, columns, rows
from lm_eval_icl.drawing.style import FILES
from lm_eval_icl.errors import InputError, require, writing
from lm_eval_icl.prompts.layouts import Layout, slices

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# All lengths are in inches, from the upper left corner: the width of the blocks' names beside a mask, the height of a
# panel's title, the width of the positions beside a mask, the height of the positions above it, and the page's width.
_BAND, _HEAD, _BESIDE, _ABOVE, _PAGE = 0.36, 0.32, 0.3, 0.46, 15.0


def check_output(path: Path) -> str:
    """The format of a picture, "svg" or "png", by the suffix of its file.

    Raises:
        InputError: the file has another suffix, or its folder does not exist, or matplotlib is missing.
    """
    kind = path.suffix.lower().removeprefix(".")
    if kind not in ("svg", "png"):
        raise InputError(f"--output {path}: must end in .svg or .png.")
    if not path.parent.is_dir():
        raise InputError(
            f"--output {path}: there is no folder {path.parent}: make it first, or name another folder."
        )
    require("matplotlib", "figures", f"--output {path}: a picture")
    return kind


def save(drawing: Drawing, path: Path) -> None:
    """Write a drawing in the format of the file's suffix. Equal drawings make equal SVG files, byte for byte.

    Raises:
        InputError: as for `check_output`, or the file cannot be written.
    """
    kind = check_output(path)
    from matplotlib import style  # imported here, since it takes half a second

    metadata: dict[str, str | None] = {"Title": f"{drawing.name}: which token sees which"}
    if kind == "svg":
        metadata |= {"Date": None, "Creator": None}
    with style.context(["default", {**FILES, "hatch.linewidth": 0.7}]), writing(f"--output {path}"):
        _figure(drawing).savefig(path, format=kind, dpi=200, metadata=metadata)


def _figure(drawing: Drawing) -> Figure:
    from matplotlib.figure import Figure

    layouts = [layout for _, layout in drawing.passes]
    cell = min(0.27, max(0.08, 7.5 / max(len(layout) for layout in layouts)))
    last = max(int(layout.positions.max()) for layout in layouts)

    # Place the panels side by side, as many as fit the width of a page.
    places: list[tuple[float, float]] = []
    head = _HEAD if any(title for title, _ in drawing.passes) else 0.0
    x, y, deepest, widest = 0.25, 0.68 + head / 3, 0.0, 0.0
    for title, layout in drawing.passes:
        beside, above = (_BESIDE, _ABOVE) if layout.step else (0.0, 0.0)
        across = _BAND + beside + max(len(layout) * cell, _width(title, 8.5) - _BAND)
        if places and x + across > _PAGE:
            x, y, deepest = 0.25, y + deepest + 0.25, 0.0
        places.append((x, y))
        attending = sum(len(block) for _, block in rows(layout))
        deepest = max(deepest, head + above + 0.36 + attending * cell)
        x += across + 0.45
        widest = max(widest, x - 0.2)
    page = max(widest, 5.4, 0.5 + _width(drawing.arguments, 9))
    notes = textwrap.wrap(" ".join(drawing.notes), int((page - 0.5) / _width("n", 7.2)))
    height = y + deepest + 0.2 + 0.17 * len(notes) + 0.12

    figure = Figure(figsize=(page, height), facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, page), ylim=(height, 0))
    axes.axis("off")
    _write(axes, 0.25, 0.28, drawing.name, 14, weight="bold")
    _write(axes, 0.25, 0.53, drawing.arguments, 9, color="#555555")
    for (title, layout), (x, y) in zip(drawing.passes, places, strict=True):
        _panel(axes, x, y, title, layout, cell, last)
    for i, note in enumerate(notes):
        _write(axes, 0.25, y + deepest + 0.2 + 0.17 * (i + 0.5), note, 7.2, color="#555555")
    return figure


def _panel(
    axes: Axes, x: float, y: float, title: str, layout: Layout, cell: float, last: int
) -> None:
    """Draw one forward pass: bars as high as the positions, the blocks' names, and the mask."""
    positions, numbered, kept = (
        layout.positions.tolist(),
        bool(layout.step),
        set(layout.kept_tokens),
    )
    blocks, attending_blocks = columns(layout), rows(layout)
    order = [i for _, block in attending_blocks for i in block]
    beside, above = (_BESIDE, _ABOVE) if numbered else (0.0, 0.0)
    left, foot = x + _BAND + beside, y + (_HEAD if title else 0.0) + above
    top = foot + 0.36
    right, bottom = left + len(positions) * cell, top + len(order) * cell
    figure_size = min(7.0, cell * 72 * 0.9 / (0.64 * len(str(last))))
    _write(axes, x, y + 0.06, title, 8.5, style="italic")

    # Columns: the tokens that are seen.
    if numbered:
        _write(axes, left - 0.06, foot + 0.06, "position", 6.5, ha="right", color="#555555")
    for name, block in blocks:
        at, across, read = left + block[0] * cell, len(block) * cell, block[0] in kept
        for i in block if numbered else ():
            tall, place = above * (positions[i] + 1) / (last + 1), left + i * cell
            _fill(
                axes,
                [(place + 0.12 * cell, foot - tall + 0.12, 0.76 * cell, tall)],
                colour(name),
                i in kept,
            )
            _write(
                axes,
                place + cell / 2,
                foot - tall + 0.06,
                str(positions[i]),
                figure_size,
                ha="center",
            )
        _band(axes, at, top - 0.23, across, 0.2, name, read)

    # Rows: the tokens that see.
    at = top
    for name, attending in attending_blocks:
        _band(axes, x, at, _BAND - 0.04, len(attending) * cell, name, attending[0] in kept)
        at += len(attending) * cell
    for k, i in enumerate(order if numbered else ()):
        _write(
            axes, left - 0.07, top + (k + 0.5) * cell, str(positions[i]), figure_size, ha="right"
        )

    # The mask: one path for each block that is seen, then grid lines, then the blocks' boundaries.
    _fill(axes, [(left, top, right - left, bottom - top)], "#f2f2f2")
    are_read = torch.zeros(len(layout), dtype=torch.bool).index_fill(
        0, torch.tensor(layout.kept_tokens).long(), True
    )
    for (name, block), read in itertools.product(blocks, (True, False)):
        within = torch.zeros_like(are_read).index_fill(0, torch.tensor(block), True) & (
            are_read == read
        )
        runs = [
            (r, run) for r, row in enumerate(order) for run in slices(layout.mask[row] & within)
        ]
        if runs:
            seen = [
                (left + run.start * cell, top + r * cell, (run.stop - run.start) * cell, cell)
                for r, run in runs
            ]
            _fill(axes, seen, colour(name), read)
    edges = {0, *(block[-1] + 1 for _, block in blocks)}
    ends = {0, *itertools.accumulate(len(block) for _, block in attending_blocks)}
    fine: dict[str, Any] = {"colors": "white", "linewidth": 0.7 if cell > 0.15 else 0.35}
    for style, x_ticks, y_ticks in (
        (fine, range(1, len(positions)), range(1, len(order))),
        ({"colors": "#333333", "linewidth": 0.8}, sorted(edges), sorted(ends)),
    ):
        axes.vlines([left + i * cell for i in x_ticks], top, bottom, **style)
        axes.hlines([top + r * cell for r in y_ticks], left, right, **style)


def _width(text: str, size: float) -> float:
    """The approximate width of a text in inches, with room for fonts that are wider than matplotlib's."""
    return len(text) * size * 0.0088


def _write(axes: Axes, x: float, y: float, text: str, size: float, **style: Any) -> None:
    if text:
        # Without `parse_math`, "$" is a dollar sign.
        axes.text(
            x,
            y,
            text,
            **{"fontsize": size, "va": "center", "color": "#222222", "parse_math": False, **style},
        )


def _band(
    axes: Axes, x: float, y: float, width: float, height: float, name: str, read: bool
) -> None:
    """Draw a box in the colour of a block, with the block's name in black or white, whichever can be read."""
    _fill(axes, [(x, y, width, height)], colour(name), read, hatch=False)
    dark = not read or colour(name) in ("#e69f00", "#cc79a7", "#56b4e9")
    size = min(8.5, width / _width(name, 1.0))
    style = {"ha": "center", "weight": "bold", "color": "#111111" if dark else "white"}
    _write(axes, x + width / 2, y + height / 2, name, size, **style)


def _fill(
    axes: Axes,
    boxes: list[tuple[float, float, float, float]],
    colour: str,
    read: bool = True,
    hatch: bool = True,
) -> None:
    """Draw boxes (x, y, width, height) in one colour: pale and hatched, if query and answer do not `read` them."""
    from matplotlib.colors import to_rgb
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Outline

    outline = Outline.make_compound_path(
        *(
            Outline([(x, y), (x + w, y), (x + w, y + h), (x, y + h), (x, y)], closed=True)
            for x, y, w, h in boxes
        )
    )
    pale = [1 - 0.35 * (1 - part) for part in to_rgb(colour)]
    style = {} if read else {"edgecolor": colour, "hatch": "//////" if hatch else None}
    axes.add_patch(PathPatch(outline, facecolor=colour if read else pale, linewidth=0, **style))
