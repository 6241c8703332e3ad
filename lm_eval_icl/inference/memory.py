"""Memories: demonstrations run through a model once, and kept as keys and values for queries to attend to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from lm_eval_icl.inference.blocks import hidden, transformer_blocks, with_hidden
from lm_eval_icl.layouts import Layout

# For each layer (keys, values), both [1, key-value heads, entries, head width].
KeyValues = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Memory:
    """The keys and values that a method computed for a context.

    Attributes:
        layers: keys and values of the entries; empty for an empty context.
        tokens: the token id of each entry, in order.
        query_start: the position of a query's first token.
        residual: (k, [width]): the vector that replaces the residual stream of the first token behind the memory
            after block k, counted from 1 (see `reading`); None if nothing is replaced.
    """

    layers: KeyValues
    tokens: list[int]
    query_start: int
    residual: tuple[int, Tensor] | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def nbytes(self) -> int:
        return sum(keys.nbytes + values.nbytes for keys, values in self.layers)

    def cache(self, once: bool = False) -> Cache:
        """A transformers cache that begins with this memory. Forward passes add entries to the cache alone.

        Args:
            once: the cache is for a single forward pass, so that the entries the pass adds are not stored.
        """
        if not self.layers:
            return DynamicCache()
        return Cache(layers=[_MemoryLayer(keys, values, once) for keys, values in self.layers])

    def followed_by(self, tokens: Sequence[int], layers: KeyValues) -> Memory:
        """This memory followed by the entries of more tokens.

        Args:
            tokens: n ids.
            layers: their keys and values, n entries in each layer.
        """
        if self.layers:
            layers = [
                (torch.cat([before[0], after[0]], dim=-2), torch.cat([before[1], after[1]], dim=-2))
                for before, after in zip(self.layers, layers, strict=True)
            ]
        return Memory(layers, [*self.tokens, *tokens], self.query_start + len(tokens))

    def without_last(self, query_start: int) -> Memory:
        """This memory without its last entry, whose token is to be run again at the position `query_start`."""
        layers = [(keys[:, :, :-1], values[:, :, :-1]) for keys, values in self.layers]
        return replace(self, layers=layers, tokens=self.tokens[:-1], query_start=query_start)

    def positions(self, depths: Tensor) -> dict[str, Tensor]:
        """The keyword argument `position_ids` for tokens that are `depths` tokens after the query's first; no argument
        if the model computes the same positions by itself."""
        return {} if self.query_start == len(self) else {"position_ids": self.query_start + depths}

    @contextmanager
    def reading(self, model: PreTrainedModel) -> Iterator[None]:
        """Inside this context, queries run on the memory: if `residual` is set, it replaces the residual stream of the
        first token in the next forward pass."""
        if self.residual is None:
            yield
            return
        layer, residual = self.residual

        def replace_first(module: nn.Module, args: Any, output: Any) -> Any:
            handle.remove()  # only the first pass behind the memory contains the token
            stream = hidden(output).clone()
            stream[:, 0] = residual.to(stream)
            return with_hidden(output, stream)

        handle = transformer_blocks(model)[layer - 1].register_forward_hook(replace_first)
        try:
            yield
        finally:
            handle.remove()


class _MemoryLayer(DynamicLayer):
    """One layer of a cache: the memory, which all rows of a batch share, followed by the entries that each row adds.

    The memory is stored once and never written to. Keys and values that join it with the rows' own entries exist only
    while the layer's attention runs. The attributes `keys` and `values` of `DynamicLayer` are the rows' own entries.
    """

    def __init__(self, keys: Tensor, values: Tensor, once: bool):
        super().__init__()
        self.memory, self.once = (keys, values), once

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        own = (key_states, value_states) if self.once else super().update(key_states, value_states)
        rows = key_states.shape[0]
        keys, values = (
            torch.cat([shared.expand(rows, -1, -1, -1), added], dim=-2)
            for shared, added in zip(self.memory, own, strict=True)
        )
        return keys, values

    def get_seq_length(self) -> int:
        return self.memory[0].shape[-2] + super().get_seq_length()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` of the rows' own entries.

        Not inherited: `DynamicLayer.crop` of transformers 5.0 counts from `get_seq_length`, which includes the memory
        here, and would remove nothing.

        Raises:
            ValueError: the number is positive, which some versions of transformers take for the length to keep.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): the number of entries to remove is given as a negative number")
        if tokens_to_remove and self.keys is not None and self.values is not None:
            self.keys = self.keys[..., :tokens_to_remove, :]
            self.values = self.values[..., :tokens_to_remove, :]


def encode(model: PreTrainedModel, layout: Layout, tokens: Sequence[int]) -> Memory:
    """Run a layout through the model in one forward pass, and keep the entries to which later tokens attend.

    The model must obey a 4-D mask if the layout is not causal, and `position_ids` if its positions are not sequential
    (`lm_eval_icl.inference.capabilities` tests both).

    Args:
        tokens: the ids of the prompt, which has every part once (`Layout.source`).
    """
    row = [tokens[i] for i in layout.source]
    if not row:
        return Memory([], [], layout.end)
    if layout.causal:
        layers = causal_pass(model, row, positions=None if layout.sequential else layout.positions)
    else:
        cache = DynamicCache()
        model(
            input_ids=torch.tensor([row], device=device_of(model)),
            position_ids=layout.positions[None].to(device_of(model)),
            attention_mask=additive(layout.mask, model.dtype)[None, None].to(device_of(model)),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        layers = _own(cache)
    kept = layout.kept_tokens
    if len(kept) < len(row):
        layers = [(keys[:, :, kept], values[:, :, kept]) for keys, values in layers]
    return Memory(layers, [row[i] for i in kept], layout.end)


def device_of(model: PreTrainedModel) -> torch.device:
    """The device on which a model takes its input.

    (`model.device` is the device of the first weights. It is "meta" for weights that accelerate has offloaded, which
    are moved to the execution device only while they are used.)
    """
    device = getattr(getattr(model, "_hf_hook", None), "execution_device", None)
    return model.device if device is None else torch.device(device)


def vocabulary_of(model: PreTrainedModel) -> int:
    """How many token ids the model knows: larger ones would fail in the middle of a forward pass."""
    embedding: Any = model.get_input_embeddings()
    return int(getattr(embedding, "num_embeddings", None) or embedding.weight.shape[0])


def additive(sees: Tensor, dtype: torch.dtype) -> Tensor:
    """A boolean mask as numbers to add to the attention scores: eager attention takes only these, sdpa takes both."""
    return torch.zeros(sees.shape, dtype=dtype).masked_fill_(~sees, torch.finfo(dtype).min)


def causal_pass(
    model: PreTrainedModel,
    tokens: Sequence[int],
    memory: Memory | None = None,
    positions: Tensor | None = None,
) -> KeyValues:
    """Run tokens through the model, each attending to the memory and to the tokens before it.

    Args:
        tokens: n ids.
        memory: the memory before them; None for no memory.
        positions: [n] their positions; None for consecutive positions from the memory's length on.

    Returns:
        The tokens' own keys and values, both [1, key-value heads, n, head width] for each layer.
    """
    cache = memory.cache() if memory is not None else DynamicCache()
    ids = torch.tensor([tokens], device=device_of(model))
    position_ids = {} if positions is None else {"position_ids": positions[None].to(device_of(model))}
    # No logits are needed, but transformers computes them for at least one token.
    model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1, **position_ids)
    return _own(cache)


def _own(cache: Cache) -> KeyValues:
    """The keys and values that forward passes added to a cache."""
    layers: list[Any] = cache.layers
    return [(layer.keys, layer.values) for layer in layers]
