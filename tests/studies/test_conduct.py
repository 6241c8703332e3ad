"""The plain parts of a study, without a model.

Which cells there are, what can be made next, what the dev set chooses. `units_to_start` and
`states` are printed, for a folder that is a set of paths.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lm_eval_icl.errors import InputError
from lm_eval_icl.studies import plan
from lm_eval_icl.studies.conduct import DONE, Failure, Here, Unit, conduct, states, units_to_start
from lm_eval_icl.studies.folder import StudyFolder
from lm_eval_icl.studies.grid import Study
from lm_eval_icl.studies.targets import Candidate, Cell, Grid, StudyTask, choose, units_of
from lm_eval_icl.studies.unit_runner import Answered

TRAIN = {"tasks": "x", "steps": 3}
DEV = {"choose": ["T"]}


def grid(**keys: Any) -> Grid:
    keys.setdefault("models", "pretrained=m")
    keys.setdefault("methods", ["icl", {"deepthink": {"T": [1, 2, 3]}}])
    keys.setdefault("tasks", ["a"])
    dev = {0: {"text": "of the dev set"}} if keys.get("dev") else {}
    tasks = {name: StudyTask(name, (2,), {name: ()}, dev=dev) for name in keys["tasks"]}
    return Grid(Study.model_validate(keys), tasks)


def cell_of(candidate: Candidate) -> Cell:
    """The only cell of a candidate on the test set."""
    (cell,) = candidate.test
    return cell


class Paths:
    """A folder that holds nothing but paths. On dev, the accuracy of deepthink is T / 10."""

    def __init__(self, *there: str) -> None:
        self.there = set(there)
        self.failed = dict[str, str]()

    def has(self, target: Any) -> bool:
        return target.path in self.there

    def choice(self, grid: Grid, candidates: tuple[Candidate, ...]) -> tuple[Cell, ...]:
        scores = [[cell_of(one).variant.arguments.get("T", 0) / 10] for one in candidates]
        return choose(grid, candidates, scores)

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


def next_units(study: Grid, folder: Any, running: Iterable[str] = ()) -> list[str]:
    """The units that can be started, while others run."""
    return printed(units_to_start(study, folder, set(running), {}))


def paths_of(units: Iterable[Unit]) -> set[str]:
    return {target.path for target in chain(*units)}


def run_all(grid: Grid, folder: Paths, failing: str = "^$") -> list[str]:
    """Everything that is made, unit by unit, where targets whose paths match fail.

    The folder then holds the rest.
    """
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
    assert next_units(study, folder) == [
        "ce icl/a,split=dev",
        "ce icl/a",  # nothing is chosen for it
        "ce deepthink,T=1/a,split=dev",
        "ce deepthink,T=2/a,split=dev | ce deepthink,T=3/a,split=dev",
    ]
    *_, dev, test = states(study, folder, {})
    assert short(dev[0].path) == "ce deepthink,T=3/a,split=dev"
    assert dev[1] == "ready"
    assert short(test[0].path) == "ce deepthink,T=3/a", "stands for the one that is chosen"
    assert test[1] == "waiting"


def test_after_a_dev_cell_the_others_and_after_all_the_chosen_one():
    folder = Paths()
    study = grid(dev=DEV)
    icl, _, first, others = units_to_start(study, folder, set(), {})
    folder.there |= paths_of([icl, first])
    assert next_units(study, folder) == [
        "ce icl/a",
        "ce deepthink,T=2/a,split=dev | ce deepthink,T=3/a,split=dev",
    ]
    running = paths_of([others])
    assert next_units(study, folder, running) == ["ce icl/a"]
    folder.there |= running
    assert next_units(study, folder) == ["ce icl/a", "ce deepthink,T=3/a,chosen=T"]


def test_a_dev_cell_that_fails_fails_what_it_would_have_chosen_and_nothing_else():
    folder = Paths()
    study = grid(dev=DEV, tasks=["a", "b"])
    order = run_all(study, folder, failing=r"T=1/a,split=dev")
    (failed,) = folder.failed
    assert short(failed) == "ce deepthink,T=1/a,split=dev"
    why = {}
    for target, state in states(study, folder, folder.failed):
        if state != DONE:
            why[short(target.path)] = state
    assert why.pop("ce deepthink,T=1/a,split=dev") == "no room"
    reason = f"nothing can be chosen on the dev set, as {failed} failed: no room"
    assert why == {"ce deepthink,T=3/a": reason}
    assert "ce deepthink,T=3/b,chosen=T" in order
    # The same command tries again what failed, and then what needs it.
    assert run_all(study, folder) == ["ce deepthink,T=1/a,split=dev", "ce deepthink,T=3/a,chosen=T"]
    assert run_all(study, folder) == []


def test_a_checkpoint_is_made_before_what_needs_it_and_only_for_that():
    folder = Paths()
    study = grid(train=TRAIN, methods=["icl", "hf", "invicl"])
    assert next_units(study, folder) == ["ch icl", "ch invicl"]
    assert run_all(study, folder) == ["ch icl", "ce icl/a", "ce hf/a", "ch invicl", "ce invicl/a"]
    # The checkpoints are deleted; all cells are there: nothing is trained.
    cells = {path for path in folder.there if path.startswith("cells")}
    assert len(cells) == 3
    assert next_units(study, Paths(*cells)) == []
    # One cell is missing: its checkpoint is made again.
    without = [path for path in cells if "hf" not in path]
    assert len(without) == 2
    assert next_units(study, Paths(*without)) == ["ch icl"]


def test_a_changed_file_runs_what_is_missing():
    folder = Paths()
    keys = {"methods": {"deepthink": {"T": [2, 3]}}}
    run_all(grid(**keys, seeds=[0]), folder)
    missing = "ce deepthink,T=2/a,seed=1 | ce deepthink,T=3/a,seed=1"
    assert run_all(grid(**keys, seeds=[0, 1]), folder) == [missing]
    # A cell that was run as it is does not stand for one that was chosen on dev.
    chosen = grid(**keys, seeds=[0], dev=DEV)
    assert run_all(chosen, folder)[-1] == "ce deepthink,T=3/a,seed=0,chosen=T"
    # A task whose documents, prompts or demonstrations are others has other cells.
    data = {(2, "None", 0, "test"): "other", (2, "None", 0, "dev"): "other"}
    changed = replace(chosen.tasks["a"], data=data)
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
    assert next_units(study, folder) == ["ce deepthink,T=1/a,split=dev"]
    folder.there |= paths_of(units_to_start(study, folder, set(), {}))
    assert next_units(study, folder) == ["ce deepthink,T=3/a,chosen=T"]
    assert StudyFolder(tmp_path).there == made.there


def test_entries_that_begin_alike_have_choices_of_their_own(tmp_path):
    methods = [{"deepthink": {"T": [1, 2], "eta": etas}} for etas in (0.1, [0.1, 0.5])]
    study = grid(dev={"choose": ["T", "eta"]}, methods=methods)
    folder = StudyFolder(tmp_path)
    folder.results = lambda cell: {"results": {"a": {"acc,none": cell.variant.arguments["eta"]}}}
    chosen = [folder.choice(study, candidates)[0] for candidates in study.alternatives]
    assert [cell.variant.arguments["eta"] for cell in chosen] == [0.1, 0.5]
    assert [cell.chosen for cell in chosen] == [("T",), ("T", "eta")]


# Cells and batches.


def known(study: Grid) -> list[Cell]:
    """Every cell, once."""
    cells: dict[str, Cell] = {}
    for candidate in chain(*study.alternatives):
        cells |= {cell.path: cell for cell in (*candidate.dev, *candidate.test)}
    return list(cells.values())


CHOOSING = grid(
    methods=["icl", {"deepthink": {"T": [1, 2]}}],
    seeds=[0, 1],
    tasks=["a", "b"],
    dev={"choose": ["T", "seeds", "decide"]},
    decide=["none", "contextual"],
)


def test_cells_of_a_unit_have_the_same_responses():
    """A chosen cell and one that was not chosen may differ in nothing else."""
    request = SimpleNamespace()
    responses = {id(request): ["a", "b"]}
    for _ in range(2):
        cell_model = Answered(SimpleNamespace(config=None), responses)
        assert cell_model.generate_until([request, request]) == ["a", "b"]


def test_what_the_dev_set_chooses_among():
    """T, seeds and rules together, for each task; for icl, which has no T, seeds and rules."""
    assert [len(candidates) for candidates in CHOOSING.alternatives] == [4, 4, 8, 8]
    for candidates in CHOOSING.alternatives:
        different = set()
        on_dev = set()
        for candidate in candidates:
            cell = cell_of(candidate)
            different.add((cell.variant.name, cell.seed, candidate.rule))
            on_dev.update(cell.path for cell in candidate.dev)
        assert len(different) == len(candidates)
        assert len(on_dev) == len(candidates) / 2, "a cell has all rules"


def test_of_equals_the_dev_set_chooses_the_first():
    """The best is seed 1, with a rule on task b."""

    def score(candidate: Candidate) -> float:
        cell = cell_of(candidate)
        better = candidate.rule and cell.task == "b"
        return 0.3 + 0.2 * cell.seed + (0.1 if better else 0)

    chosen = []
    for candidates in CHOOSING.alternatives:
        scores = [[score(candidate)] for candidate in candidates]
        chosen += choose(CHOOSING, candidates, scores)
    assert [cell.task for cell in chosen] == ["a", "b", "a", "b"]
    assert [cell.rule for cell in chosen] == ["", "contextual", "", "contextual"]
    assert {cell.seed for cell in chosen} == {1}
    assert [cell.chosen for cell in chosen[:2]] == [("seeds", "decide")] * 2
    assert [cell.chosen for cell in chosen[2:]] == [("T", "seeds", "decide")] * 2
    assert chosen[3].variant.arguments == {"T": 1}
    assert "rule=contextual" in chosen[3].path


def test_cells_of_a_unit_are_scored_together():
    """All T but the first, and all orders, of one method and set of demonstrations."""
    models = ["pretrained=m", "pretrained=n"]
    study = grid(models=models, orders=2, seeds=[0, 1], dev={"choose": []})
    alike = units_of(known(study))
    assert len(alike) == 2 * 2 * 2 * 3
    assert sorted(map(len, alike)) == [2] * 16 + [4] * 8
    for first, *others in alike:
        for cell in others:
            assert cell.model.name == first.model.name
            assert cell.task == first.task
            assert cell.seed == first.seed
            assert cell.split == first.split
            assert cell.variant.method == first.variant.method
    assert units_of([]) == []
    learned = grid(methods=[{"ctkv": {"steps": 4, "after": [0, 1, 4]}}], tasks=["a"], seeds=0)
    assert list(map(len, units_of(known(learned)))) == [3]  # which all have the same prompts


def test_one_thing_at_a_time_is_varied():
    axes = {"labels": ["none", "random"], "formats": [0, 1], "orders": 2}
    study = grid(methods=["icl"], one_at_a_time=True, **axes)
    varied = [(cell.labels, cell.format, cell.order) for cell in known(study)]
    assert varied == [(None, 0, 0), (None, 0, 1), (None, 1, 0), ("random", 0, 0)]


def test_cells_of_a_users_own_method_are_named_by_its_code(tmp_path, monkeypatch):
    """So that they are run again if it changes."""
    file = tmp_path / "mine_of_a_study.py"
    file.write_text("from lm_eval_icl.methods import ICL\n\n\nclass Mine(ICL):\n    pass\n")
    monkeypatch.chdir(tmp_path)
    study = grid(methods=["mine_of_a_study:Mine"])
    (cell,) = known(study)
    source = hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    assert cell.path.split("/")[2].endswith(f"-{source}")


# A plan.


def test_a_trial_that_fails_says_why():
    runner = SimpleNamespace(run=lambda unit: [(cell, Failure("no room")) for cell in unit])
    with pytest.raises(InputError, match="no room"):
        plan.trial(runner, known(grid(methods=["icl"])), 4)


# The choice.


def choice_of_T(*scores: Sequence[float], higher_is_better: bool = True) -> int:
    """The T that is chosen, if T = 1, 2 ... have these scores of documents or seeds."""
    study = grid(methods={"deepthink": {"T": list(range(1, len(scores) + 1))}}, dev=DEV)
    (alternatives,) = study.alternatives
    task = replace(study.tasks["a"], higher_is_better=higher_is_better)
    (cell,) = choose(Grid(study.study, {"a": task}), alternatives, scores)
    return cell.variant.arguments["T"]


def test_the_best_mean_is_chosen_and_of_equals_the_first():
    assert choice_of_T([0.2], [0.3], [0.3]) == 2
    assert choice_of_T([0.2], [0.3], [0.1], higher_is_better=False) == 3


def test_rounding_decides_nothing():
    """24 of 120 documents each, but for rounding."""
    assert choice_of_T([0.225, 0.225, 0.15], [0.2] * 3) == 1
    assert choice_of_T([0.3], [0.25 + 1e-13], [0.25], higher_is_better=False) == 2
    assert choice_of_T([0.3], [0.25 + 1e-7], [0.25], higher_is_better=False) == 3


def test_no_number_is_the_worst():
    assert choice_of_T([math.nan, 1.0], [0.1, 0.1]) == 2
    assert choice_of_T([math.nan], [9.5], higher_is_better=False) == 2


WAYS = {
    "similar": [0],
    "similar:by=bm25": [0],
    "similar:order=random": [0, 1, 2],
    "similar:fixed=1": [0, 1, 2],
    "first": [0],
    "random": [0, 1, 2],
    None: [0, 1, 2],
}


@pytest.mark.parametrize("how", WAYS)
def test_what_does_not_depend_on_the_seed_runs_once(how):
    keys = {"methods": ["icl"], "seeds": [0, 1, 2], "demonstrations": [how]}
    seeds = [cell_of(candidates[0]).seed for candidates in grid(**keys).alternatives]
    assert seeds == WAYS[how]
    relabeled = grid(**keys, labels=["random"])
    assert len(relabeled.alternatives) == 3, "labels are drawn by the seed"
    fitted = grid(**{**keys, "methods": ["moicl"]})
    assert len(fitted.alternatives) == 3, "rows to fit on are drawn by the seed"
