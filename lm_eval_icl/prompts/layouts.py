"""Which token attends to which, and at which position: every method's attention as plain data.

A *block* is the prefix, one copy of one demonstration, the query or the answer. A method's
`Pattern` says which demonstration sees (may attend to) which demonstration. `lay_out` arranges all
blocks in a row of tokens, the `Layout`: the prefix, then the demonstrations, then the query. All
blocks see the prefix. The query sees the last copies of the demonstrations. A layout is computed
from lengths alone. `Layout.source` says which token ids of a prompt stand in the row.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from lm_eval_icl.errors import InputError

POSITIONS = ("sequential", "symmetric", "none")


# Masks between n blocks of demonstrations: [n, n] bool. True means that the row's block attends to
# all tokens of the column's block. Masks compose with & and |. On the diagonal, False means that a
# block attends to itself causally, and True that each token attends to all tokens of its block.


def nothing(n: int) -> Tensor:
    """No block sees another block: [n, n] bool."""
    return torch.zeros(n, n, dtype=torch.bool)


def everything(n: int) -> Tensor:
    """Every block sees all tokens of every block, itself included: [n, n] bool."""
    return ~nothing(n)


def before(n: int) -> Tensor:
    """Every block sees the blocks before it: [n, n] bool."""
    return everything(n).tril(-1)


def others(n: int) -> Tensor:
    """Every block sees all other blocks (leave one out): [n, n] bool."""
    return ~torch.eye(n, dtype=torch.bool)


def same(groups: Sequence[int] | Tensor) -> Tensor:
    """Every block sees all blocks of its group, itself included: [n, n] bool.

    Args:
        groups: [n] the number of each block's group.
    """
    numbers = torch.as_tensor(groups, dtype=torch.long)
    return numbers[:, None] == numbers


@dataclass(frozen=True)
class Pattern:
    """Which block of demonstrations sees which block."""

    # [blocks, blocks] bool. The blocks are all demonstrations in order. With two copies, they are
    # followed by all demonstrations in order again. The diagonal is that of the masks above.
    sees: Tensor
    # The number of copies of every demonstration in the row. The query sees the last copies only.
    copies: int = 1
    # [blocks] the number of each block's window. With symmetric positions, all windows begin at the
    # same position, and the blocks of a window follow each other. None: a window for each block.
    windows: Sequence[int] | Tensor | None = None
    query: bool = False  # the demonstrations also see all of the query


@dataclass(frozen=True)
class Block:
    """Adjacent tokens of a row that see the same other blocks and have consecutive positions."""

    # P: the prefix; D1, D2, ...: demonstrations; D1': the second copy of D1; Q: the query; A: the
    # answer; M: entries of a memory (keys and values of tokens that do not run again).
    name: str
    length: int  # its number of tokens, at least 1
    start: int  # the position of its first token
    source: int  # the index of its first token in the prompt, in which every part occurs once


class SeenKeys(NamedTuple):
    """The slices of a row that some adjacent tokens attend to."""

    by_all: list[slice]  # all of the tokens attend to these
    by_some: list[slice]  # only some of the tokens attend to these


@dataclass(frozen=True)
class Layout:
    """A row of n tokens: which token attends to which, and at which position each token is."""

    blocks: tuple[Block, ...]
    sees: Tensor  # [blocks, blocks] bool: the row's block attends to all of the column's block
    kept: tuple[bool, ...]  # for each block: tokens that run after the row attend to it
    end: int  # the position of the first token after the row
    step: int = 1  # the distance of adjacent tokens' positions; 0 without positional information
    # The row begins with a memory of the same blocks (`again`). Each block also attends causally
    # to its own block M.
    sees_earlier_pass: bool = False

    def __len__(self) -> int:
        return sum(block.length for block in self.blocks)

    def rule(self, query: Tensor, key: Tensor) -> Tensor:
        """The mask as a function of token indices: True where `query` attends to `key`.

        A token attends to the blocks that `sees` gives for its block, and causally to its block
        itself (`_itself`). Entries of a memory attend to nothing.
        """

        def on_device(part: Tensor) -> Tensor:
            return part.to(query.device, non_blocking=query.is_cuda)

        block = on_device(self._block)
        place = on_device(self._place)
        row = block[query]
        column = block[key]
        itself = on_device(self._itself)[row, column] & (place[query] >= place[key])
        return on_device(self.sees)[row, column] | itself

    def keys(self, rows: slice) -> SeenKeys:
        """The slices of the row that the adjacent tokens `rows` attend to.

        Args:
            rows: at least one token, and no entries of a memory.
        """
        block = self._block
        place = self._place
        last = rows.stop - 1
        attending = slice(int(block[rows.start]), int(block[last]) + 1)
        by_all = self.sees[attending].all(dim=0)[block]
        by_some = self.sees[attending].any(dim=0)[block]
        causal = self._itself[attending].any(dim=0)[block]
        if block[rows.start] == block[last]:
            # All rows see the tokens of their block that stand before the first row.
            by_all |= causal & (place < place[rows.start])
            causal &= place <= place[last]
        return SeenKeys(slices(by_all), slices((by_some | causal) & ~by_all))

    @cached_property
    def mask(self) -> Tensor:
        """`rule` for all pairs of tokens: [n, n] bool."""
        tokens = torch.arange(len(self))
        return self.rule(tokens[:, None], tokens)

    @cached_property
    def positions(self) -> Tensor:
        """The position of each token: [n] int64."""
        starts = _numbers(block.start for block in self.blocks)
        return starts[self._block] + self.step * self._place

    @cached_property
    def source(self) -> list[int]:
        """n indices into the prompt. The row is `[prompt[i] for i in layout.source]`."""
        sources = _numbers(block.source for block in self.blocks)
        return (sources[self._block] + self._place).tolist()

    @cached_property
    def kept_tokens(self) -> list[int]:
        """The indices of the tokens to which tokens after the row attend."""
        return _booleans(self.kept)[self._block].nonzero()[:, 0].tolist()

    @cached_property
    def causal(self) -> bool:
        """Every token sees exactly itself and the tokens before it, so no mask is needed."""
        # The diagonal makes no difference for a block of one token.
        sees = self.sees & ~torch.diag(~self._has_several_tokens)
        return bool(self._runs.all()) and torch.equal(sees, before(len(self.blocks)))

    @property
    def looks_ahead(self) -> bool:
        """Some token sees a later token."""
        both_ways = self.sees.diagonal() & self._has_several_tokens
        return bool(self.sees.triu(1).any() or both_ways.any())

    @property
    def sequential(self) -> bool:
        """Every token's position is its index, so no `position_ids` are needed."""
        n = len(self)
        return self.step == 1 and self.end == n and torch.equal(self.positions, torch.arange(n))

    @cached_property
    def entries(self) -> int:
        """The number of entries of a memory at the beginning of the row. They do not run again."""
        return int((~self._runs[self._block]).sum())

    @property
    def reach(self) -> int:
        """The number of positions that the row takes: its largest position plus 1."""
        lasts = (block.start + self.step * (block.length - 1) for block in self.blocks)
        return max(lasts, default=-1) + 1

    def take(self, names: Collection[str]) -> Layout:
        """The layout of only the blocks with these names. "PQ" stands for "P" and "Q"."""
        return self._of([i for i, block in enumerate(self.blocks) if block.name in names])

    def numbered_from(self, first: int) -> Layout:
        """This row with D1 named D(first + 1), and so on.

        A row may have only some demonstrations of a prompt. These are their names in the prompt,
        in which `first` demonstrations stand before them.
        """

        def renamed(block: Block) -> Block:
            if not block.name.startswith("D"):
                return block
            bare = block.name.rstrip("'")
            primes = block.name[len(bare) :]
            return replace(block, name=f"D{int(bare[1:]) + first}{primes}")

        return replace(self, blocks=tuple(map(renamed, self.blocks)))

    def on_memory(self, memory: Layout) -> Layout:
        """This row, run on the memory of another row.

        The blocks that the other row keeps become blocks M at the beginning. All tokens see them.
        """
        kept_blocks = zip(memory.blocks, memory.kept, strict=True)
        entries = tuple(replace(block, name="M") for block, keep in kept_blocks if keep)
        n = len(entries)
        sees = nothing(n + len(self.blocks))
        sees[n:, :n] = True
        sees[n:, n:] = self.sees
        blocks = entries + self.blocks
        return replace(self, blocks=blocks, sees=sees, kept=(True,) * n + self.kept)

    def again(self, by: int, reads: Tensor | None = None) -> Layout:
        """This row, run once more on the memory of its first run, at positions increased by `by`.

        The memory has an entry for every token of the row. The entries become blocks M at the
        beginning.

        Args:
            reads: [blocks] bool: all tokens attend to the entries of these blocks. If None, a token
                attends to the entries of the tokens that it attends to in the row.
        """
        n = len(self.blocks)
        blocks = tuple(replace(block, start=block.start + by) for block in self.blocks)
        memory = replace(self, kept=(True,) * n)
        row = replace(self, blocks=blocks, end=self.end + by).on_memory(memory)
        row.sees[n:, :n] = self.sees if reads is None else reads
        return replace(row, kept=self.kept * 2, sees_earlier_pass=reads is None)

    def _of(self, indices: Sequence[int]) -> Layout:
        """The layout of only the blocks with these indices, in this order."""
        return replace(
            self,
            blocks=tuple(self.blocks[i] for i in indices),
            sees=self.sees[indices][:, indices],
            kept=tuple(self.kept[i] for i in indices),
        )

    @cached_property
    def _block(self) -> Tensor:
        """The index of each token's block: [n] int64."""
        lengths = _numbers(block.length for block in self.blocks)
        return torch.arange(len(lengths)).repeat_interleave(lengths)

    @cached_property
    def _place(self) -> Tensor:
        """The index of each token in its block: [n] int64."""
        firsts = _numbers(accumulate((block.length for block in self.blocks), initial=0))
        return torch.arange(len(self)) - firsts[self._block]

    @cached_property
    def _runs(self) -> Tensor:
        """The blocks that are run through the model, and are no memory: [blocks] bool."""
        return _booleans(block.name != "M" for block in self.blocks)

    @cached_property
    def _has_several_tokens(self) -> Tensor:
        """[blocks] bool."""
        return _booleans(block.length > 1 for block in self.blocks)

    @cached_property
    def _itself(self) -> Tensor:
        """The column's block is the row's block, in this or the earlier pass: [blocks, blocks]."""
        itself = torch.diag(self._runs)
        if self.sees_earlier_pass:
            n = int(self._runs.sum())
            itself[-n:, :n] |= torch.eye(n, dtype=torch.bool)
        return itself


