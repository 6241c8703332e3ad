"""Runs that differ in a setting are never averaged, and runs that do not differ are one row.

What counts once.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

from lm_eval_icl.results.board import Board
from lm_eval_icl.results.read import read
from lm_eval_icl.results.records import Run
from tests.boards import samples_of, write, write_samples
from tests.results.files import board_of, samples_in
from tests.results.test_rows_and_columns import HALF, ICL, MORE, MOST, RULES, study

TREC = "trec"
WEIGHTS = "provenance.weights"


def one(folder: Path, name: str = "icl", right: Iterable[int] | None = HALF, **keys: Any) -> Path:
    """A run of `icl` in a folder and at a time of its own."""
    number = len(list(folder.glob("*/results*")))
    put = {"date": 1e9 + number}
    if name == "icl":
        put["config.icl"] = ICL
    put |= keys.pop("put", {})
    keys.setdefault("task", TREC)
    return write(folder / f"{number:03}", name, right=right and list(right), put=put, **keys)


def way(demonstrations: str) -> dict[str, Any]:
    return {"metadata": {"version": 1.0, "demonstrations": demonstrations}}


def means(board: Board) -> list[float]:
    """The means of the only column."""
    (column,) = board.columns
    return sorted(round(100 * entry.cells[column.name].estimate.mean, 1) for entry in board.entries)


def marks(board: Board) -> tuple[str, ...]:
    """The marks of the only cell."""
    (entry,) = board.entries
    about_sample = {"one label", "few documents", "few seeds", "one set"}
    return tuple(mark for mark in entry.cells[TREC].marks if mark not in about_sample)


# Settings.


@pytest.mark.parametrize("other", ["similar", "random"])
@pytest.mark.parametrize("method", ["icl", "pcw", "hf"])
def test_demonstrations_that_no_file_names_are_the_tasks_own(tmp_path, method, other):
    one(tmp_path, method, HALF)
    one(tmp_path, method, MORE, **way(other))
    board = board_of(tmp_path)
    assert means(board) == [50.0, 75.0]
    labels = {entry.label.replace("=drawn by", " drawn by") for entry in board.entries}
    drawn = f"{method}, demonstrations drawn by the task"
    assert labels == {drawn, f"{method}, demonstrations={other}"}
    one(tmp_path, method, MOST, **way("first"))
    assert means(board_of(tmp_path)) == [50.0, 75.0, 80.0]


THE_SAME = yaml.safe_load("""
bm25:
  - {metadata: {version: 1.0, demonstrations: similar}}
  - {metadata: {version: 1.0, demonstrations: "similar:by=bm25"}}
the task's own way:
  - {task: icl_trec}
  - {task: icl_trec, metadata: {version: 1.0, demonstrations: stratified}}
sampler:
  - {}
  - {fewshot_config: {sampler: default}}
shots:
  - {}
  - {num_fewshot: 4}
backend:
  - {}
  - {put: {config.model_args.backend: causal}}
tokenizer:
  - {}
  - {put: {config.model_args.use_fast_tokenizer: true}}
