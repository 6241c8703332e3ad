"""Packs many queries and their options into one row of tokens.

A query and its options form a tree of tokens: the query once, then the tokens of each option except
its last token, which is predicted and never an input. Many trees are packed into one row. A token
of the row sees the memory, its ancestors in the tree and itself. It has the position that it would
have if its query ran alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lm_eval_icl.prompts.tokens import Ids

# A query with the continuations to score, as token ids.
QueryAnswers = tuple[Ids, Collection[Ids]]
# Many queries, each with its continuations.
Queries = Mapping[Ids, Collection[Ids]]


class Pack(NamedTuple):
    """Queries that run in one packed batch."""

    queries: list[QueryAnswers]
    tokens: int  # the number of tokens that run for them


def first_packed_batch(queries: Sequence[QueryAnswers], tokens: int, at_least: int = 1) -> Pack:
    """The first of these queries, at least one, for one packed batch.

    The mask of a pass of n tokens is [n, n].

    Args:
        tokens: the queries have this many tokens together.
        at_least: more tokens are allowed for this many queries, up to 16 times `tokens`.
    """
    tree = TokenTree()
    before = 0
    for n, item in enumerate(queries):
        tree.add_query(*item)
        used = len(tree.tokens)
        if n and (used > 16 * tokens or (used > tokens and n >= at_least)):
            return Pack(list(queries[:n]), before)
        before = used
    return Pack(list(queries), before)


class TokenTree:
    """A tree of token sequences that stores common beginnings once (a trie).

    A node is an index into `tokens` and `depths`. A sequence shares its beginning with the sequence
    added before it, so that sorted sequences share as much as possible. All descendants of a node
    follow it directly, up to its end.
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
        shared = 0
        for token, last_token in zip(sequence, self._last, strict=False):
            if token != last_token:
                break
            shared += 1
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
        """Begin another tree: later sequences share nothing with earlier ones."""
        self.add([])

    def add_query(self, query: Sequence[int], answers: Collection[Sequence[int]]) -> None:
        """Add the tokens that run for a query: it, and its answers without their last tokens."""
        for branch in sorted({tuple(answer[:-1]) for answer in answers}):
            self.add([*query, *branch])

    def ancestors(self) -> Tensor:
        """True where the column's node is the row's node or its ancestor: [nodes, nodes] bool."""
        n = len(self.tokens)
        nodes = np.arange(n, dtype=np.int32)
        ends = np.array(self._ends, dtype=np.int32)
        ends[self._path] = n
        sees = np.zeros((n, n), bool)
        roots = [node for node, depth in enumerate(self.depths) if depth == 0]
        for first, end in pairwise([*roots, n]):  # a node's ancestors are all in the same tree
            tree = slice(first, end)
            np.less(nodes[tree, None], ends[tree], out=sees[tree, tree])
        return torch.from_numpy(sees).tril_()
