"""Draws the layout that a method runs: which token sees which, at which position.

`lm-eval-icl show METHOD` prints it; with `--output FILE.svg` or `FILE.png` it is a picture.
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
import textwrap
import unicodedata
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_eval.api.instance import Instance
from lm_eval.utils import simple_parse_args_string
from rich.text import Text
from transformers import AutoTokenizer

from lm_eval_icl import methods
from lm_eval_icl.errors import InputError
from lm_eval_icl.layouts import Layout
from lm_eval_icl.methods import Method
from lm_eval_icl.prompts import FewShotPrompt
from lm_eval_icl.requests import RequestTokenizer
from lm_eval_icl.tokens import Context

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

METHODS: dict[str, type[Method]] = {
    name.lower(): getattr(methods, name) for name in methods.__all__ if name != "Method"
}
# Tokens in a row; beyond that nobody tells one cell from the next.
LIMIT = 200


def _error(message: str) -> InputError:
    return InputError(f"lm-eval-icl: show: {message}")


# What is drawn.


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
        raise _error(f"unknown method {name!r}: {known}")

    takes = [field.name for field in dataclasses.fields(cls)]
    given = simple_parse_args_string(arguments)
    for argument, value in given.items():
        if argument not in takes:
            owners = [n for n, m in METHODS.items() if argument in {field.name for field in dataclasses.fields(m)}]
            whose = f"belongs to {owners[0]}, not to {name}" if owners else f"is no argument of {name}"
            raise _error(f"--args: {argument!r} {whose}, which takes {', '.join(takes)}.")
        if value == "":
            raise _error(f"--args: {argument!r} has no value: write {argument}=VALUE.")
    try:
        return cls(**given)
    except InputError as error:
        raise _error(f"--args: {str(error).removeprefix('lm-eval-icl: ')}") from error


def _imported(path: str) -> type[Method]:
    module, _, name = path.partition(":")
    sys.path.insert(0, "")  # the console script's own folder stands there, not the working directory
    try:
        cls = getattr(importlib.import_module(module), name)
    except Exception as error:
        what = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise _error(f"{path!r} cannot be imported ({what}): give MODULE:CLASS, a module seen from here.") from error
    finally:
        sys.path.remove("")
    if not (isinstance(cls, type) and issubclass(cls, Method)):
        raise _error(f"{path!r} is not a class that derives from lm_eval_icl.methods.Method.")
    if inspect.isabstract(cls):
        raise _error(f"{path!r} has no {' and no '.join(sorted(cls.__abstractmethods__))}: give it one.")
    return cls


def example(shots: int) -> Parts:
    """Tokens that are only counted: prefix 2, demonstrations 3, 2, 4, 3, ..., query 2, answer 2.

    Raises:
        InputError: fewer than no demonstration, or too many to draw.
    """
    if shots < 0:
        raise _error(f"--shots {shots}: must be 0 or more.")
    if shots > LIMIT:
        raise _error(f"--shots {shots}: more than the {LIMIT} tokens that can be told apart: lower --shots.")
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
        raise _error(f"{where}: cannot be read as JSON ({' '.join(str(error).split())}).") from error
    prompt, answer = _parts(where, given)
    try:
        tokenizer = AutoTokenizer.from_pretrained(pretrained)
    except Exception as error:  # whatever the Hub, a folder or a broken file makes of it
        what = (str(error) or type(error).__name__).splitlines()[0]
        raise _error(f"--pretrained {pretrained}: no tokenizer could be loaded from there ({what}).") from error
    start = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id  # as `HFLM` has it
    if start is None:
        raise _error(f"--pretrained {pretrained}: its tokenizer names no BOS and no EOS token to begin with.")
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
        raise _error(f"{where}: {what}") from error
    context, query = request.prompt.context, request.prompt.query
    ids = {*context.tokens, *query, *request.answer}
    reads = {id: visible(str(tokenizer.decode([id], clean_up_tokenization_spaces=False))) for id in ids}
    note = "The demonstrations stand in canonical order (sorted), as they run." if method.invariant else ""
    return Parts(context, query, request.answer, reads, note)


def _parts(where: str, given: Any) -> tuple[FewShotPrompt, str]:
    """Prompt and answer of a --prompt file."""
    form = 'give {"prefix": "...", "demonstrations": ["...", ...], "query": "...", "answer": "..."}'
    if not isinstance(given, dict):
        raise _error(f"{where}: not an object: {form}.")
    parts = {"prefix": "", "answer": "", **given}
    for name in ("prefix", "demonstrations", "query", "answer"):
        if name not in parts:
            raise _error(f"{where}: {name!r} is missing, and parts are not guessed: {form}.")
        texts = parts[name] if name == "demonstrations" else [parts[name]]
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise _error(f"{where}: {name!r} is not {'a list of texts' if name == 'demonstrations' else 'a text'}.")
        if any("\ud800" <= character <= "\udfff" for text in texts for character in text):
            raise _error(f"{where}: {name!r} has half a surrogate pair in it, which is no character.")
    if unknown := sorted(parts.keys() - {"prefix", "demonstrations", "query", "answer"}):
        raise _error(f"{where}: unknown part {unknown[0]!r}: {form}.")
    prompt = FewShotPrompt(parts["prefix"], parts["demonstrations"], parts["query"])
    if not prompt.strip():
        raise _error(f"{where}: the prompt is empty.")
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
        raise _error(f"{method.name}: {why}.")
    demonstrations = (len(context.tokens) - len(context.prefix)) * int(method.repeat)
    longest = len(context.prefix) + demonstrations + len(parts.query) + len(parts.answer)
    if longest <= LIMIT:  # and not a matrix of its square before that is known
        passes = method.passes(context, parts.query, parts.answer)
        longest = max(len(layout.tokens) for _, layout in passes)
    if longest > LIMIT:
        raise _error(f"{longest} tokens in a row, and {LIMIT} at most are drawn: fewer --shots, or a shorter --prompt.")

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


def _columns(layout: Layout) -> list[tuple[str, range]]:
    """The blocks, each with the indices of its tokens."""
    ends = itertools.accumulate(length for _, length in layout.blocks)
    return [(name, range(end - length, end)) for (name, length), end in zip(layout.blocks, ends, strict=True)]


def _rows(layout: Layout) -> list[tuple[str, list[int]]]:
    """The blocks that look: a memory's entries do not."""
    looks = layout.sees.any(dim=1).tolist()
    rows = [(name, [i for i in block if looks[i]]) for name, block in _columns(layout)]
    return [(name, block) for name, block in rows if block]


