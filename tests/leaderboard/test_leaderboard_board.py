"""Runs into a board: which runs are one row, what cells and sentences say, and that no stranger's value stops it."""

import csv
import io
import json
import math
import random
import re
import shlex
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lm_eval._cli import HarnessCLI
from rich.console import Console

from lm_eval_icl.errors import InputError
from lm_eval_icl.leaderboard import numbers, tables
from lm_eval_icl.results import statistics
from lm_eval_icl.results.board import AVERAGE
from lm_eval_icl.results.build import build, named
from lm_eval_icl.results.cells import compare
from lm_eval_icl.results.differing import differing
from tests.boards import RIGHT, N, bits, digest, make_result, make_run


def grid(*models, seeds=3, orders=2, **changes):
    return [
        make_run(model, seed=seed, order=order, **changes)
        for model in models
        for seed in range(seeds)
        for order in range(orders)
    ]


def labels(board):
    return sorted(entry.label for entry in board.entries)


# Which runs are one row.


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 7},
        {"order": 3},
        {"arguments": {"T": 5}},
        {"arguments": {"T": 5.0, "eta": 0.01}},
        {"arguments": {"batch_size": 8, "device": "cuda:1", "pack_tokens": 99, "attn_implementation": "eager"}},
        {"icl": {"version": "9", "commit": "x", "method": "deepthink", "positions": "sequential", "T": 5, "eta": 0.01,
                 "overflow": "error", "tokens_run": 3, "left_out": {}, "trained": {"steps": 1}, "chosen": {"a": {}}}},
        {"date": 5.0},
        {"samples": False, "limit": None},
    ],
)  # fmt: skip
def test_runs_that_are_one_row(changes):
    board = build([make_run("deepthink"), make_run("deepthink", **changes)])
    assert labels(board) == ["deepthink, 4 shots"]
    assert len(board.entries[0].runs) == 2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"shots": 8}, ["deepthink, 4 shots", "deepthink, 8 shots"]),
        ({"shots": 1}, ["deepthink, 1 shot", "deepthink, 4 shots"]),
        ({"template": "f" * 32},
         [f"deepthink, 4 shots, prompts {digest('a')[:6]}", "deepthink, 4 shots, prompts ffffff"]),
        ({"limit": 10.0}, ["deepthink, 4 shots, all documents", "deepthink, 4 shots, limit=10"]),
        ({"scores": [1, 0]}, [f"deepthink, 4 shots, documents {digest('documents', 'a', n)[:6]}" for n in (N, 2)]),
        ({"version": "2.0"}, ["deepthink, 4 shots, version 1.0", "deepthink, 4 shots, version 2.0"]),
        ({"drawn": "first"},
         ["deepthink, 4 shots, demonstrations=drawn by the task", "deepthink, 4 shots, demonstrations=first"]),
        ({"arguments": {"T": 1}}, ["deepthink T=1, 4 shots", "deepthink, 4 shots"]),
        ({"arguments": {"max_length": 512}}, ["deepthink max_length=512, 4 shots", "deepthink, 4 shots"]),
        # Hidden arguments are shown where rows would look the same.
        ({"icl": {"method": "deepthink", "positions": "sequential", "T": 5, "eta": 0.01, "overflow": "drop"}},
         ["deepthink overflow=drop, 4 shots", "deepthink overflow=error, 4 shots"]),
    ],
)  # fmt: skip
def test_runs_that_are_two_rows(changes, said):
    board = build([make_run("deepthink"), make_run("deepthink", seed=1, **changes)])
    assert labels(board) == sorted(said)
    assert len({entry.name for entry in board.entries}) == 2


@pytest.mark.parametrize(("changes", "details"), [({"dtype": "bfloat16"}, "bfloat16"), ({"revision": "v2"}, "v2")])
def test_checkpoints_of_one_name_are_told_apart_by_what_they_differ_in(changes, details):
    board = build([make_run(), make_run(**changes)])
    assert {details} < {entry.details for entry in board.entries} <= {details, "float32", ""}


def test_paths_are_shown_by_their_ends_where_these_differ():
    paths = ["/x/one", "/x/two", "/y/two", "org/model"]
    board = build([make_run(pretrained=path) for path in paths])
    assert {entry.checkpoint for entry in board.entries} == {"one", "/x/two", "/y/two", "org/model"}


def test_a_row_of_several_tasks_stays_whole_where_templates_or_documents_change():
    runs = [make_run(tasks=("a", "b"), seed=seed) for seed in range(2)]
    new = [make_result(task, "icl", 2, 0, template=digest("new", task)) for task in ("a", "b")]
    few = [make_result(task, "icl", 3, 0, scores=bits(task, n=7)) for task in ("a", "b")]
    board = build([*runs, make_run(tasks=new, seed=2), make_run(tasks=few, seed=3)])
    assert len(board.entries) == 3
    assert all(entry.cells.keys() == {"a", "b", AVERAGE} for entry in board.entries)


def test_a_task_that_one_template_was_run_of_goes_with_the_first():
    runs = [make_run(tasks=("a",)), make_run(tasks=("b",), seed=1), make_run(template="f" * 32, seed=2)]
    first, second = sorted(build(runs).entries, key=lambda entry: entry.runs[0].date)
    assert first.cells.keys() == {"a", "b", AVERAGE} and second.cells.keys() == {"a"}


