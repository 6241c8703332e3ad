"""Memories: demonstrations run through a model once, and kept as keys and values for queries to attend to.

Some models keep more than keys and values of the tokens they have read: hybrid models with linear attention or
state-space layers keep a state that every token is mixed into. Their memory is the whole cache after the context, and
each query goes on from a copy of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel

from lm_eval_icl.inference.blocks import hidden, transformer_blocks, with_hidden
from lm_eval_icl.inference.caches import MemoryLayer, has_other_states, run_rows, select_rows, tensors
from lm_eval_icl.inference.context_attention import ROWS, RowsAtATime
from lm_eval_icl.inference.devices import device_of, on_device, to_device
from lm_eval_icl.inference.packed_attention import additive, attention_by, reads_shared_memory
from lm_eval_icl.inference.positions import position_switch
from lm_eval_icl.layouts import Layout

# How many tokens run behind a memory at a time.
PIECE = 512
# Models of which some layers do not use transformers' function for attention, found out by running them.
_with_other_attention: WeakSet[PreTrainedModel] = WeakSet()
# For each layer (keys, values), both [1, key-value heads, entries, head width].
KeyValues = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Memory:
    """What a method computed for a context, for queries to attend to.

    Attributes:
        layers: keys and values of the entries; empty for an empty context, and if there is a `state`. A layer that the
            model leaves out has no entries (Mllama's cross-attention layers, which do not run without a picture).
        tokens: the token id of each entry, in order.
        query_start: the position of a query's first token.
        residual: (k, [width]): the vector that replaces the residual stream of the first token behind the memory
            after block k, counted from 1 (see `reading`); None if nothing is replaced.
        state: the cache of a model that keeps more than keys and values (`has_other_states`), as it is after the
            context, as a batch of one row; None for an empty context and for other models.
    """

    layers: KeyValues
    tokens: list[int]
    query_start: int
    residual: tuple[int, Tensor] | None = None
    state: Cache | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def nbytes(self) -> int:
        """How many bytes the memory takes."""
        if self.state is not None:
            return sum(tensor.nbytes for tensor in tensors(self.state))
        return sum(keys.nbytes + values.nbytes for keys, values in self.layers)

    def cache(self, rows: int = 1, once: bool = False, shared: bool = False) -> Cache:
        """A transformers cache that begins with this memory. Forward passes add entries to the cache alone.

        Args:
            rows: how many rows a batch that runs on the cache has.
            once: the cache is for a single forward pass, so that the entries the pass adds are not stored.
            shared: attention reads the memory once for all rows, without copying it
                (`lm_eval_icl.inference.capabilities` tests whether the model's attention can).
        """
        if self.state is not None:
            return select_rows(self.state, 1, [0] * rows)
        if not self.layers:
            return DynamicCache()
        shared = shared and reads_shared_memory()
        return Cache(layers=[MemoryLayer(keys, values, once, shared) for keys, values in self.layers])

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

    def positions(self, depths: Tensor) -> Tensor | None:
        """The positions of tokens that are `depths` tokens after the query's first; None if the model computes the same
        by itself."""
        return None if self.query_start == len(self) else self.query_start + depths

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
    if layout.causal and layout.sequential and len(layout.kept_tokens) == len(row):
        return read(model, row)
    layers = causal_pass(model, row, positions=layout.positions) if layout.causal else masked_pass(model, row, layout)
    kept = layout.kept_tokens
    if len(kept) < len(row):
        layers = [(_take(keys, kept), _take(values, kept)) for keys, values in layers]
    return Memory(layers, [row[i] for i in kept], layout.end)


def read(model: PreTrainedModel, tokens: Sequence[int]) -> Memory:
    """The memory of these tokens, which the model reads in one ordinary causal pass."""
    if not has_other_states(model):
        return Memory(causal_pass(model, tokens), list(tokens), len(tokens))
    _, state = run_rows(model, None, on_device([tokens], device_of(model)), read=[len(tokens) - 1])
    return Memory([], list(tokens), len(tokens), state=state)


def _take(entries: Tensor, kept: Sequence[int]) -> Tensor:
    """Some of a layer's keys or values, which are none in a layer that the model leaves out."""
    return entries.index_select(2, on_device(kept, entries.device)) if entries.numel() else entries


def vocabulary_of(model: PreTrainedModel) -> int:
    """How many token ids the model knows: larger ones would fail in the middle of a forward pass."""
    embedding: Any = model.get_input_embeddings()
    return int(getattr(embedding, "num_embeddings", None) or embedding.weight.shape[0])


def masked_pass(model: PreTrainedModel, tokens: Sequence[int], layout: Layout) -> KeyValues:
    """Run the tokens of a layout's row through the model under the layout's mask.

    Of a long row, the mask is not made (`inference.context_attention`), unless the model's attention cannot be
    replaced.

    Returns:
        Keys and values of the tokens, both [1, key-value heads, n, head width] for each layer.
    """
    device = device_of(model)

    def run(mask: Tensor) -> KeyValues:
        cache = DynamicCache()
        model(
            input_ids=on_device([tokens], device),
            position_ids=to_device(layout.positions[None], device),
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return _own(cache)

    if len(tokens) > ROWS and model.config._attn_implementation == "sdpa" and model not in _with_other_attention:
        attention = RowsAtATime(layout)
        with attention_by(attention):
            layers = run(attention.mask(model.dtype, device))
        if attention.layers == sum(keys.numel() > 0 for keys, _ in layers):
            return layers
        _with_other_attention.add(model)
        del layers
    return run(additive(to_device(layout.mask, device), model.dtype)[None, None])


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
    device = device_of(model)
    cache = memory.cache() if memory is not None else DynamicCache()
    # Behind a memory, some tokens at a time, because transformers makes a mask [tokens, memory + tokens]; all at once
    # if the angles of rotary embeddings depend on the largest position of a pass. (Consecutive positions are then on
    # one side of the switch: `methods.limits` refuses a context that crosses it behind a memory.)
    at_once = len(tokens) if memory is None or (positions is not None and position_switch(model)) else PIECE
    ids = on_device([tokens], device).split(at_once, dim=1)
    at = [None] * len(ids) if positions is None else to_device(positions[None], device).split(at_once, dim=1)
    for some, at_positions in zip(ids, at, strict=True):
        given = {} if at_positions is None else {"position_ids": at_positions}
        # No logits are needed, but transformers computes them for at least one token.
        model(input_ids=some, past_key_values=cache, use_cache=True, logits_to_keep=1, **given)
    return _own(cache)


def _own(cache: Cache) -> KeyValues:
    """The keys and values that forward passes added to a cache."""
    layers: list[Any] = cache.layers
    ran = [layer.keys for layer in layers if layer.keys is not None]
    return [(ran[0][:, :, :0],) * 2 if layer.keys is None else (layer.keys, layer.values) for layer in layers if ran]
