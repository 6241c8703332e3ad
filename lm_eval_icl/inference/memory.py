"""Memories: the keys and values of demonstrations, computed once and kept for queries to attend to.

A hybrid keeps more than keys and values. Its memory is its whole cache (`inference.hybrids`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel

from lm_eval_icl.inference import attention
from lm_eval_icl.inference.attention import (
    CONTEXT_TOKENS,
    Reading,
    UnderLayouts,
    additive,
    attention_by,
)
from lm_eval_icl.inference.blocks import replaced_stream
from lm_eval_icl.inference.caches import MemoryLayer, cache_arguments, takes_positions
from lm_eval_icl.inference.devices import device_of, kept_logits, on_device, to_device
from lm_eval_icl.inference.hybrids import empty_cache, is_hybrid, select_rows, tensors
from lm_eval_icl.inference.positions import position_switch
from lm_eval_icl.prompts.layouts import Layout

# How many tokens run on a memory at a time.
PIECE = 512
# Models in which some layer was seen to compute attention without transformers' function.
_with_other_attention: WeakSet[PreTrainedModel] = WeakSet()
# For each layer (keys, values), both [1, key-value heads, entries, head width].
KeyValues = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class MemoryPart:
    """Some entries of a memory, stored in separate tensors because attention reads them in another way."""

    layers: KeyValues
    length: int  # how many entries there are
    reading: Reading


@dataclass(frozen=True)
class Memory:
    """What a method computed for a context, for queries to attend to."""

    # Keys and values of the entries; empty for an empty context, and if there is a `state`. A layer that the model
    # leaves out has no entries (Mllama's cross-attention layers, which do not run without a picture).
    layers: KeyValues
    tokens: list[int]  # the token id of each entry, in order; the entries of `parts` come last
    query_start: int  # the position of a query's first token
    # (k, i, [1, width]): a vector that replaces the residual stream after block k (counted from 1) of the token i
    # (counted from 0) that runs on the memory (`reading`).
    residual: tuple[int, int, Tensor] | None = None
    state: Cache | None = None  # the cache of a hybrid after the context, as a batch of one row
    parts: tuple[
        MemoryPart, ...
    ] = ()  # further entries, which attention reads in other ways than those of `layers`

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def nbytes(self) -> int:
        """How many bytes the memory takes."""
        if self.state is not None:
            return sum(tensor.nbytes for tensor in tensors(self.state))
        layers = [*self.layers, *(layer for part in self.parts for layer in part.layers)]
        return sum(keys.nbytes + values.nbytes for keys, values in layers)

    def divided(self, first: int, reading: Reading) -> Memory:
        """This memory with the entries from `first` on as a part, which attention reads as `reading` says."""
        before, after = (
            [(keys[:, :, entries], values[:, :, entries]) for keys, values in self.layers]
            for entries in (slice(first), slice(first, None))
        )
        return replace(self, layers=before, parts=(MemoryPart(after, len(self) - first, reading),))

    def readings(self, first: int) -> list[tuple[slice, Reading]]:
        """The slices of entries that are read differently, and how, if the entries begin at the column `first`."""
        lengths = [part.length for part in self.parts]
        ends = list(accumulate(lengths, initial=first + len(self) - sum(lengths)))
        parts = [
            (slice(a, b), part.reading)
            for a, b, part in zip(ends, ends[1:], self.parts, strict=False)
        ]
        return [(slice(first, ends[0]), Reading()), *parts]

    def cache(self, rows: int = 1, shared: bool = False) -> Cache:
        """A transformers cache that begins with this memory. Forward passes add entries to the cache alone.

        Args:
            rows: how many rows a batch that runs on the cache has.
            shared: attention reads the memory once for all rows, if possible. The model must allow it (`can_share`).
        """
        if self.state is not None:
            return select_rows(self.state, 1, [0] * rows)
        if self.parts:
            attention.install()
            layers_by_part = [
                [(*layer, part.reading) for layer in part.layers] for part in self.parts
            ]
            layers = zip(self.layers, zip(*layers_by_part, strict=True), strict=True)
            return Cache(
                layers=[MemoryLayer(*layer, once=False, parts=parts) for layer, parts in layers]
            )
        # Rows get copies if another library has replaced transformers' attention.
        return cache_of([self], shared=shared and attention.install())

    def without_last(self, query_start: int) -> Memory:
        """This memory without its last entry, whose token is to be run again at the position `query_start`."""
        layers = [(keys[:, :, :-1], values[:, :, :-1]) for keys, values in self.layers]
        return replace(self, layers=layers, tokens=self.tokens[:-1], query_start=query_start)

    @property
    def in_sequence(self) -> bool:
        """Whether a query's positions begin at the number of entries, as in a model that counts them by itself."""
        return self.query_start == len(self)

    def reading(self, model: PreTrainedModel) -> AbstractContextManager[None]:
        """Inside this context, a query runs on the memory, and the vector of `residual`, if it is set, replaces the
        residual stream of a token."""
        if self.residual is None:
            return nullcontext()
        layer, token, vector = self.residual
        return replaced_stream(model, layer, [token], vector)


