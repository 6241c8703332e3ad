"""A board as docs/contributing-results.md sets it up and adds to it, without git's commands."""

import csv
import re
import shlex
from pathlib import Path

import pytest
import yaml

from lm_eval_icl.errors import InputError
from tests import boards, commands

PAGE = (Path(__file__).resolve().parents[2] / "docs/contributing-results.md").read_text(
    encoding="utf-8"
)
WORKFLOW = yaml.safe_load(re.search(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[1])
CONTRIBUTING = re.search(r"```bash\n(.*?)```", PAGE, re.DOTALL)[1].splitlines()
CHECKING = [step["run"] for step in WORKFLOW["jobs"]["page"]["steps"] if "run" in step]


@pytest.fixture
def run(monkeypatch, capsys):
    """A function that runs lines in a folder: what our commands among them print."""

    def run_lines(lines, folder):
        monkeypatch.chdir(folder)
        for program, *arguments in map(shlex.split, lines):
            if program == "lm-eval-icl":
                commands.run(*arguments)
            else:
                assert program in ("git", "mkdir", "pip")
        return capsys.readouterr().out

    return run_lines


def test_results_of_two_people_become_one_page(run, tmp_path):
    """Both add their runs to the clone; a run that is changed afterwards is refused."""
    board = tmp_path / "board"
    for model in ("icl", "invicl"):
        for seed in range(2):  # the first command is lm-eval's own
            boards.write(tmp_path / "results", model, seed, n=20, right=0.7)
        run(CONTRIBUTING[1:], tmp_path)
    (board / "site").mkdir()
    assert run(CHECKING, board).startswith("4 runs have no faults.\n")
    page, table = (
        (board / "site" / name).read_text(encoding="utf-8") for name in ("index.html", "board.csv")
    )
    assert {row["method"] for row in csv.DictReader(table.splitlines())} == {"icl", "invicl"}
    assert table.splitlines()[1].split(",")[0] in page

    file = next((board / "runs").iterdir())
    file.rename(file.with_name(f"x{file.name}"))
    with pytest.raises(InputError, match="1 of 4 files have faults"):
        run(CHECKING, board)
