"""Trains a regressor under a method. A run that was stopped and goes on ends with the same bits."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm

from lm_eval_icl import methods
from lm_eval_icl.declared import read_into
from lm_eval_icl.errors import InputError, refusing
from lm_eval_icl.files import replacing, write_atomically
from lm_eval_icl.methods.base import Method
from scripts.regression.configuration import METHODS, Configuration
from scripts.regression.functions import draw_functions, generator
from scripts.regression.model import Regressor, reads_all_numbers

SAVE_EVERY = 500  # steps
LOG_EVERY = 50  # steps; it divides the first


@dataclass(frozen=True)
class RegressionRun:
    """One training: a method, a configuration and a seed. Its folder is METHOD-SEED.

    The folder has `run.json`, `log.jsonl`, the weights after some steps as `step-NUMBER.safetensors`, and in
    `state.safetensors` what training goes on from.
    """

    configuration: Configuration
    method: str
    seed: int
    folder: Path

    @property
    def name(self) -> str:
        return self.folder.name

    def weights(self, step: int) -> Path:
        """The file of the weights after a step."""
        return self.folder / f"step-{step:07}.safetensors"

    def load(self, step: int, device: str) -> Regressor:
        """The model after a step.

        Raises:
            InputError: there is no such file, or it is of another model.
        """
        file = self.weights(step)
        if not file.is_file():
            raise InputError(
                f"{file}: there is no such checkpoint: train {self.name} to the end first."
            )
        model = Regressor(self.configuration, method_of(self.method))
        with refusing(
            f"{file}: is no checkpoint of this configuration", "Train again, in another folder."
        ):
            model.load_state_dict(load_file(file))
        return model.to(device).eval()


def method_of(name: str) -> Method:
    """The method of this name.

    Raises:
        InputError: it is not one of the methods that are compared here.
    """
    if name not in METHODS:
        raise InputError(
            f"--methods {name}: there is no such method here: give some of {', '.join(METHODS)}."
        )
    return methods.find(name)()


def begin(output: Path, configuration: Configuration, method: str, seed: int) -> RegressionRun:
    """Take the folder of a run, or find it again.

    Raises:
        InputError: the method is unknown; the folder holds another run, or cannot be written.
    """
    method_of(method)
    run = RegressionRun(configuration, method, seed, output / f"{method}-{seed}")
    record = run.folder / "run.json"
    if record.is_file():
        recorded = open_run(run.folder).configuration.arguments
        for name, value in configuration.arguments.items():
            if recorded[name] != value:
                raise InputError(
                    f"--output {output}: {run.name} there was trained with {name}={recorded[name]}, and here it is "
                    f"{value}: give another folder."
                )
        return run
    known = {"method": method, "seed": seed, "configuration": configuration.arguments}
    with refusing(f"--output {output}: cannot be written", kinds=(OSError,)):
        run.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(record, json.dumps(known, indent=1) + "\n")
    return run


def open_run(folder: Path) -> RegressionRun:
    """The run of a folder.

    Raises:
        InputError: the folder has none.
    """
    record = folder / "run.json"
    advice = "Give the folder of a training."
    with refusing(f"{record}: cannot be read", advice, (OSError, ValueError, KeyError, TypeError)):
        known = json.loads(record.read_text(encoding="utf-8"))
        configuration = read_into(Configuration, known["configuration"])
        if configuration.arguments != known["configuration"]:
            raise InputError(
                f"{record}: its configuration is not one of this version: train again, in another folder."
            )
        return RegressionRun(configuration, known["method"], known["seed"], folder)


def open_runs(output: Path) -> list[RegressionRun]:
    """The runs in a folder that one command trained, by method and seed.

    Raises:
        InputError: there is none, or they have different configurations.
    """
    runs = [open_run(record.parent) for record in output.glob("*/run.json")]
    if not runs:
        raise InputError(
            f"--output {output}: there is no training in it: run `train` with this folder first."
        )
    for run in runs:
        if run.configuration != runs[0].configuration:
            raise InputError(
                f"--output {output}: {run.name} and {runs[0].name} have different configurations: give each its folder."
            )
    return sorted(runs, key=lambda run: (METHODS.index(run.method), run.seed))


def train(run: RegressionRun, device: str) -> None:
    """Train to the last step. A run that was stopped goes on.

    The functions of a step depend only on the seed and the step: with one seed, all methods get the same functions.
    """
    configuration = run.configuration
    if run.weights(configuration.steps).is_file():
        return
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(run.seed)
        model = Regressor(configuration, method_of(run.method)).to(device).train()
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.Adam(weights, configuration.learning_rate, fused=True)
    begun, log = _restore(run, model, optimizer)
    losses: list[Tensor] = []
    with tqdm(
        total=configuration.steps, initial=begun, desc=run.name, unit="step", mininterval=1
    ) as bar:
        for step in range(begun, configuration.steps):
            loss = step_loss(model, run.seed, step)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            bar.update()
            done = step + 1
            if done % LOG_EVERY == 0:
                log.append({"step": done, "loss": float(torch.stack(losses).double().mean())})
                losses.clear()
                bar.set_postfix(loss=f"{log[-1]['loss']:.3f}", refresh=False)
            if done in configuration.kept:
                write_tensors(run.weights(done), model.state_dict())
            if done % SAVE_EVERY == 0 or done == configuration.steps:
                _save(run, model, optimizer, done, log)


def step_loss(model: Regressor, seed: int, step: int) -> Tensor:
    """The mean squared error over the predictions of a batch (InvICL, Eq. 13).

    A row of `icl` predicts with every number of examples. Where a row has one number, it is drawn anew for each part of
    the batch, from 0 to one less than there are points: so all methods train on the numbers they are tested with, and
    where the query alone is predicted, the expected error is that of the equation.
    """
    configuration = model.configuration
    dimensions, points = configuration.stage(step)
    random = generator("training", seed, step)
    x, y = draw_functions(configuration, random, configuration.batch_size, points, dimensions)
    numbers = [points - 1]
    parts = 1
    if not reads_all_numbers(model.method):
        parts = configuration.lengths
        numbers = torch.randint(points, (parts,), generator=random).tolist()
    x, y = (tensor.to(model.read_in.weight) for tensor in (x, y))
    losses = []
    for n, x_n, y_n in zip(numbers, x.chunk(parts), y.chunk(parts), strict=True):
        read = model(x_n[:, : n + 1], y_n[:, :n])
        losses.append((read - y_n[:, n + 1 - read.shape[1] : n + 1]).square().mean())
    return torch.stack(losses).mean()


def _save(
    run: RegressionRun,
    model: Regressor,
    optimizer: torch.optim.Optimizer,
    step: int,
    log: list[dict[str, Any]],
) -> None:
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for number, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{number}.{name}": tensor for name, tensor in state.items()}
    lines = "".join(json.dumps(entry) + "\n" for entry in log)
    with refusing(f"{run.folder}: the log cannot be written", kinds=(OSError,)):
        (run.folder / "log.jsonl").write_text(lines, encoding="utf-8")
    write_tensors(run.folder / "state.safetensors", tensors, {"step": str(step), "log": lines})


def _restore(
    run: RegressionRun, model: Regressor, optimizer: torch.optim.Optimizer
) -> tuple[int, list[dict[str, Any]]]:
    """The number of steps that are done, and their log."""
    file = run.folder / "state.safetensors"
    if not file.is_file():
        return 0, []
    with refusing(f"{file}: cannot be gone on from", "Delete the folder to train anew."):
        weights: dict[str, Tensor] = {}
        state: dict[int, dict[str, Tensor]] = {}
        for name, tensor in load_file(file).items():
            part, _, name = name.partition(".")
            if part == "model":
                weights[name] = tensor
            else:
                number, _, name = name.partition(".")
                state.setdefault(int(number), {})[name] = tensor
        model.load_state_dict(weights)
        optimizer.load_state_dict(
            {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}
        )
        with safe_open(file, "pt") as opened:
            metadata = opened.metadata()
        return int(metadata["step"]), [json.loads(line) for line in metadata["log"].splitlines()]


def write_tensors(
    file: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None
) -> None:
    """Write tensors to a file, whole or not at all."""
    with (
        refusing(f"{file}: cannot be written", kinds=(OSError, SafetensorError)),
        replacing(file) as half,
    ):
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, half, metadata)
