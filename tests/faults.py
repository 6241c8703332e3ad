"""A disk that fails: operations on files below a folder are counted, and the nth of a kind fails.

Python's own operations are counted. What libraries write without Python (safetensors, pyarrow)
fails with `full`: a file cannot become larger than a limit of the process.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import os
import resource
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

OPEN = io.open
KINDS = ("open", "write", "fsync", "rename", "mkdir", "read")
VANISHES = -1  # in place of an error number: the folder of the file is removed


@dataclass
class Disk:
    """The disk of a folder.

    Attributes:
        folder: the folder.
        kind: the kind of the operations that fail; "" if none fails.
        at: the number of the first operation of this kind that fails.
        error: the error, or `VANISHES`.
        stays: whether the later ones fail as well, as they do if the disk is full.
        counts: how many operations of each kind there were.
        names: the files that were opened for writing, or renamed to.
    """

    folder: Path
    kind: str = ""
    at: int = 0
    error: int = errno.EIO
    stays: bool = False
    counts: Counter[str] = field(default_factory=Counter)
    names: set[Path] = field(default_factory=set)

    def holds(self, path: Any) -> bool:
        is_path = isinstance(path, str | os.PathLike)
        return is_path and Path(path).absolute().is_relative_to(self.folder)

    def reach(self, kind: str, path: Any) -> None:
        """Count an operation. If it is the one that fails, raise its error."""
        number = self.counts[kind]
        self.counts[kind] += 1
        if kind != self.kind or number < self.at or (number > self.at and not self.stays):
            return
        if self.error == VANISHES:
            shutil.rmtree(self.folder)
            return
        raise OSError(self.error, os.strerror(self.error), str(path))

    def open(self, path: Any, mode: str = "r", buffering: int = -1, *args: Any, **kwargs: Any):
        if not self.holds(path):
            return OPEN(path, mode, buffering, *args, **kwargs)
        writes = not set(mode).isdisjoint("wax+")
        self.reach("open" if writes else "read", path)
        if writes:
            self.names.add(Path(path))
        raw = DiskFile(self, path, mode.replace("b", "").replace("t", ""))
        buffered = io.BufferedWriter(raw) if writes else io.BufferedReader(raw)
        if "b" in mode:
            return buffered
        lines = buffering == 1
        return io.TextIOWrapper(buffered, *args, **kwargs, line_buffering=lines)

    def rename(self, theirs: Any) -> Any:
        def renamed(path: Any, to: Any, **kwargs: Any) -> None:
            if self.holds(to):
                self.reach("rename", to)
                self.names.add(Path(to))
            theirs(path, to, **kwargs)

        return renamed

    def counted(self, kind: str, theirs: Any) -> Any:
        def operation(path: Any, *args: Any, **kwargs: Any) -> Any:
            if kind == "fsync" or self.holds(path):
                self.reach(kind, path)
            return theirs(path, *args, **kwargs)

        return operation

    @contextlib.contextmanager
    def used(self) -> Iterator[Disk]:
        """A context in which this is the disk of the folder."""
        with contextlib.ExitStack() as patches:
            for module, name, operation in (
                (io, "open", self.open),
                (builtins, "open", self.open),
                (os, "replace", self.rename(os.replace)),
                (os, "rename", self.rename(os.rename)),
                (os, "fsync", self.counted("fsync", os.fsync)),
                (os, "mkdir", self.counted("mkdir", os.mkdir)),
            ):
                patches.enter_context(mock.patch.object(module, name, operation))
            yield self


class DiskFile(io.FileIO):
    """A file of a `Disk`. A write that fails is short, and then the next one raises the error."""

    def __init__(self, disk: Disk, path: Any, mode: str) -> None:
        super().__init__(path, mode)
        self.disk = disk
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        if self.error is not None:
            error = self.error
            self.error = None
            raise error
        try:
            self.disk.reach("write", self.name)
        except OSError as error:
            if len(data) < 2:
                raise
            self.error = error
            return super().write(bytes(data)[: len(data) // 2])
        return super().write(data)

    def readinto(self, buffer: Any) -> int:
        self.disk.reach("read", self.name)
        return super().readinto(buffer)

    def readall(self) -> bytes:
        self.disk.reach("read", self.name)
        return super().readall()


@contextlib.contextmanager
def full(limit: int) -> Iterator[None]:
    """A context in which no file can become larger than so many bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def files_of(folder: Path) -> dict[str, bytes]:
    """The contents of all files that have a name of their own: no file that is being written, and
    no lock."""
    contents = {}
    for file in sorted(folder.rglob("*")):
        name = file.relative_to(folder).as_posix()
        if file.is_file() and not any(part.startswith(".") for part in Path(name).parts):
            contents[name] = file.read_bytes()
    return contents


def faults(counts: Counter[str], writes: bool = True) -> Iterator[dict[str, Any]]:
    """Every fault of a sequence of operations, as arguments of `Disk`."""
    for kind, number in counts.items():
        for at in range(number):
            yield {"kind": kind, "at": at, "error": errno.EIO}
            if kind != "read":
                yield {"kind": kind, "at": at, "error": errno.ENOSPC, "stays": True}
                yield {"kind": kind, "at": at, "error": VANISHES}
