"""The end of a study: its results as a board, with a table, a page, figures and a CSV file. `study.json`, beside the
cells, has the facts that only the study knows:

    study     the name of the study
    cells     path of each results file on the test set -> "expected" (the paper's numbers, by column)
    dev       path of each cell on the dev set -> its metrics, as lm-eval writes them
    failures  path of a cell or checkpoint that could not be made -> the reason
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rich.console import Console
from rich.text import Text

from lm_eval_icl import results as tables
from lm_eval_icl.leaderboard import card, figures, study_table
from lm_eval_icl.leaderboard.page import page
from lm_eval_icl.results import statistics
from lm_eval_icl.results.board import AVERAGE, Board, Entry
from lm_eval_icl.results.build import build
from lm_eval_icl.results.read import read
from lm_eval_icl.results.records import LeftOutFile, Run
from lm_eval_icl.results.statistics import Estimate
from lm_eval_icl.studies import costs
from lm_eval_icl.studies.cells import Cell, Grid, StudyTask
from lm_eval_icl.studies.conduct import DONE, KNOWN, READY, WAITING, states
from lm_eval_icl.studies.folder import StudyFolder
from lm_eval_icl.studies.grid import Study

Results = list[tuple[Cell, Run]]
_CHOICES = 6  # how many values that were chosen on the dev set are named
DEV = "{}, dev set"  # the name of a task's column on the dev set
_TASKS = (
    8  # with more tasks, the columns are the names in `tasks` of the study's file, such as groups
)


def conclude(
    grid: Grid, folder: StudyFolder, name: str, failed: Mapping[str, str], console: Console
) -> Mapping[str, str]:
    """Write `study.json`, and write and print the results. Return path -> reason of all targets that were not made."""
    study = grid.study
    columns = columns_of(grid.study, grid.tasks)
    known = states(grid, folder, failed)
    failures = {target.path: state for target, state in known if state not in KNOWN}
    done = [target for target, state in known if state == DONE and isinstance(target, Cell)]
    tested = [cell for cell in done if cell.split == "test"]
    on_dev = [cell for cell in done if cell.split == "dev"]
    record = {
        "study": name,
        "cells": {
            f"{cell.path}/{folder.results_path(cell).name}": {"expected": expected_of(study, cell)}
            for cell in tested
        },
        "dev": {cell.path: folder.results(cell)["results"][cell.task] for cell in on_dev},
        "failures": failures,
    }
    folder.write_file("study.json", json.dumps(record, indent=2, default=str) + "\n")
    written = "study.json, no results on the test set"
    found = results_of(folder, tested)
    if study.dev and not study.dev.choose:
        found += [renamed(cell, run, grid.limit) for cell, run in results_of(folder, on_dev)]
    if found:
        paths = [run.path for _, run in found]
        table = tables.runs(paths, dev=True).merge(tables.scores(paths, dev=True))
        folder.write_file("study.csv", table.to_csv(index=False))
        board = board_of(found, columns)
        missing = [
            LeftOutFile(folder.path / path, f"failed: {why}") for path, why in failures.items()
        ]
        board = replace(board, left_out=tuple(missing))
        on_page = figures.svgs(board)
        drawn = figures.draw(board, folder.path / "figures", study.figures) if on_page else []
        folder.write_file("board.html", page(board, on_page))
        written = f"board.html, study.csv, study.json, {len(drawn)} files of figures, cells"
        flips = {
            entry.name: rate
            for entry in board.entries
            if (rate := flips_of(entry, columns)) is not None
        }
        title = " ".join(filter(None, [study.paper, study.title]))
        if board.card is None or not study.one_at_a_time:
            console.print(
                study_table.table(board, columns.names, in_order(board, found), flips, title)
            )
        if board.card is not None:
            console.print(card.table(board.card, title))
    trained = costs.trainings(grid, folder)
    if not trained.empty:
        folder.write_file("trainings.csv", trained.to_csv(index=False))
        console.print(costs.table(trained))
    for sentence in study.deviates:
        console.print(f"Deviates: {sentence}", markup=False, highlight=False)
    console.print(f"{folder.path}: {written}", markup=False, highlight=False)
    return failures


Trained = tuple[str, str]  # the name of a training ("" without training), and a task


@dataclass(frozen=True)
class Columns:
    """The columns of a study."""

    names: tuple[str, ...]  # the names of all columns; each average follows its columns
    tasks: Mapping[
        str, frozenset[Trained]
    ]  # column that is no average -> the trainings and tasks that count in it
    alike: frozenset[
        str
    ]  # the columns whose tasks have equal weights, however many documents they have
    averages: Mapping[
        str, tuple[str, ...]
    ]  # name of an average -> its columns, which have equal weights

    def groups(
        self, documents: Mapping[Trained, int], names: Mapping[Trained, str]
    ) -> dict[str, dict[str, float]]:
        """Column -> name of a task on the board -> its weight, for all columns whose results are complete. `documents`
        are the numbers of documents that were scored."""
        weights = {}
        for column, tasks in self.tasks.items():
            if tasks and tasks <= documents.keys():
                counts = {
                    task: 1 if column in self.alike else documents[task] for task in sorted(tasks)
                }
                weights[column] = {
                    names[task]: number / sum(counts.values()) for task, number in counts.items()
                }
        for average, columns in self.averages.items():
            if weights.keys() >= {*columns}:
                parts = [weights[column] for column in columns]
                in_parts = dict.fromkeys(itertools.chain(*parts))
                weights[average] = {
                    task: sum(w.get(task, 0) for w in parts) / len(columns) for task in in_parts
                }
        # A task is a column by itself, and no group.
        return {column: by_task for column, by_task in weights.items() if list(by_task) != [column]}


def columns_of(study: Study, leaves: Mapping[str, StudyTask]) -> Columns:
    """The columns that the study's file names; or else the tasks, or the names in `tasks` if there are many tasks."""
    parts: Mapping[str, Sequence[str]] = study.columns
    if not parts:
        listed = [task if isinstance(task, str) else str(task["task"]) for task in study.tasks]
        parts = {"": list(leaves) if len(leaves) <= _TASKS else listed}
    tasks: dict[str, set[Trained]] = {
        column: set() for columns in parts.values() for column in columns
    }
    for leaf, training in itertools.product(leaves.values(), study.stages):
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
    if study.dev and not study.dev.choose:
        names += map(DEV.format, leaves)
    alike = frozenset(group for leaf in leaves.values() for group in leaf.alike)
    return Columns(
        tuple(names),
        {column: frozenset(trained) for column, trained in tasks.items()},
        alike,
        averages,
    )


