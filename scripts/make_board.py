"""Run every method on the demonstration model, and make the leaderboard of docs/: the page and its picture.

    python scripts/make_board.py [--output DIR] [--browser FILE]

Offline and on a CPU. The study takes some five minutes on two cores; stopped, it goes on where it was.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STUDY = """\
models: pretrained=lm_eval_icl/demo_model
methods: [icl, nope, prefixicl, pcw, saicl, batchicl, invicl, {deepthink: {T: [1, 3, 5], eta: 0.01}}]
tasks: [icl_demo]
num_fewshot: 8
seeds: 0..4
orders: 4
"""


def run(*command: object) -> None:
    subprocess.run([sys.executable, "-m", "lm_eval_icl", *map(str, command)], cwd=ROOT, check=True)


def take_picture(page: Path, picture: Path, browser: str) -> None:
    """The upper part of the page, as a browser shows it."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        view = opened.new_page(viewport={"width": 1200, "height": 860}, color_scheme="light")
        view.goto(page.as_uri())
        view.screenshot(path=picture)
        opened.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "results" / "board", help="the study's folder")
    parser.add_argument(
        "--browser", default="/usr/bin/chromium-headless-shell", help="takes the picture, if it is there"
    )
    options = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(STUDY)
        file.flush()
        run("study", file.name, "--output", options.output.resolve(), "--batch_size", 16, "--device", "cpu")
    page = ROOT / "docs" / "board.html"
    run("leaderboard", options.output.resolve(), "--output", page)
    if Path(options.browser).is_file():
        take_picture(page, page.with_suffix(".png"), options.browser)
    else:
        print(f"--browser {options.browser}: is not there, so no picture of the page was taken.")


if __name__ == "__main__":
    main()
