"""A method on a model: what is done to the model while it runs, and contexts, as token ids, encoded as memories."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from lm_eval_icl.errors import InputError, checked_whole, log
from lm_eval_icl.inference.budget import MemoryBudget, room_for_trials
from lm_eval_icl.inference.caches import without_adapter
from lm_eval_icl.inference.capabilities import Capabilities, probe
from lm_eval_icl.inference.devices import device_of
from lm_eval_icl.inference.gelu import fused_gelu, gelus
from lm_eval_icl.inference.memory import Memory, progress
from lm_eval_icl.inference.positions import learned_positions, no_positions, position_embeddings
from lm_eval_icl.inference.prefix_cache import PrefixCache
from lm_eval_icl.inference.schedule import Ids, Sizes, side_by_side
from lm_eval_icl.methods import needs
from lm_eval_icl.methods.base import Memories, Method
from lm_eval_icl.methods.limits import PromptLimits
from lm_eval_icl.methods.several import Several
from lm_eval_icl.prompts.tokens import Context

T = TypeVar("T")
# After how many seconds the trials of what a model can do are mentioned.
_LONG = 5.0
# One lock for each model: see `Encoder.inference_mode`.
_locks: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()
_making_locks = threading.Lock()


class Encoder:
    """A method on a model: encodes contexts as memories, and stores these.

    Args:
        model: a causal language model of transformers.
        method: the method; arguments that depend on the model are filled in (`Method.bind`).
        pack_tokens: how many tokens of queries and options, and of contexts that run side by side, share one forward
            pass that scores.
        batch_size: how many texts are generated in one batch; how many queries that cannot be packed are scored in one
            batch; and, on an accelerator, how many queries at least share one packed pass.
        store_bytes: how many bytes of keys and values are stored for contexts that occur again.
        softmax_dtype: the dtype of the softmax over the vocabulary; if None, at least float32.
        mixed_precision_dtype: the dtype of autocast; None for no autocast.
        tensor_parallel: each pass is divided among several processes (tensor parallelism).
        capabilities: what the model can do, if that has been tried, which takes some thirty short passes.

    Attributes:
        capabilities: what the model can do.
        store: the stored memories.
        budget: how much runs at once.
        quiet: no bar is shown while a long context is encoded. The first of several processes shows it.
        packs_ahead: how many packs are begun before the scores of a pack are handed on: on an accelerator one, which
            runs while these are read.
        tokens_run: how many tokens were run through the model inside `counting`.
        passes_run: in how many forward passes.
        without_positions: the learned position embeddings that are switched off while the model runs; None if positions
            are left as they are.

    Raises:
        Unsupported: the model does not do what the method needs.
        InputError: the model cannot be used with any method, or an argument does not fit the model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        method: Method,
        *,
        pack_tokens: int = 1024,
        batch_size: int = 1,
        store_bytes: int = 2**31,
        softmax_dtype: torch.dtype | None = None,
        mixed_precision_dtype: torch.dtype | None = None,
        tensor_parallel: bool = False,
        capabilities: Capabilities | None = None,
    ) -> None:
        self.pack_tokens = checked_whole("pack_tokens", pack_tokens)
        batch_size = checked_whole("batch_size", batch_size)
        self.store_bytes = checked_whole("store_bytes", store_bytes)
        self.model, self.softmax_dtype, self.mixed_precision_dtype = model, softmax_dtype, mixed_precision_dtype
        self.tensor_parallel, self.quiet = tensor_parallel, os.environ.get("RANK", "0") != "0"
        self.without_positions: list[nn.Embedding] | None = None
        self._gelus, self._inside, self._counting = gelus(model), False, False
        with self.inference_mode(), room_for_trials(model):
            begun = time.monotonic()
            self.capabilities = capabilities or probe(model)
            if (seconds := time.monotonic() - begun) > _LONG:
                log.info("%.0f s were spent on trials of what %s can do.", seconds, type(model).__name__)
            self._learned_positions = learned_positions(model)
            needs.check(method, model, self.capabilities)
            if method.reads_in_parts:
                needs.check_parts(method, model)
            needs.warn(method, model, self.capabilities)
            embeddings = list(position_embeddings(model)) if method.positions == "none" else None
        self.without_positions = embeddings
        with self.inference_mode(), room_for_trials(model):
            if method.positions == "none":
                needs.check_no_positions(method, model)
            self.method = method.bind(model)
        self.begin(batch_size)

    def begin(self, batch_size: int) -> None:
        """Begin a run. The memories of an earlier run are dropped, since the model's weights may have changed."""
        self.store = PrefixCache(self._encode, self.store_bytes)
        device = device_of(self.model)
        # On a CPU, larger packs are slower, since most of their attention is masked.
        sizes = Sizes(self.pack_tokens, 1 if device.type == "cpu" else batch_size, batch_size)
        self.packs_ahead = 0 if device.type == "cpu" else 1
        self.budget = MemoryBudget(self.store, sizes, f"{type(self.model).__name__} on {device}", self.tensor_parallel)
        self.tokens_run = self.passes_run = 0

    def limits(self, max_length: int) -> PromptLimits:
        """The limits that prompts have to stay within.

        Args:
            max_length: how many positions the model has, or may use.

        Raises:
            InputError: the model has fewer learned position embeddings.
        """
        name, can, learned = type(self.model).__name__, self.capabilities, self._learned_positions
        if learned is not None and max_length > learned:
            raise InputError(
                f"max_length={max_length}: {name} has learned embeddings of {learned} positions and no more: give "
                f"max_length={learned} or less."
            )
        hint = self.method.overflow_hint if can.obeys_positions else ""
        window = needs.longest_row(self.method, can)
        keeps_window = needs.keeps_window(self.method, can)
        return PromptLimits(self.method, name, max_length, window, can.position_switch, hint, keeps_window)

    @property
    def invariant(self) -> bool:
        """Whether the order of the demonstrations makes no difference with this model, but for rounding."""
        return self.method.invariant and not needs.keeps_window(self.method, self.capabilities)

    # The model while it runs.

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
                with counter, self.own_positions(), fused_gelu(self._gelus):
                    yield
            finally:
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
            self.tokens_run += (args[0] if args else kwargs["input_ids"]).numel()
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

    # Memories.

    def _encode(self, contexts: Sequence[Context]) -> list[Memory]:
        """The memories of contexts that are not stored."""
        passes = getattr(self.method, self.method.counts_memories) if self.method.counts_memories else 1
        with progress(self.model, passes * sum(map(self._pass_length, contexts)), self.quiet):
            memories = self.method.encode(self.model, contexts)
        needs.check_memories(self.method, memories)
        return memories

    def _pass_length(self, context: Context) -> int:
        """How many tokens a pass over a context runs."""
        footprint = self.method.footprint(context)
        return footprint.kept if self.method.counts_memories else footprint.tokens

    def _memories(self, contexts: Sequence[Context]) -> list[Memory]:
        """The memories of contexts. Those that are not stored are encoded side by side, as far as they fit into a pass,
        and stored."""
        return self.store.several(contexts, self._side_by_side)

    def _side_by_side(self, contexts: Sequence[Context]) -> int:
        """How many of the first contexts are encoded in one pass."""
        method = self.method.of_window if isinstance(self.method, Several) else self.method
        work = [part for context in contexts for part in method.work(context, {}, once=True)]
        return max(side_by_side(work, self.budget.sizes, self.capabilities)[0], 1)

    def forget(self, context: Context) -> None:
        """Drop what is stored for a context that is not asked again."""
        several = self._several(context)
        for stored in several.contexts(context) if several else [context]:
            self.store.forget(stored)

    def _several(self, context: Context) -> Several | None:
        """The method, if queries run behind several memories of this context."""
        method = self.method
        return method if isinstance(method, Several) and len(method.contexts(context)) > 1 else None

    def _encode_queries(
        self, asked: Sequence[tuple[Context, Ids]], memories: Memories, can: Capabilities | None = None
    ) -> list[tuple[Memory, Ids]]:
        """The memory behind which each query runs, and what is left of the query (`Method.encode_queries`)."""
        tokens = 0
        if self.method.memory_depends_on_query:
            tokens = sum(self.method.tokens_for(context, len(query))[0] for context, query in asked)
        with progress(self.model, tokens, self.quiet):
            return self.method.encode_queries(self.model, asked, memories, can)

    def _behind(self, context: Context, query: Ids) -> tuple[list[Memory], Ids | None]:
        """The memory of a context, or those of its windows; if it depends on the query, that of the query, and the part
        of it still to run."""
        if self.method.memory_depends_on_query:
            [(memory, rest)] = self._encode_queries([(context, query)], self._memories)
            return [memory], rest
        several = self._several(context)
        return self._memories(several.contexts(context) if several else [context]), None

    def fit(self, run: Callable[[], T], halve: Callable[[], str] = str, context: Context | None = None) -> T:
        """`MemoryBudget.fit` in `inference_mode`."""
        with self.inference_mode():
            return self.budget.fit(run, halve, context)
