"""How a study ends: its results as a board, with the table, page, figures and CSV file of any results.

What only the study knows stands in `study.json`, beside the cells:

    study     its name
    cells     by the path of each results file: "expected" (the paper's numbers for the columns that the cell counts in,
              by column), "curve" (the dev set's scores for this cell and those that it was chosen among: a list of
              {"arguments", "seed", "score"}, the mean over orders), "shared" (the costs of the cells that were scored
              together)
    failures  why cells, checkpoints and choices of demonstrations could not be made, by their paths
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import pandas as pd
from rich.console import Console

from lm_eval_icl.leaderboard import figures, study_table
from lm_eval_icl.leaderboard.page import page
from lm_eval_icl.results import statistics
from lm_eval_icl.results.board import AVERAGE, Board, Entry
from lm_eval_icl.results.build import build
from lm_eval_icl.results.read import read
from lm_eval_icl.results.records import Run
from lm_eval_icl.results.statistics import Estimate
from lm_eval_icl.studies.cells import Cell, Grid
from lm_eval_icl.studies.choose import documents, score
from lm_eval_icl.studies.conduct import DONE, READY, WAITING, states
from lm_eval_icl.studies.folder import StudyFolder
from lm_eval_icl.studies.grid import Study, trained_under
from lm_eval_icl.studies.opening import Opened
from lm_eval_icl.studies.parts import Training
from lm_eval_icl.studies.tasks import Leaf

Results = Sequence[tuple[Cell, Run]]
_TASKS = 8  # with more tasks, the columns are what the study's file calls its tasks
_OWN_WAY = "as the task says"  # in place of the name of a way to draw demonstrations
_CELL = (
    *("path", "model", "method", "arguments", "task", "num_fewshot", "demonstrations", "seed", "order", "split"),
    *("chosen", "documents", "score", "seconds", "training", "commit", "decide"),
)


def conclude(opened: Opened, folder: StudyFolder, name: str, failed: Mapping[str, str], console: Console) -> None:
    """Write `study.json`, and write and print what came out.

    Args:
        failed: why targets could not be made, by path.

    Raises:
        InputError: a file cannot be written.
    """
    grid, study = opened.grid, opened.grid.study
    columns = columns_of(study, opened.leaves)
    done = [target for target, state in states(grid, folder, {}) if state == DONE and isinstance(target, Cell)]
    record = {"study": name, "cells": of_cells(grid, folder, done, columns), "failures": failures(grid, folder, failed)}
    folder.write_file("study.json", json.dumps(record, indent=2, default=str) + "\n")
    results = results_of(study, folder, done)
    table = cells_table(grid, folder, results)
    folder.write_file("study.csv", table.to_csv(index=False))
    written = "study.json, study.csv; there are no results on the test set"
    tested = [(cell, run) for cell, run in results if cell.split == "test"]
    if tested:
        board = board_of(tested, columns)
        drawn = figures.draw(board, folder.path / "figures", study.figures)
        folder.write_file("board.html", page(board, figures.svgs(board)))
        written = f"board.html, study.csv, study.json, {len(drawn)} files of figures, cells"
        flips = {entry.name: rate for entry in board.entries if (rate := flips_of(entry, columns)) is not None}
        title = " ".join(filter(None, [study.paper, study.title]))
        entries = in_order(board, tested)
        console.print(study_table.table(board, columns.names, entries, flips, title, _about(study, table)))
        for line in measures(study, folder, tested, entries, flips):
            console.print(line, markup=False, highlight=False)
    for sentence in study.deviates:
        console.print(f"Deviates: {sentence}", markup=False, highlight=False)
    console.print(f"{folder.path}: {written}", markup=False, highlight=False)


def failures(grid: Grid, folder: StudyFolder, failed: Mapping[str, str]) -> dict[str, str]:
    """Why targets could not be made, and all that need them, by path."""
    known = states(grid, folder, failed)
    return {target.path: state for target, state in known if state not in (DONE, READY, WAITING)}


# Columns.

Trained = tuple[str, str]  # a training ("" if the models are evaluated as they are), and a task


@dataclass(frozen=True)
class Columns:
    """The columns of a study.

    Attributes:
        names: all of them, each average behind what it is of.
        tasks: by column, averages aside, what counts in it: tasks, each after a training.
        alike: the columns whose tasks count alike, however many documents they have.
        averages: by the name of each average, the columns that count alike in it.
    """

    names: tuple[str, ...]
    tasks: Mapping[str, frozenset[Trained]]
    alike: frozenset[str]
    averages: Mapping[str, tuple[str, ...]]

    def having(self, task: Trained) -> set[str]:
        """The columns that a task counts in, averages among them."""
        own = {column for column, tasks in self.tasks.items() if task in tasks}
        return own | {average for average, columns in self.averages.items() if own.intersection(columns)}

    def groups(self, documents: Mapping[Trained, int], names: Mapping[Trained, str]) -> dict[str, dict[str, float]]:
        """The weights of tasks in each column of which all results are there, averages among them.

        Args:
            documents: how many were scored of each task.
            names: of the tasks on the board.
        """
        weights = {}
        for column, tasks in self.tasks.items():
            if tasks and tasks <= documents.keys():
                counts = {task: 1 if column in self.alike else documents[task] for task in sorted(tasks)}
                weights[column] = {names[task]: number / sum(counts.values()) for task, number in counts.items()}
        for average, columns in self.averages.items():
            if weights.keys() >= {*columns}:
                of_average: dict[str, float] = defaultdict(float)
                for column in columns:
                    for task, weight in weights[column].items():
                        of_average[task] += weight / len(columns)
                weights[average] = dict(of_average)
        # A task is a column by itself.
        return {column: of_tasks for column, of_tasks in weights.items() if list(of_tasks) != [column]}


def columns_of(study: Study, leaves: Mapping[str, Leaf]) -> Columns:
    """The columns that the study's file names. If it names none, its tasks: single ones, or if these are more than
    eight, as the file lists them."""
    parts: Mapping[str, Sequence[str]] = study.columns
    if not parts:
        listed = [task if isinstance(task, str) else str(task["task"]) for task in study.tasks]
        parts = {"": list(leaves) if len(leaves) <= _TASKS else listed}
    trainings: Sequence[Training | None] = study.trainings or [None]
    tasks: dict[str, set[Trained]] = {column: set() for columns in parts.values() for column in columns}
    for leaf in leaves.values():
        for training in trainings:
            if training is None or not leaf.inside.keys().isdisjoint(training.targets):
                for column in {leaf.name, *leaf.groups(training.targets if training else None)} & tasks.keys():
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
    """The board of a study's cells on the test set.

    If every column belongs to one training alone, the models of all trainings are one row. A task that models of two
    trainings are evaluated on then has a name for each.
    """
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
    places = {run.path: place for place, (_, run) in enumerate(results)}
    return sorted(board.entries, key=lambda entry: min(places[run.path] for run in entry.runs))


# Cells.


def of_cells(grid: Grid, folder: StudyFolder, cells: Sequence[Cell], columns: Columns) -> dict[str, dict[str, Any]]:
    """What `study.json` says of cells that are done."""
    curves: dict[str, Any] = {}
    for candidates in grid.alternatives if grid.study.dev else ():
        if all(folder.has(cell) for candidate in candidates for cell in candidate.dev):
            choice = folder.choice(grid, candidates)
            curves |= {cell.path: choice.curve for cell in choice.cells}
    known = {}
    for cell in cells:
        tested = cell.split == "test"
        expected = expected_of(grid.study, cell, columns.having(_trained(cell))) if tested else {}
        says = {"expected": expected, "curve": curves.get(cell.path), "shared": folder.facts(cell)["shared"]}
        path = folder.results_path(cell).relative_to(folder.path).as_posix()
        known[path] = {key: value for key, value in says.items() if value}
    return known


def results_of(study: Study, folder: StudyFolder, cells: Sequence[Cell]) -> Results:
    """Cells that are done with their results, in the order of the study's models and methods."""
    models, variants = list(study.models), list(study.variants)
    ordered = sorted(cells, key=lambda cell: (models.index(cell.model.arguments), variants.index(cell.variant)))
    runs = {run.path: run for run in read([folder.results_path(cell) for cell in ordered], quiet=True, dev=True)[0]}
    return [(cell, runs[path]) for cell in ordered if (path := folder.results_path(cell)) in runs]


