"""The settings of a training.

This module does not import torch, so that a command can refuse a setting at once.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from lm_eval_icl.declared import Arguments, NotNegative, Positive, arguments_of
from lm_eval_icl.errors import InputError, require

Rate = Annotated[float, Field(ge=0)]


@dataclass(frozen=True)
class Settings(Arguments):
    """How training goes. Each type says what the setting means.

    The defaults are MetaICL's, with 8 demonstrations as in InvICL (appendix A.4).

    Raises:
        InputError: an argument is outside its range, or `lora` cannot be used here.
    """

    num_fewshot: Annotated[NotNegative, "the number of demonstrations of an episode"] = 8
    steps: Annotated[Positive, "the number of updates"] = 30_000
    batch_size: Annotated[Positive, "the number of episodes of an update, over all processes"] = 8
    learning_rate: Annotated[Rate, "the highest learning rate, which falls linearly to 0"] = 1e-5
    warmup_steps: Annotated[NotNegative, "the number of steps in which the learning rate rises"] = 0
    weight_decay: Annotated[Rate, "the weight decay of AdamW"] = 0.0
    max_grad_norm: Annotated[Rate, "the norm at which gradients are clipped"] = 1.0
    seed: Annotated[NotNegative, "the seed of the episodes, and of dropout"] = 0
    draw: Annotated[
        Literal["task", "row"],
        "draw a task first, each equally likely, or draw every row once in an epoch",
    ] = "task"
    loss: Annotated[
        Literal["query", "all"],
        "train on the answer of the query, or also on those of the demonstrations",
    ] = "query"
    gradient_accumulation_steps: Annotated[
        Positive, "the number of passes in which a process runs its part of a batch"
    ] = 1
    gradient_checkpointing: Annotated[bool, "compute activations again instead of keeping them"] = (
        False
    )
    bf16: Annotated[bool, "run in mixed precision; the weights stay as they are"] = False
    lora: Annotated[
        bool,
        "train only low-rank adapters, which are merged into the weights at the end",
    ] = False
    lora_rank: Annotated[Positive, "the rank of the adapters"] = 16
    lora_alpha: Annotated[
        Positive, "the adapters are scaled by this number divided by the rank"
    ] = 32
    eval_steps: Annotated[
        NotNegative,
        "the number of steps between evaluations on held-out rows; 0 for none",
    ] = 500
    eval_documents: Annotated[
        NotNegative, "the number of rows of each task that are held out, at most a tenth"
    ] = 64
    save_steps: Annotated[Positive, "the number of steps between checkpoints"] = 500

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.lora:
            return
        require("peft", "lora", "--lora")
        for name in ("FSDP", "DEEPSPEED"):
            if os.environ.get(f"ACCELERATE_USE_{name}") == "true":
                raise InputError(
                    "--lora: adapters are not merged under FSDP or DeepSpeed: leave one of them "
                    "out."
                )


def with_numbers(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options from a YAML file, with numbers that are written as texts, such as "1e-5", as numbers.

    Raises:
        InputError: a setting is outside its range.
    """
    known = arguments_of(Settings)
    settings = Settings(**{name: value for name, value in options.items() if name in known})
    return {name: settings.arguments.get(name, value) for name, value in options.items()}
