"""Reads decision rules as users write them: `contextual+batch:of=pool:m=128`, or {"contextual": {"texts": ["N/A"]}}.

Methods that choose demonstrations are written in the same way. `spelled` parses `NAME:KEY=VALUE:KEY=VALUE`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter, ValidationError

from lm_eval_icl.decisions.batch import BatchCalibration
from lm_eval_icl.decisions.contextual import Contextual, Domain
from lm_eval_icl.decisions.neighbors import KNN, Hidden
from lm_eval_icl.decisions.pmi import PMI, DomainPMI
from lm_eval_icl.decisions.rule import Comparison, Rule
from lm_eval_icl.errors import InputError, did_you_mean, naming, refusal

RULES: Mapping[str, type[Rule]] = {
    rule.name: rule for rule in (Contextual, Domain, BatchCalibration, DomainPMI, PMI, Hidden, KNN)
}
# Rules that need more of a model than the log-probabilities of options.
NEIGHBORS = tuple(name for name, rule in RULES.items() if issubclass(rule, Comparison))


def read(given: Any) -> tuple[Rule, ...]:
    """The rules in the setting `decide`, which names them joined by `+`, each with its arguments after `:`.

    Raises:
        InputError: there is no such rule or argument, or the value of an argument cannot be used.
    """
    with naming(f"decide={given if isinstance(given, str) else json.dumps(given, default=str)}"):
        if isinstance(given, list | tuple):
            rules = [rule for entry in given for rule in read(entry)]
        elif isinstance(given, Mapping):
            rules = [_make(name, arguments or {}) for name, arguments in given.items()]
        else:
            rules = [_make(*spelled(text, verbatim="premise")) for text in str(given).split("+")]
        if len(names := set(map(str, rules))) < len(rules):
            raise InputError(f"names a rule twice: give {'+'.join(sorted(names))}.")
    return tuple(rules)


def written(rules: Sequence[Rule]) -> Any:
    """The rules as users write them: as one text, or as dictionaries if the text would not name all of their values."""
    text = "+".join(map(str, rules))
    try:
        if read(text) == tuple(rules):
            return text
    except InputError:
        pass
    return [{rule.name: rule.given} for rule in rules]


def spelled(text: str, verbatim: str = "") -> tuple[str, dict[str, Any]]:
    """Divides NAME:KEY=VALUE:... into the name and the arguments. Values are numbers, truth values or texts.

    Args:
        verbatim: the name of an argument whose value is all of the remaining text, colons included.

    Raises:
        InputError: an argument is not KEY=VALUE.
    """
    name, *parts = text.split(":")
    arguments: dict[str, Any] = {}
    for i, part in enumerate(parts):
        key, equals, value = part.partition("=")
        if not equals:
            raise InputError(f"{part!r}: must be NAME=VALUE, as in {name}:m=64.")
        if key == verbatim:
            return name, arguments | {key: ":".join([value, *parts[i + 1 :]]).replace("\\n", "\n")}
        try:
            arguments[key] = json.loads(value.lower())
        except ValueError:
            arguments[key] = value
    return name, arguments


def _make(name: str, given: Any) -> Rule:
    if name not in RULES:
        near = did_you_mean(str(name).lower(), RULES) or f"there are {', '.join(RULES)}."
        raise InputError(f"{name!r}: {near}")
    if not isinstance(given, Mapping):
        raise InputError('must be rules with their arguments, such as {"batch": {"of": "pool"}}.')
    known = [field.name for field in dataclasses.fields(RULES[name])]
    for key in given:
        if key not in known:
            near = did_you_mean(str(key).lower(), known) or f"there are {', '.join(known)}."
            raise InputError(f"{name}: unknown argument {key!r}: {near}")
    try:
        return TypeAdapter(RULES[name]).validate_python(dict(given))
    except ValidationError as error:
        raise InputError("{}: {}={!r}: {}.".format(name, *refusal(error))) from error
