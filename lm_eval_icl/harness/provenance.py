"""The commit of lm-eval-icl that runs. (lm-eval's `git_hash` is that of any repository in the working directory.)"""

from __future__ import annotations

import json
import subprocess
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path


def commit(package: Path = Path(__file__).parent.parent) -> str | None:
    """The hash of the commit that the package is from; None if it is unknown.

    In a checkout it is that of HEAD, with "-dirty" if files have been changed. If `pip` installed the package from git,
    it is the installed commit.
    """
    # If the file is not tracked, the package may be installed in an environment inside another project's repository.
    if _git(package, "ls-files", "--error-unmatch", "__init__.py"):
        return _git(package, "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty")
    try:
        installed = json.loads(distribution("lm-eval-icl").read_text("direct_url.json") or "{}")
    except PackageNotFoundError:
        return None
    found: str | None = installed.get("vcs_info", {}).get("commit_id")
    return found


def _git(folder: Path, *command: str) -> str | None:
    """The output of a git command; None if git fails, is not installed, or hangs (on a file system that hangs)."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *command], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
