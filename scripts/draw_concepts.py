"""Draw the pictures of docs/concepts.md: a prompt's parts, contexts, memory, pack and canonical order.

    python scripts/draw_concepts.py [--output DIR]

The pack is drawn from the object that runs (`TokenTree`). The same code and the same matplotlib give the same files,
byte for byte.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from lm_eval_icl.drawing.drawing import colour
from lm_eval_icl.drawing.style import FILES
from lm_eval_icl.inference.packing import TokenTree

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = {
    **FILES,
    "font.monospace": ["DejaVu Sans Mono", "Menlo", "Consolas"],
}
GREY, INK, FAINT = "#555555", "#222222", "#f2f2f2"
DARK_TEXT = ("#e69f00", "#cc79a7", "#56b4e9")

PREFIX = "Tell the sentiment of each review.\n\n"
DEMONSTRATIONS = (
    "Review: dull plot\nSentiment: negative\n\n",
    "Review: warm and funny\nSentiment: positive\n\n",
)
QUERY, ANSWER = "Review: odd but sharp\nSentiment:", " positive"

# All lengths are in inches, from the upper left corner.


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """An empty white page."""
    figure = Figure(figsize=(width, height), facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    return figure, axes


def write(axes: Axes, x: float, y: float, text: str, size: float = 9.0, **how: Any) -> None:
    axes.text(
        x, y, text, **{"fontsize": size, "va": "center", "color": INK, "parse_math": False, **how}
    )


def heading(axes: Axes, x: float, text: str, below: str, apart: float = 0.23) -> None:
    """A title in bold, and a line in grey below it."""
    write(axes, x, 0.3, text, 10, weight="bold")
    write(axes, x, 0.3 + apart, below, 9, color=GREY)


def pale(name: str, share: float = 0.35) -> str:
    red, green, blue = (1 - share * (1 - part) for part in to_rgb(colour(name)))
    return to_hex((red, green, blue))


def box(axes: Axes, x: float, y: float, wide: float, tall: float, fill: str, **how: Any) -> None:
    axes.add_patch(Rectangle((x, y), wide, tall, **{"facecolor": fill, "linewidth": 0, **how}))


def edged(
    axes: Axes, x: float, y: float, wide: float, tall: float, fill: str, edge: float = 1.0
) -> None:
    """A box with white edges, in a colour or in that of a part with this name."""
    box(
        axes,
        x,
        y,
        wide,
        tall,
        fill if fill[0] == "#" else colour(fill),
        edgecolor="white",
        linewidth=edge,
    )


def tile(
    axes: Axes, x: float, y: float, wide: float, tall: float, name: str, text: str = "", **how: Any
) -> None:
    """A block in its colour, paler if it is not `kept`, with a text or its name on it."""
    kept, size = how.get("kept", True), how.get("size", 9.0)
    edged(axes, x, y, wide, tall, name if kept else pale(name), how.get("edge", 1.2))
    ink = "#111111" if colour(name) in DARK_TEXT or not kept else "white"
    write(
        axes, x + wide / 2, y + tall / 2, text or name, size, ha="center", weight="bold", color=ink
    )


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], **how: Any) -> None:
    given = {
        "arrowstyle": "-|>",
        "mutation_scale": 11,
        "color": GREY,
        "linewidth": 1.1,
        "shrinkA": 0,
        "shrinkB": 0,
    }
    axes.add_patch(FancyArrowPatch(start, end, **{**given, **how}))


def line(axes: Axes, xs: Sequence[float], ys: Sequence[float], **how: Any) -> None:
    axes.plot(xs, ys, **{"color": GREY, "linewidth": 1.0, "solid_capstyle": "butt", **how})


def parts() -> Figure:
    """A prompt as text, part by part."""
    rows = [
        ("P", PREFIX, "prefix: the text before the first demonstration"),
        (
            "D1",
            DEMONSTRATIONS[0],
            "demonstration 1, with its answer and\nthe blank line that follows",
        ),
        ("D2", DEMONSTRATIONS[1], "demonstration 2"),
        ("Q", QUERY, "query: the document to answer, up to where\nthe answer begins"),
        ("A", ANSWER, "answer: one option (or the generated text)"),
    ]
    step, left, wide = 0.24, 0.75, 3.55
    figure, axes = canvas(8.3, 3.1)
    y = 0.2
    for name, text, says in rows:
        # A blank line is shown as the line break that makes it.
        texts = text.replace("\n\n", "⏎⏎").replace("\n", "⏎\n").splitlines()
        tall = step * len(texts) + 0.1
        tile(axes, 0.2, y, 0.45, tall, name)
        edged(axes, left - 0.1, y, wide, tall, pale(name, 0.18), 1.2)
        for i, words in enumerate(texts):
            shown = words.replace(" ", "␣", 1) if words.startswith(" ") else words
            write(axes, left, y + 0.05 + step * (i + 0.5), shown, 9, family="monospace")
        write(axes, left + wide + 0.1, y + tall / 2, says, 9, color=GREY)
        y += tall + 0.03
    write(
        axes,
        0.2,
        y + 0.22,
        "Joined, the parts are the string that lm-eval gives to any model.",
        9,
        color=GREY,
    )
    return figure


def bar(
    axes: Axes, x: float, y: float, names: Sequence[str], texts: Sequence[str] | None = None
) -> float:
    """Draw parts side by side, and return where they end."""
    for name, text in zip(names, texts or names, strict=True):
        wide = {"P": 0.35, "Q": 0.5}.get(name[0], 0.85)
        tile(axes, x, y, wide, 0.3, name, text)
        x += wide
    return x


def context() -> Figure:
    """Four prompts, two contexts."""
    figure, axes = canvas(8.3, 2.75)
    write(axes, 0.2, 0.25, "four prompts, as lm-eval builds them", 10, weight="bold")
    write(axes, 4.75, 0.25, "two contexts, each encoded once", 10, weight="bold")
    prompts = [("D1", "D2"), ("D1", "D2"), ("D1", "D2"), ("D3", "D4")]
    for i, demonstrations in enumerate(prompts):
        y = 0.5 + 0.45 * i
        write(axes, 0.2, y + 0.15, f"document {i + 1}", 8.5, color=GREY)
        bar(axes, 1.15, y, ["P", *demonstrations, "Q"], ["P", *demonstrations, f"Q{i + 1}"])
    for y, demonstrations, queries in ((0.95, ("D1", "D2"), (1, 2, 3)), (1.85, ("D3", "D4"), (4,))):
        end = bar(axes, 4.75, y, ["P", *demonstrations])
        for k, i in enumerate(queries):
            at = y + 0.45 * (k - (len(queries) - 1) / 2)
            tile(axes, end + 0.6, at, 0.5, 0.3, "Q", f"Q{i}")
            line(axes, [end, end + 0.6], [y + 0.15, at + 0.15])
    arrow(axes, (3.95, 1.3), (4.55, 1.3))
    write(
        axes,
        0.2,
        2.5,
        "A context is the prefix and the demonstrations of a prompt, as token ids.",
        9,
        color=GREY,
    )
    return figure


def memory() -> Figure:
    """Keys and values of a context, read by two queries."""
    row = ["P"] * 2 + ["D1"] * 3 + ["D2"] * 3
    cell, gap, layers = 0.34, 0.9, 3
    figure, axes = canvas(8.3, 3.45)
    left, top = 1.1, 0.75
    heading(axes, left, "memory: keys and values", "made once, by one pass over the context")
    edge = left + len(row) * cell
    for layer in range(layers):
        y = top + layer * 0.52
        write(axes, left - 0.12, y + 0.19, f"layer {layers - layer}", 8.5, ha="right", color=GREY)
        for i, name in enumerate(row):
            edged(axes, left + i * cell, y, cell, 0.19, name)
            edged(axes, left + i * cell, y + 0.19, cell, 0.19, pale(name, 0.6))
        write(axes, edge + 0.05, y + 0.095, "keys", 6.5, color=GREY)
        write(axes, edge + 0.05, y + 0.285, "values", 6.5, color=GREY)
    y = top + layers * 0.52 + 0.12
    for i, name in enumerate(row):
        tile(axes, left + i * cell, y, cell, 0.28, name)
        write(axes, left + (i + 0.5) * cell, y + 0.42, str(i), 8, ha="center", color=GREY)
    write(axes, left - 0.12, y + 0.14, "context", 8.5, ha="right", color=GREY)
    write(axes, left - 0.12, y + 0.42, "position", 8.5, ha="right", color=GREY)
    arrow(axes, (left + len(row) * cell / 2, y - 0.01), (left + len(row) * cell / 2, y - 0.13))
    for k, number in enumerate((3, 2)):
        x = edge + gap + k * 1.75
        heading(axes, x, f"query {k + 1}", "attends to it")
        for layer in range(layers):
            at = top + layer * 0.52
            for i in range(number):
                edged(axes, x + i * cell, at, cell, 0.38, pale("Q", 0.75))
            if k == 0:
                arrow(axes, (x - 0.04, at + 0.19), (edge + 0.42, at + 0.19))
            else:  # below the first query
                line(
                    axes,
                    [x - 0.04, x - 0.16, x - 0.16, edge + 0.6],
                    [at + 0.19] * 2 + [at + 0.45] * 2,
                )
                arrow(axes, (edge + 0.6, at + 0.45), (edge + 0.42, at + 0.3))
        for i in range(number):
            tile(axes, x + i * cell, y, cell, 0.28, "Q")
            write(
                axes, x + (i + 0.5) * cell, y + 0.42, str(len(row) + i), 8, ha="center", color=GREY
            )
        arrow(axes, (x + number * cell / 2, y - 0.01), (x + number * cell / 2, y - 0.13))
    note = "Every query attends to the memory in every layer. Its positions go on after those of the context."
    write(axes, 0.2, 3.22, note, 9, color=GREY)
    return figure


def pack() -> Figure:
    """Two queries with three options each as a tree, and the tree as one row."""
    words = ["Review:", "odd", "Mood:", "very", "good", "bad", "fine", "warm"]
    ids = {word: i for i, word in enumerate(words)}
    queries = [["Review:", "odd", "Mood:"], ["Review:", "warm", "Mood:"]]
    options = [["very", "good"], ["very", "bad"], ["fine"]]
    tree = TokenTree()
    for query in queries:
        tree.add_query(
            [ids[word] for word in query],
            [tuple(ids[word] for word in option) for option in options],
        )
    figure, axes = canvas(9.8, 4.35)
    below = "solid: tokens that run; dashed: tokens that are only predicted"
    heading(axes, 0.2, "two queries with three options each, as a tree", below)
    # The places of the tokens of the tree, in the order in which the tree numbers them.
    places = [
        (0.25, 1.95),
        (1.25, 1.25),
        (2.15, 1.25),
        (3.05, 1.0),
        (1.25, 2.65),
        (2.15, 2.65),
        (3.05, 2.4),
    ]
    sees, names = (
        tree.ancestors(),
        ["A" if words[token] == "very" else "Q" for token in tree.tokens],
    )
    for node, (x, y) in enumerate(places):
        earlier = [i for i in range(node) if sees[node, i]]
        if earlier:
            px, py = places[earlier[-1]]
            line(axes, [px + 0.72, x], [py + 0.13, y + 0.13])
        box(axes, x, y, 0.72, 0.26, colour(names[node]))
        write(
            axes,
            x + 0.36,
            y + 0.13,
            words[tree.tokens[node]],
            8,
            ha="center",
            color="white",
            family="monospace",
        )
    for node in (2, 5):
        x, y = places[node]
        predicted(axes, x, y, x + 0.9, y + 0.27, "fine")
        predicted(axes, x + 0.9, y - 0.25, x + 1.8, y - 0.43, "good")
        predicted(axes, x + 0.9, y - 0.25, x + 1.8, y - 0.09, "bad")

    heading(
        axes, 5.15, "the same tree as one packed row", "one forward pass scores all six options"
    )
    cell, left, top, wide = 0.33, 6.3, 1.25, 0.8
    tile(axes, left, top - 0.34, wide, 0.3, "M", "memory")
    for i, (token, depth, name) in enumerate(zip(tree.tokens, tree.depths, names, strict=True)):
        y, x = top + i * cell, left + wide + i * cell
        edged(axes, left - 1.0, y, 0.66, cell, name)
        write(
            axes,
            left - 0.67,
            y + cell / 2,
            words[token],
            7,
            ha="center",
            color="white",
            family="monospace",
        )
        write(axes, left - 0.08, y + cell / 2, str(8 + depth), 8, ha="right")
        edged(axes, x, top - 0.34, cell, 0.3, name)
        write(
            axes,
            x + cell / 2,
            top - 0.19,
            words[token][0],
            8,
            ha="center",
            color="white",
            family="monospace",
        )
        edged(axes, left, y, wide, cell, "M")
        for j, seen in enumerate(names):
            edged(axes, left + wide + j * cell, y, cell, cell, seen if sees[i, j] else FAINT)
    write(axes, left - 0.08, top - 0.19, "position", 7, ha="right", color=GREY)
    alone = sum(len(query) + len(option) - 1 for query in queries for option in options)
    note = (
        "A token sees the memory, the tokens before it on its own path and itself, at the position it would have alone."
        f"\n{len(tree.tokens)} tokens run. The six requests one by one would run {alone}, and the context six times."
    )
    write(axes, 0.2, 4.0, note, 9, color=GREY, linespacing=1.5)
    return figure


def predicted(axes: Axes, px: float, py: float, x: float, y: float, word: str) -> None:
    """A token that is predicted and never runs."""
    line(axes, [px + 0.72, x], [py + 0.13, y + 0.13], linestyle=(0, (3, 2)))
    box(
        axes, x, y, 0.62, 0.24, "white", edgecolor=colour("A"), linestyle=(0, (3, 2)), linewidth=1.0
    )
    write(axes, x + 0.31, y + 0.12, word, 8, ha="center", color=colour("A"), family="monospace")


def canonical_order() -> Figure:
    """Three orders of the same demonstrations, one memory."""
    texts = {"D1": "dull", "D2": "odd", "D3": "warm"}
    orders = [("D2", "D1", "D3"), ("D3", "D2", "D1"), ("D1", "D3", "D2")]
    figure, axes = canvas(9.0, 2.35)
    write(axes, 0.2, 0.25, "three prompts", 10, weight="bold")
    write(axes, 4.15, 0.25, "one context, sorted by text", 10, weight="bold")
    write(axes, 8.1, 0.25, "one memory", 10, weight="bold", ha="center")
    for i, order in enumerate(orders):
        y = 0.5 + 0.45 * i
        end = bar(axes, 0.2, y, ["P", *order], ["P", *(texts[name] for name in order)])
        arrow(axes, (end + 0.1, y + 0.15), (4.05, 1.1))
    end = bar(axes, 4.15, 0.95, ["P", *texts], ["P", *texts.values()])
    arrow(axes, (end + 0.1, 1.1), (end + 0.55, 1.1))
    for layer in range(3):
        x = 8.1 - 0.425
        for name, wide in (("P", 0.13), ("D1", 0.24), ("D2", 0.24), ("D3", 0.24)):
            edged(axes, x, 0.83 + 0.19 * layer, wide, 0.16, name, 0.8)
            x += wide
    note = "Only where the method does not depend on the order of its demonstrations in exact arithmetic."
    write(axes, 0.2, 2.1, note, 9, color=GREY)
    return figure


PICTURES: dict[str, Callable[[], Figure]] = {
    "parts": parts,
    "context": context,
    "memory": memory,
    "pack": pack,
    "canonical-order": canonical_order,
}


def save(name: str, path: Path) -> None:
    """Draw one picture as SVG, the same byte for byte at every call."""
    with style.context(["default", SETTINGS]):
        PICTURES[name]().savefig(
            path, format="svg", metadata={"Title": name, "Date": None, "Creator": None}
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=ROOT / "docs/concepts",
        help="folder (default: docs/concepts)",
    )
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    for name in PICTURES:
        path = options.output / f"{name}.svg"
        save(name, path)
        print(path)


if __name__ == "__main__":
    main()
