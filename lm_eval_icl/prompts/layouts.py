"""Which token attends to which, and at which position: the attention of every method, as plain data.

A *block* is the prefix, one copy of one demonstration, the query or the answer. A method's `Pattern` says which
demonstration sees (may attend to) which demonstration. `lay_out` arranges all blocks in a row of tokens, the `Layout`:
first the prefix, which all blocks see, then the demonstrations, then the query, which sees their last copies. A layout
is computed from lengths alone. `Layout.source` then says which token ids or embeddings stand in the row.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from lm_eval_icl.errors import InputError

POSITIONS = ("sequential", "symmetric", "none")


# Masks between n blocks of demonstrations, [n, n] bool: True where the row's block attends to all tokens of the
# column's block. Masks compose with & and |. On the diagonal, False means that a block attends to itself causally, and
# True that each of its tokens attends to all tokens of the block.


def nothing(n: int) -> Tensor:
    """[n, n] bool: no block sees another block."""
    return torch.zeros(n, n, dtype=torch.bool)


def everything(n: int) -> Tensor:
    """[n, n] bool: every block sees all tokens of every block, itself included."""
    return torch.ones(n, n, dtype=torch.bool)


def before(n: int) -> Tensor:
    """[n, n] bool: every block sees the blocks before it."""
    return everything(n).tril(-1)


def others(n: int) -> Tensor:
    """[n, n] bool: every block sees all other blocks (leave one out)."""
    return ~torch.eye(n, dtype=torch.bool)


def same(groups: Tensor) -> Tensor:
    """[n, n] bool: every block sees all blocks of its group, itself included. `groups` is [n], the groups' numbers."""
    return groups[:, None] == groups[None, :]


@dataclass(frozen=True)
class Pattern:
    """Which block of demonstrations sees which block."""

    # [blocks, blocks] bool. The blocks are all demonstrations in order and, with two copies, all of them in order
    # again. On the diagonal, True: each token of the block sees all tokens of the block; False: causal attention.
    sees: Tensor
    copies: int = 1  # how many copies of every demonstration the row has. The query sees the last copies only.
    # [blocks], the number of each block's window. With symmetric positions, all windows begin at the same position, and
    # the blocks of a window follow each other. None puts every block into a separate window.
    windows: Tensor | None = None
    query: bool = False  # whether the demonstrations also see all of the query


@dataclass(frozen=True)
class Block:
    """Adjacent tokens of a row that see the same other blocks and have consecutive positions."""

    # P: the prefix; D1, D2, ...: demonstrations; D1': the second copy of D1; Q: the query; A: the answer; M: entries of
    # a memory (keys and values of tokens that are not run again).
    name: str
    length: int  # its number of tokens, at least 1
    start: int  # the position of its first token
    source: int  # the index of its first token in the prompt, in which every part occurs once