def test_tasks_of_several_numbers_of_demonstrations_are_one_row():
    mixed = [make_result("a", "icl", 0, 0, shots=5), make_result("b", "icl", 0, 0, shots=25)]
    (entry,) = build([make_run(tasks=mixed)]).entries
    assert entry.conditions == "5 to 25 shots"
    assert "--num_fewshot" not in entry.command


def test_arguments_chosen_on_a_dev_set_are_one_row():
    def chosen(seed, t):
        icl = {"method": "deepthink", "T": t, "eta": 0.01, "study": {"chosen": ["T"]}}
        return make_run("deepthink", seed=seed, arguments={"T": t}, icl=icl)

    board = build([chosen(0, 1), chosen(1, 4), make_run("deepthink", arguments={"T": 1})])
    assert labels(board) == ["deepthink T chosen on dev, 4 shots", "deepthink T=1, 4 shots"]
    assert named(board.entries, "deepthink T chosen on dev").cells["a"].chosen == ("T=1", "T=4")
    assert named(board.entries, "deepthink T=1").cells["a"].chosen == ()


def test_models_that_a_study_trains_under_methods_are_one_checkpoint():
    def trained(model, training, weights, seed=0):
        study = {"model": "org/m", "training": training, "checkpoint": model + training}
        icl = {"method": model, "study": study, "trained": {"method": model, "steps": 9}}
        facts = {"study.weights": digest(weights), "trained.method": model}
        return make_run(model, seed=seed, pretrained=f"/x/{model}{training}", icl=icl, model_facts=facts)

    runs = [trained(model, training, (model, training), seed) for model in ("icl", "pcw")
            for training in ("one", "two") for seed in range(2)]  # fmt: skip
    board = build(runs)
    assert sorted((entry.on, entry.label) for entry in board.entries) == [
        (f"org/m (trained: {training})", f"{model}, 4 shots") for training in ("one", "two") for model in ("icl", "pcw")
    ]
    by_name = {entry.name: entry for entry in board.entries}
    compared = [(by_name[name], by_name[other]) for name, other in board.baseline.items()]
    assert [(one.method, other.method, one.on == other.on) for one, other in compared] == [("pcw", "icl", True)] * 2
    # The same training with other weights, of another study, is another row.
    assert len(build([*runs, trained("icl", "one", "others", 5)]).entries) == 5


def test_the_papers_value_is_that_of_all_runs():
    def run(seed, expected, tasks=("a", "b")):
        return make_run(tasks=tasks, seed=seed, icl={"method": "icl", "study": {"expected": expected}})

    values = {"a": 0.5, AVERAGE: 0.25, "b": "many", "c": 1}
    (entry,) = build([run(0, values), run(1, values)]).entries
    assert {name: cell.expected for name, cell in entry.cells.items()} == {"a": 0.5, "b": None, AVERAGE: 0.25}
    (entry,) = build([run(0, values), run(1, {"a": 0.6}, ("a",)), run(2, values, ("b",))]).entries
    assert {name: cell.expected for name, cell in entry.cells.items()} == {"a": None, "b": None, AVERAGE: None}
    assert build([make_run()]).entries[0].cells["a"].expected is None


# Sets, orders, repeats.


def test_two_orders_are_one_set_and_their_mean_counts():
    runs = grid("icl", seeds=3, orders=2)
    cell = build(runs).entries[0].cells["a"]
    orders = [(prompt_set.label, [unit.run.order for unit in prompt_set.answered]) for prompt_set in cell.sets]
    assert orders == [(f"seed {seed}", [0, 1]) for seed in range(3)]
    scores = np.array([[bits("icl", "a", seed, order, right=0.55) for order in (0, 1)] for seed in range(3)])
    expected = statistics.estimate(scores.mean(axis=1).T, bounds=(0, 1))
    assert cell.estimate == expected
    flips = np.mean(scores[:, 0] != scores[:, 1])
    assert cell.sensitivity.mean == pytest.approx(flips)
    assert cell.corrected == pytest.approx((expected.mean - 0.5) / 0.5)
    assert [one.value for one in cell.sets] == pytest.approx(scores.mean(axis=(1, 2)))
    assert "few seeds" in cell.marks


def test_seeds_with_the_same_demonstrations_are_one_set():
    runs = [make_run(seed=seed, scores=bits(1), seed_of_prompts=0) for seed in range(3)]
    cell = build(runs).entries[0].cells["a"]
    assert (cell.estimate.sets, cell.estimate.how, cell.marks) == (1, "wilson", ("confirmed",))
    assert [run.seed for run in cell.sets[0].answered[0].repeats] == [1, 2]


def test_a_difference_over_fewer_sets_says_so():
    for of_icl, of_pcw in ((3, 2), (2, 3)):
        runs = [*grid("icl", seeds=of_icl, orders=1), *grid("pcw", seeds=of_pcw, orders=1)]
        marks = [mark for entry in build(runs).entries for mark in entry.cells["a"].marks if "Paired" in mark]
        assert marks == ["Paired on 2 of 3 sets of demonstrations."] * (of_icl < of_pcw)