# After Okabe and Ito's palette for colour-blind readers; the demonstrations take turns.
_COLOURS = {"P": "#8c8c8c", "M": "#5a5a5a", "Q": "#d55e00", "A": "#44369c"}
_DEMONSTRATIONS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9")


def _colour(block: str) -> str:
    if block in _COLOURS:
        return _COLOURS[block]
    return _DEMONSTRATIONS[(int(block.strip("D'")) - 1) % len(_DEMONSTRATIONS)]


# In a terminal.


@dataclass(frozen=True)
class Glyphs:
    """What cells and lines are made of."""

    seen: str
    unread: str
    unseen: str
    down: str
    across: str
    cross: str


UNICODE, ASCII = Glyphs("█", "▒", "·", "│", "─", "┼"), Glyphs("#", "+", ".", "|", "-", "+")


def as_text(drawing: Drawing, room: int | None = None, glyphs: Glyphs = UNICODE) -> Text:
    """The drawing as lines of text.

    Args:
        room: how wide the terminal is; a token is two characters wide, or one where two do not fit.

    Raises:
        InputError: one does not fit either.
    """
    needed = 0
    for cell in (2, 1):
        panels = [(title, list(_lines(layout, drawing.reads, cell, glyphs))) for title, layout in drawing.passes]
        needed = max(line.cell_len for _, lines in panels for line in lines)
        if room is None or needed <= room:
            break
    else:
        raise _error(f"{needed} columns are needed and the terminal has {room}: widen it, or give --output FILE.svg.")
    text = Text.assemble((drawing.name, "bold"), f"  {drawing.arguments}\n")
    for title, lines in panels:
        text.append("\n").append(f"{title}\n" if title else "", "italic").append_text(Text("\n").join(lines)).append(
            "\n"
        )
    text.append("\n" + "\n".join(drawing.notes).replace("Hatched", glyphs.unread))
    return text if glyphs is UNICODE else Text(text.plain.encode("ascii", "backslashreplace").decode())


