"""The board as CSV, Markdown and LaTeX, and tables in the terminal."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import pandas as pd
from rich import box
from rich.markup import escape
from rich.table import Table

from lm_eval_icl.leaderboard import costs, numbers
from lm_eval_icl.results.board import Board, Column, Entry, grouped, rule_in_words, shown
from lm_eval_icl.results.statistics import Difference
from lm_eval_icl.results.summary import family

_COMPARED = 2  # the most columns of differences in the terminal
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
    """Rows as CSV. Numbers that are not finite are empty."""
    table = pd.DataFrame(list(rows), dtype=object).replace([math.inf, -math.inf], math.nan)
    return str(table.map(_plain).to_csv(index=False, lineterminator="\n"))


def _plain(value: object) -> object:
    """A text that a spreadsheet would take for a formula begins with a quotation mark."""
    is_formula = isinstance(value, str) and value.lstrip()[:1] in ("=", "+", "-", "@")
    return f"'{value}" if is_formula else value


def as_csv(board: Board) -> str:
    """The board as CSV, with a line for each entry and column. Numbers are not rounded."""
    lines = []
    for entry in board.entries:
        columns = [column for column in board.columns if column.name in entry.cells]
        lines += [_all_numbers(board, entry, column) for column in columns]
    return csv_text(lines)


def _all_numbers(board: Board, entry: Entry, column: Column) -> dict[str, object]:
    cell = entry.cells[column.name]
    estimate = cell.estimate
    line: dict[str, object] = {
        "entry": entry.name,
        "checkpoint": entry.checkpoint,
        "details": entry.details,
        "method": entry.method,
        "arguments": entry.arguments,
        "conditions": entry.conditions,
        "column": column.name,
        "kind": column.kind,
        "metric": column.metric,
        "value": estimate.mean,
        "low": estimate.low,
        "high": estimate.high,
        "standard_error": estimate.error,
        "documents": estimate.documents,
        "sets": estimate.sets,
        "error_documents": estimate.error_documents,
        "error_sets": estimate.error_sets,
        "interval": estimate.scope,
        "baseline": board.baseline.get(entry.name),
    }
    for name in ("difference", "to_raw", "to_majority"):
        difference: Difference | None = getattr(cell, name)
        line[name] = difference and difference.mean
        for part in ("low", "high", "p"):
            line[f"{name}_{part}"] = difference and getattr(difference, part)
    line["comparisons"] = cell.comparisons
    line["compared_over"] = cell.difference and cell.difference.scope
    line["to_conditions"] = "; ".join(
        f"{words}: {x.mean:.6g} ({x.low:.6g} to {x.high:.6g})" for words, x in cell.conditions
    )
    line |= {
        "best": cell.is_best,
        "worse_than_best": bool(cell.is_worse),
        "order_sensitivity": cell.sensitivity and cell.sensitivity.mean,
        "left_out": cell.left_out,
        "majority": cell.majority,
        "expected": cell.expected,
        "marks": "; ".join(cell.marks),
        "decide": entry.rule,
        "reads": "; ".join(entry.reads),
    }
    return line | costs.as_numbers(costs.cost(entry, column))


def as_markdown(board: Board) -> str:
    """The board as Markdown: its sentences, and a table of means with their intervals."""
    head, *rows = _texts(board, _markdown)
    rule = ["---", "---", *("---:" for _ in board.columns)]
    table = [f"| {' | '.join(row)} |" for row in (head, rule, *rows)]
    sentences = [*map(_markdown, board.summary), ""] if board.summary else []
    return "\n".join([*sentences, *table, "", _note(board, _markdown), ""])


def _markdown(text: str) -> str:
    return re.sub(r"([\\|`*_<>\[\]&~$])", r"\\\1", shown(text))


def as_tex(board: Board) -> str:
    """The same table in LaTeX, for the package booktabs."""
    head, *rows = _texts(board, _tex)
    table = pd.DataFrame(rows, columns=head)
    columns = "ll" + "r" * len(board.columns)
    return f"% {_note(board, _tex)}\n{table.to_latex(index=False, column_format=columns)}"


def _tex(text: str) -> str:
    return "".join(_TEX.get(character, character) for character in shown(text))


def _texts(board: Board, escaped: Callable[[str], str]) -> list[list[str]]:
    """The head and the rows of a table of means with their intervals."""
    table = [["checkpoint", "method", *(column.name for column in board.columns)]]
    for entry in board.entries:
        cells = [numbers.short(entry.cells.get(column.name), column) for column in board.columns]
        table.append([entry.on, entry.label, *cells])
    return [list(map(escaped, row)) for row in table]


def _note(board: Board, escaped: Callable[[str], str]) -> str:
    """What the numbers of the table are."""
    words = [escaped(word) for word in board.common]
    words += filter(None, [escaped(numbers.units(board))])
    words.append("mean with the 95% interval, ± half or [both ends].")
    if board.baseline:
        words[-1] += " † is a difference to the baseline that holds with all pairs of rows of a"
        words[-1] += " column (95%)."
    text = ", ".join(words)
    return text[0].upper() + text[1:]


def overview(board: Board, most: int) -> Table:
    """The first column of a board, for the terminal: the best entries of each decision rule.

    The title has words that hold for all entries, and the last line the score of always one answer.
    """
    column = board.columns[0]
    checkpoints = {entry.on for entry in board.entries}
    several = len(checkpoints) > 1
    common = board.common if several else (*checkpoints, *board.common)
    in_column = [entry for entry in board.entries if column.name in entry.cells]
    sections = grouped(in_column, lambda entry: entry.rule)
    title = shown(column.name) + (f" ({', '.join(map(shown, common))})" if common else "")
    names = ["checkpoint", "method"] if several else ["method"]
    by_head = {entry.name: board.differences(entry, column) for entry in in_column}
    heads: dict[str, None] = {}
    for differences in by_head.values():
        heads |= dict.fromkeys(differences)
    compared = list(heads)[:_COMPARED]
    wrapped = [shown(head).replace("=", "=\n") for head in compared]
    table = titled(title, names, ["mean", "its own\n95%", *wrapped])
    for rule, entries in sections.items():
        if len(sections) > 1:
            name = rule_in_words(rule)
            if "transductive" in entries[0].reads:
                name += " (transductive)"
            table.add_row(f"[bold]{escape(name)}[/]", style="dim")
        for entry in entries[:most]:
            cell = entry.cells[column.name]
            label = replace(entry, rule=None).label
            mean = numbers.value(cell.estimate.mean, column, unit=True)
            row = [
                f"[bold]{mean}" if cell.is_best else mean,
                numbers.interval(cell.estimate, column, unit=True),
            ]
            differences = by_head[entry.name]
            row += [_compared(differences.get(head), column) for head in compared]
            labels = [entry.on, label] if several else [label]
            table.add_row(*map(escape, labels), *row)
    if (majority := board.majority(column)) is not None:
        labels = ["", "always the most frequent answer"] if several else ["always one answer"]
        table.add_row(*labels, numbers.value(majority, column, unit=True), style="dim")
    if compared:
        of = family(in_column[0].cells[column.name].comparisons)
        unit = " in points" if column.percent else ""
        table.caption = f"Differences{unit}, with intervals that hold in 95% for {of} together."
    return table


def _compared(difference: Difference | None, column: Column) -> str:
    """A difference with its sign and, below it, its interval."""
    if difference is None:
        return ""
    sign = numbers.SIGNS.get(column.judged(difference), "")
    text = f"{numbers.signed(difference.mean, column)} {sign}".strip()
    return f"{text}\n[dim]{numbers.interval(difference, column, sign=True)}[/]"


def comparison(
    first: Entry,
    second: Entry,
    columns: Sequence[Column],
    differences: Mapping[str, Difference],
    title: str,
) -> Table:
    """For each column, both means, and their difference with its interval and p-value."""
    table = titled(title, ["column"], ["A", "B", "A - B", "95% interval", "p", "documents\nx sets"])
    for column in columns:
        difference = differences[column.name]
        means = [entry.cells[column.name].estimate.mean for entry in (first, second)]
        table.add_row(
            escape(shown(column.name)),
            *(numbers.value(mean, column, unit=True) for mean in means),
            numbers.signed(difference.mean, column),
            numbers.interval(difference, column, sign=True),
            numbers.p_value(difference.p),
            f"{difference.documents} x {difference.sets}",
        )
    return table


def cost_table(board: Board, most: int) -> Table:
    """The cost of the first entries in the first column, for the terminal."""
    column = board.columns[0]
    title = f"Cost, {shown(column.name)}"
    part = titled(title, ["entry"], [column.metric, *costs.HEADINGS])
    for entry in board.entries[:most]:
        entry_cost = costs.cost(entry, column)
        if entry_cost is None:
            continue
        mean = numbers.value(entry.cells[column.name].estimate.mean, column, unit=True)
        part.add_row(escape(entry.label), mean, *costs.texts(entry_cost))
    return part


def titled(title: str, names: Sequence[str], number_names: Sequence[str]) -> Table:
    table = Table(
        title=f"\n{escape(title)}",
        title_justify="left",
        title_style="bold",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )
    for name in names:
        table.add_column(name, overflow="fold")
    for name in number_names:
        table.add_column(name, justify="right", no_wrap=True)
    return table
