"""What the pages under docs/ say is so: their code runs, their links lead somewhere, their pictures are today's."""

import argparse
import dataclasses
import functools
import inspect
import itertools
import json
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import pytest
import transformers
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import simple_parse_args_string

from lm_eval_icl import methods, version
from lm_eval_icl.cli import COMMANDS, train
from lm_eval_icl.drawing import drawing, picture
from lm_eval_icl.harness import patches
from lm_eval_icl.harness.arguments import CommonArguments
from lm_eval_icl.metaicl.data import SETTINGS
from lm_eval_icl.methods import NAMES
from lm_eval_icl.smoke.demo import model_path
from scripts.regression import __main__ as regression
from scripts.regression.configuration import configured
from tests import processes

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def blocks(page: Path) -> list[tuple[str, str, str]]:
    """A page's fenced blocks: (the `file` named on the line before it, language, text)."""
    found = re.finditer(
        r"(?:`([\w.]+)`:\n\n|)```(\w+)\n(.*?)```\n", page.read_text(encoding="utf-8"), re.DOTALL
    )
    return [(match[1] or "", match[2], match[3]) for match in found]


def commands_of(page: Path) -> list[str]:
    """The commands of a page, indented or fenced, that start one of our programs, from its name on."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    shown = re.findall(r"^ {4,}(.*)$", text, re.MULTILINE)
    for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL):
        shown += [line.strip() for line in block.splitlines()]
    programs = r"lm_eval_icl|lm_eval|lm-eval-icl|python -m scripts\.regression"
    pattern = rf"(?:(?:\w+=\w+ )?(?:accelerate launch|torchrun) .*-m )?(({programs}) .*)"
    return [found[1] for line in shown if (found := re.match(pattern, line))]


@functools.cache
def known_tasks() -> set[str]:
    """The names of lm-eval's tasks and of ours. (Importing this package may have put in the patch already.)"""
    patches.install("lm_eval.tasks.manager")
    return set(TaskManager().all_tasks)


# What `hf` takes, and hands on.
HF_ARGUMENTS = {
    name
    for each in (HFLM, transformers.BitsAndBytesConfig)
    for name in inspect.signature(each.__init__).parameters
}
COMMON_ARGUMENTS = {field.name for field in dataclasses.fields(CommonArguments)}

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


