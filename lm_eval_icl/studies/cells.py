"""The cells of a study, as plain data: which there are, given what has been chosen on the dev set."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from lm_eval_icl.demonstrations.how import How
from lm_eval_icl.inference.checkpoints import ARGUMENTS
from lm_eval_icl.studies.choose import DevChoice
from lm_eval_icl.studies.grid import Demonstrations, Study, Training, Variant, trained_under


@dataclass(frozen=True)
class Model:
    """A model of a study: one that is there, or one that the study trains from that.

    Attributes:
        arguments: as of `--model_args`, of the model that is there.
        training: how it is trained; None if it is not.
        under: the method that it is trained under.
        resources: those of a cluster's worker that has it, as far as the study says.
    """

    arguments: Mapping[str, Any]
    training: Training | None = None
    under: Variant | None = None
    resources: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def name(self) -> str:
        """The name of the model that is there."""
        return str(self.arguments["pretrained"])

    @property
    def short_name(self) -> str:
        """The same for files."""
        return plain(self.name.strip("/"), 60)

    @property
    def title(self) -> str:
        """The name of the model that is evaluated, for people."""
        return self.checkpoint or self.name

    @cached_property
    def folder(self) -> str:
        """The folder of its cells: its name, the training's, and a digest of all arguments and the checkpoint."""
        arguments = json.dumps(self.arguments, sort_keys=True, default=str)
        if self.training is None:
            return f"{self.short_name}-{digest(arguments)}"
        return f"{self.short_name},{plain(self.training.name, 60)}-{digest(arguments + self.checkpoint)}"

    @property
    def training_arguments(self) -> dict[str, Any]:
        """As of `--model_args` of `lm-eval-icl train`: the arguments that training knows, and those of the method."""
        of_method = self.under.arguments if self.under else {}
        return {key: value for key, value in self.arguments.items() if key in ARGUMENTS} | dict(of_method)

    @cached_property
    def checkpoint(self) -> str:
        """The name of the checkpoint that is trained, with a digest of all that its weights depend on; or empty."""
        if self.training is None or self.under is None:
            return ""
        options = {key: value for key, value in self.training.options.items() if key not in ("save_steps", "data")}
        parts = [self.training_arguments, self.under.method, options]
        names = self.short_name, plain(self.training.name, 60), plain(self.under.name, 60)
        return f"{','.join(names)}-{digest(json.dumps(parts, sort_keys=True, default=str))}"


@dataclass(frozen=True)
class Cell:
    """One evaluation of a study.

    Attributes:
        task: the name of the leaf task.
        split: "test" or "dev".
        changes: as of `Leaf`.
        rows: a digest of the dev set's rows, which depend on all demonstrations of a study; on the test set only of a
            cell whose demonstrations a model chooses outside the dev set, and empty otherwise.
        chosen: the arguments (or "seeds") of a cell on the test set whose values were chosen on the dev set.
        alone: its task makes the requests for one method, so that it shares none with cells of others.
        decide: the decision rules whose values it has besides what the model says; empty if none.
    """

    model: Model
    variant: Variant
    task: str
    num_fewshot: int
    demonstrations: Demonstrations | None
    seed: int
    order: int
    split: str
    limit: float | None
    changes: str = ""
    rows: str = ""
    chosen: tuple[str, ...] = ()
    alone: bool = False
    decide: str = ""

    @property
    def drawn(self) -> str | None:
        """How the demonstrations are drawn or chosen, as text; None for the task's own way."""
        return None if self.demonstrations is None else str(self.demonstrations)

    @property
    def path(self) -> str:
        """The cell's folder, below that of all cells."""
        axes = {
            "num_fewshot": self.num_fewshot,
            **({} if self.drawn is None else {"demonstrations": self.drawn}),
            "seed": self.seed,
            "order": self.order,
            **({"changes": self.changes} if self.changes else {}),
            **({} if self.limit is None else {"limit": self.limit}),
            **({} if self.split == "test" and not self.rows else {"split": f"{self.split}-{self.rows}"}),
            **({"decide": self.decide} if self.decide else {}),
        }
        task = ",".join([self.task, *(f"{name}={value}" for name, value in axes.items())])
        return "/".join([self.model.folder, plain(self.variant.name), plain(task)])

    @property
    def id(self) -> str:
        """A digest of the path, for the names of files."""
        return digest(self.path)


