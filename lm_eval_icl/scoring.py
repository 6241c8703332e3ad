"""Log-likelihoods of answers against a memory: every distinct token runs through the model once.

Queries and their options form a tree behind the memory: a query once, then each option's tokens but its
last (the last is predicted, never read). Many trees are packed into one row, in which a token sees the
memory and its own ancestors, and stands at the position it would have alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lm_eval_icl.attention import in_parts
from lm_eval_icl.blocks import last_block_at
from lm_eval_icl.memory import Memory, additive, device_of

# A query and one of its continuations, as token ids; both have at least one.
Pair = tuple[Sequence[int], Sequence[int]]
# A query with the continuations to score behind it; many of them.
Query = tuple[tuple[int, ...], Collection[tuple[int, ...]]]
Queries = Mapping[tuple[int, ...], Collection[tuple[int, ...]]]
# The summed log-probability of a continuation, and whether greedy decoding would produce it.
Score = tuple[float, bool]


def cost(queries: Iterable[Query]) -> int:
    """How many tokens run through the model in one pass over these queries."""
    tree = _Tree()
    for query, answers in queries:
        tree.add_query(query, answers)
    return len(tree.tokens)


def first_pack(queries: Sequence[Query], tokens: int, least: int = 1) -> list[Query]:
    """As many of the first queries as cost `tokens` together; `least` of them if that is more, but not far more: a
    pass has a mask as large as the square of its tokens."""
    tree = _Tree()
    for n, item in enumerate(queries):
        tree.add_query(*item)
        used = len(tree.tokens)
        if n and (used > 16 * tokens or (used > tokens and n >= least)):
            return list(queries[:n])
    return list(queries)


def score_packed(
    model: PreTrainedModel,
    memory: Memory,
    pairs: Sequence[Pair],
    softmax_dtype: torch.dtype | None = None,
    cut: bool = False,
) -> list[Score]:
    """Score all pairs in one forward pass over the distinct tokens among them.

    The model must obey a 4-D mask and given positions (`lm_eval_icl.probe` tells).

    Args:
        memory: what every query attends to.
        pairs: queries with continuations; pairs of one query, or of queries with a common beginning,
            share its tokens.
        softmax_dtype: the dtype of the softmax over the vocabulary; at least float32 if None.
        cut: run the last block where an answer is predicted and nowhere else (`lm_eval_icl.blocks.last_block_at`).
    """
    tree = _Tree()
    # nodes[i]: the node that predicts each of pair i's continuation tokens.
    nodes = [tree.add([*query, *answer[:-1]])[len(query) - 1 :] for query, answer in pairs]
    predicting = sorted({node for path in nodes for node in path})
    row = {node: i for i, node in enumerate(predicting)}
    device, length = device_of(model), len(memory)

    sees = tree.ancestors()
    visible = torch.cat([torch.ones(len(sees), length, dtype=torch.bool), sees], dim=1)
    cache = memory.cache(once=True)
    # What `reading` replaces is behind a block, all of whose output it takes.
    whole = not cut or memory.residual is not None
    last = nullcontext() if whole else last_block_at(model, cache, predicting, len(tree.tokens))
    with memory.reading(model), last, in_parts(sees):
        logits = model(
            input_ids=torch.tensor([tree.tokens], device=device),
            position_ids=memory.query_start + torch.tensor([tree.depths], device=device),
            attention_mask=additive(visible, model.dtype)[None, None].to(device),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=torch.tensor(predicting),  # indices on the CPU index a tensor on any device
        ).logits[0]  # [len(predicting), vocabulary]
    if len(logits) != len(predicting):  # a model that takes no notice of logits_to_keep
        logits = logits[predicting]
    return _read(logits, [[row[node] for node in path] for path in nodes], pairs, softmax_dtype)


def score_alone(
    model: PreTrainedModel,
    memory: Memory,
    query: Sequence[int],
    answers: Collection[Sequence[int]],
    softmax_dtype: torch.dtype | None = None,
) -> list[Score]:
    """Score one query's continuations by ordinary causal passes: the query, then each continuation on it.

    For models that take no mask or positions given by hand (ALiBi, flash attention), and beyond the window of local
    attention layers. Positions are given only where the query does not start at the memory's length. No token runs
    twice here either.
    """
    cache = memory.cache()

    def run(tokens: Sequence[int], depth: int, keep: int) -> Tensor:
        ids = torch.tensor([tokens], device=device_of(model))
        positions = memory.positions(depth + torch.arange(len(tokens), device=device_of(model))[None])
        output = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=keep, **positions)
        return output.logits[0, -keep:]

    scores = []
    with memory.reading(model):
        first = run(query, 0, 1)
        for answer in answers:
            logits = first
            if len(answer) > 1:
                logits = torch.cat([first, run(answer[:-1], len(query), len(answer) - 1)])
                cache.crop(1 - len(answer))
            scores += _read(logits, [list(range(len(answer)))], [(query, answer)], softmax_dtype)
    return scores


class _Tree:
    """Token sequences joined where they begin alike. A node is an index; parents come before children."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.depths: list[int] = []
        self._parents: list[int] = []
        self._children: dict[tuple[int, int], int] = {}

    def add(self, sequence: Sequence[int]) -> list[int]:
        """Add a sequence and return the node of each of its tokens."""
        path, node = [], -1
        for depth, token in enumerate(sequence):
            child = self._children.setdefault((node, token), len(self.tokens))
            if child == len(self.tokens):
                self.tokens.append(token)
                self.depths.append(depth)
                self._parents.append(node)
            path.append(node := child)
        return path

    def add_query(self, query: Sequence[int], answers: Collection[Sequence[int]]) -> None:
        """Add what runs for a query: itself, and each of its answers but the last token."""
        for branch in {tuple(answer[:-1]) for answer in answers}:
            self.add([*query, *branch])

    def ancestors(self) -> Tensor:
        """[nodes, nodes]: whether the row's node may attend to the column's, itself or an ancestor."""
        sees = torch.eye(len(self.tokens), dtype=torch.bool)
        for node, parent in enumerate(self._parents):
            if parent >= 0:
                sees[node] |= sees[parent]
        return sees


def _read(
    logits: Tensor, rows: Sequence[Sequence[int]], pairs: Sequence[Pair], dtype: torch.dtype | None
) -> list[Score]:
    """Each pair's score, its continuation's tokens predicted by these rows of the logits."""
    dtype = dtype or torch.promote_types(logits.dtype, torch.float32)
    at = torch.tensor([row for path in rows for row in path], device=logits.device)
    tokens = torch.tensor([token for _, answer in pairs for token in answer], device=logits.device)
    logprobs = torch.empty(len(at), dtype=dtype, device=logits.device)
    for first in range(0, len(logits), 16):  # the softmax of all at once would be as large as the logits again
        here = (at >= first) & (at < first + 16)
        part = logits[first : first + 16].log_softmax(-1, dtype=dtype)
        logprobs[here] = part[at[here] - first, tokens[here]]
    greedy = (logits.argmax(-1)[at] == tokens).tolist()
    scores, start, numbers = [], 0, logprobs.tolist()
    for path in rows:
        end = start + len(path)
        scores.append((sum(numbers[start:end]), all(greedy[start:end])))
        start = end
    return scores
