"""The demonstrations that the models of a study choose: each choice is made once, and kept in the study's folder."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from lm_eval_icl import version
from lm_eval_icl.demonstrations import kept
from lm_eval_icl.demonstrations.choosing import Chooser
from lm_eval_icl.demonstrations.how import How
from lm_eval_icl.errors import CannotWrite, InputError, log, reason, writing
from lm_eval_icl.harness.choosing import predictor
from lm_eval_icl.harness.pools import PoolOfTask
from lm_eval_icl.studies import tasks as study_tasks
from lm_eval_icl.studies.cells import Cell, Model, plain
from lm_eval_icl.studies.progress import StudyProgress
from lm_eval_icl.studies.run import Models, ends_all

# model's folder, task, number of demonstrations, seed, how
Key = tuple[str, str, int, int, str]


class Choices:
    """The demonstrations that the models of a study have chosen. No document of its dev set is among them.

    Args:
        progress: the study as it stands. With `rerun`, choices that other code has made, or that are damaged, are made
            again.

    Attributes:
        failed: why a choice could not be made, or its file not be read.

    Raises:
        InputError: a task's demonstrations cannot be chosen.
    """

    def __init__(self, progress: StudyProgress) -> None:
        self.study, self.folder, self.rerun = progress.study, progress.folder, progress.rerun
        self.shots = {name: task.shots for name, task in progress.grid.tasks.items()}
        self.hows = [how for how in self.study.demonstrations if isinstance(how, How)]
        self.failed: dict[Key, str] = {}
        self._known: dict[Key, dict[str, Any]] = {}
        self._pools: dict[str, PoolOfTask] = {}
        self._contents: dict[str, str] = {}  # digests of what is chosen from
        for name, leaf in progress.leaves.items():
            most = max(self.shots[name])
            if not self.hows or not most:
                continue
            rows = progress.dev.get(name, [])
            documents = leaf.task.training_docs() if rows else []
            dev = [documents[i] for i in rows]
            self._pools[name] = PoolOfTask(leaf.task, dev)
            self._contents[name] = study_tasks.digest_of([study_tasks.contents(leaf, self.study.seeds[0]), *dev])
            if most > (number := len(self._pools[name].rows)):
                raise InputError(f"task {name!r}: {most} demonstrations asked for, {number} there: lower num_fewshot.")

    @staticmethod
    def key(cell: Cell) -> Key | None:
        """The key of the choice that a cell needs; None if no model is to choose."""
        if not isinstance(cell.demonstrations, How) or not cell.num_fewshot:
            return None
        return cell.model.folder, cell.task, cell.num_fewshot, cell.seed, str(cell.demonstrations)

    def of(self, cell: Cell) -> dict[str, Any] | None:
        """What a model has chosen for a cell. None if no model is to choose, if none has chosen yet, or if the file of
        the choice is damaged."""
        return None if (key := self.key(cell)) is None else self._read(key)

    def _read(self, key: Key) -> dict[str, Any] | None:
        if key not in self._known:
            _, task, shots, seed, _ = key
            try:
                choice = kept.read(self.path(key), self._pools[task], shots, seed)
            except InputError as error:
                if not self.rerun:
                    self.failed[key] = error.message
                return None
            if choice is None or (self.rerun and choice["version"] != version.version()):
                return None
            self._known[key] = choice
        return self._known[key]

    def path(self, key: Key) -> Path:
        """The file of a choice, which need not be there."""
        model, task, shots, seed, how = key
        name = f"{plain(f'{task},{how}')},n={shots},seed={seed},{self._contents[task]}.json"
        return self.folder.path / "choices" / model / name

    def keys(self, model: str, task: str) -> dict[Key, How]:
        """The choices of a model, by its folder, for a task: seed by seed, as the documents depend on it."""
        return {
            (model, task, shots, seed, str(how)): how
            for seed in self.study.seeds
            for how in self.hows
            for shots in self.shots[task]
            if shots
        }

    def make(self, model: Model, models: Models, task: str) -> None:
        """Choose what is missing for a task, in the first process of a launch.

        Raises:
            InputError: another checkpoint of the same name has chosen before.
        """
        name, identity = str(models.arguments["pretrained"]), models.first.model_identity()
        about = kept.about_model(name, identity)
        missing = []
        for key, how in self.keys(model.folder, task).items():
            choice = self._read(key)
            if choice is not None and choice["model"] != about:
                raise InputError(
                    f"--output {self.folder.path}: the weights or the tokenizer of {name} have changed since it chose "
                    "demonstrations: give another folder."
                )
            if choice is None and key not in self.failed:
                missing.append((key, how))
        if not missing:
            return
        pool, under_icl = self._pools[task], predictor(models.first)
        choosers: dict[int, Chooser] = {}
        level = log.level
        log.setLevel(logging.WARNING)  # what a search will cost and what does not fit, which cells keep quiet
        try:
            for key, how in missing:
                _, _, shots, seed, _ = key
                try:
                    chooser = choosers.setdefault(how.pool, Chooser(pool, under_icl, how.pool))
                    chosen = chooser.choose(how.name, shots, seed, how.balance, **how.arguments)
                except Exception as error:
                    if ends_all(error):
                        raise
                    self.failed[key] = f"task {task!r}: demonstrations={how}: {reason(error)}"
                    continue
                with writing(f"--output {self.folder.path}", CannotWrite):
                    kept.write(self.path(key), how, pool, shots, seed, chosen, about)
        finally:
            log.setLevel(level)
