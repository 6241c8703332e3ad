"""Which runs are one row, and which results one column, of boards as people have them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import yaml

from lm_eval_icl.results.board import Board
from lm_eval_icl.results.collect import collect
from lm_eval_icl.results.comparisons import compare
from lm_eval_icl.results.read import read
from tests.boards import write, write_samples
from tests.results.files import board_of, by_method, row_of, samples_in

ICL = {"method": "icl", "positions": "sequential", "overflow": "drop"}
DEEP = {"method": "deepthink", "T": 5, "eta": 0.01, "momentum": 0.0}
PCW = {**ICL, "method": "pcw"}
# Whether each of forty documents is answered rightly.
ALL = [1] * 40
MOST = [1, 1, 1, 1, 0] * 8
MORE = [1, 1, 1, 0] * 10
HALF = [1, 0] * 20
NO_ONE = [0] * 40


def run(
    folder: Path,
    name: str = "",
    *,
    icl: Mapping[str, Any] | None = None,
    task: str | Sequence[str] = "t",
    put: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Path:
    """A run in a folder and with a date of its own; `icl` says what a model of this package is.

    Several tasks GROUP_... have lm-eval's value of their groups.
    """
    number = len([path for path in folder.glob("*") if path.is_dir()])
    facts = {"date": 1e9 + number}
    if icl is not None:
        facts["config.icl"] = icl
        name = name or icl["method"]
    facts |= put or {}
    file = write(folder / f"{number:04}", name or "hf", task=task, put=facts, **settings)
    if not isinstance(task, str):
        add_groups(file, task)
    return file


def add_groups(file: Path, tasks: Sequence[str]) -> None:
    results = json.loads(file.read_text())
    results["groups"] = {}
    results["group_subtasks"] = {}
    for group in sorted({task.partition("_")[0] for task in tasks}):
        members = [task for task in tasks if task.startswith(f"{group}_")]
        value = sum(results["results"][task]["acc,none"] for task in members) / len(members)
        results["groups"][group] = {"acc,none": value, "acc_stderr,none": "N/A"}
        results["group_subtasks"][group] = members
    results["results"] |= results["groups"]
    file.write_text(json.dumps(results))


def seen(board: Board) -> str:
    """The columns, and below them a line for each row: its label, and its means in percent."""
    models = {entry.on for entry in board.entries}
    lines = [" | ".join(column.name for column in board.columns)]
    for entry in board.entries:
        parts = [entry.label if len(models) == 1 else f"{entry.label} on {entry.on}"]
        for column in board.columns:
            cell = entry.cells.get(column.name)
            parts.append("-" if cell is None else f"{100 * cell.estimate.mean:.1f}")
        lines.append(" | ".join(parts))
    return "\n".join(lines)


def assert_seen(board: Board, expected: str) -> None:
    assert seen(board) == dedent(expected).strip()


def study(**facts: Any) -> dict[str, Any]:
    return {"model": "org/model", "split": "test", "order": 0, **facts}


def test_deep_thinking_table_1(tmp_path):
    """Shots by task in one row; T and eta are chosen on dev, and with lens the seeds too."""
    drawn = study(demonstrations="stratified")
    lens = study(demonstrations="lens", chosen=["seeds"])
    for task, shots in (("sst2", 8), ("trec", 12)):
        settings = {"task": task, "shots": shots}
        for seed, T in ((0, 3), (1, 7)):
            run(tmp_path, icl={**ICL, "study": drawn}, seed=seed, right=HALF, **settings)
            chosen = {**drawn, "arguments": {"T": T}, "chosen": ["T", "eta"]}
            deep = {**DEEP, "T": T, "eta": 0.1 * seed + 0.01, "study": chosen}
            run(tmp_path, icl=deep, seed=seed, right=[1, 1, 0, 1] * 10, **settings)
        run(tmp_path, icl={**ICL, "study": lens}, seed=5, right=MOST, **settings)
    board = board_of(tmp_path)
    assert_seen(
        board,
        """
        average | sst2 | trec
        icl seeds chosen on dev, demonstrations=lens | 80.0 | 80.0 | 80.0
        deepthink T and eta chosen on dev, demonstrations=stratified | 75.0 | 75.0 | 75.0
        icl, demonstrations=stratified | 50.0 | 50.0 | 50.0
        """,
    )
    assert board.common == ("8 to 12 shots",)


def test_deep_thinking_table_2(tmp_path):
    """Groups of multiple-choice tasks, with the first demonstrations whatever the seed."""
    for seed in (0, 1):
        settings = {
            "task": ["mmlu_a", "mmlu_b"],
            "put": {"config.fewshot_seed": seed},
            "metadata": {"version": 1.0},
        }
        run(tmp_path, icl=ICL, right=HALF, **settings)
        run(tmp_path, icl=DEEP, right=MORE, **settings)
    board = board_of(tmp_path)
    assert_seen(
        board,
        """
        mmlu | mmlu_a | mmlu_b
        deepthink | 75.0 | 75.0 | 75.0
        icl | 50.0 | 50.0 | 50.0
        """,
    )
    for entry in board.entries:
        assert "confirmed" in entry.cells["mmlu_a"].marks


def test_mmlu_and_bbh_with_their_averages(tmp_path):
    """A group has no value without all its tasks."""
    tasks = ["mmlu_a", "mmlu_b", "bbh_a"]
    run(tmp_path, icl=ICL, task=tasks, right=HALF)
    run(tmp_path, icl=DEEP, task=tasks, right=MORE)
    run(tmp_path, icl=PCW, task="mmlu_a", right=[0] * 39 + [1])
    assert_seen(
        board_of(tmp_path),
        """
        average | bbh | mmlu | bbh_a | mmlu_a | mmlu_b
        deepthink | 75.0 | 75.0 | 75.0 | 75.0 | 75.0 | 75.0
        icl | 50.0 | 50.0 | 50.0 | 50.0 | 50.0 | 50.0
        pcw | - | - | - | - | 2.5 | -
        """,
    )


def test_a_group_without_a_result_of_one_task(tmp_path):
    """A task lacks the rule that was chosen on the dev set."""
    facts = {**ICL, "study": study(chosen=["T", "decide"], rule="batch")}
    file = run(tmp_path, icl=facts, task=["g_a", "g_b"], right=HALF, rules=RULES)
    results = json.loads(file.read_text())
    del results["results"]["g_b"]["acc,batch"]
    results["configs"]["g_b"]["metadata"] = {}
    file.write_text(json.dumps(results))
    assert [column.name for column in board_of(tmp_path).columns] == ["g_a"]


def trained_run(folder: Path, method: str, setting: str, task: str, right: Sequence[int]) -> None:
    icl = {
        **ICL,
        "method": method,
        "trained": {"method": method, "steps": 9, "tasks": [setting], "seed": 3},
        "study": study(training=setting),
    }
    weights = f"{method}{setting}".ljust(16, "0")
    run(folder, icl=icl, task=task, right=right, put={"config.model_files_digest": weights})


def test_invicl_table_2(tmp_path):
    """A training under each method and setting is a row a method.

    A task of two settings is a column of each.
    """
    for method, right in (("icl", HALF), ("invicl", MORE)):
        trained_run(tmp_path, method, "hr", "a", right)
        trained_run(tmp_path, method, "hr", "b", right)
        trained_run(tmp_path, method, "qa", "b", ALL)
    groups = {"hr targets": {"a": 0.5, "b [hr]": 0.5}, "qa targets": {"b [qa]": 1.0}}
    board = board_of(tmp_path, groups=groups, tasks=list(groups), columns_by=["training"])
    assert_seen(
        board,
        """
        hr targets | qa targets
        invicl | 75.0 | 100.0
        icl | 50.0 | 100.0
        """,
    )
    invicl, icl = board.entries
    assert invicl.on == "org/model (trained)"
    assert board.baseline == {invicl.name: icl.name}
    # Otherwise a cell would hold two trainings, which are never averaged.
    assert len(board_of(tmp_path).entries) == 4


def test_system_instructions_and_templates_tell_rows_apart(tmp_path):
    for number in range(2):
        put = {"system_instruction": f"Be {number}.", "chat_template": f"{number}" * 40}
        run(tmp_path, icl=ICL, put=put)
    one, other = [entry.label for entry in board_of(tmp_path).entries]
    assert one != other
    assert "icl chat " in one


def test_trainings_of_one_name_are_not_averaged(tmp_path):
    """The options of a study's training were changed between two seeds."""
    for steps, right in ((1, HALF), (3, ALL)):
        facts = study(training="t", options={"steps": steps})
        run(tmp_path, icl={**ICL, "study": facts}, seed=steps, right=right)
    assert_seen(
        board_of(tmp_path),
        """
        t
        icl, training options={"steps": 3} | 100.0
        icl, training options={"steps": 1} | 50.0
        """,
    )


