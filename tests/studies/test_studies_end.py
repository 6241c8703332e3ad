"""What comes out of a study: columns, the paper's numbers, the board, the table and records."""

from __future__ import annotations

import io
import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from rich.console import Console

from lm_eval_icl.leaderboard import study_table
from lm_eval_icl.results.board import Board
from lm_eval_icl.results.read import read
from lm_eval_icl.results.records import Run
from lm_eval_icl.studies import conduct, costs, end, grid
from lm_eval_icl.studies.grid import Training, Variant
from lm_eval_icl.studies.targets import Cell, Model, StudyTask
from lm_eval_icl.studies.unit_runner import Options
from tests import commands
from tests.boards import make_result, make_run
from tests.studies import running

ICL = Variant("icl", {}, 0)


def leaf(name: str, *groups: str, group: str = "", alike: Sequence[str] = ()) -> StudyTask:
    """A task that the study asks for by its own name or by another, in groups."""
    return StudyTask(name, (4,), {group or name: groups}, frozenset(alike))


def columns_of(*leaves: StudyTask, tasks: Sequence[str] = (), **keys: Any) -> end.Columns:
    names = tuple(tasks) or tuple(leaf.name for leaf in leaves)
    study = grid.Study.model_construct(
        models=({"pretrained": "M"},), methods=(), tasks=names, **keys
    )
    return end.columns_of(study, {leaf.name: leaf for leaf in leaves})


def result(
    task: str,
    scores: Sequence[float],
    seed: int = 0,
    order: int = 0,
    training: str = "",
    variant: Variant = ICL,
    chosen: tuple[str, ...] = (),
) -> tuple[Cell, Run]:
    """A cell and its run with these scores of documents."""
    model = Model({"pretrained": "M"})
    facts = {"model": "M", "task": task, "chosen": list(chosen), "shared": {"cells": 1}}
    facts["expected"] = {}
    if training:
        model = Model({"pretrained": "M"}, Training(training, {}, ()), ICL)
        facts["training"] = training
    cell = Cell(model, variant, task, 4, None, seed, order, chosen=chosen)
    method = variant.method
    arguments = variant.arguments
    made = make_result(task, method, seed, order, scores=scores)
    path = Path(f"/nowhere/{training},{method},{arguments},{task},{seed},{order}")
    return cell, make_run(method, made, seed, order, arguments, facts, path, "M")


def means(board: Board) -> list[dict[str, float]]:
    """By column, one element an entry."""
    names = {column.name for column in board.columns}
    of_entries = []
    for entry in board.entries:
        estimates = {name: cell.estimate for name, cell in entry.cells.items() if name in names}
        of_entries.append({name: round(value.mean, 6) for name, value in estimates.items()})
    return of_entries


def right(n: int, of: int) -> list[int]:
    """The scores of documents of which the first n are right."""
    return [1] * n + [0] * (of - n)


# Columns.


def test_means_are_weighted_by_documents_and_averages_are_not() -> None:
    """Task a: seeds 0.3 (orders 0.2 and 0.4) and 0.7; task b, with thrice the documents: 0.6."""
    runs = [
        result("a", right(2, 10), seed=0, order=0),
        result("a", right(4, 10), seed=0, order=1),
        result("a", right(6, 10), seed=1, order=0),
        result("a", right(8, 10), seed=1, order=1),
        result("b", right(18, 30), seed=0),
        result("b", right(18, 30), seed=1),
    ]
    columns = columns_of(leaf("a", "g"), leaf("b", "g"), columns={"": ("a", "b", "g")})
    (entry,) = means(end.board_of(runs, columns))
    group = (0.5 + 3 * 0.6) / 4
    average = (0.5 + 0.6 + group) / 3
    expected = {"a": 0.5, "b": 0.6, "g": group, "average": average}
    assert entry == pytest.approx(expected, abs=1e-6)
    alike = columns_of(leaf("a", "g", alike=["g"]), leaf("b", "g"), columns={"": ("g",)})
    assert means(end.board_of(runs, alike)) == [{"g": 0.55}]


