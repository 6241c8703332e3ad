"""The end of a study: its results as a board, with a table, a page, figures and a CSV file.
`study.json`, beside the cells, has the facts that only the study knows:

    study     the name of the study
    cells     path of each results file in the tables -> "expected": the paper's numbers by column,
              and "metric": that of the tables. A chosen cell that is not here was chosen before
              the study's file was changed, and readers leave it out.
    dev       path of each cell on the dev set -> its metrics, as lm-eval writes them
    failures  path of a cell or checkpoint that could not be made -> the reason
"""

from __future__ import annotations

import itertools
import json
from collections import Counter, defaultdict
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
from lm_eval_icl.studies.conduct import DONE, KNOWN, READY, WAITING, states
from lm_eval_icl.studies.folder import StudyFolder
from lm_eval_icl.studies.grid import Study
from lm_eval_icl.studies.targets import Cell, Grid, StudyTask

Results = list[tuple[Cell, Run]]
_CHOICES = 6  # how many values that were chosen on the dev set are named
DEV = "{}, dev set"  # the name of a task's column on the dev set
# With more tasks, the columns are the names in `tasks` of the study's file, such as groups.
_TASKS = 8


def conclude(
    grid: Grid, folder: StudyFolder, name: str, failed: Mapping[str, str], console: Console
) -> Mapping[str, str]:
    """Write `study.json`, and write and print the results.

    Returns:
        Path -> reason of all targets that were not made.
    """
    study = grid.study
    known = states(grid, folder, failed)
    failures = {target.path: state for target, state in known if state not in KNOWN}
    tested = list[Cell]()
    on_dev = list[Cell]()
    for target, state in known:
        if isinstance(target, Cell) and state == DONE:
            cells = tested if target.split == "test" else on_dev
            cells.append(target)
    measured = tested + on_dev if study.dev and not study.dev.choose else tested
    _write_facts(grid, folder, name, measured, on_dev, failures)
    results, left_out = results_of(folder, measured)
    for file in left_out:
        console.print(f"{file.path}: {file.why}", markup=False, highlight=False, soft_wrap=True)
    left_out += [
        LeftOutFile(folder.path / path, f"failed: {why}") for path, why in failures.items()
    ]
    written = "study.json, no results on the test set"
    if results:
        table = tables.runs([run for _, run in results], dev=True)
        table = table.merge(tables.scores([run for _, run in results], dev=True))
        folder.write_file("study.csv", table.to_csv(index=False))
        results = [
            renamed(cell, run, grid.limit) if cell.split == "dev" else (cell, run)
            for cell, run in results
        ]
        number = _write_board(grid, folder, results, left_out, console)
        written = f"board.html, study.csv, study.json, {number} files of figures, cells"
    trained = costs.trainings(grid, folder)
    if not trained.empty:
        folder.write_file("trainings.csv", trained.to_csv(index=False))
        console.print(costs.table(trained))
    for sentence in study.deviates:
        console.print(f"Deviates: {sentence}", markup=False, highlight=False)
    console.print(f"{folder.path}: {written}", markup=False, highlight=False)
    return failures


def _write_facts(
    grid: Grid,
    folder: StudyFolder,
    name: str,
    measured: Sequence[Cell],
    on_dev: Sequence[Cell],
    failures: Mapping[str, str],
) -> None:
    """Write `study.json`."""
    metric = grid.study.metric
    facts = {}
    for cell in measured:
        path = f"{cell.path}/{folder.results_path(cell).name}"
        facts[path] = {"expected": expected_of(grid.study, cell), "metric": metric}
    record = {
        "study": name,
        "cells": facts,
        "dev": {cell.path: folder.results(cell)["results"][cell.task] for cell in on_dev},
        "failures": failures,
    }
    folder.write_file("study.json", json.dumps(record, indent=2, default=str) + "\n")


