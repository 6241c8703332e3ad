"""Runs a method on a model, with token ids: encodes contexts as memories, and scores or continues queries on them."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lm_eval_icl.errors import Unsupported, checked_whole
from lm_eval_icl.inference.budget import MemoryBudget
from lm_eval_icl.inference.capabilities import Capabilities, probe
from lm_eval_icl.inference.devices import device_of
from lm_eval_icl.inference.gelu import fused_gelu
from lm_eval_icl.inference.generation import (
    GenerationSettings,
    combining,
    continue_from,
    stop_on_nonfinite,
)
from lm_eval_icl.inference.memory import Memory
from lm_eval_icl.inference.packing import Queries
from lm_eval_icl.inference.positions import no_positions, position_embeddings
from lm_eval_icl.inference.prefix_cache import PrefixCache
from lm_eval_icl.inference.schedule import (
    Batch,
    ContextQueryAnswer,
    Sizes,
    Text,
    first_texts,
    schedule,
    side_by_side,
)
from lm_eval_icl.inference.scoring import (
    Score,
    Scores,
    States,
    score_packed,
    score_rows,
    score_together,
)
from lm_eval_icl.methods import needs
from lm_eval_icl.methods.base import Method
from lm_eval_icl.methods.blocks import BlockStore
from lm_eval_icl.methods.limits import PromptLimits
from lm_eval_icl.methods.several import Several
from lm_eval_icl.prompts.tokens import Context, Ids, TokenizedPrompt

# context -> query -> answer -> the indices of the prompts with this context, query and answer.
Grouped = dict[Context, dict[Ids, dict[Ids, list[int]]]]
# The requests that a forward pass scored, and their scores in the same order.
Scored = tuple[list[ContextQueryAnswer], Scores]
# See `MethodRunner.inference_mode`.
_running = threading.RLock()


def grouped(prompts: Iterable[tuple[TokenizedPrompt, Ids]]) -> Grouped:
    """Group pairs of prompt and answer, so that every distinct context, query and answer occurs once.

    The longest context comes first, so that out-of-memory occurs at the beginning of a run.
    """
    groups: Grouped = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for i, (prompt, answer) in enumerate(prompts):
        groups[prompt.context][prompt.query][answer].append(i)
    return dict(sorted(groups.items(), key=lambda item: -len(item[0].tokens)))


class MethodRunner:
    """Runs a method on a model: encodes contexts as memories, stores the memories, and scores or continues queries.

    Args:
        model: a causal language model of transformers.
        method: the method; arguments that depend on the model are filled in (`Method.bind`).
        pack_tokens: how many tokens a packed forward pass may have: tokens of queries and options, and of contexts that
            run side by side.
        batch_size: how many rows a batch may have in which texts are generated or queries are scored without packing.
            On an accelerator, as many queries may also share a packed pass, even if they exceed `pack_tokens`.
        store_bytes: how many bytes of keys and values are stored for contexts that occur again.
        softmax_dtype: the dtype of the softmax over the vocabulary; if None, at least float32.
        mixed_precision_dtype: the dtype of autocast; None for no autocast.
        tensor_parallel: each pass is divided among several processes (tensor parallelism).
        capabilities: what the model can do, if known. Otherwise, some thirty short passes find it out.

    Attributes:
        tokens_run, passes_run: how many tokens, and how many passes, were run through the model inside `counting`.
        fits: further methods under which prompts must fit (`limits`), so that all of these methods lose the same
            demonstrations of a long prompt.

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
        capabilities: Capabilities | None = None,
    ) -> None:
        self.pack_tokens = checked_whole("pack_tokens", pack_tokens)
        batch_size = checked_whole("batch_size", batch_size)
        self.store_bytes = checked_whole("store_bytes", store_bytes, least=0)
        self.model, self.softmax_dtype, self.mixed_precision_dtype = (
            model,
            softmax_dtype,
            mixed_precision_dtype,
        )
        self.tensor_parallel = tensor_parallel
        # The learned position embeddings that are switched off while the model runs; None if positions are not removed.
        self.without_positions: list[nn.Embedding] | None = None
        self.fits: Sequence[Method] = ()
        self._inside = False
        with self.inference_mode():
            self.capabilities = capabilities or probe(model)
            needs.check(method, model, self.capabilities)
            needs.warn(method, model, self.capabilities)
            self.without_positions = (
                position_embeddings(model) if method.positions == "none" else None
            )
        with self.inference_mode():
            if method.positions == "none":
                needs.check_no_positions(method, model)
            self.method = method.bind(model)
        self.begin(batch_size)

    def begin(self, batch_size: int) -> None:
        """Begin a run. The memories of an earlier run are dropped, since the model's weights may have changed."""
        self.store = PrefixCache(lambda contexts: self.blocks.encode(contexts), self.store_bytes)
        device = device_of(self.model)
        # On a CPU, larger packs are slower, since most of their attention is masked.
        sizes = Sizes(self.pack_tokens, 1 if device.type == "cpu" else batch_size, batch_size)
        # How many further packs are begun before the scores of a pack are returned, so that an accelerator is not idle.
        self.packs_ahead = 0 if device.type == "cpu" else 1
        self.budget = MemoryBudget(
            self.store, sizes, f"{type(self.model).__name__} on {device}", self.tensor_parallel
        )
        self.blocks = BlockStore(self.model, self.method, self.capabilities, self.budget)
        self.tokens_run = self.passes_run = 0

    def limits(self, max_length: int) -> PromptLimits:
        """The limits of prompts, for a model that has, or may use, `max_length` positions."""
        can = self.capabilities
        own, *others = [
            PromptLimits(
                method,
                type(self.model).__name__,
                max_length,
                needs.longest_row(method, can),
                can.position_switch,
                method.overflow_hint if can.obeys_positions else "",
                needs.keeps_window(method, can),
            )
            for method in (self.method, *self.fits)
        ]
        return replace(own, also=tuple(others))

    @property
    def invariant(self) -> bool:
        """Whether the order of the demonstrations makes no difference with this model except for rounding."""
        return self.method.invariant and not needs.keeps_window(self.method, self.capabilities)

    # How the model runs.

    @contextmanager
    def inference_mode(self) -> Iterator[None]:
        """Inside this context, the model runs in evaluation mode, without gradients and with a faster GELU and, if the
        runner is set up so, in mixed precision and without positional information. Evaluation mode stays afterwards.

        Only one thread at a time can be inside, since positions and GELU of a model that runners may share are patched.
        """
        with _running, torch.no_grad(), self.mixed_precision():
            if self._inside:
                yield
                return
            self.model.eval()  # dropout would change every number
            self._inside = True
            try:
                with self.method_positions(), fused_gelu(self.model):
                    yield
            finally:
                self._inside = False

    @contextmanager
    def counting(self) -> Iterator[None]:
        """`inference_mode` that also counts tokens and passes."""

        def count_tokens(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            self.tokens_run += (args[0] if args else kwargs["input_ids"]).numel()
            self.passes_run += 1

        with (
            self.inference_mode(),
            self.model.register_forward_pre_hook(count_tokens, with_kwargs=True),
        ):
            yield

    def method_positions(self) -> AbstractContextManager[None]:
        """Inside this context, the model has no positional information if the method runs with `positions=none`."""
        without = self.without_positions
        return nullcontext() if without is None else no_positions(self.model, without)

    def mixed_precision(self) -> torch.autocast:
        """torch's autocast, if `mixed_precision_dtype` is set. Many passes inside one context cast the weights once."""
        dtype = self.mixed_precision_dtype
        return torch.autocast(device_of(self.model).type, dtype=dtype, enabled=dtype is not None)

    # Memories and scores.

    def _memories(self, contexts: Sequence[Context]) -> list[Memory]:
        """The memories of contexts. Those that are not stored are encoded, as many in one pass as fit, and stored."""

        def together(missing: Sequence[Context]) -> int:
            work = [
                part
                for context in missing
                for part in self.method.window_method.work(context, {}, once=True)
            ]
            return max(side_by_side(work, self.budget.sizes, self.capabilities)[0], 1)

        return self.store.several(contexts, together)

    def forget(self, context: Context) -> None:
        """Drop all stored memories of a context that no later request has."""
        for stored in self.method.contexts(context):
            self.store.forget(stored)
        self.blocks.forget(context)

    def score_prompts(
        self, prompts: Sequence[tuple[TokenizedPrompt, Ids]], once: bool = False
    ) -> Iterator[list[tuple[int, Score]]]:
        """`score` for prompts, each with an answer. Yields, for each forward pass, the indices of the prompts that it
        scored, each with its score."""
        groups = grouped(self.blocks.beginning_alike(prompts))
        for requests, scores in self.score(groups, once):
            yield [
                (i, score)
                for (context, query, answer), score in zip(requests, scores, strict=True)
                for i in groups[context][query][answer]
            ]

    def score(
        self, work: Mapping[Context, Queries], once: bool = False, states: States = None
    ) -> Iterator[Scored]:
        """Score all answers of all queries of all contexts.

        Args:
            work: contexts -> the ids of each query -> the ids of each of its answers.
            once: no later request has these contexts. Short contexts run side by side, and no memory is stored for
                longer than its queries need it.
            states: the vectors to return with the scores (`Scores.states`). The method must give all queries of a
                context one memory.

        Yields:
            For each forward pass, the requests that it scored, and their scores in the same order.
        """
        if reason := self.capabilities.no_memory:
            raise Unsupported(
                f"{type(self.model).__name__} does not continue from its cache ({reason}): only lm-eval's --model icl "
                "scores with it, since it runs every prompt as a whole."
            )
        begun: list[Scored] = []
        for batch in self._batches(work, once, states):
            begun.append(batch)
            if len(begun) > self.packs_ahead:
                yield begun.pop(0)
        yield from begun

    def _batches(
        self,
        work: Mapping[Context, Queries],
        once: bool = False,
        states: States = None,
        memory: Memory | None = None,
    ) -> Iterator[Scored]:
        """Yields as `score` does; a device may still be computing the scores. `memory`: that of the only context."""
        unscored = {context: dict(queries) for context, queries in work.items() if queries}
        if memory is None:
            with self.counting():
                unscored = {
                    context: unscored[context] for context in self.blocks.divide([*unscored])
                }
        # The memories in use and, if they depend on a query, the tokens of the query that are still to be run.
        in_use: tuple[list[Memory], Ids | None] | None = (
            None if memory is None else ([memory], None)
        )
        while unscored:
            parts = [
                part
                for context in unscored
                for part in self.blocks.work(context, unscored[context], once)
            ]
            for batch in schedule(parts, self.budget.sizes, self.capabilities):
                context, query, _ = batch.queries[0]
                with self.counting():
                    if batch.encoding == "before" and in_use is None:
                        in_use = self.budget.fit(partial(self._encoded, context, query))
                    halve, used = (
                        partial(self.budget.halve, batch.tokens, batch.rows_used),
                        context if in_use else None,
                    )
                    scores = self.budget.attempt(
                        partial(self._score, batch, in_use, states), halve, used
                    )
                if scores is None:
                    break  # the sizes are smaller now: all unscored requests are scheduled again
                yield batch.requests, scores
                for context, query, _ in batch.queries:
                    del unscored[context][query]
                    if self.method.memory_depends_on_query or not unscored[context]:
                        in_use = None
                    if not unscored[context]:
                        del unscored[context]
                        if once:
                            self.forget(context)

    def _encoded(self, context: Context, query: Ids) -> tuple[list[Memory], Ids | None]:
        """The memories of all queries of a context, and None; or the memory of this query, and its tokens to be run."""
        if context in self.blocks.contexts:
            return [*self.blocks.memories([context])], None
        if not self.method.memory_depends_on_query:
            return self._memories(self.method.contexts(context)), None
        [(memory, rest)] = self.method.encode_queries(
            self.model, [(context, query)], self._memories
        )
        return [memory], rest

    def _score(
        self, batch: Batch, in_use: tuple[list[Memory], Ids | None] | None, states: States
    ) -> Scores:
        """Run a batch, on the memories `in_use` if there are some."""
        if in_use is not None:
            (memory, *more), rest = in_use
            if more:
                assert isinstance(self.method, Several)
                pairs, at_once = (
                    [(query, answer) for _, query, answer in batch.requests],
                    bool(batch.tokens),
                )
                return score_together(
                    self.model, in_use[0], pairs, self.method, self.softmax_dtype, at_once
                )
            queries = [(rest or query, answers) for _, query, answers in batch.queries]
            if not batch.tokens:
                return score_rows(
                    self.model, memory, queries, self.softmax_dtype, batch.rows, states
                )
            work = [(memory, [(query, answer) for query, answers in queries for answer in answers])]
        elif batch.encoding == "never":
            pairs = [
                ((*context.tokens, *query), answer) for context, query, answer in batch.requests
            ]
            work = [(Memory([], [], 0), pairs)]
        elif self.method.memory_depends_on_query:
            context_queries = [(context, query) for context, query, _ in batch.queries]
            encoded = self.method.encode_queries(
                self.model, context_queries, self._memories, packed=True
            )
            work = [
                (memory, [(rest, answer) for answer in answers])
                for (memory, rest), (*_, answers) in zip(encoded, batch.queries, strict=True)
            ]
        else:
            pairs_of: dict[Context, list[tuple[Ids, Ids]]] = {}
            for context, query, answer in batch.requests:
                pairs_of.setdefault(context, []).append((query, answer))
            work = list(zip(self.blocks.memories([*pairs_of]), pairs_of.values(), strict=True))
        return score_packed(self.model, work, self.softmax_dtype, states)

    def score_memories(
        self, context: Context, queries: Queries, numbers: Collection[int]
    ) -> Iterator[tuple[int, Scored]]:
        """`score` on some of a context's memories (`Method.memories`); their `numbers` count from 1. Yields, for each
        forward pass, the number of the memory, the scored requests, and their scores."""
        memories = self.method.memories(self.model, context)
        for number in range(1, max(numbers) + 1):
            with self.counting():
                memory = next(memories)
            if number in numbers:
                for batch in self._batches({context: queries}, memory=memory):
                    yield number, batch

    def generate(
        self,
        prompts: Sequence[TokenizedPrompt],
        names: Sequence[str],
        max_new_tokens: int,
        generate: Callable[..., Tensor],
        settings: GenerationSettings,
        single: Collection[Context] = (),
    ) -> list[list[int]]:
        """Generate a continuation for the first of these prompts, as many as fit into one batch. If `generate` does not
        continue from the model's cache, a prompt is run as a whole, in a batch of one.

        Args:
            prompts: the waiting prompts. Prompts with one context are adjacent, the longest query first
                (`inference.schedule.in_order`).
            names: the names of the prompts, for errors.
            max_new_tokens: the largest number of tokens that are generated for a prompt.
            generate: as for `continue_from`.
            settings: the settings of `generate` (`settings_in_force`).
            single: the contexts that only one prompt has. Such prompts may share a batch.

        Returns:
            The generated ids, one row for each prompt of the batch.

        Raises:
            Unsupported: the method generates no text with this model.
            InputError: the scores of a next token are NaN or infinite.
        """
        method, can, by_query = self.method, self.capabilities, self.method.memory_depends_on_query
        needs.check_generates(method, self.model, can, prompts[0].context)
        windows = method.contexts(prompts[0].context)
        if len(windows) > 1:
            needs.check_generates_together(method, self.model, can, settings)
        # If a memory is read in parts, all rows share it. If a text runs on several memories, it has several rows.
        may_be_single = not isinstance(method, Several) and not method.reads_in_parts

        def first() -> list[Text]:
            texts = []
            for prompt in prompts[: self.budget.sizes.texts]:
                is_single = may_be_single and (prompt.context in single or not can.can_generate)
                texts.append(Text(prompt, method.footprint(prompt.context).kept, is_single))
            return texts[
                : first_texts(texts, max_new_tokens, self.budget.sizes, can, settings, by_query)
            ]

        def run() -> list[list[int]]:
            texts = first()
            contexts, queries = (
                [text.prompt.context for text in texts],
                [text.prompt.query for text in texts],
            )
            together: AbstractContextManager[None] = nullcontext()
            if by_query:
                [(memory, queries[0])] = method.encode_queries(
                    self.model, [(contexts[0], queries[0])], self._memories
                )
                memories = [memory]
            elif texts[0].single and all(
                map(method.is_ordinary, contexts)
            ):  # context and query run as one row
                memories = [Memory([], [], 0)]
                queries = [
                    (*context.tokens, *query)
                    for context, query in zip(contexts, queries, strict=True)
                ]
            else:
                memories = self._memories(contexts if texts[0].single else windows)
            if isinstance(method, Several) and len(windows) > 1:
                queries = [query for query in queries for _ in windows]
                memories, together = (
                    memories * len(texts),
                    combining(self.model, len(windows), method.next_token),
                )
            longest = max(map(len, memories)) + max(map(len, queries)) + max_new_tokens
            shared = can.can_share and can.sees_all_of(longest)
            with stop_on_nonfinite(self.model, names[: len(texts)]), together:
                rows = continue_from(
                    self.model, generate, memories, queries, settings.beams, shared
                )
            return rows[:: len(windows)]

        with self.inference_mode():
            return self.budget.fit(
                run, lambda: self.budget.halve(0, len(first())), prompts[0].context
            )