@pytest.mark.parametrize("name", NAMES)
def test_method_page_names_every_argument_with_its_default(name):
    """Those that all methods have are on one page; the index has the default of `positions`."""
    page = (DOCS / "methods" / f"{name}.md").read_text(encoding="utf-8")
    written = dict(re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", page, re.MULTILINE))
    fields = {field.name: str(field.default) for field in dataclasses.fields(methods.find(name))}
    positions = fields.pop("positions")
    assert fields.pop("repeat") == "1" and written == fields
    index = (DOCS / "methods" / "README.md").read_text(encoding="utf-8")
    row = re.search(rf"^\| \[{name}\]\({name}\.md\) \|.* \| (\w+)[^|]* \|$", index, re.MULTILINE)
    assert row and row[1] == {"layout": "sequential"}.get(positions, positions)


@pytest.mark.pinned
@pytest.mark.parametrize("name", NAMES)
def test_pictures_are_what_is_drawn_now(name, tmp_path):
    """Made again by: lm-eval-icl show NAME --output docs/methods/NAME.svg"""
    page, drawn = DOCS / "methods" / f"{name}.md", tmp_path / f"{name}.svg"
    assert f"]({name}.svg)" in page.read_text(encoding="utf-8")
    picture.save(drawing.draw(methods.make(name), 3), drawn)
    committed = (DOCS / "methods" / drawn.name).read_text(encoding="utf-8")
    same = drawn.read_text(encoding="utf-8") == committed
    assert same, (
        f"lm-eval-icl show {name} --output docs/methods/{name}.svg (with matplotlib as in constraints.txt)"
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_are_ones_that_we_take(page):
    """Methods, arguments and tasks exist; what the commands do is tested elsewhere."""
    for command in commands_of(page):
        words = shlex.split(command, comments=True)
        given = dict(itertools.pairwise(words))
        if words[:2] == ["lm-eval-icl", "show"]:
            methods.make(words[2], simple_parse_args_string(given.get("--args", "")))
        elif words[:3] == ["python", "-m", "scripts.regression"]:
            options = regression.options(argparse.ArgumentParser(), words[3:])
            assert getattr(options, "figure", "figure3") in regression.FIGURES
            if hasattr(options, "config"):
                configured(options.config, options.set)
        elif "train" in words[:10]:
            options = train.read_options(
                argparse.ArgumentParser(), words[words.index("train") + 1 :]
            )
            methods.find(options["method"])
            if "metaicl" in options:
                assert options["metaicl"] in SETTINGS
            else:
                assert all(task in known_tasks() for task in options["tasks"].split(","))
        elif words[0] == "lm_eval":
            own = methods.arguments_of(methods.find(given["--model"]))
            arguments = simple_parse_args_string(given["--model_args"])
            assert arguments.pop("pretrained")
            assert set(arguments) <= own | COMMON_ARGUMENTS | HF_ARGUMENTS
            for task in given["--tasks"].split(","):
                assert task in known_tasks()


def table(page: Path, heading: str) -> dict[str, list[str]]:
    """The rows of the table whose second column has this heading, by the names in their first."""
    rows = [
        line.strip("| ").split(" | ")
        for line in page.read_text(encoding="utf-8")
        .split(f" | {heading}")[1]
        .split("\n\n")[0]
        .splitlines()[2:]
    ]
    return {name: row[1:] for row in rows for name in re.findall(r"`(\w+)`", row[0])}


def test_the_table_of_readme_is_the_methods():
    rows = table(ROOT / "README.md", "method")
    assert tuple(rows) == NAMES
    for name, (_, invariant, *arguments) in rows.items():
        method = methods.make(name)
        assert (invariant != "no") == method.invariant
        own = methods.arguments_of(type(method)) - {"positions", "repeat"}
        assert set(re.findall(r"`(\w+)=", "".join(arguments))) == own


def test_the_list_of_arguments_is_their_declaration():
    _, section, *_ = (DOCS / "arguments.md").read_text(encoding="utf-8").split("\n## ")
    listed = dict(re.findall(r"^- `(\w+)(?:=(\w+))?`", section, re.MULTILINE))
    for field in dataclasses.fields(CommonArguments):
        default = "" if field.default is None else str(field.default)
        assert listed.pop(field.name) == default
    assert set(listed) == {"positions", "repeat"}


# Code that runs as it is written.

PAGE = DOCS / "add-a-method.md"


def lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip("\n").splitlines() if line.strip()]


NUMBER = r"-?\d+(?:\.\d+)?"


def check_lines(printed: list[str], expected: list[str], within: float) -> None:
    """The lines are the same, but for numbers, which differ by no more than `within`."""
    assert [re.sub(NUMBER, "#", line) for line in printed] == [
        re.sub(NUMBER, "#", line) for line in expected
    ]
    for line, says in zip(printed, expected, strict=True):
        mine, theirs = (
            [float(number) for number in re.findall(NUMBER, text)] for text in (line, says)
        )
        assert mine == pytest.approx(theirs, abs=within), line


def printed(command: str, folder: Path) -> list[str]:
    """What a command of a page prints in a folder; of lm-eval's output the pages have the tables alone."""
    program, *arguments = shlex.split(command.replace("$MODEL", str(model_path())))
    done = processes.command(*arguments, program=program, cwd=folder)
    assert done.returncode == 0, done.stderr
    return [line for line in lines(done.stdout) if program != "lm_eval" or line.startswith("|")]


@pytest.mark.slow
def test_python_blocks_print_what_the_page_says(tmp_path):
    """All Python blocks of docs/python.md run in one process, in their order."""
    code, expected = (
        "\n".join(text for _, language, text in blocks(DOCS / "python.md") if language == wanted)
        for wanted in ("python", "console")
    )
    done = processes.python(code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    check_lines(lines(done.stdout), lines(expected), within=0.003)


@pytest.mark.slow
def test_the_tutorial_prints_what_it_says(tmp_path):
    """Its files are written and its commands run, in their order."""
    ran = []
    for name, language, text in blocks(DOCS / "tutorial.md"):
        if name:
            (tmp_path / name).write_text(text, encoding="utf-8")
        elif language == "console":
            for shown in text.removeprefix("$ ").split("\n$ "):
                command, _, expected = shown.partition("\n")
                program, *arguments = shlex.split(command)
                ran.append(program)
                if program == "python":
                    subprocess.run([sys.executable, *arguments], cwd=tmp_path, check=True)
                else:
                    check_lines(printed(command, tmp_path), lines(expected), within=2)
    assert ran == ["lm_eval", "python", "lm_eval", "lm-eval-icl"]
    assert (
        (tmp_path / "results/compare/figures/sensitivity.svg")
        .read_text(encoding="utf-8")
        .startswith("<?xml")
    )


@pytest.mark.slow
def test_the_cells_of_the_notebook_run():
    """Stored without outputs. What it says of orders is so."""
    cells = json.loads((DOCS / "quickstart.ipynb").read_text(encoding="utf-8"))["cells"]
    names: dict[str, object] = {}
    matplotlib.use("agg")
    for cell in cells:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None
            exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
    plt.close("all")
    values = names["orders"].groupby(["method", "text"])["amber - square"]
    assert (values.nunique()["icl"] > 1).all() and (values.nunique()["invicl"] == 1).all()
    assert values.min()["icl", names["texts"][2]] < 0 < values.max()["icl", names["texts"][2]]
    assert names["evaluated"]["icl"]["acc,none"] == names["evaluated"]["hf"]["acc,none"]


@pytest.mark.slow
@pytest.mark.pinned
def test_adding_a_method_works_as_written(tmp_path):
    """With the page's first file in the working directory, the commands draw its picture and print what it says."""
    shown, evaluated = (
        text.removeprefix("$ ").partition("\n")
        for _, language, text in blocks(PAGE)
        if language == "console"
    )
    name, _, text = blocks(PAGE)[0]
    (tmp_path / name).write_text(text, encoding="utf-8")
    assert printed(shown[0], tmp_path) == lines(shown[2])
    assert (tmp_path / "neighbours.svg").read_bytes() == (
        DOCS / "concepts/neighbours.svg"
    ).read_bytes()
    check_lines(printed(evaluated[0], tmp_path), lines(evaluated[2]), within=0.011)


# What is said of the code.


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_are_named_are_there(page):
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"`((?:lm_eval_icl|tests|scripts|docs|task_configs)/[\w./-]+\.\w+)`", text)
    named = [name for name in named if "neighbours" not in name]  # of the reader's
    named += re.findall(r"python (scripts/\w+\.py)", text)
    assert not [name for name in named if not (ROOT / name).exists()]
    benchmark = (ROOT / "scripts/benchmark.py").read_text(encoding="utf-8")
    for command in re.findall(r"benchmark\.py (\w+)", text):
        assert f'"{command}": ' in benchmark, command


@pytest.mark.pinned
def test_pictures_of_concepts_are_what_is_drawn_now(tmp_path):
    """Made again by: python scripts/draw_concepts.py"""
    save = runpy.run_path(str(ROOT / "scripts/draw_concepts.py"))["save"]
    for name in ("parts", "context", "memory", "pack", "canonical-order"):
        save(name, tmp_path / f"{name}.svg")
        assert (tmp_path / f"{name}.svg").read_bytes() == (
            DOCS / "concepts" / f"{name}.svg"
        ).read_bytes(), name


def test_pages_are_short():
    """In words. Who makes pages shorter lowers the numbers."""
    words = {page: len(page.read_text(encoding="utf-8").split()) for page in PAGES}
    reports = sum(words.pop(page) for page in DOCS.glob("reports/*.md"))
    assert reports <= 12_000 and words[DOCS / "log.md"] <= 1_500
    assert words.pop(ROOT / "README.md") <= 828 and sum(words.values()) <= 24_636
    assert (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").count("\n") <= 60


def test_the_version_is_one():
    """Before a release, pages name the version that will be released."""
    given = [version.VERSION.removesuffix(".dev0")]
    given += re.findall(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    given += re.findall(r"^## \[(.*?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[:1]
    assert len(given) == 3 and len(set(given)) == 1, given


# The site; `make site` checks its links.


def pages_in(entries: object) -> list[str]:
    """The files that a navigation names, in its order."""
    if isinstance(entries, str):
        return [entries]
    parts = entries.values() if isinstance(entries, dict) else entries
    return [page for part in parts for page in pages_in(part)]


def test_the_navigation_has_every_page_once():
    navigation = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]
    pages = [file.relative_to(ROOT / "docs").as_posix() for file in (ROOT / "docs").rglob("*.md")]
    assert sorted(pages_in(navigation)) == sorted(pages)


def test_the_reference_has_every_command_and_method_once():
    fences = re.findall(
        r"^```command\n(.*)\n```$", (DOCS / "reference/commands.md").read_text(), re.MULTILINE
    )
    assert sorted(fences) == sorted(COMMANDS)
    classes = re.findall(
        r"^::: lm_eval_icl\.methods\.(\w+)\.(\w+)$",
        (DOCS / "reference/method-classes.md").read_text(),
        re.M,
    )
    assert [module for module, _ in classes] == [name.lower() for _, name in classes] == list(NAMES)
