"""The order of work: cells in, batches of cells out that are run together; and units, which one worker runs."""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lm_eval_icl.harness.models import model_class
from lm_eval_icl.studies.cells import Cell, Model, digest
from lm_eval_icl.studies.grid import HF, Variant

Key = tuple[Any, ...]


@dataclass(frozen=True)
class CellBatch:
    """Cells that are run together: they differ in nothing but the order of the demonstrations and the number of passes.

    Attributes:
        cells: one or more.
        requests: what batches with the same requests have in common.
    """

    cells: tuple[Cell, ...]
    requests: Key

    @property
    def id(self) -> str:
        """A name for what is kept until all cells are done; the same whichever of the cells are left to run."""
        first = self.cells[0]
        return digest(f"{first.model.folder} {(self.requests[1:], without_passes(first.variant))}")

    @property
    def title(self) -> str:
        """What is run, for people."""
        first = self.cells[0]
        return f"{first.model.title}, {first.variant.method}, {first.task} ({first.split})"


@dataclass(frozen=True, eq=False)
class Unit:
    """What one worker runs at a time for a model: its training, a choice of demonstrations, or cells.

    Attributes:
        kind: "train", "choose", "dev" or "test".
        task: the name of the task; empty for a training.
        batches: the cells, in batches with the same requests; empty for a training and a choice.
    """

    model: Model
    kind: str
    task: str = ""
    batches: tuple[CellBatch, ...] = ()

    @property
    def cells(self) -> list[Cell]:
        return [cell for batch in self.batches for cell in batch.cells]

    @property
    def title(self) -> str:
        """What is run, for people."""
        name = self.model.title
        return f"the training of {name}" if self.kind == "train" else f"{name}, {self.task} ({self.kind})"


class Queue:
    """Units that wait for a worker, by model and kind."""

    KINDS = ("train", "choose", "dev", "test")

    def __init__(self) -> None:
        self.models: dict[str, Model] = {}  # by folder, in the order of the study; with those that have no units left
        self._units: dict[str, list[tuple[int, int, Unit]]] = {}  # a heap for each model, by kind and place
        self._places = itertools.count(1)

    def add(self, unit: Unit, again: bool = False) -> None:
        """Put a unit behind those of its model and kind, or before them if it is run again."""
        folder, place = unit.model.folder, next(self._places)
        self.models.setdefault(folder, unit.model)
        units = self._units.setdefault(folder, [])
        heapq.heappush(units, (self.KINDS.index(unit.kind), -place if again else place, unit))

    def waiting(self) -> dict[str, int]:
        """The folders of the models that have units, and how soon the first of these is wanted: 0 is first."""
        return {folder: units[0][0] for folder, units in self._units.items() if units}

    def count(self, model: str) -> int:
        """How many units of a model wait."""
        return len(self._units[model])

    def take(self, model: str) -> Unit:
        """The next unit of a model that has some: first those that others wait for."""
        return heapq.heappop(self._units[model])[2]

    def best(self, held: str | None, workers: Mapping[str, int], fits: Callable[[Model], bool]) -> str | None:
        """The model of which an idle worker takes a unit; None if no unit waits that it can run.

        Trainings come first, because everything else of a model waits for them. Then the worker goes on with the model
        that it holds. If that has no units, it loads a model whose units others wait for, and which few workers hold.
        """
        waiting = {model: kind for model, kind in self.waiting().items() if fits(self.models[model])}
        return min(
            waiting,
            key=lambda model: (waiting[model] > 0, model != held, waiting[model], workers.get(model, 0)),
            default=None,
        )


def batches(cells: Iterable[Cell]) -> list[CellBatch]:
    """The batches of cells, in the order that loads and makes least.

    The cells of a model come one after another, those on the dev set before those on the test set, and those with the
    same requests one after another, since requests are made once for all methods. Otherwise all stay in their order.
    """
    by_requests: dict[Key, dict[Key, list[Cell]]] = defaultdict(lambda: defaultdict(list))
    models = dict[str, int]()
    for cell in cells:
        models.setdefault(cell.model.folder, len(models))
        axes = cell.task, cell.changes, cell.num_fewshot, cell.drawn, cell.seed
        method = cell.variant.name if cell.alone else ""
        decide = [cell.decide] if cell.decide else []
        requests = (cell.model.folder, *axes, cell.split, cell.rows, cell.limit, method, *decide)
        by_requests[requests][without_passes(cell.variant)].append(cell)
    ordered = sorted(by_requests.items(), key=lambda item: (models[item[0][0]], item[0][6] != "dev"))
    return [CellBatch(tuple(alike), requests) for requests, methods in ordered for alike in methods.values()]


def passes_of(variant: Variant) -> tuple[str, int]:
    """The argument that says how many memories a method makes, and its value; ("", 1) if a method makes one."""
    if variant.method == HF:
        return "", 1
    method = model_class(variant.method).method_class
    if not (name := method.counts_memories):
        return "", 1
    return name, getattr(method.from_arguments(variant.arguments), name)


def without_passes(variant: Variant) -> tuple[str, str]:
    """What the variants have in common that are scored together."""
    name, _ = passes_of(variant)
    return variant.method, str(sorted((key, value) for key, value in variant.arguments.items() if key != name))
