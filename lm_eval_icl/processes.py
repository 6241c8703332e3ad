"""A run divided among processes: which documents each has, and what all of them have together.

lm-eval deals a task's documents out in turn, and joins what the processes made of them end to end.
"""

from __future__ import annotations

import atexit
from collections.abc import Mapping, Sequence
from itertools import chain, zip_longest
from typing import Any

import torch.distributed
from lm_eval.api.task import Task
from lm_eval.evaluator_utils import get_sample_size

from lm_eval_icl.errors import InputError


def check_shares(
    tasks: Mapping[str, Task], limit: float | None, samples: Mapping[str, list[int]] | None, processes: int
) -> None:
    """Refuse a task with fewer documents than processes: lm-eval fails where a process has none.

    Args:
        limit, samples: as given to `lm_eval.evaluate`.
    """
    if processes == 1 or (limit is not None and limit <= 0):  # which leaves no process anything, and is refused so
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
                f"lm-eval-icl: task {name!r} has fewer documents than there are processes ({processes}), and lm-eval "
                "needs one for each: launch fewer processes, or give more documents (--limit, --samples)."
            )


def in_order(shares: Sequence[Any]) -> Any:
    """What processes made of their documents, as one process would have it.

    Args:
        shares: each process's list, its items in the order of its documents; or a dictionary of such lists.
    """
    if isinstance(shares[0], dict):
        return {key: in_order([share[key] for share in shares]) for key in shares[0]}
    nothing = object()
    turns = chain.from_iterable(zip_longest(*shares, fillvalue=nothing))
    return [item for item in turns if item is not nothing]


def by_filter(samples: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """A task's logged samples, which stand filter by filter."""
    found: dict[str, list[dict[str, Any]]] = {}
    for sample in samples:
        found.setdefault(sample["filter"], []).append(sample)
    return found


def total(shares: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The sum of every number in (nested) dictionaries, some of which may lack it."""
    keys = dict.fromkeys(key for share in shares for key in share)
    found = {key: [share[key] for share in shares if key in share] for key in keys}
    return {key: total(each) if isinstance(each[0], dict) else sum(each) for key, each in found.items()}


def leave_in_order() -> None:
    """Let this process, when it ends, take leave of the others.

    A process that ends with gloo's threads still running is now and then aborted by them, and its launcher then
    stops the one that is writing the results. (Not so NCCL's: there leaving may wait for a process that failed.)
    """
    atexit.register(_leave)


def _leave() -> None:
    group = torch.distributed
    if group.is_available() and group.is_initialized() and group.get_backend() == "gloo":
        group.destroy_process_group()
