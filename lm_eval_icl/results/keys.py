"""The keys of rows and columns: results with equal keys stand in one cell of the board."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lm_eval_icl.results.board import Pairs, RowKey, TaskRun, grouped
from lm_eval_icl.results.compared import NOT_RECORDED, SWITCHES, Fields

Keys = dict[TaskRun, tuple[RowKey, Pairs]]  # result -> the keys of its row and its column


def keys_of(units: Sequence[TaskRun], columns_by: Sequence[str]) -> Keys:
    """The keys of all results.

    A switch is in the keys of the whole board if a cell would hold two values otherwise.
    """
    weights_of = _weights_by_name(units)
    keys: Keys = {}
    for unit in units:
        result = unit.result
        column = {**result.fields.column, "task": result.task, "metric": result.metric}
        column["filter"] = result.filter_text
        column["documents"] = str(result.documents)
        for name in columns_by:
            column[name] = result.fields.switches[name]
        keys[unit] = (_row_key(unit, weights_of), as_pairs(column))
    for switch in SWITCHES:
        if switch.name not in columns_by:
            values = {unit: unit.result.fields.switches[switch.name] for unit in units}
            if _differ_in_a_cell(keys, values):
                for unit, (row, asked) in keys.items():
                    switches = (*row.switches, (switch.name, values[unit]))
                    keys[unit] = (replace(row, switches=switches), asked)
    documents = {unit: unit.result.documents_digest for unit in units}
    if _differ_in_a_cell(keys, documents):  # these say what was asked
        for unit, (row, asked) in keys.items():
            keys[unit] = (row, as_pairs(dict(asked) | {"documents": documents[unit]}))
    return keys


def as_pairs(values: Mapping[str, Any]) -> Pairs:
    return tuple(sorted((name, str(value)) for name, value in values.items()))


def _row_key(unit: TaskRun, weights_of: Mapping[str, set[str]]) -> RowKey:
    fields = unit.result.fields
    rule = unit.result.rule
    rule_fields: Pairs = ()
    if rule is not None:
        rule_fields = (("decide", rule.name), *as_pairs(rule.arguments))
    weights = fields.facts["weights"]
    compared_as = weights
    if weights == NOT_RECORDED:
        known = weights_of[fields.model.get("checkpoint", "")]
        if len(known) == 1:
            compared_as = next(iter(known))
    return RowKey(
        model=_model(fields, weights),
        method=as_pairs(fields.method),
        setting=as_pairs(fields.setting),
        rule=rule_fields,
        switches=(),
        compared_as=_model(fields, compared_as),
    )


def _model(fields: Fields, weights: str) -> Pairs:
    """The digest of the weights is the model, whatever its name. Without it, the name and the
    revision are."""
    model = dict(fields.model)
    if weights not in ("", NOT_RECORDED):
        model.pop("checkpoint", None)
        model.pop("revision", None)
    return as_pairs({**model, "weights": weights})


def _weights_by_name(units: Sequence[TaskRun]) -> dict[str, set[str]]:
    """Name of a checkpoint -> the recorded digests of its weights."""
    weights: dict[str, set[str]] = {}
    for unit in units:
        fields = unit.result.fields
        known = weights.setdefault(fields.model.get("checkpoint", ""), set())
        known |= {fields.facts["weights"]} - {"", NOT_RECORDED}
    return weights


def _differ_in_a_cell(keys: Keys, values: Mapping[TaskRun, str]) -> bool:
    cells = grouped(keys, lambda unit: keys[unit])
    return any(len({values[unit] for unit in cell_units}) > 1 for cell_units in cells.values())
