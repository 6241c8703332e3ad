"""Which commit of lm-eval-icl runs. (lm-eval's `git_hash` is the working directory's, whatever stands there.)"""

from __future__ import annotations

import json
import subprocess
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path


def commit(package: Path = Path(__file__).parent) -> str | None:
    """The hash of the checkout that the package is in, with "-dirty" if its files were changed since; of what `pip`
    installed, if it did from git; None if nothing tells."""
    # Tracked, or it is a package in an environment inside somebody else's repository.
    if _git(package, "ls-files", "--error-unmatch", "__init__.py"):
        return _git(package, "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty")
    try:
        installed = json.loads(distribution("lm-eval-icl").read_text("direct_url.json") or "{}")
    except PackageNotFoundError:
        return None
    found: str | None = installed.get("vcs_info", {}).get("commit_id")
    return found


def _git(folder: Path, *command: str) -> str | None:
    """What git prints; None if it fails or is not there."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *command], capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
