"""Test-time training, against a loop written from its paper's definition, and against peft."""

import copy
import logging
import math
import threading

import peft
import pytest
import torch

from lm_eval_icl.errors import InputError, Unsupported
from lm_eval_icl.inference.adapters import Adapter, adapted_layers
from lm_eval_icl.inference.generation import GenerationSettings
from lm_eval_icl.inference.memory import encode_all
from lm_eval_icl.methods import make
from lm_eval_icl.methods.answers import loss_in_layout
from lm_eval_icl.methods.runner import MethodRunner, score_memories
from lm_eval_icl.prompts.tokens import Context, TokenizedPrompt
from tests import tiny
from tests.methods.test_learned import CONTEXT, WORK, equal_to, hiding, permuted, scores

pytestmark = pytest.mark.usefixtures("tried_once")

# The layers that get an adapter, in order, and whether their weights are [inputs, outputs].
TARGETS = {
    "llama": (
        "self_attn.q_proj self_attn.v_proj self_attn.o_proj "
        "mlp.gate_proj mlp.up_proj mlp.down_proj",
        False,
    ),
    "gpt2": ("attn.c_attn attn.c_proj mlp.c_fc mlp.c_proj", True),
}
# Two steps.
QUICK = {"permutations": 4, "batch": 2, "rank": 3, "alpha": 6, "lr": 0.02}
OTHER = permuted(CONTEXT, [2, 0, 3, 1])


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def model(request):
    return tiny.build(request.param, torch.float64)


def targets(model):
    """The adapted layers, and whether their weights are [inputs, outputs]."""
    kind = model.config.model_type
    names, inputs_first = TARGETS[kind]
    blocks = model.model.layers if kind == "llama" else model.transformer.h
    layers = [block.get_submodule(name) for block in blocks for name in names.split()]
    return layers, inputs_first


def literal_adapter(model, layout, context, permutations, batch, rank, alpha, lr, dropout, seed):
    """The matrices of all layers after one epoch, with a dense mask, by steps written out."""
    model = copy.deepcopy(model)
    layers, inputs_first = targets(model)
    draws = torch.Generator().manual_seed(seed)
    n = len(context.demonstrations)
    by_content = sorted(range(n), key=lambda i: context.demonstrations[i])
    orders = []
    for _ in range(permutations):
        orders.append([by_content[i] for i in torch.randperm(n, generator=draws).tolist()])
    in_epoch = torch.randperm(permutations, generator=draws).tolist()
    matrices = []
    for layer in layers:
        shape = layer.weight.shape if inputs_first else layer.weight.T.shape
        bound = 1 / math.sqrt(shape[0])
        uniform = torch.rand(rank, shape[0], generator=draws).double()
        matrices.append(-bound + 2 * bound * uniform)
        matrices.append(torch.zeros(shape[1], rank, dtype=torch.double))
    dropped = torch.Generator().manual_seed(int(torch.randint(2**31, (), generator=draws)))

    def replaced(forward, number):
        def run(x):
            down, up = matrices[2 * number : 2 * number + 2]
            keep = torch.ones(x.shape)
            if dropout:
                keep = (torch.rand(x.shape, generator=dropped) >= dropout).double()
            return forward(x) + alpha / rank * (x * keep / (1 - dropout) @ down.T) @ up.T

        return run

    for number, layer in enumerate(layers):
        layer.forward = replaced(layer.forward, number)

    moments = [(torch.zeros_like(x), torch.zeros_like(x)) for x in matrices]
    steps = math.ceil(permutations / batch)
    for step in range(steps):
        matrices = [x.detach().requires_grad_() for x in matrices]
        numbers = in_epoch[step * batch : (step + 1) * batch]
        if layout != "icl":
            numbers = numbers[:1]
        losses = []
        for number in numbers:
            text = permuted(context, orders[number])
            row = make(layout).row(text)
            ids = [text.tokens[i] for i in row.source]
            places = {"position_ids": row.positions[None], "attention_mask": hiding(row.mask)}
            logits = model(torch.tensor([ids]), **places, use_cache=False).logits[0].log_softmax(-1)
            start = len(text.prefix)
            for length, (begin, end) in zip(text.lengths, text.answers, strict=True):
                for at in range(start + begin, start + end):
                    # The last copy of a token is that to which queries attend.
                    copies = [i for i, source in enumerate(row.source) if source == at]
                    losses.append(-logits[copies[-1] - 1, text.tokens[at]])
                start += length
        gradients = torch.autograd.grad(torch.stack(losses).mean(), matrices)
        rate = lr * (1 + math.cos(math.pi * step / steps)) / 2
        updated = []
        for x, g, (mean, square) in zip(matrices, gradients, moments, strict=True):
            mean.mul_(0.9).add_(0.1 * g)
            square.mul_(0.999).add_(0.001 * g * g)
            corrected = mean / (1 - 0.9 ** (step + 1))
            root = (square / (1 - 0.999 ** (step + 1))).sqrt()
            shrunk = x.detach() * (1 - rate * 0.01)
            updated.append(shrunk - rate * corrected / (root + 1e-8))
        matrices = updated
    return matrices


