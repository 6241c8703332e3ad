"""The commands, the page, the tables and the figures of a board of lm-eval's files."""

from __future__ import annotations

import csv
import json
import math
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import pytest

from lm_eval_icl.errors import InputError
from lm_eval_icl.leaderboard import curves, figures, tables
from lm_eval_icl.leaderboard.headline import Axis, headline, names_of
from lm_eval_icl.leaderboard.opened import data
from lm_eval_icl.leaderboard.page import page
from lm_eval_icl.results.board import Board, grouped
from lm_eval_icl.results.rivals import named
from tests import commands
from tests.boards import write
from tests.results.files import board_of

RULE = {"rule": "batch", "arguments": {}, "transductive": True}
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\u202e\x1b[31m"


def results(folder: Path) -> Path:
    """Six rows: three methods, each raw and under a rule.

    Star gains by the rule and is below icl under it.
    """
    right = [0, 1] * 40
    for seed in range(3):
        rules = {"batch": {**RULE, "says": right}}
        write(folder / "icl", "icl", seed, n=80, says=[0] * 60 + [1] * 20, rules=rules)
        write(folder / "pcw", "pcw", seed, n=80, says=right[:72] + [0] * 8, rules=rules)
        rules = {"batch": {**RULE, "says": [0, 1, 0, 0] * 20}}
        write(folder / "star", "star", seed, n=80, says=[0] * 80, rules=rules)
    return folder


@pytest.fixture
def board(tmp_path) -> Board:
    return board_of(results(tmp_path / "r"))


def test_what_a_newcomer_is_told(tmp_path, board):
    """What is best without a rule and under one, and by how much; what no sign means."""
    raw, under, constant, family = board.summary
    assert raw == (
        "Without a decision rule, the highest value on t is 95.0% (its own 95% interval: 87.2% to "
        "98.5%): pcw. The best is better than always giving one answer (+45.0 points). Better than "
        "icl: pcw (+45.0 points)."
    )
    assert under.startswith(
        "Under the rule batch, the highest value on t is 100.0% (its own 95% interval"
    )
    assert "icl; pcw. Worse than icl: star (\N{MINUS SIGN}25.0 points)." in under
    assert under.endswith("Better than without the rule: icl (+50.0 points); star (+25.0 points).")
    assert constant == "Always giving the most frequent right answer would score 50.0%."
    one_answer = board_of(write(tmp_path / "one", says=[0] * 39 + [1]))
    assert (
        "icl. The best is not distinguishable from always giving one answer (+2.5"
        in one_answer.summary[0]
    )
    assert "with 95% certainty: all 21 pairs of rows" in family
    assert [entry.rule for entry in board.entries] == [None] * 3 + ["batch"] * 3
    assert board.common == ("4 shots",)
    assert named(board.entries, "pcw").rule is None
    assert named(board.entries, "pcw, decide: batch").rule == "batch"


def test_the_best_is_marked_and_what_is_worse(board):
    cells = {entry.label: entry.cells["t"] for entry in board.entries}
    assert [label for label, cell in cells.items() if cell.is_best] == [
        "pcw",
        "icl, decide: batch",
        "pcw, decide: batch",
    ]
    assert cells["star, decide: batch"].is_worse
    assert not cells["pcw"].is_worse


def test_the_terminal(tmp_path, capsys):
    folder = results(tmp_path / "r")
    out = tmp_path / "new" / "folder"
    written = [part for kind in ("csv", "md", "tex") for part in (f"--{kind}", f"{out}/b.{kind}")]
    commands.run(
        "leaderboard", folder, "--output", f"{out}/b.html", *written, "--plots", f"{out}/plots"
    )
    said = capsys.readouterr().out
    for text in (
        "t (org/model, 4 shots)",
        "vs icl",
        "vs raw",
        "points",
        "+45.0",
        "always one",
        "50.0%",
    ):
        assert text in said, text
    rows = list(csv.DictReader((out / "b.csv").open()))
    assert len(rows) == 6
    assert {row["decide"] for row in rows} == {"", "batch"}
    star = next(row for row in rows if row["method"] == "star" and row["decide"])
    assert float(star["difference"]) == -0.25
    assert float(star["to_raw"]) == 0.25
    markdown = (out / "b.md").read_text()
    assert "decide: batch" in markdown
    assert "\\toprule" in (out / "b.tex").read_text()
    for row in rows:  # with the interval
        low, mean, high = (100 * float(row[name]) for name in ("low", "value", "high"))
        is_even = abs((high - mean) - (mean - low)) < 1e-6 and 0 < low and high < 100
        spread = f"± {high - mean:.1f}" if is_even else f"\\[{low:.1f}\N{EN DASH}{high:.1f}\\]"
        assert f"{mean:.1f} {spread}" in markdown
    html = (out / "b.html").read_text()
    assert all(f"{100 * float(row['value']):.1f}" in html for row in rows)
    assert {"forest.csv", "differences.png"} <= {path.name for path in (out / "plots").iterdir()}
    text = {}
    for path in (out / "plots").glob("*.svg"):
        text[path.stem] = " ".join(ET.parse(path).getroot().itertext())
    assert "hold for all pairs of rows together" in text["differences"]
    assert "+45.0 ▲" in text["differences"]
    assert "Sets of demonstrations: accuracy on t" in text["seeds"]
    assert "95% intervals" in text["forest"]
    lines = csv.DictReader((out / "plots" / "differences.csv").open())
    differences = [row["difference"] for row in rows if row["difference"]]
    assert [line["difference"] for line in lines] == differences


def test_another_metric(tmp_path, capsys):
    folder = results(tmp_path / "r")
    commands.run("leaderboard", folder, "--metric", "brier")
    assert "lowest value on t is" in capsys.readouterr().out
    with pytest.raises(InputError, match=r"x.*: no results that can be used"):
        commands.run("leaderboard", write(tmp_path / "x", samples=False), "--metric", "ece")
    with pytest.raises(InputError, match="--metric brire: no result has it: did you mean 'brier'"):
        commands.run("leaderboard", folder, "--metric", "brire")


def test_compare(tmp_path, capsys):
    folder = results(tmp_path / "r")
    commands.run("compare", "pcw", "star, decide: batch", "--results", folder)
    said = capsys.readouterr().out
    assert "+20.0" in said
    assert "one comparison by itself, not adjusted" in said
    with pytest.raises(InputError, match="there is no such entry"):
        commands.run("compare", "pcw", "nothing", "--results", folder)


def test_files_that_are_left_out_are_named_once_a_reason(tmp_path, capsys):
    folder = results(tmp_path / "r")
    for name in "ab":
        (folder / f"results_{name}.json").write_text("{")
    commands.run("leaderboard", folder)
    said = " ".join(capsys.readouterr().out.split())
    assert "results_a.json and 1 more: is damaged, half-written or not JSON" in said


def test_rows_of_two_checkpoints(tmp_path, capsys):
    for name in ("one", "two"):
        put = {"config.model_args": {"pretrained": f"org/{name}"}}
        for seed in range(3):
            write(tmp_path / name, "icl", seed, task=name, put=put)
    commands.run("leaderboard", tmp_path, "--tasks", "one,two")
    said = capsys.readouterr().out
    assert "checkpoint" in said
    assert "one" in said


def test_refusals(tmp_path):
    folder = results(tmp_path / "r")
    for arguments, message in (
        (["--output", tmp_path], "must be a file"),
        (["--output", next(folder.rglob("results_*.json"))], "is one of the results"),
        (["--csv", tmp_path / "b", "--md", tmp_path / "b"], "b: is given for two options"),
        (["--samples"], "--samples: give the page that gets them"),
        (["--samples", "T", "--output", tmp_path / "b.html"], "--samples T: did you mean 't'"),
        (["--baseline", "nope"], "there is no such entry"),
        (["--tasks", "u"], "no result of 'u'"),
        ([tmp_path / "nowhere"], "nowhere does not exist: give results files of lm-eval"),
    ):
        with pytest.raises(InputError, match=message):
            commands.run("leaderboard", folder, *arguments)


class Tags(HTMLParser):
    """The tags of a page, with their attributes, and its scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))


def hostile(folder: Path) -> Board:
    facts = {HOSTILE: {**RULE, "says": [0, 1] * 20}}
    put = {"config.model_args": {"pretrained": HOSTILE, "a": HOSTILE}, "config.icl.method": HOSTILE}
    write(folder / "a", HOSTILE, task="t", rules=facts, evil=HOSTILE, put=put)
    write(folder / "b", "icl", 1, task="t", doc_to_choice=[HOSTILE, "x"], says=[0] * 40, put=put)
    file = write(folder / "c", "icl", 2, task="t")
    file.with_name("results_<img src=x>.json").write_text('{"results": 1')
    return board_of(folder)


def test_the_page_is_inert(tmp_path):
    """No text of a stranger becomes a tag, no address is asked for, and only our script may run."""
    of_hostile = hostile(tmp_path / "h")
    of_plain = board_of(results(tmp_path / "r"))
    known = {tag for tag, _ in Tags(page(of_plain, figures.svgs(of_plain))).tags}
    text = page(of_hostile, figures.svgs(of_hostile))
    parsed = Tags(text)
    assert {tag for tag, _ in parsed.tags} <= known | {"details", "summary", "wbr"}
    assert sum(tag == "script" for tag, _ in parsed.tags) == 2
    for tag, attributes in parsed.tags:
        assert not any(name.startswith("on") for name in attributes), tag
        for name in ("src", "href"):
            assert attributes.get(name, "#").startswith(("#", "data:")), tag
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "default-src 'none'" in text
    embedded = re.search(
        r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL
    )[1]
    assert json.loads(embedded) == data(of_hostile) | {"samples": None}
    assert "<" not in embedded
    for table in (tables.as_markdown(of_hostile), tables.as_tex(of_hostile)):
        assert not re.search(r"(?<!\\)<script", table)
    assert not re.search(r"^=|\n=|,=", tables.as_csv(of_hostile))
    assert tables.csv_text([{"a": " =1", "b": "@x"}]) == "a,b\n' =1,'@x\n"
    assert tables._markdown("a|b") == r"a\|b"


def test_without_script_the_table_is_there(board):
    text = page(board, {})
    assert text.count("<tr data-row=") == 6
    assert "Under the rule batch" in text
    assert "always giving the most frequent answer" in text
    assert "vs icl ▲" in text
    assert "vs raw ▲" in text
    assert "vs icl ▼" in text
    assert "<i>4 of 6 rows are better</i>" in text
    top = " ".join(re.search(r"<header>(.*?)</header>", text, re.DOTALL)[1].split())
    assert "Best so far (undecided): <bdi>" in top
    assert "80 documents and 3 sets of demonstrations" in top
    assert "Not distinguishable from" in top
    assert "Better than <bdi>always one answer</bdi>; <bdi>icl, no rule</bdi>; 2 more rows." in top
    assert "<bdi>org/model</bdi>, <bdi>4 shots</bdi></p>" in top


def test_the_top_has_the_margin_over_the_baseline(tmp_path):
    write(tmp_path / "icl", says=[0] * 40)
    write(tmp_path / "pcw", "pcw")
    margin = r"<h1>Best: [^;]*%, \+50\.0 over <bdi>icl</bdi> \(\+\d+\.\d to \+\d+\.\d\);"
    assert re.search(margin, page(board_of(tmp_path), {}))


def test_methods_and_rules_are_explained_and_named(board):
    text = page(board, {})
    for words in ("Parallel context windows:", "s(y|x) - log mean_x", "rule batch", "no rule"):
        assert words in text


def test_a_figure_is_written_whole_or_not_at_all(tmp_path, board, monkeypatch):
    def full_disk(figure, file, **_):
        file.write_text("<svg")
        raise OSError("No space left on device")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", full_disk)
    with pytest.raises(InputError, match="cannot be written"):
        figures.draw(board, tmp_path / "figures", ["forest"])
    assert list((tmp_path / "figures").iterdir()) == []


def test_the_picture_has_every_row_and_its_interval(board):
    drawn = re.search(r"<svg class=.picture.*?</svg>", page(board, {}), re.DOTALL)[0]
    by_class = grouped(ET.fromstring(drawn), lambda element: element.get("class").split()[0])
    axis = Axis(board)
    assert len(by_class["interval"]) == len(by_class["name"]) == 6
    assert len(by_class["base"]) == 2
    assert len(by_class["one"]) == 1
    for line, entry in zip(by_class["interval"], board.entries, strict=True):
        estimate = entry.cells["t"].estimate
        ends = [float(line.get(name).rstrip("%")) for name in ("x1", "x2")]
        assert ends == [axis.place(estimate.low), axis.place(estimate.high)]
        assert 2 <= ends[0] <= ends[1] <= 98
    assert axis.place(axis.ticks[0]) == 2
    assert axis.place(axis.ticks[-1]) == 98
    assert axis.place(math.inf) == 98
    assert axis.place(-math.inf) == 2


def test_where_the_first_column_decides_nothing_a_task_does(tmp_path):
    """And the names have only conditions in which rows differ."""
    for seed in range(5):
        for model, on_t, on_u in (("icl", 1, 0), ("pcw", 0, 1)):
            for task, wrong in (("t", on_t), ("u", on_u)):
                says = [i % 2 if i >= 30 * wrong else 1 - i % 2 for i in range(40)]
                write(tmp_path / model / task, model, seed, task=task, says=says)
    board = board_of(tmp_path)
    top = headline(board)
    assert top.better == []
    assert {column.kind for column in board.columns} == {"average", "task"}
    column, entry, difference = top.on_a_task
    assert column.name == "t"
    assert entry.method == "pcw"
    assert difference.mean == 0.75
    assert "On t, <bdi>pcw</bdi> is better than its baseline <bdi>icl</bdi>" in page(board, {})
    assert set(names_of(board.entries).values()) == {"icl", "pcw"}


def test_marks_are_explained_beside_the_table(tmp_path):
    for model in ("icl", "pcw"):
        write(tmp_path / model, model, n=20, gold=[1] * 20)
    text = page(board_of(tmp_path), {})
    for mark in ("one label", "few documents", "one set"):
        assert f"<dt>{mark}</dt>" in text
        assert "(Every cell.)" in text
    assert "all documents have one right answer" in text
    assert "<dt>confirmed</dt>" not in text


def in_browser(file: Path, state: str) -> str:
    """The HTML of a page in a state. Without a browser the test is skipped."""
    browser = shutil.which("chromium-headless-shell") or shutil.which("chromium")
    if browser is None:
        pytest.skip("no chromium")
    options = "--no-sandbox --virtual-time-budget=3000 --dump-dom".split()
    command = [browser, *options, f"{file.as_uri()}#{state}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120).stdout


def test_documents_are_in_the_page_on_demand_alone(tmp_path):
    """In the list, a document has the beginning of its query, which is text and no HTML."""
    write(tmp_path, shots=0, evil=f"<img src=x>{'y' * 60}")
    file = tmp_path / "b.html"
    asked = ["leaderboard", tmp_path, "--output", file]
    commands.run(*asked)
    assert "yyy" not in file.read_text()
    commands.run(*asked, "--samples", "t")
    assert "yyy" in file.read_text()
    (entry,) = board_of(tmp_path).entries
    dom = in_browser(file, f"cell={entry.name}/0")
    assert f"<bdi>&lt;img src=x&gt;{'y' * 49}…</bdi>" in dom


def test_opened_from_a_file_the_script_sorts(tmp_path, board):
    file = tmp_path / "b.html"
    file.write_text(page(board, figures.svgs(board)), encoding="utf-8")
    dom = in_browser(file, "sort=c0:ascending&rule==")
    assert "3 of 6 entries shown" in dom
    assert 'aria-sort="ascending"' in dom
    rows = re.findall(r'<tr data-row="(\d+)"', dom)
    means = [board.entries[int(row)].cells["t"].estimate.mean for row in rows[:3]]
    assert means == sorted(means)


def test_without_matplotlib_the_page_has_no_figures(board, monkeypatch, caplog):
    assert "sets of demonstrations" in " ".join(figures.svgs(board)).lower()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert figures.svgs(board) == {}
    assert "pip install 'lm-eval-icl[figures]'. The page has none." in caplog.text
    assert "<html" in page(board, {})


def test_figures_of_curves(tmp_path):
    for T, right in ((1, [1, 0] * 20), (2, [1] * 40)):
        for shots in (2, 8):
            put = {"config.icl": {"method": "deepthink", "T": T, "eta": 0.1}}
            write(tmp_path / f"{T}{shots}", "deepthink", shots=shots, right=right, put=put)
    board = board_of(tmp_path)
    paths = figures.draw(board, tmp_path / "figures", ["T", "shots"])
    assert {path.name for path in paths} == {
        f"{name}.{kind}" for name in ("T", "shots") for kind in ("svg", "png", "csv")
    }
    lines = csv.DictReader((tmp_path / "figures" / "T.csv").open())
    assert (
        sorted((float(line["T"]), float(line["mean"])) for line in lines)
        == [(1, 0.5)] * 2 + [(2, 1.0)] * 2
    )
    with pytest.raises(InputError, match="there is no 'nothing'"):
        figures.draw(board, tmp_path / "figures", ["nothing"])


def test_the_frontier_ends_at_the_best_row(tmp_path):
    for tokens, method, right in ((100, "icl", [1, 0] * 20), (300, "pcw", [1] * 40)):
        write(tmp_path / method, method, right=right, put={"config.icl.tokens_run": tokens})
    drawn = curves.by_tokens(board_of(tmp_path))
    interval, *_, line = drawn.figure.axes[0].lines
    assert line.get_xydata().tolist() == [[2.5, 50], [7.5, 100]]
    assert line.get_drawstyle() == "steps-post"
    assert line.zorder > interval.zorder


@pytest.mark.parametrize("joined, why", [(240, "each once"), (0, "none shared")])
def test_what_retrieval_encoded_once_is_said(tmp_path, joined, why):
    counts = {"demonstrations": 240, "distinct": 197, "joined": joined}
    write(tmp_path, put={"config.icl.shared_demonstrations": counts})
    [entry] = data(board_of(tmp_path))["entries"]
    facts = dict(entry["cells"][0]["facts"])
    assert facts["Demonstrations encoded"].startswith(f"197 distinct of 240, {why}")
