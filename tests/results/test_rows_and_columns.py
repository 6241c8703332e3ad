"""Which runs are one row, and which results one column, of boards as people have them. Cells are means in percent."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from lm_eval_icl.results.board import Board
from lm_eval_icl.results.build import build
from lm_eval_icl.results.read import read
from lm_eval_icl.results.rivals import named
from tests.boards import samples_of, write

ICL = {"method": "icl", "positions": "sequential", "overflow": "drop"}
DEEP = {"method": "deepthink", "T": 5, "eta": 0.01, "momentum": 0.0}


def run(folder: Path, name: str = "", *, icl: Mapping[str, Any] | None = None, **keys: Any) -> Path:
    """A run in a folder of its own, of a model of this package if `icl` is given, with a date of its own."""
    number = len([path for path in folder.iterdir() if path.is_dir()])
    put = {
        "date": 1e9 + number,
        **({"config.icl": icl} if icl is not None else {}),
        **keys.pop("put", {}),
    }
    return write(folder / f"{number:04}", name or (icl or {}).get("method", "hf"), put=put, **keys)


def board_of(folder: Path, **keys: Any) -> Board:
    runs, left_out = read([folder], quiet=True, metric=keys.pop("metric", None))
    return build(runs, left_out, **keys)


def printed(board: Board) -> tuple[list[str], dict[str, dict[str, float]]]:
    """The names of the columns; and by the label of a row, its means."""
    rows = {
        entry.label + (f" on {entry.on}" if len({e.on for e in board.entries}) > 1 else ""): {
            column.name: round(100 * entry.cells[column.name].estimate.mean, 1)
            for column in board.columns
            if column.name in entry.cells
        }
        for entry in board.entries
    }
    return [column.name for column in board.columns], rows


def study(**facts: Any) -> dict[str, Any]:
    return {"model": "org/model", "split": "test", "order": 0, **facts}


def test_deep_thinking_table_1(tmp_path):
    """Shots by task in one row; T and eta, and for the other way of drawing the seeds too, chosen on dev."""
    for task, shots in (("sst2", 8), ("trec", 12)):
        for seed, T in ((0, 3), (1, 7)):
            of_icl = {**ICL, "study": study(demonstrations="stratified")}
            run(tmp_path, icl=of_icl, seed=seed, task=task, shots=shots, right=[1, 0] * 20)
            chosen = {"arguments": {"T": T}, "chosen": ["T", "eta"], "demonstrations": "stratified"}
            of_deep = {**DEEP, "T": T, "eta": 0.1 * seed + 0.01, "study": study(**chosen)}
            run(tmp_path, icl=of_deep, seed=seed, task=task, shots=shots, right=[1, 1, 0, 1] * 10)
        lens = {**ICL, "study": study(demonstrations="lens", chosen=["seeds"])}
        run(tmp_path, icl=lens, seed=5, task=task, shots=shots, right=[1, 1, 1, 1, 0] * 8)
    columns, rows = printed(board_of(tmp_path))
    assert columns == ["average", "sst2", "trec"]
    assert rows == {
        "icl seeds chosen on dev, demonstrations=lens": {
            "average": 80.0,
            "sst2": 80.0,
            "trec": 80.0,
        },
        "deepthink T and eta chosen on dev, demonstrations=stratified": {
            "average": 75.0,
            "sst2": 75.0,
            "trec": 75.0,
        },
        "icl, demonstrations=stratified": {"average": 50.0, "sst2": 50.0, "trec": 50.0},
    }
    assert board_of(tmp_path).common == ("8 to 12 shots",)


def test_deep_thinking_table_2(tmp_path):
    """Groups of multiple-choice tasks, with the first demonstrations, whatever the seed: one prompt set."""
    for seed in (0, 1):
        for icl, right in ((ICL, [1, 0] * 20), (DEEP, [1, 1, 1, 0] * 10)):
            run(
                tmp_path,
                icl=icl,
                task=["mmlu_a", "mmlu_b"],
                right=right,
                put={"config.fewshot_seed": seed},
                **GROUP,
            )
    board = board_of(tmp_path)
    assert printed(board) == (
        ["mmlu", "mmlu_a", "mmlu_b"],
        {
            "deepthink": dict.fromkeys(("mmlu", "mmlu_a", "mmlu_b"), 75.0),
            "icl": dict.fromkeys(("mmlu", "mmlu_a", "mmlu_b"), 50.0),
        },
    )
    assert all("confirmed" in entry.cells["mmlu_a"].marks for entry in board.entries)


GROUP = {"metadata": {"version": 1.0}}


@pytest.fixture(autouse=True)
def groups(monkeypatch):
    """Runs of tasks "GROUP_..." have lm-eval's value of these groups."""
    real = write

    def with_groups(
        *args: Any,
        task: str | Sequence[str] = "t",
        put: Mapping[str, Any] | None = None,
        **keys: Any,
    ) -> Path:
        file = real(*args, task=task, put=put, **keys)
        results = json.loads(file.read_text())
        names = [task] if isinstance(task, str) else task
        for group in sorted(
            {name.partition("_")[0] for name in names if "_" in name and len(names) > 1}
        ):
            of_group = [name for name in names if name.startswith(f"{group}_")]
            value = sum(results["results"][name]["acc,none"] for name in of_group) / len(of_group)
            results["results"][group] = {"acc,none": value, "acc_stderr,none": "N/A"}
            results.setdefault("groups", {})[group] = results["results"][group]
            results.setdefault("group_subtasks", {})[group] = of_group
        file.write_text(json.dumps(results))
        return file

    monkeypatch.setitem(globals(), "write", with_groups)


