"""What the pages under docs/ say is so: their code runs, their links lead somewhere, their pictures
are today's."""

import argparse
import dataclasses
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
from typing import Any

import lm_eval
import matplotlib
import matplotlib.pyplot as plt
import pytest
import transformers
from lm_eval.models.huggingface import HFLM
from lm_eval.utils import simple_parse_args_string

from lm_eval_icl import methods, version
from lm_eval_icl.cli import COMMANDS, train
from lm_eval_icl.decisions.rules import RULES
from lm_eval_icl.demonstrations.how import SELECTION_METHODS as SELECTION
from lm_eval_icl.drawing import drawing, picture
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
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def blocks(page: Path) -> list[tuple[str, str, str]]:
    """A page's fenced blocks: (the `file` named on the line before it, language, text)."""
    found = re.finditer(r"(?:`([\w.]+)`:\n\n|)```(\w+)\n(.*?)```\n", read(page), re.DOTALL)
    return [(match[1] or "", match[2], match[3]) for match in found]


def commands_of(page: Path) -> list[str]:
    """The commands of a page, indented or fenced, that start one of our programs, from its name
    on."""
    text = read(page).replace("\\\n", " ")
    shown = re.findall(r"^ {4,}(.*)$", text, re.MULTILINE)
    for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL):
        shown += [line.strip() for line in block.splitlines()]
    programs = r"lm_eval_icl|lm_eval|lm-eval-icl|python -m scripts\.regression"
    pattern = rf"(?:(?:\w+=\w+ )?(?:accelerate launch|torchrun) .*-m )?(({programs}) .*)"
    return [found[1] for line in shown if (found := re.match(pattern, line))]


# What `hf` takes, and hands on.
HF_ARGUMENTS = {
    *inspect.signature(HFLM.__init__).parameters,
    *inspect.signature(transformers.BitsAndBytesConfig.__init__).parameters,
}
COMMON_ARGUMENTS = {field.name for field in dataclasses.fields(CommonArguments)}

# Links.


