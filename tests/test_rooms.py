"""The rooms of the package: imports go up the list and never down; limits of size and density."""

import ast
import functools
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

import lm_eval_icl

PACKAGE = Path(lm_eval_icl.__file__).parent
# From the first to the last: a room may import from itself and from those before it.
ROOMS = [
    {"__init__", "version", "errors", "declared"},
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


class Limit(NamedTuple):
    tokens: int
    density: float  # tokens a logical line: a statement, however the formatter breaks it


# What each room may have in the package, and in tests/; "" is the top folder. Who makes a room
# smaller or plainer lowers its numbers; nobody raises one, but for what a new feature was granted
# and its tests need. Tokens are the unit, since a limit on lines is met by denser lines.
LIMITS: dict[str, tuple[Limit | None, Limit | None]] = {
    "": (Limit(2057, 9.4), Limit(17668, 11.6)),
    "files": (Limit(398, 8.0), None),
    "prompts": (Limit(7098, 10.7), Limit(7232, 12.2)),
    "metaicl": (Limit(3478, 11.4), Limit(6081, 12.5)),
    "decisions": (Limit(2005, 10.1), Limit(1713, 12.9)),
    "inference": (Limit(22865, 11.2), Limit(26660, 12.7)),
    "methods": (Limit(26682, 11.1), Limit(29066, 12.8)),
    "drawing": (Limit(3811, 11.1), Limit(2573, 13.0)),
    "demonstrations": (Limit(11133, 11.5), Limit(7258, 12.9)),
    "training": (Limit(8197, 11.2), Limit(7188, 12.2)),
    "regression": (None, Limit(3216, 13.0)),
    "harness": (Limit(26902, 10.8), Limit(36331, 12.2)),
    "results": (Limit(32413, 11.5), Limit(33245, 13.0)),
    "leaderboard": (Limit(14263, 11.1), Limit(6554, 11.5)),
    "studies": (Limit(20020, 11.3), Limit(21622, 12.5)),
    "smoke": (Limit(2931, 11.0), Limit(2038, 11.0)),
    "cli": (Limit(10701, 10.9), Limit(1330, 9.8)),
}
FILE_LINES = 500  # of a file of the package
FUNCTION_LINES = 75  # of a function of the package
LAYOUT_TOKENS = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
SCOPES = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@functools.cache
def nodes_in(file: Path) -> list[ast.AST]:
    """All that a file of Python consists of."""
    return list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))


def lines_of_docstrings(text: str) -> set[int]:
    lines: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, SCOPES) and ast.get_docstring(node, clean=False) is not None:
            lines.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return lines


def measure(text: str) -> tuple[int, int]:
    """(tokens, logical lines) of a file, without comments, docstrings and line structure."""
    docstrings = lines_of_docstrings(text)
    tokens = 0
    logical_lines = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.start[0] in docstrings:
            continue
        tokens += token.type not in LAYOUT_TOKENS
        logical_lines += token.type == tokenize.NEWLINE
    return tokens, logical_lines


def measure_room(folder: Path, room: str) -> tuple[int, int]:
    tokens = 0
    logical_lines = 0
    for file in (folder / room).rglob("*.py") if room else folder.glob("*.py"):
        of_file, lines = measure(file.read_text(encoding="utf-8"))
        tokens += of_file
        logical_lines += lines
    return tokens, logical_lines


@pytest.mark.parametrize("room", LIMITS)
def test_a_room_has_no_more_tokens_than_it_may(room):
    for folder, limit in zip((PACKAGE, TESTS), LIMITS[room], strict=True):
        tokens, logical_lines = measure_room(folder, room)
        name = f"{folder.name}/{room}"
        if limit is None:
            assert tokens == 0, f"{name} has no limit"
            continue
        assert tokens <= limit.tokens, f"{name} has {tokens} tokens, and may have {limit.tokens}"
        density = tokens / logical_lines
        assert density <= limit.density, (
            f"{name} has {density:.2f} tokens a logical line, and may have {limit.density}"
        )


def test_tokens_are_counted_without_comments_docstrings_and_line_structure():
    text = '"""A file.\n\nIts story."""\n\nx = f(  # a comment\n    1,\n)\nif x:\n    y = x\n'
    assert measure(text) == (13, 3)  # x = f ( 1 , ) | if x : | y = x
    assert measure("def f():\n    '''Do.'''\n    return 1\n") == (7, 2)