def test_mmlu_and_bbh_with_their_averages(tmp_path):
    tasks = ["mmlu_a", "mmlu_b", "bbh_a"]
    for icl, right in ((ICL, [1, 0] * 20), (DEEP, [1, 1, 1, 0] * 10)):
        run(tmp_path, icl=icl, task=tasks, right=right)
    columns, rows = printed(board_of(tmp_path))
    assert sorted(columns[1:3]) == ["bbh", "mmlu"]
    assert columns[3:] == sorted(tasks)
    assert columns[0] == "average"
    assert rows["deepthink"] == dict.fromkeys(columns, 75.0)
    run(tmp_path, icl={**ICL, "method": "pcw"}, task="mmlu_a", right=[0] * 39 + [1])
    assert printed(board_of(tmp_path))[1]["pcw"] == {"mmlu_a": 2.5}, (
        "a group has no value without all its tasks"
    )


def test_invicl_table_2(tmp_path):
    """A training under each method and setting: a row a method; a task of two settings is a column of each."""
    for method, right in (("icl", [1, 0] * 20), ("invicl", [1, 1, 1, 0] * 10)):
        for setting, tasks in (("hr", ["a", "b"]), ("qa", ["b"])):
            for task in tasks:
                trained = {"method": method, "steps": 9, "tasks": [setting], "seed": 3}
                icl = {
                    **ICL,
                    "method": method,
                    "trained": trained,
                    "study": study(training=setting),
                }
                files = {"config.model_files_digest": f"{method}{setting}".ljust(16, "0")}
                run(
                    tmp_path,
                    icl=icl,
                    task=task,
                    right=right if setting == "hr" else [1] * 40,
                    put=files,
                )
    groups = {"hr targets": {"a": 0.5, "b [hr]": 0.5}, "qa targets": {"b [qa]": 1.0}}
    board = board_of(tmp_path, groups=groups, tasks=list(groups), columns_by=["training"])
    assert printed(board) == (
        ["hr targets", "qa targets"],
        {
            "invicl": {"hr targets": 75.0, "qa targets": 100.0},
            "icl": {"hr targets": 50.0, "qa targets": 100.0},
        },
    )
    assert board.entries[0].on == "org/model (trained)"
    assert board.baseline == {board.entries[0].name: board.entries[1].name}
    _, rows = printed(board_of(tmp_path))
    assert len(rows) == 4, "otherwise a cell would hold two trainings, which are never averaged"


def test_a_curve_over_shots(tmp_path):
    for shots, right in ((0, [0] * 40), (2, [1, 0] * 20), (8, [1] * 40)):
        for seed in (0, 1):
            run(tmp_path, icl=ICL, shots=shots, seed=seed, right=right)
    run(tmp_path, icl=DEEP, shots=8, right=[1] * 40)
    assert printed(board_of(tmp_path)) == (
        ["t"], {"deepthink, 8 shots": {"t": 100.0}, "icl, 8 shots": {"t": 100.0}, "icl, 2 shots": {"t": 50.0},
                "icl, 0 shots": {"t": 0.0}},
    )  # fmt: skip


