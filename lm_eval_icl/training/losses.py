"""A picture of a training: the loss of each step, and the accuracy on held-out rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lm_eval_icl.drawing.style import METADATA, styled

_NEIGHBOURS = 5  # the line is a mean over so many steps before and after


def draw_losses(log: Sequence[Mapping[str, Any]], path: Path, method: str) -> None:
    """Draw the log of transformers' Trainer.

    Without matplotlib, a line says how to install it.

    Args:
        log: Trainer's log, an entry for each step and for each evaluation.
        path: the file, an SVG.
        method: the method under which the model was trained.
    """
    if find_spec("matplotlib") is None:
        print(f"{path.name} is not drawn without matplotlib: pip install 'lm-eval-icl[figures]'")
        return
    from matplotlib.figure import Figure

    with styled():
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        axes.set(xlabel="step", ylabel="loss", title=f"Training under {method}")
        steps, losses = _series(log, "loss")
        means = []
        for i in range(len(losses)):
            near = losses[max(0, i - _NEIGHBOURS) : i + _NEIGHBOURS + 1]
            means.append(sum(near) / len(near))
        axes.plot(steps, losses, color="C0", alpha=0.25, linewidth=0.8)
        axes.plot(steps, means, color="C0", label="training, mean of nearby steps")
        axes.plot(*_series(log, "eval_loss"), "o-", color="C1", label="held-out rows")
        axes.legend()
        steps, accuracies = _series(log, "eval_accuracy")
        if steps:
            right = axes.twinx()
            right.plot(steps, accuracies, "s--", color="C2")
            right.set_ylim(0, 1.02)
            right.set_ylabel("accuracy on held-out rows", color="C2")
        figure.savefig(path, metadata=METADATA["svg"])


def _series(log: Sequence[Mapping[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """The steps at which a number was measured, and the numbers."""
    entries = [entry for entry in log if name in entry]
    return [entry["step"] for entry in entries], [entry[name] for entry in entries]
