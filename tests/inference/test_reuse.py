"""Nothing is computed twice: tokens through the model are counted."""

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
        self.tokens, self.positions = 0, 0
        model.register_forward_pre_hook(self.before, with_kwargs=True)
        model.get_output_embeddings().register_forward_pre_hook(self.project)

    def before(self, module, args, kwargs):
        self.tokens += kwargs["input_ids"].numel()

    def project(self, module, args):
        self.positions += args[0].numel() // args[0].shape[-1]


def distinct_tokens(lm, results, passes):
    """By a set of prefixes: how many tokens must run, and from how many answers are read."""
    contexts, nodes, answers = set(), set(), set()
    for samples in results["samples"].values():
        for sample in samples:
            for prompt, continuation in sample["arguments"]:
                whole = lm.tok_encode(
                    prompt.rstrip() + prompt[len(prompt.rstrip()) :] + continuation
                )
                context = lm.tok_encode(prompt.rstrip())
                shared = evaluation.shared_length(lm.tokenizer, prompt)
                contexts.add(tuple(context[:shared]))
                nodes |= {tuple(whole[:end]) for end in range(shared + 1, len(whole))}
                answers |= {tuple(whole[:end]) for end in range(len(context), len(whole))}
    if (
        passes == 1
    ):  # contexts are read with their queries, and those that begin alike share their beginning
        nodes |= {context[:end] for context in contexts for end in range(1, len(context) + 1)}
        return len(nodes), len(answers)
    # All contexts share each pass, of which one position is projected, the least transformers can do.
    return sum(map(len, contexts)) * passes + len(nodes), len(answers) + passes


@pytest.mark.parametrize(("cls", "passes", "args"), [(ICL, 1, {}), (DeepThink, 4, {"T": 4})])
@pytest.mark.parametrize("name", ["gpt2", "bloom"])
def test_every_distinct_token_runs_once(checkpoint, cls, passes, args, name):
    lm = cls(str(checkpoint(name)), device="cpu", pack_tokens=4096, **args)
    counter = Counter(lm.model)
    results = evaluation.run(lm, "", ["one_token", "many_tokens"], 3)
    tokens, positions = distinct_tokens(lm, results, passes)
    read = lm.runner.capabilities.can_pack and passes == 1  # contexts are read with their queries
    if lm.runner.capabilities.can_pack:
        assert counter.tokens == tokens
        assert counter.positions == positions
    else:  # one query at a time: queries and options that begin alike do not share their beginnings
        assert tokens <= counter.tokens < 1.5 * tokens
    assert lm.runner.store.encoded == (
        0 if read else 2
    )  # two tasks, each with its own demonstrations

    arguments = [
        each
        for samples in results["samples"].values()
        for sample in samples
        for each in sample["arguments"]
    ]
    alone = sum(len(lm.tok_encode(str(prompt) + answer)) - 1 for prompt, answer in arguments)
    counts = results["config"]["icl"]
    assert (counts["tokens_run"], counts["tokens_saved"]) == (
        counter.tokens,
        alone - counter.tokens,
    )


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
    assert (store.encoded, store.reused) == (4, 2)
    # What is too large is used, but not kept.
    store = PrefixCache(encode, max_bytes=1)
    assert [len(*store.several([a])) for _ in range(2)] == [10, 10] and store.encoded == 2


def test_a_run_forgets_what_never_comes_up_again(checkpoint, monkeypatch):
    """Other demonstrations for every document: at no time more than one memory is kept."""
    lm = ICL(
        str(checkpoint("gpt2")), device="cpu", batch_size=4, pack_tokens=1
    )  # one context at a time
    kept: list[int] = []
    lm.model.register_forward_pre_hook(lambda *_: kept.append(len(lm.runner.store._kept)))
    evaluation.run(lm, "", ["described"], 2)
    assert lm.runner.store.encoded == 6
    assert max(kept) == 1
    assert not lm.runner.store._kept
    assert lm.runner.store._bytes == 0

    monkeypatch.setattr(
        PreparedRun, "release", lambda *_: None
    )  # the requests are sent again below
    # Two kinds of request after the same demonstrations.
    same = {"output_type": "generate_until", "doc_to_target": "{{['a', 'b'][label]}}"}
    answered = evaluation.task(
        "answered", **same, generation_kwargs={"until": ["a"], "max_gen_toks": 2}
    )
    evaluation.run(lm, "", ["one_token", answered], 2)
    assert (lm.runner.store.encoded, lm.runner.store.reused) == (
        2,
        1,
    )  # once a kind; six texts, four side by side
    assert not lm.runner.store._kept

    requests = [i for i, _ in lm.run._prepared.values() if i.request_type == "loglikelihood"]
    lm.begin([])  # outside a run, call after call, nobody knows what comes
    for request in requests:
        lm.loglikelihood([request])
    assert (lm.runner.store.encoded, lm.runner.store.reused) == (1, len(requests) - 1)