def test_chat_beside_plain(tmp_path):
    run(tmp_path, icl=ICL, right=[1, 0] * 20)
    chat = {"chat_template": "x", "chat_template_sha": "1f", "fewshot_as_multiturn": True}
    run(tmp_path, icl=ICL, right=[1] * 40, put=chat)
    columns, rows = printed(board_of(tmp_path))
    assert columns == ["t"]
    assert rows == {"icl, chat, multiturn": {"t": 100.0}, "icl": {"t": 50.0}}


RULES = {"batch": {"says": [0, 1] * 20, "rule": "batch", "arguments": {}, "transductive": True}}


def test_rules_beside_raw(tmp_path):
    """Compared within a rule: the difference to icl is to icl under it, that to raw stands beside it."""
    for seed in (0, 1):
        run(tmp_path, "icl", seed=seed, says=[0] * 40, rules=RULES)
        rules = {"batch": {**RULES["batch"], "says": [0, 1, 0, 0] * 10}}
        run(tmp_path, "star", seed=seed, says=[0, 1, 0, 1] * 10, rules=rules)
    board = board_of(tmp_path)
    columns, rows = printed(board)
    assert columns == ["t"]
    assert {label: of["t"] for label, of in rows.items()} == {
        "star": 100.0, "icl": 50.0, "icl, decide: batch": 100.0, "star, decide: batch": 75.0,
    }  # fmt: skip
    star, under = (
        next(e for e in board.entries if e.label == name).cells["t"]
        for name in ("star", "star, decide: batch")
    )
    assert star.difference.mean == 0.5
    assert star.to_raw is None
    assert board.majority(board.columns[0]) == 0.5, "of the right answers, whatever is predicted"
    assert under.difference.mean == -0.25
    assert under.to_raw.mean == -0.25
    raw = board.named(board.baseline[board.entries[0].name])
    assert raw.label == "icl"
    assert raw.rule is None
    assert [e.cells["t"].is_best for e in board.entries] == [True, False, True, False], (
        "among the two of one rule"
    )


def test_hf_beside_icl_on_a_local_model(tmp_path):
    local = {"config.model_args": {"pretrained": "/tmp/m"}, "config.model_sha": "", DIGEST: "ab" * 8,
             "config.model_dtype": "torch.float32"}  # fmt: skip
    run(
        tmp_path,
        "hf",
        right=[1, 0] * 20,
        put={**local, "config.batch_size": "8", "config.device": "cuda"},
    )
    run(tmp_path, right=[1, 0] * 20, icl=ICL, put=local)
    board = board_of(tmp_path)
    assert printed(board)[1] == {"hf": {"t": 50.0}, "icl": {"t": 50.0}}
    assert len({e.on for e in board.entries}) == 1
    assert board.named(next(iter(board.baseline))).label == "hf"


def test_with_and_without_samples(tmp_path):
    run(tmp_path, icl=ICL, right=[1, 0] * 20, seed=0)
    run(tmp_path, icl=ICL, right=[1, 1, 1, 0] * 10, seed=1, samples=False)
    columns, rows = printed(board_of(tmp_path, tasks=["t"]))
    assert columns[-1] == "t (documents not recorded)", "which may be other documents"
    assert list(rows["icl"].values())[-2:] == [50.0, 75.0]


