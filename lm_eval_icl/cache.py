"""lm-eval's response cache (`--use_cache`), kept from being read by a run that is not the one that wrote it."""

from __future__ import annotations

import json
from collections.abc import MutableMapping
from typing import Any

from lm_eval_icl.errors import InputError

_KEY = "lm-eval-icl"


def claim(cache: MutableMapping[str, Any], run: dict[str, Any]) -> None:
    """Write into a new cache which run it belongs to; refuse one that belongs to another.

    lm-eval's keys know the prompts alone, so two methods, or two values of T, would read each other's numbers.

    Args:
        cache: lm-eval's open cache, an `SqliteDict`.
        run: what the responses depend on, JSON values by name.

    Raises:
        InputError: names what differs.
    """
    writer = json.loads(cache[_KEY]) if _KEY in cache else {}
    if writer != run and len(cache):
        differs = [
            f"{name}={writer.get(name)} there, {run.get(name)} here"
            for name in run | writer
            if writer.get(name) != run.get(name)
        ]
        raise InputError(
            f"lm-eval-icl: the cache {getattr(cache, 'filename', '')} was written by "
            + (f"another run ({'; '.join(differs)})" if writer else "another model")
            + ": give another path to --use_cache."
        )
    cache[_KEY] = json.dumps(run)
