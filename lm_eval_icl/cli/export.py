"""The command `lm-eval-icl export`: results in others' formats."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from lm_eval_icl.cli.reading import RESULTS, print_left_out, print_line, read_runs
from lm_eval_icl.errors import InputError
from lm_eval_icl.leaderboard.export import RELATIONSHIPS, export


def command(parser: argparse.ArgumentParser, arguments: list[str]) -> None:
    """Run `lm-eval-icl export`."""
    parser.description = "Write results as logs of Every Eval Ever 0.3.0, with the answers document by document."
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULTS", help=RESULTS)
    parser.add_argument("--format", default="eee", metavar="eee", help="Every Eval Ever, the only one (default)")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="the folder to write to")
    parser.add_argument("--organization", default="", metavar="NAME", help="who ran the evaluations")
    kinds = ", ".join(RELATIONSHIPS)
    parser.add_argument(
        "--relationship",
        default="third_party",
        metavar="KIND",
        help=f"what the organization is to the models' developers: {kinds} (default: third_party)",
    )
    parser.add_argument(
        "--developer",
        default="local",
        metavar="NAME",
        help="the owner of checkpoints whose name has none (default: local)",
    )
    args = parser.parse_args(arguments)
    if args.format != "eee":
        raise InputError(f"--format {args.format}: must be eee (Every Eval Ever), the only format that there is.")
    console = Console()
    runs, left_out = read_runs(args.results)
    exported = export(
        runs,
        args.output,
        organization=args.organization,
        relationship=args.relationship,
        developer=args.developer,
    )
    print_left_out([*left_out, *exported.left_out], console)
    print_line(console, f"{args.output}: {len(exported.files)} files")
