"""The file in which `lm-eval-icl select`, a run or a study writes what was chosen, and from which runs read it.

{"about": {"how": "herding", "arguments": {}, "model": {...}, "version": "..."},
 "tasks": {"icl_sst2": {"n": 8, "pool": {"rows": 6920, "sha256": "..."},
                        "seeds": {"0": {"indices": [in the order of the prompt], "picked": [in that of picking],
                                        "seconds": 2.1, "tokens": 45000}}}}}
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, TypeGuard

from lm_eval_icl.errors import InputError


def pool_digest(pool: Sequence[Any]) -> str:
    """The SHA-256 of a pool's rows as JSON, which tells it from another pool."""
    hashed = hashlib.sha256()
    for row in pool:
        hashed.update(json.dumps(row, sort_keys=True, default=str).encode() + b"\n")
    return hashed.hexdigest()


def is_file_of_choices(contents: Any) -> TypeGuard[dict[str, Any]]:
    """Whether the contents of a JSON file are of this kind, and not a list of indices."""
    return isinstance(contents, dict) and all(isinstance(contents.get(name), dict) for name in ("about", "tasks"))


def indices(
    contents: dict[str, Any], n: int, pool: Sequence[Any], task: str, seed: int | None, sha256: str | None = None
) -> list[int]:
    """The rows that were chosen for a task and a seed, in the order of the prompt.

    Args:
        contents: those of a file of choices.
        pool: the rows that demonstrations are taken from.
        sha256: their `pool_digest`, if it is known.

    Raises:
        InputError: nothing was chosen for this task or seed, another number was chosen, or from another pool.
    """
    of_task = contents["tasks"].get(task)
    if not isinstance(of_task, dict):
        raise InputError(f"the file has no choice for this task, only for {', '.join(map(str, contents['tasks']))}.")
    seeds, chosen_from = of_task.get("seeds"), of_task.get("pool")
    if not isinstance(seeds, dict) or not isinstance(chosen_from, dict):
        raise InputError("the file is damaged: make it again with `lm-eval-icl select`.")
    if of_task.get("n") != n:
        raise InputError(
            f"{of_task.get('n')} demonstrations were chosen and {n} are asked for, and a part of a choice is none: "
            f"give --num_fewshot {of_task.get('n')}, or choose {n}."
        )
    if chosen_from.get("sha256") != (sha256 or pool_digest(pool)):
        raise InputError(
            f"the demonstrations were chosen from another pool (of {chosen_from.get('rows')} rows; this one has "
            f"{len(pool)}): the data has changed since. Choose anew."
        )
    of_seed = seeds.get(str(seed))
    if not isinstance(of_seed, dict):
        raise InputError(
            f"nothing was chosen for seed {seed}, only for {', '.join(map(str, seeds))}: give one of these as the "
            "fourth number of --seed, or choose for this one."
        )
    rows = of_seed.get("indices")
    if (
        not isinstance(rows, list)
        or len(rows) != n
        or not all(type(row) is int and 0 <= row < len(pool) for row in rows)
        or len(set(rows)) != n
    ):
        raise InputError(f"the file is damaged at seed {seed}: make it again with `lm-eval-icl select`.")
    return rows
