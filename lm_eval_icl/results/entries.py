"""Which runs are one row: a checkpoint under a method with its arguments, number of demonstrations and prompts."""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from lm_eval_icl.results.read import whole
from lm_eval_icl.results.records import Run, TaskResult

Item = TypeVar("Item")
Key = TypeVar("Key")

# Two runs of a row are equal in all that their files say of the model, the method, the task, the prompts, the
# generation and the filter, but in what is listed here and in `read`. Of `config.icl`:
_NOT_OF_METHOD = {
    *("version", "commit"),  # code, which is a mark
    *("pack_tokens", "store_bytes"),  # how fast: numbers change by rounding
    *("method", "trained", "study", "chosen"),  # compared as the method, the model, the task and its demonstrations
    *("left_out", "truncated", "contexts_encoded", "contexts_reused", "tokens_run", "tokens_saved"),  # counts
}
# Of `model_args`:
_NEUTRAL = {
    *("pretrained", "revision", "dtype"),  # the checkpoint
    *("device", "parallelize", "device_map", "max_memory_per_gpu", "max_cpu_memory", "offload_folder"),  # where
    *("tensor_parallel_size", "data_parallel_size", "gpu_memory_utilization", "tp_plan", "num_concurrent"),  # where
    *("batch_size", "max_batch_size", "pack_tokens", "store_bytes", "attn_implementation"),  # rounding
    *("cache_dir", "token", "trust_remote_code", "max_retries", "timeout"),  # how a checkpoint or an answer is had
}
# What of a model separates rows first: further facts of the same files would only repeat it.
_FIRST_FACTS = ("model_files_digest", "study.weights")
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
        checkpoint: name, revision, dtype, and what else of the model differs between runs of this name, as text.
        resolved: the method's arguments, defaults included, as JSON: two rows with the same are one method.
        arguments: of the method, as given in the runs, as text.
        conditions: what else tells the row from others of its method, as text: "4 shots".
        said: what a person is told of the row: its conditions in words, and what all its runs have in common.
        units: by task.
    """

    checkpoint: tuple[str, str, str, str]
    method: str
    resolved: str
    arguments: str
    conditions: tuple[str, ...]
    said: tuple[str, ...]
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
    by_model = [
        ((checkpoint[0], checkpoint[1], checkpoint[2], said), of_model)
        for (*checkpoint, _), of_name in grouped(units, lambda unit: _checkpoint(unit.run)).items()
        for said, of_model in _models(of_name)
    ]
    for (checkpoint, method, resolved), of_method in (
        ((checkpoint, *key), of_method)
        for checkpoint, of_model in by_model
        for key, of_method in grouped(of_model, lambda unit: (unit.run.model, _resolved(unit.run))).items()
    ):
        given = min((_given(unit.run) for unit in of_method), key=lambda each: (len(each), str(each)))
        loud = shown(", ".join(f"{name}={value}" for name, value in given.items() if name not in _QUIET))
        for conditions, of_row in _split(of_method):
            few, many = (of(unit.result.shots for unit in of_row) for of in (min, max))
            counted = _plural(many, "shot") if few == many else f"{few} to {many} shots"
            by_task = grouped(of_row, lambda unit: unit.result.task)
            said = tuple(map(shown, dict.fromkeys([used(of_row, counted), *_words(of_row), *conditions])))
            found.append(Row(checkpoint, method, resolved, loud, (counted, *map(shown, conditions)), said, by_task))
    return _without_needless_words(found)


def used(units: Sequence[Unit], counted: str) -> str:
    """How many demonstrations prompts have, and of how many where some were left out."""
    numbers = [unit.result.shots - unused(unit) for unit in units]
    if not any(unused(unit) for unit in units):
        return counted
    few, many = (f"{of(numbers):.4g}" for of in (min, max))
    return f"{few if few == many else f'{few} to {many}'} of {counted}"


def _words(units: Sequence[Unit]) -> list[str]:
    """What a person is to know of a row's runs, whether or not the method has other runs."""

    def are_all(read: Callable[[Run], object]) -> bool:
        return all(read(unit.run) for unit in units)

    def values(read: Callable[[Unit], object]) -> list[object]:
        return list(dict.fromkeys(value for unit in units if (value := read(unit)) is not None))

    words = []
    if are_all(lambda run: run.results.get("chat_template") or run.results.get("chat_template_sha")):
        words.append("chat")
        words.append("multiturn" if are_all(lambda run: run.results.get("fewshot_as_multiturn")) else "one turn")
    if are_all(lambda run: run.results.get("system_instruction") or run.results.get("system_instruction_sha")):
        words.append("system instruction")
    if limits := sorted({unit.run.limit for unit in units if unit.run.limit is not None}):
        words.append(f"limit={'/'.join(f'{limit:g}' for limit in limits)}")
    if chosen := values(lambda unit: unit.result.drawn):
        of_some = "" if all(unit.result.drawn for unit in units) else " in some tasks"
        words.append(f"demonstrations={'/'.join(map(str, chosen))}{of_some}")
    return [*words, *map(str, values(lambda unit: _trained(unit.run)))]