def board_of(results: Results, columns: Columns) -> Board:
    """The board of a study's cells, with the values that were chosen on the dev set. If every column
    belongs to one training only, the models of all trainings share a row, and a task that has
    results of two trainings has a column for each."""
    documents = {_trained(cell): run.all_results[0].documents for cell, run in reversed(results)}
    trainings = list(dict.fromkeys(_trained(cell)[0] for cell, _ in results))
    are_of_one = all(
        len({training for training, _ in tasks}) < 2 for tasks in columns.tasks.values()
    )
    together = len(trainings) > 1 and are_of_one
    often = Counter(task for _, task in documents)
    names = {
        (training, task): f"{task} [{training}]" if together and often[task] > 1 else task
        for training, task in documents
    }
    groups = columns.groups(documents, names)
    tasks = [column for column in columns.names if column in groups or column in names.values()]
    by = ("training",) if together else ()
    board = build([run for _, run in results], tasks=tasks, groups=groups, columns_by=by)
    cells = {run.path: cell for cell, run in results}
    entries = []
    for entry in board.entries:
        counts = Counter[str]()  # of the values that were chosen on the dev set
        for cell in (cells[run.path] for run in entry.runs):
            counts.update(f"{name}={cell.settings[name]}" for name in cell.chosen)
        if counts:
            common = [f"{value} ({number}x)" for value, number in counts.most_common(_CHOICES)]
            entry = replace(entry, arguments=f"{entry.arguments}: {', '.join(common)}")
        entries.append(entry)
    return replace(board, entries=tuple(entries))


