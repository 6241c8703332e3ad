"""Encodes demonstrations once for a run, and joins the memories of contexts from theirs.

In some methods, the keys and values of a demonstration (of its first copy) depend on the prefix and
on itself alone. Such a demonstration is *separate*. The memory of a context is then joined from
those of its prefix and its demonstrations (`pcw` with windows of one demonstration, `sbp`, `ape`).
Tokens that see several demonstrations (second copies in `invicl`) run in a further pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch
from scipy.sparse import csr_array
from scipy.sparse.csgraph import reverse_cuthill_mckee

from lm_eval_icl.errors import log
from lm_eval_icl.inference.memory import KeyValues, Memory, kept_of, masked_pass, split_entries
from lm_eval_icl.inference.packing import Queries
from lm_eval_icl.inference.schedule import ContextWork
from lm_eval_icl.methods.base import Method
from lm_eval_icl.methods.encoder import ContextEncoder
from lm_eval_icl.prompts.layouts import Layout
from lm_eval_icl.prompts.tokens import Context

# Contexts are joined if their distinct demonstrations have at most this part of the tokens of all
# contexts. Above it, joining copies more than it saves: contexts whose demonstrations hardly occur
# again run faster side by side, each in one pass.
_LARGEST_SHARE = 0.9


@dataclass(frozen=True)
class Separate(Context):
    """A prefix and one demonstration. Its memory has only the entries of the demonstration."""

    __hash__ = Context.__hash__


def separated(context: Context) -> list[Separate]:
    """The demonstrations of a context that have tokens."""
    return [Separate(context.prefix, (part,)) for part in context.demonstrations if part]


def has_separate_demonstrations(method: Method) -> bool:
    """Whether each demonstration sees the prefix and itself, at the positions it has alone.

    If there are two copies, this is asked of the first ones.
    """
    if method.memory_depends_on_query or not method.encodes_by_layout or method.repeat > 1:
        return False
    row = method.lay_out(1, [2, 3])
    demonstrations = [i for i, block in enumerate(row.blocks) if block.name != "P"]
    for i in demonstrations:
        if row.blocks[i].name.endswith("'"):
            continue
        sees_others = row.sees[i, demonstrations].sum() > row.sees[i, i]
        if sees_others or row.blocks[i].start != row.step:
            return False
    return True


class JoiningEncoder(ContextEncoder):
    """Joins the memories of contexts from those of their demonstrations, which are stored.

    Attributes:
        joined: the contexts that are joined, each with its demonstrations.
        counts: of all contexts, how many "demonstrations" they have, how many of these are
            "distinct", and how many were "joined": all of a call's, or none.
    """

    joined: Mapping[Context, Sequence[Separate]] = {}

    def order(self, contexts: list[Context]) -> list[Context]:
        """Decide whether contexts are joined, and return them in the order of scoring.

        If the store is too small for all demonstrations, contexts that share some are near each
        other.
        """
        self.joined = {}
        joined = {context: separated(context) for context in contexts if any(context.lengths)}
        # How many unscored contexts have each demonstration.
        self._uses = Counter(chain.from_iterable(joined.values()))
        new = sum(sum(part.lengths) for part in self._uses if part not in self.store)
        of_contexts = sum(sum(context.lengths) for context in joined)
        number = self._uses.total()
        self.counts.update(demonstrations=number, distinct=len(self._uses))
        if len(joined) < 2 or new > _LARGEST_SHARE * of_contexts:
            return contexts
        self.joined = joined
        self.counts["joined"] += number
        [first] = self.store.several([next(iter(self._uses))])
        bytes_of_entry = first.nbytes // max(len(first), 1)
        size = bytes_of_entry * sum(sum(part.lengths) for part in self._uses)
        holds = size <= self.store.max_bytes
        (log.info if holds else log.warning)(
            "%s: the %d distinct demonstrations of %d contexts take %d bytes, and store_bytes=%d "
            "%s",
            *(self.method.name, len(self._uses), len(joined), size, self.store.max_bytes),
            "holds them." if holds else "holds less: some are encoded again.",
        )
        return contexts if holds else near_each_other(contexts, joined, self._uses)

    def memories(self, contexts: Sequence[Context]) -> list[Memory]:
        return self._join(contexts) if contexts[0] in self.joined else super().memories(contexts)

    def for_one_pass(self, contexts: Sequence[Context]) -> Sequence[Memory]:
        return (
            self._join(contexts) if contexts[0] in self.joined else super().for_one_pass(contexts)
        )

    def work(self, context: Context, queries: Queries, once: bool) -> Sequence[ContextWork]:
        if context not in self.joined:
            return super().work(context, queries, once)
        # What is left, once the demonstrations are encoded.
        tokens = len(self.method.row(context)) - len(context.tokens)
        kept = self.method.footprint(context).kept
        shared = max(len(context.tokens), kept)
        return [ContextWork(context, sorted(queries.items()), tokens, kept, shared, alone=False)]

    def forget(self, context: Context) -> None:
        """Drop the memory of a context, and those of demonstrations that only it needs."""
        super().forget(context)
        for part in self.joined.get(context, ()):
            self._uses[part] -= 1
            if not self._uses[part]:
                self.store.forget(part)

    def encode(self, contexts: Sequence[Context]) -> list[Memory]:
        """The memories of contexts, or of demonstrations from one pass on their prefix's memory."""
        if not isinstance(contexts[0], Separate):
            return super().encode(contexts)
        prefix = contexts[0].prefix
        parts = [context.demonstrations[0] for context in contexts]
        lengths = [len(part) for part in parts]
        names = {f"D{i + 1}" for i in range(len(parts))}
        layout = self.method.lay_out(len(prefix), lengths).take({"P", *names})
        row = _on_memory(layout, len(prefix))
        memory = self.store.several([Context(prefix, ())])
        [layers] = masked_pass(self.model, [list(chain(*parts))], [row], memory)
        return [
            Memory(own, list(part), len(prefix) + len(part))
            for part, own in zip(parts, split_entries(layers, lengths), strict=True)
        ]

    def together(self, contexts: Sequence[Context]) -> int:
        """How many of the first contexts, or demonstrations, are encoded in one pass."""
        if not isinstance(contexts[0], Separate):
            return super().together(contexts)
        end = len(contexts[0].prefix)
        count = 0
        for context in contexts:
            end += sum(context.lengths)
            too_long = end > self.budget.sizes.pack_tokens or not self.can.sees_all_of(end)
            if context.prefix != contexts[0].prefix or too_long:
                break
            count += 1
        return max(count, 1)

    def _join(self, contexts: Sequence[Context]) -> list[Memory]:
        """The memories of contexts, joined from those of their demonstrations."""
        parts = list(dict.fromkeys(chain.from_iterable(map(separated, contexts))))
        encoded = dict(zip(parts, self.store.several(parts, self.together), strict=True))
        prefixes = self.store.several([Context(context.prefix, ()) for context in contexts])
        rows = [self.method.row(context) for context in contexts]
        memories = []
        for context, prefix, row in zip(contexts, prefixes, rows, strict=True):
            own = [encoded[part].layers for part in separated(context)]
            layers = _joined([prefix.layers, *own])
            memories.append(Memory(layers, list(context.tokens), row.end))
        if len(rows[0]) > len(memories[0]):
            memories = self._with_later_copies(contexts, rows, memories)
        return list(map(self.method.read, memories, contexts))

    def _with_later_copies(
        self, contexts: Sequence[Context], rows: Sequence[Layout], memories: Sequence[Memory]
    ) -> list[Memory]:
        """The memories of whole rows, after a pass over the tokens that see several demonstrations.

        Args:
            memories: the memories of prefix and first copies, which a row begins with.
        """
        ids_of_rows = [
            [context.tokens[i] for i in row.source]
            for context, row in zip(contexts, rows, strict=True)
        ]
        passes = masked_pass(
            self.model,
            [ids[len(memory) :] for ids, memory in zip(ids_of_rows, memories, strict=True)],
            [_on_memory(row, len(memory)) for row, memory in zip(rows, memories, strict=True)],
            memories,
        )
        whole = []
        for row, ids, memory, layers in zip(rows, ids_of_rows, memories, passes, strict=True):
            entries = _joined([memory.layers, layers])
            whole.append(kept_of(row, Memory(entries, ids, row.end)))
        return whole