def _lines(layout: Layout, reads: dict[int, str], cell: int, glyphs: Glyphs) -> Iterator[Text]:
    positions, sees, kept = layout.positions.tolist(), layout.sees.tolist(), set(layout.kept)
    blocks = _columns(layout)
    # A block is as wide as its tokens, or as its name.
    widths = [max(len(block) * cell, len(name)) for name, block in blocks]
    digits = len(str(max(positions)))
    gutter = max(len("position"), *(len(name) + digits + 1 for name, _ in blocks))

    def line(margin: str, cells: list[Text], end: str = "") -> Text:
        joined = Text(glyphs.down).join(cells)
        return Text.assemble(margin.rjust(gutter), " ", glyphs.down, joined, glyphs.down, end and f" {end}")

    def padded(text: Text, width: int) -> Text:
        text.pad_right(width - len(text))
        return text

    rule = glyphs.cross + glyphs.cross.join(glyphs.across * width for width in widths) + glyphs.cross
    names = zip(blocks, widths, strict=True)
    yield line("", [padded(Text(name, f"bold {_colour(name)}"), width) for (name, _), width in names])
    for digit in range(digits):  # positions are written downwards
        figures = [
            padded(Text("".join(str(positions[i]).rjust(digits)[digit].ljust(cell) for i in block)), width)
            for (_, block), width in zip(blocks, widths, strict=True)
        ]
        yield line("position" if digit == digits - 1 else "", figures)
    for name, rows in _rows(layout):
        yield Text(" " * (gutter + 1) + rule)
        for row in rows:
            cells = []
            for (column, block), width in zip(blocks, widths, strict=True):
                text = Text()
                for i in block:
                    if sees[row][i]:
                        text.append((glyphs.seen if i in kept else glyphs.unread) * cell, _colour(column))
                    else:
                        text.append(glyphs.unseen.ljust(cell), "dim")
                cells.append(padded(text, width))
            head = name.ljust(gutter - digits) if row == rows[0] else ""
            yield line(f"{head}{positions[row]:>{digits}}", cells, reads.get(layout.tokens[row], ""))


# As a picture. All lengths are in inches, from the upper left corner.

_BAND, _NUMBERS, _HEAD, _BARS = 0.36, 0.3, 0.32, 0.46
_PAGE = 15.0


def check_output(path: Path) -> str:
    """The kind of picture that a file is to be, svg or png.

    Raises:
        InputError: it is another kind, or there is no such folder.
    """
    kind = path.suffix.lower().removeprefix(".")
    if kind not in ("svg", "png"):
        raise _error(f"--output {path}: must end in .svg or .png.")
    if not path.parent.is_dir():
        raise _error(f"--output {path}: there is no folder {path.parent}: make it first, or name another.")
    return kind


def save(drawing: Drawing, path: Path) -> None:
    """Write the picture as the file's suffix says; the same drawing is the same SVG, byte for byte.

    Raises:
        InputError: as `check_output`, or the file cannot be written.
    """
    kind = check_output(path)
    from matplotlib import style  # half a second, for those who want a picture

    settings = {
        "svg.hashsalt": "lm-eval-icl",
        "svg.fonttype": "none",
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],  # the first comes with matplotlib
        "hatch.linewidth": 0.7,
    }
    metadata: dict[str, str | None] = {"Title": f"{drawing.name}: which token sees which"}
    if kind == "svg":
        metadata |= {"Date": None, "Creator": None}
    with style.context(["default", settings]), warnings.catch_warnings():
        # A browser has more glyphs than the one font here; what a PNG could not show is spelt out.
        warnings.filterwarnings("ignore", "Glyph .* missing")
        figure = _figure(drawing, _spelt if kind == "png" else str)
        try:
            figure.savefig(path, format=kind, dpi=200, metadata=metadata)
        except OSError as error:
            raise _error(f"--output {path}: cannot be written ({error.strerror or error}).") from error


def _spelt(text: str) -> str:
    """Without the characters that the font lacks."""
    from matplotlib import font_manager

    glyphs = font_manager.get_font(font_manager.findfont("DejaVu Sans")).get_charmap()
    return "".join(c if ord(c) in glyphs else f"\\u{{{ord(c):x}}}" for c in text)


