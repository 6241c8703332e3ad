"""Conducts a study: which cells there are, what is run in which order, what the dev set chooses, and the record."""

from __future__ import annotations

import functools
import gc
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from typing import Any

import torch
import transformers
from tqdm import tqdm

from lm_eval_icl import version
from lm_eval_icl.demonstrations import how
from lm_eval_icl.errors import InputError, one_line_with_place
from lm_eval_icl.harness import choosing
from lm_eval_icl.harness.distributed import of_first
from lm_eval_icl.harness.metaicl import MetaICLTask, skips
from lm_eval_icl.metaicl.files import setting_of
from lm_eval_icl.studies import tasks as study_tasks
from lm_eval_icl.studies.choices import Choices, ToChoose
from lm_eval_icl.studies.folder import Cell, Folder, Model, digest
from lm_eval_icl.studies.grid import HF, Study, Variant, trained_under
from lm_eval_icl.studies.run import (
    Models,
    Options,
    by_work,
    code_of,
    ends_all,
    naming,
    run_cells,
    without_passes,
    work_of,
)
from lm_eval_icl.studies.tasks import Leaf, Prepared

# How long to wait, in seconds, before looking again whether other processes have finished their work.
_PATIENCE = 2.0
# Of lm-eval's model arguments, those that put other weights in place of a checkpoint's, or on top of them.
_OTHER_WEIGHTS = {"peft", "delta", "gguf_file", "gptqmodel", "autogptq"}

# Checks the options of `lm-eval-icl train`, and gives what trains.
Trainer = Callable[[Mapping[str, Any]], Callable[[], None]]


class CellsFailed(InputError):
    """Some of a study's cells could not be run. The others are there."""


@dataclass(frozen=True)
class Choice:
    """What was chosen on the dev set for a model, a method and a task.

    Attributes:
        variant, seed: the chosen method with its arguments, and the chosen seed; the seed itself if seeds are not
            chosen among.
        curve: the mean over orders on the dev set, for every variant and seed: arguments, seed, score.
        names: the arguments (or "seeds") that there were several values of to choose from.
    """

    variant: Variant
    seed: int
    curve: tuple[tuple[Mapping[str, Any], int, float], ...]
    names: tuple[str, ...]


