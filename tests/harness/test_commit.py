"""The commit and the version of lm-eval-icl itself: in the results file, and in whatever is built
or installed."""

import shutil
import subprocess
from pathlib import Path

import pytest

import lm_eval_icl
from lm_eval_icl import version

ROOT = Path(__file__).resolve().parents[2]
FILES = [
    "lm_eval_icl/__init__.py",
    "lm_eval_icl/version.py",
    "lm_eval_icl/commit.txt",
    "lm_eval_icl.pth",
    "README.md",
]
FILES += ["pyproject.toml", "hatch_build.py", ".gitattributes"]


def git(folder, *command):
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    return subprocess.run(
        ["git", "-C", str(folder), *who, *command], check=True, capture_output=True, text=True
    ).stdout


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


def test_a_checkout_a_worktree_and_a_copy_without_history(package, monkeypatch):
    git(package, "tag", "v1")
    other = package.parent.parent / "other" / "lm_eval_icl"
    git(package, "worktree", "add", "-q", str(other.parent))
    git(package.parent, "commit", "-qm", "two", "--allow-empty")
    expected = [head(package), head(other)]
    assert expected[0] != expected[1]
    assert [version.commit(package), version.commit(other)] == expected
    with monkeypatch.context() as without_git:
        without_git.setenv("PATH", "")
        assert [version.commit(package), version.commit(other)] == expected
    (package / "__init__.py").write_text("x = 1\n")
    assert version.commit(package) == f"{expected[0]}+dirty"
    shutil.rmtree(package.parent / ".git")
    assert version.commit(package) is None


@pytest.mark.parametrize(
    ("base", "commit", "expected"),
    [
        ("0.2.0.dev0", "0123456789", "0.2.0.dev0+g0123456"),
        ("0.2.0", "0123456789", "0.2.0"),
        ("0.2.0", "0123456789+dirty", "0.2.0+g0123456.dirty"),
    ],
)
def test_a_state_between_releases_has_a_version_of_its_own(monkeypatch, base, commit, expected):
    monkeypatch.setattr(version, "VERSION", base)
    monkeypatch.setattr(version, "commit", lambda: commit)
    assert version.version() == lm_eval_icl.__version__ == expected
