"""The board as CSV, Markdown and LaTeX, and a comparison of two entries in the terminal."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from rich import box
from rich.markup import escape
from rich.table import Table

from lm_eval_icl.results.board import SIGNIFICANT, Board, Cell, Column, Entry
from lm_eval_icl.results.entries import shown
from lm_eval_icl.results.statistics import Difference

_TEX = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
}


def as_csv(board: Board) -> str:
    """A line for each entry and column, with all numbers."""
    names = (
        "entry checkpoint details method arguments conditions column kind metric value low high standard_error df "
        "documents sets error_documents error_sets interval baseline difference difference_low difference_high p "
        "p_holm detectable paired_by rank_first rank_last order_sensitivity chance_corrected left_out tokens "
        "seconds in_study predicted majority marks"
    ).split()
    file = io.StringIO(newline="")
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(names)
    for entry in board.entries:
        of_entry = (entry.name, entry.checkpoint, entry.details, entry.method, entry.arguments, entry.conditions)
        for column in board.columns:
            if (cell := entry.cells.get(column.name)) is None:
                continue
            e, d, rank = cell.estimate, cell.difference, cell.rank or (None, None)
            numbers: list[object] = [e.mean, e.low, e.high, e.error, e.df, e.documents, e.sets]
            numbers += [e.error_documents, e.error_sets, e.how, board.baseline.get(entry.name)]
            numbers += [None] * 7 if d is None else [d.mean, d.low, d.high, d.p, cell.p_holm, d.detectable, d.how]
            sensitivity = cell.sensitivity.mean if cell.sensitivity else None
            numbers += [*rank, sensitivity, cell.corrected, cell.left_out, entry.tokens, entry.seconds, entry.shared]
            numbers += ["; ".join(f"{name} {share:.4g}" for name, share in cell.predicted.items()), cell.majority]
            row = [*of_entry, column.name, column.kind, column.metric, *numbers, "; ".join(cell.marks)]
            writer.writerow([plain(value) for value in row])
    return file.getvalue()


def plain(value: object) -> object:
    """A cell of a CSV file: a name that a spreadsheet would take for a formula has a quotation mark in front."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return ""
    if isinstance(value, str) and value.lstrip()[:1] in ("=", "+", "-", "@"):
        return "'" + value
    return value


def as_markdown(board: Board) -> str:
    """A table of means with half of their intervals, and the sentences on top."""
    head = ["checkpoint", "method", *(column.name for column in board.columns)]
    lines = [*map(_markdown, board.summary), ""] if board.summary else []
    lines += [_markdown_row(head), _markdown_row(["---", "---", *["---:" for _ in board.columns]])]
    for entry in board.entries:
        cells = [_short(entry.cells.get(column.name), column) for column in board.columns]
        lines.append(_markdown_row([entry.on, entry.label, *cells]))
    return "\n".join([*lines, "", _note(board, _markdown), ""])


def _markdown_row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(map(_markdown, cells)) + " |"


def _markdown(text: str) -> str:
    return re.sub(r"([\\|`*_<>\[\]&~$])", r"\\\1", shown(text))


