"""Draws the layout that a method runs: which token sees which, at which position.

`lm-eval-icl show METHOD` prints it (`lm_eval_icl.terminal`); with `--output FILE.svg` or `FILE.png` it is a picture
(`lm_eval_icl.picture`).
"""

from __future__ import annotations

import bisect
import dataclasses
import difflib
import importlib
import inspect
import itertools
import json
import sys
import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.utils import simple_parse_args_string
from transformers import AutoTokenizer

from lm_eval_icl import methods
from lm_eval_icl.errors import InputError
from lm_eval_icl.layouts import Layout
from lm_eval_icl.methods import Method
from lm_eval_icl.prompts import FewShotPrompt
from lm_eval_icl.requests import RequestTokenizer
from lm_eval_icl.tokens import Context

METHODS: dict[str, type[Method]] = {
    name.lower(): getattr(methods, name) for name in methods.__all__ if name != "Method"
}
# Tokens in a row; beyond that nobody tells one cell from the next.
LIMIT = 200


def refusal(message: str) -> InputError:
    return InputError(f"lm-eval-icl: show: {message}")


@dataclass(frozen=True)
class Parts:
    """A tokenized prompt with its answer.

    Attributes:
        reads: token id -> its text; empty for the example, whose tokens are none.
        note: what to say about it under the drawing.
    """

    context: Context
    query: tuple[int, ...]
    answer: tuple[int, ...]
    reads: dict[int, str]
    note: str = ""


@dataclass(frozen=True)
class Drawing:
    """A method on a prompt: the title, every pass with its own title, the tokens' texts, how to read it."""

    name: str
    arguments: str
    passes: list[tuple[str, Layout]]
    reads: dict[int, str]
    notes: list[str]


def make_method(name: str, arguments: str = "") -> Method:
    """The method of `--model NAME`, or the class MODULE:CLASS, with arguments written as in --model_args.

    Raises:
        InputError: there is none of that name, or an argument is not its own or outside its range.
    """
    if ":" in name:
        cls = _imported(name)
    elif name in METHODS:
        cls = METHODS[name]
    else:
        near = difflib.get_close_matches(name.lower(), METHODS, n=1)
        known = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(METHODS)}."
        raise refusal(f"unknown method {name!r}: {known}")

    takes = [field.name for field in dataclasses.fields(cls)]
    given = simple_parse_args_string(arguments)
    for argument, value in given.items():
        if argument not in takes:
            owners = [n for n, m in METHODS.items() if argument in {field.name for field in dataclasses.fields(m)}]
            whose = f"belongs to {owners[0]}, not to {name}" if owners else f"is no argument of {name}"
            raise refusal(f"--args: {argument!r} {whose}, which takes {', '.join(takes)}.")
        if value == "":
            raise refusal(f"--args: {argument!r} has no value: write {argument}=VALUE.")
    try:
        return cls(**given)
    except InputError as error:
        raise refusal(f"--args: {str(error).removeprefix('lm-eval-icl: ')}") from error


def _imported(path: str) -> type[Method]:
    module, _, name = path.partition(":")
    sys.path.insert(0, "")  # the console script's own folder stands there, not the working directory
    try:
        cls = getattr(importlib.import_module(module), name)
    except Exception as error:
        what = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise refusal(f"{path!r} cannot be imported ({what}): give MODULE:CLASS, a module seen from here.") from error
    finally:
        sys.path.remove("")
    if not (isinstance(cls, type) and issubclass(cls, Method)):
        raise refusal(f"{path!r} is not a class that derives from lm_eval_icl.methods.Method.")
    if inspect.isabstract(cls):
        raise refusal(f"{path!r} has no {' and no '.join(sorted(cls.__abstractmethods__))}: give it one.")
    return cls


