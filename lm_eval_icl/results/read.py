"""Results files of lm-eval, with their samples, as `Run`s.

The files come from anyone: what is damaged, foreign or contradictory is left out or marked, with the reason, and never
stops the others. A file goes through `read` once: which files there are, JSON, its form (`form`), a run, its tasks with
their answers, its groups.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError
from tqdm import tqdm

from lm_eval_icl.errors import InputError, one_line, refusing
from lm_eval_icl.results.collect import KEY, unpack
from lm_eval_icl.results.form import DEPTH, ReportedTask, Results, RuleFacts, Unusable, at, number, parse, refusal
from lm_eval_icl.results.records import Answers, LeftOutFile, Run, TaskResult
from lm_eval_icl.results.samples import Asked, digest, lines, read_answers
from lm_eval_icl.results.settings import model_arguments, model_facts, settings, template

RESULTS_BYTES = 32 * 2**20
_FOREIGN = "is no results file of lm-eval, which has 'results', 'configs' and 'config'"

# lm-eval's metrics whose aggregation is not the mean, or of which less is better (lm_eval/api/metrics.py).
_METRICS: Mapping[str, tuple[str, bool]] = {
    "f1": ("f1", True),
    "mcc": ("matthews_corrcoef", True),
    "perplexity": ("perplexity", False),
    "word_perplexity": ("weighted_perplexity", False),
    "byte_perplexity": ("weighted_perplexity", False),
    "bits_per_byte": ("bits_per_byte", False),
    "brier_score": ("brier_score", False),
    "bleu": ("bleu", True),
    "chrf": ("chrf", True),
    "chrf++": ("chrf++", True),
    "ter": ("ter", False),
    "bypass": ("bypass", True),
}
# Those that are computed from a number, or a pair of numbers, of each document; of these, the statistics are known.
_OF_NUMBERS = ("mean", "nanmean", "perplexity")
_OF_PAIRS = ("f1", "matthews_corrcoef", "weighted_perplexity", "bits_per_byte", "macro_f1")
AGGREGATIONS = (*_OF_NUMBERS, *_OF_PAIRS)


@dataclass(frozen=True)
class _File:
    """A file that may hold results.

    Attributes:
        named: it was named itself, not found in a folder.
        root: links out of this folder are not followed.
    """

    path: Path
    named: bool
    root: Path


def read(paths: Sequence[Path], quiet: bool = False, dev: bool = False) -> tuple[list[Run], list[LeftOutFile]]:
    """Read results files of any of lm-eval's models, and files that `collect` has made.

    Of two files of one run, that with more answers is kept.

    Args:
        paths: files, or folders, which are searched with all folders in them. A results file is known by its content.
            Its samples are the files in the same folder whose names end in the same time, or digest.
        quiet: show no progress bar.
        dev: read runs on the dev set of a study too.

    Returns:
        The runs, each of them once, and what was left out: files, and tasks of files that are otherwise used.

    Raises:
        InputError: a path does not exist.
    """
    runs: dict[str, Run] = {}
    left_out: list[LeftOutFile] = []
    for file in tqdm(_files(paths, left_out), "Reading results", disable=quiet, unit=" files"):
        try:
            if (results := _load(file)) is None:
                continue
            packed = results.pop(KEY, None)
            results.pop("samples", None)  # of Python's `simple_evaluate`, never of lm-eval's own files: these are large
            name = digest([json.dumps(results, sort_keys=True)])
            known = runs.get(name)
            if known is not None and known.answered == len(known.all_results):
                raise Unusable(f"is the same run as {known.path}")
            with np.errstate(all="ignore"):  # strangers' numbers may be as large as a float can be
                run, notes = _run(file, results, packed, name, dev)
            if known is not None:
                if known.answered >= run.answered:
                    raise Unusable(f"is the same run as {known.path}")
                left_out[:] = [other for other in left_out if other.path != known.path]
                left_out.append(LeftOutFile(known.path, f"is the same run as {run.path}, with fewer samples."))
            runs[name] = run
            left_out += [LeftOutFile(file.path, _sentence(note)) for note in notes]
        except Unusable as error:
            left_out.append(LeftOutFile(file.path, _sentence(error)))
        except Exception as error:  # whatever a stranger's file has in it, the others are read
            left_out.append(LeftOutFile(file.path, f"cannot be understood ({one_line(error)})."))
    return list(runs.values()), list(dict.fromkeys(left_out))


def _sentence(text: object) -> str:
    """On one line and not too long, whatever names a file has."""
    words = " ".join(str(text).split()).removesuffix(".")
    return f"{words[:600]}..." if len(words) > 600 else f"{words}."


# ---------------------------------------------------------------------------------------------------------------
# Files.


def _files(paths: Sequence[Path], left_out: list[LeftOutFile]) -> list[_File]:
    """Each file once."""
    files: dict[Path, _File] = {}
    for path in paths:
        with refusing(f"{_printable(str(path))} cannot be read", kinds=(OSError, ValueError)):
            if path.is_dir():
                in_path = list(_walk(path, left_out))
            elif path.is_file():
                in_path = [_File(path, True, path.parent.resolve())]
            else:
                kind = "is neither a file nor a folder" if path.exists() else "does not exist"
                raise InputError(f"{_printable(str(path))} {kind}: give results files of lm-eval, or their folders.")
        for file in in_path:
            files.setdefault(file.path.resolve(), file)
    return list(files.values())


def _walk(root: Path, left_out: list[LeftOutFile]) -> Iterator[_File]:
    """The JSON files of a folder, none of them hidden."""

    def leave_out(path: str | Path, why: str) -> None:
        left_out.append(LeftOutFile(Path(_printable(str(path))), why))

    inside = root.resolve()
    for folder, folders, names in os.walk(
        root, onerror=lambda error: leave_out(error.filename, f"cannot be read ({error.strerror}).")
    ):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if folders and len(Path(folder).relative_to(root).parts) == DEPTH:
            leave_out(folder, f"its folders are more than {DEPTH} deep.")
            folders.clear()
        times = {Path(name).stem.rpartition("_")[2] for name in names if name.endswith(".json")}
        for name in sorted(name for name in names if not name.startswith(".")):
            path = Path(folder, name)
            if path.suffix == ".jsonl" and name.startswith("samples_") and path.stem.rpartition("_")[2] not in times:
                leave_out(path, "the results of these samples are not beside them.")
            if path.suffix != ".json":
                continue
            if _printable(str(path)) != str(path):
                leave_out(path, "its name is not UTF-8.")
            elif not _is_inside(path, inside):
                leave_out(path, "is not a file in this folder but a link out of it, or a device.")
            else:
                yield _File(path, False, inside)


def _is_inside(path: Path, root: Path) -> bool:
    try:
        return path.is_file() and (not path.is_symlink() or path.resolve().is_relative_to(root))
    except (OSError, RuntimeError):  # a link to itself
        return False


def _printable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def _load(file: _File) -> dict[str, Any] | None:
    """The JSON of a results file. None for another kind of file, which was found in a folder and has neither the name
    nor the key of results. `Unusable` is raised if the file is damaged or too large."""
    try:
        with file.path.open("rb") as opened:
            data = opened.read(RESULTS_BYTES + 1)
    except OSError as error:
        raise Unusable(f"cannot be read ({error.strerror})") from error
    if not file.named and not file.path.name.startswith("results") and b'"results"' not in data:
        return None
    if len(data) > RESULTS_BYTES:
        raise Unusable(f"has more than {RESULTS_BYTES:,} bytes")
    results = parse(data)
    level = [results]
    for _ in range(DEPTH + 1):
        containers = [value for value in level if isinstance(value, dict | list)]
        level = [inner for value in containers for inner in (value.values() if isinstance(value, dict) else value)]
    if level:
        raise Unusable(f"is nested more than {DEPTH} deep")
    # An escape is the only way to half of a surrogate pair in JSON, and Python cannot print or write one.
    if re.search(rb"\\u[dD][89a-fA-F]", data):
        results = json.loads(json.dumps(results, ensure_ascii=False).encode("utf-8", "replace"))
    if not isinstance(results, dict):
        raise Unusable(_FOREIGN)
    return results


# ---------------------------------------------------------------------------------------------------------------
# A run.


def _run(file: _File, results: dict[str, Any], packed: Any, name: str, dev: bool) -> tuple[Run, list[str]]:
    """A results file as a run, and sentences on tasks and groups that are left out.

    Args:
        packed: what `collect` has added.
        name: the digest.

    Raises:
        Unusable: it is not of lm-eval's form, no task has a number, or a number is one that lm-eval does not write.
    """
    try:
        form = Results.model_validate(results)
    except ValidationError as error:
        raise Unusable(f"{_FOREIGN} ({refusal(error)})") from None
    config, study, recorded = form.config, form.config.icl.study, results["config"].get("icl")
    if study.split == "dev" and not dev:
        raise Unusable("is of the dev set of a study, on which its hyperparameters were chosen")
    # Before lm-eval 0.4.10, a task is among the groups as a group of nothing.
    groups = {group: members for group, members in form.group_subtasks.items() if members}
    tasks: dict[str, TaskResult] = {}
    decided: list[TaskResult] = []
    sizes: dict[str, int] = {}  # how many documents of a task lm-eval counts for its groups
    notes: list[str] = []
    for task in form.results:
        if task in groups or task not in form.configs:
            continue
        says = ReportedTask.of({**results, KEY: packed}, task)
        try:
            tasks[task], *under_rules = _task(file, results, form, says, task, notes)
            decided += under_rules
            sizes[task] = says.sample_len or tasks[task].documents
        except Unusable as error:
            notes.append(f"task {task!r} is left out: {error}")
    if not tasks:
        raise Unusable("has no result of a task" + (f" ({notes[0]})" if notes else ""))
    weights = {}
    for group in groups:
        try:
            values = form.groups.get(group) or form.results.get(group, {})
            if of_group := _weights(values, _leaves(group, groups), tasks, sizes):
                weights[group] = of_group
        except Unusable as error:
            notes.append(f"group {group!r} is left out: {error}")
    arguments = model_arguments(config.model_args)
    checkpoint = next((key for key in ("pretrained", "model", "path", "engine") if key in arguments), "pretrained")
    pretrained = arguments.pop(checkpoint, form.model_name or "")
    revision, dtype = arguments.pop("revision", None), arguments.pop("dtype", None)
    revision = config.model_sha or revision or config.model_revision or ""
    shared = study.shared
    seconds = shared.seconds if shared else form.total_evaluation_time_seconds
    cells = (shared.cells if shared else None) or 1  # what a study says of its costs is of all cells that share them
    run = Run(
        path=file.path,
        digest=name,
        model=config.model or "",
        pretrained=str(pretrained),
        revision="" if revision == "main" else str(revision),  # "main" is no revision: it moves
        dtype=str(config.model_dtype or dtype or "").removeprefix("torch."),
        arguments=arguments,
        # What was decided is said of the task's results: a rule makes no other method.
        icl={key: value for key, value in recorded.items() if key != "decided"} if isinstance(recorded, dict) else {},
        seed=config.fewshot_seed,
        order=study.order or 0,
        date=form.date or 0.0,
        limit=config.limit,
        tasks=tasks,
        groups=weights,
        results=results,
        model_facts=model_facts(results, form),
        cost="shared" if shared else "alone",
        tokens=None if config.icl.tokens_run is None else config.icl.tokens_run / cells,
        seconds=None if seconds is None else seconds / cells,
        decided=tuple(decided),
    )
    return run, notes


def _leaves(group: str, groups: Mapping[str, Sequence[str]]) -> list[str]:
    """The tasks in a group and in the groups in it."""
    tasks: dict[str, None] = {}
    waiting, seen = [group], {group}
    while waiting:
        for inner in groups[waiting.pop()]:
            if inner not in groups:
                tasks[inner] = None
            elif inner not in seen:
                seen.add(inner)
                waiting.append(inner)
    return list(tasks)


def _weights(
    values: Mapping[str, Any], members: Sequence[str], tasks: Mapping[str, TaskResult], sizes: Mapping[str, int]
) -> dict[str, float]:
    """The weights of tasks in a group; empty if the group has no value and is only a name for several tasks.

    lm-eval's value of a group is the mean over all tasks in it, however deep, by their documents or with equal weights,
    and it does not say which: the one that gives its value, or if both do, its standard error too. `Unusable` is raised
    if its value is no such mean.
    """
    if not members or not any("," in key and number(value) is not None for key, value in values.items()):
        return {}
    if missing := [task for task in members if task not in tasks]:
        raise Unusable(f"it has no result of its task {missing[0]!r}")
    of_members = [tasks[task] for task in members]
    kinds = {(task.metric, task.filter) for task in of_members}
    metric, of_filter = min(kinds)
    value = number(values.get(f"{metric},{of_filter}"))
    if len(kinds) > 1 or value is None:
        raise Unusable("its value is not of the metric that stands for its tasks")
    n = np.array([sizes[task] for task in members], dtype=float)
    # Weights, with the standard error that lm-eval gives with them.
    squares = np.array([math.nan if task.stderr is None else task.stderr for task in of_members]) ** 2
    choices = [(np.full(len(of_members), 1 / len(of_members)), math.sqrt(squares.sum()) / len(of_members))]
    if n.all():
        more = n.sum() - len(n)
        pooled = ((n - 1) * n * squares).sum() / more / n.sum() if more > 0 else math.nan
        choices.insert(0, (n / n.sum(), math.sqrt(pooled)))
    scores = np.array([task.value for task in of_members])
    fitting = [choice for choice in choices if math.isclose(choice[0] @ scores, value, rel_tol=1e-9, abs_tol=1e-12)]
    if not fitting:
        raise Unusable(f"its {metric} is no mean of its tasks', by documents or equal")
    reported = number(values.get(f"{metric}_stderr,{of_filter}"))
    if len(fitting) > 1 and reported is not None:
        fitting = [choice for choice in fitting if math.isclose(choice[1], reported, rel_tol=1e-9)] or fitting
    return dict(zip(members, fitting[0][0].tolist(), strict=True))


# ---------------------------------------------------------------------------------------------------------------
# A task.


def _task(
    file: _File, results: Mapping[str, Any], form: Results, says: ReportedTask, task: str, notes: list[str]
) -> list[TaskResult]:
    """A task's result, then those under decision rules; each with its answers, or with marks that say why they are not
    used. Sentences on rules that are left out are added to `notes`. `Unusable` is raised if the task has no number."""
    rules = form.config.icl.decided.get(task)
    rules = rules if isinstance(rules, dict) else {}
    metric, of_filter, entry = _metric(says, form.config.icl.study.metric, rules)
    value = _value(says, f"{metric},{of_filter}")
    aggregation, higher = _METRICS.get(metric, ("mean", True))
    aggregation = entry.get("aggregation", aggregation)
    if aggregation == "bypass":
        raise Unusable("it was run with --predict_only, without a metric")
    config = form.configs[task]
    study, metadata = form.config.icl.study, says.config.metadata
    sampler = says.config.fewshot_config.get("sampler")
    # As a study says, or a task of this package, or lm-eval's sampler.
    drawn = study.demonstrations or metadata.get("demonstrations") or (None if sampler == "default" else sampler)
    result = TaskResult(
        task=task,
        metric=metric,
        filter=of_filter,
        value=value,
        stderr=number(says.values.get(f"{metric}_stderr,{of_filter}")),
        higher_is_better=says.higher_is_better.get(metric, entry.get("higher_is_better", higher)) is not False,
        aggregation=aggregation if aggregation in (*AGGREGATIONS, *dict(_METRICS.values())) else "unknown",
        shots=(says.config.num_fewshot if says.shots is None else says.shots) or 0,
        documents=says.sizes.effective or says.sample_len or 0,
        version="" if says.version is None else str(says.version),
        template=template(results, config),
        drawn=drawn if isinstance(drawn, str) else None,
        answers=None,
        settings=settings(results, config, entry, of_filter),
    )
    of_task = [result]
    for name, facts in rules.items():
        try:
            rule = RuleFacts.model_validate({**facts, "name": name} if isinstance(facts, dict) else facts)
            if metric == "exact_match":  # of the most probable text, whatever the values of the options
                raise Unusable("no decision rule changes exact_match")
            value = _value(says, f"{metric},{name}")
            stderr = number(says.values.get(f"{metric}_stderr,{name}"))
            of_task.append(replace(result, value=value, stderr=stderr, rule=rule))
        except (ValidationError, Unusable) as error:
            why = refusal(error) if isinstance(error, ValidationError) else error
            notes.append(f"task {task!r} under the decision rule {name!r} is left out: {why}")
    return _with_answers(file, results, says, of_task)


def _value(says: ReportedTask, key: str) -> float:
    """A value of a task. `Unusable` is raised if there is none, or if it is no number."""
    if key not in says.values:
        raise Unusable(f"there is no {key}")
    if (value := number(says.values[key])) is None:
        raise Unusable(f"its {key.partition(',')[0]} is {str(says.values[key])[:40]!r}, which is not a number")
    return value


def _with_answers(
    file: _File, results: Mapping[str, Any], says: ReportedTask, of_task: Sequence[TaskResult]
) -> list[TaskResult]:
    """The results of a task with their answers, or with marks that say why they are not used."""
    of_results: list[tuple[Answers | Unusable | None, list[str]]]
    if says.packed is None:
        of_results = [(answers, []) for answers in _from_samples(file, results, of_task)]
    else:
        of_results = [_from_packed(says.packed, result) for result in of_task]
    complete = []
    for result, (answers, kept_marks) in zip(of_task, of_results, strict=True):
        marks = []
        if _is_accuracy(result) and not 0 <= result.value <= 1:
            marks.append(f"its {result.metric} of {result.value:g} is not between 0 and 1")
        if result.aggregation not in AGGREGATIONS:
            marks.append(
                f"its {result.metric} is not computed from numbers of single documents, so it is shown as reported"
            )
        if isinstance(answers, Answers):
            if answers.items.ndim == 2 and result.metric == "metaicl":  # of classification
                result = replace(result, aggregation="macro_f1")
            why = "" if marks else _contradiction(answers, result)
        else:
            why = "" if answers is None else str(answers)
        marks += [f"its samples are not used: {why}"] if why else kept_marks
        if marks or not isinstance(answers, Answers):
            complete.append(replace(result, marks=tuple(dict.fromkeys(map(_sentence, marks)))))
        else:
            complete.append(replace(result, documents=len(answers.items), answers=answers))
    return complete


def _metric(task: ReportedTask, of_study: str | None, rules: Collection[str]) -> tuple[str, str, Mapping[str, Any]]:
    """The metric that stands for a task, its first filter, and what the task's configuration says of it.

    The metric that a study names comes first; a decision rule is a filter that does not stand for the task itself.
    `Unusable` is raised if the task has no metric.
    """
    filters: dict[str, str] = {}
    for key in task.values:
        metric, comma, of_filter = key.partition(",")
        if comma and not metric.endswith("_stderr") and of_filter not in rules:
            filters.setdefault(metric, of_filter)
    entries: dict[str, Mapping[str, Any]] = {}
    for entry in task.config.metric_list or []:
        name = str(entry.get("metric"))
        for metric in filters:
            if name == metric or f"def {metric}(" in name:  # a metric that is a function has its source as its name
                entries.setdefault(metric, entry)
    for metric in (*filter(None, [of_study]), "acc", "exact_match", *entries, *filters):
        if metric in filters:
            return metric, filters[metric], entries.get(metric, {})
    raise Unusable("it has no metric")


def _is_accuracy(result: TaskResult) -> bool:
    return result.metric.startswith("acc") or result.metric == "exact_match"


def _from_samples(
    file: _File, results: Mapping[str, Any], of_task: Sequence[TaskResult]
) -> Sequence[Answers | Unusable | None]:
    """The answers of these results from the samples beside them, all in one pass through the file; or why they cannot
    be used; or None if there are no samples, or none that the metric is computed from."""
    nothing = [None] * len(of_task)
    if of_task[0].aggregation not in AGGREGATIONS:
        return nothing
    try:
        path = samples_file(file.path, of_task[0].task)
        if not os.path.lexists(path):
            return nothing
        if not _is_inside(path, file.root):
            raise Unusable(f"{path.name} is a link out of its folder, or a device")
        return read_answers(lines(path), [asked(results, result) for result in of_task])
    except Unusable as error:
        return [error] * len(of_task)


def _from_packed(packed: Any, result: TaskResult) -> tuple[Answers | Unusable | None, list[str]]:
    """The answers that `collect` has kept of a result, as those of `_from_samples`, and its marks."""
    if result.rule is not None:
        packed = at(packed, "rules", result.rule.name)
        if packed is None:  # a version that knew no rules kept none of their answers
            return None, []
    try:
        return unpack(packed, f"{result.metric},{result.reported_filter}")
    except Unusable as error:
        return error, []


def samples_file(results: Path, task: str) -> Path:
    """The file beside a results file in which lm-eval puts the samples of a task.

    Raises:
        Unusable: the task's name leads to another folder.
    """
    name = f"samples_{task}_{results.stem.rpartition('_')[2]}.jsonl"
    if Path(name).name != name:
        raise Unusable("its name is none of a file")
    return results.with_name(name)


def asked(results: Mapping[str, Any], result: TaskResult) -> Asked:
    """What a task's results say about its samples."""
    task = ReportedTask.of(dict(results), result.task)
    system, description = results.get("system_instruction"), task.config.description
    delimiter = task.config.fewshot_delimiter or ""
    front = (system, delimiter, description) if system else (description,)
    return Asked(
        metric=result.metric,
        filter=result.reported_filter,
        options=task.config.output_type == "multiple_choice",
        decided=f"metaicl,{result.reported_filter}" in task.values,
        unconditional=any(entry.get("metric") == "acc_mutual_info" for entry in task.config.metric_list or []),
        shots=result.shots,
        front=tuple(text for text in front if isinstance(text, str)),
        delimiter=delimiter,
    )


def _contradiction(answers: Answers, result: TaskResult) -> str:
    """Why answers are not those that the result is of; "" if they can be."""
    items = answers.items
    if result.documents and len(items) != result.documents:
        return f"they are of {len(items)} documents, the results of {result.documents}"
    if np.isinf(items).any() or (np.isnan(items).any() and result.aggregation != "nanmean"):
        return f"the {result.metric} of a document is not a finite number"
    if _is_accuracy(result) and (items.min() < 0 or items.max() > 1):
        return f"the {result.metric} of a document is not between 0 and 1"
    if (items.ndim == 2) != (result.aggregation in _OF_PAIRS):
        return f"the {result.metric} of a document is not what lm-eval's {result.aggregation} is computed from"
    if result.aggregation in ("mean", "nanmean") and not np.isnan(items).all():
        mean = float(np.nanmean(items))
        if not math.isclose(mean, result.value, rel_tol=1e-9, abs_tol=1e-12):
            return f"their mean {result.metric} is {mean:.6g}, in the results it is {result.value:.6g}"
    return ""
