"""Runs with several processes: how the processes exchange values, and how they exit."""

import atexit
import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed

T = TypeVar("T")


def from_all(mine: T) -> list[T]:
    """The values of all processes, in their order. Every process calls this function."""
    if not _has_group():
        return [mine]
    shares: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(shares, mine)
    return shares


def from_first(value: Callable[[], T]) -> T:
    """The first process's value, for all processes. Every process calls this function. If the first
    process fails, its launcher ends the other processes."""
    if not _has_group():
        return value()
    message = [value() if torch.distributed.get_rank() == 0 else None]
    torch.distributed.broadcast_object_list(message, src=0)
    return cast("T", message[0])


def total(shares: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sum (nested) dictionaries of numbers by key. A dictionary without a key adds nothing to the
    key's sum."""
    lists = defaultdict[str, list[Any]](list)
    for share in shares:
        for key, value in share.items():
            lists[key].append(value)
    return {
        key: total(values) if isinstance(values[0], dict) else sum(values)
        for key, values in lists.items()
    }


@functools.cache
def leave_in_order() -> None:
    """Destroy the process group when this process exits, if its backend is gloo: gloo's threads
    sometimes abort a process that exits. (Destroying a group of NCCL may wait for a process that
    has failed.)"""

    def leave() -> None:
        if _has_group() and torch.distributed.get_backend() == "gloo":
            torch.distributed.destroy_process_group()

    atexit.register(leave)


def _has_group() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
