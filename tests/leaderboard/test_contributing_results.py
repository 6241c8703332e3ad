"""A board in a git repository, as docs/contributing-results.md sets it up and adds to it."""

import csv
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lm_eval_icl import cli
from tests import boards

PAGE = (Path(__file__).resolve().parents[2] / "docs/contributing-results.md").read_text(encoding="utf-8")
WORKFLOW = yaml.safe_load(re.search(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[1])
CONTRIBUTING = re.search(r"```bash\n(.*?)```", PAGE, re.DOTALL)[1].splitlines()


@pytest.fixture
def run(monkeypatch, capsys):
    """A function that runs a line in a folder: our command in this process, others in one of their own."""
    for role in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{role}_NAME", "someone")
        monkeypatch.setenv(f"GIT_{role}_EMAIL", "someone@example.org")

    def run_line(line, folder):
        program, *arguments = shlex.split(line)
        if program != "lm-eval-icl":
            assert program in ("git", "mkdir")
            subprocess.run([program, *arguments], cwd=folder, check=True, capture_output=True)
            return ""
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "argv", [program, *arguments])
        cli.main()
        return capsys.readouterr().out

    return run_line


def contribute(run, folder, model):
    """What somebody does who has run a model: the page's commands, the first of which is lm-eval's own."""
    folder.mkdir()
    run("git clone ../origin.git board", folder)
    for seed in range(2):
        boards.write(folder / "results", model, seed, n=20, right=0.7)
    for line in CONTRIBUTING[1:]:
        run(line.replace("my-runs", model), folder)
    run(f"git push origin {model}", folder / "board")


def build(run, folder, branch):
    """The workflow's steps that are lines of a shell, in a clone of a branch: what each prints."""
    run(f"git clone --branch {branch} origin.git {branch}", folder)
    lines = [step["run"] for step in WORKFLOW["jobs"]["page"]["steps"] if "run" in step]
    assert lines[0] == "pip install lm-eval-icl"
    return [run(line, folder / branch) for line in lines[1:]]


def test_results_of_two_people_become_one_page(run, tmp_path):
    """Both add their runs, the second is merged into the first; a run that is changed afterwards is refused."""
    run("git init --bare --initial-branch main origin.git", tmp_path)
    contribute(run, tmp_path / "first", "icl")
    run("git branch main icl", tmp_path / "origin.git")
    contribute(run, tmp_path / "second", "invicl")
    checked, *_ = build(run, tmp_path, "invicl")
    assert checked == "4 runs are as they should be.\n"
    page = (tmp_path / "invicl/site/index.html").read_text(encoding="utf-8")
    table = (tmp_path / "invicl/site/board.csv").read_text(encoding="utf-8")
    assert {row["method"] for row in csv.DictReader(table.splitlines())} == {"icl", "invicl"}
    assert table.splitlines()[1].split(",")[0] in page

    file = next((tmp_path / "second/board/runs").iterdir())
    file.write_text(re.sub(r'"acc,none": [\d.]+', '"acc,none": 1.0', file.read_text(), count=1))
    run("git commit -am better", tmp_path / "second/board")
    run("git push origin HEAD:better", tmp_path / "second/board")
    with pytest.raises(SystemExit, match="1 of 4 files cannot be used as they are"):
        build(run, tmp_path, "better")
