"""Models that keep more than keys and values: attention beside linear attention, state spaces and
convolutions."""

from types import SimpleNamespace

import pytest
import torch
from transformers import PreTrainedConfig

from lm_eval_icl import methods
from lm_eval_icl.errors import Unsupported
from lm_eval_icl.inference.hybrids import is_hybrid
from lm_eval_icl.inference.trials import probe
from lm_eval_icl.methods.runner import MethodRunner
from lm_eval_icl.prompts.tokens import Context
from lm_eval_icl.smoke import every_method
from tests import tiny
from tests.smoke import model_types as smoke_models

HYBRIDS = ["qwen3_5_text", "qwen3_next", "granitemoehybrid", "mamba2"]
CONTEXT = Context((1, 5), (tuple(range(10, 60)), tuple(range(80, 150, 2))))
QUERIES = {
    (60, 61, 62): [(7,), (8, 9), (11, 12, 13)],
    (70, 71, 72): [(8, 9)],
    (90, 91, 92, 93, 94): [(7,), (11, 12)],
}


def in_one_pass(model, tokens, answer):
    ids = torch.tensor([[*tokens, *answer[:-1]]])
    logits = model(input_ids=ids, use_cache=False).logits[0, len(tokens) - 1 :]
    return float(logits.log_softmax(-1).gather(-1, torch.tensor(answer)[:, None]).sum())


def assert_scored_as_in_one_pass(runner, queries=QUERIES):
    scores = tiny.scores(runner, {CONTEXT: queries})
    for (_, query, answer), (logprob, _) in scores.items():
        whole = in_one_pass(runner.model, [*CONTEXT.tokens, *query], answer)
        assert logprob == pytest.approx(whole, rel=2e-6)


@pytest.mark.parametrize("name", HYBRIDS)
@torch.no_grad()
def test_every_query_goes_on_from_the_same_state(name):
    """Twice, in two orders: no query changes what the next one starts from."""
    runner = MethodRunner(smoke_models.build(name), methods.make("icl"), batch_size=2)
    for queries in (QUERIES, dict(reversed(QUERIES.items()))):
        assert_scored_as_in_one_pass(runner, queries)
    assert runner.store.encoded == 1


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        *((name, {}) for name in ("invicl", "pcw", "nope", "deepthink", "batchicl")),
        ("icl", {"positions": "symmetric"}),
    ],
)
def test_methods_that_work_on_keys_and_values_are_refused(method, arguments):
    says = f"{method} works on keys and values, and Qwen3NextForCausalLM keeps more than these"
    with pytest.raises(Unsupported, match=says):
        MethodRunner(tiny.build("qwen3_next"), methods.make(method, arguments))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "continues"), [("qwen3_5", True), ("qwen3_next", True), ("jamba", False)]
)
@torch.no_grad()
def test_which_models_continue_from_their_states(name, continues, dtype):
    """Selective state spaces drop their state if they get several tokens at once, of which scores
    show little."""
    capabilities = probe(tiny.build(name, dtype))
    assert capabilities.is_hybrid
    assert not capabilities.obeys_mask
    assert not capabilities.obeys_positions
    assert capabilities.can_batch == continues
    assert capabilities.can_generate == continues
    assert (not capabilities.no_memory) == continues


def test_a_configuration_without_layers_is_no_hybrids():
    assert not is_hybrid(SimpleNamespace(config=PreTrainedConfig()))


@pytest.mark.slow
def test_a_model_without_a_memory_runs_icl_as_hf_does(caplog):
    """The smoke test compares log-likelihoods and texts with those of `hf`."""
    scores = every_method.smoke("jamba", special=smoke_models.TYPES)
    assert {name for name, by_task in scores.items() if not isinstance(by_task, str)} == {"icl"}
    says = "does not continue from its cache"
    assert says in scores["deepthink"]
    [message] = [message for message in caplog.messages if says in message]
    assert "every prompt is run as a whole, as with --model hf" in message
