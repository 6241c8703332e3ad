"""What a study makes, as plain data: checkpoints, demonstrations that a model chooses, and cells. Each names its file
by its inputs, and knows which others it needs first."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from lm_eval_icl import methods
from lm_eval_icl.demonstrations.how import How
from lm_eval_icl.inference.checkpoints import ARGUMENTS
from lm_eval_icl.inference.identity import source_digest
from lm_eval_icl.metaicl.files import skips
from lm_eval_icl.studies.grid import HF, Demonstrations, Study, trained_under
from lm_eval_icl.studies.parts import Training, Variant


@dataclass(frozen=True)
class Model:
    """A model of a study: one that is there, or one that the study trains from that.

    Attributes:
        arguments: as of `--model_args`, of the model that is there.
        training: how it is trained; None if it is not.
        under: the method that it is trained under.
        skips: whether MetaICL's tasks without files are left out of the training.
        resources: those of a cluster's worker that has it, as far as the study says.
    """

    arguments: Mapping[str, Any]
    training: Training | None = None
    under: Variant | None = None
    skips: bool = False
    resources: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def name(self) -> str:
        """The name of the model that is there."""
        return str(self.arguments["pretrained"])

    @property
    def title(self) -> str:
        """The name of the model that is evaluated, for people."""
        return self.checkpoint or self.name

    @cached_property
    def folder(self) -> str:
        """The folder of its cells: its name, the training's, and a digest of all arguments and the checkpoint."""
        arguments = json.dumps(self.arguments, sort_keys=True, default=str)
        names = [self.name.strip("/"), *([self.training.name] if self.training else [])]
        return f"{','.join(plain(name, 60) for name in names)}-{digest(arguments + self.checkpoint)}"

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
        inputs = [self.training_arguments, self.under.method, options, *([True] if self.skips else [])]
        names = plain(self.name.strip("/"), 60), plain(self.training.name, 60), plain(self.under.name, 60)
        return f"{','.join(names)}-{digest(json.dumps(inputs, sort_keys=True, default=str))}"


@dataclass(frozen=True)
class Checkpoint:
    """A model that the study trains."""

    model: Model
    needs = ()

    @property
    def path(self) -> str:
        return f"checkpoints/{self.model.checkpoint}"


@dataclass(frozen=True)
class ChosenRows:
    """Demonstrations that a model chooses, for all methods alike.

    Attributes:
        data: a digest of what is chosen from, and of the dev set, of which nothing is chosen.
    """

    model: Model
    task: str
    num_fewshot: int
    how: How
    seed: int
    data: str

    @cached_property
    def path(self) -> str:
        name = f"{plain(f'{self.task},{self.how}')},n={self.num_fewshot},seed={self.seed},{self.data}.json"
        return f"choices/{self.model.folder}/{name}"

    @property
    def needs(self) -> tuple[Checkpoint, ...]:
        return (Checkpoint(self.model),) if self.model.training else ()


@dataclass(frozen=True)
class Cell:
    """One evaluation of a study.

    Attributes:
        task: the name of the leaf task.
        split: "test" or "dev".
        data: a digest of the task's documents, prompts and demonstrations, and of the dev set's documents where these
            are evaluated or kept from being chosen.
        chosen: the names of what was chosen on the dev set: arguments, "seeds", "decide".
        rule: the decision rule that was chosen; empty for the raw values, and if rules are not chosen among.
        alone: its task makes the requests for one method, so that it shares none with cells of others.
        decide: the decision rules whose values it has besides what the model says; empty if none.
    """

    model: Model
    variant: Variant
    task: str
    num_fewshot: int
    demonstrations: Demonstrations | None
    seed: int
    order: int = 0
    split: str = "test"
    limit: float | None = None
    data: str = ""
    chosen: tuple[str, ...] = ()
    rule: str = ""
    alone: bool = False
    decide: str = ""

    @property
    def drawn(self) -> str | None:
        """How the demonstrations are drawn or chosen, as text; None for the task's own way."""
        return None if self.demonstrations is None else str(self.demonstrations)

    @cached_property
    def path(self) -> str:
        """The folder of its results and samples, below the study's."""
        axes = {
            "num_fewshot": self.num_fewshot,
            **({} if self.drawn is None else {"demonstrations": self.drawn}),
            "seed": self.seed,
            "order": self.order,
            **({} if self.split == "test" else {"split": self.split}),
            **({} if self.limit is None else {"limit": self.limit}),
            **({"decide": self.decide} if self.decide else {}),
            **({"chosen": "+".join(self.chosen)} if self.chosen else {}),
            **({"rule": self.rule or "none"} if "decide" in self.chosen else {}),
            **({"data": self.data} if self.data else {}),
        }
        task = ",".join([self.task, *(f"{name}={value}" for name, value in axes.items())])
        source = _source(self.variant.method)  # of a method of the user's
        variant = plain(self.variant.name) + (f"-{source}" if source else "")
        return "/".join(["cells", self.model.folder, variant, plain(task)])

    @property
    def needs(self) -> tuple[Checkpoint | ChosenRows, ...]:
        """What has to be there before it can be run; a cell on the test set also waits for its choice on dev."""
        rows = self.chosen_rows
        return (*([Checkpoint(self.model)] if self.model.training else []), *([rows] if rows else []))

    @property
    def chosen_rows(self) -> ChosenRows | None:
        """The demonstrations that its model chooses; None if they are drawn."""
        if not isinstance(self.demonstrations, How) or not self.num_fewshot:
            return None
        return ChosenRows(self.model, self.task, self.num_fewshot, self.demonstrations, self.seed, self.data)


