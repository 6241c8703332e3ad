"""A model's attention, computed by functions of ours while the model runs.

transformers keeps its attention functions by name. Its function for "sdpa" is replaced once in a process, by one that
calls it except inside `attention_by` and for keys that are marked (`behind`). Three kinds of passes need it:

- `UnderLayouts`: a long context, or several side by side, without a mask as large as the square of the tokens;
- `OfPackedRow`: a packed row on a CPU, without most of the keys that the mask hides;
- `behind`: the rows of a batch behind a memory that they share, on a CPU, without a copy of it for each row.

Attention to some keys and attention to other keys are joined by their log-sum-exps, as FlashAttention joins blocks of
keys (Dao et al., 2022, section 3.1). So a memory can also be read in parts, each in a way of its own (`Reading`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from lm_eval_icl.inference.devices import to_device
from lm_eval_icl.prompts.layouts import Layout, side_by_side

# torch's kernel that also returns the log-sum-exps. It is undocumented; if it is missing, attention is not divided.
FLASH: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
# How many tokens of a context, and of a packed row, are taken at a time. A smaller number reads fewer hidden keys, but
# needs more calls of the kernel. A query has about as many tokens as are taken of a row.
CONTEXT_TOKENS, ROW_TOKENS = 256, 64

# A layer's output, [rows, n, heads, width], and None in place of attention weights.
Attended = tuple[Tensor, Tensor | None]


@dataclass(frozen=True)
class Reading:
    """How attention reads a part of a memory.

    With the scores s of a token for the part's keys, its output over the part is softmax(s / temperature) times the
    values, and the part's share among all parts and the token's own keys is that of the log-sum-exp
    factor * LSE(s / temperature) + log_weight. The defaults are ordinary attention.
    """

    temperature: float = 1.0  # above 0
    factor: float = 1.0  # above 0
    log_weight: float = 0.0  # natural logarithm


# Keys and values, [rows, heads, entries, width], and how they are read.
Part = tuple[Tensor, Tensor, Reading]


@dataclass(frozen=True)
class AttentionCall:
    """A layer's call of its attention function, which takes the other attributes as its arguments."""

    function: Callable[..., Attended]
    module: nn.Module  # the layer's attention module
    query: Tensor  # [rows, heads, n, width]
    key: Tensor  # [rows, key-value heads, tokens, width], as the value
    value: Tensor
    mask: Tensor | None  # [rows or 1, 1, n, tokens], boolean or to be added to the scores
    options: Mapping[str, Any]  # the further arguments, by name

    def whole(self) -> Attended:
        """Compute it by transformers' function."""
        return self.function(self.module, self.query, self.key, self.value, self.mask, **self.options)

    def has(self, *options: str) -> bool:
        """Whether any of these options is set."""
        return any(self.options.get(name) is not None for name in options)

    @property
    def has_kernel(self) -> bool:
        """Whether `FLASH`, which gives the log-sum-exps that `joined` needs, computes attention as the model does."""
        fits = FLASH is not None and self.query.device.type == "cpu"
        fits = fits and self.query.dtype in (torch.float32, torch.float64)
        # In mixed precision, keys are rotated in float32 and values are not.
        fits = fits and self.query.dtype == self.key.dtype == self.value.dtype
        return fits and not self.has("position_bias", "softcap", "cache") and self.query.shape[3] == self.value.shape[3]

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Attention to some keys, and its log-sum-exps. Without the kernel, the scores of some tokens at a time are
        computed, in float32 at least.

        Args:
            query: [rows, heads, n, width].
            key, value: [rows, heads, tokens, width].
            mask: to be added to the scores.
            temperature: what the scores are divided by.

        Returns:
            [rows, heads, n, width] and [rows, heads, n].
        """
        scaling = self.options.get("scaling")
        scale = (query.shape[-1] ** -0.5 if scaling is None else scaling) / temperature
        if self.has_kernel:
            output, lse = FLASH(query, key, value, attn_mask=mask, scale=scaling if temperature == 1 else scale)
            return output, lse
        wide = torch.promote_types(query.dtype, torch.float32)
        at_once = max(1, 2**25 // (query.shape[0] * query.shape[1] * key.shape[2]))
        pieces = query.split(at_once, dim=2)
        masks: Sequence[Tensor | None] = [None] * len(pieces) if mask is None else mask.split(at_once, dim=2)
        outputs, lses = [], []
        for piece, hidden in zip(pieces, masks, strict=True):
            scores = (piece.to(wide) * scale) @ key.to(wide).mT
            scores = scores if hidden is None else scores + hidden.to(wide)
            lses.append(scores.logsumexp(-1))
            outputs.append(scores.sub_(lses[-1][..., None]).exp_() @ value.to(wide))
        return torch.cat(outputs, dim=2), torch.cat(lses, dim=2)

    def read_parts(self, query: Tensor, parts: Iterable[Part]) -> tuple[Tensor, Tensor]:
        """Attention to the parts of a memory, at least one of which has entries, each read in its own way; the rest is
        as for `attend`."""
        over_parts = []
        for key, value, reading in parts:
            if key.shape[2]:
                output, lse = self.attend(query, key, value, temperature=reading.temperature)
                over_parts.append((output, reading.factor * lse + reading.log_weight))
        return joined(over_parts)

    def check_divisible(self, divides: bool) -> None:
        """Raise a `ValueError` if a memory cannot be read in parts: shapes and mask do not allow it (`divides`), or the
        model does more with the scores than to add a mask."""
        if self.has("position_bias", "softcap", "cache", "s_aux"):
            raise ValueError("its attention has sinks, caps its scores or adds a bias")
        if not divides:
            raise ValueError("its attention cannot be computed in parts")

    def repeated(self) -> AttentionCall:
        """The same call with keys and values repeated, so that every head has its own."""
        groups = getattr(self.module, "num_key_value_groups", 1)
        return replace(self, key=repeat_kv(self.key, groups), value=repeat_kv(self.value, groups))


def joined(over_each: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Attention to several sets of keys, and its log-sum-exps, from those of attention to each set: the mean of the
    outputs, weighted by their shares of the sum of exponentials.

    Args:
        over_each: at least one, [..., n, width] and [..., n]; the first output is changed in place.
    """
    (output, lse), *others = over_each
    for other, other_lse in others:
        output.lerp_(other, torch.sigmoid(other_lse - lse)[..., None])
        lse = torch.logaddexp(lse, other_lse)
    return output, lse


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


