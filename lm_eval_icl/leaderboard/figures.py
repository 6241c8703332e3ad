"""Figures of a leaderboard or a study, each with the numbers that are drawn.

Some have a row for each entry (results, differences, orders). Some have a curve for entries that differ only in the
number of shots, or only in T. One is a heat map. `FIGURES`, at the end, lists them by name.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from lm_eval_icl.drawing.style import (
    GREY,
    INK,
    METADATA,
    clipped,
    method_style,
    one_line,
    shortened,
    styled,
)
from lm_eval_icl.errors import InputError, log, writing
from lm_eval_icl.leaderboard import card, numbers
from lm_eval_icl.leaderboard.tables import csv_text
from lm_eval_icl.results.board import Board, Column, Entry, grouped, rule_in_words
from lm_eval_icl.results.statistics import Difference, Estimate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WIDTH, _ROW = 7.6, 0.25  # inches
_ROWS, _ROWS_ON_PAGE = 60, 36
_PANELS, _LINES, _TASKS = 9, 8, 24  # the most of each in a figure
_NUMBERS = 12  # the most columns with which a heat map has room for numbers
_DASHED: dict[str, Any] = {"color": GREY, "linestyle": (0, (4, 2)), "linewidth": 1}
_ENTRY = ("checkpoint", "details", "method", "arguments", "conditions", "rule", "name")

Numbers = dict[str, object]  # a line of a figure's CSV file
_Lines = Sequence[tuple[float, str]]  # the places of vertical lines, with their labels


@dataclass(frozen=True)
class _Drawn:
    title: str
    figure: Figure
    lines: list[Numbers]


@dataclass(frozen=True)
class _Mark:
    """The mark of an entry in a figure: single values, or a mean with its interval; and a text beside it."""

    values: Sequence[float]
    interval: tuple[float, float] | None
    text: str
    line: Numbers


@dataclass(frozen=True)
class _CurvePoint:
    """A point of a curve, with the ends of its interval and its line of the CSV file."""

    panel: str
    method: str
    label: str
    x: float
    mean: float
    ends: tuple[float, float]
    line: Numbers


def draw(board: Board, folder: Path, only: Collection[str] | None = None) -> list[Path]:
    """Draw each figure for which the board has data, as SVG, PNG and a CSV of its numbers. Return the files' paths.

    Args:
        only: names of figures, out of `FIGURES`; None for all.

    Raises:
        InputError: there is no such figure, or a file cannot be written.
    """
    for name in only or ():
        if name not in FIGURES:
            raise InputError(f"figures: there is no {name!r}: name some of {', '.join(FIGURES)}.")
    paths = []
    with writing(folder), styled():
        folder.mkdir(parents=True, exist_ok=True)
        for name, drawn in _all(board, _ROWS, only):
            for kind, metadata in METADATA.items():
                paths.append(folder / f"{name}.{kind}")
                drawn.figure.savefig(paths[-1], dpi=150, metadata=metadata)
            paths.append(folder / f"{name}.csv")
            paths[-1].write_text(csv_text(drawn.lines), encoding="utf-8")
    return paths


def svgs(board: Board) -> dict[str, str]:
    """The figures of a page: title -> the text of an SVG file. None, and a warning, without matplotlib."""
    files = {}
    try:
        with styled():
            for _, drawn in _all(board, _ROWS_ON_PAGE):
                file = io.StringIO()
                drawn.figure.savefig(file, format="svg", metadata=METADATA["svg"])
                # Indentation is a tenth of the file.
                files[drawn.title] = re.sub(r"\s*\n\s*", " ", file.getvalue())
    except InputError as refusal:
        log.warning("%s The page has none.", refusal.message)
    return files


def _all(
    board: Board, most: int, only: Collection[str] | None = None
) -> Iterator[tuple[str, _Drawn]]:
    for name, make in FIGURES.items():
        if (only is None or name in only) and (drawn := make(board, most)) is not None:
            yield name, drawn


def _label(entry: Entry) -> str:
    return entry.label.replace("decide: ", "")


def _scale(column: Column) -> int:
    return 100 if column.percent else 1


def _metric(column: Column) -> str:
    return "accuracy" if column.metric == "acc" else clipped(column.metric)


def _axis(board: Board, column: Column) -> str:
    where = "average over tasks" if column.kind == "average" else clipped(column.name)
    return f"{_metric(column)}{', %' * column.percent} ({', '.join([where, *map(clipped, board.common)])})"


def _numbers(entry: Entry, column: Column, **values: object) -> Numbers:
    """A line of a CSV file: the entry, the column, and the values that are drawn."""
    names = {name: getattr(entry, name) for name in _ENTRY} | {
        "column": column.name,
        "metric": column.metric,
    }
    return {
        name: one_line(value) if isinstance(value, str) else value
        for name, value in (names | values).items()
    }


def _ends(estimate: Estimate, name: str = "mean") -> Numbers:
    return {name: estimate.mean, "low": estimate.low, "high": estimate.high}


def _marked(estimate: Estimate, column: Column, text: str, line: Numbers) -> _Mark:
    scale = _scale(column)
    ends = (scale * estimate.low, scale * estimate.high)
    return _Mark(
        [scale * estimate.mean], ends if all(map(math.isfinite, ends)) else None, text, line
    )


def _rows(
    board: Board,
    most: int,
    title: str,
    label: str,
    mark_of: Callable[[Entry], _Mark | None],
    lines_at: _Lines = (),
) -> _Drawn | None:
    """A figure with a row for each entry for which `mark_of` returns a mark, but with `most` rows at most.
    `label` is that of the x axis."""
    from matplotlib.figure import Figure

    marks = [(entry, mark) for entry in board.entries if (mark := mark_of(entry)) is not None]
    if not marks:
        return None
    kept = marks[:most]
    several = len({entry.on for entry in board.entries}) > 1
    rules = len({entry.rule for entry in board.entries}) > 1

    def panel(pair: tuple[Entry, _Mark]) -> str:
        rule = rule_in_words(pair[0].rule) if rules else ""
        return ", ".join(filter(None, [clipped(pair[0].on, 60) if several else "", rule]))

    panels = grouped(kept, panel)
    heights = [len(in_panel) + 0.3 for in_panel in panels.values()]
    height = (
        _ROW * sum(heights) + 0.3 * len(panels) + 0.8 + 0.17 * (len(lines_at) + label.count("\n"))
    )
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    shape: dict[str, Any] = {
        "squeeze": False,
        "sharex": True,
        "gridspec_kw": {"height_ratios": heights},
    }
    grid = figure.subplots(len(panels), 1, **shape)
    lines = []
    for axes, (name, in_panel) in zip(grid[:, 0], panels.items(), strict=True):
        for y, (entry, mark) in enumerate(in_panel):
            color, marker = method_style(entry.method)
            if mark.interval is not None:
                axes.plot(mark.interval, [y, y], color=color, linewidth=1.6, solid_capstyle="butt")
            axes.plot(
                mark.values,
                [y] * len(mark.values),
                marker,
                color=color,
                markersize=5,
                zorder=3,
                clip_on=False,
            )
            axes.annotate(
                mark.text, (1.01, y), xycoords=("axes fraction", "data"), va="center", fontsize=8
            )
            lines.append(mark.line)
        for place, (x, _) in enumerate(lines_at):
            axes.axvline(x, zorder=1, **{**_DASHED, "linestyle": ["--", ":"][place % 2]})
        axes.set_ylim(len(in_panel) - 0.35, -0.65)
        axes.set_yticks(
            range(len(in_panel)),
            [shortened(replace(entry, rule=None).label) for entry, _ in in_panel],
        )
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        axes.grid(axis="x", color=INK, alpha=0.13)
        axes.set_title(name, loc="left", fontweight="bold")
    meanings = [
        f"{['dashed', 'dotted'][place % 2]}: {what}" for place, (_, what) in enumerate(lines_at)
    ]
    if missing := len(marks) - len(kept):
        meanings.append(f"{missing} of {len(marks)} entries are not drawn, for lack of room")
    axes.set_xlabel("\n".join([label, "; ".join(meanings)] if meanings else [label]))
    return _Drawn(title, figure, lines)


def _forest(board: Board, most: int) -> _Drawn | None:
    """Means with intervals, and the score of always giving one answer as a line."""
    column = board.columns[0]
    majority = board.majority(column)

    def mark_of(entry: Entry) -> _Mark | None:
        if (cell := entry.cells.get(column.name)) is None:
            return None
        text = f"{numbers.value(cell.estimate.mean, column)}  [{numbers.interval(cell.estimate, column)}]"
        return _marked(cell.estimate, column, text, _numbers(entry, column, **_ends(cell.estimate)))

    lines_at = (
        []
        if majority is None
        else [(_scale(column) * majority, "always one answer (uncertain too)")]
    )
    return _rows(board, most, "Results with 95% intervals", _axis(board, column), mark_of, lines_at)


def _differences(board: Board, most: int) -> _Drawn | None:
    """Differences to the baseline under the same rule, with intervals."""
    column = board.columns[0]

    def mark_of(entry: Entry) -> _Mark | None:
        cell = entry.cells.get(column.name)
        if cell is None or cell.difference is None:
            return None
        difference = cell.difference
        line = _numbers(
            entry,
            column,
            **_ends(difference, "difference"),
            p=difference.p,
        )
        sign = numbers.SIGNS.get(column.judged(difference), "")
        return _marked(
            difference, column, f"{numbers.signed(difference.mean, column)} {sign}", line
        )

    methods = sorted(
        {base.method for name in board.baseline.values() if (base := board.named(name))}
    )
    unit = "points" if column.percent else column.metric
    label = f"difference to {', '.join(methods)}, {unit}\n▲ better, ▼ worse"
    title = "Differences to the baseline; intervals hold for all pairs of rows together (95%)"
    return _rows(board, most, title, label, mark_of, [(0, "no difference")])


def _sets(board: Board, most: int, deviations: bool) -> _Drawn | None:
    """The first task's value of each set of demonstrations (the mean over orders), or of each order minus that mean."""
    column = next((column for column in board.columns if column.kind == "task"), board.columns[0])

    def mark_of(entry: Entry) -> _Mark | None:
        cell = entry.cells.get(column.name)
        sets: dict[str, list[float]] = {}
        for prompt_set in cell.sets if cell else ():
            # Orders are compared in the task's own format.
            units = [unit for unit in prompt_set.answered if not (deviations and unit.run.format)]
            sets[prompt_set.label] = [unit.result.value for unit in units]
        if deviations:
            sets = {
                n: [v - fmean(values) for v in values]
                for n, values in sets.items()
                if len(values) > 1
            }
        values = [
            x for orders in sets.values() for x in (orders if deviations else [fmean(orders)])
        ]
        if len(values) < 2:
            return None
        text = ", ".join(
            f"{name} {' '.join(f'{x:.6g}' for x in orders)}" for name, orders in sets.items()
        )
        xs = [_scale(column) * x for x in dict.fromkeys(values)]
        return _Mark(
            xs,
            None,
            numbers.value(max(values) - min(values), column),
            _numbers(entry, column, values=text),
        )

    title = "Orders of the same demonstrations" if deviations else "Sets of demonstrations"
    what = "each order less its set's mean" if deviations else "a point for each set"
    label = f"{_axis(board, column)}\n{what}; the range is on the right"
    return _rows(
        board, most, f"{title}: {_metric(column)} on {clipped(column.name)}", label, mark_of
    )


