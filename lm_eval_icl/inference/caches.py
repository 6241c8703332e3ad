"""transformers' caches: layers that begin with a memory, and the argument by which a model is given its cache."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer

from lm_eval_icl.inference.attention import Reading, keys_on_memory, with_copies


class MemoryLayer(DynamicLayer):
    """One layer of a cache: the memory, which all rows of a batch share, followed by the entries that each row adds.

    The memory is stored once and never written to. The attributes `keys` and `values` of `DynamicLayer` are the entries
    that the rows add.

    Args:
        keys, values: the memory, both [1, key-value heads, entries, head width].
        once: the cache is for a single forward pass, so it does not store the entries of the tokens of the pass.
        shared: attention reads the memory once for all rows (`inference.attention.keys_on_memory`). Otherwise, a copy
            of the memory is put before the entries of each row while the layer's attention runs.
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
        # Tensors with room for more entries of the rows, and the views of these tensors that hold the present entries.
        # If `keys` is no longer this view, rows were selected.
        self._room: list[Tensor] = []
        self._views: list[Tensor] = []

    @classmethod
    def unshared(cls, keys: Tensor, values: Tensor) -> MemoryLayer:
        """A layer whose rows begin with these entries and share no memory."""
        layer = cls(keys[:1, :, :0], values[:1, :, :0], once=False)
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        return layer

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        keys, values = (
            (key_states, value_states) if self.once else self._append(key_states, value_states)
        )
        if self.shared or self.parts:
            return keys_on_memory(self.memory, keys, self.parts), values
        if not self.memory[0].shape[-2]:
            return keys, values
        return with_copies(self.memory, keys, values)

    def _append(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Store entries after those of earlier passes, which `DynamicLayer` would copy in every pass."""
        if (
            self.keys is None or self.values is None or not self.keys.numel()
        ):  # a single pass needs no room
            return super().update(key_states, value_states)
        stored, start, end = (
            (self.keys, self.values),
            self.keys.shape[-2],
            self.keys.shape[-2] + key_states.shape[-2],
        )
        if not self._views or self.keys is not self._views[0] or end > self._room[0].shape[-2]:
            self._room = [
                part.new_empty(*part.shape[:-2], end + end // 2, part.shape[-1]) for part in stored
            ]
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
        """A copy of the rows' entries. The memory itself, which is never written to, stays shared."""
        copied = type(self)(*self.memory, self.once, self.shared, self.parts)
        kept = ("memory", "parts", "_room", "_views")
        vars(copied).update(
            {
                name: copy.deepcopy(part, memo)
                for name, part in vars(self).items()
                if name not in kept
            }
        )
        return copied


@functools.cache
def _arguments(forward: Callable[..., Any]) -> frozenset[str]:
    """The names of a function's arguments."""
    return frozenset(inspect.signature(forward).parameters)


def cache_name(model: PreTrainedModel) -> str:
    """The name of the argument by which a model is given its cache: `cache` from transformers 5.24 on; before, it is
    `past_key_values`, or `cache_params` for models without attention. Nothing else in the package knows these names."""
    arguments = _arguments(type(without_adapter(model)).forward)
    return next(
        (name for name in ("cache", "past_key_values", "cache_params") if name in arguments),
        "past_key_values",
    )


def cache_arguments(model: PreTrainedModel, cache: Any) -> dict[str, Any]:
    """The arguments by which a forward pass continues from a cache, and adds entries to it."""
    return {cache_name(model): cache, "use_cache": True}


def takes_positions(model: PreTrainedModel) -> bool:
    """Whether the model has the argument `position_ids`."""
    return "position_ids" in _arguments(type(without_adapter(model)).forward)


def without_adapter(model: Any) -> nn.Module:
    """The model inside an adapter of PEFT, which shares its modules; for any other model, the model itself."""
    inner: nn.Module = model.get_base_model() if hasattr(model, "get_base_model") else model
    return inner
