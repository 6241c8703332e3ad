"""Figures of a study, as the papers have them: what varies, against the accuracy."""

from __future__ import annotations

import re
import statistics
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_eval_icl.errors import InputError
from lm_eval_icl.leaderboard.style import METADATA, clipped, styled
from lm_eval_icl.studies.outcome import grouped, order_sensitivity, shown, variants
from lm_eval_icl.studies.row import Row

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PANELS, _LABELS = 12, 10  # of a figure, at most
_GREY = "#666666"
# Colours that colour-blind readers tell apart too: Okabe and Ito's, without yellow and black; and Tol's "muted" ones,
# and black, for more labels.
_COLOURS = "#0072b2 #e69f00 #009e73 #cc79a7 #d55e00 #56b4e9".split()
_MUTED = "#332288 #88ccee #44aa99 #117733 #999933 #ddcc77 #cc6677 #882255 #aa4499 #000000".split()

Key = tuple[str, ...]
Paint = Callable[["Axes", Any, Mapping[str, str]], None]


@dataclass
class _Drawing:
    """A figure that is to be drawn.

    Attributes:
        panels: what `paint` draws in each, by label; by model, task, and what else a panel stands for.
        paint: draws one panel, given its data and the colour of each label.
        keys: further entries of the legend.
    """

    name: str
    x: str
    y: str
    panels: dict[Key, dict[str, Any]]
    paint: Paint
    keys: Sequence[Artist] = ()


def draw(rows: Sequence[Row], folder: Path, metric: str, which: Sequence[str] | None = None) -> list[Path]:
    """Draw the figures, each as SVG and as PNG. Equal rows make equal SVG files, byte for byte.

    A figure needs at least two values of what it shows, and is not drawn without.

    Args:
        metric: what the scores are.
        which: names of figures, see `FIGURES`; None for all.

    Returns:
        The files.

    Raises:
        InputError: there is no such figure, or a file cannot be written.
    """
    for name in which or ():
        if name not in FIGURES:
            raise InputError(f"figures: there is no figure {name!r}: name some of {', '.join(FIGURES)}.")
    paths = []
    with styled():
        for name in FIGURES if which is None else which:
            drawing = FIGURES[name](rows, "accuracy" if metric == "acc" else metric)
            if drawing.panels:
                paths += _save(_figure(drawing), folder / re.sub(r"[^\w.-]+", "-", drawing.name))
    return paths


def _save(figure: Figure, path: Path) -> list[Path]:
    found = []
    for kind, metadata in METADATA.items():
        to = path.with_name(f"{path.name}.{kind}")
        try:
            figure.savefig(to, format=kind, dpi=150, metadata=metadata)
        except OSError as error:
            raise InputError(f"{to}: cannot be written ({error.strerror or error}).") from error
        found.append(to)
    return found


