"""Hybrids: models whose cache holds more than one key and one value for each token and layer.

Linear attention, state spaces and convolutions keep a state that every token changes, and an
indexer keeps further keys. The memory of such a model is its whole cache after the context. Each
query continues from a copy of it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel, cache_utils

from lm_eval_icl.inference.caches import MemoryLayer


def is_hybrid(model: PreTrainedModel) -> bool:
    """True if the model's cache holds more than a key and a value for each token and layer."""
    try:
        layers = DynamicCache(config=model.config).layers
    except Exception:  # a configuration without layers; a trial says if such a model can be used
        return False
    kept = (cache_utils.CacheLayerMixin, cache_utils.LinearAttentionCacheLayerMixin)
    plain = (cache_utils.DynamicLayer, cache_utils.DynamicSlidingWindowLayer)
    return any(isinstance(layer, kept) and type(layer) not in plain for layer in layers)


def empty_cache(model: PreTrainedModel) -> Cache | None:
    """An empty cache for the model; None if its cache is of another class than transformers'."""
    if not getattr(model, "_supports_default_dynamic_cache", lambda: True)():
        return None
    return DynamicCache(config=model.config) if is_hybrid(model) else DynamicCache()


def select_rows(cache: Any, batch: int, rows: Sequence[int]) -> Any:
    """A copy of a cache with only these rows of its batch, in this order.

    A row may occur several times. Everything is copied, since the states of linear attention are
    updated in place. (The functions of transformers that select rows each leave out some kinds of
    layers.) A trial says if a model continues from a copy.

    Args:
        batch: the number of rows of the cache.
    """
    copies: dict[int, Any] = {}
    for tensor in tensors(cache):
        has_rows = tensor.dim() > 1 and len(tensor) == batch
        copies[id(tensor)] = tensor[list(rows)] if has_rows else tensor.clone()
    return copy.deepcopy(cache, copies)


def tensors(part: Any) -> Iterator[Tensor]:
    """The tensors of a cache or of a part of it, without those of a memory that caches share."""
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
    """Check that the states after a memory and some further tokens are the states after one pass.

    (Selective state spaces lose their state if they continue with several tokens at once.
    Log-probabilities may hardly show this.)

    Args:
        dtype: that in which the model computes.

    Raises:
        ValueError: the states differ by more than half of their digits.
    """
    # Such layers compute in float32.
    eps = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    for state, expected in zip(tensors(continued), tensors(in_one_pass), strict=True):
        difference = float((state.double() - expected.double()).norm())
        size = max(float(expected.double().norm()), 1e-30)
        if difference > eps**0.5 * size:
            raise ValueError(
                "continued from its cache, its layers have other states than after one pass"
            )
