"""Log-likelihoods of answers, given a memory and a query."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lm_eval_icl.errors import InputError
from lm_eval_icl.inference.attention import OfPackedRow, additive, attention_by
from lm_eval_icl.inference.blocks import replaced_stream, residual_stream
from lm_eval_icl.inference.caches import cache_arguments
from lm_eval_icl.inference.devices import device_of, kept_logits, on_device, to_device
from lm_eval_icl.inference.hybrids import empty_cache, select_rows
from lm_eval_icl.inference.memory import Memory, cache_of, run_after_memory
from lm_eval_icl.inference.packing import QueryAnswers, TokenTree
from lm_eval_icl.prompts.tokens import Ids

# A query and one of its continuations, as token ids. Both have at least one token.
Pair = tuple[Sequence[int], Sequence[int]]
# The summed log-probability of a continuation (natural logarithm), and whether greedy decoding would produce it.
Score = tuple[float, bool]
# The vector of each query's last token that is returned with the scores: the input of the vocabulary projection,
# [width], or the log-probabilities of the next token, [vocabulary], both in float32 at least; None for no vector.
States = Literal["hidden", "log_probs"] | None


class Scores(Sequence[Score]):
    """The scores of some pairs, which a GPU may still be computing. The program waits for them when a score is read.

    Their copy to the CPU is begun at once, so that a reader does not also wait for passes that are begun later.

    Args:
        numbers: [2, tokens]: for each token of all continuations, one continuation after another, its log-probability,
            and 1 if it is the likeliest token, or else 0.
        lengths: the number of tokens of each pair's continuation.
        states: the vector of each pair (`States`), [pairs, size]; None if there are none.
    """

    def __init__(
        self, numbers: Tensor, lengths: Sequence[int], states: Tensor | None = None
    ) -> None:
        self._numbers, self._lengths = numbers.to("cpu", non_blocking=numbers.is_cuda), lengths
        self.states = [] if states is None else [*states.cpu()]
        self._arrived = torch.cuda.Event() if numbers.is_cuda else None
        if self._arrived is not None:
            self._arrived.record(torch.cuda.current_stream(numbers.device))

    @cached_property
    def _read(self) -> list[Score]:
        if self._arrived is not None:
            self._arrived.synchronize()
        logprobs, greedy = map(iter, self._numbers.tolist())
        return [
            (sum(islice(logprobs, length)), all([*islice(greedy, length)]))
            for length in self._lengths
        ]

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, i: Any) -> Any:
        return self._read[i]


class PackedRow:
    """A packed batch: many sequences of tokens, each of which attends to a memory, as the row of one forward pass. The
    model must obey a 4-D mask and `position_ids`.

    Args:
        work: memories, each with the sequences that attend to it. If several sequences of one memory begin alike, their
            common tokens are in the row once. Adjacent memories with the same `layers` share the entries. A memory with
            a `residual` has one sequence.

    Attributes:
        paths: for each memory of `work`, a dictionary: sequence -> the index in the row of each of its tokens.
    """

    def __init__(self, work: Sequence[tuple[Memory, Iterable[Ids]]]) -> None:
        self.tree, self.paths = TokenTree(), list[dict[Ids, list[int]]]()
        self._positions: list[int] = []  # the position of each token of the row
        self._memories: list[Memory] = []
        self._groups: list[
            tuple[slice, slice]
        ] = []  # tokens of the row, and the entries that they attend to
        self._replaced: list[
            tuple[int, Tensor]
        ] = []  # tokens, and the vectors that replace their residual streams
        self._layer = 0  # the block after which they are replaced
        entries = 0
        for memory, sequences in work:
            first = len(self.tree.tokens)
            self.tree.leave()
            self.paths.append(
                {sequence: self.tree.add(sequence) for sequence in sorted(set(sequences))}
            )
            self._positions += [memory.query_start + depth for depth in self.tree.depths[first:]]
            if memory.residual is not None:
                self._layer, token, vector = memory.residual
                self._replaced.append((next(iter(self.paths[-1].values()))[token], vector))
            last = self._memories[-1] if self._memories else None
            if last is not None and memory.layers is last.layers and memory.parts is last.parts:
                first = self._groups.pop()[0].start
            else:
                self._memories.append(memory)
                entries += len(memory)
            self._groups.append(
                (slice(first, len(self.tree.tokens)), slice(entries - len(memory), entries))
            )

    def run(self, model: PreTrainedModel, read: Sequence[int]) -> Tensor:
        """Run the row, without waiting for a GPU. Returns the logits of the tokens with the indices `read`, which must
        ascend: [len(read), vocabulary]."""
        device, entries = device_of(model), self._groups[-1][1].stop
        sees = self.tree.ancestors()
        # Only the mask between the tokens of the row is copied from the CPU.
        mask = additive(to_device(sees, device), model.dtype, memory=entries)
        if len(self._groups) > 1:
            mask[:, :entries] = torch.finfo(model.dtype).min
            for tokens, seen in self._groups:
                mask[tokens, seen] = 0
        cache = cache_of(self._memories, once=True)
        in_parts = any(memory.parts for memory in self._memories)
        replaced: AbstractContextManager[None] = nullcontext()
        if self._replaced:
            at, vectors = zip(*self._replaced, strict=True)
            replaced = replaced_stream(model, self._layer, at, torch.cat(vectors))
        readings = [
            memory.readings(seen.start)
            for memory, (_, seen) in zip(self._memories, self._groups, strict=True)
        ]
        attention = OfPackedRow(sees, self._groups, readings if in_parts else ())
        with replaced, attention_by(attention):
            output: Tensor = model(
                input_ids=on_device([self.tree.tokens], device),
                position_ids=on_device([self._positions], device),
                attention_mask=mask[None, None],
                logits_to_keep=kept_logits(model, read) if read else 1,
                **cache_arguments(model, cache),
            ).logits[0]  # of all tokens, if the model ignores logits_to_keep
        return output if len(output) == len(read) else output[on_device(read, output.device)]


def score_packed(
    model: PreTrainedModel,
    work: Sequence[tuple[Memory, Sequence[Pair]]],
    softmax_dtype: torch.dtype | None = None,
    states: States = None,
) -> Scores:
    """Score pairs that attend to one memory or several, in one forward pass over a `PackedRow`, without waiting for a
    GPU.

    Args:
        work: memories, each with the queries and continuations that attend to it.
        softmax_dtype: the dtype of the softmax over the vocabulary; if None, at least float32.
        states: which vector is returned for each pair, in order.
    """
    with _projected(model, states) as projected:
        logits, rows, predicting = _predicted(model, work)
    all_pairs = [pair for _, pairs in work for pair in pairs]
    vectors = _vectors(states, logits, projected, predicting, [path[0] for path in rows])
    return Scores(_numbers(logits, rows, all_pairs, softmax_dtype), list(map(len, rows)), vectors)


def score_together(
    model: PreTrainedModel,
    memories: Sequence[Memory],
    pairs: Sequence[Pair],
    method: Any,
    softmax_dtype: torch.dtype | None = None,
    at_once: bool = True,
) -> Scores:
    """Score pairs that attend to several memories, from the combined predictions with all memories.

    Args:
        pairs: queries with continuations, each of which attends to each memory.
        method: combines the predictions by `combined` and `score` (`lm_eval_icl.methods.several.Several`).
        softmax_dtype: as for `score_packed`.
        at_once: run one forward pass for all memories; if False, one forward pass for each memory.
    """
    work = [(memory, pairs) for memory in memories]
    passes = [
        _predicted(model, group) for group in ([work] if at_once else [[item] for item in work])
    ]
    numbers, logprobs, together = list[Tensor](), torch.empty(0), torch.empty(0)
    last: Pair | None = None
    for i, (query, answer) in enumerate(pairs):
        if (
            query,
            answer[:-1],
        ) != last:  # options of one token share the query's distribution of the next token
            rows = [
                z[on_device(path, z.device)]
                for z, paths, _ in passes
                for path in paths[i :: len(pairs)]
            ]
            dtype = torch.promote_types(softmax_dtype or rows[0].dtype, torch.float32)
            logprobs = torch.stack(rows).log_softmax(-1, dtype=dtype)
            together, last = method.combined(logprobs), (query, answer[:-1])
        ids = on_device(answer, together.device)
        value = method.score(together, logprobs, ids)
        numbers.append(torch.stack((value, (together.argmax(-1) == ids).all().to(value))))
    return Scores(torch.stack(numbers, dim=1), [1] * len(pairs))


def _predicted(
    model: PreTrainedModel, work: Sequence[tuple[Memory, Sequence[Pair]]]
) -> tuple[Tensor, list[list[int]], list[int]]:
    """The logits [predicting tokens, vocabulary] of one forward pass (`score_packed`); for each pair, the rows of the
    logits that predict its continuation's tokens; and the index in the packed row of each predicting token."""
    packed = PackedRow(
        [(memory, [(*query, *answer[:-1]) for query, answer in pairs]) for memory, pairs in work]
    )
    # For each pair, the nodes that predict the tokens of its continuation.
    nodes = [
        paths[(*query, *answer[:-1])][len(query) - 1 :]
        for paths, (_, pairs) in zip(packed.paths, work, strict=True)
        for query, answer in pairs
    ]
    predicting = sorted({node for path in nodes for node in path})
    row = {node: i for i, node in enumerate(predicting)}
    return (
        packed.run(model, predicting),
        [[row[node] for node in path] for path in nodes],
        predicting,
    )


