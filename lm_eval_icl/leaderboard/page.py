"""The board as a page: one HTML file that loads nothing from any server and can be read without
JavaScript.

The table is in the HTML itself. The contents of opened cells are JSON beside it, for the script
(`page.js`). Result files come from strangers, so every string is data: the template escapes all
strings, the script sets text and no HTML, and the page's content security policy lets only our
script run.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import itertools
import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from lm_eval_icl.decisions.rules import RULES
from lm_eval_icl.leaderboard import card, costs, numbers, opened
from lm_eval_icl.leaderboard.headline import Axis, headline
from lm_eval_icl.leaderboard.opened import MARKS, clean
from lm_eval_icl.methods import NAMES
from lm_eval_icl.results.board import Board, rule_in_words

SENTENCE = 20_000  # the most characters of a sentence of the summary


def page(board: Board, figures: Mapping[str, str], samples: Mapping[str, Any] | None = None) -> str:
    """The page as HTML.

    Args:
        figures: title -> the text of an SVG file, which is put into the page as an image.
        samples: the documents behind some cells (`samples.collected`).
    """
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_finalize,
    )
    template = environment.from_string(_text("leaderboard", "page.html"))
    script = _text("leaderboard", "page.js")
    script_hash = _base64(hashlib.sha256(script.encode()).digest())
    content = {**opened.data(board), "samples": samples}
    images = {title: _base64(svg.encode()) for title, svg in figures.items()}
    summary = [Markup.escape(clean(sentence, SENTENCE)) for sentence in board.summary]
    return template.render(
        card=card,
        costs=costs,
        numbers=numbers,
        opened=opened,
        board=board,
        rule_in_words=rule_in_words,
        style=Markup(_text("leaderboard", "page.css")),
        script=Markup(script),
        script_hash=script_hash,
        figures=images,
        content=content,
        data=Markup(embed(content)),
        top=headline(board),
        axis=Axis(board),
        summary=summary,
        explained=_explained(board),
        **_names(board),
    )


def _text(room: str, name: str) -> str:
    """The text of a file of this package."""
    file = resources.files(f"lm_eval_icl.{room}") / name
    return file.read_text(encoding="utf-8")


def _explained(board: Board) -> dict[str, str]:
    """Method -> the first paragraph of its class's docstring; decision rule -> the first three
    paragraphs, with its formula. Classes of methods are read and not imported, which would need
    torch."""
    texts = {}
    for entry in board.entries:
        if entry.method in NAMES:
            for node in ast.parse(_text("methods", f"{entry.method}.py")).body:
                if isinstance(node, ast.ClassDef) and node.name.lower() == entry.method:
                    texts[entry.method] = str(ast.get_docstring(node)).partition("\n\n")[0]
        for part in (entry.rule or "").split("+"):
            rule = RULES.get(part.partition(":")[0])
            if rule is not None:
                paragraphs = str(rule.__doc__).split("\n\n")
                texts[f"decide: {rule.name}"] = " ".join(paragraphs[:3])
    return {name: " ".join(text.split()) for name, text in texts.items()}


def _base64(content: bytes) -> Markup:
    return Markup(base64.b64encode(content).decode())


def _finalize(printed: Any) -> Any:
    """Clean every text that the template prints, except our own HTML. The template then escapes
    it."""
    if isinstance(printed, str) and not isinstance(printed, Markup):
        return clean(printed)
    return printed


def _names(board: Board) -> dict[str, Any]:
    """The marks and notes that the board's cells have, with their meanings."""
    marks_of_cells = []
    for entry in board.entries:
        for column in board.columns:
            if column.name in entry.cells:
                marks_of_cells.append(entry.cells[column.name].marks)
    marks = dict.fromkeys(itertools.chain(*marks_of_cells))
    notes = sorted(marks.keys() - MARKS.keys())
    notes.sort(key=len)
    note_numbers: dict[str, int] = {}
    for note in notes:
        # A group has the notes of its tasks, with the task's name.
        of_task = note.partition(": ")[2]
        next_number = len(set(note_numbers.values())) + 1
        note_numbers[note] = note_numbers.get(of_task, next_number)
    everywhere = set(marks).intersection(*marks_of_cells)
    return {
        "everywhere": everywhere,
        "meanings": {mark: MARKS[mark] for mark in marks if mark in MARKS},
        "note_numbers": note_numbers,
    }


def embed(content: Mapping[str, Any]) -> str:
    """Data as JSON that may stand in a script element."""
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
