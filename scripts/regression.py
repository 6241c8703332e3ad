"""In-context regression: InvICL's synthetic study (section 5.1, appendices A.3, B.1, B.4 and B.5).

    python scripts/regression.py train --config NAME --output DIR [--methods M,...] [--seeds S,...] [--set KEY=VALUE]
    python scripts/regression.py evaluate --output DIR
    python scripts/regression.py plot FIGURE DIR [DIR ...] --to FILE.svg

A GPT-2 is trained to predict a function's value at a point from examples, under each method: `train` makes a folder
METHOD-SEED in DIR for each training. `evaluate` measures all that is in DIR and prints tables; `plot` draws a figure of
the paper from what was measured. What is there already is not done again, so a command that was stopped goes on when
it is given again. Configurations: `linear` (Figures 3, 7, 8, 9 and 10), `sparse` and `tree` (Figure 6) are those of the
paper; `small` and `tiny` are for two cores.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from lm_eval_icl.errors import InputError
from lm_eval_icl.leaderboard.style import GREY, METADATA, of_method, styled
from lm_eval_icl.regression.configuration import CONFIGURATIONS, METHODS, Configuration, configured
from lm_eval_icl.regression.evaluation import (
    Errors,
    evaluate,
    evaluate_baselines,
    interval,
    measured,
    shifts,
)
from lm_eval_icl.regression.training import begin, found_method, open_runs, train

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# ---------------------------------------------------------------------------------------------------------------
# Commands.


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    try:
        options.run(options)
    except InputError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    training = commands.add_parser("train", help="train a model under each method, with each seed")
    training.add_argument("--config", required=True, metavar="NAME", help=", ".join(CONFIGURATIONS))
    training.add_argument("--methods", default=",".join(METHODS), metavar="M,...", help="(default: %(default)s)")
    training.add_argument("--seeds", default="0,1,2", metavar="S,...", help="(default: %(default)s)")
    training.add_argument(
        "--set", default=[], nargs="+", metavar="KEY=VALUE", help="replace values of the configuration"
    )
    training.set_defaults(run=_train)
    evaluating = commands.add_parser("evaluate", help="measure the errors of what was trained, and print tables")
    evaluating.set_defaults(run=_evaluate)
    for command in (training, evaluating):
        command.add_argument("--output", required=True, type=Path, metavar="DIR", help="the folder of all trainings")
        command.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="(%(default)s)")
    plotting = commands.add_parser("plot", help="draw a figure of the paper")
    plotting.add_argument("figure", metavar="FIGURE", help=", ".join(FIGURES))
    plotting.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="as --output of evaluate")
    plotting.add_argument("--to", required=True, type=Path, metavar="FILE", help="an SVG or PNG file")
    plotting.set_defaults(run=_plot)
    return parser.parse_args(arguments)


def _train(options: argparse.Namespace) -> None:
    configuration = configured(options.config, options.set)
    try:
        seeds = [int(seed) for seed in options.seeds.split(",")]
    except ValueError:
        raise InputError(f"--seeds {options.seeds}: must be whole numbers, such as 0,1,2.") from None
    device = _device(options.device)
    names = options.methods.split(",")
    for name in names:
        found_method(name)
    for run in [begin(options.output, configuration, name, seed) for seed, name in product(seeds, names)]:
        train(run, device)


def _device(name: str) -> str:
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError):
        raise InputError(f"--device {name}: there is no such device here: give cpu or cuda.") from None
    return name


def _evaluate(options: argparse.Namespace) -> None:
    runs, device = open_runs(options.output), _device(options.device)
    for run in runs:
        evaluate(run, device)
    evaluate_baselines(options.output, runs[0].configuration)
    print(tables(Results(options.output)))


def _plot(options: argparse.Namespace) -> None:
    if options.figure not in FIGURES:
        raise InputError(f"plot {options.figure}: there is no such figure: give one of {', '.join(FIGURES)}.")
    kind = options.to.suffix[1:]
    if kind not in METADATA:
        raise InputError(f"--to {options.to}: must end in .svg or .png.")
    with styled():
        figure = FIGURES[options.figure]([Results(folder) for folder in options.folders])
        try:
            figure.savefig(options.to, format=kind, dpi=150, metadata=METADATA[kind])
        except OSError as error:
            raise InputError(f"--to {options.to}: cannot be written ({error.strerror or error}).") from error


class Results:
    """What was measured in one folder.

    Attributes:
        configuration: of all its trainings.
        of: by method and seed, the errors (see `lm_eval_icl.regression.evaluation.evaluate`).
        baselines: their errors, by "NAME, SHIFT".

    Raises:
        InputError: something there is not measured.
    """

    def __init__(self, folder: Path) -> None:
        runs = open_runs(folder)
        self.configuration: Configuration = runs[0].configuration
        self.of: dict[str, dict[int, Errors]] = {}
        for run in runs:
            self.of.setdefault(run.method, {})[run.seed] = measured(run)
        self.baselines = evaluate_baselines(folder, self.configuration)

    def errors(self, method: str, what: str) -> list[Tensor]:
        """For each seed the errors of "STEP SHIFT" or "probe LAYER", [functions, numbers]."""
        return [errors[what] for errors in self.of[method].values()]


# ---------------------------------------------------------------------------------------------------------------
# Tables.


def tables(results: Results) -> str:
    """The errors in Markdown: in each cell the mean over seeds and functions and its 95% bootstrap interval."""
    configuration = results.configuration
    last = configuration.steps
    numbers = [configuration.numbers[0], configuration.examples // 2, configuration.examples, configuration.longest]
    numbers = sorted({min(configuration.numbers, key=lambda n: abs(n - near)) for near in numbers[1:]})
    seeds = max(len(of) for of in results.of.values())
    parts = [
        f"Squared error divided by that of predicting 0; {seeds} seeds, {configuration.tested} functions; mean and 95% "
        "bootstrap interval."
    ]
    for shift in shifts(configuration):
        columns = {
            f"{n} examples, {step:,} steps": (f"{step} {shift}", n) for step in configuration.shown for n in numbers
        }
        rows = {f"`{name}`": _cells(results, name, list(columns.values())) for name in results.of}
        for name in results.baselines:
            if name.endswith(f", {shift}"):
                at = [configuration.numbers.index(n) for _, n in columns.values()]
                rows[name.partition(",")[0]] = _written([results.baselines[name]], at)
        parts.append(_table("method" if shift == "none" else f"shift: {shift}", list(columns), rows))
    both = (configuration.examples, configuration.longest)
    rows = {f"`{name}`": [_of_seeds(results, name, f"{last} none", n) for n in both] for name in results.of}
    parts.append(_table(f"seed by seed, {last:,} steps", [f"{n} examples" for n in both], rows))
    probed = {f"layer {layer}": (f"probe {layer}", configuration.examples) for layer in configuration.probed}
    probed["the model"] = (f"{last} none", configuration.examples)
    rows = {f"`{name}`": _cells(results, name, list(probed.values())) for name in results.of}
    parts.append(_table(f"linear probes, {configuration.examples} examples", list(probed), rows))
    return "\n\n".join(parts)


def _cells(results: Results, method: str, columns: Sequence[tuple[str, int]]) -> list[str]:
    where = results.configuration.numbers
    return [_written(results.errors(method, what), [where.index(n)])[0] for what, n in columns]


def _of_seeds(results: Results, method: str, what: str, n: int) -> str:
    at = results.configuration.numbers.index(n)
    return ", ".join(f"{errors[:, at].mean():.3f}" for errors in results.errors(method, what))


def _written(of_seeds: Sequence[Tensor], at: Sequence[int]) -> list[str]:
    return [f"{m:.3f} ({low:.3f} to {high:.3f})" for m, low, high in np.stack(interval(of_seeds), axis=1)[list(at)]]


def _table(corner: str, columns: Sequence[str], rows: Mapping[str, Sequence[str]]) -> str:
    lines = [[corner, *columns], ["---"] * (len(columns) + 1), *([name, *cells] for name, cells in rows.items())]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# ---------------------------------------------------------------------------------------------------------------
# Figures.

_DASHES = {
    "least squares": "--",
    "averaging": ":",
    "3 nearest neighbours": "-.",
    "Lasso": (0, (6, 2, 1, 2, 1, 2)),
    "greedy tree": "-",
    "boosted trees": (0, (9, 3)),
}
_LIGHT = "0.75"
_TITLES = {
    "none": "as in training",
    "offset": "label offset",
    "scale": "x three times as large",
    "subspace": "x in a half subspace",
    "linear": "linear",
    "sparse": "sparse linear",
    "tree": "decision tree",
}


def _one(results: Sequence[Results]) -> Results:
    if len(results) != 1:
        raise InputError(f"plot: this figure is of one folder, and {len(results)} are given: give one.")
    return results[0]


def _grid(across: int, down: int = 1) -> tuple[Figure, np.ndarray]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.1 * across + 1.7, 2.5 * down + 0.3), layout="constrained")
    return figure, figure.subplots(down, across, squeeze=False, sharex=True, sharey=True)


def _finish(figure: Figure, grid: np.ndarray, x: str) -> Figure:
    """Labels at the outer axes, and one legend to the right of everything."""
    from matplotlib.ticker import FuncFormatter

    for axes in grid[-1]:
        axes.set_xlabel(x)
    for axes in grid[:, 0]:
        axes.set_ylabel("squared error\n(predicting 0: 1)")
    drawn = [line for axes in grid.flat for line in axes.lines if line.get_color() not in (GREY, _LIGHT)]
    grid[0, 0].set_ylim(0.7 * min(min(line.get_ydata()) for line in drawn), 2.5)  # least squares goes down to 0
    named: dict[str, Artist] = {}
    for axes in grid.flat:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter("")
        axes.grid(axis="y", color="0.9", linewidth=0.6)
        axes.set_axisbelow(True)
        named |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(list(named.values()), list(named), loc="outside right upper")
    return figure


def _band(axes: Axes, x: Sequence[int], of_seeds: Sequence[Tensor], label: str, colour: str, marker: str = "") -> None:
    """The mean and its bootstrap interval."""
    mean, low, high = interval(of_seeds)
    every = max(1, len(x) // 8)
    axes.plot(x, mean, color=colour, marker=marker, markevery=every, markersize=3.5, linewidth=1.3, label=label)
    axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)


def _against_examples(axes: Axes, results: Results, title: str, methods: Sequence[str], what: str) -> None:
    """A panel: the error of each method by the number of examples."""
    for name in methods:
        if name in results.of:
            colour, marker = of_method(name)
            _band(axes, results.configuration.numbers, results.errors(name, what), name, colour, marker)
    _frame(axes, results, title)


def _frame(axes: Axes, results: Results, title: str) -> None:
    axes.set_title(title)
    most = results.configuration.examples
    axes.axvline(most, color=_LIGHT, linewidth=0.8, zorder=0, label="most in training")
    axes.set(yscale="log", xlim=(0, results.configuration.longest))


def _baselines(axes: Axes, results: Results, shift: str, names: Sequence[str] | None = None) -> None:
    found = {name.partition(",")[0]: of for name, of in results.baselines.items() if name.endswith(f", {shift}")}
    for name, of in found.items():
        if names is None or name in names:
            mean = of.mean(dim=0)
            axes.plot(results.configuration.numbers, mean, color=GREY, linestyle=_DASHES[name], linewidth=1, label=name)


def figure3(every: Sequence[Results]) -> Figure:
    """Error against the number of examples, early in training and at its end."""
    results = _one(every)
    figure, grid = _grid(len(results.configuration.shown))
    for axes, step in zip(grid.flat, results.configuration.shown, strict=True):
        _against_examples(axes, results, f"after {step:,} steps", METHODS, f"{step} none")
        _baselines(axes, results, "none", ["least squares"])
    return _finish(figure, grid, "examples")


def figure6(every: Sequence[Results]) -> Figure:
    """The same for other functions, a folder each, with the estimators that belong to them."""
    figure, grid = _grid(len(every))
    for axes, results in zip(grid.flat, every, strict=True):
        configuration = results.configuration
        title = f"{_TITLES[configuration.function]}, after {configuration.steps:,} steps"
        _against_examples(axes, results, title, METHODS, f"{configuration.steps} none")
        _baselines(axes, results, "none")
    return _finish(figure, grid, "examples")


def figure7(every: Sequence[Results]) -> Figure:
    """The same under shifts; as in the paper without `prefixicl` and `pcw`."""
    results = _one(every)
    if len(shifts(results.configuration)) == 1:
        raise InputError("plot figure7: the shifts are of linear functions: give a folder of them.")
    steps, moved = results.configuration.shown, shifts(results.configuration)[1:]
    figure, grid = _grid(len(moved), len(steps))
    for row, step in zip(grid, steps, strict=True):
        for axes, shift in zip(row, moved, strict=True):
            title = f"{_TITLES[shift]}, {step:,} steps"
            _against_examples(axes, results, title, ("icl", "nope", "invicl"), f"{step} {shift}")
            _baselines(axes, results, shift, ["least squares"])
    return _finish(figure, grid, "examples")


def figure8(every: Sequence[Results]) -> Figure:
    """Error against the number of examples after different numbers of steps."""
    from matplotlib import colormaps

    results = _one(every)
    shown = [name for name in ("icl", "invicl") if name in results.of]
    figure, grid = _grid(len(shown))
    kept = results.configuration.kept
    for axes, name in zip(grid.flat, shown, strict=True):
        for i, step in enumerate(kept):
            colour = colormaps["viridis"](0.95 - 0.95 * i / max(1, len(kept) - 1))
            mean, _, _ = interval(results.errors(name, f"{step} none"))
            axes.plot(results.configuration.numbers, mean, color=colour, linewidth=1.2, label=f"{step:,} steps")
        _frame(axes, results, name)
    return _finish(figure, grid, "examples")


def figure9(every: Sequence[Results]) -> Figure:
    """Error with the most examples against the number of steps."""
    results = _one(every)
    figure, grid = _grid(1)
    axes, kept = grid[0, 0], results.configuration.kept
    for name, of in results.of.items():
        colour, marker = of_method(name)
        last = [torch.stack([errors[f"{step} none"][:, -1] for step in kept], dim=1) for errors in of.values()]
        _band(axes, kept, last, name, colour, marker)
    axes.set(yscale="log", title=f"{results.configuration.longest} examples")
    return _finish(figure, grid, "steps")


def figure10(every: Sequence[Results]) -> Figure:
    """Error of linear probes of the hidden states, at four depths, beside that of the model."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    results = _one(every)
    shown = [name for name in ("icl", "invicl") if name in results.of]
    figure, grid = _grid(len(shown))
    configuration = results.configuration
    for axes, name in zip(grid.flat, shown, strict=True):
        for i, layer in enumerate(configuration.probed):
            colour = to_hex(colormaps["viridis"](0.95 - 0.3 * i))
            _band(
                axes, configuration.numbers, results.errors(name, f"probe {layer}"), f"probe of layer {layer}", colour
            )
        mean, _, _ = interval(results.errors(name, f"{configuration.steps} none"))
        axes.plot(configuration.numbers, mean, color=of_method("hf")[0], linestyle="--", linewidth=1, label="the model")
        _frame(axes, results, name)
    return _finish(figure, grid, "examples")


FIGURES: dict[str, Callable[[Sequence[Results]], Figure]] = {
    each.__name__: each for each in (figure3, figure6, figure7, figure8, figure9, figure10)
}


if __name__ == "__main__":
    sys.exit(main())
