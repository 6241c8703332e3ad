"""Draw the pictures of docs/concepts.md: a prompt's parts, contexts, memory, pack and canonical order.

    python scripts/draw_concepts.py

The pack is drawn from the object that runs (`TokenTree`). The same code and the same matplotlib give the same files,
byte for byte.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
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
SETTINGS = {**FILES, "font.monospace": ["DejaVu Sans Mono", "Menlo", "Consolas"]}
GREY = "#555555"
INK = "#222222"
FAINT = "#f2f2f2"
DARK_TEXT = ("#e69f00", "#cc79a7", "#56b4e9")

PREFIX = "Tell the sentiment of each review.\n\n"
DEMONSTRATIONS = (
    "Review: dull plot\nSentiment: negative\n\n",
    "Review: warm and funny\nSentiment: positive\n\n",
)
QUERY = "Review: odd but sharp\nSentiment:"
ANSWER = " positive"

# All lengths are in inches, from the upper left corner.


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """An empty white page."""
    figure = Figure(figsize=(width, height), facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    return figure, axes


def write(
    axes: Axes, x: float, y: float, text: str, size: float = 9.0, color: str = INK, **how: Any
) -> None:
    axes.text(x, y, text, fontsize=size, va="center", color=color, parse_math=False, **how)


def note(axes: Axes, x: float, y: float, text: str, size: float = 9.0, **how: Any) -> None:
    """A text in grey."""
    write(axes, x, y, text, size, GREY, **how)


def title(axes: Axes, x: float, y: float, text: str, **how: Any) -> None:
    write(axes, x, y, text, 10, weight="bold", **how)


def heading(axes: Axes, x: float, text: str, below: str) -> None:
    """A title, and a line in grey below it."""
    title(axes, x, 0.3, text)
    note(axes, x, 0.53, below)


def pale(name: str, share: float = 0.35) -> str:
    red, green, blue = (1 - share * (1 - part) for part in to_rgb(colour(name)))
    return to_hex((red, green, blue))


def box(
    axes: Axes, x: float, y: float, wide: float, tall: float, fill: str, edge: float = 1.0
) -> Rectangle:
    """A box with white edges, in a colour or in that of a part with this name."""
    if fill[0] != "#":
        fill = colour(fill)
    patch = Rectangle((x, y), wide, tall, facecolor=fill, edgecolor="white", linewidth=edge)
    axes.add_patch(patch)
    return patch


def tile(
    axes: Axes, x: float, y: float, wide: float, tall: float, name: str, text: str = ""
) -> None:
    """A block in its colour, with a text or its name on it."""
    box(axes, x, y, wide, tall, name, 1.2)
    ink = "#111111" if colour(name) in DARK_TEXT else "white"
    shown = text or name
    write(axes, x + wide / 2, y + tall / 2, shown, ha="center", weight="bold", color=ink)


def word(axes: Axes, x: float, y: float, text: str, size: float = 8, ink: str = "white") -> None:
    """A token as text, centered."""
    write(axes, x, y, text, size, ha="center", color=ink, family="monospace")


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    patch = FancyArrowPatch(
        start,
        end,
        arrowstyle="-|>",
        mutation_scale=11,
        color=GREY,
        linewidth=1.1,
        shrinkA=0,
        shrinkB=0,
    )
    axes.add_patch(patch)


def line(axes: Axes, xs: Sequence[float], ys: Sequence[float], style: Any = "-") -> None:
    axes.plot(xs, ys, color=GREY, linewidth=1.0, solid_capstyle="butt", linestyle=style)


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
    step = 0.24
    left = 0.75
    wide = 3.55
    figure, axes = canvas(8.3, 3.1)
    y = 0.2
    for name, text, says in rows:
        # A blank line is shown as the line break that makes it.
        texts = text.replace("\n\n", "⏎⏎").replace("\n", "⏎\n").splitlines()
        tall = step * len(texts) + 0.1
        tile(axes, 0.2, y, 0.45, tall, name)
        box(axes, left - 0.1, y, wide, tall, pale(name, 0.18), 1.2)
        for i, words in enumerate(texts):
            shown = words.replace(" ", "␣", 1) if words.startswith(" ") else words
            write(axes, left, y + 0.05 + step * (i + 0.5), shown, 9, family="monospace")
        note(axes, left + wide + 0.1, y + tall / 2, says)
        y += tall + 0.03
    note(axes, 0.2, y + 0.22, "Joined, the parts are the string that lm-eval gives to any model.")
    return figure


def bar(
    axes: Axes,
    x: float,
    y: float,
    demonstrations: Collection[str],
    texts: Collection[str] = (),
) -> float:
    """Draw the prefix and demonstrations side by side, and return where they end."""
    tile(axes, x, y, 0.35, 0.3, "P")
    x += 0.35
    for name, text in zip(demonstrations, texts or demonstrations, strict=True):
        tile(axes, x, y, 0.85, 0.3, name, text)
        x += 0.85
    return x


def context() -> Figure:
    """Four prompts, two contexts."""
    figure, axes = canvas(8.3, 2.75)
    title(axes, 0.2, 0.25, "four prompts, as lm-eval builds them")
    title(axes, 4.75, 0.25, "two contexts, each encoded once")
    prompts = [("D1", "D2"), ("D1", "D2"), ("D1", "D2"), ("D3", "D4")]
    for i, demonstrations in enumerate(prompts):
        y = 0.5 + 0.45 * i
        note(axes, 0.2, y + 0.15, f"document {i + 1}", 8.5)
        end = bar(axes, 1.15, y, demonstrations)
        tile(axes, end, y, 0.5, 0.3, "Q", f"Q{i + 1}")
    contexts = [(0.95, ("D1", "D2"), (1, 2, 3)), (1.85, ("D3", "D4"), (4,))]
    for y, demonstrations, queries in contexts:
        end = bar(axes, 4.75, y, demonstrations)
        for k, i in enumerate(queries):
            at = y + 0.45 * (k - (len(queries) - 1) / 2)
            tile(axes, end + 0.6, at, 0.5, 0.3, "Q", f"Q{i}")
            line(axes, [end, end + 0.6], [y + 0.15, at + 0.15])
    arrow(axes, (3.95, 1.3), (4.55, 1.3))
    says = "A context is the prefix and the demonstrations of a prompt, as token ids."
    note(axes, 0.2, 2.5, says)
    return figure


def memory() -> Figure:
    """Keys and values of a context, read by two queries."""
    row = ["P"] * 2 + ["D1"] * 3 + ["D2"] * 3
    cell = 0.34
    layers = 3
    left = 1.1
    top = 0.75
    bottom = top + layers * 0.52 + 0.12
    edge = left + len(row) * cell
    figure, axes = canvas(8.3, 3.45)

    def tokens(x: float, names: Sequence[str], first: int) -> None:
        """Tokens at the bottom, their positions below them, and an arrow up."""
        for i, name in enumerate(names):
            tile(axes, x + i * cell, bottom, cell, 0.28, name)
            note(axes, x + (i + 0.5) * cell, bottom + 0.42, str(first + i), 8, ha="center")
        middle = x + len(names) * cell / 2
        arrow(axes, (middle, bottom - 0.01), (middle, bottom - 0.13))

    heading(axes, left, "memory: keys and values", "made once, by one pass over the context")
    for layer in range(layers):
        y = top + layer * 0.52
        note(axes, left - 0.12, y + 0.19, f"layer {layers - layer}", 8.5, ha="right")
        for i, name in enumerate(row):
            box(axes, left + i * cell, y, cell, 0.19, name)
            box(axes, left + i * cell, y + 0.19, cell, 0.19, pale(name, 0.6))
        note(axes, edge + 0.05, y + 0.095, "keys", 6.5)
        note(axes, edge + 0.05, y + 0.285, "values", 6.5)
    tokens(left, row, 0)
    note(axes, left - 0.12, bottom + 0.14, "context", 8.5, ha="right")
    note(axes, left - 0.12, bottom + 0.42, "position", 8.5, ha="right")
    for k, query in enumerate(("QQQ", "QQ")):
        x = edge + 0.9 + k * 1.75
        heading(axes, x, f"query {k + 1}", "attends to it")
        for layer in range(layers):
            y = top + layer * 0.52
            for i in range(len(query)):
                box(axes, x + i * cell, y, cell, 0.38, pale("Q", 0.75))
            if k == 0:
                arrow(axes, (x - 0.04, y + 0.19), (edge + 0.42, y + 0.19))
            else:  # below the first query
                xs = [x - 0.04, x - 0.16, x - 0.16, edge + 0.6]
                line(axes, xs, [y + 0.19] * 2 + [y + 0.45] * 2)
                arrow(axes, (edge + 0.6, y + 0.45), (edge + 0.42, y + 0.3))
        tokens(x, query, len(row))
    says = "Every query attends to the memory in every layer. Its positions go on after those of the context."
    note(axes, 0.2, 3.22, says)
    return figure


def pack() -> Figure:
    """Two queries with three options each as a tree, and the tree as one row."""
    words = ["Review:", "odd", "Mood:", "very", "good", "bad", "fine", "warm"]
    queries = ["Review: odd Mood:", "Review: warm Mood:"]
    options = [ids_of(option, words) for option in ("very good", "very bad", "fine")]
    tree = TokenTree()
    for query in queries:
        tree.add_query(ids_of(query, words), options)
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
    sees = tree.ancestors()
    shown = [words[token] for token in tree.tokens]
    names = ["A" if token == "very" else "Q" for token in shown]
    for node, (x, y) in enumerate(places):
        earlier = [i for i in range(node) if sees[node, i]]
        if earlier:
            px, py = places[earlier[-1]]
            line(axes, [px + 0.72, x], [py + 0.13, y + 0.13])
        box(axes, x, y, 0.72, 0.26, names[node], 0)
        word(axes, x + 0.36, y + 0.13, shown[node])
    for x, y in (places[2], places[5]):
        predicted(axes, x, y, x + 0.9, y + 0.27, "fine")
        predicted(axes, x + 0.9, y - 0.25, x + 1.8, y - 0.43, "good")
        predicted(axes, x + 0.9, y - 0.25, x + 1.8, y - 0.09, "bad")

    below = "one forward pass scores all six options"
    heading(axes, 5.15, "the same tree as one packed row", below)
    cell = 0.33
    left = 6.3
    top = 1.25
    wide = 0.8
    tile(axes, left, top - 0.34, wide, 0.3, "M", "memory")
    for i, name in enumerate(names):
        y = top + i * cell
        x = left + wide + i * cell
        box(axes, left - 1.0, y, 0.66, cell, name)
        word(axes, left - 0.67, y + cell / 2, shown[i], 7)
        write(axes, left - 0.08, y + cell / 2, str(8 + tree.depths[i]), 8, ha="right")
        box(axes, x, top - 0.34, cell, 0.3, name)
        word(axes, x + cell / 2, top - 0.19, shown[i][0])
        box(axes, left, y, wide, cell, "M")
        for j, seen in enumerate(names):
            box(axes, left + wide + j * cell, y, cell, cell, seen if sees[i, j] else FAINT)
    note(axes, left - 0.08, top - 0.19, "position", 7, ha="right")
    alone = len(queries) * sum(3 + len(option) - 1 for option in options)
    says = (
        "A token sees the memory, the tokens before it on its own path and itself, at the position it would have alone."
        f"\n{len(tree.tokens)} tokens run. The six requests one by one would run {alone}, and the context six times."
    )
    note(axes, 0.2, 4.0, says, linespacing=1.5)
    return figure


def ids_of(text: str, words: list[str]) -> tuple[int, ...]:
    return tuple(map(words.index, text.split()))


def predicted(axes: Axes, px: float, py: float, x: float, y: float, text: str) -> None:
    """A token that is predicted and never runs."""
    dashes = (0, (3, 2))
    line(axes, [px + 0.72, x], [py + 0.13, y + 0.13], dashes)
    box(axes, x, y, 0.62, 0.24, "#ffffff").set(edgecolor=colour("A"), linestyle=dashes)
    word(axes, x + 0.31, y + 0.12, text, ink=colour("A"))


def canonical_order() -> Figure:
    """Three orders of the same demonstrations, one memory."""
    texts = {"D1": "dull", "D2": "odd", "D3": "warm"}
    orders = [("D2", "D1", "D3"), ("D3", "D2", "D1"), ("D1", "D3", "D2")]
    figure, axes = canvas(9.0, 2.35)
    title(axes, 0.2, 0.25, "three prompts")
    title(axes, 4.15, 0.25, "one context, sorted by text")
    title(axes, 8.1, 0.25, "one memory", ha="center")
    for i, order in enumerate(orders):
        y = 0.5 + 0.45 * i
        end = bar(axes, 0.2, y, order, [texts[name] for name in order])
        arrow(axes, (end + 0.1, y + 0.15), (4.05, 1.1))
    end = bar(axes, 4.15, 0.95, texts, texts.values())
    arrow(axes, (end + 0.1, 1.1), (end + 0.55, 1.1))
    for layer in range(3):
        x = 8.1 - 0.425
        for name, wide in (("P", 0.13), ("D1", 0.24), ("D2", 0.24), ("D3", 0.24)):
            box(axes, x, 0.83 + 0.19 * layer, wide, 0.16, name, 0.8)
            x += wide
    says = "Only where the method does not depend on the order of its demonstrations in exact arithmetic."
    note(axes, 0.2, 2.1, says)
    return figure


PICTURES = {
    "parts": parts,
    "context": context,
    "memory": memory,
    "pack": pack,
    "canonical-order": canonical_order,
}


def save(name: str, path: Path) -> None:
    """Draw one picture as SVG, the same byte for byte at every call."""
    with style.context(["default", SETTINGS]):
        metadata = {"Title": name, "Date": None, "Creator": None}
        PICTURES[name]().savefig(path, format="svg", metadata=metadata)


def main() -> None:
    for name in PICTURES:
        path = ROOT / f"docs/concepts/{name}.svg"
        save(name, path)
        print(path)


if __name__ == "__main__":
    main()
