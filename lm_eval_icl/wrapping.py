"""Methods of lm-eval's classes wrapped, where it offers no other way in."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def wrap(cls: type, name: str, wrapper: Callable[..., Any]) -> None:
    """Let a call of a method be one of `wrapper`, with the original method before the arguments. Twice changes
    nothing."""
    original = getattr(cls, name)
    wrappers = getattr(original, "wrappers", ())
    if wrapper in wrappers:
        return

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return wrapper(original, self, *args, **kwargs)

    method.wrappers = (*wrappers, wrapper)  # type: ignore[attr-defined]
    setattr(cls, name, method)
