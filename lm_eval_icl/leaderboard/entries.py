"""Which runs are one row: a checkpoint under a method with its arguments, number of demonstrations and prompts."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from lm_eval_icl.leaderboard.records import Run, TaskResult

Item = TypeVar("Item")
Key = TypeVar("Key")

# Of `config.icl`: what says nothing about which numbers come out, or is said elsewhere.
_NOT_OF_METHOD = {
    *("version", "commit", "method", "pack_tokens", "store_bytes", "trained", "study", "chosen"),
    *("left_out", "truncated", "contexts_encoded", "contexts_reused", "tokens_run", "tokens_saved"),
}
# Of `model_args`: how a model is run, not which.
_NEUTRAL = {
    *("pretrained", "revision", "dtype", "device", "batch_size", "max_batch_size", "pack_tokens", "store_bytes"),
    *("parallelize", "device_map", "max_memory_per_gpu", "max_cpu_memory", "offload_folder", "trust_remote_code"),
    *("tensor_parallel_size", "data_parallel_size", "gpu_memory_utilization", "tp_plan", "cache_dir"),
    *("use_fast_tokenizer", "num_concurrent", "max_retries", "timeout", "token", "attn_implementation"),
}
# Shown only if rows could not be told apart without.
_QUIET = {"overflow", "canonical_order"}
_CHOSEN = "chosen on dev"
_LENGTH = 200  # of a name that is shown


@dataclass(frozen=True, eq=False)
class Unit:
    """What one run gave on one task."""

    run: Run
    result: TaskResult


@dataclass(frozen=True, eq=False)
class Row:
    """The runs of an entry, not yet compared with anything.

    Attributes:
        checkpoint: name, revision, dtype.
        resolved: the method's arguments, defaults included, as JSON: two rows with the same are one method.
        arguments: of the method, as given in the runs, as text.
        conditions: what else the row stands for, as text: "4 shots".
        units: by task.
    """

    checkpoint: tuple[str, str, str]
    method: str
    resolved: str
    arguments: str
    conditions: tuple[str, ...]
    units: Mapping[str, Sequence[Unit]]

    @property
    def runs(self) -> tuple[Run, ...]:
        """All runs, each once, by date."""
        found = {unit.run.digest: unit.run for units in self.units.values() for unit in units}
        return tuple(sorted(found.values(), key=lambda run: (run.date, run.digest)))


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """The items by a key, in the order in which keys come up."""
    found: dict[Key, list[Item]] = defaultdict(list)
    for item in items:
        found[key(item)].append(item)
    return dict(found)


def rows(runs: Sequence[Run]) -> list[Row]:
    """Fold runs into rows.

    A row's results on a task all have the same number of demonstrations, limit, way of choosing the demonstrations,
    prompts' template, version and documents. Where runs of a method differ in one of these on some task, they are
    different rows.

    Args:
        runs: by date.
    """
    units = [Unit(run, result) for run in runs for result in run.tasks.values()]
    found = []
    for (checkpoint, method, resolved), of_method in grouped(
        units, lambda unit: (_checkpoint(unit.run), unit.run.model, _resolved(unit.run))
    ).items():
        given = min((_given(unit.run) for unit in of_method), key=lambda each: (len(each), str(each)))
        loud = shown(", ".join(f"{name}={value}" for name, value in given.items() if name not in _QUIET))
        for conditions, of_row in _split(of_method):
            few, many = (of(unit.result.shots for unit in of_row) for of in (min, max))
            counted = _plural(many, "shot") if few == many else f"{few} to {many} shots"
            by_task = grouped(of_row, lambda unit: unit.result.task)
            found.append(Row(checkpoint, method, resolved, loud, (counted, *map(shown, conditions)), by_task))
    return found


def shown(text: str) -> str:
    """A stranger's text on one line, not too long, and without what a terminal would not print but obey."""
    plain = "".join(c if c.isprintable() else " " if c.isspace() else "?" for c in text[: 2 * _LENGTH])
    plain = " ".join(plain.split())
    return plain if len(plain) <= _LENGTH else f"{plain[: _LENGTH - 3]}..."


def study(run: Run) -> Mapping[str, Any]:
    """What a study says of its cell; empty for other runs."""
    found = run.icl.get("study")
    return found if isinstance(found, dict) else {}


