"""How a model runs: its precision, its positions, and how its passes are counted."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from lm_eval_icl.inference.devices import device_of
from lm_eval_icl.inference.gelu import fused_gelu
from lm_eval_icl.inference.positions import no_positions
from lm_eval_icl.inference.prefix_cache import PrefixCache

# Only one thread at a time runs a model, since positions and GELU of a model that runners may share
# are patched.
_running = threading.RLock()


class ModelMode:
    """A model, and the mode in which it runs.

    Args:
        mixed_precision_dtype: the dtype of autocast. None: no autocast.
        plain: the model's own GELU runs, and not a faster one.

    Attributes:
        without_positions: the learned position embeddings that are switched off, together with
            rotary angles. None: the model has its positions.
        tokens_run, passes_run: the tokens and passes that were run through the model inside
            `counting`.
        learned: the memories that plain mode has learned in this run, by method.
        store_bytes: how many bytes of memories are stored, in plain mode for each method.
    """

    def __init__(
        self, model: PreTrainedModel, mixed_precision_dtype: torch.dtype | None, plain: bool
    ) -> None:
        self.model = model
        self.plain = plain
        self.mixed_precision_dtype = mixed_precision_dtype
        self.without_positions: list[nn.Embedding] | None = None
        self.tokens_run = 0
        self.passes_run = 0
        self.learned: dict[Any, PrefixCache] = {}
        self.store_bytes = 0
        self._inside = False

    @contextmanager
    def inference_mode(self) -> Iterator[None]:
        """Inside this context, the model runs in its mode, without gradients, with a faster GELU.

        Evaluation mode stays afterwards.
        """
        with _running, torch.no_grad(), self.mixed_precision():
            if self._inside:
                yield
                return
            self.model.eval()  # dropout would change every number
            self._inside = True
            try:
                gelu = nullcontext() if self.plain else fused_gelu(self.model)
                with self.method_positions(), gelu:
                    yield
            finally:
                self._inside = False

    @contextmanager
    def counting(self) -> Iterator[None]:
        """`inference_mode` that also counts tokens and passes."""

        def count_tokens(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            inputs = args[0] if args else kwargs.get("input_ids")
            if inputs is None:
                inputs = kwargs["inputs_embeds"][..., 0]
            self.tokens_run += inputs.numel()
            self.passes_run += 1

        with (
            self.inference_mode(),
            self.model.register_forward_pre_hook(count_tokens, with_kwargs=True),
        ):
            yield

    def method_positions(self) -> AbstractContextManager[None]:
        """Inside this context, the model has no positions if the method has `positions=none`."""
        without = self.without_positions
        return nullcontext() if without is None else no_positions(self.model, without)

    def mixed_precision(self) -> torch.autocast:
        """torch's autocast, if `mixed_precision_dtype` is set.

        Many passes inside one context cast the weights once.
        """
        dtype = self.mixed_precision_dtype
        return torch.autocast(device_of(self.model).type, dtype=dtype, enabled=dtype is not None)
