"""InvICL's synthetic study (section 5.1, appendices A.3, B.1, B.4 and B.5): `python -m scripts.regression --help`."""

from __future__ import annotations

import argparse
import sys
from itertools import product
from pathlib import Path

import torch

from lm_eval_icl.drawing.style import METADATA, styled
from lm_eval_icl.errors import InputError, writing
from scripts.regression import figures
from scripts.regression.configuration import CONFIGURATIONS, METHODS, configured
from scripts.regression.evaluation import evaluate
from scripts.regression.tables import Measurements, tables
from scripts.regression.training import begin, method_of, open_runs, train

FIGURES = ("figure3", "figure6", "figure7", "figure8", "figure9", "figure10")


def main(arguments: list[str]) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m scripts.regression", allow_abbrev=False)
    args = options(parser, arguments)
    {"train": _train, "evaluate": _evaluate, "plot": _plot}[args.action](args)


def options(parser: argparse.ArgumentParser, arguments: list[str]) -> argparse.Namespace:
    """The arguments of the command line."""
    parser.description = (
        "In-context regression: GPT-2s are trained under each method to predict a function's value at a point from "
        "examples (InvICL, section 5.1). What is in the folder already is not done again."
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="COMMAND")
    train = actions.add_parser(
        "train", help="train a model under each method, with each seed", allow_abbrev=False
    )
    train.add_argument("--config", required=True, metavar="NAME", help=", ".join(CONFIGURATIONS))
    train.add_argument(
        "--methods", default=",".join(METHODS), metavar="M,...", help="(default: %(default)s)"
    )
    train.add_argument(
        "--seeds", type=numbers, default="0,1,2", metavar="S,...", help="(default: %(default)s)"
    )
    train.add_argument(
        "--set",
        default=[],
        nargs="+",
        metavar="KEY=VALUE",
        help="replace values of the configuration",
    )
    evaluate = actions.add_parser(
        "evaluate",
        help="measure the errors of what was trained, and print tables",
        allow_abbrev=False,
    )
    for action in (train, evaluate):
        action.add_argument(
            "--output", required=True, type=Path, metavar="DIR", help="the folder of all trainings"
        )
        device = "cuda" if torch.cuda.is_available() else "cpu"
        action.add_argument("--device", default=device, help="(default: a GPU if there is one)")
    plot = actions.add_parser("plot", help="draw a figure of the paper", allow_abbrev=False)
    plot.add_argument("figure", choices=FIGURES)
    plot.add_argument(
        "folders", nargs="+", type=Path, metavar="DIR", help="as --output of evaluate"
    )
    plot.add_argument("--to", required=True, type=Path, metavar="FILE", help="an SVG file")
    return parser.parse_args(arguments)


def numbers(text: str) -> list[int]:
    return list(map(int, text.split(",")))


def _train(args: argparse.Namespace) -> None:
    configuration = configured(args.config, args.set)
    names = args.methods.split(",")
    for name in names:
        method_of(name)
    runs = []
    for seed, name in product(args.seeds, names):
        runs.append(begin(args.output, configuration, name, seed))
    for run in runs:
        train(run, args.device)


def _evaluate(args: argparse.Namespace) -> None:
    for run in open_runs(args.output):
        evaluate(run, args.device)
    print(tables(Measurements(args.output)))


def _plot(args: argparse.Namespace) -> None:
    with styled():
        figure = getattr(figures, args.figure)([Measurements(folder) for folder in args.folders])
        with writing(f"--to {args.to}"):
            figure.savefig(args.to, format="svg", metadata=METADATA["svg"])


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except InputError as error:
        sys.exit(str(error))
