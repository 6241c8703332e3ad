"""For development: prints the oldest versions that pyproject.toml declares, as constraints for pip (`make floors`)."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path


def floors(pyproject: str) -> list[str]:
    """NAME==VERSION for every dependency NAME>=VERSION, and for what the tests need of the extras; a `ValueError`
    if a dependency declares no oldest version."""
    project = tomllib.loads(pyproject)["project"]
    extras = project["optional-dependencies"]
    found = []
    for requirement in [*project["dependencies"], *extras["figures"], *extras["retrieval"]]:
        match = re.fullmatch(r"([\w-]+)>=([\w.]+)(,.*)?", requirement)
        if match is None:
            raise ValueError(f"{requirement!r} declares no oldest version: write NAME>=VERSION")
        found.append(f"{match[1]}=={match[2]}")
    return found


if __name__ == "__main__":
    text = (Path(__file__).resolve().parent.parent / "pyproject.toml").read_text(encoding="utf-8")
    print(*floors(text), sep="\n")
