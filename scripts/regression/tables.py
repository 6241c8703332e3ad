"""The measured errors of the trainings in a folder, and their tables in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from scripts.regression.configuration import Configuration
from scripts.regression.evaluation import Errors, evaluate_baselines, interval, measured, shifts
from scripts.regression.training import open_runs


class Measurements:
    """The errors that were measured in one folder.

    Attributes:
        configuration: that of all its trainings.
        of: by method and seed, the errors (see `scripts.regression.evaluation.evaluate`).
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


def tables(results: Measurements) -> str:
    """The errors in Markdown: in each cell the mean over seeds and functions and its 95% bootstrap interval."""
    configuration = results.configuration
    numbers = configuration.numbers
    at_end = f"{configuration.steps} none"
    near = (configuration.examples // 2, configuration.examples, configuration.longest)
    shown = sorted({min(numbers, key=lambda n: abs(n - wanted)) for wanted in near})
    seeds = max(len(by_seed) for by_seed in results.of.values())

    def cells(of_seeds: Sequence[Tensor], n: Sequence[int]) -> list[str]:
        columns = np.stack(interval(of_seeds), axis=1)[[numbers.index(one) for one in n]]
        return [f"{mean:.3f} ({low:.3f} to {high:.3f})" for mean, low, high in columns]

    parts = [
        f"Squared error divided by that of predicting 0; {seeds} seeds, {configuration.tested} functions; mean and 95% "
        "bootstrap interval."
    ]
    for shift in shifts(configuration):
        steps = configuration.shown
        rows: dict[str, list[str]] = {}
        for name in results.of:
            row = rows[f"`{name}`"] = []
            for step in steps:
                row += cells(results.errors(name, f"{step} {shift}"), shown)
        for name_and_shift, errors in results.baselines.items():
            name, _, of_shift = name_and_shift.partition(", ")
            if of_shift == shift:
                rows[name] = cells([errors], shown) * len(steps)
        columns = [f"{n} examples, {step:,} steps" for step in steps for n in shown]
        parts.append(_table("method" if shift == "none" else f"shift: {shift}", columns, rows))

    columns = []
    rows = {f"`{name}`": [] for name in results.of}
    for n in (configuration.examples, configuration.longest):
        columns.append(f"{n} examples")
        for name in results.of:
            of_seeds = [e[:, numbers.index(n)].mean() for e in results.errors(name, at_end)]
            rows[f"`{name}`"].append(", ".join(f"{mean:.3f}" for mean in of_seeds))
    parts.append(_table(f"seed by seed, {configuration.steps:,} steps", columns, rows))

    probed = {f"layer {layer}": f"probe {layer}" for layer in configuration.probed}
    probed["the model"] = at_end
    most = [configuration.examples]
    rows = {}
    for name in results.of:
        row = rows[f"`{name}`"] = []
        for what in probed.values():
            row += cells(results.errors(name, what), most)
    parts.append(_table(f"linear probes, {configuration.examples} examples", list(probed), rows))
    return "\n\n".join(parts)


def _table(corner: str, columns: Sequence[str], rows: Mapping[str, Sequence[str]]) -> str:
    lines = [
        [corner, *columns],
        ["---"] * (len(columns) + 1),
        *([name, *cells] for name, cells in rows.items()),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
