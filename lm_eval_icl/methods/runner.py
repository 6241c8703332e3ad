"""Runs a method on a model, with token ids: encodes contexts as memories, and scores or continues queries on them."""

from __future__ import annotations

import os
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import count, groupby, islice, takewhile
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lm_eval_icl.errors import InputError, is_whole
from lm_eval_icl.inference.budget import MemoryBudget, room_for_trials
from lm_eval_icl.inference.caches import without_adapter
from lm_eval_icl.inference.capabilities import Capabilities, probe
from lm_eval_icl.inference.devices import device_of
from lm_eval_icl.inference.gelu import fused_gelu, gelus
from lm_eval_icl.inference.generation import GenerationSettings, Stopped, continue_from, stop_on_nonfinite
from lm_eval_icl.inference.memory import Memory, progress
from lm_eval_icl.inference.packing import Queries, QueryAnswers, TokenTree, first_pack
from lm_eval_icl.inference.positions import learned_positions, no_positions, position_embeddings, position_switch
from lm_eval_icl.inference.scoring import Score, score_packed, score_rows
from lm_eval_icl.inference.store import MemoryStore
from lm_eval_icl.methods import needs
from lm_eval_icl.methods.base import Memories, Method
from lm_eval_icl.methods.limits import PromptLimits
from lm_eval_icl.tokens import Context, TokenizedPrompt

T = TypeVar("T")

# One lock for each model: see `MethodRunner.inference_mode`.
_locks: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()
_making_locks = threading.Lock()


QueryAnswer = tuple[tuple[int, ...], tuple[int, ...]]
# A context, a query behind it, and an answer.
Asked = tuple[Context, tuple[int, ...], tuple[int, ...]]
# context -> query -> answer -> the indices of the prompts that ask for it.
Grouped = dict[Context, dict[tuple[int, ...], dict[tuple[int, ...], list[int]]]]


def grouped(prompts: Iterable[tuple[TokenizedPrompt, tuple[int, ...]]]) -> Grouped:
    """Group pairs of prompt and answer, so that every distinct context, query and answer occurs once.

    The longest context comes first, so that out-of-memory occurs at the beginning of a run.
    """
    found: Grouped = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for i, (prompt, answer) in enumerate(prompts):
        found[prompt.context][prompt.query][answer].append(i)
    return dict(sorted(found.items(), key=lambda item: -len(item[0].tokens)))


def in_order(prompts: Sequence[TokenizedPrompt]) -> list[int]:
    """The indices of prompts in the order in which they are continued: the longest context first, so that out-of-memory
    occurs at the beginning of a run, and behind each context the longest query."""
    of_context = {prompt.context: i for i, prompt in enumerate(prompts)}

    def key(i: int) -> tuple[int, int, int]:
        context, query = prompts[i].context, prompts[i].query
        return -len(context.tokens), of_context[context], -len(query)

    return sorted(range(len(prompts)), key=key)


