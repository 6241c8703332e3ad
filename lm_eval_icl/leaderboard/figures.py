"""Figures of a leaderboard, each with the numbers that are drawn."""

from __future__ import annotations

import io
import itertools
import math
import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, quantiles
from typing import TYPE_CHECKING, Any
from xml.dom import minidom

from lm_eval_icl.errors import InputError
from lm_eval_icl.leaderboard.style import GREY, INK, METADATA, clipped, of_method, one_line, shortened, styled
from lm_eval_icl.leaderboard.tables import csv_text
from lm_eval_icl.results.board import Board, Cell, Column, Entry
from lm_eval_icl.results.statistics import Estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH, _ROW = 7.6, 0.23  # inches
_PANELS, _LINES, _TASKS = 6, 8, 36  # of a figure, at most
_ROWS, _ROWS_ON_PAGE = 40, 24
_NUMBERS = 14  # so many columns have room for numbers in a heat map
_ALPHA = 0.05
_BETTER, _WORSE = "#2b8fd0", "#e8752a"  # lighter, since there is text on them
FIGURES = ("forest", "differences", "seeds", "orders", "sensitivity", "shots", "T", "dev", "tokens")
_CSVLine = tuple[Entry, tuple[Any, ...]]
_ENTRY = ("checkpoint", "details", "method", "arguments", "conditions", "name")


@dataclass(frozen=True)
class _Drawn:
    """A figure, and what it shows.

    Attributes:
        name: of its files.
        header: of the CSV file, after what tells the entry.
        lines: of the CSV file, each with its entry.
    """

    name: str
    title: str
    figure: Figure
    header: Sequence[str]
    lines: Sequence[_CSVLine]


def draw(board: Board, folder: Path, only: Collection[str] | None = None) -> list[Path]:
    """Draw what the board has something to show of, each as an SVG file and a CSV file with the numbers drawn.

    Equal boards make equal files, byte for byte. What a figure has no room for, it says.

    Args:
        only: names of figures, out of `FIGURES`; None for all.

    Returns:
        The files.

    Raises:
        InputError: a file cannot be written.
    """
    paths = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with styled(**_SETTINGS):
            for drawn in _all(board, _ROWS):
                if only is not None and drawn.name not in only:
                    continue
                svg, table = (folder / f"{drawn.name}.{kind}" for kind in ("svg", "csv"))
                drawn.figure.savefig(svg, metadata=METADATA["svg"])
                names = (*_ENTRY, *drawn.header)
                rows = [(*(getattr(entry, name) for name in _ENTRY), *values) for entry, values in drawn.lines]
                clean = [[one_line(cell) if isinstance(cell, str) else cell for cell in row] for row in rows]
                table.write_text(csv_text(dict(zip(names, row, strict=True)) for row in clean), encoding="utf-8")
                paths += [svg, table]
    except OSError as error:
        where = error.filename or folder
        raise InputError(f"{where}: cannot be written ({error.strerror or error}). Name another folder.") from error
    return paths


def svgs(board: Board) -> dict[str, str]:
    """Figures for a page: by title, an `<svg>` element with text as text.

    It has no background, and lines and text have the colour of the text around it (`currentColor`), so that it can be
    read on a light and on a dark page alike. Elements have no ids but those that the figure refers to.
    """
    from matplotlib import rc_context

    found = {}
    with styled(**_SETTINGS):
        for drawn in _all(board, _ROWS_ON_PAGE):
            file = io.StringIO()
            with rc_context({"svg.hashsalt": drawn.name}):  # so that figures of one page share no ids
                drawn.figure.savefig(file, format="svg", metadata=METADATA["svg"], transparent=True)
            found[drawn.title] = _inline(file.getvalue(), drawn.title)
    return found


_SETTINGS = {
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.linewidth": 0.8,
    "legend.fontsize": 8,
    "legend.handlelength": 2.6,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
}


_FONTS = "'DejaVu Sans', Verdana, Arial, sans-serif"
_FAMILY = re.compile(r"font-family: [^;]*; ")


