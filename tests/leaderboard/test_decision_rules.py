"""Decision rules on a board: entries of their own, with marks, beside the values of the same runs without a rule."""

from __future__ import annotations

import csv
import io
import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lm_eval_icl.leaderboard import figures, tables
from lm_eval_icl.leaderboard.page import data, page
from lm_eval_icl.results import documents, statistics
from lm_eval_icl.results import read as reading
from lm_eval_icl.results.board import Board, Entry
from lm_eval_icl.results.build import build, named
from lm_eval_icl.results.collect import KEY, collect
from lm_eval_icl.results.read import read
from tests import boards
from tests.boards import samples_of, write

N = 60
GOLD = [i % 3 % 2 for i in range(N)]
# What `harness.deciding` records of each, as far as the board reads it.
RULES = {
    "batch": {"arguments": {"by": "division", "of": "task", "m": 128}, "transductive": True},
    "contextual": {"arguments": {"texts": ["N/A", "", "[MASK]"]}, "transductive": False},
    "batch:m=64:of=pool": {"arguments": {"by": "division", "of": "pool", "m": 64}, "transductive": False},
    "domain": {"arguments": {"n": 20, "of": "pool"}, "transductive": False, "corpus": 300},
    "knn": {"arguments": {"k": 3}, "transductive": False, "labels": 2016},
    "domain:of=test": {"arguments": {"n": 20, "of": "test"}, "transductive": True},
}
MARKS = {
    "batch": "transductive",
    "contextual": "",
    "batch:m=64:of=pool": "pool: 64",
    "domain:of=test": "transductive",
    "domain": "pool: 300",
    "knn": "labels: 2016",
}
METHODS = ("icl", "invicl", "pcw")


def said(*key: object, right: float) -> list[int]:
    """The option that is predicted for each document."""
    is_right = boards.bits(*key, right=right, n=N)
    return [gold if hit else 1 - gold for gold, hit in zip(GOLD, is_right, strict=True)]


def right_of(method: str, rule: str) -> float:
    return 0.5 + 0.08 * METHODS.index(method) + 0.06 * ["", *RULES].index(rule)


def files(
    folder: Path, rules: tuple[str, ...] = tuple(RULES), seeds: int = 2, tasks: tuple[str, ...] = ("t",)
) -> list[Path]:
    """Files of lm-eval, as a run with these rules leaves them."""
    paths = []
    for method, seed in itertools.product(METHODS, range(seeds)):
        predicted = {rule: said(method, seed, rule, right=right_of(method, rule)) for rule in ("", *rules)}
        paths.append(
            write(
                folder, method, seed, task=tasks, n=N, gold=GOLD, says=predicted[""],
                rules={rule: {**RULES[rule], "says": predicted[rule]} for rule in rules},
                metadata={"decide": "+".join(rules)} if rules else {},
            )
        )  # fmt: skip
    return paths


def board_of(folder: Path, **arguments: object) -> Board:
    runs, left_out = read([folder], quiet=True)
    assert not left_out
    return build(runs, **arguments)


def by_rule(board: Board) -> dict[tuple[str, str], Entry]:
    return {(entry.method, entry.rule or ""): entry for entry in board.entries}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("rules")
    files(folder)
    return folder


@pytest.fixture(scope="module")
def board(folder) -> Board:
    return board_of(folder)


def test_each_rule_is_an_entry_with_what_it_decided(board):
    """Means, predictions and differences to the same runs, from the predictions themselves."""
    entries = by_rule(board)
    assert len(entries) == len(board.entries) == len(METHODS) * (1 + len(RULES))
    assert named(board.entries, "icl").rule is None  # a method's name is that of its entry without a rule
    for (method, rule), entry in entries.items():
        predicted = np.array([said(method, seed, rule, right=right_of(method, rule)) for seed in (0, 1)])
        scores = (predicted == np.array(GOLD)).astype(float)
        cell = entry.cells["t"]
        assert cell.estimate.mean == pytest.approx(scores.mean(), abs=1e-15)
        assert cell.predicted == pytest.approx({"good": np.mean(predicted == 0), "bad": np.mean(predicted == 1)})
        assert entry.conditions == ", ".join(filter(None, ["4 shots", rule and f"decide: {rule}", MARKS.get(rule, "")]))
        if not rule:
            continue
        raw = np.array([said(method, seed, "", right=right_of(method, "")) for seed in (0, 1)]) == np.array(GOLD)
        difference = statistics.difference(scores.T, raw.astype(float).T, bounds=(0.0, 1.0))
        assert cell.difference.mean == pytest.approx(scores.mean() - raw.mean(), abs=1e-15)
        of_cell = {name: value for name, value in vars(cell.difference).items() if name != "how"}
        assert of_cell == pytest.approx({name: vars(difference)[name] for name in of_cell}, rel=1e-9)
        assert board.baseline[entry.name] == entries[method, ""].name
        assert board.is_against_itself(entry)


