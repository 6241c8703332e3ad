"""Comparisons of rows: by the command, on the board, and against loops over the documents."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lm_eval_icl.errors import InputError
from lm_eval_icl.results.board import Entry
from lm_eval_icl.results.comparisons import common, compare, comparisons_of
from lm_eval_icl.results.rivals import named
from tests import commands
from tests.boards import write, write_samples
from tests.results.files import board_of, by_method, samples_in

RULE = {"rule": "batch", "arguments": {}, "transductive": True}


def run(
    folder: Path,
    method: str = "icl",
    seed: int = 0,
    *,
    how: str = "",
    evil: str = "",
    **options: Any,
) -> Path:
    """A run in a folder of its own, with demonstrations that are found in this way."""
    number = len(list(folder.iterdir())) if folder.is_dir() else 0
    put = {"date": 1e9 + number, "config.icl": {"method": method}}
    put |= options.pop("put", {})
    if how:
        options["metadata"] = {"version": 1.0, "demonstrations": how}
    return write(folder / f"{number:03}", method, seed, put=put, evil=evil or how, **options)


def compared(capsys: Any, *arguments: object) -> list[dict[str, Any]]:
    """What `compare --json` prints."""
    capsys.readouterr()
    commands.run("compare", *arguments, "--json")
    return json.loads(capsys.readouterr().out)


def scores(entry: Entry, task: str) -> dict[int, np.ndarray]:
    """Seed -> the scores of its documents."""
    sets = entry.cells[task].sets
    return {s.answered[0].run.seed: s.answered[0].answers.items for s in sets}


def mean_difference(first: Entry, second: Entry, task: str) -> float:
    """Over the seeds that both have, if there are two, or all that one has; otherwise over all."""
    mine = scores(first, task)
    theirs = scores(second, task)
    both = mine.keys() & theirs.keys()
    if len(both) > 1 or (both and 1 in (len(mine), len(theirs))):
        mine = {seed: mine[seed] for seed in both}
        theirs = {seed: theirs[seed] for seed in both}
    sums = [sum(sum(x) for x in side.values()) / len(side) for side in (mine, theirs)]
    return float(sums[0] - sums[1]) / len(next(iter(mine.values())))


def random_folder(folder: Path, number: int) -> None:
    """Runs of three methods with some of five seeds, and a rule, on two tasks."""
    rng = np.random.default_rng(number)
    for method in ("icl", "pcw", "star"):
        seeds = rng.choice(5, size=rng.integers(1, 5), replace=False)
        right = float(rng.uniform(0.2, 0.95))
        for seed in sorted(seeds.tolist()):
            rules = {"batch": {**RULE, "says": rng.integers(2, size=30).tolist()}}
            gold = [0] * 30
            says = (rng.random(30) > right).astype(int).tolist()
            run(folder, method, seed, task="a", n=30, gold=gold, says=says, rules=rules)
            run(folder, method, seed, task="b", n=20, says=rng.integers(2, size=20).tolist())


@pytest.mark.parametrize("number", range(6))
def test_the_board_and_the_command_agree(tmp_path: Path, capsys: Any, number: int):
    """Every difference on the board is the command's "on the board", and the loops' mean."""
    random_folder(tmp_path, number)
    board = board_of(tmp_path)
    seen = 0
    for entry in board.entries:
        base = board.named(board.baseline.get(entry.name))
        if base is None:
            continue
        lines = compared(capsys, entry.name, base.name, "--results", tmp_path)
        by_column = {line["column"]: line for line in lines}
        for column in board.columns:
            if column.name not in entry.cells or column.name not in base.cells:
                continue
            difference = entry.cells[column.name].difference
            line = by_column[column.name]
            assert line["board"] == {
                "difference": difference.mean,
                "low": difference.low,
                "high": difference.high,
                "p": difference.p,
                "comparisons": entry.cells[column.name].comparisons,
                "verdict": column.judged(difference),
            }
            assert line["comparisons"] == 1
            assert line["low"] >= difference.low - 1e-12
            assert line["high"] <= difference.high + 1e-12
            assert (
                line["p"] * difference.comparisons == pytest.approx(difference.p)
                or difference.p == 1
            )
            parts = [mean_difference(entry, base, task) for task in column.weights]
            assert difference.mean == pytest.approx(np.mean(parts))
            seen += 1
    assert seen >= 4


def test_the_family_is_all_pairs_of_rows_and_one_answer(tmp_path: Path):
    random_folder(tmp_path, 0)
    board = board_of(tmp_path)
    for column in board.columns:
        rows = [entry.name for entry in board.entries if column.name in entry.cells]
        pairs = len(list(itertools.combinations([*rows, "always one answer"], 2)))
        assert comparisons_of(board.entries, column) == pairs
        assert {board.named(name).cells[column.name].comparisons for name in rows} == {pairs}


def test_no_two_sentences_of_a_board_contradict_each_other(tmp_path: Path):
    """What is not distinguishable from the best is not worse than it anywhere."""
    for number in range(4):
        random_folder(tmp_path / str(number), number)
        for entry in (board := board_of(tmp_path / str(number))).entries:
            for column in board.columns:
                cell = entry.cells.get(column.name)
                if cell is not None and cell.is_best and cell.difference is not None:
                    base = board.named(board.baseline[entry.name]).cells[column.name]
                    assert (column.judged(cell.difference) == "better") == bool(base.is_worse)


def similar_and_stratified(folder: Path, better: int = 36) -> None:
    gold = [0, 1] * 20
    for seed in range(3):
        run(folder, "icl", seed, how="stratified", says=[seed % 2] * 30 + gold[30:])
    run(folder, "icl", 0, how="similar:pool=50", says=gold[:better] + [0] * (40 - better))


def test_retrieval_is_compared_with_drawn_sets(tmp_path: Path, capsys: Any):
    """Drawn sets are a sample of one side; the other has no chance in it."""
    similar_and_stratified(tmp_path)
    (line,) = compared(capsys, "--by", "demonstrations", "--results", tmp_path)
    assert "similar" in line["a"]
    assert "stratified" in line["b"]
    assert line["difference"] == pytest.approx(line["mean_a"] - line["mean_b"])
    assert line["over"] == "sets"
    assert line["documents"] == 40
    assert line["sets"] == 3
    board = board_of(tmp_path)
    similar = named(board.entries, "icl, demonstrations=similar:pool=50")
    (words, difference) = similar.cells["t"].conditions[0]
    assert words == "demonstrations=stratified"
    assert difference.mean == line["difference"]
    assert similar.name not in board.baseline, "no row has the same conditions"
    assert "demonstrations=stratified" in " ".join(board.summary)


def test_what_an_estimate_is_over(tmp_path: Path):
    for seed in range(3):
        run(tmp_path, "icl", seed, says=[0] * 40)
        run(tmp_path, "star", seed + 5, says=[0, 1] * 20)
    run(tmp_path, "pcw", 1, says=[1] * 40)
    run(tmp_path, "nope", 9, says=[1] * 40)
    cells = {entry.method: entry.cells["t"] for entry in board_of(tmp_path).entries}
    scopes = {m: cell.difference.scope for m, cell in cells.items() if cell.difference is not None}
    assert scopes == {"star": "other sets", "pcw": "this set", "nope": "one side's set"}
    assert "other sets" in cells["star"].marks
    assert "Compared on 1 of" not in " ".join(cells["pcw"].marks)
    assert {m: cell.estimate.scope for m, cell in cells.items()} == {
        "icl": "sets",
        "star": "sets",
        "pcw": "this set",
        "nope": "this set",
    }


def test_demonstrations_of_each_document_are_a_part_of_it(tmp_path: Path):
    """As lm-eval's own sampler draws them: one run has no set that it is conditional on."""
    file = run(tmp_path, "icl", says=[0] * 40)
    samples = samples_in(file)
    for number, sample in enumerate(samples):
        for request in sample["arguments"].values():
            request["arg_0"] = f"Text: its own {number}\nLabel: good\n\n{request['arg_0']}"
    write_samples(file, "t", samples)
    assert board_of(tmp_path).entries[0].cells["t"].estimate.scope == "documents"