def _inline(svg: str, title: str) -> str:
    """An SVG file's text as a small element of an HTML page: nothing is drawn beyond the axes that is to be clipped."""
    root = minidom.parseString(svg.encode()).documentElement
    assert root is not None
    waiting: list[Any] = [root]
    while waiting:
        node = waiting.pop()
        for child in list(node.childNodes):
            if child.nodeName in ("#comment", "style", "clipPath") or (
                child.nodeName == "#text" and not child.data.strip()
            ):
                node.removeChild(child)
            elif child.nodeType == child.ELEMENT_NODE:
                waiting.append(child)
        for name, value in list(node.attributes.items()):
            if name == "style":
                node.setAttribute(name, _FAMILY.sub("", value).replace(INK, "currentColor"))
            elif name in ("d", "x", "y", "transform", "width", "height"):
                value = re.sub(r"\d+\.\d+", lambda number: f"{float(number[0]):.2f}".rstrip("0").rstrip("."), value)
                node.setAttribute(name, " ".join(value.split()))
            elif name == "xlink:href":
                node.setAttribute("href", value)
            if (
                name.startswith("xmlns")
                or name in ("xlink:href", "clip-path")
                or (name == "id" and node.nodeName == "g")
            ):
                node.removeAttribute(name)
        if node.getAttribute("transform").startswith("rotate(-0 "):
            node.removeAttribute("transform")
        # One style for all markers of a line.
        uses = [child for child in node.childNodes if child.nodeName == "use"]
        if node.nodeName == "g" and len({use.getAttribute("style") for use in uses}) == 1:
            node.setAttribute("style", uses[0].getAttribute("style").replace(INK, "currentColor"))
            for use in uses:
                use.removeAttribute("style")
    # What matplotlib's style sheet says; in a page it would be for the whole page.
    root.setAttribute("style", f"stroke-linejoin: round; stroke-linecap: butt; font-family: {_FONTS}")
    root.setAttribute("role", "img")
    root.setAttribute("aria-label", title)
    return root.toxml()


def _all(board: Board, rows: int) -> Iterator[_Drawn]:
    for make in (_forest, _differences, _seeds, _orders, _by_shots, _by_T, _by_tokens):
        if (drawn := make(board, rows)) is not None:
            yield drawn


# ---------------------------------------------------------------------------------------------------------------
# Entries as rows, in a panel for each checkpoint.


def _checkpoint(entry: Entry) -> str:
    return ", ".join(filter(None, [entry.checkpoint, entry.details]))


def _label(board: Board, entry: Entry) -> str:
    """An entry's label, without the conditions that all entries of the board have in common."""
    return shortened(_joined(entry.method, entry.arguments, "" if _common(board) else entry.conditions))


def _joined(method: str, arguments: str, conditions: str) -> str:
    return ", ".join(filter(None, [" ".join(filter(None, [method, arguments])), conditions]))


def _common(board: Board) -> str:
    """The conditions that all entries have in common; "" if they differ."""
    found = {entry.conditions for entry in board.entries}
    return found.pop() if len(found) == 1 else ""


def _unit(board: Board, column: Column) -> tuple[float, str]:
    """What values are multiplied by, and their name on an axis."""
    name = "accuracy" if column.metric == "acc" else clipped(column.metric)
    parts = [
        "average over tasks" if column.kind == "average" else clipped(column.name),
        clipped(_common(board)),
        "" if column.higher_is_better else "lower is better",
    ]
    return (100 if column.percent else 1), f"{name}{', %' * column.percent} ({', '.join(filter(None, parts))})"


def _by_checkpoint(entries: Iterable[Entry]) -> dict[str, list[Entry]]:
    found: dict[str, list[Entry]] = {}
    for entry in entries:
        found.setdefault(_checkpoint(entry), []).append(entry)
    return found


def _chosen(board: Board, entries: Sequence[Entry], most: int) -> list[Entry]:
    """As many entries as there is room for: the best of each checkpoint first, each with its baseline."""
    by_name = {entry.name: entry for entry in entries}
    place = {entry.name: at for some in _by_checkpoint(entries).values() for at, entry in enumerate(some)}
    chosen: dict[str, Entry] = {}
    for entry in sorted(entries, key=lambda one: place[one.name]):
        baseline = by_name.get(board.baseline.get(entry.name, ""), entry)
        new = {one.name: one for one in (entry, baseline) if one.name not in chosen}
        if len(chosen) + len(new) <= most:
            chosen |= new
    return [entry for entry in entries if entry.name in chosen]


def _note(*parts: tuple[int, int, str]) -> str:
    """A sentence on what is not drawn: how many, of how many, of what."""
    said = [f"{n:,} of {of:,} {what}" for n, of, what in parts if n]
    return textwrap.fill(f"Not drawn: {'; '.join(said)}.", 120) if said else ""


def _left_out(board: Board, found: Sequence[Entry], chosen: Sequence[Entry], lacking: str) -> str:
    every = len(board.entries)
    return _note(
        (len(found) - len(chosen), every, "entries, for room (the best of each checkpoint are drawn)"),
        (every - len(found), every, f"entries, since they {lacking}"),
    )


@dataclass(frozen=True)
class _Panel:
    axes: list[Axes]
    entries: list[Entry]


