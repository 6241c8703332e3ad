"""The version of this package, and the commit that it is from.

pyproject.toml and hatch_build.py run this file by itself when the package is built, so it imports nothing but the
standard library.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

# The version of a release; after the release, the next one's with ".dev0".
VERSION = "0.1.0.dev0"


def version() -> str:
    """`VERSION`; unless this is a release, also the commit, and "dirty" if files have been changed since."""
    hash_, _, dirty = (commit() or "").partition("+")
    local = [f"g{hash_[:7]}", dirty] if dirty or ".dev" in VERSION else []
    return "+".join(filter(None, [VERSION, ".".join(filter(None, local if hash_ else []))]))


def commit(package: Path = Path(__file__).parent) -> str | None:
    """The hash of the commit that the package is from, with "+dirty" if files have been changed; None if it is unknown.

    It is in the file `commit.txt` if that was written when a wheel or a source distribution was built (hatch_build.py),
    or by `git archive` (.gitattributes). In a checkout it is that of HEAD at this moment.
    """
    if written := _written(package):
        return written
    # If the file is not tracked, the package may be installed in an environment inside another project's repository.
    if _git(package, "ls-files", "--error-unmatch", "__init__.py"):
        return _git(package, "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+dirty")
    return _logged(package.parent)


def _git(folder: Path, *command: str) -> str | None:
    """The output of a git command; None if git fails, is not installed, or hangs (on a file system that hangs)."""
    # Variables such as GIT_DIR, which a hook of git's sets, would name another repository. A checkout that belongs to
    # another user, as in many containers, is safe to look at: Python is running its code.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    git = ["git", "-c", "safe.directory=*", "-C", str(folder)]
    try:
        done = subprocess.run([*git, *command], capture_output=True, text=True, timeout=10, env=environment)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def _written(package: Path) -> str | None:
    """The commit in `commit.txt`, which in a checkout has a placeholder."""
    try:
        text = (package / "commit.txt").read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return text if re.fullmatch("[0-9a-f]{40,}(\\+dirty)?", text) else None


def _logged(root: Path) -> str | None:
    """The commit of HEAD in the log that git keeps of it, for a checkout on a machine without git. (Only git could say
    whether files have been changed.)"""
    git = root / ".git"
    try:
        if git.is_file():  # of a worktree or a submodule: "gitdir: PATH"
            git = root / git.read_text(encoding="utf-8").removeprefix("gitdir:").strip()
        return (git / "logs" / "HEAD").read_text(encoding="utf-8").splitlines()[-1].split()[1]
    except (OSError, IndexError):
        return None
