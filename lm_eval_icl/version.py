"""The version of this package, and the git commit of its source.

pyproject.toml and hatch_build.py run this file by itself when the package is built, so it imports
nothing but the standard library.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

# The number of a release. Between two releases, the number of the next release with ".dev0".
VERSION = "0.1.0.dev0"


def version() -> str:
    """`VERSION`. If this is no release, the commit follows, and "dirty" if files differ from the
    commit."""
    hash_, _, dirty = (commit() or "").partition("+")
    local = [f"g{hash_[:7]}", dirty] if dirty or ".dev" in VERSION else []
    return "+".join(filter(None, [VERSION, ".".join(filter(None, local if hash_ else []))]))


def commit(package: Path = Path(__file__).parent) -> str | None:
    """The hash of the commit of the package's source, with "+dirty" if files differ from it; None
    if it is unknown.

    The file `commit.txt` holds the hash if it was written by the build of a wheel or a source
    distribution (hatch_build.py) or by `git archive` (.gitattributes). In a checkout, the hash is
    that of the present HEAD.
    """
    if written := _written(package):
        return written
    # If the file is not tracked, the package may be installed in an environment inside another
    # project's repository.
    if _git(package, "ls-files", "--error-unmatch", "__init__.py"):
        return _git(package, "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+dirty")
    return _logged(package.parent)


def _git(folder: Path, *command: str) -> str | None:
    """The output of a git command; None if git fails, is not installed, or takes more than 10
    seconds."""
    # Variables such as GIT_DIR, which git sets for its hooks, would name another repository. A
    # checkout that belongs to another user, as in many containers, is safe to read: Python is
    # running its code already.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    git = ["git", "-c", "safe.directory=*", "-C", str(folder)]
    try:
        done = subprocess.run(
            [*git, *command], capture_output=True, text=True, timeout=10, env=environment
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def _written(package: Path) -> str | None:
    """The commit in the file `commit.txt`; None if the file holds no commit (in a checkout, it
    holds a placeholder)."""
    text = (package / "commit.txt").read_text(encoding="utf-8").strip()
    is_commit = re.fullmatch("[0-9a-f]{40,}(\\+dirty)?", text)
    return text if is_commit else None


def _logged(root: Path) -> str | None:
    """The commit of HEAD, read from git's log file of HEAD: for a checkout on a machine where git
    is not installed. (Only git could say whether files differ from the commit.)"""
    git = root / ".git"
    try:
        if git.is_file():  # in a worktree or a submodule, a file with the line "gitdir: PATH"
            git = root / git.read_text(encoding="utf-8").removeprefix("gitdir:").strip()
        return (git / "logs" / "HEAD").read_text(encoding="utf-8").splitlines()[-1].split()[1]
    except (OSError, IndexError):
        return None
