"""Memories: the keys and values of demonstrations, computed once for queries to attend to.

A hybrid keeps more than keys and values. Its memory is its whole cache (`inference.hybrids`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel

from lm_eval_icl.inference import attention
from lm_eval_icl.inference.adapters import Adapter
from lm_eval_icl.inference.attention import Part, Reading, additive, attention_by
from lm_eval_icl.inference.caches import MemoryLayer, cache_arguments, takes_positions
from lm_eval_icl.inference.devices import device_of, kept_logits, on_device, to_device
from lm_eval_icl.inference.hybrids import empty_cache, is_hybrid, select_rows, tensors
from lm_eval_icl.inference.layout_attention import CONTEXT_TOKENS, UnderLayouts
from lm_eval_icl.inference.positions import position_switch
from lm_eval_icl.inference.residual import Replacement, replaced_stream
from lm_eval_icl.prompts.layouts import Layout

# This many tokens run on a memory at a time.
PIECE = 512
# Models in which some layer was seen to compute attention without transformers' function.
_with_other_attention: WeakSet[PreTrainedModel] = WeakSet()
# For each layer (keys, values), both [1, key-value heads, entries, width].
KeyValues = list[tuple[Tensor, Tensor]]


def select_entries(layers: KeyValues, entries: slice) -> KeyValues:
    """The keys and values of adjacent entries, without a copy."""
    return [(keys[:, :, entries], values[:, :, entries]) for keys, values in layers]


def split_entries(layers: KeyValues, lengths: Sequence[int]) -> list[KeyValues]:
    """Copies of the keys and values of adjacent pieces, which have these numbers of entries.

    A view of one piece would keep the others from being freed.
    """
    pieces = []
    end = 0
    for length in lengths:
        start = end
        end += length
        views = select_entries(layers, slice(start, end))
        pieces.append([(keys.clone(), values.clone()) for keys, values in views])
    return pieces


@dataclass(frozen=True)
class MemoryPart:
    """Some entries of a memory, stored apart because attention reads them in another way."""

    layers: KeyValues
    length: int  # the number of entries
    reading: Reading


@dataclass(frozen=True)
class Memory:
    """What a method computed for a context, for queries to attend to."""

    # Keys and values of the entries. Empty for an empty context, and if there is a `state`. A layer
    # that the model leaves out has no entries (Mllama's cross-attention layers, which do not run
    # without a picture).
    layers: KeyValues
    tokens: list[int]  # the token id of each entry, in order; the entries of `parts` come last
    query_start: int  # the position of a query's first token
    residual: Replacement | None = (
        None  # its token is counted from the first that runs on the memory
    )
    state: Cache | None = None  # the cache of a hybrid after the context, as a batch of one row
    # Further entries, which attention reads in other ways than those of `layers`.
    parts: tuple[MemoryPart, ...] = ()
    adapter: Adapter | None = None  # under which queries run, as the context did

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def nbytes(self) -> int:
        """The number of bytes that the memory takes, with its adapter."""
        stored: Any = self.state
        if stored is None:
            stored = [part.layers for part in self.all_parts]
        if self.adapter is not None:
            stored = [stored, self.adapter.parameters]
        return sum(tensor.nbytes for tensor in tensors(stored))

    def divided(self, first: int, reading: Reading) -> Memory:
        """This memory with the entries from `first` on as a part, read as `reading` says."""
        after = select_entries(self.layers, slice(first, None))
        part = MemoryPart(after, len(self) - first, reading)
        return replace(self, layers=select_entries(self.layers, slice(first)), parts=(part,))

    @property
    def all_parts(self) -> list[MemoryPart]:
        """All entries in order: those that attention reads as usual, then `parts`."""
        usual = len(self) - sum(part.length for part in self.parts)
        return [MemoryPart(self.layers, usual, Reading()), *self.parts]

    def readings(self, first: int) -> list[tuple[slice, Reading]]:
        """The slices of entries that are read differently, and how.

        Args:
            first: the column of the first entry.
        """
        readings = []
        for part in self.all_parts:
            end = first + part.length
            readings.append((slice(first, end), part.reading))
            first = end
        return readings

    def cache(self, rows: int = 1, shared: bool = False) -> Cache:
        """A transformers cache that begins with this memory.

        Forward passes add entries to the cache alone.

        Args:
            rows: the number of rows of a batch that runs on the cache.
            shared: attention reads the memory once for all rows, if possible. The model must allow
                it (`can_share`).
        """
        if self.state is not None:
            return select_rows(self.state, 1, [0] * rows)
        # Rows get copies if another library has replaced transformers' attention.
        shared = attention.install() and shared
        return cache_of([self], shared=shared or bool(self.parts))

    def without_last(self, query_start: int) -> Memory:
        """This memory without its last entry, whose token runs again at position `query_start`."""
        layers = select_entries(self.layers, slice(-1))
        return replace(self, layers=layers, tokens=self.tokens[:-1], query_start=query_start)

    @property
    def in_sequence(self) -> bool:
        """True if a query's positions begin at the number of entries, as a model counts them."""
        return self.query_start == len(self)

    def reading(self, model: PreTrainedModel) -> AbstractContextManager[None]:
        """The context in which a query runs on the memory. It sets the vector of `residual`."""
        if self.residual is None:
            return nullcontext()
        layer, token, vector = self.residual
        return replaced_stream(model, layer, [token], vector)

    def adapted(self, model: PreTrainedModel) -> AbstractContextManager[None]:
        """The context in which all queries of the memory run. It switches the adapter on."""
        return nullcontext() if self.adapter is None else self.adapter.on(model)


