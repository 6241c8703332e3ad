"""Memories: demonstrations run through a model once, and kept as keys and values for queries to attend to.

The memory of a hybrid, which keeps more than keys and values, is its whole cache (`inference.hybrids`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel

from lm_eval_icl.inference import attention
from lm_eval_icl.inference.attention import CONTEXT_TOKENS, Reading, UnderLayouts, additive, attention_by
from lm_eval_icl.inference.blocks import replaced_stream
from lm_eval_icl.inference.caches import MemoryLayer, behind_cache, takes_positions
from lm_eval_icl.inference.devices import device_of, kept_logits, on_device, to_device
from lm_eval_icl.inference.hybrids import empty_cache, is_hybrid, select_rows, tensors
from lm_eval_icl.inference.positions import position_switch
from lm_eval_icl.prompts.layouts import Layout

# How many tokens run behind a memory at a time.
PIECE = 512
# Models of which some layers do not use transformers' function for attention, found out by running them.
_with_other_attention: WeakSet[PreTrainedModel] = WeakSet()
# For each layer (keys, values), both [1, key-value heads, entries, head width].
KeyValues = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class MemoryPart:
    """Some entries of a memory, with tensors of their own, that attention reads in a way of their own."""

    layers: KeyValues
    length: int  # how many entries there are
    reading: Reading


@dataclass(frozen=True)
class Memory:
    """What a method computed for a context, for queries to attend to."""

    # Keys and values of the entries; empty for an empty context, and if there is a `state`. A layer that the model
    # leaves out has no entries (Mllama's cross-attention layers, which do not run without a picture).
    layers: KeyValues
    tokens: list[int]  # the token id of each entry, in order, those of `parts` last
    query_start: int  # the position of a query's first token
    # (k, i, [1, width]): the vector that replaces the residual stream of the token i behind the memory, counted from 0,
    # after block k, counted from 1 (`reading`).
    residual: tuple[int, int, Tensor] | None = None
    state: Cache | None = None  # the cache of a hybrid after the context, as a batch of one row
    parts: tuple[MemoryPart, ...] = ()  # further entries, read in parts; those of `layers` are read as usual

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
        """This memory with the entries from `first` on as a part, which is read by `reading`."""
        before, behind = (
            [(keys[:, :, entries], values[:, :, entries]) for keys, values in self.layers]
            for entries in (slice(first), slice(first, None))
        )
        return replace(self, layers=before, parts=(MemoryPart(behind, len(self) - first, reading),))

    def readings(self, first: int) -> list[tuple[slice, Reading]]:
        """How each slice of entries is read, if the entries begin at the column `first`."""
        lengths = [part.length for part in self.parts]
        ends = list(accumulate(lengths, initial=first + len(self) - sum(lengths)))
        parts = [
            (slice(start, end), part.reading) for start, end, part in zip(ends, ends[1:], self.parts, strict=False)
        ]
        return [(slice(first, ends[0]), Reading()), *parts]

    def cache(self, rows: int = 1, shared: bool = False) -> Cache:
        """A transformers cache that begins with this memory. Forward passes add entries to the cache alone.

        Args:
            rows: how many rows a batch that runs on the cache has.
            shared: attention reads the memory once for all rows, if the model's can (`Capabilities.can_share`).
        """
        if self.state is not None:
            return select_rows(self.state, 1, [0] * rows)
        if self.parts:
            attention.install()
            apart = [[(*layer, part.reading) for layer in part.layers] for part in self.parts]
            of_layers = zip(self.layers, zip(*apart, strict=True), strict=True)
            return Cache(layers=[MemoryLayer(*layer, once=False, parts=parts) for layer, parts in of_layers])
        # Without the kernel, or with a function of somebody else's in front of ours, rows get copies.
        return cache_of([self], shared=shared and attention.FLASH is not None and attention.install())

    def without_last(self, query_start: int) -> Memory:
        """This memory without its last entry, whose token is to be run again at the position `query_start`."""
        layers = [(keys[:, :, :-1], values[:, :, :-1]) for keys, values in self.layers]
        return replace(self, layers=layers, tokens=self.tokens[:-1], query_start=query_start)

    @property
    def in_sequence(self) -> bool:
        """Whether a query's positions are those that a model counts by itself, from the number of entries on."""
        return self.query_start == len(self)

    def reading(self, model: PreTrainedModel) -> AbstractContextManager[None]:
        """Inside this context, a query runs on the memory: if `residual` is set, it replaces the residual stream of its
        token."""
        if self.residual is None:
            return nullcontext()
        layer, token, vector = self.residual
        return replaced_stream(model, layer, [token], vector)


