"""Figures of a leaderboard or a study, each with the numbers that are drawn.

Some have a row for each entry (results, seeds, orders), some a curve for entries that differ in one thing (shots, T).
`FIGURES`, at the end, lists them by name.
"""

from __future__ import annotations

import functools
import io
import itertools
import math
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from lm_eval_icl.drawing.style import GREY, INK, METADATA, clipped, of_method, one_line, shortened, styled
from lm_eval_icl.errors import InputError
from lm_eval_icl.leaderboard import numbers
from lm_eval_icl.leaderboard.tables import csv_text
from lm_eval_icl.results import dev
from lm_eval_icl.results.board import SIGNIFICANT, Board, Column, Entry
from lm_eval_icl.results.cells import values_by_set
from lm_eval_icl.results.entries import grouped
from lm_eval_icl.results.statistics import Difference, Estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH, _ROW = 7.6, 0.23  # inches
_ROWS, _ROWS_ON_PAGE, _ROWS_OF_POINTS = 40, 24, 24
_PANELS, _LINES, _METHODS, _TASKS = 9, 8, 24, 36  # of a figure, at most
_NUMBERS = 14  # so many columns have room for numbers in a heat map
_BETTER, _WORSE = "#2b8fd0", "#e8752a"  # lighter, since there is text on them
_DASHED: dict[str, Any] = {"color": GREY, "linestyle": (0, (4, 2)), "linewidth": 1}
_ONE_ORDER = "have one order of their demonstrations here or none"
_FOR_ROOM = "for room (the best of each checkpoint are drawn)"
_ENTRY = ("checkpoint", "details", "method", "arguments", "conditions", "name")
_SETTINGS = {
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("legend.fontsize", "xtick.labelsize", "ytick.labelsize"), 8),
    **{"axes.linewidth": 0.8, "grid.color": INK, "grid.alpha": 0.13, "grid.linewidth": 0.6},
    "legend.handlelength": 2.6,
}

Numbers = dict[str, object]  # a line of a figure's CSV file


@dataclass(frozen=True)
class _Drawn:
    title: str
    figure: Figure
    lines: list[Numbers]


def draw(board: Board, folder: Path, only: Collection[str] | None = None) -> list[Path]:
    """Draw what the board has something to show of, each as SVG, as PNG and as CSV with the numbers drawn.

    Equal boards make equal files, byte for byte. What a figure has no room for, it says.

    Args:
        only: names of figures, out of `FIGURES`; None for all.

    Returns:
        The files.

    Raises:
        InputError: there is no such figure, or a file cannot be written.
    """
    for name in only or ():
        if name not in FIGURES:
            raise InputError(f"figures: there is no figure {name!r}: name some of {', '.join(FIGURES)}.")
    paths = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with styled(**_SETTINGS):
            for name, drawn in _all(board, _ROWS, only):
                for kind, metadata in METADATA.items():
                    paths.append(folder / f"{name}.{kind}")
                    drawn.figure.savefig(paths[-1], dpi=150, metadata=metadata)
                paths.append(folder / f"{name}.csv")
                paths[-1].write_text(csv_text(drawn.lines), encoding="utf-8")
    except OSError as error:
        where = error.filename or folder
        raise InputError(f"{where}: cannot be written ({error.strerror or error}). Name another folder.") from error
    return paths


def svgs(board: Board) -> dict[str, str]:
    """Figures for a page: by title, an `<svg>` element with text as text.

    It has no background, and lines and text have the color of the text around it (`currentColor`), so that it can be
    read on a light and on a dark page alike. Elements have no ids but those that the figure refers to.
    """
    from matplotlib import rc_context

    elements = {}
    with styled(**_SETTINGS):
        for name, drawn in _all(board, _ROWS_ON_PAGE):
            file = io.StringIO()
            with rc_context({"svg.hashsalt": name}):  # so that figures of one page share no ids
                drawn.figure.savefig(file, format="svg", metadata=METADATA["svg"], transparent=True)
            elements[drawn.title] = _element(file.getvalue(), drawn.title)
    return elements


