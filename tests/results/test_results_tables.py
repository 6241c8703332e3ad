"""Results files as tables, for a notebook."""

import json
from pathlib import Path

import numpy as np
import pytest
from lm_eval.tasks import TaskManager

from lm_eval_icl import results
from lm_eval_icl.harness.plugin import task_dir
from lm_eval_icl.smoke.demo import model_path
from tests.results.test_leaderboard_read import (
    evaluate,
    generating,
    results_of,
    samples_of,
    save,
    scored_by,
    write,
)

TASK = "icl_demo_short"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Runs of two models and two seeds on one task, and a run with several metrics and filters."""
    out = tmp_path_factory.mktemp("results")
    manager = TaskManager(include_path=str(task_dir() / "demo"), include_defaults=False)
    options = {"limit": 6, "task_manager": manager}
    for model, seed in (("hf", 7), ("hf", 8), ("icl", 7)):
        found = evaluate(model_path(), [TASK], 3, model, fewshot_random_seed=seed, **options)
        save(found, out)
    both = scored_by("both", "acc", "acc_norm", "f1")
    save(evaluate(model_path(), [generating(), both], 2), out)
    return out


@pytest.fixture(scope="module")
def demo(folder):
    """The documents of the task that all three runs have."""
    table = results.documents(folder)
    return table[table.task == TASK]


def test_means_of_documents_are_lm_evals_values(folder):
    means = results.documents(folder).groupby(["task", "model"]).acc.mean()
    runs = results.runs(folder)
    for (task, model), mean in means.dropna().items():
        values = []
        for path in runs[runs.model == model].path:
            of_task = json.loads(Path(path).read_text())["results"].get(task, {})
            values.append(of_task.get("acc,none", np.nan))
        assert mean == pytest.approx(np.nanmean(values))


def test_documents_are_lm_evals_samples(folder, demo):
    assert len(demo) == 18
    assert set(demo.doc_id) == set(range(6))
    targets = []
    for path in folder.rglob(f"samples_{TASK}_*.jsonl"):
        targets += [json.loads(line)["target"] for line in path.open()]
    assert sorted(demo.target) == sorted(targets)
    right = demo.prediction.astype(str) == demo.target.astype(str)
    assert right.eq(demo.acc == 1).all()


def test_hf_and_icl_were_asked_the_same_with_one_seed(demo):
    sets = demo.groupby(["model", "seed"]).demonstrations.agg(set)
    assert sets["hf", 7] == sets["icl", 7] != sets["hf", 8]
    of_seed = demo[demo.seed == 7]
    mine = of_seed[of_seed.model == "icl"].set_index("document")
    theirs = of_seed[of_seed.model == "hf"].set_index("document")
    assert mine.prediction.eq(theirs.prediction).all()


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
    scores = results.scores(folder)
    row = scores[(scores.task == "both") & (scores.metric == "acc_norm")]
    assert list(row["filter"]) == ["none"]
    assert row.value.item() == pytest.approx(both.acc_norm.mean())


def test_runs(folder):
    table = results.runs(folder)
    assert sorted(table.model) == ["hf", "hf", "icl", "icl"]
    assert table.run.is_unique
    assert table.date.is_monotonic_increasing
    assert str(table.date.dt.tz) == "UTC"
    backwards = [*table.path][::-1]
    assert list(results.runs(backwards).path) == list(table.path), "in the order of the dates"
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