def test_checkpoints_of_one_training_are_not_averaged(tmp_path):
    """The checkpoint was removed, and trained again elsewhere for a further seed."""
    for seed in (0, 1):
        facts = study(training="t", options={"steps": 1}, weights=str(seed) * 16)
        run(tmp_path, icl={**ICL, "study": facts}, seed=seed)
    labels = {entry.label for entry in board_of(tmp_path).entries}
    assert labels == {"icl, trained weights 000000", "icl, trained weights 111111"}


def test_a_curve_over_shots(tmp_path):
    for shots, right in ((0, NO_ONE), (2, HALF), (8, ALL)):
        for seed in (0, 1):
            run(tmp_path, icl=ICL, shots=shots, seed=seed, right=right)
    run(tmp_path, icl=DEEP, shots=8, right=ALL)
    assert_seen(
        board_of(tmp_path),
        """
        t
        deepthink, 8 shots | 100.0
        icl, 8 shots | 100.0
        icl, 2 shots | 50.0
        icl, 0 shots | 0.0
        """,
    )


def test_chat_beside_plain(tmp_path):
    run(tmp_path, icl=ICL, right=HALF)
    chat = {"chat_template": "x", "chat_template_sha": "1f", "fewshot_as_multiturn": True}
    run(tmp_path, icl=ICL, right=ALL, put=chat)
    assert_seen(
        board_of(tmp_path),
        """
        t
        icl, chat, multiturn | 100.0
        icl | 50.0
        """,
    )


