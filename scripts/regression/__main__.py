"""InvICL's synthetic study (section 5.1, appendices A.3, B.1, B.4 and B.5): `python -m scripts.regression --help`."""

from __future__ import annotations

import argparse
import sys
from itertools import product
from pathlib import Path

from lm_eval_icl.drawing.style import METADATA, styled
from lm_eval_icl.errors import InputError, writing
from scripts.regression.configuration import CONFIGURATIONS, METHODS, configured

FIGURES = ("figure3", "figure6", "figure7", "figure8", "figure9", "figure10")


def main(arguments: list[str]) -> None:
    """Run the command line."""
    args = options(
        argparse.ArgumentParser(prog="python -m scripts.regression", allow_abbrev=False), arguments
    )
    if args.action == "plot":
        _plot(args)
        return

    import torch

    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(1, device=args.device)
    except (RuntimeError, AssertionError):
        raise InputError(
            f"--device {args.device}: there is no such device here: give cpu or cuda."
        ) from None
    if args.action == "train":
        _train(args)
    else:
        _evaluate(args)


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
    train.add_argument("--seeds", default="0,1,2", metavar="S,...", help="(default: %(default)s)")
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
        action.add_argument("--device", help="cpu, cuda, ... (default: a GPU if there is one)")
    plot = actions.add_parser("plot", help="draw a figure of the paper", allow_abbrev=False)
    plot.add_argument("figure", metavar="FIGURE", help=", ".join(FIGURES))
    plot.add_argument(
        "folders", nargs="+", type=Path, metavar="DIR", help="as --output of evaluate"
    )
    plot.add_argument("--to", required=True, type=Path, metavar="FILE", help="an SVG or PNG file")
    return parser.parse_args(arguments)


def _train(args: argparse.Namespace) -> None:
    from scripts.regression.training import begin, method_of, train

    configuration = configured(args.config, args.set)
    try:
        seeds = [int(seed) for seed in args.seeds.split(",")]
    except ValueError:
        raise InputError(f"--seeds {args.seeds}: must be whole numbers, such as 0,1,2.") from None
    names = args.methods.split(",")
    for name in names:
        method_of(name)
    for run in [
        begin(args.output, configuration, name, seed) for seed, name in product(seeds, names)
    ]:
        train(run, args.device)


def _evaluate(args: argparse.Namespace) -> None:
    from scripts.regression.evaluation import evaluate, evaluate_baselines
    from scripts.regression.tables import Measurements, tables
    from scripts.regression.training import open_runs

    runs = open_runs(args.output)
    for run in runs:
        evaluate(run, args.device)
    evaluate_baselines(args.output, runs[0].configuration)
    print(tables(Measurements(args.output)))


def _plot(args: argparse.Namespace) -> None:
    if args.figure not in FIGURES:
        raise InputError(
            f"plot {args.figure}: there is no such figure: give one of {', '.join(FIGURES)}."
        )
    kind = args.to.suffix[1:]
    if kind not in METADATA:
        raise InputError(f"--to {args.to}: must end in .svg or .png.")

    with styled():
        from scripts.regression import figures
        from scripts.regression.tables import Measurements

        figure = getattr(figures, args.figure)([Measurements(folder) for folder in args.folders])
        with writing(f"--to {args.to}"):
            figure.savefig(args.to, format=kind, dpi=150, metadata=METADATA[kind])


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except InputError as error:
        sys.exit(str(error))