def test_a_limit_that_differs_by_task(tmp_path):
    """It is of the column: one row, and a task that was run with two limits is two columns."""
    for task, limit in (("a", 40), ("b", 20), ("a", 20)):
        run(tmp_path, icl=ICL, task=task, right=[1, 0] * (limit // 2), put={"config.limit": limit})
    assert printed(board_of(tmp_path)) == (
        ["average", "a (limit=20)", "a (limit=40)", "b"],
        {"icl": {"average": 50.0, "a (limit=20)": 50.0, "a (limit=40)": 50.0, "b": 50.0}},
    )


def test_metaicls_macro_f1(tmp_path):
    """Its value is of pairs of classes; the rows are found as for any metric."""
    for seed in (0, 1):
        file = run(tmp_path, icl=ICL, seed=seed, put={"config.icl.study": study(metric="metaicl")})
        samples = [json.loads(line) for line in samples_of(file, "t").open()]
        for number, sample in enumerate(samples):
            sample["metaicl"] = [["a", "b"][number % 2], "a"]
            sample["metrics"] = ["acc", "metaicl"]
            sample["doc"] |= {"prediction": 0, "options": ["a", "b"]}
        samples_of(file, "t").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
        results = json.loads(file.read_text())
        results["results"]["t"] |= {"metaicl,none": 1 / 3}
        file.write_text(json.dumps(results))
    board = board_of(tmp_path)
    assert printed(board) == (["t"], {"icl": {"t": 33.3}})
    assert board.columns[0].metric == "metaicl"
    estimate = board.entries[0].cells["t"].estimate
    assert estimate.scope == "sets"
    assert estimate.mean == pytest.approx(1 / 3)


DIGEST = "config.model_files_digest"
QUANTIZED = {"config.model_args": {"pretrained": "org/model", "load_in_4bit": True}}
COLD, WARM = ({"generation_kwargs": {"temperature": t}} for t in (0, 1))
# What is never averaged: by name, what two runs differ in, and how many rows and columns there are then.
APART: dict[str, tuple[dict[str, Any], dict[str, Any], int, int]] = {
    "weights": ({"put": {DIGEST: "a" * 16}}, {"put": {DIGEST: "b" * 16}}, 2, 1),
    "revision": ({"put": {"config.model_sha": "a"}}, {"put": {"config.model_sha": "b"}}, 2, 1),
    "dtype": ({"put": {"config.model_dtype": "torch.float16"}}, {"put": {"config.model_dtype": "torch.float32"}}, 2, 1),
    "T": ({"icl": DEEP}, {"icl": {**DEEP, "T": 7}}, 2, 1),
    "method": ({"icl": ICL}, {"icl": {**ICL, "method": "pcw"}}, 2, 1),
    "an argument of the model": ({}, {"put": QUANTIZED}, 2, 1),
    "anything that is in no list": ({"icl": ICL}, {"icl": {**ICL, "new": 1}}, 2, 1),
    "shots": ({"shots": 2}, {"shots": 4}, 2, 1),
    "generation arguments": (COLD, WARM, 1, 3),
    "the template": ({"doc_to_text": "a"}, {"doc_to_text": "b"}, 1, 3),
    "documents": ({"first": 0}, {"first": 100}, 1, 3),
    "a filter": ({"filter_list": [{"name": "none", "a": 1}]}, {"filter_list": [{"name": "none", "a": 2}]}, 1, 3),
    "anything of the task": ({}, {"new": 1}, 1, 3),
    "the version": ({}, {"put": {"versions.t": 2.0}}, 1, 3),
}  # fmt: skip


@pytest.mark.parametrize("what", APART)
def test_what_is_never_averaged(tmp_path, what):
    first, second, rows, columns = APART[what]
    run(tmp_path, right=[1] * 40, **first)
    run(tmp_path, right=[1, 0] * 20, **second)
    names, found = printed(board_of(tmp_path))
    assert len(found) == rows
    assert len(names) == columns
    values = [
        value for of_row in found.values() for name, value in of_row.items() if name != "average"
    ]
    assert sorted(values) == [50.0, 100.0]


def test_one_run_does_not_confirm_itself(tmp_path):
    """A second file of the same date is no second run."""
    for note in ("", "x"):
        run(tmp_path, icl=ICL, right=[1, 0] * 20, put={"date": 5.0, "pretty_env_info": note})
    assert "confirmed" not in board_of(tmp_path).entries[0].cells["t"].marks
    run(tmp_path, icl=ICL, right=[1, 0] * 20, put={"date": 6.0})
    assert "confirmed" in board_of(tmp_path).entries[0].cells["t"].marks


def test_study_json_is_read_beside_the_cells(tmp_path):
    file = run(tmp_path, icl={**DEEP, "study": study(arguments={"T": 5})}, right=[1, 0] * 20)
    cells = {file.relative_to(tmp_path).as_posix(): {"expected": {"t": 0.6}}}
    (tmp_path / "study.json").write_text(json.dumps({"study": "x", "cells": cells, "failures": {}}))
    assert board_of(tmp_path).entries[0].cells["t"].expected == 0.6


def test_a_rule_chosen_on_dev(tmp_path):
    """The values of the rule that each cell's study chose stand in one row."""
    for seed, rule in ((0, "batch"), (1, None)):
        facts = study(chosen=["decide"], rule=rule)
        run(tmp_path, "icl", seed=seed, says=[0] * 40, rules=RULES, put={"config.icl.study": facts})
    assert printed(board_of(tmp_path))[1] == {
        "icl": {"t": 50.0},
        "icl, decide: chosen on dev": {"t": 75.0},
    }


def test_demonstrations_that_were_left_out_mark_cells_and_differences(tmp_path):
    lost = {"left_out": {"t": {"documents": 3, "demonstrations": 7}}}
    for method, facts in (("icl", lost), ("pcw", {}), ("nope", lost)):
        run(tmp_path, icl={**ICL, **facts, "method": method}, right=[1, 0] * 20)
    cells = {entry.method: entry.cells["t"] for entry in board_of(tmp_path).entries}
    own = "7 demonstrations were left out of 3 documents' prompts, which were too long."
    of_baseline = "7 demonstrations were left out of its baseline's prompts."
    assert {
        method: [mark for mark in cell.marks if "left out" in mark]
        for method, cell in cells.items()
    } == {
        "icl": [own],
        "pcw": [of_baseline],
        "nope": [own, of_baseline],
    }
    assert {method: cell.left_out for method, cell in cells.items()} == {
        "icl": 7,
        "pcw": 0,
        "nope": 7,
    }


def test_where_demonstrations_are_from_marks_cells(tmp_path):
    run(tmp_path, icl={**ICL, "own_demonstrations": {"t": {"documents": 3}}})
    facts = {"how": "similar:pool=5000", "pool": {"rows": 5452}, "own_copies": 1}
    run(tmp_path, icl={**ICL, "method": "pcw"}, metadata={"retrieved": facts})
    marks = {entry.method: entry.cells["t"].marks for entry in board_of(tmp_path).entries}
    words = "5,000 of the 5,452 rows of the few-shot split, which have copies of 1 document,"
    assert words in marks["pcw"][0]
    assert marks["icl"][0] == "3 documents stand among their own demonstrations, with the answer."


def test_variants_of_the_baseline_are_compared_with_it_and_other_sets_too(tmp_path):
    for seed in range(3):
        write(tmp_path / "a", "icl", seed, says=[0, 1] * 18 + [0] * 4)
        write(
            tmp_path / "b",
            "icl",
            seed,
            says=[0, 1] * 17 + [0] * 6,
            put={"config.model_args.canonical_order": True},
        )
        write(tmp_path / "c", "star", seed + 5, says=[0, 1] * 16 + [0] * 8)
    board = build(*read([tmp_path], quiet=True))
    plain, variant, other = (
        named(board.entries, name) for name in ("icl", "icl canonical_order=True", "star")
    )
    assert board.baseline[variant.name] == plain.name not in board.baseline
    assert variant.cells["t"].difference.mean == pytest.approx(-0.025)
    assert variant.cells["t"].difference.scope == "sets"
    assert other.cells["t"].difference.scope == "other sets" in other.cells["t"].marks
    assert other.cells["t"].is_worse is False
    assert "95.0% (its own 95% interval: 82.1% to 99.8%)" in board.summary[0]
    assert "icl, not distinguishable from icl c" in board.summary[0]


def test_one_answer_to_all_documents_is_counted_over_all_tasks(tmp_path):
    lost = {**ICL, "left_out": {"b": {"documents": 1, "demonstrations": 2}}}
    for seed, says in enumerate(([0] * 40, [0, 1] * 20, [1] * 40)):
        run(tmp_path, icl=ICL, seed=seed, task="a", says=says)
        run(tmp_path, icl=lost, seed=seed, task="b", says=[0] * 40, gold=[0] * 30 + [1] * 10)
    cells = board_of(tmp_path).entries[0].cells
    marks = cells["average"].marks
    assert (
        "With 5 of 6 prompts it gives one answer to nearly all documents, on b with 3 of its 3."
        in marks
    )
    assert "With 2 of 3 prompts it gives one answer to nearly all documents." in cells["a"].marks
    assert "collapsed" in cells["b"].marks
    assert any(mark.startswith("b: 2 demonstrations") for mark in marks)
    above = cells["average"].to_majority
    assert above.mean == pytest.approx(1 / 12) and above.p > 0.05, (
        "right on all documents with one set of six"
    )