def encode_all(
    model: PreTrainedModel, layouts: Sequence[Layout], prompts: Sequence[Sequence[int]]
) -> list[Memory]:
    """Run the layouts of contexts side by side in one forward pass.

    The memories have the entries to which later tokens attend. The model must obey a 4-D mask if
    there are several layouts or a layout is not causal. It must obey `position_ids` if there are
    several layouts or positions are not sequential (`inference.capabilities`).

    Args:
        layouts: at least one. If there are several, each has at least one token.
        prompts: for each layout, the ids of its prompt, in which every part occurs once.
    """
    pairs = zip(layouts, prompts, strict=True)
    rows = [[prompt[i] for i in layout.source] for layout, prompt in pairs]
    layout = layouts[0]
    row = rows[0]
    if len(rows) > 1 or not layout.causal:
        layers_by_row = masked_pass(model, rows, layouts)
    elif not row:
        layers_by_row = [[]]
    elif layout.sequential and len(layout.kept_tokens) == len(row):
        return [read_causally(model, row)]
    else:
        layers_by_row = [causal_pass(model, row, positions=layout.positions)]
    return [
        kept_of(layout, Memory(layers, row, layout.end))
        for layout, row, layers in zip(layouts, rows, layers_by_row, strict=True)
    ]


def kept_of(layout: Layout, memory: Memory) -> Memory:
    """The entries to which later tokens attend, from the memory of a layout's whole row."""
    kept = layout.kept_tokens
    if len(kept) == len(memory):
        return memory

    def take(entries: Tensor) -> Tensor:
        if not entries.numel():  # the model leaves out this layer
            return entries
        return entries.index_select(2, on_device(kept, entries.device))

    layers = [(take(keys), take(values)) for keys, values in memory.layers]
    return replace(memory, layers=layers, tokens=[memory.tokens[i] for i in kept])