@pytest.mark.parametrize(("scores", "mark"), [(bits(1), "confirmed"), (bits(2), "differs")])
def test_of_repeated_runs_the_earliest_counts(scores, mark):
    runs = [make_run(scores=scores, date=9.0), make_run(scores=bits(1), date=3.0)]
    cell = build(runs).entries[0].cells["a"]
    assert (cell.marks, cell.sets[0].answered[0].run.date) == ((mark,), 3.0)
    assert cell.estimate.mean == bits(1).mean()
    confirmed = [make_run(seed=1, date=date) for date in (1.0, 2.0)]  # a cell that differs is not confirmed
    marks = build([*runs, *confirmed]).entries[0].cells["a"].marks
    assert (mark in marks) and ("confirmed" in marks) == (mark == "confirmed")


def test_zero_shot():
    board = build([make_run(model, shots=0, seed=seed) for model in ("hf", "icl") for seed in range(3)])
    for entry in board.entries:
        cell = entry.cells["a"]
        assert (entry.conditions, [one.label for one in cell.sets]) == ("0 shots", ["no demonstrations"])
        assert cell.estimate.sets == 1
        assert "few seeds" not in cell.marks
    (found,) = [entry.cells["a"].difference for entry in board.entries if entry.method == "hf"]
    assert found.how == "mcnemar"


def test_results_without_samples_are_reported():
    runs = [make_run(samples=False, seed=seed, order=order) for seed in range(3) for order in range(2)]
    board = build([*runs, make_run("invicl")])
    cell = named(board.entries, "icl").cells["a"]
    values = np.array([run.tasks["a"].value for run in runs]).reshape(3, 2).mean(axis=1)
    assert cell.estimate.mean == pytest.approx(values.mean())
    assert cell.estimate.error == pytest.approx(math.sqrt(0.05**2 + values.var(ddof=1) / 3))
    assert (cell.marks, cell.sets, cell.rank, cell.estimate.how) == (("aggregate only",), (), None, "reported")
    assert named(board.entries, "invicl").cells["a"].marks == ("unpaired",)


# Differences, ranks, groups, averages.


def test_differences_are_over_common_sets_and_orders_alone():
    first = [make_run("invicl", seed=seed, order=order) for seed, order in [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1)]]
    second = [
        make_run("icl", seed=seed, order=order) for seed, order in [(0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0)]
    ]
    board = build(first + second)
    found = named(board.entries, "invicl").cells["a"].difference

    def scores(model, common):
        return np.mean([bits(model, "a", *each, right=RIGHT[model]) for each in common], axis=0)

    common = [[(0, 0)], [(1, 0)], [(2, 0), (2, 1)]]
    a, b = (np.stack([scores(model, each) for each in common], axis=1) for model in ("invicl", "icl"))
    assert found == statistics.difference(a, b, bounds=(0, 1))
    assert found.sets == 3


def test_other_prompts_are_unpaired():
    board = build([make_run("icl"), make_run("invicl", template="f" * 32)])
    cell = named(board.entries, "invicl").cells["a"]
    assert (cell.difference, cell.p_holm, cell.rank, cell.marks) == (None, None, None, ("unpaired",))
    assert not board.pairs
    assert "not asked the same" in " ".join(board.summary)


def test_group_and_average_have_their_weights():
    groups = {"g": {"a": 0.75, "b": 0.25}}
    runs = [make_run(model, ("a", "b", "c"), seed, groups=groups) for model in ("icl", "hf") for seed in range(4)]
    board = build(runs)
    assert [column.name for column in board.columns] == [AVERAGE, "g", "a", "b", "c"]
    for entry in board.entries:
        of = {task: entry.cells[task].estimate for task in "abc"}
        assert entry.cells["g"].estimate == statistics.estimate_group([of["a"], of["b"]], [0.75, 0.25], bounds=(0, 1))
        assert entry.cells[AVERAGE].estimate == statistics.estimate_group(list(of.values()), [1 / 3] * 3, bounds=(0, 1))
    (pair,) = board.pairs.values()
    of_group = build(runs, tasks=["g"])
    assert compare(*(entry.cells for entry in of_group.entries), of_group.columns)["g"] == pair["g"]
    assert pair["g"].mean == pytest.approx(0.75 * pair["a"].mean + 0.25 * pair["b"].mean)
    assert pair["g"] == statistics.difference_group([pair["a"], pair["b"]], [0.75, 0.25], bounds=(0, 1))


def test_groups_of_the_caller_take_the_place_of_those_of_the_runs():
    runs = [make_run(model, ("a", "b", "c"), groups={"g": {"a": 0.5, "b": 0.5}}) for model in ("icl", "hf")]
    groups = {"h": {"a": 0.25, "c": 0.75}, AVERAGE: {"a": 0.5, "c": 0.5}, "missing": {"a": 0.5, "d": 0.5}}
    board = build(runs, groups=groups)
    kinds = [(AVERAGE, "average"), ("h", "group"), ("a", "task"), ("b", "task"), ("c", "task")]
    assert [(column.name, column.kind) for column in board.columns] == kinds
    for entry in board.entries:
        of_tasks = [entry.cells[task].estimate for task in ("a", "c")]
        assert entry.cells["h"].estimate == statistics.estimate_group(of_tasks, [0.25, 0.75], bounds=(0, 1))
    assert [column.name for column in build(runs, groups=groups, tasks=["b", "h"]).columns] == ["h", "b"]
    assert [column.name for column in build(runs, groups={}).columns] == ["a", "b", "c"]


