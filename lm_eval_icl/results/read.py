"""Results files of lm-eval, and files that `collect` has made, as runs.

Since anybody may have written them, files and tasks that are damaged or contradict themselves are
left out or marked, with the reason.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from lm_eval_icl.errors import InputError, one_line
from lm_eval_icl.results.collect import Documents, load
from lm_eval_icl.results.fields import (
    StudyFacts,
    Unusable,
    at,
    digest,
    has_results,
    mapping,
    model_arguments,
    number,
)
from lm_eval_icl.results.records import LeftOutFile, Run, TaskResult
from lm_eval_icl.results.tasks import parse, results_of, sentence

_PARENTS = 5  # so many folders above a results file may have its study's `study.json`
_LATEST = 253_402_300_800  # seconds before the year 10000


def read(
    paths: Sequence[Path], quiet: bool = False, dev: bool = False, metric: str | None = None
) -> tuple[list[Run], list[LeftOutFile]]:
    """The runs in results files of lm-eval and of `collect`, each once, and what was left out:
    files, and tasks of files that are otherwise used. Of two files of one run, the file with more
    answers counts.

    Args:
        paths: files, or folders, which are searched with all folders in them. The samples of a
            results file are the files in the same folder whose names end in the same time or
            digest. A study's facts are in `study.json` of a folder above.
        dev: whether runs on the dev set of a study are read too.
        metric: the metric for every task: one that the runs have, or of `metrics.CALIBRATION`.
    """
    runs: dict[str, Run] = {}
    left_out: list[LeftOutFile] = []
    studies: dict[Path, Any] = {}
    for path in tqdm(_files(paths), "Reading results", disable=quiet, unit=" files"):
        try:
            folder, facts = _study_of(path, studies)
            with np.errstate(all="ignore"):  # strangers' numbers may be as large as a float can be
                run, notes = _run(path, folder, facts, dev, metric)
        except Unusable as error:
            left_out.append(LeftOutFile(path, sentence(error)))
            continue
        except Exception as error:  # whatever a stranger's file contains, the other files are read
            left_out.append(LeftOutFile(path, f"cannot be understood ({one_line(error)})."))
            continue
        left_out += [LeftOutFile(path, sentence(note)) for note in notes]
        if run.digest in runs:
            copies = [runs[run.digest], run]
            copies.sort(key=lambda copy: -copy.answered)
            run = copies[0]
            left_out.append(LeftOutFile(copies[1].path, f"is the same run as {run.path}."))
        runs[run.digest] = run
    return list(runs.values()), left_out


def _files(paths: Sequence[Path]) -> list[Path]:
    """Every file that may hold results, once. Hidden files in folders are left out."""
    files: dict[str, Path] = {}
    for path in paths:
        if not path.exists():
            raise InputError(
                f"{path} does not exist: give results files of lm-eval, or their folders."
            )
        if not path.is_dir():
            files.setdefault(os.path.realpath(path), path)
            continue
        for file in sorted([*path.rglob("results*.json"), *path.rglob("*.parquet")]):
            if not any(part.startswith(".") for part in file.relative_to(path).parts):
                files.setdefault(os.path.realpath(file), file)
    return list(files.values())


def _load(path: Path) -> tuple[dict[str, Any], Documents | None]:
    """The JSON of a results file, and the documents' rows if `collect` has made the file."""
    if not path.is_file():
        raise Unusable("is not a file, but a device, or a link that leads nowhere")
    if path.suffix == ".parquet":
        return load(path)
    results = parse(path.read_bytes())
    if not has_results(results):
        raise Unusable(
            "is not a results file of lm-eval, which has 'results', 'configs' and 'config'"
        )
    # They are large. Only Python's `simple_evaluate` returns them with the results.
    results.pop("samples", None)
    return results, None


def _study_of(path: Path, known: dict[Path, Any]) -> tuple[str, Mapping[str, Any]]:
    """The folder of the file's study, and the facts in its `study.json` about the cell.

    Both are empty if there is no study.
    """
    path = path.absolute()  # a relative one may begin below its study
    for folder in list(path.parents)[:_PARENTS]:
        if folder not in known:
            known[folder] = None
            with suppress(OSError, ValueError, RecursionError):
                content = json.loads((folder / "study.json").read_text(encoding="utf-8"))
                known[folder] = at(content, "cells")
        cells = known[folder]
        if isinstance(cells, dict):
            facts = cells.get(path.relative_to(folder).as_posix())
            return str(folder), mapping(facts)
    return "", {}


