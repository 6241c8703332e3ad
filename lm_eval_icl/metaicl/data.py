"""MetaICL's settings, its data files, and its keys of `--metadata`.

A file is DATA/{task}/{task}_{k}_{seed}_{split}.jsonl.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, TypeAdapter, ValidationError

from lm_eval_icl.errors import InputError, did_you_mean, log

# The seeds of MetaICL's few-shot files.
SEEDS = (100, 13, 21, 42, 87)
# How many rows a training file of a target task has.
SHOTS = 16
_SETTINGS_FILE = Path(__file__).with_name("settings.json")
_FACTS: dict[str, Any] = json.loads(_SETTINGS_FILE.read_text(encoding="utf-8"))
# Setting -> "train", "test" or "unseen_domain" -> names of tasks.
SETTINGS: dict[str, dict[str, list[str]]] = _FACTS["settings"]
# Task -> "task_type" (classification, multi-choice or free-form) and "options" (of classification).
TASKS: dict[str, dict[str, Any]] = _FACTS["tasks"]


@dataclass(frozen=True)
class Row:
    """An input, its output, and the options, one of which is the output.

    A row of free text has no options.
    """

    input: str
    output: str
    options: Annotated[tuple[str, ...], BeforeValidator(lambda texts: texts or ())] = ()

    @property
    def right(self) -> int:
        """The index of the output among the options."""
        return self.options.index(self.output)


SomeRow = TypeVar("SomeRow", bound=Row)


def classifies(task: str) -> bool:
    """Whether a task is measured by macro-F1 over its classes, rather than by accuracy."""
    return bool(TASKS[task]["task_type"] == "classification")


def targets() -> list[str]:
    """The target tasks: every task in the test list of some setting, sorted by name."""
    tasks: set[str] = set()
    for lists in SETTINGS.values():
        tasks.update(lists["test"])
    return sorted(tasks)


def setting_of(name: str) -> dict[str, list[str]]:
    """The lists of tasks of a setting ("train", "test", "unseen_domain").

    Raises:
        InputError: there is no such setting.
    """
    if name not in SETTINGS:
        raise InputError(f"MetaICL has no setting {name!r}: give one of {', '.join(SETTINGS)}.")
    return SETTINGS[name]


OPTION = "--metadata metaicl=..."
# The values that each key of `--metadata` may have.
_VALUES: Mapping[str, tuple[object, ...]] = {"missing": (None, "skip"), "pmi": (False, True)}


class MetaICLFolder:
    """A folder of MetaICL's data.

    Args:
        option: the option by which the user gave the folder, for messages.

    Raises:
        InputError: it is another folder, or (later) a file cannot be used.
    """

    def __init__(self, path: Path | str, option: str) -> None:
        self.path = Path(path)
        self.option = option
        if not any(next((self.path / task).glob(f"{task}_*_*_*.jsonl"), None) for task in TASKS):
            raise InputError(
                f"{option}: {self.path}: not a folder of MetaICL's data, which has files "
                "TASK/TASK_16_100_test.jsonl: give the folder that MetaICL's preprocessing calls "
                "data."
            )

    def file(self, task: str, k: int, seed: int, split: str) -> Path:
        return self.path / task / f"{task}_{k}_{seed}_{split}.jsonl"

    def without_test(self, tasks: Iterable[str]) -> list[str]:
        """The given tasks that have no test file for any seed."""
        return [task for task in tasks if not self._seeds_with_test(task)]

    def _seeds_with_test(self, task: str) -> list[int]:
        return [seed for seed in SEEDS if self.file(task, SHOTS, seed, "test").is_file()]

    def without_train(self, tasks: Iterable[str], k: int) -> list[str]:
        """The given tasks that have no file TASK_k_100_train.jsonl, which has at most k rows."""
        return [task for task in tasks if not self.file(task, k, SEEDS[0], "train").is_file()]

    def shown(self, task: str, seed: int) -> tuple[Row, ...]:
        """The demonstrations of a target task: the rows of the seed's training file, in order."""
        path = self.file(task, SHOTS, seed, "train")
        rows = read_rows(path, task, chosen=True)
        if len(rows) != SHOTS:
            raise InputError(
                f"{path}: has {len(rows)} rows, and MetaICL's training files of target tasks have "
                f"{SHOTS}."
            )
        return rows

    def test(self, task: str, seed: int | None = None) -> tuple[Row, ...]:
        """The test rows of a target task.

        Without a seed, any seed's file is read, since MetaICL's five are equal.
        """
        if seed is None:
            seed = next(iter(self._seeds_with_test(task)), SEEDS[0])
        return read_rows(self.file(task, SHOTS, seed, "test"), task, chosen=True)

    def train(self, task: str, k: int) -> tuple[Row, ...]:
        """The rows of a task to train on, at most k."""
        return read_rows(self.file(task, k, SEEDS[0], "train"), task, chosen=False)


