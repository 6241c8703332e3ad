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
    streams: list[Tensor] = []

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        streams.append(hidden(output))

    with transformer_blocks(model)[layer - 1].register_forward_hook(keep):
        yield streams


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

    with transformer_blocks(model)[layer - 1].register_forward_hook(replace):
        yield


def hidden(output: Any) -> Tensor:
    """The residual stream in a block's output, which is the stream itself or a tuple that begins with it."""
    return output[0] if isinstance(output, tuple) else output


def with_hidden(output: Any, stream: Tensor) -> Any:
    """A block's output with the residual stream replaced."""
    return (stream, *output[1:]) if isinstance(output, tuple) else stream


class _Filled(Exception):
    """Raised to leave the last block as soon as its keys and values are in the cache."""


class _LastLayers(Cache):
    """A pass's cache as its last block sees it, which runs twice: the first run fills the cache and ends there, and the
    second run gets what the first one has filled in."""

    def __init__(self, cache: Cache) -> None:
        super().__init__(layers=cache.layers)
        self.cache, self.entries = cache, list[tuple[Tensor, Tensor]]()

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.entries:
            self.entries.append(self.cache.update(*args, **kwargs))
            raise _Filled
        return self.entries[0]


@contextmanager
def last_block_at(model: PreTrainedModel, cache: Cache, rows: Tensor, length: int) -> Iterator[None]:
    """For one forward pass under a 4-D mask, compute the last block's keys and values for all tokens, but its
    attention, feed-forward layer and output only for the tokens `rows`. The other tokens' output is zero and not used.

    The block runs twice. The first run has all tokens and is left, by an exception, as soon as their keys and values
    are in the cache: what a block does until then is known to no other than the block. The second run has the tokens
    `rows` alone, which attend to the entries of all tokens. `lm_eval_icl.inference.capabilities` tests whether this
    gives the same output as the whole block.

    Args:
        cache: the cache of the pass.
        rows: the indices of tokens in the pass.
        length: how many tokens the pass has; it has one row.

    Raises:
        LookupError: the last block does not update the cache.
    """
    block = transformer_blocks(model)[-1]
    forward, replaced = block.forward, vars(block).get("forward")  # accelerate puts one into the instance, too

    def cut(argument: Any) -> Any:
        """Select the tokens `rows` in an argument of the block (hidden states, mask, positions, rotary angles). The
        tensor's number of dimensions tells which one is that of the tokens."""
        if isinstance(argument, (tuple, list)):
            return type(argument)(cut(part) for part in argument)
        if not isinstance(argument, Tensor) or argument.dim() == 0:
            return argument
        dim = {1: 0, 4: 2}.get(argument.dim(), 1)
        return argument.index_select(dim, rows.to(argument.device)) if argument.shape[dim] == length else argument

    def forward_twice(*args: Any, **kwargs: Any) -> Any:
        layers = _LastLayers(cache)
        args = tuple(layers if argument is cache else argument for argument in args)
        kwargs = {name: layers if argument is cache else argument for name, argument in kwargs.items()}
        with suppress(_Filled):
            forward(*args, **kwargs)
        if not layers.entries:
            raise LookupError(f"the last block of {type(model).__name__} does not update the cache")
        output = forward(*cut(args), **{name: cut(argument) for name, argument in kwargs.items()})
        stream = hidden(output)
        whole = stream.new_zeros(1, length, stream.shape[-1])
        return with_hidden(output, whole.index_copy_(1, rows.to(stream.device), stream))

    block.forward = forward_twice
    try:
        yield
    finally:
        del block.forward
        if replaced is not None:
            block.forward = replaced