def _chosen(run: Run) -> list[str]:
    """The arguments that a study chose on a dev set."""
    found = study(run).get("chosen")
    return sorted(name for name in found if isinstance(name, str)) if isinstance(found, list) else []


def _plural(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _checkpoint(run: Run) -> tuple[str, str, str]:
    return run.pretrained, run.revision, run.dtype


def _resolved(run: Run) -> str:
    icl = {key: value for key, value in run.icl.items() if key not in _NOT_OF_METHOD}
    values = {key: _whole(value) for key, value in (_given(run) | icl).items()}
    return json.dumps(values | dict.fromkeys(_chosen(run), _CHOSEN), sort_keys=True, default=str)


def _whole(value: Any) -> Any:
    """A number that is whole as an integer: 5 and 5.0 are one argument."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _given(run: Run) -> dict[str, Any]:
    """The arguments as they were given; of those that a study chose on a dev set, that they were."""
    given = {key: value for key, value in run.arguments.items() if key not in _NEUTRAL}
    return given | dict.fromkeys(_chosen(run), _CHOSEN)


def _split(units: Sequence[Unit]) -> list[tuple[tuple[str, ...], list[Unit]]]:
    """The units of one method by what they differ in on the same task, with words for it."""
    bare = {unit.result.task for unit in units if unit.result.answers is None}

    def documents(unit: Unit) -> tuple[str, str]:
        """Without samples, only their number is known."""
        answers, count = unit.result.answers, f"{unit.result.documents} documents"
        if answers is None or unit.result.task in bare:
            return count, count
        return f"{answers.documents} {len(answers.items)}", f"documents {answers.documents[:6]}"

    def limit(unit: Unit) -> tuple[str, str]:
        number = unit.run.limit
        return str(number), "all documents" if number is None else f"limit={number:g}"

    # What is compared, and what is said of it. The number of demonstrations is said anyway.
    of_any_task: list[Callable[[Unit], tuple[str, str]]] = [
        lambda unit: (str(unit.result.shots), ""),
        limit,
        lambda unit: (str(unit.result.drawn), f"demonstrations={unit.result.drawn or 'drawn by the task'}"),
    ]
    of_one_task: list[Callable[[Unit], tuple[str, str]]] = [
        lambda unit: (unit.result.template, f"prompts {unit.result.template[:6]}"),
        lambda unit: (unit.result.version, f"version {unit.result.version}"),
        documents,
    ]
    parts: list[tuple[tuple[str, ...], list[Unit]]] = [((), list(units))]
    for differs in (*of_any_task, *of_one_task):
        parts = [
            ((*said, *filter(None, [words])), some)
            for said, part in parts
            for words, some in _parted(part, differs, differs in of_any_task)
        ]
    return parts


def _parted(
    units: list[Unit], differs: Callable[[Unit], tuple[str, str]], of_any_task: bool
) -> list[tuple[str, list[Unit]]]:
    """The units by a value, if there are several values on one task; with words for it.

    A value may mean the same on any task, as a number of demonstrations does. If not, as that of a template, the first
    values of all tasks belong together, and the second ones, by date. A task with one value goes with the first.
    """
    values: dict[str, dict[str, str]] = defaultdict(dict)
    for unit in units:
        value, words = differs(unit)
        values[unit.result.task].setdefault(value, words)
    several = {task: of for task, of in values.items() if len(of) > 1}
    if not several:
        return [("", units)]
    known = list(dict.fromkeys(value for of in several.values() for value in of))

    def part(unit: Unit) -> int:
        value = differs(unit)[0]
        if not of_any_task:
            return list(values[unit.result.task]).index(value)
        return known.index(value) if value in known else 0

    parts = sorted(grouped(units, part).items())
    return [(next(differs(unit)[1] for unit in some if unit.result.task in several), some) for _, some in parts]


def command(run: Run) -> str:
    """The command that makes a run again, safe to be pasted into a shell.

    Code from the checkpoint's repository (`trust_remote_code`) is for the one who pastes it to allow.
    """
    config = run.results["config"]
    seeds = [config.get(f"{name}_seed") for name in ("random", "numpy", "torch")]
    seeds = [seed if type(seed) is int else default for seed, default in zip(seeds, (0, 1234, 1234), strict=True)]
    shots = {result.shots for result in run.tasks.values()}
    parts = ["lm_eval", "--model", run.model, "--model_args", _model_args(config.get("model_args"))]
    parts += ["--tasks", ",".join(_asked(run))]
    if len(shots) == 1:
        parts += ["--num_fewshot", str(*shots)]
    if run.seed is not None:
        parts += ["--seed", ",".join(map(str, [*seeds, run.seed]))]
    if run.limit is not None:
        parts += ["--limit", f"{run.limit:.15g}"]
    if isinstance(generation := config.get("gen_kwargs"), (str, dict)) and generation:
        parts += ["--gen_kwargs", generation if isinstance(generation, str) else json.dumps(generation)]
    if run.results.get("chat_template"):
        parts += ["--apply_chat_template"]
    if run.results.get("fewshot_as_multiturn"):
        parts += ["--fewshot_as_multiturn"]
    if isinstance(instruction := run.results.get("system_instruction"), str):
        parts += ["--system_instruction", instruction]
    if isinstance(how := study(run).get("demonstrations"), str):
        parts += ["--metadata", f"demonstrations={how}"]
    parts += ["--log_samples", "--output_path", "results"]
    # A line break stays, in quotes: a system instruction may have some.
    return " ".join(shlex.quote("".join(c if c.isprintable() or c == "\n" else "?" for c in part)) for part in parts)


def _model_args(given: Any) -> str:
    """`model_args` as lm-eval takes them: `name=value,...`, or JSON where that would be read as something else."""
    if isinstance(given, str):
        return ",".join(part for part in given.split(",") if not part.strip().startswith("trust_remote_code"))
    if not isinstance(given, dict):
        return ""
    given = {name: value for name, value in given.items() if name != "trust_remote_code"}

    def is_plain(value: Any) -> bool:
        if isinstance(value, str):
            return bool(re.fullmatch(r"(?!(?i:true|false|none)$)[A-Za-z_./~][\w./:@~-]*", value))
        # lm-eval reads "-1" as -1.0
        return (isinstance(value, int) and value >= 0) or (isinstance(value, float) and math.isfinite(value))

    if all(is_plain(name) and is_plain(value) for name, value in given.items()):
        return ",".join(f"{name}={value}" for name, value in given.items())
    return json.dumps(given, default=str)


def _asked(run: Run) -> list[str]:
    """The tasks that were asked for: a group in place of its tasks."""
    inside = {task for tasks in run.groups.values() for task in tasks}
    # Of two groups with the same tasks, the first.
    groups = {frozenset(tasks): name for name, tasks in reversed(list(run.groups.items()))}
    tops = [name for tasks, name in reversed(groups.items()) if not any(tasks < others for others in groups)]
    return [*tops, *(task for task in run.tasks if task not in inside)] or list(run.tasks)


def tokens_a_document(runs: Iterable[Run]) -> float | None:
    """Tokens run through the model, a document; None if a run does not say."""
    return _a_document(runs, lambda run: run.icl.get("tokens_run"))


def seconds_a_document(runs: Iterable[Run]) -> float | None:
    """Seconds of lm-eval's whole run, a document; of a study's cells, those of scoring. None if a run does not say."""

    def seconds(run: Run) -> Any:
        shared = study(run).get("shared")
        if isinstance(shared, dict):
            return shared.get("seconds")
        return run.results.get("total_evaluation_time_seconds")

    return _a_document(runs, seconds)


def _a_document(runs: Iterable[Run], read: Callable[[Run], Any]) -> float | None:
    total, documents = 0.0, 0
    for run in runs:
        shared = study(run).get("shared")
        cells = shared.get("cells", 1) if isinstance(shared, dict) else 1  # what is said is said of all of them
        try:
            total += float(read(run)) / float(cells)
        except (TypeError, ValueError, ArithmeticError):
            return None
        documents += sum(result.documents for result in run.tasks.values())
    return total / documents if documents and 0 <= total < math.inf else None


def left_out(unit: Unit) -> int:
    """Demonstrations that were left out of a task's prompts because these were too long."""
    counts = unit.run.icl.get("left_out")
    found = counts.get(unit.result.task) if isinstance(counts, dict) else None
    number = found.get("demonstrations") if isinstance(found, dict) else None
    return number if type(number) is int and 0 <= number < 2**53 else 0
