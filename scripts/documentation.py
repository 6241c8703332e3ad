"""For development: the site's extensions (zensical.toml), which make tables of commands and patches.

Made and checked by: make site
"""

from __future__ import annotations

import argparse
import contextlib
import html
import importlib
import posixpath
from collections.abc import Iterator
from typing import Any, NoReturn
from xml.etree.ElementTree import Element

from markdown import Extension, Markdown
from markdown.treeprocessors import Treeprocessor
from zensical.extensions.context import ContextPreprocessor

from lm_eval_icl.cli import COMMANDS, OneLine
from lm_eval_icl.harness.patches import PATCHES


class _Complete(Exception):
    """A command has given its parser all arguments."""


class _Parser(OneLine):
    """Parses nothing, so that the rest of a command, which may take hours, is not run."""

    def parse_args(self, *_: Any, **__: Any) -> NoReturn:
        raise _Complete


def command_fence(source: str, *_: Any, **__: Any) -> str:
    """A fence `command`, which holds the name of one of our commands: its description, and a table of its arguments.

    It is a formatter of `pymdownx.superfences`; the other arguments that it is called with make no difference.
    """
    name = source.strip()
    parser = _Parser(prog=f"lm-eval-icl {name}", allow_abbrev=False)
    with contextlib.suppress(_Complete):
        importlib.import_module(f"lm_eval_icl.cli.{name}").command(parser, [])
    return f'<div class="command">{"".join(_described(parser, COMMANDS[name]))}</div>'


def _described(parser: argparse.ArgumentParser, what: str) -> Iterator[str]:
    yield f"<p>{html.escape(parser.description or what.capitalize() + '.')}</p>"
    formatter = argparse.HelpFormatter(parser.prog)
    rows = []
    for action in parser._actions:
        if isinstance(action, (argparse._HelpAction, argparse._SubParsersAction)):
            continue
        shown = ", ".join(action.option_strings)
        value = (
            ""
            if action.nargs == 0
            else formatter._format_args(action, str(action.metavar or action.dest.upper()))
        )
        what = formatter._expand_help(action) if action.help else ""
        rows.append(
            f"<tr><td><code>{html.escape(f'{shown} {value}'.strip())}</code></td><td>{html.escape(what)}</td></tr>"
        )
    if rows:
        yield "<table><thead><tr><th>argument</th><th>what it is</th></tr></thead><tbody>"
        yield from (*rows, "</tbody></table>")
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for choice, inner in zip(action._choices_actions, action.choices.values(), strict=True):
                yield f"<h3><code>{html.escape(inner.prog)}</code></h3>"
                yield from _described(inner, choice.help or "")


def patches_fence(*_: Any, **__: Any) -> str:
    """A fence `patches`, which is empty, becomes the table of all changes to lm-eval."""
    heads = ("place in lm-eval", "what the patch does", "in which runs", "needed by", "until")
    rows = [
        (
            f"<code>{html.escape(p.place)}</code>",
            *map(html.escape, (p.what, p.concerns, p.door, p.until)),
        )
        for p in PATCHES
    ]
    body = "".join(f"<tr><td>{'</td><td>'.join(row)}</td></tr>" for row in rows)
    return f"<table><thead><tr><th>{'</th><th>'.join(heads)}</th></tr></thead><tbody>{body}</tbody></table>"


class _LinksInside(Treeprocessor):
    """Replaces a link to a file outside of docs/ by its text, since the link only works in a checkout."""

    def run(self, root: Element) -> None:
        context = ContextPreprocessor.from_markdown(self.md)
        if context is None:
            return
        for link in root.iter("a"):
            target = link.get("href", "")
            if (
                ":" not in target
                and posixpath.normpath(posixpath.join(context.page.path, "..", target))[:2] == ".."
            ):
                link.tag = "span"
                link.attrib.clear()


class LinksInside(Extension):
    """Removes links that lead out of the site's folder."""

    def extendMarkdown(self, md: Markdown) -> None:
        md.treeprocessors.register(_LinksInside(md), "links_inside", 15)


def makeExtension(**_: Any) -> LinksInside:
    """The name by which Markdown finds an extension in a module."""
    return LinksInside()
