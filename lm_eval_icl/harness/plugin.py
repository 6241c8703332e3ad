"""Registers this package with lm-eval: the names of the models, and the folder of task
configurations."""

import importlib.metadata
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lm_eval_icl import methods, version
from lm_eval_icl.errors import InputError, did_you_mean, log
from lm_eval_icl.harness import patches

# The keys of --metadata for every task.
METADATA = ("demonstrations", "shuffle", "labels", "format", "decide")


def task_dir() -> Path:
    """The folder of this package's task configurations: inside the package in a wheel, next to it
    in a checkout."""
    package = Path(__file__).parent.parent
    packaged = package / "task_configs"
    return packaged if packaged.is_dir() else package.parent / "task_configs"


def register_models() -> None:
    """Add the names of all methods to lm-eval's registry, and `icl-NAME` for each, unless they are
    taken.

    The classes are made when lm-eval first uses them (`lm_eval_icl.harness.models`).
    """
    from lm_eval.api.registry import model_registry

    for name in methods.NAMES:
        for alias in (name, f"icl-{name}"):
            if alias not in model_registry:
                model_registry.register(alias, target=_target(name))


def imported(module: str) -> None:
    """Register with one of lm-eval's modules, which is loaded (`lm_eval_icl.harness.shim`)."""
    if module == "lm_eval.models":
        register_models()
    patches.install(module)


def provenance(model: str) -> dict[str, Any]:
    """Where a model of ours came from, in the form in which lm-eval's pull request 4082 records
    plugins in results.

    Args:
        model: the name of its class: a method's name, or MODULE:CLASS.
    """
    if model in methods.NAMES:
        target = _target(model)
        dist: str | None = f"lm-eval-icl {version.version()}"
    else:
        target = model
        names = importlib.metadata.packages_distributions().get(model.split(".")[0].split(":")[0])
        dist = f"{names[0]} {importlib.metadata.version(names[0])}" if names else None
    return {"models": {model: {"target": target, "dist": dist, "used": True}}}


def _target(name: str) -> str:
    return f"lm_eval_icl.harness.models:{name}"


def with_our_models(original: Callable[[str], Any], model_name: str) -> Any:
    """Wrapper of `get_model`: `--model MODULE:CLASS` is the method of that class, in a file of the
    user's.

    A name of ours that is also another's, who has registered it before, is the other's. A line says
    so.

    Raises:
        InputError: there is no such model, and the name is similar to one of ours.
    """
    from lm_eval.api.registry import model_registry

    if ":" in model_name:
        from lm_eval_icl.harness.models import model_class

        return model_class(model_name)
    try:
        found = original(model_name)
    except ValueError as error:
        near = did_you_mean(model_name, methods.NAMES)
        if near and model_name not in model_registry:
            raise InputError(f"--model: unknown model {model_name!r}: {near}") from error
        raise
    theirs = f"{found.__module__}:{found.__qualname__}"
    if model_name in methods.NAMES and theirs != _target(model_name):
        ours = f"--model icl-{model_name} is {_target(model_name)}"
        log.warning("--model %s is %s, which is not of lm-eval-icl: %s.", model_name, theirs, ours)
    return found


def with_our_tasks(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Wrapper of `TaskManager.__init__`: if lm-eval's own tasks are included, this package's folder
    is scanned too, before the folders of `--include_path`, so that a user's task replaces our task
    of the same name.

    Raises:
        InputError: a value of `--metadata` that this package reads is wrong. It is refused before
            thousands of files are read and before a model is loaded.
    """
    call = inspect.signature(original).bind(*args, **kwargs)
    call.apply_defaults()
    metadata = call.arguments["metadata"] or {}
    _check(metadata)
    if call.arguments.get("include_defaults"):
        paths = call.arguments["include_path"] or []
        paths = [Path(path) for path in (paths if isinstance(paths, (list, tuple)) else [paths])]
        ours = task_dir()
        # The folder is not added twice, since lm-eval warns about every name that is defined again.
        if all(path.resolve() != ours.resolve() for path in paths):
            call.arguments["include_path"] = [ours, *paths]
    original(*call.args, **call.kwargs)
    if "metaicl" in metadata:
        from lm_eval_icl.harness.metaicl_task import leave_out_missing

        leave_out_missing(args[0])


def _check(metadata: Mapping[str, Any]) -> None:
    """Read what `--metadata` says to this package. A key that is similar to one of ours may be a
    task's own."""
    from lm_eval_icl.decisions import rules as deciding
    from lm_eval_icl.demonstrations import how as choosing
    from lm_eval_icl.demonstrations import wrong_labels

    for name, value in metadata.items():
        if name not in METADATA and (near := did_you_mean(name, METADATA, cutoff=0.8)):
            log.warning("--metadata %s=...: lm-eval-icl has no such key: %s", name, near)
        readers = {
            "demonstrations": choosing.read,
            "decide": deciding.read,
            "labels": wrong_labels.read,
        }
        if name in readers and value is not None:
            readers[name](value)
