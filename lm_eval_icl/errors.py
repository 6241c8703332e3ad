"""The errors of this package, each with a message of one line, and its logger."""

from __future__ import annotations

import difflib
import importlib.util
import logging
import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType

# A child of lm-eval's logger, so that in a run of lm-eval it has that logger's handler and level.
log = logging.getLogger("lm_eval.icl")


class InputError(ValueError):
    """Something that the user gave cannot be used. The message is one line that names it and says
    what to do.

    The commands print this line without a traceback and exit with status 1.

    Attributes:
        message: the line without the "lm-eval-icl: " at its beginning.
    """

    @property
    def message(self) -> str:
        return super().__str__()

    def __str__(self) -> str:
        return f"lm-eval-icl: {self.message}"


class CannotWrite(InputError):
    """A result cannot be written, for example on a full disk. Later results could not be written
    either."""


class Unsupported(InputError):
    """The loaded model does not do what the method needs; another method may work on it."""


def show_as_lines() -> None:
    """Print an uncaught `InputError` as one line, without a traceback. Only a command calls this:
    `lm_eval` (by the start-up hook) and `lm-eval-icl`. A second call changes nothing."""
    show = sys.excepthook
    if getattr(show, "shows_lines", False):
        return

    def one_line_or_all(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if isinstance(error, InputError):
            print(error, file=sys.stderr)
        else:
            show(kind, error, trace)

    one_line_or_all.shows_lines = True  # type: ignore[attr-defined]
    sys.excepthook = one_line_or_all


def one_line(error: BaseException) -> str:
    """The type and the message of another package's error, on one line of at most 600
    characters."""
    text = " ".join(re.sub(r"\x1b\[[0-9;]*m", "", str(error)).split())
    return (
        f"{type(error).__name__}: {text[:600]}{'...' if len(text) > 600 else ''}"
        if text
        else type(error).__name__
    )


def one_line_with_place(error: BaseException) -> str:
    """`one_line`, with the file and the line where the error was raised, for errors in a user's own
    code."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{one_line(error)}, {place.filename} line {place.lineno}"


@contextmanager
def refusing(
    what: str, advice: str = "", kinds: tuple[type[Exception], ...] = (Exception,)
) -> Iterator[None]:
    """Turn exceptions of the types `kinds` into an `InputError` that begins with `what` and ends
    with `advice`.

    An `InputError` raised inside is passed on unchanged.
    """
    try:
        yield
    except InputError:
        raise
    except kinds as error:
        raise InputError(f"{what} ({one_line(error)}).{advice and ' ' + advice}") from error


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Begin the message of an `InputError` with `what` it is about, such as "task 'mmlu'"."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{what}: {error.message}") from error


def reason(error: BaseException) -> str:
    """Why something has failed: the message of an `InputError`, or else `one_line_with_place`."""
    return error.message if isinstance(error, InputError) else one_line_with_place(error)


@contextmanager
def writing(where: object, kind: type[InputError] = InputError) -> Iterator[None]:
    """Turn an `OSError` into an error of the type `kind`, whose message says that `where` cannot be
    written."""
    try:
        yield
    except OSError as error:
        raise kind(f"{where}: cannot be written ({error.strerror or error}).") from error


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """The question whether the most similar of the known names was meant; empty if none is as
    similar as `cutoff`. Capitals make no difference."""
    by_lower = {other.lower(): other for other in known}
    near = difflib.get_close_matches(name.lower(), list(by_lower), n=1, cutoff=cutoff)
    return f"did you mean {by_lower[near[0]]!r}?" if near else ""


def suggestion(name: object, known: Iterable[str], otherwise: str = "there are ") -> str:
    """The advice about an unknown name: the most similar of the known names, or all of them after
    `otherwise`."""
    names = list(known)
    return did_you_mean(str(name), names) or f"{otherwise}{', '.join(names)}."


def require(package: str, extra: str, what: str) -> None:
    """Refuse `what`, such as an option, if its library is not installed. It is in one of our
    extras."""
    if importlib.util.find_spec(package) is None:
        raise InputError(f"{what} needs {package}: pip install 'lm-eval-icl[{extra}]'.")
