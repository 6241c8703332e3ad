"""The commit and the version of lm-eval-icl itself: in the results file, and in whatever is built or installed."""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import lm_eval_icl
from lm_eval_icl import version
from tests import evaluation

ROOT = Path(__file__).resolve().parents[2]
FILES = ["lm_eval_icl/__init__.py", "lm_eval_icl/version.py", "lm_eval_icl/commit.txt", "lm_eval_icl.pth", "README.md"]
FILES += ["pyproject.toml", "hatch_build.py", ".gitattributes"]


def git(folder, *command):
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    return subprocess.run(["git", "-C", str(folder), *who, *command], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def package(tmp_path):
    """The package's folder in a new checkout, of the files that say which version it is."""
    root = tmp_path / "checkout"
    for name in FILES:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    (root / "task_configs").mkdir()
    git(root, "init", "-q")
    git(root, "add", ".")
    git(root, "commit", "-qm", "one", "--no-verify")
    return root / "lm_eval_icl"


def head(package):
    return git(package, "rev-parse", "HEAD").strip()


@pytest.mark.parametrize("has_git", [True, False])
def test_a_checkout_and_a_worktree(package, monkeypatch, has_git):
    git(package, "tag", "v1")
    other = package.parent.parent / "other" / "lm_eval_icl"
    git(package, "worktree", "add", "-q", str(other.parent))
    git(package.parent, "commit", "-qm", "two", "--allow-empty")
    expected = [head(package), head(other)]
    if not has_git:
        monkeypatch.setenv("PATH", "")
    assert expected[0] != expected[1]
    assert [version.commit(package), version.commit(other)] == expected


def test_changed_files_and_a_copy_without_history(package):
    expected = head(package)
    (package / "__init__.py").write_text("x = 1\n")
    assert version.commit(package) == f"{expected}+dirty"
    shutil.rmtree(package.parent / ".git")
    assert version.commit(package) is None


@pytest.mark.parametrize(
    ("base", "commit", "expected"),
    [
        ("0.2.0.dev0", "0123456789", "0.2.0.dev0+g0123456"),
        ("0.2.0.dev0", "0123456789+dirty", "0.2.0.dev0+g0123456.dirty"),
        ("0.2.0.dev0", None, "0.2.0.dev0"),
        ("0.2.0", "0123456789", "0.2.0"),
        ("0.2.0", "0123456789+dirty", "0.2.0+g0123456.dirty"),
        ("0.2.0", None, "0.2.0"),
    ],
)
def test_a_state_between_releases_has_a_version_of_its_own(monkeypatch, base, commit, expected):
    monkeypatch.setattr(version, "VERSION", base)
    monkeypatch.setattr(version, "commit", lambda: commit)
    assert version.version() == lm_eval_icl.__version__ == expected


def test_the_results_file_has_it_whatever_the_working_directory(checkpoint, package, monkeypatch):
    monkeypatch.chdir(package)
    found = evaluation.run("icl", checkpoint("gpt2"), ["one_token"], 1)["config"]["icl"]
    assert found["commit"] == version.commit(Path(lm_eval_icl.__file__).parent) != head(package)
    assert found["version"] == lm_eval_icl.__version__


# What is built.


def build(root, out):
    """The wheel of a folder, and what its metadata calls the version."""
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(out), str(root)]
    subprocess.run(pip, check=True, capture_output=True)
    (wheel,) = out.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        assert len(files.namelist()) == len(set(files.namelist()))
        commit = files.read("lm_eval_icl/commit.txt").decode().strip()
        (metadata,) = [name for name in files.namelist() if name.endswith("/METADATA")]
        return commit, re.search("^Version: (.*)$", files.read(metadata).decode(), re.MULTILINE)[1]


@pytest.mark.slow
def test_a_wheel_knows_its_commit(package, tmp_path):
    hash_ = head(package)
    assert build(package.parent, tmp_path / "a") == (hash_, f"{version.VERSION}+g{hash_[:7]}")
    (package.parent / "README.md").write_text("changed")
    assert build(package.parent, tmp_path / "b") == (f"{hash_}+dirty", f"{version.VERSION}+g{hash_[:7]}.dirty")
    assert git(package, "status", "--porcelain") == " M README.md\n"  # building leaves nothing behind
    shutil.rmtree(package.parent / ".git")
    assert build(package.parent, tmp_path / "c") == ("unknown", version.VERSION)
