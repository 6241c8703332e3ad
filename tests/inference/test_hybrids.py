"""Models that keep more than keys and values: attention beside linear attention, state spaces and convolutions."""

import pytest
import torch

from lm_eval_icl import methods
from lm_eval_icl.errors import Unsupported
from lm_eval_icl.inference import caches, capabilities
from lm_eval_icl.inference.capabilities import probe
from lm_eval_icl.methods.runner import MethodRunner
from lm_eval_icl.prompts.tokens import Context
from tests import tiny
from tests.smoke import model_types as smoke_models

HYBRIDS = ["qwen3_5", "qwen3_next", "jamba"]
CONTEXT = Context((1, 5), (tuple(range(10, 60)), tuple(range(80, 150, 2))))
QUERIES = {
    (60, 61, 62): [(7,), (8, 9), (11, 12, 13)],
    (70, 71, 72): [(8, 9)],
    (90, 91, 92, 93, 94): [(7,), (11, 12)],
}


def in_one_pass(model, tokens, answer):
    logits = model(input_ids=torch.tensor([[*tokens, *answer[:-1]]]), use_cache=False).logits[0, len(tokens) - 1 :]
    return float(logits.log_softmax(-1).gather(-1, torch.tensor(answer)[:, None]).sum())


def assert_scored_as_in_one_pass(runner, queries=QUERIES):
    for asked, scores in runner.score({CONTEXT: queries}):
        for (_, query, answer), (found, _) in zip(asked, scores, strict=True):
            whole = in_one_pass(runner.model, [*CONTEXT.tokens, *query], answer)
            assert found == pytest.approx(whole, rel=2e-6)


@pytest.mark.parametrize("rows", tiny.slow_but([2], [1, 2, 8]))
@pytest.mark.parametrize("name", HYBRIDS)
@torch.no_grad()
def test_every_query_goes_on_from_the_same_state(name, rows):
    """Twice, in two orders: no query changes what the next one starts from."""
    runner = MethodRunner(tiny.build(name), methods.make("icl"), batch_size=rows)
    for queries in (QUERIES, dict(reversed(QUERIES.items()))):
        assert_scored_as_in_one_pass(runner, queries)
    assert runner.store.encoded == 1


@torch.no_grad()
def test_rows_that_a_model_mixes_run_one_by_one():
    """transformers' RWKV mixes the rows of a batch as soon as a single token of each is run."""
    runner = MethodRunner(smoke_models.build("rwkv"), methods.make("icl"), batch_size=4)
    assert not runner.capabilities.can_batch
    assert_scored_as_in_one_pass(runner)


@pytest.mark.parametrize("name", HYBRIDS)
@torch.no_grad()
def test_the_demonstrations_are_run_once(name):
    runner = MethodRunner(tiny.build(name), methods.make("icl"))
    list(runner.score({CONTEXT: {query: [(7,)] for query in QUERIES}}))
    assert runner.tokens_run == len(CONTEXT.tokens) + sum(map(len, QUERIES))


@pytest.mark.parametrize(
    ("method", "arguments", "needs"),
    [
        ("invicl", {}, "hides tokens from each other"),
        ("pcw", {}, "hides tokens from each other"),
        ("nope", {}, "gives tokens positions of its own"),
        ("icl", {"positions": "symmetric"}, "gives tokens positions of its own"),
        ("deepthink", {}, "computes keys and values anew"),
        ("batchicl", {}, "computes keys and values anew"),
    ],
)
def test_methods_that_work_on_keys_and_values_are_refused(method, arguments, needs):
    says = f"{method} {needs}, and Qwen3NextForCausalLM keeps more than keys and values"
    with pytest.raises(Unsupported, match=says):
        MethodRunner(tiny.build("qwen3_next"), methods.make(method, arguments))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "stepwise"), [("qwen3_5", False), ("qwen3_next", False), ("jamba", True)])
@torch.no_grad()
def test_how_models_go_on(name, stepwise, dtype):
    """Selective state spaces drop their state if they get several tokens at once, of which scores show little."""
    found = probe(tiny.build(name, dtype))
    assert found.has_other_states and found.can_batch and found.can_generate and found.stepwise == stepwise
    assert not found.obeys_mask and not found.obeys_positions


@torch.no_grad()
def test_states_that_are_not_copied_are_noticed(monkeypatch):
    """One cache for all queries, whose state the first query changes."""
    monkeypatch.setattr(capabilities.Memory, "cache", lambda memory, rows=1: memory.state)
    with pytest.raises(ValueError, match="Qwen3NextForCausalLM cannot be used"):
        probe(tiny.build("qwen3_next"))


@torch.no_grad()
def test_rows_are_copied_with_every_kind_of_state():
    model = tiny.build("qwen3_next")
    _, cache = caches.run_rows(model, None, torch.tensor([[5, 6, 7], [8, 9, 10]]), [2])
    before = [tensor.clone() for tensor in caches.tensors(cache)]
    picked = caches.select_rows(cache, 2, [1, 0, 1])
    caches.run_rows(model, picked, torch.tensor([[11], [12], [13]]), [0])
    assert all(map(torch.equal, before, caches.tensors(cache)))
    assert {len(tensor) for tensor in caches.tensors(picked) if tensor.dim() > 2} == {3}
    again = caches.select_rows(cache, 2, [1])
    _, alone = caches.run_rows(model, None, torch.tensor([[8, 9, 10]]), [2])
    for one, other in zip(caches.tensors(again), caches.tensors(alone), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
