"""The figures of InvICL's synthetic study (section 5.1, appendices B.1, B.4 and B.5), drawn from `Measurements`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from torch import Tensor

from lm_eval_icl.drawing.style import GREY, method_style
from lm_eval_icl.errors import InputError
from scripts.regression.configuration import METHODS
from scripts.regression.evaluation import interval, shifts
from scripts.regression.tables import Measurements

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
    "offset": "label offset",
    "scale": "x three times as large",
    "subspace": "x in a half subspace",
    "linear": "linear",
    "sparse": "sparse linear",
    "tree": "decision tree",
}


def _one(results: Sequence[Measurements]) -> Measurements:
    if len(results) != 1:
        raise InputError(
            f"plot: this figure is of one folder, and {len(results)} are given: give one."
        )
    return results[0]


def _grid(across: int, down: int = 1) -> tuple[Figure, np.ndarray]:
    figure = Figure(figsize=(3.1 * across + 1.7, 2.5 * down + 0.3), layout="constrained")
    return figure, figure.subplots(down, across, squeeze=False, sharex=True, sharey=True)


def _finish(figure: Figure, grid: np.ndarray, x: str) -> Figure:
    """Labels at the outer axes, and one legend to the right of everything."""
    for axes in grid[-1]:
        axes.set_xlabel(x)
    for axes in grid[:, 0]:
        axes.set_ylabel("squared error\n(predicting 0: 1)")
    lowest = 2.5
    named: dict[str, Any] = {}
    for axes in grid.flat:
        for line in axes.lines:
            if line.get_color() not in (GREY, _LIGHT):  # least squares goes down to 0
                lowest = min(lowest, *line.get_ydata())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter("")
        axes.grid(axis="y", color="0.9", linewidth=0.6)
        axes.set_axisbelow(True)
        handles, labels = axes.get_legend_handles_labels()
        named |= dict(zip(labels, handles, strict=True))
    grid[0, 0].set_ylim(0.7 * lowest, 2.5)
    figure.legend(list(named.values()), list(named), loc="outside right upper")
    return figure


def _band(
    axes: Axes,
    x: Sequence[int],
    of_seeds: Sequence[Tensor],
    label: str,
    colour: Any,
    marker: str = "",
) -> None:
    """The mean and its bootstrap interval."""
    mean, low, high = interval(of_seeds)
    step = max(1, len(x) // 8)
    axes.plot(
        x,
        mean,
        color=colour,
        marker=marker,
        markevery=step,
        markersize=3.5,
        linewidth=1.3,
        label=label,
    )
    axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)


def _against_examples(
    axes: Axes, results: Measurements, title: str, methods: Sequence[str], what: str
) -> None:
    """A panel: the error of each method by the number of examples."""
    for name in methods:
        if name in results.of:
            colour, marker = method_style(name)
            _band(
                axes,
                results.configuration.numbers,
                results.errors(name, what),
                name,
                colour,
                marker,
            )
    _frame(axes, results, title)


def _frame(axes: Axes, results: Measurements, title: str) -> None:
    axes.set_title(title)
    most = results.configuration.examples
    axes.axvline(most, color=_LIGHT, linewidth=0.8, zorder=0, label="most in training")
    axes.set(yscale="log", xlim=(0, results.configuration.longest))


def _baselines(
    axes: Axes, results: Measurements, shift: str, names: Sequence[str] | None = None
) -> None:
    for name_and_shift, errors in results.baselines.items():
        name, _, of_shift = name_and_shift.partition(", ")
        if of_shift == shift and (names is None or name in names):
            mean = errors.mean(dim=0)
            axes.plot(
                results.configuration.numbers,
                mean,
                color=GREY,
                linestyle=_DASHES[name],
                linewidth=1,
                label=name,
            )


def figure3(folders: Sequence[Measurements]) -> Figure:
    """Error against the number of examples, early in training and at its end."""
    results = _one(folders)
    figure, grid = _grid(len(results.configuration.shown))
    for axes, step in zip(grid.flat, results.configuration.shown, strict=True):
        _against_examples(axes, results, f"after {step:,} steps", METHODS, f"{step} none")
        _baselines(axes, results, "none", ["least squares"])
    return _finish(figure, grid, "examples")


def figure6(folders: Sequence[Measurements]) -> Figure:
    """The same for other functions, a folder each, with the estimators that belong to them."""
    figure, grid = _grid(len(folders))
    for axes, results in zip(grid.flat, folders, strict=True):
        configuration = results.configuration
        title = f"{_TITLES[configuration.function]}, after {configuration.steps:,} steps"
        _against_examples(axes, results, title, METHODS, f"{configuration.steps} none")
        _baselines(axes, results, "none")
    return _finish(figure, grid, "examples")


def figure7(folders: Sequence[Measurements]) -> Figure:
    """The same under shifts; as in the paper without `prefixicl` and `pcw`."""
    results = _one(folders)
    if len(shifts(results.configuration)) == 1:
        raise InputError("plot figure7: the shifts are of linear functions: give a folder of them.")
    steps = results.configuration.shown
    moved = shifts(results.configuration)[1:]
    figure, grid = _grid(len(moved), len(steps))
    for row, step in zip(grid, steps, strict=True):
        for axes, shift in zip(row, moved, strict=True):
            title = f"{_TITLES[shift]}, {step:,} steps"
            _against_examples(axes, results, title, ("icl", "nope", "invicl"), f"{step} {shift}")
            _baselines(axes, results, shift, ["least squares"])
    return _finish(figure, grid, "examples")


def figure8(folders: Sequence[Measurements]) -> Figure:
    """Error against the number of examples after different numbers of steps."""
    results = _one(folders)
    shown = [name for name in ("icl", "invicl") if name in results.of]
    figure, grid = _grid(len(shown))
    kept = results.configuration.kept
    for axes, name in zip(grid.flat, shown, strict=True):
        for i, step in enumerate(kept):
            colour = colormaps["viridis"](0.95 - 0.95 * i / max(1, len(kept) - 1))
            mean, _, _ = interval(results.errors(name, f"{step} none"))
            axes.plot(
                results.configuration.numbers,
                mean,
                color=colour,
                linewidth=1.2,
                label=f"{step:,} steps",
            )
        _frame(axes, results, name)
    return _finish(figure, grid, "examples")


def figure9(folders: Sequence[Measurements]) -> Figure:
    """Error with the most examples against the number of steps."""
    results = _one(folders)
    figure, grid = _grid(1)
    axes = grid[0, 0]
    kept = results.configuration.kept
    for name, by_seed in results.of.items():
        colour, marker = method_style(name)
        last = [
            torch.stack([errors[f"{step} none"][:, -1] for step in kept], dim=1)
            for errors in by_seed.values()
        ]
        _band(axes, kept, last, name, colour, marker)
    axes.set(yscale="log", title=f"{results.configuration.longest} examples")
    return _finish(figure, grid, "steps")


def figure10(folders: Sequence[Measurements]) -> Figure:
    """Error of linear probes of the hidden states, at four depths, beside that of the model."""
    results = _one(folders)
    shown = [name for name in ("icl", "invicl") if name in results.of]
    figure, grid = _grid(len(shown))
    configuration = results.configuration
    for axes, name in zip(grid.flat, shown, strict=True):
        for i, layer in enumerate(configuration.probed):
            colour = colormaps["viridis"](0.95 - 0.3 * i)
            _band(
                axes,
                configuration.numbers,
                results.errors(name, f"probe {layer}"),
                f"probe of layer {layer}",
                colour,
            )
        mean, _, _ = interval(results.errors(name, f"{configuration.steps} none"))
        axes.plot(
            configuration.numbers,
            mean,
            color=method_style("hf")[0],
            linestyle="--",
            linewidth=1,
            label="the model",
        )
        _frame(axes, results, name)
    return _finish(figure, grid, "examples")
