"""Files that are written whole or not at all."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# How the names begin of files that are being written. A process that is killed leaves one.
HALF = ".half-"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to, beside `path`, which it replaces when the block ends. After an error it is removed.

    So whoever reads `path`, also after a crash, finds what was there before or what was written, and nothing between.

    Raises:
        OSError: it cannot be written.
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
        OSError: it cannot be written.
    """
    with replacing(path) as half:
        half.write_text(text, encoding="utf-8")
