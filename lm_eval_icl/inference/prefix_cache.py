"""The prefix cache stores the memories of contexts, since many requests have the same context."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from lm_eval_icl.inference.memory import Memory
from lm_eval_icl.prompts.tokens import Context


class PrefixCache:
    """Memories by context. A context is encoded once in a run, unless its memory was dropped.

    Args:
        encode: computes the memories of several contexts.

    Attributes:
        max_bytes: the largest number of bytes of keys and values that are stored. If there are
            more, the least recently used memories are dropped. A memory that is larger by itself is
            returned, but not stored.
        encoded: the number of memories that were computed.
        reused: the number of times that a stored memory was returned.
    """

    def __init__(self, encode: Callable[[Sequence[Context]], Sequence[Memory]], max_bytes: int):
        self.encode = encode
        self.max_bytes = max_bytes
        self.encoded = 0
        self.reused = 0
        self._kept: OrderedDict[Context, Memory] = OrderedDict()
        self._bytes = 0

    def several(
        self,
        contexts: Sequence[Context],
        together: Callable[[Sequence[Context]], int] = lambda missing: 1,
    ) -> list[Memory]:
        """The memories of several contexts.

        All of them are returned, also if they are too large to be stored together.

        Args:
            together: a function of a list of contexts. It returns the number of them, from the
                first on, that are encoded in one pass.
        """
        memories = {context: self._kept[context] for context in contexts if context in self._kept}
        for context in memories:
            self.reused += 1
            self._kept.move_to_end(context)
        missing = [context for context in dict.fromkeys(contexts) if context not in memories]
        while missing:
            n = together(missing)
            new_memories = self.once(missing[:n])
            for context, memory in zip(missing[:n], new_memories, strict=True):
                memories[context] = memory
                if memory.nbytes <= self.max_bytes:
                    self._kept[context] = memory
                    self._bytes += memory.nbytes
                while self._bytes > self.max_bytes:
                    _, oldest = self._kept.popitem(last=False)
                    self._bytes -= oldest.nbytes
            missing = missing[n:]
        return [memories[context] for context in contexts]

    def __contains__(self, context: Context) -> bool:
        return context in self._kept

    def once(self, contexts: Sequence[Context]) -> Sequence[Memory]:
        """The memories of several contexts, encoded in one pass and not stored."""
        memories = self.encode(contexts)
        self.encoded += len(contexts)
        return memories

    def forget(self, context: Context) -> None:
        """Drop the memory of a context, if it is stored."""
        memory = self._kept.pop(context, None)
        if memory is not None:
            self._bytes -= memory.nbytes

    def shrink(self, used: Context | None = None) -> bool:
        """Drop all memories except the memory of the context `used`.

        From now on, store at most half of the bytes that were stored, or the bytes of the remaining
        memory if they are more.

        Returns:
            True if a memory was dropped.
        """
        held = self._bytes
        others = [
            context for context, memory in self._kept.items() if context != used and memory.nbytes
        ]
        for context in others:
            self.forget(context)
        if others:
            self.max_bytes = max(held // 2, self._bytes)
        return bool(others)
