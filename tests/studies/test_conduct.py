"""The plain parts of a study, without a model: which cells there are, what can be made next, what the dev set chooses.

`units_to_start` and `states` are printed, for a folder that is a set of paths.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lm_eval_icl.studies.conduct import DONE, Failure, Here, Unit, conduct, states, units_to_start
from lm_eval_icl.studies.folder import StudyFolder
from lm_eval_icl.studies.grid import Study
from lm_eval_icl.studies.targets import Candidate, Cell, Grid, StudyTask, batches, choose

TRAIN = {"tasks": "x", "steps": 3}
DEV = {"choose": ["T"]}


def grid(**keys: Any) -> Grid:
    keys = {
        "models": "pretrained=m",
        "methods": ["icl", {"deepthink": {"T": [1, 2, 3]}}],
        "tasks": ["a"],
        **keys,
    }
    dev = {0: {"text": "of the dev set"}} if keys.get("dev") else {}
    tasks = {name: StudyTask(name, (2,), {name: ()}, dev=dev) for name in keys["tasks"]}
    return Grid(Study.model_validate(keys), tasks)


class Paths:
    """A folder that holds nothing but paths. On dev, the accuracy of deepthink is T / 10."""

    def __init__(self, *there: str) -> None:
        self.there = set(there)
        self.failed = dict[str, str]()

    def has(self, target: Any) -> bool:
        return target.path in self.there

    def choice(self, grid: Grid, candidates: tuple[Candidate, ...]) -> tuple[Cell, ...]:
        return choose(
            grid,
            candidates,
            [[one.test[0].variant.arguments.get("T", 0) / 10] for one in candidates],
        )

    def write(self, target: Any, outcome: Any) -> None:
        self.there.add(target.path)

    def note(self, failed: Mapping[str, str]) -> None:
        assert failed


def short(path: str) -> str:
    """A path without digests, the model, and the axes that have one value."""
    path = re.sub(r"-[0-9a-f]{10}|,data=\w*|,num_fewshot=2|,order=0|,seed=1234", "", path)
    return re.sub(r"^(\w\w)\w+/(m,x,|m(,x)?/)?", r"\1 ", path)


def printed(units: list[Unit]) -> list[str]:
    return [" | ".join(short(target.path) for target in unit) for unit in units]


def run_all(grid: Grid, folder: Paths, failing: str = "^$") -> list[str]:
    """Everything that is made, unit by unit, where targets whose paths match fail; the folder then holds the rest."""
    order: list[str] = []

    def run(unit: Unit) -> Any:
        order.extend(printed([unit]))
        for target in unit:
            yield target, Failure("no room") if re.search(failing, short(target.path)) else {}

    folder.failed = {}
    conduct(grid, folder, Here(run), folder.failed)
    return order


# What is ready.


def test_a_study_from_nothing_needs_its_dev_cells_first():
    folder = Paths()
    study = grid(dev=DEV)
    assert printed(units_to_start(study, folder, set(), {})) == [
        "ce icl/a,split=dev",
        "ce icl/a",  # nothing is chosen for it
        "ce deepthink,T=1/a,split=dev",
        "ce deepthink,T=2/a,split=dev | ce deepthink,T=3/a,split=dev",
    ]
    assert [(short(target.path), state) for target, state in states(study, folder, {})][-2:] == [
        ("ce deepthink,T=3/a,split=dev", "ready"),
        ("ce deepthink,T=3/a", "waiting"),  # stands for the one that is chosen
    ]


def test_after_a_dev_cell_the_others_and_after_all_the_chosen_one():
    folder = Paths()
    study = grid(dev=DEV)
    (icl, _, first, others) = units_to_start(study, folder, set(), {})
    folder.there |= {target.path for unit in (icl, first) for target in unit}
    running = {target.path for target in others}
    assert printed(units_to_start(study, folder, set(), {})) == [
        "ce icl/a",
        "ce deepthink,T=2/a,split=dev | ce deepthink,T=3/a,split=dev",
    ]
    assert printed(units_to_start(study, folder, running, {})) == ["ce icl/a"]
    folder.there |= running
    assert printed(units_to_start(study, folder, set(), {})) == [
        "ce icl/a",
        "ce deepthink,T=3/a,chosen=T",
    ]


def test_a_dev_cell_that_fails_fails_what_it_would_have_chosen_and_nothing_else():
    folder = Paths()
    study = grid(dev=DEV, tasks=["a", "b"])
    order = run_all(study, folder, failing=r"T=1/a,split=dev")
    assert [short(path) for path in folder.failed] == ["ce deepthink,T=1/a,split=dev"]
    not_done = {short(t.path): s for t, s in states(study, folder, folder.failed) if s != DONE}
    assert not_done == {
        "ce deepthink,T=1/a,split=dev": "no room",
        "ce deepthink,T=3/a": f"nothing can be chosen on the dev set, as {next(iter(folder.failed))} failed: no room",
    }
    assert "ce deepthink,T=3/b,chosen=T" in order
    # The same command tries again what failed, and then what needs it.
    assert run_all(study, folder) == ["ce deepthink,T=1/a,split=dev", "ce deepthink,T=3/a,chosen=T"]
    assert run_all(study, folder) == []


def test_a_checkpoint_is_made_before_what_needs_it_and_only_for_that():
    folder = Paths()
    study = grid(train=TRAIN, methods=["icl", "hf", "invicl"])
    assert printed(units_to_start(study, folder, set(), {})) == ["ch icl", "ch invicl"]
    assert run_all(study, folder) == ["ch icl", "ce icl/a", "ce hf/a", "ch invicl", "ce invicl/a"]
    # The checkpoints are deleted; all cells are there: nothing is trained.
    cells = {path for path in folder.there if path.startswith("cells")}
    assert len(cells) == 3
    assert units_to_start(study, Paths(*cells), set(), {}) == []
    # One cell is missing: its checkpoint is made again.
    without = cells - {next(path for path in cells if "hf" in path)}
    assert printed(units_to_start(study, Paths(*without), set(), {})) == ["ch icl"]


def test_a_changed_file_runs_what_is_missing():
    folder = Paths()
    keys = {"methods": {"deepthink": {"T": [2, 3]}}}
    run_all(grid(**keys, seeds=[0]), folder)
    assert run_all(grid(**keys, seeds=[0, 1]), folder) == [
        "ce deepthink,T=2/a,seed=1 | ce deepthink,T=3/a,seed=1"
    ]
    # A cell that was run as it is does not stand for one that was chosen on dev.
    chosen = grid(**keys, seeds=[0], dev=DEV)
    assert run_all(chosen, folder)[-1] == "ce deepthink,T=3/a,seed=0,chosen=T"
    # A task whose documents, prompts or demonstrations are others has other cells.
    changed = replace(
        chosen.tasks["a"], data={(2, "None", 0, "test"): "other", (2, "None", 0, "dev"): "other"}
    )
    assert len(run_all(Grid(chosen.study, {"a": changed}), folder)) == 2


def folder_of(made: Paths, path: Path) -> StudyFolder:
    """A folder of files whose paths are these."""
    for target in made.there:
        (path / target).mkdir(parents=True)
        (path / target / "results_x.json").write_text("{}")
    folder = StudyFolder(path)
    folder.choice = made.choice
    assert folder.there == made.there
    return folder


def test_rerun_of_a_dev_cell_makes_again_what_it_chose(tmp_path):
    """Nothing is removed before: what could not be made again is still there."""
    study = grid(dev=DEV, tasks=["a", "b"])
    made = Paths()
    run_all(study, made)
    folder = folder_of(made, tmp_path)
    forgotten = folder.forget(study, "cells/*/deepthink,T=1/a,*split=dev*")
    assert sorted(map(short, forgotten)) == [
        "ce deepthink,T=1/a,split=dev",
        "ce deepthink,T=3/a,chosen=T",
    ]
    assert printed(units_to_start(study, folder, set(), {})) == ["ce deepthink,T=1/a,split=dev"]
    folder.there |= {target.path for target in units_to_start(study, folder, set(), {})[0]}
    assert printed(units_to_start(study, folder, set(), {})) == ["ce deepthink,T=3/a,chosen=T"]
    assert StudyFolder(tmp_path).there == made.there


# Cells and batches.


def known(study: Grid) -> list[Cell]:
    cells = [
        cell for candidates in study.alternatives for c in candidates for cell in (*c.dev, *c.test)
    ]
    return [*{cell.path: cell for cell in cells}.values()]


def test_what_the_dev_set_chooses_among():
    """T, seeds and rules together; for each task, and not for icl, which has no T, but seeds and rules."""
    keys = {"methods": ["icl", {"deepthink": {"T": [1, 2]}}], "seeds": [0, 1], "tasks": ["a", "b"]}
    study = grid(**keys, dev={"choose": ["T", "seeds", "decide"]}, decide=["none", "contextual"])
    assert [len(candidates) for candidates in study.alternatives] == [4, 4, 8, 8]
    for candidates in study.alternatives:
        assert len({(c.test[0].variant.name, c.test[0].seed, c.rule) for c in candidates}) == len(
            candidates
        )
        assert (
            len({cell.path for c in candidates for cell in c.dev}) == len(candidates) / 2
        )  # a cell has all rules

    def score(candidate: Candidate) -> float:
        (cell,) = candidate.test
        return 0.3 + 0.2 * cell.seed + 0.1 * (bool(candidate.rule) and cell.task == "b")

    chosen = [
        choose(study, of, [[score(candidate)] for candidate in of])[0] for of in study.alternatives
    ]
    assert [(c.task, c.seed, c.rule, c.chosen) for c in chosen] == [
        ("a", 1, "", ("seeds", "decide")),  # of equals, the first: what the model says
        ("b", 1, "contextual", ("seeds", "decide")),
        ("a", 1, "", ("T", "seeds", "decide")),
        ("b", 1, "contextual", ("T", "seeds", "decide")),
    ]
    assert chosen[3].variant.arguments == {"T": 1}
    assert "rule=contextual" in chosen[3].path


def test_batches_are_scored_together():
    """All T but the first, and all orders, of one method and set of demonstrations."""
    study = grid(
        models=["pretrained=m", "pretrained=n"], orders=2, seeds=[0, 1], dev={"choose": []}
    )
    alike = batches(known(study))
    assert len(alike) == 2 * 2 * 2 * 3
    assert sorted(map(len, alike)) == [2] * 16 + [4] * 8
    for cells in alike:
        assert len({(c.model.name, c.task, c.seed, c.split, c.variant.method) for c in cells}) == 1
    assert batches([]) == []
    learned = grid(methods=[{"ctkv": {"steps": 4, "after": [0, 1, 4]}}], tasks=["a"], seeds=0)
    assert list(map(len, batches(known(learned)))) == [3]  # which all have the same prompts


# The choice.


@pytest.mark.parametrize(
    "candidates, higher, index",
    [
        ([[0.2], [0.3], [0.3]], True, 1),  # of equal ones, the first
        ([[0.2], [0.3], [0.1]], False, 2),
        ([[0.225, 0.225, 0.15], [0.2] * 3], True, 0),  # 24 of 120 each, but for rounding
        ([[0.3], [0.25 + 1e-13], [0.25]], False, 1),
        ([[0.3], [0.25 + 1e-7], [0.25]], False, 2),
        ([[math.nan, 1.0], [0.1, 0.1]], True, 1),  # no number is the worst
        ([[math.nan], [9.5]], False, 1),
    ],
)
def test_the_best_mean_is_chosen(candidates, higher, index):
    study = grid(methods={"deepthink": {"T": list(range(1, len(candidates) + 1))}}, dev=DEV)
    (alternatives,) = study.alternatives
    task = replace(study.tasks["a"], higher_is_better=higher)
    (cell,) = choose(Grid(study.study, {"a": task}), alternatives, candidates)
    assert cell.variant.arguments["T"] == index + 1


@pytest.mark.parametrize(
    "how, seeds",
    [
        ("similar", [0]),
        ("similar:by=bm25", [0]),
        ("similar:order=random", [0, 1, 2]),
        ("similar:fixed=1", [0, 1, 2]),
        ("first", [0]),
        ("random", [0, 1, 2]),
        (None, [0, 1, 2]),
    ],
)
def test_what_does_not_depend_on_the_seed_runs_once(how, seeds):
    of_study = grid(methods=["icl"], seeds=[0, 1, 2], demonstrations=[how])
    cells = [candidates[0].test[0] for candidates in of_study.alternatives]
    assert [cell.seed for cell in cells] == seeds
    relabeled = grid(methods=["icl"], seeds=[0, 1, 2], demonstrations=[how], labels=["random"])
    assert len(relabeled.alternatives) == 3, "labels are drawn by the seed"
