"""Encodes demonstrations, and common beginnings of contexts, once for all contexts of a run.

In some methods, the keys and values of a demonstration (of its first copy) depend on the prefix and on itself alone. It
is then a block, and a context's memory is joined from those of prefix and blocks (`pcw` with windows of one
demonstration, `sbp`, `ape`). Tokens that see several demonstrations (second copies in `invicl`) run in a further pass.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, takewhile

import numpy as np
import torch
from scipy.sparse import csr_array
from scipy.sparse.csgraph import reverse_cuthill_mckee
from transformers import PreTrainedModel

from lm_eval_icl.errors import log
from lm_eval_icl.inference.budget import MemoryBudget
from lm_eval_icl.inference.capabilities import Capabilities
from lm_eval_icl.inference.memory import KeyValues, Memory, kept_of, masked_pass
from lm_eval_icl.inference.packing import Queries
from lm_eval_icl.inference.schedule import ContextWork
from lm_eval_icl.methods.base import Method
from lm_eval_icl.prompts.layouts import Layout
from lm_eval_icl.prompts.tokens import Context, Ids, TokenizedPrompt

# Contexts are joined from blocks if the distinct blocks have at most this part of the tokens of all
# demonstrations in the contexts. Above it, joining copies more than it saves: contexts whose
# demonstrations hardly occur again run faster side by side, each in one pass.
_LARGEST_SHARE = 0.9


@dataclass(frozen=True)
class BlockContext(Context):
    """A prefix and one demonstration. Its memory has only the entries of the demonstration."""

    __hash__ = Context.__hash__


def blocks_of(context: Context) -> list[BlockContext]:
    return [BlockContext(context.prefix, (part,)) for part in context.demonstrations]


def has_blocks(method: Method) -> bool:
    """Whether a demonstration (or its first copy) sees only the prefix and itself, and has the positions that it would
    have without the other demonstrations."""
    if method.memory_depends_on_query or not method.encodes_by_layout or method.repeat > 1:
        return False
    row = method.layout(1, [2, 3])
    others = [i for i, block in enumerate(row.blocks) if block.name != "P"]
    return all(
        row.blocks[i].start == row.step and row.sees[i, others].sum() == row.sees[i, i]
        for i in others
        if not row.blocks[i].name.endswith("'")
    )


class BlockStore:
    """Joins the memories of contexts from blocks. The memories of blocks are stored in the same store as others.

    Args:
        budget: how much runs at once, and the store of memories.

    Attributes:
        contexts: the contexts that are joined, each with its blocks.
        counts: of the contexts that were divided, how many demonstrations they have, how many of
            these are distinct, and how many were encoded once and joined (all of them, or none).
    """

    def __init__(
        self, model: PreTrainedModel, method: Method, can: Capabilities, budget: MemoryBudget
    ) -> None:
        self.model = model
        self.method = method
        self.can = can
        self.budget = budget
        self.store = budget.store
        self.can_divide = can.can_pack and can.position_switch is None
        self.has_blocks = self.can_divide and has_blocks(method)
        self.contexts: dict[Context, list[BlockContext]] = {}
        self._uses = Counter[BlockContext]()
        self.counts = Counter[str]()

    def divide(self, contexts: list[Context]) -> list[Context]:
        """Decide whether contexts are joined, and return them in the order in which they are scored. If the store is
        too small for all blocks, contexts with common blocks are near each other in this order, which makes the matrix
        of contexts and blocks narrow (reverse Cuthill-McKee)."""
        several = (
            [context for context in contexts if context.demonstrations] if self.has_blocks else []
        )
        self.contexts = {context: blocks_of(context) for context in several}
        self._uses = Counter(block for parts in self.contexts.values() for block in parts)
        to_encode = sum(
            len(block.demonstrations[0]) for block in self._uses if block not in self.store
        )
        in_contexts = sum(sum(context.lengths) for context in several)
        joined = len(several) > 1 and to_encode <= _LARGEST_SHARE * in_contexts
        demonstrations = self._uses.total()
        self.counts.update(demonstrations=demonstrations, distinct=len(self._uses))
        if not joined:
            self.contexts = {}
            return contexts
        self.counts["joined"] += demonstrations
        [first] = self.store.several([next(iter(self._uses))])
        size = (
            first.nbytes
            // max(len(first), 1)
            * sum(len(block.demonstrations[0]) for block in self._uses)
        )
        text = "%s: the %d distinct demonstrations of %d contexts take %d bytes, and store_bytes=%d %s."
        about = self.method.name, len(self._uses), len(self.contexts), size, self.store.max_bytes
        if size <= self.store.max_bytes:
            log.info(text, *about, "holds them")
            return contexts
        log.warning(text, *about, "holds less: some are encoded again")
        numbers = {block: len(contexts) + i for i, block in enumerate(self._uses)}
        pairs = [
            (i, numbers[b])
            for i, context in enumerate(contexts)
            for b in self.contexts.get(context, ())
        ]
        at, n = np.array(pairs, dtype=np.int32).T, len(contexts) + len(numbers)
        half = csr_array((np.ones(len(pairs), dtype=np.int8), (at[0], at[1])), shape=(n, n))
        order = reverse_cuthill_mckee((half + half.T).tocsr(), symmetric_mode=True)
        return [contexts[i] for i in order.tolist() if i < len(contexts)]

    def forget(self, context: Context) -> None:
        """Drop the blocks that no other unscored context needs."""
        for block in self.contexts.get(context, ()):
            self._uses[block] -= 1
            if not self._uses[block]:
                self.store.forget(block)

    def work(self, context: Context, queries: Queries, once: bool) -> Iterable[ContextWork]:
        """`Method.work`; for a context that is joined, the work that is left once its blocks are encoded."""
        if context not in self.contexts:
            return self.method.work(context, queries, once)
        row, kept = (
            self.method.layout(len(context.prefix), context.lengths),
            self.method.footprint(context).kept,
        )
        joined = len(context.tokens)
        return [
            ContextWork(
                context,
                sorted(queries.items()),
                len(row) - joined,
                kept,
                max(joined, kept),
                alone=False,
            )
        ]

    def encode(self, blocks: Sequence[Context]) -> list[Memory]:
        """`Method.encode`, or the memories of blocks with the same prefix: from one pass on the prefix's memory, in
        which no block sees another."""
        if not isinstance(blocks[0], BlockContext):
            return self.method.encode(self.model, blocks)
        parts, start = [block.demonstrations[0] for block in blocks], len(blocks[0].prefix)
        [prefix] = self.store.several([Context(blocks[0].prefix, ())])
        lengths, names = [*map(len, parts)], {f"D{i + 1}" for i in range(len(parts))}
        row = _on_memory_of({"P"}, self.method.layout(start, lengths).take({"P", *names}))
        [layers] = masked_pass(
            self.model, [[token for part in parts for token in part]], [row], [prefix]
        )
        split = [
            (keys.split(lengths, dim=2), values.split(lengths, dim=2)) for keys, values in layers
        ]
        return [  # copies, since a view of one block would keep all blocks from being freed
            Memory(
                [(keys[i].clone(), values[i].clone()) for keys, values in split],
                list(part),
                start + len(part),
            )
            for i, part in enumerate(parts)
        ]

    def memories(self, contexts: Sequence[Context]) -> Sequence[Memory]:
        """The memories of contexts that run side by side. Either all of them are joined, or none."""
        if contexts[0] not in self.contexts:
            return self.store.once(contexts)
        blocks = dict.fromkeys(block for context in contexts for block in self.contexts[context])
        encoded = dict(zip(blocks, self.store.several([*blocks], self._together), strict=True))
        prefixes = self.store.several([Context(context.prefix, ()) for context in contexts])
        rows = [self.method.layout(len(context.prefix), context.lengths) for context in contexts]
        memories = []
        for context, prefix, row in zip(contexts, prefixes, rows, strict=True):
            layers = _joined(
                [prefix.layers, *(encoded[block].layers for block in self.contexts[context])]
            )
            memories.append(Memory(layers, context.tokens, row.end))
        longer = [i for i, row in enumerate(rows) if len(row) > len(memories[i])]
        if longer:  # these rows also have tokens that see several demonstrations
            firsts = {
                "P",
                *(
                    f"D{i + 1}"
                    for i in range(max(len(context.demonstrations) for context in contexts))
                ),
            }
            tokens = {i: [contexts[i].tokens[at] for at in rows[i].source] for i in longer}
            new = [tokens[i][len(memories[i]) :] for i in longer]
            layouts = [_on_memory_of(firsts, rows[i]) for i in longer]
            ran = masked_pass(self.model, new, layouts, [memories[i] for i in longer])
            for i, layers in zip(longer, ran, strict=True):
                whole = Memory(_joined([memories[i].layers, layers]), tokens[i], rows[i].end)
                memories[i] = kept_of(rows[i], whole)
        return list(map(self.method.read, memories, contexts))

    def beginning_alike(
        self, prompts: Sequence[tuple[TokenizedPrompt, Ids]]
    ) -> list[tuple[TokenizedPrompt, Ids]]:
        """The same prompts, with their answers, divided elsewhere: if several contexts begin with the same
        demonstrations, these become the context, and later demonstrations belong to the query. This is done only if
        contexts are ordinary causal passes, and if it saves more tokens than `pack_tokens`."""
        groups: dict[object, dict[Context, None]] = defaultdict(dict)
        for context in (
            prompt.context
            for prompt, _ in prompts
            if self.can_divide and prompt.context.demonstrations
        ):
            groups[context.prefix, context.demonstrations[0]][context] = None
        beginning: dict[Context, Context] = {}
        for contexts in groups.values():
            parts = zip(*(context.demonstrations for context in contexts), strict=False)
            alike = tuple(same[0] for same in takewhile(lambda same: len({*same}) == 1, parts))
            shared = Context(next(iter(contexts)).prefix, alike)
            saves = (len(contexts) - 1) * len(shared.tokens) > self.budget.sizes.pack_tokens
            by_number = {len(context.demonstrations): context for context in (shared, *contexts)}
            if saves and all(map(self.method.is_ordinary, by_number.values())):
                beginning |= dict.fromkeys(contexts, shared)

        def divided(prompt: TokenizedPrompt, shared: Context) -> TokenizedPrompt:
            return TokenizedPrompt(
                shared, (*prompt.context.tokens[len(shared.tokens) :], *prompt.query)
            )

        return [
            (divided(p, beginning[p.context]) if p.context in beginning else p, a)
            for p, a in prompts
        ]

    def _together(self, blocks: Sequence[Context]) -> int:
        """How many of the first blocks are encoded in one pass."""
        alike = [*takewhile(lambda block: block.prefix == blocks[0].prefix, blocks)]
        ends = accumulate(
            (len(block.demonstrations[0]) for block in alike), initial=len(blocks[0].prefix)
        )
        most = self.budget.sizes.pack_tokens
        return max(sum(end <= most and self.can.sees_all_of(end) for end in ends) - 1, 1)


def _on_memory_of(names: Collection[str], row: Layout) -> Layout:
    """A row in which the blocks with these names are entries of a memory."""
    return replace(
        row, blocks=tuple(replace(b, name="M") if b.name in names else b for b in row.blocks)
    )


def _joined(parts: Sequence[KeyValues]) -> KeyValues:
    """The entries of several memories, joined in order."""
    layers = zip(*filter(None, parts), strict=True)
    return [
        (torch.cat([k for k, _ in layer], 2), torch.cat([v for _, v in layer], 2))
        for layer in layers
    ]