BATCH = {"rule": "batch", "arguments": {}, "transductive": True}
RULES = {"batch": {**BATCH, "says": [0, 1] * 20}}


def test_rules_beside_raw(tmp_path):
    """The difference to icl is to icl under the same rule; that to raw stands beside it."""
    others = {"batch": {**BATCH, "says": [0, 1, 0, 0] * 10}}
    for seed in (0, 1):
        run(tmp_path, "icl", seed=seed, says=[0] * 40, rules=RULES)
        run(tmp_path, "star", seed=seed, says=[0, 1, 0, 1] * 10, rules=others)
    board = board_of(tmp_path)
    assert_seen(
        board,
        """
        t
        star | 100.0
        icl | 50.0
        icl, decide: batch | 100.0
        star, decide: batch | 75.0
        """,
    )
    # The best is the best among the two of one rule.
    assert [entry.cells["t"].is_best for entry in board.entries] == [True, False, True, False]
    star = row_of(board, "star").cells["t"]
    assert star.difference.mean == 0.5
    assert star.to_raw is None
    under_rule = row_of(board, "star, decide: batch").cells["t"]
    assert under_rule.difference.mean == -0.25
    assert under_rule.to_raw.mean == -0.25
    # The majority is that of the right answers, whatever is predicted.
    assert board.majority(board.columns[0]) == 0.5
    raw = board.named(board.baseline[board.entries[0].name])
    assert raw.label == "icl"
    assert raw.rule is None