def test_values_of_the_models_are_those_without_rules(board, tmp_path):
    """What is told of all entries of a column together aside: ranks, and p adjusted for all."""
    files(tmp_path, ())
    before, after = by_rule(board_of(tmp_path)), by_rule(board)
    for (method, _), entry in before.items():
        same = after[method, ""]
        assert (same.name, same.label, same.checkpoint) == (entry.name, entry.label, entry.checkpoint)
        for name in ("estimate", "difference", "predicted", "majority", "corrected", "marks"):
            assert getattr(same.cells["t"], name) == getattr(entry.cells["t"], name), name
        assert "--metadata" not in same.command and same.command == entry.command
    decided = after["pcw", "batch"].command
    assert "--metadata" in decided and json.dumps({"decide": "+".join(RULES)}) in decided


def test_rules_do_not_decide_what_the_average_is_over(tmp_path):
    """A task that half of the models have counts, however many rules the others are under."""
    files(tmp_path, tasks=("a",))
    write(tmp_path, "icl", 7, task=("a", "b"), n=N)
    write(tmp_path, "invicl", 7, task=("a", "b"), n=N)
    write(tmp_path, "pcw", 7, task=("b",), n=N)
    columns = board_of(tmp_path).columns
    assert columns[0].weights == {"a": 0.5, "b": 0.5}


def test_transductive_entries_are_ranked_by_themselves(board, folder):
    """The ranks of each kind are those of a board that has no other entries of rules."""
    runs, _ = read([folder], quiet=True)
    kinds = [entry.is_transductive for entry in board.entries]
    assert kinds == sorted(kinds) and sum(kinds) == 2 * len(METHODS)
    for transductive in (False, True):
        of_kind = [
            replace(
                run,
                tasks={} if transductive else run.tasks,
                decided=tuple(result for result in run.decided if result.rule.transductive is transductive),
            )
            for run in runs
        ]
        for entry in build(of_kind).entries:
            same = named(board.entries, entry.name)
            assert same.is_transductive is entry.is_transductive is transductive
            assert same.cells["t"].rank == entry.cells["t"].rank is not None
    best = max(board.entries, key=lambda entry: entry.cells["t"].estimate.mean)
    assert best.is_transductive  # the rules that read more are better here
    highest = next(sentence for sentence in board.summary if "the highest value is" in sentence)
    assert "transductive" not in highest
    assert any("of a transductive entry" in sentence for sentence in board.summary)


def test_marks_are_seen_wherever_the_entry_is(board):
    label = "pcw, 4 shots, decide: batch, transductive"
    assert label in tables.as_markdown(board) and label in tables.as_tex(board)
    rows = {row["entry"]: row for row in csv.DictReader(io.StringIO(tables.as_csv(board)))}
    for entry in board.entries:
        rule = entry.rule or ""
        assert (rows[entry.name]["decide"], rows[entry.name]["reads"]) == (rule, MARKS.get(rule, ""))
    html = page(board, {})
    for mark in filter(None, MARKS.values()):
        assert f"{mark}</bdi>" in html
    for word in ("transductive", "labels", "pool"):
        assert f"<dt>{word}</dt>" in html
    assert "of transductive</td>" in html and "the same runs without a rule" in html
    of_page = {entry["label"]: entry for entry in data(board)["entries"]}
    assert of_page[label]["transductive"] and of_page[label]["against_itself"]
    # Sorted by rank, those that are transductive are behind all others.
    ranks = [(entry["extras"]["rank"], entry["transductive"]) for entry in of_page.values()]
    assert [kind for _, kind in sorted(ranks)] == sorted(kind for _, kind in ranks)