def test_the_average_is_over_tasks_that_half_of_the_rows_have():
    runs = [make_run("icl", ("a", "b", "c")), make_run("hf", ("a", "b", "c")), make_run("invicl", ("a", "b", "own")),
            make_run("deepthink", ("a", "b"))]  # fmt: skip
    board = build(runs)
    assert board.columns[0].weights == pytest.approx({"a": 1 / 3, "b": 1 / 3, "c": 1 / 3})
    assert AVERAGE not in named(board.entries, "deepthink").cells
    assert named(board.entries, "deepthink") in board.entries[2:]  # those with an average are further up
    assert build(runs, tasks=["a"]).columns[0].name == "a"
    board = build([make_run(tasks=("a", "b"), groups={"g": {"a": 0.5, "b": 0.5}})])
    assert [column.name for column in board.columns] == ["g", "a", "b"]  # a group that is the average stands for it


def test_holm_and_rank_ranges_are_over_the_column():
    right = {"icl": 0.2, "hf": 0.25, "invicl": 0.9, "deepthink": 0.6}
    runs = [make_run(model, seed=seed, scores=bits(model, seed, right=share, n=200))
            for model, share in right.items() for seed in range(5)]  # fmt: skip
    board = build(runs)
    scores = {model: np.stack([bits(model, seed, right=share, n=200) for seed in range(5)], axis=1)
              for model, share in right.items()}  # fmt: skip
    others = [model for model in right if model != "icl"]
    adjusted = statistics.holm([statistics.difference(scores[model], scores["icl"]).p for model in others])
    for model, p in zip(others, adjusted, strict=True):
        assert named(board.entries, model).cells["a"].p_holm == pytest.approx(p)
    p = np.array([[statistics.difference(scores[a], scores[b]).p for b in right] for a in right])
    ranges = statistics.rank_ranges([scores[model].mean() for model in right], p)
    assert [named(board.entries, model).cells["a"].rank for model in right] == ranges
    assert len(set(ranges)) > 2
    assert [entry.method for entry in board.entries] == ["invicl", "deepthink", "hf", "icl"]
    assert [entry.cells["a"].tied_with_best for entry in board.entries] == [True, False, False, False]


def test_nobody_is_ranked_above_an_entry_that_is_better_where_both_were_asked():
    easy, hard = np.ones(N), np.zeros(N)
    runs = [make_run("icl", seed=seed, scores=easy if seed > 2 else hard) for seed in range(9)]
    runs += [make_run("invicl", seed=seed, scores=bits(seed, right=0.3)) for seed in range(3)]
    board = build(runs)
    assert [entry.method for entry in board.entries] == ["icl", "invicl"]
    assert [entry.cells["a"].rank for entry in board.entries] == [(1, 2), (1, 2)]
    if board.entries[1].cells["a"].difference.p <= 0.05:
        assert "significantly better" in board.summary[1]
        assert "worse" not in board.summary[1]


def test_lower_is_better():
    kind = {"metric": "bits_per_byte", "higher_is_better": False, "aggregation": "bits_per_byte"}
    runs = [make_run(model, seed=seed, scores=np.stack([-(rate + bits(seed, n=N)), np.ones(N)], axis=1), **kind)
            for model, rate in (("icl", 2), ("hf", 1)) for seed in range(3)]  # fmt: skip
    board = build(runs)
    assert [entry.method for entry in board.entries] == ["hf", "icl"]
    assert board.summary[0].startswith("On a, the lowest value is ")
    assert board.summary[1:] == (
        "1 entry is significantly worse.",
        "Against icl on the same checkpoint, hf is better (5%).",
    )
    assert not board.columns[0].percent
    assert board.entries[0].cells["a"].rank == (1, 1)


@pytest.mark.parametrize("aggregation", ["f1", "perplexity", "nanmean"])
def test_metrics_that_are_bootstrapped(aggregation):
    def items(model, seed):
        if aggregation == "f1":
            return np.stack([bits("gold"), bits(model, seed)], axis=1)
        values = -1 - bits(model, seed)
        return np.where(np.arange(N) == 3, np.nan, values) if aggregation == "nanmean" else values

    lower = {"metric": aggregation, "aggregation": aggregation, "higher_is_better": aggregation != "perplexity"}
    runs = [make_run(model, seed=seed, scores=items(model, seed), value=0.5, **lower)
            for model in ("icl", "hf") for seed in range(3)]  # fmt: skip
    board = build(runs)
    of = statistics.AGGREGATIONS[aggregation]
    sums = {m: np.stack([of.features(items(m, seed)) for seed in range(3)], axis=1) for m in ("icl", "hf")}
    for entry in board.entries:
        expected = statistics.bootstrap(sums[entry.method], of.value, bounds=of.bounds)
        assert entry.cells["a"].estimate == expected
    found = named(board.entries, "hf").cells["a"].difference
    expected = statistics.bootstrap_difference(sums["hf"], sums["icl"], of.value, bounds=of.bounds)
    assert found.mean == pytest.approx(expected.mean)
    assert len(differing(*board.entries, "a", 3)) == (0 if aggregation == "f1" else 4)