def matching(study: Study, cell: Cell) -> list[Mapping[str, Any]]:
    """The entries of `expected` that agree with a cell in all that they say."""
    own = {
        "model": cell.model.name,
        "training": _trained(cell)[0],
        "method": cell.variant.method,
        "num_fewshot": cell.num_fewshot,
        "demonstrations": cell.drawn or _OWN_WAY,
        "chosen": bool(cell.chosen),
    }
    return [
        entry
        for entry in study.expected
        if all(entry.get(name) in (None, value) for name, value in own.items())
        and (entry.get("arguments") or {}).items() <= cell.variant.arguments.items()
    ]


def expected_of(study: Study, cell: Cell, columns: set[str]) -> dict[str, float]:
    """The paper's number for each of these columns: that of the first entry of `expected` which matches the cell."""
    values: dict[str, float] = {}
    for entry in matching(study, cell):
        given = entry.get("values", {})
        values = {name: float(value) for name, value in given.items() if name in columns} | values
    return values


def measures(
    study: Study, folder: StudyFolder, results: Results, entries: Sequence[Entry], flips: Mapping[str, Estimate]
) -> list[str]:
    """A line for each of the paper's numbers that are no scores (`parts.Expected`), beside ours."""
    lines = []
    entry_of = {run.path: entry for entry in entries for run in entry.runs}
    for expected in study.expected:
        alike = [(cell, run) for cell, run in results if run.path in entry_of and expected in matching(study, cell)]
        for name, value in expected.get("measures", {}).items() if alike else ():
            ours: list[float] = []
            for cell, run in alike:
                flip, shared = flips.get(entry_of[run.path].name), run.study.shared
                if name == "order flips" and flip is not None:
                    ours.append(flip.mean)
                elif name == "milliseconds" and "seconds" in shared:
                    ours.append(1000 * shared["seconds"] / shared["cells"] / run.all_results[0].documents)
                elif name == "kept":
                    kept = folder.training_record(cell.model).get("kept", {})
                    ours += [kept[cell.variant.method]] if cell.variant.method in kept else []
            here = f"{fmean(ours):.3g}" if ours else "not measured"
            lines.append(f"{entry_of[alike[0][1].path].label}: {name} {here} (the paper: {value:g})")
    return lines