@torch.no_grad()
def test_a_step_has_the_window_that_queries_have():
    """The answer of a demonstration is predicted as after the demonstrations before it."""
    model = tiny.build("mistral_window", torch.float64)
    shown = [tuple(range(first, first + 20)) for first in (10, 40)]
    context = Context((1,), tuple(shown), ((18, 20), (18, 20)))
    runner = MethodRunner(model, make("nope"))
    with runner.inference_mode():
        loss = float(loss_in_layout(model, runner.method.row(context), context))
    expected = 0.0
    for i, part in enumerate(shown):
        work = {Context((1,), tuple(shown[:i])): {part[:18]: [part[18:]]}}
        [(number, _)] = tiny.scores(runner, work).values()
        expected -= number
    assert loss == pytest.approx(expected, rel=1e-6)


def merged(model, matrices, scale):
    """A copy of the model whose weights have the changes in them."""
    model = copy.deepcopy(model)
    layers, inputs_first = targets(model)
    for layer, down, up in zip(layers, matrices[::2], matrices[1::2], strict=True):
        change = scale * up @ down
        layer.weight.data += change.T if inputs_first else change
    return model


def memory_of(method, model, context=CONTEXT):
    with torch.no_grad():
        [memory] = method.encode(model, [context])
    return memory


@pytest.mark.parametrize(
    ("layout", "dropout"), [("icl", 0.0), ("icl", 0.3), ("pcw", 0.0), ("invicl", 0.3)]
)
def test_the_adapter_is_that_of_a_literal_loop(model, layout, dropout):
    """Three steps; the answers are those of a model into whose weights the changes are merged."""
    method = make(
        "ttt", {**QUICK, "permutations": 6, "layout": layout, "dropout": dropout, "seed": 3}
    )
    assert method.steps == 3
    runner = MethodRunner(model, method)
    with runner.inference_mode():
        [memory] = runner.encoder.memories([CONTEXT])
    expected = literal_adapter(model, layout, CONTEXT, 6, 2, 3, 6, 0.02, dropout, 3)
    for ours, theirs in zip(memory.adapter.parameters, expected, strict=True):
        assert float((ours - theirs).abs().max()) < 1e-9
    assert max(float(up.abs().max()) for up in expected[1::2]) > 0.02
    with_changes = merged(model, expected, 2.0)
    values = scores(runner)
    for (context, query, answer), value in values.items():
        row = make(layout).row(context, len(query), len(answer))
        tokens = [*context.tokens, *query, *answer]
        ids = torch.tensor([[tokens[i] for i in row.source]])
        places = {"position_ids": row.positions[None], "attention_mask": hiding(row.mask)}
        logits = with_changes(ids, **places, use_cache=False).logits[0].log_softmax(-1)
        at = len(row) - len(answer) - 1
        literal = sum(float(logits[at + i, token]) for i, token in enumerate(answer))
        assert value == pytest.approx(literal, abs=1e-9)
    assert values != scores(MethodRunner(model, make(layout)))
    assert dict(runner.encoder.learned, seconds=0) == {"contexts": 1, "steps": 3, "seconds": 0}


