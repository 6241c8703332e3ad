"""The documents behind a number: in the terminal and in the page."""

from __future__ import annotations

import json
import re

import pytest

from lm_eval_icl.leaderboard import samples
from tests import commands
from tests.boards import write
from tests.results.files import board_of

HOSTILE = "\x1b[31m\u202e"


@pytest.fixture
def folder(tmp_path):
    """Two rows of two runs: icl is wrong on documents 2 and 3, pcw on documents 3 and 4."""
    gold = [place % 2 for place in range(6)]
    for model, wrong in (("icl", (2, 3)), ("pcw", (3, 4))):
        says = [1 - gold[i] if i in wrong else gold[i] for i in range(6)]
        for seed in range(2):
            write(tmp_path / "r" / model, model, seed, n=6, says=says, evil=HOSTILE)
    return tmp_path / "r"


def show(folder, capsys, *arguments):
    commands.run("samples", *arguments, "--results", folder, "--task", "t")
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 80
    return said


def documents(said):
    return [int(number) for number in re.findall(r"^document (\d+)", said, re.MULTILINE)]


def test_two_rows_are_shown_where_they_differ(folder, capsys):
    said = show(folder, capsys, "icl", "pcw")
    assert documents(said) == [2, 4]
    assert "B: pcw on org/model (seed 0, order 0: one of 2 runs)" in said
    assert "2 of 6 documents" in said
    assert "A answers bad: wrong" in said
    assert "B answers good: right" in said
    assert "the prompt of both" in said
    assert "Text: document 2" in said
    assert "demonstration 0 a" not in said
    assert "\x1b" not in said


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["--right", "A", "--wrong", "B"], [4]),
        (["--right", "B", "--wrong", "A"], [2]),
        (["--wrong", "A"], [2, 3]),
        (["--document", "5"], [5]),
        (["--right", "A", "--most", "1"], [0]),
    ],
)
def test_filters(folder, capsys, arguments, expected):
    assert documents(show(folder, capsys, "icl", "pcw", *arguments)) == expected


def test_one_row_with_whole_prompts(folder, capsys):
    said = show(folder, capsys, "icl", "--full", "--most", "1", "--seed", "1")
    assert "A: icl on org/model (seed 1, order 0: one of 2 runs)" in said
    assert documents(said) == [0]
    assert "demonstration 1 a" in said
    assert "5 more" in said
    row = next(line for line in said.splitlines() if line.startswith("good"))
    assert "\N{MINUS SIGN}1 \N{BLACK LEFT-POINTING TRIANGLE}" in row


def test_refusals(folder, tmp_path, capsys):
    commands.run("collect", folder, "--output", tmp_path / "c")
    shared = ["--results", tmp_path / "c", "--task", "t"]
    assert "have none, since published prompts" in commands.refused("samples", "icl", *shared)
    asked = ["samples", "icl", "--results", folder, "--task", "t"]
    assert "no second entry" in commands.refused(*asked, "--wrong", "B")
    assert "have these results" in commands.refused(*asked, "--seed", "7")
    assert "--most -1: must be 0 or more" in commands.refused(*asked, "--most", "-1")
    groups = ["samples", "icl", "--results", folder, "--task", "nothing"]
    assert "no result of 'nothing'" in commands.refused(*groups)
    assert "no such file" in commands.refused("samples", "nowhere", "--task", "t")
    without = write(tmp_path / "a", samples=False)
    assert "there are no samples" in commands.refused("samples", without, "--task", "t")
    others = write(tmp_path / "b", first=7, n=6)
    message = commands.refused("samples", folder / "icl", others, "--task", "t")
    assert "did not answer the same documents" in message


def test_the_page_has_samples_within_its_budget(folder, monkeypatch):
    board = board_of(folder)
    content = samples.collected(board, ["t"])
    assert content["left_out"] == 0
    assert set(content["cells"]) == {"0/0", "1/0"}
    [first, *_] = content["cells"]["0/0"]["documents"]
    assert first["demonstrations"].startswith(r"\x1b[31m\u202eText")
    assert first["is_right"]
    assert [*first["values"]] == [-1.0, -2.0]
    assert [*first["options"]] == ["good", "bad"]
    monkeypatch.setattr(samples, "BUDGET", 2500)
    cut = samples.collected(board, None)
    assert cut["left_out"] == 1
    assert 1000 < len(json.dumps(cut)) < 2700
    assert samples.collected(board, ["u"])["cells"] == {}


def test_two_files_whose_prompts_differ_stand_side_by_side(tmp_path, capsys):
    for model in ("icl", "pcw"):
        says = [int(model == "icl")] * 6
        write(tmp_path / model, model, n=6, says=says, evil=f"of {model} ")
    commands.run("samples", tmp_path / "icl", tmp_path / "pcw", "--task", "t", "--full")
    said = capsys.readouterr().out
    assert "prompt of A" in said
    assert "prompt of B" in said