@contextmanager
def _projected(model: PreTrainedModel, states: States) -> Iterator[list[Tensor]]:
    """Inside this context, if `states` are hidden states, collect the input of the vocabulary projection in each pass:
    [rows, tokens, width]."""
    inputs_read: list[Tensor] = []
    if states != "hidden":
        yield inputs_read
        return
    with model.get_output_embeddings().register_forward_pre_hook(
        lambda module, inputs: inputs_read.append(inputs[0])
    ):
        yield inputs_read


def _vectors(
    states: States, logits: Tensor, projected: list[Tensor], read: Sequence[int], at: Any
) -> Tensor | None:
    """The vectors of a pass that `states` names, [pairs, size].

    Args:
        logits: [(rows,) len(read), vocabulary].
        projected: the inputs that `_projected` collected: those of all tokens if the model ignores `logits_to_keep`.
        read: the indices of the tokens that have these logits.
        at: for each pair, the index of its query's last token in `logits`.
    """
    if states is None:
        return None
    vectors = logits
    if states == "hidden":
        [hidden] = projected
        hidden = (
            hidden if hidden.shape[1] == len(read) else hidden[:, on_device(read, hidden.device)]
        )
        vectors = hidden.reshape(*logits.shape[:-1], -1)
    vectors = vectors[at].to(torch.promote_types(vectors.dtype, torch.float32))
    return vectors.log_softmax(-1) if states == "log_probs" else vectors