def test_other_documents_are_not_compared(tmp_path: Path):
    first = run(tmp_path / "a", "icl", says=[0] * 40)
    second = run(tmp_path / "b", "pcw", says=[0] * 40, first=7)
    message = commands.refused("compare", first, second)
    assert "did not answer the same documents" in message


def test_another_scale_of_a_metric_changes_no_difference_of_others(tmp_path: Path):
    """A file of a stranger may have the same metric in percent."""
    differences = []
    for method, scale in (("icl", 1), ("pcw", 1), ("star", 100)):
        file = run(
            tmp_path, method, right=0.6, metric_list=[{"metric": "f1", "aggregation": "mean"}]
        )
        results = json.loads(file.read_text())
        of_task = results["results"]["t"]
        of_task["f1,none"] = scale * of_task.pop("acc,none")
        file.write_text(json.dumps(results))
        samples = samples_in(file)
        for sample in samples:
            sample["f1"] = scale * sample.pop("acc")
            sample["metrics"] = ["f1"]
        write_samples(file, "t", samples)
        if method != "icl":
            board = board_of(tmp_path)
            rows = [named(board.entries, name).cells for name in ("icl", "pcw")]
            differences.append(compare(*rows, board.columns[0]))
    first, second = differences
    assert not board.columns[0].percent
    assert first.interval == second.interval


