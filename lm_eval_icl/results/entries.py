"""Which runs are one row: a checkpoint under a method with its arguments, number of demonstrations and prompts."""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from lm_eval_icl.results.board import TaskRun
from lm_eval_icl.results.form import at, reads_in_words
from lm_eval_icl.results.records import Run
from lm_eval_icl.results.samples import digest
from lm_eval_icl.results.settings import whole

Item = TypeVar("Item")
Key = TypeVar("Key")
Rule = tuple[str, str]  # its name, and its arguments as JSON
Part = tuple[tuple[str, ...], list[TaskRun]]  # some of the runs of a model or method, and words for what is theirs

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
_DIGEST = re.compile("[0-9a-f]{32}")
_LENGTH = 200  # of a name that is shown


@dataclass(frozen=True, eq=False)
class EntryRuns:
    """The runs of an entry, not yet compared with anything.

    Attributes:
        checkpoint: name, revision, dtype, and what else of the model differs between runs of this name, as text.
        resolved: the method's arguments, defaults included, as JSON: two rows with the same are one method.
        arguments: of the method, as given in the runs, as text.
        conditions: what else tells the row from others of its method, as text: "4 shots".
        words: what a person is told of the row: its conditions in words, and what all its runs have in common.
        rule: the decision rule of its results, with its arguments as JSON; None of those of the model itself.
        units: what its runs gave, by task, by date.
    """

    checkpoint: tuple[str, ...]
    method: str
    resolved: str
    arguments: str
    conditions: tuple[str, ...]
    words: tuple[str, ...]
    rule: Rule | None
    units: Mapping[str, Sequence[TaskRun]]

    @property
    def reads(self) -> tuple[str, ...]:
        """What the rule reads beside the document and the demonstrations, in words."""
        rules = (unit.result.rule for units in self.units.values() for unit in units)
        return reads_in_words(filter(None, rules))

    @property
    def runs(self) -> tuple[Run, ...]:
        """All runs, each once, by date."""
        runs = {unit.run.digest: unit.run for units in self.units.values() for unit in units}
        return tuple(sorted(runs.values(), key=lambda run: (run.date, run.digest)))


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """The items by a key, in the order in which keys come up."""
    groups: dict[Key, list[Item]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return dict(groups)


def shown(text: str) -> str:
    """A stranger's text on one line, not too long, and without what a terminal would not print but obey."""
    plain = "".join(c if c.isprintable() else " " if c.isspace() else "?" for c in text[: 2 * _LENGTH])
    plain = " ".join(plain.split())
    return plain if len(plain) <= _LENGTH else f"{plain[: _LENGTH - 3]}..."


def chosen(run: Run) -> list[str]:
    """The names of the arguments that a study chose on a dev set; "seeds" if it chose the demonstrations too."""
    known = {"seeds", *run.arguments, *run.icl}
    return sorted(name for name in run.study.chosen or [] if name in known)


def rows(runs: Sequence[Run]) -> list[EntryRuns]:
    """Fold runs into rows.

    A row's results on a task all have the same number of demonstrations, limit, way of choosing the demonstrations,
    prompts' template, version and documents. Where runs of a method differ in one of these on some task, they are
    different rows. So are the results of the model itself and those under each decision rule, of the same runs.

    Args:
        runs: by date.
    """
    units = [TaskRun(run, result) for run in runs for result in run.all_results]
    rules = {rule for unit in units if (rule := _rule(unit)) is not None}
    names = Counter(name for name, _ in rules)
    folded = []
    for (*checkpoint, _), of_name in grouped(units, lambda unit: _checkpoint(unit.run)).items():
        for facts, of_model in _by_facts(of_name):
            model = (*checkpoint, ", ".join(facts))
            for method, of_method in grouped(of_model, lambda unit: (unit.run.model, _resolved(unit.run))).items():
                arguments = min(
                    (_arguments(unit.run) for unit in of_method), key=lambda values: (len(values), str(values))
                )
                texts = [f"{name}={value}" for name, value in arguments.items() if name not in _QUIET]
                if on_dev := chosen(of_method[0].run):
                    texts.append(f"{' and '.join(on_dev)} {_CHOSEN}")
                for prompts, of_prompts in _by_prompts(of_method):
                    for rule, of_row in grouped(of_prompts, _rule).items():
                        shots, words = _words(of_row)
                        row = EntryRuns(
                            model,
                            *method,
                            arguments=shown(", ".join(texts)),
                            conditions=(shots, *map(shown, prompts)),
                            words=tuple(map(shown, dict.fromkeys([*words, *prompts]))),
                            rule=rule,
                            units=grouped(of_row, lambda unit: unit.result.task),
                        )
                        if rule is not None:
                            # Versions of this package may have other defaults, which a rule's name does not say.
                            name, more = shown(rule[0]), f" ({digest([rule[1]])[:6]})" if names[rule[0]] > 1 else ""
                            row = replace(row, words=(*row.words, f"decide: {name}{more}", *row.reads))
                        folded.append(row)
    # How the checkpoint was trained is not said where all rows have the same; nor is the digest of prompts where words
    # tell rows apart.
    if len({word for row in folded for word in row.words if word.startswith("trained ")}) == 1:
        folded = [_without(row, "trained ") for row in folded]
    short = [_without(row, "prompts ") for row in folded]
    counts = Counter((row.checkpoint, row.method, row.resolved, row.words) for row in short)
    return [
        row if counts[row.checkpoint, row.method, row.resolved, row.words] == 1 else long
        for row, long in zip(short, folded, strict=True)
    ]


def _rule(unit: TaskRun) -> Rule | None:
    rule = unit.result.rule
    return None if rule is None else (rule.name, json.dumps(rule.arguments, sort_keys=True, default=str))


def _without(row: EntryRuns, word: str) -> EntryRuns:
    return replace(row, words=tuple(text for text in row.words if not text.startswith(word)))


def _checkpoint(run: Run) -> tuple[str, str, str, str]:
    """The name of the checkpoint, its revision, its dtype, and within which method weights are compared.

    A study trains a model under each method, and these checkpoints are one model to it.
    """
    if run.study.model is not None and run.study.training is not None:
        trained = run.study.training.replace("/", "-")
        return f"{run.study.model} (trained: {trained})", run.revision, run.dtype, run.model
    return run.pretrained, run.revision, run.dtype, ""


def _by_facts(units: list[TaskRun]) -> list[Part]:
    """The results of one checkpoint's name by what their files say of the model.

    A file that does not say something agrees with the others, unless these differ in it.
    """
    names = sorted({name for unit in units for name in unit.run.model_facts})
    parts: list[Part] = [((), units)]
    for name in sorted(names, key=lambda name: name not in _FIRST_FACTS):
        split: list[Part] = []
        for words, part in parts:
            by_value = grouped(part, lambda unit, name=name: unit.run.model_facts.get(name))  # type: ignore[misc]
            if len(by_value.keys() - {None}) < 2:
                split.append((words, part))
            else:
                split += [((*words, _in_words(name, value)), same) for value, same in by_value.items()]
        parts = split
    return parts


def _in_words(name: str, value: str | None) -> str:
    """Words for a value in which rows differ, as `read` has it."""
    name = name.removeprefix("generation_kwargs.")
    if value is None:
        return f"no {name}"
    return f"{name} {value[:6]}" if _DIGEST.fullmatch(value) else f"{name}={value}"


def _resolved(run: Run) -> str:
    icl = {key: value for key, value in run.icl.items() if key not in _NOT_OF_METHOD}
    values = {key: whole(value) for key, value in (_arguments(run) | icl).items()}
    return json.dumps(values | dict.fromkeys(chosen(run), _CHOSEN), sort_keys=True, default=str)


def _arguments(run: Run) -> dict[str, Any]:
    """The arguments as they were given, but those that a study chose on a dev set."""
    return {key: value for key, value in run.arguments.items() if key not in {*_NEUTRAL, *chosen(run)}}


def _words(units: Sequence[TaskRun]) -> tuple[str, list[str]]:
    """How many demonstrations the prompts have, and what a person is to know of a row's runs, whether or not the method
    has other runs."""

    def ends_of(numbers: Sequence[float]) -> str:
        ends = dict.fromkeys(f"{x:.0f}" if x == int(x) else f"{x:.4g}" for x in (min(numbers), max(numbers)))
        return " to ".join(ends)

    number = ends_of([unit.result.shots for unit in units])
    shots = f"{number} shot{'s' * (number != '1')}"
    used = ends_of([unit.result.shots - unused(unit) for unit in units])
    runs = [unit.run for unit in units]
    words = [f"{used} of {shots}" if any(map(unused, units)) else shots]
    if all(run.results.get("chat_template") or run.results.get("chat_template_sha") for run in runs):
        words.append("chat")
        words.append("multiturn" if all(run.results.get("fewshot_as_multiturn") for run in runs) else "one turn")
    if all(run.results.get("system_instruction") or run.results.get("system_instruction_sha") for run in runs):
        words.append("system instruction")
    if limits := sorted({run.limit for run in runs if run.limit is not None}):
        words.append(f"limit={'/'.join(f'{limit:g}' for limit in limits)}")
    if drawn := dict.fromkeys(unit.result.drawn for unit in units if unit.result.drawn is not None):
        of_some = "" if all(unit.result.drawn for unit in units) else " in some tasks"
        words.append(f"demonstrations={'/'.join(drawn)}{of_some}")
    return shots, [*words, *filter(None, map(_trained, runs))]


def _trained(run: Run) -> str:
    """How the checkpoint says that it was trained; "" if it does not, or if its name says it."""
    trained = run.icl.get("trained")
    if not isinstance(trained, dict) or not trained or run.study.training is not None:
        return ""
    methods = trained.get("methods")
    names = list(map(str, methods)) if isinstance(methods, list) else []
    several = "/".join(names) if len(names) < 3 else f"{len(names)} methods"
    under = str(trained["method"]) if "method" in trained else several
    steps = trained.get("steps")
    return f"trained under {under or 'no method'}{f' for {steps} steps' if type(steps) is int else ''}"


def _by_prompts(units: list[TaskRun]) -> list[Part]:
    """The results of one method by what they differ in on the same task."""
    known: dict[tuple[str, int], set[str]] = defaultdict(set)
    for unit in units:
        if (answers := unit.result.answers) is not None:
            known[unit.result.task, len(answers.items)].add(answers.documents)

    def documents(unit: TaskRun) -> tuple[str, str]:
        """Without samples, only their number is known: they are those of the other runs if these agree."""
        result, count = unit.result, f"{unit.result.documents} documents"
        if result.answers is not None:
            digest, size = result.answers.documents, len(result.answers.items)
        elif len(of_others := known[result.task, result.documents]) == 1:
            (digest,), size = of_others, result.documents
        else:
            return count, count
        return f"{digest} {size}", f"documents {digest[:6]}"

    def limit(unit: TaskRun) -> tuple[str, str]:
        number = unit.run.limit
        return str(number), "all documents" if number is None else f"limit={number:g}"

    def drawn(unit: TaskRun) -> tuple[str, str]:
        return str(unit.result.drawn), f"demonstrations={unit.result.drawn or 'drawn by the task'}"

    def setting(name: str) -> Callable[[TaskRun], tuple[str, str]]:
        return lambda unit: (unit.result.settings.get(name, ""), _in_words(name, unit.result.settings.get(name)))

    values = {
        name: {unit.result.settings.get(name, "") for unit in units}
        for name in sorted({name for unit in units for name in unit.result.settings})
    }
    # What is compared, with what is said of it, and whether a value means the same on any task. (The number of
    # demonstrations is said anyway.)
    compared: list[tuple[Callable[[TaskRun], tuple[str, str]], bool]] = [
        (lambda unit: (str(unit.result.shots), ""), True),
        (limit, True),
        (drawn, True),
        (lambda unit: (unit.result.template, f"prompts {unit.result.template[:6]}"), False),
        (lambda unit: (unit.result.version, f"version {unit.result.version}"), False),
        *((setting(name), not any(map(_DIGEST.fullmatch, texts))) for name, texts in values.items() if len(texts) > 1),
        (documents, False),
    ]
    parts: list[Part] = [((), units)]
    for differs, of_any_task in compared:
        split: list[Part] = []
        for words, part in parts:
            if differs is limit:  # there is one on all tasks of a row
                by_limit = grouped(part, limit)
                values_of_part = [(word if len(by_limit) > 1 else "", same) for (_, word), same in by_limit.items()]
            else:
                values_of_part = _parted(part, differs, of_any_task)
            split += [((*words, *filter(None, [word])), same) for word, same in values_of_part]
        parts = split
    return parts


def _parted(
    units: list[TaskRun], differs: Callable[[TaskRun], tuple[str, str]], of_any_task: bool
) -> list[tuple[str, list[TaskRun]]]:
    """The results by a value, if there are several values on one task; with words for it.

    A value may mean the same on any task, as a number of demonstrations does; a task with one value then goes with the
    first. If not, as that of a template, values that one run has belong together; where no run says so, the first
    values of all tasks, and the second ones, by date.
    """
    values: dict[str, dict[str, None]] = defaultdict(dict)  # by task, in the order in which they come up
    of_runs: dict[tuple[str, Rule | None], dict[str, str]] = defaultdict(dict)
    for unit in units:
        value, _ = differs(unit)
        values[unit.result.task][value] = None
        of_runs[unit.run.digest, _rule(unit)][unit.result.task] = value
    several = {task for task, of_task in values.items() if len(of_task) > 1}
    if not several:
        return [("", units)]
    known = list(dict.fromkeys(value for task, of_task in values.items() if task in several for value in of_task))
    joined: list[dict[str, str]] = []  # the values of each part, by task
    for of_run in sorted(of_runs.values(), key=len, reverse=True):
        fitting = (part for part in joined if all(part.get(task, value) == value for task, value in of_run.items()))
        if (part := next(fitting, None)) is None:
            joined.append(part := {})
        part.update(of_run)

    def number(unit: TaskRun) -> int:
        task, value = unit.result.task, differs(unit)[0]
        if not of_any_task:
            return next(number for number, of_part in enumerate(joined) if of_part.get(task) == value)
        return known.index(value) if value in known else 0

    # The words are those of a task that has several values.
    return [
        (differs(min(part, key=lambda unit: unit.result.task not in several))[1], part)
        for _, part in sorted(grouped(units, number).items())
    ]


# ---------------------------------------------------------------------------------------------------------------
# What the runs of a row cost, and what they differ in without being other rows.


def costs(runs: Sequence[Run]) -> tuple[float | None, float | None, bool]:
    """Tokens run through the model and seconds, both a document; None if a run does not say. And whether they are a
    study's, which do not count where there are runs alone: the two do not compare (see `Run.cost`)."""
    counted = [run for run in runs if run.cost == "alone"] or runs
    documents = sum(sum({result.task: result.documents for result in run.all_results}.values()) for run in counted)

    def a_document(name: str) -> float | None:
        total = sum(math.nan if (value := getattr(run, name)) is None else value for run in counted)
        return total / documents if documents and 0 <= total < math.inf else None

    return a_document("tokens"), a_document("seconds"), counted[0].cost == "shared"


def varied(units: Sequence[TaskRun]) -> list[str]:
    """Sentences on what runs of one row differ in, of what is known to matter little: code, libraries, machines; and
    on weights that nothing identifies."""
    texts_by_name: dict[str, set[str]] = defaultdict(set)
    for unit in units:
        run, config = unit.run, at(unit.run.results, "configs", unit.result.task)
        for name in ("dataset_path", "dataset_kwargs"):  # folders of somebody's machine do not separate rows
            texts_by_name[name].add(json.dumps(config.get(name)) if isinstance(config, dict) else "")
        texts_by_name["lm-eval-icl"].add(str(run.icl.get("version") or ""))
        texts_by_name["lm-eval"].add(str(run.results.get("lm_eval_version") or ""))
        texts_by_name["transformers"].add(str(run.results.get("transformers_version") or ""))
        machine = str(run.results.get("pretty_env_info") or "")
        for what, name in (("torch", "PyTorch version"), ("the GPU", "GPU 0"), ("the CPU", "Model name")):
            texts_by_name[what].add(" ".join(re.findall(rf"^{name}:(.*)$", machine, re.MULTILINE)[:1]).strip())
    sentences = []
    for what, texts in texts_by_name.items():
        if len(values := sorted(map(shown, filter(None, texts)))) > 1:
            more = ", ..." if len(values) > 4 else ""
            sentences.append(f"Its runs differ in {what}: {', '.join(values[:4])}{more}.")

    def is_local(run: Run) -> bool:
        return run.pretrained.startswith((".", "/", "~")) or run.results["config"].get("model_sha", "of the Hub") == ""

    runs = [unit.run for unit in units]
    facts = [{"model_sha": run.results["config"].get("model_sha"), **run.model_facts} for run in runs]
    identified = any(all(of_run.get(name) for of_run in facts) for name in ("model_sha", *_FIRST_FACTS))
    if any(map(is_local, runs)) and not identified:
        sentences.append("Nothing says which weights the model had: other weights under its name would be this row.")
    return sentences


def left_out(unit: TaskRun, what: str = "demonstrations") -> int:
    """How many demonstrations were left out of a task's prompts because these were too long; or, of what="documents",
    of how many documents."""
    number = at(unit.run.icl, "left_out", unit.result.task, what)
    return number if type(number) is int and 0 <= number < 2**53 else 0


def unused(unit: TaskRun) -> float:
    """How many demonstrations were left out of a prompt, the mean over documents."""
    shared = unit.run.study.shared  # a study counts orders that are scored together
    documents = unit.result.documents * ((shared.orders if shared else None) or 1)
    return min(unit.result.shots, left_out(unit) / max(documents, left_out(unit, "documents"), 1))
