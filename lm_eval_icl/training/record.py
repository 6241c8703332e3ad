"""The record of a training in a checkpoint's configuration, and the warning about a mismatch."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from lm_eval_icl.methods.base import Method

KEY = "lm_eval_icl"  # the key in `config.json`


def write(config: PreTrainedConfig, trained: dict[str, Any]) -> None:
    """Put a record into a configuration.

    It has `method` or `methods` (names), `positions`, `num_fewshot` and others.
    """
    config.update({KEY: {"trained": trained}})


def read(config: PreTrainedConfig) -> dict[str, Any]:
    """The record of a configuration; empty if it has none."""
    record = getattr(config, KEY, None)
    trained = record.get("trained") if isinstance(record, dict) else None
    return trained if isinstance(trained, dict) else {}


def mismatch(trained: dict[str, Any], method: Method) -> str:
    """The warning about evaluating a method on a checkpoint of this record; empty if they match."""
    recorded = [trained.get("method"), *(trained.get("methods") or ())]
    names = [name for name in recorded if isinstance(name, str)]
    needed = method.trained_under
    if not names and method.needs_training:
        return f"it needs a model trained under {needed}, and the checkpoint records no training"
    if not names:
        return ""
    if needed not in names:
        return (
            f"the checkpoint was trained under {', '.join(names)}, and is evaluated under "
            f"{method.name}"
        )
    for name, value in method.arguments.items() if method.one_pass else ():
        if name in trained and trained[name] != value:
            return (
                f"the checkpoint was trained with {name}={trained[name]}, and is evaluated with "
                f"{value}"
            )
    return ""
