"""A model that runs one row of a layout at a time, with its own attention under a dense mask.

Plain mode (`methods.plain`) computes every request with it, and shares only the layouts with the
optimized code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, DynamicCache, PreTrainedModel

from lm_eval_icl.errors import Unsupported
from lm_eval_icl.inference.attention import Reading
from lm_eval_icl.inference.caches import cache_arguments
from lm_eval_icl.inference.devices import device_of
from lm_eval_icl.inference.memory import Memory, run_after_memory
from lm_eval_icl.prompts.layouts import Layout
from lm_eval_icl.prompts.tokens import Context


class PlainModel:
    """Runs the rows of layouts.

    Args:
        needs_mask: the method hides tokens. Otherwise, the model's own causal attention is right.
        encode: `Method.encode`, for a method that does not follow from its layout.
    """

    def __init__(
        self, model: PreTrainedModel, needs_mask: bool, encode: Callable[..., list[Memory]]
    ) -> None:
        self.model = model
        self.needs_mask = needs_mask
        self._encode = encode

    def run(
        self,
        layout: Layout,
        prompt: Sequence[int],
        keep: int = 1,
        cache: DynamicCache | None = None,
    ) -> Tensor:
        """Run the row of a layout. Returns the logits of its last tokens, [keep, vocabulary].

        Args:
            prompt: the ids of the prompt, which has every part once (`Layout.source`).
            cache: the memory at the beginning of the layout, to which the keys and values of the
                row are added.
        """
        device = device_of(self.model)
        first = layout.entries
        row = [prompt[i] for i in layout.source[first:]]
        positions = layout.positions[first:]
        arguments: dict[str, Any] = {}
        if not torch.equal(positions, torch.arange(first, len(layout))):
            arguments["position_ids"] = positions[None].to(device)
        if self.needs_mask and not layout.causal:
            hidden = torch.finfo(self.model.dtype).min
            mask = torch.zeros(len(row), len(layout), dtype=self.model.dtype)
            mask = mask.masked_fill(~layout.mask[first:], hidden)
            arguments["attention_mask"] = mask[None, None].to(device)
        if cache is None and not arguments:
            arguments["use_cache"] = False
        else:
            # Without a cache, transformers would take a position that occurs again for the start of
            # another text.
            arguments |= cache_arguments(self.model, DynamicCache() if cache is None else cache)
        ids = torch.tensor([row], device=device)
        logits: Tensor = self.model(input_ids=ids, logits_to_keep=keep, **arguments).logits
        return logits[0, -keep:]

    def run_after(self, memory: Memory, tokens: Sequence[int], keep: int) -> Tensor:
        """Run tokens on a memory. Returns the logits of the last ones, [keep, vocabulary]."""
        last = range(len(tokens) - keep, len(tokens))
        with memory.reading(self.model):
            return run_after_memory(self.model, memory, memory.cache(), [tokens], 0, last)[0]

    def memories(self, contexts: Sequence[Context]) -> list[Memory]:
        """The memories of contexts, encoded one by one."""
        return [self._encode(self.model, [context])[0] for context in contexts]

    @contextmanager
    def reading(
        self, part: tuple[int, Reading] | None, layout: Layout, after: int
    ) -> Iterator[None]:
        """Inside this context, the last `after` tokens read a part of those before in another way.

        Attention is then computed from the scores, as the definition has it.

        Args:
            part: `Method.reading`. None if all tokens are read as usual.
        """
        if part is None:
            yield
            return
        first, how = part
        rows = slice(len(layout) - after, len(layout))
        columns = slice(first, len(layout) - after)
        layers = 0

        def attend(
            module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
        ) -> tuple[Tensor, None]:
            nonlocal layers
            layers += 1
            return _in_parts(query, key, value, mask, rows, columns, how, **options), None

        original = AttentionInterface()["sdpa"]
        AttentionInterface.register("sdpa", attend)
        try:
            yield
        finally:
            AttentionInterface.register("sdpa", original)
        if not layers:
            raise Unsupported(f"no layer of {type(self.model).__name__} uses sdpa: use pcw.")


def _in_parts(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    rows: slice,
    columns: slice,
    reading: Reading,
    scaling: float | None = None,
    **_: Any,
) -> Tensor:
    """Attention whose tokens `rows` read `columns` as `reading` says: [1, n, heads, width]."""
    groups = query.shape[1] // key.shape[1]
    wide = torch.promote_types(query.dtype, torch.float32)
    keys = key.repeat_interleave(groups, dim=1).to(wide)
    values = value.repeat_interleave(groups, dim=1).to(wide)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = scale * query.to(wide) @ keys.mT
    if mask is None:
        n = scores.shape[-1]
        seen = torch.ones(n, n, dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~seen, torch.finfo(wide).min)
    else:
        scores = scores + mask.to(wide)
    # The share of a part is exp(factor * LSE(s / T) + log w), and inside it the shares are
    # softmax(s / T).
    tempered = scores[..., rows, columns] / reading.temperature
    total = tempered.logsumexp(-1, keepdim=True)
    scores[..., rows, columns] = tempered - total + reading.factor * total + reading.log_weight
    return (scores.softmax(-1) @ values).transpose(1, 2).to(query.dtype)


def entries_of(cache: DynamicCache) -> list[Tensor]:
    """The keys and values of all layers in turn. A layer that the model leaves out has none."""
    entries = []
    layers: list[Any] = cache.layers
    for layer in layers:
        if layer.keys is not None:
            entries += [layer.keys, layer.values]
    return entries


def with_entries(cache: DynamicCache, entries: Sequence[Tensor]) -> DynamicCache:
    """A cache with the layers of `cache` and other `entries`, as `entries_of` gives them."""
    replaced = DynamicCache()
    pairs = iter(zip(entries[::2], entries[1::2], strict=True))
    layers: list[Any] = cache.layers
    for i, layer in enumerate(layers):
        if layer.keys is not None:
            replaced.update(*next(pairs), i)
    return replaced