def anchors(page: Path) -> set[str]:
    """The names that a page's headings have on GitHub."""
    heads = re.findall(r"^#+ (.*)$", read(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@each_page
def test_relative_links_resolve(page):
    links = re.findall(r"\]\(([^)\s]+)\)", read(page))
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
    page = read(DOCS / "methods" / f"{name}.md")
    written = dict(re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", page, re.MULTILINE))
    fields = {field.name: str(field.default) for field in dataclasses.fields(methods.find(name))}
    positions = fields.pop("positions")
    assert fields.pop("repeat") == "1" and written == fields
    index = read(DOCS / "methods" / "README.md")
    row = re.search(rf"^\| \[{name}\]\({name}\.md\) \|.* \| (\w+)[^|]* \|$", index, re.MULTILINE)
    assert row and row[1] == {"layout": "sequential"}.get(positions, positions)


@pytest.mark.pinned
@pytest.mark.parametrize("name", NAMES)
def test_pictures_are_what_is_drawn_now(name, tmp_path):
    """Made again by: lm-eval-icl show NAME --output docs/methods/NAME.svg"""
    file = f"{name}.svg"
    drawn = tmp_path / file
    assert f"]({file})" in read(DOCS / "methods" / f"{name}.md")
    picture.save(drawing.draw(methods.make(name), 3), drawn)
    command = f"lm-eval-icl show {name} --output docs/methods/{file}"
    assert read(drawn) == read(DOCS / "methods" / file), (
        f"{command} (with matplotlib as in constraints.txt)"
    )


@each_page
def test_commands_are_ones_that_we_take(page):
    """Methods and arguments exist; what the commands do is tested elsewhere."""
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
        elif words[1] == "train":
            options = training_options(words)
            methods.find(options["method"])
            assert options.get("metaicl") in (None, *SETTINGS)
        elif words[0] == "lm_eval":
            own = methods.arguments_of(methods.find(given["--model"]))
            arguments = simple_parse_args_string(given["--model_args"])
            assert arguments.pop("pretrained")
            assert set(arguments) <= own | COMMON_ARGUMENTS | HF_ARGUMENTS


def training_options(words):
    return train.read_options(argparse.ArgumentParser(), words[2:])


def test_tasks_of_commands_exist():
    """Ours, and those of lm-eval, whose files are searched: its index of them takes 15 seconds."""
    known = {""}
    for folder in (ROOT / "task_configs", Path(lm_eval.__file__).parent):
        for file in folder.rglob("*.yaml"):
            known.update(re.findall(r"^(?:task|group): (\S+)$", read(file), re.MULTILINE))
    for command in itertools.chain(*map(commands_of, PAGES)):
        words = shlex.split(command, comments=True)
        tasks = ""
        if words[1] == "train":
            tasks = training_options(words).get("tasks", "")
        elif words[0] == "lm_eval":
            tasks = dict(itertools.pairwise(words))["--tasks"]
        assert {*tasks.split(",")} <= known, command


def table(page: Path, heading: str) -> dict[str, list[str]]:
    """The rows of the table whose second column has this heading, by the names in their first."""
    _, after, *_ = read(page).split(f" | {heading}")
    rows = {}
    for line in after.split("\n\n")[0].splitlines()[2:]:
        first, *others = line.strip("| ").split(" | ")
        for name in re.findall(r"`(\w+)`", first):
            rows[name] = others
    return rows


def test_the_table_of_readme_is_the_methods():
    rows = table(ROOT / "README.md", "method")
    assert tuple(rows) == NAMES
    for name, (_, invariant, *arguments) in rows.items():
        method = methods.make(name)
        assert (invariant != "no") == method.invariant
        own = methods.arguments_of(type(method)) - {"positions", "repeat"}
        assert set(re.findall(r"`(\w+)=", "".join(arguments))) == own


def test_the_list_of_arguments_is_their_declaration():
    _, section, *_ = read(DOCS / "arguments.md").split("\n## ")
    listed = dict(re.findall(r"^- `(\w+)(?:=(\w+))?`", section, re.MULTILINE))
    for field in dataclasses.fields(CommonArguments):
        default = "" if field.default is None else str(field.default)
        assert listed.pop(field.name) == default
    assert set(listed) == {"positions", "repeat"}


def defaults(kind: type, *common: str) -> dict[str, str]:
    """A class's arguments and their defaults as the pages write them, "" for other than numbers
    and words."""
    written = {}
    for field in dataclasses.fields(kind):
        is_plain = isinstance(field.default, str | int | float) and field.default is not False
        text = f"{field.default:g}" if isinstance(field.default, float) else str(field.default)
        if field.name not in common:
            written[field.name] = text if is_plain else ""
    return written


def test_the_table_of_decision_rules_is_their_declaration():
    page = read(DOCS / "deciding.md")
    rows = re.findall(r"^\| `(\w+)`.* \| ([^|]*) \| [^|]*\|$", page, re.MULTILINE)
    assert [name for name, _ in rows] == list(RULES)
    for name, arguments in rows:
        written = dict(re.findall(r"`(\w+)=([\w:]*)`", arguments))
        assert written == defaults(RULES[name]), name


def test_the_list_of_selection_methods_is_their_declaration():
    page = read(DOCS / "selecting.md")
    _, section = page.split("## The methods\n")
    listed = set()
    for item in re.findall(r"^- ((?:.*\n)(?:  .*\n)*)", section, re.MULTILINE):
        head, _, text = item.partition(" by ")
        arguments = re.findall(r"`(\w+)=?(\w*)`", text)
        for name in re.findall(r"`(\w+)`", head):
            assert dict(arguments) == defaults(SELECTION[name], "balance", "pool"), name
            listed.add(name)
    assert listed == set(SELECTION)
    assert "`pool=1000`" in page and "instead of 5,000" in page
    assert "`balance=False`" in page


# Code that runs as it is written.

PAGE = DOCS / "add-a-method.md"


def lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip("\n").splitlines() if line.strip()]


NUMBER = r"-?\d+(?:\.\d+)?"


def without_numbers(lines: list[str]) -> list[str]:
    return [re.sub(NUMBER, "#", line) for line in lines]


def numbers(line: str) -> list[float]:
    return list(map(float, re.findall(NUMBER, line)))


def check_lines(printed: list[str], expected: list[str], within: float) -> None:
    """The lines are the same, but for numbers, which differ by no more than `within`."""
    assert without_numbers(printed) == without_numbers(expected)
    for line, says in zip(printed, expected, strict=True):
        assert numbers(line) == pytest.approx(numbers(says), abs=within), line


def printed(command: str, folder: Path) -> list[str]:
    """What a command of a page prints in a folder; of lm-eval's output the pages have the tables
    alone."""
    program, *arguments = shlex.split(command.replace("$MODEL", str(model_path())))
    done = processes.command(*arguments, program=program, cwd=folder)
    assert done.returncode == 0, done.stderr
    return [line for line in lines(done.stdout) if program != "lm_eval" or line.startswith("|")]


def joined(page: Path, wanted: str) -> str:
    """The text of all blocks of a language."""
    return "\n".join(text for _, language, text in blocks(page) if language == wanted)


@pytest.mark.slow
def test_python_blocks_print_what_the_page_says(tmp_path):
    """All Python blocks of docs/python.md run in one process, in their order."""
    page = DOCS / "python.md"
    done = processes.python(joined(page, "python"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    check_lines(lines(done.stdout), lines(joined(page, "console")), within=0.003)


@pytest.mark.slow
@pytest.mark.pinned
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
    assert read(tmp_path / "results/compare/figures/sensitivity.svg").startswith("<?xml")


@pytest.mark.slow
def test_the_cells_of_the_notebook_run():
    """Stored without outputs. What it says of orders is so."""
    cells = json.loads(read(DOCS / "quickstart.ipynb"))["cells"]
    names: dict[str, Any] = {}
    matplotlib.use("agg")
    for cell in cells:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None
            exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
    plt.close("all")
    values = names["orders"].groupby(["method", "text"])["amber - square"]
    assert (values.nunique()["icl"] > 1).all()
    assert (values.nunique()["invicl"] == 1).all()
    last = ("icl", names["texts"][2])
    assert values.min()[last] < 0 < values.max()[last]
    evaluated = names["evaluated"]
    assert evaluated["icl"]["acc,none"] == evaluated["hf"]["acc,none"]


@pytest.mark.slow
@pytest.mark.pinned
def test_adding_a_method_works_as_written(tmp_path):
    """With the page's first file in the working directory, the commands draw its picture and print
    what it says."""
    name, _, text = blocks(PAGE)[0]
    (tmp_path / name).write_text(text, encoding="utf-8")
    show, evaluate = (text for _, language, text in blocks(PAGE) if language == "console")
    command, _, says = show.removeprefix("$ ").partition("\n")
    assert printed(command, tmp_path) == lines(says)
    expected = DOCS / "concepts/neighbours.svg"
    assert (tmp_path / "neighbours.svg").read_bytes() == expected.read_bytes()
    command, _, says = evaluate.removeprefix("$ ").partition("\n")
    check_lines(printed(command, tmp_path), lines(says), within=0.011)


# What is said of the code.


@each_page
def test_files_that_are_named_are_there(page):
    text = read(page)
    named = re.findall(r"`((?:lm_eval_icl|tests|scripts|docs|task_configs)/[\w./-]+\.\w+)`", text)
    named = [name for name in named if "neighbours" not in name]  # of the reader's
    named += re.findall(r"python (scripts/\w+\.py)", text)
    assert not [name for name in named if not (ROOT / name).exists()]
    benchmark = read(ROOT / "scripts/benchmark.py")
    for command in re.findall(r"benchmark\.py (\w+)", text):
        assert f'"{command}": ' in benchmark, command


@pytest.mark.pinned
def test_pictures_of_concepts_are_what_is_drawn_now(tmp_path):
    """Made again by: python scripts/draw_concepts.py"""
    save = runpy.run_path(str(ROOT / "scripts/draw_concepts.py"))["save"]
    for name in ("parts", "context", "memory", "pack", "canonical-order"):
        file = f"{name}.svg"
        save(name, tmp_path / file)
        expected = DOCS / "concepts" / file
        assert (tmp_path / file).read_bytes() == expected.read_bytes(), name


def test_pages_are_short():
    """In words. Who makes pages shorter lowers the numbers."""
    words = {page: len(read(page).split()) for page in PAGES}
    reports = sum(words.pop(page) for page in DOCS.glob("reports/*.md"))
    assert reports <= 12_000
    assert words[DOCS / "log.md"] <= 1_500
    assert words.pop(ROOT / "README.md") <= 850
    assert sum(words.values()) <= 21_000
    assert read(ROOT / "CHANGELOG.md").count("\n") <= 60


def test_the_version_is_one():
    """Before a release, pages name the version that will be released."""
    given = [version.VERSION.removesuffix(".dev0")]
    given += re.findall(r"^version: (.*)$", read(ROOT / "CITATION.cff"), re.MULTILINE)
    given += re.findall(r"^## \[(.*?)\]", read(ROOT / "CHANGELOG.md"), re.MULTILINE)[:1]
    assert len(given) == 3 and len(set(given)) == 1, given


# The site; `make site` checks its links.


def pages_in(entries: object) -> list[str]:
    """The files that a navigation names, in its order."""
    if isinstance(entries, str):
        return [entries]
    parts = entries.values() if isinstance(entries, dict) else entries
    return list(itertools.chain(*map(pages_in, parts)))


def test_the_navigation_has_every_page_once():
    navigation = tomllib.loads(read(ROOT / "zensical.toml"))["project"]["nav"]
    pages = [file.relative_to(DOCS).as_posix() for file in DOCS.rglob("*.md")]
    assert sorted(pages_in(navigation)) == sorted(pages)


def test_the_reference_has_every_command_and_method_once():
    page = read(DOCS / "reference/commands.md")
    fences = re.findall(r"^```command\n(.*)\n```$", page, re.MULTILINE)
    assert sorted(fences) == sorted(COMMANDS)
    page = read(DOCS / "reference/method-classes.md")
    classes = re.findall(r"^::: lm_eval_icl\.methods\.(\w+)\.(\w+)$", page, re.MULTILINE)
    assert [module for module, _ in classes] == [name.lower() for _, name in classes] == list(NAMES)