def _run(
    path: Path, folder: str, facts: Mapping[str, Any], dev: bool, wanted: str | None
) -> tuple[Run, list[str]]:
    """A results file as a run, and sentences about tasks and groups that are left out."""
    results, kept = _load(path)
    config = results["config"]
    icl = mapping(config.get("icl"))
    cell = mapping(icl.get("study"))
    study = StudyFacts.of(cell, facts)
    if study.split == "dev" and not dev:
        raise Unusable(
            "is a run on the dev set of a study, on which its hyperparameters were chosen"
        )
    if study.chosen and folder and not facts and kept is None:
        raise Unusable("is no longer chosen on the dev set of its study, which was changed")
    groups = mapping(results.get("group_subtasks"))
    tasks: dict[str, TaskResult] = {}
    decided: list[TaskResult] = []
    notes: list[str] = []
    for task in results["results"]:
        if groups.get(task) or not isinstance(results["configs"].get(task), dict):
            continue
        try:
            rows = None if kept is None else kept.get(task, [])
            tasks[task], *under_rules = results_of(path, results, task, study, rows, wanted, notes)
            decided += under_rules
        except Unusable as error:
            notes.append(f"task {task!r} is left out: {error}")
    if not tasks:
        why = f" ({notes[0]})" if notes else ""
        raise Unusable(f"has no result of a task{why}")
    weights = {}
    for group in groups:
        try:
            members = _leaves(group, groups)
            group_weights = _weights(mapping(at(results, "groups", group)), members, tasks, results)
        except Unusable as error:
            notes.append(f"group {group!r} is left out: {error}")
            continue
        if group_weights:
            weights[group] = group_weights
    apart = ("pretrained", "revision", "dtype")  # these are fields of their own
    arguments = model_arguments(config.get("model_args"))
    date = number(results.get("date")) or 0.0
    if not 0 <= date < _LATEST:
        date = 0.0
    unnamed = "a study" if cell else ""
    return Run(
        path=path,
        digest=digest([json.dumps(results, sort_keys=True)]),
        arguments={name: x for name, x in arguments.items() if name not in apart},
        icl=icl,
        date=date,
        limit=number(config.get("limit")),
        tasks=tasks,
        groups=weights,
        results=results,
        study=study,
        study_name=str(cell.get("id") or folder or unnamed),
        decided=tuple(decided),
    ), notes


def _leaves(
    group: str, groups: Mapping[str, Sequence[str]], above: tuple[str, ...] = ()
) -> dict[str, None]:
    """The tasks of a group, including those of groups inside it."""
    leaves: dict[str, None] = {}
    for name in groups[group]:
        if not groups.get(name):  # earlier lm-evals list tasks as groups of nothing
            leaves[name] = None
        elif name not in (*above, group):
            leaves |= _leaves(name, groups, (*above, group))
    return leaves


def _weights(
    values: Mapping[str, Any],
    members: Mapping[str, None],
    tasks: Mapping[str, TaskResult],
    results: Mapping[str, Any],
) -> dict[str, float]:
    """Task -> weight in a group; empty if the group has no value and only names several tasks.

    lm-eval's value of a group is a mean over its tasks, weighted by documents (preferred if both
    agree) or equally.
    """
    key = next((key for key in values if "," in key and "_stderr," not in key), None)
    if key is None or not members:
        return {}
    if missing := [task for task in members if task not in tasks]:
        raise Unusable(f"it has no result of its task {missing[0]!r}")
    n = np.array([tasks[task].documents for task in members], float)
    scores = np.array([number(at(results, "results", task, key)) or 0.0 for task in members])
    for weights in (n / n.sum(), np.full(len(members), 1 / len(members))):
        if math.isclose(weights @ scores, number(values[key]) or 0.0, rel_tol=1e-9, abs_tol=1e-12):
            return dict(zip(members, weights.tolist(), strict=True))
    raise Unusable(f"its {key} is not the mean of its tasks', weighted by documents or equally")