def said_of(capsys: Any, *arguments: object) -> str:
    """What `compare` says that is no result, on one line."""
    capsys.readouterr()
    commands.run("compare", *arguments)
    return " ".join(capsys.readouterr().err.split())


def test_what_is_not_compared_is_said_and_fails_a_threshold(tmp_path: Path, capsys: Any):
    for method, first in (("icl", 0), ("pcw", 7)):
        folder = tmp_path / method
        run(folder, method, task="t", put={"date": 5.0})
        run(folder, method, task="u", first=first, put={"date": 5.0})
    pair = [tmp_path / "pcw", tmp_path / "icl"]
    by = ["--by", "method", "--results", tmp_path]
    for arguments in (pair, by):
        assert "u: pcw and icl did not answer the same documents" in said_of(capsys, *arguments)
        refusal = commands.refused("compare", *arguments, "--fail-below", -1)
        assert "not compared: average, u" in refusal
        commands.run("compare", *arguments, "--fail-below", -1, "--tasks", "t")
    message = commands.refused("compare", *by, "--tasks", "u")
    assert "rows that differ only in this did not answer the same documents" in message
    for samples in tmp_path.glob("icl/*/samples_*"):
        samples.unlink()
    message = commands.refused("compare", *pair)
    assert message.endswith("are not compared: icl has no samples (--log_samples).")


def test_files_that_are_left_out_are_named(tmp_path: Path, capsys: Any):
    for method in ("icl", "pcw"):
        run(tmp_path, method)
        damaged = run(tmp_path, method, 1)
    damaged.write_text('{"half')
    assert f"left out: {damaged}" in said_of(capsys, "pcw", "icl", "--results", tmp_path)


def test_another_template_is_said(tmp_path: Path, capsys: Any):
    files = [run(tmp_path, doc_to_text=text) for text in ("{{text}}", "Q: {{text}}")]
    assert "t: icl and icl were asked differently: template." in said_of(capsys, *files)
    alike = run(tmp_path, "pcw", doc_to_text="{{text}}")
    assert "asked" not in said_of(capsys, files[0], alike)


def test_labels_change_texts_and_not_rows(tmp_path: Path):
    """Runs with other labels of the same seeds have the same sets, whose chance they share."""
    for seed in range(3):
        right = 0.9 - 0.3 * seed
        run(tmp_path, "icl", seed, right=right, metadata={"version": 1.0})
        labels = {"version": 1.0, "labels": "random"}
        run(tmp_path, "icl", seed, right=right, metadata=labels, evil="x")
    board = board_of(tmp_path)
    cell = next(entry.cells["t"] for entry in board.entries if entry.conditions)
    ((words, difference),) = cell.conditions
    assert words == "labels=default"
    assert difference.scope == "sets"
    assert difference.spread.sets == pytest.approx(0, abs=1e-12)


