"""Writes the commit into what is built, so that an installed package knows it: see lm_eval_icl/version.py."""

import runpy
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CommitHook(BuildHookInterface):
    """Puts `lm_eval_icl/commit.txt` into a wheel or a source distribution, in place of the checkout's placeholder."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":  # runs the checkout's files, which ask git
            return
        commit = runpy.run_path(str(Path(self.root) / "lm_eval_icl" / "version.py"))["commit"]()
        self.folder = tempfile.TemporaryDirectory()
        file = Path(self.folder.name) / "commit.txt"
        file.write_text(f"{commit or 'unknown'}\n", encoding="utf-8")
        build_data["force_include"][str(file)] = "lm_eval_icl/commit.txt"
