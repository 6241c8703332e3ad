"""Decision rules as users write them: `contextual+batch:of=pool:m=128`, or {"contextual": {"texts": ["N/A"]}}."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lm_eval_icl.decisions.batch import BatchCalibration
from lm_eval_icl.decisions.contextual import Contextual, Domain
from lm_eval_icl.decisions.neighbors import KNN, Hidden
from lm_eval_icl.decisions.pmi import PMI, DomainPMI
from lm_eval_icl.decisions.rule import Comparison, Rule
from lm_eval_icl.errors import InputError, did_you_mean, is_whole, naming

RULES: Mapping[str, type[Rule]] = {
    rule.name: rule for rule in (Contextual, Domain, BatchCalibration, DomainPMI, PMI, Hidden, KNN)
}
# Rules that read more of a model than the log-probabilities of options.
NEIGHBORS = tuple(name for name, rule in RULES.items() if issubclass(rule, Comparison))


def read(given: Any) -> tuple[Rule, ...]:
    """The rules that `decide` names, joined by `+`, with arguments after `:`.

    Raises:
        InputError: there is no such rule or argument, or its value cannot be used.
    """
    with naming(f"decide={given if isinstance(given, str) else json.dumps(given, default=str)}"):
        if isinstance(given, list | tuple):
            rules = [rule for entry in given for rule in read(entry)]
        elif isinstance(given, Mapping):
            rules = [_make(name, arguments or {}) for name, arguments in given.items()]
        elif isinstance(given, str):
            rules = [_parsed(text) for text in given.split("+")]
        else:
            raise InputError("must be names of rules joined by '+', such as contextual+batch.")
        if not rules:
            raise InputError("names no rule.")
        if len(names := set(map(str, rules))) < len(rules):
            raise InputError(f"names a rule twice: give {'+'.join(sorted(names))}.")
    return tuple(rules)


def written(rules: Sequence[Rule]) -> Any:
    """What `read` reads as these rules: names joined by `+`, or a list of rules with their arguments, where an argument
    is a text that cannot stand among names."""
    text = "+".join(map(str, rules))
    try:
        if read(text) == tuple(rules):
            return text
    except InputError:
        pass
    return [{rule.name: rule.given} for rule in rules]


def _parsed(text: str) -> Rule:
    name, *parts = text.split(":")
    verbatim = RULES[name].verbatim if name in RULES else ""
    arguments = {}
    for i, part in enumerate(parts):
        key, equals, value = part.partition("=")
        if not equals:
            raise InputError(f"{part!r}: must be NAME=VALUE, as in batch:of=pool:m=128.")
        if key == verbatim:  # the last argument, which has colons of its own
            arguments[key] = ":".join([value, *parts[i + 1 :]]).replace("\\n", "\n")
            break
        arguments[key] = value
    return _make(name, arguments)


def _make(name: str, given: Any) -> Rule:
    if name not in RULES:
        raise InputError(f"{name!r}: {did_you_mean(str(name).lower(), RULES) or _there_are(RULES)}")
    if not isinstance(given, Mapping):
        raise InputError('must be rules with their arguments, such as {"batch": {"of": "pool"}}.')
    rule, values = RULES[name], {}
    defaults = {field.name: field.default for field in dataclasses.fields(rule)}
    for key, value in given.items():
        if key not in defaults:
            near = did_you_mean(str(key).lower(), defaults)
            raise InputError(f"{name}: unknown argument {key!r}: {near or _there_are(defaults)}")
        values[key] = _value(f"{name}: {key}={value!r}", value, defaults[key], rule.choices.get(key, ()))
    if why := rule.check_given(values):
        raise InputError(f"{name}: {why}")
    return rule(**values)


def _value(what: str, value: Any, default: Any, choices: Sequence[str]) -> Any:
    """An argument's value, of the type of its default."""
    if choices:
        if value not in choices:
            raise InputError(f"{what}: must be {' or '.join(choices)}.")
        return value
    if isinstance(default, int):
        number = float(value) if isinstance(value, str) and re.fullmatch(r"\d+", value) else value
        if not is_whole(number) or number < 1:
            raise InputError(f"{what}: must be a whole number from 1.")
        return int(number)
    if isinstance(default, tuple):
        texts = value.split("|") if isinstance(value, str) else value
        if not isinstance(texts, Sequence) or not texts or not all(isinstance(text, str) for text in texts):
            raise InputError(f"{what}: must be texts joined by '|', such as N/A|[MASK], or a list.")
        return tuple(texts)
    if not isinstance(value, str) or not value.strip():
        raise InputError(f"{what}: must be a text.")
    return value


def _there_are(names: Iterable[str]) -> str:
    return f"there are {', '.join(names)}."
