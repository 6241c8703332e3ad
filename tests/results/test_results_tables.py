"""Results files as tables, for a notebook."""

import json
from pathlib import Path

import numpy as np
import pytest
from lm_eval.tasks import TaskManager

from lm_eval_icl import results
from lm_eval_icl.harness.plugin import task_dir
from lm_eval_icl.smoke.demo import model_path
from tests import evaluation
from tests.results.test_leaderboard_read import (
    CHOICE,
    GENERATE,
    evaluate,
    results_of,
    samples_of,
    save,
    write,
)

TASK = "icl_demo_short"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two runs of lm-eval's own `hf` on one set of demonstrations, and a run with several metrics and filters."""
    out = tmp_path_factory.mktemp("results")
    manager = TaskManager(include_path=str(task_dir() / "demo"), include_defaults=False)
    for model, seed in (("hf", 7), ("hf", 8), ("icl", 7)):
        more = {"limit": 6, "fewshot_random_seed": seed, "task_manager": manager}
        found = evaluate(model_path(), [TASK], 3, model, **more)
        save(found, out)
    both = evaluation.task(
        "both", **CHOICE, metric_list=[{"metric": "acc"}, {"metric": "acc_norm"}, {"metric": "f1"}]
    )
    save(evaluate(model_path(), [GENERATE, both], 2), out)
    return out


def test_documents_are_lm_evals_samples(folder):
    table = results.documents(folder)
    found = table.groupby(["task", "model"]).acc.mean()
    runs = results.runs(folder)
    for (task, model), mean in found.dropna().items():
        paths = [Path(path) for path in runs[runs.model == model].path]
        values = [
            json.loads(path.read_text())["results"].get(task, {}).get("acc,none", np.nan)
            for path in paths
        ]
        assert mean == pytest.approx(np.nanmean(values))
    of_demo = table[table.task == TASK]
    assert len(of_demo) == 18
    assert set(of_demo.doc_id) == set(range(6))
    samples = [
        json.loads(line) for path in folder.rglob(f"samples_{TASK}_*.jsonl") for line in path.open()
    ]
    assert sorted(of_demo.target) == sorted(sample["target"] for sample in samples)
    # hf and icl were asked the same, and the two seeds of hf were not.
    sets = of_demo.groupby(["model", "seed"]).demonstrations.agg(set)
    assert sets["hf", 7] == sets["icl", 7] != sets["hf", 8]
    mine, theirs = (
        of_demo[(of_demo.model == model) & (of_demo.seed == 7)] for model in ("icl", "hf")
    )
    assert mine.set_index("document").prediction.eq(theirs.set_index("document").prediction).all()
    right = of_demo.prediction.astype(str) == of_demo.target.astype(str)
    assert right.eq(of_demo.acc == 1).all()


def test_a_row_for_each_filter_and_a_column_for_each_metric(folder):
    table = results.documents(folder)
    generated = table[table.task == "generate"]
    assert set(generated["filter"]) == {"first", "whole"}
    assert generated.exact_match.notna().all()
    assert generated.acc.isna().all()
    assert all(isinstance(text, str) for text in generated.prediction)
    both = table[table.task == "both"]
    assert both[["acc", "acc_norm", "f1"]].notna().all(axis=None)
    assert len(both.f1.iloc[0]) == 2


def test_scores_are_lm_evals_table(folder):
    documents = results.documents(folder)
    both = documents[documents.task == "both"]
    values = results.scores(folder).set_index(["task", "metric", "filter"]).value
    assert values["both", "acc_norm", "none"] == pytest.approx(both.acc_norm.mean())


def test_runs(folder):
    table = results.runs(folder)
    assert sorted(table.model) == ["hf", "hf", "icl", "icl"]
    assert table.run.is_unique
    assert table.date.is_monotonic_increasing
    assert str(table.date.dt.tz) == "UTC"
    assert list(results.runs([*table.path][::-1]).path) == list(
        table.path
    )  # in the order of the dates
    assert set(table.seed.dropna()) == {7, 8, 1234}
    assert set(table.order) == {0}
    assert table.merge(results.documents(folder), on="run").pretrained_x.nunique() == 1


def test_what_is_left_out_is_said(tmp_path):
    write(tmp_path, '{"results": {"a": 1', time="bad")
    write(tmp_path, results_of({"a": [1.0, 0.0]}), {"a": samples_of([1.0, 0.0])}, time="good")
    with pytest.warns(UserWarning, match="results_bad.json: is damaged"):
        assert len(results.documents(tmp_path)) == 2
    write(tmp_path, results_of({"a": [1.0, 1.0]}), {"a": samples_of([1.0, 0.0])}, time="wrong")
    with pytest.warns(UserWarning, match="task 'a', none: its samples are not used: their acc"):
        assert len(results.documents(tmp_path)) == 2


def test_nothing_is_a_table_too(tmp_path):
    assert results.documents(tmp_path).empty
    assert results.runs([]).columns.tolist()[0] == "run"
    assert results.documents(tmp_path).groupby(["task", "model"]).doc_id.count().empty
