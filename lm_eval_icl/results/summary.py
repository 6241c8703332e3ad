"""The sentences at the top of a board: what is best, and what cannot be told apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from lm_eval_icl.results import statistics
from lm_eval_icl.results.board import Column, Entry, Pairs
from lm_eval_icl.results.entries import grouped, shown

_COLUMNS = 4  # of which the highest values are said
Words = Callable[[Entry], str]


def summarize(
    entries: Sequence[Entry],
    columns: Sequence[Column],
    pairs: Pairs,
    baselines: Mapping[str, str],
    baseline: str | None,
) -> tuple[str, ...]:
    """What is best in the first column, and in the others if it is not about them; and which entries have collapsed.

    Transductive entries are not ranked with the others: where there are others, these sentences are about them, and one
    is about the best that is transductive.

    Args:
        entries: the best first.
        baselines: as of the `Board`.
        baseline: as `build` was given it.
    """
    checkpoints, conditions = {entry.on for entry in entries}, {entry.conditions for entry in entries}

    def full(entry: Entry) -> str:
        """The entry in words: with its checkpoint and conditions, if there are several."""
        label = entry.label if len(conditions) > 1 else " ".join(filter(None, [entry.method, entry.arguments]))
        return f"{label} on {entry.on}" if len(checkpoints) > 1 else label

    first, *others = columns
    sentences = [_highest(entries, first, full), *_beside_the_best(entries, first, pairs, full)]
    in_first = [entry for entry in entries if first.name in entry.cells]
    if best := [entry for entry in in_first if entry.is_transductive and entry not in _ranked(entries, first)][:1]:
        highest = "highest" if first.higher_is_better else "lowest"
        value = _number(best[0].cells[first.name].estimate.mean, first)
        sentences.append(
            f"The {highest} value of a transductive entry, whose decisions depend on the other documents, is {value}: "
            f"{full(best[0])}."
        )
    sentences += _against_baselines(entries, first, baselines, baseline, full)
    others = [column for column in others if not column.weights.keys() <= first.weights.keys()]
    sentences += [_highest(entries, column, full) for column in others[: _COLUMNS - 1]]
    if (rest := len(others) - (_COLUMNS - 1)) > 0:
        sentences.append(f"{rest} more {'columns are' if rest > 1 else 'column is'} not spoken of here.")
    collapsed = []
    for entry in entries:
        cells = ((column, entry.cells.get(column.name)) for column in columns if column.kind == "task")
        if tasks := [shown(column.name) for column, cell in cells if cell is not None and "collapsed" in cell.marks]:
            collapsed.append(f"{full(entry)} (on {_list(tasks)})")
    if collapsed:
        have = "has" if len(collapsed) == 1 else "have"
        sentences.append(f"{_list(collapsed)} {have} collapsed: one answer is given to 95% of the documents or more.")
    return tuple(sentences)


def _ranked(entries: Sequence[Entry], column: Column) -> list[Entry]:
    """The entries of a column without those that are transductive, if it has others."""
    of_column = [entry for entry in entries if column.name in entry.cells]
    return [entry for entry in of_column if not entry.is_transductive] or of_column


def _highest(entries: Sequence[Entry], column: Column, full: Words) -> str:
    """The best value of a column and all entries that have it, beside the score of always giving one answer."""
    cells = {entry: entry.cells[column.name] for entry in _ranked(entries, column)}
    best = max(cells, key=lambda entry: column.sign * cells[entry].estimate.mean)
    estimate, majority = cells[best].estimate, cells[best].majority
    ties = [entry for entry in cells if math.isclose(cells[entry].estimate.mean, estimate.mean, abs_tol=1e-12)]
    average = f"On average over {len(column.weights)} tasks"
    where = average if column.kind == "average" else f"On {shown(column.name)}"
    highest = "highest" if column.higher_is_better else "lowest"
    sentence = f"{where}, the {highest} value is {_number(estimate.mean, column)}"
    if len(ties) > 1:
        sentence += f", that of {len(ties)} entries: {_list(map(full, ties))}"
    else:
        sentence += f": {best.label} on {best.on}"
        if estimate.low < estimate.high and math.isfinite(estimate.error):
            sentence += f" (95% interval {_number(estimate.low, column)} to {_number(estimate.high, column)})"
    if majority is None:
        return f"{sentence}."
    return f"{sentence}. Always giving the most frequent right answer would have {_number(majority, column)}."


def _beside_the_best(entries: Sequence[Entry], column: Column, pairs: Pairs, full: Words) -> list[str]:
    """How the others compare with the first entry of a column."""
    best, *others = _ranked(entries, column)
    names = {best.name, *(entry.name for entry in others)}
    # Holm's adjustment is over all pairs, as that of the ranks.
    differences = {
        pair: of_pair[column.name]
        for pair, of_pair in pairs.items()
        if column.name in of_pair and names.issuperset(pair)
    }
    p_values = [difference.p for difference in differences.values()]
    adjusted = dict(zip(differences, statistics.holm(p_values), strict=True))

    def verdict(entry: Entry) -> str:
        pair = best.name, entry.name
        return column.judged(-differences[pair].mean, adjusted[pair]) if pair in differences else "unpaired"

    by_verdict = grouped(others, verdict)
    sentences = []
    if tied := by_verdict.get("same"):
        sentences.append(f"It cannot be told apart from {_list(map(full, tied))}.")
    if better := by_verdict.get("better"):
        are = "are" if len(better) > 1 else "is"
        sentences.append(f"On the prompts that both were asked, {_list(map(full, better))} {are} significantly better.")
    if worse := len(by_verdict.get("worse", ())):
        sentences.append(f"{_entries(worse)} {'are' if worse > 1 else 'is'} significantly worse.")
    if unpaired := len(by_verdict.get("unpaired", ())):
        were = "were" if unpaired > 1 else "was"
        sentences.append(
            f"{_entries(unpaired)} {were} not asked the same, or came without samples, and cannot be compared with it."
        )
    return sentences


def _against_baselines(
    entries: Sequence[Entry], column: Column, baselines: Mapping[str, str], baseline: str | None, full: Words
) -> list[str]:
    """How the entries of a column compare with their baselines: methods with that of their checkpoint, and decision
    rules with the values of the same runs without them."""
    compared = [entry for entry in entries if column.name in entry.cells and entry.cells[column.name].difference]
    if not compared:
        return []
    adjusted = ", adjusted for all entries by Holm's method" if len(compared) > 1 else ""

    def verdict(entry: Entry) -> str:
        cell = entry.cells[column.name]
        return column.judged(cell.difference.mean, cell.p_holm) if cell.difference else "same"

    def sentence(against: str, of_kind: Sequence[Entry]) -> str:
        by_verdict = grouped(of_kind, verdict)
        parts = [
            f"{_list(map(full, by_verdict[kind]))} {'are' if len(by_verdict[kind]) > 1 else 'is'} {kind}"
            for kind in ("better", "worse")
            if kind in by_verdict
        ]
        if same := by_verdict.get("same"):
            parts.append(f"{_entries(len(same))} cannot be told apart from it")
        return f"Against {against}, {_list(parts)} (5%{adjusted})."

    by_method = baseline is None or any(entry.method == baseline for entry in entries)
    of_rules = [entry for entry in compared if by_method and entry.rule is not None]
    others = [entry for entry in compared if entry not in of_rules]
    sentences = []
    if others:
        names = {baselines[entry.name] for entry in others}
        of_first = next(entry for entry in entries if entry.name in names)
        sentences.append(sentence(f"{of_first.method} on the same checkpoint" if by_method else full(of_first), others))
    if of_rules:
        sentences.append(sentence("the same runs without a decision rule", of_rules))
    return sentences


def _entries(number: int) -> str:
    return f"{number} {'entries' if number > 1 else 'entry'}"


def _number(value: float, column: Column) -> str:
    return f"{100 * value:.1f}%" if column.percent else f"{value:.4g}"


def _list(parts: Iterable[str]) -> str:
    """Words joined by commas and an "and", or by semicolons if a word has a comma. Of more than four, the first three
    stand, and how many more there are."""
    words = list(parts)
    comma = ";" if any("," in word for word in words) else ","
    if len(words) > 4:
        words = [*words[:3], f"{len(words) - 3} more"]
    *before, last = words
    return f"{f'{comma} '.join(before)}{';' if comma == ';' else ''} and {last}" if before else last
