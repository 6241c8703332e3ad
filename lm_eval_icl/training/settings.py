"""The settings of a training. This module does not import torch, so that a command can refuse a setting at once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from lm_eval_icl.errors import InputError, refusal, require, whole

Positive = Annotated[int, BeforeValidator(whole)]  # 2.0 is 2
NotNegative = Annotated[int, BeforeValidator(partial(whole, least=0))]
# YAML reads 1e-5, without a point, as a text.
Number = BeforeValidator(lambda value: float(value) if isinstance(value, str) else value)
Rate = Annotated[float, Number, Field(ge=0, allow_inf_nan=False)]


class Settings(BaseModel):
    """How training goes. The defaults are MetaICL's, with 8 demonstrations as in InvICL (appendix A.4).

    Args:
        num_fewshot: how many demonstrations an episode has.
        steps: how many updates there are.
        batch_size: how many episodes an update has, over all processes.
        learning_rate: the highest learning rate, from which it falls linearly to 0.
        warmup_steps: over how many steps at the beginning the learning rate rises.
        weight_decay: the weight decay of AdamW.
        max_grad_norm: the norm at which gradients are clipped.
        seed: the seed of the episodes, and of dropout.
        draw: "task" draws a task first, all equally likely; "row" draws every row once an epoch.
        loss: "query", or "all" for the answers of the demonstrations too.
        gradient_accumulation_steps: in how many passes a process runs its part of a batch.
        gradient_checkpointing: compute activations twice instead of keeping them.
        bf16: run in mixed precision; the weights stay as they are.
        lora: train low-rank adapters alone, which are merged into the weights at the end.
        lora_rank: the rank of the adapters.
        lora_alpha: the adapters are scaled by this number divided by the rank.
        eval_steps: after how many steps the loss on held-out rows is measured; 0 for never.
        eval_documents: how many rows of each task are held out, at most a tenth.
        save_steps: after how many steps a checkpoint is written.

    Raises:
        InputError: an argument is outside its range, or `lora` cannot be used here.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    num_fewshot: NotNegative = 8
    steps: Positive = 30_000
    batch_size: Positive = 8
    learning_rate: Rate = 1e-5
    warmup_steps: NotNegative = 0
    weight_decay: Rate = 0.0
    max_grad_norm: Rate = 1.0
    seed: NotNegative = 0
    draw: Literal["task", "row"] = "task"
    loss: Literal["query", "all"] = "query"
    gradient_accumulation_steps: Positive = 1
    gradient_checkpointing: bool = False
    bf16: bool = False
    lora: bool = False
    lora_rank: Positive = 16
    lora_alpha: Positive = 32
    eval_steps: NotNegative = 500
    eval_documents: NotNegative = 64
    save_steps: Positive = 500

    def __init__(self, **settings: Any) -> None:
        try:
            super().__init__(**settings)
        except ValidationError as error:
            raise InputError("--{} {!r}: {}.".format(*refusal(error))) from error
        if self.lora:
            require("peft", "lora", "--lora")
        if self.lora and any(
            os.environ.get(f"ACCELERATE_USE_{name}") == "true" for name in ("FSDP", "DEEPSPEED")
        ):
            raise InputError(
                "--lora: adapters are not merged under FSDP or DeepSpeed: leave one of them out."
            )


def with_numbers(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options from a YAML file, with the texts of settings that are numbers, such as "1e-5", made numbers.

    Raises:
        InputError: a setting is outside its range.
    """
    settings = {name: value for name, value in options.items() if name in Settings.model_fields}
    return {**options, **Settings(**settings).model_dump(include=set(settings))}
