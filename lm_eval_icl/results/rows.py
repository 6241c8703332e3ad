"""Who answered: the key of a row, and the names and words by which people know it."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

from lm_eval_icl.results.board import BoardCell, Entry, TaskRun, grouped, reads_in_words, shown
from lm_eval_icl.results.cells import unused
from lm_eval_icl.results.fields import CHOSEN
from lm_eval_icl.results.records import Run, count, number

Fields = tuple[tuple[str, str], ...]
Cells = dict[str, BoardCell]  # of a row, by task or column


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


def as_fields(values: Mapping[str, Any]) -> Fields:
    return tuple(sorted((name, str(value)) for name, value in values.items()))


def in_words(name: str, value: str | None) -> str:
    """Words for a value in which rows or columns differ."""
    name = name.removeprefix("generation_kwargs.").removeprefix("metadata.")
    if not value:
        return f"no {name}"
    is_digest = len(value) in (16, 32, 64) and all(char in "0123456789abcdef" for char in value)
    return shown(f"{name} {value[:6]}" if is_digest else f"{name}={value}")


def _conditions(key: RowKey, units: Iterable[TaskRun]) -> tuple[list[str], tuple[float, float]]:
    """Words for what else tells a row from others, and the numbers of its demonstrations."""
    units = list(units)
    setting, switches = dict(key.setting), dict(key.switches)

    def ends_of(numbers: Sequence[float]) -> str:
        ends = dict.fromkeys(f"{x:.0f}" if x == int(x) else f"{x:.4g}" for x in (min(numbers), max(numbers)))
        return " to ".join(ends)

    numbers = [unit.result.shots for unit in units]
    used = [unit.result.shots - unused(unit) for unit in units]
    shots = f"{ends_of(numbers)} shot{'s' * (ends_of(numbers) != '1')}"
    words = [f"{ends_of(used)} of {shots}" if used != numbers else shots]
    if "chat" in setting:
        words += ["chat", "multiturn" if "multiturn" in setting else "one turn"]
    if "system" in setting:
        words.append("system instruction")
    words += [in_words(name, value) for name, value in key.setting if name not in ("chat", "multiturn", "system")]
    if drawn := dict.fromkeys(d for unit in units if (d := unit.result.switches.get("demonstrations")) is not None):
        of_some = "" if all(unit.result.switches.get("demonstrations") for unit in units) else " in some tasks"
        words.append(f"{in_words('demonstrations', '/'.join(drawn))}{of_some}")
    elif "demonstrations" in switches:
        words.append("demonstrations drawn by the task")
    words += [f"trained: {switches['training']}"] if switches.get("training") else []
    words += [in_words("weights", switches["weights"])] if "weights" in switches else []
    return list(map(shown, words)), (min(used), max(used))


def entries_of(
    rows: Sequence[tuple[RowKey, Mapping[str, list[TaskRun]], Cells]],
) -> tuple[dict[Entry, RowKey], tuple[str, ...]]:
    """The rows with names, and with labels that say what they differ in; and the words that all have in common."""
    names: set[str] = set()
    key_of: dict[Entry, RowKey] = {}
    units_of = [[unit for units in by_task.values() for unit in units] for _, by_task, _ in rows]
    conditions = [_conditions(key, units) for (key, _, _), units in zip(rows, units_of, strict=True)]
    shared = [word for word in conditions[0][0] if all(word in words for words, _ in conditions)]
    checkpoints = {dict(key.model).get("checkpoint", "") for key, _, _ in rows}
    ends = Counter(PurePath(checkpoint).name for checkpoint in checkpoints)
    for (key, _, cells), units, (words, shots) in zip(rows, units_of, conditions, strict=True):
        name, text = "", repr(key)
        while not name or name in names:
            text += name
            name = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:8]
        names.add(name)
        model, method = dict(key.model), dict(key.method)
        checkpoint = model.get("checkpoint", "")
        end = PurePath(checkpoint).name
        is_path = checkpoint.startswith((".", "/", "~")) or checkpoint.count("/") > 1
        alike = [dict(other.model) for other, _, _ in rows if dict(other.model).get("checkpoint", "") == checkpoint]
        fields = ["revision", "dtype", *sorted({n for m in alike for n in m} - {"checkpoint", "revision", "dtype"})]
        differing = [n for n in fields if len({other.get(n) for other in alike}) > 1]
        known = [n for n in differing if model.get(n) or n not in fields[:2]]
        details = [model[n] if n in fields[:2] else in_words(n, model.get(n)) for n in known]
        runs = tuple({unit.run.digest: unit.run for unit in units}.values())
        given = min(({n: v for n, v in run.arguments.items() if n in method and method[n] != CHOSEN} for run in runs),
                    key=lambda values: (len(values), str(values)))  # fmt: skip
        on_dev = [n for n, v in method.items() if v == CHOSEN]
        arguments = [f"{n}={v}" for n, v in given.items()] + ([f"{' and '.join(on_dev)} {CHOSEN}"] if on_dev else [])
        tokens, seconds, is_shared = _costs(runs)
        parameters = {count(run.results.get("config", {}).get("model_num_parameters")) for run in runs}
        rules = [unit.result.rule for unit in units if unit.result.rule is not None]
        entry = Entry(
            name=name,
            checkpoint=shown((end if is_path and ends[end] == 1 else checkpoint) or "unnamed"),
            details=shown(", ".join(details)),
            method=shown(method.get("method", "") or "unnamed"),
            arguments=shown(", ".join(arguments)),
            conditions=", ".join(word for word in words if word not in shared),
            runs=runs,
            cells=cells,
            parameters=(parameters.pop() or None) if len(parameters) == 1 else None,
            tokens=tokens,
            seconds=seconds,
            recorded=_recorded(runs),
            shared=is_shared,
            rule=shown(rules[0].name) if rules else None,
            reads=reads_in_words(rules),
            shots=shots,
        )
        key_of[entry] = key
    # Rows with the same label show the fields of the method in which they differ, defaults too.
    labeled: dict[Entry, RowKey] = {}
    for of_label in grouped(key_of, lambda entry: (entry.checkpoint, entry.details, entry.label)).values():
        methods = [dict((*key_of[entry].method, *key_of[entry].rule)) for entry in of_label]
        differing = [n for n in sorted({n for m in methods for n in m}) if len({m.get(n) for m in methods}) > 1]
        for entry, values in zip(of_label, methods, strict=True):
            more = [f"{n}={values[n]}" for n in differing if n in values]
            text = shown(", ".join(filter(None, [entry.arguments, *more])))
            labeled[replace(entry, arguments=text)] = key_of[entry]
    return labeled, tuple(shared)


def _recorded(runs: Sequence[Run]) -> str:
    """What the files say of how the runs were made; of several runs that agree but for seeds, once."""

    def line(run: Run) -> str:
        config = run.results.get("config", {})
        facts = {"model": run.model, "model_args": config.get("model_args"),
                 "num_fewshot": sorted({result.shots for result in run.all_results}), "limit": run.limit,
                 "gen_kwargs": config.get("gen_kwargs") or None,
                 "chat_template": bool(run.results.get("chat_template")) or None,
                 "system_instruction": run.results.get("system_instruction")}  # fmt: skip
        return "; ".join(f"{name}: {json.dumps(v, ensure_ascii=False)}" for name, v in facts.items() if v is not None)

    texts = []
    for text, alike in grouped(runs, line).items():
        seeds = sorted({run.seed for run in alike if run.seed is not None})
        tasks = sorted({result.task for run in alike for result in run.all_results})
        texts.append(f"{text}; seeds: {', '.join(map(str, seeds)) or 'not recorded'}; tasks: {', '.join(tasks)}")
    return "\n".join(texts)


def _costs(runs: Sequence[Run]) -> tuple[float | None, float | None, bool]:
    """Tokens run through the model and seconds, both a document; None if a run does not say. And whether they are a
    study's, which do not count where there are runs alone: the two do not compare (see `Run.cost`)."""
    counted = [run for run in runs if run.cost == "alone"] or runs
    documents = sum(sum({result.task: result.documents for result in run.all_results}.values()) for run in counted)

    def a_document(name: str) -> float | None:
        total = sum(math.nan if (value := number(getattr(run, name))) is None else value for run in counted)
        return total / documents if documents and 0 <= total < math.inf else None

    return a_document("tokens"), a_document("seconds"), counted[0].cost == "shared"