def test_hf_beside_icl_on_a_local_model(tmp_path):
    local = {
        "config.model_args": {"pretrained": "/tmp/m"},
        "config.model_sha": "",
        "config.model_files_digest": "ab" * 8,
        "config.model_dtype": "torch.float32",
    }
    device = {"config.batch_size": "8", "config.device": "cuda"}
    run(tmp_path, "hf", right=HALF, put={**local, **device})
    run(tmp_path, right=HALF, icl=ICL, put=local)
    board = board_of(tmp_path)
    assert_seen(
        board,
        """
        t
        hf | 50.0
        icl | 50.0
        """,
    )
    assert len({entry.on for entry in board.entries}) == 1
    assert board.named(next(iter(board.baseline))).label == "hf"


def test_with_and_without_samples(tmp_path):
    """What was not recorded may be other documents."""
    run(tmp_path, icl=ICL, right=HALF, seed=0)
    run(tmp_path, icl=ICL, right=MORE, seed=1, samples=False)
    header, line = seen(board_of(tmp_path, tasks=["t"])).splitlines()
    assert header.startswith("t (documents ")
    assert header.endswith(") | t (documents not recorded)")
    assert line == "icl | 50.0 | 75.0"


def test_a_limit_that_differs_by_task(tmp_path):
    """It is of the column: one row, and a task that was run with two limits is two columns, which
    have no average, since they share documents."""
    for task, limit in (("a", 40), ("b", 20), ("a", 20)):
        run(tmp_path, icl=ICL, task=task, right=HALF[:limit], put={"config.limit": limit})
    assert_seen(
        board_of(tmp_path),
        """
        a (limit=20) | a (limit=40) | b
        icl | 50.0 | 50.0 | 50.0
        """,
    )


def test_metaicls_macro_f1(tmp_path):
    """Its value is of pairs of classes; the rows are found as for any metric."""
    for seed in (0, 1):
        file = run(tmp_path, icl=ICL, seed=seed, put={"config.icl.study": study(metric="metaicl")})
        samples = samples_in(file)
        for number, sample in enumerate(samples):
            sample["metaicl"] = ["ab"[number % 2], "a"]
            sample["metrics"] = ["acc", "metaicl"]
            sample["doc"] |= {"prediction": 0, "options": ["a", "b"]}
        write_samples(file, "t", samples)
        results = json.loads(file.read_text())
        results["results"]["t"]["metaicl,none"] = 1 / 3
        file.write_text(json.dumps(results))
    board = board_of(tmp_path)
    assert_seen(
        board,
        """
        t
        icl | 33.3
        """,
    )
    assert board.columns[0].metric == "metaicl"
    estimate = board.entries[0].cells["t"].estimate
    assert estimate.scope == "sets"
    assert estimate.mean == pytest.approx(1 / 3)


# What two runs differ in, by name. Neither is ever averaged with the other.
TWO_ROWS = yaml.safe_load("""
weights:
  - {put: {config.model_files_digest: aaaaaaaaaaaaaaaa}}
  - {put: {config.model_files_digest: bbbbbbbbbbbbbbbb}}
revision:
  - {put: {config.model_sha: a}}
  - {put: {config.model_sha: b}}
dtype:
  - {put: {config.model_dtype: torch.float16}}
  - {put: {config.model_dtype: torch.float32}}
T:
  - {icl: {method: deepthink, T: 5, eta: 0.01, momentum: 0.0}}
  - {icl: {method: deepthink, T: 7, eta: 0.01, momentum: 0.0}}
method:
  - {icl: {method: icl, positions: sequential, overflow: drop}}
  - {icl: {method: pcw, positions: sequential, overflow: drop}}
an argument of the model:
  - {}
  - {put: {config.model_args: {pretrained: org/model, load_in_4bit: true}}}
anything that is in no list:
  - {icl: {method: icl, positions: sequential, overflow: drop}}
  - {icl: {method: icl, positions: sequential, overflow: drop, new: 1}}
shots:
  - {shots: 2}
  - {shots: 4}
""")
TWO_COLUMNS = yaml.safe_load("""
generation arguments:
  - {generation_kwargs: {temperature: 0}}
  - {generation_kwargs: {temperature: 1}}
the template:
  - {doc_to_text: a}
  - {doc_to_text: b}
documents:
  - {first: 0}
  - {first: 100}
a filter:
  - {filter_list: [{name: none, a: 1}]}
  - {filter_list: [{name: none, a: 2}]}
anything of the task:
  - {}
  - {new: 1}
the version:
  - {}
  - {put: {versions.t: 2.0}}
""")


