"""Figures of a leaderboard, of boards that are made from their parts."""

from __future__ import annotations

import csv
import math
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lm_eval_icl import methods
from lm_eval_icl.drawing import style
from lm_eval_icl.errors import InputError
from lm_eval_icl.leaderboard import figures, numbers
from lm_eval_icl.results.board import AVERAGE, Board, Entry
from tests import boards
from tests.boards import Kind

HERE = Path(__file__).parents[1]
SVG = "{http://www.w3.org/2000/svg}"
ALL = list(figures.FIGURES)
KINDS: list[Kind] = [
    ("icl", {}, 8),
    ("invicl", {}, 8),
    ("pcw", {}, 8),
    ("prefixicl", {}, 8),
    ("deepthink", {"T": 5, "eta": 0.01}, 8),
]


def make(
    kinds: Sequence[Kind] = KINDS, checkpoints: Sequence[str] = ("gpt2",), tasks: Sequence[str] = ("sst2",), **more: Any
) -> Board:
    """A board of made-up numbers, the same ones whenever it is called."""
    return boards.make(kinds, checkpoints, tasks, **more)


def everything() -> Board:
    """A board that has something to show in each figure."""
    kinds: list[Kind] = [(name, {}, shots) for name in ("icl", "invicl", "theirs") for shots in (2, 4, 8, 16)]
    kinds += [("deepthink", {"T": T, "eta": eta}, 8) for T in (1, 2, 3, 4) for eta in (0.01, 0.1)]
    return with_rules(make(kinds, tasks=("a", "b"), seeds=2, orders=2))


def with_rules(board: Board, name: str = "batch") -> Board:
    """With some of the entries under a decision rule, too."""
    compared = [entry for entry in board.entries if any(cell.difference for cell in entry.cells.values())][:5]
    decided = [
        replace(entry, name=f"{entry.name}r", conditions=f"{entry.conditions}, decide: {name}", rule=name)
        for entry in compared
    ]
    baseline = board.baseline | {entry.name: entry.name[:-1] for entry in decided}
    return replace(board, entries=(*board.entries, *decided), baseline=baseline)


def table(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def drawn(board: Board, folder: Path, *only: str) -> dict[str, list[dict[str, str]]]:
    """By the figure's name, the lines of its CSV file."""
    return {path.stem: table(path) for path in figures.draw(board, folder, only or None) if path.suffix == ".csv"}


def texts(path: Path) -> list[str]:
    """The texts of an SVG file."""
    return [part.text or "" for part in ET.parse(path).iter(f"{SVG}text")]


def of(board: Board, line: dict[str, str]) -> Entry:
    return next(entry for entry in board.entries if entry.name == line["name"])


def changed(board: Board, change: Any) -> Board:
    return replace(board, entries=tuple(change(entry) for entry in board.entries))


# ---------------------------------------------------------------------------------------------------------------
# Files.


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """All that `draw` makes of a board."""
    return figures.draw(everything(), tmp_path_factory.mktemp("figures") / "new" / "folder")


@pytest.fixture(scope="module")
def elements() -> dict[str, str]:
    return figures.svgs(everything())


@pytest.fixture(autouse=True)
def no_png(monkeypatch: pytest.MonkeyPatch) -> None:
    """A PNG is the same figure and takes as long; those of `files` do for all."""
    monkeypatch.setattr(figures, "METADATA", {"svg": style.METADATA["svg"]})


def test_each_figure_is_a_picture_with_its_numbers_beside_it(files: list[Path]) -> None:
    assert [path.name for path in files] == [f"{name}.{kind}" for name in ALL for kind in ("svg", "png", "csv")]
    for path in files:
        if path.suffix == ".csv":
            assert table(path)
        elif path.suffix == ".svg":
            assert ET.parse(path).getroot().tag == f"{SVG}svg" and len(texts(path)) > 5
        else:
            assert path.read_bytes().startswith(b"\x89PNG")


def test_equal_boards_make_equal_files(files: list[Path], elements: dict[str, str], tmp_path: Path) -> None:
    """In a process that orders sets of strings differently."""
    code = (
        "import sys; from pathlib import Path; from tests.leaderboard import test_leaderboard_figures as t; "
        "from lm_eval_icl.leaderboard import figures; "
        "figures.draw(t.everything(), Path(sys.argv[1]), ['forest']); "  # with its PNG
        "del figures.METADATA['png']; "
        "figures.draw(t.everything(), Path(sys.argv[1])); "
        "Path(sys.argv[1], 'page').write_text(str(figures.svgs(t.everything())), encoding='utf-8')"
    )
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join([*sys.path, str(HERE.parent)])}
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, env=environment)
    assert (tmp_path / "page").read_text(encoding="utf-8") == str(elements)
    compared = [path for path in files if path.suffix != ".png" or path.stem == "forest"]
    assert {path.name for path in tmp_path.iterdir()} == {"page", *(path.name for path in compared)}
    for path in compared:
        assert (tmp_path / path.name).read_bytes() == path.read_bytes(), path.name


