"""transformers' caches: layers that begin with a memory, what a model keeps in its cache, and going on from a cache.

Most models keep keys and values of the tokens they have read. Some keep more: hybrid models with linear attention or
state-space layers keep a state that every token is mixed into.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)

from lm_eval_icl.inference.attention import Reading
from lm_eval_icl.inference.devices import device_of_states, on_device, once_a_model
from lm_eval_icl.inference.shared_attention import behind, behind_copies


class MemoryLayer(DynamicLayer):
    """One layer of a cache: the memory, which all rows of a batch share, followed by the entries that each row adds.

    The memory is stored once and never written to. The attributes `keys` and `values` of `DynamicLayer` are the rows'
    own entries.

    Args:
        keys, values: the memory.
        once: the cache is for a single forward pass, so that the entries the pass adds are not stored.
        shared: attention reads the memory once for all rows (`inference.shared_attention.behind`). Otherwise, keys and
            values that join a copy of it with each row's own entries exist while the layer's attention runs.
        parts: keys and values of further entries of the memory, and how attention reads them.
    """

    def __init__(
        self,
        keys: Tensor,
        values: Tensor,
        once: bool,
        shared: bool = False,
        parts: Sequence[tuple[Tensor, Tensor, Reading]] = (),
    ):
        super().__init__()
        self.memory, self.once, self.shared, self.parts = (keys, values), once, shared, parts
        # Where the rows' entries are stored with room for more, and the views of it that hold them. If `keys` is no
        # longer this view, rows were selected.
        self._room: list[Tensor] = []
        self._views: list[Tensor] = []

    @classmethod
    def of_rows(cls, keys: Tensor, values: Tensor) -> MemoryLayer:
        """A layer without a memory that all rows share, whose rows have these entries already."""
        layer = cls(keys[:1, :, :0], values[:1, :, :0], once=False)
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        return layer

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        keys, values = (key_states, value_states) if self.once else self._append(key_states, value_states)
        if self.shared or self.parts:
            return behind(self.memory, keys, self.parts), values
        if not self.memory[0].shape[-2]:
            return keys, values
        return behind_copies(self.memory, keys, values)

    def _append(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Store entries behind those of earlier passes, which are not copied each time as in `DynamicLayer`."""
        if self.keys is None or self.values is None or not self.keys.numel():  # a single pass needs no room
            return super().update(key_states, value_states)
        stored, start, end = (self.keys, self.values), self.keys.shape[-2], self.keys.shape[-2] + key_states.shape[-2]
        if not self._views or self.keys is not self._views[0] or end > self._room[0].shape[-2]:
            self._room = [part.new_empty(*part.shape[:-2], end + end // 2, part.shape[-1]) for part in stored]
            for room, part in zip(self._room, stored, strict=True):
                room.narrow(-2, 0, start).copy_(part)
        for room, added in zip(self._room, (key_states, value_states), strict=True):
            room.narrow(-2, start, end - start).copy_(added)
        self._views = [room.narrow(-2, 0, end) for room in self._room]
        self.keys, self.values = self._views
        return self.keys, self.values

    def get_seq_length(self) -> int:
        parts = sum(keys.shape[-2] for keys, *_ in self.parts)
        return self.memory[0].shape[-2] + parts + super().get_seq_length()

    def __deepcopy__(self, memo: dict[int, Any]) -> MemoryLayer:
        """A copy with entries of its own. The memory itself, which is never written to, stays shared."""
        copied = type(self)(*self.memory, self.once, self.shared, self.parts)
        ours = ("memory", "parts", "_room", "_views")
        vars(copied).update({name: copy.deepcopy(part, memo) for name, part in vars(self).items() if name not in ours})
        return copied


@once_a_model
def has_other_states(model: PreTrainedModel) -> bool:
    """Whether a model keeps more of the tokens it has read than one key and one value for each token and layer: the
    state of linear attention, of a state-space layer or of a convolution, or the keys of an indexer that chooses what
    is attended to. The cache that transformers makes for the model says so."""
    if not _has_usual_cache(model):
        return True
    try:
        layers = DynamicCache(config=model.config).layers
    except Exception:  # a configuration without layers; `inference.capabilities` tries whether the model continues
        return False
    kept = [layer for layer in layers if isinstance(layer, (CacheLayerMixin, LinearAttentionCacheLayerMixin))]
    return any(type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) for layer in kept)


def _has_usual_cache(model: PreTrainedModel) -> bool:
    """Whether the model takes a `DynamicCache`. Others make a cache of a class of their own."""
    supports: bool = getattr(model, "_supports_default_dynamic_cache", lambda: True)()
    return supports


def cache_argument(model: PreTrainedModel) -> str:
    """The name under which a model takes its cache and returns it."""
    taken = _arguments(model)
    return next((name for name in ("past_key_values", "cache_params", "state") if name in taken), "past_key_values")


@once_a_model
def takes_positions(model: PreTrainedModel) -> bool:
    """Whether the model has the argument `position_ids`."""
    return "position_ids" in _arguments(model)


def _arguments(model: PreTrainedModel) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(without_adapter(model).forward).parameters


def without_adapter(model: Any) -> nn.Module:
    """The model inside an adapter of PEFT, which shares its modules; any other model itself."""
    inner: nn.Module = model.get_base_model() if hasattr(model, "get_base_model") else model
    return inner


def run_rows(
    model: PreTrainedModel,
    cache: Any,
    ids: Tensor,
    read: Sequence[int],
    positions: Tensor | None = None,
    stepwise: bool = False,
) -> tuple[Tensor, Any]:
    """Run a batch of tokens through the model behind a cache, each row causally.

    Args:
        cache: what was read before, a batch of as many rows; None if nothing was.
        ids: [rows, n] the tokens.
        read: the indices of the tokens whose logits are returned, in ascending order.
        positions: [rows, n] the positions of the tokens; None if they follow those in the cache.
        stepwise: run the tokens one by one, for models that go on from a cache in no other way.

    Returns:
        The logits [rows, len(read), vocabulary], and the cache after the tokens.
    """
    if stepwise and cache is not None and ids.shape[1] > 1:
        steps = []
        for i in range(ids.shape[1]):
            at = None if positions is None else positions[:, i : i + 1]
            logits, cache = run_rows(model, cache, ids[:, i : i + 1], [0], at)
            steps += [logits] if i in read else []
        return torch.cat(steps, dim=1), cache
    name, n = cache_argument(model), ids.shape[1]
    if cache is None and _has_usual_cache(model):
        cache = DynamicCache(config=model.config) if has_other_states(model) else DynamicCache()
    inputs = {} if cache is None else {name: cache}
    if positions is not None:
        inputs["position_ids"] = positions
    at_end = list(read) == list(range(n - len(read), n))
    keep = len(read) if at_end else on_device(read, device_of_states(model))
    output = model(input_ids=ids, use_cache=True, logits_to_keep=keep, **inputs)
    logits = output.logits if output.logits.shape[1] == len(read) else output.logits[:, list(read)]
    # A model that is given a cache writes to it, and some do not return it.
    after = getattr(output, name, None)
    return logits, cache if after is None else after


def select_rows(cache: Any, batch: int, rows: Sequence[int]) -> Any:
    """A copy of a cache that consists of these rows of its batch, in this order; a row may occur several times.

    Everything is copied, since the states of linear attention are updated in place. (Each of
    transformers' own ways to select rows, `reorder_cache` and `batch_select_indices`, leaves out some kinds of layers.)
    `lm_eval_icl.inference.capabilities` tests whether a model goes on from such a copy as from the cache itself.

    Args:
        batch: how many rows the cache has.
    """
    copies: dict[int, Any] = {}
    for tensor in tensors(cache):
        of_rows = tensor.dim() > 1 and len(tensor) == batch
        copies[id(tensor)] = tensor[list(rows)] if of_rows else tensor.clone()
    return copy.deepcopy(cache, copies)


def tensors(part: Any) -> Iterator[Tensor]:
    """The tensors of a cache or of a part of it, without those of a memory that several caches share."""
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, Mapping):
        for inner in part.values():
            yield from tensors(inner)
    elif isinstance(part, (list, tuple)):
        for inner in part:
            yield from tensors(inner)
    elif isinstance(part, MemoryLayer):
        yield from tensors([part.keys, part.values])
    elif type(part).__module__.startswith("transformers."):
        yield from tensors(vars(part))
