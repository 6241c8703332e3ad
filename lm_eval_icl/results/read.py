"""Results files of lm-eval, and files that `collect` has made, as runs. Since anybody may have written them, files and
tasks that are damaged or contradict themselves are left out or marked, with the reason."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from lm_eval_icl.errors import InputError, one_line
from lm_eval_icl.results.collect import Documents, load
from lm_eval_icl.results.fields import declared, digest, model_arguments, row_fields
from lm_eval_icl.results.records import (
    LeftOutFile,
    Run,
    StudyFacts,
    TaskResult,
    Unusable,
    at,
    count,
    mapping,
    number,
)
from lm_eval_icl.results.tasks import DocumentRow, parse, results_of, rows_from_samples, sentence

_PARENTS = 5  # so many folders above a results file may have its study's `study.json`


def read(
    paths: Sequence[Path], quiet: bool = False, dev: bool = False, metric: str | None = None
) -> tuple[list[Run], list[LeftOutFile]]:
    """The runs in results files of lm-eval and of `collect`, each once: of two files of one run, the file with more
    answers counts. And what was left out: files, and tasks of files that are otherwise used.

    Args:
        paths: files, or folders, which are searched with all folders in them. The samples of a results file are the
            files in the same folder whose names end in the same time or digest. A study's facts are in `study.json` of
            a folder above.
        dev: whether runs on the dev set of a study are read too.
        metric: the metric for every task: a metric that the runs have, or one of `metrics.CALIBRATION`.
    """
    found: list[tuple[int, Run]] = []
    left_out: list[LeftOutFile] = []
    studies: dict[Path, Mapping[str, Any]] = {}
    for path in tqdm(_files(paths), "Reading results", disable=quiet, unit=" files"):
        try:
            with np.errstate(all="ignore"):  # strangers' numbers may be as large as a float can be
                run, notes = _run(path, _cell_facts(path, studies), dev, metric)
            found.append((sum(result.answers is not None for result in run.all_results), run))
            left_out += [LeftOutFile(path, sentence(note)) for note in notes]
        except Unusable as error:
            left_out.append(LeftOutFile(path, sentence(error)))
        except Exception as error:  # whatever a stranger's file contains, the other files are read
            left_out.append(LeftOutFile(path, f"cannot be understood ({one_line(error)})."))
    runs: dict[str, Run] = {}
    for _, run in sorted(found, key=lambda pair: -pair[0]):
        if (kept := runs.setdefault(run.digest, run)) is not run:
            left_out.append(LeftOutFile(run.path, sentence(f"is the same run as {kept.path}")))
    return list(runs.values()), left_out


def _files(paths: Sequence[Path]) -> list[Path]:
    """Every file that may hold results, once. Hidden files in folders are left out."""
    files: dict[str, Path] = {}
    for path in paths:
        if not path.exists():
            raise InputError(
                f"{path} does not exist: give results files of lm-eval, or their folders."
            )
        in_path = [path]
        if path.is_dir():
            found = sorted([*path.rglob("results*.json"), *path.rglob("*.parquet")])
            in_path = [
                f
                for f in found
                if not any(part.startswith(".") for part in f.relative_to(path).parts)
            ]
        for file in in_path:
            files.setdefault(os.path.realpath(file), file)
    return list(files.values())


def _load(path: Path) -> tuple[dict[str, Any], Documents | None]:
    """The JSON of a results file; and the documents' rows, if `collect` has made the file, or else None."""
    if not path.is_file():
        raise Unusable("is not a file, but a device, or a link that leads nowhere")
    if path.suffix == ".parquet":
        return load(path)
    data = path.read_bytes()
    results = parse(data)
    if re.search(
        rb"\\u[dD][89a-fA-F]", data
    ):  # a lone surrogate, which Python cannot print or write
        results = json.loads(json.dumps(results, ensure_ascii=False).encode("utf-8", "replace"))
    if any(not isinstance(at(results, key), dict) for key in ("results", "configs", "config")):
        raise Unusable(
            "is not a results file of lm-eval, which has 'results', 'configs' and 'config'"
        )
    results.pop(
        "samples", None
    )  # they are large; only Python's `simple_evaluate` returns them with the results
    return results, None


def _cell_facts(path: Path, known: dict[Path, Mapping[str, Any]]) -> Mapping[str, Any]:
    """The facts in `study.json` about a cell; empty if the file belongs to no study."""
    for folder in list(path.parents)[:_PARENTS]:
        if folder not in known:
            try:
                content = json.loads((folder / "study.json").read_text(encoding="utf-8"))
                known[folder] = mapping(at(content, "cells"))
            except (OSError, ValueError, RecursionError):
                known[folder] = {}
        if known[folder]:
            return mapping(known[folder].get(path.relative_to(folder).as_posix()))
    return {}


def _run(
    path: Path, cell_facts: Mapping[str, Any], dev: bool, wanted: str | None
) -> tuple[Run, list[str]]:
    """A results file as a run, and sentences about tasks and groups that are left out."""
    results, kept = _load(path)
    config, icl = results["config"], mapping(at(results, "config", "icl"))
    study = StudyFacts.of(mapping(icl.get("study")), cell_facts)
    if study.split == "dev" and not dev:
        raise Unusable(
            "is a run on the dev set of a study, on which its hyperparameters were chosen"
        )
    groups = mapping(results.get("group_subtasks"))
    tasks: dict[str, TaskResult] = {}
    decided: list[TaskResult] = []
    notes: list[str] = []
    for task in results["results"]:
        if task in groups or not isinstance(results["configs"].get(task), dict):
            continue
        documents: list[DocumentRow] | Unusable
        try:
            documents = (
                rows_from_samples(path, results, task) if kept is None else kept.get(task, [])
            )
        except Unusable as error:
            documents = error
        try:
            tasks[task], *under_rules = results_of(results, task, study, documents, wanted, notes)
            decided += under_rules
        except Unusable as error:
            notes.append(f"task {task!r} is left out: {error}")
    if not tasks:
        raise Unusable("has no result of a task" + (f" ({notes[0]})" if notes else ""))
    weights = {}
    for group in groups:
        try:
            if group_weights := _weights(
                mapping(at(results, "groups", group)), _leaves(group, groups), tasks, results
            ):
                weights[group] = group_weights
        except Unusable as error:
            notes.append(f"group {group!r} is left out: {error}")
    rows = row_fields(results, study)
    apart = ("pretrained", "revision", "dtype")  # these are fields of their own
    arguments = {
        name: x
        for name, x in model_arguments(config.get("model_args")).items()
        if name not in apart
    }
    first = results["configs"].get(next(iter(tasks)))
    repetition = declared("repetition", {"config": config, "icl": icl, "task": first})
    date = number(results.get("date")) or 0.0
    return Run(
        path=path,
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
        decided=tuple(decided),
    ), notes


def _leaves(
    group: str, groups: Mapping[str, Sequence[str]], above: tuple[str, ...] = ()
) -> dict[str, None]:
    """The tasks of a group, including those of groups inside it."""
    leaves: dict[str, None] = {}
    for name in groups[group]:
        if name not in groups:
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
    """Task -> weight in a group; empty if the group has no value and is only a name for several tasks.

    lm-eval's value of a group is a mean over its tasks, weighted by documents (preferred if both agree) or equally.
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
