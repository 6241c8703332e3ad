"""Which rows of a board are compared: with a baseline, a reference condition, the best."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from lm_eval_icl.errors import InputError
from lm_eval_icl.results.board import BoardCell, Column, Entry, Pairs, RowKey, grouped
from lm_eval_icl.results.cells import collapse_marks
from lm_eval_icl.results.comparisons import compare, comparisons_of, to_one_answer
from lm_eval_icl.results.fields import TRAINED
from lm_eval_icl.results.statistics import Difference

_LISTED = 20  # the most names in a message
_SUGGESTED = 3
# Values that are the reference of a condition, before all others. "" is a setting's default.
_PLAIN = ("", "default", "stratified", "random", "first")
_NO_CONDITIONS = ("method", "rule", "model", "checkpoint")
_SAME = 1e-12  # means that differ by no more are equal


def named(entries: Sequence[Entry], name: str, what: str = "") -> Entry:
    """The entry with this name, as tables print it. `InputError` unless it is exactly one."""
    wanted = _plain(name)
    matching = [entry for entry in entries if wanted in _names(entry)]
    if not matching:
        # A method's name stands for its entry without a decision rule.
        for entry in entries:
            short = (entry.method, f"{entry.method} {entry.arguments}")
            if entry.rule is None and wanted in map(_plain, short):
                matching.append(entry)
    if len(matching) == 1:
        return matching[0]
    if matching:
        raise InputError(f"{what}{name}: several entries have this name: {_list(matching)}.")
    texts: dict[str, Entry] = {}
    for entry in entries:
        texts |= dict.fromkeys(_names(entry), entry)
    near = difflib.get_close_matches(wanted, list(texts), _SUGGESTED, 0.5)
    if not near:
        raise InputError(f"{what}{name}: there is no such entry. There are {_list(entries)}.")
    suggested = _list(list(dict.fromkeys(texts[text] for text in near)))
    raise InputError(f"{what}{name}: there is no such entry. Did you mean {suggested}?")


def _list(entries: Sequence[Entry]) -> str:
    return "; ".join(f"{e.label} on {e.on} ({e.name})" for e in entries[:_LISTED])


def _names(entry: Entry) -> set[str]:
    """The texts by which tables print an entry: with what its rule reads, and with its model."""
    texts = []
    for label in (entry.label, ", ".join([entry.label, *entry.reads])):
        on_model = f"{label} on {entry.on}"
        texts += [label, on_model, f"{on_model} ({entry.name})", f"{label} on {entry.checkpoint}"]
    return {entry.name, *map(_plain, texts)}


def _plain(text: str) -> str:
    """A text without the commas and line breaks by which tables separate the parts of a name."""
    return " ".join(re.split(r"[\s,]+", text.strip()))


def baselines_of(
    entries: Sequence[Entry], key_of: Mapping[Entry, RowKey], baseline: str | None
) -> dict[str, Entry]:
    """Entry's name -> its baseline: the row of a method that agrees in all but the method.

    Args:
        baseline: the method, whose row without arguments counts if it has several; or the name of a
            row, which is then the baseline of all others. None for `icl`, or `hf` without it.
    """
    methods = {entry.method for entry in entries}
    if baseline is not None and baseline not in methods:
        only = named(entries, baseline, "--baseline ")
        return {entry.name: only for entry in entries if entry is not only}
    if baseline is None:
        baseline = "icl" if "icl" in methods else "hf"
    bases: dict[str, Entry] = {}
    values = {entry: fields_of(entry, key_of[entry]) for entry in entries}
    by_conditions = grouped(entries, lambda entry: _without(values[entry], "method"))
    for alike in by_conditions.values():
        plain = [entry for entry in alike if entry.method == baseline]
        if len(plain) > 1:
            plain = [entry for entry in plain if not entry.arguments]
        if len(plain) == 1:
            (base,) = plain
            bases |= {entry.name: base for entry in alike if entry is not base}
    return bases


def condition_pairs(
    key_of: Mapping[Entry, RowKey], only: str | None = None
) -> list[tuple[str, Entry, Entry]]:
    """(condition in words, row, reference) of rows that differ by one condition alone.

    Of the rows that agree in all other fields, the one with the default value is the reference, or
    else the one with the smallest value.

    Args:
        only: the name of a field, which may be "method", "rule" or "model" too; None for all
            settings.
    """
    values = {entry: fields_of(entry, key) for entry, key in key_of.items()}
    pairs: list[tuple[str, Entry, Entry]] = []
    names: dict[str, None] = {}
    for fields in values.values():
        names |= dict.fromkeys(fields)
    for name in names:
        if name == only or (only is None and name not in _NO_CONDITIONS):
            pairs += _pairs_by(name, values)
    return pairs


def _pairs_by(
    name: str, values: Mapping[Entry, Mapping[str, str]]
) -> Iterator[tuple[str, Entry, Entry]]:
    value_of = {entry: fields.get(name, "") for entry, fields in values.items()}
    by_others = grouped(values, lambda entry: _without(values[entry], name))
    for alike in by_others.values():
        reference = min(alike, key=lambda entry: _rank(value_of[entry]))
        value = value_of[reference]
        words = f"{name}={value or 'default'}"
        for entry in alike:
            if value_of[entry] != value:
                yield words, entry, reference


def fields_of(entry: Entry, key: RowKey) -> dict[str, str]:
    """The fields by which rows may be compared, by name. Training is one field."""
    fields = dict((*key.setting, *key.switches))
    trained = [pair for pair in key.method if pair[0].startswith("trained")]
    base = entry.checkpoint.removesuffix(TRAINED)
    if (trained or base != entry.checkpoint) and not fields.get("training"):
        fields["training"] = str(trained)
    fields["method"] = str([pair for pair in key.method if pair not in trained])
    fields["rule"] = entry.rule or ""
    fields["model"] = str(key.compared_as or key.model)
    fields["checkpoint"] = base
    return fields


def _without(fields: Mapping[str, str], name: str) -> Pairs:
    """The other fields. A trained model's weights follow from its checkpoint and training."""
    follows = "model" if name == "training" else "checkpoint"
    others = sorted(fields.items())
    return tuple(field for field in others if field[1] and field[0] not in (name, follows))


