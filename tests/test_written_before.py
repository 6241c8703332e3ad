"""Results and a study's folder that an earlier version wrote are read, and the study is continued.

`files/written_before.tar.xz` was made on 2026-11-23, by the last version whose files did not carry the version of their
form: `runs` by `lm_eval --model hf|icl|deepthink` on two tasks of the demonstration model (2 shots, 8 documents),
`collected` from these by `lm-eval-icl collect`, and `study` by `lm-eval-icl study` with the file below.
"""

import json
import tarfile
from pathlib import Path

import pandas
import pytest
import yaml

from lm_eval_icl import cli, results
from lm_eval_icl.results.read import read
from lm_eval_icl.version import FORM
from tests import evaluation

ROOT = Path(__file__).resolve().parent.parent
STUDY = {
    "models": "pretrained=lm_eval_icl/demo_model",
    "methods": ["hf", "icl", {"deepthink": {"T": [1, 2], "eta": 0.1}}],
    "tasks": ["icl_demo_unseen"],
    "num_fewshot": 2,
    "seeds": "0..1",
    "orders": 2,
    "dev": {"size": 4, "choose": ["T"]},
    "title": "A small study",
    "expected": [{"model": "lm_eval_icl/demo_model", "method": "icl", "values": {"icl_demo_unseen": 0.5}}],
}


@pytest.fixture
def written(tmp_path):
    with tarfile.open(ROOT / "tests/files/written_before.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def test_runs_are_read_with_all_of_their_numbers(written):
    scores = results.scores(written / "runs")
    values = scores[scores.metric == "acc"].groupby(["model", "task"]).value.mean()
    of_tasks = {"icl_demo_short": 1.0, "icl_demo_unseen": 0.875}
    models = ("deepthink", "hf", "icl")
    assert values.to_dict() == {(model, task): value for model in models for task, value in of_tasks.items()}
    documents = results.documents(written / "runs")
    assert len(documents) == 3 * 2 * 8 and documents.acc.mean() == pytest.approx(values.mean())
    assert set(results.runs(written / "runs").seed) == {1234}
    (theirs, left_out), (mine, _) = (read([written / name], quiet=True) for name in ("collected", "runs"))
    assert not left_out and {run.digest for run in theirs} == {run.digest for run in mine}


@pytest.mark.filterwarnings("ignore:.*is of the dev set of a study")
def test_a_study_is_continued(written, capsys, monkeypatch):
    """No cell is run again; T was chosen on the dev set for each seed, which the cells say from now on."""
    monkeypatch.chdir(ROOT)
    file, folder = written / "study.yaml", written / "study"
    file.write_text(yaml.safe_dump(STUDY))
    samples = {path: path.stat().st_mtime_ns for path in folder.rglob("samples_*.jsonl")}
    scores = results.scores(folder / "cells").drop(columns="run")
    for more in (["--status"], []):
        command = ["study", file, "--output", folder, "--limit", 8, "--device", "cpu", "--batch_size", 8, *more]
        cli.run([*map(str, command)])
        said = capsys.readouterr().out
        assert ("28 done by other code" in said) if more else ("T chosen on dev" in said)
    assert samples == {path: path.stat().st_mtime_ns for path in folder.rglob("samples_*.jsonl")}
    assert scores.equals(results.scores(folder / "cells").drop(columns="run"))
    table = pandas.read_csv(folder / "study.csv")
    means = table[table.split == "test"].groupby("method").score.sum() / 4
    assert means.to_dict() == {"hf": 0.84375, "icl": 0.84375, "deepthink": 0.84375}


def test_what_a_later_version_has_written_is_left_out(written, checkpoint):
    """Runs say which form their facts have; before, they said nothing."""
    now = evaluation.run("icl", checkpoint("llama"), ["one_token"], 2, limit=2)["config"]["icl"]
    assert now["form"] == FORM
    (path,) = [path for path in (written / "runs").glob("results*.json") if '"model": "icl"' in path.read_text()]
    results = json.loads(path.read_text())
    assert "form" not in results["config"]["icl"]
    results["config"]["icl"]["form"] = FORM + 1
    path.write_text(json.dumps(results))
    runs, left_out = read([written / "runs"], quiet=True)
    assert len(runs) == 2
    assert [file.why for file in left_out if file.path == path] == [
        f"was written by a later version of lm-eval-icl, in form {FORM + 1}; this one reads {FORM}."
    ]
