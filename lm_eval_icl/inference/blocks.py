"""A model's transformer blocks, and the residual stream between them, read and replaced."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from lm_eval_icl.inference.devices import on_device


def transformer_blocks(model: PreTrainedModel) -> nn.ModuleList:
    """The model's transformer blocks in order: the first `ModuleList` with as many modules as the model has layers. (A
    vision tower may have as many layers. It is skipped by its configuration, which is not that of the text model.)

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
    raise LookupError(f"{type(model).__name__} has no list of {text.num_hidden_layers} blocks")


@contextmanager
def residual_stream(model: PreTrainedModel, layer: int) -> Iterator[list[Tensor]]:
    """Inside this context, collect the residual stream after the block `layer` (counted from 1): one tensor
    [rows, tokens, width] for each forward pass.

    Raises:
        LookupError: the model's blocks were not found.
    """
    streams, block = list[Tensor](), transformer_blocks(model)[layer - 1]
    with block.register_forward_hook(lambda module, args, output: streams.append(hidden(output))):
        yield streams


@contextmanager
def replaced_stream(
    model: PreTrainedModel, layer: int, at: Sequence[int], vectors: Tensor
) -> Iterator[None]:
    """Inside this context, replace the residual stream of some tokens after the block `layer` (counted from 1), in all
    rows of a batch.

    Args:
        at: the tokens, counted from the first token that runs in this context. All of them are in the same pass.
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
        stream = stream.index_copy(1, rows, vectors.to(stream).expand(len(stream), -1, -1))
        return (stream, *output[1:]) if isinstance(output, tuple) else stream

    with transformer_blocks(model)[layer - 1].register_forward_hook(replace):
        yield


def hidden(output: Any) -> Tensor:
    """The residual stream in a block's output, which is the stream itself or a tuple that begins with it."""
    return output[0] if isinstance(output, tuple) else output
