"""Saves a `Drawing` as a picture: `lm-eval-icl show METHOD --output FILE.svg` or `FILE.png`."""

from __future__ import annotations

import itertools
import textwrap
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_eval_icl.drawing.drawing import Drawing, colour, columns, rows
from lm_eval_icl.drawing.style import FILES
from lm_eval_icl.errors import InputError
from lm_eval_icl.prompts.layouts import Layout

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# All lengths are in inches, from the upper left corner.

_BAND, _HEAD = 0.36, 0.32
# The width of the positions beside a panel, and the height of those above it.
_BESIDE, _ABOVE = 0.3, 0.46
_PAGE = 15.0


def check_output(path: Path) -> str:
    """The format of a picture, "svg" or "png", by the suffix of its file.

    Raises:
        InputError: the suffix is another, or the folder does not exist.
    """
    kind = path.suffix.lower().removeprefix(".")
    if kind not in ("svg", "png"):
        raise InputError(f"--output {path}: must end in .svg or .png.")
    if not path.parent.is_dir():
        raise InputError(f"--output {path}: there is no folder {path.parent}: make it first, or name another.")
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
    with style.context(["default", {**FILES, "hatch.linewidth": 0.7}]), warnings.catch_warnings():
        # A browser can show an SVG's text in fonts with more glyphs than the font used here, but a PNG's glyphs are
        # drawn now: `_spelt` replaces those that are missing.
        warnings.filterwarnings("ignore", "Glyph .* missing")
        figure = _figure(drawing, _spelt if kind == "png" else str)
        try:
            figure.savefig(path, format=kind, dpi=200, metadata=metadata)
        except OSError as error:
            raise InputError(f"--output {path}: cannot be written ({error.strerror or error}).") from error


def _spelt(text: str) -> str:
    """The text with every character that the font lacks replaced by its code point."""
    from matplotlib import font_manager

    glyphs = font_manager.get_font(font_manager.findfont("DejaVu Sans")).get_charmap()
    return "".join(c if ord(c) in glyphs else f"\\u{{{ord(c):x}}}" for c in text)


def _figure(drawing: Drawing, shown: Callable[[str], str]) -> Figure:
    from matplotlib.figure import Figure

    layouts = [layout for _, layout in drawing.passes]
    cell = min(0.27, max(0.08, 7.5 / max(len(layout) for layout in layouts)))
    reads, size = [shown(text) for text in drawing.reads], min(7.5, cell * 72 * 0.8)
    label = max((0.1 + _width(text, size) for text in reads if text), default=0.0)
    last = max(int(layout.positions.max()) for layout in layouts)

    # Place the panels side by side, as many as fit the width of a page.
    places: list[tuple[float, float]] = []
    head = _HEAD if any(title for title, _ in drawing.passes) else 0.0
    x, y, deepest, widest = 0.25, 0.68 + head / 3, 0.0, 0.0
    for title, layout in drawing.passes:
        beside, above = (_BESIDE, _ABOVE) if layout.step else (0.0, 0.0)
        across = label + _BAND + beside + max(len(layout) * cell, _width(title, 8.5) - _BAND)
        if places and x + across > _PAGE:
            x, y, deepest = 0.25, y + deepest + 0.25, 0.0
        places.append((x, y))
        looking = sum(len(block) for _, block in rows(layout))
        deepest = max(deepest, head + above + 0.36 + looking * cell + label)
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
        _panel(axes, x + label, y, title, layout, reads, cell, last)
    for i, note in enumerate(notes):
        _write(axes, 0.25, y + deepest + 0.3 + 0.17 * i, note, 8, color="#555555")
    return figure