def as_tex(board: Board) -> str:
    """The same table for LaTeX, with the package booktabs."""
    lines = [rf"% {_note(board, _tex)}", r"\begin{tabular}{ll" + "r" * len(board.columns) + "}", r"\toprule"]
    lines += [
        " & ".join(["checkpoint", "method", *(_tex(column.name) for column in board.columns)]) + r" \\",
        r"\midrule",
    ]
    for entry in board.entries:
        cells = [_tex(_short(entry.cells.get(column.name), column)) for column in board.columns]
        cells = [cell.replace("±", r"$\pm$").replace("†", r"$^\dagger$") for cell in cells]
        lines.append(" & ".join([_tex(entry.on), _tex(entry.label), *cells]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def _tex(text: str) -> str:
    return "".join(_TEX.get(character, character) for character in shown(text))


def _note(board: Board, escaped: Callable[[str], str]) -> str:
    others = [column.name for column in board.columns if not column.percent]
    percent = "In percent: " if not others else f"In percent, but for {escaped(', '.join(others))}: "
    against = " † is a significant difference to the baseline (5%, Holm over the column)." if board.baseline else ""
    said = f"{percent if len(others) < len(board.columns) else ''}mean ± half of the 95% interval.{against}"
    return said[0].upper() + said[1:]


def _short(cell: Cell | None, column: Column) -> str:
    if cell is None:
        return "-"
    scale, digits = (100, 1) if column.percent else (1, 3)
    mean, half = cell.estimate.mean * scale, (cell.estimate.high - cell.estimate.low) / 2 * scale
    spread = f" ± {half:.{digits}f}" if math.isfinite(half) else ""
    mark = "†" if cell.p_holm is not None and cell.p_holm <= SIGNIFICANT else ""
    return f"{mean:.{digits}f}{spread}{mark}"


def overview(board: Board, most: int) -> Table:
    """The first column of a board: its best entries with their intervals, differences and ranks."""
    column = board.columns[0]
    there = [entry for entry in board.entries if column.name in entry.cells][:most]
    checkpoints, conditions = {entry.on for entry in there}, {entry.conditions for entry in there}
    # What all rows have in common is said above them.
    common = [*(checkpoints if len(checkpoints) == 1 else ()), *(conditions if len(conditions) == 1 else ())]
    title = shown(column.name) + (f" ({', '.join(filter(None, common))})" if any(common) else "")
    head = ["method"] if len(checkpoints) == 1 else ["checkpoint", "method"]
    table = _table(title, head, ["mean", "interval", "to baseline", "p (Holm)", "rank"])
    for entry in there:
        cell = entry.cells[column.name]
        label = entry.label if len(conditions) > 1 else f"{entry.method} {entry.arguments}"
        names = [escape(entry.on), escape(label)] if len(checkpoints) > 1 else [escape(label)]
        difference = number(cell.difference.mean, column, sign=True) if cell.difference else ""
        p = p_value(cell.p_holm) if cell.p_holm is not None else ""
        first, last = cell.rank or ("", "")
        rank = f"{first}-{last}" if first != last else f"{first}"
        interval = _between(cell.estimate.low, cell.estimate.high, column)
        table.add_row(*names, number(cell.estimate.mean, column), interval, difference, p, rank)
    return table


def comparison(first: Entry, second: Entry, columns: Sequence[Column], found: Mapping[str, Difference]) -> Table:
    """Both means, and the difference with all that belongs to it, column by column."""
    title = f"A: {first.label} on {first.on}\nB: {second.label} on {second.on}"
    numbers = ["A", "B", "A - B", "interval", "p", "detect-\nable", "documents\nx sets"]
    table = _table(title, ["column"], numbers)
    for column in columns:
        cells = [entry.cells.get(column.name) for entry in (first, second)]
        if None in cells:
            continue
        means = [number(cell.estimate.mean, column) for cell in cells if cell]
        if (d := found.get(column.name)) is None:
            table.add_row(escape(shown(column.name)), *means, "not paired", "", "", "", "")
            continue
        interval = "same answers" if d.how == "identical" else _between(d.low, d.high, column, sign=True)
        of = (number(d.mean, column, sign=True), interval, p_value(d.p), number(d.detectable, column))
        table.add_row(escape(shown(column.name)), *means, *of, f"{d.documents} x {d.sets}")
    return table


def _table(title: str, names: Sequence[str], numbers: Sequence[str]) -> Table:
    table = Table(
        title=f"\n{escape(title)}",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )
    for name in names:
        table.add_column(name, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _between(low: float, high: float, column: Column, sign: bool = False) -> str:
    """An interval, with its unit once."""
    ends = (number(low, column, sign), number(high, column, sign))
    return f"{ends[0].removesuffix('%')} to {ends[1]}"


def number(value: float, column: Column, sign: bool = False) -> str:
    """A value of a column; in percent where it is between 0 and 1."""
    if not math.isfinite(value):
        return "?"
    plus = "+" if sign else ""
    if column.percent:
        return f"{round(100 * value, 1) + 0.0:{plus}.1f}%"  # no -0.0
    return f"{value + 0.0:{plus}.4g}"


def p_value(p: float) -> str:
    """With two digits, or that it is small."""
    return "<0.0001" if p < 1e-4 else f"{p:.2g}" if p < 0.095 else f"{p:.2f}"
