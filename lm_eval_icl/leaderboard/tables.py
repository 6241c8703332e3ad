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
from lm_eval_icl.leaderboard.drawn import WHO, Numbers, ends_of, facts_of
from lm_eval_icl.results.board import Board, Column, Entry, grouped, rule_in_words, shown
from lm_eval_icl.results.statistics import Difference
from lm_eval_icl.results.summary import family

_COMPARED = 2  # the most columns of differences in the terminal
_TEX = str.maketrans(
    {
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
)


def csv_text(rows: Iterable[Mapping[str, object]]) -> str:
    """Rows as CSV. Numbers that are not finite are empty."""
    table = pd.DataFrame(list(rows), dtype=object)
    table = table.replace([math.inf, -math.inf], math.nan).map(_plain)
    return str(table.to_csv(index=False, lineterminator="\n"))


def _plain(value: object) -> object:
    """A text that a spreadsheet would take for a formula begins with a quotation mark."""
    if isinstance(value, str) and value.lstrip().startswith(("=", "+", "-", "@")):
        return f"'{value}"
    return value


def as_csv(board: Board) -> str:
    """The board as CSV, with a line for each entry and column. Numbers are not rounded."""
    lines = []
    for entry in board.entries:
        for column in board.columns:
            if column.name in entry.cells:
                lines.append(_all_numbers(board, entry, column))
    return csv_text(lines)


def _all_numbers(board: Board, entry: Entry, column: Column) -> Numbers:
    cell = entry.cells[column.name]
    estimate = cell.estimate
    line: Numbers = {"entry": entry.name, **facts_of(entry, WHO)}
    line |= {"column": column.name, "kind": column.kind, "metric": column.metric}
    line |= ends_of(estimate, "value")
    line["standard_error"] = estimate.error
    line |= facts_of(estimate, ("documents", "sets", "error_documents", "error_sets"))
    line["interval"] = estimate.scope
    line["baseline"] = board.baseline.get(entry.name)
    for name in ("difference", "to_raw", "to_majority"):
        difference = getattr(cell, name)
        line[name] = difference and difference.mean
        for part in ("low", "high", "p"):
            line[f"{name}_{part}"] = difference and getattr(difference, part)
    line["comparisons"] = cell.comparisons
    line["compared_over"] = cell.difference and cell.difference.scope
    conditions = []
    for words, x in cell.conditions:
        conditions.append(f"{words}: {x.mean:.6g} ({x.low:.6g} to {x.high:.6g})")
    line["to_conditions"] = "; ".join(conditions)
    line["best"] = cell.is_best
    line["worse_than_best"] = bool(cell.is_worse)
    line["order_sensitivity"] = cell.sensitivity and cell.sensitivity.mean
    line |= facts_of(cell, ("left_out", "majority", "expected"))
    line["marks"] = "; ".join(cell.marks)
    line["decide"] = entry.rule
    line["reads"] = "; ".join(entry.reads)
    return line | facts_of(costs.cost(entry, column), costs.NAMES)


def as_markdown(board: Board) -> str:
    """The board as Markdown: its sentences, and a table of means with their intervals."""
    head, *rows = _texts(board, _markdown)
    rule = ["---", "---", *("---:" for _ in board.columns)]
    lines = list(map(_markdown, board.summary))
    if lines:
        lines.append("")
    for row in (head, rule, *rows):
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join([*lines, "", _note(board, _markdown), ""])


def _markdown(text: str) -> str:
    return re.sub(r"([\\|`*_<>\[\]&~$])", r"\\\1", shown(text))


def as_tex(board: Board) -> str:
    """The same table in LaTeX, for the package booktabs."""
    head, *rows = _texts(board, _tex)
    table = pd.DataFrame(rows, columns=head)
    columns = "ll" + "r" * len(board.columns)
    text = table.to_latex(index=False, column_format=columns)
    return f"% {_note(board, _tex)}\n{text}"


def _tex(text: str) -> str:
    return shown(text).translate(_TEX)


def _texts(board: Board, escaped: Callable[[str], str]) -> list[list[str]]:
    """The head and the rows of a table of means with their intervals."""
    names = [column.name for column in board.columns]
    table = [["checkpoint", "method", *names]]
    for entry in board.entries:
        row = [entry.on, entry.label]
        for column in board.columns:
            row.append(numbers.short(entry.cells.get(column.name), column))
        table.append(row)
    return [list(map(escaped, row)) for row in table]


def _note(board: Board, escaped: Callable[[str], str]) -> str:
    """What the numbers of the table are."""
    words = [*board.common, numbers.units(board)]
    escaped_words = [escaped(word) for word in words if word]
    text = ", ".join([*escaped_words, "mean with the 95% interval, ± half or [both ends]."])
    if board.baseline:
        text += " † is a difference to the baseline that holds with all pairs of rows of a"
        text += " column (95%)."
    return text[0].upper() + text[1:]


def overview(board: Board, most: int) -> Table:
    """The first column of a board, for the terminal: the best entries of each decision rule.

    The title has words that hold for all entries, and the last line the score of always one answer.
    """
    column = board.columns[0]
    checkpoints = {entry.on for entry in board.entries}
    several = len(checkpoints) > 1
    names = ["method"]
    common = list(board.common)
    if several:
        names.insert(0, "checkpoint")
    else:
        common.insert(0, *checkpoints)
    title = shown(column.name)
    if common:
        title += f" ({', '.join(map(shown, common))})"
    in_column = board.entries_on(column)
    sections = grouped(in_column, lambda entry: entry.rule)
    heads: dict[str, Difference] = {}
    for entry in in_column:
        heads |= board.differences(entry, column)
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
            row = [escape(entry.on)] if several else []
            row.append(escape(replace(entry, rule=None).label))
            mean = numbers.value(cell.estimate.mean, column, unit=True)
            row.append(f"[bold]{mean}" if cell.is_best else mean)
            row.append(numbers.interval(cell.estimate, column, unit=True))
            differences = board.differences(entry, column)
            for head in compared:
                row.append(_compared(differences.get(head), column))
            table.add_row(*row)
    majority = board.majority(column)
    if majority is not None:
        labels = ["", "always the most frequent answer"] if several else ["always one answer"]
        table.add_row(*labels, numbers.value(majority, column, unit=True), style="dim")
    if compared:
        first_cell = in_column[0].cells[column.name]
        of = family(first_cell.comparisons)
        unit = " in points" if column.percent else ""
        table.caption = f"Differences{unit}, with 95% intervals that hold together for {of}."
    return table


def _compared(difference: Difference | None, column: Column) -> str:
    """A difference with its sign and, below it, its interval."""
    if difference is None:
        return ""
    text = numbers.judged(difference, column).strip()
    interval = numbers.interval(difference, column, sign=True)
    return f"{text}\n[dim]{interval}[/]"


def comparison(
    first: Entry,
    second: Entry,
    columns: Sequence[Column],
    differences: Mapping[str, Difference],
    title: str,
) -> Table:
    """For each column, both means, and their difference with its interval and p-value."""
    heads = ["A", "B", "A - B", "95% interval", "p", "documents\nx sets"]
    table = titled(title, ["column"], heads)
    for column in columns:
        row = [escape(shown(column.name))]
        for entry in (first, second):
            mean = entry.cells[column.name].estimate.mean
            row.append(numbers.value(mean, column, unit=True))
        difference = differences[column.name]
        row.append(numbers.signed(difference.mean, column))
        row.append(numbers.interval(difference, column, sign=True))
        row.append(numbers.p_value(difference.p))
        row.append(f"{difference.documents} x {difference.sets}")
        table.add_row(*row)
    return table


def cost_table(board: Board, most: int) -> Table:
    """The cost of the first entries in the first column, for the terminal."""
    column = board.columns[0]
    title = f"Cost, {shown(column.name)}"
    table = titled(title, ["entry"], [column.metric, *costs.HEADINGS])
    several = len({entry.on for entry in board.entries}) > 1
    for entry in board.entries[:most]:
        entry_cost = costs.cost(entry, column)
        if entry_cost is not None:
            estimate = entry.cells[column.name].estimate
            mean = numbers.value(estimate.mean, column, unit=True)
            name = f"{entry.label} on {entry.on}" if several else entry.label
            table.add_row(escape(name), mean, *costs.texts(entry_cost))
    return table


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
