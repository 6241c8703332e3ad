"""Plausible formats of one template of a task, after Sclar et al. (ICLR 2024, "FormatSpread").

A template such as `Review: {{text}}\\nSentiment:` has names of fields and separators: between a
name and its value, between fields and between demonstrations. In some tasks it has letters before
the listed options. A format replaces these. It leaves the texts of documents, the answers and the
description as they are.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from lm_eval_icl.errors import InputError

_CASINGS: tuple[Callable[[str], str], ...] = (str, str.upper, str.lower, str.title)
_AFTER_NAMES = (": ", ":", " : ", ":: ", " - ", "\t", ":\n", "\n")
_BETWEEN_FIELDS = ("\n", " ", "; ", ", ", " || ", " -- ", "\t")
_BETWEEN_DEMONSTRATIONS = ("\n\n", "\n", "\n\n\n", "\n###\n")
_LETTERS = ("{}.", "{})", "({})", "{}:", "[{}]")
# The parts of a template: a Jinja expression, which is kept; the name of a field at the beginning
# of a line, with the field's value in the same line or after the template; and a letter before a
# listed option.
_PARTS = re.compile(
    r"(?P<jinja>\{\{.*?\}\}|\{%.*?%\}|\{#.*?#\})"
    r"|(?P<line>\A\n*|\n+)"
    r"(?:(?P<name>[A-Z][\w'() -]*):(?P<blank>[ \t]*)(?=\{\{|\{%|\Z)|(?P<letter>[A-Z])\. )",
    re.DOTALL,
)


@dataclass(frozen=True)
class Template:
    """The settings of a task that a format changes."""

    text: str  # the Jinja template of a document
    before_answer: str  # the text between the query and its answer
    between: str  # the text between demonstrations


@dataclass(frozen=True)
class Format:
    """How names of fields are written, and the separators."""

    casing: Callable[[str], str]
    after_name: str
    between_fields: str
    between_demonstrations: str
    letter: str

    def of(self, template: Template) -> Template:
        """The template in this format."""
        ends_in_name = False

        def part(match: re.Match[str]) -> str:
            nonlocal ends_in_name
            if match["jinja"]:
                return match[0]
            if match["letter"]:  # every option stays in a separate line
                return f"{match['line']}{self.letter.format(match['letter'])} "
            line = match["line"]
            # The line breaks before the first field, and blank lines, are no separators of fields.
            if line == "\n" and match.start():
                line = self.between_fields
            ends_in_name = match.end() == len(template.text)
            return line + self.casing(match["name"]) + self.after_name

        text = _PARTS.sub(part, template.text)
        if not ends_in_name:
            return Template(text, template.before_answer, self.between_demonstrations)
        # The blanks before an answer become lm-eval's `target_delimiter`, as in the task itself.
        shown = text.rstrip(" \t\n")
        return Template(shown, text[len(shown) :], self.between_demonstrations)


@functools.cache
def _formats() -> list[Format]:
    """All formats, in a random order that is the same in every process."""
    grid = itertools.product(
        _CASINGS, _AFTER_NAMES, _BETWEEN_FIELDS, _BETWEEN_DEMONSTRATIONS, _LETTERS
    )
    # If a line break ends a demonstration, no field may end with a line break.
    formats = []
    for values in grid:
        made = Format(*values)
        ends_lines = "\n" in made.between_fields + made.after_name
        if not (ends_lines and made.between_demonstrations == "\n"):
            formats.append(made)
    Random(0).shuffle(formats)
    return formats


def format_of(template: Template, number: int) -> Format | None:
    """The format with this number; None for 0, which is the task's template itself.

    Different numbers change the template in different ways.

    Raises:
        InputError: no line of the template is a `Field: value`, or the template has fewer formats.
    """
    if number == 0:
        return None
    if not any(match["name"] for match in _PARTS.finditer(template.text)):
        raise InputError(
            f"the template {template.text[:60]!r} has no line `Field: value` that a format could "
            "change."
        )
    known = {template}
    for candidate in _formats():
        known.add(candidate.of(template))
        if len(known) > number:
            return candidate
    raise InputError(f"its template has {len(known) - 1} other formats: give a smaller number.")
