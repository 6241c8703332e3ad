"""How figures look: one style for all that show results, and files that stay the same."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

INK, GREY = "#24292f", "#6e7781"
# The files contain no time, no name of a program and no web address.
METADATA: dict[str, dict[str, Any]] = {
    "svg": {"Date": None, "Creator": None, "Format": None, "Type": None},
    "png": {"Software": None},
}
# Okabe and Ito's colours, which colour-blind readers tell apart too. Figures are read on white and on black, so there
# is grey for their black, and a darker yellow. A marker beside the colour tells apart those that share one.
_STYLES = {
    "hf": ("#7f7f7f", "s"),
    "icl": ("#0072b2", "o"),
    "invicl": ("#d55e00", "D"),
    "deepthink": ("#e69f00", "^"),
    "pcw": ("#009e73", "v"),
    "prefixicl": ("#56b4e9", "P"),
    "saicl": ("#cc79a7", "X"),
    "nope": ("#b3a200", "<"),
    "batchicl": ("#a0703c", ">"),
    "sbp": ("#8f5fd0", "p"),
    "star": ("#d02350", "*"),
    "ape": ("#43801a", "h"),
    "structured": ("#6f83e0", "d"),
    "ensemble": ("#ee8a7d", "8"),
    "nbce": ("#00989c", "H"),
}
_MARKERS = "oDs^vPX<>ph*"

# matplotlib's settings of every picture: the same bytes each time, and text that a browser can select and find.
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
    """Figures that are made and saved inside look like ours, whatever the user's settings of matplotlib are."""
    from matplotlib import style  # imported here, since it takes half a second

    with style.context(["default", {**_SETTINGS, **further}]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # of a name; an SVG's text is drawn by its reader
        yield


def of_method(name: str) -> tuple[str, str]:
    """A method's colour and marker: the same in all figures, whatever else they show."""
    if name in _STYLES:
        return _STYLES[name]
    number = int.from_bytes(hashlib.sha256(name.encode(errors="replace")).digest()[:8], "big")
    colours = [colour for colour, _ in _STYLES.values()]
    return colours[number % len(colours)], _MARKERS[number // len(colours) % len(_MARKERS)]


def clipped(name: str, most: int = 32) -> str:
    """A name in one line of at most this many characters: its end, which says more than its beginning in a path."""
    name = one_line(name)
    return name if len(name) <= most else "…" + name[len(name) - most + 1 :]


def shortened(label: str, most: int = 46) -> str:
    """The beginning and the end of a label: the method, and what tells entries of a method apart."""
    label = one_line(label)
    return label if len(label) <= most else f"{label[: most * 2 // 3 - 1]}…{label[len(label) - most // 3 :]}"


def one_line(name: str) -> str:
    """The text without newlines and other characters that cannot be printed, or not be written into an SVG file."""
    return " ".join("".join(char if char.isprintable() else " " for char in name).split())