def _write_board(
    grid: Grid,
    folder: StudyFolder,
    results: Results,
    left_out: Sequence[LeftOutFile],
    console: Console,
) -> int:
    """Write the page and the figures, and print the tables. Returns the number of figures'
    files."""
    study = grid.study
    columns = columns_of(study, grid.tasks)
    board = replace(board_of(results, columns), left_out=tuple(left_out))
    on_page = figures.svgs(board)
    drawn = figures.draw(board, folder.path / "figures", study.figures) if on_page else []
    folder.write_file("board.html", page(board, on_page))
    title = " ".join(filter(None, [study.paper, study.title]))
    if board.card is None or not study.one_at_a_time:
        flips = {}
        for entry in board.entries:
            rate = flips_of(entry, columns)
            if rate is not None:
                flips[entry.name] = rate
        entries = in_order(board, results)
        console.print(study_table.table(board, columns.names, entries, flips, title))
    if board.card is not None:
        console.print(card.table(board.card, title))
    return len(drawn)


Trained = tuple[str, str]  # the name of a training ("" without training), and a task


@dataclass(frozen=True)
class Columns:
    """The columns of a study.

    Attributes:
        names: the names of all columns; each average follows its columns.
        tasks: column that is no average -> the trainings and tasks that count in it.
        alike: the columns whose tasks have equal weights, however many documents they have.
        averages: name of an average -> its columns, which have equal weights.
    """

    names: tuple[str, ...]
    tasks: Mapping[str, frozenset[Trained]]
    alike: frozenset[str]
    averages: Mapping[str, tuple[str, ...]]

    def groups(
        self, documents: Mapping[Trained, int], names: Mapping[Trained, str]
    ) -> dict[str, dict[str, float]]:
        """Column -> name of a task on the board -> its weight, for all columns whose results are
        complete.

        Args:
            documents: the numbers of documents that were scored.
            names: the names of the tasks on the board.
        """
        weights: dict[str, dict[str, float]] = {}
        for column, tasks in self.tasks.items():
            if tasks and tasks <= documents.keys():
                is_alike = column in self.alike
                counts = {names[task]: 1 if is_alike else documents[task] for task in sorted(tasks)}
                total = sum(counts.values())
                weights[column] = {name: count / total for name, count in counts.items()}
        for average, columns in self.averages.items():
            if not weights.keys() >= {*columns}:
                continue
            mean: dict[str, float] = defaultdict(float)
            for column in columns:
                for task, weight in weights[column].items():
                    mean[task] += weight
            weights[average] = {task: weight / len(columns) for task, weight in mean.items()}
        # A task is a column by itself, and no group.
        return {column: by_task for column, by_task in weights.items() if list(by_task) != [column]}


def columns_of(study: Study, tasks: Mapping[str, StudyTask]) -> Columns:
    """The columns that the study's file names; or else the tasks, or the names in `tasks` if there
    are many tasks."""
    parts: Mapping[str, Sequence[str]] = study.columns
    if not parts:
        names = list(tasks)
        if len(tasks) > _TASKS:
            names = [task if isinstance(task, str) else str(task["task"]) for task in study.tasks]
        parts = {"": names}
    counting: dict[str, set[Trained]] = {}  # column -> what counts in it
    names = []
    averages = {}
    for part, columns in parts.items():
        for column in columns:
            counting[column] = set()
        names += columns
        if len(columns) > 1:
            names.append(f"{AVERAGE}, {part}" if part else AVERAGE)
            averages[names[-1]] = tuple(columns)
    if study.dev and not study.dev.choose:
        names += [DEV.format(task) for task in tasks]
    for task, training in itertools.product(tasks.values(), study.stages):
        listed = set(task.inside)  # names in the study's `tasks`
        if training and training.targets:
            listed &= {*training.targets}
        if not listed:
            continue
        trained = (training.name if training else "", task.name)
        for column in task.columns(listed):
            if column in counting:
                counting[column].add(trained)
    alike = frozenset[str]().union(*(task.alike for task in tasks.values()))
    frozen = {column: frozenset(trained) for column, trained in counting.items()}
    return Columns(tuple(names), frozen, alike, averages)


