"""Log-likelihoods of answers, given a memory and a query."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cached_property
from itertools import count
from math import isqrt
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from lm_eval_icl.errors import InputError
from lm_eval_icl.inference.attention import OfPackedRow, additive, attention_by
from lm_eval_icl.inference.blocks import last_block_at, replaced_stream, residual_stream
from lm_eval_icl.inference.caches import behind_cache
from lm_eval_icl.inference.devices import device_of, device_of_states, on_device, to_device
from lm_eval_icl.inference.hybrids import empty_cache, select_rows
from lm_eval_icl.inference.memory import Memory, cache_of, read_behind
from lm_eval_icl.inference.packing import QueryAnswers, TokenTree

# A query and one of its continuations, as token ids; both have at least one token.
Pair = tuple[Sequence[int], Sequence[int]]
# The summed log-probability of a continuation (natural logarithm), and whether greedy decoding would produce it.
Score = tuple[float, bool]


class Scores(Sequence[Score]):
    """The scores of some pairs, which a GPU may still be computing: nothing waits for them until one is looked at.

    They are sent to the CPU at once, so that whoever waits for them does not wait for what is begun later.

    Args:
        numbers: [2, tokens]: the log-probability of each token of all continuations, one after another, and whether it
            is the likeliest token, as 1 or 0.
        lengths: the length of each continuation.
    """

    def __init__(self, numbers: Tensor, lengths: Sequence[int]) -> None:
        self._numbers, self._lengths = numbers.to("cpu", non_blocking=numbers.is_cuda), lengths
        self._arrived = torch.cuda.Event() if numbers.is_cuda else None
        if self._arrived is not None:
            self._arrived.record(torch.cuda.current_stream(numbers.device))

    @cached_property
    def _read(self) -> list[Score]:
        if self._arrived is not None:
            self._arrived.synchronize()
        logprobs, greedy = self._numbers.tolist()
        scores, start = [], 0
        for length in self._lengths:
            end = start + length
            scores.append((sum(logprobs[start:end]), all(greedy[start:end])))
            start = end
        return scores

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, i: Any) -> Any:
        return self._read[i]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._read == list(other)

    __hash__ = None  # type: ignore[assignment]


class _States:
    """The last hidden states of queries, read where the vocabulary projection reads them, or what it makes of them."""

    def __init__(self, log_probs: bool) -> None:
        self.log_probs = log_probs
        self.by_query: dict[tuple[int, ...], Tensor] = {}
        self.latest = torch.empty(0)  # [rows or 1, tokens, size]: what the projection read in the latest pass

    def keep(self, queries: Sequence[Sequence[int]], states: Tensor) -> None:
        """Keep the state of each query's last token: [queries, size]."""
        wide = states.detach().to(torch.promote_types(states.dtype, torch.float32))
        wide = wide.log_softmax(-1) if self.log_probs else wide
        self.by_query |= zip(map(tuple, queries), wide.cpu(), strict=True)


_collecting: ContextVar[_States | None] = ContextVar("collecting", default=None)