def _trained(run: Run) -> str | None:
    """How the checkpoint says that it was trained."""
    found = run.icl.get("trained")
    if not isinstance(found, dict) or not found or "training" in study(run):
        return None
    methods = found.get("methods")
    names = list(map(str, methods)) if isinstance(methods, list) else []
    several = "/".join(names) if len(names) < 3 else f"{len(names)} methods"
    under = str(found["method"]) if "method" in found else several
    steps = found.get("steps")
    return f"trained under {under or 'no method'}{f' for {steps} steps' if type(steps) is int else ''}"


def _without_needless_words(found: Sequence[Row]) -> list[Row]:
    """The rows without the digest of their prompts where words tell them apart, and without how the checkpoint was
    trained where all rows have the same."""

    def without(row: Row, word: str) -> tuple[str, ...]:
        return tuple(said for said in row.said if not said.startswith(word))

    trained = {said for row in found for said in row.said if said.startswith("trained ")}
    if len(trained) == 1:
        found = [replace(row, said=without(row, "trained ")) for row in found]
    labels = [(row.checkpoint, row.method, row.resolved, without(row, "prompts ")) for row in found]
    counts = Counter(labels)
    return [
        replace(row, said=label[-1]) if counts[label] == 1 else row for row, label in zip(found, labels, strict=True)
    ]


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


def _checkpoint(run: Run) -> tuple[str, str, str, str]:
    """The name of the checkpoint, its revision, its dtype, and within which method weights are compared.

    A study trains a model under each method, and these checkpoints are one model to it.
    """
    said = study(run)
    if isinstance(model := said.get("model"), str) and isinstance(training := said.get("training"), str):
        return f"{model} (trained: {training.replace('/', '-')})", run.revision, run.dtype, run.model
    return run.pretrained, run.revision, run.dtype, ""


def _models(units: list[Unit]) -> list[tuple[str, list[Unit]]]:
    """The units of one checkpoint's name by what their files say of the model, with words for it.

    A file that does not say something agrees with the others, unless these differ in it.
    """
    names = sorted({name for unit in units for name in unit.run.model_facts})
    parts: list[tuple[str, list[Unit]]] = [("", units)]
    for name in sorted(names, key=lambda name: name not in _FIRST_FACTS):
        split = []
        for said, part in parts:
            by_value = grouped(part, lambda unit, name=name: unit.run.model_facts.get(name))  # type: ignore[misc]
            if len(by_value.keys() - {None}) < 2:
                split.append((said, part))
                continue
            for value, some in by_value.items():
                split.append((", ".join(filter(None, [said, _said_of(name, value)])), some))
        parts = split
    return parts


def _said_of(name: str, value: str | None) -> str:
    """What is said of rows that differ in a value as `read` has it."""
    name = name.removeprefix("generation_kwargs.")
    if value is None:
        return f"no {name}"
    return f"{name} {value[:6]}" if re.fullmatch("[0-9a-f]{32}", value) else f"{name}={value}"


def _resolved(run: Run) -> str:
    icl = {key: value for key, value in run.icl.items() if key not in _NOT_OF_METHOD}
    values = {key: whole(value) for key, value in (_given(run) | icl).items()}
    return json.dumps(values | dict.fromkeys(_chosen(run), _CHOSEN), sort_keys=True, default=str)


