"""A model's positional information: the length at which rotary angles change, learned embeddings, switching it off."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lm_eval_icl.inference.caches import cache_name, without_adapter
from lm_eval_icl.inference.devices import device_of


def position_switch(model: PreTrainedModel) -> tuple[int, bool] | None:
    """The length beyond which a sequence has other rotary angles at all of its positions (RoPE types longrope and
    dynamic), and whether the angles change again with every further token (dynamic). None for other models."""
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    # Models with several kinds of layers have one dictionary for each kind.
    for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        kind, original = (
            parameters.get("rope_type"),
            parameters.get("original_max_position_embeddings"),
        )
        if kind in ("longrope", "dynamic"):
            longest = int(model.config.get_text_config().max_position_embeddings)
            return (longest, True) if kind == "dynamic" else (int(original or longest), False)
    return None


def position_embeddings(model: PreTrainedModel) -> list[nn.Embedding]:
    """The learned position embeddings: those whose output changes with `position_ids`."""
    outputs: dict[nn.Embedding, list[Tensor]] = {
        m: [] for m in model.modules() if isinstance(m, nn.Embedding)
    }

    def keep(module: Any, args: Any, output: Tensor) -> None:
        outputs[module].append(output.clone())  # some models add to the output in place

    with ExitStack() as hooks:
        for module in outputs:
            hooks.enter_context(module.register_forward_hook(keep))
        for position in (0, 1):
            at = torch.full((1, 1), position, device=device_of(model))
            model(input_ids=torch.ones_like(at), position_ids=at, use_cache=False)
    return [table for table, kept in outputs.items() if kept and not torch.equal(kept[0], kept[-1])]


@contextmanager
def no_positions(model: PreTrainedModel, embeddings: Iterable[nn.Embedding]) -> Iterator[None]:
    """Inside this context, the model has no positional information: rotary embeddings are evaluated at position 0 for
    every token, and the output of the learned position embeddings `embeddings` is replaced by zeros."""

    def at_zero(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        kwargs = {**kwargs, "position_ids": torch.zeros_like(ids)}
        if kwargs.get(cache_name(model)) is None and kwargs.get("attention_mask") is None:
            # Without a cache and a mask, transformers takes a repeated position for the start of another sequence.
            kwargs["attention_mask"] = torch.ones_like(ids)
        return args, kwargs

    with ExitStack() as hooks:
        # The hook is on the model inside a PEFT adapter, since PEFT's `generate` calls that model directly.
        hooks.enter_context(
            without_adapter(model).register_forward_pre_hook(at_zero, with_kwargs=True)
        )
        for embedding in embeddings:
            hooks.enter_context(
                embedding.register_forward_hook(
                    lambda module, args, output: torch.zeros_like(output)
                )
            )
        yield
