"""Boards of rare kinds: in no percent, without intervals, of many rows, with marks of options."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rich.console import Console

from lm_eval_icl.leaderboard import card, figures, numbers, samples, study_table, tables
from lm_eval_icl.leaderboard.headline import names_of
from lm_eval_icl.leaderboard.opened import clean, data
from lm_eval_icl.results.board import Property
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


def test_a_heat_map_of_many_tasks_has_points_for_numbers_and_gaps(tmp_path: Path):
    tasks = [f"task {number:02}" for number in range(13)]
    write(tmp_path / "icl", "icl", task=tasks, says=[0] * 40)
    write(tmp_path / "pcw", "pcw", task=tasks)
    write(tmp_path / "star", "star", task=tasks[:2], says=[0] * 40)
    ((_, drawn),) = figures._drawn(board_of(tmp_path), 9, {"heatmap"})
    axes = drawn.figure.axes[0]
    texts = [text.get_text() for text in axes.texts]
    assert sorted(filter(None, texts)) == ["•"] * 14, "with the average"
    assert len(texts) == 14 + 2


def printed(table: Any) -> str:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(table)
    return console.export_text()


def with_random_labels(folder: Path, *arguments: Any, **keys: Any) -> None:
    """A run with random labels in its demonstrations."""
    metadata = {"labels": "random"}
    write(folder, *arguments, metadata=metadata, evil="random\n\n", says=[0] * 40, **keys)


def test_the_card_of_rows_under_one_rule_is_named_by_it(tmp_path: Path):
    """As in a study whose dev set has chosen the rule and arguments of all methods."""
    rule = {"rule": "batch", "arguments": {}, "says": [0, 1] * 20}
    study = {"chosen": ["T", "decide"], "rule": "batch"}
    put = {"config.icl": {"method": "icl", "study": study}}
    keys = {"rules": {"batch": rule}, "put": put}
    write(tmp_path / "right", **keys)
    with_random_labels(tmp_path / "random", **keys)
    ((_, drawn),) = figures._drawn(board_of(tmp_path), 9, {"card"})
    assert drawn.title.endswith("with 95% intervals, under the rule chosen on dev")


def test_what_a_method_was_not_tried_on_is_a_dash_in_its_card(tmp_path: Path):
    for method in ("icl", "pcw"):
        write(tmp_path / method, method)
    with_random_labels(tmp_path / "random", "icl")
    lines = map(str.split, printed(card.table(board_of(tmp_path).card)).splitlines())
    assert [line[0] for line in lines if numbers.DASH in line] == ["pcw"]


def table_of_a_study(folder: Path) -> str:
    """The text of a study's table with the column t."""
    board = board_of(folder)
    return printed(study_table.table(board, ["t"], board.entries, {}, "title"))


def test_the_table_of_a_study_without_percent_has_whole_numbers(tmp_path: Path):
    even = {**PERPLEXITY, "word_perplexity_stderr,none": 0.5}
    write(tmp_path, samples=False, put={**NO_PERCENT, "results.t": even})
    said = table_of_a_study(tmp_path)
    assert "12.5" in said
    assert "1250" not in said


def test_the_table_of_a_study_has_the_papers_deviation_and_the_rule(tmp_path: Path):
    rule = {"rule": "batch", "arguments": {}, "transductive": True, "says": [0, 1] * 20}
    study = {"expected": {"t": 0.875, "t ±": 0.021}}
    put = {"config.icl": {"method": "icl", "study": study}}
    write(tmp_path, rules={"batch": rule}, put=put)
    said = table_of_a_study(tmp_path)
    assert "(87.5" in said and "±2.1)" in said
    assert "decide: batch" in said


def test_an_uneven_interval_is_written_with_its_ends():
    """Percents without decimals if they have no room for them."""

    def ends(low: float, mean: float, high: float, percent: bool = True) -> str:
        estimate = SimpleNamespace(low=low, mean=mean, high=high)
        return study_table._interval(estimate, Property("", "", "", percent))

    assert ends(0.0, 0.02, 0.095) == f"0.0{numbers.DASH}9.5"
    assert ends(0.742, 0.85, 0.912) == f"74{numbers.DASH}91"
    assert ends(-math.inf, 0.5, math.inf) == "", "it is not known"
    below_zero = ends(-85.25, -80.0, -74.25, percent=False)
    assert below_zero == f"{numbers.MINUS}85.25 to {numbers.MINUS}74.25"


def test_a_long_name_on_the_page_is_cut():
    assert clean("abcdef", 4) == "abc…"
    assert clean("abcd", 4) == "abcd"
