"""Results files of lm-eval, with their samples, and files that `collect` has made, as `Run`s.

The files come from anyone: what is damaged, foreign or contradictory is left out or marked, with the reason, and never
stops the others.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from lm_eval_icl.errors import InputError, one_line, refusing
from lm_eval_icl.results.calibration import METRICS as CALIBRATION
from lm_eval_icl.results.fields import column_fields, declared, digest, model_arguments, row_fields, switch_fields
from lm_eval_icl.results.packed import Documents, load
from lm_eval_icl.results.records import (
    Answers,
    LeftOutFile,
    RuleFacts,
    Run,
    StudyFacts,
    TaskResult,
    Unusable,
    at,
    count,
    mapping,
    number,
)
from lm_eval_icl.results.samples import DEPTH, Asked, DocumentRow, answers_of, lines, parse, rows_of
from lm_eval_icl.results.statistics import AGGREGATIONS

RESULTS_BYTES = 32 * 2**20
_FOREIGN = "is no results file of lm-eval, which has 'results', 'configs' and 'config'"
_PARENTS = 5  # folders above a results file in which its study's may be

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
_OF_PAIRS = ("f1", "matthews_corrcoef", "weighted_perplexity", "bits_per_byte", "macro_f1", "ece")


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


def read(
    paths: Sequence[Path], quiet: bool = False, dev: bool = False, metric: str | None = None
) -> tuple[list[Run], list[LeftOutFile]]:
    """Read results files of any of lm-eval's models, and files that `collect` has made.

    Of two files of one run, that with more answers is kept.

    Args:
        paths: files, or folders, which are searched with all folders in them. A results file is known by its content.
            Its samples are the files in the same folder whose names end in the same time, or digest; a study's facts
            are in `study.json` of a folder above.
        quiet: show no progress bar.
        dev: read runs on the dev set of a study too.
        metric: what stands for every task: one that the runs have, or one of `CALIBRATION`.

    Returns:
        The runs, each of them once, and what was left out: files, and tasks of files that are otherwise used.

    Raises:
        InputError: a path does not exist.
    """
    runs: dict[str, Run] = {}
    left_out: list[LeftOutFile] = []
    studies: dict[Path, Mapping[str, Any]] = {}
    for file in tqdm(_files(paths, left_out), "Reading results", disable=quiet, unit=" files"):
        try:
            if (loaded := _load(file)) is None:
                continue
            with np.errstate(all="ignore"):  # strangers' numbers may be as large as a float can be
                run, notes = _run(file, *loaded, _of_study(file.path, studies), dev, metric)
            if (known := runs.get(run.digest)) is not None:
                if _answered(known) >= _answered(run):
                    raise Unusable(f"is the same run as {known.path}")
                left_out[:] = [other for other in left_out if other.path != known.path]
                left_out.append(LeftOutFile(known.path, f"is the same run as {run.path}, with fewer samples."))
            runs[run.digest] = run
            left_out += [LeftOutFile(file.path, _sentence(note)) for note in notes]
        except Unusable as error:
            left_out.append(LeftOutFile(file.path, _sentence(error)))
        except Exception as error:  # whatever a stranger's file has in it, the others are read
            left_out.append(LeftOutFile(file.path, f"cannot be understood ({one_line(error)})."))
    return list(runs.values()), list(dict.fromkeys(left_out))


def document_rows(run: Run, task: str) -> list[DocumentRow]:
    """The rows of a task's documents under all filters; none without samples.

    Raises:
        Unusable: the samples cannot be read.
    """
    if run.path.suffix == ".parquet":
        return load(run.path)[1].get(task, [])
    return _from_samples(_File(run.path, True, run.path.parent.resolve()), run.results, task)


def _answered(run: Run) -> int:
    return sum(result.answers is not None for result in run.all_results)


def _sentence(text: object) -> str:
    """On one line and not too long, whatever names a file has."""
    words = " ".join(str(text).split()).removesuffix(".")
    return f"{words[:600]}..." if len(words) > 600 else f"{words}."


# ---------------------------------------------------------------------------------------------------------------
# Files.


def _files(paths: Sequence[Path], left_out: list[LeftOutFile]) -> list[_File]:
    """Each file once."""
    files: dict[str, _File] = {}
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
            files.setdefault(os.path.realpath(file.path), file)
    return list(files.values())


def _walk(root: Path, left_out: list[LeftOutFile]) -> Iterator[_File]:
    """The files of a folder that may hold results, none of them hidden."""

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
            if path.suffix not in (".json", ".parquet"):
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


def _load(file: _File) -> tuple[dict[str, Any], Documents | None] | None:
    """The JSON of a results file, and the documents that `collect` has put beside it. None for another kind of file,
    which was found in a folder and has neither the name nor the key of results."""
    if file.path.suffix == ".parquet":
        return load(file.path)
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
    if not file.named and isinstance(results, dict) and "study" in results and "cells" in results:
        return None  # a study's own file
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
    results.pop("samples", None)  # of Python's `simple_evaluate`, never of lm-eval's own files: these are large
    return results, None


def _of_study(path: Path, known: dict[Path, Mapping[str, Any]]) -> Mapping[str, Any]:
    """What `study.json` says of a cell; empty if it is of no study."""
    for folder in list(path.parents)[:_PARENTS]:
        if folder not in known:
            try:
                says = json.loads((folder / "study.json").read_text(encoding="utf-8"))
                known[folder] = mapping(at(says, "cells"))
            except (OSError, ValueError, RecursionError):
                known[folder] = {}
        if known[folder]:
            return mapping(known[folder].get(path.relative_to(folder).as_posix()))
    return {}


# ---------------------------------------------------------------------------------------------------------------
# A run.


def _run(
    file: _File,
    results: dict[str, Any],
    kept: Documents | None,
    of_study: Mapping[str, Any],
    dev: bool,
    wanted: str | None,
) -> tuple[Run, list[str]]:
    """A results file as a run, and sentences on tasks and groups that are left out.

    Raises:
        Unusable: it is not of lm-eval's form, or no task has a number.
    """
    if any(not isinstance(results.get(key), dict) for key in ("results", "configs", "config")):
        raise Unusable(_FOREIGN)
    config, icl = results["config"], mapping(at(results, "config", "icl"))
    study = StudyFacts.of(mapping(icl.get("study")), of_study)
    if study.split == "dev" and not dev:
        raise Unusable("is of the dev set of a study, on which its hyperparameters were chosen")
    # Before lm-eval 0.4.10, a task is among the groups as a group of nothing.
    groups = {group: members for group, members in mapping(results.get("group_subtasks")).items() if members}
    tasks: dict[str, TaskResult] = {}
    decided: list[TaskResult] = []
    notes: list[str] = []
    for task in results["results"]:
        if task in groups or not isinstance(results["configs"].get(task), dict):
            continue
        try:
            documents = _documents(file, results, task) if kept is None else kept.get(task, [])
            tasks[task], *under_rules = _task(results, task, study, documents, wanted, notes)
            decided += under_rules
        except Unusable as error:
            notes.append(f"task {task!r} is left out: {error}")
    if not tasks:
        raise Unusable("has no result of a task" + (f" ({notes[0]})" if notes else ""))
    weights = {}
    for group in groups:
        try:
            values = mapping(at(results, "groups", group)) or mapping(results["results"].get(group))
            if of_group := _weights(values, _leaves(group, groups), tasks, results, wanted):
                weights[group] = of_group
        except Unusable as error:
            notes.append(f"group {group!r} is left out: {error}")
    rows = row_fields(results, study)
    arguments = model_arguments(config.get("model_args"))
    for name in ("pretrained", "revision", "dtype"):
        arguments.pop(name, None)
    first = results["configs"].get(next(iter(results["results"])))
    repetition = declared("repetition", {"config": config, "icl": icl, "task": first})
    shared = study.shared
    seconds = number(shared.get("seconds")) if shared else _time(results.get("total_evaluation_time_seconds"))
    cells = (count(shared.get("cells")) if shared else None) or 1  # costs are of all cells that share them
    tokens = number(icl.get("tokens_run"))
    date = number(results.get("date")) or 0.0
    return Run(
        path=file.path,
        digest=digest([json.dumps(results, sort_keys=True)]),
        model=rows["method"].get("method", ""),
        pretrained=rows["model"].get("checkpoint", ""),
        revision=rows["model"].get("revision", ""),
        dtype=rows["model"].get("dtype", ""),
        arguments=arguments,
        icl=icl,
        seed=count(repetition.get("seed", 0 if config.get("fewshot_seed") == 0 else None)),
        order=study.order,
        format=count(repetition.get("format")) or 0,
        date=date if 0 <= date < 253_402_300_800 else 0.0,  # before the year 10000
        limit=number(config.get("limit")),
        tasks=tasks,
        groups=weights,
        results=results,
        study=study,
        rows=rows,
        cost="shared" if shared else "alone",
        tokens=None if tokens is None else tokens / cells,
        seconds=None if seconds is None else seconds / cells,
        decided=tuple(decided),
    ), notes


def _time(text: Any) -> float | None:
    try:
        return number(float(text))  # lm-eval writes it as text
    except (TypeError, ValueError):
        return None


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
    values: Mapping[str, Any],
    members: Sequence[str],
    tasks: Mapping[str, TaskResult],
    results: Mapping[str, Any],
    wanted: str | None,
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
    n = np.array(
        [count(at(results, "results", task, "sample_len")) or tasks[task].documents for task in members], float
    )
    key = min((tasks[task].metric, tasks[task].filter) for task in members)
    if wanted is not None and key[0] in CALIBRATION:  # of which lm-eval's own group has no value
        key = next((m, f) for m, _, f in (k.partition(",") for k in values) if f and not m.endswith("_stderr"))
    of_task = [mapping(at(results, "results", task)) for task in members]
    scores = np.array([number(of.get(f"{key[0]},{key[1]}")) or 0.0 for of in of_task])
    value = number(values.get(f"{key[0]},{key[1]}"))
    if value is None or any(f"{key[0]},{key[1]}" not in of for of in of_task):
        raise Unusable("its value is not of the metric that stands for its tasks")
    # Weights, with the standard error that lm-eval gives with them.
    errors = [number(of.get(f"{key[0]}_stderr,{key[1]}")) for of in of_task]
    squares = np.array([math.nan if error is None else error for error in errors]) ** 2
    choices = [(np.full(len(members), 1 / len(members)), math.sqrt(squares.sum()) / len(members))]
    if n.all():
        more = n.sum() - len(n)
        pooled = ((n - 1) * n * squares).sum() / more / n.sum() if more > 0 else math.nan
        choices.insert(0, (n / n.sum(), math.sqrt(pooled)))
    fitting = [choice for choice in choices if math.isclose(choice[0] @ scores, value, rel_tol=1e-9, abs_tol=1e-12)]
    if not fitting:
        raise Unusable(f"its {key[0]} is no mean of its tasks', by documents or equal")
    reported = number(values.get(f"{key[0]}_stderr,{key[1]}"))
    if len(fitting) > 1 and reported is not None:
        fitting = [choice for choice in fitting if math.isclose(choice[1], reported, rel_tol=1e-9)] or fitting
    return dict(zip(members, fitting[0][0].tolist(), strict=True))


# ---------------------------------------------------------------------------------------------------------------
# A task.


def _task(
    results: Mapping[str, Any],
    task: str,
    study: StudyFacts,
    documents: Sequence[DocumentRow] | Unusable,
    wanted: str | None,
    notes: list[str],
) -> list[TaskResult]:
    """A task's result, then those under decision rules; each with its answers, or with marks that say why they are not
    used. Sentences on rules that are left out are added to `notes`. `Unusable` is raised if the task has no number."""
    values, config = mapping(results["results"][task]), results["configs"][task]
    rules = mapping(at(results, "config", "icl", "decided", task))
    for key, value in values.items():
        if "_stderr," in key and (number(value) or 0) < 0:
            raise Unusable(f"{key.partition(',')[0]} is {value:g}, and no standard error is negative")
    metric, of_filter, entry = _metric(values, config, wanted or study.metric, rules)
    aggregation, higher = _METRICS.get(metric, ("mean", True))
    aggregation = str(entry.get("aggregation", aggregation))
    is_of_probabilities = metric in CALIBRATION
    if is_of_probabilities:
        aggregation, higher = CALIBRATION[metric].aggregation, CALIBRATION[metric].higher_is_better
    if aggregation == "bypass":
        raise Unusable("it was run with --predict_only, without a metric")
    sampler = at(config, "fewshot_config", "sampler")
    switches = switch_fields(results, task, study, sampler)
    size = count(at(results, "n-samples", task, "effective")) or count(values.get("sample_len")) or 0
    shown = at(results, "higher_is_better", task, metric)
    known = {*AGGREGATIONS, *(name for name, _ in _METRICS.values())}
    plain = TaskResult(
        task=task,
        metric=metric,
        filter=of_filter,
        value=math.nan,
        stderr=None,
        higher_is_better=(entry.get("higher_is_better", higher) if shown is None else shown) is not False,
        aggregation=aggregation if aggregation in known else "unknown",
        shots=int(number(int(switches["shots"] or 0)) or 0) if str(switches["shots"]).isdecimal() else 0,
        documents=size,
        answers=None,
        column=column_fields(results, task, metric, of_filter, size),
        switches=switches,
    )
    of_task = [plain]
    for name, facts in rules.items():
        if metric == "exact_match":  # of the most probable text, whatever the values of the options
            notes.append(f"task {task!r} under the decision rule {name!r} is left out: no rule changes exact_match")
        elif not isinstance(facts, dict) or type(facts.get("transductive")) is not bool:
            notes.append(f"task {task!r} under the decision rule {name!r} is left out: its record is damaged")
        else:
            labels, corpus = count(facts.get("labels")), count(facts.get("corpus"))
            rule = RuleFacts(name, mapping(facts.get("arguments")), facts["transductive"], labels, corpus)
            of_task.append(replace(plain, rule=rule))
    complete = []
    for result in of_task:
        try:
            stderr = number(values.get(f"{metric}_stderr,{result.reported_filter}"))
            if not is_of_probabilities:
                result = replace(result, value=_value(values, metric, result.reported_filter), stderr=stderr)
            complete.append(_with_answers(result, documents))
        except Unusable as error:
            if result.rule is None:
                raise
            notes.append(f"task {task!r} under the decision rule {result.rule.name!r} is left out: {error}")
    return complete


def _value(values: Mapping[str, Any], metric: str, of_filter: str) -> float:
    key = f"{metric},{of_filter}"
    if key not in values:
        raise Unusable(f"there is no {key}")
    if (value := number(values[key])) is None:
        raise Unusable(f"its {metric} is {str(values[key])[:40]!r}, which is not a number")
    return value


def _metric(
    values: Mapping[str, Any], config: Mapping[str, Any], wanted: str | None, rules: Mapping[str, Any]
) -> tuple[str, str, Mapping[str, Any]]:
    """The metric that stands for a task, its first filter, and what the task's configuration says of it.

    The metric that is asked for comes first; a decision rule is a filter that does not stand for the task itself.
    `Unusable` is raised if the task has no metric.
    """
    filters: dict[str, str] = {}
    for key in values:
        metric, comma, of_filter = key.partition(",")
        if comma and not metric.endswith("_stderr") and of_filter not in rules:
            filters.setdefault(metric, of_filter)
    if wanted in CALIBRATION and filters:
        return str(wanted), next(iter(filters.values())), {}
    entries: dict[str, Mapping[str, Any]] = {}
    listed = config.get("metric_list")
    for entry in listed if isinstance(listed, list) else []:
        name = str(at(entry, "metric"))
        for metric in filters:
            if name == metric or f"def {metric}(" in name:  # a metric that is a function has its source as its name
                entries.setdefault(metric, entry)
    for metric in (*filter(None, [wanted]), "acc", "exact_match", *entries, *filters):
        if metric in filters:
            return metric, filters[metric], entries.get(metric, {})
    raise Unusable("it has no metric")


def _documents(file: _File, results: Mapping[str, Any], task: str) -> list[DocumentRow] | Unusable:
    try:
        return _from_samples(file, results, task)
    except Unusable as error:
        return error


def _from_samples(file: _File, results: Mapping[str, Any], task: str) -> list[DocumentRow]:
    """The rows of the samples beside the results."""
    path = samples_file(file.path, task)
    if not os.path.lexists(path):
        return []
    if not _is_inside(path, file.root):
        raise Unusable(f"{path.name} is a link out of its folder, or a device")
    return list(rows_of(lines(path), asked(results, task)))


def samples_file(results: Path, task: str) -> Path:
    """The file beside a results file in which lm-eval puts the samples of a task.

    Raises:
        Unusable: the task's name leads to another folder.
    """
    name = f"samples_{task}_{results.stem.rpartition('_')[2]}.jsonl"
    if Path(name).name != name:
        raise Unusable("its name is none of a file")
    return results.with_name(name)


def options(results: Mapping[str, Any], task: str) -> list[str]:
    """The names of the options, where all documents have the same: the configuration lists them."""
    choices = at(results, "configs", task, "doc_to_choice")
    are_names = isinstance(choices, list) and all(isinstance(name, str) for name in choices)
    return choices if are_names and len(set(choices)) == len(choices) else []


def asked(results: Mapping[str, Any], task: str) -> Asked:
    """What a task's results say about its samples."""
    values, config = mapping(results["results"][task]), results["configs"][task]
    metrics = dict.fromkeys(key.partition(",")[0] for key in values if "," in key and "_stderr," not in key)
    filters = [key.partition(",")[2] for key in values if "," in key]
    system, delimiter = results.get("system_instruction"), config.get("fewshot_delimiter", "\n\n")
    delimiter = delimiter if isinstance(delimiter, str) else ""
    front = (system, delimiter, config.get("description")) if system else (config.get("description"),)
    listed = config.get("metric_list")
    return Asked(
        filter=filters[0] if filters else "none",
        options=config.get("output_type") == "multiple_choice",
        decided=any(key.startswith("metaicl,") for key in values),
        unconditional=any(at(e, "metric") == "acc_mutual_info" for e in (listed if isinstance(listed, list) else [])),
        shots=int(declared("switch", {"file": results, "task": config}, task).get("shots", 0)),
        front=tuple(text for text in front if isinstance(text, str)),
        delimiter=delimiter,
        metrics=metrics,
    )