def test_sets_of_a_file_that_changed_are_not_the_rows_of_other_labels(tmp_path: Path):
    """Which of the two sets has the rows of the other labels' set is not known."""
    for seed in range(3):
        metadata = {"version": 1.0, "demonstrations": "sets.json"}
        run(tmp_path, "icl", seed, metadata=metadata, evil="old")
        labels = {**metadata, "labels": "random"}
        run(tmp_path, "icl", seed, metadata=labels, evil="x")
    run(tmp_path, "icl", 2, metadata=metadata, evil="new")
    cells = [entry.cells["t"] for entry in board_of(tmp_path).entries]
    (changed,) = (cell for cell in cells if len(cell.sets) == 4)
    (other,) = (cell for cell in cells if len(cell.sets) == 3)
    pairs = common(changed.sets, other.sets)
    assert [mine.answered[0].run.seed for mine, _ in pairs] == [0, 1]
    mark = "A seed has several sets of demonstrations: what it draws from has changed."
    assert mark in changed.marks
    assert not any(mark.startswith("A seed") for mark in other.marks)


def test_the_command_in_words(tmp_path: Path, capsys: Any):
    similar_and_stratified(tmp_path)
    commands.run("compare", "--by", "demonstrations", "--results", tmp_path, "--margin", 1)
    said = " ".join(capsys.readouterr().out.split())
    assert "one comparison by itself, not adjusted" in said
    assert "over documents and sets of demonstrations" in said
    assert "t on the board, as one of all 3 pairs of rows" in said


def test_verdicts_of_the_command(tmp_path: Path, capsys: Any):
    gold = [0, 1] * 200
    same = run(tmp_path / "a", "icl", says=[*gold[:398], 0, 0], n=400)
    other = run(tmp_path / "b", "pcw", says=gold, n=400)
    worse = run(tmp_path / "c", "star", says=[0] * 400, n=400)

    def verdict(first: Path, second: Path, *more: object) -> dict[str, Any]:
        return compared(capsys, first, second, *more)[0]

    assert verdict(same, other)["verdict"] == "undecided"
    assert verdict(same, other)["documents_that_decide"] > 400
    assert verdict(same, other, "--margin", 2)["verdict"] == "equivalent"
    assert verdict(worse, other, "--margin", 2)["verdict"] == "worse"
    commands.run("compare", other, worse, "--fail-below", -1)
    with pytest.raises(SystemExit, match="--fail-below -1: on t, star minus pcw is"):
        commands.run("compare", worse, other, "--fail-below", -1)
    commands.run("compare", worse, other, "--fail-below", -60)


def test_formats_are_compared_though_they_are_no_rows(tmp_path: Path, capsys: Any):
    for seed in range(2):
        for number, right in ((0, [1] * 40), (1, [1, 0] * 20)):
            metadata = {"version": 1.0, "format": number} if number else {"version": 1.0}
            run(tmp_path, "icl", seed, right=right, metadata=metadata)
    (line,) = compared(capsys, "--by", "format", "--results", tmp_path)
    assert line["difference"] == -0.5
    assert line["over"] == "sets"


def test_a_study_s_models_are_compared_before_and_after_training(tmp_path: Path, capsys: Any):
    right = [1, 0] * 20
    for training in (None, "hr_to_lr"):
        study = {"model": "org/model", "training": training}
        put = {"config.icl": {"method": "icl", "study": study}}
        put["provenance"] = {"weights": f"weights after {training}"}
        run(tmp_path, right=right, put=put)
        right = [1] * 40
    (line,) = compared(capsys, "--by", "training", "--results", tmp_path)
    assert line["difference"] == 0.5
    assert line["checkpoint_a"] == "org/model (trained)"
    assert line["checkpoint_b"] == "org/model"


