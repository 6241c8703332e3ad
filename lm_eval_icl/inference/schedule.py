"""Arranges the requests of a run, as token ids, in a list of batches. Nothing here runs a model.

Requests are grouped by context and query. A `ContextWork` says how many tokens each context takes
with a method, `Capabilities` say what the model can do, and `Sizes` how much fits on the device.
`schedule` is a function of these three. If the device runs out of memory, the sizes become smaller
(`inference.budget`), and the batches that have not run are scheduled again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from typing import Literal, NamedTuple

from lm_eval_icl.inference.capabilities import Capabilities
from lm_eval_icl.inference.packing import Pack, QueryAnswers, TokenTree, first_packed_batch
from lm_eval_icl.prompts.tokens import Context, Ids, TokenizedPrompt

# For each token of a pass, contexts that run side by side attend to this many entries of memories.
ENTRIES = 8
# A context, a query and an answer.
ContextQueryAnswer = tuple[Context, Ids, Ids]


def in_order(prompts: Sequence[TokenizedPrompt]) -> list[int]:
    """The indices of prompts in the order in which they are continued.

    The longest context comes first, so that out-of-memory occurs at the beginning of a run. Among
    the prompts with one context, the longest query comes first.
    """
    number = {prompt.context: i for i, prompt in enumerate(prompts)}

    def key(i: int) -> tuple[int, int, int]:
        context = prompts[i].context
        return -len(context.tokens), number[context], -len(prompts[i].query)

    return sorted(range(len(prompts)), key=key)


@dataclass(frozen=True)
class Sizes:
    """How much runs at once."""

    # The largest number of tokens of a packed forward pass: tokens of queries and options, and of
    # contexts side by side.
    pack_tokens: int
    queries: int  # this many queries may share a packed pass, even if they have more tokens
    texts: int  # the largest number of rows of texts, and of queries that are not packed


@dataclass(frozen=True)
class ContextWork:
    """A context, its queries with their answers, and what it takes to encode the context.

    If the memory depends on the query, there is one query.
    """

    context: Context
    queries: Sequence[QueryAnswers]  # in ascending order
    tokens: int  # the number of tokens that run to encode the context
    entries: int  # the number of entries, of all memories, that the queries attend to
    shared_entries: int = 0  # the number of entries, shared with other contexts, that it runs on
    alone: bool = True  # the context is encoded by itself, and not beside others
    ordinary: bool = False  # context and query are an ordinary causal pass, and may be one row
    memories: int = 1  # the number of memories that the queries run on


@dataclass(frozen=True)
class Batch:
    """The requests that are scored at once: a packed batch, or the rows of an ordinary one."""

    # Contexts, each with a query and the query's answers.
    queries: Sequence[tuple[Context, Ids, Collection[Ids]]]
    # When the contexts are encoded. "now": with this batch, side by side. "before": in an earlier
    # pass; the batch has one context. "never": context and query are one row of an ordinary pass.
    encoding: Literal["now", "before", "never"]
    tokens: int  # the number of tokens of a packed batch; 0 if the queries are rows of a batch
    rows: int  # the largest number of rows of a batch of rows

    @property
    def requests(self) -> list[ContextQueryAnswer]:
        """The contexts, queries and answers that are scored, in the order of the scores."""
        requests = []
        for context, query, answers in self.queries:
            requests += [(context, query, answer) for answer in answers]
        return requests

    @property
    def rows_used(self) -> int:
        """The largest number of rows that run at once: those of queries, or of their answers."""
        answers = max(len(answers) for *_, answers in self.queries)
        return min(max(len(self.queries), answers), self.rows)


def schedule(work: Sequence[ContextWork], sizes: Sizes, can: Capabilities) -> Iterator[Batch]:
    """The batches in which all queries of all contexts are scored, in this order.

    As many contexts as fit into a pass, each with all of its queries, run side by side. A context
    that does not fit is encoded by itself, and its queries come in batches of as many as fit.
    """
    rows = sizes.texts if can.can_batch else 1
    at = 0
    while at < len(work):
        n, tokens = side_by_side(work, sizes, can, at)
        if n:
            items = work[at : at + n]
            at += n
            queries: list[tuple[Context, Ids, Collection[Ids]]] = []
            for item in items:
                queries += [(item.context, *query) for query in item.queries]
            ordinary = all(item.ordinary for item in items)
            yield Batch(queries, "never" if ordinary else "now", tokens, rows)
        else:
            item = work[at]
            at += 1
            for side in _sides(item, can):
                for pack in _packs(side, sizes, can) if can.can_pack else _rows(side, rows):
                    queries = [(item.context, *query) for query in pack.queries]
                    yield Batch(queries, "before", pack.tokens, rows)


def _sides(item: ContextWork, can: Capabilities) -> Iterator[ContextWork]:
    """The queries of a context before the switch of rotary angles, and those beyond it.

    The longest query of a pass decides the angles of all.
    """
    switch = can.position_switch

    def is_long(query: QueryAnswers) -> bool:
        return switch is not None and item.entries + len(query[0]) > switch.length

    for _, queries in groupby(sorted(item.queries, key=is_long), is_long):
        yield replace(item, queries=list(queries))


def _packs(item: ContextWork, sizes: Sizes, can: Capabilities) -> Iterator[Pack]:
    """The queries of a context in packed batches. A batch of 0 tokens is one row."""
    # In ascending order, the common beginning of queries in one pack is run once.
    waiting = list(item.queries)
    most = max(sizes.pack_tokens // item.memories, 1)
    while waiting:
        pack = first_packed_batch(waiting, most, sizes.queries)
        tokens = pack.tokens * item.memories
        # A query longer than a pack gains nothing from packing, and its mask would be large.
        gains = len(pack.queries) > 1 or tokens <= sizes.pack_tokens
        if gains and can.can_pack_to(item.entries + tokens):
            pack = Pack(pack.queries, tokens)
        else:
            pack = Pack(pack.queries[:1], 0)
        yield pack
        waiting = waiting[len(pack.queries) :]


def _rows(item: ContextWork, rows: int) -> Iterator[Pack]:
    """The queries of a context in batches of rows of similar lengths."""
    waiting = sorted(item.queries, key=lambda query: len(query[0]))
    while waiting:
        batch = waiting[:rows]
        answers = chain.from_iterable(answers for _, answers in batch)
        if max(map(len, answers), default=1) > 1:  # an answer continues from the end of its row
            length = len(batch[0][0])
            batch = [query for query in batch if len(query[0]) == length]
        yield Pack(batch, 0)
        waiting = waiting[len(batch) :]


class SideBySide(NamedTuple):
    """Contexts that share a pass with all of their queries."""

    contexts: int  # the number of contexts; 0 if the first has to be encoded by itself
    tokens: int  # the number of tokens of the pass


def side_by_side(
    work: Sequence[ContextWork], sizes: Sizes, can: Capabilities, at: int = 0
) -> SideBySide:
    """As many contexts, from the index `at` on, as fit into one pass."""
    fitting = SideBySide(0, 0)
    if not can.can_divide:
        return fitting
    tree = TokenTree()
    tokens = 0
    entries = 0
    for i in range(at, len(work)):
        item = work[i]
        if item.alone:
            break
        tokens += item.tokens
        entries += item.shared_entries
        tree.leave()
        for query, answers in item.queries:
            tree.add_query(query, answers)
        total = tokens + len(tree.tokens)
        too_many = total > sizes.pack_tokens or entries > ENTRIES * sizes.pack_tokens
        if too_many or not can.sees_all_of(entries + total):
            break
        fitting = SideBySide(fitting.contexts + 1, total)
    return fitting


@dataclass(frozen=True)
class GenerationSettings:
    """The properties of a call of `generate` that decide how it is batched."""

    beams: int = 1  # the number of rows that `generate` makes of each row (beam search)
    # `generate` reads the order of a row's tokens, or counts them, so rows must have no padding.
    reads_rows: bool = False
    samples: bool = False  # `generate` draws tokens at random
    penalizes: bool = False  # `generate` changes the scores of the tokens that a row has


@dataclass(frozen=True)
class Text:
    """A prompt to be continued with generated text."""

    prompt: TokenizedPrompt
    entries: int  # the number of entries of its memory
    single: bool  # its memory may be one row of a batch whose rows have different memories


def first_texts(
    texts: Sequence[Text],
    new_tokens: int,
    sizes: Sizes,
    can: Capabilities,
    settings: GenerationSettings,
    by_query: bool,
) -> int:
    """The number of the first texts that are continued in one batch.

    Either all of them share the memory of one context, or each has another context.

    Args:
        texts: in the order in which they are continued (`in_order`).
        new_tokens: the largest number of tokens that are generated for a text.
        settings: the settings of `generate` (`inference.generation.settings_in_force`).
        by_query: the memory depends on the query.
    """
    first = texts[0]
    if by_query or sizes.texts == 1 or not can.can_batch:
        return 1
    batch: list[Text] = []
    for text in texts[: sizes.texts]:
        alike = text.single if first.single else text.prompt.context == first.prompt.context
        if not alike:
            break
        batch.append(text)
    queries = [len(text.prompt.query) for text in batch]
    longest = max(text.entries for text in batch) + max(queries) + new_tokens
    pads = can.can_pad and not settings.reads_rows and can.can_pack_to(longest)
    switch = can.position_switch
    # The longest row decides the rotary angles of all.
    if switch is not None and (
        first.single or (longest > switch.length and not first.prompt.context.tokens)
    ):
        return 1
    if pads:
        return len(batch)
    # Without padding, all rows of a batch must have the same memory and queries of the same length.
    return 1 if first.single else queries.count(queries[0])
