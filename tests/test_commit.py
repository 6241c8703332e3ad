"""The commit of lm-eval-icl itself in the results file."""

import json
import subprocess
from pathlib import Path

import pytest

import lm_eval_icl
from lm_eval_icl.harness import provenance as commit
from tests import harness


def git(folder, *command):
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    return subprocess.run(["git", "-C", str(folder), *who, *command], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package in a new checkout, and nothing installed."""
    folder = tmp_path / "checkout" / "lm_eval_icl"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    git(folder.parent, "init", "-q")
    git(folder.parent, "add", ".")
    git(folder.parent, "commit", "-qm", "one", "--no-verify")
    installed(monkeypatch, None)
    return folder


def installed(monkeypatch, direct_url):
    class Distribution:
        def read_text(self, name):
            return {"direct_url.json": direct_url}[name]

    monkeypatch.setattr(commit, "distribution", lambda name: Distribution())


def test_a_checkout(package):
    head = git(package, "rev-parse", "HEAD").strip()
    git(package, "tag", "v1")
    assert commit.commit(package) == head
    (package / "__init__.py").write_text("x = 1\n")
    assert commit.commit(package) == head + "-dirty"


def test_an_environment_inside_somebody_elses_repository(package):
    other = package / ".venv" / "lm_eval_icl"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("")
    assert commit.commit(other) is None


def test_installed_from_git(tmp_path, monkeypatch):
    url = {"url": "https://example.org/x.git", "vcs_info": {"vcs": "git", "commit_id": "abc123"}}
    installed(monkeypatch, json.dumps(url))
    assert commit.commit(tmp_path) == "abc123"


def test_installed_from_a_folder_or_an_index(tmp_path, monkeypatch):
    installed(monkeypatch, json.dumps({"url": "file:///somewhere", "dir_info": {}}))
    assert commit.commit(tmp_path) is None
    installed(monkeypatch, None)
    assert commit.commit(tmp_path) is None


def test_without_git(package, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert commit.commit(package) is None


def test_the_results_file_has_it_whatever_the_working_directory(checkpoint, package, monkeypatch):
    monkeypatch.undo()
    monkeypatch.chdir(package)
    found = harness.run("icl", checkpoint("gpt2"), ["one_token"], 1)["config"]["icl"]["commit"]
    assert found == commit.commit(Path(lm_eval_icl.__file__).parent) != git(package, "rev-parse", "HEAD").strip()


def test_a_git_that_hangs_is_given_up(monkeypatch):
    def hang(*args, timeout, **kwargs):
        raise subprocess.TimeoutExpired(args, timeout)

    monkeypatch.setattr(commit.subprocess, "run", hang)
    assert commit._git(Path(), "describe") is None
