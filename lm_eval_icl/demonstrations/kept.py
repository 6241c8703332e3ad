"""Choices that are kept in files, as `lm-eval-icl select` writes them (`choices`): each is made once.

A choice depends on the task and its documents, the method that chooses and its arguments, n, the seed, and the model;
not on the method that is evaluated. The name of a run's file says all of this.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lm_eval_icl import version
from lm_eval_icl.demonstrations import choices
from lm_eval_icl.demonstrations.choosing import Choice, Chooser
from lm_eval_icl.demonstrations.how import How
from lm_eval_icl.demonstrations.reading import TaskPool
from lm_eval_icl.errors import InputError, log, naming
from lm_eval_icl.files import write_atomically
from lm_eval_icl.methods.predictor import Predictor


@dataclass(frozen=True)
class Wanted:
    """A choice that is wanted.

    Attributes:
        pool: the task's documents.
        model: what tells the model from others, see `about_model`; and its limits, by which documents fit.
    """

    pool: TaskPool
    how: How
    n: int
    seed: int
    model: Mapping[str, Any]

    @property
    def file(self) -> str:
        """The name of the file that the choice is kept in."""
        parts = [self.pool.name, str(self.how), self.n, self.seed, self.pool.sha256, self.pool.prompts]
        parts += [version.version(), {key: value for key, value in self.model.items() if key != "pretrained"}]
        key = hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]
        plain = re.sub(r"[^\w.=-]+", "-", f"{self.pool.name}-{self.how}", flags=re.ASCII)[:100]
        return f"{plain}-{self.n}-seed{self.seed}-{key}.json"


def folder() -> Path:
    """The folder in which runs keep choices: `LM_EVAL_ICL_CACHE`, or a folder of the user's cache."""
    if cache := os.environ.get("LM_EVAL_ICL_CACHE"):
        return Path(cache) / "demonstrations"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lm-eval-icl" / "demonstrations"


def read(path: Path, pool: TaskPool, n: int, seed: int) -> dict[str, Any] | None:
    """The choice that a file has for a seed; None if there is no file.

    Raises:
        InputError: the file is damaged, or of another pool.
    """
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({error}).") from error
    if not choices.is_file_of_choices(contents):
        raise InputError(f"{path}: no file of choices.")
    rows = choices.indices(contents, n, pool.docs, pool.name, seed, pool.sha256)
    if any(map(pool.is_closed, rows)):
        raise InputError(f"{path}: has a document that is evaluated among the demonstrations.")
    of_seed: dict[str, Any] = contents["tasks"][pool.name]["seeds"][str(seed)]
    return {**of_seed, **{name: contents["about"].get(name) for name in ("model", "version")}}


def write(path: Path, how: How, pool: TaskPool, n: int, seed: int, choice: Choice, model: Mapping[str, Any]) -> None:
    """Write a file of one choice, whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    contents = {"about": about(how, model), "tasks": {pool.name: as_json(pool, n, {seed: choice})}}
    write_atomically(path, json.dumps(contents, indent=1) + "\n")


def chosen(wanted: Wanted, predictor: Predictor | Chooser) -> dict[str, Any]:
    """A choice that is kept, or that is made now and kept.

    Args:
        predictor: the model under plain ICL, or what chooses with it from this pool.

    Raises:
        InputError: nothing can be chosen.
    """
    path, pool, how = folder() / wanted.file, wanted.pool, wanted.how
    request = {"how": str(how), "n": wanted.n, "seed": wanted.seed, "file": str(path)}
    try:
        kept = read(path, pool, wanted.n, wanted.seed)
    except InputError as error:
        log.warning("%s The demonstrations are chosen again.", error.message)
        kept = None
    if kept is not None:
        kept = {name: value for name, value in kept.items() if name not in ("model", "version")}
        log.info("%s: demonstrations that %s chose before: %s", pool.name, how, path)
        return {**request, **kept, "made_now": False}
    with naming(f"task {pool.name!r}: demonstrations={how}"):
        chooser = predictor if isinstance(predictor, Chooser) else Chooser(pool, predictor, how.pool)
        choice = chooser.choose(how.name, wanted.n, wanted.seed, how.balance, **how.arguments)
    try:
        write(path, how, pool, wanted.n, wanted.seed, choice, wanted.model)
    except OSError as error:
        log.warning("%s: cannot be written (%s): the next run chooses again.", path, error.strerror or error)
    else:
        log.info("%s: %s chose demonstrations in %.1f s: %s", pool.name, how, choice.seconds, path)
    of_seed = as_json(pool, wanted.n, {wanted.seed: choice})["seeds"][str(wanted.seed)]
    return {**request, **of_seed, "made_now": True}


def as_json(pool: TaskPool, n: int, of_seeds: Mapping[int, Choice]) -> dict[str, Any]:
    """A task's part of a file of choices."""
    seeds: dict[str, Any] = {}
    for seed, choice in of_seeds.items():
        entry: dict[str, Any] = {"indices": list(choice.indices)}
        if choice.picked is not None:
            entry["picked"] = list(choice.picked)
        if choice.accuracy is not None and math.isfinite(choice.accuracy):
            entry["accuracy"] = choice.accuracy
        if choice.evaluated:
            entry["evaluated"] = choice.evaluated
        entry |= {"seconds": round(choice.seconds, 3), "tokens": choice.tokens}
        seeds[str(seed)] = entry
    return {"n": n, "pool": {"rows": len(pool.docs), "sha256": pool.sha256}, "seeds": seeds}


def about(how: How, model: Mapping[str, Any] | None) -> dict[str, Any]:
    """What a file of choices says of all of them: how they were chosen, and by which model."""
    return {
        "how": how.name,
        "arguments": dict(how.arguments),
        "balance": how.balance,
        "pool": how.pool,
        **({} if model is None else {"model": dict(model)}),
        "version": version.version(),
    }


def about_model(pretrained: str, of_model: Mapping[str, Any]) -> dict[str, str]:
    """What a file of choices says of the model.

    Args:
        of_model: `inference.identity.model_identity` of it.
    """
    text = json.dumps(of_model, sort_keys=True, default=str)
    return {"pretrained": pretrained, "sha256": hashlib.sha256(text.encode()).hexdigest()}
