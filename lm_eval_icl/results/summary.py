"""The sentences at the top of a board: what is best, and what cannot be told apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from lm_eval_icl.results import entries, statistics
from lm_eval_icl.results.board import SIGNIFICANT, Column, Entry, Pairs

_COLUMNS = 4  # of which the highest values are said


def summarize(
    found: Sequence[Entry],
    columns: Sequence[Column],
    pairs: Pairs,
    baselines: Mapping[str, str],
    baseline: str | None,
) -> tuple[str, ...]:
    """What is best in the first column, and in the others if it is not about them; and which entries have collapsed."""
    column = columns[0]
    there = [entry for entry in found if column.name in entry.cells]
    best, *others = there
    full = _full(found)
    sentences = [_highest(there, column, full)]
    # Holm's adjustment is over all pairs, as that of the ranks.
    of_pairs = {pair: of[column.name] for pair, of in pairs.items() if column.name in of}
    adjusted = dict(zip(of_pairs, statistics.holm([of.p for of in of_pairs.values()]), strict=True))
    compared = [entry for entry in others if (best.name, entry.name) in of_pairs]
    apart = [entry for entry in compared if adjusted[best.name, entry.name] <= SIGNIFICANT]
    is_better = {entry.name: (of_pairs[best.name, entry.name].mean < 0) == column.higher_is_better for entry in apart}
    if tied := [entry for entry in compared if entry not in apart]:
        sentences.append(f"It cannot be told apart from {_list(map(full, tied))}.")
    if better := [entry for entry in apart if is_better[entry.name]]:
        verb = "are" if len(better) > 1 else "is"
        sentences.append(
            f"On the prompts that both were asked, {_list(map(full, better))} {verb} significantly better."
        )
    if worse := len(apart) - len(better):
        sentences.append(f"{_entries(worse)} {'are' if worse > 1 else 'is'} significantly worse.")
    if unpaired := len(others) - len(compared):
        were = "were" if unpaired > 1 else "was"
        sentences.append(
            f"{_entries(unpaired)} {were} not asked the same, or came without samples, and cannot be compared with it."
        )
    sentences += _against_baselines(found, column, baselines, baseline, full)
    apart_from_it = [each for each in columns[1:] if not each.weights.keys() <= column.weights.keys()]
    for other in apart_from_it[: _COLUMNS - 1]:
        sentences.append(_highest([entry for entry in found if other.name in entry.cells], other, full))
    if (rest := len(apart_from_it) - (_COLUMNS - 1)) > 0:
        sentences.append(f"{rest} more {'columns are' if rest > 1 else 'column is'} not spoken of here.")
    return (*sentences, *_collapsed(found, columns, full))


def _highest(found: Sequence[Entry], column: Column, full: Callable[[Entry], str]) -> str:
    """The best value of a column and all entries that have it, beside the score of always giving one answer."""
    sign = 1 if column.higher_is_better else -1
    best = max(found, key=lambda entry: sign * entry.cells[column.name].estimate.mean)
    cell = best.cells[column.name]
    estimate = cell.estimate
    ties = [e for e in found if math.isclose(e.cells[column.name].estimate.mean, estimate.mean, abs_tol=1e-12)]
    where = (
        f"On average over {len(column.weights)} tasks"
        if column.kind == "average"
        else f"On {entries.shown(column.name)}"
    )
    said = (
        f"{where}, the {'highest' if column.higher_is_better else 'lowest'} value is {_number(estimate.mean, column)}"
    )
    if len(ties) > 1:
        said += f", that of {len(ties)} entries: {_list(map(full, ties))}"
    else:
        said += f": {best.label} on {best.on}"
        if estimate.low < estimate.high and math.isfinite(estimate.error):
            said += f" (95% interval {_number(estimate.low, column)} to {_number(estimate.high, column)})"
    if cell.majority is None:
        return f"{said}."
    return f"{said}. Always giving the most frequent right answer would have {_number(cell.majority, column)}."


def _collapsed(found: Sequence[Entry], columns: Sequence[Column], full: Callable[[Entry], str]) -> list[str]:
    """Which entries give one answer to nearly all documents of a task."""
    tasks = {
        entry: [
            entries.shown(column.name)
            for column in columns
            if column.kind == "task" and column.name in entry.cells and "collapsed" in entry.cells[column.name].marks
        ]
        for entry in found
    }
    said = [f"{full(entry)} (on {_list(of)})" for entry, of in tasks.items() if of]
    if not said:
        return []
    have = "has" if len(said) == 1 else "have"
    return [f"{_list(said)} {have} collapsed: one answer is given to 95% of the documents or more."]


def _against_baselines(
    found: Sequence[Entry],
    column: Column,
    baselines: Mapping[str, str],
    baseline: str | None,
    full: Callable[[Entry], str],
) -> list[str]:
    by_name = {entry.name: entry for entry in found}
    kinds: dict[str, list[Entry]] = {"better": [], "worse": [], "neither": []}
    for entry in found:
        cell = entry.cells.get(column.name)
        if cell is not None and cell.difference is not None and cell.p_holm is not None:
            is_better = (cell.difference.mean > 0) == column.higher_is_better
            kind = "neither" if cell.p_holm > SIGNIFICANT else "better" if is_better else "worse"
            kinds[kind].append(entry)
    compared = [entry for some in kinds.values() for entry in some]
    if not compared:
        return []
    of = [by_name[name] for name in {baselines[entry.name]: None for entry in compared}]
    by_method = baseline is None or baseline == of[0].method
    with_what = f"{of[0].method} on the same checkpoint" if by_method else full(of[0])
    parts = [
        f"{_list(map(full, some))} {'are' if len(some) > 1 else 'is'} {kind}"
        for kind, some in kinds.items()
        if some and kind != "neither"
    ]
    if neither := len(kinds["neither"]):
        parts.append(f"{_entries(neither)} cannot be told apart from it")
    adjusted = ", adjusted for all entries by Holm's method" if len(compared) > 1 else ""
    return [f"Against {with_what}, {_list(parts)} (5%{adjusted})."]


def _full(found: Sequence[Entry]) -> Callable[[Entry], str]:
    """Entries in words: with their checkpoint and conditions, if there are several."""
    checkpoints, conditions = {entry.on for entry in found}, {entry.conditions for entry in found}

    def full(entry: Entry) -> str:
        label = entry.label if len(conditions) > 1 else " ".join(filter(None, [entry.method, entry.arguments]))
        return f"{label} on {entry.on}" if len(checkpoints) > 1 else label

    return full


def _entries(number: int) -> str:
    return f"{number} {'entries' if number > 1 else 'entry'}"


def _number(value: float, column: Column) -> str:
    return f"{100 * value:.1f}%" if column.percent else f"{value:.4g}"


def _list(parts: Iterable[str], most: int = 4) -> str:
    """Words with commas and an "and"; of many, the first ones. Semicolons where there are commas in the words."""
    found = list(parts)
    comma = ";" if any("," in part for part in found) else ","
    if len(found) > most:
        found = [*found[: most - 1], f"{len(found) - most + 1} more"]
    *some, last = found
    return f"{f'{comma} '.join(some)}{';' if comma == ';' else ''} and {last}" if some else last
