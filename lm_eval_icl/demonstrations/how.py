"""Reads how demonstrations are chosen, as users write it: `herding`, `lens:m=500:rho=2`, {lens: {m: 500, rho: 2}}, or
retrieved: `similar:by=bm25`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lm_eval_icl.decisions.how import spelled
from lm_eval_icl.demonstrations import lens, similar
from lm_eval_icl.demonstrations.draw import DRAWN
from lm_eval_icl.demonstrations.select import SELECTORS, arguments_of, checked, near
from lm_eval_icl.demonstrations.similar import Similar
from lm_eval_icl.errors import InputError, naming

# The arguments of all methods, with their defaults: class balance, and the number of candidates.
_COMMON: dict[str, Any] = {"balance": True, "pool": 5000}
# The methods that search by trying sets of demonstrations, with the arguments that a user may give and their defaults.
SEARCHES: Mapping[str, dict[str, Any]] = {
    "best_random": {"sets": 100, "dev": 1000},
    "lens": asdict(lens.LensSettings()),
}
# The methods, all of which need a model.
METHODS = ("best_random", *SELECTORS, "lens")


@dataclass(frozen=True)
class How:
    """A method that chooses demonstrations, with its arguments."""

    name: str
    arguments: Mapping[str, Any] = field(
        default_factory=dict
    )  # the arguments that differ from the method's defaults
    balance: bool = _COMMON["balance"]  # choose inside each class
    pool: int = _COMMON["pool"]  # how many documents are candidates

    def __str__(self) -> str:
        """The choice as a text, which does not depend on the order in which arguments were given."""
        settings = {**self.arguments, "balance": self.balance, "pool": self.pool}
        parts = [
            f"{name}={value}"
            for name, value in sorted(settings.items())
            if _COMMON.get(name) != value
        ]
        return ":".join([self.name, *parts])


def make(name: str, arguments: Mapping[str, Any]) -> How:
    """The method with this name and these arguments, which may include `balance` and `pool`.

    Raises:
        InputError: there is no such method or argument, or a value is of another type or below its range.
    """
    if name not in METHODS:
        raise InputError(f"{name!r}: {near(name, METHODS)}")
    defaults = SEARCHES[name] if name in SEARCHES else arguments_of(SELECTORS[name])
    values = checked(name, arguments, {**defaults, **_COMMON})
    common = {key: values.pop(key) for key in _COMMON if key in values}
    return How(
        name,
        {key: value for key, value in sorted(values.items()) if defaults[key] != value},
        **common,
    )


def read(written: Any) -> How | Similar | None:
    """The method that the setting `demonstrations` names; None if it names a way of drawing (`draw.DRAWN`) or a file.

    Raises:
        InputError: there is no such method, way of drawing or file, or an argument cannot be used.
    """
    with naming(
        f"demonstrations={written if isinstance(written, str) else json.dumps(written, default=str)}"
    ):
        if isinstance(written, Mapping):
            name, arguments = next(iter(written.items()), ("", None))
            if len(written) != 1 or not isinstance(arguments, Mapping | None):
                raise InputError(
                    'must be one method with its arguments, such as {"lens": {"m": 500}}.'
                )
            return (
                similar.make(arguments or {})
                if name == "similar"
                else make(str(name), arguments or {})
            )
        name = str(written).partition(":")[0]
        if written in DRAWN or (name not in METHODS and Path(str(written)).is_file()):
            return None
        if name == "similar":
            return similar.make(spelled(str(written))[1])
        if name not in METHODS:
            advice = near(name, (*DRAWN, *METHODS, "similar"), "or a method that chooses: ")
            raise InputError(
                f"must be stratified, random, first, or a JSON file of indices that exists; {advice}"
            )
        return make(*spelled(str(written)))
