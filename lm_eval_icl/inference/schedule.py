"""Arranges the requests of a run, as token ids, in a list of batches. Nothing here runs a model.

Requests are grouped by context and query. A `ContextWork` says how many tokens each context takes with a method,
`Capabilities` say what the model can do, and `Sizes` how much fits on the device. `schedule` is a function of these
three. If the device runs out of memory, the sizes become smaller (`inference.budget`), and the batches that have not
run are scheduled again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal

from lm_eval_icl.inference.capabilities import Capabilities
from lm_eval_icl.inference.generation import GenerationSettings
from lm_eval_icl.inference.packing import QueryAnswers, TokenTree, first_packed_batch
from lm_eval_icl.prompts.tokens import Context, Ids, TokenizedPrompt

# Contexts that run side by side attend to at most this many entries of memories for each token of the pass.
ENTRIES = 8
# A context, a query and an answer.
ContextQueryAnswer = tuple[Context, Ids, Ids]


def in_order(prompts: Sequence[TokenizedPrompt]) -> list[int]:
    """The indices of prompts in the order in which they are continued: the longest context first, so that out-of-memory
    occurs at the beginning of a run, and among the prompts with one context, the longest query first."""
    number = {prompt.context: i for i, prompt in enumerate(prompts)}

    def key(i: int) -> tuple[int, int, int]:
        context, query = prompts[i].context, prompts[i].query
        return -len(context.tokens), number[context], -len(query)

    return sorted(range(len(prompts)), key=key)


@dataclass(frozen=True)
class Sizes:
    """How much runs at once."""

    # How many tokens a packed forward pass may have: tokens of queries and options, and of contexts side by side.
    pack_tokens: int
    queries: int  # this many queries may share a packed pass even if they have more tokens than `pack_tokens`
    texts: int  # how many rows a batch may have in which texts are generated or queries are scored without packing


@dataclass(frozen=True)
class ContextWork:
    """A context, its queries with their answers, and what it takes to encode the context. If the memory depends on the
    query, there is one query."""

    context: Context
    queries: Sequence[QueryAnswers]  # in ascending order
    tokens: int  # the number of tokens that run to encode the context
    entries: int  # the number of entries, of all memories, that the queries attend to
    shared_entries: int = (
        0  # the number of entries of memories shared with other contexts, on which the context runs
    )
    alone: bool = True  # whether the context is encoded by itself, and not beside others
    ordinary: bool = False  # whether context and query are an ordinary causal pass, so that they may run as one row
    memories: int = 1  # the number of memories that the queries run on


@dataclass(frozen=True)
class Batch:
    """The requests that are scored at once: a packed batch, or the rows of an ordinary one."""

    queries: Sequence[
        tuple[Context, Ids, Collection[Ids]]
    ]  # contexts, each with a query and the query's answers
    # When the contexts are encoded. "now": with this batch, side by side. "before": in an earlier pass; the batch has
    # one context. "never": context and query run as one row of an ordinary pass.
    encoding: Literal["now", "before", "never"]
    tokens: int  # the number of tokens of a packed batch; 0 if the queries are the rows of a batch
    rows: int  # how many rows a batch of rows may have

    @property
    def requests(self) -> list[ContextQueryAnswer]:
        """The contexts, queries and answers that are scored, in the order of the scores."""
        return [
            (context, query, answer)
            for context, query, answers in self.queries
            for answer in answers
        ]

    @property
    def rows_used(self) -> int:
        """The largest number of rows that run at once in a batch of rows: those of its queries, or of their answers."""
        return min(
            max(len(self.queries), *(len(answers) for *_, answers in self.queries)), self.rows
        )


def schedule(work: Sequence[ContextWork], sizes: Sizes, can: Capabilities) -> Iterator[Batch]:
    """The batches in which all queries of all contexts are scored, in this order.

    As many contexts as fit into a pass, each with all of its queries, run side by side. A context that does not fit is
    encoded by itself, and its queries come in packed batches of as many queries as fit.
    """
    rows, at = sizes.texts if can.can_batch else 1, 0
    while at < len(work):
        n, tokens = side_by_side(work, sizes, can, at)
        if n:
            items = work[at : at + n]
            ordinary = all(item.ordinary for item in items)
            queries = [(item.context, *query) for item in items for query in item.queries]
            yield Batch(queries, "never" if ordinary else "now", tokens, rows)
            at += n
            continue
        item, at = work[at], at + 1
        waiting = list(
            item.queries
        )  # in ascending order: the common beginning of queries in one pack is run once
        if not can.can_pack:
            waiting.sort(key=lambda query: len(query[0]))  # rows of one batch have similar lengths
        while waiting:
            if can.can_pack:
                pack, tokens = first_packed_batch(
                    waiting, max(sizes.pack_tokens // item.memories, 1), sizes.queries
                )
                tokens *= item.memories
                # A query longer than a pack gains nothing from packing, and its mask would be large.
                together = len(pack) > 1 or tokens <= sizes.pack_tokens
                if not (together and can.can_pack_to(item.entries + tokens)):
                    pack, tokens = pack[:1], 0
            else:
                pack, tokens = waiting[:rows], 0
                if any(len(answer) > 1 for _, answers in pack for answer in answers):
                    pack = [query for query in pack if len(query[0]) == len(pack[0][0])]
            yield Batch([(item.context, *query) for query in pack], "before", tokens, rows)
            waiting = waiting[len(pack) :]


def side_by_side(
    work: Sequence[ContextWork], sizes: Sizes, can: Capabilities, at: int = 0
) -> tuple[int, int]:
    """How many contexts, from the index `at` on, share a pass with all of their queries, and how many tokens the pass
    has; (0, 0) if the context at this index has to be encoded by itself."""
    count, used, tokens, entries, tree = 0, 0, 0, 0, TokenTree()
    while at + count < len(work) and can.can_pack and can.position_switch is None:
        item = work[at + count]
        if item.alone:
            break
        tokens, entries = tokens + item.tokens, entries + item.shared_entries
        tree.leave()
        for query, answers in item.queries:
            tree.add_query(query, answers)
        total = tokens + len(tree.tokens)
        too_many = total > sizes.pack_tokens or entries > ENTRIES * sizes.pack_tokens
        if too_many or not can.sees_all_of(entries + total):
            break
        count, used = count + 1, total
    return count, used


@dataclass(frozen=True)
class Text:
    """A prompt to be continued with generated text."""

    prompt: TokenizedPrompt
    entries: int  # the number of entries of its memory
    single: bool  # whether its memory may be one row of a batch whose rows have different memories


def first_texts(
    texts: Sequence[Text],
    new_tokens: int,
    sizes: Sizes,
    can: Capabilities,
    settings: GenerationSettings,
    by_query: bool,
) -> int:
    """How many of the first texts are continued in one batch: texts that share the memory of one context, or texts that
    each have another context.

    Args:
        texts: in the order in which they are continued (`in_order`).
        new_tokens: the largest number of tokens that are generated for a text.
        settings: the settings of `generate` (`inference.generation.settings_in_force`).
        by_query: whether the memory depends on the query.
    """
    first = texts[0]
    if by_query or sizes.texts == 1 or not can.can_batch:
        return 1
    alike = takewhile(
        lambda text: text.single if first.single else text.prompt.context == first.prompt.context,
        texts,
    )
    batch = list(alike)[: sizes.texts]
    queries = [len(text.prompt.query) for text in batch]
    pads = can.can_pad and can.can_pack_to(
        max(text.entries for text in batch) + max(queries) + new_tokens
    )
    pads = pads and not settings.reads_rows
    if first.single:
        return len(batch) if pads and can.position_switch is None else 1
    # Without padding, all rows of a batch must have queries of the same length.
    return len(batch) if pads else queries.count(queries[0])