def example(shots: int) -> Parts:
    """Tokens that are only counted: prefix 2, demonstrations 3, 2, 4, 3, ..., query 2, answer 2.

    Raises:
        InputError: fewer than no demonstration, or too many to draw.
    """
    if shots < 0:
        raise refusal(f"--shots {shots}: must be 0 or more.")
    if shots > LIMIT:
        raise refusal(f"--shots {shots}: more than the {LIMIT} tokens that can be told apart: lower --shots.")
    ids = itertools.count()

    def part(length: int) -> tuple[int, ...]:
        return tuple(itertools.islice(ids, length))

    context = Context(part(2), tuple(part((3, 2, 4)[i % 3]) for i in range(shots)))
    return Parts(context, part(2), part(2), {})


def read_prompt(source: str, pretrained: str, method: Method) -> Parts:
    """A prompt with its parts, tokenized by the code that runs.

    Args:
        source: a JSON file, or "-" for standard input: {"prefix": "...", "demonstrations": ["...", ...],
            "query": "...", "answer": "..."}, each with the blanks and line breaks that stand there. Prefix and
            answer may be left out.
        pretrained: whose tokenizer.

    Raises:
        InputError: it is no such file, there is no tokenizer, or the method cannot use the prompt.
    """
    where = f"--prompt {source}"
    try:
        text = sys.stdin.read() if source == "-" else Path(source).read_text(encoding="utf-8")
        given = json.loads(text)
    except (OSError, ValueError) as error:
        raise refusal(f"{where}: cannot be read as JSON ({' '.join(str(error).split())}).") from error
    prompt, answer = _parts(where, given)
    try:
        tokenizer = AutoTokenizer.from_pretrained(pretrained)
    except Exception as error:  # whatever the Hub, a folder or a broken file makes of it
        what = (str(error) or type(error).__name__).splitlines()[0]
        raise refusal(f"--pretrained {pretrained}: no tokenizer could be loaded from there ({what}).") from error
    start = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id  # as `HFLM` has it
    if start is None:
        raise refusal(f"--pretrained {pretrained}: its tokenizer names no BOS and no EOS token to begin with.")
    try:
        tokenize = RequestTokenizer(
            tokenizer, start, None, 1, by_part=method.symmetric_mask, canonical=method.invariant
        )
        if answer:
            request = tokenize.loglikelihood(Instance("loglikelihood", {}, (prompt, answer), 0))
        else:
            request = tokenize.generate_until(Instance("generate_until", {}, (prompt, {}), 0))
    except InputError as error:
        what = str(error.__cause__ or error).removeprefix("lm-eval-icl: ")
        raise refusal(f"{where}: {what}") from error
    context, query = request.prompt.context, request.prompt.query
    ids = {*context.tokens, *query, *request.answer}
    reads = {id: visible(str(tokenizer.decode([id], clean_up_tokenization_spaces=False))) for id in ids}
    note = "The demonstrations stand in canonical order (sorted), as they run." if method.invariant else ""
    return Parts(context, query, request.answer, reads, note)


def _parts(where: str, given: Any) -> tuple[FewShotPrompt, str]:
    """Prompt and answer of a --prompt file."""
    form = 'give {"prefix": "...", "demonstrations": ["...", ...], "query": "...", "answer": "..."}'
    if not isinstance(given, dict):
        raise refusal(f"{where}: not an object: {form}.")
    parts = {"prefix": "", "answer": "", **given}
    for name in ("prefix", "demonstrations", "query", "answer"):
        if name not in parts:
            raise refusal(f"{where}: {name!r} is missing, and parts are not guessed: {form}.")
        texts = parts[name] if name == "demonstrations" else [parts[name]]
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise refusal(f"{where}: {name!r} is not {'a list of texts' if name == 'demonstrations' else 'a text'}.")
        if any("\ud800" <= character <= "\udfff" for text in texts for character in text):
            raise refusal(f"{where}: {name!r} has half a surrogate pair in it, which is no character.")
    if unknown := sorted(parts.keys() - {"prefix", "demonstrations", "query", "answer"}):
        raise refusal(f"{where}: unknown part {unknown[0]!r}: {form}.")
    prompt = FewShotPrompt(parts["prefix"], parts["demonstrations"], parts["query"])
    if not prompt.strip():
        raise refusal(f"{where}: the prompt is empty.")
    return prompt, parts["answer"]