def test_the_users_settings_of_matplotlib_change_nothing(tmp_path: Path) -> None:
    import matplotlib

    first = {path.name: path.read_bytes() for path in figures.draw(make(), tmp_path, ["forest", "seeds"])}
    with matplotlib.rc_context({"font.size": 20, "svg.fonttype": "path", "axes.prop_cycle": "cycler('color', ['r'])"}):
        again = figures.draw(make(), tmp_path, ["forest", "seeds"])
        assert {path.name: path.read_bytes() for path in again} == first


def test_a_figure_or_a_folder_that_cannot_be_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no figure 'shot': name some of forest, "):
        figures.draw(make(), tmp_path, ["T", "shot"])
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="file: cannot be written"):
        figures.draw(make(), tmp_path / "file")


@pytest.mark.parametrize(
    ("board", "names"),
    [
        (make(KINDS[:2], tasks=("a",)), "forest seeds tokens"),  # one difference is no map
        (make(KINDS[:4], seeds=1, tokens=False), "forest differences"),
        (make([("invicl", {}, 8), ("pcw", {}, 8)], tasks=("a", "b")), "forest seeds tokens"),
        (make([("deepthink", {"T": T}, 8) for T in (1, 2)], tasks=("a", "b")), "forest seeds T dev tokens"),
        (make(KINDS[:2], tasks=("a",), orders=2), "forest seeds orders sensitivity tokens"),
        (make(KINDS[:4], missing=1), ""),
    ],
)
def test_what_has_nothing_to_show_is_not_drawn(board: Board, names: str) -> None:
    for rows in (figures._ROWS, figures._ROWS_ON_PAGE):
        with style.styled():
            assert [name for name, _ in figures._all(board, rows)] == names.split()


# ---------------------------------------------------------------------------------------------------------------
# What is drawn.


def test_forest_has_means_intervals_and_the_baseline(tmp_path: Path) -> None:
    board = make(tasks=("a", "b"), checkpoints=("one", "two"))
    lines = drawn(board, tmp_path, "forest")["forest"]
    assert len(lines) == len(board.entries)
    said = texts(tmp_path / "forest.svg")
    by_name = {entry.name: entry for entry in board.entries}
    for line in lines:
        found = of(board, line).cells[AVERAGE].estimate
        assert [float(line[name]) for name in ("mean", "low", "high")] == [found.mean, found.low, found.high]
        assert float(line["baseline"]) == by_name[board.baseline[line["name"]]].cells[AVERAGE].estimate.mean
        assert f"{numbers.value(found.mean, board.columns[0])}  [{numbers.interval(found, board.columns[0])}]" in said
    assert {"one", "two", "icl", "deepthink T=5, eta=0.01"} <= set(said)  # no word of the shots, which all have
    assert {"accuracy, % (average over tasks, 8 shots)", "Means with 95% intervals; dashed: the baseline"} <= set(said)


def test_a_mean_without_an_interval_is_a_point(tmp_path: Path) -> None:
    def change(entry: Entry) -> Entry:
        cell = entry.cells["sst2"]
        of = replace(cell.estimate, low=-math.inf, high=math.inf, error=math.inf)
        return replace(entry, cells={"sst2": replace(cell, estimate=of)})

    board = changed(make(), change)
    drawn(board, tmp_path, "forest")
    assert "inf" not in (tmp_path / "forest.svg").read_text()
    assert f"{100 * board.entries[0].cells['sst2'].estimate.mean:.1f}" in texts(tmp_path / "forest.svg")


def test_seeds_on_the_average_are_weighted_sums_of_the_tasks(tmp_path: Path) -> None:
    board = make(tasks=("a", "b"), seeds=4, orders=3)
    weights = {"a": 0.25, "b": 0.75}
    board = replace(board, columns=(replace(board.columns[0], weights=weights), *board.columns[1:]))
    lines = drawn(board, tmp_path, "seeds")["seeds"]
    assert len(lines) == 4 * len(board.entries) * 3  # the average and both tasks
    for line in lines:
        if line["column"] != AVERAGE:
            continue
        entry, at = of(board, line), int(line["prompt set"].split()[1])
        expected = sum(weight * entry.cells[task].sets[at].value for task, weight in weights.items())
        assert float(line["value"]) == pytest.approx(expected)