@pytest.mark.parametrize("settings", TWO_ROWS.values(), ids=TWO_ROWS)
def test_settings_of_the_model_and_the_method_are_rows(tmp_path, settings):
    first, second = settings
    run(tmp_path, right=ALL, **first)
    run(tmp_path, right=HALF, **second)
    header, *lines = seen(board_of(tmp_path)).splitlines()
    assert header == "t"
    assert [line.split(" | ")[1] for line in lines] == ["100.0", "50.0"]


@pytest.mark.parametrize("settings", TWO_COLUMNS.values(), ids=TWO_COLUMNS)
def test_settings_of_the_task_are_columns(tmp_path, settings):
    first, second = settings
    run(tmp_path, right=ALL, **first)
    run(tmp_path, right=HALF, **second)
    header, line = seen(board_of(tmp_path)).splitlines()
    assert "average" not in header
    assert sorted(line.split(" | ")[1:]) == ["100.0", "50.0"]


FIRST = {"metadata": {"demonstrations": "first"}}


@pytest.mark.parametrize("what", ["a rule", "a fit"])
def test_what_else_a_seed_draws_makes_sets_of_the_same_demonstrations(tmp_path, what):
    """They are paired by seed, and each with the one set of a row that draws nothing else."""
    gold = [0, 1] * 20
    run(tmp_path, icl=DEEP, says=[0] * 40, gold=gold, **FIRST)
    for seed, says in ((0, [0] * 40), (1, gold), (1, gold)):
        settings = {"says": says, "gold": gold, "put": {"config.fewshot_seed": seed}}
        fitted = [{"task": "t", "labels": [3]}]
        if what == "a rule":
            settings |= {"says": [0] * 40, "rules": {"domain": {"seed": seed, "says": says}}}
            fitted = []
        for method in ("icl", "pcw"):
            run(tmp_path, icl={**ICL, "method": method, "fitted": fitted}, **settings, **FIRST)
    board = board_of(tmp_path)
    rule = ", decide: domain" if what == "a rule" else ""
    cell = row_of(board, f"icl{rule}").cells["t"]
    assert [each.label for each in cell.sets] == ["seed 0", "seed 1"]
    assert cell.estimate.mean == 0.75
    assert "confirmed" in cell.marks
    assert "differs" not in cell.marks
    same = row_of(board, f"pcw{rule}").cells
    assert compare(same, {"t": cell}, board.columns[0]).sets == 2
    fixed = row_of(board, "deepthink").cells
    for one, other, sign in ((fixed, same, -1), (same, fixed, 1)):
        difference = compare(one, other, board.columns[0])
        assert (difference.mean, difference.sets, difference.scope) == (sign * 0.25, 2, "sets")


def test_one_set_of_labels_of_fixed_rows_is_one_that_was_drawn(tmp_path):
    run(tmp_path, icl=ICL, metadata={"demonstrations": "first", "labels": "random"})
    (entry,) = board_of(tmp_path).entries
    assert "one set" in entry.cells["t"].marks


def test_one_run_does_not_confirm_itself(tmp_path):
    """A second file of the same date is no second run."""
    for note in ("", "x"):
        run(tmp_path, icl=ICL, right=HALF, put={"date": 5.0, "pretty_env_info": note})
    assert "confirmed" not in board_of(tmp_path).entries[0].cells["t"].marks
    run(tmp_path, icl=ICL, right=HALF, put={"date": 6.0})
    assert "confirmed" in board_of(tmp_path).entries[0].cells["t"].marks


