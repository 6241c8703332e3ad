"""Runs a method on a model: scores or continues queries on the memories of their contexts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lm_eval_icl.declared import NotNegative, Positive, checked
from lm_eval_icl.errors import log
from lm_eval_icl.inference.capabilities import Capabilities
from lm_eval_icl.inference.devices import device_of, free_bytes
from lm_eval_icl.inference.generation import GenerationSettings, stop_on_nonfinite
from lm_eval_icl.inference.packing import Queries
from lm_eval_icl.inference.positions import check_length, position_embeddings
from lm_eval_icl.inference.schedule import ContextQueryAnswer, ContextWork, Sizes, schedule
from lm_eval_icl.inference.scoring import Score, Scores, States
from lm_eval_icl.inference.trials import probe
from lm_eval_icl.methods import joining, needs
from lm_eval_icl.methods.base import EncodedContext, Method
from lm_eval_icl.methods.continuing import TextBatch
from lm_eval_icl.methods.encoder import ContextEncoder
from lm_eval_icl.methods.learned import Learned, LearningEncoder
from lm_eval_icl.methods.limits import PromptLimits
from lm_eval_icl.methods.mode import ModelMode
from lm_eval_icl.methods.moicl import LabeledRow
from lm_eval_icl.methods.plain import Plain
from lm_eval_icl.methods.stepwise import Stepwise
from lm_eval_icl.prompts.tokens import Context, Ids, TokenizedPrompt

# context -> query -> answer -> the indices of the prompts with this context, query and answer.
Grouped = dict[Context, dict[Ids, dict[Ids, list[int]]]]
# A prompt, and an answer to score.
PromptAnswer = tuple[TokenizedPrompt, Ids]
# The requests that a forward pass scored, and their scores in the same order.
Scored = tuple[list[ContextQueryAnswer], Scores]


def _store_bytes(model: PreTrainedModel) -> int:
    """Half of the memory that is free on a model's device, with a line in the log."""
    free = free_bytes(device_of(model))
    log.info(
        "store_bytes=%d: memories of demonstrations may take half of the %.1f GB that are free on "
        "%s",
        free // 2,
        free / 1e9,
        device_of(model),
    )
    return free // 2


def grouped(prompts: Iterable[PromptAnswer]) -> Grouped:
    """Group prompts and answers, so that every distinct context, query and answer occurs once.

    The longest context comes first, so that out-of-memory occurs at the beginning of a run.
    """
    groups: Grouped = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for i, (prompt, answer) in enumerate(prompts):
        groups[prompt.context][prompt.query][answer].append(i)
    return dict(sorted(groups.items(), key=lambda item: -len(item[0].tokens)))


def common_beginning(contexts: Collection[Context]) -> Context:
    """The prefix and the first demonstrations that contexts with the same prefix have in common."""
    in_each_place = zip(*(context.demonstrations for context in contexts), strict=False)
    alike = takewhile(lambda demonstrations: len(set(demonstrations)) == 1, in_each_place)
    return Context(next(iter(contexts)).prefix, tuple(first for first, *_ in alike))


def share_beginnings(
    prompts: Sequence[PromptAnswer], is_ordinary: Callable[[Context], bool], least: int
) -> Sequence[PromptAnswer]:
    """The same prompts, some with a shorter context and a longer query.

    If several contexts begin with the same demonstrations, these become the context, and later
    demonstrations belong to the query. All of these contexts must be ordinary causal passes, and it
    must save more than `least` tokens.
    """
    groups: dict[object, dict[Context, None]] = defaultdict(dict)
    for prompt, _ in prompts:
        context = prompt.context
        if context.demonstrations:
            groups[context.prefix, context.demonstrations[0]][context] = None
    shorter: dict[Context, Context] = {}
    for contexts in groups.values():
        beginning = common_beginning(contexts)
        by_number = {len(context.demonstrations): context for context in (beginning, *contexts)}
        saved = (len(contexts) - 1) * len(beginning.tokens)
        if saved > least and all(map(is_ordinary, by_number.values())):
            shorter |= dict.fromkeys(contexts, beginning)
    divided = []
    for prompt, answer in prompts:
        if prompt.context in shorter:
            beginning = shorter[prompt.context]
            moved = prompt.context.tokens[len(beginning.tokens) :]
            prompt = TokenizedPrompt(beginning, (*moved, *prompt.query))
        divided.append((prompt, answer))
    return divided


