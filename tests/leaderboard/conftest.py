"""The commands on results files, as a person runs them."""

from __future__ import annotations

import csv
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lm_eval_icl.errors import InputError
from tests import commands

try:
    from playwright.sync_api import Browser, sync_playwright
except ImportError:
    sync_playwright = None  # type: ignore[assignment]

BROWSER = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "google-chrome"))), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if sync_playwright is None or BROWSER is None:
        pytest.skip("playwright (pip install) or a browser (Debian: chromium-headless-shell) is not installed")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """A function that runs `lm-eval-icl` with arguments, and gives what it prints; or, of a refusal, the line."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")

    def run(*arguments: object) -> str:
        try:
            commands.run(*arguments)
        except InputError as refusal:
            assert "\n" not in str(refusal)
            return str(refusal)
        return capsys.readouterr().out

    return run


class Made(list[dict[str, str]]):
    """The lines of a board's CSV file, with what was printed, on one line, and the page."""

    printed = ""
    page = ""


@pytest.fixture
def board(command: Callable[..., str], tmp_path: Path) -> Callable[..., Made]:
    """A function that makes a board of a folder; with page=True, its page too, which is in `made.html`."""

    def make(folder: Path, *arguments: object, page: bool = False) -> Made:
        table, html = tmp_path / "made.csv", tmp_path / "made.html"
        output = ("--output", html) if page else ()
        printed = command("leaderboard", folder, "--csv", table, *output, *arguments)
        with table.open(encoding="utf-8", newline="") as file:
            made = Made(csv.DictReader(file))
        made.printed, made.page = " ".join(printed.split()), html.read_text(encoding="utf-8") if page else ""
        return made

    return make
