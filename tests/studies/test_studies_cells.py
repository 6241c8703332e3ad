"""A study's cells: which are accepted, which are of other code, and what happens to the others when one fails."""

import csv
import json
import shutil
import sys
from pathlib import Path

import pytest

import lm_eval_icl
from lm_eval_icl.errors import InputError
from lm_eval_icl.methods.runner import MethodRunner
from lm_eval_icl.smoke.demo import model_path
from lm_eval_icl.studies import folder as study_folder
from tests import commands, processes
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


# Other code.


def by_the_code_here(line: list[str]) -> None:
    """A command for which the code of numbers is in the copy of the package in the working directory."""
    from lm_eval_icl.methods import code

    code._PACKAGE = Path.cwd() / PACKAGE.name
    sys.dont_write_bytecode = True  # a module that changes twice in a second would be taken for the one before
    sys.path.insert(0, str(Path.cwd()))
    processes.run_command(line)


def launched(folder: Path, *command: str) -> str:
    """A command by the copy of the package that is in a folder."""
    env = {"LM_EVAL_ICL_CACHE": str(folder / "cache")}
    done = processes.completed(by_the_code_here, list(command), cwd=folder, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


MINE = '''"""A method."""
from dataclasses import dataclass
from lm_eval_icl.methods.icl import ICL
from beside import REPEAT

@dataclass(frozen=True)
class Mine(ICL):
    """Twice."""
    repeat: int = REPEAT
'''


@pytest.mark.slow
def test_cells_of_other_code_are_marked_and_run_again_when_asked(tmp_path):
    """Of an installed package and a file of the user's: a comment changes nothing, what a number comes from does."""
    shutil.copytree(PACKAGE, tmp_path / "lm_eval_icl", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "beside.py").write_text("REPEAT = 1\n")
    keys = {"methods": ["hf", "icl", "mine:Mine"], "demonstrations": ["stratified", "herding:pool=20"]}
    running.write(tmp_path / "s.yaml", seeds=0, **keys)

    def run(*options: str) -> str:
        return launched(
            tmp_path, "lm-eval-icl", "study", "s.yaml", "--output", "o", "--device", "cpu", "--limit", "4", *options
        )

    def states() -> dict[str, set[str]]:
        run("--status")  # which writes nothing
        run()
        found: dict[str, set[str]] = {}
        for path, state in record(tmp_path)["cells"].items():
            how = "chosen" if "herding" in path else "drawn"
            found.setdefault(f"{path.split('/')[1].split('-')[0]} {how}", set()).add(state)
        return {name: of.pop() for name, of in found.items() if len(of) == 1}

    def replace(file: str, old: str, new: str) -> None:
        text = (tmp_path / file).read_text()
        assert old in text
        (tmp_path / file).write_text(text.replace(old, new, 1))

    every = [f"{method} {how}" for method in ("hf", "icl", "mine") for how in ("chosen", "drawn")]
    run()
    before = {file: file.read_bytes() for file in tmp_path.glob("o/cells/**/*.json*")}
    # What is said is changed, and a figure.
    for file in ("lm_eval_icl/inference/memory.py", "lm_eval_icl/demonstrations/herding.py", "mine.py"):
        replace(file, '"""', '"""Once more: ')
        (tmp_path / file).write_text((tmp_path / file).read_text() + "\n# no code\n")
    replace("lm_eval_icl/leaderboard/figures.py", "\nimport ", "\nCOLOUR = 1\nimport ")
    assert states() == dict.fromkeys(every, "done")
    # What the user's file imports, and the code that chooses.
    (tmp_path / "beside.py").write_text("REPEAT = 2\n")
    (tmp_path / "lm_eval_icl/demonstrations/herding.py").open("a").write("\nCODE = 1\n")
    other = {name for name in every if name.startswith("mine") or name.endswith("chosen")}
    assert states() == {name: "done by other code" if name in other else "done" for name in every}
    # Every method's own, but not hf's.
    (tmp_path / "lm_eval_icl/inference/scoring.py").open("a").write("\nCODE = 1\n")
    said = run("--status")
    assert "5 done by other code" in said and "1 done\n" in said
    said = run()
    assert "1 of 1 cells by other code" in said and "--rerun runs both again" in " ".join(said.split())
    assert {file: file.read_bytes() for file in tmp_path.glob("o/cells/**/*.json*")} == before  # nothing is thrown away
    with (tmp_path / "o/study.csv").open() as rows:
        assert sorted(row["code"] for row in csv.DictReader(rows)) == [""] + ["other code"] * 5
    said = run("--rerun")
    assert "by other code" not in said and set(record(tmp_path)["cells"].values()) == {"done"}
    after = {file: file.read_bytes() for file in tmp_path.glob("o/cells/**/*.json*")}
    assert after.keys() == before.keys() and {f for f in after if after[f] != before[f] and "results" in f.name} == {
        file for file in after if "results" in file.name and not ("/hf/" in str(file) and "stratified" in str(file))
    }

    # A cell of before does not say which code has made it.
    def forget(found):
        del found["config"]["icl"]["study"]["code"]

    edit(next(file for file in after if "results" in file.name and "/icl/" in str(file)), forget)
    assert "1 done by unknown code" in run("--status")


@pytest.mark.slow
def test_a_kept_choice_is_of_the_code_that_chooses(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "lm_eval_icl", ignore=shutil.ignore_patterns("__pycache__"))

    def made_now() -> bool:
        launched(
            tmp_path,
            *("lm_eval", "--model", "icl", "--model_args", f"pretrained={model_path()}", "--tasks", "icl_demo_short"),
            *("--num_fewshot", "2", "--limit", "2", "--device", "cpu", "--metadata", "demonstrations=herding:pool=20"),
            *("--output_path", "out"),
        )
        latest = max(tmp_path.glob("out/**/results_*.json"))
        return json.loads(latest.read_text())["config"]["icl"]["chosen"]["icl_demo_short"]["made_now"]

    assert made_now()
    for file in ("demonstrations/herding.py", "leaderboard/figures.py"):
        (tmp_path / "lm_eval_icl" / file).open("a").write("\n# a remark\n")
    (tmp_path / "lm_eval_icl/leaderboard/figures.py").open("a").write("\nCODE = 1\n")
    assert not made_now()
    (tmp_path / "lm_eval_icl/demonstrations/herding.py").open("a").write("\nCODE = 1\n")
    assert made_now()


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