class Conductor:
    """A study with its tasks loaded and its cells known.

    Args:
        study: the study.
        folder: its folder.
        options: where and how fast it runs.
        include_path: a folder of further tasks.
        trainer: trains the models of a study that has trainings.
        rerun: run cells again that are damaged, that other code has made, or that do not say which code.

    Attributes:
        models: those that are there, or those that are trained from them; one for each method that is trained under.
        failed: by the cell's path, why it could not be run.

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
        rerun: bool = False,
    ) -> None:
        self.study, self.folder, self.options, self.rerun = study, folder, options, rerun
        self.failed: dict[str, str] = {}
        for variant in study.variants:
            code_of(variant.method)  # now: files may be edited while a study runs
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
        self._read: dict[str, tuple[int, dict[str, Any] | None]] = {}
        self._choices: dict[str, Choice] = {}
        # The ways in which the models themselves choose demonstrations.
        self._by_model = {each for each in study.demonstrations if each is not None and how.read(each) is not None}
        self.dev = {name: self._dev_rows(leaf) for name, leaf in self.leaves.items()} if study.dev else {}
        self._rows = {name: study_tasks.contents_of_rows(self.leaves[name], rows) for name, rows in self.dev.items()}
        self.choices = Choices(folder, {name: self._to_choose(leaf) for name, leaf in self.leaves.items()}, rerun)

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

    def dev_cells(self, model: Model) -> list[Cell]:
        """All cells on the dev set; none if there is none."""
        return [cell for variant in self.variants(model) if self.dev for cell in self.cells("dev", model, variant)]

    def test_cells(self, model: Model) -> list[Cell]:
        """The cells on the test set; of those that depend on the dev set, those that are chosen so far."""
        found = []
        for variant in self.variants(model):
            for cell in self.cells("test", model, variant):
                if not self.study.chooses(variant):
                    found.append(cell)
                elif (choice := self.choice(cell)) and (choice.variant, choice.seed) == (variant, cell.seed):
                    found.append(replace(cell, chosen=choice.names))
        return found

    def _candidates(self, cell: Cell) -> list[tuple[Variant, int, list[Cell]]]:
        """Among what is chosen where this cell is one of those that may be: each method with its arguments, each seed,
        and their cells on the dev set, one an order.

        The arguments that `dev.choose` names are chosen for every set of demonstrations; if it names seeds, one set of
        demonstrations is chosen too. Arguments that it does not name are not chosen among.
        """
        dev = self.study.dev
        assert dev is not None
        fixed = {key: value for key, value in cell.variant.arguments.items() if key not in dev.choose}
        on_dev = replace(cell, split="dev", rows=self._rows[cell.task])
        orders = range(self.study.orders)
        return [
            (variant, seed, [replace(on_dev, variant=variant, seed=seed, order=order) for order in orders])
            for variant in self.study.variants
            if variant.entry == cell.variant.entry and fixed.items() <= variant.arguments.items()
            for seed in (self.study.seeds if "seeds" in dev.choose else (cell.seed,))
        ]

    def choice(self, cell: Cell) -> Choice | None:
        """What was chosen on the dev set where this cell is one of those among which is chosen; None if a cell on the
        dev set is missing.

        It is the best mean over orders; of equal ones, the first. Counts of documents, such as accuracies, are compared
        exactly. Means of other metrics, which are rounded, are equal if they differ by less than a billionth. A score
        that is no number is the worst.
        """
        candidates = self._candidates(cell)
        key = candidates[0][2][0].path
        if key in self._choices:
            return self._choices[key]
        if not all(self.is_done(each) for _, _, cells in candidates for each in cells):
            return None
        metric = self.study.dev.metric if self.study.dev else ""
        higher = self.leaves[cell.task].task.higher_is_better().get(metric, True)
        means, counts = [], True
        for _, _, cells in candidates:
            total: Fraction | float = Fraction(0)
            for each in cells:
                score, documents = self.score(each), self._documents(each)
                if not math.isfinite(score):
                    total += -math.inf if higher else math.inf
                    continue
                count = Fraction(round(score * documents), documents)
                is_count = float(count) == score
                total, counts = total + (count if is_count else Fraction(score)), counts and is_count
            means.append(total / len(cells))
        best = max(means) if higher else min(means)
        equal = [mean == best or (not counts and math.isclose(mean, best, rel_tol=1e-9)) for mean in means]
        variant, seed, _ = candidates[equal.index(True)]
        curve = tuple((each.arguments, s, float(mean)) for (each, s, _), mean in zip(candidates, means, strict=True))
        values = [{**arguments, "seeds": seed} for arguments, seed, _ in curve]
        several = {name for name in values[0] if any(each[name] != values[0][name] for each in values)}
        names = tuple(name for name in (self.study.dev.choose if self.study.dev else ()) if name in several)
        self._choices[key] = Choice(variant, seed, curve, names)
        return self._choices[key]

    def score(self, cell: Cell) -> float:
        """A cell's metric, the dev set's own on the dev set."""
        metric = self.study.dev.metric if self.study.dev and cell.split == "dev" else self.study.metric
        found = self._results(cell)["results"][self.leaves[cell.task].task.task_name]
        # Of several filters, the first counts.
        return float(next(value for name, value in found.items() if name.startswith(f"{metric},")))

    def _documents(self, cell: Cell) -> int:
        return int(self._results(cell)["n-samples"][self.leaves[cell.task].task.task_name]["effective"])

    def is_done(self, cell: Cell) -> bool:
        """Whether a cell is there and whole, and where cells are run again, of this code. One that is not whole is
        noted as failed."""
        return self._read_if_done(cell) is not None

    def _read_if_done(self, cell: Cell) -> dict[str, Any] | None:
        stamp, found = self._read.get(cell.path, (0, None))
        if found is not None:
            return found
        try:
            now = self.folder.results(cell).stat().st_mtime_ns
        except OSError:
            return None
        if now != stamp:  # otherwise it has been looked at, and is damaged, or of other code
            try:
                found = self.folder.read(cell, self.leaves[cell.task].task.task_name)
            except InputError as error:
                if not self.rerun:
                    self._fail([cell], error.message)
            if found is not None and self.rerun and self._made_by(cell, found):
                found = None
            self._read[cell.path] = now, found
        return found

    def _results(self, cell: Cell) -> dict[str, Any]:
        """The results of a cell that is done."""
        found = self._read_if_done(cell)
        assert found is not None, cell.path
        return found

    @staticmethod
    def _made_by(cell: Cell, found: Mapping[str, Any]) -> str:
        """Which code has made a cell, and has chosen its demonstrations: "" for this code."""
        said = found["config"]["icl"]["study"]
        pairs = [(said.get("code"), code_of(cell.variant.method))]
        if "choice" in said:
            pairs.append((said["choice"].get("code"), choosing.code()))
        if all(theirs == ours is not None for theirs, ours in pairs):
            return ""
        return "unknown code" if any(None in pair for pair in pairs) else "other code"

    def state(self, cell: Cell) -> str:
        """Whether a cell is "done" (with the code, if it is not this one), "failed" or "missing"."""
        if not self.is_done(cell):
            return "failed" if cell.path in self.failed else "missing"
        code = self._made_by(cell, self._results(cell))
        return f"done by {code}" if code else "done"

    # Running.

    def run(self) -> None:
        """Train the models and run the cells that are missing, and wait for those that other processes work on.

        Raises:
            CellsFailed: some could not be run, for reasons that `failed` says; all others are there.
            InputError: the study cannot go on. What was finished stays.
        """
        self._check_tasks()
        left = self.models
        while left:
            before, left = left, [model for model in left if not self._run(model)]
            if len(left) == len(before):
                time.sleep(_PATIENCE)  # other processes train the others
        if os.environ.get("RANK", "0") != "0":
            return  # of several processes of a launch, the first one writes the cells and knows which are there
        self._note_what_is_not_chosen()
        cells = self.all_cells()
        done = {cell.path for cell in cells if self.is_done(cell)}  # maybe by another process that has more memory
        self.failed = {path: why for path, why in self.failed.items() if path not in done}
        if self.failed:
            number, first = len({cell.path for cell in cells} | self.failed.keys()), next(iter(self.failed.values()))
            raise CellsFailed(
                f"{len(self.failed)} of {number} cells failed; the first: {first.removesuffix('.')}. "
                f"{self.folder.path / 'study.json'} has each reason under `failed`, and the same command tries again."
            )

    def _note_what_is_not_chosen(self) -> None:
        """Note the cells on the test set that are not known, since cells on the dev set have failed: for each choice,
        the first that might have been chosen."""
        for model in self.models:
            noted = set()
            for variant in self.variants(model):
                for cell in self.cells("test", model, variant) if self.study.chooses(variant) else ():
                    if cell.order == 0 and self.choice(cell) is None:
                        on_dev = [each.path for _, _, cells in self._candidates(cell) for each in cells]
                        if on_dev[0] not in noted:
                            noted.add(on_dev[0])
                            failed = next((path for path in on_dev if path in self.failed), on_dev[0])
                            why = self.failed.get(failed, "it was removed while the study ran.")
                            self._fail([cell], f"nothing can be chosen on the dev set, as {failed} failed: {why}")

    @contextmanager
    def _noting(self, cells: Callable[[], Iterable[Cell]]) -> Iterator[None]:
        """Inside this context, an error is noted for those of these cells that are missing, and the study goes on,
        unless nothing could be kept or run any more, or other processes of this launch would wait for this one."""
        try:
            yield
            return
        except Exception as error:
            if ends_all(error) or int(os.environ.get("WORLD_SIZE", "1")) > 1:
                raise
            why = error.message if isinstance(error, InputError) else one_line_with_place(error)
        # Now that the error no longer holds references to the model's tensors.
        self._fail([cell for cell in cells() if not self.is_done(cell)], why)
        _make_room()

    def _fail(self, cells: Sequence[Cell], why: str) -> None:
        new = [cell.path for cell in cells if cell.path not in self.failed]
        self.failed |= dict.fromkeys(new, why)
        if new:
            more = f" and {len(new) - 1} more" if len(new) > 1 else ""
            tqdm.write(f"failed: {new[0]}{more}: {why}", file=sys.stderr)

    def _missing(self, cells: Sequence[Cell]) -> list[Cell]:
        """Those of the cells that are neither there nor failed."""
        return [cell for cell in cells if not self.is_done(cell) and cell.path not in self.failed]

    def _run(self, model: Model) -> bool:
        """Train a model and run its cells, unless another process trains it. Returns whether nothing is left to do."""
        if of_first(functools.partial(self._finished, model)):
            return True
        is_there = True
        with self._noting(lambda: self._known_cells(model)):
            is_there = self._train(model)
            if is_there:
                self._run_model(model)
        _make_room()
        return is_there

    def _known_cells(self, model: Model, alike: tuple[str, str] | None = None) -> list[Cell]:
        """A model's cells on both sets, or those of the variants that are scored together (`without_passes`)."""
        cells = [*self.dev_cells(model), *self.test_cells(model)]
        return [cell for cell in cells if alike is None or without_passes(cell.variant) == alike]

    def _finished(self, model: Model) -> bool:
        return not self._missing(self._known_cells(model))

    def _train(self, model: Model) -> bool:
        """Train a model that is missing, unless another process does. Returns whether it is there."""
        if not self.folder.is_trained(model):
            if int(os.environ.get("WORLD_SIZE", "1")) > 1:
                raise InputError(
                    f"train: {model.checkpoint} is not trained yet, and a study does not train in several processes of "
                    "one launch: run the same command once without the launcher."
                )
            with self.folder.claimed(digest(model.checkpoint)) as claimed:
                if claimed is None:
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
            if variant.method != HF:  # a method that the model cannot run is refused now
                cells_of = functools.partial(self._known_cells, model, without_passes(variant))
                with self._noting(cells_of), naming(models, variant):
                    models.under(variant)
        quiet = models.rank != 0
        name = model.checkpoint or model.name
        self._check_weights(model, models)
        for split in ("dev", "test") if self.dev else ("test",):
            cells = self.dev_cells if split == "dev" else self.test_cells
            works = by_work(of_first(functools.partial(cells, model)))
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

        for cell in filter(self.is_done, self.all_cells()):
            said = self._results(cell)["config"]["icl"]["study"]
            for what, differs in (
                ("configuration or data", said["contents"] != study_tasks.contents(self.leaves[cell.task], cell.seed)),
                ("demonstrations", (now := indices(cell)) is not None and said["indices"] != now),
            ):
                if differs:
                    again = ", or --rerun" if self._made_by(cell, self._results(cell)) else ""
                    raise InputError(
                        f"--output {self.folder.path}: {cell.task}: its {what} have changed since {cell.path} was run: "
                        f"give another folder{again}."
                    )

    def _check_weights(self, model: Model, models: Models) -> None:
        """Refuse to add cells to those that another checkpoint of the same name has given."""
        for cell in filter(self.is_done, self._known_cells(model)):
            of_cell = self._results(cell)["config"]["icl"]["study"]["weights"]
            if of_cell != models.weights and of_cell != models.weights_in_memory:
                raise InputError(
                    f"--output {self.folder.path}: the weights or the tokenizer of {model.checkpoint or model.name} "
                    f"have changed since {cell.path} was run: give another folder."
                )

    def _run_work(self, models: Models, cells: Sequence[Cell]) -> bool:
        """Run cells that share work, unless another process does. Returns whether nothing is left to do."""
        # Not by all of these cells: another study may have others of the same work.
        work = digest(f"{cells[0].model.folder} {work_of(cells[0])}")
        if not of_first(lambda: self._missing(cells)):
            return True
        choice = of_first(lambda: self.choices.of(cells[0]))
        if choice is None and (key := self.choices.key(cells[0])) is not None:
            if why := of_first(lambda: self.choices.failed.get(key)):
                self._fail(self._missing(cells), why)
            return why is not None  # otherwise another process chooses
        with self.folder.claimed(work) if models.rank == 0 else nullcontext() as claim:
            if not of_first(lambda: claim is not None):
                return False
            if missing := of_first(lambda: self._missing(cells)):
                self._run_missing(models, missing, choice, work)
            if claim is not None and all(map(self.is_done, cells)):
                self.folder.drop_work(work, claim)
        return True

    def _run_missing(self, models: Models, cells: Sequence[Cell], choice: Mapping[str, Any] | None, work: str) -> None:
        """Run cells that share work: together, and if that fails, each by itself, as the error may be of one alone."""

        def run(some: Sequence[Cell]) -> None:
            run_cells(models, some, self._prepare(models, cells[0], choice), self.folder, self.options, work)

        alone = len(cells) == 1 or models.world_size > 1
        if not alone:
            try:
                run(cells)
                return
            except Exception as error:
                if ends_all(error):
                    raise
            _make_room()
            cells = self._missing(cells)
        for some in [cells] if alone else [[cell] for cell in cells]:
            with self._noting(lambda some=some: some):  # type: ignore[misc]
                run(some)

    def _prepare(self, models: Models, cell: Cell, choice: Mapping[str, Any] | None) -> Callable[[int], Prepared]:
        """The task of an order, with demonstrations that are drawn or that a model has chosen. Those of the latest
        demonstrations are kept, since the next method has the same."""
        key = (work_of(cell)[0], cell.model.folder)
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
        return [cell for model in self.models for cell in self._known_cells(model)]

    def record(self) -> dict[str, Any]:
        """What `study.json` says: the grid, the cells, what was chosen, and how much was run."""
        cells = self.all_cells()
        choices: dict[str, Any] = {}
        for cell in filter(self.is_done, cells):
            if cell.split == "test" and self.study.chooses(cell.variant):
                choice = self.choice(cell)
                assert choice is not None  # the cell would not be known
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