def _element(svg: str, title: str) -> str:
    """An SVG file of matplotlib's as an element of an HTML page.

    A name in the figure cannot look like the tags that are searched for: its "<" is written as "&lt;".
    """
    svg = svg[svg.index("<svg") :]
    # The style sheet would be for the whole page; nothing is drawn beyond the axes that is to be clipped.
    svg = re.sub(r"<!--.*?-->|<(style|clipPath|metadata)\b.*?</\1>|<defs>\s*</defs>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<g) id="[^"]*"| clip-path="[^"]*"| xmlns(?::xlink)?="[^"]*"', r"\1", svg)
    svg = svg.replace("xlink:href", "href").replace(INK, "currentColor")
    svg = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", svg)

    def rounded(attribute: re.Match[str]) -> str:
        value = re.sub(r"\d+\.\d+", lambda x: f"{float(x[0]):.2f}".rstrip("0").rstrip("."), attribute[2])
        return f'{attribute[1]}"{" ".join(value.split())}"'

    svg = re.sub(r'( (?:d|x|y|transform|width|height)=)"([^"]*)"', rounded, svg)
    svg = re.sub(r">\s+<", "><", svg)

    def styled_once(group: re.Match[str]) -> str:
        styles = set(re.findall(r' style="[^"]*"', group[1]))
        bare = re.sub(r' style="[^"]*"', "", group[1])
        return group[0] if len(styles) > 1 else f"<g{styles.pop()}>{bare}</g>"

    svg = re.sub(r'<g>((?:<use [^>]* style="[^"]*"[^>]*/>)+)</g>', styled_once, svg)
    fonts = "font-family: 'DejaVu Sans', Verdana, Arial, sans-serif"
    style = f"stroke-linejoin: round; stroke-linecap: butt; {fonts}"
    return svg.replace("<svg", f'<svg role="img" aria-label="{title}" style="{style}"', 1).strip()


def _all(board: Board, most: int, only: Collection[str] | None = None) -> Iterator[tuple[str, _Drawn]]:
    """Figures of what the models say themselves, and one of what decision rules make of it."""
    entries = tuple(entry for entry in board.entries if entry.rule is None)
    baseline = {entry.name: board.baseline[entry.name] for entry in entries if entry.name in board.baseline}
    of_models = replace(board, entries=entries, baseline=baseline)
    for name, make in FIGURES.items():
        shown = board if make is _rules else of_models
        if (only is None or name in only) and (drawn := make(shown, most)) is not None:
            yield name, drawn


# ---------------------------------------------------------------------------------------------------------------
# Names, columns and notes.


def _by_checkpoint(board: Board, entries: Iterable[Entry]) -> dict[str, list[Entry]]:
    """Entries by their checkpoint's name, without its owner where that is plain without it."""
    names = {entry.checkpoint for entry in board.entries}
    ends = {name: name.rpartition("/")[2] if re.fullmatch(r"[\w.-]+/[\w.-]+", name) else name for name in names}
    counts = Counter(ends.values())

    def checkpoint(entry: Entry) -> str:
        end = ends[entry.checkpoint]
        return ", ".join(filter(None, [end if counts[end] == 1 else entry.checkpoint, entry.details]))

    return grouped(entries, checkpoint)


def _common(board: Board) -> str:
    """The conditions that all entries have in common; "" if they differ."""
    conditions = {entry.conditions for entry in board.entries}
    return conditions.pop() if len(conditions) == 1 else ""


def _label(board: Board, entry: Entry) -> str:
    """The method with its arguments, and its conditions if entries differ in them."""
    return (replace(entry, conditions="") if _common(board) else entry).label


def _without(text: str, pattern: str) -> str:
    """Arguments or conditions, without those that match."""
    return ", ".join(part for part in text.split(", ") if part and not re.fullmatch(pattern, part))


def _short(column: Column, most: int = 26) -> str:
    return "average over tasks" if column.kind == "average" else clipped(column.name, most)


def _axis(column: Column, *parts: str) -> str:
    """What values of a column are, for an axis; with these words about them."""
    metric = ("accuracy" if column.metric == "acc" else clipped(column.metric)) + ", %" * column.percent
    words = ", ".join(map(clipped, filter(None, parts)))
    return f"{metric} ({words})" if words else metric


def _full_axis(board: Board, column: Column) -> str:
    return _axis(column, _short(column), _common(board), "" if column.higher_is_better else "lower is better")


def _scale(column: Column) -> int:
    return 100 if column.percent else 1


def _in_cell(name: str, entry: Entry, column: Column) -> Any:
    """The `estimate`, `difference` or `sensitivity` of an entry on a column; None without one."""
    return getattr(entry.cells.get(column.name), name, None)


_estimate = functools.partial(_in_cell, "estimate")


def _like_the_first(board: Board) -> list[Column]:
    """Columns that can share an axis with the first: those of its metric."""
    first = board.columns[0]
    kind = (first.metric, first.percent, first.higher_is_better)
    return [column for column in board.columns if (column.metric, column.percent, column.higher_is_better) == kind]


def _for_room(board: Board, entries: Sequence[Entry], most: int) -> list[Entry]:
    """As many entries as there is room for: the best of each checkpoint first, each with its baseline."""
    by_name = {entry.name: entry for entry in entries}
    place = {entry.name: at for group in _by_checkpoint(board, entries).values() for at, entry in enumerate(group)}
    kept: set[str] = set()
    for entry in sorted(entries, key=lambda entry: place[entry.name]):
        with_baseline = kept | {entry.name} | {board.baseline.get(entry.name, entry.name)} & by_name.keys()
        if len(with_baseline) <= most:
            kept = with_baseline
    return [entry for entry in entries if entry.name in kept]


def _note(*parts: tuple[int, int, str]) -> str:
    """A sentence on what is not drawn: how many, of how many, of what."""
    texts = [f"{n:,} of {total:,} {what}" for n, total, what in parts if n]
    return textwrap.fill(f"Not drawn: {'; '.join(texts)}.", 120) if texts else ""


def _numbers(entry: Entry, column: Column, **values: object) -> Numbers:
    """A line of a CSV file: the entry, the column, and what is drawn."""
    names = {name: getattr(entry, name) for name in _ENTRY} | {"column": column.name, "metric": column.metric}
    return {name: one_line(value) if isinstance(value, str) else value for name, value in (names | values).items()}


def _ends(estimate: Estimate) -> Numbers:
    return {name: getattr(estimate, name) for name in ("mean", "low", "high")}


# ---------------------------------------------------------------------------------------------------------------
# A row for each entry, in a panel for each checkpoint.


def _stacked(
    board: Board, entries: Sequence[Entry], foot: str, labels: Sequence[str], below: float = 0.0
) -> tuple[Figure, list[tuple[list[Entry], list[Axes]]]]:
    """Panels one below the other, whose entries are at 0, 1, ... of the y axis.

    Args:
        labels: of the x axes, one for each of the axes side by side.
        below: inches for what else is below the last panel.
    """
    from matplotlib.figure import Figure

    groups, most = _by_checkpoint(board, entries), 46 if len(labels) == 1 else 32
    heights = [_ROW * (len(group) + 0.3) for group in groups.values()]
    height = sum(heights) + 0.34 * len(groups) + below + 0.67 + 0.16 * (foot.count("\n") + 1)
    figure = Figure(figsize=(_WIDTH, height))
    figure.set_layout_engine("constrained", h_pad=0.03, w_pad=0.05, hspace=0.0, wspace=0.03)
    shape: dict[str, Any] = {"squeeze": False, "sharex": "col", "gridspec_kw": {"height_ratios": heights}}
    grid = figure.subplots(len(groups), len(labels), **shape)
    for row, (name, group) in zip(grid, groups.items(), strict=True):
        for axes in row:
            axes.set_ylim(len(group) - 0.35, -0.65)
            axes.grid(axis="x")
            axes.set_axisbelow(True)
            axes.spines["left"].set_visible(False)
            axes.tick_params(axis="y", length=0, pad=6)
            axes.set_yticks(range(len(group)), [""] * len(group))
        row[0].set_yticks(range(len(group)), [shortened(_label(board, entry), most) for entry in group])
        row[0].set_title(clipped(name, 80), loc="left", fontweight="bold")
    for axes, label in zip(grid[-1], labels, strict=True):
        axes.set_xlabel(label)
    figure.supxlabel(foot, x=0.01, ha="left", fontsize=8, color=GREY)
    return figure, [(group, list(row)) for row, group in zip(grid, groups.values(), strict=True)]


def _rows(
    board: Board,
    most: int,
    title: str,
    label: str,
    lacking: str,
    data_of: Callable[[Entry, Column], Any],
    paint: Callable[[Axes, int, Entry, Column, Any], list[Numbers]],
    columns: Sequence[Column] | None = None,
    left: float | None = None,
) -> _Drawn | None:
    """The first three columns that have data, side by side.

    Args:
        data_of: what `paint` draws of an entry and a column, at a y of some axes; it returns lines of CSV.
        columns: among which those with data are; the board's by default.
        left: where the x axes begin.
    """
    from matplotlib.ticker import MaxNLocator

    pairs = itertools.product(board.entries, board.columns if columns is None else columns)
    data = {(entry.name, column.name): x for entry, column in pairs if (x := data_of(entry, column))}
    columns = [column for column in board.columns if any(column.name == name for _, name in data)][:3]
    entries = [entry for entry in board.entries if any((entry.name, column.name) in data for column in columns)]
    if not entries:
        return None
    kept = _for_room(board, entries, most)
    note = _note(
        (len(entries) - len(kept), len(board.entries), f"entries, {_FOR_ROOM}"),
        (len(board.entries) - len(entries), len(board.entries), f"entries, since they {lacking}"),
    )
    foot = "\n".join(filter(None, [textwrap.fill(label, 110), note]))
    labels = [_short(column, 18) + ", %" * column.percent for column in columns]
    if len(columns) == 1:
        labels = [_full_axis(board, columns[0])]
    figure, panels = _stacked(board, kept, foot, labels)
    lines = []
    for group, row in panels:
        for (y, entry), (axes, column) in itertools.product(enumerate(group), zip(row, columns, strict=True)):
            if (entry.name, column.name) in data:
                lines += paint(axes, y, entry, column, data[entry.name, column.name])
    for axes, column in zip(panels[-1][1], columns, strict=True):
        axes.xaxis.set_major_locator(MaxNLocator(4 if len(columns) > 1 else 8, steps=[1, 2, 2.5, 5, 10]))
        low, high = axes.set_xlim(left)
        if high - low < (least := _scale(column) / 50):  # values that are all but equal
            axes.set_xlim((low + high - least) / 2, (low + high + least) / 2)
    return _Drawn(title, figure, lines)


def _point(axes: Axes, y: float, estimate: Estimate, scale: float, entry: Entry, text: str) -> None:
    """A mean with its 95% interval, from left to right, and a text beside the axes."""
    color, marker = of_method(entry.method)
    mean, *ends = (scale * x for x in (estimate.mean, estimate.low, estimate.high))
    if all(map(math.isfinite, ends)):
        axes.plot(ends, [y, y], color=color, linewidth=1.6, solid_capstyle="butt")
    axes.plot([mean], [y], marker, color=color, markersize=5, zorder=3, clip_on=False)
    axes.annotate(text, (1.01, y), xycoords=("axes fraction", "data"), va="center", fontsize=8)


def _forest(board: Board, most: int) -> _Drawn | None:
    """Means with intervals, and the baseline as a line."""
    first = board.columns[0]
    estimates = {entry.name: _estimate(entry, first) for entry in board.entries}
    baselines = {name: estimates.get(base) for name, base in board.baseline.items()}
    majority = board.majority(first)

    def paint(axes: Axes, y: int, entry: Entry, column: Column, estimate: Estimate) -> list[Numbers]:
        scale, baseline = _scale(column), baselines.get(entry.name)
        if baseline is not None:
            axes.plot([scale * baseline.mean] * 2, [y - 0.5, y + 0.5], zorder=1, **_DASHED)
        if majority is not None:
            axes.plot([scale * majority] * 2, [y - 0.5, y + 0.5], color=GREY, linestyle=":", linewidth=1, zorder=1)
        text = numbers.value(estimate.mean, column)
        text += f"  [{numbers.interval(estimate, column)}]" * math.isfinite(estimate.high - estimate.low)
        _point(axes, y, estimate, scale, entry, text)
        return [_numbers(entry, column, **_ends(estimate), baseline=baseline and baseline.mean)]

    label = "Means with 95% intervals" + "; dashed: the baseline" * any(baselines.values())
    label += "; dotted: always the most frequent right answer" * (majority is not None)
    lacking = "have no result here"
    return _rows(board, most, "Results with 95% intervals", label, lacking, _estimate, paint, [first])


def _differences(board: Board, most: int) -> _Drawn | None:
    """A heat map of differences to the baseline, a dot where the adjusted p-value is below 5%."""
    from matplotlib.colors import LinearSegmentedColormap, Normalize, to_rgb

    shares = [column for column in board.columns if column.percent]
    pairs = itertools.product(board.entries, shares)
    cells = {(entry.name, column.name): _in_cell("difference", entry, column) for entry, column in pairs}
    differences = {key: difference.mean for key, difference in cells.items() if difference is not None}
    if len(differences) < 2:  # one difference is no map
        return None
    columns = [column for column in board.columns if any(column.name == name for _, name in differences)][:_TASKS]
    entries = [entry for entry in board.entries if any(entry.name == name for name, _ in differences)]
    kept = _for_room(board, entries, most)
    others = [entry for entry in board.entries if board.baseline.get(entry.name, entry.name) != entry.name]
    unpaired = sum(entry not in entries for entry in others)
    left_out = len(board.columns) - len(columns)
    note = _note(
        (len(entries) - len(kept), len(others), f"entries, {_FOR_ROOM}"),
        (unpaired, len(others), "entries, since they are not paired with their baseline"),
        (left_out, len(board.columns), "columns, for room or since they are no shares"),
    )
    has_numbers = len(columns) <= _NUMBERS
    longest = max(len(column.name) for column in columns)
    is_slanted = longest > 60 / max(len(columns), 6)
    below = 0.48 + (0.055 * min(26, longest) if is_slanted else 0.15)
    figure, panels = _stacked(board, kept, note, [""], below)
    largest = max(0.1, *(abs(100 * mean) for mean in differences.values()))
    # Nothing is transparent: so it is the page's background, be it light or dark.
    shades = [(_WORSE, 0, 0.9), (_WORSE, 0.25, 0.5), (_WORSE, 0.5, 0)]
    shades += [(_BETTER, 0.5, 0), (_BETTER, 0.75, 0.5), (_BETTER, 1, 0.9)]
    colors = LinearSegmentedColormap.from_list("", [(at, (*to_rgb(end), alpha)) for end, at, alpha in shades])
    look: dict[str, Any] = {"cmap": colors, "norm": Normalize(-largest, largest), "aspect": "auto", "zorder": 0}
    lines = []
    for group, (axes,) in panels:
        goodness = [[math.nan] * len(columns) for _ in group]
        for (y, entry), (x, column) in itertools.product(enumerate(group), enumerate(columns)):
            if (entry.name, column.name) not in differences:
                axes.plot([x], [y], "_", color=GREY, markersize=4)
                continue
            mean, p_holm = differences[entry.name, column.name], entry.cells[column.name].p_holm
            goodness[y][x] = 100 * mean * column.sign
            is_significant = p_holm is not None and p_holm <= SIGNIFICANT
            if is_significant:
                at_x, at_y = (x + 0.41, y - 0.34) if has_numbers else (x, y)
                axes.plot([at_x], [at_y], "o", color=INK, markersize=2.8, markeredgewidth=0)
            if has_numbers:
                style: dict[str, Any] = {"fontsize": 7.5, "fontweight": "bold" if is_significant else "normal"}
                axes.text(x, y, numbers.signed(mean, column), ha="center", va="center", **style)
            lines.append(_numbers(entry, column, difference=mean, p_holm=p_holm, significant=is_significant))
        image = axes.imshow(goodness, interpolation="none", **look)
        axes.grid(False)
        axes.set_xlim(-0.5, max(len(columns), 6) - 0.5)  # a few columns do not become wide ones
        axes.set_xticks(range(len(columns)), [])
        axes.tick_params(axis="x", length=0)
        axes.spines["bottom"].set_visible(False)
        for x, (left, right) in enumerate(itertools.pairwise(columns)):
            if left.kind != right.kind:
                axes.vlines(x + 0.5, -0.5, len(group) - 0.5, color=GREY, linewidth=0.8)
    turned: dict[str, Any] = {"rotation": 40, "ha": "right", "rotation_mode": "anchor"} if is_slanted else {}
    axes.set_xticks(range(len(columns)), [clipped(column.name, 26) for column in columns], **turned)
    bar = figure.colorbar(
        image,
        ax=[axes for _, (axes,) in panels],
        location="bottom",
        aspect=50,
        # These are shares of the panels' height: the bar of few rows is as far and as thick as that of many.
        pad=max(0.02, 0.1 / (_ROW * len(kept))),
        fraction=max(0.05, 0.12 / (_ROW * len(kept))),
        shrink=0.6,
        ticks=[-largest, 0, largest],  # more of them overlap where long labels make the bar short
        format=lambda x, _: numbers.signed(x / 100, columns[0]),
    )
    bar.outline.set_visible(False)
    methods = sorted({entry.method for entry in board.entries if entry.name in board.baseline.values()})
    against = f"difference to {clipped(', '.join(methods)) or 'the baseline'} in points"
    bar.set_label(f"{against},\nblue is better; dot: adjusted p < 5% (Holm)", fontsize=8)
    return _Drawn("Differences to the baseline, by task", figure, lines)


def _rules(board: Board, most: int) -> _Drawn | None:
    """Entries under decision rules, less the same runs without the rule, or another baseline that was asked for."""
    entries, of_rules = {}, []
    for entry in board.entries:
        if entry.rule is not None:
            words = [word for word in entry.conditions.split(", ") if word not in entry.reads]
            conditions = ", ".join(word for word in words if not word.startswith("decide: "))
            # A label begins with the method and the rule: what is cut of it is its middle.
            arguments = ", ".join(filter(None, [entry.arguments, entry.rule, *entry.reads]))
            of_rules.append(replace(entry, arguments=arguments, conditions=conditions))
            entries[entry.name] = entry

    def paint(axes: Axes, y: int, entry: Entry, column: Column, difference: Difference) -> list[Numbers]:
        axes.plot([0, 0], [y - 0.5, y + 0.5], zorder=1, **_DASHED)
        _point(axes, y, difference, _scale(column), entry, numbers.signed(difference.mean, column))
        line = {"difference": difference.mean, "low": difference.low, "high": difference.high, "p": difference.p}
        return [_numbers(entries[entry.name], column, **line, p_holm=entry.cells[column.name].p_holm)]

    is_own = all(map(board.is_against_itself, entries.values()))
    label = f"Differences to {'the same runs without the rule' if is_own else 'the baseline'}, with 95% intervals"
    lacking = "are not paired with their baseline"
    shown = replace(board, entries=tuple(of_rules))
    return _rows(shown, most, "Decision rules", label, lacking, functools.partial(_in_cell, "difference"), paint)


# ---------------------------------------------------------------------------------------------------------------
# Sets of demonstrations: seeds, and orders of the same demonstrations.


def _points(
    board: Board,
    most: int,
    title: str,
    lacking: str,
    label: str,
    points_of: Callable[[Entry, Column], dict[str, list[float]]],
) -> _Drawn | None:
    """Points from left to right and a bar at their mean; lines join single points of the same set."""
    paths: dict[tuple[Axes, str], Any] = {}  # lines through the single points of a set, broken where a row has none

    def paint(axes: Axes, y: int, entry: Entry, column: Column, points: dict[str, list[float]]) -> list[Numbers]:
        color, marker = of_method(entry.method)
        scale, lines = _scale(column), []
        for name, values in points.items():
            xs = [scale * x for x in values]
            axes.plot(xs, [y] * len(xs), marker, color=color, markersize=4, markeredgewidth=0, alpha=0.75, zorder=3)
            if len(xs) == 1:
                if (axes, name) not in paths:
                    paths[axes, name] = axes.plot([], [], color=GREY, linewidth=0.6, alpha=0.6, zorder=2)[0]
                path_x, path_y = map(list, paths[axes, name].get_data())
                gap = [math.nan] * (bool(path_y) and path_y[-1] != y - 1)
                paths[axes, name].set_data([*path_x, *gap, *xs], [*path_y, *gap, y])
            lines += [_numbers(entry, column, **{"prompt set": name, "value": x}) for x in values]
        mean = scale * fmean(itertools.chain(*points.values()))
        axes.plot([mean] * 2, [y - 0.31, y + 0.31], color=color, linewidth=2, solid_capstyle="butt")
        return lines

    most = min(most, _ROWS_OF_POINTS)
    return _rows(board, most, title, label, lacking, points_of, paint, _like_the_first(board))


def _seeds(board: Board, most: int) -> _Drawn | None:
    """Each set of demonstrations: the mean over its orders."""

    def means(entry: Entry, column: Column) -> dict[str, list[float]]:
        sets = values_by_set(entry.cells, column)
        return {name: [fmean(values)] for name, values in sets.items()} if len(sets) > 1 else {}

    label = "A point for each set of demonstrations and a bar at their mean; lines join the same set."
    return _points(board, most, "Sets of demonstrations", "have one prompt set here or none", label, means)


def _orders(board: Board, most: int) -> _Drawn | None:
    """Values over orders of the same demonstrations, less their mean."""

    def deviations(entry: Entry, column: Column) -> dict[str, list[float]]:
        sets = {name: values for name, values in values_by_set(entry.cells, column).items() if len(values) > 1}
        return {name: [value - fmean(values) for value in values] for name, values in sets.items()}

    label = "A point for each order, less the mean over the orders of the same demonstrations."
    return _points(board, most, "Orders of the same demonstrations", _ONE_ORDER, label, deviations)


def _sensitivity(board: Board, most: int) -> _Drawn | None:
    """How often another order of the demonstrations changes the prediction, with its 95% interval."""

    def paint(axes: Axes, y: int, entry: Entry, column: Column, flips: Estimate) -> list[Numbers]:
        _point(axes, y, flips, 100, entry, numbers.share(flips.mean).removesuffix("%"))
        return [_numbers(entry, column, **{"flip rate": flips.mean, "low": flips.low, "high": flips.high})]

    label = "Predictions that another order of the same demonstrations changes (flip rate, %), with 95% intervals."
    sensitivity = functools.partial(_in_cell, "sensitivity")
    most = min(most, _ROWS_OF_POINTS)
    return _rows(board, most, "Order sensitivity", label, _ONE_ORDER, sensitivity, paint, left=0)


# ---------------------------------------------------------------------------------------------------------------
# Curves.

Panel = tuple[str, str]  # the lines of its title; either may be empty
Curve = tuple[str, str]  # the method, whose color it has, and its label


class _CurvePoint(NamedTuple):
    """A point of a curve: a mean with the ends of its interval, the line of the CSV file, and whether it has a ring."""

    panel: Panel
    curve: Curve
    x: float
    mean: float
    low: float
    high: float
    line: Numbers
    has_ring: bool = False


def _shots(board: Board, most: int) -> _Drawn | None:
    """Against the number of demonstrations, a curve for entries that differ in it only."""
    shots = r"(?:([\d.]+) of )?(\d+) shots?"

    def x(entry: Entry) -> float | None:
        matches = [re.fullmatch(shots, part) for part in entry.conditions.split(", ")]
        return next((float(match[1] or match[2]) for match in matches if match), None)

    def label(entry: Entry) -> str:
        return replace(entry, conditions=_without(entry.conditions, shots)).label

    return _against(board, "Results by number of demonstrations", "demonstrations", x, label)


def _by_T(board: Board, most: int) -> _Drawn | None:
    """Against T, a curve for entries that differ in it only; beside it, what a study measured on its dev set."""

    def argument(entry: Entry, name: str) -> float | None:
        """A method's argument if it is a number: as the entry names it, otherwise its default."""
        named = [part.removeprefix(f"{name}=") for part in entry.arguments.split(", ") if part.startswith(f"{name}=")]
        try:
            return float(named[0] if named else entry.runs[0].icl[name])
        except (KeyError, TypeError, ValueError):
            return None

    def x(entry: Entry) -> float | None:
        return None if re.search(r"\bT\b.*chosen on dev", entry.arguments) else argument(entry, "T")

    def label(entry: Entry) -> str:
        arguments = _without(entry.arguments, "T=.*")
        if "eta=" not in arguments and (eta := argument(entry, "eta")) is not None:
            arguments = ", ".join(filter(None, [f"eta={eta:g}", arguments]))
        return _label(board, replace(entry, arguments=arguments))

    def on_dev(entry: Entry, column: Column) -> Estimate | None:
        """The mean on the dev set, without an interval."""
        mean = dev.score(entry, column)
        return None if mean is None else Estimate(mean, mean, mean, 0.0, math.inf, 0, 0, None, None, "reported")

    return _against(board, "Results by T", "T", x, label, on_dev)


def _against(
    board: Board,
    title: str,
    x_name: str,
    x_of: Callable[[Entry], float | None],
    label: Callable[[Entry], str],
    dev_of: Callable[[Entry, Column], Estimate | None] = lambda *_: None,
) -> _Drawn | None:
    """Results against what entries differ in: a panel for each column and checkpoint, with its baseline."""
    columns, by_name = _like_the_first(board), {entry.name: entry for entry in board.entries}
    scale, every = _scale(columns[0]), _by_checkpoint(board, board.entries)
    points: list[_CurvePoint] = []
    baselines: dict[Panel, tuple[float, Numbers]] = {}
    for column, (checkpoint, group) in itertools.product(columns, every.items()):
        results: dict[tuple[Curve, float], tuple[Entry, Estimate]] = {}
        for entry in group:
            x, estimate = x_of(entry), _estimate(entry, column)
            if x is not None and math.isfinite(x) and estimate is not None:
                curve = entry.method, label(entry)
                results.setdefault((curve, x), (entry, estimate))
                if (on_dev := dev_of(entry, column)) is not None:
                    results.setdefault(((entry.method, f"{curve[1]}, dev set"), x), (entry, on_dev))
        lengths = Counter(curve for curve, _ in results)
        on_curves = {key: result for key, result in sorted(results.items()) if lengths[key[0]] > 1}
        if not on_curves:
            continue
        # What all panels have in common is said at the y axis.
        panel = checkpoint if len(every) > 1 else "", _short(column) if len(columns) > 1 else ""
        for (curve, x), (entry, estimate) in on_curves.items():
            line = _numbers(entry, column, line=curve[1], **{x_name: x}, **_ends(estimate))
            ends = (end if math.isfinite(end) else estimate.mean for end in (estimate.low, estimate.high))
            low, high = (scale * end for end in ends)
            points.append(_CurvePoint(panel, curve, x, scale * estimate.mean, low, high, line))
        names = {entry.name for entry, _ in on_curves.values()}
        bases = {board.baseline.get(name, "") for name in names}
        baseline = by_name.get(bases.pop()) if len(bases) == 1 else None
        if baseline and baseline.name not in names and (estimate := _estimate(baseline, column)) is not None:
            line = _numbers(baseline, column, line="baseline", **{x_name: None}, **_ends(estimate))
            baselines[panel] = scale * estimate.mean, line | {"label": _label(board, baseline)}
    common = [*every] if len(every) == 1 else []
    common += [_short(columns[0])] if len(columns) == 1 else []
    return _curves(title, x_name, _axis(columns[0], *common, _common(board)), points, baselines)


def _dev(board: Board, most: int) -> _Drawn | None:
    """What a study measured on its dev set: a curve for each task, the mean over sets of demonstrations, with a ring
    for each value that was chosen for some of them."""
    column, x_name = board.columns[0], "T"
    drawn = []
    for checkpoint, group in _by_checkpoint(board, board.entries).items():
        for entry in group:
            if board.is_against_itself(entry):  # whose runs are those of its baseline
                continue
            for (x_name, name), points in sorted(dev.curves(entry.runs).items(), key=lambda item: item[0][1]):
                where = (checkpoint, _label(board, entry)), (entry.method, name)
                for x, mean, is_chosen in points:
                    values = {"line": name, "argument": x_name, "at": x, "score": mean, "chosen": is_chosen}
                    y = _scale(column) * mean
                    drawn.append(_CurvePoint(*where, x, y, y, y, _numbers(entry, column, **values), is_chosen))
    title = "On the dev set, where arguments are chosen (ring)"
    return _curves(title, x_name, f"{_axis(column)}, on the dev set", drawn, {})


def _curves(
    title: str,
    x_name: str,
    y_name: str,
    points: Sequence[_CurvePoint],
    baselines: Mapping[Panel, tuple[float, Numbers]],
) -> _Drawn | None:
    """Panels with a common y axis; lines of a method have its color in several shades.

    Args:
        points: those of a curve in the order of x.
    """
    from matplotlib.ticker import MaxNLocator

    if not points:
        return None
    by_panel = grouped(points, lambda point: point.panel)
    curves = list(dict.fromkeys(point.curve for of_panel in by_panel.values() for point in of_panel))
    looks = _looks(curves[:_LINES])
    drawn = [panel for panel, of_panel in by_panel.items() if any(point.curve in looks for point in of_panel)]
    panels = drawn[:_PANELS]
    note = _note(
        (len(by_panel) - len(panels), len(by_panel), "panels"),
        (len(curves) - len(looks), len(curves), "methods with their arguments"),
    )
    legend: list[tuple[str, Mapping[str, Any]]] = [(shortened(label), look) for (_, label), look in looks.items()]
    of_baselines = dict.fromkeys(str(baselines[panel][1]["label"]) for panel in panels if panel in baselines)
    legend += [(f"baseline: {shortened(label)}", _DASHED) for label in of_baselines]
    figure, grid = _grid(panels, y_name, x_name, note, legend)
    lines: list[Numbers] = []
    for axes, panel in zip(grid, panels, strict=True):
        shown = grouped((point for point in by_panel[panel] if point.curve in looks), lambda point: point.curve)
        for curve, on_curve in shown.items():
            _, _, xs, means, lows, highs, of_points, _ = zip(*on_curve, strict=True)
            axes.plot(xs, means, linewidth=1.5, markersize=4.5, zorder=3, **looks[curve])
            alpha = 0.13 if len(shown) < 5 else 0.06
            axes.fill_between(xs, lows, highs, color=looks[curve]["color"], alpha=alpha, linewidth=0)
            for point in on_curve:
                if point.has_ring:
                    axes.plot([point.x], [point.mean], "o", color=GREY, markersize=10, fillstyle="none", zorder=4)
            lines += of_points
        if panel in baselines:
            mean, line = baselines[panel]
            axes.axhline(mean, **_DASHED)
            lines.append({name: value for name, value in line.items() if name != "label"})
        if x_name == "T":
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            continue
        ticks = sorted({point.x for on_curve in shown.values() for point in on_curve})
        if ticks[0] > 0:
            axes.set_xscale("log", base=2)
        else:
            axes.set_xscale("symlog", base=2, linthresh=1, linscale=1)
        ticks = ticks[:: -(-len(ticks) // 8)]
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
    return _Drawn(title, figure, lines)


def _looks(curves: Sequence[Curve]) -> dict[Curve, dict[str, Any]]:
    """By curve, its color, marker and dashes: the method's, in a shade for each of its curves."""
    from matplotlib.colors import to_hex, to_rgb

    looks = {}
    for method, alike in grouped(curves, lambda curve: curve[0]).items():
        color, marker = of_method(method)
        for at, curve in enumerate(alike):
            shade = color
            if len(alike) > 1:
                shift = at / (len(alike) - 1) * 0.7 - 0.45  # from darker to lighter
                red, green, blue = (part + abs(shift) * ((shift > 0) - part) for part in to_rgb(color))
                shade = to_hex((red, green, blue))
            looks[curve] = {"color": shade, "marker": marker, "linestyle": ["-", "--", ":", "-."][at % 4]}
    return {curve: looks[curve] for curve in curves}


def _grid(
    panels: Sequence[Panel], y: str, x: str, note: str, legend: Sequence[tuple[str, Mapping[str, Any]]]
) -> tuple[Figure, list[Axes]]:
    """Panels side by side, in rows, with titles of one line or two, below a legend of labels and looks."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    across = min(len(panels), 3)
    down = -(-len(panels) // across)
    ncols = next((n for n in (6, 5, 4, 3) if sum(sorted(len(label) + 8 for label, _ in legend)[-n:]) < 100), 2)
    two_lines = any(second for _, second in panels)
    height = (3 if across == 1 else 2.4 + 0.15 * two_lines) * down + 0.2 + 0.17 * -(-len(legend) // ncols)
    height += 0.25 + 0.16 * note.count("\n") if note else 0
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    grid = figure.subplots(down, across, squeeze=False, sharey=True)
    for axes in grid.flat[len(panels) :]:
        axes.remove()
    for i, (axes, panel) in enumerate(zip(grid.flat, panels, strict=False)):
        axes.set_title("\n".join(clipped(line, 80 // across) for line in panel if line), loc="left")
        axes.set_xlabel(x if i + across >= len(panels) else "")
        axes.grid()
        axes.set_axisbelow(True)
    figure.supylabel(y.replace(" (", "\n(", 1) if down == 1 else y, fontsize=9)
    handles = [Line2D([], [], markersize=4.5, **look) for _, look in legend]
    # Before 3.10, matplotlib left out what begins with an underscore.
    labels = [f" {label}" if label.startswith("_") else label for label, _ in legend]
    figure.legend(handles, labels, loc="outside upper left", ncols=ncols)
    figure.supxlabel(note, x=0.01, ha="left", fontsize=8, color=GREY)
    return figure, list(grid.flat[: len(panels)])


def _tokens(board: Board, most: int) -> _Drawn | None:
    """Against the tokens run for each document; a line joins what is best for its number of tokens."""
    from matplotlib.ticker import EngFormatter, LogLocator

    column = board.columns[0]
    scale = _scale(column)
    costs = {
        entry.name: (entry.tokens, estimate)
        for entry in board.entries
        if (estimate := _estimate(entry, column)) is not None and entry.tokens and math.isfinite(entry.tokens)
    }
    panels = {}
    for is_shared in (False, True):  # a study's cells share passes
        comparable = (entry for entry in board.entries if entry.name in costs and entry.shared == is_shared)
        for name, group in _by_checkpoint(board, comparable).items():
            if len(group) > 1:
                panels[name, "in a study" * is_shared] = group
    if not panels:
        return None
    keys = list(panels)[:_PANELS]
    lacking = "entries, since they have no result here or do not say how many tokens were run"
    note = _note(
        (len(panels) - len(keys), len(panels), "panels"),
        (len(board.entries) - len(costs), len(board.entries), lacking),
    )
    methods = sorted({entry.method for key in keys for entry in panels[key]})[:_METHODS]
    looks = (dict(zip(("color", "marker"), of_method(method), strict=True)) for method in methods)
    legend = [(clipped(name), {**look, "linestyle": "none"}) for name, look in zip(methods, looks, strict=True)]
    legend.append(("best for its tokens", _DASHED))
    figure, grid = _grid(keys, _full_axis(board, column), "tokens run for each document", note, legend)
    lines = []
    for axes, key in zip(grid, keys, strict=True):
        best: list[tuple[float, float]] = []
        for entry in sorted(panels[key], key=lambda entry: (costs[entry.name][0], entry.name)):
            tokens, estimate = costs[entry.name]
            mean, *ends = (scale * x for x in (estimate.mean, estimate.low, estimate.high))
            color, marker = of_method(entry.method)
            if all(map(math.isfinite, ends)):
                axes.plot([tokens] * 2, ends, color=color, linewidth=1, alpha=0.6)
            axes.plot([tokens], [mean], marker, color=color, markersize=5.5, zorder=3)
            is_best = not best or column.sign * mean > column.sign * best[-1][1]
            if is_best:
                best.append((tokens, mean))
            lines.append(_numbers(entry, column, tokens=tokens, **_ends(estimate), best=is_best))
        axes.plot(*zip(*best, strict=True), drawstyle="steps-post", zorder=1, **_DASHED)
        axes.set_xscale("log")
        low, high = axes.get_xlim()
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0,) if high > 100 * low else (1, 2, 5)))
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.minorticks_off()
    return _Drawn("Results by tokens run", figure, lines)


# By name, as in a study's file: what makes the figure, of so many rows at most. None where there is nothing to show.
FIGURES: Mapping[str, Callable[[Board, int], _Drawn | None]] = {
    "forest": _forest,
    "differences": _differences,
    "rules": _rules,
    "seeds": _seeds,
    "orders": _orders,
    "sensitivity": _sensitivity,
    "shots": _shots,
    "T": _by_T,
    "dev": _dev,
    "tokens": _tokens,
}
