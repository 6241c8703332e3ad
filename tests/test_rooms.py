"""The rooms of the package: imports go up the list and never down, and what needs no lm-eval takes none in."""

import ast
import subprocess
import sys
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
    "": (225, 1608),
    "files": (38, 0),
    "prompts": (900, 674),
    "metaicl": (500, 507),
    "decisions": (449, 150),
    "inference": (2699, 2354),
    "methods": (2098, 1348),
    "drawing": (450, 272),
    "demonstrations": (1293, 464),
    "training": (1100, 553),
    "regression": (0, 355),
    "harness": (3100, 2694),
    "results": (2600, 1719),
    "leaderboard": (1091, 290),
    "studies": (1898, 1779),
    "smoke": (439, 497),
    "cli": (899, 179),
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
            assert room(name) <= here, f"{file.relative_to(PACKAGE)} imports {module}, which is further down"
        if here < HARNESS:
            assert module.split(".")[0] not in FOREIGN, f"{file.relative_to(PACKAGE)} imports {module}"


def modules_of(room: str) -> list[str]:
    return [f"{room}.{file.stem}".removesuffix(".__init__") for file in sorted((PACKAGE / room).glob("*.py"))]


@pytest.mark.parametrize(
    ("modules", "absent"),
    [
        # lm-eval registers the names of our methods when its list of models is imported.
        (["methods"], {"torch"}),
        pytest.param(["methods", "methods.predictor", "inference.scoring"], FOREIGN, marks=pytest.mark.slow),
        # A board is made from result files, also where no model could be run.
        ([*modules_of("results"), *modules_of("leaderboard")], {"lm_eval", "torch", "transformers"}),
        # What a command can say at once does not wait for what runs models.
        (["cli", "cli.show", "cli.study"], {"torch", "transformers", "datasets", "scipy"}),
        (["demonstrations.best_random", "demonstrations.lens", "demonstrations.select"], {"torch", "scipy", *FOREIGN}),
        (["drawing.drawing", "drawing.terminal", "methods.invicl"], {"transformers", *FOREIGN}),
    ],
    ids=["names", "methods", "leaderboard", "commands", "selectors", "drawing"],
)
def test_what_is_imported_needs_no_more(modules, absent):
    code = f"import {', '.join(f'lm_eval_icl.{module}' for module in modules)}, sys; print({absent} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
