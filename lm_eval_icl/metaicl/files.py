"""MetaICL's settings, and the rows of its files: DATA/{task}/{task}_{k}_{seed}_{split}.jsonl."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lm_eval_icl.errors import InputError, log

# The seeds of MetaICL's few-shot files, and how many rows a training file of a target task has.
SEEDS = (100, 13, 21, 42, 87)
SHOTS = 16
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
    """The lists of a setting.

    Raises:
        InputError: there is none of that name.
    """
    if name not in SETTINGS:
        raise InputError(
            f"MetaICL has no setting {name!r}: give {', '.join(list(SETTINGS)[:-1])} or {list(SETTINGS)[-1]}."
        )
    return SETTINGS[name]


class MetaICLFolder:
    """A folder of MetaICL's data.

    Args:
        path: the folder, which MetaICL calls `data`.
        option: how the user gave it, for messages.

    Raises:
        InputError: there is no such folder, or it holds none of MetaICL's files.
    """

    def __init__(self, path: Path | str, option: str) -> None:
        self.path, self.option = Path(path), option
        if not self.path.is_dir():
            raise InputError(f"{option}: {self.path}: no such folder.")
        if not any(next((self.path / task).glob(f"{task}_*_*_*.jsonl"), None) for task in TASKS):
            nested = self.path / "data"
            advice = f"did you mean {nested}?" if nested.is_dir() else "give the one that its preprocessing calls data."
            raise InputError(
                f"{option}: {self.path}: not a folder of MetaICL's data, since it has no "
                f"TASK/TASK_16_100_test.jsonl or the like: {advice}"
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
        """The demonstrations of a target task: the rows of the seed's training file, in order.

        Raises:
            InputError: the file is not there, or cannot be used.
        """
        path = self._existing(task, SHOTS, seed, "train")
        rows = read_rows(path, task, chosen=True)
        if len(rows) != SHOTS:
            raise InputError(
                f"{path}: has {len(rows)} rows, and MetaICL's training files of target tasks have {SHOTS}."
            )
        return rows

    def test(self, task: str, seed: int | None = None) -> tuple[Row, ...]:
        """The test rows of a target task. If the seed is None, any seed's file is read: MetaICL writes five equal ones.

        Raises:
            InputError: as for `shown`.
        """
        seeds = [other for other in SEEDS if self.file(task, SHOTS, other, "test").is_file()]
        path = self._existing(task, SHOTS, seeds[0] if seed is None and seeds else seed or SEEDS[0], "test")
        return read_rows(path, task, chosen=True)

    def train(self, task: str, k: int) -> tuple[Row, ...]:
        """The rows of a task to train on, k at most.

        Raises:
            InputError: as for `shown`.
        """
        return read_rows(self._existing(task, k, SEEDS[0], "train"), task, chosen=False)

    def _existing(self, task: str, k: int, seed: int, split: str) -> Path:
        path = self.file(task, k, seed, split)
        if not path.is_file():
            names = sorted(file.name for file in self.path.glob(f"{task}/{task}_*_{split}.jsonl"))
            others = f"there are {', '.join(names[:5])}" if names else "there is none of this task"
            raise InputError(f"{self.option}: {path}: no such file ({others}): make it with MetaICL's preprocessing.")
        return path


def checked_seed(seed: int | None) -> int:
    """The seed, if MetaICL has files of it.

    Raises:
        InputError: it has none.
    """
    if seed not in SEEDS:
        raise InputError(
            f"--seed {seed}: MetaICL's files are of the seeds {', '.join(map(str, SEEDS))}: give one of these."
        )
    return seed


def check_missing(option: str, what: str, missing: Sequence[str], total: int, advice: str, skip: bool = False) -> None:
    """Refuse a list of tasks of which some have no files, or say which are left out.

    Args:
        what: what the tasks belong to.
        missing: those without files.
        total: how many tasks there are.
        advice: how the user says that the others are enough.
        skip: the user has said so.

    Raises:
        InputError: some are missing, and not skipped; or all of them.
    """
    if missing and total == 1:
        raise InputError(f"{option}: there are no files of {missing[0]}: make them with MetaICL's preprocessing.")
    if missing and skip and len(missing) < total:
        log.warning("the %s: goes on without %s, which have no files.", what, ", ".join(missing))
    elif missing:
        skipping = f", or give {advice} to go on with the other {total - len(missing)}" if len(missing) < total else ""
        raise InputError(
            f"{option}: {len(missing)} of the {total} {what} have no files there: {', '.join(missing)}: make them with "
            f"MetaICL's preprocessing{skipping}."
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
        if row.options or chosen:
            if len(row.options) < 2:
                raise InputError(f"{where}: has {len(row.options)} options, and a row to choose from has two or more.")
            if classifies(task) and list(row.options) != TASKS[task]["options"]:
                raise InputError(
                    f"{where}: the options {list(row.options)!r} are not those of {task}, {TASKS[task]['options']!r}."
                )
        rows.append(row)
    return tuple(rows)


def read_lines(path: Path, name: str, texts: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a file of JSON lines, each behind its place for messages. They have texts of these names, among them
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
        try:
            fields = json.loads(line)
        except ValueError as error:
            raise InputError(f"{where}: not JSON ({error}).") from error
        if not isinstance(fields, dict):
            raise InputError(f"{where}: must be an object with {', '.join(texts)} and options.")
        for text in texts:
            if not isinstance(fields.get(text), str):
                raise InputError(f"{where}: {text!r} must be a text, and is {fields.get(text)!r}.")
        options = fields["options"] = fields.get("options") or []
        if not isinstance(options, list) or not all(isinstance(option, str) for option in options):
            raise InputError(f"{where}: 'options' must be a list of texts, and is {options!r}.")
        if options and fields["output"] not in options:
            raise InputError(f"{where}: the output {fields['output']!r} is none of the options {options!r}.")
        yield where, fields
