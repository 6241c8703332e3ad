"""Attention of the rows of a batch to a memory that they share, on a CPU, without a copy of the memory for each row.

Attention to the memory is computed for all rows at once, and attention to each row's own tokens apart. The two are
joined by their log-sum-exps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lm_eval_icl.inference import attention
from lm_eval_icl.inference.attention import Attended, AttentionCall, Reading, additive, join, read_parts


def reads_shared_memory() -> bool:
    """Whether a model with `attn_implementation="sdpa"` attends to a memory that keys are put `behind`. It does not if
    the kernel is missing, or if a function of somebody else's stands in front of ours."""
    return attention.install() and attention.FLASH is not None


def behind(memory: tuple[Tensor, Tensor], keys: Tensor, parts: Sequence[tuple[Tensor, Tensor, Reading]] = ()) -> Tensor:
    """The keys of a batch's rows, marked as being behind a memory that all rows share, which attention then reads once
    for all of them. The model has to pass this very tensor to its attention function: the mark is not on its copies.

    Args:
        memory: keys and values, [1, key-value heads, entries, width].
        keys: [rows, key-value heads, tokens, width].
        parts: keys and values of further entries, behind those of `memory`, and how they are read.
    """
    marked: Any = keys[:]  # a tensor object of its own, of the same numbers
    marked.attention = partial(on_shared_memory, memory, parts=parts)
    return marked


def behind_copies(memory: tuple[Tensor, Tensor], keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """The keys and values of a batch's rows behind a copy of the memory for each, both
    [rows, key-value heads, entries + tokens, width]; the arguments are as for `behind`."""
    own = zip(memory, (keys, values), strict=True)
    keys, values = (torch.cat([shared.expand(len(keys), -1, -1, -1), part], dim=-2) for shared, part in own)
    return keys, values


def on_shared_memory(
    memory: tuple[Tensor, Tensor], call: AttentionCall, parts: Sequence[tuple[Tensor, Tensor, Reading]] = ()
) -> Attended:
    """A layer's attention of several rows to a memory and to each row's own tokens. If it cannot be divided, it is
    computed as a whole, on a copy of the memory for each row.

    Args:
        memory: keys and values, [1, key-value heads, entries, width].
        call: `key` and `value` are those of each row's own tokens, [rows, key-value heads, tokens, width]; `mask` is
            [rows or 1, 1, n, entries + tokens] and hides nothing of the memory, or None if a single token of each row
            attends to everything.
        parts: as for `behind`.

    Raises:
        ValueError: the memory is read in parts, and attention cannot be divided.
    """
    (rows, heads, n, width), (_, key_heads, tokens, _), mask = call.query.shape, call.key.shape, call.mask
    entries, groups = memory[0].shape[2] + sum(keys.shape[2] for keys, *_ in parts), heads // key_heads
    divides = (call.has_kernel or bool(parts)) and heads == groups * key_heads
    divides = divides and (n == 1 if mask is None else mask.shape[1:] == (1, n, entries + tokens))
    if parts:
        call.check_divisible(divides)
    if not divides:
        key, value = behind_copies(memory, call.key, call.value)
        return replace(call, key=key, value=value).whole()
    if mask is not None:
        mask = mask[..., entries:]
        if mask.dtype == torch.bool:
            mask = additive(mask, call.query.dtype)
        # One after another, the queries of the heads that share a key are the rows of one matrix.
        mask = mask[:, :, None].expand(-1, -1, groups, -1, -1).flatten(2, 3)
    query = call.query.unflatten(1, (key_heads, groups))
    # All rows' queries are the rows of one matrix.
    of_all = query.transpose(0, 1).reshape(1, key_heads, -1, width)
    over_memory = read_parts(call, of_all, [(*memory, Reading()), *parts])
    own, own_lse = call.attend(query.flatten(2, 3), call.key, call.value, mask)
    output, lse = (part.view(key_heads, rows, groups, n, -1).transpose(0, 1) for part in over_memory)
    own, own_lse = (part.view(rows, key_heads, groups, n, -1) for part in (own, own_lse))
    join(output, lse[..., 0], own, own_lse[..., 0])
    return output.flatten(1, 2).transpose(1, 2).to(query.dtype).contiguous(), None