def test_seeds_that_a_task_lacks_are_not_drawn_on_the_average(tmp_path: Path) -> None:
    def change(entry: Entry) -> Entry:
        fewer = replace(entry.cells["b"], sets=entry.cells["b"].sets[:3])
        return replace(entry, cells={**entry.cells, "b": fewer})

    lines = drawn(changed(make(tasks=("a", "b")), change), tmp_path, "seeds")["seeds"]
    assert {line["prompt set"] for line in lines if line["column"] == AVERAGE} == {"seed 0", "seed 1", "seed 2"}


def test_orders_are_drawn_around_the_mean_of_their_demonstrations(tmp_path: Path) -> None:
    board = make(tasks=("a",), seeds=2, orders=3)
    lines = drawn(board, tmp_path, "orders", "sensitivity")
    for entry in board.entries:
        found = [float(line["value"]) for line in lines["orders"] if line["name"] == entry.name]
        sets = entry.cells["a"].sets
        assert found == pytest.approx([one.result.value - each.value for each in sets for one in each.answered])
        (line,) = [line for line in lines["sensitivity"] if line["name"] == entry.name]
        flips = entry.cells["a"].sensitivity
        assert [float(line[name]) for name in ("flip rate", "low", "high")] == [flips.mean, flips.low, flips.high]


def test_entries_that_differ_in_shots_only_are_a_line(tmp_path: Path) -> None:
    kinds = [("icl", {}, shots) for shots in (0, 1, 4, 16)] + [("pcw", {"windows": n}, 2 * n) for n in (2, 4)]
    board = make(kinds, tasks=("a", "b"))
    every = drawn(board, tmp_path, "shots")["shots"]
    assert [line["column"] for line in every] == [AVERAGE] * 4 + ["a"] * 4 + ["b"] * 4
    lines = every[:4]
    assert [(line["line"], float(line["demonstrations"])) for line in lines] == [("icl", n) for n in (0, 1, 4, 16)]
    assert [float(line["mean"]) for line in lines] == [of(board, line).cells[AVERAGE].estimate.mean for line in lines]
    assert {"0", "1", "4", "16"} <= set(texts(tmp_path / "shots.svg"))


def test_curves_over_T_with_defaults_and_without_what_was_chosen(tmp_path: Path) -> None:
    kinds: list[Kind] = [("icl", {}, 8)]
    kinds += [("deepthink", {"T": T, "eta": eta}, 8) for T in (1, 2, 10) for eta in (0.01, 0.1)]
    board = make(kinds, tasks=("a", "b"))

    # Those by default are in the run's description.
    others = {"T=1, eta=0.01": "", "T=2, eta=0.1": "T=chosen on dev, eta=0.1"}
    board = changed(board, lambda entry: replace(entry, arguments=others.get(entry.arguments, entry.arguments)))
    lines = [line for line in drawn(board, tmp_path, "T")["T"] if line["column"] == AVERAGE]
    expected = {"deepthink eta=0.01": [1, 2, 10], "deepthink eta=0.1": [1, 10], "baseline": [None]}
    found: dict[str, list[float | None]] = {}
    for line in lines:
        found.setdefault(line["line"], []).append(float(line["T"]) if line["T"] else None)
    assert found == expected
    assert {"deepthink eta=0.01", "deepthink eta=0.1", "baseline: icl"} <= set(texts(tmp_path / "T.svg"))


def test_the_map_has_dots_where_holm_says_so_and_dashes_where_nothing_is_known(tmp_path: Path) -> None:
    board = make(tasks=("a", "b", "c"))
    *others, last = board.entries
    board = replace(board, entries=(*others, replace(last, cells={"a": last.cells["a"]})))
    lines = drawn(board, tmp_path, "differences")["differences"]
    expected = {
        (entry.name, column): cell
        for entry in board.entries
        for column, cell in entry.cells.items()
        if cell.difference is not None
    }
    assert {(line["name"], line["column"]) for line in lines} == expected.keys()
    said = texts(tmp_path / "differences.svg")
    for line in lines:
        cell = expected[line["name"], line["column"]]
        assert float(line["difference"]) == cell.difference.mean
        assert line["significant"] == str(cell.p_holm < 0.05)
        assert numbers.signed(cell.difference.mean, board.columns[0]) in said
    with style.styled():
        figure = figures._differences(board, 40)
    marks = [line.get_marker() for line in figure.figure.axes[0].get_lines()]
    assert marks.count("o") == sum(line["significant"] == "True" for line in lines) > 0
    assert marks.count("_") == len({line["name"] for line in lines}) * 4 - len(lines) > 0


