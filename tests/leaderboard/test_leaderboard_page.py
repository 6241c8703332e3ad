"""The leaderboard's page: what its HTML says, that it makes no request, and what its script does in a browser."""

from __future__ import annotations

import base64
import csv
import functools
import hashlib
import json
import math
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import lxml.etree
import lxml.html
import pytest

from lm_eval_icl.leaderboard import numbers
from lm_eval_icl.leaderboard import page as pages
from lm_eval_icl.leaderboard.figures import svgs
from lm_eval_icl.leaderboard.numbers import DASH, MINUS
from lm_eval_icl.leaderboard.page import MARKS, clean, embed, page
from lm_eval_icl.results.board import AVERAGE, Board
from tests import boards

make = functools.partial(boards.make, odd=True)

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

HOSTILE = (
    "<script>window.canary=1</script>",
    "</script ><script>window.canary=1</script>",
    '"><img src=x onerror="window.canary=1">',
    "'><svg onload=window.canary=1>",
    "javascript:window.canary=1",
    "=HYPERLINK(\"http://example.com\")",
    "{{ 7 * 7 }}{% raw %}",
    "safe\u202egnp.exe\u2066\u200b\x00\x1b[31m\u2028\ud800",
    "x" * 5000,
    "-->]]><!--&lt;&amp;",
)  # fmt: skip


def elements(text: str) -> Iterator[tuple[str, dict[str, str]]]:
    """The tag and the attributes of each element of a page."""
    for element in lxml.html.document_fromstring(text).iter(lxml.etree.Element):
        yield element.tag, dict(element.attrib)


def scripts(text: str) -> list[str]:
    return [script.text for script in lxml.html.document_fromstring(text).iter("script")]


def rows_of(text: str) -> list[list[str]]:
    """The text of each cell of the board's table."""
    (table,) = lxml.html.document_fromstring(text).xpath("//table[@id='board']")
    return [[cell.text_content() for cell in row] for row in table.iter("tr")]


def hostile() -> Board:
    """Strings from strangers everywhere."""
    names = iter(HOSTILE * 3)
    board = make([("icl", "", 8), *((name, name, 8) for name in HOSTILE[4:7])], HOSTILE[:3], note=HOSTILE[1])
    evil = tuple(
        replace(entry, details=next(names), conditions=HOSTILE[place % 10], command=f"lm_eval {HOSTILE[place % 10]}")
        for place, entry in enumerate(board.entries)
    )  # fmt: skip
    marked = replace(evil[0], cells={name: replace(cell, marks=HOSTILE) for name, cell in evil[0].cells.items()})
    run = marked.runs[0]
    marked.runs[0].results["lm_eval_version"] = HOSTILE[1]  # type: ignore[index]
    strange = replace(marked, runs=(replace(run, path=Path(HOSTILE[2])), *marked.runs[1:]))
    columns = tuple(replace(column, metric=HOSTILE[2]) if column.kind == "task" else column for column in board.columns)
    left_out = tuple(replace(board.left_out[0], path=Path(name.replace("\0", "")), why=name) for name in HOSTILE)
    return replace(board, columns=columns, entries=(strange, *evil[1:]), summary=HOSTILE, left_out=left_out)


@functools.cache
def drawn(made: Callable[[], Board]) -> tuple[Board, dict[str, str]]:
    """A board, with its figures."""
    board = made()
    return board, svgs(board)


# ---------------------------------------------------------------------------------------------------------------
# Without a browser.


def test_nothing_is_fetched_and_no_script_but_ours_may_run() -> None:
    text = page(*drawn(make))
    for tag, attributes in elements(text):
        assert not {"srcset", "action", "formaction", "background", "poster"} & attributes.keys()
        assert "src" not in attributes, tag
        assert (attributes.get("href") or "#").startswith(("#", "data:,", "data:image/png;base64,"))
        assert not any(name.startswith("on") for name in attributes)
    assert not re.search(r"@import|url\((?!#)", text)
    (policy,) = (each["content"] for _, each in elements(text) if each.get("http-equiv") == "Content-Security-Policy")
    shell = base64.b64encode(hashlib.sha256(scripts(text)[1].encode()).digest()).decode()
    assert dict(part.strip().split(" ", 1) for part in policy.split(";")) == {
        "default-src": "'none'", "style-src": "'unsafe-inline'", "img-src": "data:", "script-src": f"'sha256-{shell}'",
        "base-uri": "'none'", "form-action": "'none'",
    }  # fmt: skip


