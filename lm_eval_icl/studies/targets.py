"""The checkpoints and cells of a study as plain data, each with a path that is made of its inputs;
and the choice on the dev set."""

from __future__ import annotations

import functools
import itertools
import json
import math
import operator
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from lm_eval_icl import files, methods
from lm_eval_icl.demonstrations.similar import Similar
from lm_eval_icl.inference.checkpoints import ARGUMENTS
from lm_eval_icl.inference.identity import source_digest
from lm_eval_icl.studies.grid import HF, Demonstrations, Study, Training, Variant, trained_under


@dataclass(frozen=True)
class Model:
    """A model of a study: an existing one, or one that the study trains from an existing one, under
    a method."""

    # The arguments of the existing model, as for `--model_args`.
    arguments: Mapping[str, Any]
    training: Training | None = None
    # The method that it is trained under.
    under: Variant | None = None
    # The metadata of the tasks that it is trained on.
    metadata: Mapping[str, Any] = field(default_factory=dict)
    # The resources that the study's file asks Ray for; they change no number.
    resources: Mapping[str, float] = field(default_factory=dict, compare=False)

    @property
    def name(self) -> str:
        return str(self.arguments["pretrained"])

    @cached_property
    def folder(self) -> str:
        """The folder of the model's cells: its name, its training's name, and a digest of arguments
        and checkpoint."""
        arguments = json.dumps(self.arguments, sort_keys=True, default=str)
        names = [self.name.strip("/")]
        if self.training:
            names.append(self.training.name)
        return _named(names, arguments + self.checkpoint)

    @property
    def training_arguments(self) -> dict[str, Any]:
        """The `--model_args` for `lm-eval-icl train`: the model's arguments that it knows, and
        those of the method."""
        arguments = {key: value for key, value in self.arguments.items() if key in ARGUMENTS}
        if self.under:
            arguments |= self.under.arguments
        return arguments

    @cached_property
    def checkpoint(self) -> str:
        """The name of the trained checkpoint, with a digest of all that its weights depend on; ""
        without training."""
        if self.training is None or self.under is None:
            return ""
        inputs = [
            self.training_arguments,
            self.under.method,
            self.training.weight_options,
            self.metadata,
        ]
        names = [self.name.strip("/"), self.training.name, self.under.name]
        return _named(names, json.dumps(inputs, sort_keys=True, default=str))


def _named(names: Iterable[str], inputs: str) -> str:
    """The name of a folder: names, and a digest of all that its content depends on."""
    return f"{','.join(plain(name, 60) for name in names)}-{digest(inputs)}"


@dataclass(frozen=True)
class Checkpoint:
    """A model that the study trains."""

    model: Model

    @property
    def path(self) -> str:
        return f"checkpoints/{self.model.checkpoint}"


@dataclass(frozen=True)
class Cell:
    """One evaluation of a study."""

    model: Model
    variant: Variant
    task: str
    num_fewshot: int
    demonstrations: Demonstrations | None
    seed: int
    order: int = 0
    # "test" or "dev".
    split: str = "test"
    # lm-eval's `--limit`; None on the dev set, whose size is set already.
    limit: float | None = None
    # A digest of the data (`StudyTask.data`).
    data: str = ""
    # The settings that were chosen on the dev set: names of arguments, "seeds", "decide".
    chosen: tuple[str, ...] = ()
    # The decision rule that was chosen; "" for no rule, and if rules are not chosen.
    rule: str = ""
    # The decision rules whose values the cell has, besides the model's own answers.
    decide: str = ""
    # The labels of the demonstrations (`harness.varying`); None for the right labels.
    labels: str | None = None
    # The format of the prompts; 0 for the task's own.
    format: int = 0

    @property
    def drawn(self) -> str | None:
        """The way in which demonstrations are drawn or chosen, as text; None for the task's own
        way."""
        return None if self.demonstrations is None else str(self.demonstrations)

    @property
    def set_of_demonstrations(self) -> tuple[int, str, int]:
        """The number, way and seed of the demonstrations."""
        return self.num_fewshot, str(self.demonstrations), self.seed

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that a dev set can choose: the method's arguments, "seeds" and "decide"."""
        return {**self.variant.arguments, "seeds": self.seed, "decide": self.rule or "none"}

    def without(self, *names: str) -> Cell:
        """The cell, without these arguments of the method."""
        arguments = {k: v for k, v in self.variant.arguments.items() if k not in names}
        return replace(self, variant=replace(self.variant, arguments=arguments))

    @cached_property
    def path(self) -> str:
        """The folder of the cell's results and samples, below the study's folder."""
        axes = {
            "num_fewshot": self.num_fewshot,
            "demonstrations": self.drawn,
            "seed": self.seed,
            "order": self.order,
            "labels": self.labels,
            "format": self.format or None,
            "split": self.split if self.split != "test" else None,
            "limit": self.limit,
            "decide": self.decide or None,
            "chosen": "+".join(self.chosen) or None,
            "rule": (self.rule or "none") if "decide" in self.chosen else None,
            "data": self.data or None,
        }
        task = [self.task]
        for name, value in axes.items():
            if value is not None:
                task.append(f"{name}={value}")
        variant = plain(self.variant.name)
        source = _source(self.variant.method)  # a digest of the code of a user's method
        if source:
            variant += f"-{source}"
        return "/".join(["cells", self.model.folder, variant, plain(",".join(task))])


