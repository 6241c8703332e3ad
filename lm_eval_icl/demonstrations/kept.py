"""Keeps choices of demonstrations, so that runs and studies make each choice only once.

A choice depends on the task and its documents, on the method that chooses and its arguments, on n,
the seed and the model. It does not depend on the method that is evaluated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lm_eval_icl import version
from lm_eval_icl.demonstrations.chooser import Chooser, TaskPool
from lm_eval_icl.demonstrations.selector import SelectionMethod
from lm_eval_icl.errors import naming
from lm_eval_icl.files import as_json, digest, kept
from lm_eval_icl.methods.predictor import Predictor

FOLDER = "demonstrations"  # of choices and of rankings, in the folder of what is kept


def chosen(
    predictor: Predictor | Chooser,
    pool: TaskPool,
    how: SelectionMethod,
    n: int,
    seed: int,
    model: Mapping[str, Any],
) -> dict[str, Any]:
    """A choice of n demonstrations, as an entry of a results file.

    If it is not in the cache, it is made now.

    Args:
        predictor: the model with plain ICL, or a `Chooser` with this model and this pool.
        pool: the task's documents.
        model: the model's identity (`about_model`), and its limits, which decide which documents
            fit.

    Raises:
        InputError: nothing can be chosen.
    """
    request = {"how": str(how), "n": n, "seed": seed}
    identity = {key: value for key, value in model.items() if key != "pretrained"}

    def choose() -> dict[str, Any]:
        chooser = predictor
        if not isinstance(chooser, Chooser):
            chooser = Chooser(pool, chooser, how.pool)
        with naming(f"task {pool.name!r}: demonstrations={how}"):
            choice = chooser.choose(how, n, seed)
        return request | choice.as_json()

    inputs = [request, pool.name, pool.docs_digest, pool.prompts, version.version(), identity]
    choice = kept(FOLDER, f"{how.name}-{n}-seed{seed}", inputs, choose)
    return {**choice.value, "made_now": choice.made_now}


def about_model(pretrained: str, identity: Mapping[str, Any]) -> dict[str, str]:
    """The record of the model that chooses: its name or folder, and a digest of its identity.

    Args:
        identity: `inference.identity.model_identity`.
    """
    return {"pretrained": pretrained, "sha256": digest(as_json(identity))}