def test_steps_in_mixed_precision_are_near_those_in_float32():
    losses = []
    for dtype in (None, torch.bfloat16):
        method = make("ttt", {**QUICK, "lr": 0.1, "dropout": 0.0})
        model = tiny.build("llama")
        runner = MethodRunner(model, method, mixed_precision_dtype=dtype)
        with runner.inference_mode():
            steps = list(runner.method.learn(model, CONTEXT))
        losses.append([learned.loss for learned in steps[1:]])
    exact, rounded = losses
    assert rounded != exact
    assert rounded == pytest.approx(exact, rel=0.02)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_model_with_the_adapter_is_that_of_peft(dtype):
    model = tiny.build("llama", dtype)
    adapter = memory_of(make("ttt", QUICK), model).adapter
    names = [name.partition(".")[2].rpartition(".")[2] for name in adapter.changes]
    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=list(set(names)))
    theirs = peft.get_peft_model(copy.deepcopy(model), config).eval()
    for name, change in adapter.changes.items():
        layer = theirs.get_submodule(f"base_model.model.model.layers.{name}")
        layer.lora_A["default"].weight.data = change.down
        layer.lora_B["default"].weight.data = change.up
    ids = torch.tensor([CONTEXT.tokens])
    with torch.no_grad(), adapter.on(model):
        ours = model(ids).logits
    with torch.no_grad():
        same = theirs(ids).logits
        without = model(ids).logits
    wide = torch.promote_types(dtype, torch.float32)
    assert {part.dtype for part in adapter.parameters} == {wide}
    assert torch.allclose(ours, same, atol=1e-12) and not torch.equal(ours, without)


def test_an_adapter_on_a_model_with_an_adapter_of_peft():
    config = peft.LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False)
    model = peft.get_peft_model(tiny.build("llama", torch.float64), config).eval()
    base = tiny.build("llama", torch.float64)
    assert list(adapted_layers(model)) == list(adapted_layers(base))
    assert memory_of(make("ttt", QUICK), model).adapter is not None


# An adapter belongs to its demonstrations, and nothing else sees it.


def state(model):
    """The tree of modules with everything that could be left in it, and all weights."""
    tree = []
    for name, module in model.named_modules():
        kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
        hooks = [len(getattr(module, kind)) for kind in kinds]
        tree.append((name, id(module), sorted(vars(module)), module.training, hooks))
    weights = {}
    for name, weight in model.named_parameters():
        weights[name] = (id(weight), weight.requires_grad, weight.grad, weight.detach().clone())
    return tree, weights


def assert_unchanged(model, before):
    tree, weights = state(model)
    assert tree == before[0] and weights.keys() == before[1].keys()
    for name, (*facts, weight) in weights.items():
        *facts_before, weight_before = before[1][name]
        assert facts == facts_before and torch.equal(weight, weight_before)


def test_the_model_is_the_same_afterwards(model):
    before = state(model)
    ids = torch.tensor([CONTEXT.tokens])
    with torch.no_grad():
        logits = model(ids).logits
    for plain in (False, True):
        assert scores(MethodRunner(model, make("ttt", QUICK), plain=plain))
        assert_unchanged(model, before)
    # In the middle of learning, the model is as before, and after the learning is given up.
    with torch.no_grad():
        steps = make("ttt", QUICK).learn(model, CONTEXT)
        next(steps)
        next(steps)
        assert_unchanged(model, before)
        assert torch.equal(model(ids).logits, logits)
        steps.close()
    assert_unchanged(model, before)


