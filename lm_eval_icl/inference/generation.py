"""Generates text from a memory and a query, by transformers' `generate`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteriaList

from lm_eval_icl.declared import Positive, checked
from lm_eval_icl.errors import InputError
from lm_eval_icl.inference.caches import cache_name, without_adapter
from lm_eval_icl.inference.devices import device_of
from lm_eval_icl.inference.memory import Memory, cache_of_rows
from lm_eval_icl.inference.schedule import GenerationSettings

# Rows share a layer's keys and values if copies for all rows would take at least this many bytes.
# On a CPU, copying fewer bytes is faster than calling attention's kernel twice.
SHARED_FROM = 2**19

# Settings of transformers' `generate` that do not work with a memory, and why. A checkpoint's
# `generation_config` may not have the settings in `_REFUSED` either. (Its length and `use_cache`
# have no effect: every call here sets them.)
_REFUSED_ARGUMENTS = {
    "max_length": "counts the prompt and its padding too; give the number of new tokens instead "
    "(max_gen_toks)",
    "use_cache": "would switch off the keys and values that the demonstrations are kept in; "
    "leave it out",
    "generation_config": "would replace the checkpoint's settings; give the settings one by one",
}
_CANNOT_GO_ON = ("prompt_lookup_num_tokens", "assistant_model", "assistant_early_exit", "use_mtp")
_REFUSED = {
    "num_return_sequences": "gives more than one text for a prompt; leave it out",
    "return_dict_in_generate": "gives more than a text; leave it out",
    **dict.fromkeys(_CANNOT_GO_ON, "does not work on existing keys and values; leave it out"),
}
# Settings that make `generate` read the order of a row's tokens, count them or run some of them
# again. It would read padding, too.
_READ_ROWS = (
    "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size",
    "min_length",
    "sequence_bias",
    "bad_words_ids",
    "watermarking_config",
    "guidance_scale",
    "prefix_allowed_tokens_fn",
    "logits_processor",
    "stopping_criteria",
)
# Settings that change the scores of the tokens that a row has. 1 changes nothing.
_PENALTIES = ("repetition_penalty", "encoder_repetition_penalty")


def settings_in_force(model: PreTrainedModel, arguments: Mapping[str, Any]) -> GenerationSettings:
    """The settings of a call of `generate`.

    They are its arguments, and the checkpoint's `generation_config` for all others.

    Raises:
        InputError: a setting does not work with a memory.
    """
    for name, why in (_REFUSED_ARGUMENTS | _REFUSED).items():
        if name in arguments:
            raise InputError(f"generation argument {name}={arguments[name]!r} {why}.")
    checkpoint = getattr(model, "generation_config", None) or GenerationConfig()
    settings: dict[str, Any] = checkpoint.to_dict() | dict(arguments)
    for name, why in _REFUSED.items():
        value = settings.get(name)
        if value and (name, value) != ("num_return_sequences", 1):
            why = why.replace("leave it out", "take it out of that file")
            raise InputError(f"the checkpoint's generation_config.json: {name}={value!r} {why}.")
    return GenerationSettings(
        beams=checked("generation argument num_beams", settings.get("num_beams") or 1, Positive),
        reads_rows=any(settings.get(name) for name in _READ_ROWS),
        samples=bool(settings.get("do_sample")),
        penalizes=any(settings.get(name) not in (None, 1) for name in _PENALTIES),
    )


def continue_from(
    model: PreTrainedModel,
    generate: Callable[..., Tensor],
    memories: Sequence[Memory],
    queries: Sequence[Sequence[int]],
    beams: int = 1,
    shared: bool = False,
) -> list[list[int]]:
    """Continue every query on its memory, all in one batch.

    Args:
        generate: calls the model's `generate`. Its first argument is the ids of the rows. The
            others are the rest of `_inputs`, and a cache. It returns
            [rows, tokens + generated tokens].
        memories: one memory for all rows, or a memory of keys and values for each row.
        queries: the ids of each row's query; at least one query.
        beams: the number of rows that `generate` makes of each row (beam search).
        shared: attention can read a memory once for all rows (`Memory.cache`).

    Returns:
        The generated ids of each row, in the order of `queries`. All rows are as long as the
        longest row.
    """
    inputs = _inputs(memories, queries, device_of(model))
    memory = memories[0]
    rows = len(queries) * beams
    alone = rows == 1 and memory.state is None and not memory.parts
    if any(map(len, memories)):  # without entries, `generate` makes a cache by itself
        if alone or len(memories) > 1:
            row_memories = chain.from_iterable([memory] * beams for memory in memories)
            cache = cache_of_rows(list(row_memories))
        else:
            shared = shared and rows * memory.nbytes >= SHARED_FROM * len(memory.layers)
            cache = memory.cache(rows, shared)
        inputs[cache_name(model)] = cache
    context = inputs.pop("context")
    with _no_cache_setting(model), memory.adapted(model), memory.reading(model):
        output = generate(context, **inputs)
    return output[:, context.shape[1] :].tolist()


def _inputs(
    memories: Sequence[Memory], queries: Sequence[Sequence[int]], device: torch.device
) -> dict[str, Any]:
    """The rows that `generate` continues: `padding | memory | padding | query`.

    The memory's token ids are part of the row because `generate` takes the length of the cache from
    them and logits processors may read them. They do not run through the model again. Padding is
    masked. It repeats a token of the query, so that processors that look for the tokens of a row
    (`repetition_penalty`) find no other tokens.

    Args:
        memories, queries: as for `continue_from`.

    Returns:
        `context` and `attention_mask`, both [rows, tokens]. `position_ids`, of the same shape, are
        added if the positions differ from those that `generate` counts by the mask.
    """
    entries = max(map(len, memories))
    longest = max(map(len, queries))
    context = []
    mask = []
    positions = []

    def padded(of_memory: Sequence[int], of_query: Sequence[int], padding: int) -> list[int]:
        before_memory = [padding] * (entries - len(of_memory))
        before_query = [padding] * (longest - len(of_query))
        return [*before_memory, *of_memory, *before_query, *of_query]

    row_memories = memories if len(memories) == len(queries) else [*memories] * len(queries)
    for memory, query in zip(row_memories, queries, strict=True):
        context.append(padded(memory.tokens, query, query[0]))
        mask.append(padded([1] * len(memory), [1] * len(query), 0))
        # The memory does not run and the padding is masked, so both may have any position.
        start = memory.query_start
        positions.append(padded([], range(start, start + len(query)), start))
    inputs = {
        "context": torch.tensor(context, device=device),
        "attention_mask": torch.tensor(mask, device=device),
    }
    if not all(memory.in_sequence for memory in memories):
        inputs["position_ids"] = torch.tensor(positions, device=device)
    return inputs


@contextmanager
def _no_cache_setting(model: PreTrainedModel) -> Iterator[None]:
    """Inside this context, the checkpoint's `cache_implementation` is ignored.

    Generation continues from a memory's cache.
    """
    config = model.generation_config
    implementation = config.cache_implementation
    config.cache_implementation = None
    try:
        yield
    finally:
        config.cache_implementation = implementation


@contextmanager
def ending_rows(
    model: PreTrainedModel, stopped: Callable[[StoppingCriteriaList], Sequence[bool]]
) -> Iterator[None]:
    """Inside this context, `generate` ends each row when `stopped` says so, without beam search.

    The batch ends when all rows have ended. (lm-eval's stop strings end a batch only when all rows
    have reached the same stop string.)

    Args:
        stopped: for each row, True if one of the criteria has ended it; empty if none can be ended.
    """
    inner: Any = without_adapter(model)
    criteria_of = inner._get_stopping_criteria

    def by_row(
        generation_config: GenerationConfig, *args: Any, **kwargs: Any
    ) -> StoppingCriteriaList:
        criteria = criteria_of(generation_config, *args, **kwargs)
        if generation_config.num_beams not in (None, 1):
            return criteria

        def ended(ids: Tensor, scores: Any, **_: Any) -> Tensor:
            return torch.tensor(stopped(criteria) or [False] * len(ids), device=ids.device)

        return StoppingCriteriaList([*criteria, ended])

    inner._get_stopping_criteria = by_row
    try:
        yield
    finally:
        del inner._get_stopping_criteria


@contextmanager
def combining(
    model: PreTrainedModel,
    rows: int,
    combine: Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor | None]],
) -> Iterator[None]:
    """Inside this context, adjacent rows of a batch are one text, which runs on several memories.

    All of these rows get the next token of their combined distribution.

    Args:
        rows: the number of rows of a text.
        combine: takes log-probabilities [texts, rows, vocabulary] and the state that it returned
        for
            the token before (None for the first token). Returns log-probabilities
            [texts, vocabulary] and the new state.
    """
    state: Tensor | None = None

    def combined(module: nn.Module, args: Any, output: Any) -> None:
        nonlocal state
        last = output.logits[:, -1].unflatten(0, (-1, rows))
        dtype = torch.promote_types(last.dtype, torch.float32)
        logprobs, state = combine(last.log_softmax(-1, dtype=dtype), state)
        output.logits = logprobs.repeat_interleave(rows, 0)[:, None]

    with without_adapter(model).register_forward_hook(combined):
        yield


@contextmanager
def stop_on_nonfinite(model: PreTrainedModel, names: Sequence[str]) -> Iterator[None]:
    """Inside this context, a pass raises an error if the largest next score is NaN or infinite.

    `generate` would take some token. (This is no logits processor, since `generate` inspects the
    signature of each processor in every step.)

    Args:
        names: the names of the rows, in order, for the message. Several adjacent rows (beams) may
            have one name.

    Raises:
        InputError: the scores of a row contain NaN or infinity, or only minus infinity.
    """

    def check(module: nn.Module, args: Any, output: Any) -> None:
        greatest = output.logits[:, -1].amax(-1)  # NaN if the row contains one
        finite = greatest.isfinite()
        if not finite.all():
            row = int(finite.int().argmin())
            raise InputError(
                f"{names[row * len(names) // len(greatest)]}: the scores of the next token are "
                f"{float(greatest[row])} ({model.dtype}): the checkpoint is broken, or its numbers "
                "overflow. Try --model_args dtype=float32."
            )

    with without_adapter(model).register_forward_hook(check):
        yield
