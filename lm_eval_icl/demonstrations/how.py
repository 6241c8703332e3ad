"""How a model chooses demonstrations, as users write it: `herding`, `lens:m=500:rho=2`, or {lens: {m: 500, rho: 2}};
and how they are retrieved: `similar:by=bm25`."""

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

# The arguments that every method takes, with their defaults: class balance, and the number of candidates.
_OF_ALL: dict[str, Any] = {"balance": True, "pool": 5000}
# The methods that try demonstrations, with the arguments that a user may give and their defaults.
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
    arguments: Mapping[str, Any] = field(default_factory=dict)  # the method's; those with their default are left out
    balance: bool = _OF_ALL["balance"]  # choose inside each class
    pool: int = _OF_ALL["pool"]  # how many documents are candidates

    def __str__(self) -> str:
        """The same text for the same choice, whatever the order in which arguments were given."""
        settings = {**self.arguments, "balance": self.balance, "pool": self.pool}
        parts = [f"{name}={value}" for name, value in sorted(settings.items()) if _OF_ALL.get(name) != value]
        return ":".join([self.name, *parts])


def make(name: str, arguments: Mapping[str, Any]) -> How:
    """The method of this name with these arguments, `balance` and `pool` among them.

    Raises:
        InputError: there is no such method or argument, or a value is of another type or below its range.
    """
    if name not in METHODS:
        raise InputError(f"{name!r}: {near(name, METHODS)}")
    own = SEARCHES[name] if name in SEARCHES else arguments_of(SELECTORS[name])
    values = checked(name, arguments, {**own, **_OF_ALL})
    of_all = {key: values.pop(key) for key in _OF_ALL if key in values}
    return How(name, {key: value for key, value in sorted(values.items()) if own[key] != value}, **of_all)


def read(written: Any) -> How | Similar | None:
    """The method that `demonstrations` names; None for a way of drawing the same for all documents, and for a file.

    Raises:
        InputError: it is none of these, or an argument cannot be used.
    """
    with naming(f"demonstrations={written if isinstance(written, str) else json.dumps(written, default=str)}"):
        if isinstance(written, Mapping):
            name, arguments = next(iter(written.items()), ("", None))
            if len(written) != 1 or not isinstance(arguments, Mapping | None):
                raise InputError('must be one method with its arguments, such as {"lens": {"m": 500}}.')
            return similar.make(arguments or {}) if name == "similar" else make(str(name), arguments or {})
        name = str(written).partition(":")[0]
        if written in DRAWN or (name not in METHODS and Path(str(written)).is_file()):
            return None
        if name == "similar":
            return similar.make(spelled(str(written))[1])
        if name not in METHODS:
            advice = near(name, (*DRAWN, *METHODS, "similar"), "or a method that chooses: ")
            raise InputError(f"must be stratified, random, first, or a JSON file of indices that exists; {advice}")
        return make(*spelled(str(written)))