@contextmanager
def query_states(model: PreTrainedModel, log_probs: bool = False) -> Iterator[dict[tuple[int, ...], Tensor]]:
    """Inside this context, scoring keeps the last hidden state of each query: that of its last token, after the final
    norm, from which the vocabulary projection predicts the answer. (Not of queries behind several memories, or
    behind one that depends on the query.)

    Args:
        log_probs: keep the log-probabilities of the token that follows, [vocabulary], in place of the state.

    Yields:
        The token ids of a query -> its state [size] in float32 at least, filled while queries are scored. Those of a
        query that runs in one pass with its context begin with the context's.
    """
    states, head = _States(log_probs), model.get_output_embeddings()

    def read(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        states.latest = inputs[0]

    token = _collecting.set(states)
    try:
        with head.register_forward_pre_hook(read):
            yield states.by_query
    finally:
        _collecting.reset(token)


class PackedRow:
    """A packed batch: the distinct tokens among many sequences, each behind a memory, as the row of one forward pass.

    The model must obey a 4-D mask and `position_ids` (`lm_eval_icl.inference.capabilities` tests both).

    Args:
        work: memories, and for each the sequences that attend to it. The tokens of a common beginning of several
            sequences of one memory are in the row once. Memories one after another that have the same `layers` share
            the entries. Behind a memory with a `residual` there is one query.

    Attributes:
        paths: for each memory of `work`, each sequence -> the index in the row of each of its tokens.
    """

    def __init__(self, work: Sequence[tuple[Memory, Iterable[tuple[int, ...]]]]) -> None:
        self.tree, self.paths = TokenTree(), list[dict[tuple[int, ...], list[int]]]()
        self._positions: list[Tensor] = []  # of the tokens behind each memory
        self._memories: list[Memory] = []
        self._groups: list[tuple[slice, slice]] = []  # tokens of the row, and the entries to which they attend
        self._replaced: list[tuple[int, Tensor]] = []  # tokens whose residual stream is replaced, and by what
        self._layer = 0  # after this block
        entries = 0
        for memory, sequences in work:
            first = len(self.tree.tokens)
            self.tree.leave()
            self.paths.append({sequence: self.tree.add(sequence) for sequence in sorted(set(sequences))})
            self._positions.append(memory.query_start + torch.tensor(self.tree.depths[first:], dtype=torch.long))
            if memory.residual is not None:
                self._layer, token, vector = memory.residual
                self._replaced.append((next(iter(self.paths[-1].values()))[token], vector))
            last = self._memories[-1] if self._memories else None
            if last is not None and memory.layers is last.layers and memory.parts is last.parts:
                first = self._groups.pop()[0].start
            else:
                self._memories.append(memory)
                entries += len(memory)
            self._groups.append((slice(first, len(self.tree.tokens)), slice(entries - len(memory), entries)))

    def run(self, model: PreTrainedModel, read: Sequence[int], trim_last_block: bool, logits: bool = True) -> Tensor:
        """Run the row, without waiting for a GPU.

        Args:
            read: the indices of tokens whose output is read, in ascending order.
            trim_last_block: run the last block only for these (`inference.blocks.last_block_at`).
            logits: return their logits, [len(read), vocabulary]; if False, what is returned means nothing.
        """
        device, entries = device_of(model), self._groups[-1][1].stop
        sees = self.tree.ancestors()
        # Only the row's own part of the mask comes from the CPU.
        mask = additive(to_device(sees, device), model.dtype, memory=entries)
        if len(self._groups) > 1:
            mask[:, :entries] = torch.finfo(model.dtype).min
            for tokens, behind in self._groups:
                mask[tokens, behind] = 0
        read_at = on_device(read, device_of_states(model))
        cache = cache_of(self._memories, once=True)
        apart = any(memory.parts for memory in self._memories)  # read in parts: by all tokens alike, in every block
        trim = trim_last_block and not apart
        last = last_block_at(model, cache, read_at, len(self.tree.tokens)) if trim else nullcontext()
        replaced: AbstractContextManager[None] = nullcontext()
        if self._replaced:
            at, vectors = zip(*self._replaced, strict=True)
            replaced = replaced_stream(model, self._layer, at, torch.cat(vectors))
        readings = [
            memory.readings(behind.start) for memory, (_, behind) in zip(self._memories, self._groups, strict=True)
        ]
        attention = OfPackedRow(sees, self._groups, readings if apart else ())
        with last, replaced, attention_by(attention):
            output: Tensor = model(
                input_ids=on_device([self.tree.tokens], device),
                position_ids=to_device(torch.cat(self._positions)[None], device),
                attention_mask=mask[None, None],
                logits_to_keep=read_at if logits else 1,
                **behind_cache(model, cache),
            ).logits[0]
        if logits and len(output) != len(read):  # the model ignores logits_to_keep
            output = output[read_at.to(output.device)]
        return output


def score_packed(
    model: PreTrainedModel,
    work: Sequence[tuple[Memory, Sequence[Pair]]],
    softmax_dtype: torch.dtype | None = None,
    trim_last_block: bool = False,
) -> Scores:
    """Score pairs behind one memory or several in one forward pass over the distinct tokens among those of each memory
    (`PackedRow`), without waiting for a GPU.

    Args:
        work: memories, and for each the queries with continuations that attend to it.
        softmax_dtype: the dtype of the softmax over the vocabulary; if None, at least float32.
        trim_last_block: run the last block only for tokens that predict an answer (`inference.blocks.last_block_at`).

    Returns:
        The score of each pair, in order.
    """
    all_pairs = [pair for _, pairs in work for pair in pairs]
    logits, rows = _predicted(model, work, trim_last_block)
    return _scores(logits, rows, all_pairs, softmax_dtype)


def score_together(
    model: PreTrainedModel,
    memories: Sequence[Memory],
    pairs: Sequence[Pair],
    combined: Callable[[Tensor], Tensor],
    score: Callable[[Tensor, Tensor, Tensor], Tensor],
    softmax_dtype: torch.dtype | None = None,
    trim_last_block: bool = False,
    at_once: bool = True,
) -> list[Score]:
    """Score pairs behind several memories, from what all of these predict.

    Args:
        pairs: queries with continuations, each of which attends to each memory.
        combined: combines log-probabilities, [memories, tokens, vocabulary] -> [tokens, vocabulary].
        score: computes a continuation's log-probability from these, from what they are combined from, and from its
            token ids.
        softmax_dtype, trim_last_block: as for `score_packed`.
        at_once: run one forward pass; if False, one for each memory.
    """
    work = [(memory, pairs) for memory in memories]
    passes = [_predicted(model, group, trim_last_block) for group in ([work] if at_once else [[item] for item in work])]
    numbers, logprobs, together = list[Tensor](), torch.empty(0), torch.empty(0)
    last: Pair | None = None
    for i, (query, answer) in enumerate(pairs):
        if (query, answer[:-1]) != last:  # options of one token are read off the same distribution
            rows = [logits[path] for logits, paths in passes for path in paths[i :: len(pairs)]]
            dtype = torch.promote_types(softmax_dtype or rows[0].dtype, torch.float32)
            logprobs = torch.stack(rows).log_softmax(-1, dtype=dtype)
            together, last = combined(logprobs), (query, answer[:-1])
        ids = on_device(answer, together.device)
        value = score(together, logprobs, ids)
        numbers.append(torch.stack((value, (together.argmax(-1) == ids).all().to(value))))
    return [(value, bool(greedy)) for value, greedy in torch.stack(numbers).tolist()]  # the host waits once


def _predicted(
    model: PreTrainedModel, work: Sequence[tuple[Memory, Sequence[Pair]]], trim_last_block: bool
) -> tuple[Tensor, list[list[int]]]:
    """The logits [predicting tokens, vocabulary] of one forward pass (`score_packed`), and for each pair the rows of
    them that predict its continuation's tokens."""
    packed = PackedRow([(memory, [(*query, *answer[:-1]) for query, answer in pairs]) for memory, pairs in work])
    # For each token of a pair's continuation, the node that predicts it.
    nodes = [
        paths[(*query, *answer[:-1])][len(query) - 1 :]
        for paths, (_, pairs) in zip(packed.paths, work, strict=True)
        for query, answer in pairs
    ]
    predicting = sorted({node for path in nodes for node in path})
    row = {node: i for i, node in enumerate(predicting)}
    logits = packed.run(model, predicting, trim_last_block)
    if (states := _collecting.get()) is not None:
        read = states.latest.reshape(-1, states.latest.shape[-1])
        read = read if len(read) == len(predicting) else read[predicting]
        read = logits if states.log_probs else read
        states.keep([query for _, pairs in work for query, _ in pairs], read[[row[path[0]] for path in nodes]])
    return logits, [[row[node] for node in path] for path in nodes]


def streams_packed(
    model: PreTrainedModel,
    work: Sequence[tuple[Memory, Sequence[tuple[int, ...]]]],
    layer: int,
    trim_last_block: bool = False,
) -> list[Tensor]:
    """The residual stream of queries' last tokens after the block `layer` (counted from 1), from one forward pass over
    all queries behind all memories (`PackedRow`).

    Args:
        work: memories, and for each the queries that attend to it.
        trim_last_block: run the last block only for the tokens that are read (`inference.blocks.last_block_at`).

    Returns:
        For each memory [queries, width].
    """
    packed = PackedRow(work)
    nodes = [[paths[query][-1] for query in queries] for paths, (_, queries) in zip(packed.paths, work, strict=True)]
    with residual_stream(model, layer) as streams:
        packed.run(model, sorted({node for path in nodes for node in path}), trim_last_block, logits=False)
    (stream,) = streams
    return [stream[0].index_select(0, on_device(path, stream.device)) for path in nodes]


def score_rows(
    model: PreTrainedModel,
    memory: Memory,
    queries: Sequence[QueryAnswers],
    softmax_dtype: torch.dtype | None = None,
    rows: int = 1,
) -> list[Score]:
    """Score the answers of some queries by ordinary causal passes: one in which every query is a row of the batch, and
    then passes in which every answer of several tokens is a row, behind its query.

    This is for models that do not obey a 4-D mask or `position_ids` (ALiBi, flash attention), for hybrids, and for rows
    longer than the window of local attention layers. No mask is passed. Shorter rows are filled up at their end, where
    a causal model does not see it.

    Args:
        queries: queries with their answers. If any answer has several tokens, all queries have the same length, since
            answers go on from the end of the row.
        softmax_dtype: the dtype of the softmax over the vocabulary; if None, at least float32.
        rows: how many answers run in one batch.

    Returns:
        The score of each answer of each query, in order.
    """
    first, after = _after_queries(model, memory, [query for query, _ in queries])
    pairs = [(row, query, answer) for row, (query, answers) in enumerate(queries) for answer in answers]
    short = [i for i, (_, _, answer) in enumerate(pairs) if len(answer) == 1]
    long = [i for i, (_, _, answer) in enumerate(pairs) if len(answer) > 1]
    scores: dict[int, Score] = {}
    for batch in filter(None, [short, *(long[start : start + rows] for start in range(0, len(long), rows))]):
        inputs, logits = [pairs[i][2][:-1] for i in batch], first
        if longest := max(map(len, inputs)):
            cache = select_rows(after, len(queries), [pairs[i][0] for i in batch])
            depth = len(pairs[batch[0]][1])
            following = read_behind(model, memory, cache, inputs, depth, range(longest))
            logits = torch.cat([first, following.flatten(0, 1)])
        # Behind the rows of the queries' logits come those of the answers, `longest` for each.
        paths = [
            [pairs[i][0], *range(start, start + len(tokens))]
            for i, tokens, start in zip(batch, inputs, count(len(first), longest), strict=False)
        ]
        scores |= zip(batch, _scores(logits, paths, [pairs[i][1:] for i in batch], softmax_dtype), strict=True)
    return [scores[i] for i in range(len(pairs))]


def _after_queries(model: PreTrainedModel, memory: Memory, queries: Sequence[tuple[int, ...]]) -> tuple[Tensor, Cache]:
    """Run queries behind a memory, as the rows of a batch.

    Returns:
        The logits after each query, [queries, vocabulary], and the cache after the longest query.
    """
    cache = memory.cache(len(queries)) if len(memory) else empty_cache(model)
    assert cache is not None  # or the model has no memory
    ends = sorted({len(query) - 1 for query in queries})
    with memory.reading(model):
        logits = read_behind(model, memory, cache, queries, 0, ends)
    last = range(len(queries)), [ends.index(len(query) - 1) for query in queries]
    if (states := _collecting.get()) is not None:
        read = logits if states.log_probs else states.latest
        read = read if read.shape[1] == len(ends) else read[:, ends]
        states.keep(queries, read[last])
    return logits[last], cache


def _scores(logits: Tensor, rows: Sequence[Sequence[int]], pairs: Sequence[Pair], dtype: torch.dtype | None) -> Scores:
    """The score of each pair.

    Args:
        logits: [predicting tokens, vocabulary].
        rows: for each pair, the rows of the logits that predict its continuation's tokens.
    """
    dtype = dtype or torch.promote_types(logits.dtype, torch.float32)
    exact = torch.promote_types(dtype, torch.float32)
    at = on_device([row for path in rows for row in path], logits.device)
    tokens = on_device([token for _, answer in pairs for token in answer], logits.device)
    # A softmax of all rows at once would take as much memory as the logits, so its denominators are computed for some
    # rows at a time.
    highest, likeliest = _highest(logits)
    parts = zip(logits.split(16), highest.split(16), strict=True)
    denominators = torch.cat([(part.to(exact) - top[:, None]).exp_().sum(-1).log() for part, top in parts])
    logprobs = (logits[at, tokens].to(exact) - highest[at] - denominators[at]).to(dtype)
    numbers = torch.stack([logprobs.to(exact), likeliest[at] == tokens])
    return Scores(numbers, [len(path) for path in rows])


def _highest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The highest number of each row, and the index of the first token that has it, as `argmax` says.

    On a CPU, `argmax` takes ten times as long as `amax`. It is therefore asked for a stretch of the vocabulary, and
    then for a token of that stretch alone.

    Args:
        logits: [rows, vocabulary].
    """
    if logits.device.type != "cpu":
        return logits.amax(-1), logits.argmax(-1)
    vocabulary = logits.shape[1]
    width = isqrt(vocabulary)
    stretches = logits[:, : vocabulary // width * width].unflatten(1, (-1, width))
    # The remainder at the end belongs to a last stretch, which begins within the one before it.
    of_stretches = torch.cat([stretches.amax(-1), logits[:, -width:].amax(-1, keepdim=True)], dim=1)
    first = (of_stretches.argmax(-1) * width).clamp_(max=vocabulary - width)
    stretch = logits.gather(1, first[:, None] + torch.arange(width))
    return of_stretches.amax(-1), first + stretch.argmax(-1)


def not_finite(name: str, logprob: float, model: PreTrainedModel) -> InputError:
    """The error about a log-probability that is NaN or infinite, which metrics would count as an ordinary wrong answer.

    Args:
        name: the name of what was scored.
    """
    return InputError(
        f"{name}: the log-probability is {logprob} ({model.dtype}): the checkpoint is broken, or its numbers overflow. "
        "Try --model_args dtype=float32."
    )
