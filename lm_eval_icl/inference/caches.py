"""transformers' caches: layers that begin with a memory, and how a model is given its cache."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer

from lm_eval_icl.inference.attention import Part, keys_on_memory, with_copies


class MemoryLayer(DynamicLayer):
    """One layer of a cache: a memory that all rows share, then the entries that each row adds.

    The memory is stored once and never written to. The attributes `keys` and `values` of
    `DynamicLayer` are the entries that the rows add.

    Args:
        memory: the entries of the memory in this layer, in order.
        once: the cache is for a single forward pass. It does not store the entries of the pass.
        shared: attention reads the memory once for all rows, and each part in its own way
            (`inference.attention`). Otherwise, a copy of the memory is put before the entries of
            each row while attention runs.
    """

    def __init__(self, memory: Sequence[Part] = (), once: bool = False, shared: bool = False):
        super().__init__()
        self.memory = memory
        self.once = once
        self.shared = shared
        # Tensors with room for more entries of the rows, and the views of these tensors that hold
        # the present entries. If `keys` is no longer this view, rows were selected.
        self._room: list[Tensor] = []
        self._views: list[Tensor] = []

    @classmethod
    def unshared(cls, keys: Tensor, values: Tensor) -> MemoryLayer:
        """A layer whose rows begin with these entries and share no memory."""
        layer = cls()
        layer.lazy_initialization(keys, values)
        layer.keys = keys
        layer.values = values
        return layer

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if not self.once:
            key_states, value_states = self._append(key_states, value_states)
        if self.shared:
            return keys_on_memory(self.memory, key_states), value_states
        if not self.memory:
            return key_states, value_states
        return with_copies(self.memory, key_states, value_states)

    def _append(self, new_keys: Tensor, new_values: Tensor) -> tuple[Tensor, Tensor]:
        """Store entries after those of earlier passes, which `DynamicLayer` would copy."""
        if self.keys is None or self.values is None or not self.keys.numel():
            return super().update(new_keys, new_values)  # a single pass needs no room
        start = self.keys.shape[-2]
        end = start + new_keys.shape[-2]
        if not self._views or self.keys is not self._views[0] or end > self._room[0].shape[-2]:
            self._room = []
            for stored in (self.keys, self.values):
                room = stored.new_empty(*stored.shape[:-2], end + end // 2, stored.shape[-1])
                room.narrow(-2, 0, start).copy_(stored)
                self._room.append(room)
        for room, new in zip(self._room, (new_keys, new_values), strict=True):
            room.narrow(-2, start, end - start).copy_(new)
        self._views = [room.narrow(-2, 0, end) for room in self._room]
        self.keys, self.values = self._views
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return sum(part.keys.shape[-2] for part in self.memory) + super().get_seq_length()

    def __deepcopy__(self, memo: dict[int, Any]) -> MemoryLayer:
        """A copy of the rows' entries. The memory is never written to, and stays shared."""
        copied = type(self)(self.memory, self.once, self.shared)
        for name, part in vars(self).items():
            if name not in ("memory", "_room", "_views"):
                setattr(copied, name, copy.deepcopy(part, memo))
        return copied


@functools.cache
def _arguments(forward: Callable[..., Any]) -> frozenset[str]:
    """The names of a function's arguments."""
    return frozenset(inspect.signature(forward).parameters)


def cache_name(model: PreTrainedModel) -> str:
    """The name of the argument by which a model is given its cache.

    It is `cache` from transformers 5.24 on. Before, it is `past_key_values`, or `cache_params` for
    models without attention. Nothing else in the package knows these names.
    """
    arguments = _arguments(type(without_adapter(model)).forward)
    for name in ("cache", "past_key_values", "cache_params"):
        if name in arguments:
            return name
    return "past_key_values"


def cache_arguments(model: PreTrainedModel, cache: Any) -> dict[str, Any]:
    """The arguments by which a forward pass continues from a cache, and adds entries to it."""
    return {cache_name(model): cache, "use_cache": True}


def takes_positions(model: PreTrainedModel) -> bool:
    """True if the model has the argument `position_ids`."""
    return "position_ids" in _arguments(type(without_adapter(model)).forward)


def without_adapter(model: Any) -> nn.Module:
    """The model inside an adapter of PEFT, which shares its modules; or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model