def test_blue_is_better_also_where_less_is_better() -> None:
    board = make(tasks=("a", "b"))
    columns = [replace(column, higher_is_better=column.name != "b") for column in board.columns]
    with style.styled():
        signs = []
        for one in (board, replace(board, columns=tuple(columns))):
            found = figures._differences(one, 40)
            signs.append(np.sign(found.figure.axes[0].images[0].get_array()))
    assert (signs[0] * signs[1] == [1, 1, -1]).all()


def test_the_dashed_line_joins_what_no_cheaper_entry_reaches(tmp_path: Path) -> None:
    board = make(tasks=("a", "b"))
    lines = drawn(board, tmp_path, "tokens")["tokens"]
    assert len(lines) == len(board.entries)
    for line in lines:
        assert float(line["tokens"]) == of(board, line).tokens
        cheaper = [float(other["mean"]) for other in lines if float(other["tokens"]) < float(line["tokens"])]
        assert line["best"] == str(float(line["mean"]) > max(cheaper, default=0))


@pytest.mark.parametrize(("low", "high"), [(380, 540), (20, 30), (1.5, 9e6), (100, 900), (1e-3, 2e-3), (7, 7.01)])
def test_there_are_a_few_ticks_whatever_the_tokens(low: float, high: float) -> None:
    board = make(KINDS[:2])
    board = replace(board, entries=tuple(replace(e, tokens=t) for e, t in zip(board.entries, (low, high), strict=True)))
    with style.styled():
        made = figures._tokens(board, 40)
        axes = made.figure.axes[0]
        left, right = axes.get_xlim()
        ticks = [tick for tick in axes.get_xticks() if left <= tick <= right]
    assert 2 <= len(ticks) <= 9


def test_the_dev_curve_is_the_mean_over_seeds_with_rings_where_they_chose(tmp_path: Path) -> None:
    board = make([("icl", {}, 8), ("deepthink", {"T": 2}, 8)], seeds=2)
    lines = drawn(board, tmp_path, "dev")["dev"]
    assert [(line["line"], line["argument"], float(line["at"])) for line in lines] == [
        ("sst2", "T", T) for T in (1, 2, 4)
    ]
    assert [float(line["score"]) for line in lines] == pytest.approx([0.56, 0.57, 0.59])
    assert [line["chosen"] for line in lines] == ["False", "True", "True"]  # by one seed and the other
    assert "T" in texts(tmp_path / "dev.svg")


@pytest.mark.parametrize(
    "study",
    [
        3,
        [],
        {"curve": 3},
        {"curve": "T"},
        {"curve": [3, {}, {"arguments": 3, "score": 1}, {"arguments": {"T": 1}}]},
        {"curve": [{"arguments": {"T": T, "x": None}, "score": s} for T, s in ((1, 0.5), ("<b>", 1), (2, True))]},
    ],
)
def test_a_dev_curve_of_a_stranger_is_not_trusted(study: Any, tmp_path: Path) -> None:
    board = make(KINDS[:2])
    entry = board.entries[0]
    runs = tuple(replace(run, icl={"study": study}) for run in entry.runs)
    board = replace(board, entries=(replace(entry, runs=runs), *board.entries[1:]))
    assert figures.draw(board, tmp_path, ["dev"]) == []


# ---------------------------------------------------------------------------------------------------------------
# Large boards, strange names.


