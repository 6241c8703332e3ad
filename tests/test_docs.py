"""What the pages under docs/ say is so: their code runs, their links lead somewhere, their pictures are today's."""

import dataclasses
import importlib.util
import inspect
import itertools
import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from lm_eval.models.huggingface import HFLM
from lm_eval.utils import simple_parse_args_string

from lm_eval_icl import picture, show
from lm_eval_icl.plugin import MODELS, task_dir
from lm_eval_icl.tokens import Context

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def blocks(page: Path) -> list[tuple[str, str, str]]:
    """A page's fenced blocks: (the `file.py` named on the line before it, language, text)."""
    found = re.finditer(r"(?:`(\w+\.py)`:\n\n|)```(\w+)\n(.*?)```\n", page.read_text(encoding="utf-8"), re.DOTALL)
    return [(match[1] or "", match[2], match[3]) for match in found]


def commands(page: Path) -> list[str]:
    """The indented commands of a page that start one of our programs, from its name on."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    launched = r" {4,}(?:(?:\w+=\w+ )?(?:accelerate launch|torchrun) .*-m )?"
    return [
        found[1] for line in text.splitlines() if (found := re.match(launched + r"((lm_eval|lm-eval-icl) .*)", line))
    ]


# What `hf` takes, and hands on.
HF_ARGUMENTS = {
    name for each in (HFLM, transformers.BitsAndBytesConfig) for name in inspect.signature(each.__init__).parameters
}

# Links.


def anchors(page: Path) -> set[str]:
    """The names that a page's headings have on GitHub."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_resolve(page):
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    for link in links:
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link}"


# One page a method.


