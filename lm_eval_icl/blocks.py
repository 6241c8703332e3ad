"""Between a model's blocks: its residual stream read, and its last block run only where something reads it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel


def transformer_blocks(model: PreTrainedModel) -> nn.ModuleList:
    """The model's transformer blocks in order: the first list of modules as long as the model is deep.

    Raises:
        LookupError: there is none.
    """
    depth = model.config.get_text_config().num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == depth:
            return module
    raise LookupError(f"{type(model).__name__} has no list of {depth} blocks")


@contextmanager
def residual_stream(model: PreTrainedModel, layer: int) -> Iterator[list[Tensor]]:
    """Collects the residual stream behind a block (from 1), [rows, tokens, width] for every pass that runs."""
    found: list[Tensor] = []

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        found.append(hidden(output))

    handle = transformer_blocks(model)[layer - 1].register_forward_hook(keep)
    try:
        yield found
    finally:
        handle.remove()


def hidden(output: Any) -> Tensor:
    """The residual stream in what a block returns: all of it, or the first of several things."""
    return output[0] if isinstance(output, tuple) else output


def with_hidden(output: Any, stream: Tensor) -> Any:
    """What a block returned, with another residual stream."""
    return (stream, *output[1:]) if isinstance(output, tuple) else stream


class _Filled(Exception):
    """The last block's keys and values are in the cache: what follows them can wait."""


@contextmanager
def last_block_at(model: PreTrainedModel, cache: Cache, rows: Sequence[int], length: int) -> Iterator[None]:
    """For one forward pass under a 4-D mask: the last block's keys and values are computed for every token, and its
    attention, feed-forward layer and output for some; the others' output, which nothing reads, is zero.

    The block begins with all tokens and is left where it has updated the cache; then it runs from its beginning with
    the tokens asked for alone, and attends to the entries of all. `lm_eval_icl.probe` tells where this gives what
    the whole block does.

    Args:
        cache: the pass's.
        rows: the tokens, by their index among those of the pass.
        length: how many tokens the pass has, in one row of a batch.

    Raises:
        LookupError: the last block does not update the cache.
    """
    update = cache.update

    def cut(given: Any) -> Any:
        """Only these tokens of a tensor of any that a block is given (hidden states, mask, positions, angles)."""
        if isinstance(given, (tuple, list)):
            return type(given)(cut(part) for part in given)
        if not isinstance(given, Tensor) or given.dim() == 0:
            return given
        dim = {1: 0, 4: 2}.get(given.dim(), 1)
        return given.index_select(dim, torch.tensor(rows, device=given.device)) if given.shape[dim] == length else given

    def begin(block: nn.Module, args: Any, kwargs: Any) -> Any:
        entries: list[Any] = []

        def fill(*args: Any, **kwargs: Any) -> Any:
            entries.append(update(*args, **kwargs))
            raise _Filled

        vars(cache)["update"] = fill
        with suppress(_Filled):
            block.forward(*args, **kwargs)
        if not entries:
            raise LookupError(f"the last block of {type(model).__name__} does not update the cache")
        vars(cache)["update"] = lambda *args, **kwargs: entries[0]
        return cut(args), {name: cut(value) for name, value in kwargs.items()}

    def end(block: nn.Module, args: Any, output: Any) -> Any:
        stream = hidden(output)
        whole = stream.new_zeros(1, length, stream.shape[-1])
        return with_hidden(output, whole.index_copy_(1, torch.tensor(rows, device=stream.device), stream))

    block = transformer_blocks(model)[-1]
    handles = [block.register_forward_pre_hook(begin, with_kwargs=True), block.register_forward_hook(end)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        vars(cache).pop("update", None)  # not the bound method put back: a cache that holds itself outlives its pass
