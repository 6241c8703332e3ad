"""The style of all figures that show results. Equal figures make equal files."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lm_eval_icl.errors import require

INK, GREY = "#24292f", "#6e7781"
# The metadata of files, without time, name of the program and web address.
METADATA: dict[str, dict[str, Any]] = {
    "svg": {"Date": None, "Creator": None, "Format": None, "Type": None},
    "png": {"Software": None},
}
# Okabe and Ito's colours, which colour-blind readers can tell apart, then others. Figures are read on white and on
# black pages, so grey replaces their black, and their yellow is darker. Markers tell similar colours apart.
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

# matplotlib's settings for every picture. The bytes are the same each time, and a browser can select and find the text.
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
    """Inside this context, figures are made and saved in this style, whatever the user's settings of matplotlib."""
    require("matplotlib", "figures", "a figure")
    from matplotlib import style  # imported here, since it takes half a second

    with style.context(["default", {**_SETTINGS, **further}]), warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "Glyph .* missing"
        )  # for names: browsers draw an SVG's text in their fonts
        yield


def method_style(name: str) -> tuple[str, str]:
    """The colour and the marker of a method, which are the same in all figures."""
    if name in _STYLES:
        return _STYLES[name]
    number = int.from_bytes(hashlib.sha256(name.encode(errors="replace")).digest()[:8], "big")
    colours = [colour for colour, _ in _STYLES.values()]
    return colours[number % len(colours)], _MARKERS[number // len(colours) % len(_MARKERS)]


def clipped(name: str, most: int = 32) -> str:
    """The end of a name, at most `most` characters in one line. (The end of a path says more than its beginning.)"""
    name = one_line(name)
    return name if len(name) <= most else "…" + name[len(name) - most + 1 :]


def shortened(label: str, most: int = 46) -> str:
    """A label in one line of at most `most` characters: the beginning (the method) and the end (its arguments)."""
    label = one_line(label)
    return (
        label
        if len(label) <= most
        else f"{label[: most * 2 // 3 - 1]}…{label[len(label) - most // 3 :]}"
    )


def one_line(name: str) -> str:
    """The text without line breaks and other characters that cannot be printed or written into an SVG file."""
    return " ".join("".join(char if char.isprintable() else " " for char in name).split())
