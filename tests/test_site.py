"""The site of the documentation holds every page, command and method once; `make site` checks its links."""

import re
import tomllib
from pathlib import Path

from lm_eval_icl.cli import COMMANDS
from lm_eval_icl.methods import NAMES

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = ROOT / "docs/reference"


def pages_in(entries: object) -> list[str]:
    """The files that a navigation names, in its order."""
    if isinstance(entries, str):
        return [entries]
    parts = entries.values() if isinstance(entries, dict) else entries
    return [page for part in parts for page in pages_in(part)]


def test_the_navigation_has_every_page_once():
    navigation = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]
    pages = [file.relative_to(ROOT / "docs").as_posix() for file in (ROOT / "docs").rglob("*.md")]
    assert sorted(pages_in(navigation)) == sorted(pages)


def test_the_reference_has_every_command_and_method_once():
    fences = re.findall(r"^```command\n(.*)\n```$", (REFERENCE / "commands.md").read_text(), re.MULTILINE)
    assert sorted(fences) == sorted(COMMANDS)
    classes = re.findall(
        r"^::: lm_eval_icl\.methods\.(\w+)\.(\w+)$", (REFERENCE / "method-classes.md").read_text(), re.M
    )
    assert [module for module, _ in classes] == [name.lower() for _, name in classes] == list(NAMES)