@dataclass(frozen=True)
class Layout:
    """A row of n tokens: which token attends to which, and at which position each token is."""

    blocks: tuple[Block, ...]
    sees: Tensor  # [blocks, blocks] bool: whether the row's block attends to all tokens of the column's block
    kept: tuple[bool, ...]  # for each block, whether tokens that run after the row attend to it
    end: int  # the position of the first token after the row
    step: int = 1  # the difference between the positions of adjacent tokens; 0 without positional information
    # The row begins with a memory of the same blocks (`again`), and each block attends causally to its block M, too.
    sees_earlier_pass: bool = False

    def __len__(self) -> int:
        return sum(block.length for block in self.blocks)

    def rule(self, query: Tensor, key: Tensor) -> Tensor:
        """The mask as a function: whether the tokens `query` attend to the tokens `key`; both are indices in the row.

        A token attends to the blocks that `sees` gives for its block, and causally to the block itself (`_itself`).
        Entries of a memory attend to nothing.
        """
        parts = (self._block, self.sees, self._itself, self._place)
        block, sees, itself, place = (
            part.to(query.device, non_blocking=query.is_cuda) for part in parts
        )
        row, column = block[query], block[key]
        return sees[row, column] | (itself[row, column] & (place[query] >= place[key]))

    def keys(self, rows: slice) -> tuple[list[slice], list[slice]]:
        """The slices of the row that all of the tokens `rows` attend to, and the slices that only some attend to.

        Args:
            rows: the adjacent tokens that attend: at least one, and no entries of a memory.
        """
        block, place = self._block, self._place
        first, last = int(block[rows.start]), int(block[rows.stop - 1])
        sees, causal = self.sees[first : last + 1], self._itself[first : last + 1].any(dim=0)[block]
        all_see, some_see = sees.all(dim=0)[block], sees.any(dim=0)[block]
        if (
            first == last
        ):  # the rows are in one block: all of them see the block's tokens before the first row
            all_see |= causal & (place < place[rows.start])
            causal &= place <= place[rows.stop - 1]
        return slices(all_see), slices((some_see | causal) & ~all_see)

    @cached_property
    def mask(self) -> Tensor:
        """[n, n] bool: `rule` for all pairs of tokens."""
        return self.rule(torch.arange(len(self))[:, None], torch.arange(len(self)))

    @cached_property
    def positions(self) -> Tensor:
        """[n] int64: the position of each token."""
        starts = torch.tensor([block.start for block in self.blocks], dtype=torch.long)
        return starts[self._block] + self.step * self._place

    @cached_property
    def source(self) -> list[int]:
        """n indices into the prompt, which has every part once. The row is `[prompt[i] for i in layout.source]`."""
        sources = torch.tensor([block.source for block in self.blocks], dtype=torch.long)
        indices: list[int] = (sources[self._block] + self._place).tolist()
        return indices

    @cached_property
    def kept_tokens(self) -> list[int]:
        """The indices in the row of the tokens to which tokens after the row attend."""
        indices: list[int] = (
            torch.tensor(self.kept, dtype=torch.bool)[self._block].nonzero()[:, 0].tolist()
        )
        return indices

    @cached_property
    def causal(self) -> bool:
        """Whether every token sees exactly itself and the tokens before it, so that no mask is needed."""
        single = torch.tensor([block.length == 1 for block in self.blocks], dtype=torch.bool)
        sees = self.sees & ~torch.diag(
            single
        )  # for a block of one token, the diagonal makes no difference
        return bool(self._runs.all()) and torch.equal(sees, before(len(self.blocks)))

    @property
    def looks_ahead(self) -> bool:
        """Whether some token sees a later token."""
        both_ways = (
            torch.tensor([block.length > 1 for block in self.blocks], dtype=torch.bool)
            & self.sees.diagonal()
        )
        return bool(self.sees.triu(1).any() or both_ways.any())

    @property
    def sequential(self) -> bool:
        """Whether every token's position is its index, so that no `position_ids` are needed."""
        n = len(self)
        return self.step == 1 and self.end == n and torch.equal(self.positions, torch.arange(n))

    @cached_property
    def entries(self) -> int:
        """The number of entries of a memory at the beginning of the row. They are not run again."""
        return int((~self._runs[self._block]).sum())

    @property
    def reach(self) -> int:
        """How many positions the row takes: its largest position plus 1."""
        return max(
            (block.start + self.step * (block.length - 1) + 1 for block in self.blocks), default=0
        )

    def take(self, names: Collection[str]) -> Layout:
        """The layout of only the blocks with these names. A string such as "PQ" stands for names of one letter each."""
        indices = [i for i, block in enumerate(self.blocks) if block.name in names]
        blocks, kept = tuple(self.blocks[i] for i in indices), tuple(self.kept[i] for i in indices)
        return replace(self, blocks=blocks, sees=self.sees[indices][:, indices], kept=kept)

    def numbered_from(self, first: int) -> Layout:
        """This row with other names: D1 becomes D(first + 1), and so on. These are the names in the whole prompt if the
        row has only some of its demonstrations, and `first` demonstrations stand before them."""

        def name(block: Block) -> str:
            bare = block.name.rstrip("'")
            return (
                f"D{int(bare[1:]) + first}{block.name[len(bare) :]}"
                if bare.startswith("D")
                else bare
            )

        return replace(
            self, blocks=tuple(replace(block, name=name(block)) for block in self.blocks)
        )

    def on_memory(self, memory: Layout) -> Layout:
        """This row, run on the memory of another row. The blocks that the other row keeps become blocks M at the
        beginning of this row, and all tokens of this row see them."""
        entries = [
            replace(block, name="M")
            for block, keep in zip(memory.blocks, memory.kept, strict=True)
            if keep
        ]
        n, rows = len(entries), len(self.blocks)
        sees = nothing(n + rows)
        sees[n:, :n] = True
        sees[n:, n:] = self.sees
        return replace(
            self, blocks=(*entries, *self.blocks), sees=sees, kept=(True,) * n + self.kept
        )

    def again(self, by: int, reads: Tensor | None = None) -> Layout:
        """This row, run once more with all positions increased by `by`, on the memory of the first run, in which every
        token of the row has an entry. The entries become blocks M at the beginning.

        Args:
            reads: [blocks] bool: the blocks whose entries all tokens attend to. If None, a token attends to the entries
                of the tokens that it attends to in the row.
        """
        n = len(self.blocks)
        blocks = tuple(replace(block, start=block.start + by) for block in self.blocks)
        row = replace(self, blocks=blocks, end=self.end + by).on_memory(
            replace(self, kept=(True,) * n)
        )
        row.sees[n:, :n] = self.sees if reads is None else reads
        return replace(row, kept=self.kept * 2, sees_earlier_pass=reads is None)

    @cached_property
    def _block(self) -> Tensor:
        """[n] int64: the index of each token's block."""
        lengths = torch.tensor([block.length for block in self.blocks], dtype=torch.long)
        return torch.arange(len(self.blocks)).repeat_interleave(lengths)

    @cached_property
    def _place(self) -> Tensor:
        """[n] int64: the index of each token in its block."""
        firsts = torch.tensor(
            [*accumulate((block.length for block in self.blocks), initial=0)], dtype=torch.long
        )
        return torch.arange(len(self)) - firsts[self._block]

    @cached_property
    def _runs(self) -> Tensor:
        """[blocks] bool: whether the block is run through the model. Entries of a memory are not."""
        return torch.tensor([block.name != "M" for block in self.blocks], dtype=torch.bool)

    @cached_property
    def _itself(self) -> Tensor:
        """[blocks, blocks] bool: whether the column's block is the row's block, in this pass or in the earlier pass."""
        itself = torch.diag(self._runs)
        if self.sees_earlier_pass:
            rows = int(self._runs.sum())
            itself[-rows:, :rows] |= torch.eye(rows, dtype=torch.bool)
        return itself