def test_names_are_those_that_tables_print(tmp_path: Path):
    random_folder(tmp_path, 0)
    board = board_of(tmp_path)
    for entry in board.entries:
        on_model = f"{entry.label} on {entry.on}"
        for name in (entry.name, entry.label, on_model, f"{on_model} ({entry.name})"):
            assert named(board.entries, name) is entry
        lines = "\n".join([entry.label, *entry.reads])
        assert named(board.entries, lines) is entry, "as a study's table breaks it"
    with pytest.raises(InputError, match=r"no such entry\. Did you mean pcw, decide: batch on"):
        named(board.entries, "pcw decide: bach")


def test_the_baseline_has_the_same_conditions(tmp_path: Path):
    """Of several rows of its method, it is the one without arguments; without one there is none."""
    for shots in (2, 8):
        run(tmp_path, "icl", shots=shots, says=[0] * 40)
        run(tmp_path, "pcw", shots=shots, says=[0, 1] * 20)
    run(tmp_path, "icl", shots=8, put={"config.icl": {"method": "icl", "x": 1}, "date": 7.0})
    run(tmp_path, "star", shots=4)
    board = board_of(tmp_path)
    bases = {
        entry.label: board.named(board.baseline[entry.name]).label
        for entry in board.entries
        if entry.name in board.baseline
    }
    assert bases["pcw, 2 shots"] == "icl, 2 shots"
    assert "star, 4 shots" not in bases


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["icl"], "give two files, folders or rows"),
        (["--by", "shots"], "--by: give --results"),
        (["pcw", "pcw", "--results", "{}"], "are the same"),
        (["--by", "demonstration", "--results", "{}"], "did you mean 'demonstrations'"),
        (["icl", "pcw", "--results", "{}", "--margin", "0"], "must be above 0"),
        (["icl", "pcw", "--results", "{}", "--fail-below", "nan"], "nan: must be a number"),
        (["{}", "{}"], "holds 3 rows"),
    ],
)
def test_refusals(tmp_path: Path, arguments: Sequence[str], says: str):
    similar_and_stratified(tmp_path)
    run(tmp_path, "pcw", how="stratified")
    arguments = [argument.format(tmp_path) for argument in arguments]
    assert says in commands.refused("compare", *arguments)


def test_equal_answers_are_equivalent_within_a_margin(tmp_path: Path, capsys: Any):
    for model in ("icl", "pcw"):
        for seed in range(3):
            write(tmp_path / model, model, seed, says=[0, 1] * 20)
    commands.run("compare", "icl", "pcw", "--results", tmp_path, "--margin", "50")
    said = " ".join(capsys.readouterr().out.split())
    assert "equivalent within 50 points" in said


def test_a_task_that_one_run_lacks_is_not_passed(tmp_path: Path):
    new = write(tmp_path / "new", says=[0, 1] * 20)
    old = write(tmp_path / "old", task=["t", "u"], says=[0, 1] * 20)
    said = commands.refused("compare", new, old, "--fail-below", -99)
    assert "not compared: average, u. Choose --tasks" in said
    commands.run("compare", new, old, "--fail-below", -99, "--tasks", "t")


def test_rows_in_other_formats_are_not_compared(tmp_path: Path):
    write(tmp_path, "icl", says=[0] * 40)
    write(tmp_path, "pcw", metadata={"format": 3})
    cell = by_method(board_of(tmp_path))["pcw"].cells["t"]
    assert cell.difference is None
    assert "not compared" in cell.marks
    said = commands.refused("compare", "icl", "pcw", "--results", tmp_path)
    assert "did not answer the same documents in the same format" in said


def test_rows_without_a_task_in_common(tmp_path: Path):
    write(tmp_path / "icl", "icl", task="t")
    write(tmp_path / "pcw", "pcw", task="u")
    said = commands.refused("compare", "icl", "pcw", "--results", tmp_path)
    assert "have no task in common" in said


def test_averages_over_other_tasks_are_not_compared(tmp_path: Path, capsys: Any):
    write(tmp_path / "a", "icl", task=["t", "u"])
    write(tmp_path / "b", "pcw", task=["t", "v"])
    commands.run("compare", tmp_path / "a", tmp_path / "b")
    said = capsys.readouterr().out
    assert "t:" in said
    assert "average" not in said