class MethodRunner(ModelMode):
    """Runs a method on a model, with token ids, and stores the memories of contexts.

    Args:
        model: a causal language model of transformers.
        method: the method. Arguments that depend on the model are filled in (`Method.bind`).
        pack_tokens: how many tokens a packed forward pass may have: tokens of queries and options,
            and of contexts that run side by side.
        batch_size: how many rows a batch may have in which texts are generated or queries are
            scored without packing. On an accelerator, as many queries may also share a packed pass,
            even if they exceed `pack_tokens`.
        store_bytes: how many bytes of keys and values are stored for contexts that occur again.
            None: half of the memory that is free on the device now, when the model is loaded.
        softmax_dtype: the dtype of the softmax over the vocabulary. None: at least float32.
        mixed_precision_dtype: the dtype of autocast. None: no autocast.
        tensor_parallel: each pass is divided among several processes (tensor parallelism).
        plain: compute every request alone, with none of the optimizations (`methods.plain`).
        capabilities: what the model can do, if known. Otherwise, some thirty short passes find it
            out.

    Attributes:
        method: the method, for this model.
        encoder: makes the memories of contexts. It has the `store` of memories, and the `budget` of
            what runs at once.
        fits: further methods under which prompts must fit (`limits`), so that all of these methods
            lose the same demonstrations of a long prompt.
        rows: the labeled rows on which a context is fitted (`Method.rows_wanted`).

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
        store_bytes: int | None = None,
        softmax_dtype: torch.dtype | None = None,
        mixed_precision_dtype: torch.dtype | None = None,
        tensor_parallel: bool = False,
        plain: bool = False,
        capabilities: Capabilities | None = None,
    ) -> None:
        super().__init__(model, mixed_precision_dtype, plain)
        self.pack_tokens = checked("pack_tokens", pack_tokens, Positive)
        batch_size = checked("batch_size", batch_size, Positive)
        if store_bytes is None:
            store_bytes = _store_bytes(model)
        self.store_bytes = checked("store_bytes", store_bytes, NotNegative)
        self.softmax_dtype = softmax_dtype
        self.tensor_parallel = tensor_parallel
        self.fits: Sequence[Method] = ()
        self.rows: dict[Context, Sequence[LabeledRow]] = {}
        with self.inference_mode():
            self.capabilities = capabilities or probe(model)
            needs.check(method, model, self.capabilities)
            needs.warn(method, model, self.capabilities)
            if method.positions == "none":
                self.without_positions = position_embeddings(model)
        with self.inference_mode():
            if method.positions == "none":
                needs.check_no_positions(method, model)
            self.method = method.bind(model)
        self.begin(batch_size)

    def begin(self, batch_size: int) -> None:
        """Begin a run. Stored memories are dropped, since the model's weights may have changed."""
        on_cpu = device_of(self.model).type == "cpu"
        # On a CPU, larger packs are slower, since most of their attention is masked.
        sizes = Sizes(self.pack_tokens, queries=1 if on_cpu else batch_size, texts=batch_size)
        # How many further packs are begun before the scores of a pack are returned, so that an
        # accelerator is not idle.
        self.packs_ahead = 0 if on_cpu else 1
        joins = self.capabilities.can_divide and joining.has_separate_demonstrations(self.method)
        make_encoder: type[ContextEncoder] = ContextEncoder
        if isinstance(self.method, Learned):
            make_encoder = LearningEncoder
        elif joins:
            make_encoder = joining.JoiningEncoder
        self.encoder = make_encoder(
            self.model,
            self.method,
            self.capabilities,
            sizes,
            self.store_bytes,
            self.tensor_parallel,
            self.softmax_dtype,
        )
        self.store = self.encoder.store
        self.budget = self.encoder.budget
        self.tokens_run = 0
        self.passes_run = 0
        self.learned.clear()
        self._methods: dict[Context, Method] = {}

    def limits(self, max_length: int) -> PromptLimits:
        """The limits of prompts, for a model that has, or may use, `max_length` positions.

        Raises:
            InputError: the model has learned embeddings of fewer positions.
        """
        check_length(self.model, max_length)
        own, *others = [
            PromptLimits.of(method, self.model, self.capabilities, max_length)
            for method in (self.method, *self.fits)
        ]
        return replace(own, also=tuple(others))

    @property
    def invariant(self) -> bool:
        """Whether the order of the demonstrations makes no difference with this model."""
        return self.method.invariant and not needs.keeps_window(self.method, self.capabilities)

    def forget(self, context: Context) -> None:
        """Drop all stored memories of a context that no later request has."""
        self.encoder.forget(context)

    def method_of(self, context: Context) -> Method:
        """The method for the queries of a context (`Method.for_context`)."""
        if context not in self._methods:
            self._methods[context] = self.method.for_context(self, context)
        return self._methods[context]

    def under(self, method: Method) -> MethodRunner:
        """A runner of another method with the same settings."""
        return MethodRunner(
            self.model,
            method,
            pack_tokens=self.pack_tokens,
            batch_size=self.budget.sizes.texts,
            store_bytes=self.store_bytes,
            softmax_dtype=self.softmax_dtype,
            mixed_precision_dtype=self.mixed_precision_dtype,
            tensor_parallel=self.tensor_parallel,
            plain=self.plain,
            capabilities=self.capabilities,
        )

    # Scores.

    def score_prompts(
        self, prompts: Sequence[PromptAnswer], once: bool = False
    ) -> Iterator[list[tuple[int, Score]]]:
        """`score` for prompts, each with an answer.

        Yields:
            For each forward pass, the indices of the prompts that it scored, each with its score.
        """
        if self.capabilities.can_divide and not self.plain:
            least = self.budget.sizes.pack_tokens
            prompts = share_beginnings(prompts, self.method.is_ordinary, least)
        groups = grouped(prompts)
        for requests, scores in self.score(groups, once):
            scores_of_prompts = []
            for (context, query, answer), score in zip(requests, scores, strict=True):
                scores_of_prompts += [(i, score) for i in groups[context][query][answer]]
            yield scores_of_prompts

    def score(
        self, work: Mapping[Context, Queries], once: bool = False, states: States = None
    ) -> Iterator[Scored]:
        """Score all answers of all queries of all contexts.

        Args:
            work: contexts -> the ids of each query -> the ids of each of its answers.
            once: no later request has these contexts. Short contexts run side by side, and no
                memory is stored for longer than its queries need it.
            states: the vectors to return with the scores (`Scores.states`). All queries of a
                context must run on one memory.

        Yields:
            For each forward pass, the requests that it scored, and their scores in the same order.
        """
        shared = dict[Context, Queries]()
        plain = Plain(self, self.softmax_dtype)
        for context, queries in work.items():
            alone = queries
            if not (self.plain or self.capabilities.no_memory):
                alone = self._crossing(context, queries)
                shared[context] = {q: queries[q] for q in queries if q not in alone}
            if alone:
                yield from plain.score(self.method_of(context), {context: alone}, states)
        begun: list[Scored] = []
        for batch in self.score_batches(shared, once, states):
            begun.append(batch)
            if len(begun) > self.packs_ahead:
                yield begun.pop(0)
        yield from begun

    def _crossing(self, context: Context, queries: Queries) -> Queries:
        """The queries without a context from which an answer crosses the switch of rotary angles.

        A query that other answers share would have the angles of the longest answer.
        """
        switch = self.capabilities.position_switch
        crossing: dict[Ids, Collection[Ids]] = {}
        if switch is None or context.tokens:
            return crossing
        for query, answers in queries.items():
            longest = len(query) + max(map(len, answers), default=1) - 1
            if len(query) <= switch.length < longest:
                crossing[query] = answers
        return crossing

    def score_batches(
        self,
        work: Mapping[Context, Queries],
        once: bool = False,
        states: States = None,
        encoded: EncodedContext | None = None,
    ) -> Iterator[Scored]:
        """Yields as `score` does. A device may still be computing the scores.

        Args:
            encoded: what the queries run on, if there is only one context, and it is encoded
                already.
        """
        unscored = {context: dict(queries) for context, queries in work.items() if queries}
        if encoded is None:
            with self.counting():
                order = self.encoder.order([*unscored])
            unscored = {context: unscored[context] for context in order}
        while unscored:
            waiting = list[ContextWork]()
            for context, queries in unscored.items():
                waiting += self.encoder.work(context, queries, once)
            for batch in schedule(waiting, self.budget.sizes, self.capabilities):
                context, query, _ = batch.queries[0]
                method = self.method_of(context)  # counts the passes of a fit by itself
                with self.counting():
                    if batch.encoding == "before" and encoded is None:
                        encode = partial(method.encoded, self.encoder, context, query)
                        encoded = self.budget.fit(encode)
                    scores = self.budget.attempt(
                        partial(method.scored, self.encoder, batch, encoded, states),
                        partial(self.budget.halve, batch.tokens, batch.rows_used),
                        None if encoded is None else context,
                    )
                if scores is None:
                    break  # the sizes are smaller now: all unscored requests are scheduled again
                yield batch.requests, scores
                for context, query, _ in batch.queries:
                    del unscored[context][query]
                    is_done = not unscored[context]
                    if encoded is not None and (is_done or encoded.rest is not None):
                        encoded = None
                    if is_done:
                        del unscored[context]
                    if is_done and once:
                        self.forget(context)

    # Texts.

    def generate(
        self,
        prompts: Sequence[TokenizedPrompt],
        names: Sequence[str],
        max_new_tokens: int,
        generate: Callable[..., Tensor],
        settings: GenerationSettings,
        single: Collection[Context] = (),
    ) -> list[list[int]]:
        """Generate a continuation for the first of these prompts, as many as fit into one batch.

        Args:
            prompts: the waiting prompts, as `inference.schedule.in_order` sorts them.
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
        context = prompts[0].context
        needs.check_generates(self.method, self.model, self.capabilities, context, settings)
        if self.plain:
            plain = Plain(self, self.softmax_dtype)
            with self.inference_mode(), stop_on_nonfinite(self.model, names):
                return [plain.generate(self.method_of(context), prompts[0], generate)]
        batch = TextBatch(
            self.method_of(context),
            self.encoder,
            prompts,
            names,
            max_new_tokens,
            generate,
            settings,
            single,
        )
        with self.inference_mode():
            return self.budget.fit(batch.run, batch.halve, context)


def score_memories(
    runner: MethodRunner,
    context: Context,
    queries: Queries,
    numbers: Collection[int],
) -> Iterator[tuple[int, Scored]]:
    """`MethodRunner.score` on the memories of a context after some steps of a `Stepwise` method.

    Args:
        numbers: the numbers of the memories on which queries are scored.

    Yields:
        For each forward pass, the number of the memory, the scored requests, and their scores.
    """
    method = runner.method
    assert isinstance(method, Stepwise)
    if runner.plain:
        plain = Plain(runner, runner.softmax_dtype)
        for number in sorted(numbers):
            steps: dict[str, Any] = {method.counts_memories: number}
            for scored in plain.score(replace(method, **steps), {context: queries}):
                yield number, scored
        return
    memories = runner.encoder.stepwise(context)
    for number in range(method.first_number, max(numbers) + 1):
        with runner.counting():
            encoded = EncodedContext([next(memories)])
        if number in numbers:
            for scored in runner.score_batches({context: queries}, encoded=encoded):
                yield number, scored
