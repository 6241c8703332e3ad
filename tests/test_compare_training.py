"""The script that compares training under each method, at a size of seconds."""

from __future__ import annotations

import importlib
from pathlib import Path
from statistics import mean
from types import ModuleType
from typing import Any

import pytest

from lm_eval_icl.errors import InputError
from lm_eval_icl.smoke.demo import model_path
from lm_eval_icl.training.train import Settings

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module("compare_training")


def test_interval_is_that_of_student(script: ModuleType) -> None:
    """With two values, the quantile is 12.706 and the standard error half of their difference."""
    assert script.interval([1.0, 3.0]) == pytest.approx((2.0, 12.7062), abs=1e-4)


def test_tests_have_no_pairing_and_no_text_of_training(script: ModuleType, tmp_path: Path) -> None:
    training, testing = script.draw_tasks(seed=0)
    unseen = set().union(*(task.labels for task in testing["unseen"]))
    assert not unseen & set().union(*(task.labels for task in training))
    trained = {
        (topic, word)
        for task in training
        for topic in task.labels
        for label in task.labels.values()
        for word in label.split()
    }
    seen = [
        (topic, word)
        for task in testing["seen"]
        for topic in task.labels
        for word in " ".join(task.labels.values()).split()
    ]
    assert not trained & set(seen)
    topics = {topic for topic, _ in trained}
    assert {topic for topic, _ in seen} <= topics, "seen topics are topics of training"

    withheld: set[str] = set()
    tests = script.draw_tests(testing, 0, withheld)
    tasks = script.write_rows(tmp_path / "training.jsonl", training, 0, withheld)
    asked = [row["input"] for test in tests for row in (*test.queries, *test.demonstrations)]
    assert len({text.splitlines()[0].partition(": ")[2] for text in asked}) == len(asked), "no text twice"
    texts = {row.input.splitlines()[0].partition(": ")[2] for task in tasks for row in task.rows}
    assert not texts & {text.splitlines()[0].partition(": ")[2] for text in asked}
    assert all(row.output in row.options for task in tasks for row in task.rows)


@pytest.fixture
def small(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for name, value in {"SHOTS": (1, 8), "TEST_TASKS": 1, "TRAINING_TASKS": 3, "QUERIES": 2, "ORDERS": 2}.items():
        monkeypatch.setattr(script, name, value)
    return script


@pytest.mark.slow
def test_a_run_of_two_steps(small: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends with tables and a picture; the same command does nothing again; another one is refused."""
    settings = Settings(steps=2, learning_rate=1e-3, eval_steps=0, eval_documents=0)

    def compare(settings: Settings = settings) -> dict[str, Any]:
        found: dict[str, Any] = small.compare(model_path(), tmp_path, ("icl", "invicl"), [0, 1], settings)
        return found

    results = compare()
    first = (tmp_path / "table.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in first.splitlines() if line.startswith("| `i")]
    assert [row[0] for row in rows] == ["`icl`", "`invicl`"] * 3 + ["`invicl` less", "`icl`"]
    for name, row in zip(("icl", "invicl"), rows, strict=False):
        shares = [run["accuracy"]["seen"]["8"] for run in results["trained"][name]]
        assert row[2].startswith(f"{100 * mean(shares):.1f} ± ")
    assert rows[1][3] == rows[1][6] == "0.0 ± 0.0", "invicl does not depend on the order"
    assert (tmp_path / "accuracy.svg").stat().st_size < 100_000
    assert results["trained"]["icl"][0]["final_loss"] != results["trained"]["icl"][1]["final_loss"]

    for name in ("train", "measure"):
        monkeypatch.setattr(small, name, lambda *_, **__: pytest.fail("done again"))
    assert compare() == results
    assert (tmp_path / "table.md").read_text() == first
    with pytest.raises(InputError, match="holds runs with other learning_rate: give another folder"):
        compare(Settings(steps=2, learning_rate=1e-4, eval_steps=0, eval_documents=0))
