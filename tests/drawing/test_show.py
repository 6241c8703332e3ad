"""The drawing shows the layout that is run, and bad input is one line."""

import xml.etree.ElementTree as ET

import pytest
import torch
from lm_eval.utils import simple_parse_args_string
from transformers import AutoModelForCausalLM

from lm_eval_icl import methods
from lm_eval_icl.drawing import drawing, terminal
from lm_eval_icl.inference.scoring import score_rows
from lm_eval_icl.methods import NAMES
from lm_eval_icl.methods.parts import InParts
from lm_eval_icl.methods.several import Several
from lm_eval_icl.prompts.layouts import Layout
from lm_eval_icl.prompts.tokens import Context
from lm_eval_icl.smoke.demo import model_path
from tests import commands, tiny

VARIANTS = [
    *((name, "") for name in NAMES),
    ("icl", "positions=symmetric"),
    ("icl", "repeat=2"),
    ("pcw", "window_size=2"),
    ("invicl", "positions=sequential"),
    ("prefixicl", "repeat=2"),
    ("batchicl", "positions=symmetric,layer=2"),
    ("batchicl", "positions=none"),
    ("deepthink", "T=1"),
    ("deepthink", "T=3,restart_positions=True"),
    ("deepthink", "positions=symmetric,momentum=0.9"),
]
# The steps of methods that learn need answers, and are compared in their own tests.
RUN_AS_DRAWN = [variant for variant in VARIANTS if variant[0] not in ("ctkv", "ttt")]
RUN_AS_DRAWN += [("ctkv", "steps=0"), ("ttt", "epochs=0")]


# The text, read back.


