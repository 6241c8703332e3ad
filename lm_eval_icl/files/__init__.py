"""Files that are written whole or not at all, and what is kept between runs by its inputs.

Every file that this package writes goes through `replacing`, except those that a library writes
into a folder of its own (a checkpoint in training, a cell of a study) and the response cache, which
grows.
"""

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
    """The folder of what is kept between runs: `LM_EVAL_ICL_CACHE`, or one in the user's cache."""
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
    known = read_json(path)
    if known is not None:
        return Kept(known, path.name, made_now=False)
    text = json.dumps(make())
    with suppress(OSError):
        write_atomically(path, text)
    return Kept(json.loads(text), path.name, made_now=True)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields the path of a new file, which replaces `path` when the block ends. After an error, it
    is removed. The folder is made if there is none.

    A reader of `path` finds the old file or the whole new file, also after a crash, and after a
    power failure, since the new file is on the disk before it gets its name.

    Raises:
        OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(f"{HALF}{uuid.uuid4().hex}")
    try:
        yield half
        to_disk(half)
        half.replace(path)
    finally:
        with suppress(OSError):  # on a broken disk, the error of the block counts
            half.unlink(missing_ok=True)


def to_disk(path: Path) -> None:
    """Wait until the disk has all that was written to a file.

    Raises:
        OSError: the disk reports that it could not be written.
    """
    with path.open("r+b") as file:
        os.fsync(file.fileno())


def write_atomically(path: Path, text: str) -> None:
    """Write a text file whole or not at all (see `replacing`).

    Raises:
        OSError: the file cannot be written.
    """
    with replacing(path) as half:
        half.write_text(text, encoding="utf-8")


def read_json(path: Path) -> Any:
    """What a JSON file holds. None if there is no file, or if it is not whole or cannot be read."""
    with suppress(OSError, ValueError):
        return json.loads(path.read_text(encoding="utf-8"))
    return None
