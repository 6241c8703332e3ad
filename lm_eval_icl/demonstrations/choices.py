"""The file in which `lm-eval-icl select` or a study writes what was chosen, and from which runs read it.

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
    if task not in contents["tasks"]:
        raise InputError(f"the file has no choice for this task, only for {', '.join(contents['tasks'])}.")
    chosen = contents["tasks"][task]
    if chosen["n"] != n:
        raise InputError(
            f"{chosen['n']} demonstrations were chosen and {n} are asked for: give --num_fewshot {chosen['n']}, or "
            f"choose {n}."
        )
    if chosen["pool"]["sha256"] != (sha256 or pool_digest(pool)):
        raise InputError("the demonstrations were chosen from another pool: the data has changed since. Choose anew.")
    if str(seed) not in chosen["seeds"]:
        raise InputError(
            f"nothing was chosen for seed {seed}, only for {', '.join(chosen['seeds'])}: give one of these as the "
            "fourth number of --seed, or choose for this one."
        )
    rows: list[int] = chosen["seeds"][str(seed)]["indices"]
    return rows
