"""The record of a training in its checkpoint's configuration, and the warning of an evaluation under another method."""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers import PreTrainedConfig

from lm_eval_icl.methods.base import Method

KEY = "lm_eval_icl"  # the key in `config.json`


def write(config: PreTrainedConfig, trained: dict[str, Any]) -> None:
    """Put a record into a configuration: `method` or `methods` (names), `positions`, `num_fewshot` and others."""
    config.update({KEY: {"trained": trained}})


def read(config: PreTrainedConfig) -> dict[str, Any]:
    """The record of a configuration; empty if it has none."""
    record = getattr(config, KEY, None)
    trained = record.get("trained") if isinstance(record, dict) else None
    return trained if isinstance(trained, dict) else {}


def mismatch(trained: dict[str, Any], method: Method) -> str:
    """The warning about evaluating a method on a checkpoint of this record; empty if they match."""
    names = [
        name
        for name in (trained.get("method"), *(trained.get("methods") or ()))
        if isinstance(name, str)
    ]
    needed = method.trained_under
    if not names:
        return (
            f"it needs a model trained under {needed}; no record of that is here"
            if method.needs_training
            else ""
        )
    if needed not in names:
        return f"the checkpoint was trained under {', '.join(names)}, and is evaluated under {method.name}"
    if method.one_pass:
        for name, value in dataclasses.asdict(method).items():
            if name in trained and trained[name] != value:
                return f"the checkpoint was trained with {name}={trained[name]}, and is evaluated with {value}"
    return ""
