"""Attention of a packed row on a CPU, computed without most of the keys that the mask hides.

Attention to the memory is computed for all tokens at once, and attention to the row itself for a few tokens at a time,
with only the keys that one of them sees. The two are joined by their log-sum-exps.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lm_eval_icl.inference import attention
from lm_eval_icl.inference.attention import Attended, AttentionCall, Reading, attention_by, join, read_parts
from lm_eval_icl.inference.devices import to_device

# How many tokens of the row are taken at a time: about a query's length. A smaller number reads fewer hidden keys, but
# needs more calls of the kernel.
ROWS = 64


def in_parts(
    sees: Tensor, groups: Sequence[tuple[slice, slice]], readings: Sequence[Sequence[tuple[slice, Reading]]] = ()
) -> AbstractContextManager[None]:
    """Inside this context, a model with `attn_implementation="sdpa"` skips keys of a packed row that the mask hides.
    These are most of the row's keys: a token sees only its own query, and the row has many queries.

    Attention is not divided where this gains nothing or is not known to be possible: few tokens, a device other than
    the CPU, half precision, or a last block that runs for some of the tokens only.

    Args:
        sees: [n, n] bool: which tokens of the row each token attends to, itself included.
        groups: slices of the row, one behind the other, and for each the slice of the entries in front of the row to
            which its tokens attend: their memory.
        readings: for each group the parts of its memory, and how they are read; empty if all are read as usual.
            Attention is then always divided.
    """
    divides = attention.FLASH is not None or readings
    return attention_by(_InParts(sees, groups, readings)) if divides else nullcontext()


@dataclass
class _InParts:
    """The attention of a forward pass over a packed row; the attributes are the arguments of `in_parts`."""

    sees: Tensor
    groups: Sequence[tuple[slice, slice]]
    readings: Sequence[Sequence[tuple[slice, Reading]]]

    @cached_property
    def parts(self) -> list[tuple[slice, Tensor]]:
        """Slices of `ROWS` tokens, each with the indices of all tokens that one of them sees. All layers share them."""
        slices = [slice(first, first + ROWS) for first in range(0, len(self.sees), ROWS)]
        # As numbers, which torch compares three times as fast as it joins booleans.
        return [(rows, self.sees.view(torch.uint8)[rows].amax(dim=0).nonzero()[:, 0]) for rows in slices]

    def __call__(self, call: AttentionCall) -> Attended:
        """A layer's attention, in parts if it can be divided.

        Args:
            call: `query` is [1, heads, n, width], `key` and `value` are [1, key-value heads, memory + n, width], and
                `mask` is [1, 1, n, memory + n], to be added to the scores.
        """
        n, query, mask = len(self.sees), call.query, call.mask
        memory = call.key.shape[2] - n
        divides = memory >= 0 and (query.shape[0], query.shape[2]) == (1, n)
        divides = divides and (bool(self.readings) or (n > ROWS and call.has_kernel))
        divides = divides and (not memory or all(entries.start < entries.stop for _, entries in self.groups))
        divides = divides and mask is not None and mask.dtype == query.dtype and mask.shape[2:] == (n, memory + n)
        if self.readings:
            call.check_divisible(divides)
        if not divides or mask is None:
            return call.whole()
        repeated = call.repeated()
        key, value = repeated.key, repeated.value
        over_memory = []
        if self.readings:
            over_memory = [
                read_parts(call, query[:, :, rows], [(key[:, :, part], value[:, :, part], how) for part, how in parts])
                for (rows, _), parts in zip(self.groups, self.readings, strict=True)
            ]
        elif memory:
            over_memory = [
                # The model may have added numbers of its own to the mask, which hides nothing of a group's memory.
                call.attend(query[:, :, rows], key[:, :, entries], value[:, :, entries], mask[:, :, rows, entries])
                for rows, entries in self.groups
            ]
        output, lse = torch.empty_like(query), torch.empty(0)
        if over_memory:
            output, lse = (torch.cat(part, 2) if len(part) > 1 else part[0] for part in zip(*over_memory, strict=True))
        over_row, key, value = mask[..., memory:], key[:, :, memory:], value[:, :, memory:]
        for rows, seen in self.parts:
            seen = to_device(seen, key.device)
            own_mask = over_row[:, :, rows].index_select(3, seen)
            own = call.attend(query[:, :, rows], key.index_select(2, seen), value.index_select(2, seen), own_mask)
            if memory:
                join(output[:, :, rows], lse[:, :, rows], *own)
            else:
                output[:, :, rows] = own[0]
        return output.transpose(1, 2).to(query.dtype).contiguous(), None
