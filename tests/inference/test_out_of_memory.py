"""Where the device's memory does not suffice, less runs at once: the same results, a line in the
log, no crash."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from lm_eval_icl import methods
from lm_eval_icl.errors import InputError
from lm_eval_icl.harness.models import ICLModel, model_class
from lm_eval_icl.inference.budget import MemoryBudget
from lm_eval_icl.inference.caches import cache_name
from lm_eval_icl.inference.memory import Memory
from lm_eval_icl.inference.packing import first_packed_batch
from lm_eval_icl.inference.prefix_cache import PrefixCache
from lm_eval_icl.inference.schedule import Sizes
from lm_eval_icl.prompts.tokens import Context
from tests import evaluation, tiny

NAMES = ["described", "generate"]  # the first has another context for every document
CLASSES = {name: model_class(name) for name in methods.NAMES}


@pytest.fixture
def make(checkpoint):
    def make(method: str, **args: Any) -> ICLModel:
        return CLASSES[method](
            str(checkpoint("gpt2")), device="cpu", dtype="float64", **{"batch_size": 4, **args}
        )

    return make


def run(lm: ICLModel, limit: int = 3) -> list[Any]:
    return evaluation.responses(evaluation.run(lm, "", NAMES, 2, limit=limit))


@contextmanager
def device_of(lm: ICLModel, tokens: float) -> Iterator[dict[str, float]]:
    """A device with memory for so many tokens: of the memories kept or in use, and of the pass that
    runs, which ends as torch's passes do where it is not enough; counts the passes that failed, and
    the most tokens that there were."""
    seen = {"failed": 0, "most": 0}

    def limit(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        ids = (kwargs["input_ids"] if "input_ids" in kwargs else args[0]).numel()
        cache = kwargs.get(cache_name(lm.model))
        used = 0 if cache is None else int(cache.get_seq_length())
        held = ids + max(used, sum(len(memory) for memory in lm.runner.store._kept.values()))
        if held > tokens:
            seen["failed"] += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        seen["most"] = max(seen["most"], held)

    handle = lm.model.register_forward_pre_hook(limit, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["icl", "saicl", "deepthink", "nbce"])
def test_the_least_that_holds_a_prompt_suffices(make, method, caplog):
    expected = run(make(method))
    smallest = make(method, pack_tokens=1, batch_size=1, store_bytes=1)
    with device_of(smallest, float("inf")) as seen:
        run(smallest)

    lm = make(method)
    with device_of(lm, seen["most"]) as disturbed, caplog.at_level(logging.WARNING):
        evaluation.assert_same(run(lm), expected, 1e-10)
    assert disturbed["failed"]
    assert "CUDA out of memory: " in caplog.text

    says = r"one prompt alone needs more memory than the device has \(GPT2LMHeadModel on cpu\)"
    with device_of(lm, seen["most"] - 1), pytest.raises(InputError, match=says):
        run(lm)


def test_what_is_halved_and_what_is_forgotten(make, caplog):
    lm = make("batchicl")  # whose memories, one a demonstration, stay
    with device_of(lm, 200), caplog.at_level(logging.WARNING):
        run(lm)
    said = [record.message for record in caplog.records if "out of memory" in record.message]
    assert any("bytes of memories are kept" in line for line in said)
    assert lm.runner.store.max_bytes < lm.runner.store_bytes
    caplog.clear()
    with (
        device_of(lm, 10**6),
        caplog.at_level(logging.WARNING),
    ):  # a new run begins with all that was asked for
        run(lm)
    assert lm.runner.store.max_bytes == lm.runner.store_bytes
    assert "out of memory" not in caplog.text


def test_a_pack_holds_so_many_tokens_or_the_least_number_of_queries():
    queries = [((n,) * n, [(2, 3), (4,)]) for n in (9, 7, 5, 3)]  # each costs one more
    assert first_packed_batch(queries, 100) == (queries, 28)
    assert first_packed_batch(queries, 18) == (queries[:2], 18)
    assert first_packed_batch(queries, 17) == (queries[:1], 10)
    assert first_packed_batch(queries, 1) == (queries[:1], 10)
    assert first_packed_batch(queries, 2, at_least=3) == (queries[:3], 24)
    assert first_packed_batch(queries, 2, at_least=30) == (queries, 28)
    assert first_packed_batch(queries, 1, at_least=30) == (
        queries[:1],
        10,
    )  # 16 times as many tokens at most
    # What queries share is counted once: "5 5 5", a query's own token and the "2" after it.
    queries = [((5, 5, 5, n), [(2, 3), (2, 4), (6,)]) for n in range(10)]
    packs = [first_packed_batch(queries, tokens) for tokens in (4, 5, 6, 7, 9, 100)]
    assert [(len(pack), tokens) for pack, tokens in packs] == [
        (1, 5),
        (1, 5),
        (1, 5),
        (2, 7),
        (3, 9),
        (10, 23),
    ]


def test_auto_generates_as_many_side_by_side_as_fit(make):
    rows: list[int] = []
    expected = run(make("icl"), 6)
    lm = make("icl", batch_size="auto", max_batch_size=5)
    lm.model.register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    evaluation.assert_same(run(lm, 6), expected, 1e-10)
    assert max(rows) == 5


def test_texts_are_generated_in_smaller_batches(checkpoint, caplog):
    model, tokenizer = tiny.load(checkpoint("gpt2"))
    predictor = methods.Predictor(model, tokenizer, methods.ICL(), batch_size=3, store_bytes=0)
    queries = ["a film", "the plot", "a scene"]
    expected = predictor.generate(["a joke\n"], queries, max_new_tokens=4)
    rows = []

    def limit(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        rows.append(len(kwargs["input_ids"]))
        if rows[-1] > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    model.register_forward_pre_hook(limit, with_kwargs=True)
    with caplog.at_level(logging.WARNING):
        assert predictor.generate(["a joke\n"], queries, max_new_tokens=4) == expected
    assert max(rows) == 3
    assert "CUDA out of memory: from now on, batches have 1 rows" in caplog.messages


def test_memories_are_freed_first_and_then_less_runs_at_once():
    entries = torch.ones(1, 1, 1, 50)
    store = PrefixCache(lambda contexts: [Memory([(entries, entries)], [1], 1)], 1000)
    store.several([Context((1,), ())])
    budget = MemoryBudget(store, Sizes(64, 1, 4), "M on cpu")
    told = ["", "less runs"]

    def run(at_most: int) -> Any:
        def attempt() -> str:
            if len(told) > at_most:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return "done"

        return attempt

    assert budget.fit(run(1), told.pop) == "done"
    assert store.max_bytes == 200
    says = r"one prompt alone needs more memory than the device has \(M on cpu\)\. Lower --num_few"
    with pytest.raises(InputError, match=says):
        budget.fit(run(0))


def test_a_pass_that_several_processes_share_is_not_halved_by_one(make, monkeypatch):
    """Under tp_plan: the others would wait for it without end."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(ICLModel, "is_tensor_parallel", True)
    lm = make("icl")
    with device_of(lm, 50), pytest.raises(torch.OutOfMemoryError):
        run(lm)
