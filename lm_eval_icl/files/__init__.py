"""Files that are written whole or not at all, and what is kept between runs by its inputs."""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

# The names of files that are being written begin with this. A process that is killed leaves such a
# file.
HALF = ".half-"


def as_json(value: Any) -> str:
    """A value as JSON. The order of keys makes no difference; what JSON lacks becomes a text."""
    return json.dumps(value, sort_keys=True, default=str)


def digest(text: str) -> str:
    """The SHA-256 of a text, in 64 hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()


def cache_folder() -> Path:
    """The folder of what is kept between runs.

    It is `LM_EVAL_ICL_CACHE`, or a folder of the user's cache.
    """
    return Path(os.environ.get("LM_EVAL_ICL_CACHE") or Path.home() / ".cache" / "lm-eval-icl")


class Kept(NamedTuple):
    """A value that is kept between runs, as JSON."""

    value: Any
    file: str  # the name of its file
    made_now: bool  # rather than read from the file


def kept(folder: str, name: str, inputs: Any, make: Callable[[], Any]) -> Kept:
    """The value that depends on these inputs alone, read from its file, or made now.

    A value that is made now is written to its file if possible. If it is not, the next run makes it
    again.

    Args:
        folder: the folder of such values in `cache_folder`.
        name: the beginning of the file's name, for people. A digest of the inputs follows.
        inputs: all that the value depends on, as values of JSON.
        make: makes the value, which JSON can hold.
    """
    path = cache_folder() / folder / f"{name}-{digest(as_json(inputs))[:16]}.json"
    with suppress(OSError, ValueError):
        return Kept(json.loads(path.read_text(encoding="utf-8")), path.name, made_now=False)
    text = json.dumps(make())
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)
    return Kept(json.loads(text), path.name, made_now=True)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields the path of a new file, which replaces `path` when the block ends.

    After an error, it is removed.

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
