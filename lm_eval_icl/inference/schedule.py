"""The batches of a run: requests, as token ids, become a list of them. Nothing here runs a model.

Requests are grouped by context and query. A method says how many tokens each context takes (`ContextWork`), a model
what it can do (`Capabilities`), and the device how much fits (`Sizes`). `schedule` is a function of these three. A
device that runs out of memory makes the sizes smaller (`inference.budget`), and what is left is scheduled again.
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

# How many entries of memories contexts that run side by side have at most, for each token of a pass.
ENTRIES = 8
# A context, a query behind it, and an answer.
Asked = tuple[Context, Ids, Ids]


def in_order(prompts: Sequence[TokenizedPrompt]) -> list[int]:
    """The indices of prompts in the order in which they are continued: the longest context first, so that out-of-memory
    occurs at the beginning of a run, and behind each context the longest query."""
    of_context = {prompt.context: i for i, prompt in enumerate(prompts)}

    def key(i: int) -> tuple[int, int, int]:
        context, query = prompts[i].context, prompts[i].query
        return -len(context.tokens), of_context[context], -len(query)

    return sorted(range(len(prompts)), key=key)


@dataclass(frozen=True)
class Sizes:
    """How much runs at once."""

    # How many tokens of queries and options, and of contexts side by side, share one forward pass that scores.
    pack_tokens: int
    queries: int  # how many queries share such a pass at least, even if they have more tokens
    texts: int  # how many texts are generated, or queries scored that cannot be packed, in one batch


@dataclass(frozen=True)
class ContextWork:
    """A context, what is asked behind it, and what encoding it takes. If the memory depends on the query, there is one
    query."""

    context: Context
    queries: Sequence[QueryAnswers]  # in ascending order
    tokens: int  # how many run to encode the context,
    entries: int  # to how many entries, of all memories, the queries attend,
    behind: int = 0  # and behind how many entries of memories that it shares with others the context is encoded
    alone: bool = True  # it is encoded by itself, and not beside others
    ordinary: bool = False  # context and query are an ordinary causal pass, so that they may be read in one
    memories: int = 1  # behind how many memories the queries run


@dataclass(frozen=True)
class Batch:
    """The requests that are scored at once: a packed batch, or the rows of an ordinary one."""

    queries: Sequence[tuple[Context, Ids, Collection[Ids]]]  # contexts, each with a query and the query's answers
    # When the contexts are encoded: now, side by side; before, so that the memory of the only context (or query) is
    # there; or never, since they are read with their queries in one ordinary pass.
    encoding: Literal["now", "before", "never"]
    tokens: int  # how many tokens a packed batch runs; 0 if the queries are the rows of a batch
    rows: int  # how many rows a batch of rows may have

    @property
    def asked(self) -> list[Asked]:
        """The contexts, queries and answers that are scored, in the order of the scores."""
        return [(context, query, answer) for context, query, answers in self.queries for answer in answers]

    @property
    def rows_used(self) -> int:
        """How many rows a batch of rows has at a time: those of queries, and then those of a query's answers."""
        return min(max(len(self.queries), *(len(answers) for *_, answers in self.queries)), self.rows)


def schedule(work: Sequence[ContextWork], sizes: Sizes, can: Capabilities) -> Iterator[Batch]:
    """The batches in which all queries of all contexts are scored, in this order.

    Contexts that fit into a pass with all their queries run side by side, as many as fit. The others are encoded by
    themselves, and their queries come in packed batches of as many as fit.
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
        waiting = list(item.queries)  # in ascending order: the common beginning of queries in one pack is run once
        if not can.can_pack:
            waiting.sort(key=lambda asked: len(asked[0]))  # rows of one batch have similar lengths
        while waiting:
            if can.can_pack:
                pack, tokens = first_packed_batch(waiting, max(sizes.pack_tokens // item.memories, 1), sizes.queries)
                tokens *= item.memories
                # A query longer than a pack gains nothing from packing, and its mask would be large.
                together = len(pack) > 1 or tokens <= sizes.pack_tokens
                if not (together and can.can_pack_to(item.entries + tokens)):
                    pack, tokens = pack[:1], 0
            else:
                pack, tokens = waiting[:rows], 0
                if any(len(answer) > 1 for _, answers in pack for answer in answers):
                    pack = [asked for asked in pack if len(asked[0]) == len(pack[0][0])]
            yield Batch([(item.context, *query) for query in pack], "before", tokens, rows)
            waiting = waiting[len(pack) :]


def side_by_side(work: Sequence[ContextWork], sizes: Sizes, can: Capabilities, at: int = 0) -> tuple[int, int]:
    """How many contexts, from the one at the index `at` on, share a pass with all their queries, and how many tokens
    they have together; (0, 0) if the first has to be encoded by itself."""
    count, used, tokens, entries, tree = 0, 0, 0, 0, TokenTree()
    while at + count < len(work) and can.can_pack and can.position_switch is None:
        item = work[at + count]
        if item.alone:
            break
        tokens, entries = tokens + item.tokens, entries + item.behind
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
    """A prompt to be continued: the prompt, how many entries its memory has, and whether the memory is one of several
    that are the rows of a batch."""

    prompt: TokenizedPrompt
    entries: int
    single: bool


def first_texts(
    texts: Sequence[Text],
    new_tokens: int,
    sizes: Sizes,
    can: Capabilities,
    settings: GenerationSettings,
    by_query: bool,
) -> int:
    """How many of the first texts are continued in one batch: those of one context, whose memory they share, or those
    of which each has a context of its own.

    Args:
        texts: in the order in which they are continued (`in_order`).
        new_tokens: how many tokens are generated at most.
        settings: the settings under which `generate` runs (`inference.generation.settings_in_force`).
        by_query: what a query attends to depends on the query.
    """
    first = texts[0]
    if by_query or sizes.texts == 1 or not can.can_batch:
        return 1
    alike = takewhile(lambda text: text.single if first.single else text.prompt.context == first.prompt.context, texts)
    batch = list(alike)[: sizes.texts]
    queries = [len(text.prompt.query) for text in batch]
    pads = can.can_pad and can.can_pack_to(max(text.entries for text in batch) + max(queries) + new_tokens)
    pads = pads and not settings.reads_rows
    if first.single:
        return len(batch) if pads and can.position_switch is None else 1
    # Padding that is not possible would shift a query's tokens, so all rows of a batch must have the same length.
    return len(batch) if pads else queries.count(queries[0])
