"""The order of work: cells in, batches of cells out that are run together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from lm_eval_icl.harness.models import model_class
from lm_eval_icl.studies.cells import Cell, digest
from lm_eval_icl.studies.grid import HF, Variant

Key = tuple[Any, ...]


@dataclass(frozen=True)
class Batch:
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
        return f"{first.model.checkpoint or first.model.name}, {first.variant.method}, {first.task} ({first.split})"


def batches(cells: Iterable[Cell]) -> list[Batch]:
    """The batches of some cells, in the order that loads and makes least.

    The cells of a model come one after another, those on the dev set before those on the test set, and those with the
    same requests one after another, since requests are made once for all methods. Otherwise all stay in their order.
    """
    found: dict[Key, dict[Key, list[Cell]]] = defaultdict(lambda: defaultdict(list))
    models = dict[str, int]()
    for cell in cells:
        models.setdefault(cell.model.folder, len(models))
        axes = cell.task, cell.changes, cell.num_fewshot, cell.demonstrations and cell.demonstrations.text, cell.seed
        method = cell.variant.name if cell.alone else ""
        requests = (cell.model.folder, *axes, cell.split, cell.rows, cell.limit, method)
        found[requests][without_passes(cell.variant)].append(cell)
    by_requests = sorted(found.items(), key=lambda item: (models[item[0][0]], item[0][6] != "dev"))
    return [Batch(tuple(some), requests) for requests, methods in by_requests for some in methods.values()]


def passes_of(variant: Variant) -> tuple[str, int]:
    """The argument that says how many memories a method makes, and its value; ("", 1) if a method makes one."""
    if variant.method == HF:
        return "", 1
    cls = model_class(variant.method).method_class
    if not cls.counts_memories:
        return "", 1
    return cls.counts_memories, getattr(cls.from_arguments(variant.arguments), cls.counts_memories)


def without_passes(variant: Variant) -> tuple[str, str]:
    """What the variants have in common that are scored together."""
    name, _ = passes_of(variant)
    return variant.method, str(sorted((key, value) for key, value in variant.arguments.items() if key != name))
