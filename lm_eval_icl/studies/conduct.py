"""Conducts a study: which cells there are, what is run in which order, what the dev set chooses, and the record."""

from __future__ import annotations

import functools
import gc
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import transformers
from tqdm import tqdm

from lm_eval_icl import version
from lm_eval_icl.demonstrations import how
from lm_eval_icl.errors import InputError
from lm_eval_icl.harness.distributed import of_first
from lm_eval_icl.harness.metaicl import MetaICLTask, skips
from lm_eval_icl.metaicl.files import setting_of
from lm_eval_icl.studies import tasks as study_tasks
from lm_eval_icl.studies.choices import Choices, ToChoose
from lm_eval_icl.studies.folder import Cell, Folder, Model, digest
from lm_eval_icl.studies.grid import HF, Study, Variant, trained_under
from lm_eval_icl.studies.row import Row
from lm_eval_icl.studies.run import Models, Options, by_work, naming, run_cells, without_passes, work_of
from lm_eval_icl.studies.tasks import Leaf, Prepared

# How long to wait, in seconds, before looking again whether other processes have finished their work.
_PATIENCE = 2.0
# Of lm-eval's model arguments, those that put other weights in place of a checkpoint's, or on top of them.
_OTHER_WEIGHTS = {"peft", "delta", "gguf_file", "gptqmodel", "autogptq"}

# Checks the options of `lm-eval-icl train`, and gives what trains.
Trainer = Callable[[Mapping[str, Any]], Callable[[], None]]


@dataclass(frozen=True)
class Choice:
    """What was chosen on the dev set for a model, a method and a task.

    Attributes:
        variant, seed: the chosen method with its arguments, and the chosen seed; the seed itself if seeds are not
            chosen among.
        curve: the mean over orders on the dev set, for every variant and seed: arguments, seed, score.
    """

    variant: Variant
    seed: int
    curve: tuple[tuple[Mapping[str, Any], int, float], ...]