def test_study_json_is_read_beside_the_cells(tmp_path):
    file = run(tmp_path, icl={**DEEP, "study": study(arguments={"T": 5})}, right=HALF)
    cells = {file.relative_to(tmp_path).as_posix(): {"expected": {"t": 0.6}}}
    progress = {"study": "x", "cells": cells, "failures": {}}
    (tmp_path / "study.json").write_text(json.dumps(progress))
    assert board_of(tmp_path).entries[0].cells["t"].expected == 0.6


def test_what_a_changed_study_no_longer_chooses_is_left_out(tmp_path):
    """The file stays: another change may choose it again. Other cells count as before."""
    facts = study(chosen=["eta"])
    for eta, right in ((0.1, MOST), (0.2, HALF)):
        file = run(tmp_path, icl={**DEEP, "eta": eta, "study": facts}, right=right)
    run(tmp_path, icl={**ICL, "study": study()}, right=ALL)
    cells = {file.relative_to(tmp_path).as_posix(): {"expected": {}}}
    (tmp_path / "study.json").write_text(json.dumps({"cells": cells}))
    board = board_of(tmp_path)
    assert seen(board).split("\n")[1:] == ["icl | 100.0", "deepthink eta chosen on dev | 50.0"]
    assert len(board.left_out) == 1
    assert "no longer chosen" in board.left_out[0].why


def test_what_a_study_no_longer_chooses_is_left_out_wherever_the_reader_stands(
    tmp_path, monkeypatch
):
    """Also if nothing has been made since the study was changed."""
    file = run(tmp_path / "cells", icl={**DEEP, "study": study(chosen=["eta"])}, right=HALF)
    (tmp_path / "study.json").write_text(json.dumps({"cells": {}}))
    monkeypatch.chdir(file.parent)
    for path in (tmp_path, Path()):
        _, (left,) = read([path], quiet=True)
        assert "no longer chosen" in left.why


def test_what_is_collected_in_the_folder_of_a_study_is_read(tmp_path):
    file = run(tmp_path / "cells", icl={**DEEP, "study": study(chosen=["eta"])}, right=HALF)
    cells = {file.relative_to(tmp_path).as_posix(): {"expected": {}}}
    (tmp_path / "study.json").write_text(json.dumps({"cells": cells}))
    collect(read([tmp_path], quiet=True)[0], tmp_path / "shared")
    assert len(board_of(tmp_path / "shared").entries) == 1


def test_a_rule_chosen_on_dev(tmp_path):
    """The values of the rule that each cell's study chose stand in one row."""
    for seed, rule in ((0, "batch"), (1, None)):
        facts = study(chosen=["decide"], rule=rule)
        run(tmp_path, "icl", seed=seed, says=[0] * 40, rules=RULES, put={"config.icl.study": facts})
    assert_seen(
        board_of(tmp_path),
        """
        t
        icl | 50.0
        icl, decide: chosen on dev | 75.0
        """,
    )


def test_demonstrations_that_were_left_out_mark_cells_and_differences(tmp_path):
    lost = {"left_out": {"t": {"documents": 3, "demonstrations": 7}}}
    for method, facts in (("icl", lost), ("pcw", {}), ("nope", lost)):
        run(tmp_path, icl={**ICL, **facts, "method": method}, right=HALF)
    rows = by_method(board_of(tmp_path))
    own = "7 demonstrations were left out of 3 documents' prompts, which were too long."
    of_baseline = "7 demonstrations were left out of its baseline's prompts."

    def marks(method: str) -> list[str]:
        return [mark for mark in rows[method].cells["t"].marks if "left out" in mark]

    assert marks("icl") == [own]
    assert marks("pcw") == [of_baseline]
    assert marks("nope") == [own, of_baseline]
    numbers = {method: row.cells["t"].left_out for method, row in rows.items()}
    assert numbers == {"icl": 7, "pcw": 0, "nope": 7}


