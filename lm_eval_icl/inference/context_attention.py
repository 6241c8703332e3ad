"""Attention of a context of many demonstrations, or of several contexts side by side, for some tokens (rows of the
mask) at a time.

A layout's mask is as large as the square of its tokens, and is never made for a long row. For some tokens at a time,
the layout says which keys all of them see, for which no mask is needed, and which keys only some of them see, for which
the mask is computed by the layout's rule. What no token of them sees is not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from lm_eval_icl.inference.attention import Attended, AttentionCall, additive, join
from lm_eval_icl.prompts.layouts import Layout, side_by_side

# How many tokens are taken at a time. A smaller number reads fewer hidden keys; keys that do not lie side by side are
# copied for every so many tokens.
ROWS = 256


class RowsAtATime:
    """The attention of a forward pass over layouts side by side (`attention.attention_by`).

    Attributes:
        layout: all of them as one.
        layers: how many layers' attention was computed. If it is not that of all layers, the pass is wrong: in the
            others, no token was hidden.

    Args:
        layouts: at least one. Entries of memories are those that the pass finds in its cache, in the same order.
    """

    def __init__(self, layouts: Sequence[Layout]) -> None:
        self.layout, self.layers = side_by_side(layouts), 0
        self._masks: dict[int, Tensor] = {}  # those of a short row, which all layers use, by the first token
        self._lengths = [len(layout) - layout.entries for layout in layouts]

    @cached_property
    def parts(self) -> list[tuple[slice, list[slice], list[slice]]]:
        """The tokens that are taken at a time, with the keys that all and those that some of them see."""
        return [(rows, *self.layout.keys(rows)) for rows in _pieces(self.layout.entries, self._lengths)]

    def mask(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The mask for the model's input, [1, 1, n, entries + n], which takes the memory of a single number."""
        keys = len(self.layout)
        return torch.zeros((), dtype=dtype, device=device).expand(1, 1, keys - self.layout.entries, keys)

    def __call__(self, call: AttentionCall) -> Attended:
        """A layer's attention, computed as a whole if the mask is not that of this object.

        Args:
            call: `query` is [1, heads, n, width], `key` and `value` are [1, key-value heads, entries + n, width].
        """
        shape = (len(self.layout) - self.layout.entries, len(self.layout))
        ours = call.mask is not None and call.mask.shape[2:] == shape and not any(call.mask.stride()[2:])
        ours = ours and (call.query.shape[2], call.key.shape[2]) == shape
        if not ours or call.has("position_bias", "cache"):
            return call.whole()
        self.layers += 1
        if call.has_kernel:
            call = call.repeated()
            outputs = [self._joined(call, *part) for part in self.parts]
            return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None
        outputs = []
        for rows, shared, others in self.parts:
            seen = [*shared, *others]
            part = replace(
                call,
                query=self._of(call.query, rows),
                key=_take(call.key, seen),
                value=_take(call.value, seen),
                mask=self._mask(rows, seen, call.query) if others else None,
                options={**call.options, "is_causal": False},
            )
            outputs.append(part.whole()[0])
        return torch.cat(outputs, dim=1), None

    def _joined(self, call: AttentionCall, rows: slice, shared: Sequence[slice], others: Sequence[slice]) -> Tensor:
        """The attention of some rows to the keys that all of them see, without a mask, and to the others, joined."""
        query = self._of(call.query, rows)
        if shared:
            output, lse = call.attend(query, _take(call.key, shared), _take(call.value, shared))
        if others:
            mask = self._mask(rows, others, query)
            own, own_lse = call.attend(query, _take(call.key, others), _take(call.value, others), mask)
            if not shared:
                return own
            join(output, lse, own, own_lse)
        return output

    def _of(self, query: Tensor, rows: slice) -> Tensor:
        """The queries of some tokens of the layout. (The layout's entries of a memory have no queries.)"""
        return query[:, :, rows.start - self.layout.entries : rows.stop - self.layout.entries]

    def _mask(self, rows: slice, keys: Sequence[slice], like: Tensor) -> Tensor:
        """[1, 1, rows, keys]: the mask of these rows and keys, on the device of `like` and of its dtype."""
        mask = self._masks.get(rows.start)
        if mask is None or (mask.device, mask.dtype) != (like.device, like.dtype):
            row, *columns = (torch.arange(part.start, part.stop, device=like.device) for part in (rows, *keys))
            mask = additive(self.layout.rule(row[:, None], torch.cat(columns)), like.dtype)[None, None]
            if len(self.layout) <= 8 * ROWS:
                self._masks[rows.start] = mask
        return mask


def _pieces(first: int, lengths: Sequence[int]) -> list[slice]:
    """Divide adjacent rows of these lengths into slices of at most `ROWS` tokens, so that a row which fits into one is
    not in two: each would read the keys of other rows too.

    Args:
        first: the index of the first token.
    """
    pieces = []
    start = end = first
    for length in lengths:
        if end > start and end + length - start > ROWS:
            pieces.append(slice(start, end))
            start = end
        end += length
        while end - start > ROWS:
            pieces.append(slice(start, start + ROWS))
            start += ROWS
    return [*pieces, slice(start, end)] if end > start else pieces


def _take(entries: Tensor, slices: Sequence[slice]) -> Tensor:
    """The keys or values at these slices; a single slice is not copied."""
    parts = [entries[:, :, part] for part in slices]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
