"""What comes out of a study: its columns, the paper's numbers, the board, the table and what is recorded in results."""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from rich.console import Console

from lm_eval_icl.results.board import Board
from lm_eval_icl.results.records import Run
from lm_eval_icl.studies import conduct, end, grid
from lm_eval_icl.studies.grid import Training, Variant
from lm_eval_icl.studies.targets import Cell, Model, StudyTask
from lm_eval_icl.studies.unit_runner import Options
from tests import commands
from tests.boards import make_result, make_run
from tests.studies import running

Results = list[tuple[Cell, Run]]


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
    **keys: Any,
) -> Any:
    """A cell of `icl`, or another method, and its run with these scores of documents."""
    method = keys.pop("method", "icl")
    arguments = keys.pop("arguments", {})
    chosen = keys.pop("chosen", ())
    checkpoint = keys.pop("model", "M")
    trained = Training(training, {}, ()) if training else None
    model = Model({"pretrained": checkpoint}, trained, Variant("icl", {}, 0) if training else None)
    cell = Cell(model, Variant(method, arguments, 0), task, 4, None, seed, order, chosen=chosen)
    facts = {"model": checkpoint, "task": task, "chosen": list(chosen), "shared": {"cells": 1}}
    facts |= {"expected": keys.pop("expected", {})} | ({"training": training} if training else {})
    made = make_result(task, method, seed, order, scores=scores, **keys)
    path = Path(f"/nowhere/{training},{method},{arguments},{task},{seed},{order}")
    return cell, make_run(method, made, seed, order, arguments, facts, path, checkpoint)


def means(board: Board) -> list[dict[str, float]]:
    """By column, one element an entry."""
    names = {column.name for column in board.columns}
    return [
        {name: round(cell.estimate.mean, 6) for name, cell in entry.cells.items() if name in names}
        for entry in board.entries
    ]


# Columns.


def test_means_are_weighted_by_documents_and_averages_are_not() -> None:
    """StudyTask a: seeds 0.3 (orders 0.2 and 0.4) and 0.7; task b, with thrice the documents: 0.6."""
    columns = columns_of(leaf("a", "g"), leaf("b", "g"), columns={"": ("a", "b", "g")})
    even = columns_of(leaf("a", "g", alike=["g"]), leaf("b", "g"), columns={"": ("g",)})
    shares = {(0, 0): 2, (0, 1): 4, (1, 0): 6, (1, 1): 8}
    found = [
        result("a", [1] * n + [0] * (10 - n), seed, order) for (seed, order), n in shares.items()
    ]
    found += [result("b", [1] * 18 + [0] * 12, seed) for seed in range(2)]
    group = (0.5 + 3 * 0.6) / 4
    expected = {"a": 0.5, "b": 0.6, "g": group, "average": (0.5 + 0.6 + group) / 3}
    (entry,) = means(end.board_of(found, columns))
    assert entry == pytest.approx(expected, abs=1e-6)
    assert means(end.board_of(found, even)) == [{"g": 0.55}]


def of_two_trainings(*tasks: str) -> Results:
    return [
        result(task, [1] * n + [0] * (10 - n), training=training)
        for training, counts in (("one", (1, 2)), ("two", (5, 8)))
        for task, n in zip(tasks, counts, strict=True)
    ]


def test_trainings_with_columns_of_their_own_share_a_row() -> None:
    """A task that is a target of both counts in each column with the training that the column is of."""
    trainings = tuple(Training(name, {}, (f"of {name}",)) for name in ("one", "two"))
    leaves = [
        StudyTask(name, (4,), {f"of {t}": (f"of {t}",) for t in ("one", "two")}) for name in "ab"
    ]
    columns = columns_of(*leaves, columns={"first": ("of one", "of two")}, train=trainings)
    assert columns.names == ("of one", "of two", "average, first")
    board = end.board_of(of_two_trainings("a", "b"), columns)
    assert means(board) == [{"of one": 0.15, "of two": 0.65, "average, first": 0.4}]


def test_order_sensitivity_is_that_of_the_average_or_the_mean_of_several() -> None:
    """Of two documents none, one, and both change with the order."""
    scores = {"a": ([0, 0], [0, 0]), "b": ([0, 0], [0, 1]), "c": ([0, 0], [1, 1])}
    found = [
        result(task, of[order], order=order) for task, of in scores.items() for order in range(2)
    ]
    leaves = [leaf(task) for task in scores]
    for parts, flips in (
        ({"": ("a", "b", "c")}, 0.5),
        ({"x": ("a", "b"), "y": ("b", "c")}, 0.5),
        ({"": ("b",)}, 0.5),
    ):
        columns = columns_of(*leaves, columns=parts)
        (entry,) = end.board_of(found, columns).entries
        estimate = end.flips_of(entry, columns)
        assert estimate is not None
        assert estimate.mean == pytest.approx(flips)
    (entry,) = end.board_of(found[::2], columns).entries
    assert end.flips_of(entry, columns) is None, "of one order there is none"