Target = Checkpoint | ChosenRows | Cell


@dataclass(frozen=True)
class GridTask:
    """What the cells of a study depend on of one of its tasks.

    Attributes:
        shots: numbers of demonstrations.
        asked: the names in the study's `tasks` that it comes from.
        alone: as of `Cell`.
        reported: its name in results, where a study has a task twice.
        data: a digest of its documents, prompts, pool and drawn demonstrations, by number, way and seed of these.
        dev: a digest of its dev set; empty without one.
        higher_is_better: of the dev set's metric.
    """

    name: str
    shots: tuple[int, ...]
    asked: tuple[str, ...]
    alone: bool = False
    reported: str = ""
    data: Mapping[tuple[int, str, int], str] = field(default_factory=dict)
    dev: str = ""
    higher_is_better: bool = True

    def data_of(self, shots: int, how: Any, seed: int, on_dev: bool = False) -> str:
        """As of `Cell.data`."""
        data = self.data.get((shots, str(how), seed), "")
        return digest(data + self.dev) if self.dev and (on_dev or isinstance(how, How)) else data


@dataclass(frozen=True)
class Candidate:
    """One of the alternatives that the dev set chooses among; the only one, if there is nothing to choose.

    Attributes:
        rule: the decision rule; empty for the raw values, and if rules are not chosen among.
        dev, test: its cells, one for each order; no `dev` without a dev set.
    """

    variant: Variant
    seed: int
    rule: str
    dev: tuple[Cell, ...]
    test: tuple[Cell, ...]


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
                without_files = training is not None and "metaicl" in training.options and skips(study.metadata)
                if (model := Model(arguments, training, under, without_files, resources)) not in models:
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

    @cached_property
    def alternatives(self) -> list[tuple[Candidate, ...]]:
        """The alternatives to every cell on the test set, model by model; one each if nothing is chosen on a dev set.

        The arguments that `dev.choose` names are chosen for every set of demonstrations by itself. If it names seeds, a
        set of demonstrations is chosen too, and if it names decide, a rule.
        """
        study = self.study
        choose = study.dev.choose if study.dev else ()
        rules = [str(rule or "") for rule in study.decide] if "decide" in choose else [""]
        groups: dict[Any, list[Candidate]] = defaultdict(list)
        for model in self.models:
            for variant in self.variants(model):
                fixed = str(sorted((key, value) for key, value in variant.arguments.items() if key not in choose))
                for task in self.tasks_of(model):
                    for shots, how, seed in itertools.product(task.shots, study.demonstrations, study.seeds):
                        key = model.folder, variant.entry, fixed, task.name, shots, str(how), "seeds" in choose or seed
                        first = Cell(
                            *(model, variant, task.name, shots, how, seed),
                            data=task.data_of(shots, how, seed),
                            limit=self.limit,
                            alone=task.alone,
                            decide="+".join(map(str, study.rules)),
                        )
                        test = tuple(replace(first, order=order) for order in range(study.orders))
                        data = task.data_of(shots, how, seed, on_dev=True)
                        dev = tuple(replace(cell, split="dev", data=data) for cell in test) if study.dev else ()
                        groups[key] += [Candidate(variant, seed, rule, dev, test) for rule in rules]
        return [tuple(candidates) for candidates in groups.values()]


def batches(cells: Iterable[Cell]) -> list[tuple[Cell, ...]]:
    """The cells by their requests: those of a model, a task, a set of demonstrations and a split, in the order of the
    first of each. The requests are made once for all of them."""
    by_requests: dict[Any, list[Cell]] = defaultdict(list)
    for cell in cells:
        method = cell.variant.name if cell.alone else ""
        axes = cell.task, cell.num_fewshot, cell.drawn, cell.seed, cell.split, cell.data, method
        by_requests[cell.model.folder, *axes].append(cell)
    return [tuple(alike) for alike in by_requests.values()]


def together(cells: Iterable[Cell]) -> list[tuple[Cell, ...]]:
    """Of cells with the same requests, those that are scored together: they differ in nothing but the order of the
    demonstrations and the number of passes."""
    alike: dict[tuple[str, str], list[Cell]] = defaultdict(list)
    for cell in cells:
        name, _ = passes_of(cell.variant)
        arguments = sorted((key, value) for key, value in cell.variant.arguments.items() if key != name)
        alike[cell.variant.method, str(arguments)].append(cell)
    return [tuple(group) for group in alike.values()]


def passes_of(variant: Variant) -> tuple[str, int]:
    """The argument that says how many memories a method makes, and its value; ("", 1) if a method makes one."""
    if variant.method == HF:
        return "", 1

    cls = methods.find(variant.method)
    if not (name := cls.counts_memories):
        return "", 1
    return name, getattr(cls.from_arguments(variant.arguments), name)


@functools.cache
def _source(method: str) -> str:
    return "" if ":" not in method else source_digest(methods.find(method)) or ""


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def plain(text: str, longest: int = 150) -> str:
    """Text as a file's name. What is shortened or has other characters gets a digest."""
    name = re.sub(r"[^\w.,=+-]+", "-", text, flags=re.ASCII).lstrip(".-")[-longest:]
    return name if name == text else f"{name}-{digest(text)}"
