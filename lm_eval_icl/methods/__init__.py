"""The methods, by name. A class such as `lm_eval_icl.methods.InvICL` is imported when it is first used.

A class in a file of yours is MODULE:CLASS. Another package gives its methods names with an entry point:

    [project.entry-points."lm_eval_icl.methods"]
    neighbours = "neighbours:Neighbours"
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import sys
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from lm_eval_icl.errors import InputError, did_you_mean, one_line, one_line_with_place

if TYPE_CHECKING:
    from lm_eval_icl.methods.base import Method

# In the order of tables. A class's name in lower case is the name of its file, and the NAME of `--model NAME`.
_CLASSES = (
    "ICL",
    "NoPE",
    "PrefixICL",
    "PCW",
    "SAICL",
    "BatchICL",
    "InvICL",
    "DeepThink",
    "SBP",
    "Star",
    "APE",
    "Structured",
    "Ensemble",
    "NBCE",
)
NAMES = tuple(name.lower() for name in _CLASSES)
# The group of entry points in which other packages name their methods.
ENTRY_POINTS = "lm_eval_icl.methods"


def __getattr__(name: str) -> Any:
    """A method's class, `Method` or `Predictor`. They are imported on first use, since they import transformers."""
    modules = {"Method": "base", "Predictor": "predictor"} | {cls: cls.lower() for cls in _CLASSES}
    if name not in modules:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{modules[name]}"), name)


@functools.cache
def installed() -> dict[str, str]:
    """The methods that other installed packages add: name -> MODULE:CLASS. They cannot replace this package's own."""
    return {entry.name: entry.value for entry in entry_points(group=ENTRY_POINTS) if entry.name not in NAMES}


def is_ours(name: str) -> bool:
    """Whether `--model NAME` is a method: one of this or another installed package, or MODULE:CLASS."""
    return name in (*NAMES, *installed()) or ":" in name


def find(name: str) -> type[Method]:
    """The class of a method.

    Args:
        name: the NAME of `--model NAME`, of this or another installed package, or MODULE:CLASS.

    Raises:
        InputError: there is no such method, or the class is not a method.
    """
    if not isinstance(name, str):
        raise InputError(f"method {name!r}: must be the name of one, or MODULE:CLASS.")
    if name in NAMES:
        method: type[Method] = __getattr__(_CLASSES[NAMES.index(name)])
        return method
    if name in installed():
        method = _checked(installed()[name])
        if method.__name__.lower() != name:
            raise InputError(
                f"entry point {name!r} ({installed()[name]}): a method's name is that of its class in lower case: call "
                f"the entry point {method.__name__.lower()!r}."
            )
        return method
    if ":" in name:
        sys.path.insert(0, "")  # in a console script, the first entry is its folder, not the working directory
        try:
            return _checked(name)
        finally:
            sys.path.remove("")
    names = [*NAMES, *installed()]
    near = did_you_mean(name.lower(), names)
    raise InputError(f"unknown method {name!r}: {near or 'there are ' + ', '.join(names) + ', or MODULE:CLASS.'}")


def make(name: str, arguments: Mapping[str, Any] | None = None) -> Method:
    """The method of a name (see `find`), with these arguments.

    Raises:
        InputError: there is no such method, or it does not take an argument, or a value is outside its range.
    """
    method, arguments = find(name), {} if arguments is None else arguments
    if not isinstance(arguments, Mapping):
        raise InputError(f"{name}: its arguments are {arguments!r}: must be a dictionary, such as {{'repeat': 2}}.")
    for argument, value in arguments.items():
        if argument not in arguments_of(method):
            owners = [other for other in NAMES if argument in arguments_of(find(other))]
            whose = f"belongs to {' and '.join(owners)}, not to {name}" if owners else f"is no argument of {name}"
            fields = ", ".join(field.name for field in dataclasses.fields(method))
            raise InputError(f"{argument!r} {whose}, which takes {fields}.")
        if value == "":
            raise InputError(f"{argument!r} has no value: write {argument}=VALUE.")
    return method.from_arguments(arguments)


def arguments_of(method: type[Method]) -> set[str]:
    """The names of a method's arguments."""
    return {field.name for field in dataclasses.fields(method)}


def _checked(path: str) -> type[Method]:
    """The class MODULE:CLASS, in a module of the working directory or an installed one."""
    from lm_eval_icl.methods.base import Method

    name, _, cls = path.partition(":")
    if not (name and cls):
        raise InputError(f"{path!r}: a class in a file of yours is MODULE:CLASS.")
    if "/" in name or name.endswith(".py"):
        raise InputError(f"{path!r}: give the module as `import` takes it, in its folder: {PurePath(name).stem}:{cls}.")
    try:
        module = importlib.import_module(name)
    except Exception as error:
        says = one_line(error) if isinstance(error, (ImportError, SyntaxError)) else one_line_with_place(error)
        raise InputError(
            f"{path!r} cannot be imported ({says}): give MODULE:CLASS, a module seen from here."
        ) from error
    loaded = getattr(module, cls, None)
    if not (isinstance(loaded, type) and issubclass(loaded, Method)):
        classes = [other for other in vars(module).values() if isinstance(other, type) and other.__module__ == name]
        names = ", ".join(other.__name__ for other in classes if issubclass(other, Method)) or "there is none"
        raise InputError(
            f"{path!r} is not a class that derives from lm_eval_icl.methods.Method; in "
            f"{getattr(module, '__file__', name)}: {names}."
        )
    if inspect.isabstract(loaded):
        raise InputError(f"{path!r} has no {' and no '.join(sorted(loaded.__abstractmethods__))}: give it one.")
    return loaded
