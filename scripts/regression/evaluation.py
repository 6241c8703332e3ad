"""The errors of trained models: by the number of examples, under shifts, and of linear probes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from tqdm import tqdm

from lm_eval_icl.errors import InputError, refusing
from scripts.regression.baselines import baselines
from scripts.regression.configuration import Configuration
from scripts.regression.functions import SHIFTS, draw_functions, generator, mean_square
from scripts.regression.model import Regressor
from scripts.regression.training import RegressionRun, write_tensors

PROBES_FITTED_ON = 512  # functions
_BATCH = 128

Errors = dict[str, Tensor]


def test_points(configuration: Configuration, shift: str = "none") -> tuple[Tensor, Tensor]:
    """The functions that all models are tested on: x [tested, longest + 1, d], y [tested, longest + 1]."""
    random = generator("testing", shift)
    points = configuration.longest + 1
    return draw_functions(configuration, random, configuration.tested, points, shift=shift)


def shifts(configuration: Configuration) -> Sequence[str]:
    """The shifts under which models of the configuration are tested: those of Figure 7 are of linear functions."""
    return SHIFTS if configuration.function == "linear" else SHIFTS[:1]


@torch.no_grad()
def errors(model: Regressor, shift: str = "none") -> Tensor:
    """The squared error by function and number of examples, divided by that of predicting 0: [tested, numbers]."""
    configuration = model.configuration
    numbers = configuration.numbers
    squares = []
    for x, y in _batches(model, *test_points(configuration, shift)):
        squares.append((model.predict(numbers, x, y) - y[:, numbers]).square())
    return torch.cat(squares).cpu().double() / mean_square(configuration, shift)


@torch.no_grad()
def probes(model: Regressor) -> dict[int, Tensor]:
    """The errors, as of `errors`, of linear functions of the hidden states of a layer (InvICL, B.5 and Figure 10).

    A layer has one function for all numbers of examples: the least squares fit to queries after as many examples as in
    training.
    """
    configuration = model.configuration
    layers = configuration.probed
    points = configuration.examples + 1
    numbers = [n for n in configuration.numbers if n < points]
    x, y = draw_functions(configuration, generator("probing"), PROBES_FITTED_ON, points)
    size = configuration.width + 1
    gram = torch.zeros(len(layers), size, size, dtype=torch.double)
    moment = gram[:, :, :1].clone()
    for x_i, y_i in _batches(model, x, y):
        states = _with_one(model.states_with(numbers, x_i, y_i, layers))
        gram += states.mT @ states
        moment += states.mT @ y_i[:, numbers].cpu().double().reshape(-1, 1)
    # A trace of a penalty, since hidden states may lie in a subspace.
    traces = gram.diagonal(dim1=1, dim2=2).mean(dim=1)
    penalty = 1e-9 * traces[:, None, None] * torch.eye(size).double()
    probe = torch.linalg.solve(gram + penalty, moment)
    squares = []
    for x_i, y_i in _batches(model, *test_points(configuration)):
        states = _with_one(model.states_with(configuration.numbers, x_i, y_i, layers))
        read = (states @ probe).reshape(len(layers), len(y_i), -1)
        squares.append((read - y_i[:, configuration.numbers].cpu()).square())
    return dict(zip(layers, torch.cat(squares, dim=1) / mean_square(configuration), strict=True))


def _with_one(states: Tensor) -> Tensor:
    """Hidden states [b, numbers, layers, width] as inputs of a linear function: [layers, b * numbers, width + 1]."""
    states = states.flatten(0, 1).transpose(0, 1).cpu().double()
    return torch.cat([states, torch.ones_like(states[:, :, :1])], dim=2)


def _batches(model: Regressor, x: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
    weight = model.read_in.weight
    return list(zip(x.to(weight).split(_BATCH), y.to(weight).split(_BATCH), strict=True))


def evaluate(run: RegressionRun, device: str) -> None:
    """Measure everything that the figures show of a run, unless its folder has it (`measured`)."""
    file = run.folder / "errors.safetensors"
    if file.is_file():
        return
    configuration = run.configuration
    tests = [(step, "none") for step in configuration.kept]
    tests += [(step, shift) for step in configuration.shown for shift in shifts(configuration)[1:]]
    by_test = {}
    for step, shift in tqdm(tests, desc=run.name, unit="test"):
        by_test[f"{step} {shift}"] = errors(run.load(step, device), shift)
    for layer, probed in probes(run.load(configuration.steps, device)).items():
        by_test[f"probe {layer}"] = probed
    write_tensors(file, by_test)


def measured(run: RegressionRun) -> Errors:
    """The errors of a run that was evaluated: of "STEP SHIFT" and "probe LAYER", [functions, numbers of examples].

    Raises:
        InputError: it was not.
    """
    file = run.folder / "errors.safetensors"
    if not file.is_file():
        raise InputError(f"{run.folder}: is not evaluated: run `evaluate` with this folder first.")
    return _read(file)


def evaluate_baselines(output: Path, configuration: Configuration) -> Errors:
    """The errors of the baselines, from the folder if they were measured before.

    Returns:
        "NAME, SHIFT": the errors, [functions, numbers of examples].
    """
    file = output / "baselines.safetensors"
    if not file.is_file():
        by_name: Errors = {}
        for shift in shifts(configuration):
            squares = baselines(
                configuration, configuration.numbers, *test_points(configuration, shift)
            )
            square = mean_square(configuration, shift)
            by_name |= {f"{name}, {shift}": tensor / square for name, tensor in squares.items()}
        write_tensors(file, by_name)
    return _read(file)


def _read(file: Path) -> Errors:
    with refusing(f"{file}: cannot be read", "Delete it to measure again."):
        return load_file(file)


def interval(
    of_seeds: Sequence[Tensor], trials: int = 1000
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The mean error for each number of examples, and the ends of its 95% bootstrap interval.

    Seeds and functions are drawn again, independently of each other, since all seeds are tested on the same functions.

    Args:
        of_seeds: for each seed, [functions, numbers].
    """
    data = torch.stack(list(of_seeds)).numpy()
    seeds, functions, _ = data.shape
    random = np.random.default_rng(0)
    of_seed = random.multinomial(seeds, [1 / seeds] * seeds, trials) / seeds
    of_function = random.multinomial(functions, [1 / functions] * functions, trials) / functions
    means = sum(of_seed[:, s, None] * (of_function @ data[s]) for s in range(seeds))
    low, high = np.percentile(means, [2.5, 97.5], axis=0)
    return data.mean(axis=(0, 1)), low, high