def test_of_many_tasks_the_names_of_the_file_are_columns() -> None:
    leaves = [leaf(f"task {number}", "g", group="g") for number in range(9)]
    columns = columns_of(*leaves, tasks=["g"])
    assert columns.names == ("g",)
    assert len(columns.tasks["g"]) == 9
    assert columns_of(*leaves[:8], tasks=["g"]).names[:2] == ("task 0", "task 1")
    tagged = [leaf(f"task {number}", group="a tag") for number in range(9)]
    assert len(columns_of(*tagged, tasks=["a tag"]).tasks["a tag"]) == 9


def test_an_average_waits_for_all_of_its_columns() -> None:
    columns = columns_of(leaf("a"), leaf("b"), columns={"": ("a", "b")})
    names = {("", "a"): "a", ("", "b"): "b"}
    assert columns.groups({("", "a"): 10}, names) == {}
    halves = {"a": 0.5, "b": 0.5}
    assert columns.groups({("", "a"): 10, ("", "b"): 30}, names) == {"average": halves}


def test_a_task_that_no_training_has_for_a_target_counts_nowhere() -> None:
    training = Training("one", {}, ("a",))
    columns = columns_of(leaf("a"), leaf("b"), columns={"": ("a", "b")}, train=(training,))
    assert columns.tasks["a"] == {("one", "a")}
    assert columns.tasks["b"] == set()


def test_trainings_with_columns_of_their_own_share_a_row() -> None:
    """A task that is a target of both counts in each column with the column's training."""
    runs = [
        result("a", right(1, 10), training="one"),
        result("b", right(2, 10), training="one"),
        result("a", right(5, 10), training="two"),
        result("b", right(8, 10), training="two"),
    ]
    trainings = tuple(Training(name, {}, (f"of {name}",)) for name in ("one", "two"))
    asked_as = {"of one": ("of one",), "of two": ("of two",)}
    leaves = [StudyTask(name, (4,), asked_as) for name in "ab"]
    columns = columns_of(*leaves, columns={"first": ("of one", "of two")}, train=trainings)
    assert columns.names == ("of one", "of two", "average, first")
    board = end.board_of(runs, columns)
    assert means(board) == [{"of one": 0.15, "of two": 0.65, "average, first": 0.4}]


PARTS = {
    "the average": {"": ("a", "b", "c")},
    "two averages": {"x": ("a", "b"), "y": ("b", "c")},
    "a task": {"": ("b",)},
}


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_order_sensitivity_is_that_of_the_average_or_the_mean_of_several(parts) -> None:
    """Of two documents none, one, and both change with the order: in each part, half of them."""
    first = [result(task, [0, 0]) for task in "abc"]
    second = [
        result("a", [0, 0], order=1),
        result("b", [0, 1], order=1),
        result("c", [1, 1], order=1),
    ]
    columns = columns_of(leaf("a"), leaf("b"), leaf("c"), columns=parts)
    (entry,) = end.board_of([*first, *second], columns).entries
    estimate = end.flips_of(entry, columns)
    assert estimate is not None
    assert estimate.mean == pytest.approx(0.5)
    (entry,) = end.board_of(first, columns).entries
    assert end.flips_of(entry, columns) is None, "of one order there is none"


# The paper's numbers.


def expected(entry: dict[str, Any]) -> dict[str, float]:
    """What an entry of a study's file says of deepthink with a chosen T."""
    entries = ({"values": {"a": 0.1}, **entry},)
    study = grid.Study.model_construct(models=(), methods=(), tasks=(), expected=entries)
    variant = Variant("deepthink", {"T": 2, "eta": 0.1}, 0)
    cell, _ = result("a", [1], variant=variant, chosen=("T",))
    return end.expected_of(study, cell)


OF_THE_CELL = yaml.safe_load("""
- {}
- {model: M}
- {method: deepthink}
- {num_fewshot: 4}
- {chosen: true}
- {arguments: {eta: 0.1}}
- {arguments: {T: 2}}
""")
OF_OTHERS = yaml.safe_load("""
- {model: x}
- {method: hf}
- {num_fewshot: 8}
- {chosen: false}
- {arguments: {T: 1}}
- {demonstrations: random}
- {training: t}
""")


@pytest.mark.parametrize("entry", OF_THE_CELL, ids=str)
def test_the_papers_numbers_of_a_cell(entry: dict[str, Any]) -> None:
    assert expected(entry) == {"a": 0.1}


@pytest.mark.parametrize("entry", OF_OTHERS, ids=str)
def test_the_papers_numbers_of_other_cells(entry: dict[str, Any]) -> None:
    assert expected(entry) == {}


