"""Make the leaderboard in docs/, a page and its picture, from results of studies or of any runs of lm-eval.

python scripts/make_board.py RESULTS... [--samples T,...] [--browser FILE]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "results", nargs="+", type=Path, metavar="RESULTS", help="results files, or folders of them"
    )
    parser.add_argument("--samples", help="the tasks whose documents are in the page")
    chromium = "/usr/bin/chromium-headless-shell"
    parser.add_argument("--browser", default=chromium, help="the browser that takes the picture")
    options = parser.parse_args()
    page = ROOT / "docs" / "board.html"
    command = ["leaderboard", *options.results, "--output", page]
    if options.samples:
        command += ["--samples", options.samples]
    subprocess.run([sys.executable, "-m", "lm_eval_icl", *map(str, command)], check=True)
    if not Path(options.browser).is_file():
        print(f"--browser {options.browser}: is not there, so no picture of the page was taken.")
        return

    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=options.browser, args=["--no-sandbox"])
        view = browser.new_page(viewport={"width": 1200, "height": 860}, color_scheme="light")
        view.goto(page.as_uri())
        view.screenshot(path=page.with_suffix(".png"))
        browser.close()


if __name__ == "__main__":
    main()
