"""The one kind of error that this package raises on purpose, and the checks that several arguments share."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager


class InputError(SystemExit, ValueError):
    """Something the user gave cannot be used: one line that names it and says what to do.

    To a caller in Python it is a `ValueError`. On a command line, where nobody catches it, it is a
    `SystemExit`: Python prints the line, without a traceback, and exits with status 1.
    """


class Unsupported(InputError):
    """The loaded model does not do what the method needs; another method may work on it."""


def one_line(error: Exception) -> str:
    """What another package's error says, and what kind of error it is."""
    text = " ".join(re.sub(r"\x1b\[[0-9;]*m", "", str(error)).split())
    return f"{type(error).__name__}: {text[:600]}{'...' if len(text) > 600 else ''}" if text else type(error).__name__


@contextmanager
def refusing(what: str, advice: str = "", kinds: tuple[type[Exception], ...] = (Exception,)) -> Iterator[None]:
    """Errors of these kinds, here, are the fault of what the user gave: one line that names it."""
    try:
        yield
    except InputError:
        raise
    except kinds as error:
        raise InputError(f"lm-eval-icl: {what} ({one_line(error)}).{advice and ' ' + advice}") from error


def is_number(value: object) -> bool:
    """Whether an argument is a finite number. `True` is none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def is_whole(value: object) -> bool:
    """Whether an argument is a whole number, written 5, 5.0 or 5e0."""
    return is_number(value) and int(value) == value  # type: ignore[call-overload]