# Baselines.


def test_the_baseline_is_icl_or_else_hf_on_the_same_checkpoint_and_conditions():
    runs = [make_run(model, pretrained=path, shots=shots)
            for model in ("icl", "hf") for path in ("M", "L") for shots in (4, 8)]  # fmt: skip
    board = build(runs)
    by_name = {entry.name: entry for entry in board.entries}
    assert len(board.baseline) == 4
    for name, other in board.baseline.items():
        mine, theirs = by_name[name], by_name[other]
        assert (mine.method, theirs.method) == ("hf", "icl")
        assert (mine.checkpoint, mine.conditions) == (theirs.checkpoint, theirs.conditions)
    assert {by_name[other].method for other in build(runs, baseline="hf").baseline.values()} == {"hf"}
    assert not build([run for run in runs if run.model == "icl"]).baseline


def test_a_baseline_of_several_is_the_one_that_was_asked_the_same():
    runs = [make_run("icl"), make_run("icl", template="f" * 32), make_run("invicl")]
    board = build(runs)
    entry = named(board.entries, "invicl")
    assert named(board.entries, board.baseline[entry.name]).conditions == f"4 shots, prompts {digest('a')[:6]}"
    assert entry.cells["a"].difference is not None


def test_one_entry_is_the_baseline_of_all():
    runs = [make_run("icl"), make_run("icl", pretrained="L"), make_run("deepthink", arguments={"T": 2})]
    board = build(runs, baseline="deepthink T=2, 4 shots")
    entry = named(board.entries, "deepthink")
    assert set(board.baseline.values()) == {entry.name}
    assert len(board.baseline) == 2
    assert board.summary[-1].startswith("Against deepthink T=2 on M, ")
    assert build(runs, baseline=entry.name).baseline == board.baseline


def test_a_baseline_of_several_entries_is_refused():
    says = "--baseline icl, 4 shots: several entries are called so. Give the name of one: .* on L; .* on M"
    with pytest.raises(InputError, match=says):
        build([make_run("icl"), make_run("icl", pretrained="L")], baseline="icl, 4 shots")


# Sentences.


def told(right, seeds=5, n=200, **changes):
    runs = [make_run(model, seed=seed, scores=bits(seed, "same", right=share, n=n), **changes)
            for model, share in right.items() for seed in range(seeds)]  # fmt: skip
    return build(runs).summary


@pytest.mark.parametrize(
    ("right", "summary"),
    [
        ({"icl": 0.5}, [r"On a, the highest value is 5\d\.\d%: icl, 4 shots on M \(95% interval .*% to .*%\)\."]),
        ({"icl": 0.5, "hf": 0.5}, [r"On a, the highest value is 5\d\.\d%, that of 2 entries: hf and icl\.",
                                   "It cannot be told apart from icl.",
                                   "Against icl on the same checkpoint, 1 entry cannot be told apart from it (5%)."]),
        ({"icl": 0.9, "hf": 0.2}, [None, "1 entry is significantly worse.",
                                   "Against icl on the same checkpoint, hf is worse (5%)."]),
        ({"icl": 0.2, "hf": 0.2, "invicl": 0.9, "pcw": 0.9}, [
            None, "It cannot be told apart from pcw.", "2 entries are significantly worse.",
            "Against icl on the same checkpoint, invicl and pcw are better and 1 entry cannot be "
            "told apart from it (5%, adjusted for all entries by Holm's method)."]),
        ({"nope": 0.9, "hf": 0.5, "a": 0.5, "b": 0.5, "c": 0.5, "d": 0.5}, [
            None, "5 entries are significantly worse.",
            "Against hf on the same checkpoint, nope is better and 4 entries cannot be told apart from it "
            "(5%, adjusted for all entries by Holm's method)."]),
        ({"a": 0.5, "b": 0.5, "c": 0.5, "d": 0.5, "e": 0.5, "f": 0.5}, [
            None, "It cannot be told apart from b, c, d and 2 more."]),
    ],
)  # fmt: skip
def test_what_is_said_on_top(right, summary):
    found = told(right)
    assert len(found) == len(summary)
    for sentence, expected in zip(found, summary, strict=True):
        if expected is not None:
            assert sentence == expected or re.fullmatch(expected, sentence), sentence


def test_other_columns_have_their_sentence():
    runs = [make_run(model, (task,), scores=[value] * 4) for task, model, value in (("a", "icl", 0), ("b", "pcw", 1))]
    said = " ".join(build(runs).summary)
    assert "On a, the highest value is 0.0%: icl" in said and "On b, the highest value is 100.0%: pcw" in said


