"""The measured errors of the trainings in a folder, and their tables in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from lm_eval_icl.regression.configuration import Configuration
from lm_eval_icl.regression.evaluation import Errors, evaluate_baselines, interval, measured, shifts
from lm_eval_icl.regression.training import open_runs


class Measurements:
    """The errors that were measured in one folder.

    Attributes:
        configuration: that of all its trainings.
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


def tables(results: Measurements) -> str:
    """The errors in Markdown: in each cell the mean over seeds and functions and its 95% bootstrap interval."""
    configuration = results.configuration
    last = configuration.steps
    numbers = [configuration.numbers[0], configuration.examples // 2, configuration.examples, configuration.longest]
    numbers = sorted({min(configuration.numbers, key=lambda n: abs(n - near)) for near in numbers[1:]})
    seeds = max(len(by_seed) for by_seed in results.of.values())
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


def _cells(results: Measurements, method: str, columns: Sequence[tuple[str, int]]) -> list[str]:
    where = results.configuration.numbers
    return [_written(results.errors(method, what), [where.index(n)])[0] for what, n in columns]


def _of_seeds(results: Measurements, method: str, what: str, n: int) -> str:
    at = results.configuration.numbers.index(n)
    return ", ".join(f"{errors[:, at].mean():.3f}" for errors in results.errors(method, what))


def _written(of_seeds: Sequence[Tensor], at: Sequence[int]) -> list[str]:
    return [f"{m:.3f} ({low:.3f} to {high:.3f})" for m, low, high in np.stack(interval(of_seeds), axis=1)[list(at)]]


def _table(corner: str, columns: Sequence[str], rows: Mapping[str, Sequence[str]]) -> str:
    lines = [[corner, *columns], ["---"] * (len(columns) + 1), *([name, *cells] for name, cells in rows.items())]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
