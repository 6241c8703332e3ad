"""How a study ends: its results as a board, with the table, page, figures and CSV file of any results.

What only the study knows is recorded in the results of its cells first, under `config.icl.study`:

    chosen    the arguments (or "seeds") whose values were chosen on the dev set
    curve     what was measured on the dev set for this cell and for those that it was chosen among: a list of
              {"arguments", "seed", "score"}, the score being the mean over orders
    expected  the paper's numbers for the columns that the cell counts in, by column
    metric    what stands for the task, if that is not accuracy
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console

from lm_eval_icl.leaderboard import figures, study_table
from lm_eval_icl.leaderboard.page import page
from lm_eval_icl.results import statistics
from lm_eval_icl.results.board import AVERAGE, Board, Entry
from lm_eval_icl.results.build import build
from lm_eval_icl.results.form import RuleFacts
from lm_eval_icl.results.read import read
from lm_eval_icl.results.records import Run
from lm_eval_icl.results.statistics import Estimate
from lm_eval_icl.studies.cells import Cell
from lm_eval_icl.studies.grid import Study, Training, trained_under
from lm_eval_icl.studies.progress import StudyProgress
from lm_eval_icl.studies.tasks import Leaf

_TASKS = 8  # with more tasks, the columns are what the study's file calls its tasks
_OWN_WAY = "as the task says"  # in place of the name of a way to draw demonstrations
_RECORDED = ("chosen", "curve", "expected", "metric")
_CELL = (
    *("path", "model", "method", "arguments", "task", "num_fewshot", "demonstrations", "seed", "order", "split"),
    *("chosen", "documents", "score", "seconds", "training", "code", "decide"),
)


def conclude(progress: StudyProgress, console: Console) -> None:
    """Record in the results what only the study knows, then write and print what came out.

    Raises:
        InputError: a file cannot be written.
    """
    study, folder = progress.study, progress.folder
    columns = columns_of(study, progress.leaves)
    results = results_of(progress, columns)
    table = cells_table(progress, results)
    folder.write("study.csv", table.to_csv(index=False))
    written = "study.json, study.csv; there are no results on the test set"
    tested = [(cell, _under_chosen_rule(progress, cell, run)) for cell, run in results if cell.split == "test"]
    if tested:
        board = board_of(tested, columns)
        drawn = figures.draw(board, folder.path / "figures", study.figures)
        folder.write("board.html", page(board, figures.svgs(board), [folder.path]))
        written = f"board.html, study.csv, study.json, {len(drawn)} files of figures, cells"
        flips = {entry.name: rate for entry in board.entries if (rate := flips_of(entry, columns)) is not None}
        codes = {}  # by entry, how many cells are of other code, or of unknown code
        for entry in board.entries:
            of_entry = table.code[~table.index.duplicated()].loc[[run.path for run in entry.runs]]
            counts = of_entry[of_entry != ""].value_counts().sort_index()
            codes[entry.name] = [f"{number} of {len(of_entry)} cells by {code}" for code, number in counts.items()]
        title = " ".join(filter(None, [study.paper, study.title]))
        entries = in_order(board, tested)
        console.print(study_table.table(board, columns.names, entries, flips, codes, title, _about_training(study)))
    for sentence in study.deviates:
        console.print(f"Deviates: {sentence}", markup=False, highlight=False)
    console.print(f"{folder.path}: {written}", markup=False, highlight=False)
    if not progress.failed:  # the responses of cells that failed are kept
        folder.tidy()


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


def board_of(results: Sequence[tuple[Cell, Run]], columns: Columns) -> Board:
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
    runs = []
    for cell, run in results:
        known = run.all_results[0].task
        if (name := names[_trained(cell)]) != known:
            counts = {
                key: {name: by_task[known]}
                for key in ("left_out", "truncated")
                if known in (by_task := run.icl.get(key, {}))
            }
            configs = {name: run.results["configs"][known]}
            run = replace(
                run,
                tasks={name: replace(run.tasks[known], task=name)} if run.tasks else {},
                decided=tuple(replace(result, task=name) for result in run.decided),
                icl={**run.icl, **counts},
                results={**run.results, "configs": configs},
            )
        if together:
            every = ", ".join(trainings)
            icl = {**run.icl, "study": {**run.icl["study"], "training": every}}
            run = replace(run, icl=icl, model_facts={"study.weights": every})
        runs.append(run)
    groups = columns.groups(documents, names)
    tasks = [column for column in columns.names if column in groups or column in names.values()]
    return build(runs, tasks=tasks, groups=groups)


def _trained(cell: Cell) -> Trained:
    return cell.model.training.name if cell.model.training else "", cell.task


def flips_of(entry: Entry, columns: Columns) -> Estimate | None:
    """An entry's order sensitivity over all columns: that of the average. Of several averages, their mean."""
    cells = [entry.cells.get(column) for column in columns.averages or columns.tasks]
    flips = [cell.sensitivity for cell in cells if cell is not None and cell.sensitivity is not None]
    if not flips or len(flips) < len(cells):
        return None
    return flips[0] if len(flips) == 1 else statistics.estimate_group(flips, [1] * len(flips), bounds=(0.0, 1.0))


def in_order(board: Board, results: Sequence[tuple[Cell, Run]]) -> list[Entry]:
    """The board's entries in the order of the study's models and methods."""
    places = {run.path: place for place, (_, run) in enumerate(results)}
    return sorted(board.entries, key=lambda entry: min(places[run.path] for run in entry.runs))


# Cells.