def cells_table(grid: Grid, folder: StudyFolder, results: Results) -> pd.DataFrame:
    """One row a finished cell and decision rule, on the test set and on the dev set.

    Returns:
        The columns of `study.csv`; the index is the path of the results file. `chosen` is true if the arguments and the
        seed were chosen on the dev set, or if nothing was to be chosen. `seconds` are those of scoring, missing where
        they were not measured (`hf`, texts); cells that share passes have equal parts of them.
    """
    chosen = set()  # the paths of cells with the rules that were chosen, or that are not chosen among
    rules = [str(rule or "none") for rule in grid.study.decide]
    for candidates in grid.alternatives:
        best, tested, of_rule = candidates[0], candidates[0].test, rules
        if len(candidates) > 1:
            if not all(folder.has(cell) for candidate in candidates for cell in candidate.dev):
                continue
            tested = folder.choice(grid, candidates).cells
            first = replace(tested[0], chosen=(), rule="").path
            best = next(candidate for candidate in candidates if candidate.test[0].path == first)
            of_rule = [tested[0].rule or "none"] if "decide" in tested[0].chosen else rules
        chosen |= {(cell.path, rule) for cell in (*best.dev, *tested) for rule in of_rule}
    rows = []
    for cell, run in results:
        task, dev = grid.tasks[cell.task].reported, grid.study.dev
        metric = dev.metric if dev and cell.split == "dev" else grid.study.metric
        own = {"path": run.path, "model": cell.model.name, "method": cell.variant.method, "task": cell.task}
        own |= {"num_fewshot": cell.num_fewshot, "demonstrations": cell.drawn or _OWN_WAY, "seed": cell.seed}
        own |= {"order": cell.order, "split": cell.split, "training": _trained(cell)[0]}
        own |= {"commit": run.icl.get("commit"), "arguments": json.dumps(dict(cell.variant.arguments), default=str)}
        if "seconds" in run.study.shared:
            own["seconds"] = run.study.shared["seconds"] / run.study.shared["cells"]
        for rule in rules:
            value = score(run.results, task, metric, "" if rule == "none" else rule)
            line = {"decide": rule, "score": value, "chosen": (cell.path, rule) in chosen}
            rows.append({**own, **line, "documents": documents(run.results, task)})
    return pd.DataFrame(rows, columns=_CELL).set_index("path")


def _about(study: Study, cells: pd.DataFrame) -> str:
    """What the table says about training and about the code; "" if there is nothing to say."""
    sentences = []
    if study.trainings:
        under = {variant.method: trained_under(variant).method for variant in study.variants}
        others = sorted(name for name, trained in under.items() if name != trained)
        but = f" ({', '.join(others)}: under {under[others[0]]})" if others else ""
        sentences.append(f"Each line's model was trained from the one above it under the line's method{but}.")
    commits = cells.loc[~cells.index.duplicated()].commit.fillna("unknown").value_counts()
    if len(commits) > 1:
        counts = ", ".join(f"{commit[:7]} {number}" for commit, number in commits.items())
        sentences.append(f"The cells are of several commits of lm-eval-icl: {counts}.")
    return " ".join(sentences)