def test_the_script_sets_text_and_no_html() -> None:
    script = (Path(pages.__file__).parent / "page.js").read_text(encoding="utf-8")
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\(|Function\(|fetch\(|XMLHttp", script
    )
    assert "</script" not in script and "<!--" not in script


def test_the_table_has_the_boards_numbers() -> None:
    board = make()
    head, *rows = rows_of(page(board, {}))
    assert len(rows) == len(board.entries)
    assert [title.split()[0] for title in head][:3] == ["Entry", "rank", "average"]
    for entry, row in zip(board.entries, rows, strict=True):
        assert entry.method in row[0] and entry.arguments in row[0] and entry.checkpoint in row[0]
        for column, text in zip(board.columns, row[2:], strict=False):
            cell = entry.cells.get(column.name)
            if cell is None:
                assert text.strip() == DASH
                continue
            numbers = [_number(word) for word in re.findall(rf"[{MINUS}\d][\d.,]*", text)]
            scale = 100 if column.percent else 1
            estimate, tolerance = cell.estimate, 0.0501 if column.percent else 0.006
            expected = [scale * estimate.mean, *([estimate.sets, estimate.documents] if column.kind == "task" else [])]
            expected += [scale * estimate.low, scale * estimate.high]
            expected += [scale * cell.difference.mean] if cell.difference else []
            assert numbers == pytest.approx(expected, abs=tolerance), text
            assert all(mark in text for mark in cell.marks if mark in MARKS)
            if cell.difference:
                is_better = (cell.difference.mean > 0) == column.higher_is_better
                word = ("better" if is_better else "worse") if cell.p_holm < 0.05 else "n.s."  # type: ignore[operator]
                assert word in text
            elif entry.name in board.baseline.values():
                assert "baseline" in text


def test_a_cell_says_what_the_paper_has() -> None:
    board = make()
    object.__setattr__(board.entries[1].cells[AVERAGE], "expected", 0.579)
    rows = rows_of(page(board, {}))
    assert "paper 57.9" in rows[2][2] and sum("paper" in text for row in rows for text in row) == 1
    found = json.loads(embed(board)[0])
    assert found["entries"][1]["cells"][0][found["fields"]["cell"].index("expected")] == "57.9"


def test_the_embedded_json_is_the_board() -> None:
    board = make(orders=2)
    text, is_plain = embed(board)
    assert is_plain and not set("<>&\u2028\u2029") & set(text)
    found = json.loads(text, parse_constant=pytest.fail)
    fields = found["fields"]
    for entry, given in zip(board.entries, found["entries"], strict=True):
        for column, values in zip(board.columns, given["cells"], strict=True):
            cell = entry.cells.get(column.name)
            assert (cell is None) == (values is None)
            if cell is None:
                continue
            read = dict(zip(fields["cell"], values, strict=True))
            of = cell.estimate
            assert read["half"].rstrip("†") == numbers.half(of, column)
            assert ("†" in read["half"]) == (numbers.verdict(cell, column) in numbers.WORDS)
            in_csv = dict(zip(fields["numbers"], read["numbers"], strict=True))
            for name in ("mean", "low", "high", "error", "df", "sets", "documents"):
                assert in_csv[name] == pytest.approx(getattr(of, name), rel=1e-3)
            assert (read["difference"] is None) == (cell.difference is None)
            if cell.difference is not None:
                assert in_csv["p_holm"] == pytest.approx(cell.p_holm, rel=1e-3)
                assert in_csv["difference"] == pytest.approx(cell.difference.mean, rel=1e-3)
                difference = dict(zip(fields["difference"], read["difference"], strict=True))
                assert difference["interval"] == numbers.interval(cell.difference, column, sign=True)
            assert len(read["sets"]) == len(cell.sets)
    named = [entry.name for entry in board.entries]
    assert {(named[one], named[other]): len(rest) for one, other, *rest in found["pairs"]} == {
        pair: len(differences) for pair, differences in board.pairs.items()
    }


def test_what_is_not_finite_is_null() -> None:
    board = make()
    entry = board.entries[0]
    cell = entry.cells[AVERAGE]
    estimate = replace(cell.estimate, mean=math.nan, error=math.inf, low=-math.inf, high=math.inf, df=math.inf)
    odd = replace(entry, cells={**entry.cells, AVERAGE: replace(cell, estimate=estimate)}, seconds=math.nan)
    board = replace(board, entries=(odd, *board.entries[1:]))
    text, _ = embed(board)
    assert not re.search("NaN|Infinity", text)
    assert json.loads(text)["entries"][0]["cells"][0][0][:5] == [None] * 5
    assert rows_of(page(board, {}))[1][2].strip().startswith(DASH)


@pytest.mark.parametrize(("checkpoints", "methods", "seeds", "orders"), [(25, 4, 10, 1), (20, 5, 10, 4)])
def test_a_hundred_rows_and_thirty_tasks_are_under_a_megabyte(
    checkpoints: int, methods: int, seeds: int, orders: int
) -> None:
    names = [f"organisation/model-{number}b" for number in range(checkpoints)]
    tasks = [f"icl_task_{number}" for number in range(30)]
    board = make(boards.METHODS[:methods], names, tasks, seeds, orders)
    assert len(board.entries) == 100
    text = page(board, {})
    assert len(text.encode()) < 1_000_000
    (found,) = re.findall(r'<script type="text/plain" id="data">([^<]*)</script>', text)
    pairs = json.loads(zlib.decompress(base64.b64decode(found)))["pairs"]  # what fits, those of one checkpoint first
    of_one, of_two = [], []
    for one, other, *rest in pairs:
        is_same = board.entries[one].checkpoint == board.entries[other].checkpoint
        (of_one if is_same else of_two).append(len(rest))
    assert fmean(of_one) > fmean(of_two)


def test_characters_that_are_not_seen_are_escapes() -> None:
    assert clean("a\u202eb\x00c\u200dd\u2028e\ud800") == r"a\u202eb\x00c\u200dd\u2028e\ud800"
    assert clean("Größe 数学 é \N{GREEK SMALL LETTER ETA}") == "Größe 数学 é \N{GREEK SMALL LETTER ETA}"
    assert len(clean("x" * 5000)) == pages.LONGEST and clean("x" * 5000).endswith("…")


def test_hostile_strings_are_text() -> None:
    ours = {tag for tag, _ in elements(page(make(), {}))}
    embedded, is_plain = embed(drawn(hostile)[0])
    assert is_plain and not set("<>&") & set(embedded)
    text = page(*drawn(hostile))
    text.encode()
    assert len(scripts(text)) == 2
    of_figures = set("figure figcaption svg g defs style path clippath rect use a text image".split())
    assert {tag for tag, _ in elements(text)} <= ours | of_figures | {"mark", "section"}
    assert not any(name.startswith("on") or name == "src" for _, attributes in elements(text) for name in attributes)
    assert not re.search("[\u202a-\u202e\u2066-\u2069\u200b\x00\x1b]", text)


# ---------------------------------------------------------------------------------------------------------------
# In a browser.

Open = Callable[..., "Page"]


@pytest.fixture
def show(browser: Browser, tmp_path: Path) -> Iterator[Open]:
    """Opens a board's page in a fresh context; in the end, only the file was asked for, and nothing went wrong."""
    wrong: list[str] = []
    asked: list[str] = []
    contexts = []

    def show(
        board: Board | None,
        state: str = "",
        width: int = 1280,
        figures: Mapping[str, str] = MappingProxyType({}),
        **options: Any,
    ) -> Page:
        file = tmp_path / "board.html"
        if board is not None:
            file.write_text(page(board, figures), encoding="utf-8")
        context = browser.new_context(viewport={"width": width, "height": 844}, **options)
        context.set_default_timeout(120_000)  # a busy machine is no failure
        contexts.append(context)
        opened = context.new_page()
        opened.on("console", lambda message: wrong.append(message.text))
        opened.on("pageerror", lambda error: wrong.append(str(error)))
        opened.on("request", lambda request: asked.append(request.url.partition("#")[0]))
        opened.goto(file.as_uri() + state)
        if options.get("java_script_enabled", True):
            opened.wait_for_selector("#controls:not([hidden])")
        return opened

    yield show
    for context in contexts:
        context.close()
    address = (tmp_path / "board.html").as_uri()
    assert wrong == []
    assert set(asked) == {address}


def shown(opened: Page, column: int) -> list[str]:
    """The first line of a column's cells, of the rows that are shown."""
    script = """column => [...document.querySelectorAll("#board tbody tr:not([hidden])")]
        .map(row => row.cells[column].innerText.trim().split(/\\s/)[0])"""
    found: list[str] = opened.evaluate(script, column)
    return found


def test_columns_are_sorted_by_number_both_ways(show: Open) -> None:
    board = make()
    opened = show(board)
    perplexity = 2 + len(board.columns) - 1
    best = sorted(entry.cells["icl_perplexity"].estimate.mean for entry in board.entries)
    head = opened.locator("#board thead th").nth(perplexity)
    for order, expected in (("ascending", best), ("descending", best[::-1])):
        head.locator("button").click()
        assert head.get_attribute("aria-sort") == order
        assert [float(text) for text in shown(opened, perplexity)] == pytest.approx(expected, abs=0.006)
    task = opened.locator("#board thead th").nth(4)  # an entry has no result there: it is the last both ways
    for order in ("descending", "ascending"):
        task.locator("button").click()
        assert task.get_attribute("aria-sort") == order
        values = shown(opened, 4)
        numbers = [float(text) for text in values[:-1]]
        assert values[-1] == DASH and numbers == sorted(numbers, reverse=order == "descending")
    opened.locator("#board thead th").nth(0).locator("button").click()
    assert shown(opened, 0) == sorted(shown(opened, 0))


def test_filters_say_how_many_rows_they_hide(show: Open) -> None:
    opened = show(make())
    status = opened.locator("#status span")
    assert status.inner_text() == "12 of 12 entries shown, 0 hidden"
    opened.fill("[name=q]", "GPT2 deep")
    assert status.inner_text() == "1 of 12 entries shown, 11 hidden"
    opened.fill("[name=q]", "")
    opened.select_option("[name=method]", "=hf")
    assert status.inner_text() == "3 of 12 entries shown, 9 hidden" and set(shown(opened, 0)) == {"hf"}
    opened.select_option("[name=checkpoint]", "=gpt2-large")
    assert status.inner_text() == "1 of 12 entries shown, 11 hidden"
    opened.click("#all")
    assert status.inner_text() == "12 of 12 entries shown, 0 hidden" and not opened.locator("#all").is_visible()
    opened.check("[name=complete]")
    assert status.inner_text() == "11 of 12 entries shown, 1 hidden"
    opened.click(".menu >> text=Columns")
    opened.uncheck("[name=section][value='first half']")  # the column that the row lacks is in that group
    assert status.inner_text() == "12 of 12 entries shown, 0 hidden"
    assert not opened.locator("th[data-section='first half']").first.is_visible()


def test_an_address_restores_the_state(show: Open) -> None:
    board = make()
    opened = show(board)
    opened.locator("th[data-key=c3] button").click()
    opened.fill("[name=q]", "llama")
    opened.select_option("[name=show]", "corrected")
    for place in (0, 1):
        opened.locator("tbody tr:not([hidden]) input").nth(place).check()
    opened.locator("tbody tr:not([hidden]) td[data-open]").nth(2).click()
    assert opened.locator("dialog").is_visible()
    state = "#" + opened.url.partition("#")[2]
    again = show(None, state)
    for each in (opened, again):
        assert each.locator("th[data-key=c3]").get_attribute("aria-sort") == "descending"
        assert each.locator("#status span").inner_text().startswith("4 of 12 entries shown, 8 hidden. Corrected")
        assert each.input_value("[name=q]") == "llama" and each.input_value("[name=show]") == "corrected"
        assert each.locator("tbody input:checked").count() == 2
    assert shown(again, 5) == shown(opened, 5)
    assert again.locator("dialog").inner_text() == opened.locator("dialog").inner_text()
    # The page hears of another address after the browser has gone there.
    opened.go_back()
    opened.locator("dialog").wait_for(state="hidden")
    opened.go_forward()
    opened.locator("dialog").wait_for(state="visible")
    # The dialog's own event of the first closing may come as late as this, and closes nothing.
    opened.evaluate("document.querySelector('dialog').dispatchEvent(new Event('close'))")
    assert opened.locator("dialog").is_visible()
    nonsense = show(None, "#sort=c99:up&row=nobody&cell=nobody/nothing&compare=1&hide=nothing&show=x&method=x")
    assert nonsense.locator("#status span").inner_text() == "0 of 12 entries shown, 12 hidden"
    assert not nonsense.locator("dialog").is_visible()


def test_the_comparison_is_the_boards(show: Open) -> None:
    board = make()
    named = {entry.name: place for place, entry in enumerate(board.entries)}
    pair = next(pair for pair in board.pairs if named[pair[0]] == 2)
    opened = show(board)
    for forward in (True, False):
        for name in pair if forward else pair[::-1]:
            opened.locator("tbody tr").nth(named[name]).locator("input").check()
        opened.click("#compare")
        rows = opened.locator("dialog tbody tr").evaluate_all(
            "rows => rows.map(row => [...row.cells].map(c => c.innerText))"
        )
        assert [row[0] for row in rows] == list(board.pairs[pair])
        for (name, *_, difference, interval, p, detectable, _), column in zip(rows, board.columns, strict=True):
            expected = board.pairs[pair][name]
            sign, scale = 1 if forward else -1, 100 if column.percent else 1
            tolerance = 0.0501 if column.percent else 0.005
            assert _number(difference) == pytest.approx(sign * scale * expected.mean, abs=tolerance)
            ends = sorted(sign * scale * end for end in (expected.low, expected.high))
            assert [_number(end) for end in interval.split(" to ")] == pytest.approx(ends, abs=tolerance)
            assert _number(detectable) == pytest.approx(scale * expected.detectable, abs=tolerance)
            if p.startswith("<"):
                assert expected.p < 1e-4
            else:
                rounding = 0.0051 if expected.p >= 0.1 else 0
                assert float(p.split()[0]) == pytest.approx(expected.p, rel=0.06, abs=rounding)
            is_better = (sign * expected.mean > 0) == column.higher_is_better
            assert ("not significant" if expected.p >= 0.05 else "better" if is_better else "worse") in p
        command = opened.locator("dialog pre").inner_text()
        first, second = pair if forward else pair[::-1]
        assert command.split() == f"lm-eval-icl compare {first} {second} --results results".split()
        opened.keyboard.press("Escape")
        opened.click("#clear")


def _number(text: str) -> float:
    return float(text.replace(MINUS, "-").replace(",", ""))


def test_a_large_board_opens_and_says_what_it_has_not_got(show: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "NUMBERS", 0)
    monkeypatch.setattr(pages, "PLAIN", 0)
    board = make()
    one, other = next(iter(board.pairs))
    opened = show(board, f"#row={one}&row={other}&compare=1")
    text = opened.locator("dialog").inner_text()
    assert text.count("not in this page") == len(board.columns) and "in a terminal" in text
    assert f"lm-eval-icl compare {one} {other}" in text


def test_a_cell_opens_by_keyboard_and_the_focus_returns(show: Open) -> None:
    board = make(orders=2)
    opened = show(board)
    entry, column = board.entries[2], board.columns[2]
    cell = entry.cells[column.name]
    opened.locator("td[data-open]").first.focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "ArrowDown", "Enter"):
        opened.keyboard.press(key)
    text = opened.locator("dialog").inner_text()
    assert opened.evaluate("document.activeElement.closest('dialog') !== null")
    assert text.startswith(f"{entry.label}, {column.name}")
    for expected in (
        f"{100 * cell.estimate.mean:.1f}%", "documents alone", f"{cell.estimate.df:.1f}", "Detectable difference",
        "after Holm over the column", "seed 4", "Order sensitivity", "lm-eval 0.4.13", "transformers 5.23.0",
        "results_2026-11-14T01-15-36.75.json", entry.command, "Copy",
    ):  # fmt: skip
        assert expected in text, expected
    opened.keyboard.press("Escape")
    opened.locator("dialog").wait_for(state="hidden")
    opened.wait_for_function("!location.hash.includes('cell=')")  # `opened.url` is told of it a moment later
    place = "[document.activeElement.parentElement.rowIndex, document.activeElement.cellIndex]"
    opened.wait_for_function(f"String({place}) === '3,4'")  # the dialog closes, and then says so


def test_downloads_hold_what_is_shown(show: Open) -> None:
    board = make([("icl", "", 8), ("=cmd", "a|b_c & 100%", 8)])
    opened = show(board, "#q=gpt2&sort=c0:descending")
    texts = {}
    for kind, name in (("CSV", "csv"), ("Markdown", "md"), ("LaTeX", "tex"), ("JSON", "json")):
        opened.locator("summary", has_text="Download").click()
        with opened.expect_download() as download:
            opened.locator(f"[data-download={kind}]").click()
        assert download.value.suggested_filename == f"leaderboard.{name}"
        texts[kind] = Path(download.value.path()).read_text(encoding="utf-8")
        opened.keyboard.press("Escape")
    wanted = {entry.name: entry for entry in board.entries if entry.checkpoint == "gpt2-large"}
    rows = list(csv.DictReader(texts["CSV"].splitlines()))
    assert len(rows) == sum(len(entry.cells) for entry in wanted.values())
    for row in rows:
        cell = wanted[row["entry"]].cells[row["column"]]
        assert float(row["mean"]) == pytest.approx(cell.estimate.mean, rel=1e-3)
        assert row["method"] in ("icl", "'=cmd")  # no formula
    table = [line for line in texts["Markdown"].splitlines() if line.startswith("|")]
    assert len(table) == 2 + len(wanted) and r"a\|b\_c \& 100%" in texts["Markdown"]
    assert r"\toprule" in texts["LaTeX"] and r"\pm" in texts["LaTeX"] and r"a|b\_c \& 100\%" in texts["LaTeX"]
    found = json.loads(texts["JSON"])
    assert {entry["name"] for entry in found["entries"]} == set(wanted)


def test_hostile_strings_stay_text_in_a_browser(show: Open) -> None:
    board, figures = drawn(hostile)
    opened = show(board, figures=figures)
    assert opened.evaluate("window.canary") is None
    for cell in (0, 2):
        opened.locator("td[data-open]").nth(cell).click()
        assert HOSTILE[0] in opened.locator("dialog").inner_text()
        opened.keyboard.press("Escape")
    for place in (0, 1, 2):
        opened.locator("tbody tr input").nth(place).check()
    opened.click("#compare")
    assert opened.locator("dialog script, dialog img, dialog svg, dialog a").count() == 0
    assert opened.evaluate("window.canary") is None
    assert opened.evaluate("document.documentElement.scrollWidth") <= 1280
    hidden = show(None, "#" + HOSTILE[2] + "=1&q=" + "%3Cimg%20src%3Dx%20onerror%3Dwindow.canary%3D1%3E")
    assert hidden.evaluate("window.canary") is None


@pytest.mark.parametrize("width", [390, 820, 1440])
def test_the_page_is_no_wider_than_the_screen(show: Open, width: int) -> None:
    for board, figures in (drawn(make), drawn(hostile)):
        opened = show(board, width=width, figures=figures)
        assert opened.evaluate("document.documentElement.scrollWidth") == width
        opened.evaluate("document.querySelector('.box').scrollLeft = 400")
        first = opened.locator("tbody th").first.bounding_box()
        assert first is not None and first["x"] >= 0 and first["width"] <= width / 2  # it stays in sight
        opened.locator("td[data-open]").nth(1).click()
        box = opened.locator("dialog").bounding_box()
        assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= width
        assert opened.evaluate("(sheet => sheet.scrollWidth <= sheet.clientWidth)(document.querySelector('.sheet'))")


def test_without_scripts_the_table_can_be_read(show: Open) -> None:
    board = make()
    opened = show(board, java_script_enabled=False)
    assert opened.locator("#board tbody tr").count() == 12
    text = opened.locator("#board").inner_text()
    assert f"{100 * board.entries[0].cells[AVERAGE].estimate.mean:.1f}" in text and "n.s." in text
    for hidden in ("#controls", "#status", "#bar", "dialog", "#theme"):
        assert not opened.locator(hidden).is_visible(), hidden


def test_colors_follow_the_system_and_the_button(show: Open) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    board = make()
    light, dark = show(board, color_scheme="light"), show(None, color_scheme="dark")
    white, black = light.evaluate(ground), dark.evaluate(ground)
    assert white != black
    dark.click("#theme")
    assert dark.evaluate(ground) == white
    dark.click("#theme")
    assert dark.evaluate(ground) == black