# The function that computes attention in the forward pass of this thread; None for transformers' own function.
_attending: ContextVar[Callable[[AttentionCall], Attended] | None] = ContextVar("attending", default=None)


@contextmanager
def attention_by(function: Callable[[AttentionCall], Attended]) -> Iterator[None]:
    """Inside this context, `function` computes the attention of models with `attn_implementation="sdpa"`."""
    install()
    token = _attending.set(function)
    try:
        yield
    finally:
        _attending.reset(token)


def install() -> bool:
    """Replace transformers' function for sdpa, once in a process.

    Keys with an attribute `attention` bring the function that computes attention to them. Other keys are attended to by
    that of `attention_by`; without one, the replacement only calls the original function. Returns whether no function
    of somebody else's stands in front of it.
    """
    original = AttentionInterface()["sdpa"]  # that of the class; one set on an instance stays in front of it
    if not getattr(original, "replaced", False):

        def attention(
            module: Any, query: Any, key: Any, value: Any, attention_mask: Any = None, *more: Any, **options: Any
        ) -> Attended:
            function = getattr(key, "attention", None) or _attending.get()
            if function is None or more:  # models of transformers give all further arguments by name
                return original(module, query, key, value, attention_mask, *more, **options)
            return function(AttentionCall(original, module, query, key, value, attention_mask, options))

        attention.replaced = True  # type: ignore[attr-defined]
        AttentionInterface.register("sdpa", attention)
    return bool(getattr(ALL_ATTENTION_FUNCTIONS["sdpa"], "replaced", False))


