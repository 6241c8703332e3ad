"""The command `lm-eval-icl collect`: one small file a run, for a leaderboard that is shared."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from lm_eval_icl.cli.reading import RESULTS, print_left_out, print_line, read_runs
from lm_eval_icl.results.collect import collect


def command(parser: argparse.ArgumentParser, arguments: list[str]) -> None:
    """Run `lm-eval-icl collect`.

    Raises:
        InputError: an option cannot be used, or there are no results.
    """
    parser.description = "Make one small file of each run, with all answers: a leaderboard to share."
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULTS", help=RESULTS)
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="one file a run, in DIR/runs")
    args = parser.parse_args(arguments)
    console = Console()
    runs, left_out = read_runs(args.results)
    written = collect(runs, args.output)
    print_left_out(left_out, console)
    print_line(console, f"{args.output}: {len(written)} runs")