def encode_all(
    model: PreTrainedModel, layouts: Sequence[Layout], prompts: Sequence[Sequence[int]]
) -> list[Memory]:
    """Run the layouts of contexts through the model, side by side in one forward pass, and keep the entries to which
    later tokens attend.

    The model must obey a 4-D mask if there are several layouts or a layout is not causal, and `position_ids` if there
    are several layouts or positions are not sequential (`inference.capabilities`).

    Args:
        layouts: at least one. If there are several, each has at least one token.
        prompts: for each layout, the ids of its prompt, which has every part once (`Layout.source`).
    """
    rows = [
        [tokens[i] for i in layout.source] for layout, tokens in zip(layouts, prompts, strict=True)
    ]
    layout, row = layouts[0], rows[0]
    if len(rows) > 1 or not layout.causal:
        passes = masked_pass(model, rows, layouts)
    elif not row:
        passes = [[]]
    elif layout.sequential and len(layout.kept_tokens) == len(row):
        return [read_causally(model, row)]
    else:
        passes = [causal_pass(model, row, positions=layout.positions)]
    return [
        kept_of(layout, Memory(layers, row, layout.end))
        for layout, row, layers in zip(layouts, rows, passes, strict=True)
    ]


def kept_of(layout: Layout, memory: Memory) -> Memory:
    """The memory of a layout, given the memory of its whole row: the entries to which later tokens attend."""
    kept = layout.kept_tokens
    if len(kept) == len(memory):
        return memory

    def take(entries: Tensor) -> Tensor:  # a layer that the model leaves out has no entries
        return (
            entries.index_select(2, on_device(kept, entries.device)) if entries.numel() else entries
        )

    layers = [(take(keys), take(values)) for keys, values in memory.layers]
    return replace(memory, layers=layers, tokens=[memory.tokens[i] for i in kept])


def read_causally(model: PreTrainedModel, tokens: Sequence[int]) -> Memory:
    """The memory of some tokens after one ordinary causal pass."""
    if not is_hybrid(model):
        return Memory(causal_pass(model, tokens), list(tokens), len(tokens))
    state = empty_cache(model)
    run_rows(model, on_device([tokens], device_of(model)), [len(tokens) - 1], state)
    return Memory([], list(tokens), len(tokens), state=state)


