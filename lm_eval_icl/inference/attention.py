"""The attention of a model, computed by functions of this package while the model runs.

transformers keeps its attention functions by name. Its function for "sdpa" is replaced once in a
process. The new function calls the old one, except inside `attention_by` and for marked keys. Three
kinds of passes need it:

- `layout_attention`: a long context, or several side by side, without a mask as large as the square
  of the tokens;
- `OfPackedRow`: a packed row on a CPU, without most of the keys that the mask hides;
- `keys_on_memory`: a batch whose rows share a memory, without a copy of the memory for each row.

Attention to some keys and attention to other keys are joined by their log-sum-exps, as
FlashAttention joins blocks of keys (Dao et al., 2022, section 3.1). A memory can therefore be
divided into parts with different `Reading`s.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from lm_eval_icl.inference.devices import to_device


class Kernel(NamedTuple):
    """torch's kernel that also returns the log-sum-exps."""

    name: str
    dtypes: tuple[torch.dtype, ...]  # the dtypes in which it computes


# By type of device. The kernels are undocumented. Without them, attention is not divided.
KERNELS = {
    "cpu": Kernel("_scaled_dot_product_flash_attention_for_cpu", (torch.float32, torch.float64)),
    "cuda": Kernel(
        "_scaled_dot_product_efficient_attention",
        (torch.float32, torch.float16, torch.bfloat16),
    ),
}
# Attention of a packed row is computed for this many tokens at a time, which is about the length of
# a query. With fewer tokens, fewer keys are hidden, but the kernel is called more often.
ROW_TOKENS = 64

# A layer's output: [rows, n, heads, width], and None in place of attention weights.
Attended = tuple[Tensor, Tensor | None]


class Partial(NamedTuple):
    """Attention to some of the keys."""

    output: Tensor  # [rows, heads, n, width], in float32 at least
    lse: Tensor  # [rows, heads, n] the log-sum-exps of the scores


@dataclass(frozen=True)
class Reading:
    """How attention reads a part of a memory.

    Let s be the scores of a token for the part's keys. The token's output over the part is
    softmax(s / temperature) times the values. The part's weight, relative to the other parts and to
    the keys of the token's own row, is exp(factor * LSE(s / temperature) + log_weight). The
    defaults are ordinary attention.
    """

    temperature: float = 1.0  # above 0
    factor: float = 1.0  # above 0
    log_weight: float = 0.0  # a natural logarithm


class Part(NamedTuple):
    """Some entries of a memory in one layer, and how attention reads them."""

    keys: Tensor  # [1, key-value heads, entries, width]
    values: Tensor  # as the keys
    reading: Reading = Reading()


