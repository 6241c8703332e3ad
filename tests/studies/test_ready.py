"""The plain parts of a study, without a model: which cells there are, what can be made next, what the dev set chooses.

`ready` and `states` are printed, for a folder that is a set of paths.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import pytest

from lm_eval_icl.studies.cells import Candidate, Cell, Checkpoint, Grid, GridTask, batches, together
from lm_eval_icl.studies.choose import DevChoice, best, choose
from lm_eval_icl.studies.conduct import DONE, Failure, Here, Unit, conduct, ready, states
from lm_eval_icl.studies.folder import StudyFolder
from lm_eval_icl.studies.grid import Study

TRAIN = {"tasks": "x", "steps": 3}
DEV = {"choose": ["T"], "metric": "acc"}


def grid(**keys: Any) -> Grid:
    keys = {"models": "pretrained=m", "methods": ["icl", {"deepthink": {"T": [1, 2]}}], "tasks": ["a"], **keys}
    dev = bool(keys.get("dev"))
    tasks = {name: GridTask(name, (2,), (name,), reported=name, dev=name * dev) for name in keys["tasks"]}
    return Grid(Study.model_validate(keys), tasks)


class Paths:
    """A folder that holds nothing but paths. On dev, the accuracy of deepthink is T / 10."""

    def __init__(self, *there: str) -> None:
        self.there = set(there)

    def has(self, target: Any) -> bool:
        return target.path in self.there

    def results(self, cell: Cell) -> Mapping[str, Any]:
        accuracy = cell.variant.arguments.get("T", 0) / 10
        return {"results": {cell.task: {"acc,none": accuracy}}, "n-samples": {cell.task: {"effective": 10}}}

    def choice(self, grid: Grid, candidates: tuple[Candidate, ...]) -> DevChoice:
        return choose(grid, candidates, self.results)

    def rows(self, chosen: Any) -> Mapping[str, Any]:
        return {"of": short(chosen.path)}

    def weights(self, model: Any) -> str:
        return ""

    def write(self, target: Any, outcome: Any) -> None:
        self.there.add(target.path)

    def note(self, failed: Mapping[str, str]) -> None:
        assert failed


def short(path: str) -> str:
    """A path without digests, the model, and the axes that have one value."""
    path = re.sub(r"-[0-9a-f]{10}|,data=\w*|,num_fewshot=2|,order=0|,seed=1234", "", path)
    return re.sub(r"^(\w\w)\w+/(m,x,|m(,x)?/)?", r"\1 ", path)


def printed(units: list[Unit]) -> list[str]:
    return [f"{unit.kind}: {' | '.join(short(target.path) for target in unit.targets)}" for unit in units]


def run_all(grid: Grid, folder: Paths, failing: str = "^$") -> list[str]:
    """Everything that is made, unit by unit, where targets whose paths match fail; the folder then holds the rest."""
    order: list[str] = []

    def run(unit: Unit) -> Any:
        order.extend(printed([unit]))
        for target in unit.targets:
            yield target, Failure("no room") if re.search(failing, short(target.path)) else {}

    folder.failed = failed = {}  # type: ignore[attr-defined]
    conduct(grid, folder, Here(run), failed)
    return order


# What is ready.


def test_a_study_from_nothing_needs_its_dev_cells_first():
    folder, study = Paths(), grid(dev=DEV)
    assert printed(ready(study, folder, set(), {})) == [
        "dev: ce icl/a,split=dev | ce deepthink,T=1/a,split=dev | ce deepthink,T=2/a,split=dev",
        "test: ce icl/a",  # nothing is chosen for it
    ]
    assert [(short(target.path), state) for target, state in states(study, folder, {})] == [
        ("ce icl/a,split=dev", "ready"),
        ("ce icl/a", "ready"),
        ("ce deepthink,T=1/a,split=dev", "ready"),
        ("ce deepthink,T=2/a,split=dev", "ready"),
        ("ce deepthink,T=1/a", "waiting"),  # stands for the one that is chosen
    ]


def test_after_a_dev_cell_the_others_and_after_all_the_chosen_one():
    folder, study = Paths(), grid(dev=DEV)
    (dev, *_) = ready(study, folder, set(), {})
    first, second, third = (target.path for target in dev.targets)
    folder.there |= {first, second}
    assert printed(ready(study, folder, set(), {})) == ["test: ce icl/a", "dev: ce deepthink,T=2/a,split=dev"]
    assert printed(ready(study, folder, {third}, {})) == ["test: ce icl/a"]  # it is running
    folder.there.add(third)
    assert printed(ready(study, folder, set(), {})) == ["test: ce icl/a | ce deepthink,T=2/a,chosen=T"]


def test_a_dev_cell_that_fails_fails_what_it_would_have_chosen_and_nothing_else():
    folder, study = Paths(), grid(dev=DEV, tasks=["a", "b"])
    order = run_all(study, folder, failing=r"T=1/a,split=dev")
    failed = folder.failed  # type: ignore[attr-defined]
    assert [short(path) for path in failed] == ["ce deepthink,T=1/a,split=dev"]
    not_done = {short(t.path): s for t, s in states(study, folder, failed) if s != DONE}
    assert not_done == {
        "ce deepthink,T=1/a,split=dev": "no room",
        "ce deepthink,T=1/a": f"nothing can be chosen on the dev set, as {next(iter(failed))} failed: no room",
    }
    assert "test: ce deepthink,T=2/b,chosen=T" in order
    # The same command tries again what failed, and then what needs it.
    assert run_all(study, folder) == ["dev: ce deepthink,T=1/a,split=dev", "test: ce deepthink,T=2/a,chosen=T"]
    assert run_all(study, folder) == []


def test_a_checkpoint_is_made_before_what_needs_it_and_only_for_that():
    keys = {"train": TRAIN, "tasks": ["a"], "demonstrations": "herding", "methods": ["icl", "hf", "invicl"]}
    folder, study = Paths(), grid(**keys)
    assert printed(ready(study, folder, set(), {})) == ["train: ch icl", "train: ch invicl"]
    order = run_all(study, folder)
    assert order[:3] == [
        "train: ch icl",
        "choose: ch a,herding,n=2,.json",
        "test: ce icl/a,demonstrations=herding | ce hf/a,demonstrations=herding",
    ]
    assert order[3] == "train: ch invicl" and len(order) == 6
    # The checkpoints and the choices are deleted; all cells are there: nothing is trained.
    cells = {path for path in folder.there if path.startswith("cells")}
    assert len(cells) == 3 and ready(study, Paths(*cells), set(), {}) == []
    # One cell is missing: its checkpoint is made again, and its demonstrations are chosen again.
    without = cells - {next(path for path in cells if "hf" in path)}
    assert printed(ready(study, Paths(*without), set(), {})) == ["train: ch icl"]


def test_a_training_that_fails_takes_its_cells_with_it():
    folder, study = Paths(), grid(train=TRAIN, methods=["icl", "invicl"])
    assert run_all(study, folder, failing="ch icl") == ["train: ch icl", "train: ch invicl", "test: ce invicl/a"]
    failed = folder.failed  # type: ignore[attr-defined]
    states_of = {short(t.path): s for t, s in states(study, folder, failed)}
    (checkpoint,) = failed
    assert states_of["ce icl/a"] == f"{checkpoint} failed: no room" and states_of["ce invicl/a"] == DONE


def test_a_changed_file_runs_what_is_missing():
    folder = Paths()
    run_all(grid(seeds=[0]), folder)
    assert run_all(grid(seeds=[0, 1]), folder) == [
        "test: ce icl/a,seed=1 | ce deepthink,T=1/a,seed=1 | ce deepthink,T=2/a,seed=1"
    ]
    # A cell that was run as it is does not stand for one that was chosen on dev.
    chosen = grid(seeds=[0], dev=DEV)
    assert run_all(chosen, folder)[-1] == "test: ce deepthink,T=2/a,seed=0,chosen=T"
    # A task whose documents, prompts or demonstrations are others has other cells.
    other = {(2, "None", 0): "other"}
    changed = Grid(chosen.study, {"a": GridTask("a", (2,), ("a",), reported="a", data=other, dev="a")})
    assert len(run_all(changed, folder)) == 3


def test_rerun_of_a_dev_cell_makes_again_what_it_chose(tmp_path):
    study, made = grid(dev=DEV, tasks=["a", "b"]), Paths()
    run_all(study, made)
    for path in made.there:
        (tmp_path / path).mkdir(parents=True)
        (tmp_path / path / "results_x.json").write_text("{}")
    folder = StudyFolder(tmp_path)
    folder.results = made.results  # type: ignore[method-assign]
    assert folder.there == made.there
    removed = folder.remove(study, "cells/*/deepthink,T=1/a,*split=dev*")
    assert sorted(map(short, removed)) == ["ce deepthink,T=1/a,split=dev", "ce deepthink,T=2/a,chosen=T"]
    folder.weights = made.weights  # type: ignore[method-assign]
    assert printed(ready(study, folder, set(), {})) == ["dev: ce deepthink,T=1/a,split=dev"]
    folder.there |= {target.path for target in ready(study, folder, set(), {})[0].targets}
    assert printed(ready(study, folder, set(), {})) == ["test: ce deepthink,T=2/a,chosen=T"]


def test_rerun_of_a_checkpoint_makes_again_its_choices_and_cells(tmp_path):
    study, made = grid(train=TRAIN, demonstrations="herding", methods=["icl", "invicl"]), Paths()
    run_all(study, made)
    for path in made.there:
        place = tmp_path / path / ("results_x.json" if path.startswith("cells") else "x")
        place = tmp_path / path if path.endswith(".json") else place
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text("{}")
    folder = StudyFolder(tmp_path)
    removed = folder.remove(study, "checkpoints/*invicl*")
    assert len(removed) == 3 and StudyFolder(tmp_path).there == made.there - {*removed}
    assert all("invicl" in path or path.startswith("choices") for path in removed)


def test_here_finishes_a_model_before_the_next_one_is_loaded():
    order = run_all(grid(models=["pretrained=m", "pretrained=n"], dev=DEV), folder := Paths())
    assert len(order) == 4 + 2 and len(folder.there) == 2 * (3 + 2)
    of_models = [run_all(grid(models=f"pretrained={name}", dev=DEV), Paths()) for name in "mn"]
    assert [re.sub("n/", "", line) for line in order] == [
        re.sub("n/", "", line) for lines in of_models for line in lines
    ]


# Cells and batches.


def known(study: Grid) -> list[Cell]:
    cells = [cell for candidates in study.alternatives for c in candidates for cell in (*c.dev, *c.test)]
    return [*{cell.path: cell for cell in cells}.values()]


def test_cells_are_the_product_of_the_axes():
    keys = {"seeds": "0..2", "orders": 2, "models": ["pretrained=m", "pretrained=n"], "tasks": ["a", "b"]}
    cells = known(grid(**keys, demonstrations=["random", "herding"]))
    assert len(cells) == len({cell.path for cell in cells}) == 2 * 3 * 2 * 2 * 3 * 2
    path = "deepthink,T=2/b,num_fewshot=2,demonstrations=herding,seed=2,order=1"
    assert [cell.model.name for cell in cells if cell.path.partition("/")[2].partition("/")[2] == path] == ["m", "n"]


def test_what_the_dev_set_chooses_among():
    """T, seeds and rules together; for each task, and not for icl, which has no T, but seeds and rules."""
    choose_all = {"choose": ["T", "seeds", "decide"], "metric": "acc"}
    study = grid(dev=choose_all, seeds=[0, 1], decide=["none", "contextual"], tasks=["a", "b"])
    assert [len(candidates) for candidates in study.alternatives] == [4, 4, 8, 8]
    for candidates in study.alternatives:
        assert len({(str(c.variant), c.seed, c.rule) for c in candidates}) == len(candidates)
        assert len({cell.path for c in candidates for cell in c.dev}) == len(candidates) / 2  # a cell has all rules
    results = {0: 0.3, 1: 0.5}

    def of(cell: Cell) -> Mapping[str, Any]:
        values = {"acc,none": results[cell.seed], "acc,contextual": results[cell.seed] + 0.1 * (cell.task == "b")}
        return {"results": {cell.task: values}, "n-samples": {cell.task: {"effective": 10}}}

    chosen = [choose(study, candidates, of).cells[0] for candidates in study.alternatives]
    assert [(c.task, c.seed, c.rule, c.chosen) for c in chosen] == [
        ("a", 1, "", ("seeds", "decide")),  # of equals, the first: what the model says
        ("b", 1, "contextual", ("seeds", "decide")),
        ("a", 1, "", ("T", "seeds", "decide")),
        ("b", 1, "contextual", ("T", "seeds", "decide")),
    ]
    assert chosen[3].variant.arguments == {"T": 1} and "rule=contextual" in chosen[3].path


def test_batches_share_what_can_be_shared():
    """Requests are made once for all methods; of one method, all T and orders are scored together."""
    study = grid(models=["pretrained=m", "pretrained=n"], orders=2, seeds=[0, 1], dev={"choose": [], "metric": "acc"})
    same = batches(known(study))
    assert len(same) == 2 * 2 * 2 and {len(cells) for cells in same} == {2 + 4}
    for cells in same:
        assert len({(c.model.name, c.task, c.seed, c.split) for c in cells}) == 1
        assert [len(alike) for alike in together(cells)] == [2, 4]
    alone = {"a": GridTask("a", (2,), ("a",), alone=True)}  # makes its requests for one method
    assert [len(cells) for cells in batches(known(Grid(grid().study, alone)))] == [1] * 3
    assert batches([]) == []


def test_a_training_is_a_target_of_its_model():
    study = grid(train={"tasks": "x", "steps": 3}, methods=["icl", "hf", {"deepthink": {"T": 2}}, "invicl"])
    assert [[variant.method for variant in study.variants(model)] for model in study.models] == [
        ["icl", "hf", "deepthink"],
        ["invicl"],
    ]
    for cell in known(study):
        assert cell.needs == (Checkpoint(cell.model),)


# The choice.


@pytest.mark.parametrize(
    ("candidates", "higher", "index"),
    [
        ([[(0.2, 10)], [(0.3, 10)], [(0.3, 10)]], True, 1),  # of equal ones, the first
        ([[(0.2, 10)], [(0.3, 10)], [(0.1, 10)]], False, 2),
        ([[(0.225, 40), (0.225, 40), (0.15, 40)], [(0.2, 40)] * 3], True, 0),  # 24 of 120 each, but for rounding
        ([[(0.3, 7)], [(0.25 + 1e-13, 7)], [(0.25, 7)]], False, 1),  # no counts: equal up to rounding
        ([[(0.3, 7)], [(0.25 + 1e-7, 7)], [(0.25, 7)]], False, 2),
        ([[(math.nan, 10), (1.0, 10)], [(0.1, 10), (0.1, 10)]], True, 1),  # no number is the worst
        ([[(math.nan, 10)], [(9.5, 10)]], False, 1),
    ],
)
def test_the_best_mean_is_chosen(candidates, higher, index):
    found, means = best(candidates, higher)
    assert found == index and len(means) == len(candidates)
    assert means[index] == pytest.approx(sum(score for score, _ in candidates[index]) / len(candidates[index]))