def results_of(progress: StudyProgress, columns: Columns) -> list[tuple[Cell, Run]]:
    """Every finished cell with its results, in the order of the study's models and methods. What only the study knows
    is recorded in the results first."""
    models, variants = list(progress.study.models), list(progress.study.variants)
    cells = filter(progress.is_done, progress.all_cells())
    in_order = sorted(cells, key=lambda cell: (models.index(cell.model.arguments), variants.index(cell.variant)))
    paths = {progress.folder.results(cell): cell for cell in in_order}
    for path, cell in paths.items():
        record(progress, path, facts(progress, cell, columns))
    runs = {run.path: run for run in read(list(paths), quiet=True, dev=True)[0]}
    return [(cell, runs[path]) for path, cell in paths.items() if path in runs]


def _under_chosen_rule(progress: StudyProgress, cell: Cell, run: Run) -> Run:
    """A run with the values of the decision rule that was chosen for its cell in place of those of all rules, if rules
    are chosen among. What the model says by itself stays beside them, unless other arguments were chosen for the rule.
    """
    if "decide" not in cell.chosen or (choice := progress.choice(cell)) is None:
        return run
    ((task, raw),) = run.tasks.items()
    of_rules = {"" if result.rule is None else result.rule.name: result for result in run.all_results}
    transductive = any(rule.is_transductive for rule in progress.study.rules)
    result = replace(of_rules[choice.rule], rule=RuleFacts(name="chosen on dev", transductive=transductive))
    return replace(run, tasks={task: raw} if cell.chosen == ("decide",) else {}, decided=(result,))


def record(progress: StudyProgress, path: Path, facts: Mapping[str, Any]) -> None:
    """Write what only the study knows into a cell's results, if it is not there yet, or has changed."""
    results = json.loads(path.read_text(encoding="utf-8"))
    before = results["config"]["icl"]["study"]
    facts = json.loads(json.dumps(facts, default=str))
    now = {name: value for name, value in {**before, **facts}.items() if name not in _RECORDED or name in facts}
    if now != before:
        results["config"]["icl"]["study"] = now
        text = json.dumps(results, indent=2, ensure_ascii=False)  # as lm-eval writes it
        progress.folder.write(str(path.relative_to(progress.folder.path)), text)


def facts(progress: StudyProgress, cell: Cell, columns: Columns) -> dict[str, Any]:
    """What only the study knows of a cell, by the names at the beginning of this file."""
    study, dev = progress.study, progress.study.dev
    metric = dev.metric if dev and cell.split == "dev" else study.metric
    known: dict[str, Any] = {} if metric == "acc" else {"metric": metric}
    if cell.split == "dev":
        return known
    if cell.chosen:
        known["chosen"] = list(cell.chosen)
    if dev and (choice := progress.choice(cell)) is not None:
        known["curve"] = choice.curve
    if expected := expected_of(study, cell, columns.having(_trained(cell))):
        known["expected"] = expected
    return known


def expected_of(study: Study, cell: Cell, columns: set[str]) -> dict[str, float]:
    """The paper's number for each of these columns: that of the first entry of `expected` which matches the cell."""
    own = {
        "model": cell.model.name,
        "training": _trained(cell)[0],
        "method": cell.variant.method,
        "num_fewshot": cell.num_fewshot,
        "demonstrations": cell.drawn or _OWN_WAY,
        "chosen": bool(cell.chosen),
    }
    values: dict[str, float] = {}
    for entry in study.expected:
        matches = all(entry.get(name) in (None, value) for name, value in own.items())
        if matches and (entry.get("arguments") or {}).items() <= cell.variant.arguments.items():
            values = {name: float(value) for name, value in entry.get("values", {}).items() if name in columns} | values
    return values


def cells_table(progress: StudyProgress, results: Sequence[tuple[Cell, Run]]) -> pd.DataFrame:
    """One row a finished cell and decision rule, on the test set and on the dev set.

    Returns:
        The columns of `study.csv`; the index is the path of the results file. `model` is the checkpoint that the study
        names; a model with a `training` was trained from it. `chosen` is true if the arguments and the seed were chosen
        on the dev set, or if nothing was to be chosen. `seconds` are those of scoring, missing where they were not
        measured (`hf`, texts); cells that share passes have equal parts of them.
    """
    rows = []
    for cell, run in results:
        of_rules = {"none" if result.rule is None else result.rule.name: result for result in run.all_results}
        rules = chosen_rules = [str(rule or "none") for rule in progress.study.decide]
        if progress.study.chooses(cell.variant):
            choice = progress.choice(cell)
            if choice is None or (choice.variant, choice.seed) != (cell.variant, cell.seed):
                chosen_rules = []
            elif "decide" in choice.names:
                chosen_rules = [choice.rule or "none"]
        for rule in rules:
            rows.append(
                {
                    "path": run.path,
                    "model": cell.model.name,
                    "method": cell.variant.method,
                    "arguments": json.dumps(dict(cell.variant.arguments), ensure_ascii=False, default=str),
                    "task": cell.task,
                    "num_fewshot": cell.num_fewshot,
                    "demonstrations": cell.drawn or _OWN_WAY,
                    "seed": cell.seed,
                    "order": cell.order,
                    "split": cell.split,
                    "chosen": rule in chosen_rules,
                    "documents": of_rules[rule].documents,
                    "score": of_rules[rule].value,
                    "seconds": progress.seconds(cell),
                    "training": _trained(cell)[0],
                    "code": progress.state(cell).partition(" by ")[2],
                    "decide": rule,
                }
            )
    return pd.DataFrame(rows, columns=_CELL).set_index("path")


def _about_training(study: Study) -> str:
    """What the table says about training; "" if nothing is trained."""
    if not study.trainings:
        return ""
    under = {variant.method: trained_under(variant).method for variant in study.variants}
    others = sorted(name for name, trained in under.items() if name != trained)
    but = f" ({', '.join(others)}: under {under[others[0]]})" if others else ""
    return f"Each line's model was trained from the one above it under the line's method{but}."
