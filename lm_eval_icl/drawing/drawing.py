"""Prepares a drawing of the layouts that a method runs: which token sees which, and at which position.

`lm-eval-icl show METHOD` prints it (`terminal`), or saves a picture with `--output FILE.svg` or `FILE.png` (`picture`).
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import json
import sys
import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lm_eval_icl.errors import InputError, naming
from lm_eval_icl.methods.base import Method
from lm_eval_icl.prompts.layouts import Layout
from lm_eval_icl.prompts.prompt import FewShotPrompt
from lm_eval_icl.prompts.tokens import Context, PromptTokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# How many tokens a row may have; with more, single cells could not be told apart.
LIMIT = 200
_LABEL = 24  # the most characters of a token's label


@dataclass(frozen=True)
class Parts:
    """A tokenized prompt with its answer."""

    context: Context
    query: tuple[int, ...]
    answer: tuple[int, ...]
    reads: dict[int, str]  # token id -> its text; empty for the example, whose tokens have no text
    note: str = ""  # to write under the drawing


@dataclass(frozen=True)
class Drawing:
    """What a method runs for a prompt."""

    name: str
    arguments: str
    passes: list[tuple[str, Layout]]  # for every forward pass its title and its layout
    reads: list[str]  # the texts of the prompt's tokens, to be indexed by `Layout.source`; "" for one without text
    notes: list[str]  # how to read the drawing


def example(shots: int) -> Parts:
    """A prompt of tokens without text: prefix 2 tokens, demonstrations 3, 2, 4, 3, ..., query 2, answer 2.

    Raises:
        InputError: `shots` is negative, or too large to draw.
    """
    if shots < 0:
        raise InputError(f"--shots {shots}: must be 0 or more.")
    if shots > LIMIT:
        raise InputError(f"--shots {shots}: more than the {LIMIT} tokens that can be told apart: lower --shots.")
    ids = itertools.count()

    def part(length: int) -> tuple[int, ...]:
        return tuple(itertools.islice(ids, length))

    context = Context(part(2), tuple(part((3, 2, 4)[i % 3]) for i in range(shots)))
    return Parts(context, part(2), part(2), {})


def read_prompt(source: str, tokenizer: PreTrainedTokenizerBase, method: Method) -> Parts:
    """Read a prompt with its parts, and tokenize it as a run does.

    Args:
        source: a JSON file, or "-" for standard input: {"prefix": "...", "demonstrations": ["...", ...],
            "query": "...", "answer": "..."}, each with its exact blanks and line breaks. Prefix and answer may be
            left out.

    Raises:
        InputError: the file has another form, or the tokenizer or the method cannot use the prompt.
    """
    form = 'give {"prefix": "...", "demonstrations": ["...", ...], "query": "...", "answer": "..."}'
    with naming(f"--prompt {source}"):
        try:
            text = sys.stdin.read() if source == "-" else Path(source).read_text(encoding="utf-8")
            contents = json.loads(text)
        except (OSError, ValueError) as error:
            raise InputError(f"cannot be read as JSON ({' '.join(str(error).split())}).") from error
        if not isinstance(contents, dict):
            raise InputError(f"not an object: {form}.")
        parts = {"prefix": "", "answer": "", **contents}
        for name in ("prefix", "demonstrations", "query", "answer"):
            if name not in parts:
                raise InputError(f"{name!r} is missing, and parts are not guessed: {form}.")
            kind, texts = ("a list of texts", parts[name]) if name == "demonstrations" else ("a text", [parts[name]])
            if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
                raise InputError(f"{name!r} is not {kind}.")
            if any("\ud800" <= character <= "\udfff" for text in texts for character in text):
                raise InputError(f"{name!r} has half a surrogate pair in it, which is no character.")
        if unknown := sorted(parts.keys() - {"prefix", "demonstrations", "query", "answer"}):
            raise InputError(f"unknown part {unknown[0]!r}: {form}.")
        prompt = FewShotPrompt(parts["prefix"], parts["demonstrations"], parts["query"])
        if not prompt.strip():
            raise InputError("the prompt is empty.")
        prompts = PromptTokenizer(tokenizer, by_part=method.treats_demonstrations_alike, canonical=method.invariant)
        prompt, answer = prompts.arranged(prompt), parts["answer"]
        tokens, ids = prompts.pair(prompt, answer) if answer else (prompts.to_continue(prompt), ())
    context, query = tokens.context, tokens.query
    reads = {
        id: visible(str(tokenizer.decode([id], clean_up_tokenization_spaces=False)))
        for id in {*context.tokens, *query, *ids}
    }
    note = "The demonstrations stand in canonical order (sorted), as they run." if method.invariant else ""
    return Parts(context, query, ids, reads, note)


def visible(text: str) -> str:
    """A token's text as a label on one line. What is longer than `_LABEL` characters is cut, and ends with "…".

    Blanks, and characters that are invisible or that control a terminal or the direction of the text, are replaced by
    visible ones.
    """
    named = {"\n": "⏎", "\t": "⇥", " ": "␣"}
    # Controls, formats (direction marks, joiners), private and unassigned code points, separators.
    hidden = {"Cc", "Cf", "Co", "Cn", "Cs", "Zl", "Zp", "Zs"}

    def one(character: str) -> str:
        kind = unicodedata.category(character)
        return named.get(character) or (f"\\u{{{ord(character):x}}}" if kind in hidden else character)

    pieces = [one(character) for character in text]
    if text and unicodedata.category(text[0]).startswith("M"):
        pieces.insert(0, "◌")  # a combining accent would be drawn on the character before the label
    ends = list(itertools.accumulate(map(len, pieces)))
    whole = not ends or ends[-1] <= _LABEL
    return "".join(pieces if whole else [*pieces[: bisect.bisect_left(ends, _LABEL)], "…"])


def draw(method: Method, parts: Parts) -> Drawing:
    """The drawing of what `method` runs for a prompt.

    Raises:
        InputError: the method refuses this number of demonstrations, or the prompt is too long to draw.
    """
    context, shots = parts.context, len(parts.context.demonstrations)
    if why := method.why_not(shots):
        raise InputError(f"{method.name}: {why}.")
    demonstrations = (len(context.tokens) - len(context.prefix)) * int(method.repeat)
    longest = len(context.prefix) + demonstrations + len(parts.query) + len(parts.answer)
    if longest <= LIMIT:  # tested before layouts are made, whose masks have the size of the squared length
        passes = method.passes(len(context.prefix), context.lengths, len(parts.query), len(parts.answer))
        longest = max(len(layout) for _, layout in passes)
    if longest > LIMIT:
        raise InputError(
            f"{longest} tokens in a row, and {LIMIT} at most are drawn: fewer --shots, or a shorter --prompt."
        )

    names = {block.name for _, layout in passes for block in layout.blocks}
    notes = [
        "A row shows which tokens its token attends to, in the colours of their blocks: P prefix, D demonstrations, "
        "Q query, A answer.",
        "The model gets no positional information." if method.positions == "none" else "Numbers are positions.",
    ]
    if any(name.endswith("'") for name in names):
        notes.append("D1' is the second copy of D1. Hatched: entries to which query and answer do not attend.")
    if "M" in names:
        notes.append("M is the memory: keys and values, which do not run again.")
    if f"D{shots + 1}" in names:
        notes.append(f"D{shots + 1} is D1 again (repeat={method.repeat}).")
    if any("\ufffd" in text for text in parts.reads.values()):
        notes.append("\ufffd is a token that is part of a character.")
    arguments = {field.name: getattr(method, field.name) for field in dataclasses.fields(method)}
    # None: the value is chosen when the method meets a model (`Method.bind`), and there is none here.
    written = ", ".join(f"{name}={value}" for name, value in arguments.items() if value is not None)
    reads = [parts.reads.get(token, "") for token in (*context.tokens, *parts.query, *parts.answer)]
    return Drawing(method.name, written, passes, reads, [*notes, *filter(None, [parts.note])])


def columns(layout: Layout) -> list[tuple[str, range]]:
    """The names of the blocks, each with the indices of the block's tokens. Adjacent memory entries are one block."""
    lengths = [
        (name, sum(block.length for block in blocks))
        for name, blocks in itertools.groupby(layout.blocks, key=lambda block: block.name)
    ]
    ends = itertools.accumulate(length for _, length in lengths)
    return [(name, range(end - length, end)) for (name, length), end in zip(lengths, ends, strict=True)]


def rows(layout: Layout) -> list[tuple[str, list[int]]]:
    """The blocks whose tokens attend, as in `columns`: all but the entries of a memory."""
    return [(name, list(block)) for name, block in columns(layout) if name != "M"]


# After Okabe and Ito's palette for colour-blind readers. The demonstrations use their colours in turn.
_COLOURS = {"P": "#8c8c8c", "M": "#5a5a5a", "Q": "#d55e00", "A": "#44369c"}
_DEMONSTRATIONS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9")


def colour(block: str) -> str:
    """The colour of a block, given its name, as "#rrggbb"."""
    if block in _COLOURS:
        return _COLOURS[block]
    return _DEMONSTRATIONS[(int(block.strip("D'")) - 1) % len(_DEMONSTRATIONS)]