def test_checkpoints_are_named_where_there_are_several():
    board = build([make_run(pretrained="M"), make_run(pretrained="L", scores=bits(5)), make_run("hf", pretrained="K")])
    assert len(re.findall(" on [KLM]", board.summary[0])) == 1
    assert "It cannot be told apart from " in board.summary[1]
    assert len(re.findall(" on [KLM]", board.summary[1])) == 2


# The command.


def options(command):
    parsed = HarnessCLI()._parser.parse_args(["run", *shlex.split(command)[1:]])
    return vars(parsed)


@pytest.mark.parametrize(
    "arguments",
    [
        {"T": 5, "eta": 0.1},
        {"peft": "my adapter,x=1"},
        {"tokenizer": "1e5", "layer": -3, "subfolder": "none", "max_length": None, "parallelize": False},
    ],
)
def test_the_command_gives_lm_eval_the_same_arguments(arguments):
    results = {"config": {"model": "icl", "model_args": {"pretrained": "/m/x", "trust_remote_code": True, **arguments},
                          "random_seed": 3, "numpy_seed": 4, "torch_seed": 5, "gen_kwargs": {"temperature": 0.5},
                          "icl": {}}, "system_instruction": "Be brief.\nBe kind.",
               "chat_template": "{{x}}", "fewshot_as_multiturn": True}  # fmt: skip
    run = make_run(tasks=("a", "b", "c"), seed=7, limit=0.125, groups={"g": {"a": 0.5, "b": 0.5}}, results=results)
    (entry,) = build([run]).entries
    command, comment = entry.command.rsplit("\n", 1)
    assert comment == "# Left out, as not all that a file says is safe to paste: trust_remote_code of model_args"
    found = options(command)
    assert found["model_args"] == {"pretrained": "/m/x", **arguments}
    assert found["seed"] == [3, 4, 5, 7]
    assert (found["model"], found["num_fewshot"], found["limit"]) == ("icl", 4, 0.125)
    assert sorted(",".join(found["tasks"]).split(",")) == ["c", "g"]
    assert found["gen_kwargs"] == {"temperature": 0.5}
    assert found["system_instruction"] == "Be brief.\nBe kind."
    assert found["apply_chat_template"] is True
    assert found["fewshot_as_multiturn"] is True


@pytest.mark.parametrize(
    "evil", ["$(touch x)", "`id`", "a; rm -rf ~", "'\"; id #", "a\x1b[31m\r\nid", "\u202e", "& id", "|id"]
)
def test_the_command_is_safe_to_paste(evil):
    config = {"model_args": {"pretrained": evil, evil: evil, "trust_remote_code": True}, "gen_kwargs": {evil: evil}}
    results = {"config": config, "system_instruction": evil, "chat_template": evil}
    study = {"icl": {"study": {"arguments": {evil: evil}, "demonstrations": evil}}}
    tasks = (make_result(evil, "icl", 0, 0), make_result("a", "icl", 0, 0))
    runs = [make_run(model, tasks=tasks, results=results, **more) for model in ("icl", evil) for more in ({}, study)]
    for entry in build(runs).entries:
        assert not re.search(r"[\x00-\x09\x0b-\x1f\u202e]", entry.command)
        assert "trust_remote_code=" not in entry.command and "trust_remote_code:" not in entry.command
        # In the shell's words only quoted text is the stranger's, and the file between the two EOF.
        assert entry.command.count("EOF") in (0, 2)
        bare = re.sub(r"<<'EOF'\n.*?\nEOF\n", "\n", entry.command, flags=re.DOTALL)
        bare = re.sub(r"'[^']*'|\"'\"", "", bare)
        for line in bare.splitlines():
            assert re.match(r"lm_eval --model icl |lm-eval-icl study study-|cat > study-\w+\.yaml|# Left out", line)
            assert not re.search(r"[$`;&|<>]", line.replace("cat > ", ""))


# Strangers' values.


def test_the_order_of_runs_changes_nothing():
    runs = grid("icl", "invicl", "deepthink", tasks=("a", "b"), groups={"g": {"a": 0.7, "b": 0.3}})
    runs += [make_run("hf", ("a", "b", "c")), make_run("hf", ("b",), seed=1, samples=False)]
    runs += [make_run("hf", ("a",), seed=2, template="f" * 32), make_run("icl", ("a",), scores=bits(3), date=1.0)]
    runs += [make_run("saicl", ("a",), samples=False, date=date, value=date / 3) for date in (1.0, 2.0)]

    def content(board):
        return tables.as_csv(board), board.summary, board.pairs, [entry.command for entry in board.entries]

    expected = content(build(runs))
    for seed in range(3):
        shuffled = random.Random(seed).sample(runs, len(runs))
        assert content(build(shuffled)) == expected