def test_a_baseline_that_is_asked_for_is_that_of_all(folder):
    board = board_of(folder, baseline="icl, 4 shots")
    entries = by_rule(board)
    base = entries["icl", ""].name
    assert {board.baseline[entry.name] for entry in board.entries if entry.name != base} == {base}
    assert not board.is_against_itself(entries["pcw", "batch"]) and board.is_against_itself(entries["icl", "batch"])
    by_method = board_of(folder, baseline="invicl")
    assert by_method.baseline[by_rule(by_method)["pcw", "batch"].name] == by_rule(by_method)["pcw", ""].name


def test_collected_files_have_the_same_entries(board, folder, tmp_path):
    runs, _ = read([folder], quiet=True)
    paths = collect(runs, tmp_path / "all")
    assert not any("of" in path.stem for path in paths)
    assert tables.as_csv(board_of(tmp_path / "all")) == tables.as_csv(board)
    first = documents(folder)[["run", "filter", "doc_id", "prediction", "acc"]]
    again = documents(tmp_path / "all")[first.columns]
    order = ["run", "filter", "doc_id"]
    first, again = (table.sort_values(order, ignore_index=True) for table in (first, again))
    assert first.astype({"prediction": int}).equals(again.astype({"prediction": int}))


def test_files_that_were_collected_without_rules(folder, tmp_path):
    """Their rules have no documents, and a file that has them takes their place."""
    runs, _ = read([folder], quiet=True)
    (path,) = collect(runs[:1], tmp_path / "old")
    kept = json.loads(path.read_text())
    assert set(kept[KEY]["t"].pop("rules")) == set(RULES)
    path.write_text(json.dumps(kept))
    (old,), left_out = read([path], quiet=True)
    assert not left_out and old.digest == runs[0].digest
    assert old.tasks["t"].answers is not None and [of.answers for of in old.decided] == [None] * len(RULES)
    assert not any(of.marks for of in old.decided)
    cells = [entry.cells["t"] for entry in build([old]).entries if entry.rule]
    assert all("aggregate only" in cell.marks and cell.difference is None for cell in cells)
    (partly,) = collect([old], tmp_path / "new")
    assert partly.stem.endswith(f"-1of{1 + len(RULES)}")
    (whole,) = collect(runs[:1], tmp_path / "new")
    (best,), (note,) = read([tmp_path / "new"], quiet=True)
    assert best.path == whole and "with fewer samples" in note.why


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"config.icl.decided.t.batch.transductive": None}, "the decision rule 'batch' is left out: transductive"),
        ({"config.icl.decided.t.batch": "yes"}, "the decision rule 'batch' is left out"),
        ({"config.icl.decided.t.batch.labels": -1}, "left out: labels is -1"),
        ({"results.t.acc,batch": "N/A"}, "its acc is 'N/A', which is not a number"),
        ({"results.t.acc,batch": 3.0}, None),
        ({"config.icl.decided.t.other": RULES["batch"]}, "the decision rule 'other' is left out: there is no acc"),
    ],
)
def test_what_is_wrong_with_a_rule_stops_nothing_else(change, why, tmp_path):
    facts = {**RULES["batch"], "says": GOLD}
    write(tmp_path, n=N, gold=GOLD, says=[1 - gold for gold in GOLD], rules={"batch": facts}, put=change)
    (run,), left_out = read([tmp_path], quiet=True)
    assert run.tasks["t"].value == 0 and not run.tasks["t"].marks and run.tasks["t"].answers is not None
    entries = by_rule(build([run], left_out))
    assert ("icl", "") in entries
    if why is None:  # no accuracy
        assert "not between 0 and 1" in run.decided[0].marks[0] and ("icl", "batch") not in entries
    else:
        assert [why in note.why for note in left_out] == [True]
        assert ("icl", "batch") in entries or "'batch'" in why or "labels" in why or "N/A" in why


