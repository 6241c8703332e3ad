"""Boards of rare kinds: in no percent, without intervals, of many rows, with marks of options."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from lm_eval_icl.leaderboard import figures, numbers, samples, tables
from lm_eval_icl.leaderboard.headline import names_of
from lm_eval_icl.leaderboard.opened import clean, data
from tests import commands
from tests.boards import write, write_samples
from tests.results.files import board_of, samples_in

PERPLEXITY = {"word_perplexity,none": 12.5, "word_perplexity_stderr,none": "N/A", "sample_len": 40}
NO_PERCENT = {
    "results.t": PERPLEXITY,
    "higher_is_better.t": {"word_perplexity": False},
}


def test_a_board_without_percent_has_no_unit(tmp_path: Path):
    write(tmp_path, samples=False, put=NO_PERCENT)
    board = board_of(tmp_path)
    assert numbers.units(board) == ""
    assert "12.5" in str(data(board))


def test_a_value_without_an_error_has_no_interval(tmp_path: Path, capsys):
    write(tmp_path, samples=False, put=NO_PERCENT)
    commands.run("leaderboard", tmp_path)
    said = capsys.readouterr().out
    assert "12.5" in said
    assert "±" not in said


def test_a_long_text_is_cut():
    assert clean("word " * 9, 12) == "word word w…"


def test_rows_of_several_models_are_named_with_theirs(tmp_path: Path):
    for model in ("org/a", "org/b"):
        write(tmp_path, put={"config.model_args.pretrained": model})
    names = names_of(board_of(tmp_path).entries)
    assert sorted(names.values()) == ["icl on org/a", "icl on org/b"]


def test_entries_without_room_in_a_figure_are_counted(tmp_path: Path):
    canonical = {"config.model_args.canonical_order": True}
    for method in ("icl", "pcw", "star"):
        write(tmp_path / method, method, put=canonical)
    board = board_of(tmp_path)
    ((_, drawn),) = figures._drawn(board, 2, {"forest"})
    label = drawn.figure.axes[-1].get_xlabel()
    assert "1 of 3 entries are not drawn, for lack of room" in label


def test_samples_of_other_filters_are_not_those_of_the_number(tmp_path: Path):
    rule = {"rule": "batch", "arguments": {}, "transductive": True, "says": [1, 0] * 20}
    write(tmp_path, rules={"batch": rule})
    board = board_of(tmp_path)
    (raw,) = (entry for entry in board.entries if entry.rule is None)
    unit = raw.cells["t"].sets[0].answered[0]
    assert all(sample.is_right for sample in samples.samples_of(unit).values())


def test_a_document_without_a_known_answer_is_right_by_its_score(tmp_path: Path):
    file = write(tmp_path, says=[0] * 40)
    lines = samples_in(file)
    for line in lines:
        line["target"] = "neither"
    write_samples(file, "t", lines)
    (entry,) = board_of(tmp_path).entries
    shown = samples.samples_of(entry.cells["t"].sets[0].answered[0])
    assert [shown[number].is_right for number in range(4)] == [True, False] * 2
    assert shown[0].gold == "neither"


def test_cells_without_documents_have_none_in_the_page(tmp_path: Path):
    write(tmp_path / "icl", "icl", samples=False)
    kept = write(tmp_path / "pcw", "pcw")
    lost = write(tmp_path / "star", "star")
    board = board_of(tmp_path)
    samples_in(kept)
    lost.with_name(lost.name.replace("results_", "samples_t_") + "l").unlink()
    cells = samples.collected(board, None)["cells"]
    assert len(cells) == 1
    assert json.dumps(cells).count('"doc_id"') == 40


def test_the_table_of_numbers_has_the_differences_to_other_conditions(tmp_path: Path):
    write(tmp_path, right=[1, 0] * 20)
    write(tmp_path, right=[1] * 40, metadata={"demonstrations": "similar"}, evil="similar")
    board = board_of(tmp_path)
    lines = csv.DictReader(io.StringIO(tables.as_csv(board)))
    (text,) = filter(None, (line["to_conditions"] for line in lines))
    assert text.startswith("demonstrations=default: 0.5 (")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("select herding --model_args pretrained=x --tasks t --output .", "--output .: must be a"),
        (
            "select herding --model_args pretrained=x --tasks t --output f --seeds x",
            "--seeds x: must be whole numbers, 0 or more, or ranges such as 0..9.",
        ),
        (
            "train icl --model_args dtype=float32 --tasks t",
            "--model_args: has no pretrained=...",
        ),
        (
            "train icl --model_args pretrained=x --tasks t",
            "--output: give the folder of the trained checkpoint.",
        ),
    ],
)
def test_arguments_that_cannot_be_are_one_line(line: str, says: str):
    assert says in commands.refused(*line.split())


def test_a_task_of_several_columns_is_refused_with_their_names(tmp_path: Path):
    write(tmp_path, "icl")
    write(tmp_path, "pcw", doc_to_text="Read: {{text}}")
    refusal = commands.refused("samples", "icl", "--results", tmp_path, "--task", "t")
    assert "--task: must be one column of a task, and not t (" in refusal


def test_compare_says_whose_prompts_lost_demonstrations(tmp_path: Path, capsys):
    left_out = {"t": {"documents": 3, "demonstrations": 5}}
    one = write(tmp_path / "icl", "icl")
    other = write(tmp_path / "pcw", "pcw", put={"config.icl.left_out": left_out})
    commands.run("compare", one, other)
    said = " ".join(capsys.readouterr().out.split())
    assert "t: 5 demonstrations were left out of B's prompts." in said
