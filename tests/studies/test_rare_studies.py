"""Studies of rare kinds: on tasks that they refuse, with rows of a file, with divided models."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from lm_eval_icl import methods
from lm_eval_icl.errors import InputError
from lm_eval_icl.harness.models import ICLModel
from lm_eval_icl.harness.plugin import task_dir
from lm_eval_icl.studies import cell_tasks, end, unit_runner
from lm_eval_icl.studies.folder import StudyFolder
from lm_eval_icl.studies.targets import Model
from lm_eval_icl.studies.unit_runner import Options, UnitRunner
from tests.metaicl import test_metaicl
from tests.studies import running

pytestmark = pytest.mark.usefixtures("own_tasks")


def opened(folder: Path, **keys: Any) -> running.Ran:
    return running.opened(folder / "o", **{"methods": "icl", "seeds": 0, **keys})


def test_a_task_whose_class_builds_its_prompts_is_refused(tmp_path: Path):
    (tmp_path / "own.py").write_text("class Own:\n    task_name = 'own'\n")
    file = tmp_path / "own.yaml"
    file.write_text("task: own\nclass: !function own.Own\n")
    says = "tasks: own: its own class builds its prompts, so that a study cannot run it"
    with pytest.raises(InputError, match=says):
        opened(tmp_path, tasks=str(file))


def test_cells_are_others_if_what_a_function_of_their_task_calls_is_changed(tmp_path: Path):
    file = tmp_path / "own.yaml"
    include = task_dir() / "demo/icl_demo_short.yaml"
    file.write_text(f"include: {include}\ntask: own\ndoc_to_text: !function own.text\n")
    paths = []
    for words in ("Text:", "Text:", "Review:"):
        called = f"def called(doc):\n    return {words!r} + doc['text']\n\n\n"
        (tmp_path / "own.py").write_text(f"{called}def text(doc):\n    return called(doc)\n")
        (cell,) = opened(tmp_path, tasks=str(file)).cells("ready")
        paths.append(cell.path)
    assert paths[0] == paths[1] != paths[2]


def test_a_cell_that_cannot_be_used_is_named(tmp_path: Path):
    study = running.conduct(tmp_path / "o", methods="icl")
    file = study.folder.results_path(study.cells()[0])
    file.write_text(file.read_text().replace('"acc,none": ', '"acc,none": 7'))
    console = Console(file=StringIO(), width=500)
    end.conclude(study.grid, study.folder, "o", {}, console)
    why = f"{file}: has no result of a task (task 'icl_demo_short' is left out: its acc"
    assert why in console.file.getvalue()
    assert "is left out: its acc" in (tmp_path / "o/board.html").read_text()


def test_metaicls_tasks_take_no_other_demonstrations(tmp_path: Path):
    rows = test_metaicl.made_rows("paws", 5, 0)
    test_metaicl.write(tmp_path, "paws", 16, 100, "test", rows)
    metadata = {"metaicl": str(tmp_path)}
    says = "demonstrations: random: task 'metaicl_paws': MetaICL's demonstrations are the rows"
    with pytest.raises(InputError, match=says):
        opened(tmp_path, tasks="metaicl_paws", metadata=metadata, demonstrations="random")


def test_the_rows_of_a_file_are_the_demonstrations_in_its_order(tmp_path: Path):
    file = tmp_path / "rows.json"
    file.write_text("[7, 5, 6]")
    study = opened(tmp_path, demonstrations=str(file))
    task = study.grid.tasks["icl_demo_short"]
    drawn = cell_tasks.draw(task, 3, str(file), 0)
    assert list(drawn) == [7, 5, 6]
    assert list(drawn.values()) == [task.loaded.sampler.df[row] for row in drawn]


def test_a_model_that_is_divided_among_processes_is_refused_every_time(tmp_path, monkeypatch):
    """And loaded once: it is not tried again for the next unit."""
    divided = SimpleNamespace(is_tensor_parallel=True)
    loaded = []

    def load(arguments, where):
        loaded.append(arguments)
        return divided

    maker = SimpleNamespace(create_from_arg_obj=load)
    monkeypatch.setattr(unit_runner, "model_class", lambda name: maker)
    runner = UnitRunner(None, Options("cpu"), StudyFolder(tmp_path), None, None)
    model = Model({"pretrained": "m", "tp_plan": "auto"})
    for _ in range(2):
        with pytest.raises(InputError, match="models: tp_plan: a study does not divide a mod"):
            runner.load(model)
    assert loaded == [model.arguments]


class Generating(ICLModel):
    """A model that answers with the number of its passes, and notes when a run begins."""

    def __init__(self) -> None:
        capabilities = SimpleNamespace(no_memory="")
        method = methods.make("deepthink")
        self.runner = SimpleNamespace(method=method, capabilities=capabilities)
        self.began: list[tuple[int, Any]] = []

    def begin(self, tasks: Any) -> None:
        self.began.append((self.method.T, tasks))

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        return [f"after {self.method.T}" for _ in requests]


def test_each_number_of_passes_is_a_run_of_its_own():
    """Or else the second would have the memories and the counts of the first."""
    lm = Generating()
    instance = SimpleNamespace(request_type="generate_until", repeats=2)
    tasks = [SimpleNamespace(instances=[instance])]
    answers = unit_runner.answer(lm, tasks, "T", {1, 3})
    assert sorted(lm.began) == [(1, tasks), (3, tasks)]
    for number in (1, 3):
        assert answers[number][id(instance)] == [f"after {number}"] * 2