Target = Checkpoint | Cell


@dataclass(frozen=True, eq=False)
class StudyTask:
    """A task of a study (`cell_tasks.load`)."""

    name: str
    shots: tuple[int, ...]
    # Name in the study's `tasks` that has this task -> its groups with the task.
    inside: Mapping[str, tuple[str, ...]]
    # The groups of this task whose tasks have equal weights.
    alike: frozenset[str] = frozenset()
    # lm-eval's task, which is never changed.
    loaded: Any = None
    # Row of the training split -> document.
    dev: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    # (number, way, seed of the demonstrations; split) -> a digest of the documents, prompts, pool
    # and demonstrations; and of the dev set, if its documents are evaluated, or if a model chooses
    # demonstrations, which are then others.
    data: Mapping[tuple[int, str, int, str], str] = field(default_factory=dict)
    higher_is_better: bool = True  # of the study's metric

    def columns(self, listed: Collection[str] = ()) -> set[str]:
        """The columns in which the task counts: itself, and names in the study's `tasks` (`listed`,
        or all) with the groups that they stand for."""
        names = {self.name}
        for name in listed or self.inside:
            names |= {name, *self.inside[name]}
        return names


class Candidate(NamedTuple):
    """An alternative among which the dev set chooses; the only one if there is nothing to
    choose."""

    rule: str  # the decision rule (`Cell.rule`)
    dev: tuple[Cell, ...]  # a cell for each order; empty without a dev set
    test: tuple[Cell, ...]


@dataclass(frozen=True)
class Grid:
    """All cells that a study may have. `limit` is lm-eval's `--limit`."""

    study: Study
    tasks: Mapping[str, StudyTask]
    limit: float | None = None

    @cached_property
    def models(self) -> list[Model]:
        """The study's models: as they are, or one for every training and every method that models
        are trained under."""
        study = self.study
        metadata = {key: value for key, value in study.metadata.items() if key != "metaicl"}
        models = list[Model]()
        for given in study.models:
            arguments = dict(given)
            own = arguments.pop("resources", {})
            resources = {**study.resources, **own}  # type: ignore[dict-item]
            for training, variant in itertools.product(study.stages, study.variants):
                model = Model(arguments, resources=resources)
                if training is not None:
                    under = trained_under(variant)
                    model = Model(arguments, training, under, metadata, resources)
                if model not in models:
                    models.append(model)
        return models

    def variants(self, model: Model) -> list[Variant]:
        """The variants that run on a model."""
        variants = self.study.variants
        if model.training is None:
            return list(variants)
        return [variant for variant in variants if trained_under(variant) == model.under]

    def tasks_of(self, model: Model) -> list[StudyTask]:
        """The tasks that a model is evaluated on: if the study trains the model, the targets of its
        training."""
        targets = model.training.targets if model.training else ()
        tasks = self.tasks.values()
        return [task for task in tasks if not targets or task.inside.keys() & {*targets}]

    @cached_property
    def alternatives(self) -> list[tuple[Candidate, ...]]:
        """For every cell on the test set, the candidates for it, model by model; a single one if
        nothing is chosen. Every set of demonstrations has its own choice, unless `dev.choose` names
        seeds too."""
        study = self.study
        choose = study.dev.choose if study.dev else ()
        rules = [str(rule or "") for rule in study.decide] if "decide" in choose else [""]
        groups = defaultdict[Any, list[Candidate]](list)
        for first, orders in self._first_orders():
            task = self.tasks[first.task]
            test = tuple(replace(first, order=order) for order in range(orders))
            dev: tuple[Cell, ...] = ()
            if study.dev:
                data = task.data.get((*first.set_of_demonstrations, "dev"), "")
                dev = tuple(replace(cell, split="dev", data=data, limit=None) for cell in test)
            alike = first.without(*choose)
            if "seeds" in choose:
                alike = replace(alike, seed=0, data="")
            for rule in rules:
                groups[first.variant.entry, alike.path].append(Candidate(rule, dev, test))
        return [tuple(candidates) for candidates in groups.values()]

    def _first_orders(self) -> Iterator[tuple[Cell, int]]:
        """The cells on the test set with the first order of their demonstrations, each with the
        number of its orders."""
        study = self.study
        decide = "+".join(map(str, study.rules))
        for model in self.models:
            for variant, task in itertools.product(self.variants(model), self.tasks_of(model)):
                axes = (task.shots, study.labels, study.formats, study.demonstrations, study.seeds)
                for shots, labels, format_number, how, seed in itertools.product(*axes):
                    varied = [shots, labels, format_number]
                    firsts = [task.shots[0], study.labels[0], study.formats[0]]
                    others = sum(map(operator.ne, varied, firsts))
                    if study.one_at_a_time and others > 1:
                        continue
                    is_further = seed != study.seeds[0]
                    if is_further and not _depends_on_seed(study, variant, shots, labels, how):
                        continue
                    cell = Cell(
                        model,
                        variant,
                        task.name,
                        shots,
                        how,
                        seed,
                        data=task.data.get((shots, str(how), seed, "test"), ""),
                        limit=self.limit,
                        decide=decide,
                        labels=labels,
                        format=format_number,
                    )
                    yield cell, 1 if study.one_at_a_time and others else study.orders