def _stacked(
    board: Board, entries: Sequence[Entry], note: str, across: int = 1, below: float = 0.75
) -> tuple[Figure, list[_Panel]]:
    """Panels one below the other, a row for each entry; `across` axes side by side share the rows.

    Args:
        below: inches for what is below the last panel.
    """
    from matplotlib.figure import Figure

    groups = _by_checkpoint(entries)
    heights = [_ROW * (len(some) + 0.3) for some in groups.values()]
    height = sum(heights) + 0.34 * len(groups) + below + 0.16 * note.count("\n") + (0.25 if note else 0)
    figure = Figure(figsize=(_WIDTH, height))
    figure.set_layout_engine("constrained", h_pad=0.03, w_pad=0.05, hspace=0.0, wspace=0.03)
    grid = figure.subplots(len(groups), across, squeeze=False, sharex="col", gridspec_kw={"height_ratios": heights})
    panels = []
    for row, (name, some) in zip(grid, groups.items(), strict=True):
        for axes in row:
            axes.set_ylim(len(some) - 0.35, -0.65)
            axes.grid(axis="x", color=INK, alpha=0.13, linewidth=0.6)
            axes.set_axisbelow(True)
            axes.spines["left"].set_visible(False)
            axes.tick_params(axis="y", length=0)
            axes.set_yticks(range(len(some)), [""] * len(some))
        row[0].set_yticks(range(len(some)), [_label(board, entry) for entry in some])
        row[0].set_title(clipped(name, 80), loc="left", fontweight="bold")
        panels.append(_Panel(list(row), some))
    _footnote(figure, note)
    return figure, panels


def _footnote(figure: Figure, note: str) -> None:
    if note:
        figure.supxlabel(note, x=0.01, ha="left", fontsize=7.5, color=GREY)


def _finite(*values: float | None) -> bool:
    return all(value is not None and math.isfinite(value) for value in values)


def _point(axes: Axes, x: float, y: float, of: Estimate, scale: float, entry: Entry) -> None:
    """A mean with its 95% interval, from left to right."""
    colour, marker = of_method(entry.method)
    if _finite(of.low, of.high):
        axes.plot([scale * of.low, scale * of.high], [y, y], color=colour, linewidth=1.6, solid_capstyle="butt")
    axes.plot([x], [y], marker, color=colour, markersize=5, zorder=3)


def _forest(board: Board, rows: int) -> _Drawn | None:
    """Means with intervals, and the baseline as a line."""
    column = board.columns[0]
    scale, unit = _unit(board, column)
    found = [one for one in board.entries if column.name in one.cells and _finite(one.cells[column.name].estimate.mean)]
    if not found:
        return None
    chosen = _chosen(board, found, rows)
    note = _left_out(board, found, chosen, "have no result here")
    figure, panels = _stacked(board, chosen, note, below=0.9)
    lines: list[_CSVLine] = []
    means = {entry.name: entry.cells[column.name].estimate.mean for entry in found}
    has_baseline = False
    majority, *others = {entry.cells[column.name].majority for entry in chosen}
    has_majority = majority is not None and not others
    for panel in panels:
        (axes,) = panel.axes
        marked: tuple[list[float], list[float]] = ([], [])
        for y, entry in enumerate(panel.entries):
            of = entry.cells[column.name].estimate
            baseline = means.get(board.baseline.get(entry.name, ""))
            if baseline is not None:
                marked[0].extend([scale * baseline] * 2 + [math.nan])
                marked[1].extend([y - 0.5, y + 0.5, math.nan])
            _point(axes, scale * of.mean, y, of, scale, entry)
            digits = 1 if column.percent else 3
            said = f"{scale * of.mean:.{digits}f}"
            if _finite(of.low, of.high):
                said += f"  [{scale * of.low:.{digits}f}, {scale * of.high:.{digits}f}]"
            axes.annotate(said, (1.01, y), xycoords=("axes fraction", "data"), va="center", fontsize=8)
            lines.append((entry, (column.name, column.metric, of.mean, of.low, of.high, baseline)))
        axes.plot(*marked, color=GREY, linestyle=(0, (4, 2)), linewidth=1, zorder=1)
        has_baseline = has_baseline or bool(marked[0])
        if has_majority:
            axes.axvline(scale * (majority or 0), color=GREY, linestyle=":", linewidth=1, zorder=1)
    said = f"{unit}, with 95% interval{'; dashed: the baseline' if has_baseline else ''}"
    axes.set_xlabel(said + ";\ndotted: always the most frequent right answer" * has_majority)
    header = ("column", "metric", "mean", "low", "high", "baseline")
    return _Drawn("forest", "Results with 95% intervals", figure, header, lines)