def run_rows(
    model: PreTrainedModel,
    ids: Tensor,
    read: Sequence[int],
    cache: Cache | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """Run a batch of tokens through the model, each row causally and without a mask.

    Args:
        ids: [rows, n] the tokens.
        read: the indices of the tokens whose logits are returned, in ascending order.
        cache: the cache of earlier tokens, with as many rows; these tokens are added to it. None to keep nothing.
        positions: [rows, n] the positions of the tokens; None if they follow the positions in the cache.

    Returns:
        The logits [rows, len(read), vocabulary].
    """
    n = ids.shape[1]
    inputs: dict[str, Any] = (
        {"use_cache": False} if cache is None else cache_arguments(model, cache)
    )
    if positions is not None:
        inputs["position_ids"] = positions
    at_end = list(read) == list(range(n - len(read), n))
    keep = len(read) if at_end else kept_logits(model, read)
    logits: Tensor = model(input_ids=ids, logits_to_keep=keep, **inputs).logits
    return logits if logits.shape[1] == len(read) else logits[:, list(read)]


def run_after_memory(
    model: PreTrainedModel,
    memory: Memory,
    cache: Cache,
    rows: Sequence[Sequence[int]],
    depth: int,
    read: Sequence[int],
) -> Tensor:
    """Run tokens that follow a memory as the rows of a batch (`run_rows`). Shorter rows get padding at their end, which
    the tokens of a causal model do not see.

    Args:
        cache: the cache of the memory, to which passes may have added tokens.
        rows: the ids of each row.
        depth: how many tokens the cache has after the memory.
    """
    longest = max(map(len, rows))
    ids = torch.tensor(
        [[*row, *[row[-1]] * (longest - len(row))] for row in rows], device=device_of(model)
    )
    # Some hybrids take the number of earlier tokens from a layer that does not know it, so they are given positions.
    counts = memory.in_sequence and not (is_hybrid(model) and takes_positions(model))
    depths = depth + torch.arange(longest, device=ids.device).expand(len(rows), -1)
    return run_rows(model, ids, read, cache, None if counts else memory.query_start + depths)


def vocabulary_of(model: PreTrainedModel) -> int:
    """The number of token ids that the model knows. A larger id would fail in the middle of a forward pass."""
    embedding: Any = model.get_input_embeddings()
    return int(getattr(embedding, "num_embeddings", None) or embedding.weight.shape[0])


def masked_pass(
    model: PreTrainedModel,
    rows: Sequence[Sequence[int]],
    layouts: Sequence[Layout],
    memories: Sequence[Memory] = (),
) -> list[KeyValues]:
    """Run several rows through the model side by side in one forward pass, each with the attention of its layout.

    In a long pass, attention is computed without the whole mask (`inference.attention.UnderLayouts`). Models whose
    attention cannot be replaced get the whole mask.

    Args:
        rows: the ids of each row; at least one row.
        layouts: the layout of each row.
        memories: the memory before each row, if the layouts have entries of a memory.

    Returns:
        For each row, the keys and values of its n tokens: both [1, key-value heads, n, head width] for each layer.
    """
    device, lengths, layers = device_of(model), [len(row) for row in rows], KeyValues()
    attention_function = UnderLayouts(layouts)
    layout = attention_function.layout

    def run(mask: Tensor) -> KeyValues:
        cache = cache_of(memories)
        model(
            input_ids=on_device([[token for row in rows for token in row]], device),
            position_ids=to_device(layout.positions[None, layout.entries :], device),
            attention_mask=mask,
            logits_to_keep=1,
            **cache_arguments(model, cache),
        )
        return _added(cache)

    replaceable = model.config._attn_implementation == "sdpa" and model not in _with_other_attention
    if len(layout) > CONTEXT_TOKENS and replaceable:
        with attention_by(attention_function):
            layers = run(attention_function.mask(model.dtype, device))
        if attention_function.layers != sum(keys.numel() > 0 for keys, _ in layers):
            _with_other_attention.add(model)
            layers = []
    if not layers:
        layers = run(
            additive(to_device(layout.mask[layout.entries :], device), model.dtype)[None, None]
        )
    if len(lengths) == 1:
        return [layers]
    # The rows are copied: a view of the keys and values of one row would keep those of all rows from being freed.
    spans = [
        slice(end - length, end) for end, length in zip(accumulate(lengths), lengths, strict=True)
    ]
    return [
        [(keys[:, :, span].clone(), values[:, :, span].clone()) for keys, values in layers]
        for span in spans
    ]


def cache_of(memories: Sequence[Memory], once: bool = False, shared: bool = False) -> Cache:
    """A transformers cache that begins with these memories of keys and values, one after another.

    Args:
        once: the cache is for a single forward pass, so it does not store the entries of the tokens of the pass.
        shared: as for `Memory.cache`.
    """
    with_parts = (
        (memory.layers, *(part.layers for part in memory.parts))
        for memory in memories
        if memory.layers
    )
    nonempty = list(chain.from_iterable(with_parts))
    if not nonempty:
        return DynamicCache()
    layers = [
        layer[0]
        if len(layer) == 1
        else tuple(torch.cat(parts, dim=-2) for parts in zip(*layer, strict=True))
        for layer in zip(*nonempty, strict=True)
    ]
    return Cache(layers=[MemoryLayer(keys, values, once, shared) for keys, values in layers])


def cache_of_rows(memories: Sequence[Memory]) -> Cache:
    """A transformers cache for a batch in which each row has another memory of keys and values. Shorter memories are
    padded with zeros at their beginning, which a mask has to hide."""
    like = next(memory.layers for memory in memories if memory.layers)

    def padded(parts: Sequence[Tensor]) -> Tensor:
        longest = max(part.shape[-2] for part in parts)  # 0 in a layer that the model leaves out
        return torch.cat(
            [nn.functional.pad(part, (0, 0, longest - part.shape[-2], 0)) for part in parts]
        )

    layers: list[Any] = []
    for i, (keys, values) in enumerate(like):
        empty = keys[:, :, :0], values[:, :, :0]
        row_memories = [memory.layers[i] if memory.layers else empty for memory in memories]
        layers.append(MemoryLayer.unshared(*map(padded, zip(*row_memories, strict=True))))
    return Cache(layers=layers)


def causal_pass(
    model: PreTrainedModel,
    tokens: Sequence[int],
    memory: Memory | None = None,
    positions: Tensor | None = None,
) -> KeyValues:
    """Run tokens through the model, each attending to the memory and to the tokens before it.

    Args:
        tokens: n ids.
        memory: the memory before the tokens; None for no memory.
        positions: [n] the positions of the tokens; None for consecutive positions from the memory's length on.

    Returns:
        The keys and values of these tokens alone, both [1, key-value heads, n, head width] for each layer.
    """
    device = device_of(model)
    cache = memory.cache() if memory is not None else DynamicCache()
    # With a memory, a few tokens run at a time, because transformers makes a mask [tokens, memory + tokens]. All tokens
    # run at once if they are given positions and the angles of rotary embeddings depend on the largest position of a
    # pass. (Consecutive positions never cross the switch of angles: `methods.limits` refuses such contexts.)
    at_once = (
        len(tokens)
        if memory is None or (positions is not None and position_switch(model))
        else PIECE
    )
    ids = on_device([tokens], device).split(at_once, dim=1)
    at = (
        [None] * len(ids)
        if positions is None
        else to_device(positions[None], device).split(at_once, dim=1)
    )
    for piece, at_positions in zip(ids, at, strict=True):
        position_ids = {} if at_positions is None else {"position_ids": at_positions}
        # No logits are needed, but transformers computes them for at least one token.
        model(input_ids=piece, logits_to_keep=1, **position_ids, **cache_arguments(model, cache))
    return _added(cache)


def _added(cache: Cache) -> KeyValues:
    """The keys and values that forward passes have added to a cache, without those of its memory."""
    layers: list[Any] = cache.layers
    ran = [layer.keys for layer in layers if layer.keys is not None]
    return [
        (ran[0][:, :, :0],) * 2 if layer.keys is None else (layer.keys, layer.values)
        for layer in layers
        if ran
    ]
