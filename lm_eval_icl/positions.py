"""A model's positions: where they change kind, and how they are taken away."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lm_eval_icl.memory import device_of


def position_switch(model: PreTrainedModel) -> tuple[int, bool] | None:
    """The position from which on rotary angles of all positions change, for the types that have one, and whether
    they go on changing with every longer sequence."""
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    # Models with several kinds of layers have one dictionary a kind.
    for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        kind, original = parameters.get("rope_type"), parameters.get("original_max_position_embeddings")
        if kind in ("longrope", "dynamic"):
            longest = int(model.config.get_text_config().max_position_embeddings)
            return (longest, True) if kind == "dynamic" else (int(original or longest), False)
    return None


def position_embeddings(model: PreTrainedModel) -> list[nn.Embedding]:
    """The learned position embeddings: those whose output follows the positions that are given."""
    outputs: dict[nn.Embedding, list[Tensor]] = {m: [] for m in model.modules() if isinstance(m, nn.Embedding)}
    handles = [m.register_forward_hook(lambda module, args, output: outputs[module].append(output)) for m in outputs]
    try:
        for position in (0, 1):
            at = torch.full((1, 1), position, device=device_of(model))
            model(input_ids=torch.ones_like(at), position_ids=at, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return [m for m, found in outputs.items() if found and not torch.equal(found[0], found[-1])]


@contextmanager
def no_positions(model: PreTrainedModel, embeddings: list[nn.Embedding]) -> Iterator[None]:
    """While it lasts, every token stands nowhere: rotary angles are those of position 0, which rotate nothing, and
    learned positions (`position_embeddings`) add nothing."""

    def at_zero(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        kwargs = {**kwargs, "position_ids": torch.zeros_like(ids)}
        if kwargs.get("past_key_values") is None and kwargs.get("attention_mask") is None:
            # Without either, transformers takes a position that does not grow for the start of another text.
            kwargs["attention_mask"] = torch.ones_like(ids)
        return args, kwargs

    # Adapters of PEFT wrap a model, and generate with the one inside.
    inner: nn.Module = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    handles = [inner.register_forward_pre_hook(at_zero, with_kwargs=True)]
    handles += [m.register_forward_hook(lambda module, args, output: torch.zeros_like(output)) for m in embeddings]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