# The paper's numbers.


def expected(entries: Sequence[dict[str, Any]], cell: Cell) -> dict[str, float]:
    study = grid.Study.model_construct(models=(), methods=(), tasks=(), expected=tuple(entries))
    return end.expected_of(study, cell)


@pytest.mark.parametrize(
    "entry, matches",
    [
        *(
            (entry, True)
            for entry in ({}, {"model": "M"}, {"method": "deepthink"}, {"num_fewshot": 4})
        ),
        *(
            (entry, True)
            for entry in ({"chosen": True}, {"arguments": {"eta": 0.1}}, {"arguments": {"T": 2}})
        ),
        *(
            (entry, False)
            for entry in ({"model": "x"}, {"method": "hf"}, {"num_fewshot": 8}, {"chosen": False})
        ),
        *(
            (entry, False)
            for entry in ({"arguments": {"T": 1}}, {"demonstrations": "random"}, {"training": "t"})
        ),
    ],
)
def test_the_papers_numbers(entry: dict[str, Any], matches: bool) -> None:
    cell, _ = result("a", [1], method="deepthink", arguments={"T": 2, "eta": 0.1}, chosen=("T",))
    assert expected([{"values": {"a": 0.1}, **entry}], cell) == ({"a": 0.1} if matches else {})


# Of a study that was run.

KEYS: dict[str, Any] = {
    "methods": ["icl", {"deepthink": {"T": [1, 2], "eta": 0.5}}],
    "tasks": ["icl_demo_short", "icl_demo_unseen"],
    "num_fewshot": 2,
    "dev": {"size": 6, "choose": ["T", "eta"]},
    "figures": "sensitivity",  # there is none of one order
    "expected": {"method": "icl", "values": {"icl_demo_short": 0.579}},
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
    counts = Counter(
        cell.variant.arguments["T"] for choice in progress.choices() for cell in choice
    )
    chosen = ", ".join(f"T={value} ({number}x)" for value, number in counts.most_common())
    assert f"T chosen on dev: {chosen}" in " ".join(text.split())


def test_study_csv_has_the_scores_of_each_cell_on_the_test_set(
    study: tuple[running.Ran, str],
) -> None:
    progress, _ = study
    table = (
        pd.read_csv(progress.folder.path / "study.csv").query("metric == 'acc'").set_index("path")
    )
    tested = [cell for cell in progress.cells() if cell.split == "test"]
    assert len(table) == len(tested) == 2 * 2 * 2
    assert set(table.documents) == {4}
    for cell in tested:
        assert table.loc[str(progress.folder.results_path(cell))].value == progress.score(cell)
    assert {"board.html", "study.csv"} <= {path.name for path in progress.folder.path.iterdir()}


def test_a_dry_run_says_minutes_and_the_page_says_what_failed(tmp_path, capsys):
    """By two trials of a unit; a model that does not load is tried once, and its cells stand on the page."""
    keys = {"models": [running.MODEL, f"pretrained={tmp_path}"], "methods": ["icl", "pcw"]}
    file = running.write(tmp_path / "s.yaml", **{**keys, "seeds": [0]})
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
    """In the table, on the page, in the figure against T and in the CSV files (Deep-Thinking's Figure 6)."""
    methods = {"deepthink": {"T": "1..3", "eta": 0.5}}
    progress, text = concluded(
        tmp_path / "o", methods=methods, dev={"choose": []}, figures="T", orders=1, expected=[]
    )
    assert "dev set" in " ".join(text.split())
    folder = progress.folder.path
    assert "icl_demo_short, dev set" in (folder / "board.html").read_text()
    points = pd.read_csv(folder / "figures/T.csv").set_index(["column", "T"])["mean"]
    scores = pd.read_csv(folder / "study.csv").query("metric == 'acc'").set_index("path")
    for split, column in (("test", "icl_demo_short"), ("dev", "icl_demo_short, dev set")):
        for T in (1, 2, 3):
            cells = [
                cell
                for cell in progress.cells()
                if (cell.split, cell.variant.arguments["T"]) == (split, T)
                and cell.task == "icl_demo_short"
            ]
            assert len(cells) == 2  # seeds
            mean = sum(map(progress.score, cells)) / len(cells)
            assert points[column, T] == pytest.approx(mean)
            for cell in cells:
                row = scores.loc[str(progress.folder.results_path(cell))]
                assert row.split == split
                assert row.value == progress.score(cell)