def _differences(board: Board, rows: int) -> _Drawn | None:
    """A heat map of differences to the baseline, a dot where the adjusted p-value is below 5%."""
    from matplotlib.colors import LinearSegmentedColormap, Normalize, to_rgb

    by_name = {entry.name: entry for entry in board.entries}

    def differs(entry: Entry, column: Column) -> bool:
        cell = entry.cells.get(column.name)
        return cell is not None and cell.difference is not None and _finite(cell.difference.mean)

    columns = [
        column for column in board.columns if column.percent and any(differs(entry, column) for entry in board.entries)
    ]
    found = [entry for entry in board.entries if any(differs(entry, column) for column in columns)]
    if len(found) == len(columns) == 1 or not found:  # one difference is no map
        return None
    some, chosen = columns[:_TASKS], _chosen(board, found, rows)
    others = [entry for entry in board.entries if board.baseline.get(entry.name, entry.name) != entry.name]
    note = _note(
        (len(found) - len(chosen), len(others), "entries, for room (the best of each checkpoint are drawn)"),
        (
            len([e for e in others if e not in found]),
            len(others),
            "entries, since they are not paired with their baseline",
        ),
        (len(board.columns) - len(some), len(board.columns), "columns, for room or since they are no shares"),
    )
    numbers = len(some) <= _NUMBERS
    slanted = max(len(column.name) for column in some) > 60 / max(len(some), 6)
    below = 1.15 + (0.055 * min(26, max(len(column.name) for column in some)) if slanted else 0.15)
    figure, panels = _stacked(board, chosen, note, below=below)
    cells = {(e.name, c.name): e.cells[c.name] for e in chosen for c in some if differs(e, c)}
    signs = {column.name: 1 if column.higher_is_better else -1 for column in some}
    most = max(0.1, *(abs(100 * _mean(cell)) for cell in cells.values()))
    # Nothing is transparent: so it is the page's background, be it light or dark.
    shades_of = [(_WORSE, 0, 0.9), (_WORSE, 0.25, 0.5), (_WORSE, 0.5, 0)]
    shades_of += [(_BETTER, 0.5, 0), (_BETTER, 0.75, 0.5), (_BETTER, 1, 0.9)]
    colours = LinearSegmentedColormap.from_list("", [(at, (*to_rgb(end), alpha)) for end, at, alpha in shades_of])
    lines: list[_CSVLine] = []
    image = None
    for panel in panels:
        (axes,) = panel.axes
        shades = [[math.nan] * len(some) for _ in panel.entries]
        dots, missing = [], []
        for y, entry in enumerate(panel.entries):
            for x, column in enumerate(some):
                cell = cells.get((entry.name, column.name))
                if cell is None:
                    missing.append((x, y))
                    continue
                value = 100 * _mean(cell)
                shades[y][x] = value * signs[column.name]
                if significant := cell.p_holm is not None and cell.p_holm < _ALPHA:
                    dots.append((x + 0.41, y - 0.34) if numbers else (x, y))
                if numbers:
                    weight = "bold" if significant else "normal"
                    axes.text(x, y, _signed(value), ha="center", va="center", fontsize=7.5, fontweight=weight)
                lines.append((entry, (column.name, column.metric, _mean(cell), cell.p_holm, significant)))
        image = axes.imshow(
            shades, cmap=colours, norm=Normalize(-most, most), aspect="auto", interpolation="none", zorder=0
        )
        axes.grid(False)
        axes.plot(*_unzip(dots), "o", color=INK, markersize=2.8, markeredgewidth=0)
        axes.plot(*_unzip(missing), "_", color=GREY, markersize=4)
        axes.set_xlim(-0.5, max(len(some), 6) - 0.5)  # a few columns do not become wide ones
        axes.set_xticks(range(len(some)), [])
        axes.tick_params(axis="x", length=0)
        axes.spines["bottom"].set_visible(False)
        for x, (left, right) in enumerate(itertools.pairwise(some)):
            if left.kind != right.kind:
                axes.vlines(x + 0.5, -0.5, len(panel.entries) - 0.5, color=GREY, linewidth=0.8)
    turned: dict[str, Any] = {"rotation": 40, "ha": "right", "rotation_mode": "anchor"} if slanted else {}
    axes.set_xticks(range(len(some)), [clipped(column.name, 26) for column in some], **turned)
    baselines = sorted({one_line(by_name[name].method) for name in board.baseline.values() if name in by_name})
    assert image is not None
    bar = figure.colorbar(
        image,
        ax=[panel.axes[0] for panel in panels],
        location="bottom",
        aspect=50,
        # Of the panels' height. Of few rows it is as far and as thick as of some.
        pad=max(0.02, 0.1 / (_ROW * len(chosen))),
        fraction=max(0.05, 0.12 / (_ROW * len(chosen))),
        shrink=0.6,
        ticks=[-most, 0, most],  # more of them overlap where long labels make the bar short
        format=lambda value, _: _signed(value),
    )
    bar.outline.set_visible(False)  # type: ignore[operator]
    bar.set_label(
        f"difference to {clipped(', '.join(baselines)) or 'the baseline'} in points,\n"
        "blue is better; dot: adjusted p < 5% (Holm)",
        fontsize=8,
    )
    header = ("column", "metric", "difference", "p_holm", "significant")
    return _Drawn("differences", "Differences to the baseline, by task", figure, header, lines)


