"""How a study ends: its results as a board, with the table, page, figures and CSV file of any results. What only the
study knows stands in `study.json`, beside the cells:

    study     its name
    cells     by the path of each results file on the test set: "expected" (the paper's numbers, by column) and "curve"
              (the dev set's scores for this cell and those that it was chosen among, means over orders: a list of
              {"arguments", "seed", "score"})
    failures  why cells and checkpoints could not be made, by their paths
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from lm_eval_icl import results as tables
from lm_eval_icl.leaderboard import card, figures, study_table
from lm_eval_icl.leaderboard.page import page
from lm_eval_icl.results import statistics
from lm_eval_icl.results.board import AVERAGE, Board, Entry
from lm_eval_icl.results.build import build
from lm_eval_icl.results.read import read
from lm_eval_icl.results.records import Run
from lm_eval_icl.results.statistics import Estimate
from lm_eval_icl.studies.cells import Cell, Grid, StudyTask
from lm_eval_icl.studies.conduct import DONE, KNOWN, READY, WAITING, states
from lm_eval_icl.studies.folder import StudyFolder
from lm_eval_icl.studies.grid import Study, Training

Results = Sequence[tuple[Cell, Run]]
_TASKS = 8  # with more tasks, the columns are what the study's file calls its tasks


def conclude(
    grid: Grid, folder: StudyFolder, name: str, failed: Mapping[str, str], console: Console
) -> Mapping[str, str]:
    """Write `study.json`, and write and print what came out; why targets, and all that need them, could not be made."""
    study, columns, known = grid.study, columns_of(grid.study, grid.tasks), states(grid, folder, failed)
    failures = {target.path: state for target, state in known if state not in KNOWN}
    done = [target for target, state in known if state == DONE and isinstance(target, Cell)]
    tested = [cell for cell in done if cell.split == "test"]
    record = {"study": name, "cells": of_cells(grid, folder, tested), "failures": failures}
    folder.write_file("study.json", json.dumps(record, indent=2, default=str) + "\n")
    written = "study.json, no results on the test set"
    if found := results_of(folder, tested):
        paths = [run.path for _, run in found]
        folder.write_file("study.csv", tables.runs(paths).merge(tables.scores(paths)).to_csv(index=False))
        board = board_of(found, columns)
        drawn = figures.draw(board, folder.path / "figures", study.figures)
        folder.write_file("board.html", page(board, figures.svgs(board)))
        written = f"board.html, study.csv, study.json, {len(drawn)} files of figures, cells"
        flips = {entry.name: rate for entry in board.entries if (rate := flips_of(entry, columns)) is not None}
        title = " ".join(filter(None, [study.paper, study.title]))
        if board.card is None or not study.one_at_a_time:
            console.print(study_table.table(board, columns.names, in_order(board, found), flips, title))
        if board.card is not None:
            console.print(card.table(board.card, title))
    for sentence in study.deviates:
        console.print(f"Deviates: {sentence}", markup=False, highlight=False)
    console.print(f"{folder.path}: {written}", markup=False, highlight=False)
    return failures


Trained = tuple[str, str]  # a training ("" if the models are evaluated as they are), and a task


@dataclass(frozen=True)
class Columns:
    """The columns of a study."""

    names: tuple[str, ...]  # of all, each average after what it is of
    tasks: Mapping[str, frozenset[Trained]]  # by column, averages aside, what counts in it
    alike: frozenset[str]  # the columns whose tasks count alike, however many documents they have
    averages: Mapping[str, tuple[str, ...]]  # by the name of each average, the columns that count alike in it

    def groups(self, documents: Mapping[Trained, int], names: Mapping[Trained, str]) -> dict[str, dict[str, float]]:
        """The weights of tasks in each column of which all results are there, averages among them, by the numbers of
        documents that were scored and the names of tasks on the board."""
        weights = {}
        for column, tasks in self.tasks.items():
            if tasks and tasks <= documents.keys():
                counts = {task: 1 if column in self.alike else documents[task] for task in sorted(tasks)}
                weights[column] = {names[task]: number / sum(counts.values()) for task, number in counts.items()}
        for average, columns in self.averages.items():
            if weights.keys() >= {*columns}:
                of_all = [weights[column] for column in columns]
                tasks_of = dict.fromkeys(itertools.chain(*of_all))
                weights[average] = {task: sum(of.get(task, 0) for of in of_all) / len(columns) for task in tasks_of}
        # A task is a column by itself.
        return {column: of_tasks for column, of_tasks in weights.items() if list(of_tasks) != [column]}


def columns_of(study: Study, leaves: Mapping[str, StudyTask]) -> Columns:
    """The columns that the study's file names, or else its tasks: of more than eight, those that the file lists."""
    parts: Mapping[str, Sequence[str]] = study.columns
    if not parts:
        listed = [task if isinstance(task, str) else str(task["task"]) for task in study.tasks]
        parts = {"": list(leaves) if len(leaves) <= _TASKS else listed}
    trainings: Sequence[Training | None] = study.trainings or [None]
    tasks: dict[str, set[Trained]] = {column: set() for columns in parts.values() for column in columns}
    for leaf, training in itertools.product(leaves.values(), trainings):
        targets = training.targets if training and training.targets else leaf.inside.keys()
        groups = [leaf.inside[name] for name in leaf.inside.keys() & targets]
        for column in {leaf.name, *itertools.chain(*groups)} & tasks.keys() if groups else ():
            tasks[column].add((training.name if training else "", leaf.name))
    names: list[str] = []
    averages = {}
    for part, columns in parts.items():
        names += columns
        if len(columns) > 1:
            names.append(f"{AVERAGE}, {part}" if part else AVERAGE)
            averages[names[-1]] = tuple(columns)
    alike = frozenset(group for leaf in leaves.values() for group in leaf.alike)
    return Columns(tuple(names), {column: frozenset(trained) for column, trained in tasks.items()}, alike, averages)


