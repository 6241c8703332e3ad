"""Who answered: the key of a row, and the names and words by which people know it."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

from lm_eval_icl.results.board import Cells, Entry, TaskRun, grouped, shown
from lm_eval_icl.results.fields import CHOSEN

Fields = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class RowKey:
    """Who answered: a row of the board has one of these."""

    model: Fields  # the declared fields of each part, by name
    method: Fields
    setting: Fields
    rule: Fields  # the decision rule and its arguments; empty for what the model itself says
    switches: Fields  # those that are on

    @property
    def rival(self) -> tuple[Fields, Fields, Fields]:
        """What a row has in common with its baseline: all but the method and the switches."""
        return self.model, self.setting, self.rule


Row = tuple[RowKey, Sequence[TaskRun], Cells]


def as_fields(values: Mapping[str, Any]) -> Fields:
    return tuple(sorted((name, str(value)) for name, value in values.items()))


def in_words(name: str, value: str | None) -> str:
    """Words for a value in which rows or columns differ."""
    name = name.removeprefix("generation_kwargs.").removeprefix("metadata.")
    if not value:
        return f"no {name}"
    is_digest = len(value) in (16, 32, 64) and all(char in "0123456789abcdef" for char in value)
    return shown(f"{name} {value[:6]}" if is_digest else f"{name}={value}")


def differing(values: Sequence[Mapping[str, str]]) -> list[str]:
    """The names of fields in which these differ."""
    return [name for name in sorted({name for of in values for name in of}) if len({of.get(name) for of in values}) > 1]


def _conditions(key: RowKey, units: Sequence[TaskRun]) -> list[str]:
    """Words for what else tells a row from others."""
    setting, switches = dict(key.setting), dict(key.switches)
    shots = [str(of(unit.result.shots for unit in units)) for of in (min, max)]
    words = [f"{' to '.join(dict.fromkeys(shots))} shot{'s' * (shots != ['1', '1'])}"]
    if "chat" in setting:
        words += ["chat", "multiturn" if "multiturn" in setting else "one turn"]
    if "system" in setting:
        words.append("system instruction")
    words += [in_words(name, value) for name, value in key.setting if name not in ("chat", "multiturn", "system")]
    drawn = dict.fromkeys(unit.result.switches.get("demonstrations") for unit in units)
    if any(drawn):
        words.append(in_words("demonstrations", "/".join(way or "drawn by the task" for way in drawn)))
    elif "demonstrations" in switches:
        words.append("demonstrations drawn by the task")
    words += [f"trained: {switches['training']}"] if switches.get("training") else []
    words += [in_words("weights", switches["weights"])] if "weights" in switches else []
    return list(map(shown, words))


def entries_of(rows: Sequence[Row]) -> tuple[dict[Entry, RowKey], tuple[str, ...]]:
    """The rows with names, and with labels that say what they differ in; and the words that all have in common."""
    key_of: dict[Entry, RowKey] = {}
    conditions = [_conditions(key, units) for key, units, _ in rows]
    shared = [word for word in conditions[0] if all(word in words for words in conditions)]
    checkpoints = {dict(key.model).get("checkpoint", "") for key, _, _ in rows}
    ends = Counter(PurePath(checkpoint).name for checkpoint in checkpoints)
    for (key, units, cells), words in zip(rows, conditions, strict=True):
        model, method = dict(key.model), dict(key.method)
        checkpoint = model.get("checkpoint", "")
        end = PurePath(checkpoint).name
        is_path = checkpoint.startswith((".", "/", "~")) or checkpoint.count("/") > 1
        alike = [dict(other.model) for other, _, _ in rows if dict(other.model).get("checkpoint", "") == checkpoint]
        plain = ("revision", "dtype")  # values that speak for themselves
        apart = sorted(differing(alike), key=lambda name: (name != "revision", name != "dtype", name))
        details = [model.get(n, "") if n in plain else in_words(n, model.get(n)) for n in apart]
        runs = tuple({unit.run.digest: unit.run for unit in units}.values())
        given = min(({n: v for n, v in run.arguments.items() if n in method and method[n] != CHOSEN} for run in runs),
                    key=lambda values: (len(values), str(values)))  # fmt: skip
        on_dev = [n for n, v in method.items() if v == CHOSEN]
        arguments = [f"{n}={v}" for n, v in given.items()] + ([f"{' and '.join(on_dev)} {CHOSEN}"] if on_dev else [])
        rules = [unit.result.rule for unit in units if unit.result.rule is not None]
        entry = Entry(
            name=hashlib.sha256(repr(key).encode("utf-8", "replace")).hexdigest()[:8],
            checkpoint=shown((end if is_path and ends[end] == 1 else checkpoint) or "unnamed"),
            details=shown(", ".join(filter(None, details))),
            method=shown(method.get("method", "") or "unnamed"),
            arguments=shown(", ".join(arguments)),
            conditions=", ".join(word for word in words if word not in shared),
            runs=runs,
            cells=cells,
            rule=shown(rules[0].name) if rules else None,
            reads=tuple(dict.fromkeys(words for rule in rules for words in rule.reads)),
            shots=(min(unit.result.shots for unit in units), max(unit.result.shots for unit in units)),
        )
        key_of[entry] = key
    # Rows with the same label show the fields of the method in which they differ, defaults too.
    labeled: dict[Entry, RowKey] = {}
    for of_label in grouped(key_of, lambda entry: (entry.checkpoint, entry.details, entry.label)).values():
        methods = [dict((*key_of[entry].method, *key_of[entry].rule)) for entry in of_label]
        for entry, values in zip(of_label, methods, strict=True):
            more = [f"{n}={values[n]}" for n in differing(methods) if n in values]
            text = shown(", ".join(filter(None, [entry.arguments, *more])))
            labeled[replace(entry, arguments=text)] = key_of[entry]
    return labeled, tuple(shared)
