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
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from lm_eval_icl.errors import InputError, one_line, refusing
from lm_eval_icl.results.calibration import METRICS as CALIBRATION
from lm_eval_icl.results.fields import declared, digest, model_arguments, row_fields
from lm_eval_icl.results.packed import Documents, load
from lm_eval_icl.results.records import LeftOutFile, Run, StudyFacts, TaskResult, Unusable, at, count, mapping, number
from lm_eval_icl.results.samples import DocumentRow, parse
from lm_eval_icl.results.tasks import ResultsFile, documents_of, is_inside, results_of, rows_from_samples, sentence

_FOREIGN = "is no results file of lm-eval, which has 'results', 'configs' and 'config'"
_PARENTS = 5  # folders above a results file in which its study's may be


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
                if known.answered >= run.answered:
                    raise Unusable(f"is the same run as {known.path}")
                left_out[:] = [other for other in left_out if other.path != known.path]
                left_out.append(LeftOutFile(known.path, f"is the same run as {run.path}, with fewer samples."))
            runs[run.digest] = run
            left_out += [LeftOutFile(file.path, sentence(note)) for note in notes]
        except Unusable as error:
            left_out.append(LeftOutFile(file.path, sentence(error)))
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
    return rows_from_samples(ResultsFile(run.path, True, run.path.parent.resolve()), run.results, task)


def _files(paths: Sequence[Path], left_out: list[LeftOutFile]) -> list[ResultsFile]:
    """Each file once."""
    files: dict[str, ResultsFile] = {}
    for path in paths:
        with refusing(f"{_printable(str(path))} cannot be read", kinds=(OSError, ValueError)):
            if path.is_dir():
                in_path = list(_walk(path, left_out))
            elif path.is_file():
                in_path = [ResultsFile(path, True, path.parent.resolve())]
            else:
                kind = "is neither a file nor a folder" if path.exists() else "does not exist"
                raise InputError(f"{_printable(str(path))} {kind}: give results files of lm-eval, or their folders.")
        for file in in_path:
            files.setdefault(os.path.realpath(file.path), file)
    return list(files.values())


def _walk(root: Path, left_out: list[LeftOutFile]) -> Iterator[ResultsFile]:
    """The files of a folder that may hold results, none of them hidden."""

    def leave_out(path: str | Path, why: str) -> None:
        left_out.append(LeftOutFile(Path(_printable(str(path))), why))

    inside = root.resolve()
    for folder, folders, names in os.walk(
        root, onerror=lambda error: leave_out(error.filename, f"cannot be read ({error.strerror}).")
    ):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        times = {Path(name).stem.rpartition("_")[2] for name in names if name.endswith(".json")}
        for name in sorted(name for name in names if not name.startswith(".")):
            path = Path(folder, name)
            if path.suffix == ".jsonl" and name.startswith("samples_") and path.stem.rpartition("_")[2] not in times:
                leave_out(path, "the results of these samples are not beside them.")
            if path.suffix not in (".json", ".parquet"):
                continue
            if _printable(str(path)) != str(path):
                leave_out(path, "its name is not UTF-8.")
            elif not is_inside(path, inside):
                leave_out(path, "is not a file in this folder but a link out of it, or a device.")
            else:
                yield ResultsFile(path, False, inside)


def _printable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def _load(file: ResultsFile) -> tuple[dict[str, Any], Documents | None] | None:
    """The JSON of a results file, and the documents that `collect` has put beside it. None for another kind of file,
    which was found in a folder and has neither the name nor the key of results."""
    if file.path.suffix == ".parquet":
        return load(file.path)
    try:
        data = file.path.read_bytes()
    except OSError as error:
        raise Unusable(f"cannot be read ({error.strerror})") from error
    if not file.named and not file.path.name.startswith("results") and b'"results"' not in data:
        return None
    results = parse(data)
    if not file.named and isinstance(results, dict) and "study" in results and "cells" in results:
        return None  # a study's own file
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


def _run(
    file: ResultsFile,
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
            documents = documents_of(file, results, task) if kept is None else kept.get(task, [])
            tasks[task], *under_rules = results_of(results, task, study, documents, wanted, notes)
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
