"""What cells cost: as files record it, and as tables, terminal and page show it."""

from __future__ import annotations

import csv
import math

import pytest

from lm_eval_icl import results
from lm_eval_icl.leaderboard import costs, curves, tables
from lm_eval_icl.leaderboard.page import page
from lm_eval_icl.results.build import build
from lm_eval_icl.results.read import read
from tests import commands
from tests.boards import write

GIB = 2**30


def recorded(tokens, saved=900, passes=4, cells=1, **more):
    """What a results file says about its cost."""
    shared = {"cells": cells, "seconds": 6.0, "passes": passes}
    icl = {"tokens_run": tokens, "tokens_saved": saved, "peak_bytes": GIB, **more}
    put = {f"config.icl.{name}": value for name, value in icl.items()}
    return put | {"config.icl.study.shared": shared}


def board_of(folder):
    return build(*read([folder], quiet=True))


def only_cost(board):
    return costs.cost(board.entries[0], board.columns[0])


def test_a_cell_costs_what_its_runs_did(tmp_path):
    for seed, tokens in enumerate((100, 300)):
        write(tmp_path, seed=seed, put=recorded(tokens))
    cost = only_cost(board_of(tmp_path))
    assert cost.tokens_run == 400
    assert cost.passes == 8
    assert cost.seconds == 12
    assert cost.peak_bytes == GIB
    assert cost.tokens_a_document == 400 / 80
    assert cost.saved == 1800 / 2200
    table = results.runs(tmp_path)
    assert sorted(table.tokens_run) == [100, 300]
    assert set(table.documents_run) == {40}


def test_cells_that_were_scored_together_share_the_cost(tmp_path):
    for order in (0, 1):
        facts = {"config.icl.study.order": order, **recorded(100, cells=2)}
        write(tmp_path, order=order, put=facts)
    cost = only_cost(board_of(tmp_path))
    assert cost.tokens_run == 100
    assert cost.passes == 4
    assert cost.seconds == 6
    assert cost.shared_by == 2
    titles = dict(costs.facts(cost))
    assert titles["Shared passes"].startswith("2 runs")


def test_a_run_of_several_tasks_costs_on_their_average_alone(tmp_path):
    write(tmp_path, task=["t", "u"], put=recorded(100))
    board = board_of(tmp_path)
    by_column = {column.name: costs.cost(board.entries[0], column) for column in board.columns}
    assert by_column["t"] is None
    assert by_column["average"].tokens_run == 100
    assert dict(costs.facts(None)) == {"Cost": "not recorded for this column alone"}


@pytest.mark.parametrize("put", [{}, {"config.icl.tokens_run": 0}])
def test_what_is_not_recorded_or_read_from_a_cache_is_unknown(tmp_path, put):
    write(tmp_path, put={"total_evaluation_time_seconds": "3.5", **put})
    cost = only_cost(board_of(tmp_path))
    assert math.isnan(cost.tokens_run)
    assert math.isnan(cost.peak_bytes)
    assert cost.seconds == 3.5
    assert "NaN" not in tables.as_csv(board_of(tmp_path))


def test_the_terminal_the_csv_and_the_frontier(tmp_path, capsys):
    for model, tokens, right in (("icl", 400, 0.9), ("pcw", 100, 0.5), ("star", 800, 0.3)):
        write(tmp_path / model, model, right=right, put=recorded(tokens, model=model))
    commands.run("leaderboard", tmp_path, "--costs", "--csv", tmp_path / "b.csv")
    said = capsys.readouterr().out
    table = [line for line in said.splitlines() if not line.startswith("written: ")]
    assert "Cost, t" in said
    assert "peak," in said
    assert max(map(len, table)) <= 80
    rows = {row["method"]: row for row in csv.DictReader((tmp_path / "b.csv").open())}
    assert float(rows["pcw"]["tokens_run"]) == 100
    assert float(rows["icl"]["seconds"]) == 6
    drawn = curves.by_tokens(board_of(tmp_path))
    assert {line["method"]: line["frontier"] for line in drawn.lines} == {
        "pcw": True,
        "icl": True,
        "star": False,
    }


def test_rows_of_several_models_are_told_apart_in_the_terminal(tmp_path, capsys):
    for model in ("org/a", "org/b"):
        put = {"config.model_args.pretrained": model, **recorded(400)}
        write(tmp_path / model, right=0.5, put=put)
    commands.run("leaderboard", tmp_path, "--costs")
    said = capsys.readouterr().out.partition("Cost, t")[2]
    assert "on org/a" in said
    assert "on org/b" in said


def test_a_row_without_the_average_is_not_drawn(tmp_path):
    for model, tasks in (("icl", "ab"), ("pcw", "ab"), ("star", "a")):
        for task in tasks:
            write(tmp_path / model, model, task=task, right=0.5, put=recorded(100))
    drawn = curves.by_tokens(board_of(tmp_path))
    assert [line["method"] for line in drawn.lines] == ["icl", "pcw"]


def test_a_page_names_costs_on_one_line(tmp_path):
    write(tmp_path, put=recorded(100))
    text = page(board_of(tmp_path), {})
    assert '<th scope="col">tokens a document</th>' in text
