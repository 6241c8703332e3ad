"""Nothing is computed twice: tokens through the model are counted."""

import itertools

import pytest
import torch

from lm_eval_icl.harness.prepared_run import PreparedRun
from lm_eval_icl.inference.memory import Memory
from lm_eval_icl.inference.prefix_cache import PrefixCache
from lm_eval_icl.prompts.tokens import Context
from tests import evaluation
from tests.evaluation import ICL, DeepThink


class Counter:
    """Counts the tokens and the answer positions that go through a model."""

    def __init__(self, model):
        self.tokens = 0
        self.positions = 0
        model.register_forward_pre_hook(self.before, with_kwargs=True)
        model.get_output_embeddings().register_forward_pre_hook(self.project)

    def before(self, module, args, kwargs):
        self.tokens += kwargs["input_ids"].numel()

    def project(self, module, args):
        self.positions += args[0].numel() // args[0].shape[-1]


def arguments_of(results):
    """(prompt, continuation) of every request."""
    pairs = []
    for sample in itertools.chain(*results["samples"].values()):
        pairs += sample["arguments"]
    return pairs


def beginnings(tokens, first, last):
    return {tuple(tokens[:end]) for end in range(first, last)}


def distinct_tokens(lm, results, passes):
    """By a set of prefixes: how many tokens must run, and from how many answers are read."""
    contexts = set()
    nodes = set()
    answers = set()
    for prompt, continuation in arguments_of(results):
        whole = lm.tok_encode(str(prompt) + continuation)
        context = lm.tok_encode(prompt.rstrip())
        shared = evaluation.shared_length(lm.tokenizer, prompt)
        contexts.add(tuple(context[:shared]))
        nodes |= beginnings(whole, shared + 1, len(whole))
        answers |= beginnings(whole, len(context), len(whole))
    if passes == 1:
        # Contexts are read with their queries, and those that begin alike share their beginning.
        for context in contexts:
            nodes |= beginnings(context, 1, len(context) + 1)
        return len(nodes), len(answers)
    # All contexts share each pass, of which one position is projected, the least transformers can
    # do.
    return sum(map(len, contexts)) * passes + len(nodes), len(answers) + passes


@pytest.mark.parametrize(("cls", "passes", "args"), [(ICL, 1, {}), (DeepThink, 4, {"T": 4})])
@pytest.mark.parametrize("name", ["gpt2", "bloom"])
def test_every_distinct_token_runs_once(checkpoint, cls, passes, args, name):
    lm = cls(str(checkpoint(name)), device="cpu", pack_tokens=4096, **args)
    counter = Counter(lm.model)
    results = evaluation.run(lm, "", ["one_token", "many_tokens"], 3)
    tokens, positions = distinct_tokens(lm, results, passes)
    packs = lm.runner.capabilities.can_pack
    if packs:
        assert counter.tokens == tokens
        assert counter.positions == positions
    else:  # one query at a time: queries and options that begin alike do not share their beginnings
        assert tokens <= counter.tokens < 1.5 * tokens
    # Contexts are read with their queries, or two tasks have each its own demonstrations.
    assert lm.runner.store.encoded == (0 if packs and passes == 1 else 2)

    alone = 0
    for prompt, answer in arguments_of(results):
        alone += len(lm.tok_encode(str(prompt) + answer)) - 1
    counts = results["config"]["icl"]
    assert counts["tokens_run"] == counter.tokens
    assert counts["tokens_saved"] == alone - counter.tokens


def memory(size: int) -> Memory:
    entry = torch.zeros(1, 1, size, 1)
    return Memory([(entry, entry)], list(range(size)), size)


def test_store_forgets_the_least_recently_used():
    made = []

    def encode(contexts):
        made.extend(contexts)
        return [memory(10)] * len(contexts)

    a, b, c = (Context((i,), ()) for i in range(3))
    store = PrefixCache(encode, max_bytes=2 * memory(10).nbytes)
    for context in (a, b, a, c, a, b):
        store.several([context])
    assert made == [a, b, c, b]
    assert store.encoded == 4
    assert store.reused == 2
    # What is too large is used, but not kept.
    store = PrefixCache(encode, max_bytes=1)
    for _ in range(2):
        [of_a] = store.several([a])
        assert len(of_a) == 10
    assert store.encoded == 2


def test_a_run_forgets_what_never_comes_up_again(checkpoint):
    """Other demonstrations for every document: at no time more than one memory is kept."""
    # One context at a time.
    lm = ICL(str(checkpoint("gpt2")), device="cpu", batch_size=4, pack_tokens=1)
    kept: list[int] = []
    lm.model.register_forward_pre_hook(lambda *_: kept.append(len(lm.runner.store._kept)))
    evaluation.run(lm, "", ["described"], 2)
    store = lm.runner.store
    assert store.encoded == 6
    assert max(kept) == 1
    assert not store._kept
    assert store._bytes == 0


def test_a_memory_is_kept_for_requests_of_another_kind_and_of_later_calls(checkpoint, monkeypatch):
    lm = ICL(str(checkpoint("gpt2")), device="cpu", batch_size=4, pack_tokens=1)
    monkeypatch.setattr(PreparedRun, "release", lambda *_: None)  # requests are sent again below
    # Two kinds of request after the same demonstrations.
    answered = evaluation.generation(
        "answered", {"until": ["a"], "max_gen_toks": 2}, doc_to_target="{{['a', 'b'][label]}}"
    )
    evaluation.run(lm, "", ["one_token", answered], 2)
    # Once a kind; six texts, four side by side.
    assert lm.runner.store.encoded == 2
    assert lm.runner.store.reused == 1
    assert not lm.runner.store._kept

    requests = [i for i, _ in lm.run._prepared.values() if i.request_type == "loglikelihood"]
    lm.begin([])  # outside a run, call after call, nobody knows what comes
    for request in requests:
        lm.loglikelihood([request])
    assert lm.runner.store.encoded == 1
    assert lm.runner.store.reused == len(requests) - 1