def test_results_that_cannot_stand_in_a_column_are_left_out():
    good = [make_run(seed=seed) for seed in range(3)]
    bad = {
        "its acc of 85 is not between 0 and 1": {"samples": False, "value": 85.0},
        "a number that is not finite": {"samples": False, "stderr": 1e300},
        "its metric is f1 (none), most runs have acc (none)": {"samples": False, "metric": "f1"},
    }
    runs = [make_run("hf", seed=number, **changes) for number, changes in enumerate(bad.values())]
    called = make_run("hf", tasks=(AVERAGE,), seed=9)
    board = build([*good, *runs, called])
    assert [entry.method for entry in board.entries] == ["icl"]
    why = [each.why for each in board.left_out]
    assert len(why) == 4
    for reason in (*bad, "it is called as the average over tasks is"):
        assert sum(reason in each for each in why) == 1
    assert board.files == 7


@pytest.mark.parametrize("aggregation", ["median", "f1", "unknown", "weighted_perplexity"])
def test_answers_that_a_metric_has_no_value_for_are_reported(aggregation):
    scores = np.stack([bits(1) + 2, np.zeros(N)], axis=1) if aggregation != "median" else bits(1)
    strange = {"scores": scores, "aggregation": aggregation, "metric": "strange", "value": 3.0}
    cell = build([make_run(model, **strange) for model in ("icl", "hf")]).entries[0].cells["a"]
    assert (cell.estimate.how, cell.estimate.mean) == ("reported", 3.0)
    assert "aggregate only" in cell.marks


def test_percent_is_for_metrics_between_0_and_1():
    assert not build([make_run(metric="f1", aggregation="unknown", value=85.0, samples=False)]).columns[0].percent
    assert build([make_run(metric="f1", aggregation="unknown", value=0.85, samples=False)]).columns[0].percent


def test_a_group_that_no_row_has_whole_is_no_column():
    groups = {"g": {"a": 0.5, "b": 0.5}}
    runs = [make_run("icl", ("a",)), make_run("hf", ("b",), groups=groups)]
    board = build(runs)
    assert [column.name for column in board.columns] == ["a", "b"]
    with pytest.raises(InputError, match="no result of these tasks that can be used"):
        build(runs, tasks=["g"])


def test_digests_that_claim_the_same_documents():
    forged = make_result("a", "hf", 0, 0, scores=bits(1, n=3))
    true = make_run()
    answers = replace(
        forged.answers,
        **{key: getattr(true.tasks["a"].answers, key) for key in ("documents", "prompts", "demonstrations")},
    )
    forged = replace(forged, answers=answers)
    board = build([true, make_run("hf", tasks=(forged,)), make_run("icl", tasks=(forged,), seed=5)])
    assert len(board.entries) == 3
    whole = next(entry.name for entry in board.entries if [run.digest for run in entry.runs] == [true.digest])
    assert not any(whole in pair for pair in board.pairs)


def test_what_no_board_can_be_made_of():
    mixed = (make_result("a", "icl", 0, 0), make_result("b", "icl", 0, 0, metric="f1"))
    with pytest.raises(InputError, match="--tasks g: the tasks have different metrics"):
        build([make_run(tasks=mixed, groups={"g": {"a": 0.5, "b": 0.5}})], tasks=["g"])
    with pytest.raises(InputError, match="no results of lm-eval"):
        build([])


HOSTILE = "</script><img src=x>\x1b[31m\x07[link](javascript:x)|`a`*b*\\textbf{x}%$&#_^~\r\n\u202e[bold]"


def hostile_board():
    task = make_result(HOSTILE, "icl", 0, 0)
    arguments = {HOSTILE: HOSTILE, "T": 1}
    runs = [make_run(HOSTILE, ("a", task), pretrained=HOSTILE, arguments=arguments, revision=HOSTILE),
            make_run("=cmd()", ("a", task), pretrained=HOSTILE)]  # fmt: skip
    return build(runs)


def test_names_have_no_control_characters_and_a_limit():
    much = HOSTILE * 99
    board = build([make_run(much, pretrained=much, arguments={HOSTILE: much}, version="x" * 9999)])
    (entry,) = board.entries
    for text in (entry.checkpoint, entry.details, entry.method, entry.arguments, entry.conditions):
        assert text.isprintable() and len(text) < 300
    assert all(sentence.isprintable() for sentence in board.summary)


# Any JSON, as a file may have it.
ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(10**400) | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=6,
)


@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_no_value_stops_a_board(data):
    keys = ("T", "eta", "study", "left_out", "tokens_run", "overflow", "method")
    icl = {key: data.draw(ANY, label=key) for key in keys}
    if data.draw(st.booleans()):
        icl["study"] = {"chosen": data.draw(ANY), "shared": {"cells": data.draw(ANY), "seconds": data.draw(ANY)},
                        "demonstrations": data.draw(ANY)}  # fmt: skip
        icl["left_out"] = {"a": {"demonstrations": data.draw(ANY)}}
    config = {key: data.draw(ANY) for key in ("model_args", "model_num_parameters", "gen_kwargs", "random_seed")}
    if data.draw(st.booleans()):
        config["model_args"] = {"pretrained": data.draw(ANY), "x": data.draw(ANY)}
    results = {key: data.draw(ANY) for key in ("total_evaluation_time_seconds", "chat_template", "system_instruction")}
    arguments = data.draw(st.dictionaries(st.text(max_size=9), ANY, max_size=3))
    numbers = data.draw(st.floats(allow_nan=False, allow_infinity=False)), data.draw(st.floats(0, allow_infinity=False))
    task, metric = data.draw(st.sampled_from(["a", "b", AVERAGE])), data.draw(st.sampled_from(["acc", "strange"]))
    changes = {"value": numbers[0], "stderr": numbers[1], "metric": metric, "samples": data.draw(st.booleans())}
    strange = make_result(task, "x", 0, 0, **changes)
    run = make_run("x", (strange,), icl=icl, arguments=arguments, results={"config": config, **results})
    board = build([make_run(), make_run("x", seed=1), run])
    assert board.entries
    for text in (tables.as_csv(board), tables.as_markdown(board), tables.as_tex(board)):
        text.encode()
    for entry in board.entries:
        assert re.match("lm_eval --model |cat > study-|# Left out, as not all", entry.command)
        assert entry.tokens is None or 0 <= entry.tokens < math.inf
        assert entry.parameters is None or entry.parameters > 0


