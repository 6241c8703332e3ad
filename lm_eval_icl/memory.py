"""Demonstrations run through a model once, kept as keys and values for queries to attend to."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from lm_eval_icl.blocks import hidden, transformer_blocks, with_hidden
from lm_eval_icl.layouts import Layout
from lm_eval_icl.tokens import Context

# One (keys, values) a layer, each [1, key-value heads, entries, head width].
KeyValues = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Memory:
    """What a method made of a context.

    Attributes:
        layers: keys and values of the entries; empty for an empty context.
        tokens: the ids that the entries stand for, in order.
        query_start: the position of a query's first token.
        residual: (k, [width]): what the residual stream of the first token behind the memory is replaced by
            after block k (see `reading`).
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
        """A transformers cache that begins with this memory; what a forward pass adds is its own.

        Args:
            once: for one pass alone: what it adds is not kept.
        """
        if not self.layers:
            return DynamicCache()
        return Cache(layers=[_MemoryLayer(keys, values, once) for keys, values in self.layers])

    def followed_by(self, tokens: Sequence[int], layers: KeyValues) -> Memory:
        """This memory and behind it the entries of more tokens."""
        if self.layers:
            layers = [
                (torch.cat([before[0], after[0]], dim=-2), torch.cat([before[1], after[1]], dim=-2))
                for before, after in zip(self.layers, layers, strict=True)
            ]
        return Memory(layers, [*self.tokens, *tokens], self.query_start + len(tokens))

    def positions(self, depths: Tensor) -> dict[str, Tensor]:
        """`position_ids` of tokens this deep behind the memory, if the model does not count so by itself."""
        return {} if self.query_start == len(self) else {"position_ids": self.query_start + depths}

    @contextmanager
    def reading(self, model: PreTrainedModel) -> Iterator[None]:
        """While queries run on the memory: the first token that does has its residual stream replaced."""
        if self.residual is None:
            yield
            return
        layer, residual = self.residual

        def replace(module: nn.Module, args: Any, output: Any) -> Any:
            handle.remove()  # the first pass behind the memory alone
            stream = hidden(output).clone()
            stream[:, 0] = residual.to(stream)
            return with_hidden(output, stream)

        handle = transformer_blocks(model)[layer - 1].register_forward_hook(replace)
        try:
            yield
        finally:
            handle.remove()


class _MemoryLayer(DynamicLayer):
    """One layer of a memory, read by every row of a batch, and behind it the entries each row adds.

    The memory itself is never written and exists once; joined with the rows' own entries it exists only
    while the layer's attention runs. `DynamicLayer`'s `keys` and `values` are the rows' own entries.
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


def encode(model: PreTrainedModel, layout: Layout) -> Memory:
    """Run a layout through the model once and keep the entries that what follows attends to.

    The model must obey a 4-D mask where the layout is not causal, and given positions where they are not in
    sequence (`lm_eval_icl.probe` tells).
    """
    tokens = layout.tokens
    if not tokens:
        return Memory([], [], layout.end)
    if layout.causal:
        layers = causal_pass(model, tokens, positions=None if layout.sequential else layout.positions)
    else:
        cache = DynamicCache()
        model(
            input_ids=torch.tensor([tokens], device=device_of(model)),
            position_ids=layout.positions[None].to(device_of(model)),
            attention_mask=additive(layout.sees, model.dtype)[None, None].to(device_of(model)),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        layers = _own(cache)
    if len(layout.kept) < len(tokens):
        layers = [(keys[:, :, layout.kept], values[:, :, layout.kept]) for keys, values in layers]
    return Memory(layers, [tokens[i] for i in layout.kept], layout.end)


def device_of(model: PreTrainedModel) -> torch.device:
    """Where a model takes its input. (`model.device` is where its first weights are; accelerate keeps what it
    offloads nowhere, and brings it to a device while it is used.)"""
    device = getattr(getattr(model, "_hf_hook", None), "execution_device", None)
    return model.device if device is None else torch.device(device)


def additive(sees: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as numbers to add: eager attention adds what it is given, and sdpa takes either kind."""
    return torch.zeros(sees.shape, dtype=dtype).masked_fill_(~sees, torch.finfo(dtype).min)


def causal_pass(
    model: PreTrainedModel,
    tokens: Sequence[int],
    memory: Memory | None = None,
    positions: Tensor | None = None,
) -> KeyValues:
    """Run tokens through the model, each attending the memory and the tokens before it.

    Args:
        tokens: n ids.
        memory: what stands before them; nothing if None.
        positions: [n] their positions; the memory's length and on, if None.

    Returns:
        The tokens' own keys and values, [1, heads, n, width] a layer.
    """
    cache = memory.cache() if memory is not None else DynamicCache()
    ids = torch.tensor([tokens], device=device_of(model))
    position_ids = {} if positions is None else {"position_ids": positions[None].to(device_of(model))}
    # One position's logits are the least that transformers computes.
    model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1, **position_ids)
    return _own(cache)


def _own(cache: Cache) -> KeyValues:
    """What a pass added to a cache."""
    layers: list[Any] = cache.layers
    return [(layer.keys, layer.values) for layer in layers]


class MemoryStore:
    """Memories by context, so that each context is encoded once a run, as far as `max_bytes` reaches.

    Attributes:
        max_bytes: the keys and values kept, in bytes; the least recently used memory goes first. One that
            is larger by itself is made and used, but not kept.
        encoded: how many memories were made.
        reused: how often a kept memory was found.
    """

    def __init__(self, encode: Callable[[Context], Memory], max_bytes: int):
        self.encode, self.max_bytes = encode, max_bytes
        self.encoded = self.reused = 0
        self._kept: OrderedDict[Context, Memory] = OrderedDict()
        self._bytes = 0

    def __getitem__(self, context: Context) -> Memory:
        if context in self._kept:
            self.reused += 1
            self._kept.move_to_end(context)
            return self._kept[context]
        memory = self.encode(context)
        self.encoded += 1
        if memory.nbytes <= self.max_bytes:
            self._kept[context] = memory
            self._bytes += memory.nbytes
            while self._bytes > self.max_bytes:
                self._bytes -= self._kept.popitem(last=False)[1].nbytes
        return memory

    def forget(self, context: Context) -> None:
        if (memory := self._kept.pop(context, None)) is not None:
            self._bytes -= memory.nbytes

    def shrink(self, used: Context | None = None) -> bool:
        """Forget all memories but that of a context in use, and keep half as much from now on; whether there was
        anything to forget."""
        held, others = self._bytes, [context for context in self._kept if context != used]
        for context in others:
            self.forget(context)
        if others:
            self.max_bytes = max(held // 2, self._bytes)
        return bool(others)
