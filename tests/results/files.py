"""Boards of result files, and the samples beside such a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lm_eval_icl.results.board import Board, Entry
from lm_eval_icl.results.build import build
from lm_eval_icl.results.read import read
from tests.boards import samples_of


def samples_in(results: Path, task: str = "t") -> list[dict[str, Any]]:
    """The samples of a task beside a results file."""
    return [json.loads(line) for line in samples_of(results, task).read_text().splitlines()]


def board_of(*paths: Path, metric: str | None = None, **options: Any) -> Board:
    """The board of all result files in these folders."""
    runs, left_out = read(paths, quiet=True, metric=metric)
    return build(runs, left_out, **options)


def row_of(board: Board, label: str) -> Entry:
    """The only row of a board with this label."""
    (entry,) = (entry for entry in board.entries if entry.label == label)
    return entry


def by_method(board: Board) -> dict[str, Entry]:
    return {entry.method: entry for entry in board.entries}