# Tables.


def test_csv_has_the_numbers_of_the_board():
    board = build(grid("icl", "invicl", tasks=("a", "b")))
    lines = list(csv.DictReader(io.StringIO(tables.as_csv(board))))
    assert len(lines) == 6
    for line in lines:
        entry = named(board.entries, line["entry"])
        cell = entry.cells[line["column"]]
        assert float(line["value"]) == cell.estimate.mean
        assert float(line["standard_error"]) == cell.estimate.error
        assert (int(line["documents"]), int(line["sets"])) == (cell.estimate.documents, cell.estimate.sets)
        assert (int(line["rank_first"]), int(line["rank_last"])) == cell.rank
        assert line["marks"] == "; ".join(cell.marks)
        if cell.difference is None:
            assert (entry.method, line["difference"], line["baseline"]) == ("icl", "", "")
        else:
            assert float(line["difference"]) == cell.difference.mean
            assert (float(line["p"]), float(line["p_holm"])) == (cell.difference.p, cell.p_holm)
            assert named(board.entries, line["baseline"]).method == "icl"


def test_a_text_is_no_formula_in_csv():
    rows = [{"text": text} for text in ("=a", "+a", " -a", "@a", "a@b", -1.5)]
    assert tables.csv_text(rows).splitlines() == ["text", "'=a", "'+a", "' -a", "'@a", "a@b", "-1.5"]


def test_hostile_names_in_tables():
    board = hostile_board()
    lines = list(csv.reader(io.StringIO(tables.as_csv(board))))
    assert len({len(line) for line in lines}) == 1
    assert not [cell for line in lines for cell in line if re.match(r"\s*[=+@]", cell)]
    markdown = tables.as_markdown(board)
    rows = [line for line in markdown.splitlines() if line.startswith("|")]
    assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1
    assert not re.search(r"(?<!\\)[<>`*\[\]]|\x1b", markdown)
    tex = tables.as_tex(board)
    assert not re.search(r"(?<!\\)[%$#_]", re.sub(r"\$(\\pm|\^\\dagger|-)\$", "", tex.partition("\n")[2]))
    assert r"\textbf" not in tex
    assert tex.count("{") == tex.count("}")
    assert all(line.count(" & ") == len(board.columns) + 1 for line in tex.splitlines() if line.endswith(r"\\"))
    assert tex.splitlines()[0].startswith("% ")


@pytest.mark.parametrize("width", [80, 120])
def test_tables_of_the_terminal_fit(width):
    board = build(
        grid("icl", "deepthink", arguments={"T": 4, "max_length": 512}, tasks=("icl_demo_unseen", "icl_sst2"))
    )
    first, second = board.entries[:2]
    for table in (
        tables.overview(board, 10),
        tables.comparison(first, second, board.columns, compare(first.cells, second.cells, board.columns)),
    ):
        console = Console(width=width, file=io.StringIO())
        console.print(table)
        text = console.file.getvalue()
        assert max(map(len, text.splitlines())) <= width
        assert "…" not in text
        assert numbers.value(board.entries[0].cells[AVERAGE].estimate.mean, board.columns[0], unit=True) in text


# Documents.


def test_documents_that_differ_most(tmp_path):
    scores = np.zeros(N)
    scores[[3, 30]] = 1
    runs = [make_run("icl", scores=scores, path=tmp_path / "results_2026.json"), make_run("hf", scores=np.eye(N)[5])]
    sample = {"doc_id": 3, "arguments": {"gen_args_0": {"arg_0": "x" * 500 + "\x1b[31m\nthe end\u202e of it:"}}}
    (tmp_path / "samples_a_2026.jsonl").write_text(json.dumps(sample) + "\n" + '{"doc_id": 5, "argu')
    first, second = (named(build(runs).entries, name) for name in ("icl", "hf"))
    found = differing(first, second, "a", 2)
    assert found[0] == "a, documents that differ most (one set of demonstrations):"
    assert found[1] == "  document 3: A 1, B 0"
    assert found[2].endswith("?[31m the end? of it:")
    assert found[2].startswith("    ...xxx")
    assert len(found[2]) < 80
    assert found[3:] == ["  document 5: A 0, B 1"]
    assert differing(first, second, "a", 0) == []
    assert differing(first, first, "a", 5) == []