def _numbers(numbers: Iterable[int]) -> Tensor:
    return torch.tensor(list(numbers), dtype=torch.long)


def _booleans(booleans: Iterable[bool]) -> Tensor:
    return torch.tensor(list(booleans), dtype=torch.bool)


def slices(marked: Tensor) -> list[slice]:
    """The slices in which a vector of booleans is True."""
    zero = torch.zeros(1, dtype=torch.int)
    edges = torch.diff(marked.int(), prepend=zero, append=zero).nonzero()[:, 0].tolist()
    return list(map(slice, edges[::2], edges[1::2]))


def side_by_side(layouts: Sequence[Layout]) -> Layout:
    """Several rows as one row, in which no token sees a token of another row.

    The entries of all memories come first, then the tokens of all rows.

    Args:
        layouts: at least one; all have the same `step` and `sees_earlier_pass`.
    """
    if len(layouts) == 1:
        return layouts[0]
    blocks: list[Block] = []
    kept: list[bool] = []
    for layout in layouts:
        blocks += layout.blocks
        kept += layout.kept
    joint = replace(
        layouts[0],
        blocks=tuple(blocks),
        sees=torch.block_diag(*(layout.sees for layout in layouts)).bool(),
        kept=tuple(kept),
        end=max(layout.end for layout in layouts),
    )
    # Sorting is stable, so blocks keep their order otherwise.
    return joint._of(sorted(range(len(blocks)), key=lambda i: blocks[i].name != "M"))


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
    """The layout of a context, followed by query and answer if their lengths are given.

    Every part sees the prefix, and itself causally. On the diagonal of `Pattern.sees`, True lets
    the tokens of a block see the whole block. The query sees the prefix and the last copies. The
    answer sees the prefix, the last copies and the query.

    Args:
        prefix, demonstrations, query, answer: numbers of tokens.
        pattern: which block sees which block, for the blocks of all repetitions and copies.
        positions: "sequential": each block follows the block before it. "symmetric": every window
            begins at the end of the prefix, and the query follows the longest window (InvICL,
            Appendix A.1). "none": all tokens are at position 0.
        repeat: the sequence of demonstrations stands in the row this many times. Copies are made of
            all of it.
        query_start: the query's position, if it does not depend on the demonstrations of this row.

    Raises:
        InputError: the pattern has another number of blocks. (torch might broadcast it silently.)
    """
    step = 0 if positions == "none" else 1
    lengths = list(demonstrations) * repeat * pattern.copies
    _check_shape(pattern.sees, len(lengths))
    starts, end = _positions(prefix, lengths, pattern, positions)
    if query_start is not None and step:
        end = query_start

    # The index in the prompt of each demonstration's first token. The last one is the query's.
    sources = [*accumulate(demonstrations, initial=prefix)]
    blocks = [Block("P", prefix, 0, 0)]
    n = len(demonstrations) * repeat
    for i, length in enumerate(lengths):
        copy, number = divmod(i, n)
        name = f"D{number + 1}" + "'" * copy
        blocks.append(Block(name, length, starts[i], sources[i % len(demonstrations)]))
    blocks.append(Block("Q", query, end, sources[-1]))
    blocks.append(Block("A", answer, end + step * query, sources[-1] + query))

    # Block 0 is the prefix, blocks 1 to -3 are demonstrations, -2 is the query, -1 the answer.
    sees = nothing(len(blocks))
    sees[1:, 0] = True
    sees[1:-2, 1:-2] = pattern.sees
    sees[1:-2, -2] = pattern.query
    first_of_last_copies = len(blocks) - 2 - n
    sees[-2:, first_of_last_copies:-2] = True
    sees[-1, -2] = True
    kept = tuple(i == 0 or i >= first_of_last_copies for i in range(len(blocks)))
    row = Layout(tuple(blocks), sees, kept, end + step * (query + answer), step)
    return row._of([i for i, block in enumerate(blocks) if block.length])


def _check_shape(sees: Tensor, n: int) -> None:
    if sees.dtype != torch.bool or sees.shape != (n, n):
        raise InputError(
            f"sees must be booleans of shape [{n}, {n}], and is {sees.dtype} of shape "
            f"{list(sees.shape)}."
        )


def _positions(
    prefix: int, lengths: Sequence[int], pattern: Pattern, positions: str
) -> tuple[list[int], int]:
    """The position of the first token of each demonstration, and of the first token after all."""
    if positions == "none":
        return [0] * len(lengths), 0
    windows = [0] * len(lengths)
    if positions == "symmetric":
        windows = list(range(len(lengths)))
        if pattern.windows is not None:
            windows = torch.as_tensor(pattern.windows).tolist()
    ends = dict.fromkeys(windows, prefix)  # window -> the position after its last token so far
    starts = []
    for window, length in zip(windows, lengths, strict=True):
        starts.append(ends[window])
        ends[window] += length
    return starts, max(ends.values(), default=prefix)
