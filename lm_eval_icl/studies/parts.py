"""The parts of a study's file, and the values of a key: lists and ranges."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, FiniteFloat, model_validator
from typing_extensions import TypedDict

from lm_eval_icl.errors import InputError, whole

# Whole numbers, which may be written 5.0.
Whole = Annotated[int, BeforeValidator(lambda value: whole(value, 0))]
Positive = Annotated[int, BeforeValidator(whole)]
NotNegative = Annotated[FiniteFloat, Field(ge=0)]


@dataclass(frozen=True)
class Variant:
    """A method with one value for each of its arguments.

    Attributes:
        method: its name; "hf" is lm-eval's own model.
        arguments: those that the study gives.
        entry: which entry of `methods` it comes from. Among the variants of one entry, `dev` chooses.
    """

    method: str
    arguments: Mapping[str, Any]
    entry: int

    @property
    def name(self) -> str:
        """The method and its arguments, as `--model` and `--model_args` take them."""
        return ",".join([self.method, *(f"{name}={value}" for name, value in self.arguments.items())])


class Dev(BaseModel):
    """On how many documents (None: as many as the test set has) values are chosen, which values (arguments of methods,
    "seeds", "decide"), and by which metric."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    size: Positive | None = None
    choose: tuple[str, ...] = ()
    metric: str

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            raise ValueError("must be a mapping, such as {size: test, choose: [T, eta]}")
        dev = {key: value for key, value in given.items() if value is not None and (key, value) != ("size", "test")}
        if "choose" in dev:
            dev["choose"] = tuple(map(str, expanded("dev: choose", dev["choose"], needed=False)))
        return dev


class Expected(TypedDict, total=False):
    """Numbers of a paper, for the rows that agree with all that the other keys say: scores by column (`values`), and
    others (`measures`): "order flips", "milliseconds" of an inference, the share of training rows "kept"."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)  # type: ignore[misc]
    model: str
    training: str
    method: str
    arguments: dict[str, Any] | None
    num_fewshot: int
    demonstrations: str
    chosen: bool
    values: dict[str, FiniteFloat]
    measures: dict[Literal["order flips", "milliseconds", "kept"], FiniteFloat]


class Resources(TypedDict, total=False):
    """What a cluster's worker with a model has: as of Ray; `memory` in bytes."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)  # type: ignore[misc]
    num_cpus: NotNegative
    num_gpus: NotNegative
    memory: NotNegative


@dataclass(frozen=True)
class Training:
    """How the models of a study are trained under each method before they are evaluated: the options of `lm-eval-icl
    train`, and the names in the study's `tasks` that the trained models are evaluated on."""

    name: str
    options: Mapping[str, Any]
    targets: tuple[str, ...]


def expanded(key: str, given: Any, needed: bool = True) -> list[Any]:
    """The values of a key: a list, a single one, or ranges such as 0..9, both ends included.

    Raises:
        InputError: there is none and one is needed, or a range is empty or has other dots.
    """
    values: list[Any] = []
    for value in given if isinstance(given, list) else [] if given is None else [given]:
        if isinstance(value, str) and (ends := re.fullmatch(r"\s*(-?\d+)\s*\.\.\s*(-?\d+)\s*", value)):
            first, last = int(ends[1]), int(ends[2])
            if last < first:
                raise InputError(f"{key}: the range {value} is empty.")
            values += range(first, last + 1)
        elif isinstance(value, str) and re.fullmatch(r"[\s\d-]+\.{2,}[\s\d.-]*|\.{2,}[\s\d-]+", value):
            raise InputError(f"{key}: {value!r}: a range has two dots between its ends: 0..2 is 0, 1 and 2.")
        else:
            values.append(value)
    if needed and not values:
        raise InputError(f"{key}: names none: give one or several.")
    return values


def combinations(key: str, arguments: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Each combination of the values of arguments, which may be lists and ranges."""
    lists = {name: expanded(f"{key}: {name}", value) for name, value in (arguments or {}).items()}
    return [dict(zip(lists, values, strict=True)) for values in itertools.product(*lists.values())]