def _with_answers(result: TaskResult, documents: Sequence[DocumentRow] | Unusable) -> TaskResult:
    """A result with its answers, or with marks that say why they are not used."""
    marks, answers = [], None
    is_accuracy = result.metric.startswith("acc") or result.metric == "exact_match"
    if is_accuracy and not 0 <= result.value <= 1:
        marks.append(f"its {result.metric} of {result.value:g} is not between 0 and 1")
    if result.aggregation not in AGGREGATIONS:
        marks.append(f"its {result.metric} is not computed from numbers of single documents: it is shown as reported")
    elif isinstance(documents, Unusable):
        marks.append(f"its samples are not used: {documents}")
    elif documents and not marks:
        try:
            rows = [row for row in documents if row.filter == result.reported_filter]
            answers = answers_of(rows, result.metric, result.shots)
            if answers.items.ndim == 2 and result.metric == "metaicl":  # of classification
                result = replace(result, aggregation="macro_f1")
            if result.metric in CALIBRATION:
                metric = AGGREGATIONS[result.aggregation]
                result = replace(result, value=float(metric.value(metric.features(answers.items).sum(axis=0))))
            if why := _contradiction(answers, result, is_accuracy):
                raise Unusable(why)
        except Unusable as error:
            marks.append(f"its samples are not used: {error}")
            answers = None
    if math.isnan(result.value):
        raise Unusable(marks[0] if marks else f"its {result.metric} needs samples (--log_samples)")
    if answers is None:
        return replace(result, marks=tuple(dict.fromkeys(map(_sentence, marks))))
    size = str(len(answers.items))
    switches = {**result.switches, "documents": answers.documents}
    column = {**result.column, "documents": size}
    return replace(result, documents=len(answers.items), answers=answers, switches=switches, column=column)


def _contradiction(answers: Answers, result: TaskResult, is_accuracy: bool) -> str:
    """Why answers are not those that the result is of; "" if they can be."""
    items = answers.items
    if result.documents and len(items) != result.documents:
        return f"they are of {len(items)} documents, the results of {result.documents}"
    if np.isinf(items).any() or (np.isnan(items).any() and result.aggregation != "nanmean"):
        return f"the {result.metric} of a document is not a finite number"
    if is_accuracy and (items.min() < 0 or items.max() > 1):
        return f"the {result.metric} of a document is not between 0 and 1"
    if (items.ndim == 2) != (result.aggregation in _OF_PAIRS):
        return f"the {result.metric} of a document is not what lm-eval's {result.aggregation} is computed from"
    if result.aggregation in ("mean", "nanmean") and not np.isnan(items).all():
        mean = float(np.nanmean(items))
        if not math.isclose(mean, result.value, rel_tol=1e-9, abs_tol=1e-12):
            return f"their mean {result.metric} is {mean:.6g}, in the results it is {result.value:.6g}"
    return ""