""")


@pytest.mark.parametrize("settings", THE_SAME.values(), ids=THE_SAME)
def test_a_default_is_the_same_value_written_out(tmp_path, settings):
    first, second = settings
    one(tmp_path, seed=0, right=HALF, **first)
    one(tmp_path, seed=1, right=MORE, **second)
    board = board_of(tmp_path)
    assert len(board.entries) == 1
    assert means(board) == [62.5]


def test_false_is_a_value(tmp_path):
    """lm-eval's default of `add_bos_token` is the tokenizer's."""
    one(tmp_path, "hf", HALF)
    one(tmp_path, "hf", MORE, put={"config.model_args.add_bos_token": False})
    assert means(board_of(tmp_path)) == [50.0, 75.0]


def test_labels_are_a_setting(tmp_path):
    one(tmp_path, right=HALF)
    one(tmp_path, right=MORE, metadata={"version": 1.0, "labels": "random"})
    assert means(board_of(tmp_path)) == [50.0, 75.0]


# Facts.


def test_a_fact_that_is_not_recorded_is_never_merged_with_a_known_one(tmp_path):
    one(tmp_path, right=HALF)
    one(tmp_path, right=MORE, put={WEIGHTS: "a" * 32})
    board = board_of(tmp_path)
    assert means(board) == [50.0, 75.0]
    assert {entry.details for entry in board.entries} == {"weights aaaaaa", "weights not recorded"}


def test_the_same_weights_in_two_folders_are_one_model(tmp_path):
    for seed, folder in enumerate(("/here/model", "/there/copy")):
        facts = {"config.model_args.pretrained": folder, WEIGHTS: "a" * 32}
        one(tmp_path, right=HALF, seed=seed, put=facts)
    board = board_of(tmp_path)
    assert len(board.entries) == 1
    assert board.entries[0].cells[TREC].estimate.sets == 2


def test_other_weights_in_one_folder_are_another_model(tmp_path):
    for right, weights in ((HALF, "a" * 32), (MORE, "b" * 32)):
        one(tmp_path, "hf", right, put={WEIGHTS: weights})
        one(tmp_path, "icl", right, put={WEIGHTS: weights})
    board = board_of(tmp_path)
    assert means(board) == [50.0, 50.0, 75.0, 75.0]
    assert {difference_to_baseline(board, entry) for entry in board.entries} == {None, 0.0}


def difference_to_baseline(board, entry):
    difference = entry.cells[TREC].difference
    return None if difference is None else difference.mean


def test_a_baseline_without_a_digest_is_found_by_the_name_of_its_checkpoint(tmp_path):
    one(tmp_path, "hf", MORE)
    one(tmp_path, "icl", HALF, put={WEIGHTS: "a" * 32})
    board = board_of(tmp_path)
    assert len(board.entries) == 2
    assert len(board.baseline) == 1


# A cell of any folder.


def ten_runs(folder: Path) -> list[Path]:
    rules = {"batch": {**RULES["batch"], "says": [0] * 40}}
    wrong = [1 - right for right in HALF]
    read_again = {"provenance.responses": {"computed": 0, "read": 40}}
    first = one(folder, right=HALF)
    others = [
        one(folder, right=MORE, **way("similar")),
        one(folder, right=MOST, **way("random")),
        one(folder, right=HALF, num_fewshot=4, put={"date": 2e9}),
        one(folder, right=None, says=wrong, gold=[0] * 40, rules=rules),
        one(folder, right=MORE, metadata={"version": 1.0, "labels": "random"}),
        one(folder, right=MOST, put={"config.model_dtype": "torch.float16"}),
        one(folder, right=[0] * 30 + [1] * 10, put={WEIGHTS: "b" * 32}),
        one(folder, right=HALF, put=read_again),
    ]
    copy = folder / "copy" / first.name
    copy.parent.mkdir()
    shutil.copy(first, copy)
    shutil.copy(samples_of(first, TREC), copy.parent)
    return [first, *others, copy]


def identity(run: Run, rule: Any) -> tuple[Any, ...]:
    """What tells cells apart, without the code under test."""
    task = run.results["configs"][TREC]
    metadata = task.get("metadata", {})
    return (
        metadata.get("demonstrations"),
        metadata.get("labels"),
        run.results["config"].get("model_dtype"),
        run.results.get("provenance", {}).get("weights"),
        None if rule is None else rule.name,
    )


@pytest.mark.parametrize("sizes", [(1, 2, 9, 10), pytest.param((3, 8), marks=pytest.mark.slow)])
def test_a_cell_does_not_depend_on_what_else_is_in_the_folder(tmp_path, sizes):
    files = ten_runs(tmp_path)
    numbers: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    for size in sizes:
        for subset in itertools.combinations(files, size):
            for entry in board_of(*subset).entries:
                cell = entry.cells[TREC]
                kinds = set()
                for prompt_set in cell.sets:
                    kinds |= {identity(unit.run, unit.result.rule) for unit in prompt_set.answered}
                assert len(kinds) == 1, "a cell holds runs that differ"
                estimate = cell.estimate
                values = (estimate.mean, estimate.low, estimate.high, estimate.sets)
                assert numbers.setdefault(kinds.pop(), values) == values
    assert len(numbers) == 7
    means_of_cells = {round(100 * mean, 1) for mean, *_ in numbers.values()}
    assert means_of_cells == {25.0, 50.0, 75.0, 80.0, 100.0}


def folder_of_f1(folder: Path, values: dict[str, float]) -> Path:
    """A run of each method with this F1, which has no samples."""
    for method, value in values.items():
        file = one(folder, method, samples=False)
        results = json.loads(file.read_text())
        results["results"][TREC] = {"f1,none": value, "f1_stderr,none": 0.05, "sample_len": 40}
        file.write_text(json.dumps(results))
    return folder


def test_the_range_of_a_metric_in_another_file_changes_no_interval(tmp_path):
    """A stranger's F1 in percent, on the same task."""
    folders = [
        folder_of_f1(tmp_path / "alone", {"icl": 0.98}),
        folder_of_f1(tmp_path / "both", {"icl": 0.98, "hf": 37.5}),
    ]
    intervals = []
    for folder in folders:
        (entry,) = (entry for entry in board_of(folder).entries if entry.method == "icl")
        intervals.append(entry.cells[TREC].estimate.interval)
    assert intervals[0] == intervals[1]
    assert intervals[0][1] == 1.0


# What counts once.


def test_a_second_computed_run_confirms(tmp_path):
    one(tmp_path)
    one(tmp_path)
    assert marks(board_of(tmp_path)) == ("confirmed",)


