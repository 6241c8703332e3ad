"""Log-likelihoods of answers, given a memory and a query."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lm_eval_icl.inference.blocks import last_block_at
from lm_eval_icl.inference.memory import Memory, additive, device_of
from lm_eval_icl.inference.packed_attention import in_parts
from lm_eval_icl.inference.packing import TokenTree

# A query and one of its continuations, as token ids; both have at least one token.
Pair = tuple[Sequence[int], Sequence[int]]
# The summed log-probability of a continuation (natural logarithm), and whether greedy decoding would produce it.
Score = tuple[float, bool]


def score_packed(
    model: PreTrainedModel,
    memory: Memory,
    pairs: Sequence[Pair],
    softmax_dtype: torch.dtype | None = None,
    trim_last_block: bool = False,
) -> list[Score]:
    """Score all pairs in one forward pass over the distinct tokens among them.

    The model must obey a 4-D mask and `position_ids` (`lm_eval_icl.inference.capabilities` tests both).

    Args:
        memory: what every query attends to.
        pairs: queries with continuations. The tokens of a common beginning of several pairs are run once.
        softmax_dtype: the dtype of the softmax over the vocabulary; if None, at least float32.
        trim_last_block: run the last block only for tokens that predict an answer (`inference.blocks.last_block_at`).

    Returns:
        The score of each pair, in order.
    """
    tree = TokenTree()
    # nodes[i]: for each token of pair i's continuation, the node that predicts it.
    nodes = [tree.add([*query, *answer[:-1]])[len(query) - 1 :] for query, answer in pairs]
    predicting = sorted({node for path in nodes for node in path})
    row = {node: i for i, node in enumerate(predicting)}
    device, length = device_of(model), len(memory)

    sees = tree.ancestors()
    visible = torch.cat([torch.ones(len(sees), length, dtype=torch.bool), sees], dim=1)
    cache = memory.cache(once=True)
    # `reading` may replace the first token's output of the last block, which then has to run for all tokens.
    whole = not trim_last_block or memory.residual is not None
    last = nullcontext() if whole else last_block_at(model, cache, predicting, len(tree.tokens))
    with memory.reading(model), last, in_parts(sees):
        logits = model(
            input_ids=torch.tensor([tree.tokens], device=device),
            position_ids=memory.query_start + torch.tensor([tree.depths], device=device),
            attention_mask=additive(visible, model.dtype)[None, None].to(device),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=torch.tensor(predicting),  # indices on the CPU can index a tensor on any device
        ).logits[0]  # [len(predicting), vocabulary]
    if len(logits) != len(predicting):  # the model ignores logits_to_keep
        logits = logits[predicting]
    return _read(logits, [[row[node] for node in path] for path in nodes], pairs, softmax_dtype)


def score_alone(
    model: PreTrainedModel,
    memory: Memory,
    query: Sequence[int],
    answers: Collection[Sequence[int]],
    softmax_dtype: torch.dtype | None = None,
) -> list[Score]:
    """Score one query's continuations by ordinary causal passes: one over the query, then one over each continuation.

    This is for models that do not obey a 4-D mask or `position_ids` (ALiBi, flash attention), and for rows longer than
    the window of local attention layers. `position_ids` are passed only if the query does not start at the memory's
    length. The query is run once for all its continuations.

    Args:
        answers: the continuations.
        softmax_dtype: the dtype of the softmax over the vocabulary; if None, at least float32.

    Returns:
        The score of each continuation, in order.
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


def _read(
    logits: Tensor, rows: Sequence[Sequence[int]], pairs: Sequence[Pair], dtype: torch.dtype | None
) -> list[Score]:
    """The score of each pair.

    Args:
        logits: [predicting tokens, vocabulary].
        rows: for each pair, the rows of the logits that predict its continuation's tokens.
    """
    dtype = dtype or torch.promote_types(logits.dtype, torch.float32)
    at = torch.tensor([row for path in rows for row in path], device=logits.device)
    tokens = torch.tensor([token for _, answer in pairs for token in answer], device=logits.device)
    logprobs = torch.empty(len(at), dtype=dtype, device=logits.device)
    for first in range(0, len(logits), 16):  # the softmax of all rows at once would take as much memory as the logits
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
