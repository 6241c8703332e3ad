"""The plain parts of a study, without a model: which cells there are, their order of work, what the dev set chooses."""

import math

import pytest

from lm_eval_icl.studies.cells import Grid, GridTask
from lm_eval_icl.studies.choose import DevChoice, best
from lm_eval_icl.studies.grid import Study
from lm_eval_icl.studies.order import batches


def grid(**keys) -> Grid:
    keys = {"models": "pretrained=m", "methods": ["icl", {"deepthink": {"T": [1, 2]}}], "tasks": ["a", "b"], **keys}
    tasks = {name: GridTask(name, (2,), (name,), dev=name * bool(keys.get("dev"))) for name in keys["tasks"]}
    return Grid(Study.model_validate(keys), tasks, 6)


def known(study: Grid, choice=lambda cell: None) -> list:
    return [c for model in study.models for c in (*study.dev_cells(model), *study.test_cells(model, choice))]


def test_cells_are_the_product_of_the_axes():
    study = grid(seeds="0..2", orders=2, models=["pretrained=m", "pretrained=n"], demonstrations=["random", "herding"])
    cells = known(study)
    assert len(cells) == len({cell.path for cell in cells}) == 2 * 3 * 2 * 2 * 3 * 2
    path = "deepthink,T=2/b,num_fewshot=2,demonstrations=herding,seed=2,order=1,limit=6"
    assert [cell.model.name for cell in cells if cell.path.partition("/")[2] == path] == ["m", "n"]


def test_cells_on_the_test_set_are_known_when_they_are_chosen():
    study = grid(dev={"choose": ["T", "seeds"], "metric": "acc"}, seeds=[0, 1])
    dev = known(study)
    assert {cell.split for cell in dev} == {"dev"} and len(dev) == 3 * 2 * 2

    def choice(cell):
        candidates = study.candidates(cell)
        assert len(candidates) == (4 if cell.variant.method == "deepthink" else 2)
        return DevChoice(*candidates[-1][:3], (), ("T", "seeds")) if cell.task == "b" else None

    chosen = known(study, choice)[len(dev) :]
    assert {cell.variant.name for cell in chosen} == {"icl", "deepthink,T=2"}
    assert {(cell.task, cell.seed) for cell in chosen} == {("b", 1)}
    assert all(cell.chosen == ("T", "seeds") and cell.split == "test" and not cell.rows for cell in chosen)


def test_batches_share_what_can_be_shared():
    """Models one after another, dev before test, the same requests one after another, all T and orders together."""
    study = grid(models=["pretrained=m", "pretrained=n"], orders=2, seeds=[0, 1], dev={"choose": [], "metric": "acc"})
    cells = known(study)
    work = batches(reversed(cells))
    ran = [(b.cells[0].model.name, b.cells[0].split, b.requests, b.cells[0].variant.method) for b in work]
    assert sorted(cell.path for batch in work for cell in batch.cells) == sorted(cell.path for cell in cells)
    assert len(work) == len(ran) == len(set(ran)) == 2 * 2 * 2 * 2 * 2
    assert [key for i, key in enumerate(ran) if not i or key[:2] != ran[i - 1][:2]] == ran[::8]
    assert [(name, split) for name, split, *_ in ran[::8]] == [(n, s) for n in "nm" for s in ("dev", "test")]
    assert all(ran[i][2] == ran[i + 1][2] for i in range(0, len(ran), 2))
    for batch in work:
        first = batch.cells[0]
        assert len(batch.cells) == (4 if first.variant.method == "deepthink" else 2)
        same = {(c.model.name, c.variant.method, c.task, c.seed, c.split) for c in batch.cells}
        assert len(same) == 1 and batches(batch.cells[1:])[0].id == batch.id
    assert len({batch.id for batch in work}) == len(work) and batches([]) == []


def test_a_task_that_makes_requests_for_one_method_shares_them_with_none():
    study = grid()
    tasks = {name: GridTask(name, (2,), (name,), alone=True) for name in study.tasks}
    assert [len(b.cells) for b in batches(known(Grid(study.study, tasks)))] == [1] * 6


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