def _given(run: Run) -> dict[str, Any]:
    """The arguments as they were given; of those that a study chose on a dev set, that they were."""
    given = {key: value for key, value in run.arguments.items() if key not in _NEUTRAL}
    return given | dict.fromkeys(_chosen(run), _CHOSEN)


def _split(units: Sequence[Unit]) -> list[tuple[tuple[str, ...], list[Unit]]]:
    """The units of one method by what they differ in on the same task, with words for it."""
    known: dict[tuple[str, int], set[str]] = defaultdict(set)
    for unit in units:
        if (answers := unit.result.answers) is not None:
            known[unit.result.task, len(answers.items)].add(answers.documents)

    def documents(unit: Unit) -> tuple[str, str]:
        """Without samples, only their number is known: they are those of the other runs if these agree."""
        result, count = unit.result, f"{unit.result.documents} documents"
        if result.answers is not None:
            digest, size = result.answers.documents, len(result.answers.items)
        elif len(of_others := known[result.task, result.documents]) == 1:
            (digest,), size = of_others, result.documents
        else:
            return count, count
        return f"{digest} {size}", f"documents {digest[:6]}"

    def limit(unit: Unit) -> tuple[str, str]:
        number = unit.run.limit
        return str(number), "all documents" if number is None else f"limit={number:g}"

    def setting(name: str) -> Callable[[Unit], tuple[str, str]]:
        return lambda unit: (unit.result.settings.get(name, ""), _said_of(name, unit.result.settings.get(name)))

    settings = [
        (setting(name), all(len(value) < 32 for value in values))
        for name in sorted({name for unit in units for name in unit.result.settings})
        if (values := {unit.result.settings.get(name, "") for unit in units}) and len(values) > 1
    ]
    # What is compared, what is said of it, and whether a value means the same on any task. The number of demonstrations
    # is said anyway.
    compared: list[tuple[Callable[[Unit], tuple[str, str]], bool]] = [
        (lambda unit: (str(unit.result.shots), ""), True),
        (limit, True),
        (lambda unit: (str(unit.result.drawn), f"demonstrations={unit.result.drawn or 'drawn by the task'}"), True),
        (lambda unit: (unit.result.template, f"prompts {unit.result.template[:6]}"), False),
        (lambda unit: (unit.result.version, f"version {unit.result.version}"), False),
        *settings,
        (documents, False),
    ]
    parts: list[tuple[tuple[str, ...], list[Unit]]] = [((), list(units))]
    for differs, of_any_task in compared:
        parts = [
            ((*said, *filter(None, [words])), some)
            for said, part in parts
            for words, some in _parted(part, differs, of_any_task, strict=differs is limit)
        ]
    return parts


def _parted(
    units: list[Unit], differs: Callable[[Unit], tuple[str, str]], of_any_task: bool, strict: bool
) -> list[tuple[str, list[Unit]]]:
    """The units by a value, if there are several values on one task; with words for it.

    A value may mean the same on any task, as a number of demonstrations does; a task with one value then goes with the
    first. If not, as that of a template, values that one run has belong together; where no run says so, the first
    values of all tasks, and the second ones, by date.

    Args:
        strict: there is one value on all tasks of a row.
    """
    if strict:
        by_value = list(grouped(units, lambda unit: differs(unit)[0]).values())
        return [(differs(some[0])[1] if len(by_value) > 1 else "", some) for some in by_value]
    values: dict[str, dict[str, str]] = defaultdict(dict)
    of_runs: dict[str, dict[str, str]] = defaultdict(dict)
    for unit in units:
        value, words = differs(unit)
        values[unit.result.task].setdefault(value, words)
        of_runs[unit.run.digest][unit.result.task] = value
    several = {task: of for task, of in values.items() if len(of) > 1}
    if not several:
        return [("", units)]
    known = list(dict.fromkeys(value for of in several.values() for value in of))
    joined: list[dict[str, str]] = []  # of each part, the value on each task
    for of_run in sorted(of_runs.values(), key=len, reverse=True):
        fitting = (part for part in joined if all(part.get(task, value) == value for task, value in of_run.items()))
        if (of_part := next(fitting, None)) is None:
            joined.append(of_part := {})
        of_part.update(of_run)

    def part(unit: Unit) -> int:
        task, value = unit.result.task, differs(unit)[0]
        if not of_any_task:
            return next(number for number, of_part in enumerate(joined) if of_part.get(task) == value)
        return known.index(value) if value in known else 0

    parts = sorted(grouped(units, part).items())
    # In words, what of the task that has several.
    return [(differs(min(some, key=lambda unit: unit.result.task not in several))[1], some) for _, some in parts]