def test_files_and_functions_fit_on_few_pages():
    for file in FILES:
        name = file.relative_to(PACKAGE).as_posix()
        length = file.read_text(encoding="utf-8").count("\n")
        assert length <= FILE_LINES, f"{name} has {length} lines, and may have {FILE_LINES}"
        for node in nodes_in(file):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = node.end_lineno - node.lineno + 1
                place = f"{name}:{node.name}"
                assert length <= FUNCTION_LINES, f"{place} has {length} lines"


def test_every_room_has_a_limit():
    rooms = set().union(*ROOMS[1:]) - {"__main__"}
    assert rooms | {"", "regression"} == LIMITS.keys()


def room(module: str) -> int:
    """The number of the room that a module below the package is in."""
    return next(number for number, names in enumerate(ROOMS) if module.split(".")[0] in names)


def imported(file: Path) -> set[str]:
    """Every module that a file imports, inside functions too, with names imported from it."""
    modules = set()
    for node in nodes_in(file):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: a relative import"
            modules.add(node.module)
            modules |= {f"{node.module}.{alias.name}" for alias in node.names}
    return modules


def below(module: str) -> str | None:
    """A module's name below the package; None for another package's module and for other names."""
    if module == "lm_eval_icl":
        return "__init__"
    path = module.removeprefix("lm_eval_icl.")
    at = PACKAGE.joinpath(*path.split("."))
    is_there = at.is_dir() or at.with_suffix(".py").is_file()
    return path if path != module and is_there else None


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_go_up(file):
    name = file.relative_to(PACKAGE)
    here = room(name.with_suffix("").parts[0])
    for module in imported(file):
        ours = below(module)
        assert ours is None or room(ours) <= here, f"{name} imports {module}, which is further down"
        if here < HARNESS:
            assert module.split(".")[0] not in FOREIGN, f"{name} imports {module}"


def circles(imports: dict[str, set[str]]) -> list[str]:
    """The modules that cannot be put into an order in which each imports only modules before
    it."""
    left = dict(imports)
    while True:
        free = [module for module in left if not imports[module] & left.keys() - {module}]
        if not free:
            return sorted(left)
        for module in free:
            del left[module]


def test_no_circle_of_imports():
    """The modules can be read one after the other; imports inside functions count."""
    imports = {}
    for file in FILES:
        module = ".".join(file.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
        imports[module] = set(map(below, imported(file))) - {None}
    assert "harness.models" in imports
    assert circles(imports) == []
    assert circles({**imports, "errors": {"cli"}})  # which imports it
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"d"}}) == ["a", "b", "c"]


def test_the_glossary_has_words_of_the_code():
    """At most 40 terms; each stands in the file where the page says that it is defined."""
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
    names = Counter()
    for file in FILES:
        names.update(node.name for node in nodes_in(file) if isinstance(node, ast.ClassDef))
    assert "Method" in names
    assert not {name for name, count in names.items() if count > 1}


def test_the_test_sees_an_import_that_goes_down(tmp_path):
    file = tmp_path / "x.py"
    module = "lm_eval_icl.harness.prepared_run"
    layouts = "lm_eval_icl.prompts.layouts"
    file.write_text(
        "def f():\n    from lm_eval_icl.harness import prepared_run\n    import lm_eval.api\n"
    )
    assert {"lm_eval_icl.harness", module, "lm_eval.api"} <= imported(file)
    assert room(below(module)) == HARNESS
    assert room(below(layouts)) == 2 < HARNESS
    assert below(f"{layouts}.Pattern") is None
    assert below("torch") is None


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
            ["demonstrations.searches", "demonstrations.selectors", "demonstrations.similar"],
            {"torch", "scipy", *FOREIGN},
        ),
        (["drawing.drawing", "drawing.terminal", "methods.invicl"], {"transformers", *FOREIGN}),
    ],
    ids=["names", "methods", "leaderboard", "commands", "selectors", "drawing"],
)
def test_what_is_imported_needs_no_more(modules, absent):
    names = ", ".join(f"lm_eval_icl.{module}" for module in modules)
    code = f"import {names}, sys; print({absent} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