def read_causally(model: PreTrainedModel, tokens: Sequence[int]) -> Memory:
    """The memory of some tokens after one ordinary causal pass."""
    n = len(tokens)
    if not is_hybrid(model):
        return Memory(causal_pass(model, tokens), list(tokens), n)
    state = empty_cache(model)
    run_rows(model, on_device([tokens], device_of(model)), [n - 1], state)
    return Memory([], list(tokens), n, state=state)


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
        cache: the cache of earlier tokens, with as many rows. These tokens are added to it. None:
            nothing is kept.
        positions: [rows, n] the positions of the tokens. None: they follow those in the cache.

    Returns:
        The logits [rows, len(read), vocabulary].
    """
    inputs: dict[str, Any] = {"use_cache": False}
    if cache is not None:
        inputs = cache_arguments(model, cache)
    if positions is not None:
        inputs["position_ids"] = positions
    n = ids.shape[1]
    at_end = list(read) == list(range(n - len(read), n))
    keep = len(read) if at_end else kept_logits(model, read)
    logits = model(input_ids=ids, logits_to_keep=keep, **inputs).logits
    return logits if logits.shape[1] == len(read) else logits[:, list(read)]


def run_after_memory(
    model: PreTrainedModel,
    memory: Memory,
    cache: Cache,
    rows: Sequence[Sequence[int]],
    depth: int,
    read: Sequence[int],
) -> Tensor:
    """Run tokens that follow a memory as the rows of a batch (`run_rows`).

    Shorter rows get padding at their end, which the tokens of a causal model do not see.

    Args:
        cache: the cache of the memory, to which passes may have added tokens.
        rows: the ids of each row.
        depth: the number of tokens that the cache has after the memory.
    """
    longest = max(map(len, rows))
    padded = [[*row, *[row[-1]] * (longest - len(row))] for row in rows]
    ids = torch.tensor(padded, device=device_of(model))
    positions = None
    # Some hybrids take the number of earlier tokens from a layer that does not know it.
    if not memory.in_sequence or (is_hybrid(model) and takes_positions(model)):
        first = memory.query_start + depth
        positions = first + torch.arange(longest, device=ids.device).expand(len(rows), -1)
    return run_rows(model, ids, read, cache, positions)


def vocabulary_of(model: PreTrainedModel) -> int:
    """The number of token ids that the model knows.

    A larger id would fail in the middle of a forward pass.
    """
    embedding: Any = model.get_input_embeddings()
    return int(getattr(embedding, "num_embeddings", None) or embedding.weight.shape[0])


def masked_pass(
    model: PreTrainedModel,
    rows: Sequence[Sequence[int]],
    layouts: Sequence[Layout],
    memories: Sequence[Memory] = (),
) -> list[KeyValues]:
    """Run several rows side by side in one forward pass, each with the attention of its layout.

    In a long pass, attention is computed without the whole mask (`inference.layout_attention`).
    Models whose attention cannot be replaced get the whole mask.

    Args:
        rows: the ids of each row; at least one row.
        layouts: the layout of each row.
        memories: the memory before each row, if the layouts have entries of a memory.

    Returns:
        For each row of n tokens, its keys and values by layer: [1, key-value heads, n, width].
    """
    device = device_of(model)
    under_layouts = UnderLayouts(layouts)
    layout = under_layouts.layout

    def run(mask: Tensor) -> KeyValues:
        cache = cache_of(memories)
        model(
            input_ids=on_device([list(chain(*rows))], device),
            position_ids=to_device(layout.positions[None, layout.entries :], device),
            attention_mask=mask,
            logits_to_keep=1,
            **cache_arguments(model, cache),
        )
        return added_to(cache)

    layers: KeyValues = []
    replaceable = model.config._attn_implementation == "sdpa" and model not in _with_other_attention
    if len(layout) > CONTEXT_TOKENS and replaceable:
        with attention_by(under_layouts):
            layers = run(under_layouts.mask(model.dtype, device))
        if under_layouts.layers != sum(keys.numel() > 0 for keys, _ in layers):
            _with_other_attention.add(model)
            layers = []
    if not layers:
        sees = to_device(layout.mask[layout.entries :], device)
        layers = run(additive(sees, model.dtype)[None, None])
    return [layers] if len(rows) == 1 else split_entries(layers, list(map(len, rows)))


def cache_of(memories: Sequence[Memory], once: bool = False, shared: bool = False) -> Cache:
    """A transformers cache that begins with these memories of keys and values, in order.

    Args:
        once: the cache is for a single forward pass. It does not store the entries of the pass.
        shared: as for `Memory.cache`.
    """
    parts: list[MemoryPart] = []
    for memory in memories:
        if memory.layers:
            parts += memory.all_parts
    if not parts:
        return DynamicCache()
    layers: list[Any] = []
    for i in range(len(parts[0].layers)):
        parts_of_layer = [Part(*part.layers[i], part.reading) for part in parts]
        layers.append(MemoryLayer(parts_of_layer, once, shared))
    return Cache(layers=layers)


def cache_of_rows(memories: Sequence[Memory]) -> Cache:
    """A transformers cache for a batch in which each row has another memory of keys and values.

    Shorter memories are padded with zeros at their beginning, which a mask has to hide.
    """
    like = next(memory.layers for memory in memories if memory.layers)

    def padded(parts: Sequence[Tensor]) -> Tensor:
        longest = max(part.shape[-2] for part in parts)  # 0 in a layer that the model leaves out
        rows = [nn.functional.pad(part, (0, 0, longest - part.shape[-2], 0)) for part in parts]
        return torch.cat(rows)

    layers: list[Any] = []
    for i, (keys, values) in enumerate(like):
        empty = (keys[:, :, :0], values[:, :, :0])
        rows = [memory.layers[i] if memory.layers else empty for memory in memories]
        layers.append(MemoryLayer.unshared(*map(padded, zip(*rows, strict=True))))
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
        memory: the memory before the tokens.
        positions: [n] the positions of the tokens. None: they follow the memory's entries.

    Returns:
        The keys and values of these tokens alone by layer: [1, key-value heads, n, width].
    """
    cache = DynamicCache() if memory is None else memory.cache()
    # With a memory, a few tokens run at a time, because transformers makes a mask
    # [tokens, memory + tokens].
    at_once = len(tokens) if memory is None else PIECE
    # All tokens run at once if they are given positions and rotary angles depend on the largest
    # position of a pass. (Consecutive positions never cross the switch of angles:
    # `methods.limits` refuses such contexts.)
    if positions is not None and position_switch(model):
        at_once = len(tokens)
    device = device_of(model)
    for first in range(0, len(tokens), at_once):
        piece = slice(first, first + at_once)
        inputs = cache_arguments(model, cache)
        if positions is not None:
            inputs["position_ids"] = to_device(positions[None, piece], device)
        # No logits are needed, but transformers computes them for at least one token.
        model(input_ids=on_device([tokens[piece]], device), logits_to_keep=1, **inputs)
    return added_to(cache)


def added_to(cache: Cache) -> KeyValues:
    """The keys and values that passes have added to a cache, without those of its memory."""
    cache_layers: list[Any] = cache.layers
    ran = [layer.keys for layer in cache_layers if layer.keys is not None]
    if not ran:
        return []
    empty = ran[0][:, :, :0]  # for a layer that the model leaves out
    return [
        (empty, empty) if layer.keys is None else (layer.keys, layer.values)
        for layer in cache_layers
    ]
