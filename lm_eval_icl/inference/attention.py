"""A model's attention, computed by a function of ours while the model runs.

transformers keeps its attention functions by name. Its function for "sdpa" is replaced once in a process, by one that
calls it except inside `attention_by` and for keys that are marked (`shared_attention.behind`). Attention to some keys
and attention to other keys are joined by their log-sum-exps, as FlashAttention joins blocks of keys (Dao et al., 2022,
section 3.1).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

# torch's kernel that also returns the log-sum-exps. It is undocumented; if it is missing, attention is not divided.
FLASH: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)

# A layer's output, [rows, n, heads, width], and None in place of attention weights.
Attended = tuple[Tensor, Tensor | None]


@dataclass(frozen=True)
class AttentionCall:
    """A layer's call of its attention function.

    Attributes:
        function: transformers' function, which takes the other attributes as its arguments.
        module: the layer's attention module.
        query: [rows, heads, n, width].
        key, value: [rows, key-value heads, tokens, width].
        mask: [rows or 1, 1, n, tokens], boolean or to be added to the scores; None for none.
        options: the further arguments, by name.
    """

    function: Callable[..., Attended]
    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    options: Mapping[str, Any]

    def whole(self) -> Attended:
        """Compute it by transformers' function."""
        return self.function(self.module, self.query, self.key, self.value, self.mask, **self.options)

    def has(self, *options: str) -> bool:
        """Whether any of these options is set."""
        return any(self.options.get(name) is not None for name in options)

    @property
    def has_kernel(self) -> bool:
        """Whether `FLASH`, which gives the log-sum-exps that `join` needs, computes attention as the model does."""
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

    def check_divisible(self, divides: bool) -> None:
        """Check that a memory can be read in parts.

        Args:
            divides: whether the shapes and the mask allow it.

        Raises:
            ValueError: they do not, or the model does more with the scores than to add a mask.
        """
        if self.has("position_bias", "softcap", "cache", "s_aux"):
            raise ValueError("its attention has sinks, caps its scores or adds a bias")
        if not divides:
            raise ValueError("its attention cannot be computed in parts")

    def repeated(self) -> AttentionCall:
        """The same call with keys and values repeated, so that every head has its own."""
        groups = getattr(self.module, "num_key_value_groups", 1)
        return replace(self, key=repeat_kv(self.key, groups), value=repeat_kv(self.value, groups))


def join(output: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Join the attention to some keys with that to other keys in place, given the log-sum-exps of both.

    Attention to two sets of keys is the mean of the attention to each set, weighted by its share of the sum of
    exponentials.

    Args:
        output, other: [rows, heads, n, width]; `output` is changed.
        lse, other_lse: [rows, heads, n].
    """
    output.lerp_(other, torch.sigmoid(other_lse - lse)[..., None])


@dataclass(frozen=True)
class Reading:
    """How attention reads a part of a memory.

    With the scores s of a token for the part's keys, its output over the part is softmax(s / temperature) times the
    values, and the part's share among all parts and the token's own keys is that of the log-sum-exp
    factor * LSE(s / temperature) + log_weight. The defaults are ordinary attention.

    Attributes:
        temperature: above 0.
        factor: of the log-sum-exp, above 0.
        log_weight: added to it (natural logarithm).
    """

    temperature: float = 1.0
    factor: float = 1.0
    log_weight: float = 0.0


def read_parts(
    call: AttentionCall, query: Tensor, parts: Iterable[tuple[Tensor, Tensor, Reading]]
) -> tuple[Tensor, Tensor]:
    """Attention to the parts of a memory, each read in its own way.

    Args:
        query: [rows, heads, n, width].
        parts: keys and values, [rows, heads, entries, width], and how they are read. At least one has entries.

    Returns:
        As `AttentionCall.attend`, to be joined with attention to further keys.
    """
    output = lse = torch.empty(0)
    for key, value, reading in parts:
        if not key.shape[2]:
            continue
        part, part_lse = call.attend(query, key, value, temperature=reading.temperature)
        part_lse = reading.factor * part_lse + reading.log_weight
        if lse.numel():
            join(output, lse, part, part_lse)
            lse = torch.logaddexp(lse, part_lse)
        else:
            output, lse = part, part_lse
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
_installing = threading.Lock()


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
    that of `attention_by`; without one, the replacement only calls the original function.

    Returns:
        Whether the replacement is in force, and no function of somebody else's stands in front of it.
    """
    with _installing:
        original = AttentionInterface()["sdpa"]  # that of the class; one set on an instance stays in front of it
        if not getattr(original, "replaced", False):

            def attention(
                module: nn.Module,
                query: Tensor,
                key: Tensor,
                value: Tensor,
                attention_mask: Tensor | None = None,
                *more: Any,
                **options: Any,
            ) -> Attended:
                function = getattr(key, "attention", None) or _attending.get()
                if function is None or more:  # models of transformers give all further arguments by name
                    return original(module, query, key, value, attention_mask, *more, **options)
                call = AttentionCall(original, module, query, key, value, attention_mask, options)
                return function(call)

            attention.replaced = True  # type: ignore[attr-defined]
            AttentionInterface.register("sdpa", attention)
    return bool(getattr(ALL_ATTENTION_FUNCTIONS["sdpa"], "replaced", False))
