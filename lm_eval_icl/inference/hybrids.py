"""Hybrids: models that keep more of the tokens they have read than keys and values.

Linear attention, state spaces and convolutions keep a state that every token is mixed into, and an indexer keeps keys
of its own. The memory of such a model is its whole cache after the context, and each query continues from a copy of it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)

from lm_eval_icl.inference.caches import MemoryLayer


def is_hybrid(model: PreTrainedModel) -> bool:
    """Whether a model keeps more of the tokens it has read than one key and one value for each token and layer. The
    cache that transformers makes for the model says so."""
    try:
        layers = DynamicCache(config=model.config).layers
    except Exception:  # a configuration without layers; `inference.capabilities` tries whether the model continues
        return False
    kept = [layer for layer in layers if isinstance(layer, (CacheLayerMixin, LinearAttentionCacheLayerMixin))]
    return any(type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) for layer in kept)


def empty_cache(model: PreTrainedModel) -> Cache | None:
    """A cache for what the model keeps; None if it makes a cache of a class of its own."""
    if not getattr(model, "_supports_default_dynamic_cache", lambda: True)():
        return None
    return DynamicCache(config=model.config) if is_hybrid(model) else DynamicCache()


def select_rows(cache: Any, batch: int, rows: Sequence[int]) -> Any:
    """A copy of a cache that consists of these rows of its batch, in this order; a row may occur several times.

    Everything is copied, since the states of linear attention are updated in place. (Each of transformers' own ways to
    select rows leaves out some kinds of layers.) `inference.capabilities` tries whether a model continues from it.

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
    elif isinstance(part, MemoryLayer):
        yield from tensors([part.keys, part.values])
    elif isinstance(part, (list, tuple, Mapping)):
        for inner in part.values() if isinstance(part, Mapping) else part:
            yield from tensors(inner)
    elif type(part).__module__.startswith("transformers."):
        yield from tensors(vars(part))


def check_states(continued: Cache, in_one_pass: Cache, dtype: torch.dtype) -> None:
    """Check that the states after some tokens behind a memory are those after one pass over all tokens. (Selective
    state spaces drop theirs if they are given several tokens at once, of which log-probabilities may show little.)

    Args:
        dtype: that of the model.

    Raises:
        ValueError: they differ by more than half of their digits.
    """
    most = max(torch.finfo(each).eps for each in (dtype, torch.float32)) ** 0.5  # such layers compute in float32
    for state, expected in zip(tensors(continued), tensors(in_one_pass), strict=True):
        if float((state.double() - expected.double()).norm()) > most * max(float(expected.double().norm()), 1e-30):
            raise ValueError("the states of its layers are then not those after one pass")