def _depends_on_seed(
    study: Study, variant: Variant, shots: int, labels: str | None, how: Demonstrations | None
) -> bool:
    """Whether cells of two seeds may differ. Decision rules, other labels and rows on which a
    method is fitted are drawn by the seed, too."""
    if labels is not None or study.rules:
        return True
    if shots > 1 and variant.method != HF and variant.make().rows_wanted:
        return True
    if isinstance(how, Similar):
        return how.fixed > 0 or how.order == "random"
    return how is None or (shots > 0 and how != "first")


def units_of(cells: Iterable[Cell]) -> list[tuple[Cell, ...]]:
    """The cells as units, whose cells are scored together: they differ only in the order of the
    demonstrations and the number of passes. Cells of a single pass are units by themselves, since
    longer prompts may fit."""
    alike: dict[Any, list[Cell]] = defaultdict(list)
    for cell in cells:
        name, _ = passes_of(cell.variant)
        alone = name and len(cell.variant.make().passes(0, [1, 1])) == 1
        first = replace(cell.without(name), order=0, chosen=(), rule="")
        alike[first.path, alone].append(cell)
    return [tuple(unit) for unit in alike.values()]


def passes_of(variant: Variant) -> tuple[str, int]:
    """The argument that says how many memories a method makes, and its value; ("", 1) if a method
    makes one."""
    if variant.method == HF or not (name := methods.find(variant.method).counts_memories):
        return "", 1
    return name, getattr(variant.make(), name)


def choose(
    grid: Grid, candidates: Sequence[Candidate], scores: Sequence[Sequence[float]]
) -> tuple[Cell, ...]:
    """The cells on the test set of the candidate whose `scores` on the dev set have the best mean
    over orders; of equal means (up to rounding), the first. A score that is not finite counts as
    the worst."""
    dev = grid.study.dev
    assert dev is not None
    higher_is_better = grid.tasks[candidates[0].test[0].task].higher_is_better
    means = []
    for by_order in scores:
        if all(map(math.isfinite, by_order)):
            mean = math.fsum(by_order) / len(by_order)
            means.append(mean if higher_is_better else -mean)
        else:
            means.append(-math.inf)
    is_top = [math.isclose(mean, max(means), rel_tol=1e-9) for mean in means]
    chosen = candidates[is_top.index(True)]
    values = [{**candidate.test[0].settings, "decide": candidate.rule} for candidate in candidates]
    names = tuple(
        name for name in dev.choose if len({str(point.get(name)) for point in values}) > 1
    )
    rule = chosen.rule if "decide" in names else ""
    return tuple(replace(cell, chosen=names, rule=rule) for cell in chosen.test)


@functools.cache
def _source(method: str) -> str:
    return "" if ":" not in method else source_digest(methods.find(method)) or ""


def digest(text: str) -> str:
    return files.digest(text)[:10]


def plain(text: str, longest: int = 150) -> str:
    """Text as a file's name. A text that is too long or has other characters is changed, and gets a
    digest."""
    name = re.sub(r"[^\w.,=+-]+", "-", text, flags=re.ASCII).lstrip(".-")[-longest:]
    return name if name == text else f"{name}-{digest(text)}"