@pytest.mark.parametrize("name", MODELS)
def test_method_page_names_every_argument_with_its_default(name):
    page = (DOCS / "methods" / f"{name}.md").read_text(encoding="utf-8")
    written = dict(re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", page, re.MULTILINE))
    assert written == {field.name: str(field.default) for field in dataclasses.fields(show.METHODS[name])}
    assert f"]({name}.md)" in (DOCS / "methods" / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", MODELS)
def test_pictures_are_what_is_drawn_now(name, tmp_path):
    """Made again by: lm-eval-icl show NAME --output docs/methods/NAME.svg"""
    page, drawn = DOCS / "methods" / f"{name}.md", tmp_path / f"{name}.svg"
    assert f"]({name}.svg)" in page.read_text(encoding="utf-8")
    assert f"lm-eval-icl show {name} --output docs/methods/{name}.svg" in commands(page)
    picture.save(show.draw(show.make_method(name), show.example(3)), drawn)
    committed = (DOCS / "methods" / drawn.name).read_text(encoding="utf-8")
    same = drawn.read_text(encoding="utf-8") == committed
    assert same, f"lm-eval-icl show {name} --output docs/methods/{name}.svg (with matplotlib as in constraints.txt)"


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: str(page.relative_to(DOCS)))
def test_commands_are_ones_that_we_take(page):
    """Methods, arguments and tasks exist; what the commands do is tested elsewhere."""
    for command in commands(page):
        words = shlex.split(command)
        given = dict(itertools.pairwise(words))
        if words[:2] == ["lm-eval-icl", "show"]:
            show.make_method(words[2], given.get("--args", ""))
        elif words[0] == "lm_eval":
            own = {field.name for field in dataclasses.fields(show.METHODS[given["--model"]])}
            arguments = simple_parse_args_string(given["--model_args"])
            assert arguments.pop("pretrained")
            assert set(arguments) <= own | HF_ARGUMENTS
            assert any(task_dir().rglob(f"{given['--tasks']}.yaml"))


# The index's table of properties.


def reaches(sees: torch.Tensor) -> torch.Tensor:
    """What every token sees in any number of layers."""
    found = sees
    for _ in range(len(sees).bit_length()):
        found = (found.float() @ found.float()) > 0
    return found


def table(page: Path, heading: str) -> dict[str, list[str]]:
    """The rows of the table whose second column has this heading, by the names in their first."""
    rows = [
        line.strip("| ").split(" | ")
        for line in page.read_text(encoding="utf-8").split(f" | {heading}")[1].split("\n\n")[0].splitlines()[2:]
    ]
    return {name: row[1:] for row in rows for name in re.findall(r"`(\w+)`", row[0])}


def test_properties_are_those_of_the_layouts():
    properties = table(DOCS / "methods" / "README.md", "invariant")
    assert set(properties) == set(MODELS)
    for name, (invariant, no_leakage, interdependent) in properties.items():
        method = show.make_method(name)
        assert invariant == ("yes" if method.invariant else "no")
        if name in ("batchicl", "deepthink"):  # not one layout
            continue
        parts = show.example(3)
        layout = method.layout(parts.context, parts.query)
        sees = reaches(layout.sees)
        at = dict(show.columns(layout))
        copies = ["", "'"] if "D1'" in at else [""]
        last = {i: at[f"D{i}{copies[-1]}"] for i in (1, 2, 3)}

        def seen(i: int, j: int, sees=sees, at=at, copies=copies, last=last) -> bool:
            """Whether the first token of D_i sees the last of D_j, in any of its copies."""
            return any(bool(sees[last[i][0], at[f"D{j}{copy}"][-1]]) for copy in copies)

        assert no_leakage.startswith("no" if any(seen(i, i) for i in last) else "yes")
        others = {(i, j) for i in last for j in last if i != j and seen(i, j)}
        earlier = {(2, 1), (3, 1), (3, 2)}
        says = "no" if not others else "with those before it" if others == earlier else "with all"
        assert len(others) in (0, 3, 6) and interdependent.startswith(says)


# Adding a method.

PAGE = DOCS / "add-a-method.md"


def lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def test_adding_a_method_works_as_written(tmp_path):
    """Its files are written and its commands run, and both print what the page says."""
    written = blocks(PAGE)
    for name, language, text in written:
        if language == "python":
            assert name
            (tmp_path / name).write_text(text, encoding="utf-8")
    consoles = [text for _, language, text in written if language == "console"]
    assert len(consoles) == 2
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    outputs = []
    for console in consoles:
        command, _, expected = console.removeprefix("$ ").partition("\n")
        done = subprocess.run(
            shlex.split(command), capture_output=True, text=True, cwd=tmp_path, env=environment, check=False
        )
        assert done.returncode == 0, done.stderr
        outputs.append((lines(done.stdout), lines(expected)))
    (drawn, expected_drawing), (compared, expected_scores) = outputs
    assert drawn == expected_drawing

    scores = [[re.fullmatch(r"(\w+): accuracy (\S+), mean (\S+)", line) for line in output] for output in outputs[1]]
    assert all(scores[0]) and len(compared) == len(expected_scores) == 2
    for got, expected in zip(*scores, strict=True):
        assert got[1] == expected[1]
        assert math.isfinite(float(got[3]))
        assert float(got[2]) == pytest.approx(float(expected[2]), abs=0.021)
        assert float(got[3]) == pytest.approx(float(expected[3]), abs=0.003)
    assert scores[0][0][3] != scores[0][1][3]


def test_the_added_method_is_what_the_page_says(tmp_path, monkeypatch):
    from lm_eval.api import registry

    name, _, text = blocks(PAGE)[0]
    (tmp_path / name).write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("docs_neighbours", tmp_path / name)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "docs_neighbours", module)
    monkeypatch.setattr(registry, "register_model", lambda *names: lambda cls: cls)  # nothing stays registered
    spec.loader.exec_module(module)
    method = module.Neighbours()
    layout = method.layout(Context((0,), ((1,), (2,), (3,), (4,))), (5,), (6,))
    seen = [[j for j in range(7) if layout.sees[i, j]] for i in range(7)]
    assert seen == [[0], [0, 1], [0, 1, 2], [0, 2, 3], [0, 3, 4], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5, 6]]
    assert not method.symmetric_mask and method.name == "neighbours"
    assert module.NeighboursLM.method_class is module.Neighbours


# Tests.


@pytest.mark.parametrize(
    "command", re.findall(r"`pytest (.*?)`", (DOCS / "reliability.md").read_text(encoding="utf-8"))
)
def test_tests_that_are_named_are_there(command):
    files, _, words = command.partition(" -k ")
    names = re.findall(r"^def (test_\w+)", "".join((ROOT / file).read_text() for file in files.split()), re.MULTILINE)
    for word in words.strip('"').split(" or "):
        assert any(word in name for name in names), word
