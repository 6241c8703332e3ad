"""What runs at once, as plain data: schedules are printed and read, and no model runs."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm_eval_icl import methods
from lm_eval_icl.inference.budget import MemoryBudget
from lm_eval_icl.inference.capabilities import Capabilities, PositionSwitch
from lm_eval_icl.inference.generation import GenerationSettings
from lm_eval_icl.inference.prefix_cache import PrefixCache
from lm_eval_icl.inference.schedule import Batch, Sizes, Text, first_texts, schedule, side_by_side
from lm_eval_icl.prompts.tokens import Context, TokenizedPrompt

WITHOUT = {"no_memory": "", "window": None, "scaled_from": None, "position_switch": None}
CAN = Capabilities(**{field.name: WITHOUT.get(field.name, True) for field in fields(Capabilities)})
CANNOT = replace(CAN, obeys_mask=False, obeys_positions=False)
SWITCH = PositionSwitch(64, always_changes=False)
SIZES = Sizes(pack_tokens=24, queries=1, texts=2)


def context(name: int, *lengths: int) -> Context:
    return Context((name, name), tuple((name,) * n for n in lengths))


# Three contexts with a query each, one without demonstrations, and one that three queries share.
ASKED = {
    context(1, 4, 3): {(5, 6): [(9,), (8,)]},
    context(2, 3, 3): {(5, 6, 7): [(9,)]},
    context(3, 3): {(5,): [(9, 9, 9)]},
    context(4): {(5,): [(9,)]},
    context(5, 2): {(5, 6, 7): [(9,), (8, 8)], (5, 6): [(9,)], (5, 9): [(9,)]},
}


def scheduled(method: str, sizes: Sizes = SIZES, can: Capabilities = CAN) -> list[Batch]:
    made = methods.make(method)
    work = []
    for context, queries in ASKED.items():
        work += made.work(context, queries, once=True)
    return list(schedule(work, sizes, can))


def digits(tokens: tuple[int, ...]) -> str:
    return "".join(map(str, tokens))


def printed(batches: list[Batch]) -> str:
    lines = []
    for batch in batches:
        requests = []
        for context, query, answers in batch.queries:
            after = ",".join(map(digits, answers))
            requests.append(f"{context.prefix[0]}:{digits(query)}>{after}")
        how = f"pack of {batch.tokens}" if batch.tokens else f"rows, {batch.rows_used}"
        lines.append(f"{batch.encoding:6} | {how:10} | {'  '.join(requests)}")
    return "\n".join(lines)


SCHEDULES = {
    # Contexts that fit with all their queries are read with them, as many as fit into 24 tokens.
    ("icl", CAN): """
never  | pack of 22 | 1:56>9,8  2:567>9
never  | pack of 8  | 3:5>999
before | pack of 1  | 4:5>9
never  | pack of 9  | 5:56>9  5:567>9,88  5:59>9""",
    # Here they are encoded side by side; the second copies of demonstrations take as many tokens
    # again.
    ("invicl", CAN): """
now    | pack of 18 | 1:56>9,8
now    | pack of 17 | 2:567>9
now    | pack of 11 | 3:5>999
before | pack of 1  | 4:5>9
now    | pack of 11 | 5:56>9  5:567>9,88  5:59>9""",
    # A query's memory is its own: queries are encoded side by side, whatever their contexts.
    ("saicl", CAN): """
now    | pack of 13 | 1:56>9,8
now    | pack of 23 | 2:567>9  3:5>999
now    | pack of 23 | 4:5>9  5:56>9  5:567>9,88
now    | pack of 8  | 5:59>9""",
    # Nothing is packed: the rows of a batch, in which queries with longer answers have the same
    # length.
    ("icl", CANNOT): """