def _sensitivity(board: Board, most: int) -> _Drawn | None:
    """How often another order of the demonstrations changes the prediction, with 95% intervals."""
    column = board.columns[0]
    share = replace(column, percent=True)

    def mark_of(entry: Entry) -> _Mark | None:
        cell = entry.cells.get(column.name)
        if cell is None or cell.sensitivity is None:
            return None
        line = _numbers(entry, column, **_ends(cell.sensitivity, "flip rate"))
        return _marked(cell.sensitivity, share, numbers.value(cell.sensitivity.mean, share), line)

    label = "predictions that another order of the same demonstrations changes, %"
    return _rows(board, most, "Order sensitivity", label, mark_of)


def _heatmap(board: Board, most: int) -> _Drawn | None:
    """Differences to the baseline by task, bold if their simultaneous intervals exclude 0."""
    from matplotlib.colors import LinearSegmentedColormap, Normalize
    from matplotlib.figure import Figure

    def difference_of(entry: Entry, column: Column) -> Difference | None:
        cell = entry.cells.get(column.name)
        return cell.difference if cell is not None else None

    columns = [
        c for c in board.columns if c.percent and any(difference_of(e, c) for e in board.entries)
    ][:_TASKS]
    entries = [
        entry for entry in board.entries if any(difference_of(entry, column) for column in columns)
    ][:most]
    if len(entries) * len(columns) < 2:  # a map needs more than one difference
        return None
    lines, goodness = [], [[math.nan] * len(columns) for _ in entries]
    figure = Figure(figsize=(_WIDTH, _ROW * len(entries) + 1.7), layout="constrained")
    axes = figure.subplots()
    for y, entry in enumerate(entries):
        for x, column in enumerate(columns):
            if (difference := difference_of(entry, column)) is None:
                continue
            goodness[y][x] = 100 * difference.mean * column.sign
            is_decided = column.judged(difference) in numbers.SIGNS
            text = (
                numbers.signed(difference.mean, column)
                if len(columns) <= _NUMBERS
                else "•" * is_decided
            )
            weight = "bold" if is_decided else "normal"
            axes.text(x, y, text, ha="center", va="center", fontsize=8, fontweight=weight)
            values = {
                "difference": difference.mean,
                "p": difference.p,
                "decided": is_decided,
            }
            lines.append(_numbers(entry, column, **values))
    largest = max(0.1, *(abs(x) for row in goodness for x in row if not math.isnan(x)))
    colors = LinearSegmentedColormap.from_list("", ["#e8752a", "#ffffff", "#2b8fd0"])
    image = axes.imshow(goodness, cmap=colors, norm=Normalize(-largest, largest), aspect="auto")
    axes.set_xticks(
        range(len(columns)), [clipped(c.name, 26) for c in columns], rotation=30, ha="right"
    )
    axes.set_yticks(range(len(entries)), [shortened(_label(entry)) for entry in entries])
    bar = figure.colorbar(
        image, ax=axes, location="bottom", shrink=0.5, aspect=40, ticks=[-largest, 0, largest]
    )
    bar.ax.set_xticklabels([f"{x:+.1f}" for x in (-largest, 0, largest)])
    bar.set_label(
        "points better (blue) or worse than the baseline; bold: shown, with all pairs of rows",
        fontsize=8,
    )
    return _Drawn("Differences to the baseline, by task", figure, lines)


