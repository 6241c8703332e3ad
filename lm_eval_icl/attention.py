"""Attention of a packed row on a CPU: the memory for all its tokens at once, and for a few at a time what they see of
the row itself, joined by their log-sum-exps (as FlashAttention joins blocks of keys: Dao et al., 2022, section 3.1)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

# Tokens of the row at a time: about a query's length. Fewer read fewer keys in vain, and take more calls.
ROWS = 64


@contextmanager
def in_parts(sees: Tensor) -> Iterator[None]:
    """While it lasts, a model with `attn_implementation="sdpa"` leaves out of a packed row's attention what its mask
    hides anyway. That is most of it: a token sees its own query, and the row has many.

    What gains nothing or is not known to divide (a few tokens, no memory, another device, half precision, the last
    block where it runs for some tokens alone) runs whole.

    Args:
        sees: [n, n], which tokens of the row each one may attend to, itself among them. All attend to the memory.
    """
    n = len(sees)
    whole = ALL_ATTENTION_FUNCTIONS["sdpa"]
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # gives the log-sum-exps too

    @cache  # the same in every layer, and for nothing where no layer divides
    def parts() -> list[tuple[slice, Tensor]]:
        """Some of the row's tokens, and the indices of all that any of them sees."""
        rows = [slice(first, first + ROWS) for first in range(0, n, ROWS)]
        return [(some, sees[some].any(dim=0).nonzero()[:, 0]) for some in rows]

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        behind = key.shape[2] - n
        divides = n > ROWS and behind > 0 and (query.shape[0], query.shape[2]) == (1, n)
        divides = divides and query.device.type == "cpu" and query.dtype in (torch.float32, torch.float64)
        divides = divides and query.shape[3] == value.shape[3]
        divides = divides and all(kwargs.get(name) is None for name in ("position_bias", "softcap", "cache"))
        mask = attention_mask
        if not divides or mask is None or mask.dtype != query.dtype or mask.shape[2:] != (n, behind + n):
            return whole(module, query, key, value, attention_mask, **kwargs)
        scale = kwargs.get("scaling")
        groups = getattr(module, "num_key_value_groups", 1)
        key, value = repeat_kv(key, groups), repeat_kv(value, groups)
        over_memory, over_row = mask.split([behind, n], dim=3)
        output, lse = flash(query, key[:, :, :behind], value[:, :, :behind], attn_mask=over_memory, scale=scale)
        key, value = key[:, :, behind:], value[:, :, behind:]
        for rows, seen in parts():
            own_key, own_value = key.index_select(2, seen), value.index_select(2, seen)
            own_mask = over_row[:, :, rows].index_select(3, seen)
            own, own_lse = flash(query[:, :, rows], own_key, own_value, attn_mask=own_mask, scale=scale)
            # Softmax over two sets of keys: each set's own, weighted by its share of the exponentials.
            output[:, :, rows].lerp_(own, torch.sigmoid(own_lse - lse[:, :, rows])[..., None])
        return output.transpose(1, 2).contiguous(), None

    ALL_ATTENTION_FUNCTIONS["sdpa"] = attention
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]
        if ALL_ATTENTION_FUNCTIONS["sdpa"] is not whole:  # someone else's stood before the library's own
            ALL_ATTENTION_FUNCTIONS["sdpa"] = whole
