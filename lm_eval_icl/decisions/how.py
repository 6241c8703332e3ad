"""Decision rules as users write them: `contextual+batch:of=pool:m=128`, or {"contextual": {"texts": ["N/A"]}}."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lm_eval_icl.errors import InputError, did_you_mean, is_whole, naming

# The rules, with their arguments and defaults.
RULES: Mapping[str, Mapping[str, Any]] = {
    "contextual": {"texts": ("N/A", "", "[MASK]")},
    "domain": {"n": 20, "of": "pool"},
    "batch": {"by": "division", "of": "task", "m": 128},
    "dcpmi": {"premise": None},
    "pmi": {"premise": ":"},
    "hidden": {"m": 16},
    "knn": {"k": 3, "m": 128},
}
# Rules that compare a document with labeled rows, m of each class, by what the model says before any option.
NEIGHBORS = ("hidden", "knn")
_CHOICES = {("domain", "of"): ("pool", "test"), ("batch", "by"): ("division", "difference")}
_CHOICES["batch", "of"] = ("task", "pool")


@dataclass(frozen=True)
class Rule:
    """A rule with all its arguments.

    Attributes:
        name: one of `RULES`.
        arguments: by name, those with their default too.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        """The name of the rule's results: the same text for the same rule, in whatever order arguments were given. A
        text with other characters than a name may have stands as a digest."""
        parts = [self.name]
        for name, value in sorted(self.arguments.items()):
            if value == RULES[self.name][name]:
                continue
            text = "|".join(value) if isinstance(value, tuple) else str(value)
            if not re.fullmatch(r"[\w./|\[\] -]+", text, re.ASCII):
                text = hashlib.sha256(json.dumps(value).encode()).hexdigest()[:8]
            parts.append(f"{name}={text}")
        return ":".join(parts)

    @property
    def is_transductive(self) -> bool:
        """Whether a document's decision depends on other documents that are evaluated."""
        return self.arguments.get("of") in ("task", "test")

    @property
    def is_logarithmic(self) -> bool:
        """Whether its values are log-probabilities up to a constant, which metrics may divide by a length."""
        return self.name not in NEIGHBORS and self.arguments.get("by") != "difference"


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
    own = [{name: v for name, v in rule.arguments.items() if v != RULES[rule.name][name]} for rule in rules]
    return [{rule.name: arguments} for rule, arguments in zip(rules, own, strict=True)]


def _parsed(text: str) -> Rule:
    name, *parts = text.split(":")
    arguments = {}
    for i, part in enumerate(parts):
        key, equals, value = part.partition("=")
        if not equals:
            raise InputError(f"{part!r}: must be NAME=VALUE, as in batch:of=pool:m=128.")
        if key == "premise":  # the last argument: a premise has colons of its own
            arguments[key] = ":".join([value, *parts[i + 1 :]]).replace("\\n", "\n")
            break
        arguments[key] = value
    return _make(name, arguments)


def _make(name: str, given: Any) -> Rule:
    if name not in RULES:
        raise InputError(f"{name!r}: {did_you_mean(str(name).lower(), RULES) or _there_are(RULES)}")
    if not isinstance(given, Mapping):
        raise InputError('must be rules with their arguments, such as {"batch": {"of": "pool"}}.')
    defaults = RULES[name]
    values = {}
    for key, value in given.items():
        if key not in defaults:
            near = did_you_mean(str(key).lower(), defaults)
            raise InputError(f"{name}: unknown argument {key!r}: {near or _there_are(defaults)}")
        values[key] = _value(name, key, value)
    if name == "batch" and "m" in values and values.get("of") != "pool":
        raise InputError(f"{name}: m={values['m']}: has an effect only with of=pool: give that, or leave m out.")
    return Rule(name, {**defaults, **values})


def _value(name: str, key: str, value: Any) -> Any:
    if (name, key) in _CHOICES:
        if value not in _CHOICES[name, key]:
            raise InputError(f"{name}: {key}={value!r}: must be {' or '.join(_CHOICES[name, key])}.")
        return value
    if key in ("n", "m", "k"):
        number = float(value) if isinstance(value, str) and re.fullmatch(r"\d+", value) else value
        if not is_whole(number) or number < 1:
            raise InputError(f"{name}: {key}={value!r}: must be a whole number from 1.")
        return int(number)
    if key == "texts":
        texts = value.split("|") if isinstance(value, str) else value
        if not isinstance(texts, Sequence) or not texts or not all(isinstance(text, str) for text in texts):
            raise InputError(f"{name}: texts={value!r}: must be texts joined by '|', such as N/A|[MASK], or a list.")
        return tuple(texts)
    if not isinstance(value, str) or not value.strip():
        raise InputError(f"{name}: {key}={value!r}: must be a text.")
    return value


def _there_are(names: Iterable[str]) -> str:
    return f"there are {', '.join(names)}."
