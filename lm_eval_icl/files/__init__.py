"""Files that are written whole or not at all, and the folder of what is kept between runs."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# The names of files that are being written begin with this. A process that is killed leaves such a file.
HALF = ".half-"


def cache_folder() -> Path:
    """The folder of what is kept between runs: `LM_EVAL_ICL_CACHE`, or a folder of the user's cache."""
    return Path(os.environ.get("LM_EVAL_ICL_CACHE") or Path.home() / ".cache" / "lm-eval-icl")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields the path of a new file, which replaces `path` when the block ends. After an error, it is removed.

    A reader of `path` therefore finds the old file or the whole new file, also after a crash.

    Raises:
        OSError: the file cannot be written.
    """
    half = path.with_name(f"{HALF}{uuid.uuid4().hex}")
    try:
        yield half
        half.replace(path)
    finally:
        half.unlink(missing_ok=True)


def write_atomically(path: Path, text: str) -> None:
    """Write a text file whole or not at all (see `replacing`).

    Raises:
        OSError: the file cannot be written.
    """
    with replacing(path) as half:
        half.write_text(text, encoding="utf-8")
