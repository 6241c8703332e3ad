"""Log-likelihoods of answers, given a memory and a query."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from itertools import chain
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lm_eval_icl.errors import InputError
from lm_eval_icl.inference.attention import OfPackedRow, TokensOnMemory, additive, attention_by
from lm_eval_icl.inference.caches import cache_arguments
from lm_eval_icl.inference.devices import device_of, kept_logits, on_device, to_device
from lm_eval_icl.inference.hybrids import empty_cache, select_rows
from lm_eval_icl.inference.memory import Memory, cache_of, run_after_memory
from lm_eval_icl.inference.packing import QueryAnswers, TokenTree
from lm_eval_icl.inference.residual import last_layer_at, replaced_stream, residual_stream
from lm_eval_icl.prompts.tokens import Ids

# A query and one of its continuations, as token ids. Both have at least one token.
Pair = tuple[Sequence[int], Sequence[int]]
# The summed log-probability of a continuation (natural logarithm), and True if greedy decoding
# would produce it.
Score = tuple[float, bool]
# The vector of each query's last token that is returned with the scores: the input of the
# vocabulary projection, [width], or the log-probabilities of the next token, [vocabulary]. Both are
# in float32 at least. None: no vector.
States = Literal["hidden", "log_probs"] | None


class Scores(Sequence[Score]):
    """The scores of some pairs, which a GPU may still be computing.

    The program waits for them when a score is read. Their copy to the CPU is begun at once, so that
    a reader does not also wait for passes that are begun later.

    Args:
        numbers: [2, tokens] for each token of all continuations, one continuation after another:
            its log-probability, and 1 if it is the likeliest token, or else 0.
        lengths: the number of tokens of each pair's continuation.
        states: [pairs, size] the vector of each pair (`States`), if there are any.
    """

    def __init__(
        self, numbers: Tensor, lengths: Sequence[int], states: Tensor | None = None
    ) -> None:
        self._numbers = numbers.to("cpu", non_blocking=numbers.is_cuda)
        self._lengths = lengths
        self.states = [] if states is None else [*states.cpu()]
        self._arrived = torch.cuda.Event() if numbers.is_cuda else None
        if self._arrived is not None:
            self._arrived.record(torch.cuda.current_stream(numbers.device))

    @cached_property
    def _read(self) -> list[Score]:
        if self._arrived is not None:
            self._arrived.synchronize()
        logprobs, likeliest = self._numbers.tolist()
        scores = []
        end = 0
        for length in self._lengths:
            start = end
            end += length
            scores.append((sum(logprobs[start:end]), all(likeliest[start:end])))
        return scores

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, i: Any) -> Any:
        return self._read[i]


class PackedRow:
    """Many sequences of tokens, each on a memory, as the row of one forward pass.

    The model must obey a 4-D mask and `position_ids`.

    Args:
        work: memories, each with the sequences that attend to it. Common beginnings of a memory's
            sequences are in the row once. Adjacent memories with the same `layers` share the
            entries. The sequences of a memory with a `residual` begin with one query.

    Attributes:
        paths: for each memory, sequence -> the index in the row of each of its tokens.
    """

    def __init__(self, work: Iterable[tuple[Memory, Iterable[Ids]]]) -> None:
        self.tree = TokenTree()
        self.paths: list[dict[Ids, list[int]]] = []
        self._positions: list[int] = []  # the position of each token of the row
        self._memories: list[Memory] = []
        self._groups: list[TokensOnMemory] = []  # for each of these memories
        self._layer = 0  # residual streams are replaced after this layer
        self._replaced: dict[int, Tensor] = {}  # token -> the vector that replaces its stream
        entries = 0
        for memory, sequences in work:
            first = len(self.tree.tokens)
            self.tree.leave()
            paths = {sequence: self.tree.add(sequence) for sequence in sorted(set(sequences))}
            self.paths.append(paths)
            self._positions += [memory.query_start + depth for depth in self.tree.depths[first:]]
            if memory.residual is not None:
                path = next(iter(paths.values()))  # all sequences begin with the query
                self._layer = memory.residual.layer
                self._replaced[path[memory.residual.token]] = memory.residual.vector
            last = self._memories[-1] if self._memories else None
            if last is not None and memory.layers is last.layers and memory.parts is last.parts:
                first = self._groups.pop().tokens.start
            else:
                self._memories.append(memory)
                entries += len(memory)
            tokens = slice(first, len(self.tree.tokens))
            self._groups.append(TokensOnMemory(tokens, slice(entries - len(memory), entries)))

    def run(
        self, model: PreTrainedModel, read: Sequence[int], trim_last_layer: bool = False
    ) -> Tensor:
        """Run the row, without waiting for a GPU.

        Args:
            read: the indices of the tokens whose logits are returned, in ascending order.
            trim_last_layer: run the last layer for these tokens alone.

        Returns:
            The logits [len(read), vocabulary].
        """
        device = device_of(model)
        sees = self.tree.ancestors()
        entries = self._groups[-1].entries.stop
        # Only the mask between the tokens of the row is copied from the CPU.
        mask = additive(to_device(sees, device), model.dtype, memory=entries)
        if len(self._groups) > 1:
            mask[:, :entries] = torch.finfo(model.dtype).min
            for tokens, seen in self._groups:
                mask[tokens, seen] = 0
        cache = cache_of(self._memories, once=True)
        readings = []
        if any(memory.parts for memory in self._memories):
            for memory, (_, seen) in zip(self._memories, self._groups, strict=True):
                readings.append(memory.readings(seen.start))
        with ExitStack() as contexts:
            if self._replaced:
                at = list(self._replaced)
                vectors = torch.cat([self._replaced[token] for token in at])
                contexts.enter_context(replaced_stream(model, self._layer, at, vectors))
            if trim_last_layer and read and not readings:
                places = on_device(read, device)
                contexts.enter_context(last_layer_at(model, cache, places, len(sees)))
            contexts.enter_context(attention_by(OfPackedRow(sees, self._groups, readings)))
            logits = model(
                input_ids=on_device([self.tree.tokens], device),
                position_ids=on_device([self._positions], device),
                attention_mask=mask[None, None],
                logits_to_keep=kept_logits(model, read) if read else 1,
                **cache_arguments(model, cache),
            ).logits[0]
        if len(logits) != len(read):  # the model ignores logits_to_keep
            logits = logits[on_device(read, logits.device)]
        return logits


def score_packed(
    model: PreTrainedModel,
    work: Sequence[tuple[Memory, Sequence[Pair]]],
    softmax_dtype: torch.dtype | None = None,
    states: States = None,
    trim_last_layer: bool = False,
) -> Scores:
    """Score pairs on one memory or several in one `PackedRow`, without waiting for a GPU.

    Args:
        work: memories, each with the queries and continuations that attend to it.
        softmax_dtype: the dtype of the softmax over the vocabulary. None: at least float32.
        states: the vector that is returned for each pair, in order.
        trim_last_layer: the model's last layer can run for predicting tokens alone (`can_trim`).
    """
    with _projected(model, states) as projected:
        predicted = _predict(model, work, trim_last_layer)
    all_pairs = list(chain.from_iterable(pairs for _, pairs in work))
    firsts = [path[0] for path in predicted.paths]
    vectors = _vectors(states, predicted.logits, projected, predicted.tokens, firsts)
    numbers = _numbers(predicted.logits, predicted.paths, all_pairs, softmax_dtype)
    return Scores(numbers, list(map(len, predicted.paths)), vectors)


def score_together(
    model: PreTrainedModel,
    memories: Sequence[Memory],
    pairs: Sequence[Pair],
    method: Any,
    softmax_dtype: torch.dtype | None = None,
    at_once: bool = True,
    trim_last_layer: bool = False,
) -> Scores:
    """Score pairs that attend to several memories, from the combined predictions with all memories.

    Args:
        pairs: queries with continuations, each of which attends to each memory.
        method: combines the predictions by `combined` and `score`
            (`lm_eval_icl.methods.several.Several`).
        softmax_dtype, trim_last_layer: as for `score_packed`.
        at_once: run one forward pass for all memories. False: one for each memory.
    """
    work = [(memory, pairs) for memory in memories]
    passes = [work] if at_once else [[item] for item in work]
    predictions = [_predict(model, items, trim_last_layer) for items in passes]
    numbers = []
    last: Pair | None = None
    for i, (query, answer) in enumerate(pairs):
        predicting = (query, answer[:-1])
        if predicting != last:  # options of one token share the distribution of the next token
            last = predicting
            rows = []
            for prediction in predictions:
                for path in prediction.paths[i :: len(pairs)]:
                    at = on_device(path, prediction.logits.device)
                    rows.append(prediction.logits[at])
            dtype = torch.promote_types(softmax_dtype or rows[0].dtype, torch.float32)
            logprobs = torch.stack(rows).log_softmax(-1, dtype=dtype)
            together = method.combined(logprobs)
        ids = on_device(answer, together.device)
        value = method.score(together, logprobs, ids)
        likeliest = (together.argmax(-1) == ids).all()
        numbers.append(torch.stack((value, likeliest.to(value))))
    return Scores(torch.stack(numbers, dim=1), [1] * len(pairs))


class _Prediction(NamedTuple):
    """The logits of one packed row."""

    logits: Tensor  # [predicting tokens, vocabulary]
    paths: list[list[int]]  # for each pair, the rows of `logits` that predict its continuation
    tokens: list[int]  # the index in the packed row of each predicting token


def _predict(
    model: PreTrainedModel, work: Sequence[tuple[Memory, Sequence[Pair]]], trim_last_layer: bool
) -> _Prediction:
    packed = PackedRow(
        (memory, [(*query, *answer[:-1]) for query, answer in pairs]) for memory, pairs in work
    )
    nodes = []  # for each pair, the nodes that predict its continuation
    for paths, (_, pairs) in zip(packed.paths, work, strict=True):
        for query, answer in pairs:
            path = paths[(*query, *answer[:-1])]
            nodes.append(path[len(query) - 1 :])
    tokens = sorted(set(chain(*nodes)))
    row = {node: i for i, node in enumerate(tokens)}
    logits = packed.run(model, tokens, trim_last_layer)
    return _Prediction(logits, [[row[node] for node in path] for path in nodes], tokens)


@contextmanager
def _projected(model: PreTrainedModel, states: States) -> Iterator[list[Tensor]]:
    """Inside this context, collect the inputs of the vocabulary projection, if they are needed.

    Yields:
        A list that gets a tensor [rows, tokens, width] from each pass if `states` are hidden
        states.
    """
    collected: list[Tensor] = []
    if states != "hidden":
        yield collected
        return
    projection = model.get_output_embeddings()
    with projection.register_forward_pre_hook(lambda _, inputs: collected.append(inputs[0])):
        yield collected


def _vectors(
    states: States, logits: Tensor, projected: list[Tensor], read: Sequence[int], at: Any
) -> Tensor | None:
    """The vectors of a pass that `states` names: [pairs, size].

    Args:
        logits: [(rows,) len(read), vocabulary].
        projected: the inputs that `_projected` collected. They are those of all tokens if the model
            ignores `logits_to_keep`.
        read: the indices of the tokens that have these logits.
        at: for each pair, the index of its query's last token in `logits`.
    """
    if states is None:
        return None
    vectors = logits
    if states == "hidden":
        [hidden] = projected
        if hidden.shape[1] != len(read):
            hidden = hidden[:, on_device(read, hidden.device)]
        vectors = hidden.reshape(*logits.shape[:-1], -1)
    vectors = vectors[at].to(torch.promote_types(vectors.dtype, torch.float32))
    return vectors.log_softmax(-1) if states == "log_probs" else vectors


def streams_packed(
    model: PreTrainedModel, work: Sequence[tuple[Memory, Sequence[Ids]]], layer: int
) -> list[Tensor]:
    """The residual stream of each query's last token after a layer, counted from 1.

    It comes from one forward pass over all queries of all memories (`PackedRow`).

    Returns:
        For each memory, [queries, width].
    """
    packed = PackedRow(work)
    with residual_stream(model, layer) as collected:
        packed.run(model, [])
    [stream] = collected
    streams = []
    for paths, (_, queries) in zip(packed.paths, work, strict=True):
        last = [paths[query][-1] for query in queries]
        streams.append(stream[0].index_select(0, on_device(last, stream.device)))
    return streams


def score_rows(
    model: PreTrainedModel,
    memory: Memory,
    queries: Sequence[QueryAnswers],
    softmax_dtype: torch.dtype | None = None,
    rows: int = 1,
    states: States = None,
) -> Scores:
    """Score the answers of some queries by ordinary causal passes.

    In the first pass, every row is a query. In later passes, every row is an answer of several
    tokens, which continues from the cache of its query. No mask is passed. This is for models that
    do not obey a 4-D mask or `position_ids` (ALiBi, flash attention), for hybrids, and for rows
    longer than the window of local attention layers.

    Args:
        queries: queries with their answers. If any answer has several tokens, all queries have the
            same length, since an answer continues from the end of its row.
        softmax_dtype, states: as for `score_packed`.
        rows: the number of answers that run in one batch.

    Returns:
        The score of each answer of each query, in order.
    """
    cache = memory.cache(len(queries)) if len(memory) else empty_cache(model)
    assert cache is not None  # otherwise there is `Capabilities.no_memory`
    query_rows = [query for query, _ in queries]
    ends = sorted({len(query) - 1 for query in query_rows})
    with memory.reading(model), _projected(model, states) as projected:
        at_ends = run_after_memory(model, memory, cache, query_rows, 0, ends)
    last = [ends.index(len(query) - 1) for query in query_rows]
    after_queries = at_ends[range(len(queries)), last]

    pairs: list[Pair] = []
    row_of = []  # for each pair, the row of its query
    for row, (query, answers) in enumerate(queries):
        for answer in answers:
            pairs.append((query, answer))
            row_of.append(row)
    short = [i for i, (_, answer) in enumerate(pairs) if len(answer) == 1]
    long = [i for i, (_, answer) in enumerate(pairs) if len(answer) > 1]
    batches = [long[start : start + rows] for start in range(0, len(long), rows)]
    if short:
        batches.append(short)
    numbers: dict[int, Tensor] = {}  # pair -> its [2, tokens]
    for batch in batches:
        batch_pairs = [pairs[i] for i in batch]
        inputs = [answer[:-1] for _, answer in batch_pairs]
        longest = max(map(len, inputs))
        # The rows of the queries' logits come first, then `longest` rows for each answer.
        logits = after_queries
        if longest:
            cache_of_batch = select_rows(cache, len(queries), [row_of[i] for i in batch])
            depth = len(batch_pairs[0][0])
            following = run_after_memory(
                model, memory, cache_of_batch, inputs, depth, range(longest)
            )
            logits = torch.cat([logits, following.flatten(0, 1)])
        paths = []
        start = len(queries)
        for i, tokens in zip(batch, inputs, strict=True):
            paths.append([row_of[i], *range(start, start + len(tokens))])
            start += longest
        batch_numbers = _numbers(logits, paths, batch_pairs, softmax_dtype)
        numbers |= zip(batch, batch_numbers.split(list(map(len, paths)), dim=1), strict=True)
    at = (row_of, [last[row] for row in row_of])
    vectors = _vectors(states, at_ends, projected, ends, at)
    in_order = [numbers[i] for i in range(len(pairs))]
    return Scores(torch.cat(in_order, dim=1), [len(answer) for _, answer in pairs], vectors)


def _numbers(
    logits: Tensor, paths: Sequence[Sequence[int]], pairs: Sequence[Pair], dtype: torch.dtype | None
) -> Tensor:
    """The `numbers` of `Scores`: [2, tokens].

    Args:
        logits: [predicting tokens, vocabulary].
        paths: for each pair, the rows of the logits that predict its continuation's tokens.
    """
    if dtype is None:
        dtype = torch.promote_types(logits.dtype, torch.float32)
    exact = torch.promote_types(dtype, torch.float32)
    at = on_device(list(chain(*paths)), logits.device)
    answers = (answer for _, answer in pairs)
    tokens = on_device(list(chain.from_iterable(answers)), logits.device)
    highest = logits.amax(-1)
    chosen = logits[at, tokens]
    # A softmax of all rows at once would take as much memory as the logits, so its denominators are
    # computed for some rows at a time.
    denominators = []
    for part, top in zip(logits.split(16), highest.split(16), strict=True):
        denominators.append((part.to(exact) - top[:, None]).exp_().sum(-1).log())
    logprobs = (chosen.to(exact) - highest[at] - torch.cat(denominators)[at]).to(dtype)
    # Greedy decoding takes the first of several equally likely tokens, as `argmax` does. `argmax`
    # takes a CPU ten times as long as `amax`: there it is computed only for rows in which the
    # continuation's token is among the likeliest.
    read = at[chosen == highest[at]] if logits.device.type == "cpu" else slice(None)
    likeliest = torch.full_like(highest, -1, dtype=torch.long)
    likeliest[read] = logits[read].argmax(-1)
    return torch.stack([logprobs.to(exact), likeliest[at] == tokens])


def not_finite(name: str, logprob: float, model: PreTrainedModel) -> InputError:
    """The error about a log-probability that is NaN or infinite.

    Metrics would count it as an ordinary wrong answer.

    Args:
        name: the name of the document or text with this log-probability.
    """
    return InputError(
        f"{name}: the log-probability is {logprob} ({model.dtype}): the checkpoint is broken, or "
        "its numbers overflow. Try --model_args dtype=float32."
    )