class UnderLayouts:
    """The attention of a forward pass over layouts side by side, `CONTEXT_TOKENS` tokens at a time.

    For these tokens, the layout says which keys all of them see, for which no mask is needed, and which keys only some
    of them see, for which the layout's rule gives the mask. What no token of them sees is not read.

    Args:
        layouts: at least one. Entries of memories are those that the pass finds in its cache, in the same order.

    Attributes:
        layout: all of them as one.
        layers: how many layers' attention was computed. In the others, no token was hidden, and the pass is wrong.
    """

    def __init__(self, layouts: Sequence[Layout]) -> None:
        self.layout, self.layers = side_by_side(layouts), 0
        self._masks: dict[int, Tensor] = {}  # those of a short row, which all layers use, by the first token
        self._lengths = [len(layout) - layout.entries for layout in layouts]

    @cached_property
    def parts(self) -> list[tuple[slice, list[slice], list[slice]]]:
        """The tokens that are taken at a time, with the keys that all and those that some of them see. (A layout that
        fits into one slice is not in two, which would read the keys of other layouts too.)"""
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
        slices += [slice(start, end)] if end > start else []
        return [(tokens, *self.layout.keys(tokens)) for tokens in slices]

    def mask(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The mask for the model's input, [1, 1, n, entries + n], which takes the memory of a single number."""
        keys = len(self.layout)
        return torch.zeros((), dtype=dtype, device=device).expand(1, 1, keys - self.layout.entries, keys)

    def __call__(self, call: AttentionCall) -> Attended:
        """A layer's attention, computed as a whole if the mask is not that of this object. `call.query` is
        [1, heads, n, width], `key` and `value` are [1, key-value heads, entries + n, width]."""
        first, keys = self.layout.entries, len(self.layout)
        mask, shape = call.mask, (keys - first, keys)
        ours = mask is not None and mask.shape[2:] == shape and not any(mask.stride()[2:])
        ours = ours and (call.query.shape[2], call.key.shape[2]) == shape
        if not ours or call.has("position_bias", "cache"):
            return call.whole()
        self.layers += 1
        divides = call.has_kernel
        call = call.repeated() if divides else call
        outputs = []
        for tokens, by_all, by_some in self.parts:
            query = call.query[:, :, tokens.start - first : tokens.stop - first]
            if not divides:
                keys_of = [*by_all, *by_some]
                mask, options = self._mask(tokens, keys_of, query) if by_some else None, {"is_causal": False}
                part = replace(call, query=query, key=_take(call.key, keys_of), value=_take(call.value, keys_of))
                outputs.append(replace(part, mask=mask, options={**call.options, **options}).whole()[0])
                continue
            over_each = [
                call.attend(query, _take(call.key, seen), _take(call.value, seen), mask)
                for seen, mask in ((by_all, None), (by_some, self._mask(tokens, by_some, query) if by_some else None))
                if seen
            ]
            outputs.append(joined(over_each)[0].transpose(1, 2))
        return torch.cat(outputs, dim=1), None

    def _mask(self, tokens: slice, keys: Sequence[slice], like: Tensor) -> Tensor:
        """[1, 1, tokens, keys]: the mask of these, on the device of `like` and of its dtype."""
        mask = self._masks.get(tokens.start)
        if mask is None or (mask.device, mask.dtype) != (like.device, like.dtype):
            row, *columns = (torch.arange(part.start, part.stop, device=like.device) for part in (tokens, *keys))
            mask = additive(self.layout.rule(row[:, None], torch.cat(columns)), like.dtype)[None, None]
            if len(self.layout) <= 8 * CONTEXT_TOKENS:
                self._masks[tokens.start] = mask
        return mask


def _take(entries: Tensor, slices: Sequence[slice]) -> Tensor:
    """The keys or values at these slices; a single slice is not copied."""
    parts = [entries[:, :, part] for part in slices]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


@dataclass
class OfPackedRow:
    """The attention of a forward pass over a packed row: to the memory for all tokens of a group at once, and to the
    row itself for `ROW_TOKENS` tokens at a time, with only the keys that one of them sees. (Most keys are hidden: a
    token sees only its own query, and the row has many.)

    It is not divided where this gains nothing or is not known to be possible: few tokens, a device other than the CPU,
    or half precision.
    """

    sees: Tensor  # [n, n] bool: which tokens of the row each token attends to, itself included
    # Slices of the row, one behind the other, each with that of the entries in front of the row that its tokens see.
    groups: Sequence[tuple[slice, slice]]
    # For each group the parts of its memory, and how they are read; attention is then always divided.
    readings: Sequence[Sequence[tuple[slice, Reading]]] = ()

    @cached_property
    def parts(self) -> list[tuple[slice, Tensor]]:
        """Slices of `ROW_TOKENS` tokens, each with the indices of all tokens that one of them sees."""
        slices = [slice(first, first + ROW_TOKENS) for first in range(0, len(self.sees), ROW_TOKENS)]
        # As numbers, which torch compares three times as fast as it joins booleans.
        return [(tokens, self.sees.view(torch.uint8)[tokens].amax(dim=0).nonzero()[:, 0]) for tokens in slices]

    def __call__(self, call: AttentionCall) -> Attended:
        """A layer's attention, in parts if it can be divided. `call.query` is [1, heads, n, width], `key` and `value`
        are [1, key-value heads, memory + n, width], and `mask` is [1, 1, n, memory + n], to be added to the scores."""
        n, query, mask = len(self.sees), call.query, call.mask
        memory = call.key.shape[2] - n
        divides = memory >= 0 and (query.shape[0], query.shape[2]) == (1, n)
        divides = divides and (bool(self.readings) or (n > ROW_TOKENS and call.has_kernel))
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
                call.read_parts(query[:, :, tokens], [(key[:, :, part], value[:, :, part], how) for part, how in parts])
                for (tokens, _), parts in zip(self.groups, self.readings, strict=True)
            ]
        elif memory:
            over_memory = [
                # The model may have added numbers of its own to the mask, which hides nothing of a group's memory.
                call.attend(query[:, :, tokens], key[:, :, entries], value[:, :, entries], mask[:, :, tokens, entries])
                for tokens, entries in self.groups
            ]
        output, lse = torch.empty_like(query), torch.empty(0)
        if over_memory:
            output, lse = (torch.cat(part, 2) if len(part) > 1 else part[0] for part in zip(*over_memory, strict=True))
        mask, key, value = mask[..., memory:], key[:, :, memory:], value[:, :, memory:]
        for tokens, seen in self.parts:
            seen = to_device(seen, key.device)
            own_mask = mask[:, :, tokens].index_select(3, seen)
            own = call.attend(query[:, :, tokens], key.index_select(2, seen), value.index_select(2, seen), own_mask)
            behind = [(output[:, :, tokens], lse[:, :, tokens])] if memory else []
            output[:, :, tokens] = joined([*behind, own])[0]
        return output.transpose(1, 2).to(query.dtype).contiguous(), None


