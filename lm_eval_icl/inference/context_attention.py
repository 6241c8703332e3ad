"""Attention of a context of many demonstrations, or of several contexts side by side, for some tokens (rows of the
mask) at a time.

A layout's mask is as large as the square of its tokens, and is never made for a long row. For some tokens at a time,
the layout says which keys all of them see, for which no mask is needed, and which keys only some of them see, for which
the mask is computed by the layout's rule. What no token of them sees is not read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import repeat_kv

from lm_eval_icl.inference.packed_attention import FLASH, additive, has_kernel, join
from lm_eval_icl.layouts import Layout, side_by_side

# How many tokens are taken at a time. A smaller number reads fewer hidden keys; keys that do not lie side by side are
# copied for every so many tokens.
ROWS = 256


class RowsAtATime:
    """The attention of a forward pass over layouts side by side (`packed_attention.attention_by`).

    Attributes:
        layout: all of them as one.
        layers: how many layers' attention was computed. If it is not that of all layers, the pass is wrong: in the
            others, no token was hidden.

    Args:
        layouts: at least one. Entries of memories are those that the pass finds in its cache, in the same order.
    """

    def __init__(self, layouts: Sequence[Layout]) -> None:
        self.layout, self.layers = side_by_side(layouts), 0
        self.first = self.layout.entries
        self._masks: dict[int, Tensor] = {}  # of a short row, the masks that all layers use, by the first token
        self._lengths = [len(layout) - layout.entries for layout in layouts]

    @cached_property
    def parts(self) -> list[tuple[slice, list[slice], list[slice]]]:
        """The tokens that are taken at a time, with the keys that all and those that some of them see."""
        return [(some, *self.layout.keys(some)) for some in _pieces(self.first, self._lengths)]

    def mask(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """What is given to the model as the mask [1, 1, n, entries + n], and takes the memory of a single number."""
        keys = len(self.layout)
        return torch.zeros((), dtype=dtype, device=device).expand(1, 1, keys - self.first, keys)

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
            key, value: [1, key-value heads, entries + n, width].

        Returns:
            The output, [1, n, heads, width], and None in place of attention weights.
        """
        n = (len(self.layout) - self.first, len(self.layout))
        own = attention_mask is not None and attention_mask.shape[2:] == n and not any(attention_mask.stride()[2:])
        plain = all(kwargs.get(name) is None for name in ("position_bias", "cache"))
        if not (own and plain and (query.shape[2], key.shape[2]) == n):
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
            arguments = (self._of(query, rows), _take(key, seen), _take(value, seen), mask)
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
        query = self._of(query, rows)
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

    def _of(self, query: Tensor, rows: slice) -> Tensor:
        """The queries of some tokens of the layout; its entries of a memory have none."""
        return query[:, :, rows.start - self.first : rows.stop - self.first]

    def _mask(self, rows: slice, keys: Sequence[slice], like: Tensor) -> Tensor:
        """[1, 1, rows, keys]: the mask of these rows and keys, on the device of `like` and of its dtype."""
        if (found := self._masks.get(rows.start)) is None or (found.device, found.dtype) != (like.device, like.dtype):
            row, *columns = (torch.arange(some.start, some.stop, device=like.device) for some in (rows, *keys))
            found = additive(self.layout.rule(row[:, None], torch.cat(columns)), like.dtype)[None, None]
            if len(self.layout) <= 8 * ROWS:
                self._masks[rows.start] = found
        return found


def _pieces(first: int, lengths: Sequence[int]) -> list[slice]:
    """Divides adjacent rows of these lengths into slices of at most `ROWS` tokens, so that a row which fits into one is
    not in two: each would read the keys of other rows too.

    Args:
        first: the index of the first token.
    """
    found = []
    start = end = first
    for length in lengths:
        if end > start and end + length - start > ROWS:
            found.append(slice(start, end))
            start = end
        end += length
        while end - start > ROWS:
            found.append(slice(start, start + ROWS))
            start += ROWS
    return [*found, slice(start, end)] if end > start else found


def _take(entries: Tensor, slices: Sequence[slice]) -> Tensor:
    """The keys or values at these slices; a single slice is not copied."""
    found = [entries[:, :, some] for some in slices]
    return found[0] if len(found) == 1 else torch.cat(found, dim=2)
