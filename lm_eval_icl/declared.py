"""Arguments as users write them, read into dataclasses whose types declare the ranges.

`NAME:KEY=VALUE:KEY=VALUE` and a dictionary say the same. A field such as
`eta: Annotated[float, Field(gt=0, le=1)] = 0.01` is all that has to be written for an argument:
the check, the words of its refusal, and the words of `--help` follow from it. pydantic checks.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationInfo

from lm_eval_icl.errors import InputError, suggestion

Positive = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]

_CONFIG = ConfigDict(allow_inf_nan=False, arbitrary_types_allowed=True)
_KINDS = {bool: "True or False", int: "a whole number", float: "a number", str: "a text"}
_BOUNDS = {"gt": " above {}", "ge": ", {} or more", "lt": " and below {}", "le": " and at most {}"}


@functools.cache
def range_of(hint: Any) -> str:
    """What a value of this type must be, in words."""
    if get_origin(hint) in (Union, UnionType):
        kinds = [range_of(kind) for kind in get_args(hint) if kind is not NoneType]
        return " or ".join(kinds)
    if get_origin(hint) is Literal:
        *others, last = [str(value) or "empty" for value in get_args(hint)]
        return f"{', '.join(others)} or {last}"
    if get_origin(hint) is tuple:
        return f"a list, each {range_of(get_args(hint)[0])}"
    if get_origin(hint) is Annotated:
        kind, *details = get_args(hint)
        bounds: dict[str, float] = {}
        for detail in details:
            for constraint in getattr(detail, "metadata", ()):
                bounds |= asdict(constraint)
        words = [_BOUNDS[name].format(bound) for name, bound in bounds.items() if name in _BOUNDS]
        return range_of(kind) + "".join(words)
    return _KINDS.get(hint, "of another type")


def meaning_of(hint: Any) -> str:
    """What an argument of this type means: the text in its `Annotated`. Empty if there is none."""
    return next((text for text in get_args(hint) if isinstance(text, str)), "")


@functools.cache
def arguments_of(declared: Any) -> dict[str, Any]:
    """The types of the arguments that a dataclass declares, by name."""
    hints = get_type_hints(declared, include_extras=True)
    return {field.name: hints[field.name] for field in fields(declared)}


@functools.cache
def _adapter(hint: Any) -> TypeAdapter[Any]:
    return TypeAdapter(hint, config=_CONFIG)


def checked(name: str, value: Any, hint: Any) -> Any:
    """The value of an argument, converted to its type: 5.0 is 5, and the text "1e-5" is a number.

    Raises:
        InputError: the value is not of this type or outside its range.
    """
    must_be = range_of(hint)
    try:
        if isinstance(value, bool) and must_be.startswith(("a number", "a whole number")):
            raise ValueError
        return _adapter(hint).validate_python(value)
    except ValueError:
        raise InputError(f"{name}={value!r}: must be {must_be}.") from None


def as_argument(hint: Any) -> BeforeValidator:
    """For a field of a pydantic model: its values are read, and refused, as an argument's."""

    def read(value: Any, info: ValidationInfo) -> Any:
        return checked(str(info.field_name), value, hint)

    return BeforeValidator(read)


@dataclass(frozen=True)
class Arguments:
    """A dataclass whose values are checked when it is made, except for defaults.

    A subclass may have a `name`.

    Raises:
        InputError: a value is not of its field's type or outside its range.
    """

    def __post_init__(self) -> None:
        name = getattr(self, "name", "")
        hints = arguments_of(type(self))  # type: ignore[arg-type]
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not field.default:
                called = f"{name}: {field.name}" if name else field.name
                value = checked(called, value, hints[field.name])
                object.__setattr__(self, field.name, value)

    @property
    def arguments(self) -> dict[str, Any]:
        """All arguments by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def given(self) -> dict[str, Any]:
        """The arguments whose values differ from the defaults."""
        defaults = {field.name: field.default for field in fields(self)}
        return {name: value for name, value in self.arguments.items() if value != defaults[name]}

    def __str__(self) -> str:
        """The name and the arguments that differ from the defaults, as users write them.

        The order in which they were given makes no difference.
        """
        parts = [getattr(self, "name", "")]
        for name, value in sorted(self.given.items()):
            parts.append(f"{name}={self._written(value)}")
        return ":".join(parts)

    def _written(self, value: Any) -> str:
        return "|".join(map(str, value)) if isinstance(value, tuple) else str(value)


def read_into(declared: Any, written: Any) -> Any:
    """The dataclass `declared` with the arguments in a mapping.

    Raises:
        InputError: it is no mapping, or there is no such argument, or a value is refused.
    """
    name = getattr(declared, "name", "")
    if not isinstance(written, Mapping):
        raise InputError(f"{name}={written!r}: must be arguments and their values.")
    known = arguments_of(declared)
    for argument in written:
        if argument not in known:
            near = suggestion(argument, known)
            raise InputError(f"{name and name + ': '}unknown argument {argument!r}: {near}")
    return declared(**written)


def spelled(text: str, verbatim: str = "") -> tuple[str, dict[str, Any]]:
    """Divides NAME:KEY=VALUE:... into the name and the arguments.

    Values are numbers, truth values or texts.

    Args:
        verbatim: the argument whose value is all of the remaining text, colons included.

    Raises:
        InputError: an argument is not KEY=VALUE.
    """
    name, *parts = text.split(":")
    arguments: dict[str, Any] = {}
    for i, part in enumerate(parts):
        key, equals, value = part.partition("=")
        if not equals:
            raise InputError(f"{part!r}: must be KEY=VALUE, as in {name}:KEY=VALUE.")
        if key == verbatim:
            rest = ":".join([value, *parts[i + 1 :]])
            arguments[key] = rest.replace("\\n", "\n")
            break
        try:
            arguments[key] = json.loads(value.lower())
        except ValueError:
            arguments[key] = value
    return name, arguments