def _trained(cell: Cell) -> Trained:
    return cell.model.training.name if cell.model.training else "", cell.task


def flips_of(entry: Entry, columns: Columns) -> Estimate | None:
    """An entry's order sensitivity on the average, or the mean of several averages; None if one of them is missing."""
    cells = [entry.cells.get(column) for column in columns.averages or columns.tasks]
    flips = [
        cell.sensitivity for cell in cells if cell is not None and cell.sensitivity is not None
    ]
    if not flips or len(flips) < len(cells):
        return None
    if len(flips) == 1:
        return flips[0]
    return statistics.estimate_group(flips, [1] * len(flips), bounds=(0.0, 1.0))


def in_order(board: Board, results: Results) -> list[Entry]:
    """The board's entries in the order of the study's models and methods."""
    models = list(dict.fromkeys(cell.model.name for cell, _ in results))
    places = {
        run.path: (models.index(cell.model.name), cell.variant.entry, i)
        for i, (cell, run) in enumerate(results)
    }
    return sorted(board.entries, key=lambda entry: min(places[run.path] for run in entry.runs))


def results_of(folder: StudyFolder, cells: Sequence[Cell]) -> Results:
    """The cells that have results, with the results."""
    runs = {
        run.path: run
        for run in read([folder.results_path(cell) for cell in cells], quiet=True, dev=True)[0]
    }
    return [(cell, runs[path]) for cell in cells if (path := folder.results_path(cell)) in runs]


def renamed(cell: Cell, run: Run, limit: float | None) -> tuple[Cell, Run]:
    """A cell on the dev set, with another name of its task, so that it has a column of its own. `limit` is lm-eval's
    `--limit`, which the dev set has in its size."""
    name = DEV.format(cell.task)
    tasks = {name: replace(run.tasks[cell.task], task=name)}
    decided = tuple(replace(result, task=name) for result in run.decided)
    return replace(cell, task=name), replace(run, tasks=tasks, decided=decided, limit=limit)


def expected_of(study: Study, cell: Cell) -> dict[str, float]:
    """Column -> the paper's number, from the first entry of `expected` that agrees with the cell and has it."""
    facts = {
        "model": cell.model.name,
        "training": _trained(cell)[0],
        "method": cell.variant.method,
        "num_fewshot": cell.num_fewshot,
        "demonstrations": cell.drawn,
        "chosen": bool(cell.chosen),
    }
    values: dict[str, float] = {}
    for entry in study.expected:
        agrees = all(entry.get(name) in (None, value) for name, value in facts.items())
        if agrees and (entry.get("arguments") or {}).items() <= cell.variant.arguments.items():
            values = entry.get("values", {}) | values
    return values


def print_states(grid: Grid, folder: StudyFolder, console: Console, verbose: bool) -> None:
    """Print how many cells are in each state, and why some could not be made; `verbose` lists all that are not done."""

    def say(text: str) -> None:
        # Reasons contain texts of other people's tasks, from which characters that a terminal would obey are removed.
        console.print(
            Text("".join(c if c.isprintable() else "\ufffd" for c in text)), soft_wrap=True
        )

    names = {DONE: "done", READY: "missing", WAITING: "waiting for others"}
    known = states(grid, folder, folder.failures())
    cells = Counter(
        (target.split, names.get(s, "failed")) for target, s in known if isinstance(target, Cell)
    )
    for (split, state), number in cells.items():
        say(f"{number:,} cells on the {split} set: {state}")
    if trained := sum(not isinstance(target, Cell) for target, _ in known):
        say(f"{trained:,} checkpoints to be trained first")
    for target, state in known:
        if state not in names:
            say(f"failed: {target.path}: {state}")
        elif verbose and state != DONE:
            say(f"{names[state]}: {target.path}")