def test_large_boards_stay_readable_and_say_what_is_left_out(tmp_path: Path) -> None:
    names = ["icl", *(f"m{i}" for i in range(19))]
    kinds: list[Kind] = [(name, {}, 8) for name in names]
    board = make(kinds, [f"c{i}" for i in range(5)], [f"task{i}" for i in range(40)], seeds=2)
    found = drawn(board, tmp_path)
    assert {name: len({line["name"] for line in lines}) for name, lines in found.items()} == {
        "forest": 40,
        "differences": 40,
        "seeds": 24,
        "tokens": 100,
    }
    sentence = "60 of 100 entries, for room (the best of each checkpoint are drawn)"
    assert any(sentence in text for text in texts(tmp_path / "forest.svg"))
    assert any("5 of 41 columns, for room" in text for text in texts(tmp_path / "differences.svg"))
    for checkpoint in range(5):
        here = [line for line in found["forest"] if line["checkpoint"] == f"c{checkpoint}"]
        every = [entry for entry in board.entries if entry.checkpoint == f"c{checkpoint}"]
        # The best ones, and the baseline.
        expected = {entry.name for entry in every[: len(here)]} | {every[0].name}
        assert "icl" in {line["method"] for line in here}
        assert len({line["name"] for line in here} - expected) <= 1 < len(here)
    assert sum(map(len, figures.svgs(board).values())) < 250_000


HOSTILE = [
    "$x_1$ \\frac{",
    "<script>alert(1)</script>",
    "a\nb\x00c\x1b",
    "\ud800 lone",
    "-- --> ]]> &amp; \" '",
    "_hidden",
    "",
    "\u202egnp",
    "名前" * 40 + "\U0001f600",
    "%s {0} \\n" + "x" * 500,
]


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("where", ["rows and columns", "panels"])
def test_strange_names_are_text(where: str, tmp_path: Path) -> None:
    if where == "panels":
        kinds: list[Kind] = [("icl", {}, 4), ("icl", {}, 8), ("pcw", {"T": 1}, 8), ("pcw", {"T": 2}, 8)]
        board = make(kinds, checkpoints=HOSTILE, tasks=("a",), seeds=2, orders=2)
    else:
        kinds = [(name, {name: 1, "T": T}, shots) for name in HOSTILE for T, shots in ((1, 4), (1, 8), (2, 8))]
        board = make([("icl", {}, 8), *kinds], tasks=HOSTILE, seeds=2, orders=2)
    assert set(drawn(with_rules(board, HOSTILE[0]), tmp_path)) == set(ALL)
    for path in tmp_path.glob("*.svg"):
        said = texts(path)
        assert max(map(len, said)) < 140 and not any(char < " " for text in said for char in text)
    assert any(HOSTILE[0] in text for text in texts(tmp_path / "forest.svg"))
    assert any("alert(1)" in text for text in texts(tmp_path / "forest.svg"))
    if where == "rows and columns":
        assert any("_hidden" in text for text in texts(tmp_path / "shots.svg"))  # in the legend
    for path in tmp_path.glob("*.svg"):
        svg = figures._element(path.read_text(encoding="utf-8"), "a figure")
        assert {part.tag for part in ET.fromstring(svg).iter()} <= set("svg g defs path use text image rect".split())


# ---------------------------------------------------------------------------------------------------------------
# In a page, and colours.


def test_figures_for_a_page_need_nothing_but_the_page(elements: dict[str, str]) -> None:
    assert len(elements) == len(ALL)
    ids: list[str] = []
    for title, svg in elements.items():
        assert svg.startswith("<svg") and not re.search("http|<!--|<style|<metadata|<!DOCTYPE", svg)
        assert style.INK not in svg and "currentColor" in svg and "#ffffff" not in svg  # no background
        root = ET.fromstring(svg)
        assert root.get("role") == "img" and root.get("aria-label") == title and root.get("viewBox")
        here = [part.get("id") for part in root.iter() if part.get("id")]
        links = {part.get("href", "") for part in root.iter() if part.get("href")}
        assert {link[1:] for link in links if link.startswith("#")} <= set(here)
        assert all(link.startswith(("#", "data:image/png")) for link in links)
        ids += here
    assert len(set(ids)) == len(ids)


def test_a_method_has_one_colour_and_marker_on_all_boards(tmp_path: Path) -> None:
    known = {"hf", *methods.NAMES}
    looks = [style.of_method(name) for name in known]
    assert len({color for color, _ in looks}) == len({marker for _, marker in looks}) == len(known)
    for number, kinds in enumerate((KINDS[:2], [("theirs", {}, 8), *KINDS])):
        drawn(make(kinds), tmp_path / str(number), "forest", "seeds")
        for name in ("forest", "seeds"):
            picture = (tmp_path / str(number) / f"{name}.svg").read_text(encoding="utf-8")
            assert all(style.of_method(method)[0] in picture for method, _, _ in kinds)
    with style.styled():
        tokens = figures._tokens(make([(name, {}, 8) for name in sorted(known)]), 40)
    assert known <= {text.get_text() for text in tokens.figure.legends[0].get_texts()}