def streams_packed(
    model: PreTrainedModel, work: Sequence[tuple[Memory, Sequence[Ids]]], layer: int
) -> list[Tensor]:
    """The residual stream of each query's last token after the block `layer` (counted from 1), from one forward pass
    over all queries of all memories (`PackedRow`): for each memory, [queries, width]."""
    packed = PackedRow(work)
    nodes = [
        [paths[query][-1] for query in queries]
        for paths, (_, queries) in zip(packed.paths, work, strict=True)
    ]
    with residual_stream(model, layer) as streams:
        packed.run(model, [])
    (stream,) = streams
    return [stream[0].index_select(0, on_device(path, stream.device)) for path in nodes]


def score_rows(
    model: PreTrainedModel,
    memory: Memory,
    queries: Sequence[QueryAnswers],
    softmax_dtype: torch.dtype | None = None,
    rows: int = 1,
    states: States = None,
) -> Scores:
    """Score the answers of some queries by ordinary causal passes. In the first pass, every row is a query. In later
    passes, every row is an answer of several tokens, which continues from the cache of its query.

    This is for models that do not obey a 4-D mask or `position_ids` (ALiBi, flash attention), for hybrids, and for rows
    longer than the window of local attention layers. No mask is passed.

    Args:
        queries: queries with their answers. If any answer has several tokens, all queries have the same length, since
            an answer continues from the end of its row.
        softmax_dtype, states: as for `score_packed`.
        rows: how many answers run in one batch.

    Returns:
        The score of each answer of each query, in order.
    """
    after = memory.cache(len(queries)) if len(memory) else empty_cache(model)
    assert (
        after is not None
    )  # a model without such a cache has `Capabilities.no_memory`, and does not come here
    ends = sorted({len(query) - 1 for query, _ in queries})
    with memory.reading(model), _projected(model, states) as projected:
        at_ends = run_after_memory(model, memory, after, [query for query, _ in queries], 0, ends)
    last = [ends.index(len(query) - 1) for query, _ in queries]
    first = at_ends[range(len(queries)), last]  # the logits after each query
    pairs = [(query, answer) for query, answers in queries for answer in answers]
    row_of = [row for row, (_, answers) in enumerate(queries) for _ in answers]
    short = [i for i, (_, answer) in enumerate(pairs) if len(answer) == 1]
    long = [i for i, (_, answer) in enumerate(pairs) if len(answer) > 1]
    numbers: dict[int, Tensor] = {}
    for batch in filter(
        None, [short, *(long[start : start + rows] for start in range(0, len(long), rows))]
    ):
        batch_pairs, logits = [pairs[i] for i in batch], first
        inputs = [answer[:-1] for _, answer in batch_pairs]
        if longest := max(map(len, inputs)):
            cache = select_rows(after, len(queries), [row_of[i] for i in batch])
            following = run_after_memory(
                model, memory, cache, inputs, len(batch_pairs[0][0]), range(longest)
            )
            logits = torch.cat([first, following.flatten(0, 1)])
        # The rows of the queries' logits come first, then `longest` rows for each answer.
        starts = (
            range(len(first), len(first) + longest * len(batch), longest)
            if longest
            else [0] * len(batch)
        )
        paths = [
            [row_of[i], *range(start, start + len(tokens))]
            for i, tokens, start in zip(batch, inputs, starts, strict=True)
        ]
        batch_numbers = _numbers(logits, paths, batch_pairs, softmax_dtype)
        numbers |= zip(
            batch,
            batch_numbers.split([len(answer) for _, answer in batch_pairs], dim=1),
            strict=True,
        )
    vectors = _vectors(states, at_ends, projected, ends, (row_of, [last[row] for row in row_of]))
    in_order = [numbers[i] for i in range(len(pairs))]
    return Scores(torch.cat(in_order, dim=1), [part.shape[1] for part in in_order], vectors)


