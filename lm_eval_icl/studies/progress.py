"""A study as it stands in its folder: which cells there are, what they gave, what was chosen and what has failed."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers
from lm_eval.evaluator_utils import get_sample_size
from tqdm import tqdm

from lm_eval_icl import version
from lm_eval_icl.decisions.how import written
from lm_eval_icl.demonstrations.how import How
from lm_eval_icl.errors import InputError
from lm_eval_icl.harness.deciding import check_options, give_rules, meaningless
from lm_eval_icl.harness.metaicl import MetaICLTask
from lm_eval_icl.studies import tasks as study_tasks
from lm_eval_icl.studies.cells import Cell, Grid, GridTask, Model
from lm_eval_icl.studies.choose import DevChoice, best
from lm_eval_icl.studies.folder import StudyFolder
from lm_eval_icl.studies.grid import Study
from lm_eval_icl.studies.run import Options, code_of
from lm_eval_icl.studies.tasks import Leaf

_DOCUMENTS = 20  # of a task, for which the queries of decision rules are tried


class StudyProgress:
    """The cells of a study that are done, what they gave, what was chosen on the dev set, and what has failed.

    Args:
        grid: which cells there are.
        leaves: the study's tasks, loaded.
        dev: the rows of each task's training split that are its dev set; empty if there is none.
        folder: the study's folder. Nothing is written to it.
        options: where and how fast the study runs.
        rerun: count cells as missing that are damaged, that other code has made, or that do not say which code.

    Attributes:
        failed: by the cell's path, why it could not be run.
    """

    def __init__(
        self,
        grid: Grid,
        leaves: Mapping[str, Leaf],
        dev: Mapping[str, list[int]],
        folder: StudyFolder,
        options: Options,
        rerun: bool = False,
    ) -> None:
        self.grid, self.study, self.models = grid, grid.study, grid.models
        self.leaves, self.dev, self.folder, self.options, self.rerun = leaves, dev, folder, options, rerun
        self.failed: dict[str, str] = {}
        self._read: dict[str, tuple[int, dict[str, Any] | None]] = {}
        self._choices: dict[str, DevChoice] = {}

    # Which cells are known, and what has become of them.

    def known_cells(self, model: Model) -> list[Cell]:
        """The cells of a model that are known so far, those on the dev set first."""
        return [*self.grid.dev_cells(model), *self.grid.test_cells(model, self.choice)]

    def all_cells(self) -> list[Cell]:
        """The cells of all models that are known so far."""
        return [cell for model in self.models for cell in self.known_cells(model)]

    def missing(self, cells: Sequence[Cell]) -> list[Cell]:
        """Those of the cells that are neither done nor failed."""
        return [cell for cell in cells if not self.is_done(cell) and cell.path not in self.failed]

    def fail(self, cells: Sequence[Cell], why: str) -> None:
        """Note why cells could not be run, and say so. What is known to have failed keeps its reason."""
        new = [cell.path for cell in cells if cell.path not in self.failed]
        self.failed |= dict.fromkeys(new, why)
        if new:
            more = f" and {len(new) - 1} more" if len(new) > 1 else ""
            tqdm.write(f"failed: {new[0]}{more}: {why}", file=sys.stderr)

    def fail_what_is_not_chosen(self) -> None:
        """Note the cells on the test set that are not known, since cells on the dev set have failed: for each choice,
        the first that might have been chosen."""
        noted = set()
        for model in self.models:
            for variant in filter(self.study.chooses, self.grid.variants(model)):
                for cell in self.grid.cells("test", model, variant):
                    if cell.order > 0 or self.choice(cell) is not None:
                        continue
                    on_dev = [dev_cell.path for *_, cells in self.grid.candidates(cell) for dev_cell in cells]
                    if on_dev[0] not in noted:
                        noted.add(on_dev[0])
                        failed = next((path for path in on_dev if path in self.failed), on_dev[0])
                        why = self.failed.get(failed, "it was removed while the study ran.")
                        self.fail([cell], f"nothing can be chosen on the dev set, as {failed} failed: {why}")

    def is_done(self, cell: Cell) -> bool:
        """Whether a cell is there and whole, and where cells are run again, of this code. One that is not whole is
        noted as failed."""
        return self._read_if_done(cell) is not None

    def _read_if_done(self, cell: Cell) -> dict[str, Any] | None:
        stamp, results = self._read.get(cell.path, (0, None))
        if results is not None:
            return results
        try:
            now = self.folder.results(cell).stat().st_mtime_ns
        except OSError:
            return None
        if now != stamp:  # otherwise it has been looked at, and is damaged, or of other code
            try:
                results = self.folder.read(cell, self.leaves[cell.task].task.task_name)
            except InputError as error:
                if not self.rerun:
                    self.fail([cell], error.message)
            if results is not None and self.rerun and self._made_by(cell, results):
                results = None
            self._read[cell.path] = now, results
        return results

    def results(self, cell: Cell) -> dict[str, Any]:
        """The results, configuration and numbers of samples of a cell that is done."""
        results = self._read_if_done(cell)
        assert results is not None, cell.path
        return results

    def facts(self, cell: Cell) -> dict[str, Any]:
        """What a cell that is done says under `config.icl.study`."""
        facts: dict[str, Any] = self.results(cell)["config"]["icl"]["study"]
        return facts

    def seconds(self, cell: Cell) -> float | None:
        """What scoring a cell that is done took, its share if others were scored with it; None if it was not measured,
        as for `hf` and for texts."""
        shared = self.facts(cell)["shared"]
        return float(shared["seconds"]) / shared["cells"] if "seconds" in shared else None

    def tokens_per_second(self, model: Model) -> float | None:
        """How fast a model was on its cells that are done; None if none of them was measured."""
        tokens, total = 0.0, 0.0
        for cell in filter(self.is_done, self.known_cells(model)):
            if seconds := self.seconds(cell):
                tokens += self.results(cell)["config"]["icl"]["tokens_run"] / self.facts(cell)["shared"]["cells"]
                total += seconds
        return tokens / total if total else None

    @staticmethod
    def _made_by(cell: Cell, results: Mapping[str, Any]) -> str:
        """Which code has made a cell, and has chosen its demonstrations: "" for this code."""
        facts = results["config"]["icl"]["study"]
        pairs = [(facts.get("code"), code_of(cell.variant.method))]
        if "choice" in facts:
            pairs.append((facts["choice"].get("version"), version.version()))
        if any(None in pair for pair in pairs):
            return "unknown code"
        return "" if all(theirs == ours for theirs, ours in pairs) else "other code"

    def state(self, cell: Cell) -> str:
        """Whether a cell is "done" (with the code, if it is not this one), "failed" or "missing"."""
        if not self.is_done(cell):
            return "failed" if cell.path in self.failed else "missing"
        code = self._made_by(cell, self.results(cell))
        return f"done by {code}" if code else "done"

    def score(self, cell: Cell, rule: str = "") -> float:
        """A cell's metric, the dev set's own on the dev set, under a decision rule or by what the model says."""
        metric = self.study.dev.metric if self.study.dev and cell.split == "dev" else self.study.metric
        values = self.results(cell)["results"][self.leaves[cell.task].task.task_name]
        if rule:
            return float(values[f"{metric},{rule}"])
        # Of several filters of the task's own, the first counts.
        return float(next(value for name, value in values.items() if name.startswith(f"{metric},")))

    def choice(self, cell: Cell) -> DevChoice | None:
        """What the dev set chooses among the alternatives to this cell (`Grid.candidates`), by the mean over orders
        (`choose.best`); None if a cell on the dev set is missing."""
        candidates, dev = self.grid.candidates(cell), self.study.dev
        key = candidates[0][-1][0].path
        if key in self._choices:
            return self._choices[key]
        assert dev is not None
        if not all(self.is_done(on_dev) for *_, cells in candidates for on_dev in cells):
            return None
        task = self.leaves[cell.task].task

        def documents(on_dev: Cell) -> int:
            return int(self.results(on_dev)["n-samples"][task.task_name]["effective"])

        scores = [[(self.score(on_dev, rule), documents(on_dev)) for on_dev in cells] for *_, rule, cells in candidates]
        index, means = best(scores, task.higher_is_better().get(dev.metric, True))
        variant, seed, rule, _ = candidates[index]
        curve: list[dict[str, Any]] = []
        for (candidate, of_seed, of_rule, _), mean in zip(candidates, means, strict=True):
            rules = {"decide": of_rule or "none"} if "decide" in dev.choose else {}
            curve.append({"arguments": {**candidate.arguments, **rules}, "seed": of_seed, "score": mean})
        values = [{**point["arguments"], "seeds": point["seed"]} for point in curve]
        names = [name for name in dev.choose if len({str(of_one.get(name)) for of_one in values}) > 1]
        self._choices[key] = DevChoice(variant, seed, rule, tuple(curve), tuple(names))
        return self._choices[key]

    # What comes out.

    def record(self) -> dict[str, Any]:
        """What `study.json` says of the grid, the versions, the cells, what failed and what was chosen. The command
        adds the form of the file and how much was run."""
        cells = self.all_cells()
        choices: dict[str, Any] = {}
        for cell in filter(self.is_done, cells):
            if cell.split == "test" and self.study.chooses(cell.variant):
                choice = self.choice(cell)
                assert choice is not None  # the cell would not be known
                rule = {"decide": choice.rule or "none"} if "decide" in choice.names else {}
                chosen = {**choice.variant.arguments, "seed": choice.seed, **rule}
                choices[cell.path] = {"chosen": chosen, "curve": choice.curve}
        trained = {model.checkpoint: self.folder.is_trained(model) for model in self.models if model.training}
        return {
            "study": self.study.model_dump(),
            "versions": {
                "lm_eval_icl": version.version(),
                "python": platform.python_version(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
            "limit": self.options.limit,
            "checkpoints": {name: "done" if is_there else "missing" for name, is_there in trained.items()},
            "cells": {cell.path: self.state(cell) for cell in cells},
            "failed": self.failed,
            "dev": self.dev,
            "choices": choices,
        }

    def work(self) -> dict[str, float]:
        """How many passes and tokens the finished cells took, those of `hf` not counted. What was run again after an
        interruption counts once."""
        total = {"passes": 0.0, "tokens": 0.0}
        for cell in filter(self.is_done, self.all_cells()):
            icl = self.results(cell)["config"]["icl"]
            shared = icl["study"]["shared"]
            if "passes" in shared:
                total["passes"] += shared["passes"] / shared["cells"]
                total["tokens"] += icl["tokens_run"] / shared["cells"]
        return {name: round(number) for name, number in total.items()}


def open_study(
    study: Study,
    folder: StudyFolder,
    options: Options,
    include_path: str | None,
    rerun: bool = False,
    lacking: dict[str, str] | None = None,
) -> StudyProgress:
    """Load a study's tasks, draw its demonstrations and its dev set, and see what of it is in its folder.

    Args:
        include_path: a folder of further tasks.
        rerun: as of `StudyProgress`.
        lacking: notes here why a task cannot be loaded, by its name in the study, and goes on without it.

    Raises:
        InputError: a task cannot be loaded, its demonstrations or dev set cannot be drawn, or a metric or column does
            not exist.
    """
    for variant in study.variants:
        code_of(variant.method)  # now: files may be edited while a study runs
    leaves = {leaf.name: leaf for leaf in study_tasks.load(study.tasks, include_path, study.metadata, lacking)}
    metrics = {study.metric, *([study.dev.metric] if study.dev else [])}
    dev: dict[str, list[int]] = {}
    tasks = {}
    for name, leaf in leaves.items():
        shots = tuple(dict.fromkeys(leaf.shots(n) for n in study.num_fewshot))
        if study.rules:
            check_options(leaf.task, study.rules)
        for n in shots:
            for how in study.demonstrations:
                study_tasks.draw(leaf, n, how, study.seeds[0], study.orders - 1)
        for metric in metrics:
            if metric not in (known_metrics := leaf.task.aggregation()):
                known = ", ".join(sorted(known_metrics))
                raise InputError(f"metric: task {name!r} has no {metric!r}, only {known}.")
            if without := [str(rule) for rule in study.rules if metric in meaningless(rule)]:
                raise InputError(f"metric: {metric} means nothing under decide={without[0]}: give another.")
        if study.rules:  # their queries behind the first documents are made, so that what does not fit the task is told
            how = study.demonstrations[0]
            how = "random" if isinstance(how, How) else how  # drawn ones stand for those that a model will choose
            limit = min(get_sample_size(leaf.task, options.limit) or _DOCUMENTS, _DOCUMENTS)
            decide = written(study.rules)
            task = study_tasks.prepare(leaf, shots[0], how, study.seeds[0], 0, None, limit, decide=decide).task
            give_rules(task, None)
            task.build_all_requests()
        of_dev = ""
        if study.dev is not None:
            dev[name] = _dev_rows(study, leaf, shots, options.limit)
            documents = leaf.task.training_docs()
            of_dev = study_tasks.digest_of([dev[name], [documents[i] for i in dev[name]]])
        alone = isinstance(leaf.task, MetaICLTask)
        tasks[name] = GridTask(name, shots, tuple(leaf.inside), leaf.changes, alone, of_dev)
    columns = {*leaves, *(group for leaf in leaves.values() for group in leaf.groups())}
    for column in (column for part in study.columns.values() for column in part):
        if column not in columns and not lacking:
            known = ", ".join(sorted(columns))
            raise InputError(f"columns: {column!r} is no task of this study, and no group: {known}.")
    return StudyProgress(Grid(study, tasks, options.limit), leaves, dev, folder, options, rerun)


def _dev_rows(study: Study, leaf: Leaf, shots: Sequence[int], limit: float | None) -> list[int]:
    """The dev set of a task: rows that no seed and no way of drawing has among the demonstrations."""
    if isinstance(leaf.task, MetaICLTask):
        raise InputError(f"dev: task {leaf.name!r}: MetaICL's tasks have no split to draw it from: leave it out.")
    config = leaf.task.fewshot_cfg
    from_training = config.samples is None and config.split in (None, leaf.task.config.training_split)
    used: set[int] = set()
    for how in study.demonstrations:
        if isinstance(how, How):  # a model, which chooses outside the dev set
            continue
        for n, seed in ((n, seed) for n in shots for seed in study.seeds):
            drawn = study_tasks.draw(leaf, n, how, seed)
            if drawn is None and from_training:
                raise InputError(
                    f"dev: task {leaf.name!r} draws demonstrations of its own for every document, and from the "
                    "training split, so that those of the dev set would be among them."
                )
            used.update(drawn or ())
    pool = leaf.task.sampler.df if used else []
    return study_tasks.dev_rows(leaf, study.dev.size if study.dev else None, limit, [pool[i] for i in used])