def visible(text: str, limit: int = 24) -> str:
    """A token's text as a label: one line, nothing hidden, nothing that steers a terminal or a reader's eye."""
    named = {"\n": "⏎", "\t": "⇥", " ": "␣"}
    # Controls, formats (direction marks, joiners), private and unassigned code points, separators.
    hidden = {"Cc", "Cf", "Co", "Cn", "Cs", "Zl", "Zp", "Zs"}

    def one(character: str) -> str:
        kind = unicodedata.category(character)
        return named.get(character) or (f"\\u{{{ord(character):x}}}" if kind in hidden else character)

    pieces = [one(character) for character in text]
    if text and unicodedata.category(text[0]).startswith("M"):
        pieces.insert(0, "◌")  # an accent by itself would sit on whatever stands before it
    ends = list(itertools.accumulate(map(len, pieces)))
    whole = not ends or ends[-1] <= limit
    return "".join(pieces if whole else [*pieces[: bisect.bisect_left(ends, limit)], "…"])


def draw(method: Method, parts: Parts) -> Drawing:
    """What `method` runs for a prompt, ready to be drawn.

    Raises:
        InputError: the method refuses so many demonstrations, or the prompt is too long to draw.
    """
    context, shots = parts.context, len(parts.context.demonstrations)
    if why := method.refuse(shots):
        raise refusal(f"{method.name}: {why}.")
    demonstrations = (len(context.tokens) - len(context.prefix)) * int(method.repeat)
    longest = len(context.prefix) + demonstrations + len(parts.query) + len(parts.answer)
    if longest <= LIMIT:  # and not a matrix of its square before that is known
        passes = method.passes(context, parts.query, parts.answer)
        longest = max(len(layout.tokens) for _, layout in passes)
    if longest > LIMIT:
        raise refusal(
            f"{longest} tokens in a row, and {LIMIT} at most are drawn: fewer --shots, or a shorter --prompt."
        )

    names = {name for _, layout in passes for name, _ in layout.blocks}
    notes = [
        "A row: what its token sees, in the colour of the block it belongs to. Numbers: positions. "
        "P prefix, D demonstrations, Q query, A answer."
    ]
    if any(name.endswith("'") for name in names):
        notes.append("D1' is the second copy of D1. Hatched: entries that query and answer do not see.")
    if "M" in names:
        notes.append("M is the memory: keys and values, which do not run again.")
    if f"D{shots + 1}" in names:
        notes.append(f"D{shots + 1} is D1 again (repeat={method.repeat}).")
    if any("\ufffd" in text for text in parts.reads.values()):
        notes.append("\ufffd is a token that is part of a character.")
    if method.positions == "none":
        notes.append("No positional information: all positions are 0.")
    arguments = {field.name: getattr(method, field.name) for field in dataclasses.fields(method)}
    written = ", ".join(f"{name}={value}" for name, value in arguments.items())
    return Drawing(method.name, written, passes, parts.reads, [*notes, *filter(None, [parts.note])])


def columns(layout: Layout) -> list[tuple[str, range]]:
    """The blocks, each with the indices of its tokens."""
    ends = itertools.accumulate(length for _, length in layout.blocks)
    return [(name, range(end - length, end)) for (name, length), end in zip(layout.blocks, ends, strict=True)]


def rows(layout: Layout) -> list[tuple[str, list[int]]]:
    """The blocks that look: a memory's entries do not."""
    looks = layout.sees.any(dim=1).tolist()
    looking = [(name, [i for i in block if looks[i]]) for name, block in columns(layout)]
    return [(name, block) for name, block in looking if block]


# After Okabe and Ito's palette for colour-blind readers; the demonstrations take turns.
_COLOURS = {"P": "#8c8c8c", "M": "#5a5a5a", "Q": "#d55e00", "A": "#44369c"}
_DEMONSTRATIONS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9")


def colour(block: str) -> str:
    if block in _COLOURS:
        return _COLOURS[block]
    return _DEMONSTRATIONS[(int(block.strip("D'")) - 1) % len(_DEMONSTRATIONS)]