def _panel(
    axes: Axes, x: float, y: float, title: str, layout: Layout, reads: list[str], cell: float, last: int
) -> None:
    """Draw one forward pass: bars as high as the positions, the blocks' names, and the mask."""
    positions, sees, kept = layout.positions.tolist(), layout.mask.tolist(), set(layout.kept_tokens)
    blocks, looks = columns(layout), rows(layout)
    order = [i for _, block in looks for i in block]
    beside, above = (_BESIDE, _ABOVE) if layout.step else (0.0, 0.0)
    left, foot = x + _BAND + beside, y + (_HEAD if title else 0.0) + above
    top = foot + 0.36
    right, bottom = left + len(positions) * cell, top + len(order) * cell
    figure_size = min(7.0, cell * 72 * 0.9 / (0.64 * len(str(last))))
    _write(axes, x, y + 0.06, title, 8.5, style="italic")

    # Columns: the tokens that are seen.
    if layout.step:
        _write(axes, left - 0.06, foot + 0.06, "position", 6.5, ha="right", color="#555555")
    for name, block in blocks:
        for i in block if layout.step else ():
            tall = above * (positions[i] + 1) / (last + 1)
            at = left + i * cell
            _fill(axes, [(at + 0.12 * cell, foot - tall + 0.12, 0.76 * cell, tall)], colour(name), i in kept)
            _write(axes, at + cell / 2, foot - tall + 0.06, str(positions[i]), figure_size, ha="center")
        at, across = left + block[0] * cell, len(block) * cell
        _fill(axes, [(at, top - 0.23, across, 0.2)], colour(name), block[0] in kept, hatch=False)
        _name(axes, at + across / 2, top - 0.13, name, across, block[0] in kept)

    # Rows: the tokens that see.
    at = top
    for name, looking in looks:
        down = len(looking) * cell
        _fill(axes, [(x, at, _BAND - 0.04, down)], colour(name), looking[0] in kept, hatch=False)
        _name(axes, x + (_BAND - 0.04) / 2, at + down / 2, name, _BAND - 0.04, looking[0] in kept)
        for k, i in enumerate(looking if layout.step else ()):
            _write(axes, left - 0.07, at + (k + 0.5) * cell, str(positions[i]), figure_size, ha="right")
        at += down

    # The mask: one path for each colour, then grid lines, then block boundaries.
    _fill(axes, [(left, top, right - left, bottom - top)], "#f2f2f2")
    for name, block in blocks:
        for read in (True, False):
            runs = []
            for r, row in enumerate(order):
                seen = [i for i in block if sees[row][i] and (i in kept) == read]
                for start, end in _runs(seen):
                    runs.append((left + start * cell, top + r * cell, (end - start) * cell, cell))
            if runs:
                _fill(axes, runs, colour(name), read)
    fine = 0.7 if cell > 0.15 else 0.35
    inner = [(left + i * cell, top, 0.0, bottom - top) for i in range(1, len(positions))]
    inner += [(left, top + r * cell, right - left, 0.0) for r in range(1, len(order))]
    _stroke(axes, inner, "white", fine)
    edges = [0, *(block[-1] + 1 for _, block in blocks)]
    ends = [0, *itertools.accumulate(len(block) for _, block in looks)]
    outer = [(left + i * cell, top, 0.0, bottom - top) for i in edges]
    outer += [(left, top + r * cell, right - left, 0.0) for r in ends]
    _stroke(axes, outer, "#333333", 0.8)

    # The texts of the tokens.
    size = min(7.5, cell * 72 * 0.8)
    for r, row in enumerate(order):
        if text := reads[layout.source[row]]:
            _write(axes, x - 0.07, top + (r + 0.5) * cell, text, size, ha="right")
    for i, source in enumerate(layout.source):
        if text := reads[source]:
            upright = {"ha": "right", "va": "center_baseline", "rotation": 90, "rotation_mode": "anchor"}
            _write(axes, left + (i + 0.5) * cell, bottom + 0.07, text, size, **upright)


def _runs(indices: list[int]) -> Iterator[tuple[int, int]]:
    """Runs of consecutive indices, as (first, last + 1)."""
    for _, group in itertools.groupby(enumerate(indices), key=lambda pair: pair[1] - pair[0]):
        run = [i for _, i in group]
        yield run[0], run[-1] + 1


def _width(text: str, size: float) -> float:
    """About how wide a text is, in inches. The reader's font may be wider than the one used here."""
    return len(text) * size * 0.0088


def _write(axes: Axes, x: float, y: float, text: str, size: float, **style: Any) -> None:
    if text:
        # Without `parse_math`, "$" is a dollar sign.
        axes.text(x, y, text, **{"fontsize": size, "va": "center", "color": "#222222", "parse_math": False, **style})


def _name(axes: Axes, x: float, y: float, name: str, width: float, read: bool) -> None:
    """Write a block's name on its colour, in black or white for contrast."""
    size = min(8.5, width / _width(name, 1.0))
    dark = not read or colour(name) in ("#e69f00", "#cc79a7", "#56b4e9")
    _write(axes, x, y, name, size, ha="center", weight="bold", color="#111111" if dark else "white")


def _fill(
    axes: Axes, boxes: list[tuple[float, float, float, float]], colour: str, read: bool = True, hatch: bool = True
) -> None:
    """Draw boxes (x, y, width, height) in one colour; paler and hatched if query and answer do not `read` them."""
    from matplotlib.colors import to_hex, to_rgb
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Outline

    outline = Outline.make_compound_path(
        *(Outline([(x, y), (x + w, y), (x + w, y + h), (x, y + h), (x, y)], closed=True) for x, y, w, h in boxes)
    )
    if read:
        axes.add_patch(PathPatch(outline, facecolor=colour, linewidth=0))
        return
    red, green, blue = (1 - 0.35 * (1 - part) for part in to_rgb(colour))
    pale = to_hex((red, green, blue))
    axes.add_patch(PathPatch(outline, facecolor=pale, edgecolor=colour, hatch="//////" if hatch else None, linewidth=0))


def _stroke(axes: Axes, lines: list[tuple[float, float, float, float]], colour: str, thick: float) -> None:
    """Draw lines (x, y, width, height), of which width or height is 0."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Outline

    if lines:
        outline = Outline.make_compound_path(*(Outline([(x, y), (x + w, y + h)]) for x, y, w, h in lines))
        axes.add_patch(PathPatch(outline, facecolor="none", edgecolor=colour, linewidth=thick, capstyle="butt"))