def read_back(text: str) -> list[dict]:
    """Every panel of a text drawing: block names, seen cells, hatched columns, and, if they are shown, the positions of
    columns and rows."""
    panels = []
    for block in text.split("\n\n"):
        lines = [line for line in block.splitlines() if line.count("│") > 1]
        if not lines:
            continue
        names = [name.strip() for name in lines[0].split("│")[1:-1]]
        at = next((i for i, line in enumerate(lines) if line.startswith("position")), 0)
        rows = [line.split("│") for line in lines[at + 1 :]]
        # A cell is two characters wide; blocks narrower than their names are filled up with blanks.
        cells = [[part.replace("· ", "..").rstrip() for part in row[1:-1]] for row in rows]
        lengths = [len(part) // 2 for part in cells[0]]
        columns = []
        for k, length in enumerate(lengths) if at else ():
            digits = [line.split("│")[k + 1] for line in lines[1 : at + 1]]
            columns += [int("".join(line[2 * i] for line in digits)) for i in range(length)]
        marks = [["".join(row)[i] for i in range(0, 2 * sum(lengths), 2)] for row in cells]
        panels.append(
            {
                "blocks": list(zip(names, lengths, strict=True)),
                "columns": columns,
                "rows": [int(row[0].split()[-1]) for row in rows] if at else [],
                "sees": torch.tensor([[mark in "█▒" for mark in row] for row in marks]),
                "unread": {i for row in marks for i, mark in enumerate(row) if mark == "▒"},
            }
        )
    return panels


@pytest.mark.parametrize(("name", "arguments"), VARIANTS)
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
    for panel, (_, layout) in zip(panels, passes, strict=True):
        looks = layout.mask.any(dim=1)
        assert panel["blocks"] == [(name, len(block)) for name, block in drawing.columns(layout)]
        assert [name for name, _ in panel["blocks"]] == list(
            dict.fromkeys(block.name for block in layout.blocks)
        )
        shown = method.positions != "none"
        assert panel["columns"] == (layout.positions.tolist() if shown else [])
        assert panel["rows"] == (layout.positions[looks].tolist() if shown else [])
        assert torch.equal(panel["sees"], layout.mask[looks])
        assert panel["unread"] == set(range(len(layout))) - set(layout.kept_tokens)
    if len(passes) == 1 and name != "deepthink":
        layout = method.lay_out(*sizes)
        assert torch.equal(passes[0][1].mask, layout.mask)


# What the model does.


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_pretrained(model_path(), attn_implementation="eager").eval()


def watched(model, run) -> list[tuple[list[int], torch.Tensor]]:
    """Each forward pass of `run`: the positions of its tokens, and which entries they attended to."""
    calls: list[tuple[list[int], torch.Tensor]] = []
    positions: list[list[int]] = []
    hooks = [
        model.model.rotary_emb.register_forward_pre_hook(
            lambda module, args, kwargs: positions.append(kwargs["position_ids"][0].tolist()),
            with_kwargs=True,
        ),
        model.model.layers[1].self_attn.register_forward_hook(
            lambda module, args, output: calls.append((positions[-1], output[1][0].amax(0) > 0))
        ),
    ]
    with torch.no_grad():
        run()
    for hook in hooks:
        hook.remove()
    return calls


def part_of(layout: Layout, first: int, end: int) -> tuple[list[int], torch.Tensor]:
    """What a forward pass over these tokens should be, after the entries that were kept of those before."""
    columns = [i for i in layout.kept_tokens if i < first] + list(range(first, end))
    return layout.positions[first:end].tolist(), layout.mask[first:end][:, columns]


@pytest.mark.parametrize(("name", "arguments"), RUN_AS_DRAWN)
def test_drawing_is_what_the_model_does(model, name, arguments):
    """Positions and attention weights of every forward pass, from the model itself."""
    method = methods.make(name, simple_parse_args_string(arguments))
    context, query, answer = (
        Context((0, 1), ((2, 3, 4), (5, 6), (7, 8, 9, 10))),
        (11, 12, 90, 91),
        (13, 14, 92),
    )
    # The model of the test is eager, which `InParts.bind` refuses.
    bound = method if isinstance(method, InParts) else method.bind(model)

    def run():
        if isinstance(
            method, InParts
        ):  # by sdpa alone, which returns no weights: test_memories computes what is read
            bound.encode(model, [context])
            return
        if isinstance(bound, Several):
            for memory in [
                bound.encode(model, [context])[0] for context in bound.contexts(context)
            ]:
                score_rows(model, memory, [(query, [answer])])
            return
        memory, rest = tiny.encoded_alone(bound, model, context, query)
        score_rows(model, memory, [(tuple(rest), [answer])])

    passes = [
        layout
        for _, layout in method.passes(
            len(context.prefix), context.lengths, len(query), len(answer)
        )
    ]
    last = passes[-1]
    n, q = len(last), len(query)
    start = n - q - len(answer)
    tail = [
        (start, start + q),
        (start + q, n - 1),
    ]  # the query, and the answer but for what is never read
    if name == "saicl":
        expected = [
            part_of(last, a, b) for a, b in ((0, start + q), (start + q - 1, start + q), tail[1])
        ]
    elif name == "deepthink" and method.T > 1:
        once = len(passes[0])
        again = [part_of(passes[1], once, 2 * once)] * (method.T - 1)
        expected = [part_of(passes[0], 0, once), *again, *(part_of(last, *ab) for ab in tail)]
    elif name == "batchicl":
        expected = [part_of(last, 0, start)]
        expected += [part_of(layout, 0, len(layout) - q) for layout in passes[:-1]]
        expected += [part_of(layout, len(layout) - q, len(layout)) for layout in passes[:-1]]
        expected += [part_of(last, *ab) for ab in tail]
    elif isinstance(method, InParts):
        expected = [part_of(last, 0, start)]
    elif isinstance(bound, Several):
        ends = [(layout, len(layout) - q - len(answer)) for layout in passes]
        expected = [part_of(layout, 0, end) for layout, end in ends]
        for layout, end in ends:
            expected += [part_of(layout, end, end + q), part_of(layout, end + q, len(layout) - 1)]
    else:
        expected = [part_of(last, a, b) for a, b in ((0, start), *tail)]

    calls = watched(model, run)
    assert len(calls) == len(expected)
    for (positions, sees), (should, pattern) in zip(calls, expected, strict=True):
        assert torch.equal(sees, pattern)
        if method.positions != "none":  # there the model is run without any
            assert positions == should


# Pictures.


def test_pictures(tmp_path, capsys):
    for kind, begins in (("svg", b"<?xml"), ("png", b"\x89PNG\r\n")):
        files = [tmp_path / f"{i}.{kind}" for i in range(2)]
        for file in files:
            commands.run("show", "deepthink", "--shots", "2", "--output", str(file))
        assert files[0].read_bytes().startswith(begins)
        assert files[0].read_bytes() == files[1].read_bytes()
    root = ET.parse(tmp_path / "0.svg").getroot()
    texts = {text.text for text in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"deepthink", "P", "M", "D1", "D2", "Q", "A"} <= texts
    assert str(2 * (2 + 3 + 2) - 1) in texts  # the last position of the passes 2..T
    assert f"deepthink: drawn in {tmp_path / '0.svg'}" in capsys.readouterr().out


def test_a_value_that_the_model_decides_is_left_out():
    drawn = drawing.draw(methods.make("batchicl"), 3)
    assert drawn.arguments == "positions=sequential, repeat=1"
    assert "after layer 15 (the last if there are fewer)" in drawn.passes[-1][0]
    drawn = drawing.draw(methods.make("batchicl", {"layer": 2}), 3)
    assert drawn.arguments.endswith("layer=2") and "after layer 2," in drawn.passes[-1][0]


# Bad input.


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["invcl"], "unknown method 'invcl': did you mean 'invicl'?"),
        (["icl", "--args", "foo=1"], "'foo' is no argument of icl, which takes positions, repeat."),
        (["icl", "--args", "T=3"], "'T' belongs to deepthink, not to icl"),
        (["icl", "--shots", "-1"], "--shots -1: must be from 0 to 200"),
        (["icl", "--shots", "100"], "at most 200 are drawn"),
        (["pcw", "--args", "window_size=4"], "pcw: window_size=4: more than the 3 demonstrations"),
        (["icl", "--output", "a.pdf"], "--output a.pdf: must end in .svg or .png"),
        (
            ["nowhere:Thing"],
            "'nowhere:Thing' cannot be imported from this folder (ModuleNotFoundError",
        ),
        (["lm_eval_icl.methods:Method"], "has no pattern"),
    ],
)
def test_bad_input_is_one_line(arguments, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert says in commands.refused("show", *arguments)


def test_a_drawing_is_no_wider_than_the_terminal():
    for width, names in ((80, NAMES), (60, ["invicl"])):
        for name in names:
            text = terminal.as_text(drawing.draw(methods.make(name), 3), width=width).plain
            assert (
                max(len(line) for line in text.splitlines() if "│" in line or width == 80) <= width
            )
