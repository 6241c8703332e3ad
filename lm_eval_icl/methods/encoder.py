"""Makes and stores the memories of contexts for a run."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

import torch
from transformers import PreTrainedModel

from lm_eval_icl.inference.budget import MemoryBudget
from lm_eval_icl.inference.capabilities import Capabilities
from lm_eval_icl.inference.devices import device_of
from lm_eval_icl.inference.memory import Memory
from lm_eval_icl.inference.packing import Queries
from lm_eval_icl.inference.prefix_cache import PrefixCache
from lm_eval_icl.inference.schedule import ContextWork, Sizes, side_by_side
from lm_eval_icl.methods.base import Method
from lm_eval_icl.methods.stepwise import Stepwise
from lm_eval_icl.prompts.tokens import Context


class ContextEncoder:
    """The memories of a run. Each context is encoded once, by itself or beside others.

    Args:
        method: the method, for this model (`Method.bind`).
        sizes: how much runs at once at the beginning.
        store_bytes: how many bytes of keys and values are stored.
        tensor_parallel: each pass is divided among several processes.
        softmax_dtype: the dtype of the softmax over the vocabulary. None: at least float32.

    Attributes:
        store: the stored memories.
        budget: how much runs at once.
        counts: what is shared among contexts (`joining.JoiningEncoder`).
        learned: how many "contexts" were learned in how many "seconds", and in how many "steps"
            (`learned.LearningEncoder`) or on how many "rows" (`moicl`).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        method: Method,
        can: Capabilities,
        sizes: Sizes,
        store_bytes: int,
        tensor_parallel: bool,
        softmax_dtype: torch.dtype | None,
    ) -> None:
        self.model = model
        self.method = method
        self.can = can
        self.softmax_dtype = softmax_dtype
        self.counts = Counter[str]()
        self.learned = defaultdict[str, float](float)
        self.store = PrefixCache(self.encode, store_bytes)
        where = f"{type(model).__name__} on {device_of(model)}"
        self.budget = MemoryBudget(self.store, sizes, where, tensor_parallel)

    def order(self, contexts: list[Context]) -> list[Context]:
        """The contexts in the order in which they are scored."""
        return contexts

    def memories(self, contexts: Sequence[Context]) -> list[Memory]:
        """The memories of contexts. Those that are not stored are encoded, and stored."""
        return self.store.several(contexts, self.together)

    def for_one_pass(self, contexts: Sequence[Context]) -> Sequence[Memory]:
        """The memories of contexts whose queries all run in the next pass, from one pass."""
        return self.store.once(contexts)

    def work(self, context: Context, queries: Queries, once: bool) -> Sequence[ContextWork]:
        """What the schedule needs to know of a context and its queries (`Method.work`)."""
        return self.method.work(context, queries, once)

    def encode(self, contexts: Sequence[Context]) -> list[Memory]:
        """The memories of contexts, from one pass where the method has one."""
        return self.method.encode(self.model, contexts)

    def stepwise(self, context: Context) -> Iterator[Memory]:
        """The memories of a context after each step of a `Stepwise` method."""
        assert isinstance(self.method, Stepwise)
        for [memory] in self.method.memories(self.model, [context]):
            yield memory

    def together(self, contexts: Sequence[Context]) -> int:
        """How many of the first contexts are encoded in one pass."""
        work = []
        for context in contexts:
            footprint = self.method.footprint(context)
            alone = not (context.demonstrations and context.tokens)
            work.append(ContextWork(context, (), footprint.tokens, footprint.kept, alone=alone))
        count, _ = side_by_side(work, self.budget.sizes, self.can)
        return max(count, 1)

    def forget(self, context: Context) -> None:
        """Drop all stored memories of a context that no later request has."""
        for stored in self.method.contexts(context):
            self.store.forget(stored)
