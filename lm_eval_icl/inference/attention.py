"""The attention of a model, computed by functions of this package while the model runs.

transformers keeps its attention functions by name. Its function for "sdpa" is replaced once in a process. The new
function calls the old one, except inside `attention_by` and for marked keys. Three kinds of passes need it:

- `UnderLayouts`: a long context, or several side by side, without a mask as large as the square of the tokens;
- `OfPackedRow`: a packed row on a CPU, without most of the keys that the mask hides;
- `keys_on_memory`: a batch whose rows share a memory, without a copy of the memory for each row.

Attention to some keys and attention to other keys are joined by their log-sum-exps, as FlashAttention joins blocks of
keys (Dao et al., 2022, section 3.1). A memory can therefore be divided into parts with different `Reading`s.
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
from torch.nn.functional import pad
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from lm_eval_icl.inference.devices import to_device
from lm_eval_icl.prompts.layouts import Layout, side_by_side

# For a type of device, torch's kernel that also returns the log-sum-exps, and the dtypes in which it computes. The
# kernels are undocumented. Without them, attention is not divided.
KERNELS: dict[str, tuple[str, tuple[torch.dtype, ...]]] = {
    "cpu": ("_scaled_dot_product_flash_attention_for_cpu", (torch.float32, torch.float64)),
    "cuda": (
        "_scaled_dot_product_efficient_attention",
        (torch.float32, torch.float16, torch.bfloat16),
    ),
}
# For how many tokens of a context, and of a packed row, attention is computed at a time. With a smaller number, fewer
# keys are hidden, but the kernel is called more often. `ROW_TOKENS` is about the length of a query.
CONTEXT_TOKENS, ROW_TOKENS = 256, 64

# A layer's output, [rows, n, heads, width], and None in place of attention weights.
Attended = tuple[Tensor, Tensor | None]


@dataclass(frozen=True)
class Reading:
    """How attention reads a part of a memory.

    Let s be the scores of a token for the part's keys. The token's output over the part is softmax(s / temperature)
    times the values. The part's weight, relative to the other parts and to the keys of the token's own row, is
    exp(factor * LSE(s / temperature) + log_weight). The defaults are ordinary attention.
    """

    temperature: float = 1.0  # above 0
    factor: float = 1.0  # above 0
    log_weight: float = 0.0  # a natural logarithm


# The keys and the values of a part of a memory, both [rows, heads, entries, width], and how attention reads them.
Part = tuple[Tensor, Tensor, Reading]


@dataclass(frozen=True)
class AttentionCall:
    """A layer's call of its attention function: the function and its arguments."""

    function: Callable[..., Attended]
    module: nn.Module  # the layer's attention module
    query: Tensor  # [rows, heads, n, width]
    key: Tensor  # [rows, key-value heads, tokens, width], as the value
    value: Tensor
    mask: Tensor | None  # [rows or 1, 1, n, tokens], boolean or to be added to the scores
    options: Mapping[str, Any]  # the further arguments, by name

    def whole(self) -> Attended:
        """The attention, computed by transformers' function."""
        return self.function(
            self.module, self.query, self.key, self.value, self.mask, **self.options
        )

    def has(self, *options: str) -> bool:
        """Whether any of these options is set."""
        return any(self.options.get(name) is not None for name in options)

    @property
    def has_kernel(self) -> bool:
        """Whether a kernel that gives the log-sum-exps, which `joined` needs, computes attention as the model does."""
        kernel, dtypes = KERNELS.get(self.query.device.type, ("", ()))
        fits = self.query.dtype in dtypes and hasattr(torch.ops.aten, kernel)
        bytes_of_a_key = self.query.shape[3] * self.query.element_size()
        fits = fits and (
            self.query.device.type == "cpu" or bytes_of_a_key % 16 == 0
        )  # a GPU's kernel reads 16 bytes
        # In mixed precision, keys are rotated in float32 and values are not.
        fits = fits and self.query.dtype == self.key.dtype == self.value.dtype
        return (
            fits
            and not self.has("position_bias", "softcap", "cache")
            and self.query.shape[3] == self.value.shape[3]
        )

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        temperature: float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        """Attention to some keys, and its log-sum-exps. Without the kernel, the scores are computed for some tokens at
        a time, in float32 at least.

        Args:
            query: [rows, heads, n, width].
            key, value: [rows, heads, tokens, width].
            mask: to be added to the scores.
            temperature: the scores are divided by it.

        Returns:
            The output, [rows, heads, n, width], in float32 at least, and the log-sum-exps, [rows, heads, n].
        """
        scaling = self.options.get("scaling")
        scale = (query.shape[-1] ** -0.5 if scaling is None else scaling) / temperature
        if self.has_kernel:
            kernel = getattr(torch.ops.aten, KERNELS[query.device.type][0])
            if query.device.type == "cpu":
                return kernel(
                    query, key, value, attn_mask=mask, scale=scaling if temperature == 1 else scale
                )
            if (
                mask is not None
            ):  # the kernel needs rows of the mask that begin at multiples of 16 bytes
                mask = pad(mask, (0, -mask.shape[3] % 8))[..., : mask.shape[3]].expand(
                    *query.shape[:3], -1
                )
            output, lse, *_ = kernel(query, key, value, mask, compute_log_sumexp=True, scale=scale)
            return output.to(lse.dtype), lse[
                ..., : query.shape[2]
            ]  # they are padded to a multiple of 32 tokens
        wide = torch.promote_types(query.dtype, torch.float32)
        at_once = max(1, 2**25 // (query.shape[0] * query.shape[1] * key.shape[2]))
        outputs, lses = [], []
        for first in range(0, query.shape[2], at_once):
            tokens = slice(first, first + at_once)
            scores = (query[:, :, tokens].to(wide) * scale) @ key.to(wide).mT
            scores = scores if mask is None else scores + mask[:, :, tokens].to(wide)
            lses.append(scores.logsumexp(-1))
            outputs.append(scores.sub_(lses[-1][..., None]).exp_() @ value.to(wide))
        return torch.cat(outputs, dim=2), torch.cat(lses, dim=2)

    def read_parts(self, query: Tensor, parts: Iterable[Part]) -> tuple[Tensor, Tensor]:
        """Attention to the parts of a memory, each with its `Reading`. At least one part has entries. `query` and the
        result are as for `attend`."""
        over_parts = []
        for key, value, reading in parts:
            if key.shape[2]:
                output, lse = self.attend(query, key, value, temperature=reading.temperature)
                over_parts.append((output, reading.factor * lse + reading.log_weight))
        return joined(over_parts)

    def check_divisible(self, divides: bool) -> None:
        """Raise a `ValueError` if a memory cannot be read in parts: the shapes and the mask do not allow it (`divides`
        is False), or the model changes the scores by more than a mask."""
        if self.has("position_bias", "softcap", "cache", "s_aux"):
            raise ValueError("its attention has sinks, caps its scores or adds a bias")
        if not divides:
            raise ValueError("its attention cannot be computed in parts")

    def repeated(self) -> AttentionCall:
        """The same call with keys and values repeated, so that there are as many of them as heads of the query."""
        groups = getattr(self.module, "num_key_value_groups", 1)
        return replace(self, key=repeat_kv(self.key, groups), value=repeat_kv(self.value, groups))


def joined(over_each: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Attention to several sets of keys together, and its log-sum-exps: the mean of the outputs over each set, weighted
    by the set's share of the sum of exponentials.

    Args:
        over_each: output [..., n, width] and log-sum-exps [..., n] over each of the sets, at least one. The first
            output is changed in place.
    """
    (output, lse), *others = over_each
    for other, other_lse in others:
        output.lerp_(other, torch.sigmoid(other_lse - lse)[..., None])
        lse = torch.logaddexp(lse, other_lse)
    return output, lse


def additive(sees: Tensor, dtype: torch.dtype, memory: int = 0) -> Tensor:
    """A boolean mask as numbers to add to the scores, [..., rows, memory + columns]: eager attention takes only these.

    Args:
        sees: [..., rows, columns] bool: which columns each row attends to.
        memory: the number of columns to put before these columns, for entries that all rows attend to.
    """
    mask = torch.zeros(*sees.shape[:-1], memory + sees.shape[-1], dtype=dtype, device=sees.device)
    # On a CPU, torch converts bytes to floats seven times as fast as booleans.
    mask[..., memory:].copy_(sees.view(torch.uint8)).sub_(1).mul_(torch.finfo(dtype).max)
    return mask


# The function that computes attention in the forward pass of this thread; None for the function of transformers.
_attending: ContextVar[Callable[[AttentionCall], Attended] | None] = ContextVar(
    "attending", default=None
)


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

    If the keys have an attribute `attention`, it is the function that computes attention to them. Attention to other
    keys is computed by the function that `attention_by` sets and, without it, by the original function. Returns False
    if another library has put a function of its own in front of the replacement.
    """
    original = AttentionInterface()[
        "sdpa"
    ]  # registered for the class; a function set on an instance comes before it
    if not getattr(original, "replaced", False):

        def attention(
            module: Any,
            query: Any,
            key: Any,
            value: Any,
            attention_mask: Any = None,
            *more: Any,
            **options: Any,
        ) -> Attended:
            function = getattr(key, "attention", None) or _attending.get()
            if (
                function is None or more
            ):  # models of transformers give all further arguments by name
                return original(module, query, key, value, attention_mask, *more, **options)
            return function(
                AttentionCall(original, module, query, key, value, attention_mask, options)
            )

        attention.replaced = True  # type: ignore[attr-defined]
        AttentionInterface.register("sdpa", attention)
    return bool(getattr(ALL_ATTENTION_FUNCTIONS["sdpa"], "replaced", False))


class UnderLayouts:
    """The attention of a forward pass over layouts side by side, `CONTEXT_TOKENS` tokens at a time.

    Keys that all of these tokens see need no mask. For keys that only some of the tokens see, the layout's rule gives
    the mask. Keys that no token sees are left out.

    Args:
        layouts: at least one. The entries of their memories are in the cache of the pass, in the same order.

    Attributes:
        layout: all layouts as one layout.
        layers: how many layers' attention it has computed. In other layers no token was hidden: the pass is wrong.
    """

    def __init__(self, layouts: Sequence[Layout]) -> None:
        self.layout, self.layers = side_by_side(layouts), 0
        self._masks: dict[
            int, Tensor
        ] = {}  # the masks of a short row, kept for all layers, by their first token
        self._lengths = [len(layout) - layout.entries for layout in layouts]

    @cached_property
    def parts(self) -> list[tuple[slice, list[slice], list[slice]]]:
        """Slices of tokens, each with the keys that all of its tokens see and the keys that only some of them see. (A
        layout that fits into one slice is not divided: two slices would also have keys of other layouts.)"""
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
        """A mask of zeros for the model's input, [1, 1, n, entries + n], whose elements are one number in memory."""
        keys = len(self.layout)
        return torch.zeros((), dtype=dtype, device=device).expand(
            1, 1, keys - self.layout.entries, keys
        )

    def __call__(self, call: AttentionCall) -> Attended:
        """A layer's attention, computed as a whole if the call's mask does not come from `mask`. `call.query` is
        [1, heads, n, width], `call.key` and `call.value` are [1, key-value heads, entries + n, width]."""
        first, length = self.layout.entries, len(self.layout)
        mask, shape = call.mask, (length - first, length)
        ours = mask is not None and mask.shape[2:] == shape and not any(mask.stride()[2:])
        ours = ours and (call.query.shape[2], call.key.shape[2]) == shape
        if not ours or call.has("position_bias", "cache"):
            return call.whole()
        self.layers += 1
        divides = call.query.device.type == "cpu" and call.has_kernel
        call = call.repeated() if divides else call
        outputs = []
        for tokens, by_all, by_some in self.parts:
            query = call.query[:, :, tokens.start - first : tokens.stop - first]
            if not divides:
                seen = [*by_all, *by_some]
                mask, options = (
                    self._mask(tokens, seen, query) if by_some else None,
                    {"is_causal": False},
                )
                part = replace(
                    call, query=query, key=_take(call.key, seen), value=_take(call.value, seen)
                )
                outputs.append(
                    replace(part, mask=mask, options={**call.options, **options}).whole()[0]
                )
                continue
            over_each = [
                call.attend(query, _take(call.key, keys), _take(call.value, keys), mask)
                for keys, mask in (
                    (by_all, None),
                    (by_some, self._mask(tokens, by_some, query) if by_some else None),
                )
                if keys
            ]
            outputs.append(joined(over_each)[0].transpose(1, 2))
        return torch.cat(outputs, dim=1), None

    def _mask(self, tokens: slice, keys: Sequence[slice], like: Tensor) -> Tensor:
        """The mask of these tokens and keys, [1, 1, tokens, keys], on the device of `like` and of its dtype."""
        mask = self._masks.get(tokens.start)
        if mask is None or (mask.device, mask.dtype) != (like.device, like.dtype):
            row, *columns = (
                torch.arange(part.start, part.stop, device=like.device) for part in (tokens, *keys)
            )
            mask = additive(self.layout.rule(row[:, None], torch.cat(columns)), like.dtype)[
                None, None
            ]
            if len(self.layout) <= 8 * CONTEXT_TOKENS:
                self._masks[tokens.start] = mask
        return mask


def _take(entries: Tensor, slices: Sequence[slice]) -> Tensor:
    """The keys or values in some slices; a single slice is not copied."""
    parts = [entries[:, :, part] for part in slices]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


@dataclass
class OfPackedRow:
    """The attention of a forward pass over a packed row. Attention to the memory is computed for all tokens of a group
    at once. Attention to the row is computed for `ROW_TOKENS` tokens at a time, with only the keys that one of them
    sees. (Most keys are hidden, since the row has many queries and a token sees only its own query.)

    Attention is not divided if this gains nothing or may be impossible: for few tokens, on devices other than the CPU,
    and in half precision.
    """

    sees: Tensor  # [n, n] bool: which tokens of the row each token attends to, itself included
    # Adjacent slices of the row, each with the slice of the entries before the row that its tokens see.
    groups: Sequence[tuple[slice, slice]]
    # For each group, the parts of its memory and how they are read. If given, attention is always divided.
    readings: Sequence[Sequence[tuple[slice, Reading]]] = ()

    @cached_property
    def parts(self) -> list[tuple[slice, Tensor]]:
        """Slices of `ROW_TOKENS` tokens, each with the indices of all tokens that one of its tokens sees."""
        slices = [
            slice(first, first + ROW_TOKENS) for first in range(0, len(self.sees), ROW_TOKENS)
        ]
        # The maximum of bytes takes torch a third of the time of `any` for booleans.
        return [
            (tokens, self.sees.view(torch.uint8)[tokens].amax(dim=0).nonzero()[:, 0])
            for tokens in slices
        ]

    def __call__(self, call: AttentionCall) -> Attended:
        """A layer's attention, divided if possible. `call.query` is [1, heads, n, width], `call.key` and `call.value`
        are [1, key-value heads, memory + n, width], and `call.mask` is [1, 1, n, memory + n], to add to the scores."""
        n, query, mask = len(self.sees), call.query, call.mask
        memory = call.key.shape[2] - n
        divides = memory >= 0 and (query.shape[0], query.shape[2]) == (1, n)
        gains = n > ROW_TOKENS and query.device.type == "cpu" and call.has_kernel
        divides = divides and (bool(self.readings) or gains)
        divides = divides and (
            not memory or all(entries.start < entries.stop for _, entries in self.groups)
        )
        divides = (
            divides
            and mask is not None
            and mask.dtype == query.dtype
            and mask.shape[2:] == (n, memory + n)
        )
        if self.readings:
            call.check_divisible(divides)
        if not divides or mask is None:
            return call.whole()
        repeated = call.repeated()
        key, value = repeated.key, repeated.value
        over_memory = []
        if self.readings:
            over_memory = [
                call.read_parts(
                    query[:, :, tokens],
                    [(key[:, :, part], value[:, :, part], how) for part, how in parts],
                )
                for (tokens, _), parts in zip(self.groups, self.readings, strict=True)
            ]
        elif memory:
            over_memory = [
                # The mask hides nothing of a group's memory, but the model may have added other numbers to the mask.
                call.attend(
                    query[:, :, tokens],
                    key[:, :, entries],
                    value[:, :, entries],
                    mask[:, :, tokens, entries],
                )
                for tokens, entries in self.groups
            ]
        output, lse = torch.empty_like(query), torch.empty(0)
        if over_memory:
            output, lse = (
                torch.cat(part, 2) if len(part) > 1 else part[0]
                for part in zip(*over_memory, strict=True)
            )
        mask, key, value = mask[..., memory:], key[:, :, memory:], value[:, :, memory:]
        for tokens, seen in self.parts:
            seen = to_device(seen, key.device)
            hidden = mask[:, :, tokens].index_select(3, seen)
            over_row = call.attend(
                query[:, :, tokens], key.index_select(2, seen), value.index_select(2, seen), hidden
            )
            over_both = (
                [(output[:, :, tokens], lse[:, :, tokens]), over_row] if memory else [over_row]
            )
            output[:, :, tokens] = joined(over_both)[0]
        return output.transpose(1, 2).to(query.dtype).contiguous(), None


def keys_on_memory(
    memory: tuple[Tensor, Tensor], keys: Tensor, parts: Sequence[Part] = ()
) -> Tensor:
    """The keys of a batch's rows, marked so that attention first reads a memory that all rows share, once for all rows.
    The model has to pass this very tensor object to its attention function, since copies do not have the mark.

    Args:
        memory: keys and values, both [1, key-value heads, entries, width].
        keys: [rows, key-value heads, tokens, width].
        parts: further entries, after those of `memory`.
    """
    marked: Any = keys[:]  # another tensor object with the same numbers
    marked.attention = partial(on_shared_memory, memory, parts=parts)
    return marked


def with_copies(
    memory: tuple[Tensor, Tensor], keys: Tensor, values: Tensor
) -> tuple[Tensor, Tensor]:
    """The keys and values of a batch's rows, each row preceded by a copy of the memory."""
    pairs = zip(memory, (keys, values), strict=True)
    keys, values = (
        torch.cat([shared.expand(len(keys), -1, -1, -1), part], dim=-2) for shared, part in pairs
    )
    return keys, values


def on_shared_memory(
    memory: tuple[Tensor, Tensor], call: AttentionCall, parts: Sequence[Part] = ()
) -> Attended:
    """A layer's attention of several rows to a memory (`keys_on_memory`), for all rows at once, and to the tokens of
    each row. If attention cannot be divided, it is computed as a whole, on a copy of the memory for each row.

    Args:
        call: `key` and `value` are those of the rows alone, [rows, key-value heads, tokens, width]; `mask` is
            [rows or 1, 1, n, entries + tokens] and hides nothing of the memory, or None if each row has one token.

    Raises:
        ValueError: the memory is read in parts, and attention cannot be divided.
    """
    (rows, heads, n, width), (_, key_heads, tokens, _), mask = (
        call.query.shape,
        call.key.shape,
        call.mask,
    )
    entries, groups = (
        memory[0].shape[2] + sum(keys.shape[2] for keys, *_ in parts),
        heads // key_heads,
    )
    divides = (call.has_kernel or bool(parts)) and heads == groups * key_heads
    divides = divides and (n == 1 if mask is None else mask.shape[1:] == (1, n, entries + tokens))
    if parts:
        call.check_divisible(divides)
    if not divides:
        key, value = with_copies(memory, call.key, call.value)
        return replace(call, key=key, value=value).whole()
    if mask is not None:
        mask = mask[..., entries:]
        mask = additive(mask, call.query.dtype) if mask.dtype == torch.bool else mask
        # The queries of all heads that share a key become the rows of one matrix, one head after another.
        mask = mask[:, :, None].expand(-1, -1, groups, -1, -1).flatten(2, 3)
    query = call.query.unflatten(1, (key_heads, groups))
    # For the memory, the queries of all rows of the batch become the rows of one matrix.
    all_queries = query.transpose(0, 1).reshape(1, key_heads, -1, width)
    over_memory = call.read_parts(all_queries, [(*memory, Reading()), *parts])
    over_rows = call.attend(query.flatten(2, 3), call.key, call.value, mask)
    output, lse = (
        part.view(key_heads, rows, groups, n, -1).transpose(0, 1) for part in over_memory
    )
    row_output, row_lse = (part.view(rows, key_heads, groups, n, -1) for part in over_rows)
    output, _ = joined([(output, lse[..., 0]), (row_output, row_lse[..., 0])])
    return output.flatten(1, 2).transpose(1, 2).to(call.query.dtype).contiguous(), None