@dataclass(frozen=True)
class AttentionCall:
    """A layer's call of its attention function: the function and its arguments."""

    function: Callable[..., Attended]
    module: nn.Module  # the layer's attention module
    query: Tensor  # [rows, heads, n, width]
    key: Tensor  # [rows, key-value heads, tokens, width]
    value: Tensor  # as the key
    mask: Tensor | None  # [rows or 1, 1, n, tokens], boolean or to be added to the scores
    options: Mapping[str, Any]  # the further arguments, by name

    def whole(self) -> Attended:
        """The attention, computed by transformers' function."""
        return self.function(
            self.module, self.query, self.key, self.value, self.mask, **self.options
        )

    def has(self, *options: str) -> bool:
        """True if any of these options is set."""
        return any(self.options.get(name) is not None for name in options)

    @property
    def has_kernel(self) -> bool:
        """True if a kernel that gives the log-sum-exps computes attention as the model does."""
        device = self.query.device.type
        dtype = self.query.dtype
        width = self.query.shape[3]
        kernel = KERNELS.get(device)
        if kernel is None or dtype not in kernel.dtypes:
            return False
        if not hasattr(torch.ops.aten, kernel.name):
            return False
        # In mixed precision, keys are rotated in float32 and values are not.
        if not dtype == self.key.dtype == self.value.dtype:
            return False
        # A GPU's kernel reads 16 bytes at a time.
        if device != "cpu" and width * self.query.element_size() % 16:
            return False
        return width == self.value.shape[3] and not self.has("position_bias", "softcap", "cache")

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        temperature: float = 1.0,
    ) -> Partial:
        """Attention to some keys.

        Without the kernel, the scores are computed for some tokens at a time, in float32 at least.

        Args:
            query: [rows, heads, n, width].
            key, value: [rows, heads, tokens, width].
            mask: to be added to the scores.
            temperature: the scores are divided by it.
        """
        scale = self.options.get("scaling")
        if scale is None:
            scale = query.shape[-1] ** -0.5
        scale /= temperature
        rows, heads, n, _ = query.shape
        if self.has_kernel:
            device = query.device.type
            kernel = getattr(torch.ops.aten, KERNELS[device].name)
            if device == "cpu":
                return Partial(*kernel(query, key, value, attn_mask=mask, scale=scale))
            if mask is not None:
                # The kernel needs rows of the mask that begin at multiples of 16 bytes.
                tokens = mask.shape[3]
                mask = pad(mask, (0, -tokens % 8))[..., :tokens].expand(rows, heads, n, -1)
            output, lse, *_ = kernel(query, key, value, mask, compute_log_sumexp=True, scale=scale)
            # The log-sum-exps are padded to a multiple of 32 tokens.
            return Partial(output.to(lse.dtype), lse[..., :n])
        dtype = torch.promote_types(query.dtype, torch.float32)
        at_once = max(1, 2**25 // (rows * heads * key.shape[2]))
        partials = []
        with torch.autocast(query.device.type, enabled=False):
            for first in range(0, n, at_once):
                some = slice(first, first + at_once)
                scores = (query[:, :, some].to(dtype) * scale) @ key.to(dtype).mT
                if mask is not None:
                    scores = scores + mask[:, :, some].to(dtype)
                lse = scores.logsumexp(-1)
                weights = scores.sub_(lse[..., None]).exp_()
                partials.append(Partial(weights @ value.to(dtype), lse))
        return _in_a_row(partials)

    def read_parts(self, query: Tensor, parts: Iterable[Part]) -> Partial:
        """Attention to the parts of a memory, each with its `Reading`.

        At least one part has entries. `query` is as for `attend`.
        """
        partials = []
        for key, value, reading in parts:
            if key.shape[2]:
                output, lse = self.attend(query, key, value, temperature=reading.temperature)
                partials.append(Partial(output, reading.factor * lse + reading.log_weight))
        return joined(partials)

    def check_divisible(self, divides: bool) -> None:
        """Check that a memory can be read in parts.

        Args:
            divides: the shapes and the mask allow it.

        Raises:
            ValueError: they do not, or the model changes the scores by more than a mask.
        """
        if self.has("position_bias", "softcap", "cache", "s_aux"):
            raise ValueError("its attention has sinks, caps its scores or adds a bias")
        if not divides:
            raise ValueError("its attention cannot be computed in parts")

    def repeated(self) -> AttentionCall:
        """The same call with a key and a value for each head of the query."""
        groups = getattr(self.module, "num_key_value_groups", 1)
        return replace(self, key=repeat_kv(self.key, groups), value=repeat_kv(self.value, groups))


def _in_a_row(partials: Sequence[Partial]) -> Partial:
    """The attention of adjacent slices of tokens, as that of all of them."""
    if len(partials) == 1:
        return partials[0]
    output, lse = (torch.cat(parts, dim=2) for parts in zip(*partials, strict=True))
    return Partial(output, lse)


def joined(partials: Iterable[tuple[Tensor, Tensor]]) -> Partial:
    """Attention to several sets of keys together.

    It is the mean of the outputs over each set, weighted by the set's share of the sum of
    exponentials.

    Args:
        partials: output [..., n, width] and log-sum-exps [..., n] over each set; at least one. The
            first output is changed in place.
    """
    (output, lse), *others = partials
    for other_output, other_lse in others:
        share = torch.sigmoid(other_lse - lse)
        output.lerp_(other_output, share[..., None])
        lse = torch.logaddexp(lse, other_lse)
    return Partial(output, lse)


def additive(sees: Tensor, dtype: torch.dtype, memory: int = 0) -> Tensor:
    """A boolean mask as numbers to add to the scores. Eager attention takes only these.

    Args:
        sees: [..., rows, columns] bool: which columns each row attends to.
        memory: the number of columns to put before these, for entries that all rows attend to.

    Returns:
        [..., rows, memory + columns].
    """
    rows, columns = sees.shape[-2:]
    shape = (*sees.shape[:-2], rows, memory + columns)
    mask = torch.zeros(shape, dtype=dtype, device=sees.device)
    # On a CPU, torch converts bytes to floats seven times as fast as booleans.
    mask[..., memory:].copy_(sees.view(torch.uint8)).sub_(1).mul_(torch.finfo(dtype).max)
    return mask


# The function that computes attention in the forward pass of this thread. None: transformers'.
_attending: ContextVar[Callable[[AttentionCall], Attended] | None] = ContextVar(
    "attending", default=None
)


@contextmanager
def attention_by(function: Callable[[AttentionCall], Attended]) -> Iterator[None]:
    """Inside this context, `function` computes the attention of models on "sdpa"."""
    install()
    token = _attending.set(function)
    try:
        yield
    finally:
        _attending.reset(token)


def install() -> bool:
    """Replace transformers' function for sdpa, once in a process.

    Keys may have an attribute `attention`, a function that computes attention to them. Attention to
    other keys is computed by the function that `attention_by` sets. Without it, the original
    function computes it.

    Returns:
        False if another library has put a function of its own in front of the replacement.
    """
    # The function that is registered for the class. A function set on an instance comes before it.
    original = AttentionInterface()["sdpa"]
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
            # Models of transformers give all further arguments by name.
            if function is None or more:
                return original(module, query, key, value, attention_mask, *more, **options)
            return function(
                AttentionCall(original, module, query, key, value, attention_mask, options)
            )

        attention.replaced = True  # type: ignore[attr-defined]
        AttentionInterface.register("sdpa", attention)
    return getattr(ALL_ATTENTION_FUNCTIONS["sdpa"], "replaced", False)


class TokensOnMemory(NamedTuple):
    """Adjacent tokens of a packed row, and the entries before the row that they see."""

    tokens: slice
    entries: slice


@dataclass
class OfPackedRow:
    """The attention of a forward pass over a packed row.

    Attention to a memory is computed for all of its tokens at once. Attention to the row is
    computed for `ROW_TOKENS` tokens at a time, with only the keys that one of them sees. (Most keys
    are hidden, since the row has many queries and a token sees only its own query.)

    Attention is not divided if this gains nothing or may be impossible: for few tokens, on devices
    other than the CPU, and in half precision.
    """

    sees: Tensor  # [n, n] bool: which tokens of the row each token attends to, itself included
    groups: Sequence[TokensOnMemory]  # adjacent slices of the row
    # For each group, the parts of its memory and how they are read. If given, attention is always
    # divided.
    readings: Sequence[Sequence[tuple[slice, Reading]]] = ()

    @functools.cached_property
    def parts(self) -> list[tuple[slice, Tensor]]:
        """Slices of `ROW_TOKENS` tokens, each with the indices of all tokens that they see."""
        parts = []
        for first in range(0, len(self.sees), ROW_TOKENS):
            tokens = slice(first, first + ROW_TOKENS)
            # The maximum of bytes takes torch a third of the time of `any` for booleans.
            seen = self.sees[tokens].view(torch.uint8).amax(dim=0)
            parts.append((tokens, seen.nonzero()[:, 0]))
        return parts

    def __call__(self, call: AttentionCall) -> Attended:
        """A layer's attention, divided if possible.

        Args:
            call: its query is [1, heads, n, width], its key and value are
                [1, key-value heads, memory + n, width], and its mask is [1, 1, n, memory + n], to
                add to the scores.
        """
        memory = call.key.shape[2] - len(self.sees)
        divides = self._divides(call, memory)
        if self.readings:
            call.check_divisible(divides)
        mask = call.mask
        if not divides or mask is None:
            return call.whole()
        call = call.repeated()
        over_memory = self._over_memory(call, mask) if memory else None
        output = torch.empty_like(call.query)
        for tokens, seen in self.parts:
            seen = to_device(seen, output.device)
            key = call.key[:, :, memory:].index_select(2, seen)
            value = call.value[:, :, memory:].index_select(2, seen)
            hidden = mask[:, :, tokens, memory:].index_select(3, seen)
            partial = call.attend(call.query[:, :, tokens], key, value, hidden)
            if over_memory is not None:
                parts = [part[:, :, tokens] for part in over_memory]
                partial = joined([Partial(*parts), partial])
            output[:, :, tokens] = partial.output
        return output.transpose(1, 2).contiguous(), None

    def _divides(self, call: AttentionCall, memory: int) -> bool:
        n = len(self.sees)
        query = call.query
        if memory < 0 or query.shape[:3:2] != (1, n):
            return False
        if call.mask is None or call.mask.shape[2:] != (n, memory + n):
            return False
        if memory and any(entries.start == entries.stop for _, entries in self.groups):
            return False
        if self.readings:
            return True  # the mask may have another dtype, in mixed precision
        if call.mask.dtype != query.dtype:
            return False
        return n > ROW_TOKENS and query.device.type == "cpu" and call.has_kernel

    def _over_memory(self, call: AttentionCall, mask: Tensor) -> Partial:
        """Attention of all tokens to the entries of their memories."""
        partials = []
        for i, (tokens, entries) in enumerate(self.groups):
            query = call.query[:, :, tokens]
            if self.readings:
                parts = [
                    Part(call.key[:, :, part], call.value[:, :, part], reading)
                    for part, reading in self.readings[i]
                ]
                partials.append(call.read_parts(query, parts))
            else:
                # The mask hides nothing here, but the model may have added other numbers to it.
                hidden = mask[:, :, tokens, entries]
                key = call.key[:, :, entries]
                partials.append(call.attend(query, key, call.value[:, :, entries], hidden))
        return _in_a_row(partials)


def keys_on_memory(memory: Sequence[Part], keys: Tensor) -> Tensor:
    """The keys of a batch's rows, marked so that attention reads a shared memory before them.

    The model has to pass this very tensor object to its attention function. Copies do not have the
    mark.

    Args:
        keys: [rows, key-value heads, tokens, width].
    """
    marked: Any = keys[:]  # another tensor object with the same numbers
    marked.attention = functools.partial(on_shared_memory, memory)
    return marked


def with_copies(memory: Sequence[Part], keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """The keys and values of a batch's rows, each row after a copy of the memory."""
    keys_of_memory = [part.keys.expand(len(keys), -1, -1, -1) for part in memory]
    values_of_memory = [part.values.expand(len(keys), -1, -1, -1) for part in memory]
    return torch.cat([*keys_of_memory, keys], dim=-2), torch.cat(
        [*values_of_memory, values], dim=-2
    )


def on_shared_memory(memory: Sequence[Part], call: AttentionCall) -> Attended:
    """A layer's attention of several rows to a memory, and to the tokens of each row.

    If attention cannot be divided, it is computed as a whole, on a copy of the memory for each row.

    Args:
        call: its key and value are those of the rows alone, [rows, key-value heads, tokens, width].
            Its mask is [rows or 1, 1, n, entries + tokens] and hides nothing of the memory. It is
            None if each row has one token.

    Raises:
        ValueError: a part is not read as usual, and attention cannot be divided.
    """
    rows, heads, n, width = call.query.shape
    _, key_heads, tokens, _ = call.key.shape
    groups = heads // key_heads  # this many heads of the query share a key
    entries = sum(part.keys.shape[2] for part in memory)
    as_usual = all(part.reading == Reading() for part in memory)
    mask = call.mask
    fits = n == 1 if mask is None else mask.shape[1:] == (1, n, entries + tokens)
    divides = fits and heads == groups * key_heads and (call.has_kernel or not as_usual)
    if not as_usual:
        call.check_divisible(divides)
    if not divides:
        key, value = with_copies(memory, call.key, call.value)
        return replace(call, key=key, value=value).whole()
    if mask is not None:
        mask = mask[..., entries:]
        if mask.dtype == torch.bool:
            mask = additive(mask, call.query.dtype)
        # The queries of all heads that share a key become the rows of one matrix, head after head.
        mask = mask[:, :, None].expand(-1, -1, groups, -1, -1).flatten(2, 3)
    query = call.query.unflatten(1, (key_heads, groups))
    # For the memory, the queries of all rows of the batch become the rows of one matrix.
    all_queries = query.transpose(0, 1).reshape(1, key_heads, -1, width)
    over_memory = call.read_parts(all_queries, memory)
    over_rows = call.attend(query.flatten(2, 3), call.key, call.value, mask)

    # Both have the shape of the rows: [rows, key-value heads, groups * n, width].
    output = over_memory.output.view(key_heads, rows, groups * n, -1).transpose(0, 1)
    lse = over_memory.lse.view(key_heads, rows, groups * n).transpose(0, 1)
    output, _ = joined([(output, lse), over_rows])
    output = output.unflatten(2, (groups, n)).flatten(1, 2).transpose(1, 2)
    return output.to(call.query.dtype).contiguous(), None
