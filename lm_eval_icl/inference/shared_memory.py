"""Attention of a batch whose rows share a memory, which is read once for all rows.

A forward pass of `generate` has one token of each row. A copy of the memory for every row would be
read from the machine's memory again and again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lm_eval_icl.inference.attention import (
    Attended,
    AttentionCall,
    Part,
    Reading,
    additive,
    joined,
)

# Keys and values, both [1, key-value heads, entries, width].
KeysValues = tuple[Tensor, Tensor]


def keys_on_memory(memory: KeysValues, keys: Tensor, parts: Sequence[Part] = ()) -> Tensor:
    """The keys of a batch's rows, marked so that attention reads a shared memory before them.

    The model has to pass this very tensor object to its attention function. Copies do not have the
    mark.

    Args:
        keys: [rows, key-value heads, tokens, width].
        parts: further entries, after those of `memory`.
    """
    marked: Any = keys[:]  # another tensor object with the same numbers
    marked.attention = partial(on_shared_memory, memory, parts=parts)
    return marked


def with_copies(memory: KeysValues, keys: Tensor, values: Tensor) -> KeysValues:
    """The keys and values of a batch's rows, each row after a copy of the memory."""
    copies = [shared.expand(len(keys), -1, -1, -1) for shared in memory]
    return torch.cat([copies[0], keys], dim=-2), torch.cat([copies[1], values], dim=-2)


def on_shared_memory(
    memory: KeysValues, call: AttentionCall, parts: Sequence[Part] = ()
) -> Attended:
    """A layer's attention of several rows to a memory, and to the tokens of each row.

    If attention cannot be divided, it is computed as a whole, on a copy of the memory for each row.

    Args:
        call: its key and value are those of the rows alone, [rows, key-value heads, tokens, width].
            Its mask is [rows or 1, 1, n, entries + tokens] and hides nothing of the memory. It is
            None if each row has one token.

    Raises:
        ValueError: the memory is read in parts, and attention cannot be divided.
    """
    rows, heads, n, width = call.query.shape
    _, key_heads, tokens, _ = call.key.shape
    groups = heads // key_heads  # this many heads of the query share a key
    entries = memory[0].shape[2] + sum(keys.shape[2] for keys, *_ in parts)
    mask = call.mask
    fits = n == 1 if mask is None else mask.shape[1:] == (1, n, entries + tokens)
    divides = fits and heads == groups * key_heads and (call.has_kernel or bool(parts))
    if parts:
        call.check_divisible(divides)
    if not divides:
        key, value = with_copies(memory, call.key, call.value)
        return replace(call, key=key, value=value).whole()
    if mask is not None:
        mask = mask[..., entries:]
        if mask.dtype == torch.bool:
            mask = additive(mask, call.query.dtype)
        # The queries of all heads that share a key become the rows of one matrix, head after head.
        mask = mask[:, :, None].expand(-1, -1, groups, -1, -1).flatten(2, 3)
    query = call.query.unflatten(1, (key_heads, groups))
    # For the memory, the queries of all rows of the batch become the rows of one matrix.
    all_queries = query.transpose(0, 1).reshape(1, key_heads, -1, width)
    over_memory = call.read_parts(all_queries, [(*memory, Reading()), *parts])
    over_rows = call.attend(query.flatten(2, 3), call.key, call.value, mask)

    # Both have the shape of the rows: [rows, key-value heads, groups * n, width].
    output = over_memory.output.view(key_heads, rows, groups * n, -1).transpose(0, 1)
    lse = over_memory.lse.view(key_heads, rows, groups * n).transpose(0, 1)
    output, _ = joined([(output, lse), over_rows])
    output = output.unflatten(2, (groups, n)).flatten(1, 2).transpose(1, 2)
    return output.to(call.query.dtype).contiguous(), None
