"""Demonstrations that the model of a run chooses: before requests are built, once, and kept for other runs.

A choice depends on the task and its documents, the method that chooses and its arguments, n, the seed, and the model;
not on the `--model` method. It is kept in a file as `lm-eval-icl select` writes it, whose name says all of this.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_eval.api.task import Task

from lm_eval_icl.demonstrations import choices
from lm_eval_icl.demonstrations.how import How
from lm_eval_icl.errors import InputError, check_form, log
from lm_eval_icl.files import write_atomically
from lm_eval_icl.harness.choosing import Choice, Chooser, PoolOfTask, about, about_model, as_json, code
from lm_eval_icl.harness.distributed import of_first
from lm_eval_icl.harness.tasks import FixedSampler, template_of
from lm_eval_icl.methods import ICL, Predictor

if TYPE_CHECKING:
    from lm_eval_icl.harness.models import ICLModel

# The seed if a run has set none: lm-eval's.
_SEED = 1234
# The form of the files. Those without a number are of form 1.
FORM = 1


@dataclass(frozen=True)
class Wanted:
    """A choice that is wanted.

    Attributes:
        pool: the task's documents.
        model: what tells the model from others, see `choosing.about_model`; and its limits, by which documents fit.
    """

    pool: PoolOfTask
    how: How
    n: int
    seed: int
    model: Mapping[str, Any]

    @property
    def file(self) -> str:
        """The name of the file that the choice is kept in."""
        said = [self.pool.name, str(self.how), self.n, self.seed, self.pool.sha256, template_of(self.pool.task)]
        said.append(choices.digest(list(self.pool.task.eval_docs)))  # which are not chosen
        said += [code(), {key: value for key, value in self.model.items() if key != "pretrained"}]
        key = hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()[:16]
        plain = re.sub(r"[^\w.=-]+", "-", f"{self.pool.name}-{self.how}", flags=re.ASCII)[:100]
        return f"{plain}-{self.n}-seed{self.seed}-{key}.json"


def folder() -> Path:
    """Where runs keep what was chosen: `LM_EVAL_ICL_CACHE`, or a folder of the user's cache."""
    if given := os.environ.get("LM_EVAL_ICL_CACHE"):
        return Path(given) / "demonstrations"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lm-eval-icl" / "demonstrations"


def read(path: Path, pool: PoolOfTask, n: int, seed: int) -> dict[str, Any] | None:
    """What a file says of a seed's choice; None if there is no file.

    Raises:
        InputError: the file is damaged, or of another pool.
        LaterForm: a later version has written it.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({error}).") from error
    if not choices.is_file_of_choices(found):
        raise InputError(f"{path}: no file of choices.")
    check_form(found.get("form"), FORM, path)
    rows = choices.indices(found, n, pool.docs, pool.name, seed, pool.sha256)
    if any(map(pool.is_closed, rows)):
        raise InputError(f"{path}: has a document that is evaluated among the demonstrations.")
    of_seed: dict[str, Any] = found["tasks"][pool.name]["seeds"][str(seed)]
    return {**of_seed, **{name: found["about"].get(name) for name in ("model", "code")}}


def write(path: Path, how: How, pool: PoolOfTask, n: int, seed: int, choice: Choice, model: Mapping[str, Any]) -> None:
    """Write a file of one choice, whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    said = {"form": FORM, "about": about(how, model), "tasks": {pool.name: as_json(pool, n, {seed: choice})}}
    write_atomically(path, json.dumps(said, indent=1) + "\n")


def predictor(model: ICLModel) -> Predictor:
    """The model under plain ICL, whatever its own method, with the limits of its runs.

    Raises:
        InputError: its passes are divided among processes, of which one cannot choose by itself.
    """
    if model._is_tensor_parallel:
        raise InputError(
            "tp_plan: one process chooses demonstrations, and with tp_plan it cannot run the model by itself: make a "
            "file with `lm-eval-icl select`, and give that as demonstrations=FILE.json."
        )
    return Predictor(
        model.model,
        model.tokenizer,
        ICL(),
        max_length=model.max_length,
        add_bos_token=model.add_bos_token,
        batch_size=model.texts,
        pack_tokens=model.common.pack_tokens,
        store_bytes=model.common.store_bytes,
    )


def give_chosen(model: ICLModel, tasks: Iterable[Task]) -> dict[str, Any]:
    """Give all tasks of a run the demonstrations that its model chooses. Every process of a run calls this; the first
    one chooses.

    Returns:
        What was chosen, by task, for the results file; empty if no task asks for it.

    Raises:
        InputError: they cannot be chosen.
    """
    waiting = []
    for task in tasks:
        sampler = getattr(task, "sampler", None)
        if isinstance(sampler, FixedSampler) and sampler.method is not None and task.config.num_fewshot:
            waiting.append((task, sampler, sampler.method))
    if not waiting:
        return {}

    def choose() -> dict[str, Any]:
        asked, said = predictor(model), about_model(str(_name(model)), model.fingerprint())
        limits = {"max_length": model.max_length, "add_bos_token": model.add_bos_token}
        return {
            str(task.config.task): _chosen(
                Wanted(PoolOfTask(task), how, int(task.config.num_fewshot), _seed(sampler), {**said, **limits}),
                asked,
            )
            for task, sampler, how in waiting
        }

    found = of_first(choose)
    for task, sampler, _ in waiting:
        sampler.give(found[str(task.config.task)]["indices"])
    return found


def _name(model: ICLModel) -> str:
    return str(getattr(model.pretrained, "name_or_path", model.pretrained))


def _seed(sampler: FixedSampler) -> int:
    return _SEED if sampler.seed is None else sampler.seed


def _chosen(wanted: Wanted, asked: Predictor) -> dict[str, Any]:
    """A choice that is kept, or that is made now and kept."""
    path, pool, how = folder() / wanted.file, wanted.pool, wanted.how
    said = {"how": str(how), "n": wanted.n, "seed": wanted.seed, "file": str(path)}
    try:
        kept = read(path, pool, wanted.n, wanted.seed)
    except InputError as error:
        log.warning("%s The demonstrations are chosen again.", error.message)
        kept = None
    if kept is not None:
        kept = {name: value for name, value in kept.items() if name not in ("model", "code")}
        log.info("%s: demonstrations that %s chose before: %s", pool.name, how, path)
        return {**said, **kept, "made_now": False}
    try:
        choice = Chooser(pool, asked, how.pool).choose(how.name, wanted.n, wanted.seed, how.balance, **how.arguments)
    except InputError as error:
        raise InputError(f"task {pool.name!r}: demonstrations={how}: {error.message}") from error
    try:
        write(path, how, pool, wanted.n, wanted.seed, choice, wanted.model)
    except OSError as error:
        log.warning("%s: cannot be written (%s): the next run chooses again.", path, error.strerror or error)
    else:
        log.info("%s: %s chose demonstrations in %.1f s: %s", pool.name, how, choice.seconds, path)
    of_seed = as_json(pool, wanted.n, {wanted.seed: choice})["seeds"][str(wanted.seed)]
    return {**said, **of_seed, "made_now": True}
