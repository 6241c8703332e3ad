"""A model's transformer blocks: the residual stream read and replaced, and the last block run only for some tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from lm_eval_icl.inference.devices import on_device


def transformer_blocks(model: PreTrainedModel) -> nn.ModuleList:
    """The model's transformer blocks in order: the first `ModuleList` with as many modules as the model has layers. (A
    model of several kinds of input may have a vision tower with as many, which has a configuration of its own.)

    Raises:
        LookupError: the model has no such list.
    """
    text = model.config.get_text_config()

    def of_text(module: nn.Module) -> Iterator[nn.Module]:
        yield module
        for child in module.children():
            if isinstance(getattr(child, "config", text), (type(text), type(model.config))):
                yield from of_text(child)

    for module in of_text(model):
        if isinstance(module, nn.ModuleList) and len(module) == text.num_hidden_layers:
            return module
    raise LookupError(f"{type(model).__name__} has no list of {text.num_hidden_layers} blocks")


@contextmanager
def residual_stream(model: PreTrainedModel, layer: int) -> Iterator[list[Tensor]]:
    """Inside this context, collect the residual stream after the block `layer` (counted from 1): one tensor
    [rows, tokens, width] for each forward pass.

    Raises:
        LookupError: the model's blocks were not found.
    """
    found: list[Tensor] = []

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        found.append(hidden(output))

    handle = transformer_blocks(model)[layer - 1].register_forward_hook(keep)
    try:
        yield found
    finally:
        handle.remove()


@contextmanager
def replaced_stream(model: PreTrainedModel, layer: int, at: Sequence[int], vectors: Tensor) -> Iterator[None]:
    """Inside this context, replace the residual stream of some tokens after the block `layer` (counted from 1), in all
    rows of a batch.

    Args:
        at: the tokens, counted from the first one that runs in this context. All of them are in the same pass.
        vectors: [len(at), width].
    """
    ran = 0

    def replace(module: nn.Module, args: Any, output: Any) -> Any:
        nonlocal ran
        stream, first = hidden(output), ran
        ran += stream.shape[1]
        if not first <= at[0] < ran:
            return None
        rows = on_device([i - first for i in at], stream.device)
        return with_hidden(output, stream.index_copy(1, rows, vectors.to(stream).expand(len(stream), -1, -1)))

    handle = transformer_blocks(model)[layer - 1].register_forward_hook(replace)
    try:
        yield
    finally:
        handle.remove()


def hidden(output: Any) -> Tensor:
    """The residual stream in a block's output, which is the stream itself or a tuple that begins with it."""
    return output[0] if isinstance(output, tuple) else output


def with_hidden(output: Any, stream: Tensor) -> Any:
    """A block's output with the residual stream replaced."""
    return (stream, *output[1:]) if isinstance(output, tuple) else stream


class _Filled(Exception):
    """Raised to leave the last block as soon as its keys and values are in the cache."""


@contextmanager
def last_block_at(model: PreTrainedModel, cache: Cache, rows: Tensor, length: int) -> Iterator[None]:
    """For one forward pass under a 4-D mask, compute the last block's keys and values for all tokens, but its
    attention, feed-forward layer and output only for the tokens `rows`. The other tokens' output is zero and not used.

    The block is first run with all tokens and left by an exception as soon as it has updated the cache. Then it is run
    from its beginning with the tokens `rows` alone, which attend to the entries of all tokens.
    `lm_eval_icl.inference.capabilities` tests whether this gives the same output as the whole block.

    Args:
        cache: the cache of the pass.
        rows: the indices of tokens in the pass.
        length: how many tokens the pass has; it has one row.

    Raises:
        LookupError: the last block does not update the cache.
    """
    update = cache.update

    def cut(given: Any) -> Any:
        """Select the tokens `rows` in an argument of the block (hidden states, mask, positions, rotary angles). The
        tensor's number of dimensions tells which one is that of the tokens."""
        if isinstance(given, (tuple, list)):
            return type(given)(cut(part) for part in given)
        if not isinstance(given, Tensor) or given.dim() == 0:
            return given
        dim = {1: 0, 4: 2}.get(given.dim(), 1)
        return given.index_select(dim, rows.to(given.device)) if given.shape[dim] == length else given

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
        return with_hidden(output, whole.index_copy_(1, rows.to(stream.device), stream))

    block = transformer_blocks(model)[-1]
    # `end` comes before the hooks that read or replace the residual stream, which is that of all tokens then.
    begins = block.register_forward_pre_hook(begin, with_kwargs=True)
    handles = [begins, block.register_forward_hook(end, prepend=True)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        # Deleted, and not set to the bound method: a cache that refers to itself is not freed when the pass ends.
        vars(cache).pop("update", None)
