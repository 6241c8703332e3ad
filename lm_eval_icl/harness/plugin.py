"""Registers this package with lm-eval: the names of the models, and the folder of task configurations."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lm_eval_icl import methods
from lm_eval_icl.errors import did_you_mean, log
from lm_eval_icl.harness import patches

METADATA = (
    "demonstrations",
    "shuffle",
    "labels",
    "format",
    "decide",
)  # the keys of --metadata for every task


def task_dir() -> Path:
    """The folder of this package's task configurations: inside the package in a wheel, next to it in a checkout."""
    package = Path(__file__).parent.parent
    packaged = package / "task_configs"
    return packaged if packaged.is_dir() else package.parent / "task_configs"


def register_models() -> None:
    """Add the names of all methods, also of other packages' methods, to lm-eval's registry, unless they are taken.

    The classes are made when lm-eval first uses them (`lm_eval_icl.harness.models`).
    """
    from lm_eval.api import registry

    # lm-eval registers its own models when this is imported, which it does only while no model is registered.
    importlib.import_module("lm_eval.models")
    for name in methods.NAMES:
        if name not in registry.model_registry:
            registry.model_registry.register(name, target=f"lm_eval_icl.harness.models:{name}")


def imported(module: str) -> None:
    """Patch one of lm-eval's modules, which has just been imported (`lm_eval_icl.harness.shim`)."""
    if module == "lm_eval.models":
        register_models()
    patches.install(module)


def with_our_models(original: Callable[[str], Any], model_name: str) -> Any:
    """Wrapper of `get_model`: `--model MODULE:CLASS` is the method of that class, in a file of the user's."""
    if ":" not in model_name:
        return original(model_name)
    from lm_eval_icl.harness.models import model_class

    return model_class(model_name)


def with_our_tasks(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Wrapper of `TaskManager.__init__`: if lm-eval's own tasks are included, this package's folder is scanned too,
    before the folders of `--include_path`, so that a user's task replaces our task of the same name."""
    call = inspect.signature(original).bind(*args, **kwargs)
    call.apply_defaults()
    if call.arguments.get("include_defaults"):
        paths = call.arguments["include_path"] or []
        paths = [Path(path) for path in (paths if isinstance(paths, (list, tuple)) else [paths])]
        ours = task_dir()
        # The folder is not added twice, since lm-eval warns about every name that is defined again.
        if all(path.resolve() != ours.resolve() for path in paths):
            call.arguments["include_path"] = [ours, *paths]
    original(*call.args, **call.kwargs)
    metadata = call.arguments["metadata"] or {}
    for name in (
        metadata
    ):  # lm-eval adds the model's arguments (load_format), and tasks may have keys of their own
        if name not in METADATA and (near := did_you_mean(name, METADATA, cutoff=0.8)):
            log.warning("--metadata %s=...: lm-eval-icl has no such key: %s", name, near)
    if "metaicl" in metadata:
        from lm_eval_icl.harness.metaicl import leave_out_missing

        leave_out_missing(args[0])