def test_samples_of_a_rule_that_are_damaged(tmp_path):
    """The others of the same file are used; those of the rule must give its reported value."""
    path = write(tmp_path, n=N, gold=GOLD, rules={name: {**RULES[name], "says": GOLD} for name in ("batch", "domain")})
    lines = [json.loads(line) for line in samples_of(path, "t").read_text().splitlines()]
    twice = next(line for line in lines if line["filter"] == "batch")
    boards.write_samples(path, "t", [*lines, twice])
    (run,), _ = read([tmp_path], quiet=True)
    by_name = {of.reported_filter: of for of in run.all_results}
    assert by_name["none"].answers is not None and by_name["domain"].answers is not None
    assert by_name["batch"].answers is None and "document 0 is in the samples twice" in by_name["batch"].marks[0]
    boards.write_samples(path, "t", [{**line, "acc": 0.0} if line["filter"] == "domain" else line for line in lines])
    (run,), _ = read([tmp_path], quiet=True)
    marks = {of.reported_filter: of.marks for of in run.all_results}
    assert not marks["none"] and not marks["batch"] and "their mean acc is 0" in marks["domain"][0]
    assert len(build([run]).entries) == 3


def test_samples_are_read_once(folder, monkeypatch):
    """However many rules a run has."""
    read_files, lines = [], reading.lines
    monkeypatch.setattr(reading, "lines", lambda path: read_files.append(path) or lines(path))
    runs, _ = read([folder], quiet=True)
    assert len(read_files) == len(runs) == 2 * len(METHODS)


def test_the_same_name_with_other_defaults_is_another_entry(tmp_path):
    for seed, texts in enumerate((["N/A"], ["N/A", ""])):
        facts = {"arguments": {"texts": texts}, "transductive": False, "says": GOLD}
        write(tmp_path, seed=seed, n=N, gold=GOLD, rules={"contextual": facts})
    board = board_of(tmp_path)
    labels = [entry.label for entry in board.entries if entry.rule]
    assert len(board.entries) == 3 and len(set(labels)) == 2
    assert all(label.startswith("icl, 4 shots, decide: contextual (") for label in labels)


def test_what_a_rule_reads_may_differ_between_tasks(tmp_path):
    """They stand in one row, which says from how many to how many."""
    for task, facts in {"a": {"labels": 500}, "b": {"labels": 2016, "transductive": True}}.items():
        facts = {"arguments": {"k": 3}, "transductive": False, **facts, "says": GOLD}
        write(tmp_path, task=task, n=N, gold=GOLD, rules={"knn": facts})
    board = board_of(tmp_path)
    (decided,) = [entry for entry in board.entries if entry.rule]
    assert decided.conditions == "4 shots, decide: knn, labels: 500 to 2016, transductive" and decided.is_transductive
    assert decided.cells.keys() == {"average", "a", "b"}


def test_values_under_rules_alone(tmp_path):
    """Where the models' own values cannot be used, those under rules are shown, without a baseline."""
    files(tmp_path, ("batch", "contextual"), seeds=1)
    runs, _ = read([tmp_path], quiet=True)
    board = build([replace(run, tasks={}) for run in runs])
    assert len(board.entries) == 2 * len(METHODS) and not board.baseline
    assert all("lm_eval" in entry.command and entry.seconds is None for entry in board.entries)
    assert "decide: batch, transductive" in page(board, figures.svgs(board))


def test_no_rule_changes_exact_match(tmp_path):
    put = {"results.t": {"exact_match,none": 0.5, "exact_match,batch": 0.5, "sample_len": N}}
    write(tmp_path, n=N, rules={"batch": {**RULES["batch"], "says": [0] * N}}, put=put, samples=False)
    (run,), (note,) = read([tmp_path], quiet=True)
    assert run.tasks["t"].metric == "exact_match" and not run.decided and "changes exact_match" in note.why


def test_figures_show_what_models_say_and_one_shows_rules(board, tmp_path):
    paths = figures.draw(board, tmp_path, ["forest", "rules"])
    drawn = {path.stem: list(csv.DictReader(path.open())) for path in paths if path.suffix == ".csv"}
    names = {entry.name: entry for entry in board.entries}
    assert sorted(line["method"] for line in drawn["forest"]) == sorted(METHODS)
    assert not any(names[line["name"]].rule for line in drawn["forest"])
    assert len(drawn["rules"]) == len(METHODS) * len(RULES)
    for line in drawn["rules"]:
        of = names[line["name"]].cells["t"].difference
        assert line["conditions"] == names[line["name"]].conditions and names[line["name"]].rule
        assert [float(line[key]) for key in ("difference", "low", "high", "p")] == [of.mean, of.low, of.high, of.p]
    assert "the same runs without the rule" in (tmp_path / "rules.svg").read_text()