def _without(text: str, pattern: str) -> str:
    """A list of arguments or conditions, without the parts that match the pattern."""
    return ", ".join(part for part in text.split(", ") if part and not re.fullmatch(pattern, part))


def _shots(board: Board, most: int) -> _Drawn | None:
    """Results against the number of demonstrations, with a curve for entries that differ only in this number."""

    def x_of(entry: Entry) -> float | None:
        return entry.shots[0] if entry.shots[0] == entry.shots[1] else None

    def label(entry: Entry) -> str:
        return _label(replace(entry, conditions=_without(entry.conditions, r"\d+ shots?")))

    return _against(board, "Results by number of demonstrations", "demonstrations", x_of, label)


def _by_T(board: Board, most: int) -> _Drawn | None:
    """Results against T, with a curve for entries that differ only in T."""

    def argument(entry: Entry, name: str) -> float | None:
        """A method's argument, if it is a number and was not chosen on the dev set."""
        method = entry.runs[0].fields.method
        try:
            return float(method.get(name, ""))
        except ValueError:
            return None

    def label(entry: Entry) -> str:
        arguments = _without(entry.arguments, "T=.*")
        if "eta=" not in arguments and (eta := argument(entry, "eta")) is not None:
            arguments = ", ".join(filter(None, [f"eta={eta:g}", arguments]))
        return _label(replace(entry, arguments=arguments))

    return _against(board, "Results by T", "T", lambda entry: argument(entry, "T"), label)


