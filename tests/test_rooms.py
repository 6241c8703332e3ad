"""The rooms of the package: imports go up the list and never down, and what needs no lm-eval takes none in."""

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import lm_eval_icl

PACKAGE = Path(lm_eval_icl.__file__).parent
# From the first to the last: a room may import from itself and from those before it.
ROOMS = [
    {"__init__", "version", "errors"},
    {"files"},
    {"prompts"},
    {"metaicl"},
    {"decisions"},
    {"inference"},
    {"methods"},
    {"drawing"},
    {"demonstrations"},
    {"training"},
    {"harness"},
    {"results"},
    {"leaderboard"},
    {"studies"},
    {"smoke"},
    {"cli", "__main__"},
]
HARNESS = ROOMS.index({"harness"})
# What the rooms before the harness know nothing of.
FOREIGN = {"lm_eval", "datasets"}
FILES = sorted(PACKAGE.rglob("*.py"))
TESTS = Path(__file__).resolve().parent
# How many lines of Python each room may have in the package, and in tests/; "" is the top folder. Who makes a room
# smaller lowers its number; nobody raises one.
LIMITS = {
    "": (225, 1511),
    "files": (38, 0),
    "prompts": (999, 640),
    "metaicl": (500, 476),
    "decisions": (449, 147),
    "inference": (2698, 2236),
    "methods": (2323, 1338),
    "drawing": (450, 233),
    "demonstrations": (1646, 602),
    "training": (1100, 525),
    "regression": (0, 286),
    "harness": (3444, 2812),
    "results": (2870, 1675),
    "leaderboard": (1210, 272),
    "studies": (1956, 1693),
    "smoke": (439, 386),
    "cli": (900, 148),
}


def lines(folder: Path, room: str) -> int:
    """How many lines of Python a room has."""
    files = (folder / room).rglob("*.py") if room else folder.glob("*.py")
    return sum(file.read_text(encoding="utf-8").count("\n") for file in files)


@pytest.mark.parametrize("room", LIMITS)
def test_a_room_has_no_more_lines_than_it_may(room):
    for folder, limit in zip((PACKAGE, TESTS), LIMITS[room], strict=True):
        assert lines(folder, room) <= limit, (
            f"{folder.name}/{room} has {lines(folder, room)} lines, and may have {limit}"
        )


def test_every_room_has_a_limit():
    assert {
        "",
        "regression",
        *set().union(*ROOMS[1:]) - {"version", "errors", "__main__"},
    } == LIMITS.keys()


def room(module: str) -> int:
    """The number of the room that a module below the package is in."""
    return next(number for number, names in enumerate(ROOMS) if module.split(".")[0] in names)


def imported(file: Path) -> set[str]:
    """Every module that a file imports, inside functions too; names of modules below the package in full."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: a relative import"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def below(module: str) -> str | None:
    """A module's name below the package; None for another package's, or a name that is no module."""
    if module == "lm_eval_icl":
        return "__init__"
    path = module.removeprefix("lm_eval_icl.")
    at = PACKAGE.joinpath(*path.split("."))
    return path if path != module and (at.is_dir() or at.with_suffix(".py").is_file()) else None


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_go_up(file):
    here = room(file.relative_to(PACKAGE).with_suffix("").parts[0])
    for module in imported(file):
        if (name := below(module)) is not None:
            assert room(name) <= here, (
                f"{file.relative_to(PACKAGE)} imports {module}, which is further down"
            )
        if here < HARNESS:
            assert module.split(".")[0] not in FOREIGN, (
                f"{file.relative_to(PACKAGE)} imports {module}"
            )


def circles(imports: dict[str, set[str]]) -> list[str]:
    """The modules that cannot be put into an order in which each imports only modules before it."""
    left = dict(imports)
    while free := [
        module for module, others in left.items() if not others & left.keys() - {module}
    ]:
        for module in free:
            del left[module]
    return sorted(left)


def test_no_circle_of_imports():
    """Whoever reads a module and what it imports comes to an end; imports inside functions count."""
    imports = {}
    for file in FILES:
        module = ".".join(file.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
        imports[module] = {name for other in imported(file) if (name := below(other)) is not None}
    assert "harness.models" in imports and circles(imports) == []
    assert circles({**imports, "errors": {"cli"}})  # which imports it
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"d"}}) == ["a", "b", "c"]


def test_the_glossary_has_words_of_the_code():
    """At most 40 terms; each stands in the package, also as a name, and the file where it is defined has it."""
    page = (PACKAGE.parent / "docs" / "glossary.md").read_text(encoding="utf-8")
    rows = re.findall(r"^- \*\*([a-z ]+)\*\*: .+ \(`([\w/]+\.py)`\)$", page, re.MULTILINE)
    assert 20 <= len(rows) <= 40 and len(dict(rows)) == len(rows) == page.count("\n- ")
    for term, place in rows:
        text = (PACKAGE / place).read_text(encoding="utf-8")
        assert re.search(term.replace(" ", "[ _]?"), text, re.IGNORECASE), (
            f"{term!r} does not stand in {place}"
        )


def test_a_class_name_stands_once():
    """A name that is met in the middle of a page says which class it is."""
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in FILES]
    names = Counter(
        node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
    )
    assert "Method" in names and not {name for name, count in names.items() if count > 1}


def test_the_test_sees_an_import_that_goes_down(tmp_path):
    file = tmp_path / "x.py"
    file.write_text("def f():\n    from lm_eval_icl.harness import run\n    import lm_eval.api\n")
    assert {"lm_eval_icl.harness", "lm_eval_icl.harness.run", "lm_eval.api"} <= imported(file)
    assert (
        room(below("lm_eval_icl.harness.run"))
        == HARNESS
        > room(below("lm_eval_icl.prompts.layouts"))
        == 2
    )
    assert below("lm_eval_icl.prompts.layouts.Pattern") is None and below("torch") is None


def modules_of(room: str) -> list[str]:
    return [
        f"{room}.{file.stem}".removesuffix(".__init__")
        for file in sorted((PACKAGE / room).glob("*.py"))
    ]


@pytest.mark.parametrize(
    ("modules", "absent"),
    [
        # lm-eval registers the names of our methods when its list of models is imported.
        (["methods"], {"torch"}),
        pytest.param(
            ["methods", "methods.predictor", "inference.scoring"], FOREIGN, marks=pytest.mark.slow
        ),
        # A board is made from result files, also where no model could be run.
        (
            [*modules_of("results"), *modules_of("leaderboard")],
            {"lm_eval", "torch", "transformers"},
        ),
        # What a command can say at once does not wait for what runs models.
        (["cli", "cli.show", "cli.study"], {"torch", "transformers", "datasets", "scipy"}),
        (
            ["demonstrations.best_random", "demonstrations.lens", "demonstrations.select"],
            {"torch", "scipy", *FOREIGN},
        ),
        (["drawing.drawing", "drawing.terminal", "methods.invicl"], {"transformers", *FOREIGN}),
    ],
    ids=["names", "methods", "leaderboard", "commands", "selectors", "drawing"],
)
def test_what_is_imported_needs_no_more(modules, absent):
    code = f"import {', '.join(f'lm_eval_icl.{module}' for module in modules)}, sys; print({absent} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
