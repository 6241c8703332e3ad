"""Runs with several processes: a task's documents are divided among them, and the results are put back into order.

lm-eval gives the documents to the processes in turn (process r of n gets the documents r, r + n, ...), but
joins the results of the processes end to end.
"""

from __future__ import annotations

import atexit
import functools
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, zip_longest
from typing import Any, TypeVar, cast

import torch
import torch.distributed
from lm_eval.api.task import Task
from lm_eval.evaluator_utils import get_sample_size
from lm_eval.models.huggingface import HFLM

from lm_eval_icl.errors import InputError, one_line

T = TypeVar("T")


class DividedDocuments(HFLM):
    """`HFLM` in one of several processes, each of which runs its documents independently of the others."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        theirs = _has_group()
        super().__init__(*args, **kwargs)
        if hasattr(self, "accelerator"):
            # `HFLM` sets these numbers only for processes on the GPUs of one machine.
            self._rank, self._world_size = self.accelerator.process_index, self.accelerator.num_processes
        if _has_group() and not theirs:
            leave_in_order()

    def all_gather(self, number: torch.Tensor) -> torch.Tensor:
        """Return this process's number in place of the numbers of all processes, [world size].

        lm-eval gathers the number of requests, to give all processes the same number by repeating the last request
        (whose response is then repeated in the samples), and the batch size, to use the smallest. Both are for models
        whose forward passes wait for those of the other processes, which is not the case here.
        """
        return number.flatten().repeat(self.world_size)

    def barrier(self) -> None:
        """Wait for the other processes.

        Raises:
            InputError: another process has failed; that process has printed the reason.
        """
        try:
            super().barrier()
        except RuntimeError as error:
            why = " ".join(str(error).split())
            raise InputError(f"process {self.rank} stops, as another one did ({why}).") from error

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        """Gather the results of all processes on the process `dst`: a list of one share, in the order of the documents.

        Returns None on the other processes.
        """
        shares = super().gather_object(obj, dst)
        if shares is None:
            return None
        if all(isinstance(of_task, list) for of_task in obj.values()):  # samples; otherwise it is metrics
            shares = [{task: by_filter(samples) for task, samples in share.items()} for share in shares]
            joined = in_order(shares)
            return [{task: list(chain.from_iterable(by_rank.values())) for task, by_rank in joined.items()}]
        return [in_order(shares)]

    def total(self, share: dict[str, Any]) -> dict[str, Any]:
        """The sum of the counts of all processes, on the process that gathers; on the others, their own counts."""
        return total(super().gather_object(share) or [share])


def check_shares(
    tasks: Mapping[str, Task], limit: float | None, samples: Mapping[str, list[int]] | None, processes: int
) -> None:
    """Refuse a task with fewer documents than processes, since lm-eval fails if a process has no documents.

    Args:
        limit, samples: as given to `lm_eval.evaluate`.
    """
    if processes == 1:
        return
    for name, task in tasks.items():
        last = task.doc_iterator(
            rank=processes - 1,
            world_size=processes,
            limit=get_sample_size(task, limit),
            samples=(samples or {}).get(name),
        )
        if next(last, None) is None:
            raise InputError(
                f"task {name!r} has fewer documents than there are processes ({processes}), and lm-eval needs one for "
                "each: launch fewer processes, or give more documents (--limit, --samples)."
            )


def of_all(mine: T) -> list[T]:
    """The values of all processes, each of which calls this."""
    if not _has_group():
        return [mine]
    shares: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(shares, mine)
    return shares


def of_first(value: Callable[[], T]) -> T:
    """The first process's value, for all processes, each of which calls this.

    Raises:
        InputError: the first process raised it; or another error, which that process raises itself.
    """
    if not _has_group():
        return value()
    raised = None
    message: list[Any] = [None, ""]  # the value, and what is wrong
    if torch.distributed.get_rank() == 0:
        try:
            message[0] = value()
        except BaseException as error:  # also an interrupt: the others wait for this process
            raised = error
            stops = f"the first process stops, and with it all others ({one_line(error)})."
            message[1] = error.message if isinstance(error, InputError) else stops
    torch.distributed.broadcast_object_list(message, src=0)
    if message[1]:  # the first process ends, and its connections with it, only when all others have read this
        torch.distributed.barrier()
        raise raised or InputError(message[1])
    return cast("T", message[0])


def in_order(shares: Sequence[Any]) -> Any:
    """Join the results of several processes in the order of the documents, as a single process would give them.

    Args:
        shares: for each process a list of results in the order of the process's documents, or a (nested) dictionary of
            such lists. A list may be missing from some of the dictionaries (a metric that not all documents have).
    """
    if any(isinstance(share, dict) for share in shares):
        keys = dict.fromkeys(key for share in shares for key in share)
        empty: dict[str, Any] = {
            key: {} if any(isinstance(share.get(key), dict) for share in shares) else [] for key in keys
        }
        return {key: in_order([share.get(key, empty[key]) for share in shares]) for key in keys}
    nothing = object()
    turns = chain.from_iterable(zip_longest(*shares, fillvalue=nothing))
    return [item for item in turns if item is not nothing]


def by_filter(samples: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """A task's logged samples by filter: lm-eval lists the samples of one filter after those of another."""
    names = dict.fromkeys(sample["filter"] for sample in samples)
    return {name: [sample for sample in samples if sample["filter"] == name] for name in names}


def total(shares: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sum (nested) dictionaries of numbers by key; a key may be missing from some of them."""
    keys = dict.fromkeys(key for share in shares for key in share)
    lists = {key: [share[key] for share in shares if key in share] for key in keys}
    return {key: total(values) if isinstance(values[0], dict) else sum(values) for key, values in lists.items()}


@functools.cache
def leave_in_order() -> None:
    """Destroy the process group when this process exits, if its backend is gloo.

    A process that exits while gloo's threads are still running is sometimes aborted by them, and its launcher then
    stops the process that is writing the results. (This is not done for NCCL, where destroying the group may wait for a
    process that has failed.)
    """

    def leave() -> None:
        if _has_group() and torch.distributed.get_backend() == "gloo":
            torch.distributed.destroy_process_group()

    atexit.register(leave)


def _has_group() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
