"""How the rows of a board differ: from their baseline, from the same runs without a rule, and from each other."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from lm_eval_icl.errors import InputError
from lm_eval_icl.results import statistics
from lm_eval_icl.results.board import SIGNIFICANT, Column, Entry, Pairs, grouped
from lm_eval_icl.results.cells import common, compare
from lm_eval_icl.results.rows import Cells, RowKey
from lm_eval_icl.results.statistics import Difference

_LISTED = 20  # names in a message


def named(entries: Sequence[Entry], name: str, what: str = "") -> Entry:
    """The entry with this name, or label, or label and checkpoint.

    Raises:
        InputError: there is none, or there are several.
    """
    for key in (
        lambda entry: entry.name,
        lambda entry: f"{entry.label} on {entry.checkpoint}",
        lambda entry: entry.label,
        lambda entry: " ".join(filter(None, [entry.method, entry.arguments])),
        lambda entry: entry.method,
    ):
        if matching := [entry for entry in entries if key(entry) == name]:
            # A method's name is that of its entry without a decision rule.
            matching = [entry for entry in matching if entry.rule is None] or matching
            break
    if len(matching) == 1:
        return matching[0]
    names = "; ".join(f"{entry.name}: {entry.label} on {entry.checkpoint}" for entry in (matching or entries)[:_LISTED])
    if matching:
        raise InputError(f"{what}{name}: several entries are called so. Give the name of one: {names}.")
    raise InputError(f"{what}{name}: there is no such entry. There are {names}.")


def compare_all(
    entries: Sequence[Entry],
    key_of: Mapping[Entry, RowKey],
    columns: Sequence[Column],
    pairs: Pairs,
    baseline: str | None,
) -> tuple[tuple[Entry, ...], dict[str, str]]:
    """The entries with differences and ranks; and by the name of an entry that of its baseline.

    The baseline may be several rows, as of several numbers of demonstrations: an entry is compared on each task with
    the row that was asked the same. Its own baseline is the row that it is compared with on most tasks.
    """
    methods = {dict(key.method).get("method", "") for key in key_of.values()}
    only = named(entries, baseline, "--baseline ") if baseline is not None and baseline not in methods else None
    if baseline is None:
        baseline = next((name for name in ("icl", "hf") if name in methods), "")
    alike = grouped(entries, lambda entry: key_of[entry].rival)
    raw = {(key.model, key.method, key.setting, key.switches): entry for entry, key in key_of.items() if not key.rule}
    baselines: dict[str, str] = {}
    firsts: dict[str, dict[str, Entry]] = {}  # by an entry's name and the task, the row that it is compared with
    rivals: dict[str, list[Entry]] = {}
    differences: dict[str, dict[str, Difference]] = {}
    to_raw: dict[str, dict[str, Difference]] = {}
    for entry in entries:
        key = key_of[entry]
        if only is not None:
            rivals[entry.name] = [] if entry is only else [only]
        else:
            of_entry = (e for e in alike[key.rival] if dict(key_of[e].method).get("method") == baseline != entry.method)
            rivals[entry.name] = sorted(of_entry, key=lambda e: (key_of[e].switches != key.switches, len(e.arguments)))
        firsts[entry.name] = {}
        for task, cell in entry.cells.items():
            sets = {r: len(common(cell.sets, r.cells[task].sets)) for r in rivals[entry.name] if task in r.cells}
            order = sorted(sets, key=lambda r: (key_of[r].switches != key.switches, -sets[r]))
            if asked := [rival for rival in order if sets[rival]]:
                firsts[entry.name][task] = asked[0]
        other = {task: rival.cells[task] for task, rival in firsts[entry.name].items()}
        differences[entry.name] = compare(entry.cells, other, columns)
        counts = Counter(rival.name for rival in firsts[entry.name].values())
        same = [rival for rival in rivals[entry.name] if key_of[rival].switches == key.switches]
        if counts:
            baselines[entry.name] = max(
                (r.name for r in rivals[entry.name]), key=lambda name: counts[name]
            )  # the first
        elif len(alone := same if len(same) == 1 else rivals[entry.name]) == 1:  # which of several would be a guess
            baselines[entry.name] = alone[0].name
        if key.rule and (base := raw.get((key.model, key.method, key.setting, key.switches))) is not None:
            to_raw[entry.name] = compare(entry.cells, base.cells, columns)
    cells: dict[str, Cells] = {entry.name: {} for entry in entries}
    for column in columns:
        of_column = [entry for entry in entries if column.name in entry.cells]
        against, against_raw = (
            [of.get(entry.name, {}).get(column.name) for entry in of_column] for of in (differences, to_raw)
        )
        adjusted, adjusted_raw = (
            statistics.holm([math.nan if d is None else d.p for d in of]) for of in (against, against_raw)
        )
        ranks: dict[str, tuple[int, int]] = {}
        best: set[str] = set()
        for of_rule in grouped(of_column, lambda entry: entry.rule).values():
            ranks |= _ranks(of_rule, column, pairs)
            goodness = {e.name: column.sign * e.cells[column.name].estimate.mean for e in of_rule}
            best |= {name for name, good in goodness.items() if good >= max(goodness.values()) - 1e-12}
        for place, entry in enumerate(of_column):
            cell, difference = entry.cells[column.name], against[place]
            marks = list(cell.marks)
            if difference is not None:
                with_whom = {e.name: e for task in column.weights if (e := firsts[entry.name].get(task))}
                if list(with_whom) != [baselines[entry.name]]:
                    marks.append(f"Compared with {'; '.join(rival.label for rival in with_whom.values())}.")
                if difference.sets < cell.estimate.sets:
                    marks.append(f"Paired on {difference.sets} of {cell.estimate.sets} sets of demonstrations.")
            elif any(column.name in r.cells for r in rivals[entry.name]) and "aggregate only" not in marks:
                marks.append("unpaired")
            if "differs" in marks:  # of another prompt's answers, which other runs confirm
                marks = [mark for mark in marks if mark != "confirmed"]
            cells[entry.name][column.name] = replace(
                cell,
                difference=difference,
                p_holm=None if difference is None else adjusted[place],
                to_raw=against_raw[place],
                p_raw=None if against_raw[place] is None else adjusted_raw[place],
                rank=ranks.get(entry.name),
                is_best=entry.name in best,
                marks=tuple(marks),
            )
    # Cells stand in the order of the columns, and behind them those of tasks that are no columns.
    ordered = (cells[entry.name] | {**entry.cells, **cells[entry.name]} for entry in entries)
    return tuple(replace(entry, cells=of_row) for entry, of_row in zip(entries, ordered, strict=True)), baselines


def _ranks(entries: Sequence[Entry], column: Column, pairs: Pairs) -> dict[str, tuple[int, int]]:
    """The range of ranks of each entry on a column; of those that are paired with another.

    Args:
        entries: in the order of the board.
    """
    p = np.full((len(entries), len(entries)), math.nan)
    means = [entry.cells[column.name].estimate.mean for entry in entries]
    for (i, first), (j, second) in itertools.combinations(enumerate(entries), 2):
        if (difference := pairs.get((first.name, second.name), {}).get(column.name)) is not None:
            # The entry that is worse over all of its prompts may be better on those that both were asked.
            p[i, j] = p[j, i] = difference.p if difference.mean * (means[i] - means[j]) >= 0 else 1.0
    ranges = statistics.rank_ranges([column.sign * mean for mean in means], p, SIGNIFICANT)
    paired = ~np.isnan(p).all(axis=1)
    return {entry.name: ranks for entry, ranks, is_paired in zip(entries, ranges, paired, strict=True) if is_paired}
