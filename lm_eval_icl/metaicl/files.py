"""MetaICL's settings, its files (DATA/{task}/{task}_{k}_{seed}_{split}.jsonl), and their keys in `--metadata`."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lm_eval_icl.errors import InputError, did_you_mean, log, refusing

# The seeds of MetaICL's few-shot files, and how many rows a training file of a target task has.
SEEDS, SHOTS = (100, 13, 21, 42, 87), 16
_FACTS: dict[str, Any] = json.loads(Path(__file__).with_name("settings.json").read_text(encoding="utf-8"))
# Setting -> "train", "test" or "unseen_domain" -> names of tasks.
SETTINGS: dict[str, dict[str, list[str]]] = _FACTS["settings"]
# Task -> "task_type" (classification, multi-choice or free-form) and "options" (of classification).
TASKS: dict[str, dict[str, Any]] = _FACTS["tasks"]


@dataclass(frozen=True)
class Row:
    """A row: an input, its output, and the options, one of which is the output; free text has none."""

    input: str
    output: str
    options: tuple[str, ...]

    @property
    def right(self) -> int:
        """The index of the output among the options."""
        return self.options.index(self.output)


def classifies(task: str) -> bool:
    """Whether a task is measured by macro-F1 over its classes; others by accuracy."""
    return bool(TASKS[task]["task_type"] == "classification")


def targets() -> list[str]:
    """The tasks that occur in a test list."""
    return sorted({task for lists in SETTINGS.values() for task in lists["test"]})


def setting_of(name: str) -> dict[str, list[str]]:
    """The lists of a setting; an unknown name is refused."""
    if name not in SETTINGS:
        raise InputError(f"MetaICL has no setting {name!r}: give one of {', '.join(SETTINGS)}.")
    return SETTINGS[name]


OPTION = "--metadata metaicl=..."
# The keys of `--metadata`, and their values.
_VALUES: Mapping[str, tuple[object, ...]] = {"missing": (None, "skip"), "pmi": (False, True)}


class MetaICLFolder:
    """A folder of MetaICL's data. Other folders, and files that cannot be used, are refused.

    Args:
        option: how the user gave it, for messages.
    """

    def __init__(self, path: Path | str, option: str) -> None:
        self.path, self.option = Path(path), option
        if not any(next((self.path / task).glob(f"{task}_*_*_*.jsonl"), None) for task in TASKS):
            raise InputError(
                f"{option}: {self.path}: not a folder of MetaICL's data, which has files TASK/TASK_16_100_test.jsonl: "
                "give the one that its preprocessing calls data."
            )

    def file(self, task: str, k: int, seed: int, split: str) -> Path:
        return self.path / task / f"{task}_{k}_{seed}_{split}.jsonl"

    def without_test(self, tasks: Iterable[str]) -> list[str]:
        """The tasks among these that have no test file of any seed."""
        return [task for task in tasks if not any(self.file(task, SHOTS, seed, "test").is_file() for seed in SEEDS)]

    def without_train(self, tasks: Iterable[str], k: int) -> list[str]:
        """The tasks among these that have no file TASK_k_100_train.jsonl, which has k rows at most."""
        return [task for task in tasks if not self.file(task, k, SEEDS[0], "train").is_file()]

    def shown(self, task: str, seed: int) -> tuple[Row, ...]:
        """The demonstrations of a target task: the rows of the seed's training file, in order."""
        rows = read_rows(path := self.file(task, SHOTS, seed, "train"), task, chosen=True)
        if len(rows) != SHOTS:
            raise InputError(
                f"{path}: has {len(rows)} rows, and MetaICL's training files of target tasks have {SHOTS}."
            )
        return rows

    def test(self, task: str, seed: int | None = None) -> tuple[Row, ...]:
        """The test rows of a target task; for no seed, of any seed's file, as MetaICL writes five equal ones."""
        seeds = [other for other in SEEDS if self.file(task, SHOTS, other, "test").is_file()] or SEEDS
        return read_rows(self.file(task, SHOTS, seed or seeds[0], "test"), task, chosen=True)

    def train(self, task: str, k: int) -> tuple[Row, ...]:
        """The rows of a task to train on, k at most."""
        return read_rows(self.file(task, k, SEEDS[0], "train"), task, chosen=False)


