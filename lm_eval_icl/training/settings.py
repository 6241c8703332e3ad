"""The settings of a training. They are known without torch, so that a command can refuse one of them at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lm_eval_icl.errors import InputError, is_number, whole


@dataclass(frozen=True)
class Settings:
    """How training goes. The defaults are MetaICL's, with 8 demonstrations as in InvICL (appendix A.4).

    Args:
        num_fewshot: how many demonstrations an episode has.
        steps: how many updates there are.
        batch_size: how many episodes an update has, over all processes.
        learning_rate: at the beginning; it falls linearly to 0.
        warmup_steps: over how many steps it rises before.
        weight_decay: of AdamW.
        max_grad_norm: the norm at which gradients are clipped.
        seed: of the episodes, and of dropout.
        draw: "task" draws a task first, all equally likely; "row" draws every row once an epoch.
        loss: "query", or "all" for the answers of the demonstrations too.
        gradient_accumulation_steps: in how many passes a process runs its part of a batch.
        gradient_checkpointing: compute activations twice instead of keeping them.
        bf16: run in mixed precision; the weights stay as they are.
        lora: train low-rank adapters alone, which are merged into the weights at the end.
        lora_rank: of the adapters.
        lora_alpha: by which, divided by the rank, the adapters are scaled.
        eval_steps: after how many steps the accuracy on held-out rows is measured; 0 for never.
        eval_documents: how many rows of each task are held out, at most a tenth.
        save_steps: after how many steps a checkpoint is written.

    Raises:
        InputError: an argument is outside its range.
    """

    num_fewshot: int = 8
    steps: int = 30_000
    batch_size: int = 8
    learning_rate: float = 1e-5
    warmup_steps: int = 0
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    seed: int = 0
    draw: str = "task"
    loss: str = "query"
    gradient_accumulation_steps: int = 1
    gradient_checkpointing: bool = False
    bf16: bool = False
    lora: bool = False
    lora_rank: int = 16
    lora_alpha: int = 32
    eval_steps: int = 500
    eval_documents: int = 64
    save_steps: int = 500

    def __post_init__(self) -> None:
        least = {"num_fewshot": 0, "seed": 0, "warmup_steps": 0, "eval_steps": 0, "eval_documents": 0}
        for field in dataclasses.fields(self):
            name, value = field.name, getattr(self, field.name)
            must = ""
            if field.type == "bool" and not isinstance(value, bool):
                raise InputError(f"--{name} {value!r}: must be true or false.")
            if field.type == "int":
                try:
                    object.__setattr__(self, name, whole(value, least.get(name, 1)))  # 2.0 is 2
                except ValueError as error:
                    must = str(error)
            if field.type == "float" and not (is_number(value) and value >= 0):
                must = "must be a number, 0 or more"
            if name == "draw" and value not in ("task", "row"):
                must = "must be task or row"
            if must:
                raise InputError(f"--{name} {value}: {must}.")

    @property
    def identity(self) -> dict[str, Any]:
        """The settings that the trained weights depend on."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "save_steps"}


def with_numbers(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings from a YAML file, with numbers in place of texts such as 1e-5, which YAML does not read as a number.

    Raises:
        InputError: a text is no number.
    """
    kinds = {field.name: field.type for field in dataclasses.fields(Settings)}
    numbers = dict(settings)
    for name, value in numbers.items():
        if kinds.get(name) == "float" and isinstance(value, str):
            try:
                numbers[name] = float(value)
            except ValueError as error:
                raise InputError(f"{name}: {value!r}: must be a number.") from error
    return numbers
