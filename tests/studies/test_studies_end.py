"""What comes out of a study: its columns, the paper's numbers, the board, the table and what is recorded in results."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from rich.console import Console

from lm_eval_icl import results
from lm_eval_icl.leaderboard import study_table
from lm_eval_icl.results.board import Board
from lm_eval_icl.results.records import Run
from lm_eval_icl.studies import end, grid
from lm_eval_icl.studies.cells import Cell, Model
from lm_eval_icl.studies.parts import Training, Variant
from lm_eval_icl.studies.run import Options
from lm_eval_icl.studies.tasks import Leaf
from tests.boards import make_result, make_run
from tests.studies import running

Results = list[tuple[Cell, Run]]


def leaf(name: str, *groups: str, asked: str = "", alike: Sequence[str] = ()) -> Leaf:
    """A task that the study asks for by its own name or by another, in groups."""
    return Leaf(name, {asked or name: groups}, None, alike=frozenset(alike))  # type: ignore[arg-type]


def columns_of(*leaves: Leaf, tasks: Sequence[str] = (), **keys: Any) -> end.Columns:
    names = tuple(tasks) or tuple(leaf.name for leaf in leaves)
    study = grid.Study.model_construct(models=({"pretrained": "M"},), methods=(), tasks=names, **keys)
    return end.columns_of(study, {leaf.name: leaf for leaf in leaves})


def result(task: str, scores: Sequence[float], seed: int = 0, order: int = 0, training: str = "", **keys: Any) -> Any:
    """A cell of `icl`, or another method, and its run with these scores of documents."""
    method, arguments = keys.pop("method", "icl"), keys.pop("arguments", {})
    chosen, checkpoint = keys.pop("chosen", ()), keys.pop("model", "M")
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


def test_columns_are_the_tasks_or_what_the_file_lists_or_says() -> None:
    leaves = [leaf(f"t{i}", "g", asked="g") for i in range(9)]
    assert columns_of(*leaves[:3], tasks=["g"]).names == ("t0", "t1", "t2", "average")
    assert columns_of(*leaves, tasks=["g"]).names == ("g",), "one column has no average"
    parts = {"one": ("g",), "two": ("t0", "t1")}
    assert columns_of(*leaves, tasks=["g"], columns=parts).names == ("g", "t0", "t1", "average, two")


def test_means_are_weighted_by_documents_and_averages_are_not() -> None:
    """Task a: seeds 0.3 (orders 0.2 and 0.4) and 0.7; task b, with thrice the documents: 0.6."""
    columns = columns_of(leaf("a", "g"), leaf("b", "g"), columns={"": ("a", "b", "g")})
    even = columns_of(leaf("a", "g", alike=["g"]), leaf("b", "g"), columns={"": ("g",)})
    shares = {(0, 0): 2, (0, 1): 4, (1, 0): 6, (1, 1): 8}
    found = [result("a", [1] * n + [0] * (10 - n), seed, order) for (seed, order), n in shares.items()]
    found += [result("b", [1] * 18 + [0] * 12, seed) for seed in range(2)]
    group = (0.5 + 3 * 0.6) / 4
    expected = {"a": 0.5, "b": 0.6, "g": group, "average": (0.5 + 0.6 + group) / 3}
    (entry,) = means(end.board_of(found, columns))
    assert entry == pytest.approx(expected, abs=1e-6)
    assert means(end.board_of(found, even)) == [{"g": 0.55}]


def test_a_group_without_all_its_tasks_has_no_number() -> None:
    columns = columns_of(leaf("a", "g"), leaf("b", "g"), leaf("c"), columns={"": ("a", "g", "c")})
    board = end.board_of([result("a", [1, 0]), result("b", [0, 0]), result("a", [1, 1], method="nope")], columns)
    assert means(board) == [{"g": 0.25, "a": 0.5}, {"a": 1.0}]


def of_two_trainings(*tasks: str) -> Results:
    return [
        result(task, [1] * n + [0] * (10 - n), training=training)
        for training, counts in (("one", (1, 2)), ("two", (5, 8)))
        for task, n in zip(tasks, counts, strict=True)
    ]


def test_trainings_with_columns_of_their_own_share_a_row() -> None:
    """A task that is a target of both counts in each column with the training that the column is of."""
    trainings = tuple(Training(name, {}, (f"of {name}",)) for name in ("one", "two"))
    leaves = [Leaf(name, {f"of {t}": (f"of {t}",) for t in ("one", "two")}, None) for name in "ab"]  # type: ignore[arg-type]
    columns = columns_of(*leaves, columns={"first": ("of one", "of two")}, train=trainings)
    assert columns.names == ("of one", "of two", "average, first")
    assert columns.having(("one", "a")) == {"of one", "average, first"}
    board = end.board_of(of_two_trainings("a", "b"), columns)
    assert means(board) == [{"of one": 0.15, "of two": 0.65, "average, first": 0.4}]


def test_trainings_of_one_column_have_rows_of_their_own() -> None:
    trainings = tuple(Training(name, {}, ("a", "b")) for name in ("one", "two"))
    board = end.board_of(of_two_trainings("a", "b"), columns_of(leaf("a"), leaf("b"), train=trainings))
    assert means(board) == [{"average": 0.65, "a": 0.5, "b": 0.8}, {"average": 0.15, "a": 0.1, "b": 0.2}]
    assert all(
        f"trained: {training}" in entry.label for entry, training in zip(board.entries, ("two", "one"), strict=True)
    )


def test_order_sensitivity_is_that_of_the_average_or_the_mean_of_several() -> None:
    """Of two documents none, one, and both change with the order."""
    scores = {"a": ([0, 0], [0, 0]), "b": ([0, 0], [0, 1]), "c": ([0, 0], [1, 1])}
    found = [result(task, of[order], order=order) for task, of in scores.items() for order in range(2)]
    leaves = [leaf(task) for task in scores]
    for parts, flips in (({"": ("a", "b", "c")}, 0.5), ({"x": ("a", "b"), "y": ("b", "c")}, 0.5), ({"": ("b",)}, 0.5)):
        columns = columns_of(*leaves, columns=parts)
        (entry,) = end.board_of(found, columns).entries
        estimate = end.flips_of(entry, columns)
        assert estimate is not None and estimate.mean == pytest.approx(flips)
    (entry,) = end.board_of(found[::2], columns).entries
    assert end.flips_of(entry, columns) is None, "of one order there is none"


# The paper's numbers.


def expected(entries: Sequence[dict[str, Any]], cell: Cell) -> dict[str, float]:
    study = grid.Study.model_construct(models=(), methods=(), tasks=(), expected=tuple(entries))
    return end.expected_of(study, cell, {"a", "average"})


@pytest.mark.parametrize(
    ("entry", "matches"),
    [
        *((entry, True) for entry in ({}, {"model": "M"}, {"method": "deepthink"}, {"num_fewshot": 4})),
        *((entry, True) for entry in ({"chosen": True}, {"arguments": {"eta": 0.1}}, {"arguments": {"T": 2}})),
        *((entry, False) for entry in ({"model": "x"}, {"method": "hf"}, {"num_fewshot": 8}, {"chosen": False})),
        *((entry, False) for entry in ({"arguments": {"T": 1}}, {"demonstrations": "random"}, {"training": "t"})),
    ],
)
def test_the_papers_numbers(entry: dict[str, Any], matches: bool) -> None:
    cell, _ = result("a", [1], method="deepthink", arguments={"T": 2, "eta": 0.1}, chosen=("T",))
    assert expected([{"values": {"a": 0.1, "b": 0.2}, **entry}], cell) == ({"a": 0.1} if matches else {})


def test_of_two_entries_the_first_counts() -> None:
    entries = [{"method": "hf", "values": {"a": 1}}, {"values": {"average": 2}}, {"values": {"a": 3, "average": 4}}]
    assert expected(entries, result("a", [1])[0]) == {"a": 3, "average": 2}


# The table as it is printed.


def printed(found: Results, columns: end.Columns, title: str = "Title") -> str:
    board = end.board_of(found, columns)
    flips = {entry.name: of for entry in board.entries if (of := end.flips_of(entry, columns)) is not None}
    console = Console(width=80, file=io.StringIO(), color_system=None)
    with console.capture() as captured:
        console.print(study_table.table(board, columns.names, end.in_order(board, found), flips, title))
    return captured.get()


def test_five_tasks_fit_eighty_columns() -> None:
    names = ["icl_sst2", "icl_sst5", "icl_trec", "icl_mr", "icl_agnews"]
    shown: list[dict[str, Any]] = [{"expected": {"icl_sst2": 0.596}}]
    shown += [{"method": "deepthink", "arguments": {"T": T, "eta": 0.001}, "chosen": ("T",)} for T in (2, 3)]
    found = [
        result(name, [(i + seed * order) % 3 > 0 for i in range(40)], seed, order, **keys)
        for i, name in enumerate(names)
        for keys in (shown[0], shown[1 + i % 2])
        for seed in range(3)
        for order in range(2)
    ]
    columns = columns_of(*map(leaf, names))
    text = printed(found, columns)
    assert max(map(len, text.splitlines())) <= 80
    board = end.board_of(found, columns)
    assert [entry.method for entry in end.in_order(board, found)] == ["icl", "deepthink"], "what was chosen is one row"
    for entry in board.entries:
        for cell in (entry.cells[name] for name in columns.names):  # no number is broken
            half = 100 * (cell.estimate.high - cell.estimate.low) / 2
            assert f"{100 * cell.estimate.mean:.1f}±{half:.{int(half < 9.95)}f}" in text.split()
        flips = end.flips_of(entry, columns)
        assert flips is not None and f"{100 * flips.low:.1f}–{100 * flips.high:.1f}" in text.split()  # noqa: RUF001
    words = " ".join(text.split())
    assert text.count("(59.6)") == 1 and text.count("icl_sst2") == 1 and "flips" in text and "chosen on" in words
    assert "4 shots. Means ± half of the 95% interval over documents and sets of demonstrations, in percent;" in words


def test_many_columns_are_printed_in_parts_in_their_order() -> None:
    tasks = [f"task_number_{i}" for i in range(12)]
    found = [result(task, [1] * (i + 1) + [0] * (99 - i)) for i, task in enumerate(tasks)]
    text = printed(found, columns_of(*map(leaf, tasks), columns={"": tuple(tasks)}))
    assert max(map(len, text.splitlines())) <= 80
    assert [word.partition("±")[0] for word in text.split() if "±" in word[1:]] == [f"{n}.0" for n in range(1, 13)] + [
        "6.5"
    ]
    assert text.count("icl") == 2, "a line in each of two parts"
    assert "over documents, for these demonstrations" in " ".join(text.split())


def test_names_are_no_markup_and_cannot_command_a_terminal() -> None:
    keys = {"model": "[red]m", "method": "[i]", "arguments": {"x": "[/]\x1b[31m"}}
    text = printed([result("[b]", [1], **keys)], columns_of(leaf("[b]")), "[bold]title[/bold]\x1b]0;x\x07")
    for name in ("[red]m", "[b]", "[i]", "x=[/]", "[bold]title[/bold]"):
        assert name in text
    assert "\x1b" not in text and "\x07" not in text


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
        end.conclude(study.opened, study.folder, "name", study.failed, console)
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
    assert record.keys() == {"study", "cells", "failures"} and record["failures"] == {}
    for cell in progress.cells():
        facts, says = progress.facts(cell), record["cells"][f"{cell.path}/{progress.folder.results_path(cell).name}"]
        assert says["shared"] == facts["shared"] and not {"expected", "curve"} & facts.keys()
        if cell.split == "dev":
            assert says.keys() == {"shared"} and "chosen" not in facts
        elif cell.variant.method == "deepthink":
            assert facts["chosen"] == ["T"], "there is one eta"
            points = [(point["arguments"]["T"], point["seed"]) for point in says["curve"]]
            assert points == [(1, cell.seed), (2, cell.seed)] and "expected" not in says
        else:
            expected = {"icl_demo_short": 0.579} if cell.task == "icl_demo_short" else None
            assert says.get("expected") == expected and "chosen" not in facts
    assert text.count("(57.9)") == 1 and "eta=0.5" in text and "T chosen on dev" in " ".join(text.split())


def test_measures_of_the_paper_stand_beside_ours(tmp_path: Path, own_tasks: None) -> None:
    entry = {"method": "invicl", "measures": {"order flips": 0.25, "milliseconds": 21.9, "kept": 0.53}}
    progress, text = concluded(tmp_path / "o", methods=["invicl"], dev=None, orders=2, expected=[entry], seeds=0)
    shared = [progress.facts(cell)["shared"] for cell in progress.cells()]
    ours = sum(1000 * of["seconds"] / of["cells"] / 4 for of in shared) / len(shared)
    for line in (
        "order flips 0 (the paper: 0.25)",
        f"milliseconds {ours:.3g} (the paper: 21.9)",
        "kept not measured (the paper: 0.53)",
    ):
        assert line in text


def test_cells_of_several_commits_are_told(study: tuple[running.Ran, str]) -> None:
    table = study[0].rows()
    assert "several commits" not in end._about(study[0].study, table)
    table.loc[table.index[0], "commit"] = "0123456789"
    assert "The cells are of several commits of lm-eval-icl: " in end._about(study[0].study, table)


@pytest.mark.filterwarnings("ignore:.*is of the dev set")
def test_study_csv_has_a_line_for_each_cell(study: tuple[running.Ran, str]) -> None:
    progress, _ = study
    table = pd.read_csv(progress.folder.path / "study.csv")
    expected = "model method arguments task num_fewshot demonstrations seed order split chosen documents score seconds"
    assert list(table) == [*expected.split(), "training", "commit", "decide"]
    assert len(table) == len(progress.cells()) == 2 * 2 * (3 + 2)
    assert set(map(str, table[table.split == "dev"].chosen)) == {"True", "False"}
    scores = results.documents(progress.folder.cells).groupby("run").acc.mean()  # those of the test set
    tested = table[table.split == "test"]
    assert sorted(tested.score) == pytest.approx(sorted(scores)) and set(tested.documents) == {4}
    assert tested.chosen.all() and (progress.folder.path / "board.html").is_file()


def test_the_table_has_the_studys_metric(tmp_path: Path, own_tasks: None) -> None:
    task = {"task": "icl_demo_short", "metric_list": [{"metric": "acc"}, {"metric": "brier_score"}]}
    keys = {"tasks": [task], "metric": "brier_score", "dev": None, "methods": "icl", "expected": None}
    progress, text = concluded(tmp_path / "o", **keys)
    scores = [progress.score(cell) for cell in progress.cells()]
    assert list(pd.read_csv(tmp_path / "o/study.csv").score) == scores
    assert f"{sum(scores) / 2:.3g}" in text and "percent" not in text
