"""Generates text behind a memory, with transformers' own `generate`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, LogitsProcessor, PreTrainedModel

from lm_eval_icl.errors import InputError
from lm_eval_icl.inference.caches import cache_argument, run_rows, takes_positions, without_adapter
from lm_eval_icl.inference.devices import device_of
from lm_eval_icl.inference.memory import Memory

# Arguments of transformers' `generate` that do not work with a memory, and why.
_REFUSED = {
    "max_length": "counts the prompt and its padding too; give the number of new tokens instead (max_gen_toks)",
    "use_cache": "would switch off the keys and values that the demonstrations are kept in; leave it out",
    "num_return_sequences": "gives more than one text for a prompt; leave it out",
    "return_dict_in_generate": "gives more than a text; leave it out",
    "prompt_lookup_num_tokens": "does not work on existing keys and values; leave it out",
    "assistant_model": "does not work on existing keys and values; leave it out",
}


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Refuse arguments of `generate` that do not work with a memory.

    Raises:
        InputError: there is one.
    """
    for name, why in _REFUSED.items():
        if name in arguments:
            raise InputError(f"generation argument {name}={arguments[name]!r} {why}.")


def continue_from(
    model: PreTrainedModel,
    generate: Callable[..., Tensor],
    memory: Memory,
    queries: Sequence[Sequence[int]],
    pad: int,
    beams: int = 1,
    stepwise: bool = False,
) -> list[list[int]]:
    """Continue every query behind the memory, all in one batch.

    A row of the batch is `memory | padding | query`. The padding is masked. `generate` counts positions by the mask,
    so a query starts directly after the memory; only if it is to start elsewhere are `position_ids` passed. The
    memory's token ids are part of the row because `generate` takes the length of the cache from them and logits
    processors may read them; they are not run through the model again.

    Args:
        generate: calls the model's `generate`. Its arguments are `context` [rows, tokens], `attention_mask` of the same
            shape, a cache, and `position_ids` if needed; it returns [rows, tokens + generated tokens].
        queries: the ids of each row's query, at least one.
        pad: the id of the padding token.
        beams: how many rows `generate` makes of each row (beam search).
        stepwise: the model reads tokens behind a memory only one by one. Then there is only one query.

    Returns:
        The generated ids of each row, in the order of `queries`; all rows are as long as the longest.
    """
    if stepwise and len(memory):
        *before, last = queries[0]
        memory, queries = _followed_by(model, memory, before), [[last]]
    longest = max(map(len, queries))
    rows = [[*memory.tokens, *[pad] * (longest - len(query)), *query] for query in queries]
    mask = torch.ones(len(rows), len(rows[0]), dtype=torch.long, device=device_of(model))
    for row, query in zip(mask, queries, strict=True):
        row[len(memory) : len(row) - len(query)] = 0
    context = torch.tensor(rows, device=device_of(model))
    # Counted from the end of the memory. The memory, which is not run, and the padding, which is masked, get 0.
    at = memory.positions((mask.cumsum(-1) - 1 - len(memory)).clamp(min=0))
    positions = {} if at is None else {"position_ids": at}
    # For an empty memory `generate` makes its own cache.
    cache: dict[str, Any] = {cache_argument(model): memory.cache(len(rows) * beams)} if len(memory) else {}
    for given in cache.values():
        if not isinstance(given, (Cache, list)):
            given.is_compileable = False  # `generate` asks caches of every class, and xLSTM's does not say
    cut = nullcontext() if "past_key_values" in cache else _unread_only(model, len(memory))
    with memory.reading(model), cut:
        output = generate(context=context, attention_mask=mask, **positions, **cache)
    return output[:, context.shape[1] :].tolist()


@contextmanager
def _unread_only(model: PreTrainedModel, read: int) -> Iterator[None]:
    """Inside this context, the next forward pass gets only the tokens behind the first `read`, which the cache has read
    already. `generate` itself leaves them out only if the cache is called `past_key_values`."""

    def cut(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        handle.remove()
        names = [name for name in ("input_ids", "attention_mask") if kwargs.get(name) is not None]
        return args, kwargs | {name: kwargs[name][:, read:] for name in names}

    handle = without_adapter(model).register_forward_pre_hook(cut, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _followed_by(model: PreTrainedModel, memory: Memory, tokens: Sequence[int]) -> Memory:
    """The memory of a model with other states after more tokens, which are run one by one."""
    if not tokens:
        return memory
    ids = torch.tensor([tokens], device=device_of(model))
    at = len(memory) + torch.arange(len(tokens), device=ids.device)[None] if takes_positions(model) else None
    _, state = run_rows(model, memory.cache(), ids, [len(tokens) - 1], at, stepwise=True)
    return Memory([], [*memory.tokens, *tokens], len(memory) + len(tokens), state=state)


class StopOnNonFinite(LogitsProcessor):
    """A logits processor that raises an error if the largest score is NaN or infinite; argmax would return a token.

    Args:
        names: the names of the rows in order, for the message. A name may belong to several adjacent rows (beams).
        dtype: the model's dtype, for the message.

    Raises:
        InputError: a row of the scores, [rows, vocabulary], contains NaN or infinity, or only minus infinity.
    """

    def __init__(self, names: Sequence[str], dtype: torch.dtype) -> None:
        self.names, self.dtype = names, dtype

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        greatest = scores.amax(-1)  # NaN if the row contains one
        if not greatest.isfinite().all():
            row = int(greatest.isfinite().int().argmin()) * len(self.names) // len(scores)
            raise InputError(
                f"{self.names[row]}: the scores of the next token are {float(greatest[~greatest.isfinite()][0])} "
                f"({self.dtype}): the checkpoint is broken, or its numbers overflow. Try --model_args dtype=float32."
            )
        return scores
