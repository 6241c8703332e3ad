"""A picture of a training: the loss of each step, and the accuracy on held-out rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd

from lm_eval_icl.drawing.style import METADATA, styled
from lm_eval_icl.files import replacing


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

    columns = ["step", "loss", "eval_loss", "eval_accuracy"]
    table = pd.DataFrame(log, columns=columns).set_index("step")
    losses = table.loss.dropna()
    held_out = table.eval_loss.dropna()
    accuracy = table.eval_accuracy.dropna()
    means = losses.rolling(11, center=True, min_periods=1).mean()
    with styled():
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        axes.set(xlabel="step", ylabel="loss", title=f"Training under {method}")
        axes.plot(losses, color="C0", alpha=0.25, linewidth=0.8)
        axes.plot(means, color="C0", label="training, mean of 11 steps")
        axes.plot(held_out, "o-", color="C1", label="held-out rows")
        axes.legend(loc="center right")
        if len(accuracy):
            right = axes.twinx()
            right.plot(accuracy, "s--", color="C2")
            right.set(ylim=(0, 1.02), ylabel="accuracy on held-out rows")
            right.yaxis.label.set_color("C2")
        with replacing(path) as half:
            figure.savefig(half, format="svg", metadata=METADATA["svg"])
