"""The methods, by name; MODULE:CLASS for those of others. A class is imported when it is first used."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lm_eval_icl.errors import InputError, did_you_mean, one_line_with_place

if TYPE_CHECKING:
    from lm_eval_icl.methods.base import Method

# In the order of tables. A class's name in lower case is the name of its file, and the NAME of `--model NAME`.
_CLASSES = "ICL NoPE PrefixICL PCW SAICL BatchICL InvICL DeepThink SBP Star APE Structured Ensemble NBCE".split()
NAMES = tuple(name.lower() for name in _CLASSES)


def __getattr__(name: str) -> Any:
    """A method's class, `Method` or `Predictor`. They are imported on first use, since they import transformers."""
    modules = {"Method": "base", "Predictor": "predictor"} | {cls: cls.lower() for cls in _CLASSES}
    if name not in modules:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{modules[name]}"), name)


def find(name: str) -> type[Method]:
    """The class of a method.

    Args:
        name: the NAME of `--model NAME`, or MODULE:CLASS.

    Raises:
        InputError: there is no such method, or the class is not a method.
    """
    if name in NAMES:
        method: type[Method] = __getattr__(_CLASSES[NAMES.index(name)])
        return method
    if ":" in name:
        sys.path.insert(0, "")  # in a console script, the first entry is its folder, not the working directory
        try:
            return _imported(name)
        finally:
            sys.path.remove("")
    near = did_you_mean(name.lower(), NAMES)
    raise InputError(f"unknown method {name!r}: {near or 'there are ' + ', '.join(NAMES) + ', or MODULE:CLASS.'}")


def make(name: str, arguments: Mapping[str, Any] | None = None) -> Method:
    """The method of a name (see `find`), with these arguments.

    Raises:
        InputError: there is no such method, or it does not take an argument, or a value is outside its range.
    """
    method, arguments = find(name), arguments or {}
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


def _imported(path: str) -> type[Method]:
    """The class MODULE:CLASS, in a module of the working directory or an installed one."""
    from lm_eval_icl.methods.base import Method

    name, _, cls = path.partition(":")
    try:
        loaded = getattr(importlib.import_module(name), cls)
    except Exception as error:
        says = one_line_with_place(error)
        raise InputError(f"{path!r} cannot be imported ({says}): give MODULE:CLASS, seen from this folder.") from error
    if not (isinstance(loaded, type) and issubclass(loaded, Method)):
        raise InputError(f"{path!r} is not a class that derives from lm_eval_icl.methods.Method.")
    if inspect.isabstract(loaded):
        raise InputError(f"{path!r} has no {' and no '.join(sorted(loaded.__abstractmethods__))}: give it one.")
    return loaded
