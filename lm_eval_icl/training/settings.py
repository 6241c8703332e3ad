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

    num_fewshot: Annotated[NotNegative, "how many demonstrations an episode has"] = 8
    steps: Annotated[Positive, "how many updates there are"] = 30_000
    batch_size: Annotated[Positive, "how many episodes an update has, over all processes"] = 8
    learning_rate: Annotated[
        Rate, "the highest learning rate, from which it falls linearly to 0"
    ] = 1e-5
    warmup_steps: Annotated[
        NotNegative, "over how many steps at the beginning the learning rate rises"
    ] = 0
    weight_decay: Annotated[Rate, "the weight decay of AdamW"] = 0.0
    max_grad_norm: Annotated[Rate, "the norm at which gradients are clipped"] = 1.0
    seed: Annotated[NotNegative, "the seed of the episodes, and of dropout"] = 0
    draw: Annotated[
        Literal["task", "row"],
        "draw a task first, all equally likely, or draw every row once an epoch",
    ] = "task"
    loss: Annotated[
        Literal["query", "all"],
        "train on the answer of the query, or on those of the demonstrations too",
    ] = "query"
    gradient_accumulation_steps: Annotated[
        Positive, "in how many passes a process runs its part of a batch"
    ] = 1
    gradient_checkpointing: Annotated[bool, "compute activations twice instead of keeping them"] = (
        False
    )
    bf16: Annotated[bool, "run in mixed precision; the weights stay as they are"] = False
    lora: Annotated[
        bool,
        "train low-rank adapters alone, which are merged into the weights at the end",
    ] = False
    lora_rank: Annotated[Positive, "the rank of the adapters"] = 16
    lora_alpha: Annotated[
        Positive, "the adapters are scaled by this number divided by the rank"
    ] = 32
    eval_steps: Annotated[
        NotNegative,
        "after how many steps held-out rows are measured; 0 for never",
    ] = 500
    eval_documents: Annotated[
        NotNegative, "how many rows of each task are held out, at most a tenth"
    ] = 64
    save_steps: Annotated[Positive, "after how many steps a checkpoint is written"] = 500

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
