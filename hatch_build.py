"""Writes the commit into what is built, so that an installed package knows it: see
lm_eval_icl/version.py."""

import runpy
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CommitHook(BuildHookInterface):
    """Puts `lm_eval_icl/commit.txt` into a wheel or a source distribution, in place of the
    checkout's placeholder."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        if version == "editable":
            # The checkout's folder is on the path: its own files run, also the start-up hook's, and
            # version.py asks git.
            starters = ("lm_eval_icl.pth", "lm_eval_icl.start")
            build_data["force_include_editable"] = {str(root / name): name for name in starters}
            return
        commit = runpy.run_path(str(root / "lm_eval_icl" / "version.py"))["commit"]()
        self.folder = tempfile.TemporaryDirectory()
        file = Path(self.folder.name) / "commit.txt"
        file.write_text(f"{commit or 'unknown'}\n", encoding="utf-8")
        build_data["force_include"][str(file)] = "lm_eval_icl/commit.txt"
