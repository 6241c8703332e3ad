"""The plan of a study: what is missing, whether it can be run, and how long it takes, measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from lm_eval.evaluator_utils import get_sample_size
from rich.console import Console

from lm_eval_icl.demonstrations.how import SelectionMethod
from lm_eval_icl.errors import InputError
from lm_eval_icl.studies.conduct import DONE, Failure, states
from lm_eval_icl.studies.folder import StudyFolder
from lm_eval_icl.studies.targets import Cell, Grid, passes_of, units_of
from lm_eval_icl.studies.unit_runner import UnitRunner

_TRIALS = (4, 8)  # the documents of the two trials of a method


def print_plan(grid: Grid, folder: StudyFolder, console: Console, runner: UnitRunner) -> None:
    """Print how many cells of each model are missing, with their documents and minutes.

    Args:
        runner: checks the prompts of the cells, and runs the trials. Nothing is written.

    Raises:
        InputError: models cannot run; the message names them.
    """
    missing: dict[str, list[Cell]] = defaultdict(list)
    for target, state in states(grid, folder, {}):
        if isinstance(target, Cell) and state != DONE:
            missing[str(target.model.arguments)].append(_tried(target))
    refused = []
    with TemporaryDirectory() as temporary:
        runner.folder = StudyFolder(Path(temporary))
        for cells in missing.values():
            name = cells[0].model.name
            documents = sum(documents_of(grid, cell) for cell in cells)
            line = f"{name}: {len(cells):,} cells, {documents:,} documents"
            try:
                check(runner, cells)
                low, high = seconds(grid, runner, cells)
                line += f", {low / 60:.1f} to {high / 60:.1f} minutes by two trials of each method"
            except InputError as error:
                refused.append(name)
                line += f" that cannot be run: {error.message}"
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    if refused:
        raise InputError(f"{', '.join(refused)}: cannot be run as it is, for the reasons above.")


def _tried(cell: Cell) -> Cell:
    """The cell that stands for a cell in checks and trials: on the model before its training, and
    with demonstrations that are drawn where a model would choose them, which takes long."""
    model = replace(cell.model, training=None, under=None)
    drawn = "random" if isinstance(cell.demonstrations, SelectionMethod) else cell.demonstrations
    return replace(cell, model=model, demonstrations=drawn)


def documents_of(grid: Grid, cell: Cell) -> int:
    """The number of documents that a cell scores."""
    task = grid.tasks[cell.task]
    if cell.split == "dev":
        return len(task.dev)
    return get_sample_size(task.loaded, cell.limit) or len(task.loaded.eval_docs)


def check(runner: UnitRunner, cells: Iterable[Cell]) -> None:
    """Load the model, and raise an `InputError` if a prompt does not fit it. Prompts of other
    seeds, orders, labels and formats are assumed to be as long."""
    firsts: dict[tuple[str, str, int, str | None, str], Cell] = {}
    for cell in cells:
        key = (cell.variant.name, cell.task, cell.num_fewshot, cell.drawn, cell.split)
        firsts.setdefault(key, replace(cell, order=0))
    for cell in firsts.values():
        runner.check(cell)


def seconds(grid: Grid, runner: UnitRunner, cells: Sequence[Cell]) -> tuple[float, float]:
    """The least and the most seconds that cells take, by two trials of one unit of each method.

    A unit takes some seconds for its demonstrations and some for each document. The least is what
    the longer trial took, with each further document as the documents by which the trials differ;
    the most, if every document took its share of the whole longer trial. What a method learns in
    steps is tried for one step, and takes as long for each of the others.
    """
    by_method = defaultdict(list)
    for unit in units_of(cells):
        by_method[unit[0].variant.method].append(unit)
    low = 0.0
    high = 0.0
    for units in by_method.values():
        tried = after_steps(units[0], 0)
        short, long = (trial(runner, tried, documents) for documents in _TRIALS)
        each = max(long - short, 0) / (_TRIALS[1] - _TRIALS[0])
        a_step = 0.0
        if steps_of(units[0]):
            after_one = trial(runner, after_steps(units[0], 1), _TRIALS[0])
            a_step = max(after_one - short, 0)
        for unit in units:
            documents = documents_of(grid, unit[0])
            least = long + each * (documents - _TRIALS[1])
            most = long * documents / _TRIALS[1]
            learning = a_step * steps_of(unit)
            low += learning + min(least, most)
            high += learning + max(least, most)
    return low, high


def steps_of(unit: Sequence[Cell]) -> int:
    """After how many steps of learning the last queries of a unit run; 0 if nothing is learned."""
    passes = [passes_of(cell.variant) for cell in unit]
    return max(number if name == "after" else 0 for name, number in passes)


def after_steps(unit: Sequence[Cell], steps: int) -> Sequence[Cell]:
    """A unit. If it learns, its first variant alone, whose queries run after so many steps."""
    variant = unit[0].variant
    if not steps_of(unit):
        return unit
    changed = replace(variant, arguments={**variant.arguments, "after": steps})
    return [replace(cell, variant=changed) for cell in unit if cell.variant == variant]


def trial(runner: UnitRunner, unit: Sequence[Cell], documents: int) -> float:
    """The seconds that a unit takes on few documents."""
    seconds = 0.0
    for _, results in runner.run([replace(cell, limit=documents) for cell in unit]):
        if isinstance(results, Failure):
            raise InputError(results)
        seconds = results["config"]["icl"]["study"]["shared"]["seconds"]
    return seconds
