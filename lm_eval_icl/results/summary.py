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
    sentences = []
    for rule, of_rule in grouped(entries, lambda entry: entry.rule).items():
        in_first = [entry for entry in of_rule if first.name in entry.cells]
        if not in_first:
            continue
        words = "" if not several_rules else "as the models say" if rule is None else f"under the rule {rule}"
        sentences.append(_highest(in_first, first, full, words))
        of_baseline = _against_baseline(in_first, first, baselines, entries, full)
        sentences += [of_baseline] if of_baseline else []
        told = set(baselines.values()) if of_baseline else set()
        sentences += _all_pairs(in_first, first, pairs, told, full)
    sentences += _against_raw(entries, first, full)
    others = [column for column in others if not column.weights.keys() <= first.weights.keys()]
    for column in others[: _COLUMNS - 1]:
        of_column = [entry for entry in entries if column.name in entry.cells and entry.rule is None]
        sentences += [_highest(of_column, column, full, "")] if of_column else []
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


def _highest(entries: Sequence[Entry], column: Column, full: Words, words: str) -> str:
    """The best value of a column and all entries that have it, beside the score of always giving one answer."""
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
    if majority is None:
        return f"{sentence}."
    return f"{sentence}. Always giving the most frequent right answer would have {_number(majority, column)}."


def _verdicts(entries: Sequence[Entry], verdict: Callable[[Entry], str], words: Words) -> list[str]:
    """By verdict, which entries."""
    by_verdict = grouped(entries, verdict)
    phrases = {"better": "better", "worse": "worse", "same": "no difference found"}
    return [
        f"{phrase}: {_list(map(words, by_verdict[kind]))}" for kind, phrase in phrases.items() if kind in by_verdict
    ]


def _against_baseline(
    entries: Sequence[Entry], column: Column, baselines: Mapping[str, str], every: Sequence[Entry], full: Words
) -> str:
    """How the entries of a column, under one rule, compare with their baseline; "" if none is."""
    compared = [entry for entry in entries if entry.cells[column.name].difference is not None]
    if not compared:
        return ""
    bases = {baselines[entry.name] for entry in compared}
    base = next(entry for entry in every if entry.name in bases)
    name = full(base) if len(bases) == 1 else f"{base.method} on the same checkpoint"
    in_all = sum(e.cells[column.name].difference is not None for e in every if column.name in e.cells)

    def verdict(entry: Entry) -> str:
        cell = entry.cells[column.name]
        return column.judged(cell.difference.mean, cell.p_holm) if cell.difference else "same"

    parts = _verdicts(
        compared, verdict, lambda entry: f"{full(entry)} ({_signed(entry.cells[column.name].difference, column)})"
    )
    adjusted = f"; p adjusted for {in_all} comparisons" if in_all > 1 else ""
    return f"Compared with {name} (paired, 5%{adjusted}): {'; '.join(parts)}."


def _all_pairs(entries: Sequence[Entry], column: Column, pairs: Pairs, told: set[str], full: Words) -> list[str]:
    """How the others compare with the best entry of a column under one rule, but those that were spoken of."""
    best, *others = entries
    if len(others) < 2 or best.cells[column.name].rank is None:
        return []
    names = {entry.name for entry in entries}
    number = sum(column.name in of_pair and names.issuperset(pair) for pair, of_pair in pairs.items())
    rest = [entry for entry in others if entry.name not in told]
    from_best = grouped(rest, lambda e: "unpaired" if (best.name, e.name) not in pairs
                        else "tied" if not e.cells[column.name].is_worse else "worse")  # fmt: skip
    phrases = {
        "tied": "not significantly worse",
        "worse": "significantly worse than another",
        "unpaired": "not asked the same",
    }
    parts = [f"{phrase}: {_list(map(full, from_best[kind]))}" for kind, phrase in phrases.items() if kind in from_best]
    if not parts:
        return []
    return [f"Compared with all others (p adjusted for {number} pairs), beside {full(best)}, {'; '.join(parts)}."]


def _against_raw(entries: Sequence[Entry], column: Column, full: Words) -> list[str]:
    """How the entries under rules compare with the same runs without the rule."""
    compared = [e for e in entries if column.name in e.cells and e.cells[column.name].to_raw is not None]
    sentences = []
    for rule, of_rule in grouped(compared, lambda entry: entry.rule).items():

        def verdict(entry: Entry) -> str:
            cell = entry.cells[column.name]
            return column.judged(cell.to_raw.mean, cell.p_raw) if cell.to_raw else "same"

        parts = _verdicts(of_rule, verdict, lambda e: f"{full(e)} ({_signed(e.cells[column.name].to_raw, column)})")
        adjusted = f"; p adjusted for {len(compared)} comparisons" if len(compared) > 1 else ""
        sentences.append(f"{rule}, compared with the same runs without a rule (5%{adjusted}): {'; '.join(parts)}.")
    return sentences


def _signed(difference: object, column: Column) -> str:
    mean = getattr(difference, "mean", 0.0)
    return f"{100 * mean:+.1f} points" if column.percent else f"{mean:+.3g}"


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