def board_of(results: Results, columns: Columns) -> Board:
    """The board of a study's cells, with the values that were chosen on the dev set. If every
    column belongs to one training only, the models of all trainings share a row, and a task that
    has results of two trainings has a column for each."""
    documents = {_trained(cell): run.all_results[0].documents for cell, run in reversed(results)}
    trainings = {training for training, _ in documents}
    together = len(trainings) > 1
    for trained in columns.tasks.values():
        if len({training for training, _ in trained}) > 1:
            together = False
    often = Counter(task for _, task in documents)
    names = {}
    for training, task in documents:
        is_twice = together and often[task] > 1
        names[training, task] = f"{task} [{training}]" if is_twice else task
    groups = columns.groups(documents, names)
    tasks = [column for column in columns.names if column in groups or column in names.values()]
    by = ("training",) if together else ()
    board = build([run for _, run in results], tasks=tasks, groups=groups, columns_by=by)
    cells = {run.path: cell for cell, run in results}
    entries = []
    for entry in board.entries:
        counts = Counter[str]()  # of the values that were chosen on the dev set
        for run in entry.runs:
            cell = cells[run.path]
            counts.update(f"{name}={cell.settings[name]}" for name in cell.chosen)
        if counts:
            common = [f"{value} ({number}x)" for value, number in counts.most_common(_CHOICES)]
            entry = replace(entry, arguments=f"{entry.arguments}: {', '.join(common)}")
        entries.append(entry)
    return replace(board, entries=tuple(entries))


def _trained(cell: Cell) -> Trained:
    return cell.model.training.name if cell.model.training else "", cell.task


def flips_of(entry: Entry, columns: Columns) -> Estimate | None:
    """An entry's order sensitivity on the average, or the mean of several averages; None if one of
    them is missing."""
    flips = []
    for column in columns.averages or columns.tasks:
        cell = entry.cells.get(column)
        if cell is None or cell.sensitivity is None:
            return None
        flips.append(cell.sensitivity)
    if len(flips) < 2:
        return flips[0] if flips else None
    return statistics.estimate_group(flips, [1] * len(flips), bounds=(0.0, 1.0))


def in_order(board: Board, results: Results) -> list[Entry]:
    """The board's entries in the order of the study's models and methods."""
    models = list(dict.fromkeys(cell.model.name for cell, _ in results))
    places = {
        run.path: (models.index(cell.model.name), cell.variant.entry, i)
        for i, (cell, run) in enumerate(results)
    }
    return sorted(board.entries, key=lambda entry: min(places[run.path] for run in entry.runs))


def results_of(folder: StudyFolder, cells: Sequence[Cell]) -> tuple[Results, list[LeftOutFile]]:
    """The cells that have results, with the results; and the files that cannot be used."""
    cell_of = {folder.results_path(cell): cell for cell in cells}
    runs, left_out = read(list(cell_of), quiet=True, dev=True)
    found = {run.path: run for run in runs}
    return [(cell, found[path]) for path, cell in cell_of.items() if path in found], left_out


def renamed(cell: Cell, run: Run, limit: float | None) -> tuple[Cell, Run]:
    """A cell on the dev set, with another name of its task, so that it has a column of its own.
    `limit` is lm-eval's `--limit`, which the dev set has in its size."""
    name = DEV.format(cell.task)
    tasks = {name: replace(run.tasks[cell.task], task=name)}
    decided = tuple(replace(result, task=name) for result in run.decided)
    return replace(cell, task=name), replace(run, tasks=tasks, decided=decided, limit=limit)


def expected_of(study: Study, cell: Cell) -> dict[str, float]:
    """Column -> the paper's number, from the first entry of `expected` that agrees with the cell
    and has it."""
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
    """Print how many cells are in each state, and why some could not be made; `verbose` lists all
    that are not done."""

    def say(text: str) -> None:
        # Reasons contain texts of other people's tasks, from which characters that a terminal would
        # obey are removed.
        console.print(
            Text("".join(c if c.isprintable() else "\ufffd" for c in text)), soft_wrap=True
        )

    names = {DONE: "done", READY: "missing", WAITING: "waiting for others"}
    known = states(grid, folder, folder.failures())
    cells = Counter[tuple[str, str]]()
    checkpoints = 0
    for target, state in known:
        if isinstance(target, Cell):
            cells[target.split, names.get(state, "failed")] += 1
        else:
            checkpoints += 1
    for (split, name), number in cells.items():
        say(f"{number:,} cells on the {split} set: {name}")
    if checkpoints:
        say(f"{checkpoints:,} checkpoints to be trained first")
    for target, state in known:
        if state not in names:
            say(f"failed: {target.path}: {state}")
        elif verbose and state != DONE:
            say(f"{names[state]}: {target.path}")
