"""Packs many queries and their options into one row of tokens.

A query and its options form a tree of tokens: the query once, then the tokens of each option except its last token,
which is predicted and never an input. Many trees are packed into one row. A token of the row sees the memory, its
ancestors in the tree and itself, and has the position that it would have if its query ran alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

# A query with the continuations to score, as token ids; and many queries, each with its continuations.
QueryAnswers = tuple[tuple[int, ...], Collection[tuple[int, ...]]]
Queries = Mapping[tuple[int, ...], Collection[tuple[int, ...]]]


def first_packed_batch(
    queries: Sequence[QueryAnswers], tokens: int, at_least: int = 1
) -> tuple[list[QueryAnswers], int]:
    """The first of these queries, at least one, for one packed batch: as many as have `tokens` tokens together, but at
    least `at_least` queries if these have at most 16 times `tokens`. (The mask of a pass of n tokens is [n, n].)

    Returns:
        The queries, and how many tokens run for them.
    """
    tree, before = TokenTree(), 0
    for n, item in enumerate(queries):
        tree.add_query(*item)
        used = len(tree.tokens)
        if n and (used > 16 * tokens or (used > tokens and n >= at_least)):
            return list(queries[:n]), before
        before = used
    return list(queries), before


class TokenTree:
    """A tree of token sequences that stores common beginnings once (a trie).

    A node is an index into `tokens` and `depths`. A sequence shares its beginning with the sequence added before it, so
    that sorted sequences share as much as possible. All descendants of a node follow it directly, up to its end.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.depths: list[int] = []
        self._ends: list[int] = []
        # The sequence that was added last, and its nodes. Only these nodes have no end yet.
        self._last: Sequence[int] = ()
        self._path: list[int] = []

    def add(self, sequence: Sequence[int]) -> list[int]:
        """Add a sequence and return the node of each of its tokens."""
        pairs = enumerate(zip(self._last, sequence, strict=False))
        shared = next((i for i, (a, b) in pairs if a != b), min(len(self._last), len(sequence)))
        first = len(self.tokens)
        for node in self._path[shared:]:
            self._ends[node] = first
        self.tokens += sequence[shared:]
        self.depths += range(shared, len(sequence))
        self._ends += [0] * (len(sequence) - shared)  # set when a later sequence leaves the path
        self._path[shared:] = range(first, len(self.tokens))
        self._last = sequence
        return list(self._path)

    def leave(self) -> None:
        """Begin another tree: sequences that are added later share nothing with earlier sequences."""
        self.add([])

    def add_query(self, query: Sequence[int], answers: Collection[Sequence[int]]) -> None:
        """Add the tokens that run for a query: the query, and each of its answers without its last token."""
        for branch in sorted({tuple(answer[:-1]) for answer in answers}):
            self.add([*query, *branch])

    def ancestors(self) -> Tensor:
        """[nodes, nodes] bool: whether the column's node is the row's node or one of its ancestors."""
        n = len(self.tokens)
        ends, nodes, sees = (
            np.array(self._ends, dtype=np.int32),
            np.arange(n, dtype=np.int32),
            np.zeros((n, n), bool),
        )
        ends[self._path] = n
        roots = [node for node, depth in enumerate(self.depths) if depth == 0]
        for first, end in pairwise([*roots, n]):  # a node's ancestors are all in the same tree
            np.less(nodes[first:end, None], ends[first:end], out=sees[first:end, first:end])
        return torch.from_numpy(sees).tril_()
