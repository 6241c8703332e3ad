"""Runs a method on a model, with token ids: encodes contexts as memories, and scores or continues queries on them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import count, islice

from torch import Tensor

from lm_eval_icl.errors import Unsupported
from lm_eval_icl.inference.generation import GenerationSettings, Stopped, combining, continue_from, stop_on_nonfinite
from lm_eval_icl.inference.memory import Memory, progress
from lm_eval_icl.inference.packing import Queries
from lm_eval_icl.inference.schedule import Asked, Batch, Ids, Text, first_texts, schedule
from lm_eval_icl.inference.scoring import Score, score_packed, score_rows, score_together
from lm_eval_icl.methods import needs
from lm_eval_icl.methods.encoder import Encoder
from lm_eval_icl.methods.several import Several
from lm_eval_icl.prompts.tokens import Context, TokenizedPrompt

# context -> query -> answer -> the indices of the prompts that ask for it.
Grouped = dict[Context, dict[Ids, dict[Ids, list[int]]]]


def grouped(prompts: Iterable[tuple[TokenizedPrompt, Ids]]) -> Grouped:
    """Group pairs of prompt and answer, so that every distinct context, query and answer occurs once.

    The longest context comes first, so that out-of-memory occurs at the beginning of a run.
    """
    groups: Grouped = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for i, (prompt, answer) in enumerate(prompts):
        groups[prompt.context][prompt.query][answer].append(i)
    return dict(sorted(groups.items(), key=lambda item: -len(item[0].tokens)))


class MethodRunner(Encoder):
    """Scores and continues queries behind the memories of their contexts. Its arguments are those of `Encoder`."""

    # Scoring.

    def score_prompts(
        self,
        prompts: Sequence[tuple[TokenizedPrompt, Ids]],
        once: bool = False,
    ) -> Iterator[list[tuple[int, Score]]]:
        """Score the answer to each prompt. Equal ones are run once.

        Args:
            prompts: prompts, each with an answer.
            once: as for `score`.

        Yields:
            For each forward pass, the indices of the prompts that it scored, each with its score.

        Raises:
            InputError: the device's memory does not suffice.
        """
        asked_by = grouped(prompts)
        for scored, scores in self.score(asked_by, once):
            yield [
                (i, score)
                for (context, query, answer), score in zip(scored, scores, strict=True)
                for i in asked_by[context][query][answer]
            ]

    def score(
        self,
        work: Mapping[Context, Queries],
        once: bool = False,
    ) -> Iterator[tuple[list[Asked], Sequence[Score]]]:
        """Score all answers of all queries behind all contexts.

        Args:
            work: contexts -> the ids of each query -> the ids of each of its answers.
            once: nothing else is asked behind these contexts later. Short ones are run side by side, and no memory is
                stored for longer than its queries need it.

        Yields:
            For each forward pass, what it scored, and the scores in the same order.

        Raises:
            Unsupported: the model does not continue from its cache.
            InputError: the device's memory does not suffice.
        """
        if reason := self.capabilities.no_memory:
            raise Unsupported(
                f"{type(self.model).__name__} does not continue from its cache ({reason}): only lm-eval's --model icl, "
                "which reads every prompt as a whole, scores with it."
            )
        begun: list[tuple[list[Asked], Sequence[Score]]] = []
        for batch in self._batches(work, once):
            begun.append(batch)
            if len(begun) > self.packs_ahead:
                yield begun.pop(0)
        yield from begun

    def _batches(
        self,
        queries_by_context: Mapping[Context, Queries],
        once: bool = False,
        memory: Memory | None = None,
    ) -> Iterator[tuple[list[Asked], Sequence[Score]]]:
        """The batches of `score`. Their scores may still be computed when they are yielded. A memory that is given is
        that of the only context."""
        unscored = {context: dict(queries) for context, queries in queries_by_context.items() if queries}
        in_use: tuple[list[Memory], Ids | None] | None = None if memory is None else ([memory], None)
        while unscored:
            work = [part for context in unscored for part in self.method.work(context, unscored[context], once)]
            for batch in schedule(work, self.budget.sizes, self.capabilities):
                context, query, _ = batch.queries[0]
                with self.counting():
                    if batch.encoding == "before" and in_use is None:
                        in_use = self.budget.fit(partial(self._behind, context, query))
                    halve, used = partial(self.budget.halve, batch.tokens, batch.rows_used), context if in_use else None
                    scores = self.budget.attempt(partial(self._score, batch, in_use), halve, used)
                if scores is None:
                    break  # less runs at once from here on: what is left is scheduled again
                yield batch.asked, scores
                for context, query, _ in batch.queries:
                    del unscored[context][query]
                    if self.method.memory_depends_on_query or not unscored[context]:
                        in_use = None
                    if not unscored[context]:
                        del unscored[context]
                        if once:
                            self.forget(context)

    def _score(self, batch: Batch, in_use: tuple[list[Memory], Ids | None] | None) -> Sequence[Score]:
        """Run a batch; if its memory is there already, behind that."""
        if in_use is not None:
            memories, rest = in_use
            if several := self._several(batch.queries[0][0]):
                options = [(query, answer) for _, query, answer in batch.asked]
                trim = self.capabilities.can_trim_last_block
                how = (several.combined, several.score, self.softmax_dtype, trim, bool(batch.tokens))
                return score_together(self.model, memories, options, *how)
            [memory] = memories
            queries = [(rest or query, answers) for _, query, answers in batch.queries]
            if not batch.tokens:
                return score_rows(self.model, memory, queries, self.softmax_dtype, batch.rows)
            work = [(memory, [(query, answer) for query, answers in queries for answer in answers])]
        elif batch.encoding == "never":
            work = [
                (Memory([], [], 0), [((*context.tokens, *query), answer) for context, query, answer in batch.asked])
            ]
        elif self.method.memory_depends_on_query:
            pairs = [(context, query) for context, query, _ in batch.queries]
            encoded = self._encode_queries(pairs, self._memories, self.capabilities)
            work = [
                (memory, [(rest, answer) for answer in answers])
                for (memory, rest), (*_, answers) in zip(encoded, batch.queries, strict=True)
            ]
        else:
            behind_each: dict[Context, list[tuple[Ids, Ids]]] = {}
            for context, query, answer in batch.asked:
                behind_each.setdefault(context, []).append((query, answer))
            work = list(zip(self.store.once(list(behind_each)), behind_each.values(), strict=True))
        return score_packed(self.model, work, self.softmax_dtype, self.capabilities.can_trim_last_block)

    def score_memories(
        self, context: Context, queries: Queries, numbers: Collection[int]
    ) -> Iterator[tuple[int, list[tuple[Ids, Ids]], Sequence[Score]]]:
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
        memories, last = self.method.memories(self.model, context), list[Memory]()

        def following() -> list[Memory]:
            nonlocal memories
            try:
                with progress(self.model, self._pass_length(context), self.quiet):
                    return list(islice(memories, 1))
            except BaseException:  # an iterator that has raised an error has ended: out of memory, begin anew
                memories = islice(self.method.memories(self.model, context), number - 1, None)
                raise

        def on(memory: Memory, number: int) -> Iterator[tuple[int, list[tuple[Ids, Ids]], Sequence[Score]]]:
            for scored, scores in self._batches({context: queries}, memory=memory):
                yield number, [(query, answer) for _, query, answer in scored], scores

        for number in count(1):
            with self.counting():
                current = self.budget.fit(following)
            if not current:
                break
            if number in numbers:
                yield from on(current[0], number)
            last = current
        if last and max(numbers) >= number and number - 1 not in numbers:
            yield from on(last[0], number - 1)

    # Generation.

    def generate(
        self,
        prompts: Sequence[TokenizedPrompt],
        names: Sequence[str],
        max_new_tokens: int,
        generate: Callable[..., Tensor],
        settings: GenerationSettings,
        stopped: Stopped | None = None,
        single: Collection[Context] = (),
    ) -> list[list[int]]:
        """Generate a continuation for the first of these prompts, as many as fit into one batch.

        If `generate` does not go on from a model's cache, the model reads every prompt as a whole, alone.

        Args:
            prompts: the prompts that are waiting, those of one context side by side, the longest query first
                (`inference.schedule.in_order`).
            names: the names of the prompts, for errors.
            max_new_tokens: how many tokens are generated at most.
            generate, stopped: as for `continue_from`.
            settings: the settings under which `generate` runs (`settings_in_force`).
            single: the contexts that a single prompt has, which share a batch.

        Returns:
            The generated ids, one row for each prompt of the batch.

        Raises:
            Unsupported: as `needs.check_generates`.
            InputError: the scores of a next token are NaN or infinite, or the device's memory does not suffice.
        """
        can, by_query = self.capabilities, self.method.memory_depends_on_query
        needs.check_generates(self.method, self.model, can, prompts[0].context)
        several = self._several(prompts[0].context)
        if several:
            needs.check_generates_together(several, self.model, can, settings)

        # Rows read in parts only a memory that they share, and a text behind several memories has several rows.
        shared = isinstance(self.method, Several) or self.method.reads_in_parts

        def first() -> list[Text]:
            texts = [
                Text(
                    prompt,
                    self.method.footprint(prompt.context).kept,
                    single=not shared and (prompt.context in single or not can.can_generate),
                )
                for prompt in prompts[: self.budget.sizes.texts]
            ]
            return texts[: first_texts(texts, max_new_tokens, self.budget.sizes, can, settings, by_query)]

        def run() -> list[list[int]]:
            texts = first()
            contexts, queries = [text.prompt.context for text in texts], [text.prompt.query for text in texts]
            if several:
                memories = self._memories(several.contexts(contexts[0]))
                queries = [query for query in queries for _ in memories]
                memories = memories * len(texts)
            elif texts[0].single and all(map(self.method.is_ordinary, contexts)):  # a context is read with its query
                memories = [Memory([], [], 0)]
                queries = [(*context.tokens, *query) for context, query in zip(contexts, queries, strict=True)]
            elif texts[0].single and not by_query:
                memories = self._memories(contexts)
            else:
                [(memory, queries[0])] = self._encode_queries([(contexts[0], queries[0])], self._memories)
                memories = [memory]
            longest = max(map(len, memories)) + max(map(len, queries)) + max_new_tokens
            rows_of_text = len(queries) // len(texts)
            together = combining(self.model, rows_of_text, several.next_token) if several else nullcontext()
            ways = {"shared": can.can_share_to(longest), "leaving": can.can_leave}
            with stop_on_nonfinite(self.model, names[: len(texts)]), together:
                rows = continue_from(self.model, generate, memories, queries, settings.beams, stopped=stopped, **ways)
            return rows[::rows_of_text]

        return self.fit(run, lambda: self.budget.halve(0, len(first())), prompts[0].context)
