"""A model's layers, and the residual stream between them, read and replaced."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from lm_eval_icl.inference.devices import on_device


class Replacement(NamedTuple):
    """A vector that replaces the residual stream of a token."""

    layer: int  # after this layer, counted from 1
    token: int  # counted from 0
    vector: Tensor  # [1, width]


def transformer_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The model's layers in order: the first `ModuleList` with as many modules as layers.

    A vision tower may have as many layers. It is skipped by its configuration, which is not that of
    the text model.

    Raises:
        LookupError: the model has no such list.
    """
    text = model.config.get_text_config()

    def text_modules(module: nn.Module) -> Iterator[nn.Module]:
        yield module
        for child in module.children():
            if isinstance(getattr(child, "config", text), (type(text), type(model.config))):
                yield from text_modules(child)

    for module in text_modules(model):
        if isinstance(module, nn.ModuleList) and len(module) == text.num_hidden_layers:
            return module
    raise LookupError(f"{type(model).__name__} has no list of {text.num_hidden_layers} layers")


@contextmanager
def residual_stream(model: PreTrainedModel, layer: int) -> Iterator[list[Tensor]]:
    """Inside this context, collect the residual stream after a layer, counted from 1.

    Yields:
        A list that gets a tensor [rows, tokens, width] from each forward pass.

    Raises:
        LookupError: the model's layers were not found.
    """
    streams: list[Tensor] = []
    module = transformer_layers(model)[layer - 1]
    with module.register_forward_hook(lambda _, args, output: streams.append(_stream(output))):
        yield streams


@contextmanager
def replaced_stream(
    model: PreTrainedModel, layer: int, at: Sequence[int], vectors: Tensor
) -> Iterator[None]:
    """Inside this context, replace the residual stream of some tokens after a layer, in all rows.

    Args:
        layer: counted from 1.
        at: the tokens, counted from the first token that runs in this context. All of them are in
            the same pass.
        vectors: [len(at), width].
    """
    ran = 0

    def replace(module: nn.Module, args: Any, output: Any) -> Any:
        nonlocal ran
        stream = _stream(output)
        first = ran
        ran += stream.shape[1]
        if not first <= at[0] < ran:
            return None
        places = on_device([i - first for i in at], stream.device)
        of_rows = vectors.to(stream).expand(len(stream), -1, -1)
        return _with_stream(output, stream.index_copy(1, places, of_rows))

    with transformer_layers(model)[layer - 1].register_forward_hook(replace):
        yield


class _Stored(Exception):
    """Leaves the last layer as soon as its keys and values are in the cache."""


@contextmanager
def last_layer_at(
    model: PreTrainedModel, cache: Cache, tokens: Tensor, length: int
) -> Iterator[None]:
    """Inside this context, the last layer computes its output for some tokens only.

    The layer runs twice in the pass. The first run has all tokens, and an exception ends it as soon
    as their keys and values are in the cache. The second run has the given tokens alone, which
    attend to the keys and values of all. Other tokens have zeros as output. The model must obey a
    4-D mask, and a trial says whether its layer can run in this way.

    Args:
        cache: the cache of the pass, which has one row.
        tokens: [n] the indices of the tokens in the row.
        length: the number of tokens of the row.
    """
    layer = transformer_layers(model)[-1]
    forward = layer.forward
    patched = "forward" in vars(layer)  # accelerate patches it, too
    entries: list[Any] = []

    def store(*args: Any, **options: Any) -> None:
        entries.append(type(cache).update(cache, *args, **options))
        raise _Stored

    def cut(argument: Any) -> Any:
        """Select the tokens in hidden states, mask, positions or rotary angles."""
        if isinstance(argument, (tuple, list)):
            return type(argument)(map(cut, argument))
        if not isinstance(argument, Tensor) or not argument.dim():
            return argument
        dim = {1: 0, 4: 2}.get(argument.dim(), 1)
        if argument.shape[dim] != length:
            return argument
        return argument.index_select(dim, tokens.to(argument.device))

    def forward_twice(*args: Any, **options: Any) -> Any:
        try:
            vars(cache)["update"] = store
            return forward(*args, **options)  # whole, if the layer does not update the cache
        except _Stored:
            vars(cache)["update"] = lambda *args, **options: entries[0]
            output = forward(*cut(args), **{name: cut(value) for name, value in options.items()})
        finally:
            del vars(cache)["update"]
        stream = _stream(output)
        whole = stream.new_zeros(1, length, stream.shape[2])
        return _with_stream(output, whole.index_copy_(1, tokens.to(stream.device), stream))

    layer.forward = forward_twice
    try:
        yield
    finally:
        del layer.forward
        if patched:
            layer.forward = forward


def _stream(output: Any) -> Tensor:
    """The residual stream in a layer's output: the output itself, or the first of a tuple."""
    return output[0] if isinstance(output, tuple) else output


def _with_stream(output: Any, stream: Tensor) -> Any:
    """A layer's output with another residual stream."""
    return (stream, *output[1:]) if isinstance(output, tuple) else stream