def board_of(results: Results, columns: Columns) -> Board:
    """The board of a study's cells on the test set. If every column belongs to one training alone, the models of all
    trainings are one row, and a task that models of two trainings are evaluated on has a name for each."""
    documents = {_trained(cell): run.all_results[0].documents for cell, run in reversed(results)}
    trainings = list(dict.fromkeys(_trained(cell)[0] for cell, _ in results))
    are_of_one = all(len({training for training, _ in tasks}) < 2 for tasks in columns.tasks.values())
    together = len(trainings) > 1 and are_of_one
    often = Counter(task for _, task in documents)
    names = {
        (training, task): f"{task} [{training}]" if together and often[task] > 1 else task
        for training, task in documents
    }
    groups = columns.groups(documents, names)
    tasks = [column for column in columns.names if column in groups or column in names.values()]
    by = ("training",) if together else ()
    return build([run for _, run in results], tasks=tasks, groups=groups, columns_by=by)


def _trained(cell: Cell) -> Trained:
    return cell.model.training.name if cell.model.training else "", cell.task


def flips_of(entry: Entry, columns: Columns) -> Estimate | None:
    """An entry's order sensitivity over all columns: that of the average. Of several averages, their mean."""
    cells = [entry.cells.get(column) for column in columns.averages or columns.tasks]
    flips = [cell.sensitivity for cell in cells if cell is not None and cell.sensitivity is not None]
    if not flips or len(flips) < len(cells):
        return None
    return flips[0] if len(flips) == 1 else statistics.estimate_group(flips, [1] * len(flips), bounds=(0.0, 1.0))


def in_order(board: Board, results: Results) -> list[Entry]:
    """The board's entries in the order of the study's models and methods."""
    models = list(dict.fromkeys(cell.model.name for cell, _ in results))
    places = {run.path: (models.index(cell.model.name), cell.variant.entry, i) for i, (cell, run) in enumerate(results)}
    return sorted(board.entries, key=lambda entry: min(places[run.path] for run in entry.runs))


def of_cells(grid: Grid, folder: StudyFolder, cells: Sequence[Cell]) -> dict[str, dict[str, Any]]:
    """What `study.json` says of cells on the test set that are done."""
    curves: dict[str, Any] = {}
    for candidates in grid.alternatives if grid.study.dev else ():
        if all(folder.has(cell) for candidate in candidates for cell in candidate.dev):
            chosen, curve = folder.choice(grid, candidates)
            curves |= {cell.path: curve for cell in chosen}
    says = [{"expected": expected_of(grid.study, cell), "curve": curves.get(cell.path, [])} for cell in cells]
    paths = [folder.results_path(cell).relative_to(folder.path).as_posix() for cell in cells]
    return dict(zip(paths, says, strict=True))


def results_of(folder: StudyFolder, cells: Sequence[Cell]) -> Results:
    """Cells that are done with their results."""
    runs = {run.path: run for run in read([folder.results_path(cell) for cell in cells], quiet=True, dev=True)[0]}
    return [(cell, runs[path]) for cell in cells if (path := folder.results_path(cell)) in runs]


def expected_of(study: Study, cell: Cell) -> dict[str, float]:
    """The paper's numbers, by column: those of the first entry of `expected` that agrees with the cell."""
    own = {
        "model": cell.model.name,
        "training": _trained(cell)[0],
        "method": cell.variant.method,
        "num_fewshot": cell.num_fewshot,
        "demonstrations": cell.drawn,
        "chosen": bool(cell.chosen),
    }
    values: dict[str, float] = {}
    for entry in study.expected:
        agrees = all(entry.get(name) in (None, value) for name, value in own.items())
        if agrees and (entry.get("arguments") or {}).items() <= cell.variant.arguments.items():
            values = entry.get("values", {}) | values
    return values


def print_states(grid: Grid, folder: StudyFolder, console: Console, verbose: bool) -> None:
    """Print how many cells are in which state, and why some could not be made; all that are not done if `verbose`."""

    def say(text: str) -> None:
        # Reasons have the texts of other people's tasks: nothing that a terminal would obey.
        console.print(Text("".join(c if c.isprintable() else "\ufffd" for c in text)), soft_wrap=True)

    names = {DONE: "done", READY: "missing", WAITING: "waiting for others"}
    known = states(grid, folder, folder.failures())
    cells = Counter((target.split, names.get(s, "failed")) for target, s in known if isinstance(target, Cell))
    for (split, state), number in cells.items():
        say(f"{number:,} cells on the {split} set: {state}")
    if trained := sum(not isinstance(target, Cell) for target, _ in known):
        say(f"{trained:,} checkpoints to be trained first")
    for target, state in known:
        if state not in names:
            say(f"failed: {target.path}: {state}")
        elif verbose and state != DONE:
            say(f"{names[state]}: {target.path}")
