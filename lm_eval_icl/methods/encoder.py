"""A method on a model: contexts, as token ids, are encoded as memories."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from transformers import PreTrainedModel

from lm_eval_icl.errors import checked_whole
from lm_eval_icl.inference.budget import MemoryBudget, room_for_trials
from lm_eval_icl.inference.capabilities import Capabilities, probe
from lm_eval_icl.inference.devices import device_of
from lm_eval_icl.inference.memory import Memory, progress
from lm_eval_icl.inference.positions import learned_positions, position_embeddings
from lm_eval_icl.inference.prefix_cache import PrefixCache
from lm_eval_icl.inference.running import RunningModel
from lm_eval_icl.inference.schedule import Ids, Sizes, side_by_side
from lm_eval_icl.methods import needs
from lm_eval_icl.methods.base import Memories, Method
from lm_eval_icl.methods.limits import PromptLimits
from lm_eval_icl.prompts.tokens import Context

T = TypeVar("T")


class Encoder(RunningModel):
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
        capabilities: what the model can do, if that has been tried, which takes some fifty short passes.

    Attributes:
        capabilities: what the model can do.
        store: the stored memories.
        budget: how much runs at once.
        quiet: no bar is shown while a long context is encoded. The first of several processes shows it.
        packs_ahead: how many packs are begun before the scores of a pack are handed on: on an accelerator one, which
            runs while these are read.

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
        super().__init__(model, mixed_precision_dtype)
        self.softmax_dtype, self.tensor_parallel = softmax_dtype, tensor_parallel
        self.quiet = os.environ.get("RANK", "0") != "0"
        with self.inference_mode(), room_for_trials(model):
            self.capabilities = capabilities or probe(model)
            self._learned_positions = learned_positions(model)
        needs.check(method, model, self.capabilities)
        if method.reads_in_parts:
            with self.inference_mode(), room_for_trials(model):
                needs.check_parts(method, model)
        needs.warn(model, self.capabilities)
        if method.positions == "none":
            with self.inference_mode(), room_for_trials(model):
                embeddings = list(position_embeddings(model))
            self.without_positions = embeddings
            with self.inference_mode(), room_for_trials(model):
                needs.check_no_positions(method, model, probe(model))
        with self.inference_mode():
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
        """The limits that prompts have to stay within (`PromptLimits.of`)."""
        return PromptLimits.of(self.method, self.model, self.capabilities, self._learned_positions, max_length)

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

    def _stored(self, contexts: Sequence[Context]) -> list[Memory]:
        """The memories of contexts that come up again, each encoded alone: they have the same bits in whatever is left
        of a run."""
        return [self.store[context] for context in contexts]

    def _not_stored(self, contexts: Sequence[Context]) -> list[Memory]:
        """The memories of contexts that come with a single query, side by side as far as they fit into a pass."""
        work = [part for context in contexts for part in self.method.work(context, {}, own=True)]
        memories: list[Memory] = []
        while (at := len(memories)) < len(contexts):
            n, _ = side_by_side(work, self.budget.sizes, self.capabilities, at)
            memories += self.store.once(contexts[at : at + max(n, 1)])
        return memories

    def _encode_queries(
        self, asked: Sequence[tuple[Context, Ids]], memories: Memories, can: Capabilities | None = None
    ) -> list[tuple[Memory, Ids]]:
        """The memory behind which each query runs, and what is left of the query (`Method.encode_queries`)."""
        tokens = 0
        if self.method.memory_depends_on_query:
            tokens = sum(self.method.tokens_for(context, len(query))[0] for context, query in asked)
        with progress(self.model, tokens, self.quiet):
            return self.method.encode_queries(self.model, asked, memories, can)

    def _behind(self, context: Context, query: Ids) -> tuple[Memory, Ids | None]:
        """The memory of a context; if it depends on the query, that of the query, and the part of it still to run."""
        if self.method.memory_depends_on_query:
            return self._encode_queries([(context, query)], self._stored)[0]
        return self.store[context], None

    def fit(self, run: Callable[[], T], halve: Callable[[], str] = str, context: Context | None = None) -> T:
        """`MemoryBudget.fit` in `inference_mode`."""
        with self.inference_mode():
            return self.budget.fit(run, halve, context)
