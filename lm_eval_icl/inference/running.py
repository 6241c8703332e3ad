"""A model while it runs: what is done to it, by one thread at a time, and how many tokens went through it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from lm_eval_icl.inference.caches import without_adapter
from lm_eval_icl.inference.devices import device_of
from lm_eval_icl.inference.gelu import fused_gelu, gelus
from lm_eval_icl.inference.positions import no_positions

# One lock for each model: see `RunningModel.inference_mode`.
_locks: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()
_making_locks = threading.Lock()


class RunningModel:
    """A model that runs.

    Args:
        model: a causal language model of transformers.
        mixed_precision_dtype: the dtype of autocast; None for no autocast.

    Attributes:
        tokens_run: how many tokens were run through the model inside `counting`.
        passes_run: in how many forward passes.
        without_positions: the learned position embeddings that are switched off while the model runs; None if positions
            are left as they are.
    """

    def __init__(self, model: PreTrainedModel, mixed_precision_dtype: torch.dtype | None = None) -> None:
        self.model, self.mixed_precision_dtype = model, mixed_precision_dtype
        self.tokens_run = self.passes_run = 0
        self.without_positions: list[nn.Embedding] | None = None
        self._gelus, self._inside, self._counting = gelus(model), False, False

    @contextmanager
    def inference_mode(self) -> Iterator[None]:
        """Inside this context, the model runs in evaluation mode (in which it is left), without gradients and with a
        faster GELU, and, if it is set up for it, in mixed precision and without positional information.

        Only one thread at a time can be inside, since positions and GELU are patched on the model itself, which other
        runners may share. A run is inside from its beginning to its end: what is done to the model is done once, and
        not for every pass.
        """
        with _making_locks:
            lock = _locks.setdefault(without_adapter(self.model), threading.RLock())
        with lock, torch.no_grad(), self.mixed_precision():
            if self._inside:
                yield
                return
            if self.model.training:  # dropout would change every number
                self.model.eval()
            self._inside = True
            counter = self.model.register_forward_pre_hook(self._count, with_kwargs=True)
            try:
                with self.own_positions(), fused_gelu(self._gelus):
                    yield
            finally:
                counter.remove()
                self._inside = False

    @contextmanager
    def counting(self) -> Iterator[None]:
        """`inference_mode`, in which tokens and passes are counted."""
        with self.inference_mode():
            self._counting = True
            try:
                yield
            finally:
                self._counting = False

    def _count(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if self._counting:
            self.tokens_run += kwargs["input_ids"].numel()
            self.passes_run += 1

    def own_positions(self) -> AbstractContextManager[None]:
        """Inside this context, the model has no positional information if that was taken from it."""
        without = self.without_positions
        return nullcontext() if without is None else no_positions(self.model, without)

    def mixed_precision(self) -> torch.autocast:
        """torch's autocast, if it was asked for. It keeps the weights that it has cast until its outermost context
        ends, so many passes inside one context cast them once."""
        dtype = self.mixed_precision_dtype
        return torch.autocast(device_of(self.model).type, dtype=dtype, enabled=dtype is not None)