def test_where_demonstrations_are_from_marks_cells(tmp_path):
    run(tmp_path, icl={**ICL, "own_demonstrations": {"t": {"documents": 3}}})
    facts = {"how": "similar:pool=5000", "pool": {"rows": 5452}, "own_copies": 1}
    run(tmp_path, icl=PCW, metadata={"retrieved": facts})
    rows = by_method(board_of(tmp_path))
    words = "5,000 of the 5,452 rows of the few-shot split, which have copies of documents (1),"
    assert words in rows["pcw"].cells["t"].marks[0]
    own = "3 documents stand among their own demonstrations, with the answer."
    assert rows["icl"].cells["t"].marks[0] == own


def test_variants_of_the_baseline_are_compared_with_it_and_other_sets_too(tmp_path):
    canonical = {"config.model_args.canonical_order": True}
    for seed in range(3):
        write(tmp_path / "a", "icl", seed, says=[0, 1] * 18 + [0] * 4)
        write(tmp_path / "b", "icl", seed, says=[0, 1] * 17 + [0] * 6, put=canonical)
        write(tmp_path / "c", "star", seed + 5, says=[0, 1] * 16 + [0] * 8)
    board = board_of(tmp_path)
    plain = row_of(board, "icl")
    variant = row_of(board, "icl canonical_order=True")
    assert board.baseline[variant.name] == plain.name not in board.baseline
    difference = variant.cells["t"].difference
    assert difference.mean == pytest.approx(-0.025)
    assert difference.scope == "sets"
    other = row_of(board, "star").cells["t"]
    assert other.difference.scope == "other sets" in other.marks
    assert other.is_worse is False
    assert "95.0% (its own 95% interval: 82.1% to 99.8%)" in board.summary[0]
    assert "icl, not distinguishable from icl c" in board.summary[0]


def test_one_answer_to_all_documents_is_counted_over_all_tasks(tmp_path):
    lost = {**ICL, "left_out": {"b": {"documents": 1, "demonstrations": 2}}}
    mostly_first = [0] * 30 + [1] * 10
    for seed, says in enumerate(([0] * 40, [0, 1] * 20, [1] * 40)):
        run(tmp_path, icl=ICL, seed=seed, task="a", says=says)
        run(tmp_path, icl=lost, seed=seed, task="b", says=[0] * 40, gold=mostly_first)
    cells = board_of(tmp_path).entries[0].cells
    marks = cells["average"].marks
    one_answer = "prompts it gives one answer to nearly all documents"
    assert f"With 5 of 6 {one_answer}, on b with 3 of its 3." in marks
    assert f"With 2 of 3 {one_answer}." in cells["a"].marks
    assert "collapsed" in cells["b"].marks
    assert any(mark.startswith("b: 2 demonstrations") for mark in marks)
    # Right on all documents with one set of six.
    above = cells["average"].to_majority
    assert above.mean == pytest.approx(1 / 12)
    assert above.p > 0.05


def test_prompts_that_were_cut_and_rows_that_were_fitted_on_are_said(tmp_path):
    cut = {"truncated": {"t": {"documents": 4}}}
    run(tmp_path, icl={**ICL, **cut}, right=HALF)
    run(tmp_path, icl={**ICL, "method": "moicl", "fitted": [{"labels": [0, 1, 1]}]}, right=ALL)
    rows = by_method(board_of(tmp_path))
    assert "4 documents were cut at their beginning" in rows["icl"].cells["t"].marks[0]
    assert "labels: 3" in rows["moicl"].reads


def test_a_system_instruction_is_a_setting(tmp_path):
    run(tmp_path, icl=ICL, right=HALF)
    run(tmp_path, icl=ICL, right=ALL, put={"system_instruction": "Be brief."})
    assert_seen(
        board_of(tmp_path),
        """
        t
        icl, system instruction | 100.0
        icl | 50.0
        """,
    )


def test_names_that_are_taken_have_a_mark(tmp_path):
    """A task called as the average is, and groups of one name over other tasks."""
    run(tmp_path, icl=ICL, task="average", right=HALF)
    run(tmp_path, icl=ICL, task=["g_a", "g_b"], right=HALF)
    run(tmp_path, icl=PCW, task=["g_a", "g_c"], right=ALL)
    names = {column.name for column in board_of(tmp_path).columns}
    assert {"average'", "g", "g'"} <= names