def _against(
    board: Board,
    title: str,
    x_name: str,
    x_of: Callable[[Entry], float | None],
    label: Callable[[Entry], str],
) -> _Drawn | None:
    """Results against `x_of(entry)`, with a panel for each checkpoint and each column that has the first's metric."""
    first = board.columns[0]
    several = len({entry.on for entry in board.entries}) > 1
    points = []
    for column in board.columns:
        if (column.metric, column.percent) != (first.metric, first.percent):
            continue
        for entry in board.entries:
            x, cell = x_of(entry), entry.cells.get(column.name)
            if x is None or cell is None:
                continue
            panel = ", ".join(
                filter(None, [clipped(entry.on, 40) if several else "", clipped(column.name, 26)])
            )
            scale, estimate = _scale(column), cell.estimate
            ends = (scale * estimate.low, scale * estimate.high)
            line = _numbers(entry, column, line=label(entry), **{x_name: x}, **_ends(estimate))
            points.append(
                _CurvePoint(panel, entry.method, label(entry), x, scale * estimate.mean, ends, line)
            )
    by_curve = grouped(points, lambda point: (point.panel, point.label))
    lengths = {key: len({point.x for point in same}) for key, same in by_curve.items()}
    points = [point for point in points if lengths[point.panel, point.label] > 1]
    return _curves(title, x_name, _axis(board, first).partition(" (")[0], points)