def near_each_other(
    contexts: Sequence[Context],
    joined: Mapping[Context, Sequence[Separate]],
    demonstrations: Collection[Separate],
) -> list[Context]:
    """An order in which contexts that share demonstrations are near each other.

    It makes the matrix of contexts and demonstrations narrow (reverse Cuthill-McKee).
    """
    columns = {part: len(contexts) + i for i, part in enumerate(demonstrations)}
    pairs = []
    for i, context in enumerate(contexts):
        pairs += [(i, columns[part]) for part in joined.get(context, ())]
    rows_at, columns_at = np.array(pairs, dtype=np.int32).T
    n = len(contexts) + len(columns)
    half = csr_array((np.ones(len(pairs), dtype=np.int8), (rows_at, columns_at)), shape=(n, n))
    order = reverse_cuthill_mckee((half + half.T).tocsr(), symmetric_mode=True)
    return [contexts[i] for i in order.tolist() if i < len(contexts)]


def _on_memory(row: Layout, entries: int) -> Layout:
    """A row whose first tokens are entries of a memory."""
    blocks = []
    for block in row.blocks:
        blocks.append(replace(block, name="M") if entries > 0 else block)
        entries -= block.length
    return replace(row, blocks=tuple(blocks))


def _joined(parts: Sequence[KeyValues]) -> KeyValues:
    """The entries of several memories, joined in order."""
    joined = KeyValues()
    for layer in zip(*filter(None, parts), strict=True):
        keys = torch.cat([part_keys for part_keys, _ in layer], 2)
        values = torch.cat([part_values for _, part_values in layer], 2)
        joined.append((keys, values))
    return joined
