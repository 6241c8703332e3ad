"""The drawing shows the layout that is run, and bad input is one line."""

import xml.etree.ElementTree as ET
from itertools import chain

import pytest
import torch
from lm_eval.utils import simple_parse_args_string
from transformers import AutoModelForCausalLM

from lm_eval_icl import methods
from lm_eval_icl.drawing import drawing, terminal
from lm_eval_icl.drawing.style import method_style
from lm_eval_icl.inference.scoring import score_rows
from lm_eval_icl.methods import NAMES
from lm_eval_icl.methods.parts import InParts
from lm_eval_icl.methods.several import Several
from lm_eval_icl.prompts.layouts import Layout
from lm_eval_icl.prompts.tokens import Context
from lm_eval_icl.smoke.demo import model_path
from tests import commands, tiny

FURTHER = """
icl positions=symmetric
icl repeat=2
pcw window_size=2
invicl positions=sequential
prefixicl repeat=2
batchicl positions=symmetric,layer=2
batchicl positions=none
deepthink T=1
deepthink T=3,restart_positions=True
deepthink positions=symmetric,momentum=0.9
"""
VARIANTS = [(name, "") for name in NAMES]
VARIANTS += [tuple(line.split()) for line in FURTHER.split("\n")[1:-1]]
# The steps of methods that learn need answers, and are compared in their own tests.
RUN_AS_DRAWN = [variant for variant in VARIANTS if variant[0] not in ("ctkv", "ttt")]
RUN_AS_DRAWN += [("ctkv", "steps=0"), ("ttt", "epochs=0")]


# The text, read back.