@pytest.mark.parametrize("fails_in", [1, 2, 4])
def test_the_model_is_the_same_after_an_exception(model, fails_in):
    """In a pass that encodes, in one that learns and in one that encodes with the adapter."""
    ran = 0

    def fail(*_):
        nonlocal ran
        ran += 1
        if ran == fails_in:
            raise ZeroDivisionError

    with targets(model)[0][-1].register_forward_hook(fail):
        before = state(model)
        with pytest.raises(ZeroDivisionError):
            memory_of(make("ttt", QUICK), model)
        assert_unchanged(model, before)
    with pytest.raises(InputError, match=r"ttt: the loss is (nan|inf).*lower lr=1e\+300"):
        memory_of(make("ttt", {**QUICK, "lr": 1e300}), model)
    assert scores(MethodRunner(model, make("ttt", QUICK)))


def test_another_thread_runs_the_model_without_the_adapter(model):
    ids = torch.tensor([CONTEXT.tokens])
    adapter = memory_of(make("ttt", QUICK), model).adapter
    results = {}

    def run(name):
        with torch.no_grad():
            results[name] = model(ids).logits

    run("before")
    with adapter.on(model):
        thread = threading.Thread(target=run, args=["other thread"])
        thread.start()
        thread.join()
        run("with it")
    run("after")
    assert torch.equal(results["before"], results["other thread"])
    assert torch.equal(results["before"], results["after"])
    assert not torch.equal(results["before"], results["with it"])


def test_runs_in_threads_that_share_a_model_give_what_they_give_alone(model):
    names = [("icl", {}), ("ttt", QUICK), ("ttt", {**QUICK, "seed": 1})]
    alone = [scores(MethodRunner(model, make(*name))) for name in names]
    runners = [MethodRunner(model, make(*name)) for name in names]
    together = [[] for _ in names]

    def run(number):
        for _ in range(2):
            runners[number].begin(1)
            together[number].append(scores(runners[number]))

    threads = [threading.Thread(target=run, args=[number]) for number in range(len(names))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == [[values, values] for values in alone]


def test_each_context_has_its_own_adapter(model):
    """Also where all requests come at once, in which other methods run contexts side by side."""
    contexts = [CONTEXT, OTHER, CONTEXT.keeping([0, 1])]
    method = make("ttt", QUICK)
    alone = {}
    for context in contexts:
        alone |= scores(MethodRunner(model, method), {context: WORK[CONTEXT]})
    work = dict.fromkeys(contexts, WORK[CONTEXT])
    for once in (True, False):
        runner = MethodRunner(model, method)
        assert scores(runner, work, once) == pytest.approx(alone, abs=1e-12)
        assert runner.encoder.learned["contexts"] == 3


def test_texts_are_generated_with_the_adapter(model):
    prompts = [TokenizedPrompt(context, (20, 21)) for context in (CONTEXT, OTHER)]
    # Likely enough that every learned token is another.
    method = make("ttt", {**QUICK, "lr": 0.2})

    def generate(ids, **inputs):
        arguments = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 6}
        return model.generate(input_ids=ids, **inputs, **arguments)

    def texts(method, plain):
        runner = MethodRunner(model, method, batch_size=4, plain=plain)
        contexts = {prompt.context for prompt in prompts}
        rows = []
        while len(rows) < 2:
            waiting = prompts[len(rows) :]
            settings = GenerationSettings()
            rows += runner.generate(waiting, ["a", "b"], 6, generate, settings, contexts)
        return rows

    learned = texts(method, plain=False)
    assert learned == texts(method, plain=True)
    assert learned != texts(make("icl"), plain=False)


# What holds of all methods that learn.


@pytest.mark.parametrize("layout", ["icl", "nope", "pcw", "invicl"])
def test_without_epochs_it_is_the_layout(model, layout):
    if layout == "nope" and model.config.model_type == "gpt2":
        layout = "sbp"
    without = make("ttt", {"layout": layout, "epochs": 0})
    assert without.steps == without.after == 0
    values = scores(MethodRunner(model, without))
    assert values == equal_to(scores(MethodRunner(model, make(layout))))
    assert memory_of(without, model).adapter is None