def _figure(drawing: Drawing, shown: Callable[[str], str]) -> Figure:
    from matplotlib.figure import Figure

    layouts = [layout for _, layout in drawing.passes]
    cell = min(0.27, max(0.08, 7.5 / max(len(layout.tokens) for layout in layouts)))
    reads = {id: shown(text) for id, text in drawing.reads.items()}
    label = max((0.1 + _width(text, _label_size(cell)) for text in reads.values()), default=0.0)
    last = max(int(layout.positions.max()) for layout in layouts)

    # Panels side by side, as many as a page is wide.
    places: list[tuple[float, float]] = []
    head = _HEAD if any(title for title, _ in drawing.passes) else 0.0
    x, y, deepest, widest = 0.25, 0.68 + head / 3, 0.0, 0.0
    for title, layout in drawing.passes:
        across = label + _BAND + _NUMBERS + max(len(layout.tokens) * cell, _width(title, 8.5) - _BAND)
        if places and x + across > _PAGE:
            x, y, deepest = 0.25, y + deepest + 0.25, 0.0
        places.append((x, y))
        rows = sum(len(block) for _, block in _rows(layout))
        deepest = max(deepest, head + _BARS + 0.36 + rows * cell + label)
        x += across + 0.45
        widest = max(widest, x - 0.2)
    page = max(widest, 5.4, 0.5 + _width(drawing.arguments, 9))
    notes = textwrap.wrap(" ".join(drawing.notes), int((page - 0.5) / _width("n", 7.2)))
    height = y + deepest + 0.2 + 0.17 * len(notes) + 0.12

    figure = Figure(figsize=(page, height), facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, page), ylim=(height, 0))
    axes.axis("off")
    _write(axes, 0.25, 0.28, drawing.name, 14, weight="bold")
    _write(axes, 0.25, 0.53, drawing.arguments, 9, color="#555555")
    for (title, layout), (x, y) in zip(drawing.passes, places, strict=True):
        _panel(axes, x + label, y, title, layout, reads, cell, last)
    for i, note in enumerate(notes):
        _write(axes, 0.25, y + deepest + 0.3 + 0.17 * i, note, 8, color="#555555")
    return figure


def _panel(
    axes: Axes, x: float, y: float, title: str, layout: Layout, reads: dict[int, str], cell: float, last: int
) -> None:
    """One pass: bars as high as the positions, the blocks' names, and the matrix."""
    positions, sees, kept = layout.positions.tolist(), layout.sees.tolist(), set(layout.kept)
    blocks, rows = _columns(layout), _rows(layout)
    order = [i for _, block in rows for i in block]
    left, bars = x + _BAND + _NUMBERS, y + (_HEAD if title else 0.0)
    top = bars + _BARS + 0.36
    right, bottom = left + len(positions) * cell, top + len(order) * cell
    figure_size = min(7.0, cell * 72 * 0.9 / (0.64 * len(str(last))))
    _write(axes, x, y + 0.06, title, 8.5, style="italic")

    # Who is seen: columns.
    _write(axes, left - 0.06, bars + _BARS + 0.06, "position", 6.5, ha="right", color="#555555")
    for name, block in blocks:
        for i in block:
            tall = _BARS * (positions[i] + 1) / (last + 1)
            at = left + i * cell
            _fill(axes, [(at + 0.12 * cell, bars + _BARS - tall + 0.12, 0.76 * cell, tall)], _colour(name), i in kept)
            _write(axes, at + cell / 2, bars + _BARS - tall + 0.06, str(positions[i]), figure_size, ha="center")
        at, across = left + block[0] * cell, len(block) * cell
        _fill(axes, [(at, top - 0.23, across, 0.2)], _colour(name), block[0] in kept, hatch=False)
        _name(axes, at + across / 2, top - 0.13, name, across, block[0] in kept)

    # Who looks: rows.
    _write(axes, x, top - 0.12, "looks ↓", 6.5, color="#555555")
    at = top
    for name, looking in rows:
        down = len(looking) * cell
        _fill(axes, [(x, at, _BAND - 0.04, down)], _colour(name), looking[0] in kept, hatch=False)
        _name(axes, x + (_BAND - 0.04) / 2, at + down / 2, name, _BAND - 0.04, looking[0] in kept)
        for k, i in enumerate(looking):
            _write(axes, left - 0.07, at + (k + 0.5) * cell, str(positions[i]), figure_size, ha="right")
        at += down

    # The matrix: one path a colour, grid lines over it, block boundaries over them.
    _fill(axes, [(left, top, right - left, bottom - top)], "#f2f2f2")
    for name, block in blocks:
        for read in (True, False):
            runs = []
            for r, row in enumerate(order):
                seen = [i for i in block if sees[row][i] and (i in kept) == read]
                for start, end in _runs(seen):
                    runs.append((left + start * cell, top + r * cell, (end - start) * cell, cell))
            if runs:
                _fill(axes, runs, _colour(name), read)
    fine = 0.7 if cell > 0.15 else 0.35
    inner = [(left + i * cell, top, 0.0, bottom - top) for i in range(1, len(positions))]
    inner += [(left, top + r * cell, right - left, 0.0) for r in range(1, len(order))]
    _stroke(axes, inner, "white", fine)
    edges = [0, *(block[-1] + 1 for _, block in blocks)]
    ends = [0, *itertools.accumulate(len(block) for _, block in rows)]
    outer = [(left + i * cell, top, 0.0, bottom - top) for i in edges]
    outer += [(left, top + r * cell, right - left, 0.0) for r in ends]
    _stroke(axes, outer, "#333333", 0.8)

    # What the tokens read.
    size = _label_size(cell)
    for r, row in enumerate(order):
        if text := reads.get(layout.tokens[row]):
            _write(axes, x - 0.07, top + (r + 0.5) * cell, text, size, ha="right")
    for i, token in enumerate(layout.tokens):
        if text := reads.get(token):
            upright = {"ha": "right", "va": "center_baseline", "rotation": 90, "rotation_mode": "anchor"}
            _write(axes, left + (i + 0.5) * cell, bottom + 0.07, text, size, **upright)