def _figure(drawing: _Drawing) -> Figure:
    """Panels side by side in rows, and a legend to the right of them."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    every = list(dict.fromkeys(label for data in drawing.panels.values() for label in data))
    labels = every[:_LABELS]
    colours = dict(zip(labels, _COLOURS if len(labels) <= len(_COLOURS) else _MUTED, strict=False))
    handles = [Line2D([], [], color=colours[label], marker="o", markersize=4) for label in labels]
    found = {key: {label: data[label] for label in labels if label in data} for key, data in drawing.panels.items()}
    panels = [(key, data) for key, data in found.items() if data][:_PANELS]
    names = [textwrap.fill(label, 30) for label in labels] + [str(key.get_label()) for key in drawing.keys]
    across = min(len(panels), 4 if len(panels) > 6 or len(panels) == 4 else 3)
    down = -(-len(panels) // across)
    legend = 0.5 + 0.075 * max(len(line) for name in names for line in name.splitlines())
    tall = 0.4 + 0.19 * sum(1 + name.count("\n") for name in names)
    figure = Figure(figsize=(2.7 * across + legend, max(2.5 * down + 0.3, tall)), layout="constrained")
    grid = figure.subplots(down, across, squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.remove()
    for i, (axes, ((model, task, *further), data)) in enumerate(zip(grid.flat, panels, strict=False)):
        axes.set_title(f"{clipped(model)}\n{', '.join([clipped(task), *further])}")
        axes.set_xlabel(drawing.x if i + across >= len(panels) else "")
        axes.set_ylabel(drawing.y if i % across == 0 else "")
        axes.grid(axis="y", color="0.9", linewidth=0.6)
        axes.set_axisbelow(True)
        drawing.paint(axes, data, colours)
    parts = ((len(panels), len(drawing.panels), "panels"), (len(labels), len(every), "methods and arguments"))
    if left_out := [f"{of - drawn} of {of} {what}" for drawn, of, what in parts if drawn < of]:
        figure.suptitle(f"{' and '.join(left_out)} are left out", fontsize=9)
    figure.legend([*handles, *drawing.keys], names, loc="outside right upper")
    return figure


# ---------------------------------------------------------------------------------------------------------------
# What the figures show.


def _panels(rows: Sequence[Row], *further: str) -> dict[Key, list[Row]]:
    """The rows of each panel, by model and task, and what else of `further` the rows of these differ in."""
    found: dict[Key, list[Row]] = {}
    further = ("training", *further)
    for (model, task), some in grouped(rows, lambda row: (row.model, row.task)).items():
        differing = [name for name in further if len({getattr(row, name) for row in some}) > 1]
        for values, part in _by_values(some, differing).items():
            extra = [f"{value} shot{'s' * (value != 1)}" if isinstance(value, int) else str(value) for value in values]
            found[model, task, *extra] = part
    return found


def _by_values(rows: Sequence[Row], names: Sequence[str]) -> dict[tuple[Any, ...], list[Row]]:
    return grouped(rows, lambda row: tuple(getattr(row, name) for name in names))


def _by_seed(rows: Iterable[Row]) -> list[float]:
    """The score of each seed: the mean over orders."""
    return [statistics.fmean(row.score for row in some) for some in grouped(rows, lambda row: row.seed).values()]


def _of_variants(rows: Sequence[Row], data: Callable[[list[Row]], Any], *further: str) -> dict[Key, dict[str, Any]]:
    """By panel and label, what `data` makes of the rows; without what it makes nothing of."""
    labels = {id(row): variant.label for variant, some in variants(rows).items() for row in some}
    panels = {}
    for key, some in _panels([row for row in rows if id(row) in labels], *further).items():
        made = {label: data(part) for label, part in grouped(some, lambda row: labels[id(row)]).items()}
        if made := {label: value for label, value in made.items() if value}:
            panels[key] = made
    return panels


def _by_T(rows: Sequence[Row], metric: str) -> _Drawing:
    """Deep-Thinking, Figure 6: a line for each eta, dev dashed and test solid."""
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator

    def label(row: Row) -> str:
        others = shown({name: value for name, value in row.arguments.items() if name != "T"})
        return f"{row.method} {others}".strip()

    Curve = list[tuple[float, float, bool]]  # T, score, whether it was chosen

    def curve(some: Iterable[Row]) -> Curve:
        by_T = sorted(grouped(some, lambda row: row.arguments["T"]).items())
        return [(T, statistics.fmean(_by_seed(of)), choice and any(row.chosen for row in of)) for T, of in by_T]

    def paint(axes: Axes, data: dict[str, dict[str, Curve]], colours: Mapping[str, str]) -> None:
        for name, curves in data.items():
            for split, points in curves.items():
                x, y, chosen = zip(*points, strict=True)
                style = {"linestyle": "-", "marker": "o"} if split == "test" else {"linestyle": "--", "marker": None}
                axes.plot(x, y, color=colours[name], markersize=2.5, linewidth=1.3, **style)
                if split == "test" and any(chosen):
                    best = [point[:2] for point in points if point[2]]
                    axes.plot(*zip(*best, strict=True), "o", color=_GREY, markersize=9, fillstyle="none", zorder=4)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))

    some = [row for row in rows if isinstance(row.arguments.get("T"), int | float)]
    choice = any(not row.chosen for row in some)
    panels = {}
    for key, part in _panels(some, "num_fewshot", "demonstrations").items():
        by_label = grouped(part, label)
        curves = {
            name: {split: curve(of) for split, of in sorted(grouped(found, lambda row: row.split).items())}
            for name, found in by_label.items()
        }
        if any(len(points) > 1 for of in curves.values() for points in of.values()):
            panels[key] = curves
    keys: list[Artist] = []
    if len({row.split for row in some}) > 1:
        keys.append(Line2D([], [], color=_GREY, linestyle="-", label="test"))
        keys.append(Line2D([], [], color=_GREY, linestyle="--", label="dev"))
    if choice:
        ring: dict[str, Any] = {"marker": "o", "markersize": 9, "fillstyle": "none", "linestyle": "none"}
        keys.append(Line2D([], [], color=_GREY, label="chosen on dev", **ring))
    return _Drawing(f"{metric}-by-T", "T", metric, panels, paint, keys)


def _by_shots(rows: Sequence[Row], metric: str) -> _Drawing:
    """Deep-Thinking, Figure 4: the mean and a band of one standard deviation over seeds, a line for each method."""

    def curve(some: list[Row]) -> list[tuple[int, list[float]]]:
        return [(shots, _by_seed(of)) for shots, of in sorted(grouped(some, lambda row: row.num_fewshot).items())]

    def paint(axes: Axes, data: dict[str, list[tuple[int, list[float]]]], colours: Mapping[str, str]) -> None:
        for label, points in data.items():
            x, scores = zip(*points, strict=True)
            means = [statistics.fmean(values) for values in scores]
            spreads = [statistics.stdev(values) if len(values) > 1 else 0.0 for values in scores]
            low, high = ([m + sign * s for m, s in zip(means, spreads, strict=True)] for sign in (-1, 1))
            axes.plot(x, means, "o-", color=colours[label], markersize=3.5, zorder=3)
            axes.fill_between(x, low, high, color=colours[label], alpha=0.15, linewidth=0)
        shots = sorted({x for points in data.values() for x, _ in points})
        if shots[0] > 0:
            axes.set_xscale("log", base=2)
        ticks = shots[:: -(-len(shots) // 8)]
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()

    panels = _of_variants(rows, curve, "demonstrations")
    panels = {key: data for key, data in panels.items() if any(len(points) > 1 for points in data.values())}
    return _Drawing(f"{metric}-by-shots", "demonstrations", metric, panels, paint)


def _strips(axes: Axes, data: Mapping[str, Sequence[float]], colours: Mapping[str, str]) -> None:
    """A box and its points for each label."""
    for at, (label, values) in enumerate(data.items()):
        line = {"color": colours[label], "linewidth": 1.2}
        styles: dict[str, Any] = {
            "boxprops": line,
            "whiskerprops": line,
            "capprops": line,
            "medianprops": {**line, "linewidth": 2},
        }
        axes.boxplot([values], positions=[at], widths=0.6, showfliers=False, **styles)
        spots = [at - 0.15 + 0.3 * (i % 5) / 4 for i in range(len(values))]  # so that equal values are seen
        axes.plot(spots, values, "o", color=colours[label], alpha=0.45, markersize=3, markeredgewidth=0)
    axes.set_xticks([])


def _over_seeds(rows: Sequence[Row], metric: str) -> _Drawing:
    """Deep-Thinking, Figure 5, left: the distribution over seeds."""

    def scores(some: list[Row]) -> list[float]:
        found = _by_seed(some)
        return found if len(found) > 1 else []

    panels = _of_variants(rows, scores, "num_fewshot", "demonstrations")
    return _Drawing("seeds", "", f"{metric}, a point for each seed", panels, _strips)


def _over_orders(rows: Sequence[Row], metric: str) -> _Drawing:
    """Deep-Thinking, Figure 5, right: the distribution over orders of the same demonstrations."""
    several = len({row.seed for row in rows}) > 1

    def scores(some: list[Row]) -> list[float]:
        found = []
        for orders in grouped(some, lambda row: row.seed).values():
            if len(orders) > 1:
                mean = statistics.fmean(row.score for row in orders) if several else 0.0
                found += [row.score - mean for row in orders]
        return found

    y = f"{metric}, a point for each order"
    if several:  # demonstrations differ in their mean, which is not what is shown
        y = f"{metric} less the mean over orders\nof the same demonstrations"
    panels = _of_variants(rows, scores, "num_fewshot", "demonstrations")
    return _Drawing("orders", "", y, panels, _strips)


def _sensitivity(rows: Sequence[Row], metric: str) -> _Drawing:
    """The flip rate between orders with its 95% interval."""

    def paint(axes: Axes, data: Mapping[str, tuple[float, float, float]], colours: Mapping[str, str]) -> None:
        for at, (label, (mean, low, high)) in enumerate(data.items()):
            axes.vlines(at, low, high, color=colours[label], linewidth=1.5)
            axes.plot(at, mean, "o", color=colours[label], markersize=5, clip_on=False, zorder=3)
        axes.set(xticks=[], xlim=(-0.6, len(data) - 0.4))
        axes.set_ylim(0, max(0.05, axes.get_ylim()[1]))

    panels = _of_variants(rows, order_sensitivity, "num_fewshot", "demonstrations")
    y = "order sensitivity (flip rate),\n95% interval over documents"
    return _Drawing("order-sensitivity", "", y, panels, paint)


# By the names of the study file's `figures`.
FIGURES: dict[str, Callable[[Sequence[Row], str], _Drawing]] = {
    "T": _by_T,
    "shots": _by_shots,
    "seeds": _over_seeds,
    "orders": _over_orders,
    "sensitivity": _sensitivity,
}