def costs(runs: Sequence[Run]) -> tuple[float | None, float | None, bool]:
    """Tokens run through the model and seconds, both a document; None if a run does not say. And whether they are a
    study's: cells share passes, so that one of them costs less than a run alone, and its seconds are those of scoring.

    Those of a study do not count where there are runs alone: the two do not compare.
    """
    alone = [run for run in runs if not study(run)]
    counted = alone or runs
    tokens = _a_document(counted, lambda run: run.icl.get("tokens_run"))
    return tokens, _a_document(counted, _seconds), not alone


def _seconds(run: Run) -> Any:
    """Of lm-eval's whole run; of a study's cells, of scoring."""
    shared = study(run).get("shared")
    return shared.get("seconds") if isinstance(shared, dict) else run.results.get("total_evaluation_time_seconds")


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


def varied(units: Sequence[Unit]) -> list[str]:
    """Sentences on what runs of one row differ in, of what is known to matter little: code, libraries, machines."""
    said: dict[str, set[str]] = defaultdict(set)
    for unit in units:
        run, configs = unit.run, unit.run.results.get("configs")
        config = configs.get(unit.result.task) if isinstance(configs, dict) else None
        for name in ("dataset_path", "dataset_kwargs"):  # folders of somebody's machine do not separate rows
            said[name].add(json.dumps(config.get(name)) if isinstance(config, dict) else "")
        said["lm-eval-icl"].add(str(run.icl.get("version") or ""))
        said["lm-eval"].add(str(run.results.get("lm_eval_version") or ""))
        said["transformers"].add(str(run.results.get("transformers_version") or ""))
        machine = str(run.results.get("pretty_env_info") or "")
        for what, name in (("torch", "PyTorch version"), ("the GPU", "GPU 0"), ("the CPU", "Model name")):
            said[what].add(" ".join(re.findall(rf"^{name}:(.*)$", machine, re.MULTILINE)[:1]).strip())
    sentences = []
    for what, values in said.items():
        if len(some := sorted(shown(value) for value in values if value)) > 1:
            sentences.append(f"Its runs differ in {what}: {', '.join(some[:4])}{', ...' if len(some) > 4 else ''}.")
    if _is_unidentified([unit.run for unit in units]):
        sentences.append("Nothing says which weights the model had: other weights under its name would be this row.")
    return sentences


def _is_unidentified(runs: Sequence[Run]) -> bool:
    """Whether runs of a model of a folder, or of one without a commit, may be of several models of the same name: there
    is nothing by which all of them say which it was."""

    def is_local(run: Run) -> bool:
        return run.pretrained.startswith((".", "/", "~")) or run.results["config"].get("model_sha", "of the Hub") == ""

    facts = [{"model_sha": run.results["config"].get("model_sha"), **run.model_facts} for run in runs]
    return any(map(is_local, runs)) and not any(
        all(of_run.get(name) for of_run in facts) for name in ("model_sha", *_FIRST_FACTS)
    )


def left_out(unit: Unit, of: str = "demonstrations") -> int:
    """Demonstrations that were left out of a task's prompts because these were too long; or of how many documents."""
    counts = unit.run.icl.get("left_out")
    found = counts.get(unit.result.task) if isinstance(counts, dict) else None
    number = found.get(of) if isinstance(found, dict) else None
    return number if type(number) is int and 0 <= number < 2**53 else 0


def unused(unit: Unit) -> float:
    """How many demonstrations were left out of a prompt, the mean over documents."""
    shared = study(unit.run).get("shared")
    orders = shared.get("orders") if isinstance(shared, dict) else 1  # a study counts orders that are scored together
    documents = unit.result.documents * (orders if type(orders) is int and orders > 0 else 1)
    return min(unit.result.shots, left_out(unit) / max(documents, left_out(unit, "documents"), 1))
