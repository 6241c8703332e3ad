"""Plausible formats of one template of a task, after Sclar et al. (ICLR 2024, "FormatSpread").

A template of the form `Review: {{text}}\\nSentiment:` has names of fields, separators between a name and its value,
between fields and between demonstrations, and in some tasks letters that options are listed by. A format replaces
these, and no text of a document, no answer and no description.
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
# What Jinja renders, which stays; a name at the beginning of a line, and where its value begins: in the same line, or
# behind the template; a letter by which an option is listed.
_PARTS = re.compile(
    r"(?P<jinja>\{\{.*?\}\}|\{%.*?%\}|\{#.*?#\})"
    r"|(?P<line>\A\n*|\n+)(?:(?P<name>[A-Z][\w'() -]*):(?P<blank>[ \t]*)(?=\{\{|\{%|\Z)|(?P<letter>[A-Z])\. )",
    re.DOTALL,
)


@dataclass(frozen=True)
class Template:
    """What a format changes of a task: how a document is rendered, what stands between the query and its answer, and
    what between demonstrations."""

    text: str  # as Jinja
    before_answer: str
    between: str


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
            if match["letter"]:  # options stay in lines of their own
                return f"{match['line']}{self.letter.format(match['letter'])} "
            # What stands before the first field, or a blank line, is no separator of fields.
            line = self.between_fields if match["line"] == "\n" and match.start() else match["line"]
            ends_in_name = match.end() == len(template.text)
            return line + self.casing(match["name"]) + self.after_name

        text = _PARTS.sub(part, template.text)
        if not ends_in_name:
            return Template(text, template.before_answer, self.between_demonstrations)
        # The blanks before an answer are lm-eval's delimiter, as in the task's own template.
        shown = text.rstrip(" \t\n")
        return Template(shown, text[len(shown) :], self.between_demonstrations)


@functools.cache
def _formats() -> list[Format]:
    """All formats in a random order, which is always the same."""
    grid = itertools.product(_CASINGS, _AFTER_NAMES, _BETWEEN_FIELDS, _BETWEEN_DEMONSTRATIONS, _LETTERS)
    # Where a line ends a demonstration, it ends no field.
    formats = [made for values in grid if not ((made := Format(*values)).between_demonstrations == "\n"
               and "\n" in made.between_fields + made.after_name)]  # fmt: skip
    Random(0).shuffle(formats)
    return formats


def format_of(template: Template, number: int) -> Format | None:
    """The format of this number: None for 0, the task's own. Different numbers give the template different forms.

    Raises:
        InputError: the template has no `Field: value` in a line of its own, or there are fewer formats of it.
    """
    if number == 0:
        return None
    if not any(match["name"] for match in _PARTS.finditer(template.text)):
        raise InputError(f"the template {template.text[:60]!r} has no `Field: value` in a line of its own to vary.")
    known = {template}
    for each in _formats():
        if (variant := each.of(template)) not in known:
            known.add(variant)
            if len(known) > number:
                return each
    raise InputError(f"its template has {len(known) - 1} other formats: give a smaller number.")
