"""Methods that learn, against loops written from their papers' definitions."""

import math
from itertools import chain

import pytest
import torch
from transformers import DynamicCache

from lm_eval_icl.errors import InputError
from lm_eval_icl.inference.caches import cache_arguments
from lm_eval_icl.methods import make
from lm_eval_icl.methods.answers import loss_in_layout
from lm_eval_icl.methods.runner import MethodRunner, score_memories
from lm_eval_icl.prompts.tokens import Context
from tests import plain, tiny
from tests.test_docs import DOCS, blocks

pytestmark = pytest.mark.usefixtures("tried_once")

# A prefix and four demonstrations, each an input, an answer and a delimiter.
CONTEXT = Context(
    (1, 60),
    ((15, 26, 37, 8), (9, 40, 11, 12, 13), (14, 75, 16), (9, 61, 62, 33, 34, 35)),
    ((2, 3), (3, 5), (2, 3), (3, 5)),
)
WORK = {CONTEXT: {(20, 21): [(22, 23), (24,)], (30, 31, 32): [(22, 23)]}}


def hiding(sees):
    return torch.zeros(sees.shape, dtype=torch.double).masked_fill(~sees, -torch.inf)[None, None]


def literal_memory(model, first, context, steps, lr, dropout, seed):
    """CT-KV as its paper and `notes` of its code define it: one pass over the demonstrations, then
    steps in which each demonstration runs under a dense mask on all entries.

    Returns:
        The keys and values [1, heads, entries, width] of all layers after the steps.
    """
    row = first.row(context)
    parts = [-1] * len(context.prefix)
    for i, length in enumerate(context.lengths):
        parts += [i] * length
    cache = DynamicCache()
    mask = hiding(row.mask)
    ids = torch.tensor([[context.tokens[i] for i in row.source]])
    with torch.no_grad():
        model(
            ids,
            attention_mask=mask,
            position_ids=row.positions[None],
            **cache_arguments(model, cache),
        )
    kept = row.kept_tokens
    owner = [parts[row.source[i]] for i in kept]
    entries = []
    for layer in cache.layers:
        entries += [layer.keys[:, :, kept], layer.values[:, :, kept]]
    moments = [(torch.zeros_like(x), torch.zeros_like(x)) for x in entries]
    order = sorted(range(len(context.lengths)), key=lambda i: context.demonstrations[i])
    by_content = [e for i in (-1, *order) for e in range(len(kept)) if owner[e] == i]
    generator = torch.Generator().manual_seed(seed)
    total = sum(end - begin for begin, end in context.answers)
    for step in range(steps):
        entries = [x.detach().requires_grad_() for x in entries]
        loss = 0
        for i in order:
            hidden = torch.tensor([o == i for o in owner])
            draws = torch.rand(len(kept), generator=generator)
            for draw, entry in zip(draws.tolist(), by_content, strict=True):
                hidden[entry] |= draw < dropout
            begin, end = context.answers[i]
            tokens = context.demonstrations[i][:end]
            n = len(tokens)
            sees = torch.cat([(~hidden).expand(n, -1), torch.ones(n, n).tril().bool()], dim=1)
            mask = hiding(sees)
            cache = DynamicCache()
            for number, pair in enumerate(zip(entries[::2], entries[1::2], strict=True)):
                cache.update(*pair, number)
            logits = model(
                torch.tensor([tokens]),
                attention_mask=mask,
                position_ids=row.end + torch.arange(n)[None],
                **cache_arguments(model, cache),
            ).logits[0]
            for at in range(begin, end):
                loss = loss - logits[at - 1].log_softmax(-1)[tokens[at]] / total
        gradients = torch.autograd.grad(loss, entries)
        norm = math.sqrt(sum(float((g * g).sum()) for g in gradients))
        rate = lr * (1 + math.cos(math.pi * step / steps)) / 2
        updated = []
        for x, g, (mean, square) in zip(entries, gradients, moments, strict=True):
            g = g * min(1.0, 1.0 / (norm + 1e-6))
            mean.mul_(0.9).add_(0.1 * g)
            square.mul_(0.999).add_(0.001 * g * g)
            corrected = mean / (1 - 0.9 ** (step + 1))
            root = (square / (1 - 0.999 ** (step + 1))).sqrt()
            updated.append(x.detach() - rate * corrected / (root + 1e-8))
        entries = updated
    return entries


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def model(request):
    return tiny.build(request.param, torch.float64)


def scores(runner, work=WORK, once=False):
    values = {}
    with runner.inference_mode():
        for requests, scored in runner.score(work, once):
            values |= zip(requests, [score for score, _ in scored], strict=True)
    return values