# Of a study that was run.

KEYS: dict[str, Any] = {
    "methods": ["icl", {"deepthink": {"T": [1, 2], "eta": 0.5}}],
    "tasks": ["icl_demo_short", "icl_demo_unseen"],
    "num_fewshot": 2,
    "dev": {"size": 6, "choose": ["T", "eta"]},
    "figures": "sensitivity",  # there is none of one order
    "expected": {"method": "icl", "values": {"icl_demo_short": 0.579}},
    "deviates": "4 documents [of 1,000]",
}
OPTIONS = Options("cpu", 8, 4)


def end_of(study: running.Ran) -> str:
    """What is printed at the end of a study."""
    console = Console(width=80, file=io.StringIO(), color_system=None)
    with console.capture() as captured:
        end.conclude(study.grid, study.folder, "name", study.failed, console)
    return captured.get()


def concluded(folder: Path, **keys: Any) -> tuple[running.Ran, str]:
    study = running.conduct(folder, OPTIONS, **{**KEYS, **keys})
    return study, end_of(study)


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory, own_tasks: None) -> tuple[running.Ran, str]:
    return concluded(tmp_path_factory.mktemp("end") / "o")


def test_study_json_says_what_only_the_study_knows(study: tuple[running.Ran, str]) -> None:
    """And a cell's file, when it is written, what was chosen."""
    progress, text = study
    record = json.loads((progress.folder.path / "study.json").read_text())
    assert record.keys() == {"study", "cells", "dev", "failures"}
    assert record["failures"] == {}
    for cell in progress.cells():
        facts = progress.facts(cell)
        says = record["cells"].get(f"{cell.path}/{progress.folder.results_path(cell).name}")
        assert "expected" not in facts
        if cell.split == "dev":
            assert says is None
            assert "chosen" not in facts
            metrics = record["dev"].pop(cell.path)
            assert metrics["acc,none"] == progress.score(cell)
        elif cell.variant.method == "deepthink":
            assert facts["chosen"] == ["T"], "there is one eta"
            assert not says["expected"]
        else:
            assert says["expected"] == {"icl_demo_short": 0.579}
            assert "chosen" not in facts
    assert record["dev"] == {}
    assert text.count("(57.9)") == 1
    assert "eta=0.5" in text
    chosen = Counter(cell.variant.arguments["T"] for (cell,) in progress.choices())
    counts = ", ".join(f"T={value} ({number}x)" for value, number in chosen.most_common())
    assert f"T chosen on dev: {counts}" in " ".join(text.split())


def test_the_end_says_in_what_a_study_deviates(study: tuple[running.Ran, str]) -> None:
    """As it stands in the file, brackets too."""
    _, text = study
    assert "Deviates: 4 documents [of 1,000]\n" in text


def test_another_metric_is_that_of_cells_that_are_there(tmp_path: Path) -> None:
    """For every reader of the folder, and without a further run."""
    keys = {"methods": "icl", "tasks": "icl_demo_pieces", "dev": None, "seeds": 0}
    for metric in ("acc", "acc_norm"):
        progress, text = concluded(tmp_path / "o", **keys, metric=metric, expected=[])
        (cell,) = progress.cells()
        assert f"{100 * progress.score(cell):.1f}" in text
        (run,), _ = read([progress.folder.path], quiet=True)
        assert run.tasks[cell.task].metric == metric


def scores_in(folder: Path) -> pd.DataFrame:
    """The accuracies in the study's table, by the path of the cell."""
    return pd.read_csv(folder / "study.csv").query("metric == 'acc'").set_index("path")


def test_study_csv_has_the_scores_of_each_cell_on_the_test_set(
    study: tuple[running.Ran, str],
) -> None:
    progress, _ = study
    table = scores_in(progress.folder.path)
    tested = progress.cells(split="test")
    assert len(table) == len(tested) == 2 * 2 * 2
    assert set(table.documents) == {4}
    for cell in tested:
        assert table.loc[str(progress.folder.results_path(cell))].value == progress.score(cell)
    assert {"board.html", "study.csv"} <= {path.name for path in progress.folder.path.iterdir()}


