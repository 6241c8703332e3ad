"""Finds methods by name. MODULE:CLASS names a method of another package.

A class is imported when it is first used.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lm_eval_icl import declared
from lm_eval_icl.errors import InputError, one_line_with_place, suggestion

if TYPE_CHECKING:
    from lm_eval_icl.methods.base import Method

# The classes in the order of tables, each with its colour and marker in figures. A class's name in
# lower case is the name of its file, and NAME in `--model NAME`.
_CLASSES = {
    "ICL": ("#0072b2", "o"),
    "NoPE": ("#b3a200", "D"),
    "PrefixICL": ("#56b4e9", "P"),
    "PCW": ("#009e73", "s"),
    "SAICL": ("#cc79a7", "X"),
    "BatchICL": ("#a0703c", "8"),
    "InvICL": ("#d55e00", "D"),
    "DeepThink": ("#e69f00", "p"),
    "SBP": ("#8f5fd0", "p"),
    "Star": ("#d02350", "*"),
    "APE": ("#43801a", "h"),
    "Structured": ("#6f83e0", "d"),
    "Ensemble": ("#ee8a7d", "8"),
    "NBCE": ("#00989c", "H"),
    "MoICL": ("#9a4fb0", "s"),
    "CTKV": ("#5a7d00", "d"),
    "TTT": ("#2f4b9c", "X"),
}
STYLES = {name.lower(): style for name, style in _CLASSES.items()}
NAMES = tuple(STYLES)
# The classes that others derive from, and the Python API, each with its file.
_OTHERS = {
    "Method": "base",
    "ByQuery": "by_query",
    "Several": "several",
    "Stepwise": "stepwise",
    "LearnedMemory": "learned",
    "Predictor": "predictor",
}


def __getattr__(name: str) -> Any:
    """The class of a method, or a class of `_OTHERS`. The import takes seconds."""
    if name in _CLASSES:
        file = name.lower()
    elif name in _OTHERS:
        file = _OTHERS[name]
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{file}"), name)


def find(name: str) -> type[Method]:
    """The class of a method.

    Args:
        name: the NAME in `--model NAME`, or MODULE:CLASS.

    Raises:
        InputError: there is no such method, or the class is not a method.
    """
    if name in NAMES:
        method: type[Method] = __getattr__(list(_CLASSES)[NAMES.index(name)])
        return method
    if ":" in name:
        # In a console script, the first entry is the script's folder, not the working directory.
        sys.path.insert(0, "")
        try:
            return _imported(name)
        finally:
            sys.path.remove("")
    raise InputError(f"unknown method {name!r}: {suggestion(name, (*NAMES, 'MODULE:CLASS'))}")


def make(name: str, arguments: Mapping[str, Any] | None = None) -> Method:
    """The method with this name (see `find`) and these arguments.

    Raises:
        InputError: there is no such method, or it has no such argument, or a value is outside its
            range.
    """
    method = find(name)
    arguments = arguments or {}
    for argument, value in arguments.items():
        if argument not in arguments_of(method):
            known = ", ".join(declared.arguments_of(method))
            owners = owners_of(argument)
            fault = f"belongs to {owners}, not to {name}" if owners else f"is no argument of {name}"
            raise InputError(f"{argument!r} {fault}, which takes {known}.")
        if value == "":
            raise InputError(f"{argument!r} has no value: write {argument}=VALUE.")
    return method.from_arguments(arguments)


def arguments_of(method: type[Method]) -> set[str]:
    """The names of a method's arguments."""
    return set(declared.arguments_of(method))


def owners_of(argument: str) -> str:
    """The names of the methods that have an argument, joined by "and"."""
    return " and ".join(name for name in NAMES if argument in arguments_of(find(name)))


def _imported(path: str) -> type[Method]:
    """The class MODULE:CLASS. The module is in the working directory or installed."""
    from lm_eval_icl.methods.base import Method

    name, _, cls = path.partition(":")
    try:
        module = importlib.import_module(name)
        loaded = getattr(module, cls, None)
    except Exception as error:
        why = one_line_with_place(error)
        raise InputError(
            f"{path!r} cannot be imported from this folder ({why}): give MODULE:CLASS."
        ) from error
    if not (isinstance(loaded, type) and issubclass(loaded, Method)):
        own = [
            other
            for other, kind in inspect.getmembers(module, inspect.isclass)
            if issubclass(kind, Method) and kind.__module__ == name
        ]
        raise InputError(
            f"{path!r} is not a class that derives from lm_eval_icl.methods.Method. Those of "
            f"{name}: {', '.join(own) or 'none'}."
        )
    if inspect.isabstract(loaded):
        raise InputError(
            f"{path!r} has no {' and no '.join(sorted(loaded.__abstractmethods__))}: give it one."
        )
    return loaded