@pytest.mark.parametrize("layout", ["icl", "pcw", "invicl"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_the_memory_of_ctkv_is_that_of_a_literal_loop(model, layout, dropout):
    arguments = {"layout": layout, "steps": 5, "lr": 0.1, "token_dropout": dropout, "seed": 3}
    runner = MethodRunner(model, make("ctkv", arguments))
    with runner.inference_mode():
        [memory] = runner.encoder.memories([CONTEXT])
        [before] = make(layout).encode(model, [CONTEXT])
    expected = literal_memory(model, make(layout), CONTEXT, 5, 0.1, dropout, 3)
    learned = [entry for layer in memory.layers for entry in layer]
    largest = 0.0
    for ours, theirs, start in zip(
        learned, expected, (x for layer in before.layers for x in layer), strict=True
    ):
        assert float((ours - theirs).abs().max()) < 1e-9
        largest = max(largest, float((ours - start).abs().max()))
    assert largest > 0.05
    assert runner.encoder.learned["contexts"] == 1 and runner.encoder.learned["steps"] == 5
    assert all(parameter.grad is None for parameter in model.parameters())


def equal_to(expected):
    """To the bit. In plain mode to rounding, since there a layout's query runs in the pass of its
    context, and a learned memory's query runs after it."""
    return pytest.approx(expected, rel=0, abs=1e-12 if plain.ON else 0)


@pytest.mark.parametrize("layout", ["icl", "nope", "pcw", "prefixicl", "invicl"])
def test_without_steps_it_is_the_layout(model, layout):
    if layout == "nope" and model.config.model_type == "gpt2":
        layout = "star"
    ctkv = scores(MethodRunner(model, make("ctkv", {"layout": layout, "steps": 0})))
    assert ctkv == equal_to(scores(MethodRunner(model, make(layout))))


@pytest.mark.parametrize("layout", ["icl", "invicl"])
def test_plain_mode_gives_the_same(model, layout):
    arguments = {"layout": layout, "steps": 3, "lr": 0.1}
    fast = scores(MethodRunner(model, make("ctkv", arguments)))
    plain = scores(MethodRunner(model, make("ctkv", arguments), plain=True))
    assert fast.keys() == plain.keys()
    for request, score in fast.items():
        assert score == pytest.approx(plain[request], abs=1e-9)


def test_every_step_can_be_scored_on_the_way(model):
    """After k of 4 steps, the scores are those of the method that stops there."""
    arguments = {"steps": 4, "lr": 0.1}
    runner = MethodRunner(model, make("ctkv", arguments))
    by_number = {}
    with runner.inference_mode():
        for number, (requests, values) in score_memories(runner, CONTEXT, WORK[CONTEXT], {0, 2, 4}):
            pairs = zip(requests, [score for score, _ in values], strict=True)
            by_number.setdefault(number, {}).update(pairs)
    assert by_number.keys() == {0, 2, 4}
    for number, values in by_number.items():
        stopped = MethodRunner(model, make("ctkv", {**arguments, "after": number}))
        assert scores(stopped) == values
    assert by_number[0] == equal_to(scores(MethodRunner(model, make("icl"))))
    assert by_number[2] != by_number[4]


def test_every_step_can_be_scored_by_definition(model):
    def by_number(plain):
        runner = MethodRunner(model, make("deepthink", {"T": 3}), plain=plain)
        values = {}
        with runner.inference_mode():
            in_passes = score_memories(runner, CONTEXT, WORK[CONTEXT], {3, 1})
            for number, (requests, scored) in in_passes:
                for request, (logprob, _) in zip(requests, scored, strict=True):
                    values[number, *request] = logprob
        return values

    by_definition = by_number(plain=True)
    assert by_definition == pytest.approx(by_number(plain=False), abs=1e-7)
    assert len(by_definition) == 6
    assert next(iter(by_definition))[0] == 1


def test_models_may_ignore_which_logits_are_asked_for(model):
    """They then give the logits and the states of all tokens."""

    def ignoring(module, args, kwargs):
        return args, {name: value for name, value in kwargs.items() if name != "logits_to_keep"}

    def states(runner):
        vectors = []
        with runner.inference_mode():
            for _, scored in runner.score(WORK, states="hidden"):
                vectors += scored.states
        return torch.stack(vectors)

    runner = MethodRunner(model, make("icl"))
    layout = runner.method.row(CONTEXT)
    expected = states(runner)
    loss = loss_in_layout(model, layout, CONTEXT)
    with model.register_forward_pre_hook(ignoring, with_kwargs=True):
        torch.testing.assert_close(states(runner), expected)
        torch.testing.assert_close(loss_in_layout(model, layout, CONTEXT), loss)


def test_memories_of_several_contexts_are_those_of_each(model):
    method = make("ctkv", {"steps": 2, "lr": 0.1})
    other = Context(CONTEXT.prefix, CONTEXT.demonstrations[::-1], CONTEXT.answers[::-1])
    *_, together = method.memories(model, [CONTEXT, other])
    for memory, context in zip(together, [CONTEXT, other], strict=True):
        [alone] = method.encode(model, [context])
        for mine, theirs in zip(chain(*memory.layers), chain(*alone.layers), strict=True):
            assert torch.equal(mine, theirs)


def permuted(context, order):
    return Context(
        context.prefix,
        tuple(context.demonstrations[i] for i in order),
        tuple(context.answers[i] for i in order),
    )


@pytest.mark.parametrize("layout", ["pcw", "invicl"])
def test_over_invariant_layouts_the_order_makes_no_difference(model, layout):
    """Dropout is drawn by content, so also where demonstrations are not sorted first."""
    arguments = {"layout": layout, "steps": 3, "lr": 0.1, "token_dropout": 0.3}
    runner = MethodRunner(model, make("ctkv", arguments))
    assert runner.invariant and not MethodRunner(model, make("ctkv")).invariant
    queries = WORK[CONTEXT]
    one = scores(runner)
    other = scores(runner, {permuted(CONTEXT, [2, 0, 3, 1]): queries})
    for (_, query, answer), score in one.items():
        [same] = [s for (_, q, a), s in other.items() if (q, a) == (query, answer)]
        assert score == pytest.approx(same, abs=1e-9)


def test_the_loss_falls(model):
    method = make("ctkv", {"steps": 20, "lr": 0.05, "token_dropout": 0})
    with torch.no_grad():
        losses = [learning.loss for learning in method.learn(model, CONTEXT)]
    assert math.isnan(losses[0]) and losses[-1] < losses[1] / 2


def test_in_half_precision_what_is_learned_is_float32(model):
    half = tiny.build(model.config.model_type, torch.bfloat16)
    method = make("ctkv", {"steps": 3, "lr": 1e-3})
    with torch.no_grad():
        [before] = method.first.encode(half, [CONTEXT])
        [memory] = method.encode(half, [CONTEXT])
    assert {x.dtype for x in method.parameters(half, before)} == {torch.float32}
    assert {x.dtype for layer in memory.layers for x in layer} == {torch.bfloat16}
    moved = [
        (a != b).float().mean() for a, b in zip(memory.layers[0], before.layers[0], strict=True)
    ]
    assert max(moved) > 0


def test_what_is_refused(model):
    for arguments, why in (
        ({"after": 5, "steps": 4}, "after=5: must be at most steps=4"),
        ({"lr": 0}, "lr=0: must be a number above 0"),
        ({"steps": -1}, "steps=-1: must be a whole number, 0 or more"),
        ({"layout": "batchicl"}, "layout='batchicl': must be a method of one pass"),
        ({"layout": "ctkv"}, "layout='ctkv': must be"),
    ):
        with pytest.raises(InputError, match=why):
            make("ctkv", arguments)
    with torch.no_grad(), pytest.raises(InputError, match=r"loss is (nan|inf).*lower lr"):
        make("ctkv", {"steps": 9, "lr": 1e300}).encode(model, [CONTEXT])


def test_the_soft_prompt_of_the_page_learns(model, tmp_path, monkeypatch):
    """docs/add-a-method.md's file; its gradient is that of a literal pass over the whole row."""
    [text] = [
        text
        for _, language, text in blocks(DOCS / "add-a-method.md")
        if language == "python" and "SoftPrompt" in text
    ]
    (tmp_path / "softprompt.py").write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    method = make("softprompt:SoftPrompt", {"steps": 12, "lr": 0.05, "vectors": 3})
    runner = MethodRunner(model, method)
    with runner.inference_mode():
        losses = [learning.loss for learning in method.learn(model, CONTEXT)]
        [memory] = runner.encoder.memories([CONTEXT])
        [before] = method.first.encode(model, [CONTEXT])
    assert losses[-1] < losses[1] - 0.1
    assert len(memory) == len(before) + 3 and memory.query_start == before.query_start + 3
    assert runner.tokens_run == 0 and scores(runner) and runner.tokens_run > 0

    embed = model.get_input_embeddings().weight
    vectors = embed[CONTEXT.tokens[-3:]].detach()
    first = make("softprompt:SoftPrompt", {"steps": 0, "vectors": 3})
    for (_, query, answer), score in scores(MethodRunner(model, first)).items():
        row = torch.cat([embed[CONTEXT.tokens], vectors, embed[[*query, *answer]]])
        logits = model(inputs_embeds=row[None]).logits[0].log_softmax(-1)
        at = len(row) - len(answer) - 1
        expected = sum(float(logits[at + i, token]) for i, token in enumerate(answer))
        assert score == pytest.approx(expected, abs=1e-6)
