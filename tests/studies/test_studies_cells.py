"""A study's cells: which are accepted, which are of other code, and what happens to the others when one fails."""

import csv
import json
import shutil
from pathlib import Path

import pytest

import lm_eval_icl
from lm_eval_icl.errors import InputError
from lm_eval_icl.methods.runner import MethodRunner
from lm_eval_icl.smoke.demo import model_path
from lm_eval_icl.studies import folder as study_folder
from tests import commands
from tests.studies import running

PACKAGE = Path(lm_eval_icl.__file__).parent


pytestmark = pytest.mark.usefixtures("own_tasks")


@pytest.fixture
def study(tmp_path, monkeypatch, capsys):
    """Runs the command on a study in `tmp_path`: what it prints, and its last line if it fails."""

    def run(*options: object, limit: int | None = 6, **keys: object) -> tuple[str, str]:
        file = running.write(tmp_path / "s.yaml", **{"seeds": 0, **keys})
        line = ["study", file, "--output", tmp_path / "o", "--device", "cpu", *options]
        line += ["--limit", limit] if limit else []
        failure = ""
        try:
            commands.run(*line)
        except InputError as refusal:
            failure = str(refusal)
            assert "\n" not in failure
        return capsys.readouterr().out, failure

    return run


def record(folder: Path) -> dict:
    return json.loads((folder / "o/study.json").read_text())


def files(folder: Path, part: str) -> tuple[Path, Path]:
    """The results and the samples of the one cell whose path has this part."""
    (results,) = (path for path in folder.glob("o/cells/**/results_*") if part in str(path))
    (samples,) = results.parent.glob("samples_*")
    return results, samples


def edit(file: Path, change) -> None:
    """Change a results file."""
    found = json.loads(file.read_text())
    change(found)
    file.write_text(json.dumps(found))


# Which cells are accepted.


def cut(results: Path, samples: Path) -> None:
    samples.write_text("".join(samples.read_text().splitlines(keepends=True)[:-2]))


def another_accuracy(results: Path, samples: Path) -> None:
    def change(found):
        (of_task,) = found["results"].values()
        of_task["acc,none"] = 1.0 if of_task["acc,none"] < 1 else 0.5

    edit(results, change)


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (cut, "of 4 documents, the results of 6"),
        (another_accuracy, "mean acc is"),
    ],
)
@pytest.mark.slow
def test_a_damaged_cell_is_refused_and_the_others_are_there(tmp_path, study, damage, why):
    keys = {"methods": ["icl", "nope"]}
    study(**keys)
    path = next(path for path in record(tmp_path)["cells"] if "/icl/" in path)
    damage(*files(tmp_path, "/icl/"))
    damaged = [file.read_bytes() for file in files(tmp_path, "/icl/")]
    for _ in range(2):  # it is not run again by itself, as somebody has changed it
        said, failure = study(**keys)
        assert failure.startswith("lm-eval-icl: study: 1 of 2 cells failed") and why in failure and "nope" in said
        assert why in record(tmp_path)["failed"][path] and record(tmp_path)["cells"][path] == "failed"
    assert [file.read_bytes() for file in files(tmp_path, "/icl/")] == damaged
    assert why in study("--status", **keys)[0]
    assert study("--rerun", **keys)[1] == ""
    assert set(record(tmp_path)["cells"].values()) == {"done"} and not record(tmp_path)["failed"]


@pytest.mark.slow
def test_what_needs_a_damaged_cell_fails_for_that_reason(tmp_path, study):
    """The choice that it is part of; that of another task is made."""
    keys = {"methods": ["icl", {"deepthink": {"T": [1, 2]}}], "dev": {"size": 8, "choose": "T"}}
    keys["tasks"] = ["icl_demo_short", "icl_demo_unseen"]
    study(limit=None, **keys)
    damaged = next(path for path in record(tmp_path)["cells"] if "T=2/icl_demo_short" in path and "dev" in path)
    cut(*files(tmp_path, damaged))
    _, failure = study(limit=None, **keys)
    failed = record(tmp_path)["failed"]
    assert "2 of " in failure and len(failed) == 2 and damaged in failed
    (why,) = (why for path, why in failed.items() if path != damaged)
    assert f"nothing can be chosen on the dev set, as {damaged} failed" in why and "not whole" in why
    (choice,) = record(tmp_path)["choices"]
    assert "icl_demo_unseen" in choice


# What fails.


