"""Attention of a forward pass over layouts, without a mask as large as the square of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from lm_eval_icl.inference.attention import Attended, AttentionCall, additive, joined
from lm_eval_icl.prompts.layouts import Layout, SeenKeys, side_by_side

# Attention is computed for this many tokens at a time. With fewer tokens, fewer keys are hidden,
# but the kernel is called more often.
CONTEXT_TOKENS = 256


class UnderLayouts:
    """The attention of a forward pass over layouts side by side, some tokens at a time.

    Keys that all of these tokens see need no mask. For keys that only some of the tokens see, the
    layout's rule gives the mask. Keys that no token sees are left out.

    Args:
        layouts: at least one. The entries of their memories are in the cache of the pass, in the
            same order.

    Attributes:
        layout: all layouts as one layout.
        layers: the number of layers whose attention was computed. In other layers no token was
            hidden: the pass is wrong.
    """

    def __init__(self, layouts: Sequence[Layout]) -> None:
        self.layout = side_by_side(layouts)
        self.layers = 0
        # The masks of a short row by their first token, kept for all layers.
        self._masks: dict[int, Tensor] = {}
        self._lengths = [len(layout) - layout.entries for layout in layouts]

    @cached_property
    def parts(self) -> list[tuple[slice, SeenKeys]]:
        """Slices of tokens, each with the keys that its tokens see.

        A layout that fits into one slice is not divided: two slices would also have keys of other
        layouts.
        """
        slices = []
        start = end = self.layout.entries
        for length in self._lengths:
            if end > start and end + length - start > CONTEXT_TOKENS:
                slices.append(slice(start, end))
                start = end
            end += length
            while end - start > CONTEXT_TOKENS:
                slices.append(slice(start, start + CONTEXT_TOKENS))
                start += CONTEXT_TOKENS
        if end > start:
            slices.append(slice(start, end))
        return [(tokens, self.layout.keys(tokens)) for tokens in slices]

    def mask(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A mask of zeros for the model's input, whose elements are one number in memory.

        Returns:
            [1, 1, n, entries + n].
        """
        keys = len(self.layout)
        zero = torch.zeros((), dtype=dtype, device=device)
        return zero.expand(1, 1, keys - self.layout.entries, keys)

    def __call__(self, call: AttentionCall) -> Attended:
        """A layer's attention, which is whole if the call's mask does not come from `mask`.

        Args:
            call: its query is [1, heads, n, width], and its key and value are
                [1, key-value heads, entries + n, width].
        """
        mask = call.mask
        keys = len(self.layout)
        shape = (keys - self.layout.entries, keys)
        if mask is None or mask.shape[2:] != shape or any(mask.stride()[2:]):
            return call.whole()
        if (call.query.shape[2], call.key.shape[2]) != shape or call.has("position_bias", "cache"):
            return call.whole()
        self.layers += 1
        attend = self._attend_masked
        if call.query.device.type == "cpu" and call.has_kernel:
            attend = self._attend_divided
            call = call.repeated()
        first = self.layout.entries
        outputs = []
        for tokens, seen in self.parts:
            query = call.query[:, :, tokens.start - first : tokens.stop - first]
            outputs.append(attend(replace(call, query=query), tokens, seen))
        return torch.cat(outputs, dim=1), None

    def _attend_divided(self, call: AttentionCall, tokens: slice, seen: SeenKeys) -> Tensor:
        """Attention to the keys that all tokens see, joined with attention to the others."""
        partials = []
        if seen.by_all:
            part = _take(call, seen.by_all)
            partials.append(call.attend(part.query, part.key, part.value))
        if seen.by_some:
            part = _take(call, seen.by_some)
            mask = self._mask(tokens, seen.by_some, part.query)
            partials.append(call.attend(part.query, part.key, part.value, mask))
        return joined(partials).output.transpose(1, 2)

    def _attend_masked(self, call: AttentionCall, tokens: slice, seen: SeenKeys) -> Tensor:
        """Attention to all keys that some token sees, by transformers' function."""
        keys = [*seen.by_all, *seen.by_some]
        mask = self._mask(tokens, keys, call.query) if seen.by_some else None
        options = {**call.options, "is_causal": False}
        return replace(_take(call, keys), mask=mask, options=options).whole()[0]

    def _mask(self, tokens: slice, keys: Sequence[slice], like: Tensor) -> Tensor:
        """The mask of these tokens and keys, with the device and the dtype of `like`.

        Returns:
            [1, 1, tokens, keys].
        """
        mask = self._masks.get(tokens.start)
        if mask is None or mask.device != like.device or mask.dtype != like.dtype:
            indices = torch.arange(len(self.layout), device=like.device)
            columns = torch.cat([indices[part] for part in keys])
            sees = self.layout.rule(indices[tokens, None], columns)
            mask = additive(sees, like.dtype)[None, None]
            if len(self.layout) <= 8 * CONTEXT_TOKENS:
                self._masks[tokens.start] = mask
        return mask


def _take(call: AttentionCall, slices: Sequence[slice]) -> AttentionCall:
    """The call with the keys and values in some slices. A single slice is not copied."""

    def take(entries: Tensor) -> Tensor:
        parts = [entries[:, :, part] for part in slices]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)

    return replace(call, key=take(call.key), value=take(call.value))