def behind(memory: tuple[Tensor, Tensor], keys: Tensor, parts: Sequence[Part] = ()) -> Tensor:
    """The keys of a batch's rows, marked as being behind a memory that all rows share, which attention then reads once
    for all of them. The model has to pass this very tensor to its attention function: the mark is not on its copies.

    Args:
        memory: keys and values, [1, key-value heads, entries, width].
        keys: [rows, key-value heads, tokens, width].
        parts: further entries, behind those of `memory`.
    """
    marked: Any = keys[:]  # a tensor object of its own, of the same numbers
    marked.attention = partial(on_shared_memory, memory, parts=parts)
    return marked


def behind_copies(memory: tuple[Tensor, Tensor], keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """The keys and values of a batch's rows behind a copy of the memory for each."""
    own = zip(memory, (keys, values), strict=True)
    keys, values = (torch.cat([shared.expand(len(keys), -1, -1, -1), part], dim=-2) for shared, part in own)
    return keys, values


def on_shared_memory(memory: tuple[Tensor, Tensor], call: AttentionCall, parts: Sequence[Part] = ()) -> Attended:
    """A layer's attention of several rows to a memory (`behind`), for all rows at once, and to each row's own tokens.
    If it cannot be divided, it is computed as a whole, on a copy of the memory for each row.

    Args:
        call: `key` and `value` are those of each row's own tokens, [rows, key-value heads, tokens, width]; `mask` is
            [rows or 1, 1, n, entries + tokens] and hides nothing of the memory, or None if a single token of each row
            attends to everything.

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
        mask = additive(mask, call.query.dtype) if mask.dtype == torch.bool else mask
        # One after another, the queries of the heads that share a key are the rows of one matrix.
        mask = mask[:, :, None].expand(-1, -1, groups, -1, -1).flatten(2, 3)
    query = call.query.unflatten(1, (key_heads, groups))
    # All rows' queries are the rows of one matrix.
    of_all = query.transpose(0, 1).reshape(1, key_heads, -1, width)
    over_memory = call.read_parts(of_all, [(*memory, Reading()), *parts])
    own, own_lse = call.attend(query.flatten(2, 3), call.key, call.value, mask)
    output, lse = (part.view(key_heads, rows, groups, n, -1).transpose(0, 1) for part in over_memory)
    own, own_lse = (part.view(rows, key_heads, groups, n, -1) for part in (own, own_lse))
    output, _ = joined([(output, lse[..., 0]), (own, own_lse[..., 0])])
    return output.flatten(1, 2).transpose(1, 2).to(call.query.dtype).contiguous(), None