class MethodRunner:
    """Runs a method on a model.

    Args:
        model: a causal language model of transformers.
        method: the method; arguments that depend on the model are filled in (`Method.bind`).
        pack_tokens: how many tokens of queries and options, and of contexts that run side by side, share one forward
            pass that scores.
        batch_size: how many texts are generated in one batch; how many queries that cannot be packed are scored in one
            batch; and, on an accelerator, how many queries at least share one packed pass.
        store_bytes: how many bytes of keys and values are stored for contexts that occur again.
        softmax_dtype: the dtype of the softmax over the vocabulary; if None, at least float32.
        mixed_precision_dtype: the dtype of autocast; None for no autocast.
        tensor_parallel: each pass is divided among several processes (tensor parallelism).

    Attributes:
        capabilities: what the model can do.
        store: the stored memories.
        budget: how much runs at once.
        tokens_run: how many tokens were run through the model for scoring.
        passes_run: in how many forward passes.
        quiet: no bar is shown while a long context is encoded. Of several processes, the first one shows it.
        packs_ahead: how many packs are begun before the scores of a pack are handed on: on an accelerator one, which
            runs while these are read.
        without_positions: the learned position embeddings that are switched off while the model runs; None if positions
            are left as they are.

    Raises:
        Unsupported: the model does not do what the method needs.
        InputError: the model cannot be used with any method, or an argument does not fit the model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        method: Method,
        *,
        pack_tokens: int = 1024,
        batch_size: int = 1,
        store_bytes: int = 2**31,
        softmax_dtype: torch.dtype | None = None,
        mixed_precision_dtype: torch.dtype | None = None,
        tensor_parallel: bool = False,
    ) -> None:
        for name, value in (("pack_tokens", pack_tokens), ("batch_size", batch_size), ("store_bytes", store_bytes)):
            if not is_whole(value) or value < 1:
                raise InputError(f"{name}={value!r}: must be a whole number, 1 or more.")
        self.model, self.pack_tokens, self.store_bytes = model, int(pack_tokens), int(store_bytes)
        self.softmax_dtype, self.mixed_precision_dtype = softmax_dtype, mixed_precision_dtype
        self.tensor_parallel = tensor_parallel
        self.quiet = os.environ.get("RANK", "0") != "0"
        self.without_positions: list[nn.Embedding] | None = None
        self._gelus, self._inside, self._counting = gelus(model), False, False
        with self.inference_mode(), room_for_trials(model):
            self.capabilities = probe(model)
            self._learned_positions = learned_positions(model)
        needs.check(method, model, self.capabilities)
        needs.warn(model, self.capabilities)
        if method.positions == "none":
            self._take_positions_away(method)
        with self.inference_mode():
            self.method = method.bind(model)
        self.begin(int(batch_size))

    def begin(self, batch_size: int) -> None:
        """Begin a run. The memories of an earlier run are dropped, since the model's weights may have changed."""
        self.store = MemoryStore(self._encode, self.store_bytes)
        device = device_of(self.model)
        # On a CPU, larger packs are slower, since most of their attention is masked.
        queries = 1 if device.type == "cpu" else batch_size
        self.packs_ahead = 0 if device.type == "cpu" else 1
        what = f"{type(self.model).__name__} on {device}"
        self.budget = MemoryBudget(self.store, self.pack_tokens, queries, batch_size, what, self.tensor_parallel)
        self.tokens_run = self.passes_run = 0

    def limits(self, max_length: int) -> PromptLimits:
        """The limits that prompts have to stay within.

        Args:
            max_length: how many positions the model has, or may use.

        Raises:
            InputError: the model has fewer learned position embeddings than `max_length`.
        """
        model, method = type(self.model).__name__, self.method
        learned = self._learned_positions
        if learned is not None and max_length > learned:
            raise InputError(
                f"max_length={max_length}: {model} has learned embeddings of {learned} positions and no more: give "
                f"max_length={learned} or less."
            )
        return PromptLimits(
            method,
            model=model,
            positions=max_length,
            window=needs.longest_row(method, self.capabilities),
            switch=position_switch(self.model),
            hint=method.overflow_hint if self.capabilities.obeys_positions else "",
        )

    def _take_positions_away(self, method: Method) -> None:
        with self.inference_mode(), room_for_trials(self.model):
            embeddings = list(position_embeddings(self.model))
        self.without_positions = embeddings
        with self.inference_mode(), room_for_trials(self.model):
            needs.check_no_positions(method, self.model, probe(self.model))

    @contextmanager
    def inference_mode(self) -> Iterator[None]:
        """Inside this context, the model runs in evaluation mode (in which it is left), without gradients and with a
        faster GELU, and, if this runner is set up for it, in mixed precision and without positional information.

        Only one thread at a time can be inside, since positions and GELU are patched on the model itself, which other
        runners may share. A run is inside from its beginning to its end: what is done to the model is done once, and
        not for every pass.
        """
        with _making_locks:
            lock = _locks.setdefault(without_adapter(self.model), threading.RLock())
        with lock, torch.no_grad(), self.mixed_precision():
            if self._inside:
                yield
                return
            if self.model.training:  # dropout would change every number
                self.model.eval()
            self._inside = True
            counter = self.model.register_forward_pre_hook(self._count, with_kwargs=True)
            try:
                with self.own_positions(), fused_gelu(self._gelus):
                    yield
            finally:
                counter.remove()
                self._inside = False

    def _count(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Count a pass that scores."""
        if self._counting:
            self.tokens_run += kwargs["input_ids"].numel()
            self.passes_run += 1

    def own_positions(self) -> AbstractContextManager[None]:
        """Inside this context, the model has no positional information if the method is one with `positions=none`."""
        without = self.without_positions
        return nullcontext() if without is None else no_positions(self.model, without)

    def mixed_precision(self) -> torch.autocast:
        """torch's autocast, if it was asked for. It keeps the weights that it has cast until its outermost context
        ends, so many passes inside one context cast them once."""
        dtype = self.mixed_precision_dtype
        return torch.autocast(device_of(self.model).type, dtype=dtype, enabled=dtype is not None)

    # Scoring.

    def score(
        self,
        work: Mapping[Context, Queries],
        done: Callable[[Context], None] = lambda context: None,
        own: Callable[[Context], bool] = lambda context: False,
    ) -> Iterator[tuple[list[Asked], Sequence[Score]]]:
        """Score all answers of all queries behind all contexts.

        Args:
            work: contexts -> the ids of each query -> the ids of each of its answers.
            done: called with each context when its memory is not needed any more.
            own: tells which contexts are known to come with a single query. They are run side by side, and their
                memories are not stored.

        Yields:
            For each forward pass, what it scored, and the scores in the same order.

        Raises:
            InputError: the device's memory does not suffice.
        """
        begun: list[tuple[list[Asked], Sequence[Score]]] = []
        for each in self._passes(list(work.items()), done, own):
            begun.append(each)
            if len(begun) > self.packs_ahead:
                yield begun.pop(0)
        yield from begun

    def _passes(
        self,
        waiting: Sequence[tuple[Context, Queries]],
        done: Callable[[Context], None],
        own: Callable[[Context], bool],
    ) -> Iterator[tuple[list[Asked], Sequence[Score]]]:
        """The forward passes of `score`, whose scores may still be computed when they are yielded."""
        if self.method.memory_depends_on_query:  # two queries share nothing but a pass
            waiting = [(context, {query: queries[query]}) for context, queries in waiting for query in sorted(queries)]
        while waiting:
            context, queries = waiting[0]
            together = self._counted(
                partial(self._score_together, waiting, own), partial(self._halve_together, waiting, own)
            )
            if together is not None:
                some, asked, scores = together
                yield asked, scores
            else:
                some = 1
                for pairs, scores in self._score_one(context, queries):
                    yield [(context, *pair) for pair in pairs], scores
            goes_on = waiting[some][0] if some < len(waiting) else None
            for context in dict.fromkeys(context for context, _ in waiting[:some]):
                if context is not goes_on:
                    done(context)
            waiting = waiting[some:]

    def _together(self, waiting: Sequence[tuple[Context, Queries]], own: Callable[[Context], bool]) -> tuple[int, int]:
        """How many of the first contexts run side by side, with their queries, and how many tokens they have together;
        0 if this is not possible, or if the first context does not fit into a pass."""
        first, _ = waiting[0]
        if not self.method.memory_depends_on_query:
            return self._side_by_side(self._rows_of(takewhile(lambda item: own(item[0]), waiting)))
        # Not behind another context that several queries have: what is left of a run may have these in another order.
        some = takewhile((lambda item: own(item[0])) if own(first) else (lambda item: item[0] is first), waiting)
        return self._side_by_side(
            (*self.method.tokens_for(context, len(query)), queries) for context, queries in some for query in queries
        )

    def _rows_of(self, items: Iterable[tuple[Context, Queries]]) -> Iterator[tuple[int, int, Queries]]:
        """How many tokens encoding each context takes, behind no entries, and its queries, up to the first context that
        runs alone."""
        for context, queries in takewhile(lambda item: item[0].demonstrations and item[0].tokens, items):
            yield self.method.footprint(context).tokens, 0, queries

    def _side_by_side(self, rows: Iterable[tuple[int, int, Queries]]) -> tuple[int, int]:
        """How many of the first rows share a pass, and how many tokens they have together.

        Args:
            rows: how many tokens are run for each, behind how many entries of memories, and the queries that are scored
                behind it.
        """
        found, used, tokens, entries, tree = 0, 0, 0, 0, TokenTree()
        if not self.capabilities.can_pack or position_switch(self.model):
            return found, used
        for of_row, behind, queries in rows:
            tokens, entries = tokens + of_row, entries + behind
            tree.leave()
            for query in sorted(queries):
                tree.add_query(query, queries[query])
            total = tokens + len(tree.tokens)
            if total > self.budget.pack_tokens or not self.capabilities.sees_all_of(entries + total):
                break
            found, used = found + 1, total
        return found, used

    def _score_together(
        self, waiting: Sequence[tuple[Context, Queries]], own: Callable[[Context], bool]
    ) -> tuple[int, list[Asked], Sequence[Score]] | None:
        """Score the answers of the first contexts in one pass; None if only one context is to be run at a time."""
        n, _ = self._together(waiting, own)
        if not n:
            return None
        asked = [
            (context, query, answer)
            for context, queries in waiting[:n]
            for query in sorted(queries)
            for answer in queries[query]
        ]
        if self.method.memory_depends_on_query:
            encoding = self._alone if own(waiting[0][0]) else self._stored
            behind = [(context, query) for context, queries in waiting[:n] for query in queries]
            encoded = self._encode_queries(behind, encoding, self.capabilities)
            answers = [queries[query] for _, queries in waiting[:n] for query in queries]
            work = [
                (memory, [(rest, answer) for answer in of_query])
                for (memory, rest), of_query in zip(encoded, answers, strict=True)
            ]
        elif all(self.method.is_ordinary(context) for context, _ in waiting[:n]):
            # An ordinary pass reads the contexts with the queries.
            pairs = [((*context.tokens, *query), answer) for context, query, answer in asked]
            work = [(Memory([], [], 0), pairs)]
        elif n < 2:
            return None
        else:
            contexts = [context for context, _ in waiting[:n]]
            memories = dict(zip(contexts, self.store.once(contexts), strict=True))
            of_context = groupby(asked, key=lambda each: each[0])
            work = [(memories[context], [each[1:] for each in some]) for context, some in of_context]
        trim = self.capabilities.can_trim_last_block
        return n, asked, score_packed(self.model, work, self.softmax_dtype, trim)

    def _stored(self, contexts: Sequence[Context]) -> list[Memory]:
        """The memories of contexts that come up again, each encoded alone: they have the same bits in whatever is left
        of a run."""
        return [self.store[context] for context in contexts]

    def _alone(self, contexts: Sequence[Context]) -> list[Memory]:
        """The memories of contexts that come with a single query, encoded side by side as far as they fit into a pass,
        and not stored."""
        memories: list[Memory] = []
        while len(memories) < len(contexts):
            waiting = contexts[len(memories) :]
            n, _ = self._side_by_side(self._rows_of((context, {}) for context in waiting))
            memories += self.store.once(waiting[: max(n, 1)])
        return memories

    def _halve_together(self, waiting: Sequence[tuple[Context, Queries]], own: Callable[[Context], bool]) -> str:
        n, tokens = self._together(waiting, own)
        return self.budget.halve_pack(tokens) if n else ""

    def _score_one(self, context: Context, queries: Queries) -> Iterator[tuple[list[QueryAnswer], Sequence[Score]]]:
        """Score the answers of one context's queries, as many in a pass as run together."""
        if not self.method.memory_depends_on_query:
            yield from self._score_on(context, self._counted(lambda: self.store[context]), queries)
            return
        for query, answers in queries.items():
            memory, rest = self._counted(partial(self._encode_query, context, query))
            for pairs, scores in self._score_on(context, memory, {rest: answers}):
                yield [(query, answer) for _, answer in pairs], scores

    def score_memories(
        self, context: Context, queries: Queries, numbers: Collection[int]
    ) -> Iterator[tuple[int, list[QueryAnswer], Sequence[Score]]]:
        """Score all answers of all queries on some of a context's memories (`Method.memories`), which are not stored.

        Args:
            queries: as for `score`.
            numbers: which memories, from 1 on. If there are fewer, the last one stands for those that are missing.

        Yields:
            For each forward pass, the number of the memory on which it ran, its pairs of query and answer, and their
            scores in the same order.

        Raises:
            InputError: the device's memory does not suffice.
        """
        memories = self.method.memories(self.model, context)

        def following() -> Memory | None:
            nonlocal memories
            try:
                with progress(self.model, self._pass_length(context), self.quiet):
                    return next(memories, None)
            except BaseException:  # an iterator that has raised an error has ended: out of memory, begin anew
                memories = islice(self.method.memories(self.model, context), number - 1, None)
                raise

        last: Memory | None = None
        for number in count(1):
            memory = self._counted(following)
            if memory is None:
                break
            if number in numbers:
                for pairs, scores in self._score_on(context, memory, queries):
                    yield number, pairs, scores
            last = memory
        if last is not None and max(numbers) >= number and number - 1 not in numbers:
            for pairs, scores in self._score_on(context, last, queries):
                yield number - 1, pairs, scores

    def _pass_length(self, context: Context) -> int:
        """How many tokens a pass over a context runs."""
        footprint = self.method.footprint(context)
        return footprint.kept if self.method.counts_memories else footprint.tokens

    def _encode(self, contexts: Sequence[Context]) -> list[Memory]:
        """The memories of contexts that are not stored."""
        passes = getattr(self.method, self.method.counts_memories) if self.method.counts_memories else 1
        with progress(self.model, passes * sum(map(self._pass_length, contexts)), self.quiet):
            memories = self.method.encode(self.model, contexts)
        needs.check_memories(self.method, memories)
        return memories

    def _encode_queries(
        self, asked: Sequence[tuple[Context, tuple[int, ...]]], memories: Memories, can: Capabilities | None = None
    ) -> list[tuple[Memory, tuple[int, ...]]]:
        """What is run behind which memory, for each of several queries (`Method.encode_queries`)."""
        tokens = 0
        if self.method.memory_depends_on_query:
            tokens = sum(self.method.tokens_for(context, len(query))[0] for context, query in asked)
        with progress(self.model, tokens, self.quiet):
            return self.method.encode_queries(self.model, asked, memories, can)

    def _encode_query(self, context: Context, query: tuple[int, ...]) -> tuple[Memory, tuple[int, ...]]:
        return self._encode_queries([(context, query)], self._stored)[0]

    def _score_on(
        self, context: Context, memory: Memory, queries: Queries
    ) -> Iterator[tuple[list[QueryAnswer], Sequence[Score]]]:
        # Sorted: the common beginning of queries in one pack is run once, and rows of one batch have similar lengths.
        length = (lambda query: 0) if self.capabilities.can_pack else len
        waiting = sorted(queries.items(), key=lambda item: (length(item[0]), item[0]))
        while waiting:
            pack, scores = self._counted(
                partial(self._score_first, memory, waiting), partial(self._halve_pack, memory, waiting), context
            )
            waiting = waiting[len(pack) :]
            yield [(query, answer) for query, answers in pack for answer in answers], scores

    def _score_first(
        self, memory: Memory, waiting: Sequence[QueryAnswers]
    ) -> tuple[list[QueryAnswers], Sequence[Score]]:
        """The first of the waiting queries, as many as run together, and the scores of all their answers."""
        pack, tokens = self._pack(memory, waiting)
        if tokens:
            pairs = [(query, answer) for query, answers in pack for answer in answers]
            trim = self.capabilities.can_trim_last_block
            return pack, score_packed(self.model, [(memory, pairs)], self.softmax_dtype, trim)
        rows, stepwise = self._most_rows, self.capabilities.stepwise
        return pack, score_rows(self.model, memory, pack, self.softmax_dtype, rows, stepwise)

    def _pack(self, memory: Memory, waiting: Sequence[QueryAnswers]) -> tuple[list[QueryAnswers], int]:
        """The first of the waiting queries, as many as run together, and of how many tokens the packed pass is in which
        they run. If it is 0, they are the rows of a batch."""
        if not self.capabilities.can_pack:
            return self._rows(waiting), 0
        pack, tokens = first_pack(waiting, self.budget.pack_tokens, self.budget.queries)
        # A query longer than a pack gains nothing from packing, and its mask would be large.
        together = len(pack) > 1 or tokens <= self.budget.pack_tokens
        together = together and self.capabilities.can_pack_to(len(memory) + tokens)
        return (pack, tokens) if together else (pack[:1], 0)

    @property
    def _most_rows(self) -> int:
        """How many rows a batch that scores has at most."""
        return self.budget.texts if self.capabilities.can_batch else 1

    def _rows(self, waiting: Sequence[QueryAnswers]) -> list[QueryAnswers]:
        """The first of the waiting queries, the shortest first, as many as run as the rows of one batch."""
        rows = list(waiting[: self._most_rows])
        if all(len(answer) == 1 for _, answers in rows for answer in answers):
            return rows
        return [row for row in rows if len(row[0]) == len(rows[0][0])]

    def _halve_pack(self, memory: Memory, waiting: Sequence[QueryAnswers]) -> str:
        pack, tokens = self._pack(memory, waiting)
        if tokens:
            return self.budget.halve_pack(tokens)
        most = max(len(pack), *(len(answers) for _, answers in pack))
        return self.budget.halve_texts(min(most, self._most_rows))

    # Generation.

    def generate(
        self,
        prompts: Sequence[TokenizedPrompt],
        names: Sequence[str],
        max_new_tokens: int,
        generate: Callable[..., Tensor],
        settings: GenerationSettings,
        stopped: Stopped | None = None,
        own: Callable[[Context], bool] = lambda context: False,
    ) -> list[list[int]]:
        """Generate a continuation for the first of these prompts, as many as fit into one batch.

        A model whose cache `generate` does not go on from reads every prompt as a whole, alone.

        Args:
            prompts: the prompts that are waiting, those of one context side by side, the longest query first
                (`in_order`).
            names: the names of the prompts, for errors.
            max_new_tokens: how many tokens are generated at most.
            generate, stopped: as for `continue_from`.
            settings: the settings under which `generate` runs (`settings_in_force`).
            own: as for `score`.

        Returns:
            The generated ids, one row for each prompt of the batch.

        Raises:
            Unsupported: as `check_generates`.
            InputError: the scores of a next token are NaN or infinite, or the device's memory does not suffice.
        """
        self.check_generates(prompts[0].context)
        own = own if self.capabilities.can_generate else (lambda context: True)

        def run() -> list[list[int]]:
            some = prompts[: self._batch(prompts, max_new_tokens, settings, own)]
            if own(some[0].context):
                memories, queries = self._of_own_contexts(some, own)
            else:
                memory, first = self._encode_query(some[0].context, some[0].query)
                memories, queries = [memory], [first, *(prompt.query for prompt in some[1:])]
            can, longest = self.capabilities, max(map(len, memories)) + max(map(len, queries)) + max_new_tokens
            ways = {"stepwise": can.stepwise, "shared": can.can_share_to(longest), "leaving": can.can_leave}
            with stop_on_nonfinite(self.model, names[: len(some)]):
                return continue_from(self.model, generate, memories, queries, settings.beams, stopped=stopped, **ways)

        def halve_texts() -> str:
            return self.budget.halve_texts(self._batch(prompts, max_new_tokens, settings, own))

        return self.fit(run, halve_texts, prompts[0].context)

    def check_generates(self, context: Context) -> None:
        """Check that text can be generated behind a context.

        Raises:
            Unsupported: transformers' `generate` does not go on from this model's cache, and the method needs that.
        """
        needs.check_generates(self.method, self.model, self.capabilities, context)

    def _of_own_contexts(
        self, prompts: Sequence[TokenizedPrompt], own: Callable[[Context], bool]
    ) -> tuple[list[Memory], list[tuple[int, ...]]]:
        """The memory of each of these prompts, and what is to be run behind it. Where the memory would be that of an
        ordinary causal pass, there is none: the context is run with the query."""
        contexts = [prompt.context for prompt in prompts]
        if all(map(self.method.is_ordinary, contexts)):
            whole = [(*prompt.context.tokens, *prompt.query) for prompt in prompts]
            return [Memory([], [], 0)], whole
        if self.method.memory_depends_on_query:
            memory, rest = self._encode_query(contexts[0], prompts[0].query)
            return [memory], [rest]
        return self._alone(contexts), [prompt.query for prompt in prompts]

    def _batch(
        self,
        prompts: Sequence[TokenizedPrompt],
        max_new_tokens: int,
        settings: GenerationSettings,
        own: Callable[[Context], bool],
    ) -> int:
        """How many of the first prompts can be continued in one batch: those of one context, whose memory they share,
        or those of which each has a context of its own."""
        batch = prompts[: self.budget.texts]
        if self.method.memory_depends_on_query or self._most_rows == 1 or self.capabilities.stepwise:
            return 1
        together = own if own(batch[0].context) else batch[0].context.__eq__
        batch = list(takewhile(lambda prompt: together(prompt.context), batch))
        kept = max(self.method.footprint(prompt.context).kept for prompt in batch)
        longest = max(len(prompt.query) for prompt in batch)
        pads = self.capabilities.can_pad and self.capabilities.can_pack_to(kept + longest + max_new_tokens)
        pads = pads and not settings.reads_rows
        if own(batch[0].context):
            return len(batch) if pads and not position_switch(self.model) else 1
        if not pads:
            # Padding would shift a query's tokens, so all rows of a batch must have the same length.
            return sum(len(prompt.query) == len(batch[0].query) for prompt in batch)
        return len(batch)

    def fit(self, run: Callable[[], T], halve: Callable[[], str] = str, context: Context | None = None) -> T:
        """`MemoryBudget.fit` in `inference_mode`."""
        with self.inference_mode():
            return self.budget.fit(run, halve, context)

    def _counted(self, run: Callable[[], T], halve: Callable[[], str] = str, context: Context | None = None) -> T:
        """`fit`, with the tokens that are run through the model added to `tokens_run`."""
        with self.inference_mode():
            self._counting = True
            try:
                return self.budget.fit(run, halve, context)
            finally:
                self._counting = False
