"""Attention on a CPU, computed in two parts: of a packed row, without most of the keys that the mask hides, and of the
rows of a batch behind a memory, without a copy of the memory for each.

The first part is attention to the memory, for all tokens at once. The second part is attention to the row itself; of a
packed row, for a few tokens at a time and only with the keys that one of them sees. The parts are joined by their
log-sum-exps, as FlashAttention joins blocks of keys (Dao et al., 2022, section 3.1).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

# How many tokens of the row are taken at a time: about a query's length. A smaller number reads fewer hidden keys, but
# needs more calls of the kernel.
ROWS = 64
# torch's kernel that also returns the log-sum-exps. It is undocumented; if it is missing, attention is not divided.
FLASH: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)


class _PackedRow:
    """The packed row of a forward pass.

    Args:
        sees: [n, n] bool: which tokens of the row each token attends to.
        groups: adjacent tokens of the row, and the entries in front of the row to which they attend.
    """

    def __init__(self, sees: Tensor, groups: Sequence[tuple[slice, slice]]) -> None:
        self.sees, self.groups = sees, groups

    @cached_property
    def parts(self) -> list[tuple[slice, Tensor]]:
        """Slices of `ROWS` tokens, each with the indices of all tokens that one of them sees. All layers share them."""
        rows = [slice(first, first + ROWS) for first in range(0, len(self.sees), ROWS)]
        # As numbers, which torch compares three times as fast as it joins booleans.
        return [(some, self.sees.view(torch.uint8)[some].amax(dim=0).nonzero()[:, 0]) for some in rows]


# What computes attention in the forward pass that this thread is running; None for transformers' own function.
_attending: ContextVar[Callable[..., tuple[Tensor, Tensor | None]] | None] = ContextVar("attending", default=None)
_installing = threading.Lock()


@contextmanager
def in_parts(sees: Tensor, groups: Sequence[tuple[slice, slice]]) -> Iterator[None]:
    """Inside this context, a model with `attn_implementation="sdpa"` skips keys of a packed row that the mask hides.
    These are most of the row's keys: a token sees only its own query, and the row has many queries.

    Attention is not divided where this gains nothing or is not known to be possible: few tokens, a device other than
    the CPU, half precision, or a last block that runs for some of the tokens only.

    Args:
        sees: [n, n] bool: which tokens of the row each token attends to, itself included.
        groups: slices of the row, one behind the other, and for each the slice of the entries in front of the row to
            which its tokens attend: their memory.
    """
    with nullcontext() if FLASH is None else attention_by(partial(_attention, _PackedRow(sees, groups))):
        yield


@contextmanager
def attention_by(function: Callable[..., tuple[Tensor, Tensor | None]]) -> Iterator[None]:
    """Inside this context, `function` computes the attention of models with `attn_implementation="sdpa"`. It is called
    with transformers' function, which it may call, and with the arguments of that."""
    _install()
    token = _attending.set(function)
    try:
        yield
    finally:
        _attending.reset(token)


