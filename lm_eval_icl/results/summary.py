"""The sentences at the top of a board: what is best, and what cannot be told apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from lm_eval_icl.results.board import Column, Entry, Pairs, grouped, shown

_COLUMNS = 4  # of which the highest values are said
Words = Callable[[Entry], str]


def summarize(
    entries: Sequence[Entry], columns: Sequence[Column], pairs: Pairs, baselines: Mapping[str, str]
) -> tuple[str, ...]:
    """What is best in the first column, of what the models themselves say and under each decision rule; how that
    compares with the baseline and with all others; and the highest values of the other columns.

    Each sentence on differences says to what they are, and over how many comparisons p is adjusted (Holm).

    Args:
        entries: the best first.
        baselines: as of the `Board`.
    """
    checkpoints = {entry.on for entry in entries}
    several_rules = len({entry.rule for entry in entries}) > 1

    def full(entry: Entry) -> str:
        """The entry in words, without its rule: the sentence has that; with its checkpoint, if there are several."""
        label = " ".join(filter(None, [entry.method, entry.arguments]))
        label = ", ".join(filter(None, [label, entry.conditions]))
        return f"{label} on {entry.on}" if len(checkpoints) > 1 else label

    first, *others = columns
    sentences: list[str] = []
    for rule, of_rule in grouped(entries, lambda entry: entry.rule).items():
        in_first = [entry for entry in of_rule if first.name in entry.cells]
        if not in_first:
            continue
        words = "" if not several_rules else "as the models say" if rule is None else f"under the rule {rule}"
        of_baseline = _against_baseline(in_first, first, baselines, entries, full)
        told = set(baselines.values()) if of_baseline else set()
        parts = [_highest(in_first, first, full, words, constant=not sentences), of_baseline]
        parts.append(_all_pairs(in_first, first, pairs, told, full))
        parts.append(_against_raw(in_first, first, full))
        sentences.append(" ".join(filter(None, parts)))
    others = [column for column in others if not column.weights.keys() <= first.weights.keys()]
    for column in others[: _COLUMNS - 1]:
        of_column = [entry for entry in entries if column.name in entry.cells and entry.rule is None]
        sentences += [_highest(of_column, column, full, "", constant=True)] if of_column else []
    if (rest := len(others) - (_COLUMNS - 1)) > 0:
        sentences.append(f"{rest} more {'columns are' if rest > 1 else 'column is'} not spoken of here.")
    collapsed = []
    for entry in entries:
        cells = ((column, entry.cells.get(column.name)) for column in columns if column.kind == "task")
        if tasks := [shown(column.name) for column, cell in cells if cell is not None and "collapsed" in cell.marks]:
            rule = f" under {entry.rule}" if entry.rule is not None else ""
            collapsed.append(f"{full(entry)}{rule} (on {_list(tasks)})")
    if collapsed:
        have = "has" if len(collapsed) == 1 else "have"
        sentences.append(f"{_list(collapsed)} {have} collapsed: one answer is given to 95% of the documents or more.")
    return tuple(sentences)


def _highest(entries: Sequence[Entry], column: Column, full: Words, words: str, constant: bool) -> str:
    """The best value of a column and all that have it; with `constant`, the score of always giving one answer."""
    cells = {entry: entry.cells[column.name] for entry in entries}
    best = max(cells, key=lambda entry: column.sign * cells[entry].estimate.mean)
    estimate, majority = cells[best].estimate, cells[best].majority
    ties = [entry for entry in cells if math.isclose(cells[entry].estimate.mean, estimate.mean, abs_tol=1e-12)]
    where = f"on average over {len(column.weights)} tasks" if column.kind == "average" else f"on {shown(column.name)}"
    where = ", ".join(filter(None, [words, where]))
    highest = "highest" if column.higher_is_better else "lowest"
    sentence = f"{where[0].upper()}{where[1:]}, the {highest} value is {_number(estimate.mean, column)}"
    if len(ties) > 1:
        sentence += f", that of {len(ties)} entries: {_list(map(full, ties))}"
    else:
        sentence += f": {full(best)}"
        if estimate.low < estimate.high and math.isfinite(estimate.error):
            sentence += f" (95% interval {_number(estimate.low, column)} to {_number(estimate.high, column)})"
    if majority is None or not constant:
        return f"{sentence}."
    return f"{sentence}. Always giving the most frequent right answer would have {_number(majority, column)}."


def _verdicts(entries: Sequence[Entry], column: Column, name: str, p_name: str, words: Words) -> str:
    """Which entries are better or worse, by the difference and the p-value of these names; the others by name alone."""

    def verdict(entry: Entry) -> str:
        cell = entry.cells[column.name]
        return column.judged(getattr(cell, name).mean, getattr(cell, p_name))

    def with_difference(entry: Entry) -> str:
        mean = getattr(entry.cells[column.name], name).mean
        return f"{words(entry)} ({f'{100 * mean:+.1f} points' if column.percent else f'{mean:+.3g}'})"

    by_verdict = grouped(entries, verdict)
    if list(by_verdict) == ["same"] and len(entries) > 1:
        return f"no difference was found for any of {len(entries)}"
    parts = [f"{of} {_list(map(with_difference, by_verdict[of]))}" for of in ("better", "worse") if of in by_verdict]
    parts += [f"no difference was found for {_list(map(words, by_verdict['same']))}"] if "same" in by_verdict else []
    return "; ".join(parts)


def _against_baseline(
    entries: Sequence[Entry], column: Column, baselines: Mapping[str, str], every: Sequence[Entry], full: Words
) -> str:
    """How the entries of a column, under one rule, compare with their baseline; "" if none is."""
    compared = [entry for entry in entries if entry.cells[column.name].difference is not None]
    if not compared:
        return ""
    bases = {baselines[entry.name] for entry in compared}
    base = next(entry for entry in every if entry.name in bases)
    name = full(base) if len(bases) == 1 else f"{base.method} on the same checkpoint and prompts"
    in_all = sum(e.cells[column.name].difference is not None for e in every if column.name in e.cells)
    adjusted = f", p adjusted for {in_all} comparisons" if in_all > 1 else ""
    return f"Compared with {name} (5%{adjusted}): {_verdicts(compared, column, 'difference', 'p_holm', full)}."


def _all_pairs(entries: Sequence[Entry], column: Column, pairs: Pairs, told: set[str], full: Words) -> str:
    """Which others are significantly worse than another, of all pairs of a column's entries under one rule; but those
    that were spoken of. "" if none is, or none was asked the same."""
    worse = [entry for entry in entries if entry.cells[column.name].is_worse and entry.name not in told]
    if len(entries) < 3 or not worse:
        return ""
    names = {entry.name for entry in entries}
    number = sum(column.name in of_pair and names.issuperset(pair) for pair, of_pair in pairs.items())
    return f"Of all {number} pairs (5%, p adjusted), significantly worse than another: {_list(map(full, worse))}."


def _against_raw(entries: Sequence[Entry], column: Column, full: Words) -> str:
    """How the entries under a rule compare with the same runs without it; "" for what the models say themselves."""
    compared = [entry for entry in entries if entry.cells[column.name].to_raw is not None]
    if not compared:
        return ""
    verdicts = _verdicts(compared, column, "to_raw", "p_raw", full)
    return f"Compared with the same runs without the rule (5%, p adjusted over the column): {verdicts}."


def _number(value: float, column: Column) -> str:
    return f"{100 * value:.1f}%" if column.percent else f"{value:.4g}"


def _list(parts: Iterable[str]) -> str:
    """Words joined by commas and an "and", or by semicolons if a word has a comma. Of more than six, the first five
    stand, and how many more there are."""
    words = list(parts)
    comma = ";" if any("," in word for word in words) else ","
    if len(words) > 6:
        words = [*words[:5], f"{len(words) - 5} more"]
    *before, last = words
    return f"{f'{comma} '.join(before)}{';' if comma == ';' else ''} and {last}" if before else last