def _numbers(
    logits: Tensor, rows: Sequence[Sequence[int]], pairs: Sequence[Pair], dtype: torch.dtype | None
) -> Tensor:
    """The `numbers` of `Scores`: [2, tokens].

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
    highest, chosen = logits.amax(-1), logits[at, tokens]
    parts = zip(logits.split(16), highest.split(16), strict=True)
    denominators = torch.cat(
        [(part.to(exact) - top[:, None]).exp_().sum(-1).log() for part, top in parts]
    )
    logprobs = (chosen.to(exact) - highest[at] - denominators[at]).to(dtype)
    # Greedy decoding takes the first of several equally likely tokens, as `argmax` does, which takes a CPU ten times as
    # long as `amax`: there it is computed only for rows in which the continuation's token is among the likeliest.
    rows_of_argmax = at[chosen == highest[at]] if logits.device.type == "cpu" else slice(None)
    likeliest = torch.full_like(highest, -1, dtype=torch.long)
    likeliest[rows_of_argmax] = logits[rows_of_argmax].argmax(-1)
    return torch.stack([logprobs.to(exact), likeliest[at] == tokens])


def not_finite(name: str, logprob: float, model: PreTrainedModel) -> InputError:
    """The error about a log-probability that is NaN or infinite, which metrics would count as an ordinary wrong answer.

    Args:
        name: the name of the document or text with this log-probability, for the message.
    """
    return InputError(
        f"{name}: the log-probability is {logprob} ({model.dtype}): the checkpoint is broken, or its numbers overflow. "
        "Try --model_args dtype=float32."
    )
