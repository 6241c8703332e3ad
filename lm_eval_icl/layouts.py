"""Which token sees which, at which position: the attention of every method, as plain data.

A method says which *block* sees which (`Pattern`); a block is one copy of one demonstration. `lay_out` puts the
blocks in a row, between the prefix that all see and the query that sees the last copies, and spells the pattern
out for every token (`Layout`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

POSITIONS = ("sequential", "symmetric", "none")


# Masks between n blocks, [n, n] bool: whether the row's block may attend to all of the column's. They compose with
# & and |. A block sees itself causally whatever they say, and both ways where they say so on the diagonal.


def nothing(n: int) -> Tensor:
    """No other block."""
    return torch.zeros(n, n, dtype=torch.bool)


def everything(n: int) -> Tensor:
    """Every block, itself included: both ways."""
    return torch.ones(n, n, dtype=torch.bool)


def before(n: int) -> Tensor:
    """The blocks before it."""
    return everything(n).tril(-1)


def others(n: int) -> Tensor:
    """Every block but itself: leave one out."""
    return ~torch.eye(n, dtype=torch.bool)


def same(groups: Tensor) -> Tensor:
    """The blocks of its own group; `groups` is [n], a number a block."""
    return groups[:, None] == groups[None, :]


@dataclass(frozen=True)
class Pattern:
    """Which block of demonstrations sees which.

    Attributes:
        sees: [blocks, blocks] bool. The blocks are all demonstrations in order, then, with two copies, all of
            them again.
        copies: how often every demonstration stands there. Query and continuation see the last copy only.
        windows: [blocks], a number a block: under symmetric positions the blocks of a window follow each other.
            None for a window a block.
        query: whether the demonstrations also see all of the query.
    """

    sees: Tensor
    copies: int = 1
    windows: Tensor | None = None
    query: bool = False


@dataclass(frozen=True)
class Layout:
    """A row of tokens, ready to run.

    Attributes:
        tokens: n ids.
        positions: [n] where they stand.
        sees: [n, n] bool: whether the row's token may attend to the column's.
        kept: the indices of the entries that whatever follows the row attends to, in order.
        end: the position of what follows the row.
        blocks: (name, number of tokens) of each block in order: P, D1, ..., D1' (a second copy), Q, A.
    """

    tokens: list[int]
    positions: Tensor
    sees: Tensor
    kept: list[int]
    end: int
    blocks: list[tuple[str, int]]

    @property
    def causal(self) -> bool:
        """Every token sees exactly itself and those before it: no mask is needed."""
        return bool(torch.equal(self.sees, torch.ones_like(self.sees).tril()))

    @property
    def sequential(self) -> bool:
        """Every token's position is its index: none need be given."""
        return self.positions.tolist() == list(range(len(self.tokens))) and self.end == len(self.tokens)


def starts(prefix: int, lengths: Sequence[int], pattern: Pattern, positions: str) -> tuple[list[int], int]:
    """Where every block starts, and where the query does.

    "sequential": as the tokens stand. "symmetric": every window at the end of the prefix, the query behind the
    longest (InvICL, Appendix A.1). "none": nowhere, which is position 0 throughout.

    Args:
        prefix: its number of tokens.
        lengths: each block's number of tokens.
    """
    if positions == "none":
        return [0] * len(lengths), 0
    windows = list(range(len(lengths))) if pattern.windows is None else pattern.windows.tolist()
    if positions == "sequential":
        windows = [0] * len(lengths)
    ends = dict.fromkeys(windows, prefix)
    found = []
    for window, length in zip(windows, lengths, strict=True):
        found.append(ends[window])
        ends[window] += length
    return found, max(ends.values(), default=prefix)


def lay_out(
    prefix: Sequence[int],
    demonstrations: Sequence[Sequence[int]],
    pattern: Pattern,
    positions: str,
    query: Sequence[int] = (),
    answer: Sequence[int] = (),
) -> Layout:
    """Spell a pattern out for every token of a context, and of the query and continuation if they are given.

    Every part sees the prefix, and itself causally (DESIGN's section 3). The query sees the prefix and the last
    copies; the continuation sees what the query sees, and the query.
    """
    n, copies = len(demonstrations), list(demonstrations) * pattern.copies
    step = 0 if positions == "none" else 1
    start, end = starts(len(prefix), [len(copy) for copy in copies], pattern, positions)
    names = [f"D{i % n + 1}" + "'" * (i // n) for i in range(len(copies))]
    blocks = [("P", prefix, 0), *zip(names, copies, start, strict=True)]
    blocks += [("Q", query, end), ("A", answer, end + step * len(query))]

    # Between blocks first: 0 is the prefix, then the copies, -2 is the query and -1 the continuation.
    seen = nothing(len(blocks))
    seen[1:, 0] = True
    seen[1:-2, 1:-2] = pattern.sees
    seen[1:-2, -2] = pattern.query
    last = slice(len(blocks) - 2 - n, len(blocks) - 2)
    seen[-2:, last] = True
    seen[-1, -2] = True

    of = torch.tensor([b for b, (_, tokens, _) in enumerate(blocks) for _ in tokens], dtype=torch.long)
    causal = torch.ones(len(of), len(of), dtype=torch.bool).tril()
    at = [first + step * i for _, tokens, first in blocks for i in range(len(tokens))]
    read = [0, *range(last.start, len(blocks))]
    return Layout(
        tokens=[token for _, tokens, _ in blocks for token in tokens],
        positions=torch.tensor(at, dtype=torch.long),
        sees=seen[of][:, of] | (same(of) & causal),
        kept=[i for i, b in enumerate(of.tolist()) if b in read],
        end=end + step * (len(query) + len(answer)),
        blocks=[(name, len(tokens)) for name, tokens, _ in blocks if tokens],
    )