def _runs(indices: list[int]) -> Iterator[tuple[int, int]]:
    """Neighbouring indices as (first, behind the last)."""
    for _, group in itertools.groupby(enumerate(indices), key=lambda pair: pair[1] - pair[0]):
        run = [i for _, i in group]
        yield run[0], run[-1] + 1


def _width(text: str, size: float) -> float:
    """About how wide a text is; a reader's own font may be wider than ours."""
    return len(text) * size * 0.0088


def _label_size(cell: float) -> float:
    return min(7.5, cell * 72 * 0.8)


def _write(axes: Axes, x: float, y: float, text: str, size: float, **style: Any) -> None:
    if text:
        # "$" is a dollar sign here, not mathematics.
        axes.text(x, y, text, **{"fontsize": size, "va": "center", "color": "#222222", "parse_math": False, **style})


def _name(axes: Axes, x: float, y: float, name: str, room: float, read: bool) -> None:
    """A block's name on its colour."""
    size = min(8.5, room / _width(name, 1.0))
    dark = not read or _colour(name) in ("#e69f00", "#cc79a7", "#56b4e9")
    _write(axes, x, y, name, size, ha="center", weight="bold", color="#111111" if dark else "white")


def _fill(
    axes: Axes, boxes: list[tuple[float, float, float, float]], colour: str, read: bool = True, hatch: bool = True
) -> None:
    """Boxes (x, y, width, height) of one colour; paler and hatched where nothing that follows reads them."""
    from matplotlib.colors import to_hex, to_rgb
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Outline

    outline = Outline.make_compound_path(
        *(Outline([(x, y), (x + w, y), (x + w, y + h), (x, y + h), (x, y)], closed=True) for x, y, w, h in boxes)
    )
    if read:
        axes.add_patch(PathPatch(outline, facecolor=colour, linewidth=0))
        return
    red, green, blue = (1 - 0.35 * (1 - part) for part in to_rgb(colour))
    pale = to_hex((red, green, blue))
    axes.add_patch(PathPatch(outline, facecolor=pale, edgecolor=colour, hatch="//////" if hatch else None, linewidth=0))


def _stroke(axes: Axes, lines: list[tuple[float, float, float, float]], colour: str, thick: float) -> None:
    """Lines (x, y, width, height), one of the last two being nothing."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Outline

    if lines:
        outline = Outline.make_compound_path(*(Outline([(x, y), (x + w, y + h)]) for x, y, w, h in lines))
        axes.add_patch(PathPatch(outline, facecolor="none", edgecolor=colour, linewidth=thick, capstyle="butt"))
