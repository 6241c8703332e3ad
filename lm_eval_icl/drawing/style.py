"""The style of all figures that show results. Equal figures make equal files."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lm_eval_icl.errors import require
from lm_eval_icl.methods import STYLES

INK = "#24292f"
GREY = "#6e7781"
# The metadata of files, without time, name of the program and web address.
METADATA: dict[str, dict[str, Any]] = {
    "svg": {"Date": None, "Creator": None, "Format": None, "Type": None},
    "png": {"Software": None},
}
# Okabe and Ito's colours, which colour-blind readers can tell apart, then others. Figures are read
# on white and on black pages, so grey replaces their black, and their yellow is darker. Markers
# tell similar colours apart; none is a triangle, since ▲ and ▼ mean better and worse.
_STYLES = {"hf": ("#7f7f7f", "s"), **STYLES}
_MARKERS = "oDsdPX8ph*H"

# matplotlib's settings for every picture. The bytes are the same each time, and a browser can
# select and find the text.
FILES: dict[str, Any] = {
    "svg.hashsalt": "lm-eval-icl",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],  # the first comes with matplotlib
}
_SETTINGS = {
    **FILES,
    "font.size": 9,
    "text.parse_math": False,  # names may have dollar signs
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}


@contextmanager
def styled(**further: Any) -> Iterator[None]:
    """Inside this context, figures are made and saved in this style.

    The user's settings of matplotlib have no effect.
    """
    require("matplotlib", "figures", "a figure")
    from matplotlib import style  # imported here, since it takes half a second

    with style.context(["default", {**_SETTINGS, **further}]), warnings.catch_warnings():
        # Names may have such characters. Browsers draw an SVG's text in their own fonts.
        warnings.filterwarnings("ignore", "Glyph .* missing")
        yield


def method_style(name: str) -> tuple[str, str]:
    """The colour and the marker of a method, which are the same in all figures."""
    if name in _STYLES:
        return _STYLES[name]
    number = int.from_bytes(hashlib.sha256(name.encode(errors="replace")).digest()[:8], "big")
    colours = [colour for colour, _ in _STYLES.values()]
    return colours[number % len(colours)], _MARKERS[number // len(colours) % len(_MARKERS)]


def clipped(name: str, most: int = 32) -> str:
    """The end of a name, at most `most` characters in one line.

    (The end of a path says more than its beginning.)
    """
    name = one_line(name)
    return name if len(name) <= most else "…" + name[len(name) - most + 1 :]


def shortened(label: str, most: int = 46) -> str:
    """A label in one line of at most `most` characters.

    The beginning (the method) and the end (its arguments) stay.
    """
    label = one_line(label)
    if len(label) <= most:
        return label
    return f"{label[: most * 2 // 3 - 1]}…{label[len(label) - most // 3 :]}"


def one_line(name: str) -> str:
    """The text in one line, without characters that cannot be printed or written into an SVG."""
    printable = "".join(char if char.isprintable() else " " for char in name)
    return " ".join(printable.split())
