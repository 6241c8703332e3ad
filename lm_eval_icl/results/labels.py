"""The names of the board's rows, which say in what the rows differ."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath

from lm_eval_icl.results.board import (
    BoardCell,
    Entry,
    RowKey,
    TaskRun,
    grouped,
    in_words,
    shown,
)
from lm_eval_icl.results.columns import differing
from lm_eval_icl.results.compared import CHOSEN, NOT_RECORDED
from lm_eval_icl.results.fields import as_text, listed
from lm_eval_icl.results.records import Run, at

Row = tuple[RowKey, Sequence[TaskRun], Mapping[str, BoardCell]]
_PLAIN = ("revision", "dtype")  # these values are shown without their names


def entries_of(rows: Sequence[Row]) -> tuple[dict[Entry, RowKey], tuple[str, ...]]:
    """The rows as entries, whose labels say in what they differ; and the words that all rows have
    in common."""
    conditions = [_conditions(key, units) for key, units, _ in rows]
    common = [word for word in conditions[0] if all(word in words for words in conditions)]
    checkpoints = _checkpoints(rows)
    models = [_model_fields(row) for row in rows]
    alike: dict[str, list[Mapping[str, str]]] = {}
    for checkpoint, model in zip(checkpoints, models, strict=True):
        alike.setdefault(checkpoint, []).append(model)
    key_of: dict[Entry, RowKey] = {}
    for row, words, checkpoint, model in zip(rows, conditions, checkpoints, models, strict=True):
        key, units, cells = row
        stable = repr(replace(key, compared_as=()))  # without what follows from other rows
        name = hashlib.sha256(stable.encode("utf-8", "replace")).hexdigest()[:8]
        runs = tuple({unit.run.digest: unit.run for unit in units}.values())
        rules = [unit.result.rule for unit in units if unit.result.rule is not None]
        reads = _labels(runs)
        for rule in rules:
            reads += rule.reads
        shots = [unit.result.shots for unit in units]
        entry = Entry(
            name=name,
            checkpoint=shown(checkpoint or "unnamed"),
            details=shown(_details(model, alike[checkpoint])),
            method=shown(dict(key.method).get("method", "") or "unnamed"),
            arguments=shown(_arguments(key, runs)),
            conditions=", ".join(word for word in words if word not in common),
            runs=runs,
            cells=cells,
            rule=shown(rules[0].name) if rules else None,
            reads=tuple(dict.fromkeys(reads)),
            shots=(min(shots), max(shots)),
        )
        key_of[entry] = key
    return _told_apart(key_of), tuple(common)


def _labels(runs: Sequence[Run]) -> list[str]:
    """How many labeled rows the method was fitted on, besides its demonstrations."""
    words = []
    for run in runs:
        for fitted in listed(run.icl.get("fitted")):
            words.append(f"labels: {len(listed(at(fitted, 'labels')))}")
    return words


def _conditions(key: RowKey, units: Sequence[TaskRun]) -> list[str]:
    """Words about the setting and the switches of a row, such as its number of shots."""
    setting = dict(key.setting)
    switches = dict(key.switches)
    words = [_shots([unit.result.shots for unit in units])]
    if "chat" in setting:
        words += ["chat", "multiturn" if "multiturn" in setting else "one turn"]
    if "system" in setting:
        words.append("system instruction")
    for name, value in setting.items():
        if name not in ("chat", "multiturn", "system"):
            words.append(in_words(name, value))
    ways = dict.fromkeys(unit.result.fields.switches["demonstrations"] for unit in units)
    if list(ways) != ["default"]:
        shown_ways = [way if way != "default" else "drawn by the task" for way in ways]
        words.append(in_words("demonstrations", "/".join(shown_ways)))
    elif "demonstrations" in switches:
        words.append("demonstrations drawn by the task")
    if switches.get("training"):
        words.append(f"trained: {switches['training']}")
    for name in ("training options", "trained weights"):
        if switches.get(name):
            words.append(in_words(name, switches[name]))
    return list(map(shown, words))


def _shots(shots: Sequence[int]) -> str:
    fewest = min(shots)
    most = max(shots)
    if fewest < most:
        return f"{fewest} to {most} shots"
    return "1 shot" if most == 1 else f"{most} shots"


def _checkpoints(rows: Sequence[Row]) -> list[str]:
    """The checkpoint's name of each row: of a folder, the end of its path, if that is the end of
    one path only. The same weights may have several names, of which the shortest is shown."""
    names = []
    for _, units, _ in rows:
        row_names = {unit.run.pretrained for unit in units}
        names.append(min(row_names, key=lambda name: (len(name), name)))
    ends = Counter(PurePath(name).name for name in set(names))
    for place, name in enumerate(names):
        is_path = name.startswith((".", "/", "~")) or name.count("/") > 1
        end = PurePath(name).name
        if is_path and ends[end] == 1:
            names[place] = end
    return names


def _model_fields(row: Row) -> dict[str, str]:
    """The fields of a row's model that may tell it from models of the same name."""
    key, units, _ = row
    fields = dict(key.model)
    fields.pop("checkpoint", None)
    if revisions := {unit.run.revision for unit in units} - {""}:
        fields["revision"] = min(revisions)
    return fields


def _details(model: Mapping[str, str], alike: Sequence[Mapping[str, str]]) -> str:
    """The fields in which models of one name differ."""
    apart = differing(alike)
    revisions = {fields.get("revision") for fields in alike}
    if "revision" in apart and len(revisions) == len(alike):
        apart = [name for name in apart if name != "weights"]
    apart.sort(key=lambda name: (name != "revision", name != "dtype", name))
    words = []
    for name in apart:
        value = model.get(name, "")
        if name == "weights" and value == NOT_RECORDED:
            value = "weights not recorded"
        elif name not in _PLAIN:
            value = in_words(name, value)
        words.append(value)
    return ", ".join(filter(None, words))


def _arguments(key: RowKey, runs: Sequence[Run]) -> str:
    """The arguments of a row's method as they were given, in the run that gives the fewest."""
    method = dict(key.method)
    on_dev = [name for name, value in method.items() if value == CHOSEN]
    given = []
    for run in runs:
        arguments = run.arguments.items()
        # Arguments that a study has chosen are named below, without their values.
        own = {name: value for name, value in arguments if method.get(name, CHOSEN) != CHOSEN}
        given.append([f"{name}={value}" for name, value in own.items()])
    words = min(given, key=lambda arguments: (len(arguments), str(arguments)))
    if on_dev:
        names = " and ".join(on_dev)
        words = [*words, f"{names} {CHOSEN}"]
    return ", ".join(words)


def _told_apart(key_of: Mapping[Entry, RowKey]) -> dict[Entry, RowKey]:
    """The entries. Those with the same label show in what their methods and settings differ, with
    defaults."""
    labeled: dict[Entry, RowKey] = {}
    same_labels = grouped(key_of, lambda entry: (entry.checkpoint, entry.details, entry.label))
    for same_label in same_labels.values():
        keys = [key_of[entry] for entry in same_label]
        fields = [dict((*key.method, *key.rule, *key.setting)) for key in keys]
        apart = differing(fields)
        for entry, values in zip(same_label, fields, strict=True):
            more = [in_words(name, as_text(values[name])) for name in apart if name in values]
            text = ", ".join(filter(None, [entry.arguments, *more]))
            labeled[replace(entry, arguments=shown(text))] = key_of[entry]
    return labeled