def _rank(value: str) -> tuple[int, float, str]:
    """The order of the values of a condition: first those that are a reference, then by number."""
    place = _PLAIN.index(value) if value in _PLAIN else len(_PLAIN)
    number = float(value) if value.isdecimal() else 0.0
    return place, number, value


def compare_all(
    entries: Sequence[Entry],
    key_of: Mapping[Entry, RowKey],
    columns: Sequence[Column],
    baseline: str | None,
) -> tuple[tuple[Entry, ...], dict[str, str]]:
    """The entries with differences and marks; and entry's name -> the name of its baseline."""
    bases = baselines_of(entries, key_of, baseline)
    by_rule = condition_pairs(key_of, "rule")
    raws = {entry.name: raw for _, entry, raw in by_rule if raw.rule is None}
    conditions = grouped(condition_pairs(key_of), lambda pair: pair[1].name)
    cells: dict[str, dict[str, BoardCell]] = {entry.name: {} for entry in entries}
    for column in columns:
        rows = [entry for entry in entries if column.name in entry.cells]
        family = comparisons_of(rows, column)
        best_of = {}
        for rule, rule_rows in grouped(rows, lambda entry: entry.rule).items():
            best_of[rule] = max(rule_rows, key=column.goodness)
        for entry in rows:
            minus = functools.partial(_difference, entry, column, family)
            best = best_of[entry.rule]
            below = minus(best)
            to_one = to_one_answer(entry.cells, column)
            to_conditions = []
            for words, _, reference in conditions.get(entry.name, ()):
                if difference := minus(reference):
                    to_conditions.append((words, difference))
            cell = replace(
                entry.cells[column.name],
                difference=minus(bases.get(entry.name)),
                to_raw=minus(raws.get(entry.name)),
                to_majority=None if to_one is None else replace(to_one, comparisons=family),
                conditions=tuple(to_conditions),
                comparisons=family,
                is_best=column.goodness(best) - column.goodness(entry) <= _SAME,
                is_worse=None if below is None else column.judged(below) == "worse",
            )
            marks = _marks(cell, bases.get(entry.name), column)
            cells[entry.name][column.name] = replace(cell, marks=(*cell.marks, *marks))
    # Cells are in the order of the columns. The cells of tasks that are not columns follow.
    ordered = []
    for entry in entries:
        compared = cells[entry.name]
        ordered.append(replace(entry, cells=compared | {**entry.cells, **compared}))
    return tuple(ordered), {name: base.name for name, base in bases.items()}


def _difference(
    entry: Entry, column: Column, family: int, other: Entry | None
) -> Difference | None:
    """The row minus another one, as one of a family of comparisons."""
    if other is None or other is entry:
        return None
    alone = compare(entry.cells, other.cells, column)
    return None if alone is None else replace(alone, comparisons=family)


def _marks(cell: BoardCell, base: Entry | None, column: Column) -> list[str]:
    """What is to be known of a cell and of its difference to its baseline."""
    marks = list(collapse_marks(cell.collapsed))
    difference = cell.difference
    has_base = base is not None and column.name in base.cells
    if difference is None:
        if has_base and "aggregate only" not in cell.marks:
            marks.append("not compared")
        return marks
    if difference.scope == "other sets":
        marks.append("other sets")
    elif difference.sets < cell.estimate.sets:
        marks.append(
            f"Compared on {difference.sets} of {cell.estimate.sets} sets of demonstrations."
        )
    lost = base.cells[column.name].left_out if base is not None else 0
    if lost:
        marks.append(f"{lost} demonstrations were left out of its baseline's prompts.")
    return marks