def encode_all(model: PreTrainedModel, layouts: Sequence[Layout], prompts: Sequence[Sequence[int]]) -> list[Memory]:
    """Run the layouts of contexts through the model, side by side in one forward pass, and keep the entries to which
    later tokens attend.

    The model must obey a 4-D mask if there are several or one is not causal, and `position_ids` if there are several or
    positions are not sequential (`inference.capabilities`).

    Args:
        layouts: at least one. If there are several, each has at least one token.
        prompts: the ids of each one's prompt, which has every part once (`Layout.source`).
    """
    rows = [[tokens[i] for i in layout.source] for layout, tokens in zip(layouts, prompts, strict=True)]
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
    """The memory that a layout leaves, given the entries of its whole row: those to which later tokens attend."""
    kept = layout.kept_tokens
    if len(kept) == len(memory):
        return memory

    def take(entries: Tensor) -> Tensor:  # a layer that the model leaves out has none
        return entries.index_select(2, on_device(kept, entries.device)) if entries.numel() else entries

    layers = [(take(keys), take(values)) for keys, values in memory.layers]
    return replace(memory, layers=layers, tokens=[memory.tokens[i] for i in kept])


def read_causally(model: PreTrainedModel, tokens: Sequence[int]) -> Memory:
    """The memory of these tokens, which the model reads in one ordinary causal pass."""
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
        cache: what was read before, a batch of as many rows; the tokens are added to it. None to keep nothing.
        positions: [rows, n] the positions of the tokens; None if they follow those in the cache.

    Returns:
        The logits [rows, len(read), vocabulary].
    """
    n = ids.shape[1]
    inputs: dict[str, Any] = {"use_cache": False} if cache is None else behind_cache(model, cache)
    if positions is not None:
        inputs["position_ids"] = positions
    at_end = list(read) == list(range(n - len(read), n))
    keep = len(read) if at_end else kept_logits(model, read)
    logits: Tensor = model(input_ids=ids, logits_to_keep=keep, **inputs).logits
    return logits if logits.shape[1] == len(read) else logits[:, list(read)]


def read_behind(
    model: PreTrainedModel, memory: Memory, cache: Cache, rows: Sequence[Sequence[int]], depth: int, read: Sequence[int]
) -> Tensor:
    """Run tokens behind a memory as the rows of a batch (`run_rows`). Shorter rows are filled up at their end, where a
    causal model does not see it.

    Args:
        cache: the memory's, or one that goes on from it.
        rows: the ids of each row.
        depth: how many tokens behind the memory the cache has read.
    """
    longest = max(map(len, rows))
    ids = torch.tensor([[*row, *[row[-1]] * (longest - len(row))] for row in rows], device=device_of(model))
    # Some hybrids count the tokens that they have read by a layer that does not know.
    counts = memory.in_sequence and not (is_hybrid(model) and takes_positions(model))
    depths = depth + torch.arange(longest, device=ids.device).expand(len(rows), -1)
    return run_rows(model, ids, read, cache, None if counts else memory.query_start + depths)


def vocabulary_of(model: PreTrainedModel) -> int:
    """The number of token ids that the model knows: larger ones would fail in the middle of a forward pass."""
    embedding: Any = model.get_input_embeddings()
    return int(getattr(embedding, "num_embeddings", None) or embedding.weight.shape[0])


def masked_pass(
    model: PreTrainedModel, rows: Sequence[Sequence[int]], layouts: Sequence[Layout], memories: Sequence[Memory] = ()
) -> list[KeyValues]:
    """Run several rows through the model side by side in one forward pass, each under its layout.

    In a long pass, attention is computed without the whole mask (`inference.attention.UnderLayouts`). Models whose
    attention cannot be replaced get the whole mask.

    Args:
        rows: the ids of each row, at least one.
        layouts: the layout of each row.
        memories: the memory before each row, if the layouts have entries of a memory.

    Returns:
        Keys and values of the tokens of each row, both [1, key-value heads, n, head width] for each layer.
    """
    device, lengths, layers = device_of(model), [len(row) for row in rows], KeyValues()
    by_rows = UnderLayouts(layouts)
    layout = by_rows.layout

    def run(mask: Tensor) -> KeyValues:
        cache = cache_of(memories)
        model(
            input_ids=on_device([[token for row in rows for token in row]], device),
            position_ids=to_device(layout.positions[None, layout.entries :], device),
            attention_mask=mask,
            logits_to_keep=1,
            **behind_cache(model, cache),
        )
        return _own(cache)

    replaceable = model.config._attn_implementation == "sdpa" and model not in _with_other_attention
    if len(layout) > CONTEXT_TOKENS and replaceable:
        with attention_by(by_rows):
            layers = run(by_rows.mask(model.dtype, device))
        if by_rows.layers != sum(keys.numel() > 0 for keys, _ in layers):
            _with_other_attention.add(model)
            layers = []
    if not layers:
        layers = run(additive(to_device(layout.mask[layout.entries :], device), model.dtype)[None, None])
    if len(lengths) == 1:
        return [layers]
    # They are copied, since each row would keep the keys and values of all the others from being freed.
    spans = [slice(end - length, end) for end, length in zip(accumulate(lengths), lengths, strict=True)]
    return [[(keys[:, :, span].clone(), values[:, :, span].clone()) for keys, values in layers] for span in spans]


def cache_of(memories: Sequence[Memory], once: bool = False, shared: bool = False) -> Cache:
    """A transformers cache that begins with these memories of keys and values, one after another.

    Args:
        once: the cache is for a single forward pass, so that the entries the pass adds are not stored.
        shared: as for `Memory.cache`.
    """
    filled = list[KeyValues]()
    for memory in memories:
        if memory.layers:
            filled += [memory.layers, *(part.layers for part in memory.parts)]
    if not filled:
        return DynamicCache()
    layers = [
        layer[0] if len(layer) == 1 else tuple(torch.cat(parts, dim=-2) for parts in zip(*layer, strict=True))
        for layer in zip(*filled, strict=True)
    ]
    return Cache(layers=[MemoryLayer(keys, values, once, shared) for keys, values in layers])


def cache_of_rows(memories: Sequence[Memory]) -> Cache:
    """A transformers cache for a batch whose rows have a memory of keys and values each. Memories end side by side: the
    shorter ones have zeros in front, which a mask has to hide."""
    like = next(memory.layers for memory in memories if memory.layers)

    def padded(parts: Sequence[Tensor]) -> Tensor:
        longest = max(part.shape[-2] for part in parts)  # 0 in a layer that the model leaves out
        return torch.cat([nn.functional.pad(part, (0, 0, longest - part.shape[-2], 0)) for part in parts])

    layers: list[Any] = []
    for i, (keys, values) in enumerate(like):
        none = keys[:, :, :0], values[:, :, :0]
        of_rows = [memory.layers[i] if memory.layers else none for memory in memories]
        layers.append(MemoryLayer.of_rows(*map(padded, zip(*of_rows, strict=True))))
    return Cache(layers=layers)


def causal_pass(
    model: PreTrainedModel, tokens: Sequence[int], memory: Memory | None = None, positions: Tensor | None = None
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
    # Behind a memory, a few tokens run at a time, because transformers makes a mask [tokens, memory + tokens]. All run
    # at once if the angles of rotary embeddings depend on the largest position of a pass. (Consecutive positions are
    # then on one side of the switch: `methods.limits` refuses a context that crosses it behind a memory.)
    at_once = len(tokens) if memory is None or (positions is not None and position_switch(model)) else PIECE
    ids = on_device([tokens], device).split(at_once, dim=1)
    at = [None] * len(ids) if positions is None else to_device(positions[None], device).split(at_once, dim=1)
    for piece, at_positions in zip(ids, at, strict=True):
        position_ids = {} if at_positions is None else {"position_ids": at_positions}
        # No logits are needed, but transformers computes them for at least one token.
        model(input_ids=piece, logits_to_keep=1, **position_ids, **behind_cache(model, cache))
    return _own(cache)


def _own(cache: Cache) -> KeyValues:
    """The keys and values that forward passes added to a cache."""
    layers: list[Any] = cache.layers
    ran = [layer.keys for layer in layers if layer.keys is not None]
    return [(ran[0][:, :, :0],) * 2 if layer.keys is None else (layer.keys, layer.values) for layer in layers if ran]