def _mean(cell: Cell) -> float:
    assert cell.difference is not None
    return cell.difference.mean


def _signed(value: float) -> str:
    said = f"{value:+.1f}".replace("-", "\N{MINUS SIGN}")
    return said[1:] if said.endswith("0.0") and len(said) == 4 else said


def _unzip(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


# ---------------------------------------------------------------------------------------------------------------
# Prompt sets: seeds, and orders of the same demonstrations.


def _values(entry: Entry, column: Column) -> dict[tuple[str, int], float]:
    """The entry's value by prompt set and order; over several tasks for what there is of all of them."""
    parts: list[tuple[float, dict[tuple[str, int], float]]] = []
    for task, weight in column.weights.items():
        cell = entry.cells.get(task)
        sets = cell.sets if cell is not None else ()
        parts.append((weight, {(one.label, of.order): of.result.value for one in sets for of in one.answered}))
    if not parts:
        return {}
    common = [key for key in parts[0][1] if all(key in values for _, values in parts)]
    found = {key: sum(weight * values[key] for weight, values in parts) for key in common}
    return {key: value for key, value in found.items() if math.isfinite(value)}


def _of_sets(values: Mapping[tuple[str, int], float]) -> dict[str, list[float]]:
    """By prompt set, the values of its orders."""
    found: dict[str, list[float]] = {}
    for (label, _), value in values.items():
        found.setdefault(label, []).append(value)
    return found


def _column(board: Board, shows: Callable[[Entry, Column], bool]) -> tuple[Column, list[Entry]] | None:
    """The first column on which an entry shows something, and all entries that do."""
    for column in board.columns:
        if found := [entry for entry in board.entries if shows(entry, column)]:
            return column, found
    return None


def _strip(axes: Axes, values: Sequence[float], y: float, entry: Entry) -> None:
    """Points from left to right, a box of their quartiles behind them, and their median."""
    colour, marker = of_method(entry.method)
    if len(values) > 3:
        first, median, third = quantiles(values, n=4, method="inclusive")
        axes.barh(y, third - first, left=first, height=0.62, color=colour, alpha=0.25, linewidth=0, zorder=1)
        axes.plot([median] * 2, [y - 0.31, y + 0.31], color=colour, linewidth=1.8, alpha=0.8, solid_capstyle="butt")
    axes.plot(values, [y] * len(values), marker, color=colour, markersize=4, markeredgewidth=0, alpha=0.8, zorder=3)


def _seeds(board: Board, rows: int) -> _Drawn | None:
    """Each prompt set's value, the same sets joined across entries."""

    def shows(entry: Entry, column: Column) -> bool:
        return len(_of_sets(_values(entry, column))) > 1

    if (where := _column(board, shows)) is None:
        return None
    column, found = where
    scale, unit = _unit(board, column)
    chosen = _chosen(board, found, min(rows, 24))
    note = _left_out(board, found, chosen, "have one prompt set here or none")
    figure, panels = _stacked(board, chosen, note, below=0.9)
    lines: list[_CSVLine] = []
    for panel in panels:
        (axes,) = panel.axes
        joined: dict[str, list[float]] = {}
        for y, entry in enumerate(panel.entries):
            values = {name: fmean(some) for name, some in _of_sets(_values(entry, column)).items()}
            _strip(axes, [scale * value for value in values.values()], y, entry)
            for name, value in values.items():
                joined.setdefault(name, [math.nan] * len(panel.entries))[y] = scale * value
                lines.append((entry, (column.name, column.metric, name, value)))
        for of_set in joined.values():
            axes.plot(of_set, range(len(of_set)), color=GREY, linewidth=0.6, alpha=0.6, zorder=2)
    axes.set_xlabel(f"{unit}, a point for each set of demonstrations;\nlines join the same set")
    header = ("column", "metric", "prompt set", "value")
    return _Drawn("seeds", "Sets of demonstrations", figure, header, lines)


def _orders(board: Board, rows: int) -> _Drawn | None:
    """Values over orders of the same demonstrations, and how often an order changes the prediction."""

    def deviations(entry: Entry, column: Column) -> list[tuple[str, float]]:
        by_set = {name: some for name, some in _of_sets(_values(entry, column)).items() if len(some) > 1}
        return [(name, value - fmean(some)) for name, some in by_set.items() for value in some]

    def shows(entry: Entry, column: Column) -> bool:
        cell = entry.cells.get(column.name)
        return bool(deviations(entry, column)) or (cell is not None and cell.sensitivity is not None)

    if (where := _column(board, shows)) is None:
        return None
    column, found = where
    scale, unit = _unit(board, column)
    chosen = _chosen(board, found, min(rows, 24))
    note = _left_out(board, found, chosen, "have one order of their demonstrations here or none")
    figure, panels = _stacked(board, chosen, note, 2, below=1.05)
    lines: list[_CSVLine] = []
    for panel in panels:
        left, right = panel.axes
        for y, entry in enumerate(panel.entries):
            cell = entry.cells.get(column.name)
            flips = cell.sensitivity if cell is not None else None
            values = deviations(entry, column)
            if values:
                _strip(left, [scale * value for _, value in values], y, entry)
            if flips is not None and _finite(flips.mean):
                _point(right, 100 * flips.mean, y, flips, 100, entry)
                right.annotate(
                    f"{100 * flips.mean:.1f}", (1.01, y), xycoords=("axes fraction", "data"), va="center", fontsize=8
                )
            for name, value in values:
                lines.append((entry, (column.name, column.metric, name, value, None, None, None)))
            if flips is not None:
                lines.append((entry, (column.name, column.metric, None, None, flips.mean, flips.low, flips.high)))
    right.set_xlim(left=0)
    left.set_xlabel(unit.replace(" (", "\n(", 1) + "\nless the mean over orders")
    right.set_xlabel("predictions changed by\nanother order (flip rate), %,\nwith 95% interval")
    header = ("column", "metric", "prompt set", "deviation", "flip rate", "low", "high")
    return _Drawn("orders", "Orders of the same demonstrations", figure, header, lines)


# ---------------------------------------------------------------------------------------------------------------
# Curves, in a panel for each checkpoint.


@dataclass(frozen=True)
class _Line:
    """Entries that differ in one thing, by its value."""

    method: str
    label: str
    points: tuple[tuple[float, Entry], ...]


def _lines_of(
    board: Board, value: Callable[[Entry], float | None], label: Callable[[Entry], str]
) -> dict[str, list[_Line]]:
    """Lines of two points or more, by checkpoint: entries with a result in the first column, joined by their label."""
    column = board.columns[0].name
    found: dict[str, dict[tuple[str, str], dict[float, Entry]]] = {}
    for entry in board.entries:
        x = value(entry)
        if x is not None and column in entry.cells and _finite(x, entry.cells[column].estimate.mean):
            lines = found.setdefault(_checkpoint(entry), {})
            lines.setdefault((entry.method, label(entry)), {}).setdefault(x, entry)
    panels = {
        name: [_Line(*key, tuple(sorted(of.items()))) for key, of in sorted(lines.items()) if len(of) > 1]
        for name, lines in found.items()
    }
    return {name: lines for name, lines in panels.items() if lines}


def _without(text: str, pattern: str) -> str:
    """Arguments or conditions, without those that match."""
    return ", ".join(part for part in text.split(", ") if part and not re.fullmatch(pattern, part))


_SHOTS = r"(?:([\d.]+) of )?(\d+) shots?"


def _shots(entry: Entry) -> float | None:
    """Demonstrations that a prompt has; None if they differ between tasks."""
    found = [re.fullmatch(_SHOTS, part) for part in entry.conditions.split(", ")]
    return next((float(each[1] or each[2]) for each in found if each), None)


def _argument(entry: Entry, name: str) -> float | None:
    """A method's argument if it is a number: as the entry says it, otherwise its default."""
    said = [part.removeprefix(f"{name}=") for part in entry.arguments.split(", ") if part.startswith(f"{name}=")]
    try:
        return float(said[0] if said else entry.runs[0].icl[name])
    except (KeyError, TypeError, ValueError):
        return None


def _by_shots(board: Board, rows: int) -> _Drawn | None:
    """Against the number of demonstrations, a line for entries that differ in it only."""

    def label(entry: Entry) -> str:
        return _joined(entry.method, entry.arguments, _without(entry.conditions, _SHOTS))

    def axis(axes: Axes, values: list[float]) -> None:
        if values[0] > 0:
            axes.set_xscale("log", base=2)
        else:
            axes.set_xscale("symlog", base=2, linthresh=1, linscale=1)
        ticks = values[:: -(-len(values) // 8)]
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()

    panels = _lines_of(board, _shots, label)
    return _curves(board, panels, "shots", "Results by number of demonstrations", "demonstrations", axis)


def _by_T(board: Board, rows: int) -> _Drawn | None:
    """Against T, a line for entries that differ in it only."""
    from matplotlib.ticker import MaxNLocator

    def label(entry: Entry) -> str:
        arguments = _without(entry.arguments, "T=.*")
        if "eta=" not in arguments and (eta := _argument(entry, "eta")) is not None:
            arguments = ", ".join(filter(None, [f"eta={eta:g}", arguments]))
        return _joined(entry.method, arguments, "" if _common(board) else entry.conditions)

    def axis(axes: Axes, values: list[float]) -> None:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))

    return _curves(board, _lines_of(board, lambda entry: _argument(entry, "T"), label), "T", "Results by T", "T", axis)


def _curves(
    board: Board,
    panels: Mapping[str, Sequence[_Line]],
    name: str,
    title: str,
    x: str,
    axis: Callable[[Axes, list[float]], None],
) -> _Drawn | None:
    if not panels:
        return None
    column = board.columns[0]
    scale, unit = _unit(board, column)
    every = list(dict.fromkeys((line.method, line.label) for lines in panels.values() for line in lines))
    labels = every[:_LINES]
    shown = {key: [one for one in some if (one.method, one.label) in labels] for key, some in panels.items()}
    drawn = [key for key, some in shown.items() if some][:_PANELS]
    note = _note(
        (len(panels) - len(drawn), len(panels), "checkpoints"),
        (len(every) - len(labels), len(every), "methods with their arguments"),
    )
    looks = {label: _looks(label, labels) for label in labels}
    legend: list[tuple[str, Mapping[str, Any]]] = [(shortened(label), looks[method, label]) for method, label in labels]
    by_name = {entry.name: entry for entry in board.entries}
    others: dict[str, Entry] = {}  # the one baseline of a panel, if it is none of its lines
    for key in drawn:
        of_panel = [entry for line in shown[key] for _, entry in line.points]
        baselines = {board.baseline.get(entry.name, "") for entry in of_panel}
        baseline = by_name.get(baselines.pop()) if len(baselines) == 1 else None
        if baseline is not None and baseline not in of_panel and column.name in baseline.cells:
            others[key] = baseline
    for label in dict.fromkeys(_label(board, entry) for entry in others.values()):
        legend.append((f"baseline: {label}", {"color": GREY, "linestyle": (0, (4, 2)), "linewidth": 1}))
    figure, grid = _grid(drawn, unit, x, note, legend)
    lines: list[_CSVLine] = []
    for axes, key in zip(grid, drawn, strict=True):
        for line in shown[key]:
            look = looks[line.method, line.label]
            of = [entry.cells[column.name].estimate for _, entry in line.points]
            values = [value for value, _ in line.points]
            axes.plot(values, [scale * one.mean for one in of], linewidth=1.5, markersize=4.5, zorder=3, **look)
            low = [scale * (one.low if _finite(one.low) else one.mean) for one in of]
            high = [scale * (one.high if _finite(one.high) else one.mean) for one in of]
            axes.fill_between(
                values, low, high, color=look["color"], alpha=0.13 if len(shown[key]) < 5 else 0.06, linewidth=0
            )
            for (value, entry), one in zip(line.points, of, strict=True):
                lines.append((entry, (column.name, column.metric, line.label, value, one.mean, one.low, one.high)))
        if key in others:
            of_baseline = others[key].cells[column.name].estimate
            axes.axhline(scale * of_baseline.mean, color=GREY, linestyle=(0, (4, 2)), linewidth=1)
            one = of_baseline
            lines.append((others[key], (column.name, column.metric, "baseline", None, one.mean, one.low, one.high)))
        axis(axes, sorted({value for line in shown[key] for value, _ in line.points}))
    header = ("column", "metric", "line", x, "mean", "low", "high")
    return _Drawn(name, title, figure, header, lines)


def _looks(line: tuple[str, str], lines: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """A line's colour, marker and dashes: the method's, in a shade for each of its lines."""
    from matplotlib.colors import to_hex, to_rgb

    colour, marker = of_method(line[0])
    of_same = [one for one in lines if one[0] == line[0]]
    at = of_same.index(line)
    if len(of_same) > 1:
        shift = at / (len(of_same) - 1) * 0.7 - 0.45  # from darker to lighter
        to = 1.0 if shift > 0 else 0.0
        red, green, blue = (part + abs(shift) * (to - part) for part in to_rgb(colour))
        colour = to_hex((red, green, blue))
    return {"color": colour, "marker": marker, "linestyle": ["-", "--", ":", "-."][at % 4]}


def _grid(
    names: Sequence[str], y: str, x: str, note: str, legend: Sequence[tuple[str, Mapping[str, Any]]]
) -> tuple[Figure, list[Axes]]:
    """Panels side by side, in rows, below a legend of labels and looks."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    across = min(len(names), 3)
    down = -(-len(names) // across)
    ncols = next((n for n in (4, 3) if sum(sorted(len(label) + 8 for label, _ in legend)[-n:]) < 100), 2)
    height = (3 if across == 1 else 2.4) * down + 0.2 + 0.17 * -(-len(legend) // ncols)
    height += 0.25 + 0.16 * note.count("\n") if note else 0
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    grid = figure.subplots(down, across, squeeze=False)
    for axes in grid.flat[len(names) :]:
        axes.remove()
    for i, (axes, name) in enumerate(zip(grid.flat, names, strict=False)):
        axes.set_title(clipped(name, 34), loc="left", fontweight="bold")
        axes.set_xlabel(x if i + across >= len(names) else "")
        axes.grid(color=INK, alpha=0.13, linewidth=0.6)
        axes.set_axisbelow(True)
    figure.supylabel(y.replace(" (", "\n(", 1) if down == 1 else y, fontsize=9)
    handles = [Line2D([], [], markersize=4.5, **look) for _, look in legend]
    # Before 3.10, matplotlib left out what begins with an underscore.
    labels = [f" {label}" if label.startswith("_") else label for label, _ in legend]
    figure.legend(handles, labels, loc="outside upper left", ncols=ncols)
    _footnote(figure, note)
    return figure, list(grid.flat[: len(names)])


def _log_ticks(low: float, high: float) -> list[float]:
    """Two to five round numbers between these."""
    from matplotlib.ticker import MaxNLocator

    tens = [10.0**power for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]
    for steps in ((1,), (1, 3), (1, 2, 5)):
        found = [step * ten for ten in tens for step in steps if low <= step * ten <= high]
        if len(found) > 2:
            return found[:: -(-len(found) // 5)]
    return [float(tick) for tick in MaxNLocator(5, steps=[1, 2, 5, 10]).tick_values(low, high) if low <= tick <= high]


def _by_tokens(board: Board, rows: int) -> _Drawn | None:
    """Against the tokens run for each document; a line joins what is best for its number of tokens."""
    from matplotlib.ticker import EngFormatter

    column = board.columns[0]
    scale, unit = _unit(board, column)
    with_result = [
        one for one in board.entries if column.name in one.cells and _finite(one.cells[column.name].estimate.mean)
    ]
    found = [entry for entry in with_result if _finite(entry.tokens) and entry.tokens]
    panels = {
        f"{name}{' (in a study)' * shared}": some
        for shared in (False, True)  # a study's cells share passes
        for name, some in _by_checkpoint(entry for entry in found if entry.shared == shared).items()
        if len(some) > 1
    }
    if not panels:
        return None
    drawn = list(panels)[:_PANELS]
    note = _note(
        (len(panels) - len(drawn), len(panels), "checkpoints"),
        (
            len(board.entries) - len(found),
            len(board.entries),
            "entries, since they have no result here or do not say how many tokens were run",
        ),
    )
    methods = sorted({entry.method for name in drawn for entry in panels[name]})
    legend: list[tuple[str, Mapping[str, Any]]] = [
        (clipped(method), {"color": colour, "marker": marker, "linestyle": "none"})
        for method in methods[:12]
        for colour, marker in [of_method(method)]
    ]
    legend.append(("best for its tokens", {"color": GREY, "linewidth": 1, "linestyle": (0, (4, 2))}))
    figure, grid = _grid(drawn, unit, "tokens run for each document", note, legend)
    sign = 1 if column.higher_is_better else -1
    lines: list[_CSVLine] = []
    for axes, name in zip(grid, drawn, strict=True):
        best: list[tuple[float, float]] = []
        for entry in sorted(panels[name], key=lambda one: (one.tokens or 0, one.name)):
            tokens, of = entry.tokens or 0, entry.cells[column.name].estimate
            colour, marker = of_method(entry.method)
            if _finite(of.low, of.high):
                axes.plot([tokens] * 2, [scale * of.low, scale * of.high], color=colour, linewidth=1, alpha=0.6)
            axes.plot([tokens], [scale * of.mean], marker, color=colour, markersize=5.5, zorder=3)
            front = not best or sign * scale * of.mean > sign * best[-1][1]
            if front:
                best.append((tokens, scale * of.mean))
            lines.append((entry, (column.name, column.metric, tokens, of.mean, of.low, of.high, front)))
        axes.plot(*_unzip(best), color=GREY, linewidth=1, linestyle=(0, (4, 2)), drawstyle="steps-post", zorder=1)
        axes.set_xscale("log")
        ticks = _log_ticks(*axes.get_xlim())
        axes.set_xticks(ticks, [EngFormatter(sep="").format_eng(tick) for tick in ticks])
        axes.minorticks_off()
    header = ("column", "metric", "tokens", "mean", "low", "high", "best")
    return _Drawn("tokens", "Results by tokens run", figure, header, lines)
