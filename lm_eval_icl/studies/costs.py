"""What the trainings of a study took, and the loss on held-out rows before and after them."""

from __future__ import annotations

import json
from typing import Any

import pandas as pd
from rich import box
from rich.table import Table
from rich.text import Text

from lm_eval_icl.studies.folder import StudyFolder
from lm_eval_icl.studies.targets import Grid


def trainings(grid: Grid, folder: StudyFolder) -> pd.DataFrame:
    """A row for each trained model whose checkpoint is there.

    `tokens` were run in `seconds` of the steps alone; `memory` is in bytes. The losses are NaN if
    none was measured.
    """
    rows = []
    for model in grid.models:
        file = folder.checkpoints / model.checkpoint / "trainer_state.json"
        if model.training is None or model.under is None or not file.is_file():
            continue
        state: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        measured = [entry["eval_loss"] for entry in state["log_history"] if "eval_loss" in entry]
        first, last = (measured[0], measured[-1]) if measured else (None, None)
        rows.append(
            {
                "model": model.name,
                "training": model.training.name,
                "method": model.under.name,
                "steps": state["global_step"],
                "tokens": state["num_input_tokens_seen"],
                **state["stateful_callbacks"]["Costs"]["args"],
                "loss_before": first,
                "loss_after": last,
            }
        )
    return pd.DataFrame(rows)


def table(costs: pd.DataFrame) -> Table:
    """The costs as a table of the terminal."""
    printed = Table(title="Trainings", box=box.SIMPLE)
    for name in ("training", "steps", "tokens", "minutes", "GiB", "held-out loss"):
        printed.add_column(name, justify="left" if name == "training" else "right")
    for row in costs.itertuples():
        printed.add_row(
            Text(f"{row.training}\n{row.method}"),
            f"{row.steps:,}",
            f"{row.tokens:,}",
            f"{row.seconds / 60:,.1f}",
            f"{row.memory / 2**30:.1f}",
            f"{row.loss_before:.3f} → {row.loss_after:.3f}" if pd.notna(row.loss_after) else "",
        )
    return printed