def checked_seed(seed: int | None) -> int:
    """Return the seed, or raise an `InputError` if MetaICL has no files for it."""
    if seed not in SEEDS:
        known = ", ".join(map(str, SEEDS))
        raise InputError(
            f"--seed {seed}: MetaICL has files for the seeds {known}: give one of these."
        )
    return seed


def check_missing(option: str, what: str, missing: Sequence[str], total: int, skip: bool) -> None:
    """Raise an `InputError` if some tasks have no files.

    With `skip`, warn that the run leaves these tasks out, unless no task is left.
    """
    names = ", ".join(missing)
    if missing and skip and len(missing) < total:
        log.warning("the %s: the run goes on without %s, which have no files.", what, names)
    elif missing:
        raise InputError(
            f"{option}: {len(missing)} of the {total} {what} have no files there: {names}: make "
            "them with MetaICL's preprocessing, or go on without them: --metadata missing=skip."
        )


@functools.lru_cache(maxsize=256)
def read_rows(path: Path, task: str, chosen: bool) -> tuple[Row, ...]:
    """The rows of a file.

    Args:
        chosen: whether every row must have options to choose from. Otherwise a row without options
            is free text.

    Raises:
        InputError: the file cannot be read, or a line is not a row of the task; the message has the
            line's number.
    """
    rows = []
    for where, row in read_lines(path, str(path), Row):
        if (row.options or chosen) and len(row.options) < 2:
            raise InputError(
                f"{where}: has {len(row.options)} options, and a row to choose from has two or "
                "more."
            )
        if row.options and classifies(task) and list(row.options) != TASKS[task]["options"]:
            raise InputError(
                f"{where}: has other options than {task}, which has {TASKS[task]['options']!r}."
            )
        rows.append(row)
    return tuple(rows)


def read_lines(path: Path, name: str, kind: type[SomeRow]) -> Iterator[tuple[str, SomeRow]]:
    """Yield (place, row) for each row of a file of JSON lines.

    The place names the file and the line, for messages. If a row has options, the output is one of
    them.

    Args:
        name: the file's name in messages.
        kind: the class of the rows.

    Raises:
        InputError: the file cannot be read or has no rows, or a line is not such a row.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{name}: cannot be read ({error}).") from error
    if not any(line.strip() for line in lines):
        raise InputError(f"{name}: has no rows.")
    row_type = TypeAdapter(kind)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{name}, line {number}"
        try:
            row = row_type.validate_json(line)
        except ValidationError as error:
            fault = error.errors()[0]
            field = "".join(f"{part}: " for part in fault["loc"])
            raise InputError(f"{where}: {field}{fault['msg']}.") from error
        if row.options and row.output not in row.options:
            raise InputError(
                f"{where}: the output {row.output!r} is none of the options {[*row.options]!r}."
            )
        yield where, row


def folder(metadata: Mapping[str, Any]) -> MetaICLFolder:
    """The folder that `--metadata metaicl=...` names.

    Raises:
        InputError: no folder is named, or it is not a folder of MetaICL's data; or another key has
            a wrong value. A misspelt key is an error too, since a run without PMI, for example, has
            numbers that look right.
    """
    known = ("metaicl", *_VALUES)
    for name, value in metadata.items():
        if name in _VALUES and value not in _VALUES[name]:
            raise InputError(
                f"--metadata {name}={value}: must be {_VALUES[name][1]}, or be left out."
            )
        near = did_you_mean(str(name), known)
        if near and name not in known:
            raise InputError(f"--metadata {name}={value}: {near}")
    if not metadata.get("metaicl"):
        raise InputError(
            "MetaICL's tasks need the folder of its data: give --metadata metaicl=DATA_DIR."
        )
    return MetaICLFolder(str(metadata["metaicl"]), OPTION)


def skips(metadata: Mapping[str, Any]) -> bool:
    """Whether the run leaves out tasks that have no files (`--metadata missing=skip`)."""
    return metadata.get("missing") == "skip"


@functools.cache
def check_group(files: MetaICLFolder, setting: str, split: str, skip: bool) -> None:
    """Raise an `InputError` if tasks of a group have no files.

    With `skip`, warn once which tasks are left out.
    """
    tasks = setting_of(setting)[split]
    what = f"{split.replace('_', '-')} tasks of {setting}"
    check_missing(OPTION, what, files.without_test(tasks), len(tasks), skip)