def _install() -> None:
    """Replace transformers' attention function for sdpa, once in a process. Outside `attention_by`, and for keys that
    are not `behind` a memory, the replacement only calls the original function."""
    with _installing:
        whole = AttentionInterface()["sdpa"]  # that of the class; one set on an instance stays in front of it
        if getattr(whole, "replaced", False):
            return

        def attention(module: nn.Module, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
            memory, function = getattr(key, "memory", None), _attending.get()
            if memory is not None:
                return _on_shared_memory(whole, memory, module, query, key, *args, **kwargs)
            if function is not None:
                return function(whole, module, query, key, *args, **kwargs)
            return whole(module, query, key, *args, **kwargs)

        attention.replaced = True  # type: ignore[attr-defined]
        AttentionInterface.register("sdpa", attention)


def additive(sees: Tensor, dtype: torch.dtype, memory: int = 0) -> Tensor:
    """A boolean mask as numbers to add to the attention scores: eager attention takes only these, sdpa takes both.

    Args:
        sees: [..., rows, columns] bool: which columns each row attends to.
        memory: how many columns are put before these, to which all rows attend.
    """
    mask = torch.zeros(*sees.shape[:-1], memory + sees.shape[-1], dtype=dtype, device=sees.device)
    # On a CPU, torch converts bytes to floats seven times as fast as booleans.
    mask[..., memory:].copy_(sees.view(torch.uint8)).sub_(1).mul_(torch.finfo(dtype).max)
    return mask


def join(output: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Make the attention to some keys that to these and other keys, given the log-sum-exps of both.

    Attention to two sets of keys is the mean of the attention to each set, weighted by its share of the sum of
    exponentials.

    Args:
        output, other: [rows, heads, n, width].
        lse, other_lse: [rows, heads, n].
    """
    output.lerp_(other, torch.sigmoid(other_lse - lse)[..., None])


def has_kernel(query: Tensor, value: Tensor, kwargs: Mapping[str, Any]) -> bool:
    """Whether `FLASH`, which gives the log-sum-exps that `join` needs, computes a layer's attention as the model does.

    Args:
        query: [rows, heads, n, width].
        value: [rows, key-value heads, tokens, width].
        kwargs: the further arguments of the attention function.
    """
    fits = FLASH is not None and query.device.type == "cpu" and query.dtype in (torch.float32, torch.float64)
    plain = all(kwargs.get(name) is None for name in ("position_bias", "softcap", "cache"))
    return fits and plain and query.shape[3] == value.shape[3]


def _attention(
    row: _PackedRow,
    whole: Callable[..., tuple[Tensor, Tensor | None]],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """A layer's attention, in parts if it can be divided, else computed by `whole`.

    Args:
        query: [1, heads, n, width].
        key, value: [1, key-value heads, memory + n, width].
        attention_mask: [1, 1, n, memory + n], to be added to the scores.

    Returns:
        The output, [1, n, heads, width], and None in place of attention weights.
    """
    n = len(row.sees)
    behind = key.shape[2] - n
    divides = n > ROWS and behind >= 0 and (query.shape[0], query.shape[2]) == (1, n)
    divides, mask = divides and has_kernel(query, value, kwargs), attention_mask
    divides = divides and (not behind or all(some.start < some.stop for _, some in row.groups))
    if not divides or mask is None or mask.dtype != query.dtype or mask.shape[2:] != (n, behind + n):
        return whole(module, query, key, value, attention_mask, **kwargs)
    scale = kwargs.get("scaling")
    groups = getattr(module, "num_key_value_groups", 1)
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    output, lse = torch.empty_like(query), torch.empty(0)
    if behind:
        over_memory = [
            # The model may have added numbers of its own to the mask, which hides nothing of a group's memory.
            FLASH(query[:, :, rows], key[:, :, some], value[:, :, some], attn_mask=mask[:, :, rows, some], scale=scale)
            for rows, some in row.groups
        ]
        output, lse = (torch.cat(part, 2) if len(part) > 1 else part[0] for part in zip(*over_memory, strict=True))
    over_row, key, value = mask[..., behind:], key[:, :, behind:], value[:, :, behind:]
    for rows, seen in row.parts:
        own_key, own_value = key.index_select(2, seen), value.index_select(2, seen)
        own_mask = over_row[:, :, rows].index_select(3, seen)
        own, own_lse = FLASH(query[:, :, rows], own_key, own_value, attn_mask=own_mask, scale=scale)
        if behind:
            join(output[:, :, rows], lse[:, :, rows], own, own_lse)
        else:
            output[:, :, rows] = own
    return output.transpose(1, 2).contiguous(), None


# Rows of a batch behind a memory that they share.


def reads_shared_memory() -> bool:
    """Whether a model with `attn_implementation="sdpa"` attends to a memory that keys are put `behind`. It does not if
    the kernel is missing, or if a function of somebody else's stands in front of ours."""
    _install()
    return FLASH is not None and getattr(ALL_ATTENTION_FUNCTIONS["sdpa"], "replaced", False)


def behind(memory: tuple[Tensor, Tensor], keys: Tensor) -> Tensor:
    """The keys of a batch's rows, marked as being behind a memory that all rows share, which attention then reads once
    for all of them. The model has to pass this very tensor to its attention function: the mark is not on its copies.

    Args:
        memory: keys and values, [1, key-value heads, entries, width].
        keys: [rows, key-value heads, tokens, width].
    """
    marked: Any = keys[:]  # a tensor object of its own, of the same numbers
    marked.memory = memory
    return marked  # type: ignore[no-any-return]


def _on_shared_memory(
    whole: Callable[..., tuple[Tensor, Tensor | None]],
    memory: tuple[Tensor, Tensor],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """A layer's attention of several rows to a memory and to each row's own tokens. If it cannot be divided, it is
    computed by `whole` on a copy of the memory for each row.

    Args:
        memory: keys and values, [1, key-value heads, entries, width].
        query: [rows, heads, n, width].
        key, value: [rows, key-value heads, tokens, width].
        attention_mask: [rows or 1, 1, n, entries + tokens], boolean or to be added to the scores, which hides nothing
            of the memory; None if a single token of each row attends to everything.

    Returns:
        The output, [rows, n, heads, width], and None in place of attention weights.
    """
    (rows, heads, n, width), (_, key_heads, tokens, _), mask = query.shape, key.shape, attention_mask
    entries, groups = memory[0].shape[2], heads // key_heads
    divides = has_kernel(query, value, kwargs) and heads == groups * key_heads
    divides = divides and (n == 1 if mask is None else mask.shape[1:] == (1, n, entries + tokens))
    if not divides:
        key, value = (
            torch.cat([shared.expand(rows, -1, -1, -1), own], dim=2)
            for shared, own in zip(memory, (key, value), strict=True)
        )
        return whole(module, query, key, value, mask, **kwargs)
    if mask is not None:
        mask = mask[..., entries:]
        if mask.dtype == torch.bool:
            mask = additive(mask, query.dtype)
        # One after another, the queries of the heads that share a key are the rows of one matrix.
        mask = mask[:, :, None].expand(-1, -1, groups, -1, -1).flatten(2, 3)
    scale = kwargs.get("scaling")
    query = query.unflatten(1, (key_heads, groups))
    # All rows' queries are the rows of one matrix.
    of_all = query.transpose(0, 1).reshape(1, key_heads, -1, width)
    output, lse = FLASH(of_all, *memory, scale=scale)
    own, own_lse = FLASH(query.flatten(2, 3), key, value, attn_mask=mask, scale=scale)
    output, lse = (part.view(key_heads, rows, groups, n, -1).transpose(0, 1) for part in (output, lse))
    own, own_lse = (part.view(rows, key_heads, groups, n, -1) for part in (own, own_lse))
    join(output, lse[..., 0], own, own_lse[..., 0])
    return output.flatten(1, 2).transpose(1, 2).contiguous(), None