before | rows, 2    | 1:56>9,8
before | rows, 1    | 2:567>9
before | rows, 1    | 3:5>999
before | rows, 1    | 4:5>9
before | rows, 2    | 5:56>9  5:59>9
before | rows, 2    | 5:567>9,88""",
}


@pytest.mark.parametrize(
    ("method", "can"), SCHEDULES, ids=["read", "side by side", "by query", "rows"]
)
def test_a_schedule(method, can):
    assert printed(scheduled(method, can=can)) == SCHEDULES[method, can].strip("\n")


def test_what_a_model_cannot_see_at_once_is_not_scheduled_at_once():
    """A window of 16 tokens; rotary angles that change with the length of a sequence."""
    windowed = scheduled("icl", can=replace(CAN, window=16))
    assert max(batch.tokens for batch in windowed) <= 16
    assert len(windowed) > len(scheduled("icl"))
    switching = scheduled("icl", can=replace(CAN, position_switch=SWITCH))
    assert {batch.encoding for batch in switching} == {"before"}
    on_both_sides = {(5,) * 3: [(9,)], (6,) * 70: [(9,)]}
    work = methods.make("icl").work(Context((), ()), on_both_sides, once=True)
    sizes = Sizes(pack_tokens=100, queries=2, texts=2)
    assert len([*schedule(work, sizes, CAN)]) == 1
    assert len([*schedule(work, sizes, replace(CAN, position_switch=SWITCH))]) == 2


NAMES = ["icl", "invicl", "saicl", "batchicl", "deepthink"]


@settings(deadline=None, max_examples=50)
@given(
    method=st.sampled_from(NAMES),
    sizes=st.builds(Sizes, st.integers(1, 60), st.integers(1, 4), st.integers(1, 4)),
    can=st.sampled_from([CAN, CANNOT, replace(CAN, window=12), replace(CANNOT, can_batch=False)]),
)
def test_every_request_is_scored_once(method, sizes, can):
    scheduled_requests = []
    for batch in scheduled(method, sizes, can):
        scheduled_requests += batch.requests
    asked = []
    for context, queries in ASKED.items():
        for query, answers in queries.items():
            asked += [(context, query, answer) for answer in answers]
    assert len(scheduled_requests) == len(asked)
    assert set(scheduled_requests) == set(asked)


def test_halving_ends_with_one_row():
    """Out of memory at every batch: sizes get smaller until there is nothing left to halve."""
    budget = MemoryBudget(PrefixCache(lambda contexts: [], 1), SIZES, "a model")

    def first_batch() -> Batch:
        return scheduled("icl", budget.sizes)[0]

    tried = []
    batch = first_batch()
    while budget.halve(batch.tokens, batch.rows_used):
        tried.append((batch.encoding, batch.tokens, batch.rows_used))
        batch = first_batch()
    assert tried[0] == ("never", 22, 2)
    assert tried[-1] == ("before", 0, 2)
    assert batch.rows_used == 1
    assert budget.sizes == Sizes(pack_tokens=1, queries=1, texts=1)


# Three texts, each with a context of its own; and the same after one context.
OWN = []
for i, n in enumerate((4, 4, 3)):
    OWN.append(Text(TokenizedPrompt(context(i, 3), (5,) * n), 5, single=True))


ON_ONE_MEMORY = []
for text in OWN:
    prompt = replace(text.prompt, context=context(9, 3))
    ON_ONE_MEMORY.append(replace(text, prompt=prompt, single=False))


def at_once(texts, can=CAN, settings=None, by_query=False, most=8):
    sizes = Sizes(24, 1, most)
    return first_texts(texts, 10, sizes, can, settings or GenerationSettings(), by_query)


def test_how_many_texts_are_continued_at_once():
    assert at_once([*OWN, *ON_ONE_MEMORY]) == 3
    assert at_once([*ON_ONE_MEMORY, *OWN]) == 3
    assert at_once(OWN, most=2) == 2
    assert at_once(OWN, replace(CAN, position_switch=SWITCH)) == 1
    assert at_once(ON_ONE_MEMORY, by_query=True) == 1
    assert at_once(ON_ONE_MEMORY, replace(CAN, can_batch=False)) == 1


@pytest.mark.parametrize(
    "case",
    [
        {"can": replace(CAN, can_pad=False)},
        {"can": replace(CAN, window=18)},
        {"settings": GenerationSettings(reads_rows=True)},
    ],
    ids=["cannot pad", "window", "rows are read"],
)
def test_without_padding_texts_of_one_length_on_one_memory_are_continued_at_once(case):
    assert at_once(OWN, **case) == 1
    assert at_once(ON_ONE_MEMORY, **case) == 2


def test_contexts_alone():
    method = methods.make("icl")
    work = []
    for context in ASKED:
        work += method.work(context, {}, once=True)
    taken = [side_by_side(work, SIZES, CAN, at) for at in range(5)]
    assert taken == [(3, 22), (2, 13), (1, 5), (0, 0), (1, 4)]
