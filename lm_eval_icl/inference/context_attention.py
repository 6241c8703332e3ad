"""Attention of a context of many demonstrations, for some tokens (rows of the mask) at a time.

A layout's mask is as large as the square of its tokens, and is never made for a long row. For some tokens at a time,
the layout says which keys all of them see, for which no mask is needed, and which keys only some of them see, for which
the mask is computed by the layout's rule. What no token of them sees is not read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import repeat_kv

from lm_eval_icl.inference.packed_attention import FLASH, additive, has_kernel, join
from lm_eval_icl.layouts import Layout

# How many tokens are taken at a time. A smaller number reads fewer hidden keys; keys that do not lie side by side are
# copied for every so many tokens.
ROWS = 256


class RowsAtATime:
    """The attention of a forward pass over a layout (`packed_attention.attention_by`).

    Attributes:
        layers: how many layers' attention was computed. If it is not that of all layers, the pass is wrong: in the
            others, no token was hidden.

    Args:
        layout: the layout, without entries of a memory.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout, self.layers = layout, 0
        rows = [slice(first, min(first + ROWS, len(layout))) for first in range(0, len(layout), ROWS)]
        self.parts = [(some, *layout.keys(some)) for some in rows]

    def mask(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """What is given to the model as the mask [1, 1, n, n], and takes the memory of a single number."""
        return torch.zeros((), dtype=dtype, device=device).expand(1, 1, len(self.layout), len(self.layout))

    def __call__(
        self,
        whole: Callable[..., tuple[Tensor, Tensor | None]],
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """A layer's attention, computed by `whole` at once if the mask is not that of this object.

        Args:
            query: [1, heads, n, width].
            key, value: [1, key-value heads, n, width].

        Returns:
            The output, [1, n, heads, width], and None in place of attention weights.
        """
        n = len(self.layout)
        own = attention_mask is not None and attention_mask.shape[2:] == (n, n) and not any(attention_mask.stride()[2:])
        plain = all(kwargs.get(name) is None for name in ("position_bias", "cache"))
        if not (own and plain and query.shape[2] == key.shape[2] == n):
            return whole(module, query, key, value, attention_mask, **kwargs)
        self.layers += 1
        if has_kernel(query, value, kwargs):
            groups = getattr(module, "num_key_value_groups", 1)
            key, value = repeat_kv(key, groups), repeat_kv(value, groups)
            found = [self._joined(*part, query, key, value, kwargs.get("scaling")) for part in self.parts]
            return torch.cat(found, dim=2).transpose(1, 2).contiguous(), None
        found = []
        for rows, shared, others in self.parts:
            seen = [*shared, *others]
            mask = self._mask(rows, seen, query) if others else None
            arguments = (query[:, :, rows], _take(key, seen), _take(value, seen), mask)
            found.append(whole(module, *arguments, **kwargs | {"is_causal": False})[0])
        return torch.cat(found, dim=1), None

    def _joined(
        self,
        rows: slice,
        shared: Sequence[slice],
        others: Sequence[slice],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
    ) -> Tensor:
        """The attention of some rows to the keys that all of them see, without a mask, and to the others, joined."""
        query = query[:, :, rows]
        if shared:
            output, lse = FLASH(query, _take(key, shared), _take(value, shared), scale=scale)
        if others:
            mask = self._mask(rows, others, query)
            own, own_lse = FLASH(query, _take(key, others), _take(value, others), attn_mask=mask, scale=scale)
            if shared:
                join(output, lse, own, own_lse)
            else:
                output = own
        found: Tensor = output
        return found

    def _mask(self, rows: slice, keys: Sequence[slice], like: Tensor) -> Tensor:
        """[1, 1, rows, keys]: the mask of these rows and keys, on the device of `like` and of its dtype."""
        row, *columns = (torch.arange(some.start, some.stop, device=like.device) for some in (rows, *keys))
        return additive(self.layout.rule(row[:, None], torch.cat(columns)), like.dtype)[None, None]


def _take(entries: Tensor, slices: Sequence[slice]) -> Tensor:
    """The keys or values at these slices; a single slice is not copied."""
    found = [entries[:, :, some] for some in slices]
    return found[0] if len(found) == 1 else torch.cat(found, dim=2)