@pytest.mark.parametrize("layout", ["icl", "nope", "invicl", "star"])
def test_plain_mode_gives_the_same(model, layout):
    if layout == "nope" and model.config.model_type == "gpt2":
        layout = "sbp"
    method = make("ttt", {**QUICK, "layout": layout})
    plain = MethodRunner(model, method, plain=True)
    assert scores(MethodRunner(model, method)) == pytest.approx(scores(plain), abs=1e-9)
    # Learned once; where nothing is kept, for each request.
    assert plain.learned[method].encoded == 1
    if layout == "icl":
        plain = MethodRunner(model, method, plain=True, store_bytes=0)
        scores(plain)
        assert plain.learned[method].encoded == 3


def test_every_step_can_be_scored_on_the_way(model):
    runner = MethodRunner(model, make("ttt", QUICK))
    by_number = {}
    with runner.inference_mode():
        for number, (requests, values) in score_memories(runner, CONTEXT, WORK[CONTEXT], {0, 1, 2}):
            pairs = zip(requests, [score for score, _ in values], strict=True)
            by_number.setdefault(number, {}).update(pairs)
    for number, values in by_number.items():
        stopped = MethodRunner(model, make("ttt", {**QUICK, "after": number}))
        assert scores(stopped) == values
    assert by_number[0] == equal_to(scores(MethodRunner(model, make("icl"))))
    assert make("ttt", QUICK).after == 2
    assert by_number[1] != by_number[2]


@pytest.mark.parametrize("layout", ["icl", "invicl"])
def test_the_adapter_does_not_depend_on_the_order_of_the_demonstrations(model, layout):
    method = make("ttt", {**QUICK, "layout": layout, "epochs": 2})
    seeded = memory_of(make("ttt", {**QUICK, "layout": layout, "epochs": 2, "seed": 1}), model)
    one = memory_of(method, model).adapter
    other = memory_of(method, model, OTHER).adapter
    for ours, theirs in zip(one.parameters, other.parameters, strict=True):
        assert float((ours - theirs).abs().max()) < 1e-9
    assert float((one.parameters[0] - seeded.adapter.parameters[0]).abs().max()) > 0.01
    runner = MethodRunner(model, method)
    first = scores(runner)
    second = scores(runner, {OTHER: WORK[CONTEXT]})
    differences = [abs(a - b) for a, b in zip(first.values(), second.values(), strict=True)]
    assert (max(differences) < 1e-9) == (layout == "invicl") == runner.invariant


def batches_of(arguments, context=CONTEXT):
    method = make("ttt", arguments)
    batches = method.batches(context, torch.Generator().manual_seed(0))
    assert len(batches) == method.steps
    return batches


def test_the_texts_of_a_step():
    arguments = {"permutations": 7, "batch": 3, "epochs": 2}
    batches = batches_of(arguments)
    assert [len(batch) for batch in batches] == [3, 3, 1] * 2
    assert [len(batch) for batch in batches_of({})] == [5] * 8
    first = [text for batch in batches[:3] for text in batch]
    second = [text for batch in batches[3:] for text in batch]
    assert first != second and sorted(map(repr, first)) == sorted(map(repr, second))
    for text in first:
        pairs = zip(text.demonstrations, text.answers, strict=True)
        assert set(pairs) == set(zip(CONTEXT.demonstrations, CONTEXT.answers, strict=True))
        assert text.prefix == CONTEXT.prefix
    assert len(set(first)) > 3 and batches_of(arguments, OTHER) == batches
    # Under an invariant layout, texts are alike.
    assert [len(batch) for batch in batches_of({**arguments, "layout": "pcw"})] == [1] * 6