def test_a_study_says_that_its_page_has_no_figures(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    file = running.write(tmp_path / "s.yaml", methods="icl", seeds=[0])
    line = ["study", file, "--limit", "4", "--device", "cpu", "--output", tmp_path / "o"]
    commands.run(*line)
    assert "pip install 'lm-eval-icl[figures]'. The page has none." in caplog.text
    assert not (tmp_path / "o" / "figures").exists()


def test_a_dry_run_says_minutes_and_the_page_says_what_failed(tmp_path, capsys):
    """By two trials of a unit; a model that does not load is tried once.

    Its cells stand on the page.
    """
    models = [running.MODEL, f"pretrained={tmp_path}"]
    file = running.write(tmp_path / "s.yaml", models=models, methods=["icl", "pcw"], seeds=[0])
    line = ["study", file, "--limit", "6", "--device", "cpu"]
    refused = commands.refused(*line, "--dry_run")
    said = capsys.readouterr().out
    low, high = re.search(r"documents, ([\d.]+) to ([\d.]+) minutes by two trials", said).groups()
    assert 0 <= float(low) <= float(high) < 10
    assert "cannot be run" in refused
    commands.refused(*line, "--output", tmp_path / "o")
    failed = [text for text in capsys.readouterr().err.splitlines() if text.startswith("failed:")]
    assert len(failed) == 1
    assert "2 left out" in (tmp_path / "o" / "board.html").read_text()


def test_the_time_that_is_left_has_an_error():
    assert conduct.time_left([60.0], 3) == "time left not known yet"
    assert conduct.time_left([60.0, 60.0, 60.0], 4) == "4 to 4 min left, by 3 cells"
    assert conduct.time_left([0.0, 120.0], 10) == "0 to 30 min left, by 2 cells"


def test_a_measured_dev_set_has_columns_beside_the_test_set(tmp_path: Path) -> None:
    """In the table, on the page, in the figure against T (Deep-Thinking's Figure 6) and in CSV."""
    progress, text = concluded(
        tmp_path / "o",
        methods={"deepthink": {"T": "1..3", "eta": 0.5}},
        dev={"choose": []},
        figures="T",
        orders=1,
        expected=[],
    )
    assert "dev set" in " ".join(text.split())
    folder = progress.folder.path
    assert "icl_demo_short, dev set" in (folder / "board.html").read_text()
    points = pd.read_csv(folder / "figures/T.csv").set_index(["column", "T"])["mean"]
    scores = scores_in(folder)
    for split, column in (("test", "icl_demo_short"), ("dev", "icl_demo_short, dev set")):
        cells = progress.cells(split=split, task="icl_demo_short")
        by_T: dict[int, list[float]] = {1: [], 2: [], 3: []}
        for cell in cells:
            row = scores.loc[str(progress.folder.results_path(cell))]
            assert row.split == split
            assert row.value == progress.score(cell)
            by_T[cell.variant.arguments["T"]].append(progress.score(cell))
        for T, of_seeds in by_T.items():
            assert len(of_seeds) == 2
            assert points[column, T] == pytest.approx(sum(of_seeds) / 2)


def printed(table: Any) -> str:
    console = Console(width=80, file=io.StringIO(), color_system=None)
    with console.capture() as captured:
        console.print(table)
    return captured.get()


def test_order_flips_are_the_last_column_of_the_table() -> None:
    runs = [result("a", right(2, 10), order=0), result("a", right(6, 10), order=1)]
    columns = columns_of(leaf("a"))
    board = end.board_of(runs, columns)
    (entry,) = board.entries
    flips = {entry.name: end.flips_of(entry, columns)}
    text = printed(study_table.table(board, columns.names, board.entries, flips, "title"))
    *_, last = next(line for line in text.splitlines() if "icl" in line).split()
    assert last.startswith("40.0")
    assert "Order flips: how often two orders" in text


def test_the_table_of_trainings() -> None:
    took = {"steps": 1500, "tokens": 2_000_000, "seconds": 90.0, "memory": 3 * 2**30}
    measured = {"training": "a", "method": "pcw", **took, "loss_before": 1.5, "loss_after": 0.25}
    unmeasured = {**measured, "training": "b", "loss_before": None, "loss_after": None}
    text = printed(costs.table(pd.DataFrame([measured, unmeasured])))
    lines = [line.split() for line in text.splitlines()]
    assert ["a", "1,500", "2,000,000", "1.5", "3.0", "1.500", "→", "0.250"] in lines
    assert ["b", "1,500", "2,000,000", "1.5", "3.0"] in lines
