"""What lm-eval is told about us: the model names and the folder of task configurations."""

from pathlib import Path

# --model name -> where its class is. The same table stands in pyproject.toml as entry points.
_CLASSES = ("ICL", "NoPE", "PrefixICL", "PCW", "SAICL", "BatchICL", "InvICL", "DeepThink")
MODELS = {name.lower(): f"lm_eval_icl.models:{name}" for name in _CLASSES}


def task_dir() -> Path:
    """The folder of our task configurations: inside the package in a wheel, beside it in a checkout."""
    packaged = Path(__file__).parent / "task_configs"
    return packaged if packaged.is_dir() else Path(__file__).parent.parent / "task_configs"


def register_models() -> None:
    """Add our names to lm-eval's registry, lazily and only where nobody has taken them.

    lm-eval releases after 0.4.13 read the entry points themselves (`registry.load_plugins`); there this
    does nothing.
    """
    from lm_eval.api import registry

    if hasattr(registry, "load_plugins"):
        return
    for name, target in MODELS.items():
        if name not in registry.model_registry:
            registry.model_registry.register(name, target=target)


def add_task_dir() -> None:
    """Let every `TaskManager` with the default tasks scan our folder too, before `--include_path`.

    A task of the user's with one of our names therefore wins, as it does over lm-eval's own.
    """
    from inspect import signature

    from lm_eval.tasks.manager import TaskManager

    original = TaskManager.__init__

    def __init__(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        call = signature(original).bind(self, *args, **kwargs)
        call.apply_defaults()
        if call.arguments.get("include_defaults"):
            paths = call.arguments["include_path"] or []
            paths = [Path(path) for path in (paths if isinstance(paths, (list, tuple)) else [paths])]
            ours = task_dir()
            # Not twice: lm-eval warns of every name that a later folder gives again.
            if all(path.resolve() != ours.resolve() for path in paths):
                call.arguments["include_path"] = [ours, *paths]
        original(*call.args, **call.kwargs)

    TaskManager.__init__ = __init__