def slices(marked: Tensor) -> list[slice]:
    """The slices in which a vector of booleans is True."""
    edges = torch.diff(
        marked.int(), prepend=marked.new_zeros(1).int(), append=marked.new_zeros(1).int()
    )
    bounds = edges.nonzero()[:, 0].tolist()
    return [slice(start, stop) for start, stop in zip(bounds[::2], bounds[1::2], strict=True)]


def side_by_side(layouts: Sequence[Layout]) -> Layout:
    """Several rows as one row, in which no token sees a token of another row: first the entries of all memories, then
    the tokens of all rows.

    Args:
        layouts: at least one; all have the same `step` and `sees_earlier_pass`.
    """
    if len(layouts) == 1:
        return layouts[0]
    blocks = [block for layout in layouts for block in layout.blocks]
    kept = [keep for layout in layouts for keep in layout.kept]
    order = sorted(
        range(len(blocks)), key=lambda i: blocks[i].name != "M"
    )  # stable: the others keep their order
    return Layout(
        blocks=tuple(blocks[i] for i in order),
        sees=torch.block_diag(*(layout.sees for layout in layouts)).bool()[order][:, order],
        kept=tuple(kept[i] for i in order),
        end=max(layout.end for layout in layouts),
        step=layouts[0].step,
        sees_earlier_pass=layouts[0].sees_earlier_pass,
    )


