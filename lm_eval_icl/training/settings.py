"""The settings of a training. They are known without torch, so that a command can refuse one of them at once."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from lm_eval_icl.errors import InputError, refusal, whole

Positive = Annotated[int, BeforeValidator(whole)]  # 2.0 is 2
NotNegative = Annotated[int, BeforeValidator(partial(whole, least=0))]
Rate = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Settings(BaseModel):
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
    loss: str = "query"
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

    @property
    def identity(self) -> dict[str, Any]:
        """The settings that the trained weights depend on."""
        return {name: value for name, value in self if name != "save_steps"}


def with_numbers(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings from a YAML file, with numbers in place of texts such as 1e-5, which YAML does not read as a number.

    Raises:
        InputError: a text is no number.
    """
    numbers = dict(settings)
    for name, value in numbers.items():
        field = Settings.model_fields.get(name)
        if field is not None and field.annotation is float and isinstance(value, str):
            try:
                numbers[name] = float(value)
            except ValueError as error:
                raise InputError(f"{name}: {value!r}: must be a number.") from error
    return numbers