@dataclass(frozen=True)
class GridTask:
    """What the cells of a study depend on of one of its tasks.

    Attributes:
        shots: numbers of demonstrations.
        asked: the names in the study's `tasks` that it comes from.
        changes, alone: as of `Cell`.
        dev: a digest of its rows on the dev set; empty without one.
    """

    name: str
    shots: tuple[int, ...]
    asked: tuple[str, ...]
    changes: str = ""
    alone: bool = False
    dev: str = ""


@dataclass(frozen=True)
class Grid:
    """All cells that a study may have.

    Attributes:
        limit: as of `lm_eval`.
    """

    study: Study
    tasks: Mapping[str, GridTask]
    limit: float | None = None

    @cached_property
    def models(self) -> list[Model]:
        """The study's models, or one for each training and each method that is trained under."""
        study, models = self.study, list[Model]()
        for arguments, resources in zip(study.models, study.resources, strict=True):
            trained = itertools.product(study.trainings, map(trained_under, study.variants))
            for training, under in trained if study.trainings else [(None, None)]:
                if (model := Model(arguments, training, under, resources)) not in models:
                    models.append(model)
        return models

    def variants(self, model: Model) -> list[Variant]:
        """The variants that run on a model."""
        variants = self.study.variants
        return [variant for variant in variants if model.training is None or trained_under(variant) == model.under]

    def tasks_of(self, model: Model) -> list[GridTask]:
        """The tasks that a model is evaluated on: if the study trains it, the targets of its training."""
        targets = set(model.training.targets) if model.training else None
        return [task for task in self.tasks.values() if targets is None or not targets.isdisjoint(task.asked)]

    def cells(self, split: str, model: Model, variant: Variant, seeds: Sequence[int] = ()) -> Iterator[Cell]:
        """The cells of a model and a method, over tasks, numbers of demonstrations, seeds and orders.

        Args:
            seeds: in place of the study's.
        """
        study = self.study
        decide = "+".join(map(str, study.rules))
        for task in self.tasks_of(model):
            axes = task.shots, study.demonstrations, seeds or study.seeds, range(study.orders)
            for shots, how, seed, order in itertools.product(*axes):
                rows = task.dev if split == "dev" or isinstance(how, How) else ""
                of_task = shots, how, seed, order, split, self.limit, task.changes, rows
                yield Cell(model, variant, task.name, *of_task, alone=task.alone, decide=decide)

    def dev_cells(self, model: Model) -> list[Cell]:
        """All cells on the dev set; none if there is none."""
        variants = self.variants(model) if self.study.dev else []
        return [cell for variant in variants for cell in self.cells("dev", model, variant)]

    def test_cells(self, model: Model, choice: Callable[[Cell], DevChoice | None]) -> list[Cell]:
        """The cells on the test set. If the dev set chooses among cells, only those that it has chosen are there.

        Args:
            choice: returns what the dev set has chosen among the alternatives to a cell (`candidates`); None as long
                as nothing is chosen.
        """
        known = []
        for variant in self.variants(model):
            for cell in self.cells("test", model, variant):
                if not self.study.chooses(variant):
                    known.append(cell)
                elif (best := choice(cell)) and (best.variant, best.seed) == (variant, cell.seed):
                    known.append(replace(cell, chosen=best.names))
        return known

    def candidates(self, cell: Cell) -> list[tuple[Variant, int, str, list[Cell]]]:
        """The alternatives that the dev set chooses among, this cell's own included: a method with its arguments, a
        seed and a decision rule (empty for none), with their cells on the dev set, one for each order.

        The arguments that `dev.choose` names are chosen for every set of demonstrations by itself; the others stay. If
        it names seeds, a set of demonstrations is chosen too, and if it names decide, a rule. Without decide, the
        model's own decisions are what is compared.
        """
        dev = self.study.dev
        assert dev is not None
        fixed = {key: value for key, value in cell.variant.arguments.items() if key not in dev.choose}
        on_dev = replace(cell, split="dev", rows=self.tasks[cell.task].dev)
        orders = range(self.study.orders)
        rules = [str(rule or "") for rule in self.study.decide] if "decide" in dev.choose else [""]
        return [
            (variant, seed, rule, [replace(on_dev, variant=variant, seed=seed, order=order) for order in orders])
            for variant in self.study.variants
            if variant.entry == cell.variant.entry and fixed.items() <= variant.arguments.items()
            for seed in (self.study.seeds if "seeds" in dev.choose else (cell.seed,))
            for rule in rules
        ]


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def plain(text: str, longest: int = 150) -> str:
    """Text as a file's name. What is shortened or has other characters gets a digest."""
    name = re.sub(r"[^\w.,=+-]+", "-", text, flags=re.ASCII).lstrip(".-")[-longest:]
    return name if name == text else f"{name}-{digest(text)}"