def lay_out(
    prefix: int,
    demonstrations: Sequence[int],
    pattern: Pattern,
    positions: str,
    query: int = 0,
    answer: int = 0,
    *,
    repeat: int = 1,
    query_start: int | None = None,
) -> Layout:
    """The layout of a context, followed by the query and the continuation if their lengths are given.

    Every part sees the prefix, and itself causally; on the diagonal of `Pattern.sees`, True lets the tokens of a block
    see the whole block. The query sees the prefix and the last copies. The continuation sees the prefix, the last
    copies and the query.

    Args:
        prefix, demonstrations, query, answer: numbers of tokens.
        pattern: which block of demonstrations sees which block, for the blocks of all repetitions and copies.
        positions: "sequential": each block follows the block before it. "symmetric": every window begins at the end of
            the prefix, and the query follows the longest window (InvICL, Appendix A.1). "none": all are at position 0.
        repeat: how many times the sequence of demonstrations is repeated, before copies are made of it.
        query_start: the query's position, if it does not depend on the demonstrations of this row.

    Raises:
        InputError: the pattern has another number of blocks. (torch might broadcast such a pattern without an error.)
    """
    n, step = len(demonstrations) * repeat, 0 if positions == "none" else 1
    lengths = list(demonstrations) * repeat * pattern.copies
    if pattern.sees.dtype != torch.bool or pattern.sees.shape != (len(lengths), len(lengths)):
        found = f"{pattern.sees.dtype} of shape {list(pattern.sees.shape)}"
        raise InputError(
            f"sees must be booleans of shape [{len(lengths)}, {len(lengths)}], and is {found}."
        )
    windows = list(range(len(lengths))) if pattern.windows is None else pattern.windows.tolist()
    windows = [0] * len(lengths) if positions == "sequential" else windows
    ends, start = dict.fromkeys(windows, prefix), []
    for window, length in zip(windows, lengths, strict=True):
        start.append(ends[window])
        ends[window] += length
    end = max(ends.values(), default=prefix) if query_start is None else query_start
    if positions == "none":
        start, end = [0] * len(lengths), 0
    # The index in the prompt of each demonstration's first token, and of the query's.
    source = [*accumulate(demonstrations, initial=prefix)]
    blocks = [Block("P", prefix, 0, 0)]
    for i, (length, at) in enumerate(zip(lengths, start, strict=True)):
        name = f"D{i % n + 1}" + "'" * (i // n)
        blocks.append(Block(name, length, at, source[i % len(demonstrations)]))
    blocks += [
        Block("Q", query, end, source[-1]),
        Block("A", answer, end + step * query, source[-1] + query),
    ]

    # Block 0 is the prefix, blocks 1 to -3 are the demonstrations, -2 is the query and -1 the continuation.
    sees = nothing(len(blocks))
    sees[1:, 0] = True
    sees[1:-2, 1:-2] = pattern.sees
    sees[1:-2, -2] = pattern.query
    last = slice(len(blocks) - 2 - n, len(blocks) - 2)
    sees[-2:, last] = True
    sees[-1, -2] = True
    kept = [True] * len(blocks)
    kept[1 : last.start] = [False] * (last.start - 1)

    nonempty = [i for i, block in enumerate(blocks) if block.length]
    return Layout(
        blocks=tuple(blocks[i] for i in nonempty),
        sees=sees[nonempty][:, nonempty],
        kept=tuple(kept[i] for i in nonempty),
        end=end + step * (query + answer),
        step=step,
    )
