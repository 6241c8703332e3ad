"""Text generated behind a memory, by transformers' own `generate`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from lm_eval.api.instance import Instance
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel

from lm_eval_icl.errors import InputError
from lm_eval_icl.memory import Memory, device_of


def continue_from(
    model: PreTrainedModel,
    generate: Callable[..., Tensor],
    memory: Memory,
    queries: Sequence[Sequence[int]],
    pad: int,
) -> list[list[int]]:
    """Continue every query from the memory, all in one batch.

    A row is `memory | padding | query`: the padding is masked, and `generate` counts positions by the
    mask, so a query starts right behind the memory; where it stands elsewhere, positions are given. The
    memory's own tokens are given for their number, and for logit processors that look at what stands
    before; they do not run through the model again.

    Args:
        generate: the model's, called with `context` [rows, tokens], `attention_mask` of that shape, a cache and
            perhaps `position_ids`; returns [rows, tokens and what was generated].
        queries: one row each, at least one token each.
        pad: the id to pad with.

    Returns:
        The generated ids of each row, in the order of `queries`, to the longest row's length.
    """
    longest = max(map(len, queries))
    rows = [[*memory.tokens, *[pad] * (longest - len(query)), *query] for query in queries]
    mask = torch.ones(len(rows), len(rows[0]), dtype=torch.long, device=device_of(model))
    for row, query in zip(mask, queries, strict=True):
        row[len(memory) : len(row) - len(query)] = 0
    context = torch.tensor(rows, device=device_of(model))
    # Counted from the end of the memory; what stands before is not run.
    positions = memory.positions((mask.cumsum(-1) - 1 - len(memory)).clamp(min=0))
    # Without entries there is nothing to continue from, and `generate` makes its own cache.
    cache = {"past_key_values": memory.cache()} if memory.layers else {}
    with memory.reading(model):
        output = generate(context=context, attention_mask=mask, **positions, **cache)
    return output[:, context.shape[1] :].tolist()


class Finite(LogitsProcessor):
    """Stops a generation whose next token is chosen by numbers that are none: the greatest of NaNs is a token too.

    Args:
        requests: of the rows, in order; a request may have several rows beside each other (beams).
        dtype: the model's, for the message.

    Raises:
        InputError: a row of the scores, [rows, vocabulary], has NaN, or nothing above minus infinity.
    """

    def __init__(self, requests: Sequence[Instance], dtype: torch.dtype) -> None:
        self.requests, self.dtype = requests, dtype

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        greatest = scores.amax(-1)  # NaN where there is one
        if not greatest.isfinite().all():
            row = int(greatest.isfinite().int().argmin()) * len(self.requests) // len(scores)  # several beams a request
            request = self.requests[row]
            raise InputError(
                f"lm-eval-icl: task {request.task_name!r}, document {request.doc_id}: the scores of the next token are "
                f"{float(greatest[~greatest.isfinite()][0])} ({self.dtype}): the checkpoint is broken, or its numbers "
                "overflow. Try --model_args dtype=float32."
            )
        return scores
