"""Functions of lm-eval wrapped, where it offers no other way in."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any


def wrap(place: type | ModuleType, name: str, wrapper: Callable[..., Any]) -> None:
    """Let a call of a class's method or a module's function be one of `wrapper`, with the original before the
    arguments. Twice changes nothing."""
    original = getattr(place, name)
    wrappers = getattr(original, "wrappers", ())
    if wrapper in wrappers:
        return

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    wrapped.wrappers = (*wrappers, wrapper)  # type: ignore[attr-defined]
    setattr(place, name, wrapped)
