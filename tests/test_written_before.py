"""Results that an earlier version wrote are read.

`files/written_before.tar.xz` was made on 2026-11-23, by the last version whose files did not carry the version of their
form: `runs` by `lm_eval --model hf|icl|deepthink` on two tasks of the demonstration model (2 shots, 8 documents),
`collected` from these by `lm-eval-icl collect`, and `study` by `lm-eval-icl study` with the file below.
"""

import json
import tarfile
from pathlib import Path

import pytest

from lm_eval_icl import results
from lm_eval_icl.results.read import read
from lm_eval_icl.version import FORM
from tests import evaluation

ROOT = Path(__file__).resolve().parent.parent


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
