"""The board as CSV, Markdown and LaTeX, and tables in the terminal."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
from rich import box
from rich.markup import escape
from rich.table import Table

from lm_eval_icl.leaderboard import costs, numbers
from lm_eval_icl.results.board import Board, Column, Entry, grouped, rule_in_words, shown
from lm_eval_icl.results.statistics import Difference

_TEX = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "±": r"$\pm$",
    "†": r"$^\dagger$",
    numbers.MINUS: "$-$",
    numbers.DASH: "--",
}


def csv_text(rows: Iterable[Mapping[str, object]]) -> str:
    """Rows as CSV. A text that a spreadsheet would take for a formula begins with a quotation mark."""

    def plain(value: object) -> object:
        if value is None or (isinstance(value, float) and not math.isfinite(value)):
            return ""
        return (
            f"'{value}"
            if isinstance(value, str) and value.lstrip()[:1] in ("=", "+", "-", "@")
            else value
        )

    table = pd.DataFrame(
        [{name: plain(value) for name, value in row.items()} for row in rows], dtype=object
    )
    return str(table.to_csv(index=False, lineterminator="\n"))


def as_csv(board: Board) -> str:
    """The board as CSV, with a line for each entry and column. Numbers are not rounded."""
    pairs = (
        (entry, column)
        for entry in board.entries
        for column in board.columns
        if column.name in entry.cells
    )
    return csv_text(_all_numbers(board, *pair) for pair in pairs)


def _all_numbers(board: Board, entry: Entry, column: Column) -> dict[str, object]:
    cell = entry.cells[column.name]
    estimate = cell.estimate
    difference: dict[str, Any] = defaultdict(
        lambda: None, {} if cell.difference is None else vars(cell.difference)
    )
    return {
        "entry": entry.name,
        **{
            name: getattr(entry, name)
            for name in ("checkpoint", "details", "method", "arguments", "conditions")
        },
        **{"column": column.name, "kind": column.kind, "metric": column.metric},
        **{
            "value": estimate.mean,
            "low": estimate.low,
            "high": estimate.high,
            "standard_error": estimate.error,
        },
        **{
            name: getattr(estimate, name)
            for name in ("df", "documents", "sets", "error_documents", "error_sets")
        },
        "interval": estimate.how,
        "baseline": board.baseline.get(entry.name),
        **{
            f"difference{end}": difference[name]
            for end, name in (("", "mean"), ("_low", "low"), ("_high", "high"))
        },
        **{"p": difference["p"], "p_holm": difference["p_holm"]},
        **{"to_raw": cell.to_raw and cell.to_raw.mean, "p_raw": cell.to_raw and cell.to_raw.p_holm},
        **{"detectable": difference["detectable"], "paired_by": difference["how"]},
        **{"best": cell.is_best, "worse_than_best": bool(cell.is_worse)},
        **{
            "order_sensitivity": cell.sensitivity and cell.sensitivity.mean,
            "left_out": cell.left_out,
        },
        **{"majority": cell.majority, "p_majority": cell.to_majority and cell.to_majority.p_holm},
        **{"expected": cell.expected, "marks": "; ".join(cell.marks)},
        **{"decide": entry.rule, "reads": "; ".join(entry.reads)},
        **costs.as_numbers(costs.cost(entry, column)),
    }


def as_markdown(board: Board) -> str:
    """The board as Markdown: its sentences, and a table of means with their intervals."""

    def line(cells: Iterable[str]) -> str:
        return f"| {' | '.join(cells)} |"

    head = ["checkpoint", "method", *(column.name for column in board.columns)]
    table = [line(map(_markdown, head)), line(["---", "---", *("---:" for _ in board.columns)])]
    table += [line(map(_markdown, _row(board, entry))) for entry in board.entries]
    sentences = [*map(_markdown, board.summary), ""] if board.summary else []
    return "\n".join([*sentences, *table, "", _note(board, _markdown), ""])


def _markdown(text: str) -> str:
    return re.sub(r"([\\|`*_<>\[\]&~$])", r"\\\1", shown(text))


def as_tex(board: Board) -> str:
    """The same table in LaTeX, for the package booktabs."""
    head = ["checkpoint", "method", *(column.name for column in board.columns)]
    rows = [list(map(_tex, _row(board, entry))) for entry in board.entries]
    table = pd.DataFrame(rows, columns=list(map(_tex, head)))
    return f"% {_note(board, _tex)}\n" + str(
        table.to_latex(index=False, column_format="ll" + "r" * len(board.columns))
    )


def _tex(text: str) -> str:
    return "".join(_TEX.get(character, character) for character in shown(text))


def _row(board: Board, entry: Entry) -> list[str]:
    return [
        entry.on,
        entry.label,
        *(numbers.short(entry.cells.get(column.name), column) for column in board.columns),
    ]


def _note(board: Board, escaped: Callable[[str], str]) -> str:
    others = [column.name for column in board.columns if not column.percent]
    percent = (
        "In percent: " if not others else f"In percent, but for {escaped(', '.join(others))}: "
    )
    common = "".join(f"{escaped(word)}, " for word in board.common)
    text = f"{common}{percent if len(others) < len(board.columns) else ''}mean with the 95% interval, ± half or [both ends]."
    against = " † is a significant difference to the baseline (5%, Holm over the column)."
    return text[0].upper() + text[1:] + against * bool(board.baseline)


def overview(board: Board, most: int) -> Table:
    """The first column of a board, for the terminal: the best entries of each decision rule, with intervals and
    differences. The title has words that hold for all entries, and the last line the score of always one answer."""
    column = board.columns[0]
    checkpoints = {entry.on for entry in board.entries}
    common = [*(checkpoints if len(checkpoints) == 1 else ()), *board.common]
    sections = grouped(
        (e for e in board.entries if column.name in e.cells), lambda entry: entry.rule
    )
    bases = {entry.method for entry in board.entries if entry.name in board.baseline.values()}
    base = bases.pop() if len(bases) == 1 else "baseline"
    points = ",\npoints" if column.percent else ""
    has_rules = any(rule is not None for rule in sections)
    head = ["method"] if len(checkpoints) == 1 else ["checkpoint", "method"]
    to_raw = [f"vs raw{points}"] if has_rules else []
    table = titled(shown(column.name) + (f" ({', '.join(map(shown, common))})" if common else ""), head,
                   ["mean", "95% interval", f"vs {shown(base)}{points}", "p (Holm)", *to_raw])  # fmt: skip
    for rule, entries in sections.items():
        if has_rules:
            name = rule_in_words(rule) + " (transductive)" * ("transductive" in entries[0].reads)
            table.add_row(f"[bold]{escape(name)}[/]", style="dim")
        for entry in entries[:most]:
            cell = entry.cells[column.name]
            label = replace(entry, rule=None).label
            raw = (
                [numbers.signed(cell.to_raw.mean, column) if cell.to_raw else ""]
                if has_rules
                else []
            )
            table.add_row(
                *map(escape, [entry.on, label] if len(checkpoints) > 1 else [label]),
                f"{'[bold]' if cell.is_best else ''}{numbers.value(cell.estimate.mean, column, unit=True)}",
                numbers.interval(cell.estimate, column, unit=True),
                numbers.signed(cell.difference.mean, column) if cell.difference else "",
                numbers.p_value(cell.difference.p_holm) if cell.difference else "",
                *raw,
            )
    if (majority := board.majority(column)) is not None:
        names = (
            ["always one answer"]
            if len(checkpoints) == 1
            else ["", "always the most frequent answer"]
        )
        table.add_row(*names, numbers.value(majority, column, unit=True), style="dim")
    return table


def cost_table(board: Board, most: int) -> Table:
    """The cost of the first entries in the first column, for the terminal."""
    column = board.columns[0]
    title = f"Cost, {shown(column.name)}"
    part = titled(title, ["entry"], [column.metric, *costs.HEADINGS])
    for entry in board.entries[:most]:
        cell = entry.cells.get(column.name)
        entry_cost = costs.cost(entry, column)
        if cell is None or entry_cost is None:
            continue
        mean = numbers.value(cell.estimate.mean, column, unit=True)
        part.add_row(escape(entry.label), mean, *costs.texts(entry_cost))
    return part


def comparison(
    first: Entry, second: Entry, columns: Sequence[Column], differences: Mapping[str, Difference]
) -> Table:
    """For each column, both means, and their difference with its interval, p-value and detectable size."""
    title = f"A: {first.label} on {first.on}\nB: {second.label} on {second.on}"
    table = titled(
        title,
        ["column"],
        ["A", "B", "A - B", "interval", "p", "detect-\nable", "documents\nx sets"],
    )
    lost = []
    for column in columns:
        if column.name not in first.cells or column.name not in second.cells:
            continue
        means = [entry.cells[column.name].estimate.mean for entry in (first, second)]
        row = [
            escape(shown(column.name)),
            *(numbers.value(mean, column, unit=True) for mean in means),
        ]
        if (difference := differences.get(column.name)) is None:
            table.add_row(*row, "not paired", "", "", "", "")
            continue
        is_same = difference.how == "identical"
        table.add_row(
            *row,
            numbers.signed(difference.mean, column),
            "same answers" if is_same else numbers.interval(difference, column, sign=True),
            numbers.p_value(difference.p),
            numbers.value(difference.detectable, column, unit=True),
            f"{difference.documents} x {difference.sets}",
        )
        for name, entry in (("A", first), ("B", second)):
            if count := entry.cells[column.name].left_out:
                lost.append(
                    f"{escape(shown(column.name))}: {count} demonstrations were left out of {name}'s prompts."
                )
    table.caption = "\n".join(lost) or None
    return table


def titled(title: str, names: Sequence[str], number_names: Sequence[str]) -> Table:
    left: dict[str, Any] = {
        "title_justify": "left",
        "caption_justify": "left",
        "title_style": "bold",
    }
    table = Table(
        title=f"\n{escape(title)}",
        **left,
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )
    for name in names:
        table.add_column(name, overflow="fold")
    for name in number_names:
        table.add_column(name, justify="right", no_wrap=True)
    return table