@pytest.mark.parametrize(
    "facts",
    [
        {"provenance.responses": {"computed": 0, "read": 80}},
        {"provenance.responses": {"computed": 70, "read": 10}},
        {"config.use_cache": "/some/cache"},
    ],
)
def test_a_run_that_read_its_answers_confirms_nothing(tmp_path, facts):
    one(tmp_path)
    one(tmp_path, put=facts)
    board = board_of(tmp_path)
    assert "confirmed" not in marks(board)
    assert marks(board)
    assert board.entries[0].cells[TREC].estimate.sets == 1


def test_equal_scores_with_other_answers_do_not_confirm(tmp_path):
    gold = [0, 1] * 20
    for says in ([0] * 40, [0] * 20 + [1] * 20):
        one(tmp_path, right=None, says=says, gold=gold)
    first, second = read([tmp_path], quiet=True)[0]
    assert first.tasks[TREC].value == second.tasks[TREC].value
    assert "confirmed" not in marks(board_of(tmp_path))
    assert "differs" in marks(board_of(tmp_path))


@pytest.mark.parametrize("logprob, mark", [("-1.00001", "confirmed"), ("-1.01", "differs")])
def test_log_likelihoods_confirm_up_to_rounding(tmp_path, logprob, mark):
    one(tmp_path, right=[1] * 40)
    file = one(tmp_path, right=[1] * 40)
    samples = samples_in(file, TREC)
    for sample in samples:
        sample["filtered_resps"] = [[logprob, "False"], ["-2.0", "False"]]
    write_samples(file, TREC, samples)
    assert mark in marks(board_of(tmp_path))


@pytest.mark.parametrize(
    "responses, mark",
    [
        ([["-1.0", "False"], ["-2.0", "False"], ["-3.0", "False"]], "differs"),
        ([["-2.0", "False"], ["-1.0", "False"]], "differs"),
        ([], "does not record that it computed"),
    ],
    ids=["options", "answers", "unknown"],
)
def test_other_log_likelihoods_do_not_confirm(tmp_path, responses, mark):
    """Whatever the scores in the samples."""
    one(tmp_path, right=[1] * 40)
    file = one(tmp_path, right=[1] * 40)
    samples = samples_in(file, TREC)
    for sample in samples:
        sample["filtered_resps"] = responses
    write_samples(file, TREC, samples)
    assert mark in " ".join(marks(board_of(tmp_path)))


def test_equal_cells_of_a_study_confirm_nothing(tmp_path):
    facts = {**ICL, "study": study(demonstrations="similar")}
    for seed in (0, 0):
        one(tmp_path, seed=seed, put={"config.icl": facts})
    assert marks(board_of(tmp_path)) == ("Cells of one study with the same prompts count once.",)
    other = {**ICL, "study": study(demonstrations="similar", id="another")}
    one(tmp_path, put={"config.icl": other})
    assert "confirmed" in marks(board_of(tmp_path))


def test_a_copy_says_what_it_is(tmp_path):
    file = one(tmp_path)
    results = json.loads(file.read_text())
    copy = tmp_path / "copy" / file.name
    copy.parent.mkdir()
    copy.write_text(json.dumps({**results, "pretty_env_info": "another machine"}))
    shutil.copy(samples_of(file, TREC), copy.parent)
    assert marks(board_of(tmp_path)) == ("A copy of a run counts once.",)


# Sets of demonstrations.


def test_a_set_of_demonstrations_is_its_rows_before_any_cut(tmp_path):
    """In another order, MetaICL's cut shortens another demonstration."""
    for order in (0, 1):
        facts = {**ICL, "study": study(order=order)}
        put = {"config.icl": facts, f"provenance.demonstrations.{TREC}": "a set"}
        file = one(tmp_path, order=order, right=HALF, put=put)
        if order:
            samples = samples_in(file, TREC)
            for sample in samples:
                for arguments in sample["arguments"].values():
                    arguments["arg_0"] = arguments["arg_0"][9:]
            write_samples(file, TREC, samples)
    (entry,) = board_of(tmp_path).entries
    cell = entry.cells[TREC]
    assert len(cell.sets) == 1
    assert cell.sensitivity.mean == 0.0


def test_a_group_has_a_sensitivity_over_the_tasks_that_have_one(tmp_path):
    for task, orders in (("a", (0, 1)), ("b", (0,))):
        for order in orders:
            facts = {**ICL, "study": study(order=order)}
            right = MORE if order else HALF
            one(tmp_path, task=task, order=order, right=right, put={"config.icl": facts})
    board = board_of(tmp_path)
    cells = board.entries[0].cells
    assert cells["average"].sensitivity.mean == cells["a"].sensitivity.mean > 0
    assert "The order sensitivity is over 1 of 2 tasks." in cells["average"].marks