def test_adapters_beyond_the_budget_are_learned_again(model, caplog):
    method = make("ttt", QUICK)
    memory = memory_of(method, model)
    adapter_bytes = sum(part.nbytes for part in memory.adapter.parameters)
    [without] = encode_all(model, [method.first.row(CONTEXT)], [CONTEXT.tokens])
    assert memory.nbytes == adapter_bytes + without.nbytes
    work = [{context: WORK[CONTEXT]} for context in (CONTEXT, OTHER)] * 2
    for kept, learned in ((2, 2), (1, 4)):
        room = kept * memory.nbytes
        runner = MethodRunner(model, method, store_bytes=room)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            values = [scores(runner, part) for part in work]
        assert values[:2] == values[2:]
        assert runner.encoder.learned["contexts"] == learned
        lines = [line for line in caplog.messages if "learned again" in line]
        told = f"ttt: store_bytes={room} does not hold what was learned from all sets of"
        assert len(lines) == kept % 2 and all(line.startswith(told) for line in lines)


def test_a_context_without_demonstrations_is_that_of_the_layout(model):
    empty = CONTEXT.keeping([])
    work = {empty: WORK[CONTEXT]}
    for plain in (False, True):
        method = make("ttt", QUICK)
        zero_shot = scores(MethodRunner(model, method, plain=plain), work)
        assert zero_shot == scores(MethodRunner(model, make("icl"), plain=plain), work)


def test_what_is_refused(model):
    for arguments, why in (
        ({"permutations": 0}, "permutations=0: must be a whole number, 1 or more"),
        ({"batch": 0}, "batch=0: must be a whole number, 1 or more"),
        ({"alpha": 0}, "alpha=0: must be a number above 0"),
        ({"dropout": 1}, "dropout=1: must be a number, 0 or more and below 1"),
        ({"after": 9}, "after=9: must be at most steps=8"),
        ({"steps": 3}, "'steps' belongs to ctkv, not to ttt"),
        ({"layout": "prefixicl"}, "layout='prefixicl': must be a method under which no demons"),
        ({"layout": "ttt"}, "layout='ttt': must be a method of one pass"),
    ):
        with pytest.raises(InputError, match=why):
            make("ttt", arguments)
    bare = copy.deepcopy(model)
    bare.config.num_hidden_layers = 7
    with pytest.raises(Unsupported, match=r"finds no layers for its adapters: .* no list of 7"):
        make("ttt").bind(bare)
    with pytest.raises(Unsupported, match="tensor parallelism: leave tp_plan out"):
        bare._tp_size = 2
        make("ttt").bind(bare)


@pytest.mark.parametrize(
    ("architecture", "names"),
    [
        ("gpt_neox", "query_key_value dense dense_h_to_4h dense_4h_to_h"),
        ("opt", "v_proj q_proj out_proj fc1 fc2"),
        ("qwen3", "q_proj v_proj o_proj gate_proj up_proj down_proj"),
        ("gemma2_window", "q_proj v_proj o_proj gate_proj up_proj down_proj"),
        ("phi", "q_proj v_proj dense fc1 fc2"),
    ],
)
def test_the_layers_of_other_architectures(architecture, names, caplog):
    """Each of them changes after a step, in each block."""
    other = tiny.build(architecture)
    with caplog.at_level(logging.INFO):
        runner = MethodRunner(other, make("ttt", {**QUICK, "permutations": 1}))
    layers = adapted_layers(other)
    assert {name.rpartition(".")[2] for name in layers} == set(names.split())
    assert len(layers) == len(names.split()) * other.config.num_hidden_layers
    assert any(line.startswith("ttt: adapters change") for line in caplog.messages)
    with runner.inference_mode():
        [memory] = runner.encoder.memories([CONTEXT])
    for name, change in memory.adapter.changes.items():
        assert change.up.abs().max() > 0, name
    begun = Adapter.begin(other, 3, 2.0, torch.Generator())
    assert all(change.up.abs().max() == 0 for change in begun.changes.values())