class Panel:
    """A panel of a text drawing: its blocks, positions, seen cells and hatched columns."""

    def __init__(self, lines: list[str]) -> None:
        names = [name.strip() for name in lines[0].split("│")[1:-1]]
        at = next((i for i, line in enumerate(lines) if line.startswith("position")), 0)
        rows = [line.split("│") for line in lines[at + 1 :]]
        self.rows = [int(row[0].split()[-1]) for row in rows] if at else []
        # A cell is two characters wide; blocks narrower than their names are filled up with blanks.
        cells = [[part.replace("· ", "..").rstrip() for part in row[1:-1]] for row in rows]
        lengths = [len(part) // 2 for part in cells[0]]
        self.blocks = list(zip(names, lengths, strict=True))
        marks = ["".join(row)[::2] for row in cells]
        self.sees = torch.tensor([[mark in "█▒" for mark in row] for row in marks])
        self.unread = set()
        for row in marks:
            self.unread.update(i for i, mark in enumerate(row) if mark == "▒")
        digits = [line.split("│")[1:-1] for line in lines[1 : at + 1]]
        self.columns = columns_of(digits, lengths) if at else []


def columns_of(digits: list[list[str]], lengths: list[int]) -> list[int]:
    """The positions of columns, whose digits stand one below the other."""
    columns = []
    for block, length in enumerate(lengths):
        for i in range(length):
            columns.append(int("".join(line[block][2 * i] for line in digits)))
    return columns


def read_back(text: str) -> list[Panel]:
    """Every panel of a text drawing."""
    panels = []
    for part in text.split("\n\n"):
        lines = [line for line in part.splitlines() if line.count("│") > 1]
        if lines:
            panels.append(Panel(lines))
    return panels


@pytest.mark.parametrize("name, arguments", VARIANTS)
@pytest.mark.parametrize("shots", [0, 1, 5])
def test_text_is_the_layout(name, arguments, shots):
    method = methods.make(name, simple_parse_args_string(arguments))
    if method.why_not(shots):
        shots = 2
    sizes = drawing.PREFIX, drawing.example(shots), drawing.QUERY, drawing.ANSWER
    passes = method.passes(*sizes)
    text = terminal.as_text(drawing.draw(method, shots)).plain
    assert ("no positional" in text) == ("position " not in text) == (method.positions == "none")
    panels = read_back(text)
    assert len(panels) == len(passes)
    shown = method.positions != "none"
    for panel, (_, layout) in zip(panels, passes, strict=True):
        looks = layout.mask.any(dim=1)
        assert panel.blocks == [(name, len(block)) for name, block in drawing.columns(layout)]
        names = dict.fromkeys(block.name for block in layout.blocks)
        assert [name for name, _ in panel.blocks] == list(names)
        assert panel.columns == (layout.positions.tolist() if shown else [])
        assert panel.rows == (layout.positions[looks].tolist() if shown else [])
        assert torch.equal(panel.sees, layout.mask[looks])
        assert panel.unread == set(range(len(layout))) - set(layout.kept_tokens)
    if len(passes) == 1 and name != "deepthink":
        layout = method.lay_out(*sizes)
        assert torch.equal(passes[0][1].mask, layout.mask)


# What the model does.


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_pretrained(model_path(), attn_implementation="eager").eval()


def watched(model, run) -> list[tuple[list[int], torch.Tensor]]:
    """Each forward pass of `run`: the positions of its tokens, and which entries they saw."""
    calls: list[tuple[list[int], torch.Tensor]] = []
    positions: list[list[int]] = []

    def note_positions(module, args, kwargs):
        positions.append(kwargs["position_ids"][0].tolist())

    def note_call(module, args, output):
        calls.append((positions[-1], output[1][0].amax(0) > 0))

    hooks = [
        model.model.rotary_emb.register_forward_pre_hook(note_positions, with_kwargs=True),
        model.model.layers[1].self_attn.register_forward_hook(note_call),
    ]
    with torch.no_grad():
        run()
    for hook in hooks:
        hook.remove()
    return calls


def part_of(layout: Layout, first: int, end: int) -> tuple[list[int], torch.Tensor]:
    """What a forward pass over these tokens should be, after the entries kept of those before."""
    columns = [i for i in layout.kept_tokens if i < first] + list(range(first, end))
    return layout.positions[first:end].tolist(), layout.mask[first:end][:, columns]


CONTEXT = Context((0, 1), ((2, 3, 4), (5, 6), (7, 8, 9, 10)))
QUERY = (11, 12, 90, 91)
ANSWER = (13, 14, 92)


def run(model, method, bound):
    """What a method runs for a context, a query and its answer."""
    if isinstance(method, InParts):
        # By sdpa alone, which returns no weights: test_memories computes what is read.
        bound.encode(model, [CONTEXT])
    elif isinstance(bound, Several):
        memories = [bound.encode(model, [context])[0] for context in bound.contexts(CONTEXT)]
        for memory in memories:
            score_rows(model, memory, [(QUERY, [ANSWER])])
    else:
        memory, rest = tiny.encoded_alone(bound, model, CONTEXT, QUERY)
        score_rows(model, memory, [(tuple(rest), [ANSWER])])


def expected_passes(method, bound) -> list[tuple[list[int], torch.Tensor]]:
    """The forward passes, as parts of the layouts that are drawn."""
    passes = method.passes(len(CONTEXT.prefix), CONTEXT.lengths, len(QUERY), len(ANSWER))
    layouts = [layout for _, layout in passes]
    last = layouts[-1]
    q = len(QUERY)

    def query_and_answer(layout):
        """But for the end of the answer, which is never read."""
        start = len(layout) - q - len(ANSWER)
        query = part_of(layout, start, start + q)
        return [query, part_of(layout, start + q, len(layout) - 1)]

    start = len(last) - q - len(ANSWER)
    context = part_of(last, 0, start)
    if isinstance(method, InParts):
        return [context]
    if method.name == "saicl":
        end = start + q
        both = part_of(last, 0, end)
        again = part_of(last, end - 1, end)
        return [both, again, query_and_answer(last)[1]]
    if method.name == "deepthink" and method.T > 1:
        first, again = layouts[:2]
        once = len(first)
        steps = [part_of(again, once, 2 * once)] * (method.T - 1)
        return [part_of(first, 0, once), *steps, *query_and_answer(last)]
    if method.name == "batchicl":
        alone = []
        queries = []
        for layout in layouts[:-1]:
            end = len(layout) - q
            alone.append(part_of(layout, 0, end))
            queries.append(part_of(layout, end, end + q))
        return [context, *alone, *queries, *query_and_answer(last)]
    if isinstance(bound, Several):
        contexts = [part_of(layout, 0, len(layout) - q - len(ANSWER)) for layout in layouts]
        return contexts + list(chain(*map(query_and_answer, layouts)))
    return [context, *query_and_answer(last)]


@pytest.mark.parametrize("name, arguments", RUN_AS_DRAWN)
def test_drawing_is_what_the_model_does(model, name, arguments):
    """Positions and attention weights of every forward pass, from the model itself."""
    method = methods.make(name, simple_parse_args_string(arguments))
    # The model of the test is eager, which `InParts.bind` refuses.
    bound = method if isinstance(method, InParts) else method.bind(model)
    expected = expected_passes(method, bound)
    calls = watched(model, lambda: run(model, method, bound))
    assert len(calls) == len(expected)
    for (positions, sees), (should, pattern) in zip(calls, expected, strict=True):
        assert torch.equal(sees, pattern)
        if method.positions != "none":  # there the model is run without any
            assert positions == should


# Pictures.


def test_pictures(tmp_path, capsys):
    line = ["show", "deepthink", "--shots", "2", "--output"]
    for kind, begins in (("svg", b"<?xml"), ("png", b"\x89PNG\r\n")):
        files = [tmp_path / f"{i}.{kind}" for i in range(2)]
        for file in files:
            commands.run(*line, file)
        first, second = (file.read_bytes() for file in files)
        assert first.startswith(begins)
        assert first == second
    tree = ET.parse(tmp_path / "0.svg")
    texts = {text.text for text in tree.iter("{http://www.w3.org/2000/svg}text")}
    assert {"deepthink", "P", "M", "D1", "D2", "Q", "A"} <= texts
    assert str(2 * (2 + 3 + 2) - 1) in texts  # the last position of the passes 2..T
    assert f"deepthink: drawn in {tmp_path / '0.svg'}" in capsys.readouterr().out


def test_a_value_that_the_model_decides_is_left_out():
    drawn = drawing.draw(methods.make("batchicl"), 3)
    assert drawn.arguments == "positions=sequential, repeat=1"
    assert "after layer 15 (the last if there are fewer)" in drawn.passes[-1][0]
    drawn = drawing.draw(methods.make("batchicl", {"layer": 2}), 3)
    assert drawn.arguments.endswith("layer=2")
    assert "after layer 2," in drawn.passes[-1][0]


# Bad input.


BAD_LINES = {
    "invcl": "unknown method 'invcl': did you mean 'invicl'?",
    "icl --args foo=1": "'foo' is no argument of icl, which takes positions, repeat.",
    "icl --args T=3": "'T' belongs to deepthink, not to icl",
    "icl --shots -1": "--shots -1: must be from 0 to 200",
    "icl --shots 100": "at most 200 are drawn",
    "pcw --args window_size=4": "pcw: window_size=4: must not exceed the 3 demo",
    "icl --output a.pdf": "--output a.pdf: must end in .svg or .png",
    "icl --output x/a.svg": "--output x/a.svg: there is no folder x: make it first",
    "deepthink --args T=": "'T' has no value: write T=VALUE.",
    "pathlib:Path": "'pathlib:Path' is not a class that derives from lm_eval_icl.methods.Method. "
    "Those of pathlib: none.",
    "lm_eval_icl.methods.pcw:Pcw": "Method. Those of lm_eval_icl.methods.pcw: PCW.",
    "nowhere:Thing": "'nowhere:Thing' cannot be imported from this folder (ModuleNotFoundError",
    "lm_eval_icl.methods:Method": "has no pattern",
}


@pytest.mark.parametrize("line", BAD_LINES)
def test_bad_input_is_one_line(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert BAD_LINES[line] in commands.refused("show", *line.split())


def drawn_lines(name, width):
    text = terminal.as_text(drawing.draw(methods.make(name), 3), width=width).plain
    return text.splitlines()


def test_a_drawing_is_no_wider_than_the_terminal():
    for name in NAMES:
        assert max(map(len, drawn_lines(name, 80))) <= 80
    panels = [line for line in drawn_lines("invicl", 60) if "│" in line]
    assert max(map(len, panels)) <= 60


def test_the_command_draws_in_the_terminal(capsys):
    commands.run("show", "pcw")
    drawn, _, advice = capsys.readouterr().out.strip().rpartition("\n")
    assert drawn.strip() == terminal.as_text(drawing.draw(methods.make("pcw"), 3)).plain.strip()
    assert advice == "As a picture: --output FILE.svg or FILE.png"


def test_a_method_of_a_user_has_a_look_of_its_own():
    names = [f"own:Method{number}" for number in range(20)]
    looks = [method_style(name) for name in names]
    assert looks == [method_style(name) for name in names]
    assert len(set(looks)) > 10
