"""A model's positional information: where rotary angles change, which embeddings are learned, how to switch it off."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from accelerate.utils.memory import should_reduce_batch_size
from torch import Tensor, nn
from transformers import PreTrainedModel

from lm_eval_icl.inference.caches import cache_name, without_adapter
from lm_eval_icl.inference.devices import device_of


def position_switch(model: PreTrainedModel) -> tuple[int, bool] | None:
    """The length beyond which a sequence has other rotary angles at all positions (RoPE types longrope and dynamic),
    and whether the angles change again with every longer sequence (dynamic). None for other models."""
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    # Models with several kinds of layers have one dictionary for each kind.
    for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        kind, original = parameters.get("rope_type"), parameters.get("original_max_position_embeddings")
        if kind in ("longrope", "dynamic"):
            longest = int(model.config.get_text_config().max_position_embeddings)
            return (longest, True) if kind == "dynamic" else (int(original or longest), False)
    return None


def position_embeddings(model: PreTrainedModel) -> dict[nn.Embedding, int]:
    """The learned position embeddings, each with its number of positions.

    These are the embeddings whose output changes with `position_ids`. A table may begin with rows that belong to no
    position (OPT's has two); these are not counted.
    """
    outputs: dict[nn.Embedding, list[Tensor]] = {m: [] for m in model.modules() if isinstance(m, nn.Embedding)}

    def keep(module: Any, args: Any, output: Tensor) -> None:
        outputs[module].append(output.clone())  # some models add to the output in place

    with ExitStack() as hooks:
        for module in outputs:
            hooks.enter_context(module.register_forward_hook(keep))
        for position in (0, 1):
            at = torch.full((1, 1), position, device=device_of(model))
            model(input_ids=torch.ones_like(at), position_ids=at, use_cache=False)
    differ = {m: kept[0] for m, kept in outputs.items() if kept and not torch.equal(kept[0], kept[-1])}
    return {table: table.num_embeddings - _first_row(table, at_zero) for table, at_zero in differ.items()}


def _first_row(table: nn.Embedding, output: Tensor) -> int:
    """The index of the table's row that is equal to `output`, the embedding of position 0. It is 0 if no row is equal,
    or if the table's weights are offloaded."""
    if table.weight.is_meta or output.shape[-1] != table.weight.shape[-1]:
        return 0
    equal = (table.weight == output.reshape(-1, output.shape[-1])[:1].to(table.weight)).all(dim=-1).nonzero()
    return int(equal[0]) if len(equal) else 0


def learned_positions(model: PreTrainedModel) -> int | None:
    """How many positions a model with learned position embeddings has; None for any other model."""
    try:
        return min(position_embeddings(model).values(), default=None)
    except Exception as error:  # the model takes no `position_ids`, so it has no position embeddings
        if should_reduce_batch_size(error):
            raise
        return None


@contextmanager
def no_positions(model: PreTrainedModel, embeddings: Iterable[nn.Embedding]) -> Iterator[None]:
    """Inside this context, the model has no positional information: rotary embeddings are evaluated at position 0 for
    every token, and the output of the learned position embeddings `embeddings` is replaced by zeros."""

    def at_zero(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        kwargs = {**kwargs, "position_ids": torch.zeros_like(ids)}
        if kwargs.get(cache_name(model)) is None and kwargs.get("attention_mask") is None:
            # Without either, transformers takes a repeated position for the start of another packed sequence.
            kwargs["attention_mask"] = torch.ones_like(ids)
        return args, kwargs

    with ExitStack() as hooks:
        # PEFT's `generate` calls the model inside.
        hooks.enter_context(without_adapter(model).register_forward_pre_hook(at_zero, with_kwargs=True))
        for embedding in embeddings:
            hook = embedding.register_forward_hook(lambda module, args, output: torch.zeros_like(output))
            hooks.enter_context(hook)
        yield