FAILS = """
from dataclasses import dataclass
from pathlib import Path
from lm_eval_icl.methods.icl import ICL

@dataclass(frozen=True)
class Fails(ICL):
    def pattern(self, n):
        if n == 4 and Path({}).exists():
            raise ZeroDivisionError("four is too many")
        return super().pattern(n)
"""


@pytest.mark.slow
def test_a_bad_cell_fails_alone_and_is_tried_again(tmp_path, study, monkeypatch):
    bad = tmp_path / "bad"
    bad.touch()
    (tmp_path / "fails_at_four.py").write_text(FAILS.format(repr(str(bad))))
    monkeypatch.syspath_prepend(tmp_path)
    # The first model has no weights.
    shutil.copytree(model_path(), tmp_path / "nothing", ignore=shutil.ignore_patterns("*.safetensors"))
    models = [f"pretrained={tmp_path / 'nothing'}", running.MODEL]
    keys = {"models": models, "methods": ["fails_at_four:Fails", "nope"], "num_fewshot": [3, 4, 5], "seeds": "0..1"}
    said, failure = study(**keys)
    assert failure.startswith("lm-eval-icl: study: 14 of 24 cells failed; the first: ") and "nope" in said
    failed = record(tmp_path)["failed"]
    four = {path: why for path, why in failed.items() if "nothing" not in path}
    assert len(four) == 2 and all("num_fewshot=4" in path and "Fails" in path for path in four)
    assert all("ZeroDivisionError: four is too many" in why and "fails_at_four.py line" in why for why in four.values())
    assert sorted(record(tmp_path)["cells"].values()) == ["done"] * 10 + ["failed"] * 14
    with (tmp_path / "o/study.csv").open() as rows:
        assert len(list(csv.DictReader(rows))) == 10
    assert "14 failed" in study("--status", **keys)[0]
    # The second model alone has rows for a table; without it there is none.
    alone = study("--output", tmp_path / "alone", **{**keys, "models": models[0]})[1]
    assert "12 of 12 cells failed" in alone
    times = {file: file.stat().st_mtime_ns for file in tmp_path.glob("o/cells/**/results_*")}
    bad.unlink()
    assert study(**{**keys, "models": models[1]})[1] == ""
    assert set(record(tmp_path)["cells"].values()) == {"done"} and not record(tmp_path)["failed"]
    assert {file: file.stat().st_mtime_ns for file in times} == times


@pytest.mark.slow
def test_cells_that_are_run_together_fail_one_by_one(tmp_path, study):
    """Thinking twice takes more positions than the model is given, thinking once does not."""
    keys = {"models": f"{running.MODEL},max_length=58", "methods": {"deepthink": {"T": [1, 2]}}, "seeds": 0}
    _, failure = study(**keys)
    states = {path.split("/")[1].partition("T=")[2]: state for path, state in record(tmp_path)["cells"].items()}
    assert states == {"1": "done", "2": "failed"}, (failure, record(tmp_path)["failed"])
    assert f"1 of 2 cells failed; the first: {model_path()}, deepthink,T=2: " in failure


def test_what_is_stopped_between_two_passes_goes_on_with_the_second(tmp_path, monkeypatch):
    keys = {"methods": {"deepthink": {"T": [1, 2], "eta": 0.5}}, "seeds": 0}
    calm, score = running.conduct(tmp_path / "calm", **keys), MethodRunner.score_memories

    def once(*args):
        yield next(score(*args))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("lm_eval_icl.harness.response_cache.SECONDS", 0)  # what is finished is written
        patch.setattr(MethodRunner, "score_memories", once)
        with pytest.raises(KeyboardInterrupt):
            running.conduct(tmp_path / "o", **keys)
    again = running.conduct(tmp_path / "o", **keys)
    for cell in calm.all_cells():
        assert running.samples(again, cell) == running.samples(calm, cell)
    assert [each["shared"]["cells"] for each in running.facts(again)] == [2, 2]  # neither was run again by itself


def test_a_full_disk_ends_the_study_at_once_and_leaves_no_half_cell(tmp_path, study, monkeypatch):
    tried, save = [], study_folder.EvaluationTracker.save_results_samples

    def half(tracker, task_name, samples):
        tried.append(task_name)
        save(tracker, task_name, samples[:-1])

    monkeypatch.setattr(study_folder.EvaluationTracker, "save_results_samples", half)
    _, failure = study(methods=["icl", "nope", "pcw"])
    assert "is the disk full?" in failure and "failed" not in failure and len(tried) == 1
    assert not [path for path in (tmp_path / "o/cells").rglob("*") if path.is_file()]
