"""Keeps choices of demonstrations in a cache of files, so that runs and studies make each choice only once.

A choice depends on the task and its documents, on the method that chooses and its arguments, on n, the seed and the
model. It does not depend on the method that is evaluated. The name of its file has a digest of all of these.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lm_eval_icl import version
from lm_eval_icl.demonstrations.choosing import Chooser, TaskPool
from lm_eval_icl.demonstrations.how import How
from lm_eval_icl.errors import naming
from lm_eval_icl.files import cache_folder, read_json, write_atomically
from lm_eval_icl.methods.predictor import Predictor


@dataclass(frozen=True)
class Wanted:
    """A choice of n demonstrations to make, or to read from the cache.

    Attributes:
        pool: the task's documents.
        model: the model's identity (`about_model`), and its limits, which decide which documents fit.
    """

    pool: TaskPool
    how: How
    n: int
    seed: int
    model: Mapping[str, Any]


def folder() -> Path:
    """The folder in which choices are kept: `LM_EVAL_ICL_CACHE`, or a folder of the user's cache."""
    return cache_folder() / "demonstrations"


def chosen(wanted: Wanted, predictor: Predictor | Chooser) -> dict[str, Any]:
    """The choice, as an entry of a results file. If it is not in the cache, it is made now, and kept if possible.

    Args:
        predictor: the model with plain ICL, or a `Chooser` with this model and this pool.

    Raises:
        InputError: nothing can be chosen.
    """
    pool = wanted.pool
    how = wanted.how
    request = {"how": str(wanted.how), "n": wanted.n, "seed": wanted.seed}
    model = {key: value for key, value in wanted.model.items() if key != "pretrained"}
    digest = hashlib.sha256(
        _json([request, pool.name, pool.sha256, pool.prompts, version.version(), model])
    ).hexdigest()
    path = folder() / f"{how.name}-{wanted.n}-seed{wanted.seed}-{digest[:16]}.json"
    if (known := read_json(path)) is not None:
        return {**known, "made_now": False}
    chooser = predictor if isinstance(predictor, Chooser) else Chooser(pool, predictor, how.pool)
    with naming(f"task {pool.name!r}: demonstrations={how}"):
        choice = chooser.choose(how.name, wanted.n, wanted.seed, how.balance, **how.arguments)
    kept = {**request, **choice.as_json()}
    with contextlib.suppress(OSError):  # if the file cannot be written, the next run chooses again
        write_atomically(path, json.dumps(kept, indent=1) + "\n")
    return {**kept, "made_now": True}


def about_model(pretrained: str, identity: Mapping[str, Any]) -> dict[str, str]:
    """The record of the model that chooses: its name or folder, and a digest of its identity
    (`inference.identity.model_identity`)."""
    return {"pretrained": pretrained, "sha256": hashlib.sha256(_json(identity)).hexdigest()}


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, default=str).encode()
