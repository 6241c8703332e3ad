"""Makes and stores the memories of contexts for a run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from transformers import PreTrainedModel

from lm_eval_icl.inference.budget import MemoryBudget
from lm_eval_icl.inference.capabilities import Capabilities
from lm_eval_icl.inference.memory import Memory
from lm_eval_icl.inference.packing import Queries
from lm_eval_icl.inference.prefix_cache import PrefixCache
from lm_eval_icl.inference.schedule import ContextWork, Sizes, side_by_side
from lm_eval_icl.methods.base import Method
from lm_eval_icl.methods.joining import Joining, Separate
from lm_eval_icl.prompts.tokens import Context


class ContextEncoder:
    """The memories of a run: each context is encoded once, by itself, beside others, or from its demonstrations.

    Args:
        method: the method, for this model (`Method.bind`).
        sizes: how much runs at once at the beginning.
        store_bytes: how many bytes of keys and values are stored.
        where: the model and the device, for the message about out-of-memory.
        tensor_parallel: each pass is divided among several processes.
        softmax_dtype: the dtype of the softmax over the vocabulary. None: at least float32.

    Attributes:
        store: the stored memories.
        budget: how much runs at once.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        method: Method,
        can: Capabilities,
        *,
        sizes: Sizes,
        store_bytes: int,
        where: str,
        tensor_parallel: bool = False,
        softmax_dtype: torch.dtype | None = None,
    ) -> None:
        self.model = model
        self.method = method
        self.can = can
        self.softmax_dtype = softmax_dtype
        self.store = PrefixCache(self._encode, store_bytes)
        self.budget = MemoryBudget(self.store, sizes, where, tensor_parallel)
        self.joining = Joining(model, method, can, self.budget)

    def memories(self, contexts: Sequence[Context]) -> list[Memory]:
        """The memories of contexts. Those that are not stored are encoded, many in one pass, and stored."""
        if any(context in self.joining.contexts for context in contexts):
            return self.joining.memories(contexts)
        return self.store.several(contexts, self._together)

    def for_one_pass(self, contexts: Sequence[Context]) -> Sequence[Memory]:
        """The memories of contexts whose queries all run in the next pass. They are encoded in one pass."""
        if any(context in self.joining.contexts for context in contexts):
            return self.joining.memories(contexts)
        return self.store.once(contexts)

    def work(self, context: Context, queries: Queries, once: bool) -> Iterable[ContextWork]:
        """What the schedule needs to know of a context and its queries. `once`: as for `Method.work`."""
        if context in self.joining.contexts:
            return [self.joining.work(context, queries)]
        return self.method.work(context, queries, once)

    def forget(self, context: Context) -> None:
        """Drop all stored memories of a context that no later request has."""
        for stored in self.method.contexts(context):
            self.store.forget(stored)
        self.joining.forget(context)

    def _encode(self, contexts: Sequence[Context]) -> list[Memory]:
        if isinstance(contexts[0], Separate):
            return self.joining.encode(contexts)
        return self.method.encode(self.model, contexts)

    def _together(self, missing: Sequence[Context]) -> int:
        """How many of the first contexts are encoded in one pass."""
        work = [self.method.context_work(context, {}, once=True) for context in missing]
        count, _ = side_by_side(work, self.budget.sizes, self.can)
        return max(count, 1)