def _curves(title: str, x_name: str, y_name: str, points: Iterable[_CurvePoint]) -> _Drawn | None:
    """Panels with a common y axis. The lines of a method have one color, and differ in their dashes."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator

    if not (by_panel := grouped(points, lambda point: point.panel)):
        return None
    panels = list(by_panel)[:_PANELS]
    curves = list(dict.fromkeys((p.method, p.label) for panel in panels for p in by_panel[panel]))[
        :_LINES
    ]
    looks: dict[tuple[str, str], Mapping[str, Any]] = {}
    for method, alike in grouped(curves, lambda curve: curve[0]).items():
        color, marker = method_style(method)
        for at, curve in enumerate(alike):
            looks[curve] = {"color": color, "marker": marker, "linestyle": ["-", "--", ":", "-."][at % 4],
                            "fillstyle": ["full", "none"][at // 4 % 2]}  # fmt: skip
    across = min(len(panels), 3)
    down = -(-len(panels) // across)
    height = (3 if across == 1 else 2.4) * down + 0.3 + 0.17 * len(curves)
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    grid = figure.subplots(down, across, squeeze=False, sharey=True)
    for axes in grid.flat[len(panels) :]:
        axes.remove()
    lines: list[Numbers] = []
    for axes, panel in zip(grid.flat, panels, strict=False):
        for curve, curve_points in grouped(by_panel[panel], lambda p: (p.method, p.label)).items():
            if curve not in looks:
                continue
            ordered = sorted(curve_points, key=lambda point: point.x)
            xs = [point.x for point in ordered]
            axes.plot(
                xs,
                [point.mean for point in ordered],
                linewidth=1.5,
                markersize=4.5,
                zorder=3,
                **looks[curve],
            )
            lows, highs = zip(*(point.ends for point in ordered), strict=True)
            axes.fill_between(xs, lows, highs, color=looks[curve]["color"], alpha=0.08, linewidth=0)
            lines += [point.line for point in ordered]
        axes.set_title(panel, loc="left")
        axes.set_xlabel(x_name)
        axes.grid(color=INK, alpha=0.13)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.supylabel(y_name, fontsize=9)
    handles = [Line2D([], [], markersize=4.5, **look) for look in looks.values()]
    figure.legend(
        handles, [f" {shortened(label)}" for _, label in looks], loc="outside upper left", ncols=2
    )
    return _Drawn(title, figure, lines)


def _card(board: Board, most: int) -> _Drawn | None:
    """The robustness card, if the board has one."""
    return None if board.card is None else _Drawn(*card.figure(board.card, most))


# Name, as in a study's file -> a function of the board and of the most rows, which makes the figure or returns None.
FIGURES: Mapping[str, Callable[[Board, int], _Drawn | None]] = {
    "card": _card,
    "forest": _forest,
    "differences": _differences,
    "heatmap": _heatmap,
    "shots": _shots,
    "T": _by_T,
    "seeds": lambda board, most: _sets(board, most, deviations=False),
    "orders": lambda board, most: _sets(board, most, deviations=True),
    "sensitivity": _sensitivity,
}
