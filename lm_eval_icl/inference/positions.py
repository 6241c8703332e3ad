"""A model's positional information: where rotary angles change, learned embeddings, neither."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lm_eval_icl.errors import InputError
from lm_eval_icl.inference.caches import cache_name, takes_positions, without_adapter
from lm_eval_icl.inference.capabilities import PositionSwitch
from lm_eval_icl.inference.devices import device_of


def position_switch(model: PreTrainedModel) -> PositionSwitch | None:
    """The length at which the model's rotary angles change (RoPE types longrope and dynamic)."""
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    # Models with several kinds of layers have one dictionary for each kind.
    for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        kind = parameters.get("rope_type")
        if kind == "dynamic":
            return PositionSwitch(int(config.max_position_embeddings), True)
        if kind == "longrope":
            original = parameters.get("original_max_position_embeddings")
            return PositionSwitch(int(original or config.max_position_embeddings), False)
    return None


def position_embeddings(model: PreTrainedModel) -> list[nn.Embedding]:
    """The learned position embeddings: those whose output changes with `position_ids`."""
    outputs: dict[nn.Embedding, list[Tensor]] = {}
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            outputs[module] = []

    def keep(module: Any, args: Any, output: Tensor) -> None:
        outputs[module].append(output.clone())  # some models add to the output in place

    with ExitStack() as hooks:
        for embedding in outputs:
            hooks.enter_context(embedding.register_forward_hook(keep))
        for position in (0, 1):
            at = torch.full((1, 1), position, device=device_of(model))
            model(input_ids=torch.ones_like(at), position_ids=at, use_cache=False)
    return [table for table, kept in outputs.items() if kept and not torch.equal(kept[0], kept[-1])]


@torch.no_grad()
def check_length(model: PreTrainedModel, max_length: int) -> None:
    """Refuse prompts of more tokens than the model has learned position embeddings for.

    Raises:
        InputError: `max_length` is above their number.
    """
    known = getattr(model.config.get_text_config(), "max_position_embeddings", max_length)
    if max_length > known and takes_positions(model) and position_embeddings(model):
        raise InputError(
            f"max_length={max_length}: {type(model).__name__} has learned embeddings for {known} "
            f"positions only: give at most {known}, or leave max_length out."
        )


@contextmanager
def no_positions(model: PreTrainedModel, embeddings: Iterable[nn.Embedding]) -> Iterator[None]:
    """Inside this context, the model has no positional information.

    Rotary embeddings are evaluated at position 0 for every token. The output of the learned
    position embeddings is replaced by zeros.
    """

    def at_zero(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        kwargs = {**kwargs, "position_ids": torch.zeros_like(ids)}
        if kwargs.get(cache_name(model)) is None and kwargs.get("attention_mask") is None:
            # transformers takes a repeated position for the start of another sequence, if there is
            # neither a cache nor a mask.
            kwargs["attention_mask"] = torch.ones_like(ids)
        return args, kwargs

    with ExitStack() as hooks:
        # The hook is on the model inside a PEFT adapter: PEFT's `generate` calls it directly.
        inner = without_adapter(model)
        hooks.enter_context(inner.register_forward_pre_hook(at_zero, with_kwargs=True))
        for embedding in embeddings:
            zeros = embedding.register_forward_hook(
                lambda _, args, output: torch.zeros_like(output)
            )
            hooks.enter_context(zeros)
        yield