class Conductor:
    """A study with its tasks loaded and its cells known.

    Args:
        study: the study.
        folder: its folder.
        options: where and how fast it runs.
        include_path: a folder of further tasks.
        trainer: trains the models of a study that has trainings.

    Attributes:
        models: those that are there, or those that are trained from them; one for each method that is trained under.

    Raises:
        InputError: an option of a training is not possible, a task cannot be loaded, or its demonstrations or dev set
            cannot be drawn.
    """

    def __init__(
        self,
        study: Study,
        folder: Folder,
        options: Options,
        include_path: str | None,
        trainer: Trainer | None = None,
    ) -> None:
        self.study, self.folder, self.options = study, folder, options
        self.include_path, self.trainer = include_path, trainer
        self.models = [model for arguments in study.models for model in self._models(arguments)]
        for model in self.models:
            if model.training:
                self._training(model)
        self.leaves = {leaf.name: leaf for leaf in study_tasks.load(study.tasks, include_path, study.metadata)}
        for leaf in self.leaves.values():
            for shots in self.shots(leaf):
                for drawn_by in study.demonstrations:
                    study_tasks.draw(leaf, shots, drawn_by, study.seeds[0], study.orders - 1)
        for metric in {study.metric, *([study.dev.metric] if study.dev else [])}:
            for leaf in self.leaves.values():
                if metric not in (there := leaf.task.aggregation()):
                    raise InputError(f"metric: task {leaf.name!r} has no {metric!r}, only {', '.join(sorted(there))}.")
        known = {*self.leaves, *(group for leaf in self.leaves.values() for group in leaf.groups())}
        for column in (column for part in study.columns.values() for column in part):
            if column not in known:
                raise InputError(
                    f"columns: {column!r} is no task of this study, and no group: {', '.join(sorted(known))}."
                )
        self._read: dict[str, dict[str, Any]] = {}
        # The ways in which the models themselves choose demonstrations.
        self._by_model = {each for each in study.demonstrations if each is not None and how.read(each) is not None}
        self.dev = {name: self._dev_rows(leaf) for name, leaf in self.leaves.items()} if study.dev else {}
        self._rows = {name: study_tasks.contents_of_rows(self.leaves[name], rows) for name, rows in self.dev.items()}
        self.choices = Choices(folder, {name: self._to_choose(leaf) for name, leaf in self.leaves.items()})

    def _to_choose(self, leaf: Leaf) -> ToChoose:
        """What the models of this study choose for a task: no documents of its dev set."""
        hows = [found for each in self.study.demonstrations if each and (found := how.read(each)) is not None]
        rows = self.dev.get(leaf.name, [])
        documents = leaf.task.training_docs() if rows else []
        without = [documents[i] for i in rows]
        return ToChoose(leaf, without, tuple(self.shots(leaf)), tuple(hows), self.study.seeds)

    # Models.

    def _models(self, arguments: Mapping[str, Any]) -> list[Model]:
        """The models that one of the study's models stands for: itself, or one for each training and method."""
        found = [Model(arguments)] if not self.study.trainings else []
        for training in self.study.trainings:
            for variant in self.study.variants:
                if (model := Model(arguments, training, trained_under(variant))) not in found:
                    found.append(model)
        return found

    def variants(self, model: Model) -> list[Variant]:
        """The variants that run on a model."""
        return [each for each in self.study.variants if model.training is None or trained_under(each) == model.under]

    def leaves_of(self, model: Model) -> list[Leaf]:
        """The tasks that a model is evaluated on."""
        if model.training is None:
            return list(self.leaves.values())
        return [leaf for leaf in self.leaves.values() if not {*model.training.targets}.isdisjoint(leaf.inside)]

    def _training(self, model: Model) -> Callable[[], None]:
        """What trains a model, its options checked.

        Raises:
            InputError: an option cannot be used.
        """
        assert model.training and model.under and self.trainer
        where = f"train: {model.training.name}"
        if other := sorted(_OTHER_WEIGHTS & model.arguments.keys()):
            raise InputError(f"models: {other[0]}: {where} makes weights of its own: leave it out.")
        device, options = self.options.device, dict(model.training.options)
        if "metaicl" in options and "data" not in options:
            if "metaicl" not in self.study.metadata:
                raise InputError(f"{where}: needs the folder of MetaICL's data: give --metadata metaicl=DATA_DIR.")
            options["data"] = self.study.metadata["metaicl"]
        given = {
            **options,
            "method": model.under.method,
            "model_args": model.training_arguments,
            "output": str(self.folder.unfinished(model)),
            "resume": True,
            "metadata": self.study.metadata,
            "include_path": self.include_path,
            "device": device.removesuffix(":0") if device else None,
        }
        try:
            return self.trainer({name: value for name, value in given.items() if value is not None})
        except InputError as error:
            raise InputError(f"{where}: {error.message}") from error

    def _dev_rows(self, leaf: Leaf) -> list[int]:
        if isinstance(leaf.task, MetaICLTask):
            raise InputError(f"dev: task {leaf.name!r}: MetaICL's tasks have no split to draw it from: leave it out.")
        used: set[int] = set()
        for shots in self.shots(leaf):
            for drawn_by in self.study.demonstrations:
                if drawn_by in self._by_model:  # which chooses outside the dev set
                    continue
                for seed in self.study.seeds:
                    drawn = study_tasks.draw(leaf, shots, drawn_by, seed)
                    own = leaf.task.fewshot_cfg
                    training = own.samples is None and own.split in (None, leaf.task.config.training_split)
                    if drawn is None and training:
                        raise InputError(
                            f"dev: task {leaf.name!r} draws demonstrations of its own for every document, and from "
                            "the training split, so that those of the dev set would be among them."
                        )
                    used.update(drawn or ())
        pool = leaf.task.sampler.df if used else []
        size = self.study.dev.size if self.study.dev else None
        return study_tasks.dev_rows(leaf, size, self.options.limit, [pool[i] for i in used])

    def shots(self, leaf: Leaf) -> list[int]:
        return list(dict.fromkeys(study_tasks.shots_of(leaf, shots) for shots in self.study.num_fewshot))

    # Cells.

    def cells(self, split: str, model: Model, variant: Variant, seed: int | None = None) -> Iterator[Cell]:
        """The cells of a model and a method, over tasks, numbers of demonstrations, seeds and orders."""
        study = self.study
        for leaf in self.leaves_of(model):
            for shots in self.shots(leaf):
                for drawn_by in study.demonstrations:
                    for one in study.seeds if seed is None else [seed]:
                        for order in range(study.orders):
                            of_task = (shots, drawn_by, one, order, split, self.options.limit, leaf.changes)
                            depends = split == "dev" or drawn_by in self._by_model
                            rows = self._rows.get(leaf.name, "") if depends else ""
                            alone = isinstance(leaf.task, MetaICLTask)
                            yield Cell(model, variant, leaf.name, *of_task, rows, alone=alone)

    def _cells_of(self, split: str, model: Model) -> list[Cell]:
        return self.dev_cells(model) if split == "dev" else self.test_cells(model) or []

    def dev_cells(self, model: Model) -> list[Cell]:
        """All cells on the dev set; none if there is none."""
        return [cell for variant in self.variants(model) if self.dev for cell in self.cells("dev", model, variant)]

    def test_cells(self, model: Model) -> list[Cell] | None:
        """All cells on the test set, of which some may depend on the dev set; None if that is not yet finished."""
        if not all(map(self.folder.is_done, self.dev_cells(model))):
            return None
        found = []
        for variant in self.variants(model):
            for cell in self.cells("test", model, variant):
                if not self.study.chooses(variant):
                    found.append(cell)
                    continue
                choice = self.choice(cell)
                if (choice.variant, choice.seed) == (variant, cell.seed):
                    found.append(replace(cell, chosen=self.study.dev.choose if self.study.dev else ()))
        return found

    def choice(self, cell: Cell) -> Choice:
        """What was chosen on the dev set where this cell is one of those among which is chosen.

        The arguments that `dev.choose` names are chosen for every set of demonstrations, over its orders; if it names
        seeds, one set of demonstrations is chosen too. Arguments that it does not name are not chosen among.
        """
        dev = self.study.dev
        assert dev is not None
        fixed = {key: value for key, value in cell.variant.arguments.items() if key not in dev.choose}
        variants = [
            other
            for other in self.study.variants
            if other.entry == cell.variant.entry and fixed.items() <= other.arguments.items()
        ]
        seeds = self.study.seeds if "seeds" in dev.choose else (cell.seed,)
        curve = []
        dev_cell = replace(cell, split="dev", rows=self._rows[cell.task])
        for variant in variants:
            for seed in seeds:
                scores = [
                    self.score(replace(dev_cell, variant=variant, seed=seed, order=order))
                    for order in range(self.study.orders)
                ]
                curve.append((variant, seed, sum(scores) / len(scores)))
        best = max if self.leaves[cell.task].task.higher_is_better().get(dev.metric, True) else min
        variant, seed, _ = best(curve, key=lambda each: each[2])  # the first of the best
        return Choice(variant, seed, tuple((each.arguments, one, value) for each, one, value in curve))

    def score(self, cell: Cell) -> float:
        """A cell's metric, the dev set's own on the dev set."""
        metric = self.study.dev.metric if self.study.dev and cell.split == "dev" else self.study.metric
        found = self._results(cell)["results"][self.leaves[cell.task].task.task_name]
        # Of several filters, the first counts.
        return float(next(value for name, value in found.items() if name.startswith(f"{metric},")))

    def _results(self, cell: Cell) -> dict[str, Any]:
        if cell.path not in self._read:
            self._read[cell.path] = self.folder.read(cell)
        return self._read[cell.path]

    # Running.

    def run(self) -> None:
        """Train the models and run the cells that are missing, and wait for those that other processes work on.

        Raises:
            InputError: a model cannot be trained, or a cell cannot be run. What was finished stays.
        """
        self._check_tasks()
        left = self.models
        while left:
            before, left = left, [model for model in left if not self._run(model)]
            if len(left) == len(before):
                time.sleep(_PATIENCE)  # other processes train the others

    def _run(self, model: Model) -> bool:
        """Train a model and run its cells, unless another process trains it. Returns whether they are all there."""
        if of_first(functools.partial(self._finished, model)):
            return True
        if not self._train(model):
            return False
        self._run_model(model)
        _make_room()
        return True

    def _finished(self, model: Model) -> bool:
        cells = self.test_cells(model)
        return cells is not None and all(map(self.folder.is_done, cells))

    def _train(self, model: Model) -> bool:
        """Train a model that is missing, unless another process does. Returns whether it is there."""
        if not self.folder.is_trained(model):
            if int(os.environ.get("WORLD_SIZE", "1")) > 1:
                raise InputError(
                    f"train: {model.checkpoint} is not trained yet, and a study does not train in several processes of "
                    "one launch: run the same command once without the launcher."
                )
            with self.folder.claimed(digest(model.checkpoint)) as claimed:
                if not claimed:
                    return False
                if not self.folder.is_trained(model):
                    try:
                        self._training(model)()
                    except InputError as error:
                        raise InputError(f"training of {model.checkpoint}: {error.message}") from error
                    _make_room()
                    self.folder.finish_training(model)
        if model.training:
            self._check_beginning(model)
        return True

    def _check_beginning(self, model: Model) -> None:
        """Refuse models that began from other weights, or were trained on other rows, than others of this study; and
        those that were trained on a part of MetaICL's tasks, unless this is said."""
        mine = self.folder.training_record(model)
        options = model.training.options if model.training else {}
        if "metaicl" in options and not skips(self.study.metadata):
            tasks = setting_of(str(options["metaicl"]))["train"]
            if without := [task for task in tasks if task not in mine["rows"]]:
                raise InputError(
                    f"--output {self.folder.path}: {model.checkpoint} was trained without {', '.join(without)}, which "
                    "had no files: give another folder, or missing=skip in --metadata."
                )
        for other in self.models:
            if other.arguments == model.arguments and self.folder.is_trained(other):
                theirs = self.folder.training_record(other)
                every = other.training == model.training
                both = mine["rows"].keys() | theirs["rows"] if every else mine["rows"].keys() & theirs["rows"]
                same_rows = all(mine["rows"].get(task) == theirs["rows"].get(task) for task in both)
                if not same_rows or mine["weights"] != theirs["weights"]:
                    what = f"the weights of {model.name}" if same_rows else "the rows of the training tasks"
                    raise InputError(
                        f"--output {self.folder.path}: {what} changed between the trainings of {other.checkpoint} and "
                        f"{model.checkpoint}: give another folder."
                    )

    def _run_model(self, model: Model) -> None:
        models = Models(self.folder.arguments(model), self.options)
        for variant in {without_passes(each): each for each in self.variants(model)}.values():
            if variant.method != HF:
                with naming(models, variant):  # a method that the model cannot run is refused now
                    models.under(variant)
        quiet = models.rank != 0
        name = model.checkpoint or model.name
        self._check_weights(model, models)
        for split in ("dev", "test") if self.dev else ("test",):
            works = by_work(of_first(functools.partial(self._cells_of, split, model)))
            with tqdm(total=sum(map(len, works.values())), desc=f"{name}, cells ({split})", disable=quiet) as bar:
                while works:
                    before = len(works)
                    self.choices.make(model, models, [leaf.name for leaf in self.leaves_of(model)])
                    for key in list(works):
                        if self._run_work(models, works[key]):
                            bar.update(len(works.pop(key)))
                    if len(works) == before:
                        time.sleep(_PATIENCE)  # other processes run the others

    def _check_tasks(self) -> None:
        """Refuse to go on with cells of a task that had other documents, demonstrations or prompts."""

        @functools.cache
        def drawn(task: str, *given: Any) -> list[int] | None:
            return study_tasks.draw(self.leaves[task], *given)

        def indices(cell: Cell) -> list[int] | None:
            of_cell = (cell.num_fewshot, cell.demonstrations, cell.seed, cell.order)
            if cell.demonstrations not in self._by_model:
                return drawn(cell.task, *of_cell)
            choice = self.choices.of(cell)  # which nobody needs any more, if its file has been removed
            return None if choice is None else study_tasks.draw(self.leaves[cell.task], *of_cell, choice)

        for cell in filter(self.folder.is_done, self.all_cells()):
            said = self._results(cell)["config"]["icl"]["study"]
            for what, differs in (
                ("configuration or data", said["contents"] != study_tasks.contents(self.leaves[cell.task], cell.seed)),
                ("demonstrations", (now := indices(cell)) is not None and said["indices"] != now),
            ):
                if differs:
                    raise InputError(
                        f"--output {self.folder.path}: {cell.task}: its {what} have changed since {cell.path} was run: "
                        "give another folder."
                    )

    def _check_weights(self, model: Model, models: Models) -> None:
        """Refuse to add cells to those that another checkpoint of the same name has given."""
        cells = [*self.dev_cells(model), *(self.test_cells(model) or ())]
        for cell in filter(self.folder.is_done, cells):
            if self._results(cell)["config"]["icl"]["study"]["weights"] != models.weights:
                raise InputError(
                    f"--output {self.folder.path}: the weights or the tokenizer of {model.checkpoint or model.name} "
                    f"have changed since {cell.path} was run: give another folder."
                )

    def _run_work(self, models: Models, cells: Sequence[Cell]) -> bool:
        """Run cells that share work, unless another process does. Returns whether they are all there."""
        # Not by all of these cells: another study may have others of the same work.
        work = digest(f"{cells[0].model.folder} {work_of(cells[0])}")
        missing = of_first(lambda: [i for i, cell in enumerate(cells) if not self.folder.is_done(cell)])
        if not missing:
            return True
        choice = of_first(lambda: self.choices.of(cells[0]))
        if choice is None and cells[0].demonstrations in self._by_model and cells[0].num_fewshot:
            return False  # another process chooses
        with self.folder.claimed(work) if models.rank == 0 else nullcontext(False) as claimed:
            if not of_first(lambda: claimed):
                return False
            missing = of_first(lambda: [i for i, cell in enumerate(cells) if not self.folder.is_done(cell)])
            if missing:
                run_cells(
                    models,
                    [cells[i] for i in missing],
                    self._prepare(models, cells[0], choice),
                    self.folder,
                    self.options,
                    work,
                )
            if models.rank == 0:
                self.folder.drop_work(work)
        return True

    def _prepare(self, models: Models, cell: Cell, choice: Mapping[str, Any] | None) -> Callable[[int], Prepared]:
        """The task of an order, with demonstrations that are drawn or that a model has chosen. Those of the latest
        demonstrations are kept, since the next method has the same."""
        key = (work_of(cell)[0], id(models))
        if getattr(self, "_prepared_for", None) != key:
            self._prepared_for: Any = key
            self._prepared: dict[int, Prepared] = {}
            models.forget_requests()

        def prepared(order: int) -> Prepared:
            if order not in self._prepared:
                self._prepared[order] = study_tasks.prepare(
                    self.leaves[cell.task],
                    cell.num_fewshot,
                    cell.demonstrations,
                    cell.seed,
                    order,
                    self.dev[cell.task] if cell.split == "dev" else None,
                    self.options.limit,
                    models.rank,
                    models.world_size,
                    choice,
                    lambda task: task.bind(models.hf() if cell.variant.method == HF else models.under(cell.variant)),
                )
            return self._prepared[order]

        return prepared

    # What comes out.

    def all_cells(self) -> list[Cell]:
        """The cells of all models that are known so far, those on the dev set first."""
        return [cell for model in self.models for cell in (*self.dev_cells(model), *(self.test_cells(model) or ()))]

    def rows(self) -> list[Row]:
        """What the finished cells gave, in the order of the study's models and methods."""
        models, variants = list(self.study.models), list(self.study.variants)
        cells = [cell for cell in self.all_cells() if self.folder.is_done(cell)]
        cells.sort(key=lambda cell: (models.index(cell.model.arguments), variants.index(cell.variant)))
        return [self._row(cell) for cell in cells]

    def columns(self) -> Mapping[str, Sequence[str]]:
        """The columns of each part of the table. If the study does not say: the tasks, or the entries of the study's
        `tasks` if there are more than eight."""
        if self.study.columns:
            return self.study.columns
        if len(self.leaves) <= 8:
            return {"": list(self.leaves)}
        return {"": [each if isinstance(each, str) else each["task"] for each in self.study.tasks]}

    def alike(self) -> set[str]:
        """The groups whose tasks count alike."""
        return {group for leaf in self.leaves.values() for group in leaf.alike}

    def _row(self, cell: Cell) -> Row:
        leaf, training = self.leaves[cell.task], cell.model.training
        found = self._results(cell)
        shared = found["config"]["icl"]["study"]["shared"]
        chosen = not self.study.chooses(cell.variant) or cell.split == "test"
        if not chosen:
            choice = self.choice(cell) if all(map(self.folder.is_done, self.dev_cells(cell.model))) else None
            chosen = choice is not None and (choice.variant, choice.seed) == (cell.variant, cell.seed)
        return Row(
            model=cell.model.name,
            method=cell.variant.method,
            arguments=cell.variant.arguments,
            task=cell.task,
            groups=leaf.groups(training.targets if training else None),
            num_fewshot=cell.num_fewshot,
            demonstrations=str(cell.demonstrations or "as the task says"),
            seed=cell.seed,
            order=cell.order,
            split=cell.split,
            chosen=chosen,
            documents=int(found["n-samples"][leaf.task.task_name]["effective"]),
            score=self.score(cell),
            predictions=self._predictions(cell),
            seconds=float(shared.get("seconds", 0.0)) / shared["cells"],
            training=training.name if training else "",
        )

    def _predictions(self, cell: Cell) -> tuple[int, ...]:
        task = self.leaves[cell.task].task
        if task.OUTPUT_TYPE != "multiple_choice":
            return ()
        samples = self.folder.samples(cell, task.task_name)
        if isinstance(task, MetaICLTask):
            return tuple(int(sample["doc"]["prediction"]) for sample in samples)
        # With acc_mutual_info, those of the options without the question follow.
        parts = 2 if "acc_mutual_info" in self.leaves[cell.task].task.aggregation() else 1
        options = (sample["resps"][: len(sample["resps"]) // parts] for sample in samples)
        return tuple(_best([float(response[0][0]) for response in each]) for each in options)

    def record(self) -> dict[str, Any]:
        """What `study.json` says: the grid, the cells, what was chosen, and how much was run."""
        cells = self.all_cells()
        done = [cell for cell in cells if self.folder.is_done(cell)]
        choices: dict[str, Any] = {}
        for cell in done:
            if cell.split == "test" and self.study.chooses(cell.variant):
                choice = self.choice(cell)
                choices[f"{cell.path}"] = {
                    "chosen": {**choice.variant.arguments, "seed": choice.seed},
                    "curve": [{"arguments": each, "seed": seed, "score": score} for each, seed, score in choice.curve],
                }
        return {
            "study": asdict(self.study),
            "versions": {
                "lm_eval_icl": version.version(),
                "python": platform.python_version(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
            "limit": self.options.limit,
            "checkpoints": {
                model.checkpoint: "done" if self.folder.is_trained(model) else "missing"
                for model in self.models
                if model.training
            },
            "cells": {cell.path: "done" if self.folder.is_done(cell) else "missing" for cell in cells},
            "dev": self.dev,
            "choices": choices,
        }

    def work(self) -> dict[str, float]:
        """How many passes and tokens the finished cells took, those of `hf` not counted. What was run again after an
        interruption counts once."""
        total = {"passes": 0.0, "tokens": 0.0}
        for cell in filter(self.folder.is_done, self.all_cells()):
            icl = self._results(cell)["config"]["icl"]
            shared = icl["study"]["shared"]
            if "passes" in shared:
                total["passes"] += shared["passes"] / shared["cells"]
                total["tokens"] += icl["tokens_run"] / shared["cells"]
        return {name: round(number) for name, number in total.items()}


def _make_room() -> None:
    """Free the memory of a model that is no longer used: it refers to itself, and the next one needs its place."""
    gc.collect()
    torch.cuda.empty_cache()


def _best(scores: Sequence[float]) -> int:
    return scores.index(max(scores))