def checked_seed(seed: int | None) -> int:
    """The seed, if MetaICL has files of it; others are refused."""
    if seed not in SEEDS:
        raise InputError(
            f"--seed {seed}: MetaICL's files are of the seeds {', '.join(map(str, SEEDS))}: give one of these."
        )
    return seed


def check_missing(option: str, what: str, missing: Sequence[str], total: int, skip: bool) -> None:
    """Refuse tasks of which some have no files; with `skip`, warn that these are left out."""
    if missing and skip and len(missing) < total:
        log.warning("the %s: goes on without %s, which have no files.", what, ", ".join(missing))
    elif missing:
        raise InputError(
            f"{option}: {len(missing)} of the {total} {what} have no files there: {', '.join(missing)}: make them with "
            "MetaICL's preprocessing, or go on without them: --metadata missing=skip."
        )


@functools.lru_cache(maxsize=256)
def read_rows(path: Path, task: str, chosen: bool) -> tuple[Row, ...]:
    """The rows of a file.

    Args:
        chosen: every row has options to choose from. Otherwise one without options is free text.

    Raises:
        InputError: the file cannot be read, or a line is no such row; the message has the line's number.
    """
    rows = []
    for where, fields in read_lines(path, str(path), ("input", "output")):
        row = Row(fields["input"], fields["output"], tuple(fields["options"]))
        if (row.options or chosen) and len(row.options) < 2:
            raise InputError(f"{where}: has {len(row.options)} options, and a row to choose from has two or more.")
        if row.options and classifies(task) and list(row.options) != TASKS[task]["options"]:
            raise InputError(f"{where}: has other options than {task}, which has {TASKS[task]['options']!r}.")
        rows.append(row)
    return tuple(rows)


def read_lines(path: Path, name: str, texts: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a file of JSON lines, each after its place for messages. They have texts of these names, among them
    `output`, and the list `options`, which is empty or has the output.

    Args:
        name: the file, for messages.

    Raises:
        InputError: the file cannot be read or has no rows, or a line is no such row.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{name}: cannot be read ({error}).") from error
    if not any(line.strip() for line in lines):
        raise InputError(f"{name}: has no rows.")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{name}, line {number}"
        with refusing(f"{where}: not JSON"):
            fields = json.loads(line)
        says = {**fields, "options": fields.get("options") or []} if isinstance(fields, dict) else {"options": None}
        options = says["options"]
        are_texts = isinstance(options, list) and all(isinstance(text, str) for text in options)
        if not (are_texts and all(isinstance(says.get(text), str) for text in texts)):
            raise InputError(f"{where}: must have the texts {', '.join(texts)}, and options, a list of texts.")
        if options and says["output"] not in options:
            raise InputError(f"{where}: the output {says['output']!r} is none of the options {options!r}.")
        yield where, says


def folder(metadata: Mapping[str, Any]) -> MetaICLFolder:
    """The folder that `--metadata metaicl=...` names.

    Raises:
        InputError: there is none, or it is not one of MetaICL's; or another of the settings cannot be used. A
            misspelt key is refused too, since a run without PMI, for example, has numbers that look right.
    """
    for name, value in metadata.items():
        if name in _VALUES and value not in _VALUES[name]:
            raise InputError(f"--metadata {name}={value}: must be {_VALUES[name][1]}, or be left out.")
        if name not in ("metaicl", *_VALUES) and (near := did_you_mean(str(name).lower(), ("metaicl", *_VALUES))):
            raise InputError(f"--metadata {name}={value}: {near}")
    if not metadata.get("metaicl"):
        raise InputError("MetaICL's tasks need the folder of its data: give --metadata metaicl=DATA_DIR.")
    return MetaICLFolder(str(metadata["metaicl"]), OPTION)


def skips(metadata: Mapping[str, Any]) -> bool:
    """Whether tasks without files are left out."""
    return metadata.get("missing") == "skip"


@functools.cache
def check_group(files: MetaICLFolder, setting: str, split: str, skip: bool) -> None:
    """Refuse a group with tasks that have no files, or say once which are left out."""
    tasks = setting_of(setting)[split]
    check_missing(OPTION, f"{split.replace('_', '-')} tasks of {setting}", files.without_test(tasks), len(tasks), skip)
